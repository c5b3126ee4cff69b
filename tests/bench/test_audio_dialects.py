from __future__ import annotations

import json

import pytest

from omni_bus.bench.audio_dialects import PcmReader, Speech, Transcription, TranscriptReader
from omni_bus.bench.dataset import Prompt
from omni_bus.bench.dialects import Form, Wishes
from omni_bus.bench.record import Record


def record() -> Record:
    return Record(index=0, intended_at=0.0)


def read(*events: dict | bytes) -> tuple[Record, TranscriptReader]:
    """Read events, the one with number n at second n."""
    found = record()
    reader = TranscriptReader(found, keeps_answer=True)
    for at, event in enumerate(events):
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        reader.feed(b"data: " + data + b"\n\n", float(at))
    return found, reader


@pytest.mark.parametrize(
    ("headers", "bytes_per_s"),
    [
        ({}, 48_000),
        ({"X-Sample-Rate": "8000"}, 16_000),
        ({"X-Sample-Rate": "44100", "X-Channels": "2"}, 176_400),
        ({"X-Sample-Rate": "fast", "X-Channels": "-1"}, 48_000),
        ({"X-Sample-Rate": "0", "X-Channels": "0"}, 48_000),
        ({"X-Sample-Rate": "999999999", "X-Channels": "65536"}, 48_000),
    ],
)
def test_samples_are_as_long_as_the_server_says(headers: dict[str, str], bytes_per_s: int) -> None:
    found = record()
    reader = PcmReader(found, keeps_answer=False)
    reader.begin(headers)

    assert reader.feed(bytes(bytes_per_s // 2), 1.0) == 1
    assert (found.sounds, found.pcm) == ([(1.0, 0.5)], [])


def test_samples_that_are_cut_by_reads_are_counted_once() -> None:
    found = record()
    reader = PcmReader(found, keeps_answer=True)
    reader.begin({"X-Sample-Rate": "1000", "X-Channels": "2"})

    assert [reader.feed(bytes(size), at) for at, size in enumerate((3, 3, 1, 1))] == [0, 1, 0, 1]
    assert found.sounds == [(1, 0.001), (3, 0.001)]
    assert b"".join(found.pcm) == bytes(8)


def test_text_comes_in_either_servers_events() -> None:
    done = {"type": "transcript.text.done", "text": "Hello you", "usage": {"type": "duration", "seconds": 3}}
    ours, reader = read(
        {"type": "transcript.text.delta", "delta": "Hello"}, {"type": "transcript.text.delta", "delta": " you"}, done
    )
    assert (ours.texts, ours.answer, ours.heard_s, reader.is_over) == ([(0.0, 5), (1.0, 4)], ["Hello", " you"], 3, True)

    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    other, reader = read({"choices": [{"delta": {"content": "Hello"}}]}, {"choices": [{"delta": {}}]}, usage)
    assert (other.texts, other.output_tokens, other.tokens_from) == ([(0.0, 5)], 2, "usage")
    assert not reader.is_over
    reader.feed(b"data: [DONE]\n\n", 9.0)
    assert reader.is_over


def test_length_that_is_known_is_not_the_servers_rounded_one() -> None:
    found = Record(index=0, intended_at=0.0, heard_s=2.25)
    done = {"type": "transcript.text.done", "text": "", "usage": {"type": "duration", "seconds": 3}}
    TranscriptReader(found, keeps_answer=False).feed(b"data: " + json.dumps(done).encode() + b"\n\n", 0.0)

    assert found.heard_s == 2.25


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ({"error": {"message": "gone", "type": "StageLost"}}, "error in the stream: StageLost"),
        (b"{", "unreadable event"),
        (b'{"delta": 3}', "unreadable event"),
        (b'{"choices": [3]}', "unreadable event"),
    ],
)
def test_transcription_that_breaks_is_a_failure(event, name: str) -> None:
    assert read(event)[0].failure == name


def test_bodies_say_what_was_asked_for() -> None:
    wishes = Wishes(model="m", voice="heart", extra_body={"speed": 2}, wants_stage_metrics=True, ignore_eos=True)
    prompt = Prompt(text="Hi", sound=b"RIFF", sound_name="hi.wav")
    streamed = {"response_format": "pcm", "stream": True, "stream_format": "audio"}

    assert Speech().body(prompt, wishes) == {"input": "Hi", "model": "m", "voice": "heart", "speed": 2, **streamed}
    assert Speech().body(prompt, Wishes(model="")) == {"input": "Hi", **streamed}
    fields = {"response_format": "json", "stream": "true", "model": "m", "temperature": "0.5", "language": "en"}
    told = Wishes(model="m", sampling={"temperature": 0.5}, extra_body={"language": "en"})
    assert Transcription().body(prompt, told) == Form(fields=fields, file=b"RIFF", file_name="hi.wav")


def test_text_for_a_slow_reader_is_long() -> None:
    prompt = Prompt(text="Four words are here.")

    assert len(Speech().lengthened(prompt, 4096).text.split()) == 3072
    assert Speech().lengthened(prompt, 1).text == prompt.text
    assert Transcription().lengthened(prompt, 4096) == prompt
