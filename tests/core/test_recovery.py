import pytest

from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.recovery import error_for_broken, error_for_lost
from omni_bus.errors import LinkBroken, RequestCancelled, StageLost
from omni_bus.ids import Peer
from omni_bus.wire.frames import Broken, Hello, Route, RouteEdge

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


VOICE = Peer("voice.0", 3, "v")
PATH = (
    EDGES[0],
    RouteEdge("llm", "b", "voice", "b", "text", 1, 1024),
    RouteEdge("voice", "c", "out", "c", "text", 1, 1024),
)
LONG = Route("r", "p", GATEWAY, {"llm": LLM, "voice": VOICE}, PATH)


@pytest.mark.parametrize(
    ("source", "target", "pending", "stage"),
    [
        (GATEWAY, LLM, {"llm", "voice"}, "llm"),  # input may be lost
        (LLM, GATEWAY, {"llm", "voice"}, "llm"),  # credit may be
        (GATEWAY, LLM, {"voice"}, ""),  # the stage has all that it needed
        (LLM, VOICE, {"llm", "voice"}, "llm"),
        (LLM, VOICE, {"voice"}, "voice"),  # its last chunks, or their end
        (VOICE, LLM, {"llm"}, "llm"),  # credit that it waits for
        (VOICE, LLM, set(), ""),
        (VOICE, GATEWAY, {"voice"}, "voice"),
        (VOICE, GATEWAY, set(), ""),  # what the client misses it knows itself
        (GATEWAY, VOICE, {"voice"}, "voice"),
        (LLM, Peer("gateway", 9, "g"), {"llm", "voice"}, ""),
        (Peer("llm.3", 9, "l"), VOICE, {"llm", "voice"}, ""),
    ],
)
def test_broken_connection_concerns_whoever_is_at_work_on_either_end(source, target, pending, stage):
    error = error_for_broken(Broken(source, target), LONG, pending, Pipeline("p", "p", (), PATH))

    assert (error.stage if error is not None else "") == stage


def test_broken_connection_between_stages_that_share_no_edge_concerns_nobody():
    route = Route("r", "p", GATEWAY, {"llm": LLM, "voice": VOICE}, (EDGES[0], PATH[2]))

    assert error_for_broken(Broken(LLM, VOICE), route, {"llm", "voice"}, Pipeline("p", "p", (), PATH)) is None


@pytest.mark.parametrize("non_idempotent", [frozenset(), frozenset({"voice"}), frozenset({"other"})])
def test_broken_connection_is_named_with_whether_a_retry_is_safe(non_idempotent):
    pipeline = Pipeline("p", "p", (), PATH, non_idempotent)

    error = error_for_broken(Broken(LLM, VOICE), LONG, {"voice"}, pipeline)

    assert isinstance(error, LinkBroken)
    assert "from llm.3 to voice.0 broke" in error.message
    assert error.is_retry_safe == ("voice" not in non_idempotent)
