from __future__ import annotations

import base64
import io
import json
import wave

import msgspec
import pytest

from omni_bus.bench.backends import DIALECTS
from omni_bus.bench.dataset import Prompt
from omni_bus.bench.dialects import AudioMetadata, Chat, Completions, StreamReader, Wishes, sound_s
from omni_bus.bench.record import Record, StageTiming


def read(*documents: dict, keeps_answer: bool = False) -> tuple[Record, StreamReader]:
    """Read documents, the one with number n at second n."""
    record = Record(index=0, intended_at=0.0)
    reader = StreamReader(record, keeps_answer=keeps_answer)
    for at, document in enumerate(documents):
        reader.feed(b"data: " + json.dumps(document).encode() + b"\n\n", float(at))
    return record, reader


def chat_chunk(delta: dict, **top) -> dict:
    choice = {"index": 0, "delta": delta, "finish_reason": None} | top.pop("choice", {})
    return {"object": "chat.completion.chunk", "choices": [choice], **top}


def wav(num_frames: int, rate_hz: int = 8000) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate_hz, 0, "NONE", ""))
        out.writeframes(bytes(2 * num_frames))
    return base64.b64encode(file.getvalue()).decode()


def test_text_usage_and_end() -> None:
    record, reader = read(
        chat_chunk({"role": "assistant", "content": ""}),
        chat_chunk({"content": "Hel"}),
        chat_chunk({"content": "lo"}),
        chat_chunk({}, choice={"finish_reason": "stop"}),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}},
    )

    assert record.texts == [(1.0, 3), (2.0, 2)]
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (7, 2, "usage")
    assert (record.answer, record.failure, reader.is_over) == ([], "", False)
    assert reader.feed(b"data: [DONE]\n\n", 9.0) == 0
    assert reader.is_over


def test_reasoning_is_text_too() -> None:
    assert read(chat_chunk({"reasoning": "Hm"}), chat_chunk({"reasoning_content": "So"}))[0].texts == [
        (0.0, 2),
        (1.0, 2),
    ]


def test_text_is_kept_only_for_counting() -> None:
    assert read(chat_chunk({"content": "Hi"}), keeps_answer=True)[0].answer == ["Hi"]


def test_completions_have_their_text_elsewhere() -> None:
    assert read({"object": "text_completion", "choices": [{"index": 0, "text": "Hi"}]})[0].texts == [(0.0, 2)]


def test_sound_is_told_from_text_in_both_forms() -> None:
    half_second = base64.b64encode(bytes(24_000)).decode()
    record, _ = read(
        chat_chunk({"content": "Hi"}, modality="text"),
        chat_chunk({"content": half_second}, modality="audio"),
        chat_chunk({"audio": {"id": "a", "data": half_second}}),
        chat_chunk({"content": ""}, modality="audio", usage={"prompt_tokens": 7, "completion_tokens": 0}),
    )

    assert record.texts == [(0.0, 2)]
    assert record.sounds == [(1.0, 0.5), (2.0, 0.5)]
    assert record.output_tokens is None  # sound's usage counts no text


@pytest.mark.parametrize("num_bytes", [2, 4, 6, 4800])
def test_length_of_raw_samples_needs_no_decoding(num_bytes: int) -> None:
    assert sound_s(base64.b64encode(bytes(num_bytes)).decode(), None) == num_bytes / 2 / 24_000


def test_length_of_sound_is_the_servers_word_or_the_files() -> None:
    assert sound_s("AAAA", AudioMetadata(frame_count=4000, sample_rate_hz=8000)) == 0.5
    assert sound_s(wav(2000), None) == 0.25
    with pytest.raises(ValueError, match="no WAV file"):
        sound_s("UklGRgAA", None)


def test_last_word_on_stage_timings_stands() -> None:
    stages = [
        {"0": {"num_tokens_out": 1, "vllm_tpot_ms": None}, "1": {"num_tokens_out": 90}},
        {"0": {"num_tokens_out": 3, "vllm_tpot_ms": 10.5, "vllm_itls_ms": [10.0, 11.0], "stage_name": "x"}},
    ]
    record, _ = read(*(chat_chunk({"content": "a"}, metrics={"stage_metrics": one}) for one in stages))

    assert record.timing == StageTiming(3, (0.010, 0.011), 0.0105)
    assert read(chat_chunk({"content": "a"}, metrics=None))[0].timing is None


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        ({"message": "gone", "type": "StageLost", "code": 503}, "error in the stream: StageLost", "gone"),
        ({"message": "gone", "code": 503}, "error in the stream: 503", "gone"),
        ("gone", "error in the stream", "gone"),
    ],
)
def test_error_in_the_stream_is_a_failure_with_its_name(error, name: str, message: str) -> None:
    record, _ = read(chat_chunk({"content": "a"}), {"error": error})

    assert (record.failure, record.message) == (name, message)


@pytest.mark.parametrize(
    "event", [b"{", b"[]", b'{"choices": 3}', b"\xff", b'{"choices":[{"delta":{"content":"UklGRgAA"}}]']
)
def test_unreadable_event_is_a_failure(event: bytes) -> None:
    record = Record(index=0, intended_at=0.0)

    StreamReader(record, keeps_answer=False).feed(b"data: " + event + b"\n\n", 0.0)

    assert record.failure == "unreadable event"


def test_sound_that_is_none_is_a_failure() -> None:
    assert read(chat_chunk({"content": "UklGRgAA"}, modality="audio"))[0].failure == "unreadable event"


def test_bodies_say_what_was_asked_for() -> None:
    wishes = Wishes(
        model="m",
        modalities=("text", "audio"),
        voice="heart",
        ignore_eos=True,
        sampling={"temperature": 0.5},
        extra_body={"top_k": 1},
        wants_stage_metrics=True,
    )
    common = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
        "return_stage_metrics": True,
        "top_k": 1,
    }
    prompt = Prompt(text="Hi", output_len=5)

    assert Chat().body(prompt, wishes) == common | {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 5,
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16", "voice": "heart"},
    }
    assert Completions().body(prompt, wishes) == common | {"prompt": "Hi", "max_tokens": 5}


def test_wishes_that_nobody_has_are_not_sent() -> None:
    prompt = Prompt(messages=({"role": "user", "content": "Hi"},))
    plain = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}

    assert Chat().body(prompt, Wishes(model="m")) == plain | {"messages": [{"role": "user", "content": "Hi"}]}
    assert Completions().body(prompt, Wishes(model="m")) == plain | {"prompt": "Hi"}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_body_is_json(name: str) -> None:
    assert msgspec.json.encode(DIALECTS[name].body(Prompt(text="Hi"), Wishes(model="m")))
