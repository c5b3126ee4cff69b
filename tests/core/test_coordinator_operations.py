"""Drained and returning replicas, and coordinators that come after others: no request is lost by any of it."""

from __future__ import annotations

from typing import Any

import pytest

from omni_bus.core.administration import CUT_S, Arrangement
from omni_bus.core.adoption import MAX_ROUTES
from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.effects import DropTimer, Report, Send, SetTimer
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.recovery import MAX_WAIT_S
from omni_bus.errors import BadInput
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
    Outlook,
    Pong,
    Progress,
    Ready,
    Reject,
    Reroute,
    Rest,
    Rested,
    Route,
    RouteEdge,
    Submit,
    Welcome,
)

EDGES = (
    RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
    RouteEdge("llm", "text", "out", "text", "text", 4, 4096),
    RouteEdge("llm", "text", "voice", "text", "text", 4, 4096),
    RouteEdge("voice", "audio", "out", "audio", "text", 4, 4096),
)


def peer(name: str, incarnation: int = 1) -> Peer:
    return Peer(name, incarnation, f"{name}-{incarnation}")


LLM, LLM_1, VOICE = peer("llm.0"), peer("llm.1"), peer("voice.0")
GATEWAY, SUPERVISOR = peer("gateway.0"), peer("supervisor")
PATIENCE_S = 5.0


class Deployment:
    """A coordinator with two replicas of llm and one of voice."""

    def __init__(
        self,
        *,
        awaited=(),
        clients=(),
        max_in_flight=8,
        max_queued=2,
        arrangement=None,
        non_idempotent=frozenset(),
    ):
        pipeline = Pipeline("chat", "chat", (), EDGES, non_idempotent, max_in_flight, max_queued)
        self.core = CoordinatorCore(
            peer("coordinator"),
            {"chat": pipeline},
            arrangement=arrangement or Arrangement(),
            awaited=awaited,
            clients=clients,
        )
        self.now = 0.0
        self.sent: list[Send] = []
        self.reports: list[tuple[str, str]] = []
        self.timers: dict[tuple[str, str], float] = {}
        self.calls = 0
        self.take(self.core.start(0.0))

    def take(self, effects) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append(effect)
                case SetTimer(key=key, at=at):
                    self.timers[key] = at
                case DropTimer(key=key):
                    self.timers.pop(key, None)
                case Report(event=event, fields=fields):
                    self.reports.append((event, fields.get("name", "")))
                case _:
                    pass

    def say(self, sender: Peer, frame) -> None:
        self.take(self.core.on_frame(sender.sender, frame, self.now))

    def join(self, *peers: Peer, is_ready=True, live: tuple[Route, ...] = ()) -> None:
        for who in peers:
            stage, _, number = who.actor.rpartition(".")
            role: Any = {"": "supervisor", "gateway": "gateway"}.get(stage, "stage")
            stage = stage if role == "stage" else ""
            self.say(who, Hello(PROTOCOL_VERSION, who, role, stage, int(number) if stage else 0, is_ready, live))

    def join_all(self) -> None:
        self.join(LLM, LLM_1, VOICE, GATEWAY, SUPERVISOR)

    def arrange(self, **args) -> None:
        self.admin("arrange", **args)
        assert self.reply() is None

    def admin(self, op: str, *, by: Peer = SUPERVISOR, **args) -> None:
        self.calls += 1
        self.say(by, Admin(self.calls, op, args))

    def reply(self, to: Peer = SUPERVISOR) -> Any:
        (found,) = self.to(to, AdminReply)
        return found.result

    def submit(self, *requests: str, outputs=("text",), **fields) -> None:
        for request in requests:
            self.say(GATEWAY, Submit(request, "chat", outputs, **fields))

    def to(self, who: Peer, kind: type) -> list[Any]:
        """Take the frames of a kind that were sent to somebody since the last call."""
        found = [send for send in self.sent if send.peer == who and isinstance(send.frame, kind)]
        self.sent = [send for send in self.sent if send not in found]
        return [send.frame for send in found]

    def bound(self) -> dict[str, list[str]]:
        """Take the admissions since the last call: request and replicas."""
        return {
            admit.route.request: [replica.actor for replica in admit.route.stages.values()]
            for admit in self.to(GATEWAY, Admit)
        }

    def rejected(self) -> dict[str, str]:
        return {reject.request: reject.error.message for reject in self.to(GATEWAY, Reject)}

    def is_due(self, key: tuple[str, str]) -> None:
        self.now = self.timers.pop(key)
        self.take(self.core.on_timer(key, self.now))

    def is_clean(self) -> bool:
        core = self.core
        counts = core._admission["chat"].counts
        kinds = {kind for kind, _ in self.timers} - {"alive", "strangers"}
        return not (
            core.num_live or core._lifecycle.held or core._bindings.total or counts.in_flight or counts.queued or kinds
        )


