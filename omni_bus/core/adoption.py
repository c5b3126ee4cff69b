"""What a coordinator learns of running requests that it did not admit: it is new, or had given an actor up.

Actors list them in their `Hello`. Nobody's word is final: whoever takes part in a request has `patience_s` to say hello
too; who does not is gone, and so is, at once, who is known to have died while there was no coordinator to be told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from omni_bus.core.effects import Report, Send, SetTimer
from omni_bus.core.pipeline import OUT
from omni_bus.core.recovery import is_retry_safe, needed_stages, stage_lost
from omni_bus.core.request import Request, State
from omni_bus.errors import LinkBroken, OmniBusError, RequestCancelled, unknown_name
from omni_bus.wire.frames import Cancel, Failed, Inquire, Submit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.core.absence import Absences
    from omni_bus.core.admission import Admission
    from omni_bus.core.binding import Bindings
    from omni_bus.core.deaths import Deaths
    from omni_bus.core.effects import Common
    from omni_bus.core.membership import Actor, Membership
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.core.tombstones import Tombstones
    from omni_bus.errors import ErrorInfo
    from omni_bus.ids import Peer, RequestId, Sender
    from omni_bus.wire.frames import Hello, Route

MAX_ROUTES = 4096
"""Running requests that one hello may bring; taking so many over costs about a tenth of a second of the loop.

