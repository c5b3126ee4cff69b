"""Whole conversations, one page each: what a client sees, in order."""

import pytest

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import effects as done
from omni_bus.core.session import server_events as said
from omni_bus.core.session.items import (
    FunctionCallOutput,
    InputAudio,
    InputText,
    ItemReference,
    Message,
    OutputAudio,
    OutputText,
)
from omni_bus.core.session.limits import Limits
from omni_bus.sim.sessions import Talk, names

NO_VAD = {"audio": {"input": {"turn_detection": None}}}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CASCADE = said.Capabilities(supports_tools=True, hears_audio=False)
TRANSCRIBING = {"audio": {"input": {"transcription": {}}}}


def user(text: str, item_id: str | None = None) -> Message:
    return Message(id=item_id, role="user", content=(InputText(text),))


def turn(talk: Talk, speech_ms: int = 500) -> list[said.AnyServerEvent]:
    """The user speaks, and falls silent for long enough."""
    events = talk.append(100)
    begin = talk.vad_ms
    events += talk.append(speech_ms)
    events += talk.speech(begin + 50)
    events += talk.append(500)
    return events + talk.silence(begin + speech_ms)


def prompts(talk: Talk) -> list[tuple[str, str]]:
    """Role and text of what the last answer is given; sound is a note."""
    (generate,) = [effect for effect in talk.effects if isinstance(effect, done.Generate)][-1:]
    return [
        (message.role, "".join(part if isinstance(part, str) else "♪" for part in message.content))
        for message in generate.messages
    ]


def error_of(events: list[said.AnyServerEvent]) -> tuple[str, str | None, str | None]:
    (event,) = events
    assert isinstance(event, said.ErrorEvent)
    return event.error.code, event.error.param, event.error.event_id


def done_of(events: list[said.AnyServerEvent]) -> said.ResponseView:
    (event,) = [event for event in events if isinstance(event, said.ResponseDone)]
    return event.response


# --- the first word ------------------------------------------------------------------------------------------


def test_the_session_speaks_first_and_shows_all_of_its_configuration():
    talk = Talk(session={"instructions": "Be brief.", "audio": {"output": {"voice": "heart"}}})

    (created,) = talk.events

    assert isinstance(created, said.SessionCreated)
    assert created.session.config.instructions == "Be brief."
    assert created.session.config.audio.output.voice == "heart"
    assert created.session.config.audio.input.turn_detection is not None
    assert created.resume_token is None


def test_a_session_with_a_bad_configuration_ends_with_one_error():
    talk = Talk(session={"audio": {"output": {"speed": 9}}})

    (event,) = talk.events

    assert isinstance(event, said.ErrorEvent)
    assert event.error.param == "session.audio.output.speed"
    assert talk.ended == "open_failed"
    assert list(talk.closed) == [1]


# --- text ----------------------------------------------------------------------------------------------------


def test_a_text_turn():
    talk = Talk(session={"output_modalities": ["text"]})

    assert names(talk.say(asked.ItemCreate(item=user("Hi")))) == [
        "conversation.item.added",
        "conversation.item.done",
    ]
    assert names(talk.say(asked.ResponseCreate())) == ["response.created"]
    assert prompts(talk) == [("user", "Hi")]
    assert names(talk.text("Hel")) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    talk.text("lo.")
    events = talk.finish(usage=said.ResponseUsage(total_tokens=5, input_tokens=3, output_tokens=2))
    assert names(events) == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]
    response = done_of(events)
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == 5
    assert response.output == (Message(id=f"item_{response.id}", role="assistant", content=(OutputText("Hello."),)),)
    talk.say(asked.ItemCreate(item=user("And?")))
    talk.say(asked.ResponseCreate())
    assert prompts(talk) == [("user", "Hi"), ("assistant", "Hello."), ("user", "And?")]


# --- sound, turns committed by the client ----------------------------------------------------------------------


