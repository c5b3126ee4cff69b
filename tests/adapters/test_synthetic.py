"""Each synthetic engine carries its marker from input to output, in the amount that it is told."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters import ADAPTERS
from adapters.synthetic import SyntheticImage, SyntheticRelay, SyntheticSpeech, SyntheticText
from adapters.synthetic_marks import PictureMark, read_image, read_ramp, read_text, read_video
from adapters.synthetic_video import MAX_PROMPT_CHARACTERS, SyntheticVideo
from omni_bus.config.schema import StageConfig
from omni_bus.engine import Finished
from omni_bus.errors import BadInput, InputTooLarge
from omni_bus.registry import ADAPTER_GROUP, load_class
from omni_bus.testing import ListedInputs, StepDriver, build_engine, make_engine, run_streaming, start_streaming
from omni_bus.wire.frames import Usage
from omni_bus.wire.payloads import Json, Payload, Text

CONFIGS = Path(__file__).parents[2] / "configs"


def chat(*texts: str) -> dict[str, list[Payload]]:
    """A conversation that ends with the user."""
    roles = ("assistant", "user")
    messages = [{"role": roles[(len(texts) - i) % 2], "content": text} for i, text in enumerate(texts)]
    return {"prompt": [Json({"messages": messages})]}


# --- text


def run_text(prompt: dict[str, list[Payload]], params: dict[str, Any], **options: Any) -> Any:
    driver = StepDriver(make_engine(SyntheticText, options))
    [collected] = driver.run(driver.add(prompt, params))
    return collected


def test_last_user_message_is_the_marker() -> None:
    assert run_text(chat("one", "two", "what is this?"), {"tokens": 3}).text == (
        "what_is_this?:0 what_is_this?:1 what_is_this?:2"
    )


def test_marker_may_be_given_alone() -> None:
    assert run_text({"prompt": [Json({"marker": "m 1"})]}, {"tokens": 2}).text == "m_1:0 m_1:1"


def test_text_without_user_message_marks_itself_by_the_last() -> None:
    prompt: dict[str, list[Payload]] = {"prompt": [Json({"messages": [{"role": "system", "content": "be kind"}]})]}

    assert run_text(prompt, {"tokens": 1}).text == "be_kind:0"


def test_usage_counts_words_of_all_messages() -> None:
    assert run_text(chat("a b", "c d e"), {"tokens": 7}).finish.usage == Usage(5, 7)


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason"),
    [
        ({}, 16, "stop"),
        ({"tokens": 4}, 4, "stop"),
        ({"max_tokens": 4}, 4, "length"),
        ({"max_tokens": 16}, 16, "stop"),
        ({"max_tokens": 99}, 16, "stop"),
        ({"min_tokens": 20}, 20, "stop"),
        ({"max_tokens": 40, "ignore_eos": True}, 40, "length"),
        ({"tokens": 10, "tokens_per_step": 4}, 10, "stop"),
    ],
)
def test_answer_has_the_length_asked_for(params: dict[str, Any], num_tokens: int, reason: str) -> None:
    collected = run_text(chat("m"), params)

    assert [mark.number for mark in read_text(collected.text)] == list(range(num_tokens))
    assert collected.finish.reason == reason
    assert sum(payload.num_tokens for payload in collected.port("text")) == num_tokens


def test_last_token_and_end_come_in_one_step() -> None:
    driver = StepDriver(make_engine(SyntheticText, {"tokens": 2}))
    driver.add(chat("m"), outputs=("text",))

    assert len(driver.step()) == 1
    assert isinstance(driver.step()[-1], Finished)


def test_words_are_filled_to_the_chunk_size() -> None:
    collected = run_text(chat("m"), {"tokens": 3}, chunk_bytes=100)

    assert [len(payload.text) for payload in collected.port("text")] == [100, 100, 100]
    assert [mark.number for mark in read_text(collected.text)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("params", "field"),
    [({"stop": ["x"]}, "stop"), ({"stop_token_ids": [1]}, "stop_token_ids"), ({"ignore_eos": True}, "ignore_eos")],
)
def test_parameter_that_has_no_effect_is_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=field) as refused:
        run_text(chat("m"), params)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("payloads", "field"),
    [
        ([], "prompt"),
        ([Json({"marker": "a"}), Json({"marker": "b"})], "prompt"),
        ([Json({"marker": 3})], "marker"),
        ([Json({"marker": "a", "messages": []})], "marker"),
        ([Json({"messages": []})], "messages"),
        ([Json([])], "prompt"),
        ([Text("hello")], "prompt"),
    ],
)
def test_prompt_that_cannot_be_read_is_refused(payloads: list[Payload], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        run_text({"prompt": payloads}, {})
    assert refused.value.field == field


def test_prompt_over_its_limit_is_refused() -> None:
    with pytest.raises(InputTooLarge, match="4 tokens came \\(allowed: 3\\)"):
        run_text(chat("a b c d"), {}, max_prompt_tokens=3)


# --- relay


async def test_relay_passes_pieces_on_unchanged() -> None:
    pieces = [Text("a ", 1), Text(""), Text("ü")]
    collected = await run_streaming(make_engine(SyntheticRelay), {"text": pieces})

    assert collected.port("text") == pieces
    assert collected.finish.detail == {"pieces": 3}


# --- speech


@pytest.mark.parametrize("chunk_bytes", [2, 64, 9_600, 2**20])
async def test_speech_is_one_ramp_over_all_pieces(chunk_bytes: int) -> None:
    engine = make_engine(SyntheticSpeech, {"samples_per_character": 31, "chunk_bytes": chunk_bytes})
    collected = await run_streaming(engine, {"text": [Text("hello "), Text(""), Text("wörld")]})

    assert read_ramp(collected.pcm) == (0, 11 * 31, ())
    assert max(len(audio.data) for audio in collected.port("audio")) <= chunk_bytes
    assert collected.finish.detail == {"characters": 11, "samples": 341}


async def test_ramp_begins_where_it_is_told() -> None:
    engine = make_engine(SyntheticSpeech)
    collected = await run_streaming(engine, {"text": [Text("hello")]}, {"first_sample": 1234, "rate_hz": 16_000})

    assert read_ramp(collected.pcm) == (1234, 5 * 480, ())
    assert {audio.rate_hz for audio in collected.port("audio")} == {16_000}


async def test_speech_comes_while_text_streams_in() -> None:
    inputs = ListedInputs({"text": [Text("a"), Text("b"), Text("c")]})
    async with start_streaming(make_engine(SyntheticSpeech), inputs) as stream:
        assert await stream.pull() is not None
        assert inputs.num_taken["text"] == 1


async def test_pace_sets_the_time_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(duration_s: float) -> None:
        waits.append(duration_s)

    monkeypatch.setattr("adapters.synthetic_work.asyncio.sleep", note)
    engine = make_engine(SyntheticSpeech, {"pace": 2.0, "step_time_s": 0.5, "chunk_bytes": 960})
    await run_streaming(engine, {"text": [Text("a")]})

    assert waits == [pytest.approx(0.5 + 0.01)]


async def test_no_text_gives_no_speech() -> None:
    collected = await run_streaming(make_engine(SyntheticSpeech), {"text": []})

    assert collected.outputs == []
    assert collected.is_finished


# --- image


def test_image_says_prompt_and_last_step() -> None:
    driver = StepDriver(engine := make_engine(SyntheticImage, {"steps": 5, "width": 100, "height": 60}))
    [collected] = driver.run(driver.add({"prompt": [Text("a red "), Text("cat")]}, outputs=["image"]))

    [image] = collected.port("image")
    assert (image.width, image.height) == (100, 60)
    assert read_image(image) == PictureMark("a_red_cat", 4, 5)
    assert engine.statistics().steps == 5


def test_preview_says_each_step() -> None:
    driver = StepDriver(make_engine(SyntheticImage))
    [collected] = driver.run(driver.add({"prompt": [Text("cat")]}, {"steps": 3}))

    assert [read_image(image).step for image in collected.port("preview")] == [0, 1, 2]


# --- video


async def test_frames_count_through_all_chunks() -> None:
    engine = make_engine(SyntheticVideo, {"num_frames": 7, "frames_per_chunk": 3, "fps": 30})
    collected = await run_streaming(engine, {"prompt": [Text("a "), Text("cat")]})

    chunks = collected.port("video")
    assert [(video.first_frame, video.num_frames) for video in chunks] == [(0, 3), (3, 3), (6, 1)]
    assert {(video.time_base_num, video.time_base_den) for video in chunks} == {(1, 30)}
    marks = [mark for video in chunks for mark in read_video(video)]
    assert marks == [PictureMark("a_cat", i, 7) for i in range(7)]


async def test_long_prompt_of_a_video_is_cut() -> None:
    pieces = [Text("x" * 1000) for _ in range(20)]
    inputs = ListedInputs({"prompt": pieces})
    collected = await run_streaming(make_engine(SyntheticVideo), inputs, {"num_frames": 1})

    assert inputs.num_taken["prompt"] * 1000 > MAX_PROMPT_CHARACTERS
    assert read_video(collected.port("video")[0])[0].marker == "x" * 48


# --- deployments


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("synthetic_*.toml")), ids=lambda path: path.stem)
def test_shipped_deployment_joins_ports_of_one_kind(path: Path) -> None:
    deployment = tomllib.loads(path.read_text())
    engines: dict[str, Any] = {}
    for name, table in deployment["stages"].items():
        own = {key: value for key, value in table.items() if key not in StageConfig.__struct_fields__}
        engine_class = load_class("adapter", table["adapter"], ADAPTERS, ADAPTER_GROUP)
        engines[name] = build_engine(engine_class, own)
    used: set[str] = set()
    for edge in [edge for pipeline in deployment["pipelines"].values() for edge in pipeline["edges"]]:
        source, target = (end.strip().split(".") for end in edge.split("->"))
        emitted = None if source[0] == "in" else engines[source[0]].emits[source[1]]
        accepted = None if target[0] == "out" else engines[target[0]].accepts[target[1]]
        used |= {source[0], target[0]}
        assert None in (emitted, accepted) or emitted == accepted, edge

    assert used - {"in", "out"} == set(engines)


def test_every_synthetic_adapter_is_deployed() -> None:
    texts = [path.read_text() for path in CONFIGS.glob("synthetic_*.toml")]
    deployed = {stage["adapter"] for text in texts for stage in tomllib.loads(text)["stages"].values()}

    assert deployed - {"realtime"} == {name for name in ADAPTERS if name.startswith("synthetic-")}


def test_every_option_and_parameter_is_typed() -> None:
    """A TOML may only say what `msgspec` can check."""
    for name in ADAPTERS:
        if name.startswith("synthetic-"):
            engine_class = load_class("adapter", name, ADAPTERS, ADAPTER_GROUP)
            for struct in (engine_class.Options, engine_class.Params):
                assert msgspec.json.schema(struct)


def test_engines_load_without_heavy_modules() -> None:
    script = """
import sys
from adapters.synthetic import SyntheticImage, SyntheticSpeech, SyntheticText
from adapters.synthetic_actions import SyntheticActions
from adapters.synthetic_video import SyntheticVideo
from omni_bus.testing import make_engine
for engine_class in (SyntheticImage, SyntheticSpeech, SyntheticText, SyntheticVideo, SyntheticActions):
    make_engine(engine_class).close()
print(*sorted({"numpy", "torch", "transformers", "zmq", "aiohttp"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "\n"
