from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from strategies import FRAME_TYPES, frames, of_struct, payloads, plain_values

from omni_bus.errors import BadFrame, ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.checks import check_frame
from omni_bus.wire.codec import (
    MAX_HEADER_BYTES,
    MAX_PARTS,
    MAX_REASON_CHARS,
    BadChunk,
    Codec,
    DeviceReference,
    Reference,
)
from omni_bus.wire.frames import (
    Admin,
    AdminReply,
    AnyFrame,
    Chunk,
    Close,
    Credit,
    Failed,
    Finish,
    Open,
    Ping,
    Progress,
    Route,
    RouteEdge,
    Submit,
    Welcome,
)
from omni_bus.wire.payloads import MAX_NESTING, Blob, Json, Media, Record, Tensor, Text, Tokens, Unreadable, check
from omni_bus.wire.records import unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

codec = Codec()
pack = msgspec.msgpack.encode


def chunk_header(*payload: Any) -> bytes:
    """A `Chunk` header around a hand-made payload."""
    return pack(["Chunk", "r-1", 0, 0, list(payload)])


def raw_json_chunk(value: bytes) -> bytes:
    """A `Chunk` header around a JSON payload of hand-made MessagePack bytes."""
    return b"\x95\xa5Chunk\xa3r-1\x00\x00\x92\xa4json" + value


def decoded_or_bad(parts: Sequence[bytes | bytearray | memoryview]) -> AnyFrame | None:
    """Decode hostile parts: a frame that passes every check and encodes again, or None for `BadFrame`."""
    try:
        frame = codec.decode(parts)
    except BadFrame as error:
        assert len(error.message) <= MAX_REASON_CHARS + 1
        return None
    check_frame(frame)
    if isinstance(frame, Chunk):
        check(frame.payload)
    codec.encode(frame)
    return frame


@pytest.mark.parametrize("cls", FRAME_TYPES, ids=lambda cls: cls.__name__)
def test_every_frame_round_trips(cls: type[AnyFrame]) -> None:
    @settings(max_examples=30, deadline=None)
    @given(of_struct(cls))
    def round_trip(frame: AnyFrame) -> None:
        assert codec.decode([bytes(part) for part in codec.encode(frame)]) == frame

    round_trip()


@settings(max_examples=300, deadline=None)
@given(payloads)
def test_every_payload_round_trips(payload: Any) -> None:
    frame = Chunk("r-1", 2, 3, payload)

    parts = codec.encode(frame)

    assert codec.decode(parts) == frame
    assert len(parts) == 1 if isinstance(payload, (Text, Json)) else len(parts) == 2


@settings(max_examples=200, deadline=None)
@given(frames, st.lists(plain_values, min_size=1, max_size=3))
def test_unknown_trailing_fields_are_ignored(frame: AnyFrame, extra: list[Any]) -> None:
    header, *rest = codec.encode(frame)

    longer = pack([*msgspec.msgpack.decode(header), *extra])

    assert codec.decode([longer, *rest]) == frame


def test_missing_trailing_fields_take_their_defaults() -> None:
    assert codec.decode([pack(["Submit", "r-1", "chat", ["text"]])]) == Submit("r-1", "chat", ("text",))


def test_unknown_tag_is_a_bad_frame() -> None:
    with pytest.raises(BadFrame, match="Explode"):
        codec.decode([pack(["Explode", 1])])


def test_unknown_payload_kind_is_a_bad_frame() -> None:
    with pytest.raises(BadFrame, match="smell"):
        codec.decode([chunk_header("smell", "rose")])


def test_blob_is_a_view_of_the_part() -> None:
    part = bytearray(b"\1\0\0\0")

    frame = codec.decode([chunk_header("tokens", 1), part])
    part[0] = 7

    assert isinstance(frame, Chunk)
    assert isinstance(frame.payload, Tokens)
    assert frame.payload.ids.view[0] == 7


def test_encoding_views_the_blob() -> None:
    data = bytearray(8)

    part = codec.encode(Chunk("r-1", 0, 0, Media("x/y", Blob(data))))[1]
    data[0] = 9

    assert isinstance(part, memoryview)
    assert part[0] == 9


