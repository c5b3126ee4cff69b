"""What a client may not do: one ``error`` event that names its event, and the session goes on unchanged."""

import copy

import pytest
from msgspec.structs import replace

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.items import (
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputImage,
    InputText,
    ItemReference,
    Message,
    OutputText,
)
from omni_bus.core.session.limits import Limits
from omni_bus.sim.sessions import Talk, names

LIMITS = Limits(max_items=6, max_item_bytes=1000, max_buffer_bytes=32_000, max_out_of_band=1)
CALL = FunctionCall(id="f1", call_id="call_1", name="weather", arguments="{}")
OPTIONS = asked.ResponseOptions


def text_of(role: str, *content, **fields):
    return Message(role=role, content=content, **fields)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def talk() -> Talk:
    """A session with a finished answer ``item_resp_5eed_1``, a user's item ``u1`` and a call whose result is there."""
    talk = Talk(session={"audio": {"input": {"turn_detection": None}}}, limits=LIMITS)
    talk.say(asked.ResponseCreate())
    talk.text("Hello you there.")
    talk.sound(1000)
    talk.finish()
    talk.say(asked.ItemCreate(item=text_of("user", InputText("Hi"), id="u1")))
    talk.say(asked.ItemCreate(item=CALL))
    talk.say(asked.ItemCreate(item=FunctionCallOutput(id="o1", call_id="call_1", output="Sunny")))
    return talk


def session(**patch):
    return asked.SessionUpdate(session=patch)