@pytest.fixture
def up() -> Deployment:
    deployment = Deployment()
    deployment.join_all()
    return deployment


# --- drained replicas ---------------------------------------------------------------------------------------


def test_drained_replica_gets_nothing_new_and_keeps_what_it_has(up):
    up.submit("a", "b")
    assert up.bound() == {"a": ["llm.0"], "b": ["llm.1"]}
    up.arrange(drained=["llm.0"])
    up.submit("c", "d")

    assert up.bound() == {"c": ["llm.1"], "d": ["llm.1"]}
    assert up.to(LLM, Cancel) == []
    up.say(LLM, Done("a"))
    assert up.to(GATEWAY, Failed) == []


def test_drain_is_answered_when_nothing_is_outstanding(up):
    up.submit("a", "b")
    up.arrange(drained=["llm.0"])
    up.admin("drain", actors=["llm.0"], timeout_s=9.0)
    assert up.to(SUPERVISOR, AdminReply) == []

    up.say(LLM_1, Done("b"))
    assert up.to(SUPERVISOR, AdminReply) == []
    up.say(LLM, Done("a"))

    assert up.reply() == {"outstanding": {}, "has_cut": False}
    assert up.is_clean()


def test_drain_of_who_has_nothing_or_is_not_here_is_answered_at_once(up):
    for name in ("llm.0", "llm.7", "gateway.0"):
        up.admin("drain", actors=[name], timeout_s=9.0)
        assert up.reply() == {"outstanding": {}, "has_cut": False}


def test_drain_says_at_its_end_how_many_are_left(up):
    up.submit("a", "b", "c")
    up.admin("drain", actors=["llm.0"], timeout_s=9.0)
    up.is_due(("drain", "1"))

    assert up.reply() == {"outstanding": {"llm.0": 2}, "has_cut": False}
    assert up.to(LLM, Cancel) == []


@pytest.mark.parametrize(("non_idempotent", "is_safe"), [(frozenset(), True), (frozenset({"llm"}), False)])
def test_forced_drain_cuts_only_what_is_left_there(non_idempotent, is_safe):
    deployment = Deployment(non_idempotent=non_idempotent)
    deployment.join_all()
    deployment.submit("a", "b")
    deployment.admin("drain", actors=["llm.0"], timeout_s=9.0, is_forced=True)
    deployment.is_due(("drain", "1"))

    (failed,) = deployment.to(GATEWAY, Failed)
    assert (failed.request, failed.error.code, failed.error.is_retry_safe) == ("a", "unavailable", is_safe)
    assert deployment.to(SUPERVISOR, AdminReply) == [], "the stage has not let go yet"
    deployment.say(LLM, Cancelled("a", 1))
    assert deployment.reply() == {"outstanding": {}, "has_cut": True}
    deployment.say(LLM_1, Done("b"))
    assert deployment.is_clean()


def test_forced_drain_of_a_stage_that_hangs_has_an_end(up):
    up.submit("a")
    up.admin("drain", actors=["llm.0"], timeout_s=9.0, is_forced=True)
    up.is_due(("drain", "1"))
    assert up.timers["drain", "1"] == 9.0 + CUT_S
    up.is_due(("drain", "1"))

    assert up.reply() == {"outstanding": {"llm.0": 1}, "has_cut": True}


