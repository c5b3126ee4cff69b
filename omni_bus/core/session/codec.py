"""Events on the edge between a gateway and a session: one chunk each, MessagePack, so that sound stays binary.

One chunk for event and sound together: neither can arrive, or be sent again, without the other.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from omni_bus.core.session.client_events import AnyClientEvent
from omni_bus.core.session.server_events import AnyServerEvent
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Blob, Media, Payload, kind_of

MEDIA_TYPE = "application/vnd.msgpack"

_client = msgspec.msgpack.Decoder(AnyClientEvent)
_server = msgspec.msgpack.Decoder(AnyServerEvent)
_Event = TypeVar("_Event")

_encoder = msgspec.msgpack.Encoder()


def encoded(event: AnyClientEvent | AnyServerEvent) -> bytes:
    """Return an event's bytes."""
    return _encoder.encode(event)


def payload_of(event: AnyClientEvent | AnyServerEvent) -> Media:
    """Return the chunk that carries an event."""
    return Media(MEDIA_TYPE, Blob(encoded(event)))


def client_event(payload: Payload) -> AnyClientEvent:
    """Return what a client said.

    Raises:
        BadInput: the payload carries no such event.
    """
    return _decoded(payload, _client)


def server_event(payload: Payload) -> AnyServerEvent:
    """Return what a session said.

    Raises:
        BadInput: the payload carries no such event.
    """
    return _decoded(payload, _server)


def _decoded(payload: Payload, decoder: msgspec.msgpack.Decoder[_Event]) -> _Event:
    if not isinstance(payload, Media) or payload.media_type != MEDIA_TYPE:
        what = payload.media_type if isinstance(payload, Media) else kind_of(payload)
        raise BadInput(f"events: {what} came (allowed: {MEDIA_TYPE})", field="events")
    try:
        return decoder.decode(payload.data.view)
    except msgspec.MsgspecError as error:
        raise BadInput(f"events: {error}", field="events") from error
