"""What a coordinator hears of processes from their supervisor, and what it tells of them and of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.coordinator import CoordinatorCore
from omni_bus.core.effects import Report, Send, SetTimer
from omni_bus.core.pipeline import Pipeline
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Admit,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Goodbye,
    Hello,
    Lost,
    Ready,
    RequestStats,
    Reroute,
    RouteEdge,
    Submit,
    Usage,
)

if TYPE_CHECKING:
    from omni_bus.core.effects import Common
    from omni_bus.wire.frames import Role

PIPELINE = Pipeline(
    "text",
    "text",
    (),
    (RouteEdge("in", "a", "llm", "a", "json", 8, 1024), RouteEdge("llm", "b", "out", "b", "text", 8, 1024)),
    max_in_flight=1,
    max_queued=0,
)


def peer(name: str, incarnation: int = 1) -> Peer:
    return Peer(name, incarnation, f"ipc:///{name}-{incarnation}")


LLM, CLIENT, SUPERVISOR = peer("llm.0"), peer("client"), peer("supervisor")


class Deployment:
    def __init__(self) -> None:
        self.core = CoordinatorCore(peer("coordinator"), {"text": PIPELINE}, heartbeat_s=60.0)
        self.now = 0.0
        self.join(SUPERVISOR, "supervisor")
        self.join(CLIENT, "client")
        self.join(LLM, "stage", stage="llm")
        self.say(LLM, Ready())

    def say(self, sender: Peer, frame) -> list[Common]:
        self.now += 1.0
        return self.core.on_frame(sender.sender, frame, self.now)

    def join(self, who: Peer, role: Role, stage: str = "", *, is_ready: bool = False) -> list[Common]:
        return self.say(who, Hello(PROTOCOL_VERSION, who, role, stage, 0, is_ready))

    def submit(self, request: str = "r-1") -> list[Common]:
        return self.say(CLIENT, Submit(request, "text", ()))


def sent(effects: list[Common], to: Peer, kind: type) -> list:
    return [e.frame for e in effects if isinstance(e, Send) and e.peer == to and isinstance(e.frame, kind)]


def reports(effects: list[Common], event: str) -> list[dict]:
    return [effect.fields for effect in effects if isinstance(effect, Report) and effect.event == event]


def test_supervisors_word_ends_a_lost_stages_requests() -> None:
    deployment = Deployment()
    assert len(sent(deployment.submit(), CLIENT, Admit)) == 1

    effects = deployment.say(SUPERVISOR, Lost(LLM))

    (rerouted,) = sent(effects, CLIENT, Reroute)
    assert (rerouted.error.code, rerouted.error.stage) == ("stage_lost", "llm")
    assert sent(deployment.say(CLIENT, Cancel(rerouted.successor)), CLIENT, Cancelled) != []
    assert deployment.core.num_live == 0
    assert reports(effects, "actor gone")[0]["name"] == "llm.0"


def test_only_a_supervisor_is_believed() -> None:
    deployment = Deployment()
    deployment.submit()

    effects = deployment.say(CLIENT, Lost(LLM))

    assert sent(effects, CLIENT, Failed) == []
    assert deployment.core.num_live == 1


def test_word_of_a_former_incarnation_changes_nothing() -> None:
    deployment = Deployment()
    successor = peer("llm.0", 2)
    deployment.join(successor, "stage", stage="llm")
    deployment.say(successor, Ready())
    deployment.submit()

    assert deployment.say(SUPERVISOR, Lost(LLM)) == []
    assert deployment.core.num_live == 1


def test_readiness_is_told_with_its_incarnation() -> None:
    deployment = Deployment()
    successor = peer("llm.0", 0xABC)

    assert reports(deployment.join(successor, "stage", stage="llm"), "actor ready") == []
    (told,) = reports(deployment.say(successor, Ready()), "actor ready")

    assert (told["name"], told["incarnation"]) == ("llm.0", "0000000000000abc")


def test_readiness_is_told_by_a_new_coordinator_too() -> None:
    (told,) = reports(Deployment().join(peer("other.0"), "stage", stage="other", is_ready=True), "actor ready")

    assert told["name"] == "other.0"


def test_idle_means_without_requests_and_gateways() -> None:
    deployment = Deployment()
    gateway = peer("gateway.openai.0")
    assert deployment.core.is_idle

    deployment.join(gateway, "gateway")
    assert not deployment.core.is_idle
    deployment.say(gateway, Goodbye())
    deployment.submit()
    assert not deployment.core.is_idle
    deployment.say(LLM, Done("r-1"))
    assert deployment.core.is_idle


def test_each_request_has_one_line_at_its_end() -> None:
    deployment = Deployment()
    told: list[dict] = []

    told += reports(deployment.submit("r-1"), "request ended")
    told += reports(deployment.submit("r-2"), "request ended")
    stats = RequestStats(0.25, 2.0, 1, 7, 99, Usage(3, 7))
    told += reports(deployment.say(LLM, Done("r-1", stats)), "request ended")
    deployment.submit("r-3")
    told += reports(deployment.say(CLIENT, Cancel("r-3", "changed my mind")), "request ended")
    told += reports(deployment.say(LLM, Done("r-3", stats)), "request ended")
    deployment.submit("r-4")
    told += reports(deployment.say(SUPERVISOR, Lost(LLM)), "request ended")

    assert [(line["request"], line["outcome"], line.get("code")) for line in told] == [
        ("r-2", "rejected", "overloaded"),
        ("r-1", "done", None),
        ("r-3", "cancelled", "cancelled"),
        ("r-4", "rerouted", "stage_lost"),
    ]
    assert told[1]["pipeline"] == "text"
    assert told[1]["total_s"] == 2.0
    assert told[1]["stages"]["llm"] == {
        "first_output_s": 0.25,
        "total_s": 2.0,
        "chunks_in": 1,
        "chunks_out": 7,
        "bytes_out": 99,
        "prompt_tokens": 3,
        "completion_tokens": 7,
    }


def test_client_that_leaves_after_its_last_output_cancelled_nothing() -> None:
    """Its goodbye and the stage's word come over different links."""
    deployment = Deployment()
    deployment.submit()

    left = deployment.say(CLIENT, Goodbye())
    assert reports(left, "request ended") == []
    (told,) = reports(deployment.say(LLM, Done("r-1")), "request ended")

    assert told["outcome"] == "done"
    assert deployment.core.num_live == 0


def test_request_of_a_client_that_left_does_not_stay() -> None:
    deployment = Deployment()
    deployment.submit()
    left = deployment.say(CLIENT, Goodbye())
    assert any(isinstance(effect, SetTimer) and effect.key == ("left", "r-1") for effect in left)

    effects = deployment.core.on_timer(("left", "r-1"), deployment.now + 1.0)

    assert [line["outcome"] for line in reports(effects, "request ended")] == ["cancelled"]
    assert len(sent(effects, LLM, Cancel)) == 1
    assert sent(effects, CLIENT, Failed) == [], "nothing may open a lane to it again"


def test_lost_client_has_its_requests_cancelled_at_once() -> None:
    deployment = Deployment()
    deployment.submit()

    effects = deployment.say(SUPERVISOR, Lost(CLIENT))

    assert [line["outcome"] for line in reports(effects, "request ended")] == ["cancelled"]
    assert len(sent(effects, LLM, Cancel)) == 1
