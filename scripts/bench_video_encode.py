#!/usr/bin/env python3
"""Frames to MP4, ours against the naive path: each frame to a ``VideoFrame``, then to the encoder, on one thread.

Both get the same frames (RGB, uint8) and tell libx264 the same preset and quality; both run on two cores. The second
part feeds a stream of fragments, and says when the first one can leave against when the whole file could. What becomes
of the pictures before the encoder is compared byte by byte.

Run: ``python scripts/bench_video_encode.py [--quick] [--rounds N] [--frames N] [--presets a,b]``
"""

from __future__ import annotations

import argparse
import io
import os
import time
from typing import TYPE_CHECKING, Any

import av
import msgspec
import numpy as np
from av.video.reformatter import Colorspace, VideoReformatter

import measured
from omni_bus.media.h264 import FILE_GOP_S, Settings, options_of
from omni_bus.media.mp4 import Mp4File, Mp4Fragments
from omni_bus.media.video_pool import frame_slices
from omni_bus.media.yuv import Converter
from omni_bus.wire.payloads import Blob, Video

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEIGHT, FPS = 1344, 768, 24
CHUNK_FRAMES = 17
"""Of a temporal window of a video VAE, about."""


def scene(num_frames: int) -> np.ndarray[Any, Any]:
    """Smooth shades that move, over a grain that stands still."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    grain = np.random.default_rng(0).integers(0, 12, (HEIGHT, WIDTH, 3))
    frames = np.empty((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    for i, frame in enumerate(frames):
        waves = (columns / 90 + i / 10, rows / 70 - i / 14, (columns + rows) / 120 + i / 9)
        for channel, wave in enumerate(waves):
            frame[..., channel] = np.clip(128 + 100 * np.sin(wave) + grain[..., channel], 0, 255)
    return frames


def naive(frames: np.ndarray[Any, Any], settings: Settings) -> int:
    """Encode one frame after another; return the file's size."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options_of("libx264", settings))
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = FILE_GOP_S * FPS
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)))
        container.mux(stream.encode(None))
    return len(file.getvalue())


def ours(video: Video, settings: Settings, converter: Converter) -> int:
    """Encode with conversion beside it; return the file's size."""
    fd = os.memfd_create("video")
    try:
        file = Mp4File(fd, converter, settings)
        for piece in frame_slices(video):
            file.feed_blocking(piece)
        file.finish_blocking()
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def stream(video: Video, converter: Converter) -> tuple[float, float]:
    """Return when the first fragment, and when the last one could leave, in seconds."""
    began_at = time.perf_counter()
    maker = Mp4Fragments(converter)
    first_at = 0.0
    for piece in frame_slices(video, CHUNK_FRAMES * WIDTH * HEIGHT):
        for _ in maker.feed_blocking(piece):
            first_at = first_at or time.perf_counter()
    return first_at - began_at, time.perf_counter() - began_at


def compare_planes(frames: np.ndarray[Any, Any], video: Video, converter: Converter) -> int:
    """Return how many bytes of converted frames differ from those of a conversion one after another."""
    plain = VideoReformatter()
    num_different = 0
    for picture, converted in zip(frames, converter.frames_blocking(video), strict=True):
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        expected = plain.reformat(frame, format="yuv420p", dst_colorspace=Colorspace.ITU709)
        num_different += int(np.count_nonzero(expected.to_ndarray() != converted.to_ndarray()))
    return num_different


def timed(function: Callable[..., int], *args: Any) -> tuple[float, int]:
    """Return seconds and what came."""
    began_at = time.perf_counter()
    found = function(*args)
    return time.perf_counter() - began_at, found


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3, help="how often each way is measured (default 3)")
    options.add_argument("--frames", type=int, default=124, help="frames of the video (default 124)")
    options.add_argument("--presets", default="ultrafast,veryfast,medium", help="of libx264, by commas")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    rounds, num_frames = (1, 8) if args.quick else (args.rounds, args.frames)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    measured.header()
    print(f"{rounds} rounds, each way in turn, {num_frames} frames of {WIDTH}×{HEIGHT}, two cores")
    frames = scene(num_frames)
    video = Video(0, num_frames, HEIGHT, WIDTH, 1, FPS, Blob(frames.reshape(-1).data))
    converter = Converter()
    results: dict[str, dict[str, list[float]]] = {}
    for preset in ["ultrafast"] if args.quick else args.presets.split(","):
        settings = msgspec.convert({"encoder": "libx264", "preset": preset}, Settings)
        found = results[preset] = {"naive s": [], "ours s": [], "naive MB": [], "ours MB": []}
        for _ in range(rounds):
            for name, took in (
                ("naive", timed(naive, frames, settings)),
                ("ours", timed(ours, video, settings, converter)),
            ):
                found[f"{name} s"].append(took[0])
                found[f"{name} MB"].append(took[1] / 1e6)
    streams = [stream(video, converter) for _ in range(rounds)]
    columns = ("naive s", "ours s", "naive MB", "ours MB")
    rows = {preset: [measured.median(found[column]) for column in columns] for preset, found in results.items()}
    measured.table("a whole file, by libx264's preset (medians of the rounds)", columns, rows)
    print("\nratios")
    for preset, found in results.items():
        value = measured.median(found["naive s"]) / measured.median(found["ours s"])
        measured.ratio(f"naive / ours, {preset}", value, "aim: at least 1.5", key=f"video_{preset}")
    first, whole = (measured.median(values) for values in zip(*streams, strict=True))
    measured.ratio("first fragment of a stream / all of it", first / whole, "aim: at most 0.35", key="video_first")
    measured.ratio("bytes of converted pictures that differ", compare_planes(frames, video, converter), "aim: 0")
    converter.close()
    measured.write_json(args.json, results)


if __name__ == "__main__":
    main()
