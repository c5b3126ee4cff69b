"""Sound that a command reads from the user's own files."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from omni_bus.errors import BadInput
from omni_bus.media.decode import AudioRequest
from omni_bus.runtime.media_pool import MediaPool
from omni_bus.wire.payloads import Audio

MAX_SECONDS = 4 * 3600.0
DECODE_S = 300.0
"""It is the caller's own file: these are more than a gateway gives a stranger's."""


async def decoded(name: str, rate_hz: int, field: str) -> Audio:
    """Return a file's sound as one channel of s16, decoded in a process of its own; ``-`` is standard input.

    Raises:
        BadInput: it can't be read, or is no sound.
        MediaTooLarge: it is longer than allowed.
    """
    data = await asyncio.to_thread(_read_blocking, name, field)
    pool = MediaPool(1, DECODE_S)
    max_bytes = int(MAX_SECONDS) * rate_hz * 2
    try:
        found = await pool.decode(data, AudioRequest(name, MAX_SECONDS, max_bytes, rate_hz, 1))
    finally:
        pool.close()
    assert isinstance(found, Audio)
    return found


def _read_blocking(name: str, field: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise BadInput(f"can't read {name}: {error.strerror}", field=field) from error