def test_a_spoken_turn_that_the_client_commits():
    talk = Talk(session=NO_VAD)
    assert talk.append(300) == []

    events = talk.say(asked.AudioCommit())
    assert names(events) == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
    ]
    assert talk.generating == {}
    talk.say(asked.ResponseCreate())
    assert prompts(talk) == [("user", "♪")]
    assert names(talk.text("Hello.")) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
    ]
    (first,), (second,) = talk.sound(200), talk.sound(200)
    assert isinstance(first, said.AudioDelta)
    assert isinstance(second, said.AudioDelta)
    assert (first.start_ms, second.start_ms) == (0, 200)
    assert names(talk.finish()) == [
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]


def test_sound_is_left_out_of_events_but_of_those_that_ask_for_it():
    talk = Talk(session=NO_VAD)
    talk.append(100)
    events = talk.say(asked.AudioCommit())
    (item_id,) = talk.items
    (retrieved,) = talk.say(asked.ItemRetrieve(item_id=item_id))

    shown = [event.item for event in events if isinstance(event, said.ItemAdded | said.ItemDone)]
    assert shown == [Message(id=item_id, role="user", content=(InputAudio(),))] * 2
    assert isinstance(retrieved, said.ItemRetrieved)
    assert retrieved.item == Message(id=item_id, role="user", content=(InputAudio(audio=bytes(3200)),))


# --- sound, turns found by a detector --------------------------------------------------------------------------


def test_a_turn_that_a_detector_finds():
    talk = Talk()
    talk.append(600)
    (started,) = talk.speech(400)
    talk.append(900)
    events = talk.silence(1000)

    assert isinstance(started, said.SpeechStarted)
    assert started.audio_start_ms == 100  # 300 ms of padding
    assert names(events) == [
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
    ]
    stopped, committed, added = events[:3]
    assert isinstance(stopped, said.SpeechStopped)
    assert isinstance(committed, said.InputCommitted)
    assert isinstance(added, said.ItemAdded)
    assert started.item_id == stopped.item_id == committed.item_id == added.item.id
    assert stopped.audio_end_ms == 1200
    ((clip,),) = [message.content for message in talk.generating[talk.generation].messages]
    assert isinstance(clip, done.ClipPart)
    assert len(clip.audio) == 32 * 1100


def test_speech_interrupts_the_answer_and_what_was_not_heard_is_forgotten():
    talk = Talk()
    turn(talk)
    response_id = talk.generation
    talk.text("One two three four five six seven eight.")
    talk.sound(2000)
    talk.append(500)
    position = talk.vad_ms
    talk.append(500)

    events = talk.speech(position)

    assert names(events) == [
        "input_audio_buffer.speech_started",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]
    response = done_of(events)
    assert response.status == "cancelled"
    assert response.status_details == said.StatusDetails(
        type="cancelled", reason="turn_detected", cause="turn_detected"
    )
    assert response.output[0].status == "incomplete"
    assert talk.generating == {}
    assert talk.text("nine", response_id) == talk.sound(100, response_id) == []
    talk.append(900)
    talk.silence(position + 400)
    # A second of two was heard.
    assert prompts(talk) == [("user", "♪"), ("assistant", "One two three four"), ("user", "♪")]


def test_speech_over_a_finished_answer_that_is_still_heard_forgets_the_rest():
    talk = Talk()
    turn(talk)
    talk.text("One two three four five six seven eight.")
    talk.sound(2000)
    talk.finish()
    talk.append(500)
    position = talk.vad_ms
    talk.append(500)

    assert names(talk.speech(position)) == ["input_audio_buffer.speech_started"]

    talk.append(900)
    talk.silence(position + 400)
    assert prompts(talk)[1] == ("assistant", "One two three four")


