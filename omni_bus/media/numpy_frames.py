"""MessagePack with NumPy arrays in it, as openpi-client's `msgpack_numpy` speaks it, to `Record` and back.

An array is a map of four pairs whose keys are MessagePack *bin*: ``__ndarray__`` true, ``data`` bin in C order,
``dtype`` NumPy's type string, ``shape`` an array of integers. A NumPy scalar is ``__npgeneric__`` with a native number
as ``data``. Text keys are taken as well, and so is the older form of the package msgpack-numpy: ``nd``, ``type``,
``kind``, ``data``, ``shape``. No array is copied or even looked at: the record's bytes are the message's.

The reader is written by hand since arrays are to stay where they are, and since what a stranger sends must be counted
while it is read: libraries make lists of millions of elements first.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Blob, Record, RecordArray, check, record_item_bytes

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 32
"""Maps and lists inside each other."""
MAX_VALUES = 100_000
"""Numbers, texts, maps … of a message, keys too: arrays are the form for more."""


class TooManyValues(BadInput):
    """The message has more values than are allowed here."""


class _Bytes(NamedTuple):
    offset: int
    length: int


class _Scalar(NamedTuple):
    dtype: str
    value: Any


class _Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int


_FIXED = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_LENGTHS = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
_TEXT, _BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4}, {0xC4: 1, 0xC5: 2, 0xC6: 4}
_LISTS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}


def decode(frame: bytes, *, max_values: int = MAX_VALUES, must_be_map: bool = True) -> Record:
    """Return what a message says.

    Args:
        frame: one value.
        max_values: what it may hold at most, keys and array's own parts too.
        must_be_map: an array, for example, is refused.

    Raises:
        TooManyValues: more than `max_values`.
        BadInput: not such a message; says what came where.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise BadInput(f"message: {len(frame)} bytes came (allowed: at most {MAX_FRAME_BYTES})", field="message")
    reader = _Reader(frame, max_values)
    try:
        value = reader.whole()
        if must_be_map and not isinstance(value, dict):
            raise ValueError("something else than a map came (allowed: a map)")
        if reader.at != len(frame):
            raise ValueError(f"{len(frame) - reader.at} bytes are left after its end")
        record = Record(value, tuple(reader.arrays), Blob(frame))
        check(record)
    except (struct.error, IndexError):
        raise BadInput(f"message: it ends too early, after {len(frame)} bytes", field="message") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise BadInput(f"message: {error}", field="message") from None
    return record


