"""Who is here: actors by name, their incarnations, readiness and last sign of life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.ids import Peer, Sender
from omni_bus.wire.frames import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omni_bus.wire.frames import Hello, Range

MISSED_HEARTBEATS = 5
"""So many in a row mean that an actor is lost: one can be late behind a long garbage collection, five can't."""


class Actor(msgspec.Struct):
    """One live actor."""

    peer: Peer
    role: Role
    stage: str
    replica: int
    is_ready: bool
    phase: str
    fraction: float
    since: float
    seen_at: float
    context_length: int | None = None
    """Of a stage's replica that is ready: tokens of prompt and answer together."""
    ranges: Mapping[str, Range] = {}
    """Of such a replica: the values that its model takes of parameters."""
    suspected_at: float = -1.0
    """When it had last missed all heartbeats but one."""
    level: int = 0
    """At which its engine sleeps, or was told to; 0 once it has said that it is awake."""
    told: int = 0
    """The number of the last `Rest` to it that it has not answered; 0 for none."""

    @property
    def sender(self) -> Sender:
        """The identity of its frames."""
        return self.peer.sender

    def row(self, now: float) -> dict[str, Any]:
        """Return what health and status tell of every actor."""
        return {
            "actor": self.peer.actor,
            "role": self.role,
            "stage": self.stage,
            "replica": self.replica,
            "phase": self.phase,
            "fraction": self.fraction,
            "is_ready": self.is_ready,
            "elapsed_s": round(now - self.since, 3),
            **({} if self.context_length is None else {"context_length": self.context_length}),
            **({"ranges": self.ranges} if self.ranges else {}),
        }


class Membership:
    """The table of actors; at most one incarnation of each name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Actor] = {}
        self._by_stage: dict[str, dict[str, Actor]] = {}

    def __iter__(self) -> Iterator[Actor]:
        return iter(tuple(self._by_name.values()))

    def get(self, sender: Sender) -> Actor | None:
        """The actor of that very incarnation."""
        actor = self._by_name.get(sender.actor)
        return actor if actor is not None and actor.peer.incarnation == sender.incarnation else None

    def named(self, name: str) -> Actor | None:
        """The actor of that name, whatever its incarnation."""
        return self._by_name.get(name)

    def former(self, hello: Hello) -> Actor | None:
        """Who is known under the newcomer's name and is not it, so is replaced: a former incarnation, usually."""
        actor = self._by_name.get(hello.peer.actor)
        if actor is None or (actor.peer, actor.role, actor.stage) == (hello.peer, hello.role, hello.stage):
            return None
        return actor

    def join(self, hello: Hello, now: float) -> Actor:
        """Take an actor in, or take its repeated hello."""
        known = self.get(hello.peer.sender)
        actor = Actor(
            peer=hello.peer,
            role=hello.role,
            stage=hello.stage,
            replica=hello.replica,
            is_ready=hello.is_ready,
            phase="ready" if hello.is_ready else "starting",
            fraction=0.0,
            since=now if known is None else known.since,
            seen_at=now,
            context_length=hello.context_length,
            ranges=hello.ranges,
            # It may have said this before it got the order to sleep.
            level=known.level if known is not None and known.told else hello.level,
            told=0 if known is None else known.told,
        )
        self._by_name[hello.peer.actor] = actor
        if hello.role == "stage":
            self._by_stage.setdefault(hello.stage, {})[hello.peer.actor] = actor
        return actor

    def leave(self, actor: Actor) -> None:
        """Take an actor out."""
        if self._by_name.get(actor.peer.actor) is actor:
            del self._by_name[actor.peer.actor]
            self._by_stage.get(actor.stage, {}).pop(actor.peer.actor, None)

    def present(self, stage: str) -> list[Actor]:
        """The stage's replicas, in order of their numbers."""
        return sorted(self._by_stage.get(stage, {}).values(), key=lambda actor: actor.replica)

    def replicas(self, stage: str) -> list[Actor]:
        """Those that can serve."""
        return [actor for actor in self.present(stage) if actor.is_ready]
