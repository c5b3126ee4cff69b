"""What clients see of a process that hangs (SIGSTOP) and is the only one of its kind, and when it is replaced.

In each round a fresh deployment of synthetic stages, with the heartbeat that deployments have by default, gets a stream
of words, a conversation on a WebSocket that listens, and a request and a conversation more for each second from the
moment of the hang on. Then it is told how each of these ended and after how many seconds. Exits with 1 if a client
waited in vain.

Run: ``python scripts/hang_run [NAME ...]``, of ``gateway.openai.0``, ``coordinator``, ``sessions.0``, ``llm.0``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

import measured

TOML = (
    (Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("port = 8000", "port = 0")
    .replace("tokens = 32\nstep_time_s = 0.005", "tokens = 2500\nstep_time_s = 0.01")
)
CHAT = "/v1/chat/completions"
NAMES = ("gateway.openai.0", "coordinator", "sessions.0", "llm.0")
NUM_TOKENS = 2500
"""Of the stream: at 10 ms each it outlasts the hang."""
STREAM_S = 25.0
LIMIT_S = 60.0
GOOD = ("answered", "begun")


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    """A chat request."""
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "synthetic-voice", "messages": messages, "max_tokens": tokens, "modalities": ["text"]}
    return {**fields, "stream": stream}


async def stream(session: aiohttp.ClientSession, begun: asyncio.Event) -> str:
    """Read a stream of words; return how it ended."""
    try:
        async with session.post(CHAT, json=body(NUM_TOKENS, stream=True)) as response:
            last = b""
            async for line in response.content:
                begun.set()
                last = line.strip() or last
    except aiohttp.ClientError as error:
        return f"the connection was cut ({type(error).__name__})"
    return "complete" if last == b"data: [DONE]" else f"ended with {last[:300].decode()}"


async def conversation(session: aiohttp.ClientSession, begun: asyncio.Event) -> str:
    """Listen to a conversation for as long as the stream is; return how it ended."""
    told = ""
    async with session.ws_connect("/v1/realtime?model=synthetic-sessions") as socket:
        while True:
            try:
                message = await socket.receive(timeout=STREAM_S)
            except TimeoutError:
                return "goes on"
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            begun.set()
            event = msgspec.json.decode(message.data)
            told = f", told: {event['error']['message']}" if event["type"] == "error" else ""
    return f"closed with {socket.close_code}{told}"


async def ask(session: aiohttp.ClientSession) -> str:
    """Ask for one word over a connection of its own; return what came."""
    try:
        async with session.post(CHAT, json=body(1, stream=False)) as response:
            if response.status == 200:
                return "answered"
            return f"{response.status}: {(await response.json())['error']['message']}"
    except aiohttp.ClientError as error:
        return f"the connection was cut ({type(error).__name__})"


async def converse(session: aiohttp.ClientSession) -> str:
    """Begin a conversation; return what came."""
    try:
        async with session.ws_connect("/v1/realtime?model=synthetic-sessions") as socket:
            message = await socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                return f"closed with {socket.close_code}"
            event = msgspec.json.decode(message.data)
            return "begun" if event["type"] == "session.created" else f"told: {event['error']['message']}"
    except aiohttp.ClientError as error:
        return f"the connection was cut ({type(error).__name__})"


async def after(hung_at: float, work: Any) -> str:
    """Say when something ended, and how."""
    try:
        async with asyncio.timeout(LIMIT_S):
            how = await work
    except TimeoutError:
        how = "WAITED IN VAIN"
    return f"after {time.monotonic() - hung_at:.1f} s: {how}"


async def watch(deployment: measured.Deployment, name: str) -> list[str]:
    """Freeze a process; return a line for each client."""
    url = deployment.ready["gateways"]["openai"]
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        begun = [asyncio.Event(), asyncio.Event()]
        running = {
            "stream": asyncio.create_task(stream(session, begun[0])),
            "conversation": asyncio.create_task(conversation(session, begun[1])),
        }
        for event in begun:
            await event.wait()
        hung_at = time.monotonic()
        os.kill(deployment.pids[name], signal.SIGSTOP)
        told = [asyncio.create_task(after(hung_at, task)) for task in running.values()]
        lines: list[str] = []
        asked: list[asyncio.Task[str]] = []
        while len(asked) < 6 or not all(task.done() and task.result().endswith(GOOD) for task in asked[-2:]):
            at_s = time.monotonic() - hung_at
            for what, work in (("request", ask(session)), ("conversation", converse(session))):
                asked.append(asyncio.create_task(after(hung_at, work)))
                lines.append(f"{what} at {at_s:.1f} s")
            await asyncio.sleep(1.0)
        ends = await asyncio.gather(*told, *asked)
        return [f"{what}: {end}" for what, end in zip([*running, *lines], ends, strict=True)]


def main() -> int:
    """Run it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", default=NAMES, help=f"default: {' '.join(NAMES)}")
    measured.header()
    in_vain = 0
    for name in options.parse_args().names:
        with measured.Deployment(TOML) as deployment:
            lines = uvloop.run(watch(deployment, name))
        print(f"{name} hangs")
        print(*(f"  {line}" for line in lines), sep="\n", flush=True)
        in_vain += sum("IN VAIN" in line for line in lines)
    print(f"promises broken: {in_vain} (clients that waited in vain)")
    return 1 if in_vain else 0
