"""PCM sound to whole files, and the threads that encode.

Everything named ``_blocking`` belongs on an `EncodingPool`. Sound in pieces: `omni_bus.media.encoder`.
"""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from omni_bus.media.encoder import StreamEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.media.encoder import Format
    from omni_bus.wire.payloads import Audio

MAX_INLINE_BYTES = 64 * 1024
"""S16 sound up to this size (1.4 s at 24 kHz) is wrapped on the loop: that takes less than the hop to a thread."""

_BASE64_PIECE_BYTES = 3 * 64 * 1024

ResultT = TypeVar("ResultT")


def encode_blocking(audio: Audio, fmt: Format) -> bytes:
    """Return `audio` as one complete file.

    Raises:
        BadInput: the format can't hold this sound, or PyAV is not installed.
    """
    encoder = StreamEncoder(fmt, is_whole=True)
    return encoder.feed_blocking(audio) + encoder.finish_blocking()


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
        if StreamEncoder(fmt).is_light(audio) and len(audio.data) <= MAX_INLINE_BYTES:
            return encode_blocking(audio, fmt)
        return await self.run(encode_blocking, audio, fmt)

    async def feed(self, encoder: StreamEncoder, audio: Audio) -> bytes:
        """Give an encoder a piece and return what is ready, off the loop unless that is small and needs no codec.

        Raises:
            BadInput, ValueError: see `StreamEncoder.feed_blocking`.
        """
        if encoder.is_light(audio) and len(audio.data) <= MAX_INLINE_BYTES:
            return encoder.feed_blocking(audio)
        return await self.run(encoder.feed_blocking, audio)

    async def finish(self, encoder: StreamEncoder) -> bytes:
        """Return the rest of an encoder's bytes."""
        return await self.run(encoder.finish_blocking)

    async def base64(self, data: bytes) -> bytes:
        """Return base64, off the loop if `data` is large."""
        if len(data) <= MAX_INLINE_BYTES:
            return base64.b64encode(data)
        return await self.run(base64_blocking, data)

    def close(self) -> None:
        """Drop what waits and end the threads when they are done."""
        self._threads.shutdown(wait=True, cancel_futures=True)