CASES = [
    # --- the session
    (session(nonsense=1), "unknown_parameter", "bad_event", "session.nonsense"),
    (session(model="other"), "cannot_update_model", "model_update_unsupported", "session.model"),
    (session(type="transcription"), "invalid_value", "invalid_session_config", "session.type"),
    (session(output_modalities=[]), "invalid_value", "bad_event", "session.output_modalities"),
    (session(output_modalities=["smell"]), "invalid_value", "bad_event", "session.output_modalities[0]"),
    (session(instructions=None), "invalid_value", "bad_event", "session.instructions"),
    (session(max_output_tokens=0), "invalid_value", "bad_event", "session.max_output_tokens"),
    (session(temperature=3), "invalid_value", "bad_event", "session.temperature"),
    (session(truncation="some"), "invalid_value", "bad_event", "session.truncation"),
    (session(truncation={"type": "ratio"}), "invalid_value", "bad_event", "session.truncation.type"),
    (
        session(truncation={"type": "retention_ratio", "retention_ratio": 2}),
        "invalid_value",
        "bad_event",
        "session.truncation.retention_ratio",
    ),
    (session(tracing="loud"), "invalid_value", "bad_event", "session.tracing"),
    (session(prompt={"id": "pmpt_1"}), "invalid_value", "bad_event", "session.prompt"),
    (session(reasoning={"effort": "all"}), "invalid_value", "bad_event", "session.reasoning.effort"),
    (
        session(include=["item.input_audio_transcription.logprobs"]),
        "invalid_value",
        "bad_event",
        "session.include",
    ),
    (
        session(audio={"input": {"transcription": {"keywords": ["omni"]}}}),
        "invalid_value",
        "bad_event",
        "session.audio.input.transcription.keywords",
    ),
    (
        asked.ResponseCreate(response=OPTIONS(prompt={"id": "pmpt_1"})),
        "invalid_value",
        "bad_event",
        "response.prompt",
    ),
    (
        asked.ResponseCreate(response=OPTIONS(input=(text_of("user", OutputText("x")),))),
        "invalid_value",
        "bad_event",
        "response.input[0].content[0].type",
    ),
    (session(tools=[{"type": "function"}]), "missing_required_parameter", "bad_event", "session.tools[0].name"),
    (session(audio=7), "invalid_value", "bad_event", "session.audio"),
    (
        session(audio={"input": {"format": {"type": "audio/mp3"}}}),
        "invalid_value",
        "bad_event",
        "session.audio.input.format.type",
    ),
    (
        session(audio={"input": {"format": {"type": "audio/pcm", "rate": 12}}}),
        "invalid_value",
        "bad_event",
        "session.audio.input.format.rate",
    ),
    (
        session(audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 1.5}}}),
        "invalid_value",
        "bad_event",
        "session.audio.input.turn_detection.threshold",
    ),
    (
        session(audio={"output": {"voice": "nova"}}),
        "cannot_update_voice",
        "voice_update_after_audio_unsupported",
        "session.audio.output.voice",
    ),
    (asked.EventAck(server_event_seq=9999), "invalid_event_ack", "invalid_event_ack", "server_event_seq"),
    (asked.EventAck(server_event_seq=-1), "invalid_event_ack", "invalid_event_ack", "server_event_seq"),
    (asked.SessionOpen(session_id="x"), "session_exists", "session_exists", None),
    (
        asked.SessionResume(session_id="x", resume_token="t", last_received_server_event_seq=0),
        "unsupported_session_resume",
        "unsupported_session_resume",
        None,
    ),
    (asked.Refuse(code="INVALID_JSON", message="no JSON"), "invalid_json", "invalid_json", None),
    (asked.Refuse(code="UNKNOWN_EVENT", message="x", param="type"), "unknown_event", "unknown_event", "type"),
    (asked.Refuse(code="a code of next year", message="x"), "invalid_event", "bad_event", None),
    # --- the buffer
    (asked.AudioCommit(), "input_audio_buffer_commit_empty", "input_audio_buffer_empty", None),
    (asked.AudioAppend(audio=bytes(32_002)), "rate_limit_exceeded", "input_backpressure", "audio"),
    (asked.AudioAppend(overlap_action="shout"), "invalid_value", "bad_event", "overlap_action"),
    (asked.AudioAppend(video_frames=(b"\xff\xd8",)), "invalid_value", "invalid_input_modality", "video_frames"),
    # --- items
    (
        asked.ItemCreate(item=text_of("user", InputText("x"), id="u1")),
        "item_already_exists",
        "bad_event",
        "item.id",
    ),
    (
        asked.ItemCreate(item=text_of("user", InputText("x"), id="root")),
        "item_already_exists",
        "bad_event",
        "item.id",
    ),
    (
        asked.ItemCreate(item=text_of("user", InputText("x")), previous_item_id="gone"),
        "item_not_found",
        "item_not_found",
        "previous_item_id",
    ),
    (
        asked.ItemCreate(item=FunctionCallOutput(call_id="call_9", output="x")),
        "invalid_tool_call_id",
        "invalid_function_call_output",
        "item.call_id",
    ),
    (
        asked.ItemCreate(item=FunctionCallOutput(call_id="call_1", output="x")),
        "invalid_tool_call_id",
        "invalid_function_call_output",
        "item.output",
    ),
    (asked.ItemCreate(item=FunctionCall(call_id="c", name="")), "invalid_value", "bad_event", "item.name"),
    (
        asked.ItemCreate(item=text_of("user", InputText("x" * 2000))),
        "event_too_large",
        "event_too_large",
        "item",
    ),
    (
        asked.ItemCreate(item=text_of("user", InputAudio(audio=bytes(2000)))),
        "event_too_large",
        "event_too_large",
        "item",
    ),
    (
        asked.ItemCreate(item=text_of("assistant", InputAudio(audio=b"12"))),
        "invalid_value",
        "bad_event",
        "item.content[0].type",
    ),
    (
        asked.ItemCreate(item=text_of("system", OutputText("x"))),
        "invalid_value",
        "bad_event",
        "item.content[0].type",
    ),
    (
        asked.ItemCreate(item=text_of("user", InputText("x"), InputImage("data:image/png;base64,"))),
        "invalid_value",
        "bad_event",
        "item.content[1].type",
    ),
    (asked.ItemRetrieve(item_id="gone"), "item_not_found", "item_not_found", "item_id"),
    (asked.ItemDelete(item_id="gone"), "item_not_found", "item_not_found", "item_id"),
    (asked.ItemTruncate(item_id="gone", audio_end_ms=1), "item_not_found", "item_not_found", "item_id"),
    (asked.ItemTruncate(item_id="u1", audio_end_ms=1), "invalid_value", "bad_event", "item_id"),
    (
        asked.ItemTruncate(item_id="item_resp_5eed_1", audio_end_ms=1002),
        "invalid_value",
        "bad_event",
        "audio_end_ms",
    ),
    (
        asked.ItemTruncate(item_id="item_resp_5eed_1", audio_end_ms=1, content_index=1),
        "invalid_value",
        "bad_event",
        "content_index",
    ),
    # --- responses
    (asked.ResponseCancel(), "response_cancel_not_active", "response_not_active", "response_id"),
    (
        asked.ResponseCancel(response_id="resp_5eed_1"),
        "response_cancel_not_active",
        "response_not_active",
        "response_id",
    ),
    (asked.OutputAudioClear(response_id="gone"), "response_cancel_not_active", "response_not_active", "response_id"),
    (
        asked.ResponseCreate(response=OPTIONS(input=(ItemReference(id="gone"),))),
        "item_not_found",
        "item_not_found",
        "response.input[0].id",
    ),
    (
        asked.ResponseCreate(response=OPTIONS(metadata={str(i): "" for i in range(17)})),
        "invalid_value",
        "bad_event",
        "response.metadata",
    ),
    (
        asked.ResponseCreate(response=OPTIONS(metadata={"k": "x" * 513})),
        "invalid_value",
        "bad_event",
        "response.metadata",
    ),
    # --- playback
    (
        asked.PlaybackAck(played_ms=1, response_id="resp_9"),
        "playback_item_not_found",
        "playback_item_not_found",
        "item_id",
    ),
    (
        asked.PlaybackAck(played_ms=1, response_id="resp_5eed_1", item_id="u1"),
        "playback_item_mismatch",
        "playback_item_mismatch",
        "item_id",
    ),
]


