"""Typed payloads: what a chunk carries.

Each is a tagged Struct whose bulk sits in a `Blob`, a view of raw bytes that travels as a message part of its own
and is never copied into the header. The tag is the *kind* that edges are checked by (`KINDS`).
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeAlias, cast

import msgspec

from omni_bus.errors import InputTooLarge


class Blob:
    """Raw bytes outside the header.

    Wraps any contiguous buffer without copying it; the buffer must not be modified once the blob was sent. On the
    receiving side it views the received message part, or the sender's shared memory; that memory is the sender's again
    when the last view of it is gone (slices and NumPy arrays made from it count).
    """

    __slots__ = ("__weakref__", "view")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        if view.ndim != 1 or view.format != "B":
            view = view.cast("B") if view.nbytes else memoryview(b"")  # `cast` refuses a shape with a zero
        self.view = view

    def __len__(self) -> int:
        return self.view.nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and self.view == other.view

    def __hash__(self) -> int:
        raise TypeError("a Blob is a view of mutable memory and has no hash")

    def __repr__(self) -> str:
        return f"Blob({len(self)} bytes)"


def ordinary_memory(num_bytes: int) -> Blob:
    """Return writable memory of this process alone, all zeros.

    Raises:
        ValueError: `num_bytes` is negative.
    """
    if num_bytes < 0:
        raise ValueError(f"num_bytes {num_bytes} is negative (allowed: 0 or more)")
    return Blob(bytearray(num_bytes))


Dtype: TypeAlias = Literal[
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
]
"""Element types by their common NumPy, ml_dtypes and torch name; little-endian on the wire."""

SampleFormat: TypeAlias = Literal["s16", "f32"]
"""PCM samples: signed 16-bit, or 32-bit float in [-1, 1]; little-endian, channels interleaved."""

Shape: TypeAlias = tuple[int, ...]


class Candidate(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A token that might have been chosen: its natural log-probability, and the bytes that it stands for."""

    id: int
    logprob: float
    raw: bytes


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token that was chosen; `logprob` and `candidates` (most probable first) where they were asked for."""

    id: int
    raw: bytes = b""
    logprob: float | None = None
    candidates: tuple[Candidate, ...] = ()


class Text(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="text"):
    """A piece of text; pieces of one edge concatenate. Never ends inside a character.

    `tokens` are those of this piece, where ids or log-probabilities were asked for; their bytes may run ahead of the
    text or, where text is held back, behind it.
    """

    text: str
    num_tokens: int = 0
    tokens: tuple[Token, ...] = ()


class Tokens(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="tokens"):
    """Token ids of the vocabulary that the edge's two stages share: int32."""

    ids: Blob


class Tensor(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="tensor"):
    """A dense array in C order."""

    dtype: Dtype
    shape: Shape
    data: Blob


class Audio(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="audio"):
    """PCM sound; pieces of one edge concatenate and have one rate, format and channel count."""

    rate_hz: int
    channels: int
    format: SampleFormat
    data: Blob

    @property
    def num_frames(self) -> int:
        """Samples per channel."""
        return len(self.data) // (self.channels * (2 if self.format == "s16" else 4))


class Image(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="image"):
    """One picture: uint8, (height, width, channels), channels 1 grey, 3 RGB or 4 RGBA."""

    height: int
    width: int
    channels: int
    data: Blob


class Video(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="video"):
    """Consecutive frames: uint8, (frames, height, width, 3).

    `first_frame` is the index of the first one in the whole stream; frame i is shown at
    ``i * time_base_num / time_base_den`` seconds.
    """

    first_frame: int
    num_frames: int
    height: int
    width: int
    time_base_num: int
    time_base_den: int
    data: Blob


class Codes(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="codes"):
    """Codec codes: int32, (frames, codebooks), at `frame_rate_hz`."""

    num_frames: int
    num_codebooks: int
    frame_rate_hz: float
    data: Blob


class Hidden(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="hidden"):
    """Hidden states: (tokens, width), of consecutive positions from `first_position`."""

    first_position: int
    dtype: Dtype
    shape: Shape
    data: Blob


class Latents(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="latents"):
    """Diffusion latents at denoising step `step` of `num_steps`."""

    step: int
    num_steps: int
    dtype: Dtype
    shape: Shape
    data: Blob


class Json(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="json"):
    """A small structured value (messages, actions' metadata): maps, lists, text, numbers, booleans, null."""

    value: Any


class Media(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="media"):
    """Encoded media as a client sent it or will get it, with its IANA media type."""

    media_type: str
    data: Blob


