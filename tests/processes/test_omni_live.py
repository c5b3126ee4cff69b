"""The shipped conversation with an omni model in three stages, as processes, with the official client."""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from recordings import pcm_of, silence  # type: ignore[import-not-found] (put on the path above)

if TYPE_CHECKING:
    from collections.abc import Callable

    from openai.resources.realtime.realtime import AsyncRealtimeConnection
    from processes.conftest import Up  # pyright: ignore[reportMissingImports]

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = "Qwen/Qwen2.5-Omni-7B"
NUM_CODES = 200
"""Of each answer: four seconds of sound."""

SETTINGS = f"""
[stages.thinker]
params = {{ temperature = 0.0, ignore_eos = true, max_tokens = 3000 }}
[stages.talker]
params = {{ min_tokens = {NUM_CODES}, max_tokens = {NUM_CODES}, seed = 1 }}
[stages.token2wav]
params = {{ seed = 1 }}
[stages.live]
output_lead_ms = 60000.0
"""
STAGES = ("thinker", "talker", "token2wav")


async def speak(live: AsyncRealtimeConnection, sound: bytes) -> None:
    await live.input_audio_buffer.append(audio=base64.b64encode(sound).decode())


async def until(live: AsyncRealtimeConnection, kind: str) -> list[Any]:
    """Return what came, to the first event of this kind."""
    events: list[Any] = []
    while not events or events[-1].type != kind:
        events.append(await live.recv())
        assert events[-1].type != "error", events[-1]
    return events


async def counts(url: str, outcome: str) -> dict[str, int]:
    """Return how many requests ended so in each stage of the model."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        stage: sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("omni_bus_stage_requests_total{") and f'"{stage}"' in line and f'"{outcome}"' in line
        )
        for stage in STAGES
    }


async def test_a_spoken_turn_is_answered_in_sound_and_interrupted_in_every_stage(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    folder = tiny_omni.qwen2_5(tmp_path)
    base = (CONFIGS / "qwen2_5_omni.toml").read_text(encoding="utf-8")
    assert base.count(f'"{MODEL}"') == 3
    (tmp_path / "base.toml").write_text(base.replace(f'"{MODEL}"', f'"{folder}"').replace("port = 8000", "port = 0"))
    toml = (CONFIGS / "qwen2_5_omni_live.toml").read_text(encoding="utf-8")
    (tmp_path / "live.toml").write_text(toml.replace("qwen2_5_omni.toml", "base.toml"))
    deployment = up(f'base = "live.toml"\n{SETTINGS}')
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        client.realtime.connect(model="qwen2.5-omni-live") as live,
    ):
        form: Any = {"type": "audio/pcm", "rate": 16_000}
        output: Any = {"voice": "Ethan"}
        await live.session.update(
            session={
                "type": "realtime",
                "audio": {"input": {"format": form}, "output": output},
                "max_output_tokens": 40,
            }
        )
        question = pcm_of("bicycle") + silence(1.0)
        await speak(live, question)
        answer = await until(live, "response.done")
        spoken = b"".join(base64.b64decode(e.delta) for e in answer if e.type == "response.output_audio.delta")
        written = "".join(e.delta for e in answer if e.type == "response.output_audio_transcript.delta")
        (item,) = answer[-1].response.output

        assert [e.type for e in answer].count("input_audio_buffer.speech_started") == 1
        assert answer[-1].response.status in ("completed", "incomplete")
        assert len(written) > 10
        assert item.content[0].transcript == written
        samples = np.frombuffer(spoken, "<i2")
        assert len(samples) == NUM_CODES * 24_000 // 50
        assert samples.std() > 100
        usage = answer[-1].response.usage
        of_input, of_output = usage.input_token_details, usage.output_token_details
        assert min(of_input.text_tokens, of_input.audio_tokens) > 5
        assert of_input.text_tokens + of_input.audio_tokens == usage.input_tokens
        assert (of_output.text_tokens, of_output.audio_tokens) == (40, NUM_CODES)

        # The user interrupts: the request ends in every stage, and what was said then is answered.
        assert await counts(url, "cancelled") == dict.fromkeys(STAGES, 0)
        await live.session.update(session={"type": "realtime", "max_output_tokens": "inf"})
        await speak(live, question)
        await until(live, "response.output_audio.delta")
        await speak(live, question)
        cut = await until(live, "response.done")
        assert cut[-1].response.status_details.reason == "turn_detected"
        await until(live, "response.output_audio.delta")
        assert await counts(url, "cancelled") == dict.fromkeys(STAGES, 1)
    assert await asyncio.to_thread(deployment.stop) == 0
