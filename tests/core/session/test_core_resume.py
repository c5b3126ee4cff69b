"""Another socket goes on where the last one ended: nothing is lost, nothing comes twice, and nobody else gets in."""

import pytest

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.core import no_session
from omni_bus.core.session.effects import Emit, EndAttachment
from omni_bus.core.session.limits import Limits
from omni_bus.sim.sessions import Talk, names


def resume(talk: Talk, token: str, seq: int, attachment: int) -> list[said.AnyServerEvent]:
    event = asked.SessionResume(session_id="sess_1", resume_token=token, last_received_server_event_seq=seq)
    events = talk.take(talk.core.on_resumed(attachment, event, talk.now))
    if talk.core.attachment == attachment:
        talk.attachment = attachment
    return events


def code_of(events: list[said.AnyServerEvent]) -> str:
    (event,) = events
    assert isinstance(event, said.ErrorEvent)
    return event.error.vendor_code


def seqs(events: list[said.AnyServerEvent]) -> list[int]:
    return [event.server_event_seq for event in events if event.server_event_seq is not None]


@pytest.fixture
def talk() -> Talk:
    return Talk(session={"output_modalities": ["text"]}, is_resumable=True)


def test_an_answer_goes_on_while_nobody_listens_and_comes_after_the_resume(talk):
    talk.say(asked.ResponseCreate())
    talk.text("One ")
    heard = talk.watcher.last_seq
    talk.take(talk.core.on_detached(1, talk.now))
    assert talk.text("two ") == []
    talk.wait(5)
    assert talk.text("three.") == talk.finish() == []

    events = resume(talk, talk.tokens[-1], heard - 1, 2)

    assert isinstance(events[0], said.SessionResumed)
    assert events[0].resume_token != talk.tokens[0]
    assert events[0].attachment_generation == 2
    assert names(events[1:]) == [
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]
    assert seqs(events) == list(range(heard, heard + 9))
    assert names(talk.say(asked.Heartbeat())) == ["session.heartbeat_ack"]


def test_a_token_works_once(talk):
    first = talk.tokens[-1]
    talk.take(talk.core.on_detached(1, talk.now))
    resume(talk, first, 0, 2)
    talk.say(asked.EventAck(server_event_seq=0))
    talk.take(talk.core.on_detached(2, talk.now))

    assert code_of(resume(talk, first, 0, 3)) == "invalid_resume_token"
    assert talk.closed[3] == "invalid_resume_token"
    assert names(resume(talk, talk.tokens[-1], 0, 4)) == ["session.resumed"]


def test_a_token_works_again_if_the_next_one_may_not_have_come(talk):
    first = talk.tokens[-1]
    talk.take(talk.core.on_detached(1, talk.now))
    resume(talk, first, 0, 2)
    talk.take(talk.core.on_detached(2, talk.now))

    assert names(resume(talk, first, 0, 3)) == ["session.resumed"]


def test_a_takeover_ends_the_former_socket_whose_loss_then_means_nothing(talk):
    resume(talk, talk.tokens[-1], 0, 2)

    assert names(talk.seen[1])[-1] == "session.replaced"
    assert talk.closed == {1: "session_replaced"}
    assert talk.core.on_client(1, asked.Heartbeat(), talk.now) == []
    assert talk.core.on_detached(1, talk.now) == []
    talk.wait(100)
    assert talk.ended is None
    assert names(talk.say(asked.Heartbeat())) == ["session.heartbeat_ack"]


def test_what_was_acknowledged_is_not_kept(talk):
    for _ in range(3):
        talk.say(asked.Heartbeat())
    assert talk.say(asked.EventAck(server_event_seq=2)) == []
    talk.take(talk.core.on_detached(1, talk.now))

    assert names(resume(talk, talk.tokens[-1], 1, 2)) == ["session.resync_required"]
    assert talk.closed[2] == "journal_gap"
    assert names(resume(talk, talk.tokens[-1], 2, 3)) == ["session.resumed", "session.heartbeat_ack"]


def test_more_than_was_said_is_a_conflict(talk):
    talk.take(talk.core.on_detached(1, talk.now))

    assert code_of(resume(talk, talk.tokens[-1], 5, 2)) == "session_resume_conflict"


def test_what_is_too_old_is_gone(talk):
    talk.say(asked.ResponseCreate())
    talk.take(talk.core.on_detached(1, talk.now))
    talk.text("One")
    talk.wait(29)
    resume(talk, talk.tokens[-1], 1, 2)
    talk.wait(32)
    talk.take(talk.core.on_detached(2, talk.now))

    (event,) = resume(talk, talk.tokens[-1], 1, 3)

    assert isinstance(event, said.ResyncRequired)
    assert event.reason == "journal_gap"


def test_nobody_comes_back_in_time(talk):
    talk.say(asked.ResponseCreate())
    talk.take(talk.core.on_detached(1, talk.now))
    talk.wait(29)
    assert talk.ended is None
    talk.wait(2)

    assert talk.ended == "disconnect_grace_expired"
    assert talk.generating == {}


def test_a_session_that_is_over_turns_everybody_away():
    event = asked.SessionResume(session_id="sess_1", resume_token="t", last_received_server_event_seq=0)

    effects = no_session(7, event)

    assert code_of([effect.event for effect in effects if isinstance(effect, Emit)]) == "session_resume_expired"
    assert effects[-1] == EndAttachment(7, "session_resume_expired")


def test_a_journal_that_overflows_says_so_once_and_numbers_no_more():
    talk = Talk(is_resumable=True, limits=Limits(journal_bytes=2000))
    for _ in range(200):
        talk.say(asked.Heartbeat())

    assert names(talk.events).count("session.resync_required") == 1
    assert talk.events[-1].server_event_seq is None
    talk.take(talk.core.on_detached(1, talk.now))
    assert talk.ended == "disconnect"


def test_the_resumed_session_shows_what_is_so_now(talk):
    talk.say(asked.SessionUpdate(session={"instructions": "Be brief."}))
    talk.say(asked.ResponseCreate())
    talk.take(talk.core.on_detached(1, talk.now))

    (resumed,) = resume(talk, talk.tokens[-1], 2, 2)

    assert isinstance(resumed, said.SessionResumed)
    assert resumed.session.config.instructions == "Be brief."
    assert resumed.session.active_response_id == talk.generation


def test_a_session_that_can_not_be_resumed_says_so():
    talk = Talk()

    assert code_of(resume(talk, "token", 0, 2)) == "unsupported_session_resume"
    assert talk.core.attachment == 1