def test_gateway_is_drained_of_its_requests(up):
    up.submit("a")
    up.admin("drain", actors=["gateway.0"], timeout_s=9.0, is_forced=True)
    up.is_due(("drain", "1"))

    assert [failed.request for failed in up.to(GATEWAY, Failed)] == ["a"]
    assert up.reply() == {"outstanding": {}, "has_cut": True}


def test_drained_stage_is_refused_at_once_and_served_again_when_undone(up):
    up.arrange(drained=["llm.0", "llm.1"])
    up.submit("a")
    assert up.rejected() == {"a": "stage 'llm' has no replica that can serve (llm.0: drained; llm.1: drained)"}

    up.arrange()
    up.submit("b")
    assert up.bound() == {"b": ["llm.0"]}


def test_only_a_supervisor_drains(up):
    for op in ("arrange", "drain", "rest"):
        up.admin(op, by=GATEWAY)
        (reply,) = up.to(GATEWAY, AdminReply)
        assert (reply.error.code, reply.error.field) == ("bad_input", "op")


def test_malformed_operation_is_answered(up):
    up.admin("arrange", drained="llm.0")

    (reply,) = up.to(SUPERVISOR, AdminReply)
    assert reply.error.code == "bad_input"


def test_drain_of_a_supervisor_that_is_gone_leaves_no_timer(up):
    up.submit("a")
    up.admin("drain", actors=["llm.0"], timeout_s=9.0)
    up.say(SUPERVISOR, Goodbye())
    up.say(LLM, Done("a"))

    assert up.is_clean()


def test_health_and_status_tell_of_it(up):
    up.submit("a")
    up.arrange(wanted={"llm": 3, "voice": 1}, drained=["llm.0", "llm.1"], returning=["llm.2"])
    up.admin("health", by=GATEWAY)
    up.admin("status", by=GATEWAY)
    for who in (LLM, LLM_1, VOICE):
        up.say(who, Pong(1))

    status, health = (reply.result for reply in up.to(GATEWAY, AdminReply))
    for rows in (status["actors"], health):
        found = {row["actor"]: (row["phase"], row["is_drained"], row["wanted"]) for row in rows if row["stage"]}
        assert found == {
            "llm.0": ("draining", True, 3),
            "llm.1": ("drained", True, 3),
            "llm.2": ("restarting", False, 3),
            "voice.0": ("ready", False, 1),
        }


def test_replica_is_told_that_it_is_drained_once_it_is_and_again_when_it_says_hello(up):
    """Its requests may last for as long as their clients like, and end only if it has them end."""

    def told(who):
        return [welcome.is_drained for welcome in up.to(who, Welcome)]

    assert [told(who) for who in (LLM, LLM_1, VOICE)] == [[False]] * 3
    up.arrange(drained=["llm.0", "llm.7"])
    assert [told(who) for who in (LLM, LLM_1, VOICE)] == [[True], [], []]
    up.arrange(drained=["llm.0", "voice.0"])
    assert [told(who) for who in (LLM, LLM_1, VOICE)] == [[], [], [True]]
    up.core.on_link_broken(LLM, up.now)  # what it was sent may be lost; it introduces itself
    up.join(LLM)
    assert told(LLM) == [True]
    up.arrange()
    assert [told(who) for who in (LLM, LLM_1, VOICE)] == [[False], [], [False]]


def test_replica_that_is_to_sleep_is_told_as_one_that_is_drained(up):
    def told():
        return [welcome.is_drained for welcome in up.to(LLM, Welcome)]

    told()
    up.arrange(asleep={"llm.0": 1})
    assert told() == [True]
    up.arrange(asleep={"llm.0": 2}, drained=["llm.0"])
    up.arrange(drained=["llm.0"])
    assert told() == []
    up.arrange()
    assert told() == [False]


def test_new_coordinator_tells_the_drained(up):
    deployment = Deployment(arrangement=Arrangement(drained=frozenset({"llm.0"})))
    deployment.join_all()
    assert [deployment.to(who, Welcome)[0].is_drained for who in (LLM, LLM_1)] == [True, False]


