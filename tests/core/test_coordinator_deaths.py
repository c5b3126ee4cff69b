"""Processes that end while there is no coordinator to be told: their supervisor tells the next one."""

import pytest
from msgspec.structs import replace

from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    Broken,
    Cancel,
    Cancelled,
    Failed,
    Heartbeat,
    Introduce,
    Lost,
    Outlook,
    Reject,
    Reroute,
    RouteEdge,
    Submit,
    Unheard,
    Welcome,
)
from tests.core.test_coordinator import GATEWAY, LLM, PATIENCE_S, SUPERVISOR, VOICE, Deployment, codes, route

LLM_1 = Peer("llm.1", 4, "l1")


@pytest.fixture
def new() -> Deployment:
    """A coordinator that comes after another and has met nobody."""
    return Deployment(awaited=("llm.0", "llm.1", "voice.0"))


@pytest.mark.parametrize("is_told_first", [True, False])
def test_request_of_a_replica_that_died_goes_on_at_once(new, is_told_first):
    new.join(LLM_1)
    if is_told_first:
        new.join(SUPERVISOR)
        new.frame(SUPERVISOR, Lost(LLM))
    new.join(VOICE, live=(route(),))
    new.join(GATEWAY, live=(route(),))
    if not is_told_first:
        new.wait_until(0.0)
        assert new.to(GATEWAY, Reroute) == [], "it may say hello yet"
        new.join(SUPERVISOR)
        new.frame(SUPERVISOR, Lost(LLM))
    new.wait_until(0.0)

    assert codes(new.to(GATEWAY, Reroute)) == ["stage_lost"]


def test_request_waits_for_its_client_who_may_have_it_run_again(new):
    new.join(SUPERVISOR, LLM_1)
    new.frame(SUPERVISOR, Lost(LLM))
    new.join(VOICE, live=(route(),))
    new.wait_until(0.0)
    assert new.to(VOICE, Cancel) == []

    new.join(GATEWAY, live=(route(),))
    new.wait_until(0.0)
    assert len(new.to(GATEWAY, Reroute)) == 1


def test_requests_of_a_gateway_that_died_are_let_go_of_at_once(new):
    new.join(SUPERVISOR, LLM, VOICE, live=())
    new.join(LLM, live=(route(),))
    new.wait_until(0.0)
    assert new.to(LLM, Cancel) == []

    new.frame(SUPERVISOR, Lost(GATEWAY))
    new.wait_until(0.0)

    assert [cancel.request for cancel in new.to(LLM, Cancel)] == ["r"]
    for stage in (LLM, VOICE):
        new.frame(stage, Cancelled("r"))
    assert new.core.num_live == 0


def test_who_has_retired_is_missed_by_nobody(new):
    new.join(SUPERVISOR, LLM_1)
    new.frame(SUPERVISOR, Lost(LLM, is_settled=True))
    new.join(VOICE, GATEWAY, live=(route(),))
    new.wait_until(0.0)

    assert new.to(GATEWAY, Reroute) == []
    assert new.core.num_live == 1


def test_last_words_of_the_dead_bring_nobody_back(new):
    """They come another way than the supervisor's, and may come later."""
    new.join(SUPERVISOR)
    new.frame(SUPERVISOR, Lost(LLM))
    new.frame(LLM, Heartbeat("l"))
    new.join(LLM)

    assert new.to(LLM, Introduce) == []
    assert new.to(LLM, Welcome) == []
    again = Peer("llm.0", 7, "l7")
    new.join(again)
    assert len(new.to(again, Welcome)) == 1


def test_break_of_a_connection_to_the_dead_is_answered_at_once(new):
    new.join(SUPERVISOR, LLM, VOICE)
    new.frame(LLM, Broken(LLM, GATEWAY, 1))
    assert new.to(LLM, Broken) == [], "it may say hello yet"

    new.frame(SUPERVISOR, Lost(GATEWAY))
    new.frame(VOICE, Broken(VOICE, GATEWAY, 2))

    assert new.to(LLM, Broken) == [Broken(LLM, GATEWAY, 1)]
    assert new.to(VOICE, Broken) == [Broken(VOICE, GATEWAY, 2)]


def test_replica_that_is_down_is_awaited_by_no_request():
    new = Deployment(awaited=("llm.0", "voice.0"))
    new.join(GATEWAY, SUPERVISOR, VOICE)
    new.frame(GATEWAY, Submit("r", "chat", ("text",)))
    assert new.to(GATEWAY, Reject) == []

    new.frame(SUPERVISOR, Outlook("llm.0", "llm", 0, "degraded", "exit code 70", 60.0))

    assert codes(new.to(GATEWAY, Reject)) == ["unavailable"]
    assert new.now < PATIENCE_S


def test_death_is_told_again_and_changes_nothing_for_what_has_ended(new):
    new.join(SUPERVISOR, VOICE)
    new.join(GATEWAY, live=(route(),))
    for _ in range(2):
        new.frame(SUPERVISOR, Lost(LLM))
        new.join(VOICE, live=(route(),))
        new.wait_until(0.0)

    assert len(new.to(GATEWAY, Reroute)) == 1
    assert new.to(GATEWAY, Failed) == []


def test_request_whose_replica_died_before_its_first_word_goes_on_once_the_next_stage_says_so(new):
    """Where only another stage follows, the client can't tell what that has received."""
    chain = (
        RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
        RouteEdge("llm", "text", "voice", "text", "text", 4, 4096),
        RouteEdge("voice", "audio", "out", "audio", "text", 4, 4096),
    )
    new.join(SUPERVISOR, LLM_1)
    new.frame(SUPERVISOR, Lost(LLM))
    new.join(VOICE)
    new.join(GATEWAY, live=(replace(route(), edges=chain),))
    new.wait_until(0.0)
    assert new.to(GATEWAY, Reroute) == [], "it may have sent all of it"

    new.frame(LLM_1, Unheard("r"))
    new.frame(VOICE, Unheard("other"))
    new.wait_until(0.0)
    assert new.to(GATEWAY, Reroute) == []

    new.frame(VOICE, Unheard("r"))
    new.wait_until(0.0)
    assert codes(new.to(GATEWAY, Reroute)) == ["stage_lost"]
