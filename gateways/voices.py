"""Voices that callers uploaded: samples of sound, kept in the store of files, each seen by its caller alone."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from gateways.fields import refusal
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_bus.media.spool import Spool
    from omni_bus.media.store import Entry, Store

KIND = "voice"

MAX_NAME_CHARS = 256

READ_BYTES = 1024 * 1024

Policy: TypeAlias = Literal["replace", "immutable"]


class VoiceSample(msgspec.Struct, frozen=True):
    """What an uploaded voice is spoken with."""

    name: str
    data: bytes
    """The file as it was uploaded."""
    text: str | None
    """What is said in it."""


class Voices:
    """The uploaded voices of all callers.

    Names differ by more than the case of their letters. Two uploads of one name at once, perhaps by two processes, may
    both be kept for a moment: the later one counts.

    Args:
        store: where they are kept.
        max_voices: of one caller.
        policy: whether an upload may replace a voice of the same name.
        reserved: names that nobody may upload.
    """

    def __init__(self, store: Store, max_voices: int, policy: Policy, reserved: frozenset[str]) -> None:
        self._store = store
        self._max_voices = max_voices
        self._policy = policy
        self._reserved = reserved
        self._last_created_at = 0

    async def entries(self, caller: str) -> dict[str, Entry]:
        """Return a caller's voices by lower-case name."""
        return {key_of(entry.metadata["name"]): entry for entry in await self._store.entries(KIND, caller)}

    async def check(self, name: str, caller: str) -> None:
        """Refuse a name that this caller can't upload now.

        Raises:
            BadInput: it is a built-in voice's, or taken, or the caller has as many voices as it may.
        """
        if key_of(name) in self._reserved:
            raise BadInput(f"name: {name!r} is a built-in voice (allowed: another name)", field="name")
        known = await self.entries(caller)
        if key_of(name) in known:
            if self._policy == "immutable":
                message = f"name: the voice {name!r} is there already (allowed: another name, or delete it first)"
                raise BadInput(message, field="name")
        elif len(known) >= self._max_voices:
            raise BadInput(f"name: {len(known)} voices are kept for you (allowed: {self._max_voices})", field="name")

    async def add(self, name: str, caller: str, sample: Spool, about: dict[str, Any]) -> Entry:
        """Keep a voice, in the place of one of that name.

        Args:
            name: as the caller wrote it.
            caller: whose it is.
            sample: a whole file.
            about: what else is to be told of it.

        Raises:
            BadInput: see `check`.
            StorageQuotaExceeded, StorageFull: see `Store`.
        """
        await self.check(name, caller)
        begun = await self._store.begin(KIND, caller, max_bytes=sample.num_bytes, what="audio_sample")
        async with begun as upload:
            async for piece in _pieces(sample):
                await upload.write(piece)
            former = [entry for entry in await self._store.entries(KIND, caller) if _is_called(entry, name)]
            latest = max((entry.metadata["created_at"] for entry in former), default=0)
            self._last_created_at = max(int(time.time()), latest + 1, self._last_created_at + 1)
            found = await upload.commit({"name": name, "created_at": self._last_created_at, **about})
        for entry in former:
            await self._store.delete(entry.id, KIND, caller)
        return found

    async def delete(self, name: str, caller: str) -> bool:
        """Delete a voice; False if the caller has none of that name."""
        found = [entry for entry in await self._store.entries(KIND, caller) if _is_called(entry, name)]
        return any([await self._store.delete(entry.id, KIND, caller) for entry in found])

    async def resolve(self, name: str, caller: str) -> VoiceSample | None:
        """Return what a caller's voice is spoken with; None if the caller has none of that name."""
        if key_of(name) in self._reserved:  # the usual case, without a look at the disk
            return None
        entry = (await self.entries(caller)).get(key_of(name))
        fd = await self._store.open(entry) if entry is not None else None
        if entry is None or fd is None:
            return None
        data = bytearray()
        try:
            while piece := await self._store.read(fd, len(data), READ_BYTES):
                data += piece
        finally:
            os.close(fd)
        return VoiceSample(entry.metadata["name"], bytes(data), entry.metadata.get("ref_text"))


def key_of(name: str) -> str:
    """Return what two names have in common that mean the same voice."""
    return name.strip().lower()


def read_name(text: str) -> str:
    """Return a voice's name as it may be.

    Raises:
        BadInput: it is empty, too long, or could be taken for a path.
    """
    name = text.strip()
    is_path = name in (".", "..") or "/" in name or "\\" in name
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or is_path:
        allowed = f"1 to {MAX_NAME_CHARS} printable characters without / and \\, and neither . nor .."
        raise refusal("name", text, allowed)
    return name


def _is_called(entry: Entry, name: str) -> bool:
    return key_of(entry.metadata["name"]) == key_of(name)


async def _pieces(sample: Spool) -> AsyncIterator[bytes]:
    at = 0
    while at < sample.num_bytes:
        piece = await asyncio.to_thread(os.pread, sample.fileno(), READ_BYTES, at)
        at += len(piece)
        yield piece
