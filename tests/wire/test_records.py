"""Records to nested values with arrays and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omni_bus.engine import ordinary_memory
from omni_bus.errors import InputTooLarge
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import Chunk
from omni_bus.wire.payloads import MAX_IN_HEADER_BYTES, Record, charge, check
from omni_bus.wire.records import ALIGNMENT, pack, unpack

dtypes = st.sampled_from(["|b1", "|u1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8", "<U3", "|S2"])
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, shapes))
scalars = st.builds(np.float32, st.floats(width=32)) | st.builds(np.int16, st.integers(-9, 9)) | st.builds(np.bool_)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
values = st.recursive(
    arrays | scalars | texts | st.none() | st.integers(-5, 5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        if not isinstance(right, np.ndarray) or left.shape != right.shape:
            return False
        native = left.astype(left.dtype.newbyteorder("="))
        return native.dtype == right.dtype and native.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return type(left) is type(right) and left.tobytes() == right.tobytes()
    return type(left) is type(right) and left == right


@settings(max_examples=300, deadline=None)
@given(values)
def test_every_value_crosses_the_bus_and_comes_back(value: Any) -> None:
    record = pack(value)
    check(record)
    frame: Any = Codec().decode(Codec().encode(Chunk("r", 0, 0, record)))

    found = unpack(frame.payload)

    assert same(value, found)


def test_arrays_come_back_writable_aligned_and_of_the_machines_order() -> None:
    found = unpack(pack({"a": np.arange(3, dtype="|u1"), "b": np.arange(6, dtype=">f8").reshape(2, 3).T}))

    assert found["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["b"].dtype == np.float64
    for array in found.values():
        array[...] = 1
        assert array.flags.c_contiguous
        assert array.flags.aligned


def test_packing_copies_each_array_once_into_the_memory_given() -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> Any:
        asked.append(num_bytes)
        return ordinary_memory(num_bytes)

    record = pack([np.zeros(10, np.uint8), np.zeros(3, np.float32)], allocate)

    assert asked == [ALIGNMENT + 12]
    assert [leaf.offset for leaf in record.arrays] == [0, ALIGNMENT]


@pytest.mark.parametrize("dtype", ["O", "c16", "f4,i4", "M8[s]"])
def test_arrays_without_a_form_on_the_wire_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="no objects, structures, complex numbers"):
        pack({"a": np.zeros(2, dtype)})


def test_values_beside_arrays_are_bounded_by_the_header() -> None:
    bulk = pack({"a": np.zeros(MAX_IN_HEADER_BYTES + 1, np.uint8)})
    assert charge(bulk) > MAX_IN_HEADER_BYTES

    with pytest.raises(InputTooLarge, match="record of"):
        charge(Record({"a": "x" * MAX_IN_HEADER_BYTES}, (), bulk.data))


def test_endless_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(ValueError, match="nested more than"):
        pack(value)
