"""A bounded round trip to every actor: ping all, wait for the answers or for a timer, then report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import to_builtins
from msgspec.structs import asdict

from omni_bus.core.effects import Common, DropTimer, Send, SetTimer
from omni_bus.wire.frames import AdminReply, Ping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.core.membership import Actor
    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.frames import Pong

ROUND_TRIP_S = 1.0
"""An actor that does not answer a ping within this is not healthy."""

Marks: TypeAlias = "Callable[[Actor], dict[str, Any]]"


def unmarked(actor: Actor) -> dict[str, Any]:
    """Return no further fields."""
    return {}


class _Round:
    def __init__(
        self, asker: Peer, call: int, actors: list[Actor], absent: list[dict[str, Any]], now: float, marks: Marks
    ) -> None:
        self.asker = asker
        self.call = call
        self.started_at = now
        self.actors = actors
        self.absent = absent
        self.waiting = {actor.sender for actor in actors}
        self.rows: dict[Sender, dict[str, Any]] = {
            actor.sender: {**actor.row(now), "is_live": False, **marks(actor)} for actor in actors
        }


class Health:
    """The rounds under way; each ends in one `AdminReply` whose result lists the actors."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}
        self._num_rounds = 0

    def begin(
        self,
        asker: Peer,
        call: int,
        actors: Iterable[Actor],
        absent: list[dict[str, Any]],
        now: float,
        marks: Marks = unmarked,
        *,
        wants_metrics: bool = False,
    ) -> list[Common]:
        """Ping every actor; rows of the absent go into the answer as they are.

        Args:
            asker: who gets the answer.
            call: which question of it this is.
            actors: whom to ping.
            absent: rows of those that should be here and are not.
            now: monotonic seconds.
            marks: further fields of an actor's row.
            wants_metrics: rows also have ``metrics``, what the actor's engine measures.
        """
        self._num_rounds += 1
        nonce = self._num_rounds
        round_ = _Round(asker, call, list(actors), absent, now, marks)
        self._rounds[nonce] = round_
        if not round_.actors:
            return self._end(nonce)
        pings: list[Common] = [Send(actor.peer, Ping(nonce, wants_metrics)) for actor in round_.actors]
        return [*pings, SetTimer(("health", str(nonce)), now + ROUND_TRIP_S)]

    def on_pong(self, sender: Sender, pong: Pong, now: float) -> list[Common]:
        """Take an answer; the last one ends the round."""
        round_ = self._rounds.get(pong.nonce)
        if round_ is None or sender not in round_.waiting:
            return []
        round_.waiting.discard(sender)
        round_.rows[sender] |= {
            "is_live": True,
            "round_trip_s": round(now - round_.started_at, 6),
            "stats": asdict(pong.stats),
            **({"metrics": to_builtins(pong.metrics)} if pong.metrics else {}),
        }
        return [] if round_.waiting else self._end(pong.nonce)

    def on_timer(self, nonce: int) -> list[Common]:
        """Time is up; who has not answered is reported as not live."""
        return self._end(nonce) if nonce in self._rounds else []

    def forget(self, asker: Peer) -> list[Common]:
        """Whoever asked is gone."""
        nonces = [nonce for nonce, round_ in self._rounds.items() if round_.asker == asker]
        for nonce in nonces:
            del self._rounds[nonce]
        return [DropTimer(("health", str(nonce))) for nonce in nonces]

    def _end(self, nonce: int) -> list[Common]:
        round_ = self._rounds.pop(nonce)
        for sender in round_.waiting:
            round_.rows[sender]["reason"] = f"does not answer (waited {ROUND_TRIP_S:g} s)"
        reply = AdminReply(round_.call, [*round_.rows.values(), *round_.absent])
        return [DropTimer(("health", str(nonce))), Send(round_.asker, reply)]
