import pytest

from omni_bus.core.effects import Send
from omni_bus.core.links import MAX_SETTLED, MAX_TARGETS, NONCE, BrokenLinks, error_for_broken
from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import LinkBroken
from omni_bus.ids import Peer
from omni_bus.wire.frames import Broken, Hello, Ping, Route, RouteEdge

EDGES = (RouteEdge("in", "a", "llm", "a", "text", 1, 1024), RouteEdge("llm", "b", "out", "b", "text", 1, 1024))
GATEWAY, LLM = Peer("gateway", 1, "g"), Peer("llm.3", 2, "l")
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
    assert "from llm.3 to voice.0 is broken" in error.message
    assert error.is_retry_safe == ("voice" not in non_idempotent)


def test_breaks_wait_for_a_sign_of_life_of_their_target():
    links, llm = BrokenLinks(), Membership().join(Hello(1, LLM, "stage", "llm"), 0.0)

    assert links.suspect(Broken(GATEWAY, LLM), llm) == [Send(LLM, Ping(NONCE))]
    links.suspect(Broken(VOICE, LLM), llm)
    links.suspect(Broken(VOICE, LLM), llm)

    assert links.settle(VOICE.sender) == []
    assert links.settle(LLM.sender) == [Broken(GATEWAY, LLM), Broken(VOICE, LLM)]
    assert links.settle(LLM.sender) == []


def test_breaks_towards_strangers_wait_too_and_end_with_whoever_takes_their_name():
    links, former, newcomer = BrokenLinks(), Peer("llm.3", 1, "l"), LLM

    assert links.keep(Broken(GATEWAY, former))
    assert links.keep(Broken(VOICE, newcomer))
    assert links.keep(Broken(LLM, VOICE))

    assert links.settle_others("llm.3", newcomer.sender) == [Broken(GATEWAY, former)]
    assert links.settle_others("llm.3", None) == [Broken(VOICE, newcomer)]
    assert links.settle(VOICE.sender) == [Broken(LLM, VOICE)]


def test_breaks_towards_strangers_are_limited():
    links = BrokenLinks()
    for number in range(MAX_TARGETS):
        assert links.keep(Broken(GATEWAY, Peer("nobody", number, "n")))

    assert not links.keep(Broken(GATEWAY, LLM))
    assert links.keep(Broken(VOICE, Peer("nobody", 0, "n"))), "its target is waited for anyhow"


def test_settled_breaks_are_remembered_for_a_time_and_not_without_limit():
    links = BrokenLinks()
    links.remember(Broken(GATEWAY, LLM), 1.0)
    links.remember(Broken(LLM, VOICE), 2.0)
    assert links.settled_since(2.0) == [Broken(LLM, VOICE)]

    links.remember(Broken(GATEWAY, LLM), 3.0)
    for number in range(MAX_SETTLED - 1):
        links.remember(Broken(VOICE, Peer("llm.0", number, "l")), 4.0)

    assert Broken(LLM, VOICE) not in links.settled_since(0.0)
    assert links.settled_since(0.0)[0] == Broken(GATEWAY, LLM)
    assert len(links.settled_since(0.0)) == MAX_SETTLED


def test_break_can_be_answered_once_when_all_who_were_told_confirm_it():
    links, broken = BrokenLinks(), Broken(LLM, VOICE, 1)
    links.remember(broken, 1.0)
    assert links.is_settled(broken)
    first, second = links.tell(broken, (GATEWAY, VOICE, GATEWAY))
    assert (first, second) == (Send(GATEWAY, Ping(-1)), Send(VOICE, Ping(-2)))

    assert links.on_pong(GATEWAY.sender, -2) == links.on_pong(LLM.sender, -1) == []
    assert links.on_pong(VOICE.sender, -2) == []
    assert links.tell_again(VOICE) == []
    assert links.tell_again(GATEWAY) == [Send(GATEWAY, Ping(-3))]
    assert links.on_pong(GATEWAY.sender, -1) == [], "what was sent before may be lost, this one may be late"
    assert not links.is_answered(broken)
    assert links.on_pong(GATEWAY.sender, -3) == [broken]

    assert links.is_answered(broken)
    assert links.on_pong(GATEWAY.sender, -3) == links.forget(GATEWAY.sender) == []


def test_breaks_are_not_answered_while_there_is_patience():
    links, broken = BrokenLinks(), Broken(LLM, VOICE, 1)
    links.be_patient()
    links.remember(broken, 1.0)
    links.tell(broken, (GATEWAY,))
    assert links.forget(GATEWAY.sender) == []

    assert links.lose_patience() == [broken]
    assert links.lose_patience() == []


def test_target_is_told_again_of_a_break_that_it_has_not_confirmed():
    links, broken = BrokenLinks(), Broken(LLM, GATEWAY, 1)
    links.remember(broken, 1.0)
    links.tell(broken, (GATEWAY,))

    assert links.tell_again(GATEWAY) == [Send(GATEWAY, broken), Send(GATEWAY, Ping(-2))]
