"""Multipart messages to frames and back.

Part 0 is the header, a tagged Struct in array-like MessagePack. Parts 1..n are the `Blob` bytes; the header holds their
numbers, and each part is referred to exactly once, in order. Nothing is copied: encoding yields the blobs' own
views, decoding views the parts. A blob that both ends can reach in shared memory is no part: the header holds a
`Reference` in place of the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from omni_bus.errors import BadFrame
from omni_bus.wire.checks import check_frame
from omni_bus.wire.device import DeviceBlob
from omni_bus.wire.frames import AnyFrame, Chunk
from omni_bus.wire.payloads import Blob, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Part = bytes | bytearray | memoryview
    Store = Callable[[Blob], "Reference | DeviceReference | None"]
    Fetch = Callable[["Reference | DeviceReference"], "memoryview | Blob"]

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A header holds text, parameters and JSON at most; everything bulky is a blob."""

MAX_PARTS = 64
"""No payload has more than one blob today; the rest is room."""

MAX_REASON_CHARS = 300
"""What a `BadFrame` repeats of a message is for a log line, and the peer chooses its length."""

_ILL_FORMED = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""All that msgspec and the checks raise; `UnicodeError` is a `ValueError`."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Where a blob lies in its sender's arena: descriptor of a process, bytes from the beginning, and which lease."""

    pid: int
    fd: int
    offset: int
    length: int
    generation: int


class DeviceReference(msgspec.Struct, frozen=True, array_like=True, tag="cuda"):
    """Where a blob lies in its sender's device memory: bytes from the beginning of a range, and which lease.

    `device` is the sender's number for the device; `written` the handle of the event after which the bytes are there.
    """

    device: int
    offset: int
    length: int
    generation: int
    written: bytes


class BadChunk(BadFrame):
    """A chunk whose payload can't be read; `chunk` is what is known of it, so that its request can be failed."""

    def __init__(self, message: str, chunk: Chunk) -> None:
        super().__init__(message)
        self.chunk = chunk


class Codec:
    """One encoder and one typed decoder.

    Not shared between threads, since both keep the parts of the message in hand.

    Args:
        store: puts a blob where the receiver can reach it and says where, or None: then it travels as a part.
        store_from_bytes: shorter blobs always travel as parts, unless they are in device memory.
        fetch: views what another's `store` referred to; raises `ValueError` if there is no such thing.
    """

    def __init__(self, *, store: Store | None = None, store_from_bytes: int = 0, fetch: Fetch | None = None) -> None:
        self._store = store
        self._store_from_bytes = store_from_bytes
        self._fetch = fetch
        self._fetch_error = ""
        self._blobs: list[memoryview] = []
        self._parts: Sequence[Part] = ()
        self._next_part = 1
        self._encode_header = msgspec.msgpack.Encoder(enc_hook=self._encode_blob).encode
        self._decode_header = msgspec.msgpack.Decoder(AnyFrame, dec_hook=self._decode_blob).decode

    def encode(self, frame: AnyFrame) -> list[Part]:
        """Return the message parts of a frame: the header and one view per blob.

        What `decode` would refuse for its values (a shape that doesn't fit its bytes) is not looked for here.

        Raises:
            BadFrame: a value that has no form on the wire (its type, an integer over 64 bits, a lone surrogate, nesting
                without end), or a header over `MAX_HEADER_BYTES`.
        """
        try:
            header = self._encode_header(frame)
        except _ILL_FORMED as error:
            self._blobs = []
            raise BadFrame(f"{type(frame).__name__} can't be encoded: {_reason(error)}") from error
        if len(header) > MAX_HEADER_BYTES:
            self._blobs = []
            raise BadFrame(f"{type(frame).__name__}: a header of {len(header)} bytes (allowed: {MAX_HEADER_BYTES})")
        if not self._blobs:
            return [header]
        parts: list[Part] = [header, *self._blobs]
        self._blobs = []
        return parts

    def decode(self, parts: Sequence[Part]) -> AnyFrame:
        """Return the frame that the parts say.

        Raises:
            BadChunk: a chunk whose payload is not what it says, or refers to memory that is not there.
            BadFrame: not a frame of this protocol version, whatever the bytes.
        """
        if not parts or len(parts) > MAX_PARTS or len(parts[0]) > MAX_HEADER_BYTES:
            raise BadFrame(f"a message has 1 to {MAX_PARTS} parts and a header of at most {MAX_HEADER_BYTES} bytes")
        self._parts = parts
        self._next_part = 1
        frame: AnyFrame | None = None
        try:
            frame = self._decode_header(parts[0])
            if self._next_part != len(parts):
                raise BadFrame(f"{len(parts) - 1} blobs came, the header refers to {self._next_part - 1}")
            if self._fetch_error:
                raise ValueError(self._fetch_error)
            check_frame(frame)
        except _ILL_FORMED as error:
            reason = _reason(error)
            if type(frame) is Chunk and frame.edge >= 0 and frame.seq >= 0:
                lost = Chunk(frame.request, frame.edge, frame.seq, Unreadable(reason))  # pyright: ignore[reportArgumentType] (never sent on)
                raise BadChunk(reason, lost) from error
            raise BadFrame(reason) from error
        finally:
            self._parts = ()
            self._fetch_error = ""
        return frame

    def _encode_blob(self, value: Any) -> int | Reference | DeviceReference:
        if not isinstance(value, Blob):
            raise TypeError(f"a frame can't carry a {type(value).__name__}")
        if self._store is not None and (len(value) >= self._store_from_bytes or isinstance(value, DeviceBlob)):
            reference = self._store(value)
            if reference is not None:
                return reference
        self._blobs.append(value.view)
        return len(self._blobs)

    def _decode_blob(self, kind: type, value: Any) -> Blob:
        if kind is Blob and self._fetch is not None and isinstance(value, list):
            return self._fetch_blob(self._fetch, cast("list[Any]", value))
        due = self._next_part
        if kind is not Blob or type(value) is not int or value != due or value >= len(self._parts):
            raise ValueError(f"blob {str(value)[:20]} where {due} of {len(self._parts) - 1} was due")
        self._next_part = due + 1
        return Blob(self._parts[value])

    def _fetch_blob(self, fetch: Fetch, value: list[Any]) -> Blob:
        """View what a reference means; an empty blob if it means nothing, so that the rest of the frame is read."""
        kind = DeviceReference if value and value[0] == "cuda" else Reference
        reference: Reference | DeviceReference = msgspec.convert(value, kind)
        try:
            found = fetch(reference)
            return found if isinstance(found, Blob) else Blob(found)
        except ValueError as error:
            self._fetch_error = _reason(error)
            return Blob(b"")


def _reason(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"
