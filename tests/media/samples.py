"""Real files of every kind that is read, made by real encoders; and a PNG writer for those that no encoder makes.

Import as ``from samples import …`` in a test that puts this folder on the path.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import av
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEIGHT = 48, 32
RATE_HZ, SECONDS = 24000, 1.0
FPS, NUM_FRAMES = 10, 30


def slope(width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A picture that is different at each corner: red grows to the right, green downwards."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return pixels


# --- pictures -------------------------------------------------------------------------------------------------


def encoded(pixels: np.ndarray, encoder: str, pix_fmt: str, source: str = "rgb24", **options: str) -> bytes:
    """One picture by one of FFmpeg's encoders."""
    context: Any = av.CodecContext.create(encoder, "w")
    context.height, context.width = pixels.shape[:2]
    context.pix_fmt, context.time_base, context.options = pix_fmt, Fraction(1, 25), options
    frame = av.VideoFrame.from_ndarray(pixels, format=source).reformat(format=pix_fmt)
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *extra: bytes, num_rows: int | None = None) -> bytes:
    """A black PNG with further chunks before its pixels; `num_rows` fewer or more than its header says."""
    row = b"\0" + bytes(3 * width)
    deflater = zlib.compressobj(9)
    pixels = b"".join(deflater.compress(row) for _ in range(height if num_rows is None else num_rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            *extra,
            png_chunk(b"IDAT", pixels + deflater.flush()),
            png_chunk(b"IEND", b""),
        )
    )


def with_orientation(jpeg: bytes, orientation: int, order: str = "<") -> bytes:
    """A JPEG with an Exif block that says how to turn it."""
    tiff = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HIH", 42, 8, 1)
    tiff += struct.pack(f"{order}HHIHHI", 0x0112, 3, 1, orientation, 0, 0)
    block = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


@functools.cache
def images() -> dict[str, bytes]:
    """A slope in every kind of picture."""
    alpha = np.concatenate([slope(), np.full((HEIGHT, WIDTH, 1), 128, np.uint8)], axis=2)
    return {
        "png": encoded(slope(), "png", "rgb24"),
        "png-rgba": encoded(alpha, "png", "rgba", "rgba"),
        "png-grey": encoded(slope(), "png", "gray"),
        "png-16": encoded(slope(), "png", "rgb48be"),
        "jpeg": encoded(slope(), "mjpeg", "yuvj444p", qmin="1", q="1"),
        "jpeg-420": encoded(slope(), "mjpeg", "yuvj420p"),
        "webp": encoded(slope(), "libwebp", "yuv420p"),
        "webp-lossless": encoded(slope(), "libwebp", "bgra", lossless="1"),
        "webp-rgba": encoded(alpha, "libwebp", "bgra", "rgba", lossless="1"),
        "gif": encoded(slope(), "gif", "rgb8"),
        "gif-animated": video("gif", "gif", "rgb8"),
        "bmp": encoded(slope(), "bmp", "bgr24"),
    }


# --- sound ----------------------------------------------------------------------------------------------------


def tone(rate_hz: int = RATE_HZ, seconds: float = SECONDS, hz: float = 440.0) -> np.ndarray:
    """A sine, s16."""
    return (12000 * np.sin(2 * np.pi * hz * np.arange(round(rate_hz * seconds)) / rate_hz)).astype("<i2")


def sound(
    container: str, encoder: str, *, rate_hz: int = RATE_HZ, seconds: float = SECONDS, layout: str = "mono"
) -> bytes:
    """A sine of 440 Hz as a file."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as opened:
        stream: Any = opened.add_stream(encoder, rate=rate_hz)
        context = stream.codec_context
        context.layout = layout
        context.open()
        frame: Any = av.AudioFrame.from_ndarray(tone(rate_hz, seconds)[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = rate_hz, 0
        resampler = av.AudioResampler(context.format, context.layout, context.sample_rate, context.frame_size or None)
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            for packet in context.encode(piece):
                packet.stream = stream
                opened.mux(packet)
    return file.getvalue()


@functools.cache
def sounds() -> dict[str, bytes]:
    """A second of 440 Hz in every kind of file."""
    return {
        "wav": sound("wav", "pcm_s16le"),
        "wav-24": sound("wav", "pcm_s24le"),
        "wav-f32": sound("wav", "pcm_f32le"),
        "wav-mulaw": sound("wav", "pcm_mulaw", rate_hz=8000),
        "mp3": sound("mp3", "libmp3lame"),
        "flac": sound("flac", "flac"),
        "ogg-opus": sound("ogg", "libopus", rate_hz=48000),
        "aac": sound("adts", "aac"),
        "m4a": sound("ipod", "aac"),
        "webm-opus": sound("webm", "libopus", rate_hz=48000),
        "aiff": sound("aiff", "pcm_s16be"),
        "wav-stereo": sound("wav", "pcm_s16le", layout="stereo"),
    }


# --- video ----------------------------------------------------------------------------------------------------


def grey_of(index: int) -> int:
    """How bright the frame of that index is, by which it is known again."""
    return 20 + 7 * index


def video(
    container: str,
    encoder: str,
    pix_fmt: str = "yuv420p",
    *,
    num_frames: int = NUM_FRAMES,
    fps: int = FPS,
    size: tuple[int, int] = (64, 48),
    has_sound: bool = False,
    **options: str,
) -> bytes:
    """Grey frames that get brighter, as a file."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as opened:
        stream: Any = opened.add_stream(encoder, rate=fps, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        speech: Any = opened.add_stream("aac", rate=RATE_HZ, layout="mono") if has_sound else None
        for i in range(num_frames):
            grey = np.full((size[1], size[0], 3), min(255, grey_of(i)), np.uint8)
            opened.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        opened.mux(stream.encode(None))
        if speech is not None:
            samples = tone(RATE_HZ, num_frames / fps).astype("f4")[None] / 32768
            frame: Any = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE_HZ, 0
            resampler = av.AudioResampler("fltp", "mono", RATE_HZ, speech.codec_context.frame_size)
            for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
                opened.mux(speech.encode(piece))
    return file.getvalue()


def _in_a_thread(make: Callable[[], bytes]) -> bytes:
    """Return what it makes, in a thread that then ends.

    For root SVT-AV1 makes whichever thread opens it a real-time one, for good (``SCHED_FIFO``, 99): before everything
    else on the machine, the processes under test included.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


@functools.cache
def videos() -> dict[str, bytes]:
    """Three seconds at ten frames a second in every kind of file."""
    return {
        "mp4-h264": video("mp4", "libx264"),
        "mp4-h264-sound": video("mp4", "libx264", has_sound=True),
        "mp4-faststart": video("mp4", "libx264", has_sound=True, movflags="faststart"),
        "mov-mjpeg": video("mov", "mjpeg", "yuvj420p"),
        "webm-vp8": video("webm", "libvpx"),
        "webm-vp9": video("webm", "libvpx-vp9"),
        "mkv-ffv1": video("matroska", "ffv1"),
        "avi-mpeg4": video("avi", "mpeg4"),
        "mp4-av1": _in_a_thread(lambda: video("mp4", "libsvtav1", preset="12")),
    }
