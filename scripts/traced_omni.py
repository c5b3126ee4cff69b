"""Engines of omni stages that write down when they compute: lines of JSON in the file `trace` of their table.

Times are monotonic nanoseconds, which all processes of a host share (clock_gettime(2), CLOCK_MONOTONIC). Found by name,
as anybody's engines are: ``adapter = "traced_omni:Thinker"`` with this folder in PYTHONPATH.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from adapters.omni.code2wav import Code2WavOptions, OmniCode2Wav
from adapters.omni.talker import OmniTalker, TalkerOptions
from adapters.omni.thinker import OmniThinker, ThinkerOptions
from omni_bus.engine import Starved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import msgspec

    from omni_bus.engine import Event
    from omni_bus.ids import RequestId


class TracedThinkerOptions(ThinkerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    trace: str


class TracedTalkerOptions(TalkerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    trace: str


class TracedCode2WavOptions(Code2WavOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    trace: str


@contextmanager
def _noting(options: Any) -> Iterator[dict[str, Any]]:
    """Write down when the block began and ended, and what it puts into the dictionary; nothing if that is empty."""
    about: dict[str, Any] = {}
    begin = time.monotonic_ns()
    yield about
    end = time.monotonic_ns()
    if about:
        with Path(options.trace).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"begin": begin, "end": end, **about}) + "\n")


def _did(events: Sequence[Event]) -> dict[str, Any]:
    """Return what a step came to; nothing for one that found nothing to do."""
    if all(isinstance(event, Starved) for event in events) and events:
        return {}
    ports = sorted({port for event in events if (port := getattr(event, "port", None)) is not None})
    return {"what": ", ".join(ports) or "reading"}


class Thinker(OmniThinker):
    """Writes down its steps."""

    Options = TracedThinkerOptions

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """As `OmniThinker.step`."""
        with _noting(self.options) as about:
            events = super().step(requests)
            about.update(_did(events))
        return events


class Talker(OmniTalker):
    """Writes down its steps."""

    Options: ClassVar[type[msgspec.Struct]] = TracedTalkerOptions

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """As `OmniTalker.step`."""
        with _noting(self.options) as about:
            events = super().step(requests)
            about.update(_did(events))
        return events


class Code2Wav(OmniCode2Wav):
    """Writes down when its thread decodes."""

    Options: ClassVar[type[msgspec.Struct]] = TracedCode2WavOptions

    def _decode_blocking(self, decoding: Any) -> None:
        with _noting(self.options) as about:
            super()._decode_blocking(decoding)
            about["what"] = "decoding"
