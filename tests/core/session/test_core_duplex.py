"""What duplex clients do: speak while they hear, say what they played, and interrupt."""

from base64 import b64decode

import pytest

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import effects as done
from omni_bus.core.session import server_events as said
from omni_bus.core.session.items import InputAudio, InputImage, InputText, Message
from omni_bus.core.session.limits import Limits
from omni_bus.sim.sessions import Talk, names

VOICE = b"\x00\x10" * 16  # a millisecond of s16 at an eighth of full scale


def duplex(policy: str = "listen_only", **fields) -> Talk:
    session = {"audio": {"input": {"turn_detection": None}}, "duplex": {"overlap_policy": policy}, **fields}
    return Talk(session=session)


def speak(talk: Talk, num_ms: int, **hints) -> list[said.AnyServerEvent]:
    talk.wait(num_ms / 1000)
    return talk.say(asked.AudioAppend(audio=VOICE * num_ms, **hints))


def answered(talk: Talk, num_ms: int = 2000) -> str:
    """The user speaks, and an answer is under way."""
    speak(talk, 500)
    talk.say(asked.AudioCommit(create_response=True))
    response_id = talk.generation
    talk.text("One two three four five six seven eight.")
    talk.sound(num_ms)
    return response_id


def decision(events: list[said.AnyServerEvent]) -> tuple[str, str]:
    (found,) = [event for event in events if isinstance(event, said.OverlapDecision)]
    return found.action, found.reason


def committed(events: list[said.AnyServerEvent]) -> said.CommitDetail:
    (found,) = [event for event in events if isinstance(event, said.InputCommitted)]
    return found.detail


def heard(talk: Talk) -> str:
    """What the next prompt has of the first answer."""
    talk.say(asked.ItemCreate(item=Message(role="user", content=(InputText("Go on"),))))
    talk.say(asked.ResponseCreate())
    generate = [effect for effect in talk.effects if isinstance(effect, done.Generate)][-1]
    return "".join(
        str(part) for message in generate.messages if message.role == "assistant" for part in message.content
    )


def test_a_commit_asks_for_its_answer_and_speech_is_announced():
    talk = duplex()
    speak(talk, 500)

    assert names(talk.say(asked.AudioCommit(create_response=True)))[-1] == "response.created"
    talk.text("Hello.")
    assert names(talk.sound(100)) == ["response.speak", "response.output_audio.delta"]


def test_silence_is_no_turn():
    talk = duplex()
    talk.append(500)

    events = talk.say(asked.AudioCommit(create_response=True))

    assert names(events) == ["input_audio_buffer.committed", "response.listen"]
    assert committed(events).is_empty
    assert talk.items == []


def test_nothing_is_an_error():
    assert names(duplex().say(asked.AudioCommit())) == ["error"]


def test_a_response_to_nothing_is_refused():
    (event,) = duplex().say(asked.ResponseCreate())

    assert isinstance(event, said.ErrorEvent)
    assert event.error.vendor_code == "response_create_without_input"


def test_a_short_acknowledgement_over_an_answer_is_no_turn():
    talk = duplex()
    answered(talk)
    assert decision(speak(talk, 400)) == ("listen", "policy_listen_only")

    events = talk.say(asked.AudioCommit(create_response=True))

    assert committed(events).overlap_ack
    assert len(talk.generating) == 1


def test_a_longer_turn_over_an_answer_waits_for_its_end():
    talk = duplex()
    first = answered(talk)
    speak(talk, 1000)

    detail = committed(talk.say(asked.AudioCommit(create_response=True)))
    assert detail.overlap_deferred
    assert detail.response_create_deferred
    assert talk.generation == first

    assert names(talk.finish())[-1] == "response.created"
    assert talk.generation != first


def test_speech_interrupts_where_the_policy_says_so_and_is_the_next_turn():
    talk = duplex("barge_in_on_speech")
    first = answered(talk)

    events = speak(talk, 500)

    assert decision(events) == ("barge_in", "policy_barge_in_on_speech")
    (done_event,) = [event for event in events if isinstance(event, said.ResponseDone)]
    assert done_event.response.status_details is not None
    assert done_event.response.status_details.cause == "barge_in"
    assert talk.generating == {}
    assert not talk.sound(100, first)
    talk.say(asked.AudioCommit(create_response=True))
    assert len(talk.generating) == 1


def test_an_answer_that_ended_but_still_sounds_is_only_cleared():
    talk = duplex()
    first = answered(talk)
    talk.finish()

    assert names(talk.say(asked.BargeIn()))[0] == "output_audio_buffer.cleared"
    assert names(talk.say(asked.BargeIn())) == ["error"]
    assert talk.watcher.responses[first].is_done


def test_epochs_advance_with_all_that_cuts_an_answer_off():
    talk = duplex()
    answered(talk)
    talk.say(asked.ResponseCancel())
    talk.say(asked.InputCancel())
    answered(talk)
    events = talk.say(asked.BargeIn())
    (event,) = talk.say(asked.TurnSignal(event="user_started"))

    assert names(events)[-1] == "input_audio_buffer.cleared"
    assert isinstance(event, said.TurnEvent)
    assert event.epoch == 3
    assert event.turn_state == "user_speaking"


