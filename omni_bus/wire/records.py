"""Records as nested Python values with NumPy arrays in them, and back.

NumPy is imported at the first use, so that processes that only pass payloads on never load it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from omni_bus.wire.payloads import (
    MAX_NESTING,
    Blob,
    Record,
    RecordArray,
    ordinary_memory,
    record_item_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

ALIGNMENT = 64
"""Arrays of a packed record begin at multiples of this: a cache line, and more than any vector instruction wants."""


class _Packing:
    """The leaves of one value, found on the way through it."""

    def __init__(self) -> None:
        self.arrays: list[RecordArray] = []
        self.pieces: list[tuple[int, memoryview]] = []
        self.num_bytes = 0

    def plain(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """Return the value without what JSON can't say, which is noted."""
        import numpy as np

        if isinstance(value, np.ndarray):
            return self._array(cast("np.ndarray[Any, Any]", value), path)
        if isinstance(value, np.generic):
            scalar = cast("np.generic[Any]", value)
            self.arrays.append(RecordArray(path, scalar.dtype.str, None))
            return scalar.item()
        if isinstance(value, bytes):
            self._place(memoryview(value), path, "bytes", (len(value),))
            return None
        if len(path) > MAX_NESTING:
            raise ValueError(f"a value is nested more than {MAX_NESTING} deep")
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {key: self.plain(item, (*path, key)) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.plain(item, (*path, i)) for i, item in enumerate(cast("list[Any]", value))]
        return value

    def _array(self, array: np.ndarray[Any, Any], path: tuple[str | int, ...]) -> None:
        import numpy as np

        record_item_bytes(array.dtype.str)  # refuses what has no form on the wire
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._place(flat.data, path, array.dtype.str, tuple(array.shape))

    def _place(self, data: memoryview, path: tuple[str | int, ...], dtype: str, shape: tuple[int, ...]) -> None:
        offset = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        self.arrays.append(RecordArray(path, dtype, shape, offset))
        self.pieces.append((offset, data))
        self.num_bytes = offset + data.nbytes


def pack(value: Any, allocate: Callable[[int], Blob] = ordinary_memory) -> Record:
    """Return a value as a payload: maps, lists, plain values, NumPy arrays and scalars, raw bytes.

    Args:
        value: what is sent; all arrays are copied once, into one buffer.
        allocate: makes that buffer (`omni_bus.engine.Context.allocate`).

    Raises:
        ValueError: an array of a type that has no form on the wire, or nesting without end.
    """
    packing = _Packing()
    plain = packing.plain(value, ())
    data = allocate(packing.num_bytes)
    for offset, piece in packing.pieces:
        data.view[offset : offset + piece.nbytes] = piece
    return Record(plain, tuple(packing.arrays), data)


def unpack(record: Record) -> Any:
    """Return the value with its arrays: writable, C-ordered, of the machine's byte order, the caller's own.

    The record has passed `omni_bus.wire.payloads.check`; its value is used up.
    """
    import numpy as np

    value = record.value
    for leaf in record.arrays:
        found: Any
        if leaf.shape is None:
            with np.errstate(over="ignore"):  # a number beyond its type's range is infinite
                found = np.dtype(leaf.dtype).newbyteorder("=").type(_at(value, leaf.path))
        else:
            num_bytes = math.prod(leaf.shape) * record_item_bytes(leaf.dtype)
            raw = record.data.view[leaf.offset : leaf.offset + num_bytes]
            if leaf.dtype == "bytes":
                found = bytes(raw)
            else:
                dtype = np.dtype(leaf.dtype)
                found = np.frombuffer(raw, np.uint8).copy().view(dtype).reshape(leaf.shape)
                if not dtype.isnative:
                    found = found.astype(dtype.newbyteorder("="))
        if not leaf.path:
            return found
        _at(value, leaf.path[:-1])[leaf.path[-1]] = found
    return value


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
