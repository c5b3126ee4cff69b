"""What the coordinator does about connections that break while both ends live."""

from __future__ import annotations

import pytest

from omni_bus.core.effects import Send
from omni_bus.core.links import NONCE
from omni_bus.errors import ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Admit,
    Broken,
    Cancel,
    Cancelled,
    Done,
    Failed,
    Goodbye,
    Hello,
    Inquire,
    Introduce,
    Ping,
    Pong,
    Reroute,
)
from tests.core.test_coordinator import GATEWAY, LLM, VOICE, Deployment, codes, route


def confirm(deployment: Deployment, *peers: Peer) -> None:
    """Have these actors answer every ping."""
    for peer in peers:
        for ping in deployment.to(peer, Ping):
            deployment.frame(peer, Pong(ping.nonce))


@pytest.fixture
def up() -> Deployment:
    deployment = Deployment()
    deployment.join(LLM, VOICE, GATEWAY)
    return deployment


def test_broken_connection_ends_what_both_ends_work_on(up):
    up = Deployment(non_idempotent=frozenset({"voice"}))
    up.join(LLM, VOICE, GATEWAY)
    up.submit("both", outputs=("audio",))
    up.submit("other", outputs=("text",))

    up.frame(LLM, Broken(LLM, VOICE))
    assert up.to(VOICE, Ping) == [Ping(NONCE)]
    assert up.to(GATEWAY, Failed) == [], "first it must be known that the voice lives"
    up.frame(VOICE, Pong(NONCE))

    assert codes(up.to(GATEWAY, Failed)) == ["link_broken"]
    assert [cancel.request for cancel in up.to(LLM, Cancel)] == ["both"]
    assert [cancel.request for cancel in up.to(VOICE, Cancel)] == ["both"]
    assert up.to(VOICE, Broken) == [Broken(LLM, VOICE)]
    confirm(up, VOICE, GATEWAY)
    assert up.to(LLM, Broken) == [Broken(LLM, VOICE)]
    assert up.to(GATEWAY, Broken) == []
    for stage in (LLM, VOICE):
        up.frame(stage, Cancelled("both"))
    up.frame(LLM, Done("other"))
    assert up.is_clean()


def test_client_hears_of_a_broken_connection_after_its_requests_errors(up):
    up = Deployment(non_idempotent=frozenset({"llm"}))
    up.join(LLM, VOICE, GATEWAY)
    up.submit("r")
    up.frame(LLM, Broken(LLM, GATEWAY))
    up.frame(GATEWAY, Pong(NONCE))

    kinds = [type(send.frame) for send in up.sent if send.peer == GATEWAY]

    assert kinds.index(Failed) < kinds.index(Broken)


def test_broken_connection_of_what_is_done_ends_nothing(up):
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Done("r"))

    up.frame(GATEWAY, Broken(GATEWAY, LLM))
    up.frame(LLM, Pong(NONCE))

    confirm(up, LLM)
    assert up.to(GATEWAY, Failed) == []
    assert up.to(GATEWAY, Broken) == [Broken(GATEWAY, LLM)]


@pytest.mark.parametrize("last", [VOICE, GATEWAY], ids=lambda who: who.actor)
def test_source_repeats_a_break_until_all_who_must_hear_of_it_have(up, last):
    """A coordinator that dies may have told the source only: the next one would wait for what is lost."""
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Broken(LLM, VOICE, 1))
    confirm(up, VOICE)  # that it lives
    confirm(up, *({VOICE, GATEWAY} - {last}))
    up.frame(LLM, Broken(LLM, VOICE, 1))
    assert up.to(LLM, Broken) == []

    confirm(up, last)
    assert up.to(LLM, Broken) == [Broken(LLM, VOICE, 1)]
    assert len(up.to(GATEWAY, Reroute)) == 1

    up.frame(LLM, Broken(LLM, VOICE, 1))
    assert up.to(LLM, Broken) == [Broken(LLM, VOICE, 1)], "the answer was lost"
    assert up.to(VOICE, Ping) == up.to(GATEWAY, Reroute) == []


