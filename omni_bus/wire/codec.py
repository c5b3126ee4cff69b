"""Multipart messages to frames and back.

Part 0 is the header, a tagged Struct in array-like MessagePack. Parts 1..n are the `Blob` bytes; the header holds their
numbers, and each part is referred to exactly once, in order. Nothing is copied: encoding yields the blobs' own
views, decoding views the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.errors import BadFrame
from omni_bus.wire.checks import check_frame
from omni_bus.wire.frames import AnyFrame
from omni_bus.wire.payloads import Blob

if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A header holds text, parameters and JSON at most; everything bulky is a blob."""

MAX_PARTS = 64
"""No payload has more than one blob today; the rest is room."""

MAX_REASON_CHARS = 300
"""What a `BadFrame` repeats of a message is for a log line, and the peer chooses its length."""

_ILL_FORMED = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""All that msgspec and the checks raise; `UnicodeError` is a `ValueError`."""


class Codec:
    """One encoder and one typed decoder.

    Not shared between threads, since both keep the parts of the message in hand.
    """

    def __init__(self) -> None:
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
            BadFrame: not a frame of this protocol version, whatever the bytes.
        """
        if not parts or len(parts) > MAX_PARTS or len(parts[0]) > MAX_HEADER_BYTES:
            raise BadFrame(f"a message has 1 to {MAX_PARTS} parts and a header of at most {MAX_HEADER_BYTES} bytes")
        self._parts = parts
        self._next_part = 1
        try:
            frame = self._decode_header(parts[0])
            if self._next_part != len(parts):
                raise BadFrame(f"{len(parts) - 1} blobs came, the header refers to {self._next_part - 1}")
            check_frame(frame)
        except _ILL_FORMED as error:
            raise BadFrame(_reason(error)) from error
        finally:
            self._parts = ()
        return frame

    def _encode_blob(self, value: Any) -> int:
        if not isinstance(value, Blob):
            raise TypeError(f"a frame can't carry a {type(value).__name__}")
        self._blobs.append(value.view)
        return len(self._blobs)

    def _decode_blob(self, kind: type, value: Any) -> Blob:
        due = self._next_part
        if kind is not Blob or type(value) is not int or value != due or value >= len(self._parts):
            raise ValueError(f"blob {str(value)[:20]} where {due} of {len(self._parts) - 1} was due")
        self._next_part = due + 1
        return Blob(self._parts[value])


def _reason(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= MAX_REASON_CHARS else text[:MAX_REASON_CHARS] + "…"
