"""PCM sound, piece by piece: rate, tempo, channels and peaks; pieces of any size come to the same samples.

numpy, soxr and PyAV are imported when they are first needed, so that a gateway whose sound needs nothing done to it
stays small. Everything here blocks: it belongs on an `EncodingPool`, or in a process of its own.

Samples are float32, (frames, channels), 1.0 at full scale.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.float32]

LAYOUTS = {1: "mono", 2: "stereo", 3: "3.0", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
"""FFmpeg's names, by the number of channels."""

LIMITER_WINDOW_S = 0.01
"""The gain begins to fall so long before a peak, and is back so long after it."""

_TEMPO_BLOCK_FRAMES = 512
"""What the tempo filter is fed at a time: what it makes depends, by a few samples, on how it is fed."""

_TEMPO_TAIL_S = 0.2
"""Silence after the end, which the filter holds back in place of the last sound."""


def join(pieces: Sequence[Audio]) -> Audio:
    """Return the pieces of one stream as one.

    Raises:
        ValueError: no piece, or pieces of different rate, channels or sample format.
    """
    if not pieces:
        raise ValueError("no audio to join")
    first = pieces[0]
    for piece in pieces:
        check_same(first, piece)
    if len(pieces) == 1:
        return first
    return Audio(first.rate_hz, first.channels, first.format, Blob(b"".join([piece.data.view for piece in pieces])))


def check_same(first: Audio, piece: Audio) -> None:
    """Refuse to join two pieces that differ in more than their samples.

    Raises:
        ValueError: another rate, number of channels, or sample format.
    """
    if (piece.rate_hz, piece.channels, piece.format) != (first.rate_hz, first.channels, first.format):
        raise ValueError(
            f"audio changed from {first.rate_hz} Hz, {first.channels} channels, {first.format} "
            f"to {piece.rate_hz} Hz, {piece.channels} channels, {piece.format} within one stream"
        )


def slices(audio: Audio, max_frames: int) -> Iterator[Audio]:
    """Yield the sound in pieces of at most so many samples of each channel, without a copy."""
    if audio.num_frames <= max_frames:
        yield audio
        return
    step = max_frames * len(audio.data) // audio.num_frames
    for start in range(0, len(audio.data), step):
        yield Audio(audio.rate_hz, audio.channels, audio.format, Blob(audio.data.view[start : start + step]))


def floats_of(audio: Audio) -> Samples:
    """Return the samples; what is no number becomes silence, what is infinite full scale."""
    import numpy as np

    if audio.format == "s16":
        samples = np.frombuffer(audio.data.view, "<i2").astype(np.float32) / np.float32(32768)
    else:
        raw = np.frombuffer(audio.data.view, "<f4")
        samples = np.nan_to_num(raw, nan=0.0, posinf=1.0, neginf=-1.0).astype(np.float32)
    return samples.reshape(-1, audio.channels)


def s16_of(samples: Samples) -> bytes:
    """Return samples as s16 little-endian, channels interleaved: scaled by 32768, rounded, cut at full scale."""
    import numpy as np

    return np.clip(np.rint(samples * np.float32(32768)), -32768, 32767).astype("<i2").tobytes()


class Resampler:
    """Another sample rate, by soxr (HQ: 20 bits), whose filter goes on from piece to piece.

    The whole has ``frames * out_hz / in_hz`` frames, rounded.
    """

    def __init__(self, in_hz: int, out_hz: int, channels: int) -> None:
        import soxr

        self._stream = soxr.ResampleStream(in_hz, out_hz, channels, dtype="float32", quality="HQ")
        self._channels = channels
        self._length = _Length(Fraction(out_hz, in_hz))

    def feed(self, samples: Samples) -> Samples:
        """Return what is ready."""
        return self._length.of(samples, self._run(samples))

    def finish(self) -> Samples:
        """Return the rest."""
        import numpy as np

        return self._length.rest(self._run(np.zeros((0, self._channels), np.float32), is_last=True))

    def _run(self, samples: Samples, *, is_last: bool = False) -> Samples:
        made = self._stream.resample_chunk(samples[:, 0] if self._channels == 1 else samples, last=is_last)
        return made.reshape(-1, self._channels)