@pytest.mark.parametrize(("event", "code", "vendor_code", "param"), CASES)
def test_a_refusal_names_event_and_field_and_changes_nothing(talk, event, code, vendor_code, param):
    former = copy.deepcopy((talk.core.config, talk.core._shared.conversation.items))

    (refusal,) = talk.say(replace(event, event_id="mine"))

    assert isinstance(refusal, said.ErrorEvent)
    assert refusal.error.event_id == "mine"
    assert (refusal.error.code, refusal.error.vendor_code, refusal.error.param) == (code, vendor_code, param)
    assert refusal.event_id != "mine"
    assert former == (talk.core.config, talk.core._shared.conversation.items)
    assert talk.generating == {}
    assert names(talk.say(asked.Heartbeat())) == ["session.heartbeat_ack"]


def test_sound_that_nobody_understands_is_refused():
    talk = Talk(capabilities=said.Capabilities(supports_audio_input=False))

    (refusal,) = talk.append(100)

    assert isinstance(refusal, said.ErrorEvent)
    assert refusal.error.vendor_code == "invalid_input_modality"


def test_a_second_response_is_refused_while_one_is_given(talk):
    talk.say(asked.ResponseCreate())

    (refusal,) = talk.say(asked.ResponseCreate(event_id="mine"))

    assert isinstance(refusal, said.ErrorEvent)
    assert refusal.error.code == "conversation_already_has_active_response"
    assert names(talk.finish())[-2:] == ["response.done", "rate_limits.updated"]


def test_too_many_responses_beside_the_conversation_are_refused(talk):
    beside = asked.ResponseCreate(response=OPTIONS(conversation="none"))
    talk.say(beside)

    (refusal,) = talk.say(beside)

    assert isinstance(refusal, said.ErrorEvent)
    assert refusal.error.type == "rate_limit_error"


def test_cancel_twice_is_refused_once(talk):
    talk.say(asked.ResponseCreate())

    assert "response.done" in names(talk.say(asked.ResponseCancel()))
    assert names(talk.say(asked.ResponseCancel())) == ["error"]


def test_a_full_conversation_takes_no_more_until_something_goes(talk):
    for index in range(2):
        talk.say(asked.ItemCreate(item=text_of("user", InputText("x"), id=f"x{index}")))
    refused = [
        asked.ItemCreate(item=text_of("user", InputText("x"))),
        asked.ResponseCreate(),
    ]
    for event in refused:
        assert names(talk.say(event)) == ["error"]
    talk.append(100)
    assert names(talk.say(asked.AudioCommit())) == ["error"]
    assert names(talk.say(asked.ItemDelete(item_id="x0"))) == ["conversation.item.deleted"]
    assert names(talk.say(asked.AudioCommit()))[0] == "input_audio_buffer.committed"


def test_what_comes_from_an_attachment_that_is_none_is_not_heard(talk):
    assert talk.core.on_client(7, asked.Heartbeat(), talk.now) == []
    assert talk.core.on_detached(7, talk.now) == []
    assert talk.ended is None


@pytest.mark.parametrize(
    ("capabilities", "patch", "param"),
    [
        (said.Capabilities(supports_tools=False), {"tools": [{"type": "function", "name": "f"}]}, "session.tools"),
        (
            said.Capabilities(supports_audio_output=False),
            {"output_modalities": ["audio"]},
            "session.output_modalities",
        ),
        (
            said.Capabilities(supports_transcription=False),
            {"output_modalities": ["text"], "audio": {"input": {"transcription": {}}}},
            "session.audio.input.transcription",
        ),
        (said.Capabilities(supports_transcription=False), {"type": "transcription"}, "session.type"),
    ],
)
def test_what_the_deployment_can_not_do_is_refused(capabilities, patch, param):
    talk = Talk(session=patch, capabilities=capabilities)

    (refusal,) = talk.events

    assert isinstance(refusal, said.ErrorEvent)
    assert refusal.error.param == param
    assert talk.ended is not None
