"""RGB frames to what H.264 is made of (YUV 4:2:0 by ITU-R BT.709, limited range), several at a time.

swscale does the arithmetic and lets the interpreter go meanwhile, so threads are enough. A frame is read where it lies
in the payload and is let go once it was converted.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from omni_bus.wire.payloads import Video

NUM_THREADS = 2

IN_FLIGHT = 2
"""Conversions under way for each thread: those that run, and as many that are ready for the encoder."""


class Converter:
    """A few threads that convert frames for all encoders of a process; `close` at the end."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="yuv")
        self._local = threading.local()

    def frames_blocking(self, video: Video) -> Iterator[Any]:
        """Yield a payload's frames in order as ``av.VideoFrame`` (yuv420p), whose pts are their indices in the stream.

        Sides that are odd get one more column or row, a copy of the last one, as 4:2:0 has no half samples.
        """
        import numpy as np  # gateways start without it

        pictures = np.frombuffer(video.data.view, np.uint8).reshape(video.num_frames, video.height, video.width, 3)
        under_way: deque[Future[Any]] = deque()
        try:
            for index, picture in enumerate(pictures):
                if len(under_way) >= IN_FLIGHT * self._num_threads:
                    yield under_way.popleft().result()
                under_way.append(self._threads.submit(self._convert, picture, video.first_frame + index))
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()

    def close(self) -> None:
        """End the threads when they are done."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _convert(self, picture: np.ndarray[Any, Any], pts: int) -> Any:
        if not hasattr(self._local, "reformatter"):
            from av.video.reformatter import VideoReformatter

            self._local.reformatter = VideoReformatter()  # keeps its tables; one thread's at a time
        return convert_blocking(picture, pts, self._local.reformatter)


def convert_blocking(picture: np.ndarray[Any, Any], pts: int, reformatter: Any) -> Any:
    """Return one picture, uint8 (height, width, 3), as an ``av.VideoFrame``."""
    import av
    import numpy as np
    from av.video.reformatter import Colorspace

    height, width, _ = picture.shape
    if height % 2 or width % 2:
        picture = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    frame = av.VideoFrame.from_numpy_buffer(picture, format="rgb24")
    converted = reformatter.reformat(frame, format="yuv420p", dst_colorspace=Colorspace.ITU709)
    converted.pts = pts
    return converted
