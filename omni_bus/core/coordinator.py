"""The thinking of the coordinator: one handler per control frame; membership, admission and binding do the parts.

A request (`omni_bus.core.request` has its states) leaves in `_end`, the one place, and leaves a tombstone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.core.absence import Absences
from omni_bus.core.administration import Administration, Arrangement, error_for_cut
from omni_bus.core.admission import Admission
from omni_bus.core.adoption import MAX_ROUTES, Adoption
from omni_bus.core.binding import Bindings
from omni_bus.core.breaks import Breaks
from omni_bus.core.deaths import Deaths
from omni_bus.core.effects import Common, DropTimer, Forget, Report, Send, SetTimer
from omni_bus.core.health import Health
from omni_bus.core.intake import Intake, stopping
from omni_bus.core.links import NONCE
from omni_bus.core.member import FIRST_HEARTBEAT_S
from omni_bus.core.membership import MISSED_HEARTBEATS, Actor, Membership
from omni_bus.core.pipeline import IN
from omni_bus.core.recovery import Recovery, error_for_lost, is_retry_safe, needed_stages, successor_of
from omni_bus.core.request import Request, State
from omni_bus.core.roster import Roster
from omni_bus.core.strangers import Strangers
from omni_bus.core.tombstones import Tombstones
from omni_bus.errors import (
    BadFrame,
    BadInput,
    DeadlineExceeded,
    ErrorInfo,
    OmniBusError,
    RequestCancelled,
    StageLost,
    Unavailable,
    from_info,
    unknown_name,
)
from omni_bus.ids import CLIENT_PREFIX, Peer, RequestId
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Admin,
    AdminReply,
    Admit,
    Broken,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Introduce,
    Lost,
    Outlook,
    Pong,
    Progress,
    Ready,
    Refused,
    Reject,
    Reroute,
    Route,
    Stalled,
    Submit,
    Unheard,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from omni_bus.core.effects import TimerKey
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.core.quota import Quota
    from omni_bus.ids import Sender
    from omni_bus.wire.frames import AnyFrame

NOTHING_ARRANGED = Arrangement()

OPERATIONS = ("arrange", "drain", "health", "metrics", "pipelines", "status")
SUPERVISED = ("arrange", "drain")
"""Operations that only a supervisor may ask for: it keeps what they change, and tells the next coordinator."""
MAX_CALLER_ROWS = 100
"""Callers of each pipeline that a status names, the busiest first."""

CANCEL_RETRY_S = 1.0
"""A cancel that is not answered within this is sent again: a reconnecting link may have lost it."""


class CoordinatorCore:
    """Frames and time in, effects out.

    Args:
        me: this coordinator, as it introduces itself.
        pipelines: by name.
        heartbeat_s: how often actors must show that they live.
        quotas: what callers that the deployment names may use.
        arrangement: how many replicas are wanted, and which of them get nothing new.
        awaited: replicas that served under a former coordinator: until they said hello to this one, or had the time
            to, requests for their stages wait.
    """

    def __init__(
        self,
        me: Peer,
        pipelines: dict[str, Pipeline],
        heartbeat_s: float = 1.0,
        quotas: Mapping[str, Quota] | None = None,
        arrangement: Arrangement = NOTHING_ARRANGED,
        awaited: Iterable[str] = (),
    ) -> None:
        self._me = me
        self._pipelines = pipelines
        self._heartbeat_s = heartbeat_s
        self._membership = Membership()
        self._deaths = Deaths()
        self._strangers = Strangers(self._membership, self._patience_with_strangers_s)
        self._administration = Administration(arrangement, awaited)
        self._absences = Absences(self._membership, self._administration.is_drained)
        self._bindings = Bindings()
        self._admission = {name: Admission(pipeline, quotas) for name, pipeline in pipelines.items()}
        self._requests: dict[RequestId, Request] = {}
        self._roster = Roster(self._membership, self._absences, self._administration, self._bindings, self._requests)
        self._held: dict[RequestId, None] = {}
        """Those that wait for a replica, in order of arrival."""
        self._tombstones: Tombstones[ErrorInfo] = Tombstones()
        self._intake = Intake(
            pipelines,
            self._membership,
            administration=self._administration,
            absences=self._absences,
            requests=self._requests,
            tombstones=self._tombstones,
        )
        self._recovery = Recovery(self._intake.bindable, self._absences)
        self._admitting: set[str] = set()
        self._health = Health()
        self._adoption = Adoption(
            pipelines,
            self._membership,
            bindings=self._bindings,
            admission=self._admission,
            requests=self._requests,
            tombstones=self._tombstones,
            patience_s=self._patience_with_strangers_s,
            absences=self._absences,
            deaths=self._deaths,
        )
        self._breaks = Breaks(
            self._membership,
            self._absences,
            self._deaths,
            self._requests,
            self._give_up,
            self._patience_with_strangers_s,
        )
        self._ended = {"done": 0, "failed": 0, "cancelled": 0, "rejected": 0, "rerouted": 0}
        self._received: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def is_idle(self) -> bool:
        """No client waits for a request, and no gateway is left that could bring one.

        Stages that have not let go yet keep nobody waiting.
        """
        is_waited_for = any(
            entry.state is not State.ENDING and not entry.has_client_left for entry in self._requests.values()
        )
        return not is_waited_for and not any(actor.role == "gateway" for actor in self._membership)

    # --- entry points -------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Common]:
        """Begin; call it once, before the first frame."""
        if not self._administration.is_waiting:
            return []
        return [SetTimer(("awaited", ""), now + self._patience_with_strangers_s), *self._breaks.start(now)]

    def on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> list[Common]:
        """Take a frame from an actor; from one that is not known, only `Hello` is understood."""
        self._received[type(frame).__name__] += 1
        return self._counted(self._on_frame(sender, frame, now))

    def _counted(self, effects: list[Common]) -> list[Common]:
        """Answer drains that are over, and count what is sent, by kind of frame."""
        effects += self._administration.settled(self._roster.outstanding)
        for effect in effects:
            if isinstance(effect, Send):
                self._sent[type(effect.frame).__name__] += 1
        return effects

    def _on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> list[Common]:
        if isinstance(frame, Hello):
            return self._on_hello(sender, frame, now)
        actor = self._membership.get(sender)
        if actor is None:
            return self._on_stranger(sender, frame, now)
        actor.seen_at = now
        match frame:
            case Heartbeat(num_live=num_live):
                return self._on_heartbeat(actor, num_live)
            case Progress(phase=phase, fraction=fraction):
                actor.phase, actor.fraction = phase, fraction
                return []
            case Ready(context_length=context_length):
                actor.is_ready, actor.phase, actor.context_length = True, "ready", context_length
                return [self._report_ready(actor, now), *self._resume(now), *self._run_held(now)]
            case Stalled():
                return self._on_stalled(sender, frame, now)
            case Outlook() if actor.role == "supervisor":
                return self._on_outlook(frame, now)
            case Goodbye(reason=reason, is_settled=is_settled):
                effects = self._on_goodbye(actor, now)
                return effects + self._on_leave(actor, reason or "goodbye", now, is_settled=is_settled)
            case Lost(peer=peer, is_settled=is_settled) if actor.role == "supervisor":
                return self._on_ended(peer, now, is_settled=is_settled)
            case Broken():
                return self._breaks.on_broken(actor, frame, now)
            case Pong():
                return self._on_pong(actor, frame, now)
            case Submit():
                return self._on_submit(actor, frame, now)
            case Cancel(request=request, reason=reason):
                return self._on_cancel(actor, request, reason, now)
            case Cancelled(request=request, freed=freed):
                return self._on_stage_end(actor, request, freed, self._error_for_let_go(actor, request), now)
            case Done(request=request, stats=stats):
                entry = self._requests.get(request)
                if entry is not None and entry.pending.get(actor.stage) == actor.peer:
                    entry.stats[actor.stage] = stats
                return self._on_stage_end(actor, request, 0, None, now)
            case Failed(request=request, error=error):
                return self._on_stage_end(actor, request, 0, from_info(error), now)
            case Unheard(request=request):
                is_hopeless = self._adoption.note_unheard(actor, request)
                return [SetTimer(("adopted", request), now)] if is_hopeless else []
            case Admin():
                return self._on_admin(actor, frame, now)
            case _:
                return [Report("unexpected frame", {"name": actor.peer.actor, "frame": type(frame).__name__})]

    def on_timer(self, key: TimerKey, now: float) -> list[Common]:
        """A timer that was set is due."""
        return self._counted(self._on_timer(key, now))

    def _on_timer(self, key: TimerKey, now: float) -> list[Common]:
        kind, of = key
        match kind:
            case "deadline":
                return self._end_early(of, DeadlineExceeded("the request's time limit passed"), now)
            case "cancel":
                return self._retry_cancel(of, now)
            case "adopted":
                return self._check_adopted(of, now)
            case "left":
                return self._end_early(of, RequestCancelled("the client is gone"), now)
            case "recover":
                return self._end_recovery(of, now)
            case "alive":
                return self._check_alive(of, now)
            case "health" | "metrics":
                return list(self._health.on_timer(int(of)))
            case "drain":
                return self._end_drain(of, now)
            case "awaited":
                self._administration.give_up()
                return self._run_held(now)
            case "strangers":
                return self._strangers.on_timer(now)
            case "breaks":
                return self._breaks.lose_patience()
            case _:
                raise AssertionError(f"no such timer: {key}")

    def drain(self, now: float) -> list[Common]:
        """Admit nothing any more; waiting requests are refused, running ones go on."""
        self._intake.is_closed = True
        effects: list[Common] = []
        waiting = (State.QUEUED, State.HELD, State.RECOVERING)
        for request in [r for r, entry in self._requests.items() if entry.state in waiting]:
            effects += self._end_early(request, stopping(), now)
        return effects

    def cut(self, now: float) -> list[Common]:
        """End every running request with an error: the time to drain is over. No effects mean that none was running."""
        effects: list[Common] = []
        for request in list(self._requests):
            effects += self._end_early(request, stopping(), now)
        return effects

    # --- membership ---------------------------------------------------------------------------------------

    def _on_hello(self, sender: Sender, hello: Hello, now: float) -> list[Common]:
        if hello.version != PROTOCOL_VERSION:
            error = BadFrame(
                f"{hello.peer.actor} speaks protocol version {hello.version}, this coordinator {PROTOCOL_VERSION}"
            )
            return [Send(hello.peer, Refused(error.to_info())), *self._strangers.met(hello.peer, now)]
        if sender.actor.startswith(CLIENT_PREFIX) and hello.role != "client":
            error = BadFrame(f"{sender.actor} comes with a client's key and calls itself a {hello.role}")
            return [Send(hello.peer, Refused(error.to_info())), *self._strangers.met(hello.peer, now)]
        if hello.peer.sender != sender:
            return [Report("hello of somebody else", {"sender": sender.actor, "claims": hello.peer.actor})]
        if sender in self._deaths:
            return []  # its last words came another way than those of its supervisor
        former = self._membership.former(hello)
        effects = [] if former is None else self._on_leave(former, "replaced by a newcomer of its name", now)
        known = self._membership.get(sender)
        is_new, was_ready = known is None, known is not None and known.is_ready
        actor = self._membership.join(hello, now)
        self._absences.join(actor)
        effects.append(Send(hello.peer, Welcome(PROTOCOL_VERSION, self._me, self._heartbeat_s)))
        if is_new:
            effects.append(SetTimer(("alive", hello.peer.actor), now + self._patience_s))
        # Its `Ready` may have been lost with a connection: then this is the first that is heard of it.
        if actor.is_ready and not was_ready:
            effects.append(self._report_ready(actor, now))
        if is_new:
            self._administration.heard_of(hello.peer.actor)
            effects += self._breaks.on_name(hello.peer.actor, actor)
        effects += self._adoption.on_hello(actor, hello, now) + self._hurry(now)
        effects += self._breaks.on_hello(actor, now) + self._resume(now)
        return effects + (self._run_held(now) if is_new or not was_ready else [])

    def _report_ready(self, actor: Actor, now: float) -> Report:
        """The actor can be bound from now on; its supervisor reads this."""
        fields = {"name": actor.peer.actor, "incarnation": f"{actor.peer.incarnation:016x}"}
        return Report("actor ready", {**fields, "after_s": round(now - actor.since, 3)})

    def _on_stranger(self, sender: Sender, frame: AnyFrame, now: float) -> list[Common]:
        """An actor that this coordinator has not met (it is new itself) is asked to introduce itself."""
        if sender in self._deaths:
            return []
        if isinstance(frame, Heartbeat):
            stranger = Peer(sender.actor, sender.incarnation, frame.endpoint)
            return [Send(stranger, Introduce()), *self._strangers.met(stranger, now)]
        return self._on_stalled(sender, frame, now) if isinstance(frame, Stalled) else []

    @property
    def _patience_s(self) -> float:
        return self._heartbeat_s * MISSED_HEARTBEATS

    @property
    def _patience_with_strangers_s(self) -> float:
        """How long to wait for a hello: who was never welcomed does not know the deployment's heartbeat."""
        return MISSED_HEARTBEATS * max(self._heartbeat_s, FIRST_HEARTBEAT_S)

    def _check_alive(self, name: str, now: float) -> list[Common]:
        actor = self._membership.named(name)
        if actor is None:
            return self._breaks.on_name(name, None)
        due = actor.seen_at + self._patience_s
        if now < due:
            return [SetTimer(("alive", name), due)]
        return self._on_leave(actor, f"no heartbeat for {self._patience_s:g} s", now)

    def _on_heartbeat(self, actor: Actor, num_live: int) -> list[Common]:
        if actor.role != "stage":
            return [Send(actor.peer, Welcome(PROTOCOL_VERSION, self._me, self._heartbeat_s))]
        # Nobody would ever end what a stage holds beyond what is bound to it; its hello lists it.
        has_surplus = self._bindings.outstanding(actor.sender) < min(num_live, MAX_ROUTES)
        return [Send(actor.peer, Introduce())] if has_surplus else []

    def _on_stalled(self, sender: Sender, stalled: Stalled, now: float) -> list[Common]:
        """Give up a stage whose engine is stuck. Its supervisor ends it; that may join later than its first word."""
        reason = f"its engine has made no progress for {stalled.seconds:.3g} s"
        actor = self._membership.get(sender)
        if actor is not None:
            return self._on_leave(actor, reason, now)
        if stalled.peer.sender != sender:
            return [Report("stall of somebody else", {"sender": sender.actor, "claims": stalled.peer.actor})]
        told: list[Common] = [
            Send(other.peer, Lost(stalled.peer, reason)) for other in self._membership if other.role == "supervisor"
        ]
        return [*told, Forget(stalled.peer)]

    def _on_outlook(self, outlook: Outlook, now: float) -> list[Common]:
        """Learn why a replica is away; nobody waits for one that does not come back, or for its hello."""
        self._absences.take(outlook, now)
        effects = self._hurry(now)
        for request, error in self._recovery.hopeless(now):
            effects += self._end_early(request, error, now)
        if self._membership.named(outlook.actor) is not None:
            return effects
        self._administration.is_down(outlook.actor)
        return effects + self._run_held(now)

    def _on_ended(self, peer: Peer, now: float, *, is_settled: bool) -> list[Common]:
        """A supervisor has seen a process end, now or under a former coordinator: whatever waits for it goes on."""
        self._deaths.note(peer.sender, is_settled=is_settled)
        lost = self._membership.get(peer.sender)
        if lost is not None:
            return self._on_leave(lost, "its process ended", now, is_settled=is_settled)
        return self._breaks.on_gone(peer.sender) + self._hurry(now, peer)

    def _on_goodbye(self, actor: Actor, now: float) -> list[Common]:
        """A client that leaves has cancelled what it gave up; it has all of the rest, and the stages say so soon."""
        effects: list[Common] = []
        for request, entry in self._requests.items():
            if entry.client == actor.peer and entry.state is State.RUNNING:
                entry.has_client_left = True
                effects.append(SetTimer(("left", request), now + CANCEL_RETRY_S))
        return effects

    def _on_leave(self, actor: Actor, reason: str, now: float, *, is_settled: bool = False) -> list[Common]:
        """An actor is gone: nothing reaches it any more, and what it worked on ends.

        Args:
            actor: who.
            reason: why, for the log.
            now: monotonic seconds.
            is_settled: all that it ever sent has arrived, so that nobody misses it where it had finished its part.
        """
        self._membership.leave(actor)
        self._adoption.on_leave(actor)
        self._bindings.forget(actor.sender)
        self._absences.leave(actor, reason, now, is_returning=self._administration.is_returning(actor.peer.actor))
        effects: list[Common] = [
            DropTimer(("alive", actor.peer.actor)),
            Report("actor gone", {"name": actor.peer.actor, "reason": reason}),
            *self._administration.forget(actor.peer),
            *self._health.forget(actor.peer),
        ]
        for request, entry in list(self._requests.items()):
            if is_settled and actor.peer != entry.client and actor.peer not in entry.pending.values():
                continue
            effects += self._lose(request, entry, actor, now)
        effects += self._breaks.on_gone(actor.sender)
        # After the requests' own errors, which know more than a client can conclude from this.
        effects += [Send(other.peer, Lost(actor.peer, reason)) for other in self._membership]
        return [*effects, Forget(actor.peer)]

    def _lose(self, request: RequestId, entry: Request, actor: Actor, now: float) -> list[Common]:
        if entry.client == actor.peer:
            entry.wants_ack = False
            if entry.has_client_left and all(peer.sender != actor.sender for peer in entry.pending.values()):
                return []
        if entry.route is None:
            is_concerned = entry.client == actor.peer
            return self._end_early(request, RequestCancelled("the client is gone"), now) if is_concerned else []
        error = error_for_lost(actor, entry.route, entry.pipeline)
        if error is None:
            return []
        # By name and incarnation: a route that was told by somebody else may have another address of it.
        for stage in [stage for stage, peer in entry.pending.items() if peer.sender == actor.sender]:
            self._release(entry, stage)
        return self._give_up(request, entry, error, now)

    # --- connections that break ---------------------------------------------------------------------------

    def on_link_broken(self, peer: Peer, now: float) -> list[Common]:
        """The connection to an actor broke, which may have lost frames of ours: its introduction makes up for them."""
        actor = self._membership.get(peer.sender)
        return [] if actor is None else self._counted([Send(actor.peer, Introduce())])

    def _on_pong(self, actor: Actor, pong: Pong, now: float) -> list[Common]:
        if pong.nonce > NONCE:
            return self._health.on_pong(actor.sender, pong, now)
        effects = self._breaks.on_pong(actor, pong.nonce, now)
        return [*effects, *self._resume(now)] if effects else []

    def _check_adopted(self, request: RequestId, now: float) -> list[Common]:
        """Who takes part in an adopted request and is known to be gone, or has had the time to say hello, is lost."""
        entry = self._requests.get(request)
        if entry is None:
            return []
        absent, error = self._adoption.missing(entry)
        entry.wants_ack = entry.wants_ack and not isinstance(error, RequestCancelled)
        for stage in absent:
            self._release(entry, stage)
        broken, for_broken = (None, None) if error is not None else self._breaks.former(entry, now)
        error = error or for_broken
        if error is None:
            return self._settle(request, entry, now) if absent else []
        effects = self._give_up(request, entry, error, now)
        if broken is not None:
            effects += self._breaks.confirm(broken, entry.client)
        if request in self._requests and self._adoption.missing(entry)[0]:
            effects.append(SetTimer(("adopted", request), now + self._patience_with_strangers_s))
        return effects

    def _hurry(self, now: float, because_of: Peer | None = None) -> list[Common]:
        """Wait no longer with adopted requests that lost an actor while there was no coordinator to be told."""
        return [
            SetTimer(("adopted", request), now)
            for request, entry in self._requests.items()
            if entry.is_adopted
            and (because_of is None or because_of in (entry.client, *entry.pending.values()))
            and self._adoption.is_hopeless(entry)
        ]

    # --- recovery -----------------------------------------------------------------------------------------

    def _give_up(self, request: RequestId, entry: Request, error: OmniBusError, now: float) -> list[Common]:
        """End a request that lost an actor, and put up its successor if it may have one."""
        is_hopeless = any(self._absences.is_degraded(stage) for stage in needed_stages(entry.edges))
        found = None if self._intake.is_closed or is_hopeless else successor_of(entry, error)
        if found is None or self._intake.is_used(found[0]) or self._membership.get(entry.client.sender) is None:
            return self._end_early(request, error, now) + self._settle(request, entry, now)
        name, successor = found
        self._requests[name] = successor
        deadline = successor.deadline
        effects: list[Common] = [] if deadline is None else [SetTimer(("deadline", name), deadline)]
        # Before its predecessor's place is free, so that it goes ahead of the queue; the client hears of it later.
        is_ready = self._recovery.is_ready(successor)
        resumed = self._offer_again(name, successor, now) if is_ready else self._recovery.wait(name, successor, now)
        effects += self._end_early(request, error, now, successor=name)
        return effects + self._settle(request, entry, now) + resumed

    def _resume(self, now: float) -> list[Common]:
        """Offer those for admission again whose stages all have a replica now."""
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
            return self._end_early(request, error, now)
        self._held.pop(request, None)
        entry.move("no replica")
        self._admission[entry.pipeline.name].leave(request, now)
        return self._recovery.wait(request, entry, now) + self._admit_waiting(entry.pipeline.name, now)

    def _end_recovery(self, request: RequestId, now: float) -> list[Common]:
        """No replica came in time."""
        error = self._recovery.error_after_wait(request, now)
        return self._resume(now) if error is None else self._end_early(request, error, now)

    # --- requests -----------------------------------------------------------------------------------------

    def _on_submit(self, actor: Actor, submit: Submit, now: float) -> list[Common]:
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
            offer = admission.offer(submit, None if entry.deadline is None else entry.deadline - now, now)
        except OmniBusError as error:
            self._ended["rejected"] += 1
            fields = {"request": submit.request, "pipeline": submit.pipeline, "outcome": "rejected", "code": error.code}
            reject = Reject(submit.request, error.to_info(), submit.attempt)
            return [Send(actor.peer, reject), Report("request ended", fields)]
        self._requests[submit.request] = entry
        effects: list[Common] = []
        if entry.deadline is not None:
            effects.append(SetTimer(("deadline", submit.request), entry.deadline))
        if offer.pushed_out is not None:
            effects += self._end_early(offer.pushed_out, admission.overloaded(), now)
        return effects + (self._run(submit.request, entry, now) if offer.may_run else [])

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
                self._held[request] = None
            return []
        self._held.pop(request, None)
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

    def _run_held(self, now: float) -> list[Common]:
        """Replicas or their arrangement changed: whoever waits for one may find it, or learn that there is none."""
        effects: list[Common] = []
        for request in sorted(self._held, key=lambda request: -self._requests[request].submit.priority):
            entry = self._requests.get(request)
            if entry is not None and entry.state is State.HELD:
                effects += self._run(request, entry, now)
        return effects

    def _on_cancel(self, actor: Actor, request: RequestId, reason: str, now: float) -> list[Common]:
        entry = self._requests.get(request)
        if entry is None:
            # Remembered, since a stage that still holds it may say hello only now.
            self._tombstones.bury(request, RequestCancelled(reason or "cancelled by the client").to_info())
            return [Send(actor.peer, Cancelled(request))]
        if entry.client != actor.peer:
            return [Report("cancel by a stranger", {"name": actor.peer.actor, "request": request})]
        entry.wants_ack = True
        return self._end_early(request, RequestCancelled(reason or "cancelled by the client"), now)

    def _on_stage_end(
        self, actor: Actor, request: RequestId, freed: int, error: OmniBusError | None, now: float
    ) -> list[Common]:
        """A stage has finished, failed or let go; late and repeated ends change nothing."""
        entry = self._requests.get(request)
        if entry is None or entry.pending.get(actor.stage) != actor.peer:
            return []
        entry.freed += freed
        self._release(entry, actor.stage)
        if isinstance(error, StageLost) and entry.route is not None:
            # It missed chunks, or let go of a former attempt. Whether a retry is safe is for us to say, who know the
            # pipeline.
            error.is_retry_safe = is_retry_safe(entry.route, entry.pipeline)
            return self._give_up(request, entry, error, now) + self._resume(now)
        effects = [] if error is None else self._end_early(request, error, now)
        return effects + self._settle(request, entry, now)

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

    def _release(self, entry: Request, stage: str) -> None:
        """One stage has nothing of the request any more."""
        self._bindings.release(entry.pending.pop(stage).sender, entry.submit)

    def _settle(self, request: RequestId, entry: Request, now: float) -> list[Common]:
        """End a request once no stage holds anything of it."""
        if entry.pending or request not in self._requests:
            return []
        if entry.state is State.RUNNING:
            entry.move("all stages done")
            return self._end(request, "done", now)
        entry.move("all stages let go")
        return self._end(request, "", now)

    def _end_early(self, request: RequestId, error: OmniBusError, now: float, successor: str = "") -> list[Common]:
        """Tell the client, once, and have every stage that is still at work let go."""
        entry = self._requests.get(request)
        if entry is None or entry.state is State.ENDING:
            return []
        outcome = "rerouted" if successor else "cancelled" if isinstance(error, RequestCancelled) else "failed"
        self._ended[outcome] += 1
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
            effects += self._to_members(frame, entry.client)
        if was_waiting:
            return effects + self._end(request, "", now)
        effects += self._to_members(Cancel(request, error.code), *entry.pending.values())
        if entry.pending:
            effects.append(SetTimer(("cancel", request), now + CANCEL_RETRY_S))
        return effects + self._settle(request, entry, now)

    def _retry_cancel(self, request: RequestId, now: float) -> list[Common]:
        entry = self._requests.get(request)
        if entry is None or not entry.pending:
            return []
        again = self._to_members(Cancel(request, "again"), *entry.pending.values())
        return [*again, SetTimer(("cancel", request), now + CANCEL_RETRY_S)]

    def _to_members(self, frame: AnyFrame, *peers: Peer) -> list[Common]:
        """Send to those who are here: an adopted request may name peers that never were, and a hello tells the rest."""
        return [Send(peer, frame) for peer in peers if self._membership.get(peer.sender) is not None]

    def _end(self, request: RequestId, outcome: str, now: float) -> list[Common]:
        """The one place where a request leaves; its place goes to the next one that waits."""
        entry = self._requests.pop(request)
        self._held.pop(request, None)
        self._recovery.leave(request)
        self._tombstones.bury(request, entry.error)
        effects: list[Common] = []
        if outcome:
            self._ended[outcome] += 1
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

    # --- administration -----------------------------------------------------------------------------------

    def _on_admin(self, actor: Actor, frame: Admin, now: float) -> list[Common]:
        try:
            return self._operate(actor, frame, now)
        except OmniBusError as error:
            return [Send(actor.peer, AdminReply(frame.call, None, error.to_info()))]

    def _operate(self, actor: Actor, frame: Admin, now: float) -> list[Common]:
        """Carry an operation out.

        Raises:
            UnknownName: there is no such operation.
            BadInput: its arguments are malformed, or it is for a supervisor only.
        """
        if frame.op not in OPERATIONS:
            raise unknown_name("operation", frame.op, OPERATIONS, field="op")
        if frame.op in SUPERVISED and actor.role != "supervisor":
            raise BadInput(f"operation '{frame.op}' is the supervisor's: ask it with `omni-bus drain`", field="op")
        match frame.op:
            case "health":
                served_by = ("stage", "gateway")
                others = [other for other in self._membership if other is not actor and other.role in served_by]
                absent = self._roster.absent(now)
                return self._health.begin(
                    *(actor.peer, frame.call, others, absent, now, self._roster.marks),
                    wants_metrics=frame.op == "metrics",
                )
            case "status":
                return [Send(actor.peer, AdminReply(frame.call, self._status(now)))]
            case "pipelines":
                return [Send(actor.peer, AdminReply(frame.call, msgspec.to_builtins(self._pipelines)))]
            case "arrange":
                self._administration.arrange(frame.args)
                return [Send(actor.peer, AdminReply(frame.call)), *self._resume(now), *self._run_held(now)]
            case "drain":
                return self._administration.drain(actor.peer, frame.call, frame.args, now)
            case _:
                raise AssertionError(f"no such operation: {frame.op}")

    def _end_drain(self, number: str, now: float) -> list[Common]:
        effects, cut = self._administration.on_timer(number, self._roster.outstanding, now)
        for name in cut:
            for request, entry in self._roster.takes_part(name):
                effects += self._end_early(request, error_for_cut(name, entry.route, entry.pipeline), now)
        return effects

    def _status(self, now: float) -> dict[str, Any]:
        return {
            "is_draining": self._intake.is_closed,
            "requests": {"live": len(self._requests), **self._ended},
            "held": len(self._held),
            "frames": {"received": dict(self._received), "sent": dict(self._sent)},
            "pipelines": {name: admission.counts._asdict() for name, admission in self._admission.items()},
            "callers": [row for admission in self._admission.values() for row in admission.callers()[:MAX_CALLER_ROWS]],
            "actors": [*self._roster.present(now), *self._roster.absent(now)],
        }