# --- replicas that sleep ------------------------------------------------------------------------------------


def test_sleeping_stage_is_refused_at_once_by_name_and_served_again_when_awake(up):
    up.arrange(asleep={"llm.0": 2, "llm.1": 1})
    up.submit("a")
    assert up.rejected() == {"a": "stage 'llm' has no replica that can serve (llm.0: asleep; llm.1: asleep)"}

    up.arrange(asleep={"llm.1": 1})
    up.submit("b")
    assert up.bound() == {"b": ["llm.0"]}


def test_requests_wait_for_a_sleeping_stage_that_they_are_to_wait_for(up):
    up.arrange(asleep={"voice.0": 2}, returning=["voice.0"])
    up.submit("a", outputs=("audio",))
    assert (up.bound(), up.rejected()) == ({}, {})

    up.arrange()
    assert up.bound() == {"a": ["llm.0", "voice.0"]}


def test_order_to_sleep_reaches_the_replica_and_its_answer_the_supervisor(up):
    up.admin("rest", actors=["llm.0"], level=1)
    assert up.to(LLM, Rest) == [Rest(1, 1)]
    up.is_due(("rest", "1"))
    assert up.to(LLM, Rest) == [Rest(1, 1)], "the first one may be lost"

    up.say(LLM, Rested(1, level=1))

    assert up.reply() == {"failed": {}}
    assert up.is_clean()


def test_replica_that_dies_on_the_way_ends_the_order(up):
    up.admin("rest", actors=["llm.0"], level=1)
    up.say(LLM, Goodbye())

    assert up.reply() == {"failed": {"llm.0": "its process ended"}}


def test_what_sleeps_goes_on_sleeping_after_a_restart(up):
    up.arrange(asleep={"llm.0": 2}, wanted={"llm": 2})
    up.say(LLM, Goodbye(is_settled=True))
    again = peer("llm.0", 2)
    up.join(again, is_ready=False)
    assert up.to(again, Rest) == []

    up.say(again, Ready())

    assert up.to(again, Rest) == [Rest(1, 2)]
    up.submit("a")
    assert up.bound() == {"a": ["llm.1"]}


def test_what_is_no_longer_to_sleep_is_woken_and_waited_for_if_it_was_told_to_sleep(up):
    up.arrange(asleep={"llm.0": 2, "llm.1": 2}, returning=["llm.0"])
    up.say(LLM, Goodbye(is_settled=True))
    again = peer("llm.0", 2)
    up.join(again)
    assert up.to(again, Rest) == [Rest(1, 2)]

    up.arrange(asleep={"llm.1": 2})
    assert (up.to(again, Rest), up.to(LLM_1, Rest)) == ([Rest(2, 0)], [])
    up.submit("a")
    up.say(again, Rested(1, None, 2))
    assert (up.bound(), up.rejected()) == ({}, {}), "an order to sleep may reach it after a request"

    failed = Rested(2, BadInput("level: no").to_info(), 2)
    up.say(again, failed)
    up.is_due(("rest", "2"))
    assert up.to(again, Rest) == [Rest(2, 0)], "it is tried again"
    up.admin("status")
    (row,) = [row for row in up.reply()["actors"] if row["actor"] == "llm.0"]
    assert (row["phase"], row["is_ready"]) == ("waking", False)
    up.say(again, Rested(2))
    assert up.bound() == {"a": ["llm.0"]}


def test_replica_that_dies_before_it_is_awake_keeps_nobody_waiting(up):
    up.say(LLM_1, Goodbye(is_settled=True))
    up.admin("rest", actors=["llm.0"], level=1)
    up.submit("a")
    assert (up.bound(), up.rejected()) == ({}, {})

    up.say(LLM, Goodbye(is_settled=True))

    up.is_due(("recover", "a"))
    assert "stage 'llm' has no replica that can serve" in up.rejected()["a"]


