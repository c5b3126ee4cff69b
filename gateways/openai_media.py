"""The pictures, sound and video of a conversation, read from wherever its messages say that they are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omni_bus.errors import BadInput, MediaTooLarge
from omni_bus.media.sniff import HEAD_BYTES, IMAGES, kind_of
from omni_bus.media.spool import Spool
from omni_bus.wire.payloads import size_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateways.media import MediaOptions, MediaReader
    from gateways.openai_files import FilesRoutes
    from gateways.openai_messages import Source
    from omni_bus.media.store import Entry
    from omni_bus.wire.payloads import Payload

PIECE_BYTES = 512 * 1024
"""Of an uploaded file, read at a time."""

_VIDEOS = ("mp4", "webm", "avi")


class MessageMedia:
    """Reads what messages bring besides text.

    Args:
        reader: decodes, in processes of its own.
        files: what callers have uploaded.
        options: the limits.
    """

    def __init__(self, reader: MediaReader, files: FilesRoutes, options: MediaOptions) -> None:
        self._reader = reader
        self._files = files
        self._options = options

    async def ports_of(self, file_ids: Iterable[str], caller: str) -> dict[str, str]:
        """Return the input port for each uploaded file; none for ids that this caller has not, or of other files."""
        found: dict[str, str] = {}
        for file_id in dict.fromkeys(file_ids):
            entry = await self._files.entry(file_id, caller)
            if entry is not None and (port := _port_of(await self._head(entry))):
                found[file_id] = port
        return found

    async def read(self, sources: Iterable[Source], caller: str) -> dict[str, list[Payload]]:
        """Return payloads by input port, each port's in reading order.

        Raises:
            BadInput: one is damaged, of another kind, or not to be read; names its place.
            MediaTooLarge: one is beyond a limit, or all together are.
            Unreachable: an address doesn't give it.
        """
        found: dict[str, list[Payload]] = {}
        num_bytes = 0
        for source in sources:
            payload = await self._read(source, caller)
            num_bytes += size_of(payload)
            if num_bytes > self._options.max_decoded_bytes:
                raise MediaTooLarge(
                    f"{source.place}: with it the request's media are {num_bytes} bytes once decoded "
                    f"(allowed: {self._options.max_decoded_bytes})",
                    field=source.place,
                )
            found.setdefault(source.port, []).append(payload)
        return found

    async def _read(self, source: Source, caller: str) -> Payload:
        if not source.file_id:
            return await self._decode(source, source.url)
        entry = await self._files.entry(source.file_id, caller)
        if entry is None:
            raise _gone(source)
        with Spool(entry.num_bytes, what=source.place) as spool:
            await self._copy(entry, spool, source)
            return await self._decode(source, spool)

    async def _decode(self, source: Source, given: str | Spool) -> Payload:
        match source.port:
            case "images":
                return await self._reader.image(given, field=source.place)
            case "audio":
                return await self._reader.audio(given, field=source.place)
            case _:
                return await self._reader.video(given, field=source.place)

    async def _copy(self, entry: Entry, spool: Spool, source: Source) -> None:
        store = self._files.store
        fd = await store.open(entry)
        if fd is None:
            raise _gone(source)
        try:
            for at in range(0, entry.num_bytes, PIECE_BYTES):
                await spool.write(await store.read(fd, at, PIECE_BYTES))
        finally:
            os.close(fd)
        await spool.flush()

    async def _head(self, entry: Entry) -> bytes:
        store = self._files.store
        fd = await store.open(entry)
        if fd is None:
            return b""
        try:
            return await store.read(fd, 0, HEAD_BYTES)
        finally:
            os.close(fd)


def _port_of(head: bytes) -> str:
    kind = kind_of(head)
    if kind is None:
        return ""
    return "images" if kind in IMAGES else "video" if kind in _VIDEOS else "audio"


def _gone(source: Source) -> BadInput:
    return BadInput(f"{source.place}: there is no such file (allowed: one that you have uploaded)", field=source.place)
