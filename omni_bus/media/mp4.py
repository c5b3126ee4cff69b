"""Frames and sound to MP4: a whole file whose head comes first, or fragments each of which plays when it arrives.

Frames go through `omni_bus.media.yuv` and an encoder of `omni_bus.media.h264`, sound through FFmpeg's AAC. All calls
block; they belong on a thread.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.media.h264 import LIVE, Settings, configure, encoder_name, options_of
from omni_bus.media.sound import LAYOUTS
from omni_bus.wire.payloads import SAMPLE_BYTES, Audio, Video

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.media.yuv import Converter

AAC_RATES_HZ = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)

MAX_FRAGMENT_BYTES = 512 * 1024
"""A fragment is closed before it is larger, unless one frame is; clients of WebSockets often take 1 MiB at most."""

MEDIA_TYPE = "video/mp4"


class Facts(msgspec.Struct, frozen=True):
    """What a video came to."""

    width: int
    height: int
    fps: float
    num_frames: int
    has_sound: bool

    @property
    def duration_s(self) -> float:
        """Seconds of its frames."""
        return self.num_frames / self.fps


class Fragment(msgspec.Struct, frozen=True):
    """A run of frames that a player may have once it has all before; the first begins with the stream's head."""

    num_frames: int
    data: bytes


class _Track:
    """A video stream's encoder: checks that payloads follow each other, and gives packets."""

    def __init__(self, container: Any, settings: Settings, converter: Converter, first: Video) -> None:
        self._converter = converter
        self._first = first.height, first.width, first.time_base_num, first.time_base_den
        self.rate = Fraction(first.time_base_den, first.time_base_num)
        name = encoder_name(settings)
        # PyAV wants a rate that 32 bits hold, as the container does.
        self.stream = container.add_stream(name, rate=self.rate, options=options_of(name, settings))
        even = first.width + first.width % 2, first.height + first.height % 2
        configure(self.stream, settings, *even, self.rate)
        self.num_frames = 0

    def encode(self, video: Video) -> Iterator[Any]:
        """Yield the packets that a payload gives.

        Raises:
            ValueError: it does not follow what came before.
        """
        came = video.height, video.width, video.time_base_num, video.time_base_den
        if came != self._first:
            height, width, num, den = self._first
            raise ValueError(
                f"frames of {video.width}×{video.height} at {video.time_base_num}/{video.time_base_den} s came "
                f"after frames of {width}×{height} at {num}/{den} s"
            )
        if video.first_frame != self.num_frames:
            raise ValueError(f"frame {video.first_frame} came where frame {self.num_frames} was due")
        for frame in self._converter.frames_blocking(video):
            frame.time_base = 1 / self.rate
            self.num_frames += 1
            yield from self.stream.encode(frame)

    def flush(self) -> Iterator[Any]:
        """Yield the packets that the encoder held back."""
        yield from self.stream.encode(None)

    def facts(self, *, has_sound: bool) -> Facts:
        """Return what it came to."""
        height, width, *_ = self._first
        return Facts(width, height, float(self.rate), self.num_frames, has_sound)


class Mp4File:
    """A whole file: its head (moov) comes before the media, so that a browser plays it while it loads.

    Args:
        fd: an empty file that may be read and written, and opened again by its number; stays the caller's.
        converter: converts the frames.
        settings: how to encode.
        expects_sound: sound may come too, which must be known when the head is laid out.
    """

    def __init__(self, fd: int, converter: Converter, settings: Settings, *, expects_sound: bool = False) -> None:
        import av

        self._converter = converter
        self._settings = settings
        self._container: Any = av.open(f"/proc/self/fd/{fd}", "w", format="mp4", options={"movflags": "faststart"})
        self._expects_sound = expects_sound
        self._held: list[Any] = []
        """Packets from before it was known whether there is sound; small beside the frames."""
        self._track: _Track | None = None
        self._sound: _Sound | None = None

    @property
    def num_frames(self) -> int:
        """Frames that came."""
        return 0 if self._track is None else self._track.num_frames

    def feed_blocking(self, payload: Video | Audio) -> None:
        """Take a piece.

        Raises:
            ValueError: it does not follow what came before, or can't be encoded.
        """
        if isinstance(payload, Audio):
            self._feed_sound(payload)
        elif payload.num_frames:
            if self._track is None:
                self._track = _Track(self._container, self._settings, self._converter, payload)
            for packet in self._track.encode(payload):
                self._mux(packet)

    def finish_blocking(self) -> Facts:
        """Write what is left, and the head.

        Raises:
            ValueError: no frame came.
        """
        if self._track is None:
            self._container.close()
            raise ValueError("no frame came")
        self._expects_sound = False
        for packet in self._track.flush():
            self._mux(packet)
        for packet in self._sound.finish() if self._sound is not None else ():
            self._mux(packet)
        self._release()
        self._container.close()
        return self._track.facts(has_sound=self._sound is not None)

    def close(self) -> None:
        """Give up what is not finished; harmless afterwards."""
        self._held.clear()
        self._container.close()

    def _feed_sound(self, audio: Audio) -> None:
        if not audio.num_frames:
            return
        if self._sound is None:
            self._sound = _Sound(self._container, audio)
        for packet in self._sound.encode(audio):
            self._mux(packet)

    def _mux(self, packet: Any) -> None:
        if self._track is None or (self._expects_sound and self._sound is None):
            self._held.append(packet)
            return
        self._release()
        self._container.mux_one(packet)

    def _release(self) -> None:
        held, self._held = self._held, []
        for packet in held:
            self._container.mux_one(packet)