def test_request_whose_turn_comes_when_its_stage_sleeps_is_refused_at_once(up):
    up.arrange(asleep={"voice.0": 1}, returning=["voice.0"])
    up.submit("a", outputs=("audio",))

    up.arrange(asleep={"voice.0": 1})

    assert up.rejected() == {"a": "stage 'voice' has no replica that can serve (voice.0: asleep)"}


def test_replica_is_not_told_to_sleep_while_a_request_is_bound_to_it():
    """One that a former coordinator bound may not have reached the replica when this one meets it."""
    awaited = {"arrangement": Arrangement(asleep={"llm.0": 1}), "awaited": ["llm.0"], "clients": ["gateway.0"]}
    deployment = Deployment(**awaited)
    deployment.join(LLM)
    assert deployment.to(LLM, Rest) == []

    deployment.join(GATEWAY)

    assert deployment.to(LLM, Rest) == [Rest(1, 1)]


def test_order_to_wake_is_done_where_nothing_sleeps(up):
    """A process that loads comes up awake."""
    up.say(LLM, Goodbye(is_settled=True))
    up.admin("rest", actors=["llm.0"], level=0)
    assert up.reply() == {"failed": {}}


def test_new_coordinator_has_the_sleeping_sleep_on():
    deployment = Deployment(arrangement=Arrangement(asleep={"llm.0": 1}))
    deployment.join_all()

    assert (deployment.to(LLM, Rest), deployment.to(LLM_1, Rest)) == ([Rest(1, 1)], [])


def test_health_and_status_tell_who_sleeps(up):
    up.submit("a")
    up.arrange(asleep={"llm.0": 1, "llm.1": 1})
    up.admin("health", by=GATEWAY)
    up.admin("status", by=GATEWAY)
    for who in (LLM, LLM_1, VOICE):
        up.say(who, Pong(1))

    for reply in up.to(GATEWAY, AdminReply):
        rows = reply.result if isinstance(reply.result, list) else reply.result["actors"]
        found = {row["actor"]: (row["phase"], row.get("is_asleep")) for row in rows if row["stage"]}
        assert found == {"llm.0": ("draining", True), "llm.1": ("asleep", True), "voice.0": ("ready", None)}
    up.say(LLM, Progress("weights", 0.5))
    up.admin("status", by=GATEWAY)
    (status,) = up.to(GATEWAY, AdminReply)
    assert status.result["actors"][0]["phase"] == "weights", "it is waking"


# --- replicas that come back --------------------------------------------------------------------------------


def test_requests_wait_for_the_only_replica_while_it_restarts(up):
    up.arrange(drained=["voice.0"], returning=["voice.0"])
    up.submit("a", "b", outputs=("audio",))
    up.submit("c")
    assert up.bound() == {"c": ["llm.0"]}, "who needs no voice does not wait"
    up.say(VOICE, Goodbye(is_settled=True))
    up.arrange(returning=["voice.0"])
    again = peer("voice.0", 2)
    up.join(again, is_ready=False)
    assert (up.bound(), up.rejected()) == ({}, {})

    up.say(again, Ready())

    assert up.bound() == {"a": ["llm.1", "voice.0"], "b": ["llm.0", "voice.0"]}
    assert up.core.num_live == 3


def test_those_that_wait_are_bound_by_priority(up):
    up.arrange(drained=["voice.0"], returning=["voice.0"])
    for request, priority in (("a", 0), ("b", 1), ("c", 0)):
        up.submit(request, outputs=("audio",), priority=priority)
    up.arrange()

    assert list(up.bound()) == ["b", "a", "c"]


def test_another_replica_serves_while_one_restarts(up):
    up.arrange(drained=["llm.0"], returning=["llm.0"])
    up.submit("a", "b")

    assert up.bound() == {"a": ["llm.1"], "b": ["llm.1"]}


