"""A synthetic detector of speech and a synthetic recogniser: for load and fault tests of sessions, not models.

The detector takes loud for speech. The recogniser writes how long and how loud what it heard is, so that a test can
tell whose sound it got. Work, time and faults are those of `adapters.synthetic_work`; a step is a frame, or a word.
"""

from __future__ import annotations

import math
from array import array
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from adapters.departure import Departure
from adapters.synthetic_shapes import Progress, SyntheticStream
from adapters.synthetic_work import StreamingOptions, WorkParams, plan_of
from omni_bus.engine import EngineRequest, Inputs
from omni_bus.errors import BadInput
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Json, Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from omni_bus.engine import Context

FRAME_S = 0.02

Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=60_000)]
Loudness = Annotated[float, msgspec.Meta(ge=0, le=1)]


class VadOptions(StreamingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticVad`."""

    min_speech_ms: Milliseconds = 100
    """So much must be loud before it is speech."""
    min_silence_ms: Milliseconds = 500
    """So much must be quiet before it is over."""
    pause_ms: Milliseconds = 0
    """Quiet of this length is told as a pause, where it is shorter; 0: none is."""
    loudness: Loudness = 0.02
    """Root mean square, of full scale, from which on a frame is loud."""


class VadParams(WorkParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set on `SyntheticVad`."""

    min_speech_ms: Milliseconds | None = None
    min_silence_ms: Milliseconds | None = None
    pause_ms: Milliseconds | None = None
    loudness: Loudness | None = None
    until_drained: bool = False
    """End in the first quiet after the replica was drained, wherever the sound is: for callers who come again."""


class SyntheticVad(SyntheticStream):
    """Says ``{"type": "start" | "end", "at", "heard"}``, in seconds, as soon as it is certain of either.

    With `pause_ms` also ``"pause"``, and ``"resume"`` where no end follows it.
    """

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"speech": "json"}
    Options = VadOptions
    Params = VadParams

    def __init__(self, options: VadOptions, context: Context) -> None:
        super().__init__(options, context)
        self._departure = Departure()

    def on_drained(self, *, is_drained: bool) -> None:
        """Let those go who asked for it."""
        self._departure.on_drained(is_drained=is_drained)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Take sound and listen to it, frame by frame."""
        plan: VadOptions = plan_of(self.options, request.params)
        turns = _Turns(plan)
        rest = b""
        leaves = request.params.until_drained
        rested = self._departure.pieces(inputs.port("audio"), lambda: leaves and turns.is_quiet)
        async with aclosing(rested) as pieces:
            with Progress(self._workload, plan) as progress:
                async for piece in pieces:
                    samples, rate_hz = _samples(piece)
                    data = rest + samples
                    frame_bytes = 2 * round(rate_hz * FRAME_S)
                    whole = len(data) - len(data) % frame_bytes
                    rest = data[whole:]
                    for start in range(0, whole, frame_bytes):
                        await progress.step()
                        is_loud = loudness(data[start : start + frame_bytes]) >= plan.loudness
                        for value in turns.feed(is_loud=is_loud):
                            if "speech" in request.outputs:
                                yield "speech", Json(value)
        left = {"heard": turns.heard_s} if leaves and self._departure.is_due else {}
        yield Finish(detail={"seconds": turns.heard_s, **left})


class _Turns:
    """Frames in, loud or not; out, as values for the port, what becomes certain."""

    def __init__(self, options: VadOptions) -> None:
        self._min_speech_ms, self._min_silence_ms = options.min_speech_ms, options.min_silence_ms
        self._pause_ms = options.pause_ms if 0 < options.pause_ms < options.min_silence_ms else math.inf
        self.heard_s = 0.0
        self._changed_at = 0.0
        """From when on it sounds otherwise than was told."""
        self._is_speech = False
        self._is_paused = False

    @property
    def is_quiet(self) -> bool:
        """Nobody speaks, or may have begun to."""
        return not self._is_speech and self._changed_at == self.heard_s

    def feed(self, *, is_loud: bool) -> Iterator[dict[str, Any]]:
        """Take the next frame; yields what it makes certain."""
        begin_s = self.heard_s
        self.heard_s += FRAME_S
        if is_loud == self._is_speech:
            self._changed_at = self.heard_s
        lasts_ms = (self.heard_s - self._changed_at) * 1000 + 1e-6
        if self._is_paused and is_loud:
            self._is_paused = False
            yield self._event("resume", begin_s)
        elif self._is_speech and not self._is_paused and lasts_ms >= self._pause_ms:
            self._is_paused = True
            yield self._event("pause", self._changed_at)
        needed_ms = self._min_silence_ms if self._is_speech else self._min_speech_ms
        if is_loud != self._is_speech and lasts_ms >= needed_ms:
            self._is_speech, self._is_paused = is_loud, False
            yield self._event("start" if is_loud else "end", self._changed_at)
            self._changed_at = self.heard_s

    def _event(self, kind: str, at_s: float) -> dict[str, Any]:
        return {"type": kind, "at": at_s, "heard": self.heard_s}


class SyntheticAsr(SyntheticStream):
    """Writes ``heard N ms at L``: the length of all of the sound, and its loudness in thousandths of full scale."""

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = StreamingOptions
    Params = WorkParams

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Take all of the sound, then write word by word."""
        plan: StreamingOptions = plan_of(self.options, request.params)
        pieces: list[bytes] = []
        rate_hz = 1
        with Progress(self._workload, plan) as progress:
            async for piece in inputs.port("audio"):
                samples, rate_hz = _samples(piece)
                pieces.append(samples)
            sound = b"".join(pieces)
            seconds = len(sound) / 2 / rate_hz
            words = ("heard ", f"{round(seconds * 1000)} ms ", f"at {round(1000 * loudness(sound))}")
            for word in words:
                await progress.step()
                if "text" in request.outputs:
                    yield "text", Text(word)
        yield Finish(detail={"seconds": seconds})


def loudness(samples: bytes) -> float:
    """Return the root mean square of s16 samples, of full scale 1."""
    values = array("h", samples)
    return (sum(value * value for value in values) / len(values)) ** 0.5 / 32768 if values else 0.0


def _samples(payload: Payload) -> tuple[bytes, int]:
    if not isinstance(payload, Audio) or payload.format != "s16" or payload.channels != 1:
        what = f"{payload.format}, {payload.channels} channels" if isinstance(payload, Audio) else kind_of(payload)
        raise BadInput(f"audio: {what} came (allowed: audio, s16, one channel)", field="audio")
    return bytes(payload.data.view), payload.rate_hz