def test_codec_keeps_no_blob_of_an_earlier_frame() -> None:
    blob = bytearray(16)

    parts = codec.encode(Chunk("r-1", 0, 0, Media("x/y", Blob(blob))))
    codec.decode(parts)
    del parts

    blob.append(0)  # raises BufferError while any view of it lives


@pytest.mark.parametrize("number", [0, 2, -1, 2**63, True, 1.0, "1", None, [1], {}], ids=repr)
def test_wrong_blob_number_is_a_bad_frame(number: Any) -> None:
    with pytest.raises(BadFrame, match="blob"):
        codec.decode([chunk_header("tokens", number), b"\0\0\0\0"])


def test_second_reference_to_a_blob_is_refused() -> None:
    # An AdminReply's result is untyped, so an integer there refers to nothing; only typed places do.
    with pytest.raises(BadFrame, match="2 blobs came, the header refers to 1"):
        codec.decode([chunk_header("tokens", 1), b"\0\0\0\0", b"\0\0\0\0"])
    with pytest.raises(BadFrame, match="blob 1 where 1 of 0 was due"):
        codec.decode([chunk_header("tokens", 1)])
    with pytest.raises(BadFrame, match="1 blobs came, the header refers to 0"):
        codec.decode([pack(["Ping", 1]), b"x"])


@pytest.mark.parametrize("parts", [[], [b""], [b"x"] * (MAX_PARTS + 1), [b"\xc1"], [b"\x90"], [b"\xc0"]], ids=len)
def test_shapeless_messages_are_bad_frames(parts: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        codec.decode(parts)


def test_header_over_its_limit_is_refused_both_ways() -> None:
    text = "x" * MAX_HEADER_BYTES
    with pytest.raises(BadFrame, match="header of at most"):
        codec.decode([pack(["Chunk", "r-1", 0, 0, ["text", text]])])
    with pytest.raises(BadFrame, match="allowed: 16777216"):
        codec.encode(Chunk("r-1", 0, 0, Text(text)))


@pytest.mark.parametrize(
    "length",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["array", "map", "text", "bytes", "extension"],
)
def test_huge_length_prefix_is_a_bad_frame(length: bytes) -> None:
    for header in (length, raw_json_chunk(length), b"\x95\xa5Chunk" + length):
        with pytest.raises(BadFrame):
            codec.decode([header])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k"], ids=["lists", "maps"])
@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 500, 900, 5_000, 1_000_000])
def test_nesting_without_end_is_a_bad_frame(opening: bytes, depth: int) -> None:
    with pytest.raises(BadFrame, match=r"nested|recursion"):
        codec.decode([raw_json_chunk(opening * depth + b"\xc0")])


def test_nesting_up_to_the_limit_is_read() -> None:
    frame = codec.decode([raw_json_chunk(b"\x91" * MAX_NESTING + b"\xc0")])

    assert codec.decode(codec.encode(frame)) == frame


@pytest.mark.parametrize(
    "value",
    [
        b"\xd4\x05\x00",  # extension type 5
        b"\xd6\xff\x00\x00\x00\x00",  # a date
        b"\xc4\x01\x00",  # bytes
        b"\x81\x01\x02",  # a map with an integer key
        b"\x81\x90\x02",  # a map with a list as key
        b"\x81\x80\x02",  # a map with a map as key
    ],
    ids=bytes.hex,
)
def test_values_that_json_lacks_are_bad_frames(value: bytes) -> None:
    with pytest.raises(BadFrame):
        codec.decode([raw_json_chunk(value)])
    with pytest.raises(BadFrame):
        codec.decode([b"\x93\xaaAdminReply\x01" + value])


