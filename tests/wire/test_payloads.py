from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))

from strategies import payloads

from omni_bus.wire.payloads import (
    DTYPE_BYTES,
    HEADER_BYTES,
    KINDS,
    MAX_DIMENSIONS,
    PAYLOAD_TYPES,
    Audio,
    Blob,
    Codes,
    Hidden,
    Image,
    Json,
    Latents,
    Media,
    Payload,
    Record,
    RecordArray,
    Tensor,
    Text,
    Tokens,
    Video,
    check,
    check_plain,
    kind_of,
    size_of,
)


def zeros(num_bytes: int) -> Blob:
    return Blob(bytes(num_bytes))


@settings(max_examples=200, deadline=None)
@given(payloads)
def test_every_valid_payload_passes_the_check(payload: Payload) -> None:
    check(payload)
    assert kind_of(payload) in KINDS
    assert size_of(payload) >= HEADER_BYTES


def test_kinds_are_distinct() -> None:
    assert len(set(KINDS)) == len(PAYLOAD_TYPES)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (Tokens(zeros(5)), "5 bytes are not whole int32"),
        (Text("a", -1), "num_tokens -1"),
        (Tensor("float32", (2, 3), zeros(23)), "23 bytes came where the header says 24"),
        (Tensor("bfloat16", (2,), zeros(8)), "says 4"),
        (Tensor("uint8", (-1,), zeros(0)), "negative side"),
        (Tensor("uint8", (-1, -4), zeros(4)), "negative side"),
        (Tensor("uint8", (1,) * (MAX_DIMENSIONS + 1), zeros(1)), "more than 16 dimensions"),
        (Tensor("uint8", (0, 2**63), zeros(0)), "larger than any array"),
        (Tensor("uint8", (0, 2**31, 2**31), zeros(0)), "larger than any array"),
        (Hidden(-1, "float32", (1,), zeros(4)), "count is negative"),
        (Hidden(0, "float16", (3, 2), zeros(11)), "says 12"),
        (Latents(-1, 4, "float32", (1,), zeros(4)), "count is negative"),
        (Latents(0, 4, "float32", (2,), zeros(4)), "says 8"),
        (Audio(0, 1, "s16", zeros(2)), "rate_hz 0"),
        (Audio(24_000, 0, "s16", zeros(2)), "channels 0"),
        (Audio(24_000, 2**40, "s16", zeros(0)), "channels 1099511627776"),
        (Audio(24_000, 2, "f32", zeros(12)), "whole f32 frames of 2 channels"),
        (Image(2, 2, 2, zeros(8)), "allowed: 1, 3, 4"),
        (Image(-2, -2, 1, zeros(4)), "count is negative"),
        (Image(2, 2, 3, zeros(11)), "says 12"),
        (Image(0, 2**63 - 1, 3, zeros(0)), "larger than any array"),
        (Video(0, 1, 1, 1, 1, 0, zeros(3)), "time base 1/0"),
        (Video(0, 1, 1, 1, 0, 25, zeros(3)), "time base 0/25"),
        (Video(-1, 1, 1, 1, 1, 25, zeros(3)), "count is negative"),
        (Video(0, 2, 1, 1, 1, 25, zeros(3)), "says 6"),
        (Codes(1, 8, float("nan"), zeros(32)), "frame_rate_hz nan"),
        (Codes(1, 8, float("inf"), zeros(32)), "frame_rate_hz inf"),
        (Codes(1, 8, 0.0, zeros(32)), "frame_rate_hz 0.0"),
        (Codes(1, 8, 12.5, zeros(31)), "says 32"),
        (Json({1: "a"}), "key of type int"),
        (Json([b"a"]), "a bytes where only"),
        (Record({"a": b"x"}, (), zeros(0)), "a bytes where only"),
        (Record({"a": None}, (RecordArray(("a",), "<f4", (2,), 0),), zeros(7)), "not within its 7 bytes"),
        (Record({"a": None}, (RecordArray(("a",), "<f4", (2,), -1),), zeros(8)), "not within"),
        (Record({"a": None}, (RecordArray(("a",), "<f4", (-2,), 0),), zeros(8)), "negative side"),
        (Record({"a": 1}, (RecordArray(("a",), "<f4", (2,), 0),), zeros(8)), "not within"),
        (Record({"a": None}, (RecordArray(("b",), "<f4", (2,), 0),), zeros(8)), "nothing is at"),
        (Record([None], (RecordArray((-1,), "<f4", (2,), 0),), zeros(8)), "nothing is at"),
        (Record({"a": "x"}, (RecordArray(("a", 0), "<U1", None),), zeros(0)), "nothing is at"),
        (Record({"a": None}, (RecordArray(("a",), "|u1", (1,), 0),) * 2, zeros(8)), "two arrays"),
        (Record({"a": None}, (RecordArray(("a",), "|O8", (1,), 0),), zeros(8)), "no objects"),
        (Record({"a": None}, (RecordArray(("a",), "<c8", (1,), 0),), zeros(8)), "complex"),
        (Record({"a": "x"}, (RecordArray(("a",), "<f4", None),), zeros(0)), "a str where a scalar of type <f4"),
        (Record({"a": True}, (RecordArray(("a",), "<i4", None),), zeros(0)), "a bool where"),
        (Record({"a": 256}, (RecordArray(("a",), "|u1", None),), zeros(0)), "256 does not fit"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_payload_that_contradicts_itself_is_refused(payload: Payload, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check(payload)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_tensor_length_follows_its_element_type(dtype: Any) -> None:
    check(Tensor(dtype, (3, 5), zeros(15 * DTYPE_BYTES[dtype])))
    check(Tensor(dtype, (), zeros(DTYPE_BYTES[dtype])))
    check(Tensor(dtype, (0, 7), zeros(0)))
    with pytest.raises(ValueError, match="came where the header says"):
        check(Tensor(dtype, (3, 5), zeros(15 * DTYPE_BYTES[dtype] + 1)))


def test_flow_control_charges_bulk_and_header() -> None:
    assert size_of(Text("aé€")) == HEADER_BYTES + 6
    assert size_of(Tokens(zeros(40))) == HEADER_BYTES + 40
    assert size_of(Media("a/b", zeros(10))) == HEADER_BYTES + 10
    assert size_of(Json({"a": 1})) == HEADER_BYTES + 4
    assert size_of(Record({"a": None}, (RecordArray(("a",), "|u1", (10,)),), zeros(10))) == 2 * HEADER_BYTES + 4 + 10


def test_plain_values_of_every_type_pass() -> None:
    check_plain({"a": [None, True, 1, 2.5, "x", {"b": []}], "c": (1, 2)})


def test_blob_wraps_without_a_copy() -> None:
    data = bytearray(4)
    blob = Blob(data)
    data[2] = 5

    assert blob.view[2] == 5
    assert len(blob) == 4


def test_blob_flattens_other_views() -> None:
    assert bytes(Blob(memoryview(bytes(range(8))).cast("H")).view) == bytes(range(8))
    assert len(Blob(memoryview(bytes(8)).cast("B", (2, 2, 2)))) == 8
    assert len(Blob(memoryview(b"").cast("I"))) == 0


def test_blobs_compare_by_content() -> None:
    assert Blob(b"ab") == Blob(bytearray(b"ab"))
    assert Blob(b"ab") != Blob(b"ac")
    assert Blob(b"ab") != b"ab"
    with pytest.raises(TypeError, match="no hash"):
        hash(Blob(b"ab"))


@pytest.mark.parametrize(("kind", "num_frames"), [("s16", 6), ("f32", 3)])
def test_audio_counts_samples_per_channel(kind: Any, num_frames: int) -> None:
    assert Audio(24_000, 2, kind, zeros(24)).num_frames == num_frames
