"""Pictures, sound and video of strangers to plain samples, with a limit on everything that can grow.

Only for a process that may be lost (`omni_bus.runtime.media_worker`): a damaged file can hold a decoder for as long as
it likes, or end it. Nothing is guessed by FFmpeg: bytes say what they are (`omni_bus.media.sniff`), and only that
demuxer and the decoders of `CODECS` are let at them, for others open further files and addresses that a file names.

Each function writes samples to `out` as they come and returns the payload's header without them.
"""

from __future__ import annotations

import contextlib
import math
import os
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, Protocol, TypeAlias

import msgspec

from omni_bus.errors import BadInput, MediaTooLarge
from omni_bus.media.sniff import CONTAINERS, HEAD_BYTES, IMAGES, ImageHeader, bare_png, image_header, kind_of
from omni_bus.wire.payloads import Audio, Blob, Image, SampleFormat, Video

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEMUXERS = {"mp4": "mov", "webm": "matroska"}
"""FFmpeg's names where they differ from ours."""

_IMAGE_DECODERS = {"jpeg": "mjpeg"}

AUDIO_CODECS = (
    *("aac", "aac_latm", "ac3", "alac", "amrnb", "amrwb", "eac3", "flac", "gsm", "mp1float", "mp2float", "mp3float"),
    *("opus", "libopus", "libspeex", "speex", "vorbis", "wavpack"),
    *("adpcm_ima_wav", "adpcm_ms", "adpcm_ima_qt", "pcm_alaw", "pcm_mulaw", "pcm_f32le", "pcm_f32be", "pcm_f64le"),
    *("pcm_f64be", "pcm_s8", "pcm_s16be", "pcm_s16le", "pcm_s24be", "pcm_s24le", "pcm_s32be", "pcm_s32le", "pcm_u8"),
)
VIDEO_CODECS = (
    *("av1", "libdav1d", "ffv1", "h263", "h264", "hevc", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v3"),
    *("png", "prores", "qtrle", "rawvideo", "theora", "vp8", "vp9", "wmv2"),
)

MAX_STREAMS = 16
MAX_CHANNELS = 8
MAX_RATE_HZ = 768_000

_CUT_SHARE, _CUT_S = 0.05, 0.5
"""A file that ends so much before the end which its header declares is cut off; encoders round by less."""

_SCRATCH_FRAMES = 1 << 16

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class ImageRequest(msgspec.Struct, frozen=True, tag="image"):
    """What to make of a picture."""

    field: str
    """The caller's field, for refusals."""
    max_pixels: int
    channels: Literal[0, 1, 3, 4] = 3
    """1 grey, 3 RGB on white, 4 RGBA; 0 is 4 for a picture with transparent parts and 3 for others."""


class AudioRequest(msgspec.Struct, frozen=True, tag="audio"):
    """What to make of a sound, or of a video's."""

    field: str
    max_seconds: _Positive
    max_bytes: int
    """Of the samples that come out."""
    rate_hz: int = 0
    """Resampled to this; 0 leaves it."""
    channels: int = 0
    """1 mixes down, 2 makes stereo; 0 leaves them."""
    format: SampleFormat = "s16"


class VideoRequest(msgspec.Struct, frozen=True, tag="video"):
    """What to make of a video's pictures."""

    field: str
    max_seconds: _Positive
    max_pixels: int
    """Of one of the file's frames."""
    max_decoded_frames: int
    """Frames of the file, wanted or not: each costs its decoding."""
    max_bytes: int
    """Of the frames that come out."""
    fps: _Positive | None = None
    """Frames a second that come out; by default as many as the file has."""
    max_frames: int | None = None
    """At most so many come out, spread evenly where the file's length is known."""
    max_frame_pixels: int | None = None
    """Larger frames are scaled down to this."""


Request: TypeAlias = ImageRequest | AudioRequest | VideoRequest


class Out(Protocol):
    """Takes samples."""

    def write(self, data: Any, /) -> Any:
        """Write all of them."""
        ...


def decode(file: BinaryIO, request: Request, out: Out) -> Image | Audio | Video:
    """Decode a file.

    Args:
        file: open for reading, seekable.
        request: what is wanted, and the limits.
        out: takes the samples.

    Returns:
        The payload without its samples.

    Raises:
        BadInput: another kind of file, damaged or cut off; says why, and what is allowed.
        MediaTooLarge: beyond a limit.
    """
    import av.error
    import av.logging

    av.logging.set_level(av.logging.PANIC)
    field = request.field
    try:
        match request:
            case ImageRequest():
                return _image(file.read(), request, out)
            case AudioRequest():
                with contextlib.closing(_Opened(file, request)) as opened:
                    return _audio(opened, request, out)
            case VideoRequest():
                with contextlib.closing(_Opened(file, request)) as opened:
                    return _video(opened, request, out)
    except MemoryError:  # FFmpeg's own too
        raise MediaTooLarge(f"{field}: it takes more memory than one file may", field=field) from None
    except av.error.FFmpegError:
        raise _damaged(field, "it can't be decoded") from None


def _damaged(field: str, why: str) -> BadInput:
    return BadInput(f"{field}: the file is damaged: {why}", field=field)


def _known(head: bytes, allowed: tuple[str, ...], field: str) -> str:
    """Return what a file is.

    Raises:
        BadInput: nothing of what is allowed.
    """
    kind = kind_of(head)
    if not head:
        raise BadInput(f"{field}: an empty file came (allowed: {', '.join(allowed)})", field=field)
    if kind not in allowed:
        came = f"a {kind} file" if kind else "a file of an unknown kind"
        raise BadInput(f"{field}: {came} came (allowed: {', '.join(allowed)})", field=field)
    return kind


# --- pictures -------------------------------------------------------------------------------------------------


def _image(data: bytes, request: ImageRequest, out: Out) -> Image:
    field = request.field
    kind = _known(data[:HEAD_BYTES], IMAGES, field)
    try:
        header = image_header(data)
        _check_pixels(header.width, header.height, request.max_pixels, field)
        if kind == "png":
            data = bare_png(data)
    except ValueError as error:
        raise _damaged(field, str(error)) from None
    pixels = _turned(_pixels(_picture(data, header, request), request.channels), header.orientation)
    height, width, channels = pixels.shape
    out.write(memoryview(pixels.reshape(-1)))
    return Image(height, width, channels, Blob(b""))


def _check_pixels(width: int, height: int, max_pixels: int, field: str) -> None:
    if width * height > max_pixels:
        raise MediaTooLarge(f"{field}: {width} × {height} pixels came (allowed: {max_pixels} in all)", field=field)


def _picture(data: bytes, header: ImageHeader, request: ImageRequest) -> Any:
    """Return the first frame.

    Decoded without a demuxer, which would look for the format by itself and decode to find out.
    """
    import av

    context: Any = av.CodecContext.create(_IMAGE_DECODERS.get(header.kind, header.kind), "r")
    context.thread_count = 1
    # `explode`: half a picture is an error and not a picture with a grey half.
    context.options = {"max_pixels": str(request.max_pixels), "err_detect": "crccheck+bitstream+buffer+explode"}
    frames = context.decode(av.Packet(data)) or context.decode(None)
    if not frames:
        raise _damaged(request.field, "it holds no picture")
    return frames[0]


def _pixels(frame: Any, channels: int) -> Any:
    """Return an array (height, width, channels) of a frame."""
    if channels == 1:
        return frame.reformat(format="gray").to_ndarray()[..., None]
    has_alpha = any(component.is_alpha for component in frame.format.components) or frame.format.name == "pal8"
    if not has_alpha:
        rgb = frame.reformat(format="rgb24").to_ndarray()
        return rgb if channels != 4 else _opaque(rgb)
    rgba = frame.reformat(format="rgba").to_ndarray()
    if channels == 4 or (channels == 0 and rgba[..., 3].min() < 255):
        return rgba
    return _on_white(rgba)


def _opaque(rgb: Any) -> Any:
    import numpy as np

    return np.concatenate([rgb, np.full((*rgb.shape[:2], 1), 255, np.uint8)], axis=2)


def _on_white(rgba: Any) -> Any:
    """Blend with white, row by row: no second picture of larger numbers is made."""
    import numpy as np

    rgb: Any = np.empty((*rgba.shape[:2], 3), np.uint8)
    for row, source in zip(rgb, rgba, strict=True):
        alpha = source[:, 3:].astype(np.uint16)
        row[:] = (source[:, :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return rgb


def _turned(pixels: Any, orientation: int) -> Any:
    """Return the picture as it is meant to be seen (Exif 2.3, tag 0x0112)."""
    import numpy as np

    if orientation in (2, 4, 5, 7):
        pixels = pixels[:, ::-1]
    num_quarters = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}[orientation]
    return np.ascontiguousarray(np.rot90(pixels, num_quarters))


# --- files of sound and video ---------------------------------------------------------------------------------


class _Opened:
    """A container with one of its streams, and what it declares of its length."""

    def __init__(self, file: BinaryIO, request: AudioRequest | VideoRequest) -> None:
        import av
        from av.stream import Disposition

        field, wanted = request.field, "audio" if isinstance(request, AudioRequest) else "video"
        kind = _known(file.read(HEAD_BYTES), CONTAINERS, field)
        if kind == "wav":
            _check_wav(file, field)
        file.seek(0)
        codecs = AUDIO_CODECS if wanted == "audio" else VIDEO_CODECS
        self.container: Any = av.open(
            file,
            "r",
            format=_DEMUXERS.get(kind, kind),
            metadata_errors="replace",  # titles in whatever encoding are no reason to refuse a song
            options={
                "max_streams": str(MAX_STREAMS),
                "codec_whitelist": ",".join((*AUDIO_CODECS, *VIDEO_CODECS)),
                "protocol_whitelist": "none",
                "enable_drefs": "0",
            },
        )
        streams = getattr(self.container.streams, wanted)
        # A cover picture within a sound file is a video stream by name only.
        streams = [s for s in streams if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise BadInput(f"{field}: a {kind} file without {wanted} came (allowed: one with {wanted})", field=field)
        self.stream: Any = streams[0]
        self.field = field
        name = self.stream.codec_context.name if self.stream.codec_context is not None else "an unknown codec"
        if name not in codecs:
            raise BadInput(f"{field}: {wanted} coded as {name} came (allowed: {', '.join(codecs)})", field=field)
        self.context: Any = self.stream.codec_context
        self.context.thread_count = 1
        self.seconds = self._declared_seconds()
        if self.seconds is not None and self.seconds > request.max_seconds:
            raise _too_long(field, self.seconds, request.max_seconds)

    def close(self) -> None:
        """Give the decoders back."""
        self.container.close()

    def _declared_seconds(self) -> float | None:
        if self.stream.duration is not None and self.stream.time_base is not None:
            return float(self.stream.duration * self.stream.time_base)
        return self.container.duration / 1e6 if self.container.duration is not None else None

    def check_end(self, seconds: float) -> None:
        """Refuse what ended before its time.

        Raises:
            BadInput: it is cut off.
        """
        declared = self.seconds
        if declared is not None and seconds + max(_CUT_S, _CUT_SHARE * declared) < declared:
            raise _damaged(self.field, f"it is cut off after {seconds:.1f} of {declared:.1f} s")


def _too_long(field: str, seconds: float | str, max_seconds: float) -> MediaTooLarge:
    came = seconds if isinstance(seconds, str) else f"{seconds:.1f}"
    return MediaTooLarge(f"{field}: {came} s came (allowed: at most {max_seconds:g} s)", field=field)


def _check_wav(file: BinaryIO, field: str) -> None:
    """Refuse a WAV file that is shorter than it says: FFmpeg takes what is there.

    Whoever writes one as a stream doesn't know its size yet and puts zero or something very large.
    """
    file.seek(4)
    declared = int.from_bytes(file.read(4), "little") + 8
    found = file.seek(0, os.SEEK_END)
    if 8 < declared < 0x7FFF0000 and declared > found + 1:
        raise _damaged(field, f"it is cut off after {found} of {declared} bytes")


# --- sound ----------------------------------------------------------------------------------------------------


def _audio(opened: _Opened, request: AudioRequest, out: Out) -> Audio:
    import av

    field, context = request.field, opened.context
    rate_hz, channels = request.rate_hz or context.sample_rate, request.channels or context.channels
    if not context.sample_rate or not context.channels:
        raise _damaged(field, "it holds no sound")
    if not 0 < context.sample_rate <= MAX_RATE_HZ or not 0 < context.channels <= MAX_CHANNELS:
        raise BadInput(
            f"{field}: {context.channels} channels at {context.sample_rate} Hz came "
            f"(allowed: 1 to {MAX_CHANNELS} channels at up to {MAX_RATE_HZ} Hz)",
            field=field,
        )
    layouts = {1: "mono", 2: "stereo"}
    resampler: Any = av.AudioResampler(
        format="s16" if request.format == "s16" else "flt",
        layout=layouts[request.channels] if request.channels else context.layout,
        rate=rate_hz,
        frame_size=_SCRATCH_FRAMES,
    )
    frame_bytes = channels * (2 if request.format == "s16" else 4)
    num_frames = num_bytes = 0
    for piece in _resampled(resampler, opened):
        num_frames += piece.samples
        num_bytes += piece.samples * frame_bytes
        if num_frames > request.max_seconds * rate_hz:
            raise _too_long(field, f"more than {request.max_seconds:g}", request.max_seconds)
        if num_bytes > request.max_bytes:
            raise MediaTooLarge(
                f"{field}: more than {request.max_bytes} bytes of samples came (allowed: {request.max_bytes})",
                field=field,
            )
        out.write(memoryview(piece.planes[0])[: piece.samples * frame_bytes])
    if not num_frames:
        raise _damaged(field, "it holds no sound")
    opened.check_end(num_frames / rate_hz)
    return Audio(rate_hz, channels, request.format, Blob(b""))


def _resampled(resampler: Any, opened: _Opened) -> Iterator[Any]:
    try:
        for frame in opened.container.decode(opened.stream):
            yield from resampler.resample(frame)
        yield from resampler.resample(None)
    except ValueError:
        raise _damaged(opened.field, "its rate or channels change within") from None


# --- video ----------------------------------------------------------------------------------------------------


def _video(opened: _Opened, request: VideoRequest, out: Out) -> Video:
    field, context = request.field, opened.context
    _check_pixels(context.width, context.height, request.max_pixels, field)
    context.options = {"max_pixels": str(request.max_pixels)}
    fps = _rate(opened, request)
    size: tuple[int, int] | None = None
    num_frames = 0
    pixels: Any = None
    last: Any = None
    for frame, num_times in _on_grid(opened, fps, request):
        if frame is not last:
            last, size = frame, size or _fitted(frame, request.max_frame_pixels)
            pixels = _upright(frame.reformat(width=size[0], height=size[1], format="rgb24"), frame.rotation)
        for _ in range(num_times):
            num_frames += 1
            if num_frames * pixels.size > request.max_bytes:
                raise MediaTooLarge(
                    f"{field}: more than {request.max_bytes} bytes of frames came (allowed: {request.max_bytes})",
                    field=field,
                )
            out.write(memoryview(pixels.reshape(-1)))
    if pixels is None:
        raise _damaged(field, "it holds no frame")
    height, width, _ = pixels.shape
    return Video(0, num_frames, height, width, fps.denominator, fps.numerator, Blob(b""))


def _rate(opened: _Opened, request: VideoRequest) -> Fraction:
    """Return the frames a second that come out."""
    own = opened.stream.average_rate or opened.stream.guessed_rate or Fraction(25)
    fps = Fraction(request.fps).limit_denominator(1001) if request.fps else Fraction(own)
    if request.max_frames is not None and opened.seconds and fps * Fraction(opened.seconds) > request.max_frames:
        fps = Fraction(request.max_frames / opened.seconds).limit_denominator(100_000)
    return max(fps, Fraction(1, 100_000))


def _on_grid(opened: _Opened, fps: Fraction, request: VideoRequest) -> Iterator[tuple[Any, int]]:
    """Yield each frame that is shown at some multiple of 1/fps, with the number of those times.

    Raises:
        MediaTooLarge: the file goes on longer, or has more frames, than is allowed.
        BadInput: it is cut off.
    """
    field, num_due, begun_s, shown = request.field, 0, None, None
    end_s = 0.0
    for num_decoded, frame in enumerate(opened.container.decode(opened.stream), 1):
        if num_decoded > request.max_decoded_frames:
            limit = request.max_decoded_frames
            raise MediaTooLarge(f"{field}: more than {limit} frames came (allowed: at most {limit})", field=field)
        at_s = frame.time if frame.time is not None else end_s
        begun_s = at_s if begun_s is None else begun_s
        at_s -= begun_s
        if at_s > request.max_seconds:
            raise _too_long(field, f"more than {request.max_seconds:g}", request.max_seconds)
        if shown is not None:
            num_times = _due(at_s, fps, num_due, request.max_frames)
            num_due += num_times
            if num_times:
                yield shown, num_times
        shown = frame
        end_s = max(end_s, at_s + _frame_seconds(frame, opened))
    if shown is not None:
        opened.check_end(end_s)
        num_times = max(_due(end_s, fps, num_due, request.max_frames), 0 if num_due else 1)
        if num_times:
            yield shown, num_times


def _due(until_s: float, fps: Fraction, num_due: int, max_frames: int | None) -> int:
    """Return how many multiples of 1/fps lie before `until_s` that had no frame yet; times are rounded in files."""
    num = math.ceil(until_s * fps - 1e-3)
    return max(0, (num if max_frames is None else min(num, max_frames)) - num_due)


def _frame_seconds(frame: Any, opened: _Opened) -> float:
    if frame.duration and frame.time_base:
        return float(frame.duration * frame.time_base)
    rate = opened.stream.average_rate or opened.stream.guessed_rate
    return float(1 / rate) if rate else 0.0


def _fitted(frame: Any, max_pixels: int | None) -> tuple[int, int]:
    """Return width and height, scaled down to at most so many pixels."""
    width, height = frame.width, frame.height
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


def _upright(frame: Any, rotation: int) -> Any:
    """Return an array (height, width, 3) of a frame, turned as its file says; cameras are held upright."""
    import numpy as np

    return np.ascontiguousarray(np.rot90(frame.to_ndarray(), round(rotation / 90) % 4))
