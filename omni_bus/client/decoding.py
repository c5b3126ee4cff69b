"""JSON to typed events; what is not known, or not as expected, is an event of its own and never an exception."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

E = TypeVar("E")
U = TypeVar("U")


class EventDecoder(Generic[E, U]):
    """Decodes the events of one protocol.

    Args:
        union: of Structs whose tag is the event's ``type``.
        unknown: makes the event for the rest, from its fields, none if it was no JSON object, and what was wrong.
    """

    def __init__(self, union: type[E] | Any, unknown: Callable[[Mapping[str, Any], str], U]) -> None:
        self.kinds = frozenset(kind.__struct_config__.tag for kind in get_args(union))
        """Types of events that it knows."""
        self._decoder: msgspec.json.Decoder[E] = msgspec.json.Decoder(union)
        self._unknown = unknown

    def decode(self, data: str | bytes) -> E | U:
        """Return the event."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            problem = str(error)
        try:
            fields = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            fields = {}
        return self._unknown(fields, problem)


def text_of(fields: Mapping[str, Any], name: str) -> str:
    """Return a field of an event that nobody checked; empty if it is no text."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""
