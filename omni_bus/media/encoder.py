"""PCM sound to files and streams that clients know, piece by piece: wav, raw pcm, flac, mp3, opus and aac.

``wav`` and ``pcm`` are written by hand; the others need PyAV, which is imported when the first one is asked for, so
that a gateway that never needs it stays small.
"""

from __future__ import annotations

import importlib.util
import io
import struct
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from omni_bus.errors import BadInput
from omni_bus.media.sound import LAYOUTS, Shaper

if TYPE_CHECKING:
    from omni_bus.wire.payloads import Audio

Format: TypeAlias = Literal["wav", "pcm", "pcm16", "flac", "mp3", "opus", "aac"]
"""``pcm`` and ``pcm16`` are the same: raw s16 little-endian samples, channels interleaved, no header."""

FORMATS: tuple[Format, ...] = get_args(Format)

MEDIA_TYPES: dict[Format, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}

UNKNOWN_BYTES = 0xFFFFFFFF
"""What a wav header says of a length that is not known yet."""


class _Codec(msgspec.Struct, frozen=True):
    """How PyAV makes one format, and what the codec can hold."""

    container: str
    encoder: str
    sample_format: str
    rates_hz: tuple[int, ...]
    """All rates that it knows, rising; empty where it takes others too."""
    max_channels: int
    options: dict[str, str] = {}
    """Of the container."""


_CODECS: dict[str, _Codec] = {
    "flac": _Codec("flac", "flac", "s16", (), 8),
    "mp3": _Codec("mp3", "libmp3lame", "s16p", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000), 2),
    # A page of Ogg is what a player waits for; microseconds.
    "opus": _Codec("ogg", "libopus", "s16", (8000, 12000, 16000, 24000, 48000), 2, {"page_duration": "60000"}),
    "aac": _Codec(
        "adts",
        "aac",
        "fltp",
        (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000),
        2,
    ),
}


def wav_header(rate_hz: int, channels: int, num_bytes: int | None) -> bytes:
    """Return the 44-byte RIFF header of s16 samples (Microsoft's "Multimedia Programming Interface", 1991).

    Args:
        rate_hz: samples of each channel in a second.
        channels: interleaved.
        num_bytes: of all samples; None for a stream, whose sizes are the largest number.

    Raises:
        BadInput: more than 4 GiB, which the format can't hold.
    """
    if num_bytes is not None and num_bytes + 36 > UNKNOWN_BYTES:
        raise BadInput(f"audio: {num_bytes} bytes don't fit into a wav file (allowed: below 4 GiB)", field="audio")
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        UNKNOWN_BYTES if num_bytes is None else num_bytes + 36,
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
        UNKNOWN_BYTES if num_bytes is None else num_bytes,
    )


def allowed_rates(fmt: Format, rate_hz: int) -> str:
    """Return which rates a format holds, in words, if this one is not among them; else nothing."""
    if fmt == "flac" and rate_hz > 0xFFFF and rate_hz % 10:  # what a frame's header can say
        return "up to 65535, or multiples of 10"
    rates_hz = _CODECS[fmt].rates_hz if fmt in _CODECS else ()
    return ", ".join(map(str, rates_hz)) if rates_hz and rate_hz not in rates_hz else ""


class StreamEncoder:
    """One sound, fed in pieces, to bytes that concatenate to a file; players can begin with the first of them.

    Nothing is kept but what filters and codecs hold back (less than half a second), unless the file is to be whole.
    It needs no closing: what is left of it goes with the object.

    Rates that mp3, opus or aac don't know are resampled to the next higher one that they do; more channels than they
    hold are mixed down.

    Args:
        fmt: of the bytes.
        rate_hz: of the result; 0 for that of the sound.
        speed: 2 is twice as fast, at the same pitch.
        is_cut: the sound was cut out of a longer one, and its ends are to be faded.
        is_whole: the file is read when it is complete. It has its sizes in its head, and comes from `finish` alone.
        field: what the caller calls the format, for refusals.

    Raises:
        BadInput: PyAV or soxr is needed, and is not installed.
    """

    def __init__(
        self,
        fmt: Format,
        *,
        rate_hz: int = 0,
        speed: float = 1.0,
        is_cut: bool = False,
        is_whole: bool = False,
        field: str = "audio.format",
    ) -> None:
        if fmt in _CODECS:
            _check_installed("av", "PyAV", field, f"'{fmt}'", "wav, pcm, pcm16")
        if speed != 1:
            _check_installed("av", "PyAV", "speed", f"{speed:g}", "1")
        if rate_hz:
            _check_installed("soxr", "soxr", "sample_rate", f"{rate_hz}", "null")
        self.format: Format = fmt
        self.rate_hz = rate_hz
        """Of the result; known once something was fed."""
        self.channels = 0
        """Of the result; known once something was fed."""
        self._speed = speed
        self._is_cut = is_cut
        self._is_whole = is_whole
        self._field = field
        self._shaper: Shaper | None = None
        self._writer: _PcmWriter | _AvWriter | None = None

    def is_light(self, audio: Audio) -> bool:
        """Whether to take a piece is no more than to copy it."""
        return (
            self.format not in _CODECS
            and audio.format == "s16"
            and self._speed == 1
            and not self._is_cut
            and self.rate_hz in (0, audio.rate_hz)
        )

    def feed_blocking(self, audio: Audio) -> bytes:
        """Take a piece and return what is ready.

        Raises:
            BadInput: the format can't hold this sound.
            ValueError: the sound changed its rate, channels or sample format.
        """
        if self._shaper is None or self._writer is None:
            self._shaper, self._writer = self._begin(audio)
        return self._writer.write(self._shaper.feed(audio))

    @property
    def num_bytes(self) -> int:
        """Bytes that were made so far, whether they came already or come at the end."""
        return 0 if self._writer is None else self._writer.num_bytes

    def finish_blocking(self) -> bytes:
        """Return the rest; nothing if nothing was ever fed."""
        if self._shaper is None or self._writer is None:
            return b""
        return self._writer.write(self._shaper.finish()) + self._writer.finish()

    def _begin(self, audio: Audio) -> tuple[Shaper, _PcmWriter | _AvWriter]:
        self.rate_hz, self.channels = self.rate_hz or audio.rate_hz, audio.channels
        codec = _CODECS.get(self.format)
        if codec is None:
            writer = _PcmWriter(self.rate_hz, self.channels, has_header=self.format == "wav", is_whole=self._is_whole)
        else:
            if audio.channels not in LAYOUTS:
                message = f"audio: {audio.channels} channels don't fit into {self.format} (allowed: 1 to 8)"
                raise BadInput(message, field=self._field)
            if codec.rates_hz:  # the lowest that loses nothing
                self.rate_hz = next((rate for rate in codec.rates_hz if rate >= self.rate_hz), codec.rates_hz[-1])
            self.channels = min(audio.channels, codec.max_channels)
            writer = _AvWriter(codec, self.rate_hz, audio.channels, self.channels, is_whole=self._is_whole)
        return Shaper(audio, rate_hz=self.rate_hz, speed=self._speed, is_cut=self._is_cut), writer


