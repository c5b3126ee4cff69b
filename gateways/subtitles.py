"""Subtitles: SubRip (``.srt``) and WebVTT (https://www.w3.org/TR/webvtt1/, 4) of segments; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Cue(msgspec.Struct, frozen=True):
    """A text, and when it is shown, in seconds."""

    start: float
    end: float
    text: str


def cues_of(segments: Iterable[dict[str, Any]]) -> list[Cue]:
    """Return the cues of a recogniser's segments.

    Raises:
        KeyError, AttributeError: one that is no segment.
    """
    return [Cue(each["start"], each["end"], each["text"].strip()) for each in segments]


def srt(cues: Iterable[Cue]) -> str:
    """Return a SubRip file."""
    blocks = (
        f"{number}\n{_time(cue.start, ',')} --> {_time(cue.end, ',')}\n{_lines(cue.text)}\n\n"
        for number, cue in enumerate(cues, 1)
    )
    return "".join(blocks)


def vtt(cues: Iterable[Cue]) -> str:
    """Return a WebVTT file; what would be a tag or an entity there is escaped."""
    blocks = (f"{_time(cue.start, '.')} --> {_time(cue.end, '.')}\n{_escaped(cue.text)}\n\n" for cue in cues)
    return "WEBVTT\n\n" + "".join(blocks)


def _time(seconds: float, mark: str) -> str:
    rest, milliseconds = divmod(round(max(0.0, seconds) * 1000), 1000)
    rest, second = divmod(rest, 60)
    hours, minute = divmod(rest, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{milliseconds:03}"


def _lines(text: str) -> str:
    """Return a text whose lines can't end the cue early: none of them is empty."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()).replace("-->", "->")


def _escaped(text: str) -> str:
    return _lines(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