def test_after_a_restart_that_fails_nobody_waits_for_long(up):
    up.arrange(drained=["voice.0"], returning=["voice.0"])
    up.submit("a", "b", outputs=("audio",))
    up.say(VOICE, Goodbye(is_settled=True))
    up.say(SUPERVISOR, Outlook("voice.0", "voice", 0, "backing off", "it died", 0.5))
    up.arrange()
    assert up.rejected() == {}
    up.submit("c", outputs=("audio",))
    assert "voice.0: backing off, it died" in up.rejected()["c"]

    up.say(SUPERVISOR, Outlook("voice.0", "voice", 0, "degraded", "it died"))

    assert up.rejected().keys() == {"a", "b"}
    assert up.is_clean()


LLMS = ["llm.0", "llm.1"]
COMING_BACK = {
    "they sleep and are waited for": {"asleep": dict.fromkeys(LLMS, 1), "returning": LLMS},
    "a person restarts them": {"drained": LLMS, "returning": LLMS},
    "they wake": {},
}
"""How it is arranged that the two replicas of llm are not here, and will be some time."""


@pytest.fixture(params=COMING_BACK)
def coming_back(request, up) -> dict[str, Any]:
    """Arrange that requests wait for llm, however long it takes; return the arrangement."""
    if not COMING_BACK[request.param]:
        up.arrange(asleep=dict.fromkeys(LLMS, 1))
        up.admin("rest", actors=LLMS, level=1)
        for who in (LLM, LLM_1):
            up.say(who, Rested(1, level=1))
        assert up.reply() == {"failed": {}}
    up.arrange(**COMING_BACK[request.param])
    return COMING_BACK[request.param]


def loses_voice(up: Deployment, coming_back: dict[str, Any]) -> None:
    """The other stage's only replica leaves, and who is held hears of it, by whatever is arranged next."""
    up.say(VOICE, Goodbye(is_settled=True))
    up.arrange(**coming_back)
    assert ("recover", "a") in up.timers


def is_back(up: Deployment) -> None:
    """What `coming_back` has taken away serves again."""
    up.arrange()
    for who in (LLM, LLM_1):
        for rest in up.to(who, Rest):
            up.say(who, Rested(rest.number, level=rest.level))


def test_who_waits_for_what_comes_back_has_no_limit_from_the_loss_of_another_stage(up, coming_back):
    """The lost one is here again long before; for the other one its turn had come without that loss."""
    up.submit("a", outputs=("audio",))
    loses_voice(up, coming_back)

    up.join(peer("voice.0", 2))
    assert ("recover", "a") not in up.timers
    up.now += 2 * MAX_WAIT_S
    assert (up.bound(), up.rejected()) == ({}, {})

    is_back(up)
    assert [replicas[1] for replicas in up.bound().values()] == ["voice.0"]


def test_who_waited_in_vain_is_told_of_the_lost_stage_not_of_one_that_comes_back(up, coming_back):
    up.submit("a", outputs=("audio",))
    loses_voice(up, coming_back)

    up.is_due(("recover", "a"))

    assert up.rejected() == {"a": "stage 'voice' has no replica that can serve (voice.0: lost, goodbye)"}
    assert up.core.num_live == 0


def test_successor_waits_for_what_comes_back_as_others_do(up):
    """It lost one stage, and the other one is put to sleep before that is here again."""
    up.submit("a", outputs=("audio",))
    up.say(LLM, Done("a"))
    up.arrange(asleep=dict.fromkeys(LLMS, 1), returning=LLMS)
    up.say(VOICE, Goodbye())
    assert [reroute.successor for reroute in up.to(GATEWAY, Reroute)] == ["a.2"]

    up.join(peer("voice.0", 2))
    assert ("recover", "a.2") not in up.timers
    up.arrange()

    assert list(up.bound().values())[-1] == ["llm.0", "voice.0"]


def test_those_that_wait_are_bounded_by_the_limits():
    deployment = Deployment(max_in_flight=2, max_queued=1)
    deployment.join_all()
    deployment.arrange(returning=["llm.0", "llm.1"], drained=["llm.0", "llm.1"])
    deployment.submit("a", "b", "c", "d")
    assert "is busy" in deployment.rejected()["d"]
    assert deployment.core._admission["chat"].counts[:3:2] == (2, 1)

    deployment.arrange()
    assert list(deployment.bound()) == ["a", "b"]
    deployment.say(LLM, Done("a"))
    assert list(deployment.bound()) == ["c"]


