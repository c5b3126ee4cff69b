"""The thinking of the coordinator: one handler per control frame; membership, admission and binding do the parts.

What becomes of a request, from its submit to its end, is in `omni_bus.core.lifecycle`.
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
from omni_bus.core.lifecycle import CANCEL_RETRY_S, Lifecycle
from omni_bus.core.links import NONCE
from omni_bus.core.member import FIRST_HEARTBEAT_S
from omni_bus.core.membership import MISSED_HEARTBEATS, Actor, Membership
from omni_bus.core.recovery import Recovery, error_for_lost
from omni_bus.core.request import Request, State
from omni_bus.core.rests import Rests
from omni_bus.core.roster import Roster
from omni_bus.core.strangers import Strangers
from omni_bus.core.ties import Ties
from omni_bus.core.tombstones import Tombstones
from omni_bus.errors import (
    BadFrame,
    BadInput,
    DeadlineExceeded,
    ErrorInfo,
    OmniBusError,
    RequestCancelled,
    from_info,
    unknown_name,
)
from omni_bus.ids import CLIENT_PREFIX, Peer, RequestId
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Admin,
    AdminReply,
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
    Rested,
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

OPERATIONS = ("arrange", "drain", "health", "metrics", "pipelines", "rest", "status")
SUPERVISED = ("arrange", "drain", "rest")
"""Operations that only a supervisor may ask for: it keeps what they change, and tells the next coordinator."""
HAVE_REQUESTS = ("client", "gateway")
"""Roles of those who may have requests; the next coordinator is told of each that joined and has not left."""
CLIENT_JOINED, CLIENT_LEFT = "client joined", "client left"
"""Reports of that; whoever starts the next one reads them."""
MAX_CALLER_ROWS = 100
"""Callers of each pipeline that a status names, the busiest first."""


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
        clients: all who had requests of a former coordinator, or may have: until they, too, said hello, no replica can
            be taken for empty.
    """

    def __init__(
        self,
        me: Peer,
        pipelines: dict[str, Pipeline],
        heartbeat_s: float = 1.0,
        quotas: Mapping[str, Quota] | None = None,
        arrangement: Arrangement = NOTHING_ARRANGED,
        awaited: Iterable[str] = (),
        clients: Iterable[str] = (),
    ) -> None:
        self._me = me
        self._pipelines = pipelines
        self._heartbeat_s = heartbeat_s
        self._membership = Membership()
        self._deaths = Deaths()
        self._strangers = Strangers(self._membership, self._patience_with_strangers_s)
        self._administration = Administration(arrangement, awaited, clients)
        self._absences = Absences(self._membership, self._administration.kept)
        self._bindings = Bindings()
        self._admission = {name: Admission(pipeline, quotas) for name, pipeline in pipelines.items()}
        self._requests: dict[RequestId, Request] = {}
        self._roster = Roster(self._membership, self._absences, self._administration, self._bindings, self._requests)
        self._tombstones: Tombstones[ErrorInfo] = Tombstones()
        self._intake = Intake(
            pipelines,
            self._membership,
            administration=self._administration,
            absences=self._absences,
            requests=self._requests,
            tombstones=self._tombstones,
        )
        self._recovery = Recovery(self._intake.missing, self._absences)
        self._lifecycle = Lifecycle(
            self._requests,
            self._membership,
            admission=self._admission,
            bindings=self._bindings,
            intake=self._intake,
            recovery=self._recovery,
            absences=self._absences,
            tombstones=self._tombstones,
        )
        self._health = Health()
        self._rests = Rests(self._membership)
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
        self._ties = Ties(
            self._membership, self._deaths, self._requests, self._patience_with_strangers_s, self._adoption.give_up
        )
        self._breaks = Breaks(
            self._membership,
            self._absences,
            self._deaths,
            self._requests,
            self._lifecycle.give_up,
            self._patience_with_strangers_s,
        )
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
        return self._counted(self._on_frame(sender, frame, now), now)

    def _counted(self, effects: list[Common], now: float) -> list[Common]:
        """Answer drains that are over, put to sleep what may, and count what is sent, by kind of frame."""
        effects += self._administration.settled(self._roster.outstanding)
        effects += self._rests.settle(self._administration.level, self._roster.outstanding, now)
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
                if (phase, fraction) != (actor.phase, actor.fraction):
                    actor.phase, actor.fraction = phase, fraction
                    self._rests.on_progress(actor, now)
                return []
            case Ready(context_length=context_length, ranges=ranges):
                actor.is_ready, actor.phase = True, "ready"
                actor.context_length, actor.ranges = context_length, ranges
                resumed = [*self._lifecycle.resume(now), *self._lifecycle.run_held(now)]
                self._rests.compare(actor.peer.actor)
                return [self._report_ready(actor, now), *resumed]
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
            case Rested():
                rested = self._rests.on_rested(actor, frame, now)
                return [*rested, *self._lifecycle.resume(now), *self._lifecycle.run_held(now)]
            case Pong():
                return self._on_pong(actor, frame, now)
            case Submit():
                return self._lifecycle.on_submit(actor, frame, now)
            case Cancel(request=request, reason=reason):
                return self._lifecycle.on_cancel(actor, request, reason, now)
            case Cancelled(request=request, freed=freed):
                return self._lifecycle.on_let_go(actor, request, freed, now)
            case Done(request=request, stats=stats):
                entry = self._requests.get(request)
                if entry is not None and entry.pending.get(actor.stage) == actor.peer:
                    entry.stats[actor.stage] = stats
                return self._lifecycle.on_stage_end(actor, request, 0, None, now)
            case Failed(request=request, error=error):
                return self._lifecycle.on_stage_end(actor, request, 0, from_info(error), now)
            case Unheard(request=request):
                is_hopeless = self._adoption.note_unheard(actor, request)
                return [SetTimer(("adopted", request), now)] if is_hopeless else []
            case Admin():
                return self._on_admin(actor, frame, now)
            case _:
                return [Report("unexpected frame", {"name": actor.peer.actor, "frame": type(frame).__name__})]

    def on_timer(self, key: TimerKey, now: float) -> list[Common]:
        """A timer that was set is due."""
        return self._counted(self._on_timer(key, now), now)

    def _on_timer(self, key: TimerKey, now: float) -> list[Common]:
        kind, of = key
        match kind:
            case "deadline":
                return self._lifecycle.end_early(of, DeadlineExceeded("the request's time limit passed"), now)
            case "cancel":
                return self._lifecycle.retry_cancel(of, now)
            case "adopted":
                return self._check_adopted(of, now)
            case "left":
                return self._lifecycle.end_early(of, RequestCancelled("the client is gone"), now)
            case "recover":
                return self._lifecycle.end_recovery(of, now)
            case "alive":
                return self._check_alive(of, now)
            case "health":
                return list(self._health.on_timer(int(of)))
            case "drain":
                return self._end_drain(of, now)
            case "rest":
                return self._rests.on_timer(int(of), now)
            case "awaited":
                gone = [Report(CLIENT_LEFT, {"name": name}) for name in self._administration.give_up()]
                return [*gone, *self._lifecycle.run_held(now)]
            case "strangers":
                return self._strangers.on_timer(now)
            case "breaks":
                return self._breaks.lose_patience()
            case "ties":
                return self._ties.tell(now)
            case _:
                raise AssertionError(f"no such timer: {key}")

    def drain(self, now: float) -> list[Common]:
        """Admit nothing any more; waiting requests are refused, running ones go on."""
        self._intake.is_closed = True
        effects: list[Common] = []
        waiting = (State.QUEUED, State.HELD, State.RECOVERING)
        for request in [r for r, entry in self._requests.items() if entry.state in waiting]:
            effects += self._lifecycle.end_early(request, stopping(), now)
        return effects

    def cut(self, now: float) -> list[Common]:
        """End every running request with an error: the time to drain is over. No effects mean that none was running."""
        effects: list[Common] = []
        for request in list(self._requests):
            effects += self._lifecycle.end_early(request, stopping(), now)
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
        if is_new:
            self._rests.on_join(actor)
        self._absences.join(actor)
        effects.append(self._welcome(hello.peer, is_new=is_new))
        if is_new:
            effects.append(SetTimer(("alive", hello.peer.actor), now + self._patience_s - self._heartbeat_s))
        # Its `Ready` may have been lost with a connection: then this is the first that is heard of it.
        if actor.is_ready and not was_ready:
            effects.append(self._report_ready(actor, now))
        if actor.is_ready and (not was_ready or hello.level != self._administration.level(actor.peer.actor)):
            self._rests.compare(actor.peer.actor)
        if is_new:
            has_requests = actor.role in HAVE_REQUESTS
            effects += [Report(CLIENT_JOINED, {"name": hello.peer.actor})] if has_requests else []
            if not has_requests or len(hello.live) <= MAX_ROUTES:  # else it has more than are taken over now
                self._administration.heard_of(hello.peer.actor)
            effects += self._breaks.on_name(hello.peer.actor, actor)
        effects += self._adoption.on_hello(actor, hello, now) + self._hurry(now)
        effects += self._ties.take(hello.linked, now)
        # A request that has sent nothing yet links to the actors of its route in a moment, or has since this was sent.
        routed = [peer for live in hello.live for peer in (live.gateway, *live.stages.values())]
        effects += self._ties.take(filter(self._ties.is_gone, routed), now)
        effects += self._breaks.on_hello(actor, now) + self._lifecycle.resume(now)
        return effects + (self._lifecycle.run_held(now) if is_new or not was_ready else [])

    def _welcome(self, peer: Peer, *, is_new: bool = False) -> Send:
        is_drained = bool(self._administration.kept(peer.actor))
        return Send(peer, Welcome(PROTOCOL_VERSION, self._me, self._heartbeat_s, is_drained, is_new))

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
        suspicious_at = actor.seen_at + self._patience_s - self._heartbeat_s
        if now < suspicious_at:
            return [SetTimer(("alive", name), suspicious_at)]
        if actor.suspected_at <= actor.seen_at:
            # If it was us who were held up, its heartbeats wait to be read: they are before the last one is due.
            actor.suspected_at = now
            return [SetTimer(("alive", name), now + self._heartbeat_s)]
        return self._on_leave(actor, f"no heartbeat for {self._patience_s:g} s", now)

    def _on_heartbeat(self, actor: Actor, num_live: int) -> list[Common]:
        if actor.role != "stage":
            return [self._welcome(actor.peer)]
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
            effects += self._lifecycle.end_early(request, error, now)
        if self._membership.named(outlook.actor) is not None:
            return effects
        self._administration.is_down(outlook.actor)
        return effects + self._lifecycle.run_held(now)

    def _on_ended(self, peer: Peer, now: float, *, is_settled: bool) -> list[Common]:
        """A supervisor has seen a process end, now or under a former coordinator: whatever waits for it goes on."""
        self._deaths.note(peer.sender, is_settled=is_settled)
        lost = self._membership.get(peer.sender)
        if lost is not None:
            return self._on_leave(lost, "its process ended", now, is_settled=is_settled)
        return self._breaks.on_gone(peer.sender) + self._hurry(now, peer) + self._ties.tell(now)

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
            *([Report(CLIENT_LEFT, {"name": actor.peer.actor})] if actor.role in HAVE_REQUESTS else []),
            *self._administration.forget(actor.peer),
            *self._health.forget(actor.peer),
            *self._rests.on_leave(actor),
        ]
        for request, entry in list(self._requests.items()):
            if is_settled and actor.peer != entry.client and actor.peer not in entry.pending.values():
                continue
            effects += self._lose(request, entry, actor, now)
        effects += self._breaks.on_gone(actor.sender)
        if actor.level:  # nobody waits any more for it to wake
            effects += self._lifecycle.run_held(now)
        # After the requests' own errors, which know more than a client can conclude from this.
        effects += [Send(other.peer, Lost(actor.peer, reason)) for other in self._membership]
        return [*effects, Forget(actor.peer)]

    def _lose(self, request: RequestId, entry: Request, actor: Actor, now: float) -> list[Common]:
        if entry.client == actor.peer:
            entry.wants_ack = False
            if entry.has_client_left and all(peer.sender != actor.sender for peer in entry.pending.values()):
                return []
        if entry.route is None:
            if entry.client != actor.peer:
                return []
            return self._lifecycle.end_early(request, RequestCancelled("the client is gone"), now)
        error = error_for_lost(actor, entry.route, entry.pipeline)
        if error is None:
            return []
        # By name and incarnation: a route that was told by somebody else may have another address of it.
        for stage in [stage for stage, peer in entry.pending.items() if peer.sender == actor.sender]:
            self._lifecycle.release(entry, stage)
        return self._lifecycle.give_up(request, entry, error, now)

    # --- connections that break ---------------------------------------------------------------------------

    def on_link_broken(self, peer: Peer, now: float) -> list[Common]:
        """The connection to an actor broke, which may have lost frames of ours: its introduction makes up for them."""
        actor = self._membership.get(peer.sender)
        return [] if actor is None else self._counted([Send(actor.peer, Introduce())], now)

    def _on_pong(self, actor: Actor, pong: Pong, now: float) -> list[Common]:
        if pong.nonce > NONCE:
            return self._health.on_pong(actor.sender, pong, now)
        effects = self._breaks.on_pong(actor, pong.nonce, now)
        return [*effects, *self._lifecycle.resume(now)] if effects else []

    def _check_adopted(self, request: RequestId, now: float) -> list[Common]:
        """Who takes part in an adopted request and is known to be gone, or has had the time to say hello, is lost."""
        entry = self._requests.get(request)
        if entry is None:
            return []
        took_part = dict(entry.pending)
        effects = self._end_adopted(request, entry, now)
        # Others may have sent them something for this request since they said hello.
        lost = [peer for stage, peer in took_part.items() if stage not in entry.pending]
        return effects + self._ties.take([*lost, entry.client], now, until=now)

    def _end_adopted(self, request: RequestId, entry: Request, now: float) -> list[Common]:
        absent, error = self._adoption.missing(entry)
        entry.wants_ack = entry.wants_ack and not isinstance(error, RequestCancelled)
        for stage in absent:
            self._lifecycle.release(entry, stage)
        broken, for_broken = (None, None) if error is not None else self._breaks.former(entry, now)
        error = error or for_broken
        if error is None:
            return self._lifecycle.settle(request, entry, now) if absent else []
        effects = self._lifecycle.give_up(request, entry, error, now)
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
            raise BadInput(f"operation '{frame.op}' is the supervisor's, to which `omni-bus` gives orders", field="op")
        match frame.op:
            case "health" | "metrics":
                served_by = ("stage", "gateway")
                others = [other for other in self._membership if other is not actor and other.role in served_by]
                absent = self._roster.absent(now)
                marks, wants_metrics = self._roster.marks, frame.op == "metrics"
                return self._health.begin(
                    actor.peer, frame.call, others, absent, now, marks, wants_metrics=wants_metrics
                )
            case "status":
                return [Send(actor.peer, AdminReply(frame.call, self._status(now)))]
            case "pipelines":
                return [Send(actor.peer, AdminReply(frame.call, msgspec.to_builtins(self._pipelines)))]
            case "arrange":
                # One that came back while it was to sleep was told so, and may sleep although the order failed.
                woken, changed = self._administration.arrange(frame.args)
                for name in woken:
                    self._rests.compare(name)
                told = [
                    other.peer for other in self._membership if other.role == "stage" and other.peer.actor in changed
                ]
                return [
                    *(self._welcome(peer) for peer in told),
                    Send(actor.peer, AdminReply(frame.call)),
                    *self._lifecycle.resume(now),
                    *self._lifecycle.run_held(now),
                ]
            case "drain":
                return self._administration.drain(actor.peer, frame.call, frame.args, now)
            case "rest":
                return self._rests.begin(actor.peer, frame.call, frame.args, now)
            case _:
                raise AssertionError(f"no such operation: {frame.op}")

    def _end_drain(self, number: str, now: float) -> list[Common]:
        effects, cut = self._administration.on_timer(number, self._roster.outstanding, now)
        for name in cut:
            for request, entry in self._roster.takes_part(name):
                effects += self._lifecycle.end_early(request, error_for_cut(name, entry.route, entry.pipeline), now)
        return effects

    def _status(self, now: float) -> dict[str, Any]:
        return {
            "is_draining": self._intake.is_closed,
            "requests": {"live": len(self._requests), **self._lifecycle.ended},
            "held": len(self._lifecycle.held),
            "frames": {"received": dict(self._received), "sent": dict(self._sent)},
            "pipelines": {name: admission.counts._asdict() for name, admission in self._admission.items()},
            "callers": [row for admission in self._admission.values() for row in admission.callers()[:MAX_CALLER_ROWS]],
            "actors": [*self._roster.present(now), *self._roster.absent(now)],
        }
