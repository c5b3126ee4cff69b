"""What becomes of each request: it is taken, bound and run, may wait for a replica, and ends.

`omni_bus.core.request` has the states. A request leaves in `_end`, the one place, and leaves a tombstone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Common, DropTimer, Report, Send, SetTimer
from omni_bus.core.intake import Intake
from omni_bus.core.pipeline import IN
from omni_bus.core.recovery import is_retry_safe, needed_stages, successor_of
from omni_bus.core.request import Request, State
from omni_bus.errors import ErrorInfo, OmniBusError, RequestCancelled, StageLost, Unavailable
from omni_bus.wire.frames import Admit, Cancel, Cancelled, Failed, Reject, Reroute, Route, Submit

if TYPE_CHECKING:
    from omni_bus.core.absence import Absences
    from omni_bus.core.admission import Admission
    from omni_bus.core.binding import Bindings
    from omni_bus.core.membership import Actor, Membership
    from omni_bus.core.recovery import Recovery
    from omni_bus.core.tombstones import Tombstones
    from omni_bus.ids import Peer, RequestId
    from omni_bus.wire.frames import AnyFrame

CANCEL_RETRY_S = 1.0
"""A cancel that is not answered within this is sent again: a reconnecting link may have lost it."""


class Lifecycle:
    """The table of requests, and the only one that takes any in or out but for adoption, which puts some in.

    Args:
        requests: those that live.
        membership: who is here.
        admission: by pipeline.
        bindings: what each replica has to do.
        intake: what must hold for a submit.
        recovery: those that wait for a replica of a stage that lost its last one.
        absences: which replicas are away.
        tombstones: ids that ended lately.
    """

    def __init__(
        self,
        requests: dict[RequestId, Request],
        membership: Membership,
        *,
        admission: dict[str, Admission],
        bindings: Bindings,
        intake: Intake,
        recovery: Recovery,
        absences: Absences,
        tombstones: Tombstones[ErrorInfo],
    ) -> None:
        self._requests = requests
        self._membership = membership
        self._admission = admission
        self._bindings = bindings
        self._intake = intake
        self._recovery = recovery
        self._absences = absences
        self._tombstones = tombstones
        self._admitting: set[str] = set()
        self.held: dict[RequestId, None] = {}
        """Those that wait for a replica that is being restarted, in order of arrival."""
        self.ended = {"done": 0, "failed": 0, "cancelled": 0, "rejected": 0, "rerouted": 0}
        """How many ended how."""

    # --- recovery -----------------------------------------------------------------------------------------

    def give_up(self, request: RequestId, entry: Request, error: OmniBusError, now: float) -> list[Common]:
        """End a request that lost an actor, and put up its successor if it may have one."""
        is_hopeless = any(self._absences.is_degraded(stage) for stage in needed_stages(entry.edges))
        found = None if self._intake.is_closed or is_hopeless else successor_of(entry, error)
        if found is None or self._intake.is_used(found[0]) or self._membership.get(entry.client.sender) is None:
            return self.end_early(request, error, now) + self.settle(request, entry, now)
        name, successor = found
        self._requests[name] = successor
        deadline = successor.deadline
        effects: list[Common] = [] if deadline is None else [SetTimer(("deadline", name), deadline)]
        # Before its predecessor's place is free, so that it goes ahead of the queue; the client hears of it later.
        is_ready = self._recovery.is_ready(successor)
        resumed = self._offer_again(name, successor, now) if is_ready else self._recovery.wait(name, successor, now)
        effects += self.end_early(request, error, now, successor=name)
        return effects + self.settle(request, entry, now) + resumed

    def resume(self, now: float) -> list[Common]:
        """Offer those for admission again whose stages all have a replica now, or one that is coming back."""
        effects: list[Common] = []
        for request, entry in self._recovery.take_ready():
            effects += [DropTimer(("recover", request)), *self._offer_again(request, entry, now)]
        return effects

    def _offer_again(self, request: RequestId, entry: Request, now: float) -> list[Common]:
        entry.move("replicas ready")
        may_run = self._admission[entry.pipeline.name].offer(entry.submit, None, now, is_back=True).may_run
        return self._run(request, entry, now) if may_run else []

    def _strand(self, request: RequestId, entry: Request, error: Unavailable, now: float) -> list[Common]:
        """Have a request whose turn it is wait for a stage that lost its last replica, if one may come in time."""
        if not self._recovery.may_wait(entry, error.stage, now):
            return self.end_early(request, error, now)
        self.held.pop(request, None)
        entry.move("no replica")
        self._admission[entry.pipeline.name].leave(request, now)
        return self._recovery.wait(request, entry, now) + self._admit_waiting(entry.pipeline.name, now)

    def end_recovery(self, request: RequestId, now: float) -> list[Common]:
        """No replica came in time."""
        error = self._recovery.error_after_wait(request, now)
        return self.resume(now) if error is None else self.end_early(request, error, now)

    # --- requests -----------------------------------------------------------------------------------------

    def on_submit(self, actor: Actor, submit: Submit, now: float) -> list[Common]:
        """A client asks: the request runs, waits, or is refused."""
        live = self._requests.get(submit.request)
        if live is not None and live.client == actor.peer:
            if submit == live.submit:
                # A refusal would end the request for its client only, who would leave its stages without credit.
                return [Report("submit came twice", {"name": actor.peer.actor, "request": submit.request})]
            if submit.attempt > live.submit.attempt:
                return self._on_repeated(submit, live)
        try:
            entry = self._intake.accept(actor.peer, submit, now)
            admission = self._admission[submit.pipeline]
            entry.is_moved = self._follow(actor, submit)
            timeout_s = None if entry.deadline is None else entry.deadline - now
            offer = admission.offer(submit, timeout_s, now, is_back=entry.is_moved)
        except OmniBusError as error:
            self.ended["rejected"] += 1
            fields = {"request": submit.request, "pipeline": submit.pipeline, "outcome": "rejected", "code": error.code}
            reject = Reject(submit.request, error.to_info(), submit.attempt)
            return [Send(actor.peer, reject), Report("request ended", fields)]
        self._requests[submit.request] = entry
        effects: list[Common] = []
        if entry.deadline is not None:
            effects.append(SetTimer(("deadline", submit.request), entry.deadline))
        if offer.pushed_out is not None:
            effects += self.end_early(offer.pushed_out, admission.overloaded(), now)
        return effects + (self._run(submit.request, entry, now) if offer.may_run else [])

    def _follow(self, actor: Actor, submit: Submit) -> bool:
        """Whether a submit gets the place of its former request, which nobody else does."""
        former = self._requests.get(submit.former)
        if former is None or former.client != actor.peer or former.state is not State.RUNNING or former.is_followed:
            return False
        had = (former.submit.pipeline, former.submit.key, former.submit.priority)
        former.is_followed = had == (submit.pipeline, submit.key, submit.priority)
        return former.is_followed

    def _on_repeated(self, submit: Submit, entry: Request) -> list[Common]:
        """Its client has not heard of a live request, and wants the answer to this attempt."""
        entry.submit = submit
        if entry.state is State.ENDING and entry.error is not None:
            return [Send(entry.client, Failed(submit.request, entry.error))]
        return [] if entry.route is None else [Send(entry.client, Admit(entry.route, submit.attempt))]

    def _run(self, request: RequestId, entry: Request, now: float) -> list[Common]:
        """Bind every needed stage and answer with the route."""
        try:
            replicas = self._intake.replicas(entry.edges, now)
        except Unavailable as error:
            return self._strand(request, entry, error, now)
        if replicas is None:
            if entry.state is State.QUEUED:
                entry.move("held")
                self.held[request] = None
            return []
        self.held.pop(request, None)
        entries = {edge.target for edge in entry.edges if edge.source == IN}
        stages = {
            name: self._bindings.bind(name, found, entry.submit, entry.pipeline.routing, is_entry=name in entries)
            for name, found in replicas.items()
        }
        entry.route = Route(
            request=request,
            pipeline=entry.pipeline.name,
            gateway=entry.client,
            stages=stages,
            edges=entry.edges,
            priority=entry.submit.priority,
            timeout_s=None if entry.deadline is None else max(0.0, entry.deadline - now),
            trace=entry.submit.trace,
            key=entry.submit.key,
            is_retry=entry.cause is not None,
            wants_metrics=entry.submit.wants_metrics,
        )
        entry.pending = dict(stages)
        entry.move("admitted")
        return [Send(entry.client, Admit(entry.route, entry.submit.attempt))]

    def run_held(self, now: float) -> list[Common]:
        """Replicas or their arrangement changed: whoever waits for one may find it, or learn that there is none."""
        effects: list[Common] = []
        for request in sorted(self.held, key=lambda request: -self._requests[request].submit.priority):
            entry = self._requests.get(request)
            if entry is not None and entry.state is State.HELD:
                effects += self._run(request, entry, now)
        return effects

    def on_cancel(self, actor: Actor, request: RequestId, reason: str, now: float) -> list[Common]:
        """A client wants nothing more of a request."""
        entry = self._requests.get(request)
        if entry is None:
            # Remembered, since a stage that still holds it may say hello only now.
            self._tombstones.bury(request, RequestCancelled(reason or "cancelled by the client").to_info())
            return [Send(actor.peer, Cancelled(request))]
        if entry.client != actor.peer:
            return [Report("cancel by a stranger", {"name": actor.peer.actor, "request": request})]
        entry.wants_ack = True
        return self.end_early(request, RequestCancelled(reason or "cancelled by the client"), now)

    def on_stage_end(
        self, actor: Actor, request: RequestId, freed: int, error: OmniBusError | None, now: float
    ) -> list[Common]:
        """A stage has finished, failed or let go; late and repeated ends change nothing."""
        entry = self._requests.get(request)
        if entry is None or entry.pending.get(actor.stage) != actor.peer:
            return []
        entry.freed += freed
        self.release(entry, actor.stage)
        if isinstance(error, StageLost) and entry.route is not None:
            # It missed chunks, or let go of a former attempt. Whether a retry is safe is for us to say, who know the
            # pipeline.
            error.is_retry_safe = is_retry_safe(entry.route, entry.pipeline)
            return self.give_up(request, entry, error, now) + self.resume(now)
        effects = [] if error is None else self.end_early(request, error, now)
        return effects + self.settle(request, entry, now)

    def on_let_go(self, actor: Actor, request: RequestId, freed: int, now: float) -> list[Common]:
        """A stage has dropped a request, as it was told to."""
        return self.on_stage_end(actor, request, freed, self._error_for_let_go(actor, request), now)

    def _error_for_let_go(self, actor: Actor, request: RequestId) -> OmniBusError:
        """Return what a request ends with that a stage let go of before we asked: a former coordinator did.

        If it ended the request, as one that we adopted, that was for its own reason. If we admitted it, an earlier
        attempt of the same id was cancelled of which the client never heard: then nothing of this one was done there.
        """
        entry = self._requests.get(request)
        if entry is None or entry.route is None or entry.is_adopted:
            return RequestCancelled(f"stage '{actor.stage}' was told to let go", stage=actor.stage)
        return StageLost(
            f"stage '{actor.stage}' (actor {actor.peer.actor}) was told to let go of a former attempt",
            stage=actor.stage,
            is_retry_safe=is_retry_safe(entry.route, entry.pipeline),
        )

    def release(self, entry: Request, stage: str) -> None:
        """One stage has nothing of the request any more."""
        self._bindings.release(stage, entry.pending.pop(stage).sender, entry.submit.request)

    def settle(self, request: RequestId, entry: Request, now: float) -> list[Common]:
        """End a request once no stage holds anything of it."""
        if entry.pending or request not in self._requests:
            return []
        if entry.state is State.RUNNING:
            entry.move("all stages done")
            return self._end(request, "done", now)
        entry.move("all stages let go")
        return self._end(request, "", now)

    def end_early(self, request: RequestId, error: OmniBusError, now: float, successor: str = "") -> list[Common]:
        """Tell the client, once, and have every stage that is still at work let go."""
        entry = self._requests.get(request)
        if entry is None or entry.state is State.ENDING:
            return []
        outcome = "rerouted" if successor else "cancelled" if isinstance(error, RequestCancelled) else "failed"
        self.ended[outcome] += 1
        was_waiting = entry.state in (State.QUEUED, State.HELD, State.RECOVERING)
        entry.move("ended early")
        entry.error = error.to_info()
        effects: list[Common] = [DropTimer(("deadline", request)), entry.account(outcome, error, now)]
        if not entry.wants_ack and not entry.has_client_left:
            frame = Failed(request, entry.error)
            if was_waiting:
                frame = Reject(request, entry.error, entry.submit.attempt)
            elif successor:
                frame = Reroute(request, successor, entry.error)
            effects += self.to_members(frame, entry.client)
        if was_waiting:
            return effects + self._end(request, "", now)
        effects += self.to_members(Cancel(request, error.code), *entry.pending.values())
        if entry.pending:
            effects.append(SetTimer(("cancel", request), now + CANCEL_RETRY_S))
        return effects + self.settle(request, entry, now)

    def retry_cancel(self, request: RequestId, now: float) -> list[Common]:
        """Tell those again that have not let go of a request that ended early."""
        entry = self._requests.get(request)
        if entry is None or not entry.pending:
            return []
        again = self.to_members(Cancel(request, "again"), *entry.pending.values())
        return [*again, SetTimer(("cancel", request), now + CANCEL_RETRY_S)]

    def to_members(self, frame: AnyFrame, *peers: Peer) -> list[Common]:
        """Send to those who are here: an adopted request may name peers that never were, and a hello tells the rest."""
        return [Send(peer, frame) for peer in peers if self._membership.get(peer.sender) is not None]

    def _end(self, request: RequestId, outcome: str, now: float) -> list[Common]:
        """The one place where a request leaves; its place goes to the next one that waits."""
        entry = self._requests.pop(request)
        self.held.pop(request, None)
        self._recovery.leave(request)
        self._tombstones.bury(request, entry.error)
        effects: list[Common] = []
        if outcome:
            self.ended[outcome] += 1
            effects.append(entry.account(outcome, None, now))
        effects += [DropTimer((kind, request)) for kind in ("deadline", "cancel", "adopted", "left", "recover")]
        if entry.wants_ack:
            effects.append(Send(entry.client, Cancelled(request, entry.freed)))
        self._admission[entry.pipeline.name].leave(request, now)
        return effects + self._admit_waiting(entry.pipeline.name, now)

    def _admit_waiting(self, pipeline: str, now: float) -> list[Common]:
        """Run whoever waits and now may; one that can't be bound ends and comes back here, which must not nest."""
        effects: list[Common] = []
        if pipeline in self._admitting:
            return effects
        self._admitting.add(pipeline)
        while (waiting := self._admission[pipeline].next(now)) is not None:
            effects += self._run(waiting, self._requests[waiting], now)
        self._admitting.discard(pipeline)
        return effects
