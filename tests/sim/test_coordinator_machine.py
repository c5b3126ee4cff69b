"""The coordinator among actors that break every rule: it never raises, ends each request once and keeps its counts."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.effects import DropTimer, Forget, Report, Send, SetTimer
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.quota import Quota
from omni_bus.core.recovery import origin
from omni_bus.core.request import State
from omni_bus.errors import ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Admin,
    Admit,
    Cancel,
    Cancelled,
    Credit,
    Done,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Inquire,
    Introduce,
    Lost,
    Outlook,
    Ping,
    Pong,
    Progress,
    Ready,
    Reject,
    Reroute,
    Rested,
    Route,
    RouteEdge,
    Stalled,
    Submit,
    Unheard,
)

ONE = (
    RouteEdge("in", "a", "llm", "a", "text", 4, 4096),
    RouteEdge("llm", "b", "out", "b", "text", 4, 4096),
)
TWO = (
    *ONE,
    RouteEdge("llm", "b", "voice", "b", "text", 4, 4096),
    RouteEdge("voice", "c", "out", "c", "text", 4, 4096),
)
PIPELINES = {
    "one": Pipeline("one", "one", (), ONE, max_in_flight=2, max_queued=2, max_queued_bytes=10),
    "two": Pipeline("two", "two", (), TWO, frozenset({"voice"}), max_in_flight=3, max_queued=1, timeout_s=30.0),
}
QUOTAS = {"small": Quota(0.5, 1, 1), "rated": Quota(4.0, requests_per_minute=30), "low": Quota(max_priority=0)}
callers = st.sampled_from(["", "", "other", *QUOTAS])

peers = st.builds(
    Peer,
    st.sampled_from(["llm.0", "llm.1", "voice.0", "gateway.0", "gateway.1"]),
    st.integers(1, 2),
    st.sampled_from(["a", "a", "a", "b"]),
)
replicas = st.sampled_from(["llm.0", "llm.1", "voice.0"])
requests = st.sampled_from([f"r{i}" for i in range(8)])
stages = st.sampled_from(["llm", "voice", "", "nowhere"])
roles = st.sampled_from(["stage", "gateway", "client"])
moments = st.floats(0.0, 3.0)
errors = st.sampled_from([ErrorInfo("stage_failed", "broke", stage="llm"), ErrorInfo("no_such_code", "?")])
routes = st.builds(
    Route,
    requests,
    st.sampled_from(["one", "two", "gone"]),
    peers,
    st.dictionaries(st.sampled_from(["llm", "voice", "nowhere"]), peers, max_size=2),
    st.sampled_from([ONE, TWO, ()]),
    st.integers(-1, 1),
    st.sampled_from([None, 5.0, 0.0, -1.0]),
    key=callers,
)


class Coordinator(RuleBasedStateMachine):
    """Frames of any kind from anybody at any time, timers late; frames that the core answers with are counted."""

    def __init__(self):
        super().__init__()
        self.core = CoordinatorCore(Peer("coordinator", 9, "c"), PIPELINES, quotas=QUOTAS)
        self.now = 0.0
        self.timers: dict[tuple[str, str], float] = {}
        self.routes: dict[str, Route] = {}
        self.entered: set[str] = set()
        self.live: set[str] = set()
        self.ends: Counter[tuple[str, Peer]] = Counter()
        self.acks: Counter[str] = Counter()
        self.successors: dict[str, set[str]] = {}

    def take(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(frame=Admit(route=route)):
                    former = self.routes.setdefault(route.request, route)
                    assert former == route, "admitted twice"
                    kept = self.core._administration.kept
                    if former is route:
                        assert not any(kept(peer.actor) for peer in route.stages.values())
                case Send(peer=peer, frame=Failed(request=request)):
                    self.ends[request, peer] += 1
                case Send(frame=Reroute(request=request, successor=successor)):
                    self.successors.setdefault(request, set()).add(successor)
                case Send(peer=peer, frame=Cancel()):
                    assert self.core._membership.get(peer.sender) is not None, "a cancel to nobody"
                case Send():
                    pass
                case SetTimer(key=key, at=at):
                    self.timers[key] = at
                case DropTimer(key=key):
                    self.timers.pop(key, None)
                case Report() | Forget():
                    pass
                case _:
                    raise AssertionError(effect)
        current = set(self.core._requests)
        assert not (current - self.live) & self.entered, "a request came back"
        self.entered |= current
        self.live = current

    def frame(self, peer: Peer, frame: Any, wait: float = 0.0) -> None:
        self.now += wait
        self.take(self.core.on_frame(peer.sender, frame, self.now))

    # --- actors that behave -------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["llm.0", "llm.1", "voice.0"]), incarnation=st.integers(1, 2))
    def stage_joins(self, name, incarnation):
        stage, _, replica = name.partition(".")
        peer = Peer(name, incarnation, "a")
        self.frame(peer, Hello(PROTOCOL_VERSION, peer, "stage", stage, int(replica), is_ready=True))

    @rule(number=st.integers(0, 1), incarnation=st.integers(1, 2))
    def gateway_joins(self, number, incarnation):
        peer = Peer(f"gateway.{number}", incarnation, "a")
        self.frame(peer, Hello(PROTOCOL_VERSION, peer, "gateway"))

    @rule(data=st.data(), wait=moments)
    def bound_stage_answers(self, data, wait):
        """A stage that the request is bound to says how it ended there."""
        bound = [(r, s, p) for r, e in self.core._requests.items() for s, p in e.pending.items()]
        if not bound:
            return
        request, _, peer = data.draw(st.sampled_from(bound))
        kinds = [Done(request), Cancelled(request, 1), Failed(request, ErrorInfo("stage_failed", "broke"))]
        self.frame(peer, data.draw(st.sampled_from(kinds)), wait)

    @rule(actor=st.sampled_from(["llm.0", "llm.1", "voice.0"]), incarnation=st.integers(1, 2))
    def supervisor_sees_a_stage_end(self, actor, incarnation):
        supervisor = Peer("supervisor", 1, "a")
        self.frame(supervisor, Hello(PROTOCOL_VERSION, supervisor, "supervisor"))
        self.frame(supervisor, Lost(Peer(actor, incarnation, "a")))

    @rule(
        actor=st.sampled_from(["llm.0", "llm.1", "voice.0"]),
        phase=st.sampled_from(["backing off", "degraded", "starting", "stopped"]),
    )
    def supervisor_tells_of_a_stage(self, actor, phase):
        supervisor = Peer("supervisor", 1, "a")
        stage, _, replica = actor.partition(".")
        self.frame(supervisor, Hello(PROTOCOL_VERSION, supervisor, "supervisor"))
        self.frame(supervisor, Outlook(actor, stage, int(replica), phase, "it died", 5.0))
        assert not any(request for request, _ in self.core._recovery.hopeless(self.now))

    # --- actors that don't --------------------------------------------------------------------------------

    @rule(
        peer=peers,
        version=st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION, 99]),
        claimed=st.none() | peers,
        role=roles,
        stage=stages,
        is_ready=st.booleans(),
        live=st.lists(routes, max_size=2),
        ran_s=st.lists(st.sampled_from([0.0, 3.0, 1e9, -1.0]), max_size=3),
    )
    def hello_of_anybody(self, peer, version, claimed, role, stage, is_ready, live, ran_s):
        self.frame(peer, Hello(version, claimed or peer, role, stage, 0, is_ready, tuple(live), tuple(ran_s)))

    @rule(
        peer=peers,
        request=requests,
        pipeline=st.sampled_from(["one", "two", "gone"]),
        outputs=st.sampled_from([(), ("b",), ("c",), ("zzz",)]),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from([None, 1.0, 0.0, -3.0]),
        key=callers,
        input_bytes=st.sampled_from([0, 0, 4, 11]),
        attempt=st.integers(0, 1),
    )
    def submit(self, peer, request, pipeline, outputs, priority, timeout_s, key, input_bytes, attempt):
        self.frame(peer, Submit(request, pipeline, outputs, priority, timeout_s, key, "", input_bytes, attempt))

    @rule(peer=peers, request=requests, error=errors, wait=moments, which=st.integers(0, 6))
    def word_about_any_request(self, peer, request, error, wait, which):
        frames = [
            Cancel(request, "why"),
            Cancelled(request, 1),
            Done(request),
            Failed(request, error),
            Inquire(request),
            Unheard(request),
            Reject(request, error),
        ]
        self.frame(peer, frames[which], wait)

    @rule(peer=peers, other=peers, which=st.integers(0, 14), wait=moments, number=st.integers(0, 3))
    def any_other_frame(self, peer, other, which, wait, number):
        frames = [
            Heartbeat(peer.endpoint, number),
            Ready(),
            Progress("loading", 0.5),
            Pong(number),
            Ping(number),
            Introduce(),
            Lost(other),
            Goodbye("bye"),
            Credit("r0", 0, 1, 1),
            Admin(number, "health"),
            Admin(number, "nonsense"),
            Stalled(peer, "llm", 0, 60.0),
            Stalled(other, "llm", 0, 60.0),
            Outlook("llm.0", "llm", 0, "degraded", "x", 60.0),
            Rested(number),
        ]
        self.frame(peer, frames[which], wait)

    @rule(data=st.data(), late_s=moments)
    def timer(self, data, late_s):
        """Timers fire in any order, late."""
        if not self.timers:
            return
        key = data.draw(st.sampled_from(sorted(self.timers)))
        self.now = max(self.now, self.timers.pop(key) + late_s)
        self.take(self.core.on_timer(key, self.now))

    # --- a supervisor -------------------------------------------------------------------------------------

    @rule(incarnation=st.integers(1, 2))
    def supervisor_joins(self, incarnation):
        peer = Peer("supervisor", incarnation, "s")
        self.frame(peer, Hello(PROTOCOL_VERSION, peer, "supervisor"))

    @rule(
        incarnation=st.integers(1, 2),
        drained=st.lists(replicas, max_size=3),
        returning=st.lists(replicas, max_size=2),
        asleep=st.dictionaries(replicas, st.integers(1, 2), max_size=2),
        is_good=st.integers(0, 9),
    )
    def arrange(self, incarnation, drained, returning, asleep, is_good):
        peer = Peer("supervisor", incarnation, "s")
        args = {"wanted": {"llm": 2}, "drained": drained, "returning": returning, "asleep": asleep}
        self.frame(peer, Admin(0, "arrange", args if is_good else {"drained": 1}))

    @rule(
        peer=st.builds(Peer, st.just("supervisor"), st.integers(1, 2), st.just("s")) | peers,
        actors=st.lists(replicas | st.just("gateway.0"), max_size=2),
        timeout_s=st.sampled_from([0.0, 2.0, -1.0]),
        is_forced=st.booleans(),
    )
    def drain_actors(self, peer, actors, timeout_s, is_forced):
        self.frame(peer, Admin(0, "drain", {"actors": actors, "timeout_s": timeout_s, "is_forced": is_forced}))

    @rule(
        peer=st.builds(Peer, st.just("supervisor"), st.integers(1, 2), st.just("s")) | peers,
        actors=st.lists(replicas | st.just("gateway.0"), max_size=2),
        level=st.integers(-1, 2),
    )
    def rest(self, peer, actors, level):
        self.frame(peer, Admin(0, "rest", {"actors": actors, "level": level}))

    @rule(incarnation=st.integers(1, 2), peer=peers, is_settled=st.booleans())
    def replica_retires(self, incarnation, peer, is_settled):
        self.frame(peer, Goodbye("retired", is_settled))
        self.frame(Peer("supervisor", incarnation, "s"), Lost(peer, is_settled))

    @rule(number=st.integers(0, 19))
    def drain_or_cut(self, number):
        if number == 0:
            self.take(self.core.drain(self.now))
        if number == 1:
            self.take(self.core.cut(self.now))

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def each_request_has_one_terminal_transition(self):
        ended = sum(self.core._lifecycle.ended[outcome] for outcome in ("done", "failed", "cancelled", "rerouted"))
        num_ending = sum(entry.state is State.ENDING for entry in self.core._requests.values())
        assert ended == len(self.entered) - len(self.core._requests) + num_ending

    @invariant()
    def capacity_is_conserved(self):
        requests = self.core._requests
        pending = Counter(peer.sender for entry in requests.values() for peer in entry.pending.values())
        assert pending == self.core._bindings._outstanding
        assert min(self.core._bindings._outstanding.values(), default=1) > 0
        for name, admission in self.core._admission.items():
            mine = {r: e for r, e in requests.items() if e.pipeline.name == name}
            queued = {r for r, e in mine.items() if e.state is State.QUEUED}
            recovering = {r for r, e in mine.items() if e.state is State.RECOVERING}
            assert admission._queued.keys() == queued
            assert admission._in_flight.keys() == mine.keys() - queued - recovering
            counts = admission.counts
            assert counts.queued <= counts.max_queued + sum(mine[r].is_back for r in queued)
            assert counts.in_flight <= counts.max_in_flight + sum(e.is_adopted for e in mine.values())
            assert counts.queued_bytes == sum(mine[r].submit.input_bytes for r in queued)
            assert counts.queued_bytes <= counts.max_queued_bytes + sum(
                mine[r].submit.input_bytes for r in queued if mine[r].is_back
            )

    @invariant()
    def callers_keep_their_own_limits(self):
        for row in self.core._status(self.now)["callers"]:
            mine = [e for e in self.core._requests.values() if e.submit.key == row["caller"]]
            mine = [e for e in mine if e.pipeline.name == row["pipeline"] and e.state is not State.RECOVERING]
            num_queued = sum(e.state is State.QUEUED for e in mine)
            assert (row["in_flight"], row["queued"]) == (len(mine) - num_queued, num_queued)
            quota = QUOTAS.get(row["caller"], Quota())
            num_back = sum(e.state is State.QUEUED and e.is_back for e in mine)
            assert quota.max_queued is None or num_queued <= quota.max_queued + num_back
            num_adopted = sum(e.is_adopted for e in mine)
            assert quota.max_in_flight is None or row["in_flight"] <= quota.max_in_flight + num_adopted
            assert quota.max_priority is None or all(
                e.submit.priority <= quota.max_priority or e.is_adopted for e in mine
            )

    @invariant()
    def nobody_waits_who_may_run(self):
        for admission in self.core._admission.values():
            if admission.counts.in_flight < admission.counts.max_in_flight:
                assert all(admission._accounts[place.caller].is_held for place in admission._queued.values())

    @invariant()
    def running_requests_are_bound_and_ending_ones_have_a_timer(self):
        for request, entry in self.core._requests.items():
            if entry.state in (State.QUEUED, State.HELD, State.RECOVERING):
                assert entry.route is None
                assert not entry.pending
            else:
                assert entry.pending
            if entry.state is State.ENDING:
                assert ("cancel", request) in self.timers

    @invariant()
    def waiting_for_a_replica_are_those_that_may_get_one(self):
        core = self.core
        held = {request for request, entry in core._requests.items() if entry.state is State.HELD}
        assert core._lifecycle.held.keys() == held
        for request in held:
            edges = core._requests[request].edges
            stages = {name for edge in edges for name in (edge.source, edge.target)} - {"in", "out"}
            assert any(core._administration.is_coming_back(stage) for stage in stages)

    @invariant()
    def drains_have_timers_and_are_over_when_nothing_is_left(self):
        drains = self.core._administration._drains
        assert {("drain", number) for number in drains} == {key for key in self.timers if key[0] == "drain"}
        for drain in drains.values():
            assert any(self.core._roster.outstanding(name) for name in drain.args.actors)

    @invariant()
    def orders_to_rest_have_timers_and_somebody_here_who_has_not_answered(self):
        orders = self.core._rests._orders
        assert {("rest", str(number)) for number in orders} == {key for key in self.timers if key[0] == "rest"}
        for order in orders.values():
            assert order.waiting
            assert all(self.core._membership.get(peer.sender) is not None for peer in order.waiting.values())

    @invariant()
    def who_waits_for_a_replica_has_a_timer_and_a_reason(self):
        recovering = {r: e for r, e in self.core._requests.items() if e.state is State.RECOVERING}
        assert self.core._recovery._waiting == recovering
        for request, entry in recovering.items():
            assert ("recover", request) in self.timers
            assert self.core._intake.missing(entry.edges) is not None

    @invariant()
    def each_request_has_at_most_one_successor(self):
        for request, successors in self.successors.items():
            assert len(successors) == 1
            assert origin(request) == request, "a successor has none"

    @invariant()
    def membership_tables_agree(self):
        membership = self.core._membership
        staged = {actor.peer for actors in membership._by_stage.values() for actor in actors.values()}
        assert staged == {actor.peer for actor in membership if actor.role == "stage"}
        for actor in membership:
            assert ("alive", actor.peer.actor) in self.timers

    def teardown(self):
        """When everybody leaves and the timers run out, nothing is left."""
        for actor in self.core._membership:
            self.frame(actor.peer, Goodbye())
        for _ in range(200):
            if not self.timers:
                break
            key = min(self.timers, key=lambda key: self.timers[key])
            self.now = max(self.now, self.timers.pop(key))
            self.take(self.core.on_timer(key, self.now))
        assert not self.core._requests
        assert self.core._bindings.total == 0
        assert not self.core._health._rounds
        assert not self.core._rests._orders
        assert not self.timers


TestCoordinator = pytest.mark.timeout(180)(Coordinator.TestCase)
TestCoordinator.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