class _Reader:
    """Reads one message from front to back."""

    def __init__(self, frame: bytes, max_values: int) -> None:
        self.frame = frame
        self.at = 0
        self.arrays: list[RecordArray] = []
        self._left = self._max_values = max_values
        self._path: list[str | int] = []

    def whole(self) -> Any:
        """Read a value that is in no other."""
        return self._kept(self.value(0))

    def value(self, depth: int) -> Any:
        """Read a value; arrays, scalars and raw bytes as what says where they are."""
        self._spend(1)
        tag = self.frame[self.at]
        self.at += 1
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag < 0x90:
            return self._map(tag & 0x0F, depth)
        if tag < 0xA0:
            return self._list(tag & 0x0F, depth)
        if tag < 0xC0:
            return self._text(tag & 0x1F)
        return self._tagged(tag, depth)

    def _tagged(self, tag: int, depth: int) -> Any:
        if tag in _PLAIN:
            return _PLAIN[tag]
        if tag in _FIXED:
            return self._unpack(_FIXED[tag])
        if tag in _TEXT:
            return self._text(self._unpack(_LENGTHS[_TEXT[tag]]))
        if tag in _BYTES:
            length = self._unpack(_LENGTHS[_BYTES[tag]])
            return _Bytes(self._skip(length), length)
        if tag in _LISTS:
            return self._list(self._unpack(_LENGTHS[_LISTS[tag]]), depth)
        if tag in _MAPS:
            return self._map(self._unpack(_LENGTHS[_MAPS[tag]]), depth)
        raise ValueError(f"an extension (byte 0x{tag:02x}) at {self.at - 1} (allowed: MessagePack's own types)")

    def _list(self, length: int, depth: int) -> list[Any]:
        self._enter(length, depth)
        found: list[Any] = []
        for i in range(length):
            self._path.append(i)
            found.append(self._kept(self.value(depth + 1)))
            self._path.pop()
        return found

    def _map(self, length: int, depth: int) -> Any:
        self._enter(2 * length, depth)
        pairs: dict[str, Any] = {}
        raw_keys: list[str] = []
        for _ in range(length):
            key = self.value(MAX_DEPTH)
            if isinstance(key, _Bytes):
                key = self.frame[key.offset : key.offset + key.length].decode()
                raw_keys.append(key)
            if not isinstance(key, str):
                raise ValueError(f"a map has a key of type {type(key).__name__} (allowed: text)")  # noqa: TRY004
            if key in pairs:
                raise ValueError(f"the key '{key[:80]}' came twice")
            self._path.append(key)
            pairs[key] = self.value(depth + 1)
            self._path.pop()
        marker = _marker(pairs, self.frame)
        if marker is not None:
            return marker
        if raw_keys:
            raise ValueError(f"a map has a key of raw bytes, {raw_keys[0][:80]!r} (allowed: text)")
        for key, value in pairs.items():
            self._path.append(key)
            pairs[key] = self._kept(value)
            self._path.pop()
        return pairs

    def _kept(self, value: Any) -> Any:
        """Note an array at the present path; returns what stands there in the value."""
        match value:
            case _Array(dtype=dtype, shape=shape, offset=offset):
                self.arrays.append(RecordArray(tuple(self._path), dtype, shape, offset))
                return None
            case _Scalar(dtype=dtype, value=number):
                self.arrays.append(RecordArray(tuple(self._path), dtype, None))
                return number
            case _Bytes(offset=offset, length=length):
                self.arrays.append(RecordArray(tuple(self._path), "bytes", (length,), offset))
                return None
            case _:
                return value

    def _enter(self, num_values: int, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise ValueError(f"lists and maps nested too deep, or as a key (allowed: {MAX_DEPTH} inside each other)")
        if num_values > len(self.frame) - self.at:
            raise ValueError(f"{num_values} values are announced at {self.at} where fewer bytes are left")
        if num_values > self._left:
            self._spend(num_values)

    def _spend(self, num_values: int) -> None:
        self._left -= num_values
        if self._left < 0:
            raise TooManyValues(
                f"message: more than {self._max_values} values came (allowed: {self._max_values}; send arrays)",
                field="message",
            )

    def _unpack(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self.frame, self.at)
        self.at += layout.size
        return value

    def _text(self, length: int) -> str:
        start = self._skip(length)
        return self.frame[start : self.at].decode()

    def _skip(self, length: int) -> int:
        start, self.at = self.at, self.at + length
        if self.at > len(self.frame):
            raise IndexError
        return start


def _marker(pairs: dict[str, Any], frame: bytes) -> _Array | _Scalar | None:
    """Return the array or scalar that a map stands for; None for a map that is just one.

    Raises:
        ValueError: it stands for one that is not allowed, or is none.
    """
    if "__ndarray__" in pairs or "__npgeneric__" in pairs:
        is_array = "__ndarray__" in pairs
        dtype = _dtype(pairs.get("dtype"), "dtype")
    elif "nd" in pairs and "type" in pairs and "kind" in pairs:
        is_array = pairs["nd"] is True
        dtype = _dtype(_as_text(pairs["type"], frame), "type")
        kind = _as_text(pairs["kind"], frame)
        if kind not in ("", dtype.lstrip("<>|=")[0]):
            raise ValueError(f"an array of type {dtype} whose kind is {kind!r} (allowed: the type's letter, or none)")
    else:
        return None
    data = pairs.get("data")
    if is_array:
        return _array(dtype, pairs.get("shape"), data)
    return _scalar(dtype, data, frame)


def _dtype(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"an array whose {key} is a {_kind(value)} (allowed: NumPy's type string)")  # noqa: TRY004
    record_item_bytes(value)
    if value == "bytes":
        raise ValueError("an array whose dtype is 'bytes' (allowed: NumPy's type string)")
    return value


def _array(dtype: str, shape: Any, data: Any) -> _Array:
    if not isinstance(data, _Bytes):
        raise ValueError(f"an array whose data is a {_kind(data)} (allowed: raw bytes)")  # noqa: TRY004
    if not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise ValueError("an array whose shape is no list of integers")
    if any(side < 0 for side in shape):
        raise ValueError(f"an array of shape {shape[:16]} (allowed: sides of 0 or more)")
    num_bytes = record_item_bytes(dtype)
    for side in shape:
        num_bytes *= side
    if num_bytes != data.length:
        raise ValueError(
            f"an array of shape {shape[:16]} and type {dtype} has {data.length} bytes (allowed: {num_bytes})"
        )
    return _Array(dtype, tuple(shape), data.offset)


def _scalar(dtype: str, data: Any, frame: bytes) -> _Scalar:
    if isinstance(data, _Bytes):
        import numpy as np

        if data.length != record_item_bytes(dtype):
            raise ValueError(f"a scalar of type {dtype} has {data.length} bytes")
        data = np.frombuffer(frame[data.offset : data.offset + data.length], dtype)[0].item()
    return _Scalar(dtype, data)


def _as_text(value: Any, frame: bytes) -> Any:
    if isinstance(value, _Bytes):
        return frame[value.offset : value.offset + value.length].decode()
    return value


def _kind(value: Any) -> str:
    match value:
        case None:
            return "missing or null"
        case _Bytes():
            return "run of raw bytes"
        case _Array() | _Scalar():
            return "NumPy value"
        case _:
            return type(value).__name__


def encode(record: Record) -> bytes:
    """Return the message that openpi-client's `packb` would make of a record's value, byte for byte."""
    value = _copied(record.value)
    for leaf in record.arrays:
        marked = _mark(leaf, record, _at(value, leaf.path))
        if not leaf.path:
            value = marked
        else:
            _at(value, leaf.path[:-1])[leaf.path[-1]] = marked
    return msgspec.msgpack.encode(value)


def _copied(value: Any) -> Any:
    """Return a value whose maps and lists are new ones: markers are put into them."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def _mark(leaf: RecordArray, record: Record, found: Any) -> Any:
    if leaf.shape is None:
        return {b"__npgeneric__": True, b"data": found, b"dtype": leaf.dtype}
    num_bytes = record_item_bytes(leaf.dtype)
    for side in leaf.shape:
        num_bytes *= side
    data = record.data.view[leaf.offset : leaf.offset + num_bytes]
    if leaf.dtype == "bytes":
        return data
    return {b"__ndarray__": True, b"data": data, b"dtype": leaf.dtype, b"shape": leaf.shape}


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
