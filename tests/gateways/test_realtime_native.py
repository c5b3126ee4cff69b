"""The native lifecycle of ``/v1/duplex``: chosen by the first frame, told in events of its own."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from gateways.realtime.native import UNTOLD, NativeDialect
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.config import ALaw, Duplex, Pcm, SessionConfig, merged
from tests.gateways.conversation import LOUD, QUIET, connected, deployed
from tests.gateways.test_realtime_dialects import EVENTS, MODEL, any_model, as_text, response, view

HERE = {"session_id", "epoch"}
SPOKEN = {"response_id", "audio", "text", "format", "sample_rate_hz", "audio_duration_ms", "audio_text_marks"}

FIELDS: dict[str, set[str]] = {
    # what the reference of the protocol has, event by event
    "session.created": {"session"},
    "session.updated": {"session"},
    "session.closed": {"session_id", "reason"},
    "session.expired": {"session_id", "reason"},
    "session.heartbeat_ack": {"session_id"},
    "input.committed": HERE | {"turn_id", "history_len", "native_audio"},
    "input.cancelled": HERE | {"reason", "cancelled"},
    "input.transcribed": {"transcript"},
    "response.created": HERE | {"response_id", "modalities"},
    "response.speak": HERE | {"response_id", "model_speak"},
    "response.listen": HERE | {"reason", "model_listen"},
    "response.output_audio.delta": {"epoch", "end_of_turn", "model_speak", "playback"} | SPOKEN,
    "response.text.delta": {"response_id", "delta"},
    "response.done": {"response_id", "epoch", "committed", "status", "status_details", "playback"},
    "audio.cancelled": {"response_id", "reason", "cancelled_epoch", "epoch", "committed_ms", "playback"},
    "overlap.decision": HERE | {"policy", "action", "reason", "duration_ms", "overlap_speech_ms", "buffer_audio"},
    "playback.acknowledged": HERE | {"item_id", "played_ms", "committed_ms", "truncate", "playback"},
    "turn.event": {"event", "turn_state", "epoch"},
    "function_call.done": {"call_id", "name", "arguments"},
    "conversation.item.created": {"item", "created"},
    "conversation.item.deleted": {"item_id", "deleted"},
    "conversation.item.truncated": {"item_id", "truncated"},
    "error": {"error", "code"},
}

AS_IN_GA = {
    "conversation.item.retrieved",
    "conversation.item.input_audio_transcription.delta",
    "conversation.item.input_audio_transcription.segment",
    "conversation.item.input_audio_transcription.failed",
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.timeout_triggered",
}
"""The reference has no native name for these."""


def native() -> NativeDialect:
    return NativeDialect(any_model, is_beta=False)


def test_every_event_has_the_fields_of_the_reference() -> None:
    dialect = native()
    frames = [as_text(frame) for event in EVENTS for frame in dialect.frames(event)]
    frames += [as_text(frame) for frame in dialect.frames(said.ResponseDone(response=response()))]
    for frame in frames:
        assert not {"event_id", "server_event_seq"} & set(frame)
        assert frame["type"] in AS_IN_GA or FIELDS[frame["type"]] <= set(frame), frame
        assert "secret" not in str(frame)
    assert {frame["type"] for frame in frames} == set(FIELDS) | AS_IN_GA


def test_what_is_untold_is_told_otherwise_or_can_not_be() -> None:
    told = [event for event in EVENTS if not isinstance(event, (*UNTOLD, said.TranscriptDelta, said.AudioDone))]
    for event in told:
        if not isinstance(event, said.ItemAdded | said.OutputAudioCleared):
            assert native().frames(event), event


# --- the words of an answer ---------------------------------------------------------------------------------------

WHERE: dict[str, Any] = {"response_id": "resp_1", "item_id": "item_resp_1", "output_index": 0}


def sound(start_ms: float, samples: bytes = b"\1\2", form: Any = Pcm()) -> said.AudioDelta:  # noqa: B008 (frozen)
    return said.AudioDelta(**WHERE, delta=samples, format=form, start_ms=start_ms, duration_ms=20.0, at=0)


def told(*events: said.AnyServerEvent, wav: bool = False) -> list[dict[str, Any]]:
    dialect = native()
    config = SessionConfig(model=MODEL, duplex=Duplex(has_wav_headers=wav))
    dialect.frames(said.SessionCreated(session=view(config), attachment_generation=1, resume_token=None))
    return [frame for event in events for frame in dialect.frames(event)]


def test_words_go_with_the_sound_after_them_and_the_last_with_the_end() -> None:
    frames = told(
        said.ResponseCreated(response=response("in_progress")),
        said.TranscriptDelta(**WHERE, delta="Hel"),
        said.TranscriptDelta(**WHERE, delta="lo"),
        sound(0),
        sound(20),
        said.TranscriptDelta(**WHERE, delta="."),
        said.AudioDone(**WHERE),
        said.ResponseDone(response=response()),
    )
    deltas = [frame for frame in frames if frame["type"] == "response.output_audio.delta"]

    assert [(frame["text"], frame["end_of_turn"]) for frame in deltas] == [("Hello", False), ("", False), (".", True)]
    assert [frame["audio_duration_ms"] for frame in deltas] == [20, 40, 40]
    assert frames[-1]["type"] == "response.done"
    assert frames[-1]["status"] == "completed"


def test_a_cancelled_answer_says_no_more_and_names_both_epochs() -> None:
    details = said.StatusDetails(type="cancelled", reason="turn_detected", cause="barge_in")
    frames = told(
        said.ResponseCreated(response=response("in_progress")),
        sound(0),
        said.TranscriptDelta(**WHERE, delta="never heard"),
        said.OutputAudioCleared(response_id="resp_1", epoch=0),
        said.ResponseDone(response=response("cancelled", details)),
        said.OutputAudioCleared(response_id="resp_0", reason="barge_in", epoch=2),
    )

    first, second = frames[-2:]
    assert (first["type"], first["reason"], first["cancelled_epoch"], first["epoch"]) == (
        ("audio.cancelled", "barge_in", 0, 1)
    )
    assert (second["type"], second["response_id"], second["epoch"]) == ("audio.cancelled", "resp_0", 2)
    assert "never heard" not in str(frames)


@pytest.mark.parametrize(
    ("form", "name", "head"),
    [(Pcm(16_000), "wav", b"RIFF"), (Pcm(16_000), "pcm16", b"\1\2"), (ALaw(), "g711_alaw", b"\1\2")],
)
def test_sound_is_a_file_for_each_piece_where_it_is_wav(form: Any, name: str, head: bytes) -> None:
    frame = told(sound(0, form=form), wav=name != "pcm16")[0]
    data = base64.b64decode(frame["audio"])

    assert frame["format"] == name
    assert data.startswith(head)
    assert data.endswith(b"\1\2")
    assert frame["sample_rate_hz"] == form.rate_hz


def test_a_session_may_be_opened_flat_or_nested_and_keeps_what_nobody_knows() -> None:
    fields = {"session_id": "mine", "sample_rate_hz": 8000, "seat": 7, "extra_body": {"force_listen_count": 3}}
    for frame in ({"type": "session.create", **fields}, {"type": "open_session", "session": fields}):
        (opened,) = native().first(frame, MODEL)
        assert isinstance(opened, asked.SessionOpen)
        assert not opened.is_resumable
        assert opened.session_id.startswith("duplex-")
        config = merged(SessionConfig(), opened.session)
        assert config.audio.input.format == Pcm(8000)
        (created,) = native().frames(
            said.SessionCreated(session=view(config), attachment_generation=1, resume_token=None)
        )
        session = created["session"]
        assert (session["client_session_id"], session["seat"]) == ("mine", 7)
        assert session["extra_body"] == {"auto_response": False, "force_listen_count": 3}
        assert session["output_audio_format"] == "wav"
        assert session["playback_commit_policy"] == "commit_all_on_done"


# --- in a deployment ----------------------------------------------------------------------------------------------


async def test_a_native_conversation() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/duplex") as client:
        session = {"model": "synthetic-sessions", "input_audio_transcription": {}, "initial_user_text": "Be kind"}
        await client.say("session.create", session=session, session_id="mine")
        created = await client.hear()
        assert created["session"]["capabilities"]["supports_session_resume"] is False
        assert created["session"]["initial_user_text"] == "Be kind"
        assert (await client.hear())["type"] == "conversation.item.created"

        await client.speak(LOUD, 500, rate_hz=16_000)
        await client.say("input.commit")
        committed = await client.until("input.committed")
        assert (committed["turn_id"], committed["history_len"], committed["native_audio"]) == (1, 2, False)
        done = await client.until("response.done")
        assert (done["status"], done["committed"]) == ("completed", True)
        assert client.of("input.transcribed")[0]["transcript"].startswith("heard 500 ms")
        deltas = client.of("response.output_audio.delta")
        assert all(base64.b64decode(frame["audio"])[:4] in {b"RIFF", b""} for frame in deltas)
        assert [frame["end_of_turn"] for frame in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1]["audio_duration_ms"] == done["playback"]["sent_ms"]
        text = "".join(frame["text"] for frame in deltas)

        sent_ms = done["playback"]["sent_ms"]
        await client.say("playback.ack", played_ms=sent_ms, response_id=done["response_id"])
        acknowledged = await client.until("playback.acknowledged")
        assert (acknowledged["committed_ms"], acknowledged["truncate"]) == (sent_ms, False)
        await client.say("turn.signal", event="user_started")
        assert (await client.until("turn.event"))["turn_state"] == "user_speaking"
        await client.speak(QUIET, 200, rate_hz=16_000)
        await client.say("input_audio_buffer.commit")
        assert (await client.until("input.committed"))["no_response"] is True
        assert (await client.until("response.listen"))["reason"] == "silence_or_noise"
        await client.ask("In writing", modalities=["text"])
        await client.until("response.done")
        assert "".join(frame["delta"] for frame in client.of("response.text.delta"))
        assert text
        await client.say("session.heartbeat")
        await client.until("session.heartbeat_ack")
        await client.say("close", reason="enough")
        assert await client.end() == (1000, "enough")
        assert client.frames[-1] == {
            "type": "session.closed",
            "session_id": created["session"]["id"],
            "reason": "enough",
        }


async def test_a_native_answer_is_interrupted() -> None:
    long = ("tokens = 3", "tokens = 4000")
    async with deployed(long) as deployment, connected(deployment, "/v1/duplex") as client:
        await client.say("session.create", turn_detection={"type": "server_vad"}, response_format="pcm16")
        await client.ask("Hello")
        await client.until("response.output_audio.delta")
        for sample, num_ms in ((LOUD, 600), (QUIET, 900)):
            await client.speak(sample, num_ms, rate_hz=16_000)
        cancelled = await client.until("audio.cancelled")
        assert (cancelled["reason"], cancelled["cancelled_epoch"], cancelled["epoch"]) == ("turn_detected", 0, 1)
        assert cancelled["playback"]["sent_ms"] > 0
        decision = client.of("overlap.decision")[0]
        assert (decision["action"], decision["cancel_reason"]) == ("barge_in", "turn_detected")
        second = (await client.until("response.created"))["response_id"]
        await client.until("response.output_audio.delta")
        await client.say("input.cancel")
        assert (await client.until("audio.cancelled"))["response_id"] == second
        dropped = await client.until("input.cancelled")
        assert dropped["reason"] == "input_cancel"
        assert dropped["epoch"] > 1
        names = client.kinds()
        assert "response.done" not in names
        assert names.count("response.created") == names.count("audio.cancelled") == 2


async def test_native_errors_are_flat_and_the_session_goes_on() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/duplex?model=synthetic-sessions") as client:
        await client.say("session.create")
        await client.hear()
        for bad, code in (
            ({"type": "session.create"}, "session_exists"),
            ({"type": "session.config"}, "session_exists"),
            ({"type": "session.resume"}, "unsupported_session_resume"),
            ({"type": "dance"}, "unknown_event"),
            ({"type": "input_audio_buffer.append", "audio": "!"}, "bad_audio"),
            ({"type": "input_audio_buffer.commit"}, "commit_aborted"),
            ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_empty"),
            ({"type": "input_audio_buffer.commit", "final": "yes"}, "bad_event"),
            ({"type": "session.update", "session": {"initial_user_text": "late"}}, "bad_event"),
            ({"type": "response.cancel"}, "response_not_active"),
            ({"type": "response.create"}, "response_create_without_input"),
        ):
            await client.socket.send(json.dumps(bad | {"event_id": "mine"}))
            refused = await client.error()
            assert isinstance(refused["error"], str)
            assert (refused["code"], refused["client_event_id"]) == (code, "mine"), refused
            assert refused["session_id"].startswith("duplex-")
        await client.ask("Hello")
        await client.until("response.done")


@pytest.mark.parametrize(
    ("path", "first", "is_native"),
    [
        ("/v1/duplex", "session.create", True),
        ("/v1/duplex?model=synthetic-sessions", "open_session", True),
        ("/v1/duplex", "session.config", True),
        ("/v1/duplex", "session.update", False),
        ("/v1/duplex", "session.heartbeat", False),
        ("/v1/duplex?autostart=1&model=synthetic-sessions", "session.heartbeat", False),
        ("/v1/realtime?duplex=1", "session.create", False),
        ("/v1/realtime?duplex=1&autostart=0", "dance", False),
    ],
)
async def test_the_first_frame_decides(path: str, first: str, is_native: bool) -> None:  # noqa: FBT001 (a case)
    async with deployed() as deployment, connected(deployment, path) as client:
        if "autostart=1" in path:
            await client.hear()
        await client.say(first)
        await client.say("session.close")
        assert (await client.end())[0] == 1000
        assert client.kinds()[0] == "session.created"
        assert ("event_id" in client.frames[0]) is not is_native
        assert client.frames[0]["session"]["capabilities"]["supports_session_resume"] is not is_native


async def test_a_gateway_with_a_successor_keeps_a_session_that_can_not_be_resumed() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/duplex") as client:
        await client.say("session.create")
        await client.hear()
        retiring = asyncio.create_task(deployment.gateway.retire())
        async with connected(deployment, "/v1/realtime?duplex=1&model=synthetic-sessions") as other:
            assert (await other.end())[0] == 1001
        await client.ask("Hello")
        await client.until("response.done")
        await client.say("session.close")
        assert (await client.end())[0] == 1000
        await retiring


async def test_who_leaves_a_native_session_ends_it() -> None:
    full = ('chat = "voice"', 'chat = "voice"\nmax_sessions = 1'), ("tokens = 3", "tokens = 4000")
    async with deployed(*full) as deployment:
        async with connected(deployment, "/v1/duplex") as client:
            await client.say("session.create")
            await client.ask("Hello")
            await client.until("response.output_audio.delta")
        stages = [deployment.stages[name]._core for name in ("sessions.0", "llm.0", "voice.0")]
        while any(core.running for core in stages):
            await deployment.gateway.client.admin("health")  # a round trip
        async with connected(deployment, "/v1/duplex") as client:
            await client.say("session.create")
            assert (await client.hear())["type"] == "session.created"


async def test_the_first_frame_may_name_the_model() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/duplex") as client:
        await client.say("session.create", session={"model": "nobody"})
        refused = await client.error()
        assert refused["error"]["code"] == "model_not_found"
        assert (await client.end())[0] == 1000