class Tempo:
    """Another speed at the same pitch, by FFmpeg's `atempo` (overlap-add of similar waves).

    The whole has ``frames / speed`` frames, rounded. One filter does 0.5 to 2; beyond it would drop or repeat sound, so
    that several follow each other.

    Args:
        speed: 2 is twice as fast; 0.25 to 4.
        rate_hz: of the samples.
        channels: of the samples.

    Raises:
        BadInput: more channels than FFmpeg has names for.
    """

    def __init__(self, speed: float, rate_hz: int, channels: int) -> None:
        import numpy as np
        from av.filter import Graph

        if channels not in LAYOUTS:
            raise BadInput(f"audio: {channels} channels can't change their speed (allowed: 1 to 8)", field="speed")
        self._rate_hz = rate_hz
        self._layout = LAYOUTS[channels]
        self._channels = channels
        self._length = _Length(1 / Fraction(speed))
        self._waiting: Samples = np.zeros((0, channels), np.float32)
        self._pts = 0
        self._graph = Graph()
        last = self._graph.add_abuffer(
            sample_rate=rate_hz, format="flt", layout=self._layout, time_base=Fraction(1, rate_hz)
        )
        number = max(1, math.ceil(abs(math.log2(speed))))
        for name, options in [("atempo", f"{speed ** (1 / number):.12f}")] * number + [("abuffersink", None)]:
            following = self._graph.add(name, options)
            last.link_to(following)
            last = following
        self._graph.configure()

    def feed(self, samples: Samples) -> Samples:
        """Return what is ready."""
        return self._length.of(samples, self._run(samples))

    def finish(self) -> Samples:
        """Return the rest."""
        import numpy as np

        num_frames = round(_TEMPO_TAIL_S * self._rate_hz / min(1, float(self._length.ratio)))
        num_frames += -(num_frames + len(self._waiting)) % _TEMPO_BLOCK_FRAMES
        return self._length.rest(self._run(np.zeros((num_frames, self._channels), np.float32)))

    def _run(self, samples: Samples) -> Samples:
        import av
        import numpy as np

        waiting = np.concatenate([self._waiting, samples])
        made: list[Samples] = []
        whole = len(waiting) - len(waiting) % _TEMPO_BLOCK_FRAMES
        for start in range(0, whole, _TEMPO_BLOCK_FRAMES):
            block = np.ascontiguousarray(waiting[start : start + _TEMPO_BLOCK_FRAMES]).reshape(1, -1)
            frame: Any = av.AudioFrame.from_ndarray(block, format="flt", layout=self._layout)
            frame.sample_rate = self._rate_hz
            frame.pts = self._pts
            self._pts += _TEMPO_BLOCK_FRAMES
            self._graph.push(frame)
            made += self._pulled()
        self._waiting = waiting[whole:]
        return np.concatenate([waiting[:0], *made])

    def _pulled(self) -> Iterator[Samples]:
        while True:
            try:
                frame: Any = self._graph.pull()
            except BlockingIOError:  # nothing until it is fed again
                return
            yield frame.to_ndarray().reshape(-1, self._channels)


class _Length:
    """Keeps a filter's output as long as its input says: filters hold a little back, or make a little more."""

    def __init__(self, ratio: Fraction) -> None:
        self.ratio = ratio
        self._num_in = 0
        self._num_out = 0

    def of(self, fed: Samples, made: Samples) -> Samples:
        """Return what was made of what was fed, but no more than belongs to it."""
        self._num_in += len(fed)
        return self._take(made)

    def rest(self, made: Samples) -> Samples:
        """Return the last of it, cut or filled up."""
        import numpy as np

        made = self._take(made)
        missing = self._wanted() - self._num_out
        self._num_out += missing
        return np.concatenate([made, np.zeros((missing, made.shape[1]), np.float32)])

    def _take(self, made: Samples) -> Samples:
        made = made[: max(0, self._wanted() - self._num_out)]
        self._num_out += len(made)
        return made

    def _wanted(self) -> int:
        return math.floor(self._num_in * self.ratio + Fraction(1, 2))