def test_without_interruption_the_next_turn_waits_for_the_answer():
    talk = Talk(session={"audio": {"input": {"turn_detection": {"interrupt_response": False}}}})
    turn(talk)
    first = talk.generation
    talk.text("Hello.")

    events = turn(talk)
    assert "response.created" not in names(events)
    assert talk.generation == first

    assert names(talk.finish())[-3:] == ["response.done", "rate_limits.updated", "response.created"]
    assert talk.generation != first
    assert prompts(talk) == [("user", "♪"), ("assistant", "Hello."), ("user", "♪")]


def test_a_detector_whose_turns_are_not_to_be_answered_only_commits():
    talk = Talk(session={"audio": {"input": {"turn_detection": {"create_response": False}}}})

    assert names(turn(talk))[-1] == "conversation.item.done"
    assert talk.generating == {}


def test_turning_detection_off_in_the_middle_of_a_turn_leaves_the_sound_in_the_buffer():
    talk = Talk()
    talk.append(500)
    talk.speech(100)
    stream = talk.vad
    talk.say(asked.SessionUpdate(session=NO_VAD))

    assert talk.vad is None
    assert stream is not None
    assert talk.take(talk.core.on_vad(stream, "end", 300, 500, talk.now)) == []
    assert names(talk.say(asked.AudioCommit()))[0] == "input_audio_buffer.committed"


def test_positions_count_all_sound_whatever_was_committed_or_cleared():
    talk = Talk()
    turn(talk)
    talk.finish()
    talk.append(1000)
    talk.say(asked.AudioClear())
    start = talk.vad_ms
    talk.append(1000)
    (started,) = talk.speech(start + 500)

    assert isinstance(started, said.SpeechStarted)
    assert started.audio_start_ms == start + 200


