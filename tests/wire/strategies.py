"""Hypothesis strategies made from the wire types themselves, so that a new frame or field is covered by being declared.

Import as ``from strategies import frames`` in a test of this folder (it puts its folder on the path), or load by path.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from omni_bus.wire.frames import AnyFrame, Chunk, Open, Route, Welcome
from omni_bus.wire.payloads import (
    DTYPE_BYTES,
    IMAGE_CHANNELS,
    SAMPLE_BYTES,
    Audio,
    Blob,
    Candidate,
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
    Token,
    Tokens,
    Video,
)

FRAME_TYPES: tuple[type[AnyFrame], ...] = AnyFrame.__args__  # type: ignore[attr-defined]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e9)
plain_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


def blobs(num_bytes: int) -> st.SearchStrategy[Blob]:
    """Return blobs of one length."""
    return st.binary(min_size=num_bytes, max_size=num_bytes).map(Blob)


def _product(*sides: int) -> int:
    total = 1
    for side in sides:
        total *= side
    return total


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, tuple[int, ...], Blob]:
    """Return dtype, shape and matching bytes."""
    dtype, shape = draw(dtypes), draw(shapes)
    return dtype, shape, draw(blobs(_product(*shape) * DTYPE_BYTES[dtype]))


@st.composite
def audio(draw: st.DrawFn) -> Audio:
    """Return whole frames of sound."""
    channels, kind = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(SAMPLE_BYTES)))
    data = draw(blobs(draw(st.integers(0, 20)) * channels * SAMPLE_BYTES[kind]))
    return Audio(draw(st.integers(1, 384_000)), channels, kind, data)  # type: ignore[arg-type]


@st.composite
def images(draw: st.DrawFn) -> Image:
    """Return small pictures."""
    height, width, channels = draw(st.integers(0, 6)), draw(st.integers(0, 6)), draw(st.sampled_from(IMAGE_CHANNELS))
    return Image(height, width, channels, draw(blobs(height * width * channels)))


@st.composite
def videos(draw: st.DrawFn) -> Video:
    """Return a few small frames."""
    n, height, width = draw(st.integers(0, 3)), draw(st.integers(0, 4)), draw(st.integers(0, 4))
    num, den = draw(st.integers(1, 1001)), draw(st.integers(1, 90_000))
    return Video(draw(counts), n, height, width, num, den, draw(blobs(n * height * width * 3)))


@st.composite
def codes(draw: st.DrawFn) -> Codes:
    """Return a few frames of codec codes."""
    n, books = draw(st.integers(0, 5)), draw(st.integers(0, 8))
    return Codes(n, books, draw(st.floats(0.1, 1000)), draw(blobs(n * books * 4)))


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Return a map or list with a few arrays and scalars in it."""
    value: dict[str, Any] = {"rest": draw(plain_values), "list": [None, None]}
    arrays: list[RecordArray] = []
    offset = 0
    places = draw(st.lists(st.sampled_from([("a",), ("b c",), ("list", 0), ("list", 1)]), max_size=4, unique=True))
    for path in places:
        holder: Any = value if len(path) == 1 else value["list"]
        if draw(st.booleans()):
            dtype, scalar = draw(st.sampled_from([("<f4", 1.5), ("|b1", True), ("<i2", -7), ("<U3", "xyz")]))
            holder[path[-1]] = scalar
            arrays.append(RecordArray(path, dtype, None))
            continue
        holder[path[-1]] = None
        dtype, item_bytes = draw(st.sampled_from([("<f4", 4), ("|u1", 1), (">i8", 8), ("<U2", 8), ("|b1", 1)]))
        shape = draw(shapes)
        arrays.append(RecordArray(path, dtype, shape, offset))
        offset += _product(*shape) * item_bytes + draw(st.integers(0, 3))
    return Record(value, tuple(arrays), draw(blobs(offset)))


candidates = st.builds(Candidate, counts, st.floats(allow_nan=False), st.binary(max_size=8))
tokens = st.builds(
    Token,
    counts,
    st.binary(max_size=8),
    st.none() | st.floats(allow_nan=False),
    st.lists(candidates, max_size=3).map(tuple),
)

payloads: st.SearchStrategy[Payload] = st.one_of(
    st.builds(Text, texts, counts, st.lists(tokens, max_size=3).map(tuple)),
    st.integers(0, 20).flatmap(lambda n: blobs(n * 4)).map(Tokens),
    arrays().map(lambda array: Tensor(*array)),  # type: ignore[arg-type]
    audio(),
    images(),
    videos(),
    codes(),
    st.builds(lambda position, array: Hidden(position, *array), counts, arrays()),
    st.builds(lambda step, num, array: Latents(step, num, *array), counts, counts, arrays()),
    st.builds(Json, plain_values),
    st.builds(Media, texts, st.binary(max_size=50).map(Blob)),
    records(),
)


def of_type(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for one type as msgspec sees it."""
    match kind:
        case inspect.StrType():
            return texts
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return counts
        case inspect.FloatType():
            return seconds
        case inspect.NoneType():
            return st.none()
        case inspect.BytesType():
            return st.binary(max_size=70)
        case inspect.AnyType():
            return plain_values
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.UnionType(types=types):
            return st.one_of([of_type(each) for each in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(of_type(item), max_size=3).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=3)
        case inspect.StructType(cls=cls):
            return of_struct(cls)
        case _:
            raise NotImplementedError(f"teach strategies.py to make {kind}")


def of_struct(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for one Struct: each field from its type, with the few rules that types don't say."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    if cls is Chunk:
        return st.builds(Chunk, texts, counts, counts, payloads)
    if cls is Open:
        routes = of_struct(Route).filter(lambda route: len(route.edges) > 0)
        params = st.dictionaries(texts, st.dictionaries(texts, plain_values, max_size=2), max_size=2)
        return routes.flatmap(
            lambda route: st.builds(Open, st.just(route), st.integers(0, len(route.edges) - 1), params)
        )
    fields = {field.name: of_type(field.type) for field in info.fields}
    if cls is Welcome:
        fields["heartbeat_s"] = st.floats(0.001, 1e9)
    return st.builds(cls, **fields)


frames: st.SearchStrategy[AnyFrame] = st.one_of([of_struct(cls) for cls in FRAME_TYPES])
