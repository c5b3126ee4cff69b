from collections import Counter
from typing import Any

import msgspec
import pytest

from omni_bus.core import adoption, coordinator
from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.effects import DropTimer, Forget, Send, SetTimer
from omni_bus.core.lifecycle import CANCEL_RETRY_S
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.quota import Quota
from omni_bus.core.recovery import MAX_WAIT_S
from omni_bus.core.request import State
from omni_bus.errors import ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Admin,
    AdminReply,
    Admit,
    Cancel,
    Cancelled,
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
    Refused,
    Reject,
    Reroute,
    Route,
    RouteEdge,
    Stalled,
    Submit,
    Welcome,
)

LLM, VOICE, GATEWAY = Peer("llm.0", 1, "l"), Peer("voice.0", 2, "v"), Peer("gateway.0", 3, "g")
SUPERVISOR = Peer("supervisor.0", 5, "s")
EDGES = (
    RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
    RouteEdge("llm", "text", "out", "text", "text", 4, 4096),
    RouteEdge("llm", "text", "voice", "text", "text", 4, 4096),
    RouteEdge("voice", "audio", "out", "audio", "text", 4, 4096),
)
PATIENCE_S = 5.0


class Deployment:
    """A coordinator, and the frames that it sent to each actor."""

    def __init__(
        self,
        *,
        max_in_flight=4,
        max_queued=4,
        timeout_s=None,
        non_idempotent=frozenset(),
        quotas=None,
        heartbeat_s=1.0,
        awaited=(),
    ):
        pipeline = Pipeline("chat", "chat", (), EDGES, non_idempotent, max_in_flight, max_queued, timeout_s, 1000)
        self.core = CoordinatorCore(
            Peer("coordinator", 9, "c"), {"chat": pipeline}, heartbeat_s, quotas, awaited=awaited
        )
        self.heartbeat_s = heartbeat_s
        self.now = 0.0
        self.sent: list[Any] = []
        self.forgotten: list[Peer] = []
        self.timers: dict[tuple[str, str], float] = {}
        self.take(self.core.start(self.now))

    def take(self, effects):
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append(effect)
                case SetTimer(key=key, at=at):
                    self.timers[key] = at
                case DropTimer(key=key):
                    self.timers.pop(key, None)
                case Forget(peer=peer):
                    self.forgotten.append(peer)
                case _:
                    pass

    def frame(self, peer, frame):
        self.take(self.core.on_frame(peer.sender, frame, self.now))

    def join(self, *peers, is_ready=True, live=(), ran_s=(), received=None):
        received = ((),) * len(live) if received is None else received
        for peer in peers:
            name, _, replica = peer.actor.partition(".")
            role = name if name in ("gateway", "supervisor") else "stage"
            stage = name if role == "stage" else ""
            self.frame(peer, Hello(PROTOCOL_VERSION, peer, role, stage, int(replica), is_ready, live, ran_s, received))

    def submit(self, *requests, outputs=("text",), **fields):
        for request in requests:
            self.frame(GATEWAY, Submit(request, "chat", outputs, **fields))

    def to(self, peer, kind) -> list[Any]:
        """Take the frames of a kind that were sent to a peer since the last call."""
        found = [send.frame for send in self.sent if send.peer == peer and isinstance(send.frame, kind)]
        self.sent = [send for send in self.sent if not (send.peer == peer and isinstance(send.frame, kind))]
        return found

    def wait_until(self, at):
        while self.timers:
            key = min(self.timers, key=lambda key: self.timers[key])
            if self.timers[key] > at:
                break
            self.now = max(self.now, self.timers.pop(key))
            self.take(self.core.on_timer(key, self.now))
        self.now = at

    def beat_until(self, at, *peers):
        """Wait, and have these actors live meanwhile."""
        while self.now < at:
            for peer in peers:
                self.frame(peer, Heartbeat(peer.endpoint))
            self.wait_until(min(at, self.now + self.heartbeat_s))

    def is_clean(self):
        core = self.core
        counts = core._admission["chat"].counts
        kinds = {kind for kind, _ in self.timers} - {"alive", "strangers"}
        return not (core.num_live or core._bindings.total or counts.in_flight or counts.queued or kinds)


@pytest.fixture
def up() -> Deployment:
    deployment = Deployment()
    deployment.join(LLM, VOICE, GATEWAY)
    return deployment


def route(request="r", **stages) -> Route:
    stages = stages or {"llm": LLM, "voice": VOICE}
    edges = EDGES if "voice" in stages else EDGES[:2]
    return Route(request, "chat", GATEWAY, stages, edges)


def codes(frames) -> list[str]:
    return [frame.error.code for frame in frames]


# --- membership ---------------------------------------------------------------------------------------------


def test_hello_is_welcomed_and_another_version_refused():
    deployment = Deployment()
    deployment.join(LLM)
    deployment.frame(VOICE, Hello(PROTOCOL_VERSION + 1, VOICE, "stage", "voice"))

    assert deployment.to(LLM, Welcome)[0].coordinator == Peer("coordinator", 9, "c")
    assert "version" in deployment.to(VOICE, Refused)[0].error.message


@pytest.mark.parametrize("role", ["stage", "gateway", "supervisor"])
def test_who_comes_with_a_clients_key_can_be_nothing_else(role):
    deployment = Deployment()
    client = Peer("client.laptop.x", 4, "x")

    deployment.frame(client, Hello(PROTOCOL_VERSION, client, role, "llm" if role == "stage" else ""))
    (refused,) = deployment.to(client, Refused)
    assert refused.error.message == f"client.laptop.x comes with a client's key and calls itself a {role}"

    deployment.frame(client, Hello(PROTOCOL_VERSION, client, "client"))
    assert len(deployment.to(client, Welcome)) == 1


def test_stranger_is_asked_to_introduce_itself():
    deployment = Deployment()
    deployment.frame(LLM, Heartbeat("there"))
    deployment.frame(LLM, Ready())

    assert deployment.sent == [Send(Peer("llm.0", 1, "there"), Introduce())]


def test_way_to_a_stranger_that_never_introduces_itself_is_closed():
    deployment, elsewhere = Deployment(), Peer(LLM.actor, LLM.incarnation, "elsewhere")
    for stranger in (LLM, VOICE, elsewhere):
        deployment.frame(stranger, Heartbeat(stranger.endpoint))
    deployment.frame(GATEWAY, Hello(PROTOCOL_VERSION + 1, GATEWAY, "gateway"))
    deployment.join(LLM)

    deployment.beat_until(20.0, LLM)

    assert deployment.forgotten == [VOICE, elsewhere, GATEWAY]


def test_refused_hello_of_a_member_closes_no_way_to_it(up):
    up.frame(GATEWAY, Hello(PROTOCOL_VERSION + 1, GATEWAY, "gateway"))

    up.beat_until(20.0, LLM, VOICE, GATEWAY)

    assert up.forgotten == []


