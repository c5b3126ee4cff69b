"""What a record's header may say: types that NumPy has, arrays within its bytes, one value at a place."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

from omni_bus.wire.plain import check_extent, check_plain

if TYPE_CHECKING:
    from omni_bus.wire.payloads import Record

MAX_RECORD_ARRAYS = 4096

_TYPE_STRING = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9][0-9]{0,7})", re.ASCII)


def record_item_bytes(dtype: str) -> int:
    """Return the size of one element of a `RecordArray`.

    Raises:
        ValueError: another type than NumPy's booleans, numbers (not complex) and text of fixed length.
    """
    if dtype == "bytes":
        return 1
    if not _TYPE_STRING.fullmatch(dtype):
        allowed = "NumPy's booleans, integers, floats and text of fixed length"
        raise ValueError(f"dtype {dtype[:40]!r} came (allowed: {allowed}; no objects, structures, complex numbers)")
    kind = dtype.lstrip("<>|=")
    return int(kind[1:]) * (4 if kind[0] == "U" else 1)


def check_record(record: Record) -> None:
    """Refuse a record whose arrays and scalars are not where and what they are said to be.

    Raises:
        ValueError: names the path or the type.
    """
    check_plain(record.value)
    if len(record.arrays) > MAX_RECORD_ARRAYS:
        raise ValueError(f"record: {len(record.arrays)} arrays came (allowed: at most {MAX_RECORD_ARRAYS})")
    paths: set[tuple[str | int, ...]] = set()
    for array in record.arrays:
        if array.path in paths:
            raise ValueError(f"record: two arrays at {array.path}")
        paths.add(array.path)
        item_bytes = record_item_bytes(array.dtype)
        found = _at(record.value, array.path)
        if array.shape is None:
            _check_scalar(array.dtype, found)
            continue
        check_extent(array.shape)
        end = array.offset + math.prod(array.shape) * item_bytes
        if array.offset < 0 or end > len(record.data) or found is not None:
            raise ValueError(f"record: the array at {array.path} is not within its {len(record.data)} bytes")


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        # As strict as JSON: an index from the end, or into a text, would let two paths mean one place.
        items: Any
        if isinstance(key, str):
            items = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
            is_there = key in items
        else:
            items = cast("list[Any]", value) if isinstance(value, list) else []
            is_there = 0 <= key < len(items)
        if not is_there:
            raise ValueError(f"record: nothing is at {path}")
        value = items[key]
    return value


_SCALARS: dict[str, type | tuple[type, ...]] = {"b": bool, "i": int, "u": int, "f": (int, float), "U": str}


def _check_scalar(dtype: str, value: Any) -> None:
    kind = dtype.lstrip("<>|=")
    if not isinstance(value, _SCALARS.get(kind[0], ())) or (kind[0] != "b" and isinstance(value, bool)):
        raise ValueError(f"record: a {type(value).__name__} where a scalar of type {dtype} was due")
    if kind[0] in "iu":
        bits = 8 * int(kind[1:])
        low, high = (0, 2**bits) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        if not low <= value < high:
            raise ValueError(f"record: {value} does not fit type {dtype}")