def test_deadline_cancel_and_leaving_end_the_wait(up):
    up.arrange(drained=["voice.0"], returning=["voice.0"])
    up.submit("late", outputs=("audio",), timeout_s=3.0)
    up.submit("unwanted", "orphan", outputs=("audio",))
    up.is_due(("deadline", "late"))
    assert [reject.error.code for reject in up.to(GATEWAY, Reject)] == ["deadline_exceeded"]
    up.say(GATEWAY, Cancel("unwanted"))
    assert up.to(GATEWAY, Cancelled) == [Cancelled("unwanted")]
    up.say(GATEWAY, Goodbye())

    assert up.is_clean()
    up.arrange()
    assert up.sent == [] or not up.bound()


def test_stop_refuses_those_that_wait(up):
    up.arrange(drained=["voice.0"], returning=["voice.0"])
    up.submit("a", outputs=("audio",))
    up.take(up.core.drain(1.0))

    assert up.rejected() == {"a": "the deployment is stopping"}
    assert up.is_clean()


def test_repeated_submit_of_one_that_waits_is_the_same_request(up):
    up.arrange(drained=["voice.0"], returning=["voice.0"])
    up.submit("a", outputs=("audio",))
    up.submit("a", outputs=("audio",), attempt=1)
    up.arrange()

    assert [admit.attempt for admit in up.to(GATEWAY, Admit)] == [1]


# --- replicas that leave after their work -------------------------------------------------------------------


def test_replica_whose_output_has_arrived_is_not_missed(up):
    up.submit("a", outputs=("audio",))
    up.say(LLM, Done("a"))
    up.say(LLM, Goodbye("restarted", is_settled=True))

    assert up.to(GATEWAY, Failed) == []
    up.say(VOICE, Done("a"))
    assert up.is_clean()


@pytest.mark.parametrize(("is_done", "is_settled"), [(True, False), (False, True)])
def test_replica_that_leaves_anything_open_is_missed(up, is_done, is_settled):
    up.submit("a", outputs=("audio",))
    if is_done:
        up.say(LLM, Done("a"))
    up.say(LLM, Goodbye("restarted", is_settled=is_settled))

    assert [reroute.error.code for reroute in up.to(GATEWAY, Reroute)] == ["stage_lost"]


# --- a coordinator after another ----------------------------------------------------------------------------


def test_new_coordinator_waits_for_those_who_served_before():
    """It would refuse what comes before their hello, or give it all to the first one."""
    deployment = Deployment(awaited=("llm.0", "llm.1"))
    deployment.join(GATEWAY)
    deployment.submit("a", "b")
    deployment.join(LLM)
    assert (deployment.bound(), deployment.rejected()) == ({}, {})

    deployment.join(LLM_1)

    assert deployment.bound() == {"a": ["llm.0"], "b": ["llm.1"]}


def test_who_served_before_and_does_not_come_is_given_up():
    deployment = Deployment(awaited=("llm.0", "llm.1", "voice.0"))
    deployment.join(GATEWAY, LLM)
    deployment.submit("a")
    deployment.submit("b", outputs=("audio",))
    assert deployment.timers["awaited", ""] == PATIENCE_S

    for who in (GATEWAY, LLM):
        deployment.say(who, Heartbeat(""))
    deployment.is_due(("awaited", ""))

    assert deployment.bound() == {"a": ["llm.0"]}
    assert deployment.rejected() == {}
    deployment.is_due(("recover", "b"))
    assert deployment.rejected() == {"b": "stage 'voice' has no replica that can serve"}


def test_who_served_before_and_loads_again_is_not_waited_for():
    deployment = Deployment(awaited=("llm.0",))
    deployment.join(GATEWAY)
    deployment.submit("a")
    again = peer("llm.0", 2)
    deployment.join(again, is_ready=False)
    assert ("recover", "a") in deployment.timers, "not for longer than for one that died"

    deployment.say(again, Ready())
    assert deployment.bound() == {"a": ["llm.0"]}


