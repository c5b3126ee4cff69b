"""A turn's words are asked for in a pause that may be its end, and used only if it was."""

import pytest

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import effects as done
from omni_bus.core.session import server_events as said
from omni_bus.core.session.limits import Limits
from omni_bus.sim.sessions import Talk, names

CASCADE = said.Capabilities(supports_tools=True, hears_audio=False)
TRANSCRIBING = {"audio": {"input": {"transcription": {}}}}


def transcript_of(event: said.AnyServerEvent) -> said.TranscriptionCompleted:
    assert isinstance(event, said.TranscriptionCompleted)
    return event


def words_of(talk: Talk) -> list[str]:
    """What the one answer is given to read."""
    (generate,) = [effect for effect in talk.effects if isinstance(effect, done.Generate)]
    return ["".join(map(str, message.content)) for message in generate.messages]


def paused(talk: Talk, *, ends_at: float = 600.0) -> dict[str, done.Transcribe]:
    """The user speaks for half a second and pauses; what is being written down."""
    talk.append(700)
    talk.speech(100.0)
    talk.append(60)
    talk.pause(ends_at)
    return talk.transcribing


def test_a_turn_is_written_down_in_its_pause_and_told_when_it_is_over():
    talk = Talk(session=TRANSCRIBING, capabilities=CASCADE)
    (item_id,) = paused(talk)
    assert talk.transcribed("What time is it?") == []
    talk.append(440)

    events = talk.silence(600.0)

    assert names(events)[1:] == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "conversation.item.input_audio_transcription.delta",
        "conversation.item.input_audio_transcription.completed",
        "response.created",
    ]
    completed = transcript_of(events[-2])
    assert completed.item_id == item_id == talk.items[0]
    assert completed.transcript == "What time is it?"
    assert completed.usage.seconds == pytest.approx(0.8)
    assert talk.transcribing == {}
    assert words_of(talk) == ["What time is it?"]


def test_words_that_come_after_the_end_of_a_guessed_turn_are_waited_for():
    talk = Talk(session=TRANSCRIBING, capabilities=CASCADE)
    (item_id,) = paused(talk)
    talk.take(talk.core.on_transcript(item_id, "What time", talk.now))
    talk.append(440)

    assert names(talk.silence(600.0))[-2:] == [
        "conversation.item.input_audio_transcription.delta",
        "response.created",
    ]
    assert list(talk.transcribing) == [item_id]
    assert talk.generating == {}
    assert transcript_of(talk.transcribed(" is it?")[-1]).transcript == "What time is it?"
    assert words_of(talk) == ["What time is it?"]


@pytest.mark.parametrize("goes_on", ["resume", "next pause", "another end", "clear", "commit", "lost", "update"])
def test_a_guess_is_dropped_when_it_was_not_all_or_is_not_wanted(goes_on):
    """Nothing of it is told or read, and it is worked on no more."""
    talk = Talk(session=TRANSCRIBING, capabilities=CASCADE)
    (item_id,) = paused(talk)
    first = talk.transcribing[item_id]
    talk.take(talk.core.on_transcript(item_id, "What", talk.now))
    talk.append(440)
    if goes_on == "resume":
        talk.resume(1000.0)
        assert talk.transcribing == {}
    elif goes_on == "next pause":
        talk.pause(1100.0)
        assert talk.transcribing[item_id] is not first
    elif goes_on == "clear":
        talk.say(asked.AudioClear())
        assert talk.transcribing == {}
        return
    elif goes_on == "commit":
        talk.say(asked.AudioCommit(create_response=True))
    elif goes_on == "lost":
        assert talk.vad is not None
        talk.take(talk.core.on_vad_failed(talk.vad, "lost", talk.now))
        assert talk.transcribing == {}
        return
    elif goes_on == "update":
        talk.say(asked.SessionUpdate(session={"audio": {"input": {"transcription": {"language": "en"}}}}))
    if goes_on != "commit":
        talk.append(700)
        talk.silence(600.0 if goes_on == "update" else 1100.0)

    events = talk.transcribed("All of it")

    assert transcript_of(events[-1]).transcript == "All of it"
    assert words_of(talk) == ["All of it"]
    assert [type(effect).__name__ for effect in talk.effects].count("Transcribe") == 2


def test_a_guess_that_fails_is_asked_for_again_when_the_turn_is_over():
    talk = Talk(session=TRANSCRIBING, capabilities=CASCADE)
    (item_id,) = paused(talk)
    del talk.transcribing[item_id]
    assert talk.take(talk.core.on_transcript_failed(item_id, "stage 'asr' was lost", talk.now)) == []
    talk.append(440)
    talk.silence(600.0)

    talk.transcribed("Hello")

    assert words_of(talk) == ["Hello"]


@pytest.mark.parametrize(
    ("capabilities", "limits"), [(None, None), (CASCADE, Limits(transcribes_pauses=False))], ids=["hears", "off"]
)
def test_nothing_is_guessed_where_nobody_waits_or_it_is_not_wanted(capabilities, limits):
    talk = Talk(session=TRANSCRIBING, capabilities=capabilities, limits=limits)

    assert paused(talk) == {}


def test_a_semantic_turn_is_guessed_in_the_pause_that_is_judged():
    vad = {"audio": {"input": {"transcription": {}, "turn_detection": {"type": "semantic_vad"}}}}
    talk = Talk(session=vad, capabilities=said.Capabilities(hears_audio=False, supports_semantic_vad=True))
    talk.append(700)
    talk.speech(100.0)
    talk.append(60)
    talk.silence(600.0)

    (item_id,) = talk.transcribing
    talk.transcribed("Hello")
    talk.append(200)
    assert names(talk.judge(1.0))[-1] == "response.created"
    assert words_of(talk) == ["Hello"]
    assert talk.items == [item_id]
