"""What is told of each actor: of those who are here, and of those who should be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_bus.core.absence import Absences
    from omni_bus.core.administration import Administration
    from omni_bus.core.binding import Bindings
    from omni_bus.core.membership import Actor, Membership
    from omni_bus.core.request import Request
    from omni_bus.ids import RequestId


class Roster:
    """Reads the coordinator's tables; changes nothing."""

    def __init__(
        self,
        membership: Membership,
        absences: Absences,
        administration: Administration,
        bindings: Bindings,
        requests: dict[RequestId, Request],
    ) -> None:
        self._membership = membership
        self._absences = absences
        self._administration = administration
        self._bindings = bindings
        self._requests = requests

    def marks(self, actor: Actor) -> dict[str, Any]:
        """Return what a row about an actor says beside the actor's own word."""
        return self._administration.describe(actor, self.outstanding(actor.peer.actor))

    def present(self, now: float) -> list[dict[str, Any]]:
        """Return a row for each actor that is here."""
        return [
            {
                **actor.row(now),
                "seen_s_ago": round(now - actor.seen_at, 3),
                "outstanding": self._bindings.outstanding(actor.sender),
                **self.marks(actor),
            }
            for actor in self._membership
        ]

    def absent(self, now: float) -> list[dict[str, Any]]:
        """Return a row for each replica that should be here and is not."""
        rows = self._absences.rows(now)
        known = {*(actor.peer.actor for actor in self._membership), *(row["actor"] for row in rows)}
        rows += self._administration.unheard(known)
        return [row | self._administration.marks(row["actor"], row["stage"]) for row in rows]

    def outstanding(self, name: str) -> int:
        """Return in how many requests an actor takes part: bound to a stage's replica, or asked for by a client.

        At least one for a replica of which a new coordinator can't tell yet.
        """
        actor = self._membership.named(name)
        if actor is None:
            return int(self._administration.is_unsure(name))
        if actor.role == "stage":
            return max(self._bindings.outstanding(actor.sender), int(self._administration.is_unsure(name)))
        return sum(1 for entry in self._requests.values() if entry.client == actor.peer and entry.error is None)

    def takes_part(self, name: str) -> list[tuple[RequestId, Request]]:
        """Return the requests that an actor takes part in."""
        return [
            (request, entry)
            for request, entry in self._requests.items()
            if name == entry.client.actor or any(name == peer.actor for peer in entry.pending.values())
        ]