def test_who_asked_for_health_and_left_is_sent_nothing(up):
    """It would open the way to it again, which nobody would close."""
    up.join(SUPERVISOR)
    up.frame(SUPERVISOR, Admin(1, "health", {}))
    up.frame(SUPERVISOR, Goodbye())

    for peer in (LLM, VOICE, GATEWAY):
        for ping in up.to(peer, Ping):
            up.frame(peer, Pong(ping.nonce))

    assert up.to(SUPERVISOR, AdminReply) == []
    assert up.is_clean()


def test_silent_actor_is_lost_after_five_beats(up):
    up.now = 3.0
    up.frame(LLM, Heartbeat("l"))
    up.wait_until(PATIENCE_S)
    assert up.forgotten == [VOICE, GATEWAY]
    assert up.to(LLM, Lost) == [Lost(VOICE, "no heartbeat for 5 s"), Lost(GATEWAY, "no heartbeat for 5 s")]

    up.wait_until(3.0 + PATIENCE_S)

    assert up.forgotten == [VOICE, GATEWAY, LLM]


def test_new_incarnation_replaces_the_former(up):
    up.submit("r")
    successor = Peer("llm.0", 77, "l")
    up.join(successor)

    assert up.forgotten == [LLM]
    assert up.to(GATEWAY, Lost) == [Lost(LLM, "replaced by a newcomer of its name")]
    assert codes(up.to(GATEWAY, Reroute)) == ["stage_lost"]
    up.submit("s")
    assert [admit.route.stages for admit in up.to(GATEWAY, Admit)[1:]] == [{"llm": successor}] * 2


def test_stage_holding_more_than_is_bound_is_asked_for_its_list(up):
    up.submit("r")
    up.frame(LLM, Heartbeat("l", 1))
    assert up.to(LLM, Introduce) == []

    up.frame(LLM, Heartbeat("l", 2))

    assert up.to(LLM, Introduce) == [Introduce()]


def test_progress_and_readiness_show_in_status(up):
    starting = Peer("llm.1", 4, "x")
    up.join(starting, is_ready=False)
    up.frame(starting, Progress("weights", 0.5))
    up.submit("r")
    up.frame(GATEWAY, Admin(5, "status"))

    (reply,) = up.to(GATEWAY, AdminReply)
    rows = {row["actor"]: row for row in reply.result["actors"]}
    assert (rows["llm.1"]["phase"], rows["llm.1"]["fraction"], rows["llm.1"]["is_ready"]) == ("weights", 0.5, False)
    assert rows["llm.0"]["outstanding"] == 1
    assert reply.result["requests"]["live"] == 1


def test_unknown_operation_names_the_known_ones(up):
    up.frame(GATEWAY, Admin(5, "helth"))

    (reply,) = up.to(GATEWAY, AdminReply)
    assert "did you mean 'health'" in reply.error.message


def test_heartbeats_of_those_who_submit_are_answered(up):
    up.to(GATEWAY, Welcome)
    up.to(LLM, Welcome)
    up.frame(GATEWAY, Heartbeat("g"))
    up.frame(LLM, Heartbeat("l"))

    assert len(up.to(GATEWAY, Welcome)) == 1
    assert up.to(LLM, Welcome) == []


def test_health_asks_everybody_once(up):
    up.frame(GATEWAY, Admin(5, "health"))
    for peer in (LLM, VOICE):
        (ping,) = up.to(peer, Ping)
        up.frame(peer, Pong(ping.nonce))

    (reply,) = up.to(GATEWAY, AdminReply)
    assert [row["is_live"] for row in reply.result] == [True, True]
    assert up.is_clean()


# --- one request --------------------------------------------------------------------------------------------


def test_admitted_request_is_bound_to_needed_stages_only(up):
    up.submit("r")
    up.submit("s", outputs=("audio",))

    admits = up.to(GATEWAY, Admit)
    assert admits[0].route.stages == {"llm": LLM}
    assert admits[0].route.edges == EDGES[:2]
    assert admits[1].route.stages == {"llm": LLM, "voice": VOICE}


def test_route_says_whether_the_client_wants_to_know_what_stages_did(up):
    up.submit("plain")
    up.submit("curious", wants_metrics=True)

    assert [admit.route.wants_metrics for admit in up.to(GATEWAY, Admit)] == [False, True]


def test_request_ends_once_all_stages_are_done(up):
    up.submit("r", outputs=())
    up.frame(LLM, Done("r"))
    assert up.core.num_live == 1
    up.frame(LLM, Done("r"))
    up.frame(VOICE, Done("r"))

    assert up.is_clean()
    assert up.to(GATEWAY, Failed) == []
    up.frame(VOICE, Done("r"))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"outputs": ("txt",)}, "unknown_name"),
        ({"timeout_s": 0.0}, "deadline_exceeded"),
        ({"timeout_s": -1.0}, "deadline_exceeded"),
    ],
)
def test_bad_submits_are_rejected_with_a_reason(up, fields, code):
    up.submit("r", **fields)

    assert codes(up.to(GATEWAY, Reject)) == [code]
    assert up.is_clean()


def test_unknown_pipeline_is_rejected(up):
    up.frame(GATEWAY, Submit("r", "chta", ()))

    assert "did you mean 'chat'" in up.to(GATEWAY, Reject)[0].error.message


def test_submit_that_comes_twice_runs_once(up):
    up.submit("r")
    up.submit("r")
    up.frame(LLM, Done("r"))

    assert len(up.to(GATEWAY, Admit)) == 1
    assert up.to(GATEWAY, Reject) == []
    assert up.is_clean()


def test_used_id_is_rejected_also_after_the_end(up):
    other = Peer("gateway.1", 4, "h")
    up.join(other)
    up.submit("r")
    up.submit("r", priority=1)
    up.frame(other, Submit("r", "chat", ("text",), attempt=1))
    assert codes(up.to(other, Reject)) == ["bad_input"]
    up.frame(LLM, Done("r"))
    up.submit("r")

    assert codes(up.to(GATEWAY, Reject)) == ["bad_input", "bad_input"]


def test_submit_that_is_repeated_is_one_request(up):
    """A client repeats it when the coordinator did not know the client, without knowing what was heard before."""
    up.submit("r")
    up.submit("r", attempt=1)

    first, second = up.to(GATEWAY, Admit)
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.route == second.route
    assert up.core.num_live == 1


def test_repeated_submit_that_waits_is_answered_as_its_last_attempt():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("first", "r")
    deployment.submit("r", attempt=1)
    deployment.frame(LLM, Done("first"))

    assert [(admit.route.request, admit.attempt) for admit in deployment.to(GATEWAY, Admit)] == [("first", 0), ("r", 1)]


def test_repeated_submit_of_what_ends_is_told_the_end(up):
    up.submit("r")
    up.frame(LLM, Failed("r", ErrorInfo("stage_failed", "broke")))
    up.submit("s", outputs=("audio",))
    up.frame(LLM, Failed("s", ErrorInfo("stage_failed", "broke")))
    assert up.core.num_live == 1, "voice has not let go of s"
    assert codes(up.to(GATEWAY, Failed)) == ["stage_failed", "stage_failed"]
    up.submit("s", outputs=("audio",), attempt=1)

    assert codes(up.to(GATEWAY, Failed)) == ["stage_failed"]


