"""PCM sound to files that clients know: wav, raw pcm, flac, mp3 and opus.

``wav`` and ``pcm`` are written by hand; the others need PyAV, which is imported when the first one is asked for, so
that a gateway that never needs it stays small. Everything named ``_blocking`` belongs on an `EncodingPool`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Format: TypeAlias = Literal["wav", "pcm", "pcm16", "flac", "mp3", "opus"]
"""``pcm`` and ``pcm16`` are the same: raw s16 little-endian samples, channels interleaved, no header."""

FORMATS: tuple[Format, ...] = get_args(Format)

MAX_INLINE_BYTES = 64 * 1024
"""S16 sound up to this size (1.4 s at 24 kHz) is wrapped on the loop: that takes less than the hop to a thread."""

_BASE64_PIECE_BYTES = 3 * 64 * 1024

_MP3_RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_OPUS_RATES_HZ = (8000, 12000, 16000, 24000, 48000)

ResultT = TypeVar("ResultT")


class _Codec:
    """How PyAV makes one format: container, encoder, sample format, and what the codec can hold."""

    def __init__(
        self, container: str, encoder: str, sample_format: str, rates_hz: tuple[int, ...], max_channels: int
    ) -> None:
        self.container = container
        self.encoder = encoder
        self.sample_format = sample_format
        self.rates_hz = rates_hz
        self.max_channels = max_channels

    def rate_hz(self, rate_hz: int) -> int:
        """Return the lowest rate of the codec that loses nothing; its highest for still higher ones."""
        if not self.rates_hz:
            return rate_hz
        return next((rate for rate in self.rates_hz if rate >= rate_hz), self.rates_hz[-1])


_CODECS: dict[str, _Codec] = {
    "flac": _Codec("flac", "flac", "s16", (), 8),
    "mp3": _Codec("mp3", "libmp3lame", "s16p", _MP3_RATES_HZ, 2),
    "opus": _Codec("ogg", "libopus", "s16", _OPUS_RATES_HZ, 2),
}
_LAYOUTS = {1: "mono", 2: "stereo", 3: "3.0", 4: "quad", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}


def join(pieces: Sequence[Audio]) -> Audio:
    """Return the pieces of one stream as one.

    Raises:
        ValueError: no piece, or pieces of different rate, channels or sample format.
    """
    if not pieces:
        raise ValueError("no audio to join")
    first = pieces[0]
    for piece in pieces:
        if (piece.rate_hz, piece.channels, piece.format) != (first.rate_hz, first.channels, first.format):
            raise ValueError(
                f"audio changed from {first.rate_hz} Hz, {first.channels} channels, {first.format} "
                f"to {piece.rate_hz} Hz, {piece.channels} channels, {piece.format} within one stream"
            )
    if len(pieces) == 1:
        return first
    return Audio(first.rate_hz, first.channels, first.format, Blob(b"".join([piece.data.view for piece in pieces])))


def pcm16(audio: Audio) -> bytes:
    """Return the samples as s16 little-endian; floats are scaled by 32768, rounded and clipped."""
    if audio.format == "s16":
        return bytes(audio.data.view)
    samples = array("f", bytes(audio.data.view))
    if sys.byteorder == "big":
        samples.byteswap()
    # max(-32768, nan) keeps its first argument, so that a stray NaN becomes a click and not an exception.
    clipped = array("h", [round(min(32767.0, max(-32768.0, sample * 32768.0))) for sample in samples])
    if sys.byteorder == "big":
        clipped.byteswap()
    return clipped.tobytes()


def wav_header(rate_hz: int, channels: int, num_bytes: int) -> bytes:
    """Return the 44-byte RIFF header of s16 samples (Microsoft's "Multimedia Programming Interface", 1991).

    Raises:
        BadInput: more than 4 GiB, which the format can't hold.
    """
    if num_bytes + 36 > 0xFFFFFFFF:
        raise BadInput(f"audio: {num_bytes} bytes don't fit into a wav file (allowed: below 4 GiB)", field="audio")
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        num_bytes + 36,
        b"WAVE",
        b"fmt ",
        16,
        1,
        channels,
        rate_hz,
        rate_hz * channels * 2,
        channels * 2,
        16,
        b"data",
        num_bytes,
    )


def encode_blocking(audio: Audio, fmt: Format) -> bytes:
    """Return `audio` as one complete file.

    Rates that mp3 or opus don't know are resampled to the next higher one that they do; more channels than they hold
    are mixed down.

    Raises:
        BadInput: the format can't hold this sound, or PyAV is not installed.
    """
    samples = pcm16(audio)
    match fmt:
        case "pcm" | "pcm16":
            return samples
        case "wav":
            return wav_header(audio.rate_hz, audio.channels, len(samples)) + samples
        case _:
            return _encode_by_av(samples, audio.rate_hz, audio.channels, fmt)


def _encode_by_av(samples: bytes, rate_hz: int, channels: int, fmt: Format) -> bytes:
    try:
        import av
    except ImportError as error:
        raise BadInput(
            f"audio.format: '{fmt}' needs PyAV, which is not installed here (allowed: wav, pcm, pcm16)",
            field="audio.format",
        ) from error
    codec = _CODECS[fmt]
    if channels not in _LAYOUTS:
        raise BadInput(f"audio: {channels} channels don't fit into {fmt} (allowed: 1 to 8)", field="audio.format")
    file = io.BytesIO()
    with av.open(file, "w", format=codec.container) as container:
        stream: Any = container.add_stream(codec.encoder, rate=codec.rate_hz(rate_hz))
        stream.codec_context.layout = _LAYOUTS[min(channels, codec.max_channels)]
        stream.codec_context.format = codec.sample_format
        stream.codec_context.open()
        context = stream.codec_context
        resampler = av.AudioResampler(
            format=context.format,
            layout=context.layout,
            rate=context.sample_rate,
            frame_size=context.frame_size or None,
        )
        for frame in [*_resampled(resampler, samples, rate_hz, channels), None]:
            for packet in context.encode(frame):
                packet.stream = stream
                container.mux(packet)
    return file.getvalue()


def _resampled(resampler: Any, samples: bytes, rate_hz: int, channels: int) -> list[Any]:
    import av

    frames: list[Any] = []
    num_frames = len(samples) // (2 * channels)
    if num_frames:
        frame: Any = av.AudioFrame(format="s16", layout=_LAYOUTS[channels], samples=num_frames)
        plane = frame.planes[0]
        plane.update(samples + bytes(plane.buffer_size - len(samples)))  # planes are padded for alignment
        frame.sample_rate = rate_hz
        frame.pts = 0
        frames += resampler.resample(frame)
        frames += resampler.resample(None)
    return frames


def base64_blocking(data: bytes) -> bytes:
    """Return base64, made in pieces so that other threads get their turn: `binascii` keeps the interpreter."""
    view = memoryview(data)
    pieces = range(0, len(view), _BASE64_PIECE_BYTES)
    return b"".join([base64.b64encode(view[start : start + _BASE64_PIECE_BYTES]) for start in pieces])


class EncodingPool:
    """A few threads for encoding; each caller waits for its own result, so the queue is no longer than the callers."""

    def __init__(self, num_threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Run a blocking function on one of the threads; a cancelled wait takes it out of the queue."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def encode(self, audio: Audio, fmt: Format) -> bytes:
        """Return `audio` as one complete file, off the loop unless it is small and needs no codec.

        Raises:
            BadInput: see `encode_blocking`.
        """
        is_light = fmt in ("wav", "pcm", "pcm16") and audio.format == "s16"
        if is_light and len(audio.data) <= MAX_INLINE_BYTES:
            return encode_blocking(audio, fmt)
        return await self.run(encode_blocking, audio, fmt)

    async def base64(self, data: bytes) -> bytes:
        """Return base64, off the loop if `data` is large."""
        if len(data) <= MAX_INLINE_BYTES:
            return base64.b64encode(data)
        return await self.run(base64_blocking, data)

    def close(self) -> None:
        """Drop what waits and end the threads when they are done."""
        self._threads.shutdown(wait=True, cancel_futures=True)
