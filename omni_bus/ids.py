"""Who and what: the small value types that name actors and requests.

An actor is named by its role in the deployment (``llm.0``, ``gateway.openai.0``, ``coordinator``) and by an
incarnation, a random 64-bit number drawn at each start. The pair is the ZeroMQ routing id of every socket
through which the actor sends, so a receiver learns the sender of each frame without trusting its contents.
"""

from __future__ import annotations

import re
import secrets

import msgspec

RequestId = str
"""Unique in the deployment for longer than any tombstone lives; made by the gateway with `new_request_id`."""

EdgeId = int
"""Position of an edge in its request's route; the two ends of an edge use the same number."""

MAX_ACTOR_NAME_BYTES = 200
"""ZeroMQ allows 255 bytes of routing id; 22 are the separator, the incarnation and the mark of a second socket."""

CLIENT_PREFIX = "client."
"""Actors that connect with a client's own key are called ``client.KEY`` or ``client.KEY.ANYTHING``; no others are."""

# Exactly what `Sender` writes: `int` alone would also read "+", "-", "_", spaces and capitals, and so give one
# actor many ids.
_ROUTING_ID = re.compile(rb"(.+):([0-9a-f]{16})(?:/bulk)?", re.DOTALL)


class Sender(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The identity under which a frame arrived."""

    actor: str
    incarnation: int

    def encode(self) -> bytes:
        """Return the ZeroMQ routing id."""
        return f"{self.actor}:{self.incarnation:016x}".encode()

    def encode_bulk(self) -> bytes:
        """Return the ZeroMQ routing id of the second socket to a peer, for bulky payloads."""
        return self.encode() + b"/bulk"


class Peer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An actor that can be sent to: its name, its incarnation and the address of its inbox."""

    actor: str
    incarnation: int
    endpoint: str

    @property
    def sender(self) -> Sender:
        """The identity that this peer's own frames carry."""
        return Sender(self.actor, self.incarnation)


def parse_sender(routing_id: bytes) -> Sender | None:
    """Read a routing id back; None for one that no actor of ours would use."""
    found = _ROUTING_ID.fullmatch(routing_id)
    if found is None:
        return None
    try:
        return Sender(found[1].decode(), int(found[2], 16))
    except UnicodeDecodeError:
        return None


def new_incarnation() -> int:
    """Draw 64 random bits."""
    return secrets.randbits(64)


def new_request_id() -> RequestId:
    """Draw a request id: 96 random bits, printable."""
    return "r-" + secrets.token_hex(12)