def test_a_new_detector_begins_where_the_sound_is():
    talk = Talk(session=NO_VAD)
    talk.append(1000)
    talk.say(asked.AudioCommit())
    talk.say(asked.SessionUpdate(session={"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}))
    talk.append(500)

    (started,) = talk.speech(400)

    assert isinstance(started, said.SpeechStarted)
    assert started.audio_start_ms == 1100


def test_silence_is_not_kept_for_ever():
    talk = Talk()

    for _ in range(40):
        talk.append(1000)

    assert len(talk.core._listening._buffer) == 32 * 30_300


def test_a_detector_may_be_late():
    talk = Talk()
    for _ in range(25):
        talk.append(1000)

    (started,) = talk.speech(1000)
    talk.silence(3000)

    assert isinstance(started, said.SpeechStarted)
    assert started.audio_start_ms == 700
    ((clip,),) = [message.content for message in talk.generating[talk.generation].messages]
    assert isinstance(clip, done.ClipPart)
    assert len(clip.audio) == 32 * 2500


def test_a_semantic_detector_waits_longer_where_the_words_sound_open():
    capabilities = said.Capabilities(hears_audio=True, supports_semantic_vad=True)
    talk = Talk(session={"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}, capabilities=capabilities)
    talk.append(600)
    talk.speech(100)
    talk.append(200)

    assert talk.silence(640) == talk.judge(0.1) == []
    talk.append(700)  # without a judge it would have been an end
    assert talk.speech(1400) == []  # the user went on
    assert talk.append(2500) == []  # for longer than the pause would have been
    assert talk.silence(3840) == talk.judge(0.99) == []
    before = len(talk.events)
    talk.wait(0.1)
    assert names(talk.events[before:])[:2] == ["input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]


def test_a_semantic_detector_that_is_not_here_is_replaced_and_said_to_be():
    talk = Talk(session={"audio": {"input": {"turn_detection": {"type": "semantic_vad", "create_response": False}}}})

    detection = talk.core.config.audio.input.turn_detection

    assert type(detection).__name__ == "ServerVad"
    assert detection is not None
    assert detection.create_response is False


def test_a_user_who_says_nothing_is_asked():
    talk = Talk(session={"audio": {"input": {"turn_detection": {"idle_timeout_ms": 5000}}}})
    turn(talk)
    talk.text("Are you there?")
    talk.sound(2000)
    talk.finish()
    before = len(talk.events)

    talk.wait(6.9)  # two seconds of it the answer is heard
    assert len(talk.events) == before
    talk.wait(0.2)

    assert names(talk.events[before:]) == [
        "input_audio_buffer.timeout_triggered",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
    ]


def test_a_detector_that_fails_is_told_and_another_one_is_asked():
    talk = Talk()
    talk.append(100)
    stream, talk.vad = talk.vad, None
    assert stream is not None

    (event,) = talk.take(talk.core.on_vad_failed(stream, "stage 'vad' was lost", talk.now))
    assert isinstance(event, said.ErrorEvent)
    assert event.error.vendor_code == "server_vad_unavailable"
    talk.append(100)
    assert talk.vad is None
    talk.append(1000)
    assert talk.vad == stream + 1


def test_a_detector_that_leaves_is_followed_by_one_that_hears_what_came_since():
    talk = Talk()
    talk.append(1000)
    stream, talk.vad = talk.vad, None
    assert stream is not None

    assert talk.take(talk.core.on_vad_left(stream, 700, talk.now)) == []
    assert (talk.vad, talk.vad_ms) == (stream + 1, 300)
    assert talk.take(talk.core.on_vad_left(stream, 700, talk.now)) == []  # a former one
    talk.append(500)
    (started,) = talk.speech(200)
    assert isinstance(started, said.SpeechStarted)
    assert started.audio_start_ms == 900 - 300


def test_a_detector_that_leaves_in_a_pause_leaves_the_turn_to_end():
    semantic = {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}
    talk = Talk(session=semantic, capabilities=said.Capabilities(supports_semantic_vad=True))
    talk.append(1000)
    talk.speech(100)
    talk.append(300)
    assert talk.silence(1000) == []
    stream, talk.vad = talk.vad, None
    assert stream is not None

    assert talk.take(talk.core.on_vad_left(stream, 1300, talk.now)) == []
    assert talk.vad is None  # there is nothing yet that another one could hear
    talk.wait(10)
    assert "input_audio_buffer.committed" in names(talk.events)
    talk.append(100)
    assert (talk.vad, talk.vad_ms) == (stream + 1, 100)


# --- words for a model that does not hear -----------------------------------------------------------------------


def test_an_answer_waits_for_the_words_where_the_model_does_not_hear():
    talk = Talk(session=TRANSCRIBING, capabilities=CASCADE)
    assert names(turn(talk))[-1] == "response.created"
    (item_id,) = talk.transcribing
    assert talk.generating == {}
    assert names(talk.take(talk.core.on_transcript(item_id, "What time", talk.now))) == [
        "conversation.item.input_audio_transcription.delta"
    ]

    (_, completed) = talk.transcribed(" is it?")

    assert isinstance(completed, said.TranscriptionCompleted)
    assert completed.transcript == "What time is it?"
    assert completed.usage.seconds == pytest.approx(0.8)
    assert prompts(talk) == [("user", "What time is it?")]


def test_words_that_nobody_asked_for_are_not_told():
    talk = Talk(capabilities=CASCADE)
    turn(talk)

    assert talk.transcribed("Hello") == []
    assert prompts(talk) == [("user", "Hello")]


def test_a_model_that_hears_does_not_wait_for_the_words():
    talk = Talk(session=TRANSCRIBING)
    turn(talk)
    talk.text("Hello.")
    talk.finish()

    assert names(talk.transcribed("Hi"))[-1] == "conversation.item.input_audio_transcription.completed"


def test_a_noise_that_a_detector_took_for_speech_is_not_answered():
    talk = Talk(capabilities=CASCADE)
    turn(talk)

    events = talk.transcribed("  ")

    assert names(events) == ["response.done", "rate_limits.updated"]
    assert done_of(events).output == ()
    assert talk.generating == {}
    assert talk.core._responses.ledger._cursors == {}  # nothing is kept of it


def test_words_that_can_not_be_had_are_told_and_the_answer_is_given_without():
    talk = Talk(session=TRANSCRIBING, capabilities=CASCADE)
    turn(talk)
    (item_id,) = talk.transcribing
    del talk.transcribing[item_id]

    (failed,) = talk.take(talk.core.on_transcript_failed(item_id, "stage 'asr' failed", talk.now))

    assert isinstance(failed, said.TranscriptionFailed)
    assert len(talk.generating) == 1


def test_speech_while_an_answer_waits_for_words_cancels_it_without_any_model():
    talk = Talk(capabilities=CASCADE)
    turn(talk)
    talk.append(500)

    events = talk.speech(talk.vad_ms - 100)

    assert done_of(events).status == "cancelled"
    assert not [effect for effect in talk.effects if isinstance(effect, done.CancelGeneration)]


# --- functions -------------------------------------------------------------------------------------------------


def test_a_function_is_called_and_its_result_comes_back():
    talk = Talk(session={"tools": [WEATHER], "output_modalities": ["text"]})
    talk.say(asked.ItemCreate(item=user("Weather?")))
    talk.say(asked.ResponseCreate())
    assert talk.generating[talk.generation].options.tools[0]["name"] == "weather"
    response_id = talk.generation
    events = talk.take(talk.core.on_tool_call(response_id, 0, "call_1", "weather", '{"city":', talk.now))
    events += talk.take(talk.core.on_tool_call(response_id, 0, None, None, '"Rome"}', talk.now))
    events += talk.take(talk.core.on_tool_calls_done(response_id, talk.now))
    events += talk.finish("tool_calls")
    assert names(events) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
        "rate_limits.updated",
    ]
    (call,) = done_of(events).output
    assert call.arguments == '{"city":"Rome"}'  # pyright: ignore[reportAttributeAccessIssue]
    assert talk.say(asked.ResponseCreate())  # without its result the call is left out
    assert prompts(talk) == [("user", "Weather?")]
    talk.say(asked.ResponseCancel())

    talk.say(asked.ItemCreate(item=FunctionCallOutput(call_id="call_1", output="Sunny")))
    assert talk.generating == {}
    talk.say(asked.ResponseCreate())

    messages = talk.generating[talk.generation].messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[1].tool_calls == (("call_1", "weather", '{"city":"Rome"}'),)
    assert messages[2].tool_call_id == "call_1"


# --- responses beside the conversation ----------------------------------------------------------------------------


def test_a_response_beside_the_conversation_leaves_no_trace_in_it():
    talk = Talk(session={"output_modalities": ["text"]})
    talk.say(asked.ItemCreate(item=user("Hi", "u1")))
    talk.say(asked.ResponseCreate())
    main = talk.generation
    options = asked.ResponseOptions(
        conversation="none",
        instructions="Classify.",
        metadata={"topic": "x"},
        input=(ItemReference(id="u1"), user("spam?")),
    )

    (created,) = talk.say(asked.ResponseCreate(response=options))

    assert isinstance(created, said.ResponseCreated)
    assert created.response.conversation_id is None
    assert created.response.metadata == {"topic": "x"}
    assert prompts(talk) == [("system", "Classify."), ("user", "Hi"), ("user", "spam?")]
    beside = created.response.id
    talk.text("Hello.", main)
    assert names(talk.text("no", beside)) == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    talk.finish(response_id=beside)
    talk.finish(response_id=main)
    assert talk.items == ["u1", f"item_{main}"]


def test_cancel_without_a_name_means_the_conversations_response():
    talk = Talk(session={"output_modalities": ["text"]})
    talk.say(asked.ResponseCreate(response=asked.ResponseOptions(conversation="none", input=())))
    beside = talk.generation

    assert error_of(talk.say(asked.ResponseCancel(event_id="e1")))[0] == "response_cancel_not_active"
    events = talk.say(asked.ResponseCancel(response_id=beside))

    assert done_of(events).status == "cancelled"
    assert talk.generating == {}


# --- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_how_an_answer_ends(finish, status, reason):
    talk = Talk(session={"output_modalities": ["text"]})
    talk.say(asked.ResponseCreate())
    talk.text("One")

    response = done_of(talk.finish(finish))

    assert response.status == status
    assert (response.status_details.reason if response.status_details else None) == reason
    assert response.output[0].status == ("completed" if status == "completed" else "incomplete")


def test_a_failed_answer_is_closed_and_the_session_goes_on():
    talk = Talk()
    talk.say(asked.ResponseCreate())
    talk.text("One")
    talk.sound(100)

    response = done_of(talk.fail())

    assert response.status == "failed"
    assert response.status_details is not None
    assert response.status_details.error == said.StatusError(
        type="server_error", code="stage_failed", message="stage 'llm' failed"
    )
    assert names(talk.say(asked.ResponseCreate())) == ["response.created"]


def test_latency_is_counted_from_the_end_of_speech():
    talk = Talk(capabilities=CASCADE)
    turn(talk)  # 500 ms of silence pass before it is known
    talk.wait(0.2)
    talk.transcribed("Hi")
    talk.wait(0.3)
    talk.text("Hello")
    talk.wait(0.1)
    talk.sound(100)

    timings = done_of(talk.finish()).timings

    assert timings == {
        "detected": pytest.approx(500, abs=1),
        "generation": pytest.approx(700, abs=1),
        "first_text": pytest.approx(1000, abs=1),
        "first_audio": pytest.approx(1100, abs=1),
        "done": pytest.approx(1100, abs=1),
    }


# --- the conversation ----------------------------------------------------------------------------------------------


def test_items_go_where_the_client_wants():
    talk = Talk()
    talk.say(asked.ItemCreate(item=user("b", "b")))
    talk.say(asked.ItemCreate(item=user("a", "a"), previous_item_id="root"))
    talk.say(asked.ItemCreate(item=user("c", "c"), previous_item_id="b"))
    talk.say(asked.ItemCreate(item=user("a2", "a2"), previous_item_id="a"))

    assert talk.items == ["a", "a2", "b", "c"]
    assert names(talk.say(asked.ItemDelete(item_id="a2"))) == ["conversation.item.deleted"]
    assert talk.items == ["a", "b", "c"]


def test_what_a_client_truncates_is_forgotten_to_the_word():
    talk = Talk(session=NO_VAD)
    talk.say(asked.ResponseCreate())
    talk.text("One two three four five six seven eight.")
    talk.sound(2000)
    talk.finish()
    item_id = talk.items[-1]

    assert names(talk.say(asked.ItemTruncate(item_id=item_id, audio_end_ms=1000))) == ["conversation.item.truncated"]
    assert talk.core._shared.conversation.get(item_id).content == (OutputAudio("One two three four"),)  # pyright: ignore[reportAttributeAccessIssue]
    talk.say(asked.ItemTruncate(item_id=item_id, audio_end_ms=1000))
    talk.say(asked.ResponseCreate())

    assert prompts(talk) == [("assistant", "One two three four")]


def test_a_deleted_item_does_not_come_back_with_the_end_of_its_response():
    talk = Talk(session=NO_VAD)
    talk.say(asked.ResponseCreate())
    talk.text("One")
    talk.say(asked.ItemDelete(item_id=talk.items[0]))

    assert "conversation.item.done" not in names(talk.finish())
    assert talk.items == []


def test_a_long_conversation_loses_its_oldest_items_in_the_prompt_only():
    talk = Talk(limits=Limits(max_history_characters=100), session={"instructions": "x" * 20})
    for index in range(10):
        talk.say(asked.ItemCreate(item=user(f"{index}" * 30)))
    talk.say(asked.ResponseCreate())

    assert prompts(talk) == [("system", "x" * 20), ("user", "8" * 30), ("user", "9" * 30)]
    assert len(talk.items) == 10


def test_a_conversation_that_must_not_lose_anything_fails_the_response():
    talk = Talk(limits=Limits(max_history_characters=100), session={"truncation": "disabled"})
    talk.say(asked.ItemCreate(item=user("x" * 200)))

    events = talk.say(asked.ResponseCreate())

    assert done_of(events).status == "failed"


# --- a transcription session ----------------------------------------------------------------------------------------


def test_a_transcription_session_never_answers():
    talk = Talk(session={"type": "transcription", **TRANSCRIBING})

    events = turn(talk)
    events += talk.transcribed("Hello")

    assert names(events)[-2:] == [
        "conversation.item.input_audio_transcription.delta",
        "conversation.item.input_audio_transcription.completed",
    ]
    assert not [name for name in names(events) if name.startswith("response.")]
    assert error_of(talk.say(asked.ResponseCreate()))[0] == "invalid_event"


# --- the end -------------------------------------------------------------------------------------------------------


def test_close_ends_all_that_goes_on():
    talk = Talk(capabilities=CASCADE)
    turn(talk)
    events = talk.say(asked.SessionClose())

    assert names(events)[-1] == "session.closed"
    assert done_of(events).status == "cancelled"
    assert talk.ended == "client_close"
    assert talk.closed == {1: "client_close"}
    assert talk.say(asked.Heartbeat()) == []


def test_a_session_that_can_not_be_resumed_ends_with_its_attachment():
    talk = Talk()

    talk.take(talk.core.on_detached(1, talk.now))

    assert talk.ended == "disconnect"


def test_a_client_without_a_sign_of_life_is_given_up():
    talk = Talk(limits=Limits(idle_ttl_s=100))
    talk.wait(90)
    talk.say(asked.Heartbeat())
    talk.wait(90)
    assert talk.ended is None
    talk.wait(20)

    assert names(talk.events)[-1] == "session.expired"
    assert talk.ended == "idle_ttl_expired"


def test_a_long_answer_is_a_sign_of_life():
    talk = Talk(limits=Limits(idle_ttl_s=100))
    talk.say(asked.ResponseCreate())
    talk.wait(150)
    assert talk.ended is None
    talk.finish()
    talk.wait(99)
    assert talk.ended is None
    talk.wait(2)
    assert talk.ended == "idle_ttl_expired"


def test_no_session_is_for_ever():
    talk = Talk(limits=Limits(max_duration_s=3600))
    for _ in range(40):
        talk.wait(100)
        if talk.ended is None:
            talk.say(asked.Heartbeat())

    assert talk.ended == "max_duration"


def test_a_conversation_may_be_as_long_as_its_client_says():
    """``token_limits`` leave out the instructions; of what is too long the retained share is kept, at least a turn."""
    limits = {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 20}}
    talk = Talk(session={"truncation": limits, "instructions": "x" * 500})
    for index in range(6):
        part = InputText(f"{index}" * 20)
        talk.say(asked.ItemCreate(item=Message(role="user", content=(part,))))
    talk.say(asked.ResponseCreate())

    (generate,) = [effect for effect in talk.effects if isinstance(effect, done.Generate)]
    assert [message.content[0] for message in generate.messages] == ["x" * 500, "4" * 20, "5" * 20]


def test_tracing_that_is_on_stays_as_it_is():
    talk = Talk(session={"tracing": "auto"})

    assert names(talk.say(asked.SessionUpdate(session={"tracing": "auto"}))) == ["session.updated"]
    (refused,) = talk.say(asked.SessionUpdate(session={"tracing": None}))

    assert isinstance(refused, said.ErrorEvent)
    assert refused.error.param == "session.tracing"


def test_how_long_a_model_may_think_is_passed_on():
    talk = Talk(session={"reasoning": {"effort": "low"}})
    talk.say(asked.ResponseCreate())

    (generate,) = [effect for effect in talk.effects if isinstance(effect, done.Generate)]
    assert generate.options.reasoning_effort == "low"