@pytest.mark.parametrize("teller", [GATEWAY, VOICE], ids=lambda who: who.actor)
def test_new_coordinator_takes_no_replica_for_empty_that_only_others_know_to_be_bound(teller):
    """What opens the request there may be under way yet, so that the replica itself knows nothing of it."""
    deployment = Deployment(awaited=("llm.0", "llm.1", "voice.0"), clients=("gateway.0",))
    route = Route("r", "chat", GATEWAY, {"llm": LLM, "voice": VOICE}, EDGES)
    deployment.join(LLM, LLM_1, *({VOICE, GATEWAY} - {teller}), SUPERVISOR)

    deployment.admin("drain", actors=["llm.0"], timeout_s=60.0)
    assert deployment.to(SUPERVISOR, AdminReply) == []
    deployment.join(teller, live=(route,))
    assert deployment.to(SUPERVISOR, AdminReply) == []

    deployment.say(LLM, Done("r"))
    assert deployment.reply() == {"outstanding": {}, "has_cut": False}


def test_new_coordinator_takes_a_replica_for_empty_once_all_had_the_time_to_tell():
    deployment = Deployment(awaited=("llm.0", "voice.0"), clients=("gateway.0", "visitor"))
    deployment.join_all()
    deployment.admin("drain", actors=["llm.0"], timeout_s=1.0)
    deployment.is_due(("drain", "1"))
    assert deployment.reply() == {"outstanding": {"llm.0": 1}, "has_cut": False}, "it can't tell yet"

    deployment.admin("drain", actors=["llm.0"], timeout_s=60.0)
    deployment.is_due(("awaited", ""))
    assert deployment.reply() == {"outstanding": {}, "has_cut": False}
    assert ("client left", "visitor") in deployment.reports


@pytest.mark.parametrize("last", [GATEWAY, VOICE], ids=lambda who: who.actor)
def test_new_coordinator_takes_a_replica_for_empty_as_soon_as_all_have_said_hello(last):
    deployment = Deployment(awaited=("llm.0", "voice.0"), clients=("gateway.0",))
    deployment.join(SUPERVISOR, LLM, *({VOICE, GATEWAY} - {last}))
    deployment.admin("drain", actors=["llm.0"], timeout_s=60.0)
    assert deployment.to(SUPERVISOR, AdminReply) == []

    deployment.join(last)

    assert deployment.reply() == {"outstanding": {}, "has_cut": False}


def test_client_that_tells_of_too_much_at_once_is_not_taken_for_heard():
    deployment = Deployment(awaited=("llm.0",), clients=("gateway.0",))
    live = tuple(Route(f"r{n}", "chat", GATEWAY, {"llm": LLM_1}, EDGES[:2]) for n in range(MAX_ROUTES + 1))
    deployment.join(SUPERVISOR, LLM)
    deployment.join(GATEWAY, live=live)
    deployment.admin("drain", actors=["llm.0"], timeout_s=60.0)

    assert deployment.to(SUPERVISOR, AdminReply) == []


def test_who_may_have_requests_is_reported_for_the_next_coordinator():
    deployment = Deployment()
    deployment.join_all()
    deployment.say(GATEWAY, Goodbye("closed"))

    told = [report for report in deployment.reports if report[0].startswith("client")]
    assert told == [("client joined", "gateway.0"), ("client left", "gateway.0")]


def test_new_coordinator_knows_at_once_of_replicas_that_served_under_no_other():
    deployment = Deployment(awaited=("voice.0",))
    deployment.join_all()
    deployment.admin("drain", actors=["llm.0"], timeout_s=60.0)

    assert deployment.reply() == {"outstanding": {}, "has_cut": False}


def test_first_coordinator_awaits_nobody():
    assert Deployment().timers == {}


def test_new_coordinator_knows_the_arrangement_from_the_start():
    deployment = Deployment(arrangement=Arrangement({"llm": 2}, frozenset({"llm.0"})))
    deployment.join_all()
    deployment.submit("a")

    assert deployment.bound() == {"a": ["llm.1"]}
