"""Sessions whose process is to end: each ends in its first pause, tells why, and goes on if that is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.core import SETTLE_S
from omni_bus.core.session.items import InputText, Message
from omni_bus.sim.sessions import Talk, names

if TYPE_CHECKING:
    from collections.abc import Callable

MANUAL = {"audio": {"input": {"turn_detection": None}}}
TRANSCRIBING = {"audio": {"input": {"turn_detection": None, "transcription": {}}}}
HI = asked.ItemCreate(item=Message(role="user", content=(InputText("Hi"),)))


def drain(talk: Talk, *, is_drained: bool = True) -> list[said.AnyServerEvent]:
    return talk.take(talk.core.on_drained(talk.now, is_drained=is_drained))


def test_session_in_a_pause_ends_at_once_and_its_client_is_told_why():
    talk = Talk()

    error, closed = drain(talk)

    assert isinstance(error, said.ErrorEvent)
    assert (error.error.code, error.error.type) == ("server_stopping", "server_error")
    assert error.error.message.endswith("please open another session")
    assert isinstance(closed, said.SessionClosed)
    assert (closed.reason, talk.ended, talk.closed) == ("shutdown", "shutdown", {1: "shutdown"})


def answering(talk: Talk) -> None:
    talk.say(HI)
    talk.say(asked.ResponseCreate())


def answering_beside(talk: Talk) -> None:
    talk.say(asked.ResponseCreate(response=asked.ResponseOptions(conversation="none")))


def writing_down(talk: Talk) -> None:
    talk.append(100)
    talk.say(asked.AudioCommit())


def speaking(talk: Talk) -> None:
    talk.append(400)
    talk.speech(100)


def silent(talk: Talk) -> None:
    """The answer to what was said begins."""
    talk.append(600)
    talk.silence(500)


@pytest.mark.parametrize(
    ("session", "begin", "end"),
    [
        (None, answering, lambda talk: talk.finish()),
        (None, answering, lambda talk: talk.fail()),
        (None, answering, lambda talk: talk.say(asked.ResponseCancel())),
        (None, answering_beside, lambda talk: talk.finish()),
        (TRANSCRIBING, writing_down, lambda talk: talk.transcribed("hi")),
        ({"audio": {"input": {"turn_detection": {"type": "server_vad", "create_response": False}}}}, speaking, silent),
    ],
    ids=["answered", "failed", "cancelled", "beside", "written down", "heard"],
)
def test_what_is_under_way_is_brought_to_its_end(
    session: dict | None, begin: Callable[[Talk], object], end: Callable[[Talk], object]
):
    talk = Talk(session=session)
    begin(talk)
    assert drain(talk) == []
    talk.wait(20.0)
    assert talk.ended is None

    end(talk)

    talk.wait(SETTLE_S)
    assert talk.ended == "shutdown"
    assert names(talk.events)[-2:] == ["error", "session.closed"]


@pytest.mark.parametrize(
    ("event", "sequel"),
    [
        (asked.AudioAppend(audio=b"\0\0" * 1600), asked.AudioCommit()),
        (HI, asked.ResponseCreate()),
        (asked.TurnSignal(event="user_started"), HI),
    ],
)
def test_who_has_begun_something_may_go_on(event: asked.AnyClientEvent, sequel: asked.AnyClientEvent):
    talk = Talk(session=MANUAL)
    talk.say(event)
    assert drain(talk) == []
    talk.wait(SETTLE_S * 0.9)

    talk.say(sequel)
    talk.wait(SETTLE_S * 0.9)

    assert talk.ended is None


def test_sound_without_speech_keeps_no_session_from_its_end():
    talk = Talk()
    talk.append(100)
    drain(talk)
    assert talk.ended == "shutdown"


def test_session_goes_on_when_the_drain_is_undone():
    talk = Talk()
    answering(talk)
    drain(talk)

    assert drain(talk, is_drained=False) == []

    talk.finish()
    talk.wait(10.0)
    assert talk.ended is None
    drain(talk)
    assert talk.ended == "shutdown"


def test_session_whose_client_is_away_is_left_alone_until_it_is_back():
    talk = Talk(is_resumable=True)
    talk.take(talk.core.on_detached(1, talk.now))
    assert drain(talk) == []
    talk.wait(5.0)
    assert talk.ended is None

    event = asked.SessionResume(session_id="sess_1", resume_token=talk.tokens[-1], last_received_server_event_seq=0)
    events = talk.take(talk.core.on_resumed(2, event, talk.now))

    assert names(events) == ["session.resumed", "error", "session.closed"]
