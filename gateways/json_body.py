"""JSON bodies without holding the loop: kept as they come without being copied, weighed before they are decoded.

msgspec keeps the interpreter until a body is decoded, on whatever thread. So what bounds the loop's delay is what a
body may cost, that heavy ones are decoded one at a time with a pause after each, and that what is done with the pieces
of all of them is bounded in each turn of the loop (`Pace`).
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import re
import weakref
from typing import Any

import msgspec

MAX_JSON_WEIGHT = 1_600_000
"""Of a JSON body: what its values cost to decode, in commas of 30 ns each (measured; `JsonWeight` has all prices).

Within this weight that takes 50 ms, and 32 MiB of text as much again at the very worst; without it 4 MB of nested
objects took 0.8 s, and 32 MB of long numbers 1.6 s. Media in base64 weighs nothing, and a prompt as heavy is longer
than any model's context.
"""

HEAVY_BYTES = 256 * 1024
"""JSON from this size on is decoded in turn with other heavy bodies."""

MAX_TURN_S = 0.005
"""Of each turn of the loop, for pieces of heavy bodies: of twenty senders on one host, each has one in every turn."""

_CLASSES = bytes(
    ord("0") if byte in b"0123456789" else ord(",") if byte in b",[{:" else ord("x") for byte in range(256)
)

_LONG_NUMBER = b"0" * 20
"""A number of more digits than 64 bits hold is decoded digit by digit, and longer ones ever more slowly."""

_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
_paces: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Pace] = weakref.WeakKeyDictionary()


class Pace:
    """Shares the turns of a loop among the bodies that come; whoever waits reads nothing, which its sender feels."""

    def __init__(self) -> None:
        self._spent_s = 0.0

    @classmethod
    def of_running_loop(cls) -> Pace:
        """Return the one of the running loop."""
        return _paces.setdefault(asyncio.get_running_loop(), cls())

    async def turn(self) -> None:
        """Wait for a turn of the loop in which there is time left."""
        while self._spent_s >= MAX_TURN_S:  # noqa: ASYNC110 (a turn of the loop is what it waits for)
            await asyncio.sleep(0)

    def spend(self, seconds: float) -> None:
        """Note what a piece took."""
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._spent_s += seconds

    def _end_turn(self) -> None:
        self._spent_s = 0.0


class JsonWeight:
    """What a JSON body will cost to decode, told from its bytes as they come."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, piece: bytes) -> None:
        """Count the marks of a piece; within strings too, since only decoding would tell."""
        classes = piece.translate(_CLASSES)  # one pass shows that base64 has none of them
        self.total += 12 * classes.count(_LONG_NUMBER)
        if b"," in classes:
            num_commas, num_colons = piece.count(b","), piece.count(b":")
            self.total += 3 * classes.count(b",") - 2 * num_commas + 2 * num_colons


def _reserved(length: int) -> mmap.mmap | None:
    """Return memory that is not taken yet; None where the machine wants to have it at once and has not."""
    try:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None


_LONE_HALF = re.compile(
    rb"""
    (?<!\\)(?:\\\\)*                          # backslashes before it stand for themselves
    (\\u[dD][89abAB][0-9a-fA-F]{2})           # the first half of a surrogate pair
    (?=.{1,5}\Z)(?!\\\Z|\\u[0-9a-fA-F]*\Z)   # the second one takes six bytes, and doesn't begin there
    """,
    re.VERBOSE | re.DOTALL,
)


def decode_json(raw: bytes | memoryview, kind: Any = Any) -> Any:
    """Decode JSON, of a type if need be.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is none; that half of a surrogate pair stands alone
            near the end is not called a truncated document, as msgspec would.
        msgspec.ValidationError: it is of another type.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        start = max(0, len(raw) - 64)
        half = _LONE_HALF.search(bytes(raw[start:])) if "truncated" in str(error) else None
        if half is None:
            raise
        at = start + half.start(1)
        message = f"JSON is malformed: unexpected end of escaped utf-16 surrogate pair (byte {at})"
        raise msgspec.DecodeError(message) from None


class BodyBuffer:
    """A body as it comes.

    A large one whose length is known goes to memory of its own that is taken page by page as it fills; a buffer that
    grows would be copied whole, again and again, and one that is joined at the end once more.

    Args:
        length: as the head says; None if it does not, or if the body is encoded.
    """

    def __init__(self, length: int | None) -> None:
        self._memory = _reserved(length) if length is not None and length >= HEAVY_BYTES else None
        self._blocks = [bytearray()]
        self.num_bytes = 0

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        start, self.num_bytes = self.num_bytes, self.num_bytes + len(piece)
        if self._memory is not None:
            self._memory[start : self.num_bytes] = piece
            return
        if len(self._blocks[-1]) >= HEAVY_BYTES:
            self._blocks.append(bytearray())
        self._blocks[-1] += piece

    def to_bytes(self) -> bytes:
        """Return all of it."""
        return self._memory[: self.num_bytes] if self._memory is not None else b"".join(self._blocks)

    async def decode(self) -> Any:
        """Decode it as JSON and give its memory back.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is none.
        """
        if self.num_bytes < HEAVY_BYTES:
            return decode_json(self.to_bytes())
        loop = asyncio.get_running_loop()
        async with _turns.setdefault(loop, asyncio.Lock()):
            began_at = loop.time()
            try:
                return self._decode()
            finally:
                # As long as it took, others have the loop, however many bodies wait.
                await asyncio.sleep(loop.time() - began_at)

    def _decode(self) -> Any:
        """Decode with the garbage collector held, which would go through all new values again and again."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            if self._memory is None:
                whole = b"".join(self._blocks)
                self._blocks.clear()
                return decode_json(whole)
            # The part is let go of here: an error's traceback would hold it, and so the memory.
            with self._memory as memory, memoryview(memory) as view, view[: self.num_bytes] as body:
                return decode_json(body)
        finally:
            if was_on:
                gc.enable()
