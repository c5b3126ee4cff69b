"""Which H.264 encoder there is, and how it is told what a video is for.

PyAV's FFmpeg knows encoders of many devices; whether one is there shows when it is opened. The first that works is
taken, libx264 at the end, which always does.
"""

from __future__ import annotations

import functools
import logging
import os
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import msgspec

logger = logging.getLogger(__name__)

HARDWARE = ("h264_nvenc", "h264_qsv", "h264_amf", "h264_videotoolbox")
"""FFmpeg's encoders of devices that take frames from ordinary memory, in the order in which they are tried."""

SOFTWARE = "libx264"

Encoder: TypeAlias = Literal["auto", "libx264", "h264_nvenc", "h264_qsv", "h264_amf", "h264_videotoolbox"]

Preset: TypeAlias = Literal[
    "ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow"
]
"""Time against size, by libx264's names."""

FILE_GOP_S, LIVE_GOP_S = 10, 2
"""Seconds from one frame that stands for itself to the next: where a player may jump to, or recover."""

MAX_THREADS = 8
"""Of one encoder; more make a file larger and hardly faster."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to encode."""

    encoder: Encoder = "auto"
    preset: Preset = "veryfast"
    """Of libx264; devices have their own way between time and size."""
    quality: int = 20
    """Constant rate factor: 0 loses nothing, 51 is the worst; 18 to 23 look like the original."""
    is_live: bool = False
    """Every frame leaves the encoder at once: nothing looks ahead, no frame refers to a later one."""


LIVE = Settings(preset="ultrafast", quality=23, is_live=True)
"""For a stream that is watched while it is made."""


def options_of(name: str, settings: Settings) -> dict[str, str]:
    """Return FFmpeg's options of one encoder."""
    quality = str(settings.quality)
    match name:
        case "libx264":
            return {"preset": settings.preset, "crf": quality, **({"tune": "zerolatency"} if settings.is_live else {})}
        case "h264_nvenc":
            live = {"preset": "p2", "tune": "ull", "zerolatency": "1", "bf": "0"} if settings.is_live else {}
            return {"preset": "p5", "rc": "vbr", "cq": quality} | live
        case "h264_qsv":
            live = {"async_depth": "1", "bf": "0"} if settings.is_live else {}
            return {"preset": "veryfast", "global_quality": quality} | live
        case "h264_amf":
            live = {"usage": "ultralowlatency"} if settings.is_live else {}
            return {"rc": "cqp", "qp_i": quality, "qp_p": quality, "qp_b": quality} | live
        case _:
            return {"realtime": "1", "prio_speed": "1"} if settings.is_live else {}


def encoder_name(settings: Settings) -> str:
    """Return the encoder to use: the one that was asked for, or the first that works here."""
    return _first_working() if settings.encoder == "auto" else settings.encoder


def works_blocking(name: str) -> bool:
    """Whether an encoder can be opened and gives something for a frame."""
    import av
    from av.error import FFmpegError

    try:
        context: Any = av.CodecContext.create(name, "w")
        context.width = context.height = 256
        context.pix_fmt = "yuv420p"
        context.time_base = Fraction(1, 24)
        context.options = options_of(name, LIVE)
        frame = av.VideoFrame(256, 256, "yuv420p")
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        frame.pts = 0
        return bool(context.encode(frame) or context.encode(None))
    except (FFmpegError, ValueError):
        return False


@functools.cache
def _first_working() -> str:
    name = next((name for name in HARDWARE if works_blocking(name)), SOFTWARE)
    logger.info("video encoder", extra={"fields": {"name": name}})
    return name


def configure(stream: Any, settings: Settings, width: int, height: int, rate: Fraction) -> None:
    """Prepare an output stream of PyAV for frames that `omni_bus.media.yuv` makes.

    Args:
        stream: of the encoder that `encoder_name` names.
        settings: how to encode.
        width: of the frames; even.
        height: of the frames; even.
        rate: frames a second.
    """
    from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

    context = stream.codec_context
    context.width, context.height, context.pix_fmt = width, height, "yuv420p"
    context.time_base = 1 / rate
    context.framerate = rate
    context.gop_size = max(1, round((LIVE_GOP_S if settings.is_live else FILE_GOP_S) * rate))
    # What players show depends on it: without these tags most take small pictures for BT.601.
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    # Threads on frames of their own keep all cores busy and cost no quality, but hold frames back; as they wait for
    # each other, two a core are faster than one (scripts/bench_video_encode.py).
    num_cores = len(os.sched_getaffinity(0))
    context.thread_count = min(MAX_THREADS, num_cores if settings.is_live else 2 * num_cores)
    context.thread_type = "SLICE" if settings.is_live else "FRAME"