An actor that runs more has the others taken over as the first ones end, since its heartbeats tell of them.
"""

MAX_GIVEN_UP = 1024
"""Clients that are remembered as given up; the first of them is forgotten for one more."""


class Adoption:
    """Works on the coordinator's own tables; ends no request itself, since that is the coordinator's one place."""

    def __init__(
        self,
        pipelines: dict[str, Pipeline],
        membership: Membership,
        *,
        bindings: Bindings,
        admission: dict[str, Admission],
        requests: dict[RequestId, Request],
        tombstones: Tombstones[ErrorInfo],
        patience_s: float,
        absences: Absences,
        deaths: Deaths,
    ) -> None:
        self._pipelines = pipelines
        self._membership = membership
        self._absences = absences
        self._bindings = bindings
        self._admission = admission
        self._requests = requests
        self._tombstones = tombstones
        self._patience_s = patience_s
        self._deaths = deaths
        self._given_up: dict[Sender, None] = {}
        """Clients to whom everybody has closed the way, which may live and come back."""

    def on_leave(self, actor: Actor) -> None:
        """Note that an actor left or was given up: what was under way to a client may have been dropped."""
        if actor.role != "stage":
            self.give_up(actor.sender)

    def give_up(self, sender: Sender) -> None:
        """Note that everybody is told to close the way to an actor, which may be a client."""
        self._given_up[sender] = None
        if len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def on_hello(self, actor: Actor, hello: Hello, now: float) -> list[Common]:
        """Take over what the hello lists, and ask the actor for what it should list and does not.

        What an adopted request's former coordinator heard is unknown; and what was under way between us and an actor
        whom we know already may be lost: an end that we did not hear of, or an admission that never arrived.
        """
        listed = {route.request for route in hello.live}
        effects: list[Common] = [
            Send(actor.peer, Inquire(request))
            for request, entry in self._requests.items()
            if request not in listed and actor.peer in (entry.client, *entry.pending.values())
        ]
        for number, (route, ran_s) in enumerate(_listed(hello)):
            effects += self.adopt(actor, route, ran_s, now)
            entry = self._requests.get(route.request)
            if entry is not None and entry.is_adopted and number < len(hello.received):
                self._note_received(actor, entry, hello.received[number])
        if len(hello.live) > MAX_ROUTES:
            fields = {"name": actor.peer.actor, "listed": len(hello.live), "taken": MAX_ROUTES}
            effects.append(Report("hello lists more requests than are taken over at once", fields))
        self._given_up.pop(actor.sender, None)
        return effects

    def adopt(self, actor: Actor, route: Route, ran_s: float, now: float) -> list[Common]:
        """Learn of a request from one who takes part in it and says that it has run for `ran_s`.

        A route that touches no stage is forged: what runs over it, or instead of it, would never end.
        """
        is_client = route.gateway == actor.peer
        if (
            not route.stages
            or not needed_stages(route.edges)
            or not (is_client or route.stages.get(actor.stage) == actor.peer)
        ):
            return []
        request = route.request
        entry = self._requests.get(request)
        if entry is None and request not in self._tombstones and route.pipeline in self._pipelines:
            return self._take_over(actor, route, ran_s, now)
        if entry is not None and entry.state is State.RUNNING and entry.route == route:
            return self._shorten(entry, ran_s, now)
        if entry is not None and (entry.route != route or entry.state is State.RUNNING):
            return []
        if not is_client:
            if entry is not None and actor.stage not in entry.pending:
                entry.pending[actor.stage] = actor.peer
                self._bindings.rebind(actor.stage, actor.sender, entry.submit)
            return [Send(actor.peer, Cancel(request, "the request ended"))]
        error = self._error_for_client(route) if entry is None else entry.error
        return [] if error is None else [Send(actor.peer, Failed(request, error))]

    def missing(self, entry: Request) -> tuple[list[str], OmniBusError | None]:
        """Return the stages that are gone, and the error that the request ends with; None if none is missed.

        Without any that is known to be gone, those that have not said hello: when the patience is over, they are too.
        Where all its output has arrived nobody misses a stage.
        """
        if entry.route is None:
            return [], None
        gone = self._gone(entry)
        absent = [stage for stage, peer in entry.pending.items() if self._membership.get(peer.sender) is None]
        if not gone and self._membership.get(entry.client.sender) is None:
            return absent, RequestCancelled("the client's gateway is gone")
        if gone:
            return gone, stage_lost(gone[0], entry.route, entry.pipeline)
        finished = self._finished(entry, entry.route, absent)
        missed = [stage for stage in absent if stage not in finished]
        return absent, stage_lost(missed[0], entry.route, entry.pipeline) if missed else None

    def is_hopeless(self, entry: Request) -> bool:
        """Whether a request need not wait for whoever has not said hello: it has lost an actor for certain.

        A client that may still say hello is waited for: to tell it of a successor it has to be here.
        """
        if self._membership.get(entry.client.sender) is None:
            return self._is_gone(entry.client)
        return bool(self._gone(entry))

    def _gone(self, entry: Request) -> list[str]:
        """Return the stages whose replica certainly is no more and is missed, whatever patience it has left.

        Another incarnation bears its name, or its supervisor says so of its process or of its name; and somebody lacks
        its output.
        """
        route = entry.route
        if route is None:
            return []
        return [
            stage for stage, peer in entry.pending.items() if self._is_gone(peer) and _is_missed(entry, route, stage)
        ]

    def _is_gone(self, peer: Peer) -> bool:
        if self._deaths.has_cut_short(peer.sender):
            return True
        present = self._membership.named(peer.actor)
        return self._absences.is_away(peer.actor) if present is None else present.sender != peer.sender

    def _note_received(self, actor: Actor, entry: Request, sources: tuple[str, ...]) -> None:
        """Remember whose whole output an actor has; only what takes part in the request counts."""
        route = entry.route
        if route is None or len(sources) > len(route.edges):
            return
        targets = [stage for stage, peer in route.stages.items() if peer == actor.peer]
        targets += [OUT] if route.gateway == actor.peer else []
        for target in targets:
            entry.received.setdefault(target, set()).update(source for source in sources if source in route.stages)

    def note_unheard(self, actor: Actor, request: RequestId) -> bool:
        """Remember that a stage has received nothing of an adopted request; return whether that makes it hopeless.

        Without that, nobody could tell whether a replica before it has died before or after its last word.
        """
        entry = self._requests.get(request)
        if entry is None or not entry.is_adopted or entry.pending.get(actor.stage) != actor.peer:
            return False
        if actor.stage in entry.received:
            return False
        entry.received[actor.stage] = set()
        return self.is_hopeless(entry)

    def _finished(self, entry: Request, route: Route, absent: list[str]) -> set[str]:
        """Return the stages whose output has all been received: their targets say so, or have finished themselves."""
        finished = {stage for stage in route.stages if stage not in entry.pending}
        candidates = set(absent)
        while candidates:
            found = {stage for stage in candidates if _is_received(entry, route, stage, finished)}
            if not found:
                break
            finished |= found
            candidates -= found
        return finished

    def _error_for_client(self, route: Route) -> ErrorInfo | None:
        """What a client that still waits for an ended request is told; None if its last chunks are under way.

        They are not if it was given up since: whoever was told that has dropped what it could not yet send.
        """
        pipeline = self._pipelines.get(route.pipeline)
        if pipeline is None:
            return unknown_name("pipeline", route.pipeline, self._pipelines, field="pipeline").to_info()
        error = self._tombstones.epitaph(route.request)
        absent = [stage for stage, peer in route.stages.items() if self._membership.get(peer.sender) is None]
        if error is None and absent:
            return stage_lost(absent[0], route, pipeline).to_info()
        if error is None and route.gateway.sender in self._given_up:
            message = f"{route.gateway.actor} was given up, and the end of the request's output may be lost"
            return LinkBroken(message, is_retry_safe=is_retry_safe(route, pipeline)).to_info()
        return error

    def _take_over(self, actor: Actor, route: Route, ran_s: float, now: float) -> list[Common]:
        """Run a former coordinator's request on, and ask all who take part what became of it."""
        request = route.request
        entry = Request(
            submit=Submit(
                request,
                route.pipeline,
                (),
                route.priority,
                route.timeout_s,
                route.key,
                route.trace,
                wants_metrics=route.wants_metrics,
            ),
            client=route.gateway,
            pipeline=self._pipelines[route.pipeline],
            edges=route.edges,
            received_at=now - ran_s,
            deadline=None if route.timeout_s is None else now + max(0.0, route.timeout_s - ran_s),
            state=State.RUNNING,
            route=route,
            pending=dict(route.stages),
            is_adopted=True,
        )
        self._requests[request] = entry
        self._admission[route.pipeline].adopt(request, route.key, now)
        for stage, peer in route.stages.items():
            self._bindings.rebind(stage, peer.sender, entry.submit)
        effects: list[Common] = [
            Send(peer, Inquire(request))
            for peer in (route.gateway, *route.stages.values())
            if peer != actor.peer and self._membership.get(peer.sender) is not None
        ]
        if entry.deadline is not None:
            effects.append(SetTimer(("deadline", request), entry.deadline))
        return [*effects, SetTimer(("adopted", request), now + self._patience_s)]

    def _shorten(self, entry: Request, ran_s: float, now: float) -> list[Common]:
        """Believe whoever says that an adopted request has run longest: a stage learns of it later than its client."""
        if not entry.is_adopted or entry.deadline is None or entry.route is None or entry.route.timeout_s is None:
            return []
        deadline = now + max(0.0, entry.route.timeout_s - ran_s)
        if deadline >= entry.deadline:
            return []
        entry.deadline, entry.received_at = deadline, now - ran_s
        return [SetTimer(("deadline", entry.route.request), deadline)]


def _listed(hello: Hello) -> Iterator[tuple[Route, float]]:
    """Pair the routes with how long each has run: nothing where that is not said, or can't be."""
    for number, route in enumerate(hello.live[:MAX_ROUTES]):
        ran_s = hello.ran_s[number] if number < len(hello.ran_s) else 0.0
        yield route, ran_s if 0.0 <= ran_s < math.inf else 0.0


def _targets(route: Route, stage: str) -> set[str]:
    return {edge.target for edge in route.edges if edge.source == stage}


def _is_received(entry: Request, route: Route, stage: str, finished: set[str]) -> bool:
    """Whether each of a stage's targets has its whole output, or has finished, and so had it."""
    targets = _targets(route, stage)
    return bool(targets) and all(target in finished or stage in entry.received.get(target, ()) for target in targets)


def _is_missed(entry: Request, route: Route, stage: str) -> bool:
    """Whether one of a stage's targets has said what it has received, and that was not all."""
    return any(stage not in entry.received.get(target, {stage}) for target in _targets(route, stage))
