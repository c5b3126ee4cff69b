"""Runs against real deployments of synthetic stages; a scripted server only for what ours don't say."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from aiohttp import web

from actors.testing import running
from omni_bus.bench.audio_dialects import Speech
from omni_bus.bench.client import Server
from omni_bus.bench.dataset import Lengths, Prompt, random_prompts
from omni_bus.bench.dialects import Chat, Completions, Dialect, Wishes
from omni_bus.bench.measures import METRICS
from omni_bus.bench.record import StageTiming
from omni_bus.bench.run import MODES, Outcome, Plan, Run
from omni_bus.bench.summary import Summary, summarise
from omni_bus.errors import Unavailable
from tests.bench.servers import DONE, Scripted, completion, usage

TEXT = """
[stages.llm]
adapter = "synthetic-text"
tokens = 8
step_time_s = {step_s}
max_num_seqs = 8
max_resident = 8

[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
max_in_flight = 8
max_queued = {max_queued}

[gateways.openai]
port = 0
"""

VOICE = """
[stages.llm]
adapter = "synthetic-text"
tokens = 4

[stages.voice]
adapter = "synthetic-speech"

[pipelines.voice]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]

[gateways.openai]
port = 0
"""


SPEECH = """
[stages.voice]
adapter = "synthetic-speech"

[pipelines.voice]
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]

