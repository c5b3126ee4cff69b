"""MessagePack with arrays: byte for byte what openpi-client writes, and nothing else let in."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from openpi_client import msgpack_numpy

from omni_bus.errors import BadInput
from omni_bus.media.numpy_frames import MAX_DEPTH, MAX_FRAME_BYTES, MAX_VALUES, TooManyValues, decode, encode
from omni_bus.wire.records import pack, unpack

packb: Any = msgpack_numpy.packb  # it has no types

dtypes = st.sampled_from(["|b1", "|u1", "<i2", ">i4", "<u8", "<f2", ">f4", "<f8", "<U3", "|S2"])
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_side=4)))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda text: not text.startswith("__"))
scalars = st.builds(np.float32, st.floats(width=32)) | st.builds(np.int16, st.integers(-9, 9)) | st.builds(np.bool_)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=9)
values = st.dictionaries(
    texts,
    st.recursive(
        arrays | scalars | plain,
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=12,
    ),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_what_openpi_client_packs_is_read_and_written_back_byte_for_byte(value: dict[str, Any]) -> None:
    frame = packb(value)

    assert encode(decode(frame)) == frame


@settings(max_examples=200, deadline=None)
@given(values)
def test_what_is_written_is_what_openpi_client_packs(value: dict[str, Any]) -> None:
    assert encode(pack(value)) == packb(value)


def test_arrays_lie_where_the_message_has_them() -> None:
    frame = packb({"a": {"b": [np.arange(3, dtype=np.int16)]}})

    record = decode(frame)

    (leaf,) = record.arrays
    assert leaf.path == ("a", "b", 0)
    assert frame[leaf.offset : leaf.offset + 6] == b"\0\0\1\0\2\0"
    assert record.data.view.obj is frame


LEGACY = bytes.fromhex("85a26e64c3a474797065a33c6932a46b696e64a169a573686170659103a464617461c406010002000300")


def _legacy(**changes: Any) -> bytes:
    array = {"nd": True, "type": "<i2", "kind": "i", "shape": [3], "data": b"\1\0\2\0\3\0"} | changes
    return msgspec.msgpack.encode({"x": {key: value for key, value in array.items() if value is not ...}})


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (b"\x81\xa1x" + LEGACY, np.array([1, 2, 3], np.int16)),
        (_legacy(kind=""), np.array([1, 2, 3], np.int16)),
        (_legacy(type=b"<i2", kind=b"i"), np.array([1, 2, 3], np.int16)),
        (_legacy(nd=False, shape=..., data=b"\7\0"), np.int16(7)),
        (_legacy(kind=..., data="z"), {"nd": True, "type": "<i2", "shape": [3], "data": "z"}),
        (
            msgspec.msgpack.encode({"x": {"__ndarray__": True, "data": b"\0\2", "dtype": ">i2", "shape": [1]}}),
            np.array([2], np.int16),
        ),
    ],
)
def test_other_forms_of_arrays_are_taken(frame: bytes, expected: Any) -> None:
    found = unpack(decode(frame))["x"]

    assert type(found) is type(expected)
    assert np.array_equal(found, expected)
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)


def _array(**changes: Any) -> bytes:
    array = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    array |= {key.encode(): value for key, value in changes.items()}
    return msgspec.msgpack.encode({"x": array})


NESTED: Any = 1
for _ in range(MAX_DEPTH + 1):
    NESTED = [NESTED]

BAD: list[tuple[bytes, str]] = [
    (b"", "ends too early"),
    (b"\x81\xa1x", "ends too early, after 3 bytes"),
    (_array()[:-3], "announced|too early"),
    (b"\x81\xa1x\xdd\xff\xff\xff\xff", "4294967295 values are announced"),
    (b"\x81\xa1x\xdf\xff\xff\xff\xff", "8589934590 values are announced"),
    (b"\x81\xa1x\xc6\xff\xff\xff\xff", "ends too early"),
    (b"\x90", "something else than a map"),
    (b"\xa4text", "something else than a map"),
    (packb(np.zeros(2)), "something else than a map"),
    (b"\x80\x80", "1 bytes are left"),
    (b"\x81\xa1x\xc1", "an extension"),
    (b"\x81\xa1x\xd6\xff\0\0\0\0", "an extension"),
    (b"\x81\xa1x\xa2\xff\xff", "utf-8"),
    (b"\x81\x01\x01", "key of type int"),
    (b"\x81\x80\x01", "as a key"),
    (b"\x81\xc4\x01x\x01", "key of raw bytes, 'x'"),
    (b"\x82\xa1x\x01\xa1x\x02", "'x' came twice"),
    (msgspec.msgpack.encode({"x": NESTED}), f"allowed: {MAX_DEPTH} inside each other"),
    (_array(shape=[3]), "has 8 bytes .allowed: 12"),
    (_array(shape=[-2]), r"shape \[-2\] .allowed: sides of 0 or more"),
    (_array(shape=[-1, -2]), "sides of 0 or more"),
    (_array(shape=[2.0]), "no list of integers"),
    (_array(shape=None), "no list of integers"),
    (_array(shape=[0, 2**63], data=b""), "larger than any array"),
    (_array(shape=[1] * 17, data=b"\0" * 4), "more than 16 dimensions"),
    (_array(data="text"), "data is a str"),
    (_array(dtype="|O8"), "no objects"),
    (_array(dtype="<c8"), "complex"),
    (_array(dtype="|V8"), "no objects, structures"),
    (_array(dtype="<f4,<i4"), "structures"),
    (_array(dtype="bytes"), "dtype is 'bytes'"),
    (_array(dtype=[["a", "<f4"]]), "dtype is a list"),
    (_array(dtype=None), "dtype is a missing or null"),
    (_legacy(kind="V"), "whose kind is 'V'"),
    (_legacy(kind="O", type="|O8"), "no objects"),
    (_legacy(shape=[4]), "has 6 bytes"),
    (_legacy(nd=False, shape=...), "a scalar of type <i2 has 6 bytes"),
    (msgspec.msgpack.encode({"x": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}}), "300 does not fit"),
    (msgspec.msgpack.encode({"x": {b"__npgeneric__": True, b"data": "a", b"dtype": "<f4"}}), "a str where"),
    (msgspec.msgpack.encode({"x": {b"__npgeneric__": True, b"dtype": "<f4"}}), "a NoneType where"),
]


@pytest.mark.parametrize(("frame", "why"), BAD, ids=range(len(BAD)))
def test_anything_else_is_refused_and_says_why(frame: bytes, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        decode(frame)


def test_values_are_counted_while_they_are_read() -> None:
    many = msgspec.msgpack.encode({"x": [0] * MAX_VALUES})
    with pytest.raises(TooManyValues, match=f"more than {MAX_VALUES} values"):
        decode(many)
    with pytest.raises(TooManyValues, match="allowed: 10; send arrays"):
        decode(msgspec.msgpack.encode({"x": [[0] * 4] * 3}), max_values=10)

    assert decode(msgspec.msgpack.encode({"x": [0] * (MAX_VALUES - 10)})).value["x"][-1] == 0


def test_message_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(BadInput, match=f"allowed: at most {MAX_FRAME_BYTES}"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_every_opening_and_every_damage_is_refused_or_read() -> None:
    """Each pair of first bytes, then each byte of a real message changed and each end cut off."""
    frame = packb({"a": np.zeros(3, np.float32), "b": [np.int16(1), {"c": "d"}], "e": b"f"})
    tries = [struct.pack("BB", first, second) + b"\xa1x\1\2\3" for first in range(256) for second in range(256)]
    tries += [frame[:i] for i in range(len(frame))]
    tries += [frame[:i] + bytes([byte]) + frame[i + 1 :] for i in range(len(frame)) for byte in range(0, 256, 5)]
    for each in tries:
        try:
            record = decode(each)
        except BadInput:
            continue
        unpack(record)
