"""Every event of a session in every dialect, against the types of OpenAI's client; and frames of clients, read."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from openai.types.beta.realtime import RealtimeServerEvent as BetaServerEvent
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from gateways.realtime.beta import BetaDialect
from gateways.realtime.duplex import DuplexDialect
from gateways.realtime.ga import DUPLEX_ONLY, GaDialect
from gateways.realtime.turn import TurnDialect
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import (
    ALaw,
    AudioConfig,
    AudioInput,
    Duplex,
    MuLaw,
    NamedTool,
    NoiseReduction,
    Pcm,
    RetentionRatio,
    SemanticVad,
    ServerVad,
    SessionConfig,
    TokenLimits,
    Tool,
    Tracing,
    Transcription,
    merged,
)
from omni_bus.core.session.items import (
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputImage,
    InputText,
    Message,
    OutputAudio,
    OutputText,
)

MODEL = "gpt-realtime"
"""Some types of the SDK are lists of names."""

GA = TypeAdapter[Any](RealtimeServerEvent)
BETA = TypeAdapter[Any](BetaServerEvent)


def view(config: SessionConfig = SessionConfig(model=MODEL)) -> said.SessionView:  # noqa: B008 (frozen)
    return said.SessionView(
        id="sess_1", config=config, capabilities=said.Capabilities(), created_at=1.5, expires_at=3601.5
    )


def response(status: Any = "completed", details: said.StatusDetails | None = None) -> said.ResponseView:
    return said.ResponseView(
        id="resp_1",
        status=status,
        status_details=details,
        output=(ANSWER, CALL),
        usage=said.ResponseUsage(total_tokens=3, input_tokens=1, output_tokens=2),
        conversation_id="conv_1",
        output_modalities=("audio",),
        max_output_tokens="inf",
        metadata={"topic": "x"},
        output_audio=said.OutputAudioView(format=Pcm(), voice="heart"),
        timings={"first_audio_ms": 12.0},
    )


ANSWER = Message(id="item_resp_1", role="assistant", content=(OutputAudio(transcript="hi"),))
CALL = FunctionCall(id="item_3", call_id="call_1", name="f", arguments="{}")
CONTENT = (InputText(text="hi"), InputAudio(audio=b"\0\0"), InputImage(image_url="data:image/png;base64,"))
USER = Message(id="item_1", role="user", content=CONTENT)
CONFIG = SessionConfig(
    model=MODEL,
    output_modalities=("text",),
    instructions="be brief",
    audio=AudioConfig(
        input=AudioInput(
            format=MuLaw(),
            transcription=Transcription(model="whisper-1", language="en"),
            noise_reduction=NoiseReduction(type="near_field"),
            turn_detection=SemanticVad(),
        )
    ),
    tools=(Tool(type="function", name="f", parameters={"type": "object"}),),
    tool_choice=NamedTool(type="function", name="f"),
    max_output_tokens=100,
    temperature=0.8,
    truncation=RetentionRatio(retention_ratio=0.5, token_limits=TokenLimits(post_instructions=1000)),
    tracing=Tracing(workflow_name="x"),
    duplex=Duplex(),
)
WHERE: dict[str, Any] = {"response_id": "resp_1", "item_id": "item_resp_1", "output_index": 0}
ITEM: dict[str, Any] = {"item_id": "item_1", "content_index": 0}
HEARD: dict[str, Any] = {"session_id": "sess_1", "epoch": 1}
DETAIL = Code.ITEM_NOT_FOUND
ERROR = SessionError(DETAIL, "item_id: 'x' came", param="item_id").detail("mine")

EVENTS: list[said.AnyServerEvent] = [
    said.SessionCreated(session=view(), attachment_generation=1, resume_token="secret"),
    said.SessionUpdated(session=view(CONFIG)),
    said.SessionUpdated(session=view(msgspec.structs.replace(CONFIG, type="transcription", model=""))),
    said.SessionResumed(session_id="sess_1", session=view(CONFIG), attachment_generation=2, resume_token="secret"),
    said.SessionReplaced(session_id="sess_1", attachment_generation=1),
    said.ResyncRequired(session_id="sess_1", reason="journal_gap"),
    said.SessionClosed(session_id="sess_1", reason="client_close"),
    said.SessionExpired(session_id="sess_1", reason="idle_ttl_expired"),
    said.HeartbeatAck(session_id="sess_1"),
    said.ErrorEvent(error=ERROR),
    said.ItemAdded(item=USER, previous_item_id=None),
    said.ItemAdded(item=CALL, previous_item_id="item_1"),
    said.ItemDone(item=FunctionCallOutput(id="item_4", call_id="call_1", output="5"), previous_item_id="item_3"),
    said.ItemDone(
        item=Message(id="item_5", role="assistant", content=(OutputText(text="x"),)), previous_item_id="item_3"
    ),
    said.ItemRetrieved(item=USER),
    said.ItemDeleted(item_id="item_1"),
    said.ItemTruncated(**ITEM, audio_end_ms=20.6),
    said.TranscriptionDelta(**ITEM, delta="hi"),
    said.TranscriptionCompleted(**ITEM, transcript="hi", usage=said.TranscriptionUsage(seconds=1.5)),
    said.TranscriptionSegment(**ITEM, id="seg_1", speaker="", start=0.0, end=1.0, text="hi"),
    said.TranscriptionFailed(**ITEM, error=ERROR),
    said.InputCommitted(item_id="item_1", previous_item_id=None, detail=said.CommitDetail(turn_id=1, epoch=0)),
    said.InputCommitted(
        item_id=None, previous_item_id=None, detail=said.CommitDetail(turn_id=1, epoch=0, is_empty=True)
    ),
    said.InputCleared(),
    said.SpeechStarted(item_id="item_1", audio_start_ms=1),
    said.SpeechStopped(item_id="item_1", audio_end_ms=2),
    said.TimeoutTriggered(item_id="item_1", audio_start_ms=1, audio_end_ms=2),
    said.OutputAudioCleared(response_id="resp_1"),
    said.ResponseCreated(response=response("in_progress")),
    said.ResponseDone(
        response=response(
            "cancelled", said.StatusDetails(type="cancelled", reason="client_cancelled", cause="barge_in")
        )
    ),
    said.ResponseDone(
        response=response(
            "failed",
            said.StatusDetails(type="failed", error=said.StatusError(type="server_error", code="x", message="y")),
        )
    ),
    said.RateLimitsUpdated(),
    said.OutputItemAdded(response_id="resp_1", output_index=0, item=ANSWER),
    said.OutputItemDone(response_id="resp_1", output_index=1, item=CALL),
    said.ContentPartAdded(**WHERE, part=said.Part(type="audio", transcript="")),
    said.ContentPartDone(**WHERE, part=said.Part(type="text", text="x")),
    said.TextDelta(**WHERE, delta="x"),
    said.TextDone(**WHERE, text="x"),
    said.AudioDelta(**WHERE, delta=b"\1\2", format=Pcm(), start_ms=20.0, duration_ms=10.0, at=5.0),
    said.AudioDone(**WHERE),
    said.TranscriptDelta(**WHERE, delta="x"),
    said.TranscriptDone(**WHERE, transcript="x"),
    said.ArgumentsDelta(**WHERE, call_id="call_1", delta="{"),
    said.ArgumentsDone(**WHERE, call_id="call_1", name="f", arguments="{}"),
    said.Speak(response_id="resp_1", item_id="item_resp_1", epoch=1),
    said.Listen(**HEARD, reason="silence_or_noise"),
    said.OverlapDecision(
        **HEARD,
        policy="listen_only",
        action="listen",
        reason="short_ack",
        duration_ms=20.0,
        overlap_speech_ms=20.0,
        is_audio_kept=True,
    ),
    said.PlaybackAcknowledged(
        **HEARD,
        response_id="resp_1",
        item_id="item_resp_1",
        played_ms=10.0,
        committed_ms=10.0,
        is_truncated=False,
        playback=said.Playback(),
        history_committed=True,
    ),
    said.TurnEvent(**HEARD, event="user_started", turn_state="user_speaking"),
]
NUMBERED = [
    event if isinstance(event, said.UNKEPT) else msgspec.structs.replace(event, server_event_seq=seq)
    for seq, event in enumerate(EVENTS, 1)
]
NAMED = [msgspec.structs.replace(event, event_id=f"event_{index}") for index, event in enumerate(NUMBERED)]


def as_text(frame: dict[str, Any]) -> dict[str, Any]:
    """Return a frame as a client reads it."""
    return msgspec.json.decode(msgspec.json.encode(frame))


def ids(event: said.AnyServerEvent) -> str:
    return f"{type(event).__struct_config__.tag}"


def any_model(name: str) -> bool:
    return name == MODEL


def test_the_table_has_every_event() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(said.AnyServerEvent))


@pytest.mark.parametrize("event", NAMED, ids=ids)
def test_ga_frames_are_those_of_the_sdk(event: said.AnyServerEvent) -> None:
    frames = [as_text(frame) for frame in GaDialect(any_model).frames(event)]

    is_untold = isinstance(event, DUPLEX_ONLY) or (isinstance(event, said.InputCommitted) and event.item_id is None)
    assert len(frames) == (0 if is_untold else 1)
    for frame in frames:
        parsed = GA.validate_python(frame)
        assert type(parsed).model_fields["type"].annotation == typing.Literal[frame["type"]]
        assert "server_event_seq" not in frame
        assert "secret" not in str(frame)


def in_beta(event: said.AnyServerEvent) -> bool:
    """Whether the beta types have it; that of transcription sessions wants a secret, which sockets have none of."""
    if isinstance(event, said.SessionUpdated):
        return event.session.config.type != "transcription"
    return not isinstance(event, said.TimeoutTriggered | said.OutputAudioCleared)


@pytest.mark.parametrize("event", list(filter(in_beta, NAMED)), ids=ids)
def test_beta_frames_are_those_of_the_sdk(event: said.AnyServerEvent) -> None:
    if isinstance(event, said.ItemAdded | said.ItemRetrieved) and event.item is USER:
        without_picture = msgspec.structs.replace(USER, content=CONTENT[:2])
        event = msgspec.structs.replace(event, item=without_picture)
    for frame in map(as_text, BetaDialect(any_model).frames(event)):
        parsed = BETA.validate_python(frame)
        assert type(parsed).model_fields["type"].annotation == typing.Literal[frame["type"]]
        assert "output_" not in frame["type"].replace("output_item", "")


@pytest.mark.parametrize("event", NAMED, ids=ids)
def test_duplex_frames_have_one_number_and_names_of_their_own(event: said.AnyServerEvent) -> None:
    frames = [as_text(frame) for frame in DuplexDialect(any_model, is_beta=False).frames(event)]

    assert frames
    numbers = [frame["server_event_seq"] for frame in frames if "server_event_seq" in frame]
    assert numbers == ([] if event.server_event_seq is None else [event.server_event_seq])
    names = [frame["event_id"] for frame in frames]
    assert len(set(names)) == len(names)
    vendor = (*DUPLEX_ONLY, said.SessionExpired)
    if not isinstance(event, vendor) and not (isinstance(event, said.InputCommitted) and event.item_id is None):
        for frame in frames:
            GA.validate_python(frame)  # OpenAI's client speaks to a duplex session too


def test_duplex_shows_what_clients_branch_on() -> None:
    (created,) = DuplexDialect(any_model, is_beta=False).frames(EVENTS[0])

    assert created["resume_token"] == "secret"
    capabilities = created["session"]["capabilities"]
    for name in ("barge_in", "playback_ack", "multi_session", "session_resume"):
        assert isinstance(capabilities[f"supports_{name}"], bool)
    assert capabilities["chunk_period_ms"] > 0


def test_duplex_errors_have_its_own_codes() -> None:
    (frame,) = DuplexDialect(any_model, is_beta=False).frames(
        said.ErrorEvent(error=SessionError(Code.RESPONSE_NOT_ACTIVE, "no").detail("mine"))
    )
    assert frame["error"] == {
        "type": "invalid_request_error",
        "code": "response_not_active",
        "message": "no",
        "event_id": "mine",
    }


@pytest.mark.parametrize(
    ("switch", "names"),
    [
        ("seed", ["response.audio"]),
        ("ga", ["response.output_audio"]),
        ("both", ["response.audio", "response.output_audio"]),
    ],
)
def test_turn_sound_has_the_names_that_were_chosen(switch: Any, names: list[str]) -> None:
    dialect = TurnDialect(lambda _: None, switch)
    sound = said.AudioDelta(**WHERE, delta=b"\1\2", format=Pcm(), start_ms=0, duration_ms=1, at=0)

    frames = dialect.frames(sound)
    ends = dialect.frames(said.ResponseDone(response=response()))

    assert [frame["type"] for frame in frames] == [f"{name}.delta" for name in names]
    assert all(frame["audio"] == frame["delta"] == "AQI=" for frame in frames)
    assert [frame["type"] for frame in ends] == ["transcription.done", *(f"{name}.done" for name in names)]
    assert all(frame["has_audio"] for frame in ends[1:])


# --- reading ----------------------------------------------------------------------------------------------------


def patched(dialect: GaDialect | DuplexDialect, session: dict[str, Any]) -> SessionConfig:
    """Return the configuration that an update leads to."""
    (event,) = dialect.read({"type": "session.update", "session": session})
    assert isinstance(event, asked.SessionUpdate)
    return merged(SessionConfig(model=MODEL), event.session)


def test_beta_and_ga_spellings_mean_the_same() -> None:
    flat = patched(
        GaDialect(any_model),
        {
            "modalities": ["text"],
            "voice": "heart",
            "speed": 1.5,
            "input_audio_format": "g711_ulaw",
            "output_audio_format": "G711_ALAW",
            "input_audio_transcription": {"model": "whisper-1"},
            "turn_detection": None,
            "max_response_output_tokens": 10,
            "temperature": 0.7,
        },
    )
    nested = patched(
        GaDialect(any_model),
        {
            "type": "realtime",
            "id": "sess_sent_back",
            "object": "realtime.session",
            "output_modalities": ["text"],
            "audio": {
                "input": {
                    "format": {"type": "audio/pcmu"},
                    "transcription": {"model": "whisper-1"},
                    "turn_detection": None,
                },
                "output": {"format": {"type": "audio/pcma"}, "voice": {"id": "heart"}, "speed": 1.5},
            },
            "max_output_tokens": 10,
            "temperature": 0.7,
        },
    )
    assert flat == nested
    assert flat.audio.input.turn_detection is None
    assert flat.audio.output.format == ALaw()


def test_an_update_keeps_what_it_does_not_name() -> None:
    config = patched(GaDialect(any_model), {"audio": {"input": {"turn_detection": {"threshold": 0.9}}}, "model": MODEL})

    detection = config.audio.input.turn_detection
    assert isinstance(detection, ServerVad)
    assert (detection.threshold, detection.silence_duration_ms) == (0.9, 500)
    assert config.audio.input.format == Pcm()


@pytest.mark.parametrize(
    ("session", "rate"),
    [({}, 16_000), ({"type": "realtime"}, 24_000), ({"sample_rate_hz": 8000}, 8000), ({"sample_rate": 48000}, 48000)],
)
def test_the_rate_of_a_duplex_session(session: dict[str, Any], rate: int) -> None:
    opened = DuplexDialect(any_model, is_beta=False).first({"type": "session.update", "session": session}, MODEL)[0]

    assert isinstance(opened, asked.SessionOpen)
    assert merged(SessionConfig(), opened.session).audio.input.format == Pcm(rate)


def test_openais_client_on_duplex_says_late_what_it_is() -> None:
    dialect = DuplexDialect(any_model, is_beta=False)
    opened = dialect.opening({}, MODEL)[0]
    assert isinstance(opened, asked.SessionOpen)
    config = merged(SessionConfig(), opened.session)
    assert config.audio.input.turn_detection is None

    (update,) = dialect.read(
        {"type": "session.update", "session": {"type": "realtime", "output_modalities": ["audio"]}}
    )

    assert isinstance(update, asked.SessionUpdate)
    config = merged(config, update.session)
    assert config.audio.input.format == Pcm(24_000)
    assert config.audio.input.turn_detection == ServerVad()
    assert config.duplex is not None
    assert config.duplex.overlap_policy == "barge_in_on_speech"


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        (
            {
                "type": "input_audio_buffer.append",
                "delta": "AQI=",
                "vad": {"speech_probability": 0.4},
                "overlap": "ack",
            },
            asked.AudioAppend(audio=b"\1\2", is_speech=False, overlap_action="ack"),
        ),
        (
            {"type": "input_audio_buffer.append", "audio": "AQI=", "sample_rate_hz": 8000, "speech": True},
            asked.AudioAppend(audio=b"\1\2", is_speech=True, format=Pcm(8000)),
        ),
        ({"type": "input.commit"}, asked.AudioCommit(create_response=True)),
        ({"type": "input_audio_buffer.commit", "response_create": True}, asked.AudioCommit(create_response=True)),
        ({"type": "input_audio_buffer.commit"}, asked.AudioCommit()),
        ({"type": "close", "reason": "bye"}, asked.SessionClose(reason="bye")),
        ({"type": "audio.playback_ack", "played_ms": 100}, asked.PlaybackAck(played_ms=100)),
        ({"type": "turn.signal", "event": "barge_in"}, asked.BargeIn()),
        ({"type": "signal_turn", "event": "close", "payload": {"reason": "x"}}, asked.SessionClose(reason="x")),
        (
            {"type": "turn.signal", "event": "conversation.item.delete", "payload": {"item_id": "item_1"}},
            asked.ItemDelete(item_id="item_1"),
        ),
        ({"type": "turn.signal", "event": "user_started"}, asked.TurnSignal(event="user_started")),
        (
            {"type": "push_text", "text": "hi"},
            asked.ItemCreate(item=Message(role="user", content=(InputText("hi"),))),
        ),
        ({"type": "session.event_ack", "server_event_seq": 7}, asked.EventAck(server_event_seq=7)),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_duplex_frames_are_read(fields: dict[str, Any], event: asked.AnyClientEvent) -> None:
    assert DuplexDialect(any_model, is_beta=False).read(fields) == [event]


def test_a_model_that_answers_by_itself_answers_at_a_commit() -> None:
    dialect = DuplexDialect(any_model, is_beta=False)
    config = SessionConfig(model=MODEL, duplex=Duplex(auto_response=True))
    dialect.frames(said.SessionCreated(session=view(config), attachment_generation=1, resume_token="secret"))
    commit = {"type": "input_audio_buffer.commit", "final": True}

    assert dialect.read(commit) == [asked.AudioCommit(create_response=True)]
    assert dialect.read(commit | {"response_create": False}) == [asked.AudioCommit()]


@pytest.mark.parametrize(
    ("session", "code"),
    [
        ({"turn_detection": {"type": "server_vad", "threshold": 0.1}}, Code.UNSUPPORTED_TURN_DETECTION),
        ({"turn_detection": {"type": "server_vad", "interrupt_response": False}}, Code.UNSUPPORTED_TURN_DETECTION),
        ({"turn_detection": {"type": "server_vad", "eager": 1}}, Code.UNSUPPORTED_TURN_DETECTION),
        ({"turn_detection": {"type": "other"}}, Code.UNSUPPORTED_TURN_DETECTION),
        ({"turn_detection": None, "overlap_policy": "barge_in_on_speech"}, Code.UNSUPPORTED_TURN_DETECTION),
        ({"overlap_policy": "barge_in_on_speech"}, Code.UNSUPPORTED_TURN_DETECTION),
        ({"input_audio_format": "mp3"}, Code.UNSUPPORTED_FORMAT),
        ({"ref_audio": "data:audio/wav;base64,"}, Code.REF_AUDIO_IS_FIXED),
        ({"initial_user_text": "Hello"}, Code.INVALID_VALUE),
        ({"idle_timeout_s": 0, "initial_user_text": 5}, Code.INVALID_VALUE),
        ({"extra_body": {"_secret": 1}}, Code.UNKNOWN_PARAMETER),
        ({"extra_body": {"audio_event_names": "beta"}}, Code.INVALID_VALUE),
        ({"note": "x" * 20_000}, Code.EVENT_TOO_LARGE),
    ],
)
def test_duplex_sessions_that_are_refused(session: dict[str, Any], code: Code) -> None:
    with pytest.raises(SessionError) as caught:
        DuplexDialect(any_model, is_beta=False).read({"type": "session.update", "session": session})
    assert caught.value.code is code
    assert caught.value.param is not None