def test_repeated_submit_of_what_was_given_up_may_be_tried_again(up):
    up.submit("r")
    up.frame(GATEWAY, Goodbye())
    up.wait_until(CANCEL_RETRY_S)
    up.frame(LLM, Cancelled("r", 1))
    up.join(GATEWAY)
    up.submit("r", attempt=1)

    (reject,) = up.to(GATEWAY, Reject)
    assert (reject.error.code, reject.error.is_retry_safe) == ("unavailable", True)


def test_missing_stage_is_refused_at_once():
    deployment = Deployment()
    deployment.join(LLM, GATEWAY)
    deployment.join(VOICE, is_ready=False)
    deployment.submit("r", outputs=())

    (reject,) = deployment.to(GATEWAY, Reject)
    assert (reject.error.code, reject.error.stage, reject.error.is_retry_safe) == ("unavailable", "voice", True)
    deployment.frame(VOICE, Ready())
    deployment.submit("s", outputs=())
    assert len(deployment.to(GATEWAY, Admit)) == 1


def test_deadline_cancels_stages_and_tells_the_client(up):
    up.submit("r", timeout_s=2.0)
    up.submit("s", timeout_s=4.0)
    for peer in (LLM, VOICE, GATEWAY):
        up.frame(peer, Heartbeat("x"))
    up.wait_until(2.0)

    assert codes(up.to(GATEWAY, Failed)) == ["deadline_exceeded"]
    assert up.to(LLM, Cancel) == [Cancel("r", "deadline_exceeded")]
    up.frame(LLM, Cancelled("r", 1))
    up.frame(LLM, Done("s"))
    assert up.is_clean()


def test_pipeline_deadline_counts_waiting_time():
    deployment = Deployment(max_in_flight=1, timeout_s=3.0)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("r", "s")
    deployment.now = 1.0
    deployment.frame(LLM, Done("r"))

    assert [admit.route.timeout_s for admit in deployment.to(GATEWAY, Admit)] == [3.0, 2.0]


# --- cancel -------------------------------------------------------------------------------------------------


def test_cancel_is_acknowledged_when_every_stage_let_go(up):
    up.submit("r", outputs=())
    up.frame(GATEWAY, Cancel("r", "gone"))
    assert [up.to(peer, Cancel) for peer in (LLM, VOICE)] == [[Cancel("r", "cancelled")]] * 2
    up.frame(LLM, Cancelled("r", 1))
    assert up.to(GATEWAY, Cancelled) == []

    up.frame(VOICE, Cancelled("r", 1))

    assert up.to(GATEWAY, Cancelled) == [Cancelled("r", 2)]
    assert up.to(GATEWAY, Failed) == []
    assert up.is_clean()


def test_cancel_is_repeated_until_answered(up):
    up.submit("r")
    up.frame(GATEWAY, Cancel("r"))
    for number in range(1, 4):
        up.wait_until(number * CANCEL_RETRY_S)

    assert len(up.to(LLM, Cancel)) == 4
    up.frame(LLM, Cancelled("r"))
    assert up.is_clean()


def test_cancel_of_a_waiting_request_is_answered_at_once():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("r", "s")
    deployment.frame(GATEWAY, Cancel("s"))

    assert deployment.to(GATEWAY, Cancelled) == [Cancelled("s", 0)]
    assert deployment.to(GATEWAY, Reject) == []


def test_cancel_of_an_unknown_request_is_answered(up):
    up.frame(GATEWAY, Cancel("zzz"))

    assert up.to(GATEWAY, Cancelled) == [Cancelled("zzz", 0)]


def test_stranger_may_not_cancel(up):
    other = Peer("gateway.1", 8, "o")
    up.join(other)
    up.submit("r")
    up.frame(other, Cancel("r"))

    assert up.to(LLM, Cancel) == []
    assert up.core.num_live == 1


def test_failure_of_one_stage_cancels_the_others(up):
    up.submit("r", outputs=())
    up.frame(LLM, Failed("r", ErrorInfo("stage_failed", "out of memory", stage="llm")))

    (failed,) = up.to(GATEWAY, Failed)
    assert (failed.error.message, failed.error.stage) == ("out of memory", "llm")
    assert up.to(LLM, Cancel) == []
    assert len(up.to(VOICE, Cancel)) == 1
    up.frame(VOICE, Cancelled("r"))
    assert up.is_clean()


def test_stage_that_lets_go_unasked_has_the_request_run_anew(up):
    """A former coordinator's cancel of an earlier attempt reached it; the others would wait for its output for ever."""
    up.submit("r", outputs=())
    up.to(GATEWAY, Admit)
    up.frame(LLM, Cancelled("r", 1))

    (reroute,) = up.to(GATEWAY, Reroute)
    assert (reroute.error.code, reroute.error.stage, reroute.error.is_retry_safe) == ("stage_lost", "llm", True)
    assert [admit.route.request for admit in up.to(GATEWAY, Admit)] == [reroute.successor]
    assert [cancel.request for cancel in up.to(VOICE, Cancel)] == ["r"]


def test_stage_that_lets_go_unasked_ends_what_must_not_be_repeated():
    up = Deployment(non_idempotent=frozenset({"voice"}))
    up.join(LLM, VOICE, GATEWAY)
    up.submit("r", outputs=())
    up.frame(LLM, Cancelled("r", 1))

    (failed,) = up.to(GATEWAY, Failed)
    assert (failed.error.code, failed.error.is_retry_safe) == ("stage_lost", False)


def test_stage_that_let_go_of_an_adopted_request_ends_it():
    """Its former coordinator had ended it, for a reason of its own."""
    new = Deployment()
    new.join(GATEWAY, VOICE, live=(route(),))
    new.join(LLM)
    new.frame(LLM, Cancelled("r", 1))

    assert codes(new.to(GATEWAY, Failed)) == ["cancelled"]
    assert len(new.to(VOICE, Cancel)) == 1


# --- limits -------------------------------------------------------------------------------------------------


