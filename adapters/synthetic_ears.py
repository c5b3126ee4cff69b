"""A synthetic detector of speech and a synthetic recogniser: for load and fault tests of sessions, not models.

The detector takes loud for speech. The recogniser writes how long and how loud what it heard is, so that a test can
tell whose sound it got. Work, time and faults are those of `adapters.synthetic_work`; a step is a frame, or a word.
"""

from __future__ import annotations

from array import array
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from adapters.departure import Departure
from adapters.synthetic_shapes import Progress, SyntheticStream
from adapters.synthetic_work import StreamingOptions, WorkParams, plan_of
from omni_bus.engine import EngineRequest, Inputs
from omni_bus.errors import BadInput
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Json, Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

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
        heard_s = changed_at = 0.0
        is_speech = is_paused = False
        rest = b""
        leaves = request.params.until_drained
        rested = self._departure.pieces(
            inputs.port("audio"), lambda: leaves and not is_speech and changed_at == heard_s
        )
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
                        if is_loud == is_speech:
                            changed_at = heard_s + FRAME_S
                        heard_s += FRAME_S
                        quiet_ms = (heard_s - changed_at) * 1000 + 1e-6
                        if is_paused and is_loud:
                            is_paused = False
                            yield "speech", Json({"type": "resume", "at": heard_s - FRAME_S, "heard": heard_s})
                        elif (
                            is_speech and not is_paused and 0 < plan.pause_ms <= min(quiet_ms, plan.min_silence_ms - 1)
                        ):
                            is_paused = True
                            yield "speech", Json({"type": "pause", "at": changed_at, "heard": heard_s})
                        needed_ms = plan.min_silence_ms if is_speech else plan.min_speech_ms
                        if (heard_s - changed_at) * 1000 >= needed_ms - 1e-6 and is_loud != is_speech:
                            is_speech, is_paused = is_loud, False
                            value = {"type": "start" if is_speech else "end", "at": changed_at, "heard": heard_s}
                            changed_at = heard_s
                            if "speech" in request.outputs:
                                yield "speech", Json(value)
        left = {"heard": heard_s} if leaves and self._departure.is_due else {}
        yield Finish(detail={"seconds": heard_s, **left})


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
