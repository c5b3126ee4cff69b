"""The duplex dialect against the tables of its reference: fields, capabilities, events, codes and their types."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from typing import Any, cast

import pytest

from actors.sessions import Sessions
from gateways.realtime.duplex import DuplexDialect
from gateways.realtime.reading import read_frame, with_plain_numbers
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import Code
from omni_bus.core.session.config import Duplex, Pcm, SessionConfig, merged
from omni_bus.core.session.items import InputText, Message
from tests.gateways.conversation import LOUD, connected, deployed
from tests.gateways.test_realtime_dialects import EVENTS, MODEL, WHERE, any_model, as_text, response, view

DUPLEX = "/v1/realtime?duplex=1&model=synthetic-sessions"

SESSION = {
    *("object", "type", "id", "model", "state", "turn_state", "epoch", "turn_id", "active_request_id"),
    *("active_response_id", "active_response_turn_id", "modalities", "output_modalities", "sample_rate_hz"),
    *("input_audio_format", "output_audio_format", "voice", "instructions", "temperature", "speed"),
    *("idle_timeout_s", "turn_detection", "overlap_policy", "overlap_short_ack_ms", "overlap_barge_in_ms"),
    *("overlap_silence_rms", "playback_commit_policy", "extra_body", "audio", "playback", "capabilities"),
}
CAPABILITIES = {
    *("implementation_level", "chunk_period_ms", "supports_barge_in", "supports_playback_ack"),
    *("supports_session_resume", "supports_multi_session", "supports_multi_session_same_replica"),
    *("supports_audio_truncate", "supports_input_append", "supports_core_resumable_request"),
    *("supports_concurrent_turn_requests", "supports_image_input", "supports_text_only_turn"),
    *("required_input_modalities", "optional_input_modalities", "supports_session_lease", "session_admission_mode"),
    *("input_modes", "signal_sources", "adapter_patterns", "stage_handoff_transport", "target_barge_in_latency_ms"),
    *("supports_session_adapter", "supports_model_native_turn_policy", "supports_external_turn_signal"),
    *("supports_client_commit", "supports_replace_latest_chunk", "supports_reencode_context"),
    *("supports_rollback_to_checkpoint", "supports_turn_commit_only", "supports_kv_lease", "supports_core_kv_lease"),
    *("supports_model_internal_state", "supports_stage_resumption", "supports_scheduler_native_append"),
    *("supports_stage_connector_handoff", "supports_independent_io_streams", "supports_realtime_endpoint"),
    *("requires_model_runner_kv", "requires_native_stage_role"),
}
EVENT_FIELDS: dict[str, set[str]] = {
    "session.created": {"session", "attachment_generation", "resume_token"},
    "session.updated": {"session"},
    "session.resumed": {"session_id", "session", "attachment_generation", "resume_token"},
    "session.replaced": {"session_id", "attachment_generation"},
    "session.resync_required": {"session_id", "reason"},
    "session.closed": {"session_id", "reason", "event"},
    "session.expired": {"session_id", "reason"},
    "session.heartbeat_ack": {"session_id"},
    "response.created": {"response_id", "response"},
    "response.done": {"response_id", "response"},
    "response.speak": {"response_id", "item_id", "output_index", "content_index", "metadata"},
    "response.listen": {"session_id", "epoch", "response"},
    "response.output_audio.delta": {"response_id", "item_id", "delta", "format", "sample_rate_hz", "metadata"},
    "response.output_audio_transcript.delta": {"metadata", "delta"},
    "input_audio_buffer.committed": {"event"},
    "conversation.item.deleted": {"event"},
    "conversation.item.truncated": {"event"},
    "overlap.decision": {"session_id", "epoch", "policy", "action", "reason", "metadata"},
    "playback.acknowledged": {"event"},
    "turn.event": {"session_id", "event", "turn_state", "epoch"},
}
NESTED: dict[tuple[str, str], set[str]] = {
    ("response.output_audio.delta", "metadata"): {
        *("session_id", "epoch", "model_speak", "end_of_turn", "audio_duration_ms", "audio_text_marks", "playback"),
    },
    ("response.speak", "metadata"): {"session_id", "epoch", "model_speak"},
    ("overlap.decision", "metadata"): {
        *("duration_ms", "overlap_speech_ms", "buffer_audio", "defer_runtime_append", "force_listen"),
        *("preserve_realtime_input", "cancel_reason"),
    },
    ("playback.acknowledged", "event"): {
        *("session_id", "epoch", "item_id", "played_ms", "committed_ms", "truncate", "playback", "history_committed"),
    },
    ("input_audio_buffer.committed", "event"): {"turn_id", "epoch", "history_len"},
    ("session.closed", "event"): {"session_id", "reason"},
}

INVALID = [
    *("bad_event", "bad_audio", "config_timeout", "invalid_json", "event_too_large"),
    *("unknown_event", "session_exists", "session_closed", "unknown_session", "response_already_active"),
    *(
        "response_not_active",
        "response_create_without_input",
        "text_only_turn_unsupported",
        "input_audio_buffer_empty",
        "missing_item_id",
    ),
    *(
        "item_not_found",
        "playback_item_mismatch",
        "playback_item_not_found",
        "playback_ack_too_late",
        "unsupported_audio_format",
    ),
    *(
        "unsupported_turn_detection",
        "model_update_unsupported",
        "voice_update_after_audio_unsupported",
        "ref_audio_update_unsupported",
        "invalid_video_frames",
    ),
    *(
        "invalid_input_modality",
        "invalid_function_call_output",
        "barge_in_unsupported",
        "invalid_session_resume",
        "session_resume_expired",
    ),
    *(
        "unsupported_session_resume",
        "invalid_resume_token",
        "session_resume_conflict",
        "invalid_event_ack",
        "invalid_session_config",
    ),
    *("invalid_image", "unsupported"),
]
TYPES = {
    **dict.fromkeys(INVALID, "invalid_request_error"),
    **dict.fromkeys(("internal_error", "engine_error", "commit_aborted", "server_vad_unavailable"), "server_error"),
    **dict.fromkeys(("resource_exhausted", "input_backpressure"), "rate_limit_error"),
}
OURS = {"model_not_found", "model_not_validated", "server_stopping"}
"""Codes for what the reference has no word for."""


def duplex(**options: Any) -> DuplexDialect:
    return DuplexDialect(any_model, **{"is_beta": False, **options})


def test_a_session_shows_every_field_of_the_reference() -> None:
    (created,) = duplex().frames(EVENTS[0])

    assert set(created["session"]) >= SESSION
    assert set(created["session"]["capabilities"]) >= CAPABILITIES
    assert set(created["session"]["playback"]) == {"generated_ms", "sent_ms", "played_ms", "committed_ms"}


def test_every_event_has_the_fields_of_the_reference() -> None:
    frames = [as_text(frame) for event in EVENTS for frame in duplex().frames(event)]
    for frame in frames:
        assert frame["event_id"] is not None
        assert EVENT_FIELDS.get(frame["type"], set()) <= set(frame), frame
    for (kind, name), fields in NESTED.items():
        found = [frame[name] for frame in frames if frame["type"] == kind]
        assert found
        assert all(fields <= set(each) for each in found), (kind, name)
    assert set(EVENT_FIELDS) <= {frame["type"] for frame in frames}


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_every_code_has_the_type_of_the_reference(code: Code) -> None:
    assert code.vendor_code in OURS or TYPES[code.vendor_code] == code.type


# --- sound out ----------------------------------------------------------------------------------------------------

SOUND = said.AudioDelta(
    **WHERE, delta=b"\1\2\3\4", format=Pcm(16_000), start_ms=20.0, duration_ms=10.0, at=5.0, text_chars=4
)
TEXT = said.TranscriptDelta(**WHERE, delta="x")


def configured(dialect: DuplexDialect, **fields: Any) -> DuplexDialect:
    config = SessionConfig(model=MODEL, duplex=Duplex(**fields))
    dialect.frames(said.SessionUpdated(session=view(config)))
    return dialect


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        (duplex(), ["response.output_audio.delta", "response.output_audio_transcript.delta"]),
        (duplex(is_beta=True), ["response.audio.delta", "response.audio_transcript.delta"]),
        (
            configured(duplex(), extra_body={"audio_event_names": "both"}),
            [
                *("response.output_audio.delta", "response.output_audio_transcript.delta"),
                *("response.audio.delta", "response.audio_transcript.delta"),
            ],
        ),
    ],
)
def test_sound_goes_out_under_the_names_that_were_asked_for(dialect: DuplexDialect, names: list[str]) -> None:
    assert [frame["type"] for frame in dialect.frames(SOUND)] == names
    assert [frame["type"] for frame in dialect.frames(TEXT)] == names[1::2]
    assert "response.done" in [frame["type"] for frame in dialect.frames(said.ResponseDone(response=response()))]


def test_a_piece_of_sound_says_how_far_the_answer_is() -> None:
    dialect = duplex()
    dialect.frames(next(event for event in EVENTS if isinstance(event, said.PlaybackAcknowledged)))

    metadata = dialect.frames(SOUND)[0]["metadata"]

    assert metadata["audio_duration_ms"] == 30
    assert metadata["audio_text_marks"] == [{"text_chars": 4, "audio_end_ms": 30}]
    assert metadata["playback"] == {"generated_ms": 30, "sent_ms": 30, "played_ms": 10, "committed_ms": 10}


def test_a_session_that_wants_wav_gets_a_file_in_each_piece() -> None:
    opened = duplex().first({"type": "session.update", "session": {"response_format": "wav"}}, MODEL)[0]
    assert isinstance(opened, asked.SessionOpen)
    dialect = duplex()
    config = merged(SessionConfig(), opened.session)
    (shown,) = dialect.frames(said.SessionUpdated(session=view(config)))
    frame = dialect.frames(SOUND)[0]

    with wave.open(io.BytesIO(base64.b64decode(frame["delta"]))) as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
        assert file.readframes(9) == b"\1\2\3\4"
    assert frame["format"] == shown["session"]["output_audio_format"] == "wav"


# --- sessions of clients ------------------------------------------------------------------------------------------


def test_a_first_text_is_an_item_of_the_user() -> None:
    for session in ({"initial_user_text": "Hello"}, {"extra_body": {"duplex_initial_user_text": "Hello"}}):
        dialect = duplex()
        events = dialect.first({"type": "session.update", "session": session}, MODEL)
        assert events[2] == asked.ItemCreate(item=Message(role="user", content=(InputText("Hello"),)))
        again = {"type": "session.update", "session": session}  # clients send all of it each time
        assert len(dialect.read(again)) == 1


def test_what_nobody_knows_is_shown_again_and_what_is_shown_is_ignored() -> None:
    dialect = duplex()
    session = {"seat": 7, "extra_body": {"return_stage_metrics": True, "overlap_short_ack_ms": 5}}
    opened = dialect.first({"type": "session.update", "session": session}, MODEL)[0]
    assert isinstance(opened, asked.SessionOpen)
    config = merged(SessionConfig(model=MODEL), opened.session)
    (created,) = dialect.frames(
        said.SessionCreated(session=view(config), attachment_generation=1, resume_token="secret")
    )
    (update,) = dialect.read({"type": "session.update", "session": created["session"]})

    assert created["session"]["seat"] == 7
    assert created["session"]["extra_body"] == {"auto_response": False, "return_stage_metrics": True}
    assert created["session"]["overlap_short_ack_ms"] == 5
    assert isinstance(update, asked.SessionUpdate)
    assert merged(config, update.session) == config


@pytest.mark.parametrize(
    ("fields", "is_wanted"),
    [
        ({"type": "input_audio_buffer.commit"}, False),
        ({"type": "input.commit"}, True),
        ({"type": "input.commit", "final": False}, False),
        ({"type": "input.commit", "final": False, "create_response": True}, True),
        ({"type": "input.commit", "final": None}, True),
    ],
)
def test_commits_that_ask_for_an_answer(fields: dict[str, Any], is_wanted: bool) -> None:  # noqa: FBT001 (a case)
    assert duplex().read(fields) == [asked.AudioCommit(create_response=is_wanted)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5.0", 5),
        ("5", 5),
        ("5.5", 5.5),
        ("-0.0", 0),
        ("1e300", 1e300),
        ('{"a": [2.0, true, "3.0"]}', {"a": [2, True, "3.0"]}),
    ],
)
async def test_whole_numbers_may_be_written_as_fractions(text: str, number: Any) -> None:
    """``played_ms: 1000.0`` is what a client in Python sends; true and false are no numbers."""
    found = with_plain_numbers(await read_frame(f'{{"value": {text}}}'))["value"]

    assert (found, type(found)) == (number, type(number))


def test_options_of_a_response() -> None:
    options = {"modalities": ["text"], "speed": 1.5, "extra_body": {"x": 1}, "output_audio_format": "g711_ulaw"}
    (event,) = duplex().read({"type": "response.create", "response": options | {"conversation": "none"}})

    assert isinstance(event, asked.ResponseCreate)
    assert event.response.output_modalities == ("text",)
    assert event.response.audio.output.speed == 1.5


# --- connections --------------------------------------------------------------------------------------------------


async def test_a_silent_connection_is_lost_and_its_session_is_not() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/realtime?duplex=1") as client:
        await client.say("session.update", session={"idle_timeout_s": 1, "sample_rate_hz": 8000})
        created = await client.hear()
        assert await client.end() == (1000, "idle_timeout")
        assert "session.closed" not in client.kinds()
        async with connected(deployment, f"{DUPLEX}&resume=1") as second:
            token = {"session_id": created["session"]["id"], "resume_token": created["resume_token"]}
            await second.say("session.resume", last_received_server_event_seq=1, **token)
            await second.say("session.update", session={"idle_timeout_s": 60})
            resumed = await second.hear()
            assert resumed["type"] == "session.resumed"
            assert resumed["session"]["sample_rate_hz"] == 8000
            assert (await second.until("session.updated"))["session"]["idle_timeout_s"] == 60
            await second.speak(LOUD, 300, rate_hz=8000)
            await second.say("input.commit")
            await second.until("response.done")


async def test_of_two_who_resume_at_once_one_wins_and_the_loser_harms_nobody() -> None:
    async with deployed() as deployment, connected(deployment, DUPLEX) as first:
        created = await first.hear()
        token = {"session_id": created["session"]["id"], "resume_token": created["resume_token"]}
        resume = json.dumps({"type": "session.resume", "last_received_server_event_seq": 0, **token})
        path = f"{DUPLEX}&autostart=0"
        async with connected(deployment, path) as one, connected(deployment, path) as two:
            await asyncio.gather(one.socket.send(resume), two.socket.send(resume))
            generations = []
            for client in (one, two):
                heard = await client.hear()
                assert heard["type"] == "session.resumed"  # with a token that nobody has used since: a lost reply
                generations.append(heard["attachment_generation"])
            assert sorted(generations) == [2, 3]
            winner, loser = (two, one) if generations[1] == 3 else (one, two)
            assert await loser.end() == (1000, "session_replaced")
            assert await first.end() == (1000, "session_replaced")
            await winner.say("session.heartbeat")
            await winner.until("session.heartbeat_ack")


async def test_a_full_stage_has_room_once_a_session_says_that_it_is_closed() -> None:
    full = ('chat = "voice"', 'chat = "voice"\nmax_sessions = 1')
    async with deployed(full) as deployment, connected(deployment, DUPLEX) as first:
        created = await first.hear()
        assert created["session"]["capabilities"]["supports_multi_session"] is False
        async with connected(deployment, DUPLEX) as second:
            refused = (await second.error())["error"]
            assert (refused["type"], refused["code"]) == ("rate_limit_error", "resource_exhausted")
            assert refused["message"] == "duplex_session_capacity_exhausted: limit=1"
            assert (await second.end())[0] == 1000
        await first.say("session.close")
        await first.until("session.closed")
        async with connected(deployment, DUPLEX) as third:
            assert (await third.hear())["type"] == "session.created"


async def test_a_session_that_nobody_comes_back_to_ends() -> None:
    short = ('chat = "voice"', 'chat = "voice"\ngrace_s = 0.1\nmax_sessions = 1')
    async with deployed(short) as deployment:
        async with connected(deployment, DUPLEX) as first:
            created = await first.hear()
        token = {"session_id": created["session"]["id"], "resume_token": created["resume_token"]}
        while cast("Sessions", deployment.stages["sessions.0"].engine)._sessions:
            await deployment.gateway.client.admin("health")
        async with connected(deployment, f"{DUPLEX}&resume=true") as second:
            await second.say("session.resume", last_received_server_event_seq=1, **token)
            assert (await second.error())["error"]["code"] == "session_resume_expired"