def _check_installed(module: str, name: str, field: str, value: str, allowed: str) -> None:
    if importlib.util.find_spec(module) is None:
        message = f"{field}: {value} needs {name}, which is not installed here (allowed: {allowed})"
        raise BadInput(message, field=field)


class _PcmWriter:
    """Samples as they are, under a header or none."""

    def __init__(self, rate_hz: int, channels: int, *, has_header: bool, is_whole: bool) -> None:
        self._rate_hz = rate_hz
        self._channels = channels
        self._head = wav_header(rate_hz, channels, None) if has_header and not is_whole else b""
        self._kept: list[bytes] | None = [] if has_header and is_whole else None
        self.num_bytes = 0

    def write(self, samples: bytes) -> bytes:
        self.num_bytes += len(samples)
        if self._kept is not None:
            self._kept.append(samples)
            return b""
        head, self._head = self._head, b""
        return head + samples

    def finish(self) -> bytes:
        if self._kept is None:
            return b""
        return b"".join([wav_header(self._rate_hz, self._channels, self.num_bytes), *self._kept])


class _Pipe:
    """What a muxer writes to, where it can't go back: what it wrote is taken away."""

    def __init__(self) -> None:
        self._written: list[bytes] = []
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        self.num_bytes += len(data)
        return len(data)

    def take(self) -> bytes:
        written, self._written = self._written, []
        return b"".join(written)


class _AvWriter:
    """Samples through one of FFmpeg's encoders and muxers.

    A muxer that can't go back leaves out what it would learn later: flac's number of samples, and mp3's head with the
    silence before and after the sound (up to 0.1 s, which players then play); aac's container (ADTS) has no place for
    such a head.
    """

    def __init__(self, codec: _Codec, rate_hz: int, channels_in: int, channels: int, *, is_whole: bool) -> None:
        import av

        self._rate_hz = rate_hz
        self._channels = channels_in
        self._file: io.BytesIO | _Pipe = io.BytesIO() if is_whole else _Pipe()
        # Without flushing, half a minute of speech would wait in the muxer's buffer.
        self._container: Any = av.open(
            self._file, "w", format=codec.container, options={"flush_packets": "1", **codec.options}
        )
        self._stream: Any = self._container.add_stream(codec.encoder, rate=rate_hz)
        self._context: Any = self._stream.codec_context
        self._context.layout = LAYOUTS[channels]
        self._context.format = codec.sample_format
        self._context.open()
        self._container.start_encoding()  # else a sound without samples would have no head
        self._cutter = av.AudioResampler(
            format=self._context.format,
            layout=self._context.layout,
            rate=rate_hz,
            frame_size=self._context.frame_size or None,
        )
        self._pts = 0

    def write(self, samples: bytes) -> bytes:
        if samples:
            self._encode(self._cutter.resample(self._frame(samples)))
        return self._taken()

    def finish(self) -> bytes:
        if self._pts:
            self._encode(self._cutter.resample(None))
        self._encode([None])
        self._container.close()
        return self._file.getvalue() if isinstance(self._file, io.BytesIO) else self._file.take()

    @property
    def num_bytes(self) -> int:
        return self._file.tell() if isinstance(self._file, io.BytesIO) else self._file.num_bytes

    def _taken(self) -> bytes:
        return b"" if isinstance(self._file, io.BytesIO) else self._file.take()

    def _frame(self, samples: bytes) -> Any:
        import av

        num_frames = len(samples) // (2 * self._channels)
        frame: Any = av.AudioFrame(format="s16", layout=LAYOUTS[self._channels], samples=num_frames)
        plane = frame.planes[0]
        plane.update(samples + bytes(plane.buffer_size - len(samples)))  # planes are padded for alignment
        frame.sample_rate = self._rate_hz
        frame.pts = self._pts
        self._pts += num_frames
        return frame

    def _encode(self, frames: list[Any]) -> None:
        for frame in frames:
            for packet in self._context.encode(frame):
                packet.stream = self._stream
                self._container.mux(packet)
