"""Multipart messages to frames and back.

Part 0 is the header, a tagged Struct in array-like MessagePack. Parts 1..n are the `Blob` bytes; the header holds their
numbers, and each part is referred to exactly once, in order. Nothing is copied: encoding yields the blobs' own
views, decoding views the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import BadFrame
from omni_bus.wire.frames import AnyFrame, Chunk
from omni_bus.wire.payloads import Blob, check

if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A header holds text, parameters and JSON at most; everything bulky is a blob."""

MAX_PARTS = 64
"""No payload has more than one blob today; the rest is room."""


class Codec:
    """One encoder and one typed decoder; not for two threads, since both keep the parts of the message in hand."""

    def __init__(self) -> None:
        self._blobs: list[memoryview] = []
        self._parts: Sequence[Part] = ()
        self._next_part = 1
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_blob)
        self._decoder = msgspec.msgpack.Decoder(AnyFrame, dec_hook=self._decode_blob)

    def encode(self, frame: AnyFrame) -> list[Part]:
        """Return the message parts of a frame: the header and one view per blob."""
        self._blobs = []
        header = self._encoder.encode(frame)
        return [header, *self._blobs]

    def decode(self, parts: Sequence[Part]) -> AnyFrame:
        """Return the frame that the parts say.

        Raises:
            BadFrame: not a frame of this protocol version, whatever the bytes.
        """
        if not parts or len(parts) > MAX_PARTS or len(parts[0]) > MAX_HEADER_BYTES:
            raise BadFrame(f"a message has 1 to {MAX_PARTS} parts and a header of at most {MAX_HEADER_BYTES} bytes")
        self._parts = parts
        self._next_part = 1
        try:
            frame = self._decoder.decode(parts[0])
            if self._next_part != len(parts):
                raise BadFrame(f"{len(parts) - 1} blobs came, the header refers to {self._next_part - 1}")
            if isinstance(frame, Chunk):
                check(frame.payload)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError, ValueError) as error:
            raise BadFrame(str(error)) from error
        finally:
            self._parts = ()
        return frame

    def _encode_blob(self, value: Any) -> int:
        if not isinstance(value, Blob):
            raise TypeError(f"a frame can't carry a {type(value).__name__}")
        self._blobs.append(value.view)
        return len(self._blobs)

    def _decode_blob(self, kind: type, value: Any) -> Blob:
        if kind is not Blob or value != self._next_part or isinstance(value, bool) or value >= len(self._parts):
            raise ValueError(f"blob {value!r} where {self._next_part} of {len(self._parts) - 1} was due")
        part = self._parts[self._next_part]
        self._next_part += 1
        return Blob(part)