def test_requests_beyond_the_limits_wait_then_are_refused():
    deployment = Deployment(max_in_flight=1, max_queued=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("a", "b", "c")
    assert codes(deployment.to(GATEWAY, Reject)) == ["overloaded"]
    assert [admit.route.request for admit in deployment.to(GATEWAY, Admit)] == ["a"]

    deployment.frame(LLM, Done("a"))

    assert [admit.route.request for admit in deployment.to(GATEWAY, Admit)] == ["b"]


def test_who_was_let_go_keeps_the_place_until_the_stage_has_said_so():
    """The client hears of it from the stage, and may ask again before the coordinator has heard."""
    deployment = Deployment(max_in_flight=1, max_queued=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("a")
    deployment.submit("waits")
    deployment.submit("b", former="a")
    deployment.submit("c", former="a")
    deployment.submit("d", former="unknown")
    deployment.submit("e", former="waits")
    assert [frame.request for frame in deployment.to(GATEWAY, Reject)] == ["c", "d", "e"]

    deployment.to(GATEWAY, Admit)
    deployment.frame(LLM, Done("a"))
    assert [admit.route.request for admit in deployment.to(GATEWAY, Admit)] == ["b"]
    deployment.frame(LLM, Done("b"))
    assert [admit.route.request for admit in deployment.to(GATEWAY, Admit)] == ["waits"]
    deployment.frame(LLM, Done("waits"))
    assert deployment.is_clean()


@pytest.mark.parametrize(
    ("client", "fields"),
    [(GATEWAY, {"priority": 1}), (GATEWAY, {"key": "somebody"}), (Peer("gateway.1", 7, "o"), {})],
)
def test_place_is_kept_only_for_the_same_caller_with_the_same_priority(client, fields):
    deployment = Deployment(max_in_flight=1, max_queued=0)
    deployment.join(LLM, VOICE, *{GATEWAY, client})
    deployment.submit("a")
    deployment.frame(client, Submit("b", "chat", ("text",), former="a", **fields))

    assert codes(deployment.to(client, Reject)) == ["overloaded"]


def test_callers_own_limit_is_told_from_the_pipelines():
    deployment = Deployment(max_in_flight=1, max_queued=2, quotas={"small": Quota(max_queued=0)})
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("a")
    deployment.submit("b", key="small")
    deployment.submit("c", "d", "e")
    assert codes(deployment.to(GATEWAY, Reject)) == ["quota_exceeded", "overloaded"]

    deployment.frame(GATEWAY, Admin(7, "status"))

    (reply,) = deployment.to(GATEWAY, AdminReply)
    assert [(row["caller"], row["in_flight"], row["queued"], row["refused"]) for row in reply.result["callers"]] == [
        ("", 1, 2, 1),
        ("small", 0, 0, 1),
    ]


def test_request_that_makes_room_is_told_at_once():
    deployment = Deployment(max_in_flight=1, max_queued=2)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("running")
    deployment.submit("a1", "a2", key="a", timeout_s=50.0)

    deployment.submit("b1", key="b")

    (rejected,) = deployment.to(GATEWAY, Reject)
    assert (rejected.request, rejected.error.code, rejected.error.is_retry_safe) == ("a2", "overloaded", True)
    assert ("deadline", "a2") not in deployment.timers
    for running in ("running", "a1", "b1"):
        deployment.frame(LLM, Done(running))
    assert [admit.route.request for admit in deployment.to(GATEWAY, Admit)] == ["running", "a1", "b1"]
    assert deployment.is_clean()


def test_input_that_waits_is_limited_and_shown():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("running", "a", input_bytes=900)
    deployment.submit("b", input_bytes=101)
    assert codes(deployment.to(GATEWAY, Reject)) == ["overloaded"]

    deployment.frame(GATEWAY, Admin(7, "status"))

    counts = deployment.to(GATEWAY, AdminReply)[0].result["pipelines"]["chat"]
    assert (counts["queued_bytes"], counts["max_queued_bytes"]) == (900, 1000)


def test_deadline_that_cannot_be_met_is_refused_before_it_comes():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("a")
    deployment.now = 3.0
    deployment.frame(LLM, Done("a"))
    deployment.submit("b", "c")

    deployment.submit("d", timeout_s=2.9)

    assert codes(deployment.to(GATEWAY, Reject)) == ["deadline_exceeded"]
    assert ("deadline", "d") not in deployment.timers


def test_work_goes_to_the_replica_with_least_of_it(up):
    second = Peer("llm.1", 4, "x")
    up.join(second)
    up.submit("a", "b", "c")
    up.frame(second, Done("b"))
    up.submit("d")

    assert [admit.route.stages["llm"] for admit in up.to(GATEWAY, Admit)] == [LLM, second, LLM, second]


def test_long_queue_is_refused_without_nesting():
    """A stage is lost while thousands wait for it."""
    deployment = Deployment(max_in_flight=1, max_queued=1500)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit(*(f"r{number}" for number in range(1501)))

    deployment.frame(LLM, Goodbye())
    assert deployment.to(GATEWAY, Reject) == [], "another replica may come"
    deployment.beat_until(MAX_WAIT_S, VOICE, GATEWAY)

    rejected = deployment.to(GATEWAY, Reject)
    assert Counter(codes(rejected)) == {"unavailable": 1500, "stage_lost": 1}
    assert deployment.is_clean()


def test_draining_refuses_waiting_and_new_requests_and_lets_others_run():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("a", "b")
    deployment.take(deployment.core.drain(0.0))
    deployment.submit("c")
    assert codes(deployment.to(GATEWAY, Reject)) == ["unavailable", "unavailable"]
    assert deployment.core.num_live == 1

    deployment.take(deployment.core.cut(1.0))

    assert codes(deployment.to(GATEWAY, Failed)) == ["unavailable"]
    deployment.frame(LLM, Cancelled("a"))
    assert deployment.is_clean()


# --- loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("non_idempotent", [frozenset(), frozenset({"voice"})])
def test_lost_stage_ends_its_requests_and_only_the_living_are_awaited(non_idempotent):
    deployment = Deployment(non_idempotent=non_idempotent)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("r", outputs=())
    deployment.submit("text only")
    deployment.frame(VOICE, Goodbye())

    (ended,) = deployment.to(GATEWAY, Failed if non_idempotent else Reroute)
    assert (ended.request, ended.error.stage) == ("r", "voice")
    assert ended.error.is_retry_safe == (not non_idempotent)
    assert deployment.to(VOICE, Cancel) == []
    deployment.frame(GATEWAY, Cancel("r.2"))
    deployment.frame(LLM, Cancelled("r"))
    deployment.frame(LLM, Done("text only"))
    assert deployment.is_clean()


def test_client_hears_of_its_requests_before_the_loss(up):
    up.join(Peer("llm.1", 4, "x"))
    up.submit("r")
    up.frame(LLM, Goodbye())

    kinds = [type(send.frame) for send in up.sent if send.peer == GATEWAY]
    assert kinds[-3:] == [Reroute, Admit, Lost]


def test_lost_gateway_cancels_its_requests_and_is_told_nothing():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("r", "waiting")
    deployment.frame(GATEWAY, Cancel("r"))
    deployment.frame(GATEWAY, Goodbye())
    deployment.frame(LLM, Cancelled("r"))

    assert deployment.to(GATEWAY, Cancelled) == []
    assert deployment.is_clean()


def test_actor_that_changes_its_stage_has_left(up):
    up.submit("r")
    up.frame(LLM, Hello(PROTOCOL_VERSION, LLM, "stage", "voice", 1, is_ready=True))

    assert codes(up.to(GATEWAY, Reroute)) == ["stage_lost"]
    assert up.core._membership.replicas("llm") == []


# --- recovery -----------------------------------------------------------------------------------------------


SECOND = Peer("llm.1", 4, "x")


def admitted(deployment) -> list[str]:
    return [admit.route.request for admit in deployment.to(GATEWAY, Admit)]


def test_successor_runs_at_once_where_another_replica_is(up):
    up.join(SECOND)
    up.submit("r", timeout_s=20.0, priority=2)
    up.now = 4.0
    up.frame(LLM, Goodbye())

    (reroute,) = up.to(GATEWAY, Reroute)
    assert (reroute.request, reroute.successor, reroute.error.code) == ("r", "r.2", "stage_lost")
    route = up.to(GATEWAY, Admit)[-1].route
    assert (route.request, route.stages, route.is_retry) == ("r.2", {"llm": SECOND}, True)
    assert (route.priority, route.timeout_s) == (2, 16.0)
    assert up.to(GATEWAY, Failed) == []
    up.frame(SECOND, Done("r.2"))
    assert up.is_clean()
    assert up.core._lifecycle.ended == {"done": 1, "failed": 0, "cancelled": 0, "rejected": 0, "rerouted": 1}


def test_successor_waits_for_every_stage_to_have_a_replica(up):
    up.submit("r", outputs=())
    up.frame(LLM, Goodbye())
    up.frame(VOICE, Goodbye())
    assert up.to(GATEWAY, Admit)[1:] == []

    up.join(LLM)
    up.join(VOICE, is_ready=False)
    assert up.to(GATEWAY, Admit) == []
    up.frame(VOICE, Ready())

    assert admitted(up) == ["r.2"]
    assert ("recover", "r.2") not in up.timers


def test_second_loss_ends_the_request(up):
    up.join(SECOND)
    up.submit("r")
    up.frame(LLM, Goodbye())
    up.frame(SECOND, Goodbye())

    (failed,) = up.to(GATEWAY, Failed)
    assert (failed.request, failed.error.code, failed.error.is_retry_safe) == ("r.2", "stage_lost", True)
    assert len(up.to(GATEWAY, Reroute)) == 1
    assert up.is_clean()


def test_wait_in_vain_ends_after_ten_seconds_with_the_loss(up):
    up.submit("r")
    up.frame(LLM, Goodbye())
    up.beat_until(MAX_WAIT_S, VOICE, GATEWAY)

    (reject,) = up.to(GATEWAY, Reject)
    assert (reject.request, reject.error.code, reject.error.stage) == ("r.2", "stage_lost", "llm")
    assert reject.error.message.endswith(
        "was lost while it worked on the request, and none came in its place within 10 s"
    )
    assert up.is_clean()


def test_deadline_holds_for_the_successor_too(up):
    up.submit("r", timeout_s=6.0)
    up.now = 2.0
    up.frame(LLM, Goodbye())
    up.beat_until(6.0, VOICE, GATEWAY)

    assert codes(up.to(GATEWAY, Reject)) == ["deadline_exceeded"]
    assert up.is_clean()


def test_successor_of_a_degraded_stage_is_refused_at_once(up):
    up.join(SUPERVISOR)
    up.submit("r")
    up.frame(SUPERVISOR, Lost(LLM))
    up.frame(SUPERVISOR, Outlook("llm.0", "llm", 0, "backing off", "exit code 70", 0.5))
    assert up.to(GATEWAY, Reject) == []

    up.frame(SUPERVISOR, Outlook("llm.0", "llm", 0, "degraded", "exit code 70", 60.0))

    (reject,) = up.to(GATEWAY, Reject)
    assert (reject.request, reject.error.code, reject.error.stage) == ("r.2", "unavailable", "llm")
    assert reject.error.retry_after_s == 60.0
    up.submit("s")
    assert codes(up.to(GATEWAY, Reject)) == ["unavailable"]


@pytest.mark.parametrize("others", [(), (SECOND,)], ids=["degraded", "another serves"])
def test_who_lost_one_stage_is_told_at_once_where_another_is_degraded(up, others):
    """That one had done its part and left; it came back, died, and comes no more."""
    up.join(SUPERVISOR, *others)
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Done("r"))
    up.frame(LLM, Goodbye(is_settled=True))
    up.join(again := msgspec.structs.replace(LLM, incarnation=77))
    up.frame(SUPERVISOR, Lost(again))
    up.frame(SUPERVISOR, Outlook("llm.0", "llm", 0, "degraded", "exit code 70", 60.0))
    assert up.to(GATEWAY, Failed) == []

    up.frame(SUPERVISOR, Lost(VOICE))

    if others:
        assert [reroute.successor for reroute in up.to(GATEWAY, Reroute)] == ["r.2"]
        return
    (failed,) = up.to(GATEWAY, Failed)
    assert (failed.error.code, failed.error.stage, failed.error.is_retry_safe) == ("stage_lost", "voice", True)
    assert up.to(GATEWAY, Reroute) == []
    assert up.is_clean()


def test_only_a_supervisor_tells_of_replicas(up):
    up.submit("r")
    up.frame(LLM, Goodbye())
    up.frame(GATEWAY, Outlook("llm.0", "llm", 0, "degraded"))

    assert up.to(GATEWAY, Reject) == []


def test_successor_goes_ahead_of_the_queue_and_not_beyond_the_limit():
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, SECOND, VOICE, GATEWAY)
    deployment.submit("first", outputs=())
    deployment.submit("queued")
    deployment.submit("urgent", priority=1)
    deployment.frame(LLM, Goodbye())
    assert admitted(deployment) == ["first"], "the place is free once every stage has let go"

    for stage, request in ((VOICE, "first"), (SECOND, "urgent"), (VOICE, "first.2"), (SECOND, "first.2")):
        deployment.frame(stage, Cancelled(request) if request == "first" else Done(request))

    assert admitted(deployment) == ["urgent", "first.2", "queued"]