class Limiter:
    """Turns sound down around peaks beyond full scale, instead of cutting their tops off; leaves other sound as it is.

    The gain is a minimum over a window and then a mean over another: it falls before a peak as smoothly as it rises
    after it, and at the peak it is low enough. All channels have the same.
    """

    def __init__(self, rate_hz: int, channels: int) -> None:
        import numpy as np

        self._ahead = max(1, round(LIMITER_WINDOW_S * rate_hz))
        """Samples before and after each one that its gain depends on."""
        self._waiting: Samples = np.zeros((0, channels), np.float32)
        self._gains = np.ones(self._ahead)
        """What the peaks allow, of the `_ahead` samples before the waiting ones, and of these."""

    def feed(self, samples: Samples) -> Samples:
        """Return what is ready: all but the last window."""
        import numpy as np

        peaks = np.abs(samples).max(axis=1, initial=0.0).astype(np.float64)
        self._gains = np.concatenate([self._gains, 1 / np.maximum(peaks, 1)])
        self._waiting = np.concatenate([self._waiting, samples])
        return self._take(max(0, len(self._waiting) - self._ahead))

    def finish(self) -> Samples:
        """Return the rest."""
        import numpy as np

        self._gains = np.concatenate([self._gains, np.ones(self._ahead)])
        return self._take(len(self._waiting))

    def _take(self, num_frames: int) -> Samples:
        from numpy.lib.stride_tricks import sliding_window_view

        made, self._waiting = self._waiting[:num_frames], self._waiting[num_frames:]
        gains, self._gains = self._gains[: num_frames + 2 * self._ahead], self._gains[num_frames:]
        if not num_frames or gains.min() >= 1:
            return made
        lowest = sliding_window_view(gains, self._ahead + 1).min(axis=1)
        gain = sliding_window_view(lowest, self._ahead + 1).mean(axis=1)
        return (made * gain[:, None]).astype(made.dtype)


class Shaper:
    """From sound as a stage makes it to s16 samples at another speed and rate.

    Sound that is as it is wanted passes through untouched.

    Args:
        audio: the first piece, for its form; all others have the same.
        rate_hz: of the result.
        speed: 2 is twice as fast.

    Raises:
        BadInput: more channels than can be worked on.
    """

    def __init__(self, audio: Audio, *, rate_hz: int, speed: float = 1.0) -> None:
        self._first = audio
        self._filters: list[Tempo | Resampler | Limiter] = []
        if speed != 1:
            self._filters.append(Tempo(speed, audio.rate_hz, audio.channels))
        if rate_hz != audio.rate_hz:
            self._filters.append(Resampler(audio.rate_hz, rate_hz, audio.channels))
        if self._filters or audio.format != "s16":
            # Whatever is filtered may swing beyond full scale, even if what came did not.
            self._filters.append(Limiter(rate_hz, audio.channels))

    def feed(self, audio: Audio) -> bytes:
        """Return the samples that are ready.

        Raises:
            ValueError: the sound changed its rate, channels or sample format.
        """
        check_same(self._first, audio)
        if not self._filters:
            return bytes(audio.data.view)
        samples = floats_of(audio)
        for stage in self._filters:
            samples = stage.feed(samples)
        return s16_of(samples)

    def finish(self) -> bytes:
        """Return the rest of the samples."""
        import numpy as np

        if not self._filters:
            return b""
        samples: Samples = np.zeros((0, self._first.channels), np.float32)
        for stage in self._filters:
            samples = np.concatenate([stage.feed(samples), stage.finish()])
        return s16_of(samples)
