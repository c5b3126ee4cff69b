"""What clients of live conversations send: a frame becomes a JSON object, and its fields become values.

Everything here raises `SessionError`, which a socket passes on to its session as `Refuse`, so that the ``error`` event
comes in order with what was done before.
"""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from gateways.fields import shown
from gateways.json_body import MAX_JSON_WEIGHT, BodyBuffer, JsonWeight
from omni_bus.core.session.client_events import Refuse
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import converted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from omni_bus.core.session.client_events import AnyClientEvent

KindT = TypeVar("KindT")

MAX_EVENT_BYTES = 15 * 1024 * 1024
"""Of one frame; a longer one is refused and the session goes on (OpenAI's limit of an append)."""

EXACT = 2**53
"""Up to here a float is one whole number and no other."""

MAX_INTEGER = 2**63 - 1
"""Of MessagePack, which events have inside."""

MAX_ID_CHARACTERS = 512
"""Of a client's `event_id`; longer ones are not echoed."""


async def read_frame(text: str) -> dict[str, Any]:
    """Return a text frame's JSON object.

    Raises:
        SessionError: it is too large, or no JSON object.
    """
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MAX_EVENT_BYTES:
        raise SessionError(Code.EVENT_TOO_LARGE, f"event: {len(data)} bytes came (allowed: {MAX_EVENT_BYTES})")
    weight = JsonWeight()
    weight.add(data)
    if weight.total > MAX_JSON_WEIGHT:
        raise SessionError(Code.EVENT_TOO_LARGE, "event: its JSON has too many values")
    body = BodyBuffer(None)
    body.add(data)
    try:
        document = await body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SessionError(Code.INVALID_JSON, f"event: it is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise SessionError(Code.INVALID_EVENT, f"event: {shown(document)} came (allowed: a JSON object)")
    return cast("dict[str, Any]", document)


def with_plain_numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event whose whole numbers are integers: some clients write 1000.0 for 1000.

    Raises:
        SessionError: an integer is larger than events inside can be, or the event nests too deep.
    """
    try:
        return cast("dict[str, Any]", _plain(fields, "event"))
    except RecursionError:
        raise SessionError(Code.INVALID_JSON, "event: it nests too deep") from None


def _plain(value: Any, at: str) -> Any:
    match value:
        case dict():
            fields = cast("dict[str, Any]", value)
            return {name: _plain(field, f"{at}.{name}") for name, field in fields.items()}
        case list():
            items = cast("list[Any]", value)
            return [_plain(item, f"{at}[{index}]") for index, item in enumerate(items)]
        case float() if value.is_integer() and abs(value) <= EXACT:
            return int(value)
        case int() if not -MAX_INTEGER <= value <= MAX_INTEGER:
            param = at.removeprefix("event.")
            message = f"{param}: {shown(value)} came (allowed: integers of 64 bits)"
            raise SessionError(Code.INVALID_VALUE, message, param=param)
        case _:
            return value


def event_id_of(fields: Mapping[str, Any]) -> str | None:
    """Return the client's name for its event, if it gave one that can be echoed."""
    name = fields.get("event_id")
    return name if isinstance(name, str) and len(name) <= MAX_ID_CHARACTERS else None


def type_of(fields: Mapping[str, Any]) -> str:
    """Return an event's type.

    Raises:
        SessionError: it has none.
    """
    name = fields.get("type")
    if not isinstance(name, str):
        came = "it is missing" if name is None else f"{shown(name)} came"
        code = Code.MISSING_PARAMETER if name is None else Code.INVALID_VALUE
        raise SessionError(code, f"type: {came} (allowed: the name of an event)", param="type")
    return name


def unknown_event(name: str, known: Collection[str]) -> SessionError:
    """Return the refusal of an event that a dialect does not have."""
    return SessionError(
        Code.UNKNOWN_EVENT, f"type: {shown(name)} came (allowed: {', '.join(sorted(known))})", param="type"
    )


def refusal(error: SessionError, event_id: str | None, *, is_append: bool = False) -> Refuse:
    """Return what tells a session of something that could not be read."""
    return Refuse(
        code=error.code.name, message=error.message, param=error.param, event_id=event_id, is_append=is_append
    )


def read_as(fields: Mapping[str, Any], kind: type[KindT], *names: str, **values: Any) -> KindT:
    """Return an event of `kind` with the named fields of a client's, null and absent ones left out.

    Raises:
        SessionError: a field is missing or has a value that is not allowed.
    """
    found = {name: fields[name] for name in ("event_id", *names) if fields.get(name) is not None}
    if event_id_of(fields) is None:
        found.pop("event_id", None)
    return converted(found | values, kind, at="")


def table(fields: Mapping[str, Any], name: str, *, at: str = "") -> dict[str, Any]:
    """Return a field that is an object; empty where it is absent or null.

    Raises:
        SessionError: it is something else.
    """
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        param = f"{at}{name}"
        raise SessionError(Code.INVALID_VALUE, f"{param}: {shown(value)} came (allowed: an object)", param=param)
    return cast("dict[str, Any]", value)


def sound(fields: Mapping[str, Any], *names: str) -> bytes:
    """Return the sound of an append, under the first of these names that it has.

    Raises:
        SessionError: it is missing, or no base64.
    """
    name = next((name for name in names if fields.get(name) is not None), names[0])
    return base64_bytes(fields.get(name), name)


def base64_bytes(value: Any, name: str) -> bytes:
    """Return the bytes of base64 (RFC 4648, section 4).

    Raises:
        SessionError: it is missing, or no base64.
    """
    if value is None:
        raise SessionError(Code.MISSING_PARAMETER, f"{name}: is missing (allowed: base64)", param=name)
    try:
        return binascii.a2b_base64(cast("str", value), strict_mode=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise SessionError(Code.INVALID_AUDIO, f"{name}: {shown(value)} came: {error}", param=name) from None


def refuse_keys(fields: Mapping[str, Any], known: Collection[str], at: str) -> None:
    """Refuse a field that nobody reads; null asks for nothing.

    Raises:
        SessionError: names the first.
    """
    for name, value in fields.items():
        if name not in known and value is not None:
            param = f"{at}.{name}"
            raise SessionError(Code.UNKNOWN_PARAMETER, f"{param}: no such field", param=param)


def without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null, at any depth."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: without_nulls(field) for name, field in fields.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(field) for field in cast("list[Any]", value)]
    return value


Events = list["AnyClientEvent"]
