#!/usr/bin/env python3
"""Conversations over two replicas of a real model: how much of their prompts is cached, and how soon answers begin.

Two replicas of a small language model on llama.cpp serve three pipelines, which differ in how a replica is chosen:
`prefix` (where the prompt's beginning was seen, until that replica is busier by what it saves), `least_tokens` and
`round_robin`. Two conversations share each system prompt, and all of them take turns; llama.cpp gives a prompt the free
slot that begins most like it, and there are enough for all. So what is computed twice was at the wrong replica, or came
while its beginning was still being computed. Every pipeline has prompts of its own, and the pipelines take turns, round
after round. Cached tokens are what llama.cpp itself says in each answer's usage.

Run: ``python scripts/bench_routing.py [--quick] [--rounds N] [--systems N] [--turns N] [--concurrency N]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

import aiohttp
import msgspec
import uvloop

import measured

ROUTINGS = ("prefix", "least_tokens", "round_robin")
STAGE = """
[stages.llm]
adapter = "llamacpp"
replicas = 2
threads = 1
max_num_seqs = 8
context_length = 1024

[gateways.openai]
port = 0
"""
PIPELINE = """
[pipelines.{routing}]
serve_as = "{routing}"
routing = "{routing}"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
"""
WORDS = [
    f"{first}{second}"
    for first in ("sun", "moon", "rain", "snow", "sea")
    for second in ("light", "side", "man", "beam")
]
ANSWER_TOKENS = 8
CONVERSATIONS_PER_SYSTEM = 2


class Answer(msgspec.Struct):
    """What one request came to."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    turn: int


class Load(msgspec.Struct, frozen=True):
    """The conversations of one round."""

    systems: int
    turns: int
    concurrency: int
    system_words: int
    user_words: int


def words(dice: random.Random, count: int) -> str:
    """Return a text that is unlike those that other dice give."""
    return " ".join(dice.choice(WORDS) for _ in range(count))


async def ask(session: aiohttp.ClientSession, model: str, messages: list[Any], turn: int) -> tuple[Answer, str]:
    """Return what a request came to, and what was answered."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    first_s, text, usage = 0.0, "", None
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    first_s = first_s or time.perf_counter() - begun
                    text += piece
    if usage is None or not first_s:
        raise RuntimeError(f"{model}: an answer without text or usage came")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(first_s * 1e3, usage["prompt_tokens"], cached, turn), text


async def converse(session: aiohttp.ClientSession, model: str, load: Load, dice: random.Random) -> list[Answer]:
    """Hold all conversations of a round; each turn of one waits for its last, and for its place."""
    turns = asyncio.Semaphore(load.concurrency)
    systems = [words(dice, load.system_words) for _ in range(load.systems)]
    num_conversations = load.systems * CONVERSATIONS_PER_SYSTEM
    users = [[words(dice, load.user_words) for _ in range(load.turns)] for _ in range(num_conversations)]
    answers: list[Answer] = []

    async def hold(number: int) -> None:
        messages = [{"role": "system", "content": systems[number % len(systems)]}]
        for turn, user in enumerate(users[number]):
            messages.append({"role": "user", "content": user})
            async with turns:
                answer, text = await ask(session, model, messages, turn)
            answers.append(answer)
            messages.append({"role": "assistant", "content": text})

    async with asyncio.TaskGroup() as group:
        for number in range(num_conversations):
            group.create_task(hold(number))
    return answers


async def run(load: Load, rounds: int) -> dict[str, list[Answer]]:
    """Return all answers by routing."""
    found: dict[str, list[Answer]] = {routing: [] for routing in ROUTINGS}
    toml = STAGE + "".join(PIPELINE.format(routing=name) for name in ROUTINGS)
    with measured.Deployment(toml) as deployment:
        async with aiohttp.ClientSession(deployment.ready["gateways"]["openai"]) as session:
            for number in range(rounds):
                for place in range(len(ROUTINGS)):
                    routing = ROUTINGS[(number + place) % len(ROUTINGS)]
                    dice = random.Random(f"{routing} {number}")
                    found[routing] += await converse(session, routing, load, dice)
    return found


def hit_rate(answers: list[Answer]) -> float:
    """Return the share of all prompts' tokens that were cached."""
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


def report(found: dict[str, list[Answer]]) -> None:
    """Print a table, then ratios."""
    ttft = {name: [answer.ttft_ms for answer in answers] for name, answers in found.items()}
    later = {name: [answer for answer in answers if answer.turn] for name, answers in found.items()}
    measured.table(
        "prompts and the time to the first token",
        ("requests", "prompt tokens", "cached", "hit rate", "of later turns", "ttft p50 ms", "mean ms", "p90 ms"),
        {
            name: [
                str(len(answers)),
                str(sum(answer.prompt_tokens for answer in answers)),
                str(sum(answer.cached_tokens for answer in answers)),
                hit_rate(answers),
                hit_rate(later[name]),
                measured.quantile(ttft[name], 0.5),
                sum(ttft[name]) / len(answers),
                measured.quantile(ttft[name], 0.9),
            ]
            for name, answers in found.items()
        },
    )
    print("\nratios")
    for other in ROUTINGS[1:]:
        measured.ratio(
            f"hit rate, prefix / {other}", hit_rate(found["prefix"]) / hit_rate(found[other]), "aim: above 1"
        )
    for other in ROUTINGS[1:]:
        mean = {name: sum(ttft[name]) / len(ttft[name]) for name in ("prefix", other)}
        measured.ratio(f"ttft mean, prefix / {other}", mean["prefix"] / mean[other], "aim: below 1")
        median = {name: measured.median(ttft[name]) for name in ("prefix", other)}
        measured.ratio(f"ttft p50, prefix / {other}", median["prefix"] / median[other], "aim: below 1")


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=2, help="of all pipelines (default 2)")
    options.add_argument("--systems", type=int, default=3, help="system prompts of each round (default 3)")
    options.add_argument("--turns", type=int, default=2, help="of each conversation (default 2)")
    options.add_argument("--concurrency", type=int, default=3, help="requests at once (default 3)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    load = Load(args.systems, args.turns, args.concurrency, system_words=80, user_words=4)
    rounds = args.rounds
    if args.quick:
        load, rounds = Load(2, 2, 2, system_words=40, user_words=5), 1
    measured.header()
    print(
        f"load: {load.systems} system prompts, {CONVERSATIONS_PER_SYSTEM} conversations with each, {load.turns} turns,"
        f" {load.concurrency} requests at once, {rounds} rounds"
    )
    found = uvloop.run(run(load, rounds))
    report(found)
    measured.write_json(args.json, {"answers": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