@pytest.mark.parametrize("invalid", [b"\xa1\xff", b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80"], ids=bytes.hex)
def test_invalid_utf8_is_a_bad_frame(invalid: bytes) -> None:
    for header in (b"\x92\xa8Progress" + invalid, b"\x92" + invalid + b"\x01", raw_json_chunk(invalid)):
        with pytest.raises(BadFrame):
            codec.decode([header])


ROUTE = Route("r-1", "chat", Peer("gateway", 1, "ipc://g"), {}, (RouteEdge("in", "a", "out", "b", "text", 8, 1024),))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_seconds_that_no_timer_takes_are_bad_frames(number: float) -> None:
    error = ErrorInfo("overloaded", "full", retry_after_s=number)
    for frame in (
        Submit("r-1", "chat", ("text",), timeout_s=number),
        Welcome(1, Peer("coordinator", 1, "ipc://c"), number),
        Failed("r-1", error),
        AdminReply(1, None, error),
        Open(msgspec.structs.replace(ROUTE, timeout_s=number), 0),
    ):
        with pytest.raises(BadFrame, match="finite"):
            codec.decode(codec.encode(frame))


@pytest.mark.parametrize(
    "frame",
    [
        Chunk("r-1", -1, 0, Text("a")),
        Chunk("r-1", 0, -1, Text("a")),
        Chunk("r-1", 0, 0, Text("a", num_tokens=-1)),
        Credit("r-1", 0, -1, 0),
        Credit("r-1", 0, 0, -1),
        Close("r-1", 0, -1),
        Open(ROUTE, 1),
        Open(ROUTE, -1),
        Open(msgspec.structs.replace(ROUTE, edges=()), 0),
        Welcome(1, Peer("coordinator", 1, "ipc://c"), 0.0),
        Progress("load", float("nan")),
        Chunk("r-1", 0, 0, Tensor("float32", (-1, -1), Blob(b"\0\0\0\0"))),
    ],
    ids=repr,
)
def test_numbers_out_of_range_are_bad_frames(frame: AnyFrame) -> None:
    with pytest.raises(BadFrame):
        codec.decode(codec.encode(frame))


@pytest.mark.parametrize(
    "frame",
    [
        Ping(2**64),
        Admin(1, "op", {"a": object()}),
        Chunk("r-1", 0, 0, Text("\ud800")),
        Close("r-1", 0, 0, Finish(detail={"a": {1, 2}, "b": 1j})),
    ],
    ids=["int", "object", "surrogate", "complex"],
)
def test_frame_without_a_form_on_the_wire_is_refused(frame: AnyFrame) -> None:
    with pytest.raises(BadFrame, match="can't be encoded"):
        codec.encode(frame)


def test_endless_value_is_refused_by_the_encoder() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(BadFrame, match="can't be encoded"):
        codec.encode(Chunk("r-1", 0, 0, Json(value)))


def test_bad_frame_leaves_the_codec_usable() -> None:
    with pytest.raises(BadFrame):
        codec.decode([chunk_header("tokens", 1, 2), b"\0"])
    with pytest.raises(BadFrame):
        codec.encode(Admin(1, "op", {"blob": Blob(b"1"), "no": object()}))

    assert codec.encode(Ping(1)) == [pack(["Ping", 1, False])]
    assert codec.decode([pack(["Ping", 1])]) == Ping(1)


# --- fuzz: every outcome is a frame or BadFrame ---------------------------------------------------------------


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes_never_crash(parts: list[bytes]) -> None:
    decoded_or_bad(parts)


@settings(max_examples=1500, deadline=None)
@given(frames, st.data())
def test_flipped_bits_never_crash(frame: AnyFrame, data: st.DataObject) -> None:
    header, *rest = codec.encode(frame)
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    decoded_or_bad([bytes(damaged), *rest])


@settings(max_examples=300, deadline=None)
@given(frames)
def test_truncated_header_is_a_bad_frame(frame: AnyFrame) -> None:
    header, *rest = codec.encode(frame)
    step = max(1, len(header) // 40)
    for end in range(0, len(header), step):
        assert decoded_or_bad([bytes(header[:end]), *rest]) is None


@settings(max_examples=500, deadline=None)
@given(payloads, st.integers(0, 4), st.integers(-9, 9))
def test_blobs_too_many_or_of_other_length_never_crash(payload: Any, num_blobs: int, longer_by: int) -> None:
    header, *blobs = codec.encode(Chunk("r-1", 0, 0, payload))
    blob = bytes(blobs[0]) if blobs else b""
    blob = blob + b"\0" * longer_by if longer_by >= 0 else blob[:longer_by]

    frame = decoded_or_bad([header, *[blob] * num_blobs])

    assert frame is None or num_blobs == len(blobs)


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from([cls.__name__ for cls in FRAME_TYPES]),
    st.lists(plain_values | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=5), max_size=8),
)
def test_right_tag_with_wrong_fields_never_crashes(tag: str, fields: list[Any]) -> None:
    decoded_or_bad([pack([tag, *fields])])


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(
        ["text", "tokens", "tensor", "audio", "image", "video", "codes", "hidden", "latents", "json", "media"]
    ),
    st.lists(
        st.sampled_from(
            [
                0,
                1,
                1,
                1,
                -1,
                3,
                2**31,
                2**63 - 1,
                2**64 - 1,
                0.0,
                float("nan"),
                float("inf"),
                "s16",
                "bfloat16",
                "",
                None,
            ]
        )
        | st.lists(st.sampled_from([0, 1, 2, -1, 2**40, 2**63 - 1]), max_size=18),
        max_size=8,
    ),
    st.integers(0, 2),
)
def test_hostile_payload_headers_never_crash(kind: str, fields: list[Any], num_blobs: int) -> None:
    frame = decoded_or_bad([chunk_header(kind, *fields), *[b"\0" * 4] * num_blobs])

    match frame:
        case Chunk(payload=Record() as record):
            unpack(record)
        case Chunk(payload=payload) if not isinstance(payload, (Text, Json, Media, Record)):
            from omni_bus.wire import buffers

            buffers.view(payload)


