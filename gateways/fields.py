"""Fields of a JSON body: each is converted alone, so that a refusal names the field, the value and what is allowed."""

from __future__ import annotations

import functools
import typing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from omni_bus.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection

StructT = TypeVar("StructT", bound=msgspec.Struct)


def read_fields(cls: type[StructT], body: dict[str, Any], *, prefix: str = "") -> StructT:
    """Return the Struct's fields from `body`; null means absent, keys that the Struct doesn't have are left alone.

    Each field's type says in words what is allowed, as ``Annotated[..., Meta(description="a number from 0 to 2")]``.

    Raises:
        BadInput: a field is missing or has another type or value.
    """
    values: dict[str, Any] = {}
    for field, key, kind, is_required in _fields_of(cls):
        raw = body.get(key)
        if raw is None:
            if is_required:
                raise BadInput(f"{prefix}{key}: missing (allowed: {_words(kind)})", field=f"{prefix}{key}")
            continue
        try:
            values[field] = msgspec.convert(raw, kind)
        except msgspec.ValidationError:
            raise refusal(f"{prefix}{key}", raw, _words(kind)) from None
    return cls(**values)


class _Field(NamedTuple):
    name: str
    key: str
    """In a body."""
    kind: Any
    is_required: bool


@functools.cache
def _fields_of(cls: type[msgspec.Struct]) -> tuple[_Field, ...]:
    """Look a Struct's fields up once: their annotations are text and would be compiled each time."""
    return tuple(
        _Field(field.name, field.encode_name, field.type, field.required) for field in msgspec.structs.fields(cls)
    )


def names_of(*structs: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of Structs by the names that bodies have for them."""
    return frozenset(field.key for struct in structs for field in _fields_of(struct))


def refuse_unknown(body: dict[str, Any], known: Collection[str], *, prefix: str = "") -> None:
    """Refuse a field that nobody reads: it would be taken and do nothing. Null asks for nothing.

    Raises:
        BadInput: names the first such field, and the known one that it resembles.
    """
    for name, value in body.items():
        if name not in known and value is not None:
            place = f"{prefix}{name[:80]}"
            hint = did_you_mean(name[:80], known)
            raise BadInput(f"{place}: unknown field{hint} (allowed: the fields in /openapi.json)", field=place)


def refusal(name: str, value: Any, allowed: str) -> BadInput:
    """Return the error for a field's value."""
    return BadInput(f"{name}: {shown(value)} came (allowed: {allowed})", field=name)


def shown(value: Any) -> str:
    """Return a value as an error may show it: short, and without the text of a prompt."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)[:40]
        case str():
            return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _words(kind: Any) -> str:
    """Return the description that a type carries; looks through unions."""
    if typing.get_origin(kind) is typing.Annotated:
        for extra in typing.get_args(kind)[1:]:
            if isinstance(extra, msgspec.Meta) and extra.description:
                return extra.description
    for argument in typing.get_args(kind):
        if found := _words(argument):
            return found
    return ""
