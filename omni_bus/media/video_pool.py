"""Video encoding off the loop: threads that encode, and those that convert frames for all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from omni_bus.media.spool import run_to_end
from omni_bus.media.yuv import Converter
from omni_bus.wire.payloads import Blob, Video

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ResultT = TypeVar("ResultT")

NUM_ENCODERS = 2
"""Videos that are encoded at the same moment; each encoder has threads of its own besides."""

SLICE_PIXELS = 8 * 1024 * 1024
"""So much is encoded in one go, that a cancel needn't wait long; eight frames of a megapixel."""


class VideoPool:
    """Threads for encoding video, started when the first one comes; `close` at the end."""

    def __init__(self, num_encoders: int = NUM_ENCODERS) -> None:
        self._threads = ThreadPoolExecutor(num_encoders, thread_name_prefix="video")
        self.converter = Converter()

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Run a blocking function on a thread and stay until it is done, even if the caller is cancelled meanwhile."""
        return await run_to_end(self._threads, function, *args)

    def close(self) -> None:
        """End the threads when they are done."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.converter.close()


def frame_slices(video: Video, max_pixels: int = SLICE_PIXELS) -> Iterator[Video]:
    """Yield a payload in pieces of few frames, which view the same memory."""
    frame_bytes = 3 * video.height * video.width
    step = max(1, max_pixels // max(1, video.height * video.width))
    for start in range(0, video.num_frames, step):
        num_frames = min(step, video.num_frames - start)
        view = video.data.view[start * frame_bytes : (start + num_frames) * frame_bytes]
        yield msgspec.structs.replace(
            video, first_frame=video.first_frame + start, num_frames=num_frames, data=Blob(view)
        )