@pytest.mark.parametrize(
    ("acks", "text"),
    [
        ([], "One two three four five six seven eight."),
        ([1000], "One two three four"),
        ([0], ""),
        ([1000, 500], "One two three four"),
        ([500, 2000], "One two three four five six seven eight."),
    ],
)
def test_what_counts_as_heard_is_what_was_acknowledged_last(acks, text):
    talk = duplex()
    answered(talk)
    for played_ms in acks:
        (event,) = talk.say(asked.PlaybackAck(played_ms=played_ms))
        assert isinstance(event, said.PlaybackAcknowledged)
    talk.finish()

    assert heard(talk) == text


def test_an_acknowledgement_that_truncates_is_final():
    talk = duplex()
    answered(talk)
    talk.finish()
    talk.say(asked.PlaybackAck(played_ms=1000, truncate=True))
    talk.say(asked.PlaybackAck(played_ms=2000))

    assert heard(talk) == "One two three four"


def test_an_acknowledgement_after_the_next_turn_is_too_late_unless_one_came_before():
    talk = duplex()
    first = answered(talk)
    talk.finish()
    talk.say(asked.PlaybackAck(played_ms=100, response_id=first))
    talk.wait(2)
    second = answered(talk)
    talk.finish()
    talk.wait(2)
    speak(talk, 1000)
    talk.say(asked.AudioCommit())

    (late,) = talk.say(asked.PlaybackAck(played_ms=2000, response_id=second))
    (fine,) = talk.say(asked.PlaybackAck(played_ms=2000, response_id=first))

    assert isinstance(late, said.ErrorEvent)
    assert late.error.code == "playback_ack_too_late"
    assert isinstance(fine, said.PlaybackAcknowledged)


def test_answers_from_before_the_first_acknowledgement_stay_heard():
    talk = duplex()
    answered(talk)
    talk.finish()
    talk.wait(3)
    answered(talk)
    talk.say(asked.PlaybackAck(played_ms=1000))
    talk.finish()

    assert heard(talk) == "One two three four five six seven eight.One two three four"


def test_who_wants_only_acknowledged_words_hears_nothing_by_itself():
    talk = duplex(playback_commit_policy="ack_only")
    first = answered(talk)
    talk.finish()
    speak(talk, 1000)
    assert committed(talk.say(asked.AudioCommit(create_response=True))).response_create_deferred

    events = talk.say(asked.PlaybackAck(played_ms=2000, response_id=first))

    assert names(events) == ["error"]  # the user has spoken since


def test_acknowledged_in_time_the_deferred_turn_is_answered():
    talk = duplex(playback_commit_policy="ack_only")
    first = answered(talk)
    talk.finish()
    talk.say(asked.PlaybackAck(played_ms=500, response_id=first))
    speak(talk, 1000)
    talk.say(asked.AudioCommit(create_response=True))
    assert talk.generating == {}

    assert names(talk.say(asked.PlaybackAck(played_ms=2000, response_id=first)))[-1] == "response.created"


def test_the_turns_that_wait_are_bounded():
    talk = duplex()
    answered(talk)
    for _ in range(4):
        speak(talk, 1000)
        talk.say(asked.AudioCommit(create_response=True))
    speak(talk, 1000)

    (event,) = talk.say(asked.AudioCommit(create_response=True))

    assert isinstance(event, said.ErrorEvent)
    assert event.error.vendor_code == "input_backpressure"


def test_a_model_that_can_not_be_interrupted_says_so_and_goes_on():
    capabilities = said.Capabilities(hears_audio=True, supports_barge_in=False)
    talk = Talk(session={"audio": {"input": {"turn_detection": None}}, "duplex": {}}, capabilities=capabilities)
    answered(talk)

    events = speak(talk, 100, force_barge_in=True, event_id="mine")

    assert names(events) == ["overlap.decision", "error"]
    assert names(talk.say(asked.BargeIn())) == ["error"]
    assert names(talk.sound(100)) == ["response.output_audio.delta"]


# --- pictures ---------------------------------------------------------------------------------------------------

JPEG = b"\xff\xd8" + bytes(40)
SEES = said.Capabilities(hears_audio=True, supports_image_input=True)


def seeing(**limits) -> Talk:
    session = {"audio": {"input": {"turn_detection": None}}, "duplex": {}}
    return Talk(session=session, capabilities=SEES, limits=Limits(**limits))


def pictures(talk: Talk) -> list[str]:
    generate = [effect for effect in talk.effects if isinstance(effect, done.Generate)][-1]
    return [
        part.image_url for message in generate.messages for part in message.content if isinstance(part, done.ImagePart)
    ]