def test_sign_of_life_is_no_confirmation(up):
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Broken(LLM, VOICE, 1))
    up.frame(VOICE, Pong(NONCE))

    for peer in (VOICE, GATEWAY):
        up.frame(peer, Pong(NONCE))
        up.join(peer, live=(route(),) if peer == GATEWAY else ())

    assert up.to(LLM, Broken) == []


def test_who_leaves_has_nothing_to_confirm(up):
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Broken(LLM, VOICE, 1))
    confirm(up, VOICE)
    confirm(up, VOICE)
    assert up.to(LLM, Broken) == []

    up.frame(GATEWAY, Goodbye())

    assert up.to(LLM, Broken) == [Broken(LLM, VOICE, 1)]


def test_what_a_client_may_have_missed_of_a_break_is_repeated_with_its_hello(up):
    """Its own connection to the coordinator broke too, and it alone knows whether chunks are missing."""
    up.submit("r")
    up.frame(LLM, Done("r"))
    up.frame(LLM, Broken(LLM, GATEWAY, 1))
    up.frame(GATEWAY, Pong(NONCE))
    assert up.to(GATEWAY, Broken) == [Broken(LLM, GATEWAY, 1)]

    up.join(GATEWAY, live=(route(llm=LLM),))
    assert up.to(GATEWAY, Broken) == [Broken(LLM, GATEWAY, 1)]
    confirm(up, GATEWAY)
    assert up.to(LLM, Broken) == [Broken(LLM, GATEWAY, 1)]
    up.join(GATEWAY)
    assert up.to(GATEWAY, Broken) == []


def test_second_break_of_a_connection_is_one_of_its_own(up):
    for number in (1, 2):
        up.submit(f"r{number}")
        up.frame(LLM, Broken(LLM, GATEWAY, number))
        confirm(up, GATEWAY)
        confirm(up, GATEWAY)

    assert up.to(LLM, Broken) == [Broken(LLM, GATEWAY, 1), Broken(LLM, GATEWAY, 2)]
    assert [reroute.request for reroute in up.to(GATEWAY, Reroute)] == ["r1", "r2"]


def test_new_coordinator_answers_no_break_before_all_whom_it_may_concern_had_their_time():
    """If it died too meanwhile, the next one would be as ignorant of the break as this one is of the request."""
    new = Deployment(awaited=("llm.0", "voice.0"))
    new.join(LLM, VOICE)
    new.frame(LLM, Broken(LLM, VOICE, 1))
    confirm(new, VOICE)
    confirm(new, VOICE)
    assert new.to(LLM, Broken) == []
    new.beat_until(4.0, LLM, VOICE)
    new.join(GATEWAY, live=(route(),))
    new.beat_until(9.5, LLM, VOICE, GATEWAY)
    assert [reroute.error.code for reroute in new.to(GATEWAY, Reroute)] == ["link_broken"]

    new.beat_until(20.0, LLM, VOICE, GATEWAY)
    assert new.to(LLM, Broken) == []
    confirm(new, GATEWAY)

    assert new.to(LLM, Broken) == [Broken(LLM, VOICE, 1)]


def test_break_is_told_by_its_own_source_only(up):
    up.submit("r")

    up.frame(VOICE, Broken(LLM, GATEWAY))
    up.frame(VOICE, Broken(Peer("voice.0", 99, "v"), LLM))
    for peer in (LLM, GATEWAY):
        up.frame(peer, Pong(NONCE))

    assert up.to(GATEWAY, Failed) == []
    assert up.to(VOICE, Broken) == []


def test_broken_connection_reroutes_what_may_run_again(up):
    up.submit("r")
    up.frame(LLM, Broken(LLM, GATEWAY))
    up.frame(GATEWAY, Pong(NONCE))

    (reroute,) = up.to(GATEWAY, Reroute)
    assert (reroute.request, reroute.error.code, reroute.error.is_retry_safe) == ("r", "link_broken", True)
    (_, admit) = up.to(GATEWAY, Admit)
    assert (admit.route.request, admit.route.stages) == (reroute.successor, {"llm": LLM})
    up.frame(LLM, Cancelled("r"))
    up.frame(LLM, Done(reroute.successor))
    assert up.is_clean()