def test_whose_turn_comes_while_a_stage_is_away_waits_for_it(up):
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("a")
    deployment.submit("b", "c")
    deployment.frame(LLM, Goodbye())
    assert deployment.to(GATEWAY, Reject) == []
    assert deployment.core.num_live == 3

    deployment.join(LLM)
    for request in ("a.2", "b", "c"):
        deployment.frame(LLM, Done(request))

    assert admitted(deployment) == ["a", "a.2", "b", "c"]
    assert deployment.is_clean()


def test_nothing_is_put_up_for_a_client_that_is_gone(up):
    up.submit("r")
    up.frame(GATEWAY, Goodbye())
    up.frame(LLM, Goodbye())

    assert up.to(GATEWAY, Reroute) == up.to(GATEWAY, Failed) == []
    assert up.is_clean()


def test_draining_coordinator_puts_up_nothing_and_refuses_who_waits():
    deployment = Deployment()
    deployment.join(LLM, VOICE, GATEWAY)
    deployment.submit("waits", outputs=())
    deployment.frame(VOICE, Goodbye())
    deployment.frame(LLM, Cancelled("waits"))
    deployment.submit("runs")
    deployment.take(deployment.core.drain(0.0))
    assert [(frame.request, frame.error.code) for frame in deployment.to(GATEWAY, Reject)] == [
        ("waits.2", "unavailable")
    ]

    deployment.frame(LLM, Goodbye())

    assert codes(deployment.to(GATEWAY, Failed)) == ["stage_lost"]
    assert deployment.is_clean()