[gateways.openai]
port = 0
"""


def text(*, max_queued: int = 256, step_s: float = 0.0) -> str:
    return TEXT.format(max_queued=max_queued, step_s=step_s)


def plan_of(count: int, dialect: Dialect, model: str, **options: Any) -> Plan:
    lengths = Lengths(input_len=4, output_len=8)
    *prompts, aside = random_prompts(count + 1, lengths, random.Random(0))
    again = random_prompts(count, lengths, random.Random(0), mark="again")
    wishes = Wishes(model=model, modalities=options.pop("modalities", ("text",)))
    told = {"mode": "load", "rate": math.inf, "prompts": prompts, "prompts_again": again, "aside": aside} | options
    return Plan(dialect=dialect, wishes=wishes, **told)


async def run(url: str, plan: Plan) -> Outcome:
    async with Server(url, plan.dialect, plan.dialect.path, {}, 60.0) as server:
        return await Run(server, plan).run()


def told(outcome: Outcome) -> Summary:
    [phase] = outcome.phases
    return summarise(phase.records, label="", names=list(METRICS), percentiles=[99], limits={})


async def test_closed_loop_keeps_its_concurrency() -> None:
    async with running(text()) as deployment:
        summary = told(await run(deployment.url, plan_of(40, Chat(), "text", max_concurrency=3, num_warmups=2)))

    assert (summary.completed, summary.failed) == (40, 0)
    assert summary.max_concurrent == 3
    assert (summary.output_tokens, summary.tokens_from) == (320, {"usage": 40})
    assert summary.input_tokens == 160
    assert {"ttft", "e2el"} <= summary.metrics.keys()


async def test_open_loop_counts_from_the_intended_time() -> None:
    """One place, and requests due faster than they end: each is quick, but all are sent late."""
    async with running(text()) as deployment:
        plan = plan_of(20, Chat(), "text", rate=1e4, burstiness=math.inf, max_concurrency=1)
        outcome = await run(deployment.url, plan)

    records = outcome.phases[0].records
    assert [record.intended_at for record in records] == pytest.approx([number / 1e4 for number in range(20)])
    assert all(record.sent_at >= record.intended_at for record in records)
    metrics = told(outcome).metrics
    assert metrics["e2el"].max < metrics["intended_e2el"].max
    # The last one waited for all the others.
    assert metrics["intended_e2el"].max >= metrics["e2el"].mean * 20 - records[-1].intended_at * 1000


async def test_refused_requests_are_counted_by_name() -> None:
    async with running(text(max_queued=2, step_s=0.05)) as deployment:
        summary = told(await run(deployment.url, plan_of(60, Chat(), "text")))

    assert summary.completed >= 8
    assert summary.completed + summary.failed == 60
    assert list(summary.failures) == ["503 ServiceUnavailableError"]
    assert "is busy" in summary.failures["503 ServiceUnavailableError"].message


async def test_sound_is_measured() -> None:
    async with running(VOICE) as deployment:
        plan = plan_of(5, Chat(), "voice", modalities=("text", "audio"))
        outcome = await run(deployment.url, plan)

    summary = told(outcome)
    assert (summary.completed, summary.failed) == (5, 0)
    # 480 samples at 24 kHz for each character.
    characters = sum(length for record in outcome.phases[0].records for _, length in record.texts)
    assert summary.audio_s == pytest.approx(characters * 480 / 24_000)
    assert summary.metrics["audio_ttfp"].count == summary.metrics["audio_rtf"].count == 5


@pytest.mark.parametrize("mode", MODES)
async def test_speech_is_measured_in_every_mode(mode: str) -> None:
    async with running(SPEECH) as deployment:
        plan = plan_of(5, Speech(), "", mode=mode, num_slow_readers=2, slow_reader_rate=1000.0)
        outcome = await run(deployment.url, plan)

    records = outcome.phases[-1].records
    prompts = plan.prompts_again if mode == "slow-reader" else plan.prompts
    assert not any(record.failure for record in records)
    for record in records:
        if record.is_complete:  # 480 samples at 24 kHz for each character
            seconds = len(prompts[record.index].text) * 480 / 24_000
            assert sum(length for _, length in record.sounds) == pytest.approx(seconds)
    if mode == "slow-reader":
        assert outcome.slow is not None
        assert all(record.sounds for record in outcome.slow.records[:2])
    elif mode == "cancel-storm":
        assert outcome.storm is not None
        assert all(record.is_complete for record in (*outcome.storm.calm, *outcome.storm.after))
    else:
        summary = told(outcome)
        assert (summary.completed, summary.tokens_from) == (5, {})
        assert summary.metrics["audio_gaps"].count == summary.metrics["audio_ttfp"].count == 5


async def test_slow_readers_leave_when_the_load_is_over() -> None:
    async with running(text()) as deployment:
        plan = plan_of(
            30, Chat(), "text", mode="slow-reader", max_concurrency=2, num_slow_readers=3, slow_reader_rate=5.0
        )
        outcome = await run(deployment.url, plan)
        async with Server(deployment.url, Chat(), Chat.path, {}, 60.0) as server, asyncio.timeout(20):
            while (found := await server.occupancy()) is not None and found.held:
                pass  # each question is a round trip; a cancel takes one as well

    assert [phase.label for phase in outcome.phases] == ["alone", "beside slow readers"]
    assert all(record.is_complete for phase in outcome.phases for record in phase.records)
    assert outcome.slow is not None
    assert len(outcome.slow.records) >= 3
    assert all(record.texts and not record.failure for record in outcome.slow.records[:3])


async def test_slow_readers_that_are_refused_hold_nobody_up() -> None:
    server = Scripted(
        lambda body: (
            web.json_response({"error": {"type": "TooLong", "message": "no"}}, status=400)
            if body["max_tokens"] == 4096
            else [completion("a"), usage(1, 1), DONE]
        )
    )
    async with server.serving() as url:
        outcome = await run(url, plan_of(4, Completions(), "m", mode="slow-reader", num_slow_readers=2))

    assert outcome.slow is not None
    assert [record.failure for record in outcome.slow.records] == ["400 TooLong"] * 2
    assert all(record.is_complete for phase in outcome.phases for record in phase.records)


async def test_storm_leaves_every_place_free() -> None:
    async with running(text(step_s=0.03)) as deployment:
        outcome = await run(deployment.url, plan_of(60, Chat(), "text", mode="cancel-storm"))

    storm = outcome.storm
    assert storm is not None
    records = outcome.phases[0].records
    assert sum(record.has_left for record in records) >= 30  # most, for they share eight places
    assert not any(record.failure for record in records)
    assert storm.at_last is not None
    assert (storm.at_last.places, storm.at_last.source) == (8, "/health")
    assert all(record.is_complete for record in (*storm.calm, *storm.after))


async def test_server_that_refuses_the_extension_is_asked_without_it() -> None:
    """Ours does, today; so does OpenAI's."""

    def script(body: dict[str, Any]) -> Any:
        if "return_stage_metrics" in body:
            return web.json_response({"error": {"message": "unknown field", "type": "BadRequestError"}}, status=400)
        return [completion("a"), usage(1, 1), DONE]

    server = Scripted(script)
    async with server.serving() as url:
        summary = told(await run(url, plan_of(3, Completions(), "m")))

    assert (summary.completed, len(server.bodies)) == (3, 1 + 1 + 3)


