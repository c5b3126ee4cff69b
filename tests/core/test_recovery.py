import msgspec
import pytest

from omni_bus.core.absence import Absences
from omni_bus.core.effects import SetTimer
from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.recovery import MAX_WAIT_S, Recovery, error_for_lost, origin, successor_of
from omni_bus.core.request import Request, State
from omni_bus.errors import RequestCancelled, StageLost, Unavailable
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, Outlook, Route, RouteEdge, Submit

EDGES = (RouteEdge("in", "a", "llm", "a", "text", 1, 1024), RouteEdge("llm", "b", "out", "b", "text", 1, 1024))
GATEWAY, LLM = Peer("gateway", 1, "g"), Peer("llm.3", 2, "l")
ROUTE = Route("r", "p", GATEWAY, {"llm": LLM}, EDGES)


def actor(peer: Peer, stage: str = ""):
    return Membership().join(Hello(1, peer, "stage" if stage else "gateway", stage), 0.0)


@pytest.mark.parametrize("non_idempotent", [frozenset(), frozenset({"llm"}), frozenset({"other"})])
def test_lost_stage_is_named_with_whether_a_retry_is_safe(non_idempotent):
    error = error_for_lost(actor(LLM, "llm"), ROUTE, Pipeline("p", "p", (), EDGES, non_idempotent))

    assert isinstance(error, StageLost)
    assert error.stage == "llm"
    assert "llm.3" in error.message
    assert error.is_retry_safe == ("llm" not in non_idempotent)


def test_lost_gateway_cancels():
    assert isinstance(error_for_lost(actor(GATEWAY), ROUTE, Pipeline("p", "p", (), EDGES)), RequestCancelled)


def test_lost_stranger_does_not_concern_the_request():
    other = actor(Peer("llm.3", 99, "l"), "llm")

    assert error_for_lost(other, ROUTE, Pipeline("p", "p", (), EDGES)) is None


# --- successors ---------------------------------------------------------------------------------------------


LOST = StageLost("gone", stage="llm", is_retry_safe=True)


def entry(**changes) -> Request:
    """A request that runs over `ROUTE`."""
    request = Request(
        submit=Submit("r", "p", ("b",), 3, 9.0, "team"),
        client=GATEWAY,
        pipeline=Pipeline("p", "p", (), EDGES),
        edges=EDGES,
        received_at=4.0,
        deadline=13.0,
        state=State.RUNNING,
        route=ROUTE,
        pending={"llm": LLM},
    )
    return msgspec.structs.replace(request, **changes)


def test_successor_keeps_all_but_the_id():
    found = successor_of(entry(), LOST)

    assert found is not None
    name, successor = found
    assert (name, origin(name), origin("r")) == ("r.2", "r", "r")
    assert successor.submit == Submit("r.2", "p", ("b",), 3, 9.0, "team")
    assert (successor.client, successor.edges, successor.deadline, successor.received_at) == (GATEWAY, EDGES, 13.0, 4.0)
    assert (successor.state, successor.route, successor.pending) == (State.RECOVERING, None, {})
    assert successor.cause == LOST.to_info()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, StageLost("gone", is_retry_safe=False)),
        ({}, RequestCancelled("the client's gateway is gone")),
        ({"route": msgspec.structs.replace(ROUTE, is_retry=True)}, LOST),
        ({"state": State.ENDING}, LOST),
        ({"has_client_left": True}, LOST),
        ({"state": State.QUEUED, "route": None}, LOST),
    ],
)
def test_there_is_no_successor_where_a_second_run_is_wrong(changes, error):
    assert successor_of(entry(**changes), error) is None


class Waiting:
    """A recovery with one stage, which may have replicas."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.absences = Absences(self.membership)
        self.recovery = Recovery(lambda edges: None if self.membership.replicas("llm") else "llm", self.absences)

    def stage_is_ready(self) -> None:
        self.membership.join(Hello(1, LLM, "stage", "llm", is_ready=True), 0.0)


def test_who_waits_goes_on_in_order_once_every_stage_has_a_replica():
    waiting = Waiting()
    for name in ("b", "a"):
        effects = waiting.recovery.wait(name, entry(), 50.0)
        assert effects == [SetTimer(("recover", name), 50.0 + MAX_WAIT_S)]
    assert waiting.recovery.take_ready() == []

    waiting.stage_is_ready()

    assert [name for name, _ in waiting.recovery.take_ready()] == ["b", "a"]
    assert waiting.recovery.take_ready() == []


def test_wait_is_not_longer_for_a_replica_that_comes_and_goes():
    waiting, request = Waiting(), entry()
    waiting.recovery.wait("r", request, 50.0)

    assert waiting.recovery.wait("r", request, 57.0) == [SetTimer(("recover", "r"), 50.0 + MAX_WAIT_S)]
    assert waiting.recovery.may_wait(request, "llm", 57.0)
    assert not waiting.recovery.may_wait(request, "llm", 50.0 + MAX_WAIT_S)


def test_nobody_waits_for_a_degraded_stage():
    waiting, request = Waiting(), entry()
    waiting.recovery.wait("r", request, 50.0)
    assert waiting.recovery.hopeless(50.0) == []

    waiting.absences.take(Outlook("llm.3", "llm", 3, "degraded", "exit code 70", 60.0), 50.0)

    ((name, error),) = waiting.recovery.hopeless(51.0)
    assert (name, error.code, error.stage, error.retry_after_s) == ("r", "unavailable", "llm", 60.0)
    assert not waiting.recovery.may_wait(entry(), "llm", 51.0)


def test_wait_in_vain_ends_with_the_loss_behind_it_or_with_what_is_missing():
    waiting = Waiting()
    waiting.recovery.wait("successor", entry(cause=LOST.to_info()), 0.0)
    waiting.recovery.wait("queued", entry(), 0.0)

    lost = waiting.recovery.error_after_wait("successor", 10.0)
    missing = waiting.recovery.error_after_wait("queued", 10.0)

    assert (type(lost), lost and lost.is_retry_safe) == (StageLost, True)
    assert lost is not None
    assert lost.message == "gone, and none came in its place within 10 s"
    assert isinstance(missing, Unavailable)
    waiting.stage_is_ready()
    assert waiting.recovery.error_after_wait("queued", 10.0) is None
    waiting.recovery.leave("queued")
    assert waiting.recovery.error_after_wait("queued", 10.0) is None