def test_id_of_a_successor_that_was_used_already_is_not_used_again(up):
    up.join(SECOND)
    up.submit("r.2")
    up.submit("r", "other")
    up.frame(SECOND, Done("r.2"))
    up.frame(LLM, Goodbye())
    up.frame(SECOND, Goodbye())

    assert [reroute.request for reroute in up.to(GATEWAY, Reroute)] != ["r"]
    assert "r" in [failed.request for failed in up.to(GATEWAY, Failed)]


def test_who_was_never_welcomed_has_the_time_of_its_own_heartbeat_to_say_hello():
    """It does not know the deployment's heartbeat, which is shorter: its first sign of life comes after a second."""
    deployment = Deployment(heartbeat_s=0.1)
    deployment.join(LLM, GATEWAY, live=(route(),))
    deployment.beat_until(1.0, LLM, GATEWAY)
    assert deployment.to(GATEWAY, Failed) == deployment.to(GATEWAY, Reroute) == []

    deployment.join(VOICE, live=(route(),))
    deployment.beat_until(20.0, LLM, VOICE, GATEWAY)

    assert deployment.to(GATEWAY, Failed) == deployment.to(GATEWAY, Reroute) == []
    for stage in (LLM, VOICE):
        deployment.frame(stage, Done("r"))
    assert deployment.is_clean()


def test_adopted_request_has_a_successor_once():
    for is_retry in (False, True):
        deployment = Deployment()
        former = msgspec.structs.replace(route(llm=LLM), is_retry=is_retry)
        deployment.join(GATEWAY, SECOND, live=())
        deployment.join(GATEWAY, LLM, live=(former,))
        deployment.frame(LLM, Goodbye())

        assert len(deployment.to(GATEWAY, Reroute)) == (not is_retry)
        assert len(deployment.to(GATEWAY, Failed)) == is_retry


# --- a stage whose engine is stuck --------------------------------------------------------------------------


def test_stalled_stage_is_given_up_with_the_reason(up):
    up.join(SUPERVISOR)
    up.submit("r")
    up.frame(LLM, Stalled(LLM, "llm", 0, 61.2))

    reason = "its engine has made no progress for 61.2 s"
    assert up.to(SUPERVISOR, Lost) == [Lost(LLM, reason)]
    assert codes(up.to(GATEWAY, Reroute)) == ["stage_lost"]
    up.submit("s")
    assert f"llm.0: lost, {reason}" in up.to(GATEWAY, Reject)[0].error.message
    up.frame(GATEWAY, Admin(5, "health"))
    for peer in (VOICE,):
        (ping,) = up.to(peer, Ping)
        up.frame(peer, Pong(ping.nonce))
    (reply,) = up.to(GATEWAY, AdminReply)
    assert {row["actor"]: row.get("reason") for row in reply.result}["llm.0"] == reason


def test_stalled_stage_is_told_again_to_a_supervisor_that_came_later(up):
    up.frame(LLM, Stalled(LLM, "llm", 0, 60.0))
    up.frame(LLM, Heartbeat("l"))
    assert up.to(LLM, Introduce) == [Introduce()]
    up.join(SUPERVISOR)

    up.frame(LLM, Stalled(LLM, "llm", 0, 60.0))

    assert up.to(SUPERVISOR, Lost) == [Lost(LLM, "its engine has made no progress for 60 s")]
    assert up.forgotten[-1] == LLM, "the lane of the question is closed again"
    assert up.core._membership.replicas("llm") == []


def test_nobody_can_call_another_stalled(up):
    up.join(SUPERVISOR)
    up.frame(Peer("llm.9", 9, "z"), Stalled(LLM, "llm", 0, 60.0))

    assert up.to(SUPERVISOR, Lost) == []
    assert up.core._membership.replicas("llm") != []


# --- a new coordinator --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(GATEWAY, LLM, VOICE), (LLM, VOICE, GATEWAY), (VOICE, GATEWAY, LLM)], ids=str)
def test_running_request_is_taken_over_and_ends_normally(order):
    deployment = Deployment()
    running = msgspec.structs.replace(route(), key="somebody")
    for peer in order:
        deployment.join(peer, live=(running,))
    assert deployment.core._bindings.total == 2
    assert deployment.core._admission["chat"].counts.in_flight == 1
    assert deployment.core._admission["chat"].callers()[0]["caller"] == "somebody"

    deployment.frame(LLM, Done("r"))
    deployment.frame(VOICE, Done("r"))

    assert deployment.is_clean()
    assert deployment.to(GATEWAY, Failed) == []


@pytest.mark.parametrize("order", [(GATEWAY, LLM), (LLM, GATEWAY)], ids=str)
def test_stage_under_another_address_is_lost_like_any_other(order):
    """A gateway told of it, so nothing that is sent to that address is ever answered."""
    deployment = Deployment()
    elsewhere = Peer(LLM.actor, LLM.incarnation, "elsewhere")
    for peer in order:
        deployment.join(peer, live=(route(llm=elsewhere),) if peer == GATEWAY else ())
    del deployment.timers["adopted", "r"]  # who takes part had the time to say hello
    deployment.take(deployment.core.on_timer(("adopted", "r"), PATIENCE_S))
    deployment.frame(GATEWAY, Goodbye())
    deployment.frame(LLM, Goodbye())
    deployment.wait_until(60.0)

    assert deployment.is_clean()


def test_stage_that_was_done_before_is_asked_and_not_waited_for():
    deployment = Deployment()
    deployment.join(VOICE, live=(route(),))
    deployment.join(LLM)
    assert deployment.to(LLM, Inquire) == [Inquire("r")]
    deployment.frame(LLM, Done("r"))
    deployment.frame(VOICE, Done("r"))

    assert deployment.is_clean()


def test_stage_done_before_another_says_hello_ends_nothing_early():
    deployment = Deployment()
    deployment.join(LLM, live=(route(),))
    deployment.frame(LLM, Done("r"))
    deployment.join(VOICE, live=(route(),))

    assert deployment.to(VOICE, Cancel) == []
    assert deployment.core.num_live == 1


def test_failure_that_the_former_coordinator_lost_reaches_the_client():
    deployment = Deployment()
    deployment.join(LLM)
    deployment.join(GATEWAY, live=(route(llm=LLM),))
    assert deployment.to(LLM, Inquire) == [Inquire("r")]

    deployment.frame(LLM, Failed("r", ErrorInfo("stage_failed", "x")))

    assert codes(deployment.to(GATEWAY, Failed)) == ["stage_failed"]
    assert deployment.is_clean()


