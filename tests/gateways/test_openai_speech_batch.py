"""Batches of texts: each item has an outcome of its own."""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from parrot import Parrot  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.openai_audio_answers import SpeechBatch

BATCH = "/v1/audio/speech/batch"
TOML = """
[stages.voice]
adapter = "synthetic-speech"
[stages.parrot]
adapter = "parrot:Parrot"
[pipelines.speech]
serve_as = "ramp"
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
[pipelines.cloning]
serve_as = "parrot"
edges = ["in.text -> parrot.text", "in.reference -> parrot.reference", "parrot.audio -> out.audio"]
[gateways.openai]
"""


@pytest.fixture
async def speaking():
    async with running(TOML) as deployment:
        yield deployment


async def post(deployment: Running, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(deployment.url) as session, session.post(BATCH, json=body) as response:
        return response.status, json.loads(await response.read())


async def test_each_item_has_a_file_and_its_own_fields_win(speaking: Running) -> None:
    items = [{"input": "one"}, {"input": "three", "response_format": "flac"}, {"input": "ab", "speed": None}]
    status, answer = await post(speaking, items=items, response_format="wav", sample_rate=48_000)

    assert status == 200
    found = msgspec.convert(answer, SpeechBatch)
    assert found.id.startswith("speech-batch-")
    assert (found.total, found.succeeded, found.failed) == (3, 3, 0)
    assert [result.index for result in found.results] == [0, 1, 2]
    assert [result.media_type for result in found.results] == ["audio/wav", "audio/flac", "audio/wav"]
    for item, result in zip(items, answer["results"], strict=True):
        file = base64.b64decode(result["audio_data"])
        assert "error" not in result
        assert result["usage"]["input_tokens"] == len(item["input"])
        if result["media_type"] == "audio/wav":
            with wave.open(io.BytesIO(file)) as opened:
                assert (opened.getframerate(), opened.getnframes()) == (48_000, 960 * len(item["input"]))


async def test_items_that_fail_leave_the_others_alone(speaking: Running) -> None:
    items: list[dict[str, Any]] = [
        {"input": "good"},
        {"input": " "},
        {"input": "x", "speed": 9},
        {"input": "x", "nonsense": 1},
        {},
        {"input": "x", "extra_params": {"fail_at_step": 0}},
        {"input": "x", "stream": True},
        {"input": "x", "model": "parrot"},
        {"input": "also good"},
    ]
    status, answer = await post(speaking, items=items)

    assert status == 200
    assert [result["status"] for result in answer["results"]] == ["success", *["error"] * 7, "success"]
    assert (answer["succeeded"], answer["failed"]) == (2, 7)
    errors = [result["error"].partition(":")[0] for result in answer["results"][1:-1]]
    assert errors[:4] + errors[5:] == ["input", "speed", "nonsense", "input", "stream", "model"]
    assert all("audio_data" not in result and "usage" not in result for result in answer["results"][1:-1])


async def test_all_may_fail(speaking: Running) -> None:
    status, answer = await post(speaking, items=[{"input": " "}, {"input": "\0"}])

    assert (status, answer["succeeded"], answer["failed"]) == (200, 0, 2)


async def test_items_share_a_reference_and_may_have_their_own_words(speaking: Running) -> None:
    Parrot.seen.clear()
    sound = "data:audio/wav;base64," + base64.b64encode(_second()).decode()
    items = [{"input": "a"}, {"input": "b", "ref_text": "mine"}]
    status, answer = await post(speaking, model="parrot", items=items, ref_audio=sound, ref_text="ours")

    assert (status, answer["failed"]) == (200, 0), answer
    assert {text: params.reference_text for text, params, _ in Parrot.seen} == {"a": "ours", "b": "mine"}


def _second() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, 8000, 0, "NONE", ""))
        opened.writeframes(b"\1\0" * 8000)
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "items"),
        ({"items": []}, 400, "items"),
        ({"items": {}}, 400, "items"),
        ({"items": [{"input": "x"}] * 33}, 400, "items"),
        ({"items": [{"input": "x"}, "y"]}, 400, "items[1]"),
        ({"items": [{"input": "x"}], "input": "y"}, 400, "input"),
        ({"items": [{"input": "x"}], "stream": True}, 400, "stream"),
        ({"items": [{"input": "x"}], "stream_format": "sse"}, 400, "stream_format"),
        ({"items": [{"input": "x"}], "nonsense": 1}, 400, "nonsense"),
        ({"items": [{"input": "x"}], "speed": 9}, 400, "speed"),
        ({"items": [{"input": "x"}], "language": "French"}, 400, "language"),
        ({"items": [{"input": "x"}], "model": "parrot", "ref_audio": "ftp://a/b"}, 400, "ref_audio"),
        ({"items": [{"input": "x"}], "model": "nope"}, 404, "model"),
    ],
)
async def test_what_concerns_all_is_refused_for_all(
    speaking: Running, body: dict[str, Any], status: int, param: str
) -> None:
    found, document = await post(speaking, **body)

    assert (found, document["error"]["param"]) == (status, param), document
    assert speaking.stages["voice.0"].stats.done == 0


async def test_files_share_the_limit() -> None:
    async with running(TOML + "max_answer_bytes = 30000\n") as deployment:
        status, answer = await post(deployment, items=[{"input": "x" * 10}, {"input": "x" * 20}])

    assert (status, answer["succeeded"], answer["failed"]) == (200, 1, 1)