class RecordArray(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An array, a NumPy scalar or raw bytes somewhere in a `Record`."""

    path: tuple[str | int, ...]
    """Keys and indices that lead to it in the record's value."""
    dtype: str
    """NumPy's type string, ``<f4`` or ``|u1``, of either byte order, text (``<U4``) too; ``bytes`` for raw bytes."""
    shape: Shape | None
    """None for a NumPy scalar, whose number is in the value itself."""
    offset: int = 0
    """Where its bytes begin in the record's data, C order."""


class Record(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="record"):
    """A structured value with arrays in it, such as a robot's observation or its actions.

    `value` is what JSON can say; it has null wherever one of `arrays` belongs. All bytes lie in one buffer, in any
    order, with anything between: it may be the very message that a client sent.
    """

    value: Any
    arrays: tuple[RecordArray, ...]
    data: Blob


Payload: TypeAlias = Text | Tokens | Tensor | Audio | Image | Video | Codes | Hidden | Latents | Json | Media | Record

PAYLOAD_TYPES: tuple[type[Payload], ...] = (
    Text,
    Tokens,
    Tensor,
    Audio,
    Image,
    Video,
    Codes,
    Hidden,
    Latents,
    Json,
    Media,
    Record,
)

KINDS: tuple[str, ...] = tuple(str(cls.__struct_config__.tag) for cls in PAYLOAD_TYPES)
"""The names that ports and edges are declared with."""


_KIND_OF: dict[type[Payload], str] = dict(zip(PAYLOAD_TYPES, KINDS, strict=True))

TYPE_OF: dict[str, type[Payload]] = dict(zip(KINDS, PAYLOAD_TYPES, strict=True))
"""The payload's class by its tag."""


def kind_of(payload: Payload) -> str:
    """Return the payload's tag."""
    return _KIND_OF[type(payload)]


class Unreadable(msgspec.Struct, frozen=True, array_like=True, tag="unreadable"):
    """Stands on the receiving side where a chunk's payload could not be read; never travels."""

    reason: str


DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
SAMPLE_BYTES = {"s16": 2, "f32": 4}
MAX_AUDIO_CHANNELS = 1024
IMAGE_CHANNELS = (1, 3, 4)
MAX_DIMENSIONS = 16
MAX_EXTENT_BYTES = 1 << 62
"""What the sides of a shape other than zero may come to: an empty array of a huge shape has no view otherwise."""
MAX_RECORD_ARRAYS = 4096
MAX_NESTING = 64
"""Lists and maps inside each other in a JSON-like value; leaves room on the stack for whoever encodes it again."""


def _expected_bytes(payload: Payload) -> int | None:
    """Return how long the payload's blob must be; None where any length is right."""
    match payload:
        case Tensor(shape=shape) | Hidden(shape=shape) | Latents(shape=shape):
            _check_extent(shape)
            return math.prod(shape) * DTYPE_BYTES[payload.dtype]
        case Image(height=height, width=width, channels=channels):
            return height * width * channels
        case Video(num_frames=num_frames, height=height, width=width):
            return num_frames * height * width * 3
        case Codes(num_frames=num_frames, num_codebooks=num_codebooks):
            return num_frames * num_codebooks * 4
        case _:
            return None


def _check_extent(shape: Shape) -> None:
    if len(shape) > MAX_DIMENSIONS or any(side < 0 for side in shape):
        raise ValueError(f"shape {shape[:MAX_DIMENSIONS]} has a negative side or more than {MAX_DIMENSIONS} dimensions")
    if math.prod(side for side in shape if side) > MAX_EXTENT_BYTES // 8:
        raise ValueError(f"shape {shape} is larger than any array")


def check_plain(value: Any, depth: int = 0) -> None:
    """Refuse what JSON has no form for (NaN and infinities apart): extensions, bytes, dates, keys that aren't text.

    Raises:
        ValueError: names the type, or the depth.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return
    if depth >= MAX_NESTING:
        raise ValueError(f"a value is nested more than {MAX_NESTING} deep")
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                kind = type(key).__name__
                raise ValueError(f"a map has a key of type {kind}, only text is allowed")  # noqa: TRY004 (bad data)
            check_plain(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            check_plain(item, depth + 1)
    else:
        kind = type(value).__name__
        allowed = "maps, lists, text, numbers, booleans and null"
        raise ValueError(f"a {kind} where only {allowed} are allowed")  # noqa: TRY004 (bad data)


_TYPE_STRING = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9][0-9]{0,8})", re.ASCII)


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


def _check_record(record: Record) -> None:
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
        _check_extent(array.shape)
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


def check(payload: Payload) -> None:
    """Refuse a payload that is not what its header says: the blob's length, an impossible count, rate or shape.

    Raises:
        ValueError: names the kind, what came and what is allowed.
    """
    match payload:
        case Text(num_tokens=num_tokens):
            if num_tokens < 0:
                raise ValueError(f"text: num_tokens {num_tokens} is negative")
        case Json(value=value):
            check_plain(value)
        case Media():
            return
        case Record():
            _check_record(payload)
        case Tokens(ids=blob):
            if len(blob) % 4:
                raise ValueError(f"tokens: {len(blob)} bytes are not whole int32 ids")
        case Audio(rate_hz=rate_hz, channels=channels, format=fmt, data=blob):
            if rate_hz < 1 or not 1 <= channels <= MAX_AUDIO_CHANNELS:
                raise ValueError(
                    f"audio: rate_hz {rate_hz} must be at least 1, channels {channels} from 1 to {MAX_AUDIO_CHANNELS}"
                )
            if len(blob) % (channels * SAMPLE_BYTES[fmt]):
                raise ValueError(f"audio: {len(blob)} bytes are not whole {fmt} frames of {channels} channels")
        case _:
            _check_length(payload)


def _check_length(payload: Tensor | Image | Video | Codes | Hidden | Latents) -> None:
    sides = (
        getattr(payload, name, 0)
        for name in (
            "num_frames",
            "height",
            "width",
            "channels",
            "num_codebooks",
            "first_frame",
            "first_position",
            "step",
            "num_steps",
        )
    )
    if any(side < 0 for side in sides):
        raise ValueError(f"{kind_of(payload)}: a count is negative")
    match payload:
        case Image(height=height, width=width, channels=channels):
            if channels not in IMAGE_CHANNELS:
                raise ValueError(f"image: {channels} channels (allowed: 1, 3, 4)")
            _check_extent((height, width, channels))
        case Video(time_base_num=num, time_base_den=den):
            if num < 1 or den < 1:
                raise ValueError(f"video: time base {num}/{den} must be positive")
            _check_extent((payload.num_frames, payload.height, payload.width, 3))
        case Codes(num_frames=num_frames, num_codebooks=num_codebooks, frame_rate_hz=rate):
            if not 0 < rate < math.inf:
                raise ValueError(f"codes: frame_rate_hz {rate} must be positive and finite")
            _check_extent((num_frames, num_codebooks))
        case _:
            pass  # tensors, hidden states, latents: their shape is checked with their length
    expected = _expected_bytes(payload)
    if expected != len(payload.data):
        raise ValueError(f"{kind_of(payload)}: {len(payload.data)} bytes came where the header says {expected}")


HEADER_BYTES = 64
"""What a payload costs in flow control besides its bulk, so that empty chunks are not free."""


MAX_IN_HEADER_BYTES = 15 * 1024 * 1024
"""Text and JSON travel in a frame's header, which `codec.MAX_HEADER_BYTES` limits; the rest of a chunk is small."""


TOKEN_BYTES = 24
"""What the numbers of a token or a candidate take in a header, about."""


def _size_of_tokens(tokens: tuple[Token, ...]) -> int:
    return sum(
        TOKEN_BYTES + len(token.raw) + sum(TOKEN_BYTES + len(candidate.raw) for candidate in token.candidates)
        for token in tokens
    )


def size_of(payload: Payload) -> int:
    """Return the bytes that flow control charges for a payload.

    Raises:
        ValueError, OverflowError, TypeError: it has no form on the wire (a lone surrogate, an integer over 64 bits).
    """
    match payload:
        case Text(text=text):
            # Called several times for each chunk; of ASCII the length is known without encoding it.
            size = HEADER_BYTES + (len(text) if text.isascii() else len(text.encode()))
            return size + _size_of_tokens(payload.tokens) if payload.tokens else size
        case Tokens(ids=blob):
            return HEADER_BYTES + len(blob)
        case Json(value=value):
            return HEADER_BYTES + len(msgspec.msgpack.encode(value))
        case Record(value=value, arrays=arrays, data=data):
            return HEADER_BYTES * (1 + len(arrays)) + len(msgspec.msgpack.encode(value)) + len(data)
        case _:
            return HEADER_BYTES + len(payload.data)


def charge(payload: Payload) -> int:
    """Return the size of a payload that is about to be sent.

    Raises:
        InputTooLarge: text or JSON that no frame can hold.
        ValueError, OverflowError, TypeError: see `size_of`.
    """
    size = size_of(payload)
    if isinstance(payload, Text | Json):
        in_header = size
    else:
        in_header = size - len(payload.data) if isinstance(payload, Record) else 0
    if in_header > MAX_IN_HEADER_BYTES:
        raise InputTooLarge(
            f"{kind_of(payload)} of {size} bytes came (allowed: at most {MAX_IN_HEADER_BYTES})", field="payload"
        )
    return size
