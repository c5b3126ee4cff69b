"""Segments of probabilities: when they begin, end, and are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.speech_segments import FRAME_S, Segmenter, SegmentOptions, Speech

OPTIONS = SegmentOptions(min_speech_ms=96, min_silence_ms=320, pad_ms=64)


def run(probabilities: list[float], **options: Any) -> list[Speech]:
    segmenter = Segmenter(msgspec.structs.replace(OPTIONS, **options))
    found = [speech for probability in probabilities for speech in segmenter.feed(probability)]
    return [*found, *segmenter.end(len(probabilities) * FRAME_S)]


def segments(found: list[Speech]) -> list[tuple[int, int]]:
    """Return segments in frames."""
    values = [speech.value for speech in found if speech.port == "segments"]
    return [(round(value["start"] / FRAME_S), round(value["end"] / FRAME_S)) for value in values]


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.0] * 50, []),
        ([0.0] * 20 + [0.9] * 2 + [0.0] * 20, []),
        ([0.0] * 20 + [0.9] * 10 + [0.0] * 20, [(18, 32)]),
        ([0.9] * 10 + [0.0] * 20, [(0, 12)]),
        ([0.0] * 20 + [0.9] * 10, [(18, 30)]),
        ([0.9] * 10 + [0.0] * 5 + [0.9] * 10 + [0.0] * 20, [(0, 27)]),
        ([0.9] * 10 + [0.0] * 12 + [0.9] * 10 + [0.0] * 20, [(0, 12), (20, 34)]),
        ([0.9] * 5 + [0.4] * 20 + [0.0] * 20, [(0, 27)]),
        ([0.4] * 50, []),
    ],
    ids=["silence", "click", "word", "at once", "to the end", "short pause", "pause", "fading", "murmur"],
)
def test_segments(probabilities: list[float], expected: list[tuple[int, int]]) -> None:
    assert segments(run(probabilities)) == expected


def test_each_is_told_as_soon_as_it_is_certain() -> None:
    events = [speech.value for speech in run([0.0] * 20 + [0.9] * 10 + [0.0] * 20) if speech.port == "speech"]

    frames = [(e["type"], round(e["at"] / FRAME_S), round(e["heard"] / FRAME_S)) for e in events]
    assert frames == [("start", 20, 23), ("end", 30, 40)]


def test_a_pause_is_told_and_then_its_end_or_that_speech_goes_on() -> None:
    """A short one is none; an end says the same moment as its pause."""
    probabilities = [0.9] * 10 + [0.0] * 3 + [0.9] * 10 + [0.0] * 8 + [0.9] * 10 + [0.0] * 20

    events = [speech.value for speech in run(probabilities, pause_ms=160) if speech.port == "speech"]

    frames = [(e["type"], round(e["at"] / FRAME_S), round(e["heard"] / FRAME_S)) for e in events]
    assert frames == [
        ("start", 0, 3),
        ("pause", 23, 28),
        ("resume", 31, 32),
        ("pause", 41, 46),
        ("end", 41, 51),
    ]
    assert segments(run(probabilities, pause_ms=160)) == segments(run(probabilities))


def test_speech_without_a_pause_is_parted_where_it_is_least_certain() -> None:
    probabilities = [0.9] * 130 + [0.6] + [0.9] * 160 + [0.0] * 20

    found = run(probabilities, max_speech_s=5)

    assert segments(found) == [(0, 130), (130, 234), (234, 293)]
    assert [speech.value["type"] for speech in found if speech.port == "speech"] == ["start", "end"]


@given(
    probabilities=st.one_of(*(st.lists(st.floats(low, 1), max_size=400) for low in (0, 0.3))),
    pad_ms=st.integers(0, 1000),
)
def test_segments_are_in_order_within_the_sound(probabilities: list[float], pad_ms: int) -> None:
    found = run(probabilities, pad_ms=pad_ms, max_speech_s=5)

    values = [speech.value for speech in found if speech.port == "segments"]
    ends = [0.0, *(value["end"] for value in values)]
    assert all(end <= value["start"] < value["end"] for end, value in zip(ends, values, strict=False))
    assert ends[-1] <= len(probabilities) * FRAME_S + 0.001
    kinds = [speech.value["type"] for speech in found if speech.port == "speech"]
    assert kinds == ["start", "end"] * (len(kinds) // 2)
    assert len(kinds) // 2 <= len(values)
