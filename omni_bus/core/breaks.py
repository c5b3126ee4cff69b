"""What the coordinator does about connections that break: it asks, ends what that concerns, tells, and answers.

`omni_bus.core.links` has the rules and the tables; here are the frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Report, Send, SetTimer
from omni_bus.core.links import NONCE, BrokenLinks, error_for_broken
from omni_bus.core.request import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.core.absence import Absences
    from omni_bus.core.deaths import Deaths
    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Actor, Membership
    from omni_bus.core.request import Request
    from omni_bus.errors import OmniBusError
    from omni_bus.ids import Peer, RequestId, Sender
    from omni_bus.wire.frames import Broken

    GiveUp = Callable[[RequestId, Request, OmniBusError, float], list[Common]]


class Breaks:
    """Breaks from their first word to their answer.

    Args:
        membership: who is here.
        absences: which replicas are away.
        deaths: which processes are known to have ended.
        requests: those that live; only `give_up` changes any.
        give_up: ends a request, or has it run again.
        patience_s: how long the target of a break may take to say its first hello.
    """

    def __init__(
        self,
        membership: Membership,
        absences: Absences,
        deaths: Deaths,
        requests: dict[RequestId, Request],
        give_up: GiveUp,
        patience_s: float,
    ) -> None:
        self._membership = membership
        self._absences = absences
        self._deaths = deaths
        self._requests = requests
        self._give_up = give_up
        self._patience_s = patience_s
        self._links = BrokenLinks()

    def start(self, now: float) -> list[Common]:
        """Answer none before all whom it may concern had their time.

        Whoever says hello to a new coordinator in time may have a request to be adopted, which then has as much time.
        """
        self._links.be_patient()
        return [SetTimer(("breaks", ""), now + 2 * self._patience_s)]

    def lose_patience(self) -> list[Common]:
        """Answer those that can be; call it when that timer is due."""
        return self._answer(self._links.lose_patience())

    def on_broken(self, actor: Actor, broken: Broken, now: float) -> list[Common]:
        """Take the word of the source; whether the target still lives is asked first, or seen by its hello."""
        if broken.source != actor.peer:
            return [Report("a break of somebody else", {"name": actor.peer.actor, "claims": broken.source.actor})]
        if self._links.is_settled(broken):
            return self._answer([broken]) if self._links.is_answered(broken) else []
        target = self._membership.get(broken.target.sender)
        if target is not None:
            return self._links.suspect(broken, target)
        name = broken.target.actor
        is_gone = self._membership.named(name) is not None or self._absences.is_away(name)
        is_gone = is_gone or broken.target.sender in self._deaths
        if is_gone or not self._links.keep(broken):
            return [Send(actor.peer, broken)]
        return [SetTimer(("alive", name), now + self._patience_s)]

    def on_name(self, name: str, present: Actor | None) -> list[Common]:
        """Tell the sources of breaks whose target turns out to be gone; what that means has rules of its own.

        Args:
            name: of somebody who has said hello, or has had the time to.
            present: the actor of that name.
        """
        return self._answer(self._links.settle_others(name, None if present is None else present.sender))

    def on_gone(self, sender: Sender) -> list[Common]:
        """Expect nothing more of an actor, neither a sign of life nor a confirmation."""
        return self._answer([*self._links.settle(sender), *self._links.forget(sender)])

    def on_pong(self, actor: Actor, nonce: int, now: float) -> list[Common]:
        """Take a sign of life, or a confirmation."""
        if nonce == NONCE:
            return self.on_alive(actor, now)
        return self._answer(self._links.on_pong(actor.sender, nonce))

    def on_hello(self, actor: Actor, now: float) -> list[Common]:
        """Repeat what the actor may have missed, and take its sign of life."""
        return self._links.tell_again(actor.peer) + self.on_alive(actor, now)

    def on_alive(self, actor: Actor, now: float) -> list[Common]:
        """The target of broken connections lives: end what both ends work on, since nobody can tell what is lost."""
        effects: list[Common] = []
        for broken in self._links.settle(actor.sender):
            self._links.remember(broken, now)
            effects.append(Report("connection broke", {"name": broken.source.actor, "to": broken.target.actor}))
            told: list[Peer] = []
            for request, entry in list(self._requests.items()):
                if entry.route is None or entry.state is not State.RUNNING:
                    continue
                error = error_for_broken(broken, entry.route, entry.pending, entry.pipeline)
                if error is not None:
                    told.append(entry.client)
                    effects += self._give_up(request, entry, error, now)
            # After the requests' own errors, which know more than a client can conclude from this.
            effects += [Send(actor.peer, broken), *self.confirm(broken, *told, actor.peer)]
        return effects

    def confirm(self, broken: Broken, *told: Peer) -> list[Common]:
        """Answer the source of a break once all who were told because of it have heard that."""
        present = [peer for peer in told if self._membership.get(peer.sender) is not None]
        return self._links.tell(broken, present)

    def former(self, entry: Request, now: float) -> tuple[Broken, OmniBusError] | tuple[None, None]:
        """Return a break that may have cost an adopted request frames before it was known here, and what it means."""
        if entry.route is None or entry.state is not State.RUNNING:
            return None, None
        for broken in self._links.settled_since(now - 2 * self._patience_s):
            error = error_for_broken(broken, entry.route, entry.pending, entry.pipeline)
            if error is not None:
                return broken, error
        return None, None

    def _answer(self, breaks: Iterable[Broken]) -> list[Common]:
        """Tell the sources that they need not repeat these."""
        return [
            Send(broken.source, broken) for broken in breaks if self._membership.get(broken.source.sender) is not None
        ]
