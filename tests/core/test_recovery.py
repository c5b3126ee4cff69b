import pytest

from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.recovery import error_for_lost
from omni_bus.errors import RequestCancelled, StageLost
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, Route, RouteEdge

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