class _Sound:
    """A file's sound, as AAC."""

    def __init__(self, container: Any, first: Audio) -> None:
        import av

        if first.channels not in LAYOUTS:
            raise ValueError(f"sound of {first.channels} channels can't be encoded")
        self._first = first.rate_hz, first.channels, first.format
        rate_hz = next((rate for rate in AAC_RATES_HZ if rate >= first.rate_hz), AAC_RATES_HZ[-1])
        self._stream: Any = container.add_stream("aac", rate=rate_hz)
        context = self._stream.codec_context
        context.layout = LAYOUTS[min(first.channels, 2)]
        context.open()
        self._resampler = av.AudioResampler(
            format=context.format, layout=context.layout, rate=rate_hz, frame_size=context.frame_size
        )
        self._pts = 0

    def encode(self, audio: Audio) -> Iterator[Any]:
        import av

        if (audio.rate_hz, audio.channels, audio.format) != self._first:
            raise ValueError("the sound changed its rate, channels or format")
        frame: Any = av.AudioFrame(
            format="s16" if audio.format == "s16" else "flt",
            layout=LAYOUTS[audio.channels],
            samples=audio.num_frames,
        )
        plane = frame.planes[0]
        size = audio.num_frames * audio.channels * SAMPLE_BYTES[audio.format]
        plane.update(bytes(audio.data.view) + bytes(plane.buffer_size - size))  # planes are padded for alignment
        frame.sample_rate, frame.pts = audio.rate_hz, self._pts
        self._pts += audio.num_frames
        for piece in self._resampler.resample(frame):
            yield from self._stream.encode(piece)

    def finish(self) -> Iterator[Any]:
        for piece in self._resampler.resample(None):
            yield from self._stream.encode(piece)
        yield from self._stream.encode(None)


class Mp4Fragments:
    """A fragmented MP4 (ISO/IEC 14496-12, 8.8) of frames alone, a fragment or more for each payload, without delay.

    Concatenated they are a file. Each fragment is made by a muxer of its own, since FFmpeg's would keep a fragment
    until the next one begins; its head is left out of all but the first.

    Args:
        converter: converts the frames.
        settings: how to encode; live ones give every frame at once.
    """

    def __init__(self, converter: Converter, settings: Settings = LIVE) -> None:
        import av

        self._converter = converter
        self._settings = settings
        self._pipe = _Pipe()
        self._encoder: Any = av.open(self._pipe, "w", format="mp4", options={"movflags": "empty_moov"})
        self._track: _Track | None = None
        self._num_fragments = 0

    @property
    def num_frames(self) -> int:
        """Frames that came."""
        return 0 if self._track is None else self._track.num_frames

    def feed_blocking(self, video: Video) -> Iterator[Fragment]:
        """Take a payload and yield fragments as they are full, the last one when its frames are in.

        Raises:
            ValueError: it does not follow what came before.
        """
        if not video.num_frames:
            return
        if self._track is None:
            self._track = _Track(self._encoder, self._settings, self._converter, video)
            self._track.stream.codec_context.open()
            self._encoder.start_encoding()  # makes the parameters known that each muxer is given
        yield from self._fragments(self._track.encode(video))

    def finish_blocking(self) -> Iterator[Fragment]:
        """Yield what the encoder held back, if it did."""
        if self._track is not None:
            yield from self._fragments(self._track.flush())

    def facts(self) -> Facts:
        """Return what it came to; once a frame came."""
        assert self._track is not None
        return self._track.facts(has_sound=False)

    def _fragments(self, packets: Iterator[Any]) -> Iterator[Fragment]:
        run: list[Any] = []
        num_bytes = 0
        for packet in packets:
            if run and num_bytes + packet.size > MAX_FRAGMENT_BYTES:
                yield self._fragment(run)
                run, num_bytes = [], 0
            run.append(packet)
            num_bytes += packet.size
        if run:
            yield self._fragment(run)

    def _fragment(self, packets: list[Any]) -> Fragment:
        import av

        assert self._track is not None
        self._num_fragments += 1
        pipe = _Pipe()
        muxer: Any = av.open(
            pipe,
            "w",
            format="mp4",
            options={
                "movflags": "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer",
                "fragment_index": str(self._num_fragments),
                "avoid_negative_ts": "disabled",  # else each fragment would begin at zero
            },
        )
        stream = muxer.add_stream_from_template(self._track.stream, opaque=True)
        for packet in packets:
            packet.stream = stream
            packet.duration = packet.duration or 1
            muxer.mux_one(packet)
        muxer.close()
        data = pipe.take()
        return Fragment(len(packets), data if self._num_fragments == 1 else _without_head(data))


class _Pipe:
    """What a muxer writes to, where it can't go back."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        written, self._written = self._written, []
        return b"".join(written)


def boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, start and end of each box at the top of an MP4 (ISO/IEC 14496-12, 4.2)."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, at + 8)
        if size < 8:
            raise ValueError(f"a box of {size} bytes at {at}")
        yield kind, at, at + size
        at += size


def _without_head(data: bytes) -> bytes:
    start = next(start for kind, start, _ in boxes(data) if kind == b"moof")
    return data[start:]
