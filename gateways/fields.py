"""Fields of a JSON body, read so that a refusal names the field, the value and what is allowed."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any, TypeVar

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
    given = {key: raw for key, raw in body.items() if raw is not None}
    try:
        return msgspec.convert(given, cls)
    except msgspec.ValidationError:
        refused = _first_refused(cls, given, prefix)
        if refused is None:
            raise
        raise refused from None


def _first_refused(cls: type[msgspec.Struct], given: dict[str, Any], prefix: str) -> BadInput | None:
    """Return the refusal of the first field that is missing or, in the body's order, can't be converted by itself."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    for key, field in fields.items():
        if field.required and key not in given:
            return BadInput(f"{prefix}{key}: missing (allowed: {_words(field.type)})", field=f"{prefix}{key}")
    for key, raw in given.items():
        if key in fields:
            try:
                msgspec.convert(raw, fields[key].type)
            except msgspec.ValidationError:
                return refusal(f"{prefix}{key}", raw, _words(fields[key].type))
    return None


def names_of(*structs: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields of Structs by the names that bodies have for them."""
    return frozenset(key for struct in structs for key in struct.__struct_encode_fields__)


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