def test_every_messagepack_opening_stays_typed() -> None:
    """Every first byte with every second byte: the whole table of MessagePack openings."""
    for first in range(256):
        for second in range(256):
            decoded_or_bad([struct.pack("BB", first, second) + b"\xa4Ping\x01" * 3])


def test_stored_blob_travels_as_a_reference() -> None:
    stored: dict[int, Blob] = {}

    def store(blob: Blob) -> Reference | None:
        stored[len(stored) + 1] = blob
        return Reference(1, 2, 3, len(blob), len(stored))

    sender = Codec(store=store, store_from_bytes=10)
    receiver = Codec(fetch=lambda reference: stored[reference.generation].view)

    for data, num_parts in ((b"x" * 10, 1), (b"x" * 9, 2)):
        frame = Chunk("r", 0, 0, Media("x/y", Blob(data)))
        parts = sender.encode(frame)
        assert len(parts) == num_parts
        assert receiver.decode(parts) == frame
    assert len(stored) == 1


def test_blob_that_is_not_stored_travels_as_a_part() -> None:
    frame = Chunk("r", 0, 0, Media("x/y", Blob(b"x" * 10)))

    assert Codec(store=lambda _: None).encode(frame) == Codec().encode(frame)


@pytest.mark.parametrize(
    "reference",
    [[], [1, 2, 3, 4], [1, 2, 3, 4, "5"], [1, 2, 3, 4, None], [1, 2, 3, 4, 1.5], [[1], 2, 3, 4, 5], [True, 2, 3, 4, 5]],
)
def test_ill_formed_reference_is_a_bad_frame(reference: list[Any]) -> None:
    header = msgspec.msgpack.encode(["Chunk", "r", 0, 0, ["media", "x/y", reference]])

    def fetch(_: Reference | DeviceReference) -> memoryview:
        raise AssertionError

    with pytest.raises(BadFrame):
        Codec(fetch=fetch).decode([header])


def test_reference_without_shared_memory_is_a_bad_frame() -> None:
    header = msgspec.msgpack.encode(["Chunk", "r", 0, 0, ["media", "x/y", [1, 2, 3, 4, 5]]])

    with pytest.raises(BadFrame, match="blob"):
        Codec().decode([header])


def test_chunk_whose_reference_means_nothing_is_still_known() -> None:
    parts = Codec(store=lambda _: Reference(1, 2, 3, 4, 5)).encode(Chunk("r", 3, 7, Media("x/y", Blob(b"x"))))

    def fetch(reference: Reference | DeviceReference) -> memoryview:
        raise ValueError(f"nothing at {reference.offset}")

    codec = Codec(fetch=fetch)
    with pytest.raises(BadChunk, match="nothing at 3") as caught:
        codec.decode(parts)

    assert caught.value.chunk == Chunk("r", 3, 7, Unreadable("nothing at 3"))  # type: ignore[arg-type]
    fine = Chunk("r", 0, 0, Media("x/y", Blob(b"x")))
    assert codec.decode(Codec().encode(fine)) == fine