def test_break_whose_target_died_is_a_loss(up):
    """The other end's process ended: that is why the connection broke, and its own rules hold."""
    up.submit("r", outputs=("audio",))
    up.frame(LLM, Broken(LLM, VOICE))

    up.frame(VOICE, Goodbye())

    (reroute,) = up.to(GATEWAY, Reroute)
    assert (reroute.error.code, reroute.error.stage) == ("stage_lost", "voice")
    assert up.to(LLM, Broken) == [Broken(LLM, VOICE)]


def test_hello_of_the_target_is_a_sign_of_life_too(up):
    """The ping, or its answer, may be what is lost."""
    up.submit("r")
    up.frame(LLM, Broken(LLM, GATEWAY))

    up.join(GATEWAY, live=(route(llm=LLM),))

    assert len(up.to(GATEWAY, Reroute)) == 1


def test_break_towards_a_former_incarnation_is_only_answered(up):
    up.frame(LLM, Broken(LLM, Peer("gateway.0", 99, "g")))

    assert up.to(LLM, Broken) == [Broken(LLM, Peer("gateway.0", 99, "g"))]
    assert up.to(GATEWAY, Broken) == []


def test_break_towards_whom_a_new_coordinator_has_not_met_waits_for_its_hello():
    new = Deployment()
    new.join(GATEWAY, live=(route(llm=LLM),))
    new.frame(GATEWAY, Broken(GATEWAY, LLM))
    assert new.to(GATEWAY, Broken) == [], "the other end may live, and wait for frames that are lost"

    new.join(LLM, live=(route(llm=LLM),))

    assert [reroute.error.code for reroute in new.to(GATEWAY, Reroute)] == ["link_broken"]
    assert [cancel.request for cancel in new.to(LLM, Cancel)] == ["r"]
    assert new.to(LLM, Broken) == [Broken(GATEWAY, LLM)]
    confirm(new, LLM, GATEWAY)
    assert new.to(GATEWAY, Broken) == [Broken(GATEWAY, LLM)]


def test_break_towards_somebody_who_never_says_hello_is_answered_in_the_end():
    new = Deployment()
    new.join(GATEWAY)
    new.frame(GATEWAY, Broken(GATEWAY, LLM))

    new.beat_until(20.0, GATEWAY)

    assert new.to(GATEWAY, Broken) == [Broken(GATEWAY, LLM)]
    new.join(LLM)
    assert new.to(LLM, Broken) == []


def test_break_towards_a_stranger_ends_with_the_hello_of_its_successor():
    new, former = Deployment(), Peer(LLM.actor, 99, "l")
    new.join(GATEWAY)
    new.frame(GATEWAY, Broken(GATEWAY, former))

    new.join(LLM)

    assert new.to(GATEWAY, Broken) == [Broken(GATEWAY, former)]
    assert new.to(LLM, Broken) == []


def test_request_that_is_adopted_after_its_connection_broke_ends_too():
    """Its client is the last to say hello; the stages hold nothing, since what opens the request there is lost."""
    new = Deployment()
    new.join(LLM, VOICE)
    new.frame(LLM, Broken(LLM, VOICE))
    new.frame(VOICE, Pong(NONCE))
    new.now = 1.0
    new.join(GATEWAY, live=(route(),))
    new.frame(LLM, Done("r"))

    new.beat_until(7.0, LLM, VOICE, GATEWAY)

    assert [reroute.error.code for reroute in new.to(GATEWAY, Reroute)] == ["link_broken"]


def test_request_that_is_adopted_long_after_a_break_goes_on():
    new = Deployment()
    new.join(LLM, VOICE)
    new.frame(LLM, Broken(LLM, VOICE))
    new.frame(VOICE, Pong(NONCE))
    new.beat_until(60.0, LLM, VOICE)
    new.join(GATEWAY, live=(route(),))

    new.beat_until(80.0, LLM, VOICE, GATEWAY)

    assert new.to(GATEWAY, Reroute) == new.to(GATEWAY, Failed) == []


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

    (told,) = [*up.to(GATEWAY, Failed), *up.to(GATEWAY, Reroute)]
    assert isinstance(told, Failed if non_idempotent else Reroute)
    assert told.error.code == "link_broken"
    assert told.error.is_retry_safe == (not non_idempotent)