@pytest.mark.parametrize(("absent", "code"), [(VOICE, "stage_lost"), (LLM, "stage_lost")])
def test_stage_that_never_comes_is_lost(absent, code):
    deployment = Deployment()
    present = [peer for peer in (LLM, VOICE) if peer != absent]
    deployment.join(GATEWAY, *present, live=(route(),))
    deployment.now = 4.0
    for peer in (GATEWAY, *present):
        deployment.frame(peer, Heartbeat("x"))
    deployment.wait_until(PATIENCE_S)

    assert codes(deployment.to(GATEWAY, Reroute)) == [code]
    for peer in present:
        assert len(deployment.to(peer, Cancel)) == 1
        deployment.frame(peer, Cancelled("r"))
    deployment.frame(GATEWAY, Cancel("r.2"))
    assert deployment.is_clean()


@pytest.mark.parametrize("is_known_first", [False, True])
@pytest.mark.parametrize("whose_word", ["newcomer", "supervisor"])
def test_stage_that_died_without_a_coordinator_is_lost_at_once(whose_word, is_known_first):
    """Not when its patience is over: a new coordinator may die before that, and the next one begins to wait anew."""
    deployment = Deployment()
    deployment.join(SUPERVISOR, LLM)

    def tell():
        if whose_word == "newcomer":
            deployment.join(Peer("voice.0", 77, "v"), is_ready=False)
        else:
            deployment.frame(SUPERVISOR, Outlook("voice.0", "voice", 0, "backing off"))

    if is_known_first:
        tell()
    deployment.join(GATEWAY, live=(route(),))
    if not is_known_first:
        deployment.wait_until(0.0)
        assert deployment.to(GATEWAY, Reroute) == []
        tell()
    deployment.wait_until(0.0)

    assert codes(deployment.to(GATEWAY, Reroute)) == ["stage_lost"]
    assert len(deployment.to(LLM, Cancel)) == 1
    deployment.frame(LLM, Cancelled("r"))
    deployment.frame(GATEWAY, Cancel("r.2"))
    assert deployment.is_clean()


NEXT_LLM = Peer("llm.0", 9, "l")
WHOLE = {"gateway": ("llm",), "voice": ("llm",)}


@pytest.mark.parametrize("successor", [None, NEXT_LLM])
@pytest.mark.parametrize("order", [(GATEWAY, VOICE), (VOICE, GATEWAY)])
def test_stage_that_had_finished_and_left_is_not_missed(order, successor):
    """A restart took it away before this coordinator came; its word that all had arrived went to the former one."""
    deployment = Deployment()
    if successor is not None:
        deployment.join(successor)
    for peer in order:
        deployment.join(peer, live=(route(),), received=(WHOLE[peer.actor.partition(".")[0]],))
    deployment.beat_until(PATIENCE_S, VOICE, GATEWAY, *(() if successor is None else (successor,)))

    assert deployment.to(GATEWAY, Failed) == []
    assert deployment.to(GATEWAY, Reroute) == []
    deployment.frame(VOICE, Done("r"))
    assert deployment.is_clean()


@pytest.mark.parametrize("lacking", ["gateway", "voice"])
def test_stage_that_left_while_anybody_lacks_its_output_is_missed_at_once(lacking):
    deployment = Deployment()
    deployment.join(NEXT_LLM)
    for peer in (GATEWAY, VOICE):
        name = peer.actor.partition(".")[0]
        deployment.join(peer, live=(route(),), received=(() if name == lacking else WHOLE[name],))
    deployment.wait_until(0.0)

    assert codes(deployment.to(GATEWAY, Reroute)) == ["stage_lost"]


def test_whole_chain_that_had_finished_is_not_missed():
    """Only the last one still works: that it has all means that those before had all too."""
    llm, talker, voice = LLM, Peer("talker.0", 5, "t"), VOICE
    edges = (
        RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
        RouteEdge("llm", "text", "talker", "text", "text", 4, 4096),
        RouteEdge("talker", "codes", "voice", "codes", "text", 4, 4096),
        RouteEdge("voice", "audio", "out", "audio", "text", 4, 4096),
    )
    chain = Route("r", "chat", GATEWAY, {"llm": llm, "talker": talker, "voice": voice}, edges)
    deployment = Deployment()
    deployment.join(GATEWAY, live=(chain,), received=((),))
    deployment.join(voice, live=(chain,), received=(("talker",),))
    deployment.beat_until(PATIENCE_S, voice, GATEWAY)

    assert deployment.to(GATEWAY, Failed) == []
    deployment.frame(voice, Done("r"))
    assert deployment.is_clean()


@pytest.mark.parametrize("received", [(("llm", "nowhere", "out", "in"),), (("llm",) * 99,), (), (("llm",), ("llm",))])
def test_word_about_what_was_received_may_be_anything(received):
    deployment = Deployment()
    deployment.join(VOICE, GATEWAY, live=(route(),), received=received)
    deployment.beat_until(PATIENCE_S, VOICE, GATEWAY)
    deployment.frame(VOICE, Cancelled("r"))
    deployment.frame(VOICE, Done("r"))

    assert deployment.core.num_live in (0, 1)


def test_gateway_that_never_comes_cancels():
    deployment = Deployment()
    deployment.join(LLM, live=(route(llm=LLM),))
    deployment.now = 4.0
    deployment.frame(LLM, Heartbeat("l", 1))
    deployment.wait_until(PATIENCE_S)

    assert len(deployment.to(LLM, Cancel)) == 1
    deployment.frame(LLM, Cancelled("r"))
    assert deployment.is_clean()


def test_gateway_that_gave_up_meanwhile_is_asked():
    deployment = Deployment()
    deployment.join(GATEWAY)
    deployment.join(LLM, live=(route(llm=LLM),))
    assert deployment.to(GATEWAY, Inquire) == [Inquire("r")]

    deployment.frame(GATEWAY, Cancel("r", "ended"))

    assert len(deployment.to(LLM, Cancel)) == 1


def test_cancel_before_the_stage_says_hello_is_remembered():
    deployment = Deployment()
    deployment.join(GATEWAY)
    deployment.frame(GATEWAY, Cancel("r"))
    deployment.join(LLM, live=(route(llm=LLM),))

    assert len(deployment.to(LLM, Cancel)) == 1
    assert deployment.is_clean()


def test_evicted_gateway_learns_how_its_requests_ended(up):
    up.submit("r")
    up.frame(GATEWAY, Goodbye())
    up.frame(LLM, Cancelled("r"))
    up.to(GATEWAY, Failed)

    up.join(GATEWAY, live=(route(llm=LLM),))

    assert codes(up.to(GATEWAY, Failed)) == ["stage_lost"]
    assert up.is_clean()