def test_frames_that_ride_on_sound_belong_to_its_turn():
    talk = seeing()
    speak(talk, 500, video_frames=(JPEG, b"\x89PNG"))

    events = talk.say(asked.AudioCommit(create_response=True))

    (added,) = [event.item for event in events if isinstance(event, said.ItemAdded)]
    assert isinstance(added, Message)
    assert added.content == (InputImage(), InputImage(), InputAudio())  # events bring no media
    assert [url.partition(",")[0] for url in pictures(talk)] == ["data:image/jpeg;base64", "data:image/png;base64"]


def test_of_many_frames_the_latest_are_kept():
    talk = seeing(max_images=3)
    for index in range(5):
        speak(talk, 100, video_frames=(b"\xff\xd8" + bytes([index]),))
    talk.say(asked.AudioCommit(create_response=True))
    assert [b64decode(url.partition(",")[2])[2] for url in pictures(talk)] == [2, 3, 4]
    talk.finish()
    speak(talk, 100, video_frames=(JPEG,))

    talk.say(asked.AudioCommit(create_response=True))

    assert len(pictures(talk)) == 1  # those of the turn before are forgotten together


def test_cleared_frames_are_gone():
    talk = seeing()
    speak(talk, 100, video_frames=(JPEG,))
    talk.say(asked.AudioClear())
    speak(talk, 100)
    talk.say(asked.AudioCommit(create_response=True))

    assert pictures(talk) == []


def picture(url: str | None = "data:image/png;base64,AAAA") -> asked.ItemCreate:
    return asked.ItemCreate(item=Message(role="user", content=(InputImage(url),)))


def test_a_picture_of_an_item_is_seen_and_shown_once():
    talk = seeing()
    added = talk.say(picture())[0]
    assert isinstance(added, said.ItemAdded)
    talk.say(asked.ResponseCreate())
    (whole,) = talk.say(asked.ItemRetrieve(item_id=talk.items[0]))

    assert pictures(talk) == ["data:image/png;base64,AAAA"]
    assert isinstance(added.item, Message)
    assert added.item.content == (InputImage(),)
    assert isinstance(whole, said.ItemRetrieved)
    assert isinstance(whole.item, Message)
    assert whole.item.content == (InputImage("data:image/png;base64,AAAA"),)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (picture(None), "invalid_image"),
        (picture("https://example.com/cat.png"), "invalid_image"),
        (picture("data:image/gif;base64,AAAA"), "invalid_image"),
        (picture("data:image/png;base64," + "A" * 5000), "input_backpressure"),
    ],
)
def test_pictures_that_are_refused(event, code):
    talk = seeing(max_image_bytes=1000)

    (refused,) = talk.say(event)

    assert isinstance(refused, said.ErrorEvent)
    assert refused.error.vendor_code == code
    assert talk.items == []


def test_more_pictures_than_may_be_are_refused():
    talk = seeing(max_images=2)
    assert names(talk.say(picture()) + talk.say(picture())).count("conversation.item.added") == 2

    (refused,) = talk.say(picture())

    assert isinstance(refused, said.ErrorEvent)
    assert refused.error.vendor_code == "input_backpressure"


def test_a_model_that_sees_nothing_says_so():
    talk = duplex()

    for event in (picture(), asked.AudioAppend(audio=VOICE, video_frames=(JPEG,))):
        (refused,) = talk.say(event)
        assert isinstance(refused, said.ErrorEvent)
        assert refused.error.param in {"item.content[0].type", "video_frames"}


# --- commits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    [
        asked.AudioAppend(audio=VOICE, overlap_action="nonsense"),
        asked.Refuse(code="INVALID_AUDIO", message="no base64", is_append=True),
    ],
)
def test_a_commit_of_a_turn_that_lost_sound_is_aborted_once(lost):
    talk = duplex()
    speak(talk, 500)
    talk.say(lost)

    (aborted,) = talk.say(asked.AudioCommit(create_response=True))

    assert isinstance(aborted, said.ErrorEvent)
    assert (aborted.error.vendor_code, aborted.error.type) == ("commit_aborted", "server_error")
    assert names(talk.say(asked.AudioCommit(create_response=True)))[-1] == "response.created"


def test_what_was_refused_besides_sound_aborts_no_commit():
    talk = duplex()
    speak(talk, 500)
    talk.say(asked.Refuse(code="INVALID_JSON", message="no JSON"))
    talk.say(asked.Refuse(code="INVALID_AUDIO", message="no base64", is_append=True))
    talk.say(asked.AudioClear())
    speak(talk, 500)

    assert names(talk.say(asked.AudioCommit(create_response=True)))[-1] == "response.created"


def test_a_model_that_answers_speech_alone_wants_some():
    capabilities = said.Capabilities(hears_audio=True, supports_text_only_turn=False)
    talk = Talk(session={"audio": {"input": {"turn_detection": None}}, "duplex": {}}, capabilities=capabilities)
    talk.say(asked.ItemCreate(item=Message(role="user", content=(InputText("Hello"),))))

    (refused,) = talk.say(asked.ResponseCreate())

    assert isinstance(refused, said.ErrorEvent)
    assert refused.error.vendor_code == "text_only_turn_unsupported"
    speak(talk, 500)
    assert names(talk.say(asked.AudioCommit(create_response=True)))[-1] == "response.created"
