"""What the coordinator does about connections that break while both ends live."""

from __future__ import annotations

import pytest

from omni_bus.core.effects import Send
from omni_bus.errors import ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Broken,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Hello,
    Inquire,
    Introduce,
)
from tests.core.test_coordinator import GATEWAY, LLM, VOICE, Deployment, codes, route


@pytest.fixture
def up() -> Deployment:
    deployment = Deployment()
    deployment.join(LLM, VOICE, GATEWAY)
    return deployment


def test_broken_connection_ends_what_both_ends_work_on(up):
    up.submit("both", outputs=("audio",))
    up.submit("other", outputs=("text",))

    up.frame(LLM, Broken(LLM, VOICE))

    assert codes(up.to(GATEWAY, Failed)) == ["link_broken"]
    assert [cancel.request for cancel in up.to(LLM, Cancel)] == ["both"]
    assert [cancel.request for cancel in up.to(VOICE, Cancel)] == ["both"]
    assert up.to(LLM, Broken) == up.to(VOICE, Broken) == [Broken(LLM, VOICE)]
    assert up.to(GATEWAY, Broken) == []
    for stage in (LLM, VOICE):
        up.frame(stage, Cancelled("both"))
    up.frame(LLM, Done("other"))
    assert up.is_clean()


def test_client_hears_of_a_broken_connection_after_its_requests_errors(up):
    up.submit("r")
    up.frame(LLM, Broken(LLM, GATEWAY))

    kinds = [type(send.frame) for send in up.sent if send.peer == GATEWAY]

    assert kinds.index(Failed) < kinds.index(Broken)


def test_broken_connection_of_what_is_done_ends_nothing(up):
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Done("r"))

    up.frame(GATEWAY, Broken(GATEWAY, LLM))

    assert up.to(GATEWAY, Failed) == []
    assert up.to(GATEWAY, Broken) == [Broken(GATEWAY, LLM)]


def test_break_is_told_by_its_own_source_only(up):
    up.submit("r")

    up.frame(VOICE, Broken(LLM, GATEWAY))
    up.frame(VOICE, Broken(Peer("voice.0", 99, "v"), LLM))

    assert up.to(GATEWAY, Failed) == []
    assert up.to(VOICE, Broken) == []


def test_break_towards_somebody_unknown_is_only_answered(up):
    up.frame(LLM, Broken(LLM, Peer("gateway.0", 99, "g")))

    assert up.to(LLM, Broken) == [Broken(LLM, Peer("gateway.0", 99, "g"))]
    assert up.to(GATEWAY, Broken) == []


def test_broken_connection_to_an_actor_asks_it_to_introduce_itself(up):
    up.take(up.core.on_link_broken(LLM, up.now))
    up.take(up.core.on_link_broken(Peer("llm.0", 99, "l"), up.now))

    assert [send for send in up.sent if isinstance(send.frame, Introduce)] == [Send(LLM, Introduce())]


def test_admission_that_never_arrived_is_taken_back(up):
    """The client has given it up, and nobody else would ever end it."""
    up.submit("r")
    up.take(up.core.on_link_broken(GATEWAY, up.now))
    up.join(GATEWAY)

    assert up.to(GATEWAY, Inquire) == [Inquire("r")]
    up.frame(GATEWAY, Cancel("r", "ended"))
    assert [cancel.request for cancel in up.to(LLM, Cancel)] == ["r"]
    up.frame(LLM, Cancelled("r"))
    assert up.is_clean()


def test_end_that_was_lost_is_told_again(up):
    up.submit("r")
    up.frame(LLM, Hello(PROTOCOL_VERSION, LLM, "stage", "llm", 0, is_ready=True))

    assert up.to(LLM, Inquire) == [Inquire("r")]
    up.frame(LLM, Done("r"))
    assert up.is_clean()


def test_error_that_a_client_missed_is_told_again(up):
    up.submit("r")
    up.frame(LLM, Failed("r", ErrorInfo("stage_failed", "no")))
    assert codes(up.to(GATEWAY, Failed)) == ["stage_failed"]

    up.join(GATEWAY, live=(route(llm=LLM),))

    assert codes(up.to(GATEWAY, Failed)) == ["stage_failed"]


@pytest.mark.parametrize("non_idempotent", [frozenset(), frozenset({"llm"})])
def test_chunks_that_a_stage_missed_are_rated_by_the_pipeline(non_idempotent):
    up = Deployment(non_idempotent=non_idempotent)
    up.join(LLM, VOICE, GATEWAY)
    up.submit("r")

    up.frame(LLM, Failed("r", ErrorInfo("link_broken", "chunk 5 came where 3 was due", stage="llm")))

    (failed,) = up.to(GATEWAY, Failed)
    assert failed.error.code == "link_broken"
    assert failed.error.is_retry_safe == (not non_idempotent)