def test_gateway_waits_for_chunks_under_way_from_the_living_only_and_not_after_it_was_given_up(up):
    up.submit("r")
    up.frame(LLM, Done("r"))
    up.join(GATEWAY, live=(route(llm=LLM),))
    assert up.to(GATEWAY, Failed) == []

    up.frame(GATEWAY, Goodbye())
    up.join(GATEWAY, live=(route(llm=LLM),))
    assert codes(up.to(GATEWAY, Failed)) == ["link_broken"], "who was told that it is gone has dropped the rest"
    up.join(GATEWAY, live=(route(llm=LLM),))
    assert up.to(GATEWAY, Failed) == [], "what ended since it is back may be under way"

    up.frame(GATEWAY, Goodbye())
    up.frame(LLM, Goodbye())
    up.join(GATEWAY, live=(route(llm=LLM),))

    assert codes(up.to(GATEWAY, Failed)) == ["stage_lost"]


def test_evicted_stage_must_let_go_of_what_ended_without_it(up):
    up.submit("r", outputs=())
    up.frame(LLM, Goodbye())
    up.to(LLM, Cancel)
    up.join(LLM, live=(route(),))

    assert len(up.to(LLM, Cancel)) == 1
    up.frame(GATEWAY, Cancel("r.2"))
    up.frame(LLM, Cancelled("r.2"))
    up.frame(VOICE, Cancelled("r.2"))
    up.frame(VOICE, Cancelled("r"))
    assert up.core.num_live == 1, "the evicted stage still has it"
    up.frame(LLM, Cancelled("r"))
    assert up.is_clean()


def test_adopted_request_keeps_to_what_is_left_of_its_limit():
    deployment = Deployment()
    deployment.join(GATEWAY, LLM, live=(msgspec.structs.replace(route(llm=LLM), timeout_s=4.0),), ran_s=(3.0,))
    deployment.wait_until(1.0)

    assert codes(deployment.to(GATEWAY, Failed)) == ["deadline_exceeded"]


def test_forged_hello_has_nothing_sent_to_those_it_names():
    deployment = Deployment()
    nobody = Peer("llm.7", 77, "tcp://elsewhere:1")
    deployment.join(GATEWAY, live=(route(llm=nobody),))
    deployment.frame(GATEWAY, Cancel("r"))
    deployment.beat_until(PATIENCE_S, GATEWAY)

    assert [send for send in deployment.sent if send.peer == nobody] == []
    assert deployment.to(GATEWAY, Cancelled) == [Cancelled("r", 0)]
    assert deployment.is_clean()


def test_stage_that_holds_more_than_is_taken_over_is_not_asked_again_and_again(monkeypatch):
    for module in (coordinator, adoption):
        monkeypatch.setattr(module, "MAX_ROUTES", 2)
    deployment = Deployment()
    deployment.join(GATEWAY)
    deployment.join(LLM, live=tuple(route(f"r{number}", llm=LLM) for number in range(4)))
    deployment.frame(LLM, Heartbeat("l", 4))
    assert deployment.to(LLM, Introduce) == []

    deployment.frame(LLM, Done("r0"))
    deployment.frame(LLM, Heartbeat("l", 3))

    assert deployment.to(LLM, Introduce) == [Introduce()]


def test_request_of_a_pipeline_that_is_gone_ends():
    deployment = Deployment()
    gone = Route("r", "former", GATEWAY, {"llm": LLM}, EDGES[:2])
    deployment.join(LLM, GATEWAY, live=(gone,))

    assert len(deployment.to(LLM, Cancel)) == 1
    assert codes(deployment.to(GATEWAY, Failed)) == ["unknown_name"]


# --- the transition table -----------------------------------------------------------------------------------


def in_state(state: State) -> Deployment:
    """A deployment whose request 'r' is in a state."""
    deployment = Deployment(max_in_flight=1)
    deployment.join(LLM, VOICE, GATEWAY, SUPERVISOR)
    if state in (State.QUEUED, State.RECOVERING):
        deployment.submit("other", outputs=())
    if state is State.HELD:
        deployment.frame(VOICE, Goodbye())
        deployment.frame(SUPERVISOR, Admin(1, "arrange", {"returning": ["voice.0"]}))
    deployment.submit("r", outputs=(), timeout_s=50.0)
    if state is State.RECOVERING:
        deployment.frame(VOICE, Goodbye())
        deployment.frame(LLM, Cancelled("other"))
    if state is State.ENDING:
        deployment.take(deployment.core.on_timer(("deadline", "r"), 50.0))
    assert deployment.core._requests["r"].state is state
    return deployment


GATEWAY_ASKS_AGAIN = (GATEWAY, Submit("r", "chat", (), attempt=1))
EVENTS = [
    (LLM, Done("r")),
    (LLM, Cancelled("r", 1)),
    (LLM, Failed("r", ErrorInfo("stage_failed", "x"))),
    (LLM, Cancel("r")),
    (LLM, Goodbye()),
    (LLM, Hello(PROTOCOL_VERSION, LLM, "stage", "llm", 0, is_ready=True, live=(route(),))),
    (VOICE, Done("r")),
    (VOICE, Cancelled("r")),
    (VOICE, Hello(PROTOCOL_VERSION, VOICE, "stage", "voice", 0, is_ready=True)),
    (SUPERVISOR, Admin(2, "arrange")),
    (SUPERVISOR, Admin(3, "arrange", {"drained": ["llm.0"], "returning": ["llm.0"]})),
    (GATEWAY, Cancel("r")),
    (GATEWAY, Submit("r", "chat", ())),
    GATEWAY_ASKS_AGAIN,
    (GATEWAY, Goodbye()),
    (GATEWAY, Done("r")),
    ("timer", ("deadline", "r")),
    ("timer", ("cancel", "r")),
    ("timer", ("adopted", "r")),
    ("timer", ("recover", "r")),
    (VOICE, Hello(PROTOCOL_VERSION, VOICE, "stage", "voice", 0, is_ready=True)),
    (SUPERVISOR, Outlook("voice.0", "voice", 0, "degraded")),
    (LLM, Stalled(LLM, "llm", 0, 60.0)),
]


@pytest.mark.parametrize("state", list(State))
def test_no_event_leaves_the_transition_table(state):
    """Each triple of events in each state: a move that the table does not know would raise."""
    for first in EVENTS:
        for second in EVENTS:
            for third in EVENTS:
                deployment = in_state(state)
                for who, what in (first, second, third):
                    if who == "timer":
                        deployment.take(deployment.core.on_timer(what, deployment.now))
                    else:
                        deployment.frame(who, what)
                if GATEWAY_ASKS_AGAIN not in (first, second, third):
                    ended = [send.frame for send in deployment.sent if send.peer == GATEWAY]
                    assert sum(isinstance(frame, Failed) and frame.request == "r" for frame in ended) <= 1


def test_coordinator_that_was_held_up_itself_gives_nobody_up():
    """Its timers are due before it has read what was said meanwhile."""
    up = Deployment()
    up.join(LLM)
    up.now = 100.0
    up.take(up.core.on_timer(("alive", "llm.0"), up.now))
    assert up.forgotten == []

    up.frame(LLM, Heartbeat("l"))
    up.wait_until(up.now + PATIENCE_S - 0.1)
    assert up.forgotten == []

    up.wait_until(up.now + 0.1)
    assert up.forgotten == [LLM]