async def test_bundled_tokens_are_timed_by_the_server() -> None:
    stage = {"num_tokens_out": 4, "vllm_tpot_ms": 11.0, "vllm_itls_ms": [10.0, 11.0, 12.0]}
    bundle = completion("a b c d", metrics={"stage_metrics": {"0": stage}})
    server = Scripted(lambda body: [bundle if body.get("return_stage_metrics") else completion("x"), usage(3, 4), DONE])
    async with server.serving() as url:
        outcome = await run(url, plan_of(3, Completions(), "m"))

    summary = told(outcome)
    assert outcome.phases[0].records[0].timing == StageTiming(4, (0.010, 0.011, 0.012), 0.011)
    assert summary.times_from == {"server": 3}
    assert summary.metrics["tpot"].mean == pytest.approx(11.0)
    assert summary.metrics["itl"].count == 9
    assert summary.tokens_per_chunk == 4.0


async def test_tokens_without_usage_are_counted_by_the_tokeniser_or_the_chunks() -> None:
    def script(body: dict[str, Any]) -> Any:
        return [completion("one two"), completion(" three"), DONE]

    async with Scripted(script, tokenize=lambda text: len(text.split())).serving() as url:
        counted = told(await run(url, plan_of(3, Completions(), "m")))
    async with Scripted(script).serving() as url:
        guessed = told(await run(url, plan_of(3, Completions(), "m")))

    assert (counted.output_tokens, counted.tokens_from) == (9, {"tokenize": 3})
    assert (guessed.output_tokens, guessed.tokens_from) == (6, {"chunks": 3})


async def test_first_request_that_fails_stops_the_run() -> None:
    server = Scripted(lambda body: web.json_response({"error": {"message": "no", "type": "Odd"}}, status=500))
    async with server.serving() as url:
        with pytest.raises(Unavailable, match="the first request failed, so none was measured: 500 Odd: no"):
            await run(url, plan_of(3, Completions(), "m"))

    assert len(server.bodies) == 1


@pytest.mark.parametrize("mode", ["load", "slow-reader", "cancel-storm"])
async def test_no_measured_prompt_was_asked_before(mode: str) -> None:
    """A server's prefix cache would make it faster than it is."""
    server = Scripted(lambda body: [completion("a"), usage(1, 1), DONE])
    plan = plan_of(6, Completions(), "m", mode=mode, num_warmups=2, num_slow_readers=1)
    async with server.serving() as url:
        await run(url, plan)

    asked = Counter(body["prompt"] for body in server.bodies)
    assert asked[plan.aside.text] >= 3
    measured = [*plan.prompts, *(plan.prompts_again if mode == "slow-reader" else [])]
    # One whose client left at once never came.
    assert {prompt.text: asked[prompt.text] for prompt in measured if asked[prompt.text] > 1} == {}
    assert asked.keys() - {plan.aside.text} <= {prompt.text for prompt in measured}


async def test_same_seed_asks_the_same() -> None:
    bodies: list[list[dict[str, Any]]] = []
    for _ in range(2):
        server = Scripted(lambda body: [completion("a"), usage(1, 1), DONE])
        async with server.serving() as url:
            await run(url, plan_of(5, Completions(), "m", max_concurrency=1))
        bodies.append(server.bodies)

    assert bodies[0] == bodies[1]
    assert [body["max_tokens"] for body in bodies[0]] == [8] * 6


@pytest.mark.model
async def test_real_model_is_measured() -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("hibari")
    from pathlib import Path

    toml = (Path(__file__).parents[2] / "configs" / "voice_chat.toml").read_text(encoding="utf-8")
    prompts = [Prompt(text="What is the capital of France?", output_len=24)] * 3
    async with running(toml.replace("port = 8000", "port = 0")) as deployment:
        plan = plan_of(0, Chat(), "smollm2-voice", prompts=prompts, modalities=("text", "audio"), max_concurrency=2)
        wishes = msgspec.structs.replace(plan.wishes, sampling={"temperature": 0})
        outcome = await run(deployment.url, msgspec.structs.replace(plan, wishes=wishes))

    summary = told(outcome)
    assert (summary.completed, summary.tokens_from) == (3, {"usage": 3})
    assert summary.output_tokens == 3 * 8  # "The capital of France is Paris." and the end
    assert 3 * 1.0 < summary.audio_s < 3 * 6.0
    assert summary.metrics["audio_ttfp"].min > summary.metrics["ttft"].min
