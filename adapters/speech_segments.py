"""From the probability of speech in each frame to segments; pure.

Two thresholds, as Silero's authors have them: speech begins where the probability reaches the upper one and ends where
it stays below the lower one (0.15 less) for a while; what is shorter than a word is a click. Who speaks without a pause
is parted where it is least certain that somebody speaks, so that no reader waits for the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAME = 512
"""Samples that Silero VAD looks at, at 16 kHz."""

FRAME_S = FRAME / 16_000

_HYSTERESIS = 0.15


class SegmentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as speech."""

    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Probability at which speech begins."""

    min_speech_ms: Annotated[int, Meta(ge=0, le=10_000)] = 100
    """Shorter speech is none."""

    min_silence_ms: Annotated[int, Meta(ge=32, le=60_000)] = 500
    """Shorter silence parts no segments."""

    pause_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Silence of this length is told on `speech` as a pause, where it is shorter than `min_silence_ms`; 0: none is."""

    max_speech_s: Annotated[float, Meta(ge=5, le=3600)] = 28.0
    """Longer speech is parted; Whisper looks at 30 seconds."""

    pad_ms: Annotated[int, Meta(ge=0, le=10_000)] = 200
    """Added to a segment on either side, at most half of the silence there."""


class Speech(msgspec.Struct, frozen=True):
    """What became certain: a value for the port ``segments`` or ``speech``."""

    port: str
    value: dict[str, Any]


class Segmenter:
    """Probabilities in, one a frame; segments and events out, as soon as they are certain."""

    def __init__(self, options: SegmentOptions) -> None:
        self._options = options
        self._lower = max(0.01, options.threshold - _HYSTERESIS)
        self._num_frames = 0
        self._start: int | None = None
        """Frame in which speech, or a click, began."""
        self._is_told = False
        """Whether that is certain to be speech."""
        self._silence: int | None = None
        """Frame from which on nobody spoke."""
        self._is_paused = False
        """Whether that was told."""
        self._probabilities: list[float] = []
        """Of the frames since then."""
        self._last_end_s = 0.0
        """End of the segment before, with its padding."""
        self.speech_s = 0.0
        """Of all segments so far, without padding."""

    @property
    def is_speech(self) -> bool:
        """Somebody speaks, or might."""
        return self._start is not None

    @property
    def heard_s(self) -> float:
        """How much came."""
        return self._num_frames * FRAME_S

    def feed(self, probability: float) -> Iterator[Speech]:
        """Take the next frame; yields what it makes certain."""
        frame, self._num_frames = self._num_frames, self._num_frames + 1
        if probability >= self._options.threshold:
            self._silence = None
            if self._start is None:
                self._start = frame
            if self._is_paused:
                self._is_paused = False
                yield self._event("resume", frame * FRAME_S)
        elif self._start is not None and probability < self._lower and self._silence is None:
            self._silence = frame
        if self._start is None:
            return
        self._probabilities.append(probability)
        yield from self._tell_start()
        yield from self._tell_pause(frame)
        if self._silence is not None and (frame + 1 - self._silence) * FRAME_S * 1000 >= self._options.min_silence_ms:
            yield from self._end(self._silence * FRAME_S, self._num_frames * FRAME_S)
        elif self._silence is None and len(self._probabilities) * FRAME_S >= self._options.max_speech_s:
            yield self._part()

    def end(self, seconds: float) -> Iterator[Speech]:
        """The sound is over, after so many seconds; yields what is still open."""
        if self._start is not None:
            yield from self._end(seconds if self._silence is None else self._silence * FRAME_S, seconds)

    def _tell_start(self) -> Iterator[Speech]:
        assert self._start is not None
        until = self._num_frames if self._silence is None else self._silence
        if not self._is_told and (until - self._start) * FRAME_S * 1000 >= self._options.min_speech_ms:
            self._is_told = True
            yield self._event("start", self._start * FRAME_S)

    def _tell_pause(self, frame: int) -> Iterator[Speech]:
        if self._silence is None or not self._is_told or self._is_paused:
            return
        pause_ms = self._options.pause_ms
        if 0 < pause_ms < self._options.min_silence_ms and (frame + 1 - self._silence) * FRAME_S * 1000 >= pause_ms:
            self._is_paused = True
            yield self._event("pause", self._silence * FRAME_S)

    def _end(self, end_s: float, heard_s: float) -> Iterator[Speech]:
        """Close a segment; what follows it is silent until `heard_s` at least."""
        assert self._start is not None
        start_s, is_told = self._start * FRAME_S, self._is_told
        self._start, self._silence, self._is_told, self._is_paused = None, None, False, False
        self._probabilities.clear()
        if not is_told:
            return
        yield self._event("end", end_s)
        pad_s = min(self._options.pad_ms, self._options.min_silence_ms / 2) / 1000
        yield self._segment(start_s, end_s, min(end_s + pad_s, heard_s))

    def _part(self) -> Speech:
        """Close a segment in whose last third somebody may have breathed; the next one begins there."""
        assert self._start is not None
        late = len(self._probabilities) * 2 // 3
        num = min(range(late, len(self._probabilities)), key=self._probabilities.__getitem__)
        start_s, self._start = self._start * FRAME_S, self._start + num
        del self._probabilities[:num]
        cut_s = self._start * FRAME_S
        return self._segment(start_s, cut_s, cut_s)

    def _segment(self, start_s: float, end_s: float, padded_end_s: float) -> Speech:
        self.speech_s += end_s - start_s
        start_s = max(self._last_end_s, start_s - self._options.pad_ms / 1000)
        self._last_end_s = padded_end_s
        return Speech("segments", {"start": round(start_s, 3), "end": round(padded_end_s, 3)})

    def _event(self, kind: str, at_s: float) -> Speech:
        heard_s = self._num_frames * FRAME_S
        return Speech("speech", {"type": kind, "at": round(at_s, 3), "heard": round(heard_s, 3)})
