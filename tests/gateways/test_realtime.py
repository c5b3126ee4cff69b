"""Live conversations over real sockets, in every dialect: what a client says and hears, and how connections end."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import websockets
from openai import AsyncOpenAI

from actors.sessions import Sessions
from omni_bus.client import BusClient
from tests.gateways.conversation import LOUD, QUIET, check_ga, connected, deployed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running

GA_ANSWER = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
    "rate_limits.updated",
]


def answer_of(kinds: list[str]) -> list[str]:
    """Return an answer's events without its deltas."""
    return [kind for kind in kinds[kinds.index("response.created") :] if not kind.endswith(".delta")]


# --- OpenAI's dialects ------------------------------------------------------------------------------------------


async def test_ga_in_writing() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/realtime?model=synthetic-sessions") as client:
        created = await client.hear()
        assert created["type"] == "session.created"
        await client.say("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        updated = await client.until("session.updated")
        assert updated["session"]["audio"]["input"]["turn_detection"] is None
        assert updated["session"]["model"] == "synthetic-sessions"

        await client.ask("Hello", metadata={"topic": "one"})
        await client.until("rate_limits.updated")
        await client.ask("Again", output_modalities=["text"], conversation="none")
        await client.until("rate_limits.updated")

        check_ga(client.frames)
        first = client.kinds().index("rate_limits.updated") + 1
        assert answer_of(client.kinds()[:first]) == GA_ANSWER
        assert [item for item in answer_of(client.kinds()[first:]) if "content" in item or "text" in item] == [
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
        ]
        one, two = client.of("response.done")
        assert one["response"]["metadata"] == {"topic": "one"}
        assert one["response"]["output"][0]["content"][0]["transcript"] == client.text()
        assert two["response"]["conversation_id"] is None
        assert two["response"]["usage"]["output_tokens"] == 3
        assert len(client.sound()) == 2 * 480 * len(client.text())


async def test_ga_in_speech_and_barge_in() -> None:
    async with deployed(("tokens = 3", "tokens = 400")) as deployment, connected(deployment) as client:
        await client.say("session.update", session={"type": "realtime", "audio": {"input": {"transcription": {}}}})
        for _ in range(2):
            await client.speak(LOUD, 600)
            await client.speak(QUIET, 900)
            await client.until("response.created")
            await client.until("response.output_audio.delta")
        await client.speak(LOUD, 400)
        await client.until("response.done")

        check_ga(client.frames)
        turn = [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        start = client.kinds().index(turn[0])
        assert client.kinds()[start : start + 5] == turn
        item_ids = {frame.get("item_id") or frame["item"]["id"] for frame in client.frames[start : start + 5]}
        assert len(item_ids) == 1
        done = client.of("response.done")
        assert [frame["response"]["status_details"]["reason"] for frame in done] == ["turn_detected"] * 2
        for frame in done:
            after = client.frames[client.frames.index(frame) + 1 :]
            assert not [late for late in after if late.get("response_id") == frame["response"]["id"]]


async def test_beta_client() -> None:
    async with deployed() as deployment:
        url = deployment.url.replace("http", "ws") + "/v1"
        openai = AsyncOpenAI(api_key="x", base_url=f"{deployment.url}/v1", websocket_base_url=url)
        async with openai.beta.realtime.connect(model="synthetic-sessions") as connection:
            session: Any = {"modalities": ["text", "audio"], "turn_detection": None}
            await connection.session.update(session=session)
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
            )
            await connection.response.create()
            events: list[Any] = [await connection.recv()]
            while events[-1].type != "response.done":
                events.append(await connection.recv())

    kinds = [event.type for event in events]
    assert "conversation.item.created" in kinds
    assert "conversation.item.added" not in kinds
    assert not [kind for kind in kinds if kind.startswith("response.output_") and "item" not in kind]
    text = "".join(event.delta for event in events if event.type == "response.audio_transcript.delta")
    sound = b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.audio.delta")
    assert len(sound) == 960 * len(text) > 0
    assert events[-1].response.output[0].content[0].type == "audio"


async def test_transcription_session() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/realtime?intent=transcription") as client:
        created = await client.hear()
        assert created["session"]["type"] == "transcription"
        await client.say("session.update", session={"type": "transcription", "audio": {"input": {"transcription": {}}}})
        await client.speak(LOUD, 600)
        await client.speak(QUIET, 900)
        heard = await client.until("conversation.item.input_audio_transcription.completed")
        await client.say("response.create", event_id="mine")
        refused = await client.error()

        assert heard["transcript"].startswith("heard ")
        assert heard["usage"]["type"] == "duration"
        assert refused["error"]["event_id"] == "mine"
        assert not client.of("response.created")
        check_ga(client.frames)


# --- the turn dialect -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["response.audio.done", "response.output_audio.done"])
async def test_turn_clients_of_both_generations(end: str) -> None:
    async with deployed() as deployment, connected(deployment) as client:
        created = await client.hear()
        assert {"id", "created"} <= set(created)
        await client.say("session.update", model="synthetic-sessions")
        for _ in range(2):  # the socket is good for another turn
            client.frames.clear()
            await client.say("input_audio_buffer.commit", final=False)
            await client.speak(LOUD, 500, rate_hz=16_000)
            await client.say("input_audio_buffer.commit", final=True)
            assert (await client.until(end))["has_audio"] is True

            prefix = end.removesuffix(".done")
            (done,) = client.of("transcription.done")
            assert done["text"] == client.text("transcription.delta") != ""
            assert done["usage"]["completion_tokens"] == 3
            assert "heard_500_ms" in done["text"]  # at 16 kHz
            assert len(client.sound(f"{prefix}.delta", "audio")) == 960 * len(done["text"])
            assert {frame["sample_rate_hz"] for frame in client.of(f"{prefix}.delta")} == {24_000}
        if end == "response.output_audio.done":
            assert client.kinds()[-2:] == ["response.audio.done", "response.output_audio.done"]
        else:
            await client.until("response.output_audio.done")
        assert "session.updated" not in client.kinds()


async def test_turn_client_may_choose_the_names_of_sound() -> None:
    async with deployed() as deployment, connected(deployment, "/v1/realtime?turn_audio_events=seed") as client:
        await client.say("session.update", model="synthetic-sessions")
        await client.speak(LOUD, 500)
        await client.say("input_audio_buffer.commit", final=True)
        await client.until("response.audio.done")
        assert not [kind for kind in client.kinds() if kind.startswith("response.output_audio")]


async def test_turn_refusals_are_flat_and_end_the_turn() -> None:
    async with deployed() as deployment, connected(deployment) as client:
        await client.say("input_audio_buffer.commit", final=True)
        assert (await client.error())["code"] == "model_not_validated"
        await client.say("session.update", model="another")
        assert (await client.error())["code"] == "model_not_found"
        await client.say("session.update", model="synthetic-sessions")
        await client.say("input_audio_buffer.append", audio="!", event_id="mine")
        refused = await client.error()
        assert (refused["code"], refused["client_event_id"]) == ("invalid_audio", "mine")
        await client.say("dance")
        assert (await client.error())["code"] == "unknown_event"
        await client.say("input_audio_buffer.commit", final=True)
        assert (await client.error())["code"] == "invalid_audio"
        assert (await client.until("response.output_audio.done"))["has_audio"] is False
        assert all(isinstance(frame["error"], str) for frame in client.of("error"))


# --- duplex -----------------------------------------------------------------------------------------------------

DUPLEX = "/v1/realtime?duplex=1"


@pytest.mark.parametrize("path", [f"{DUPLEX}&autostart=0", "/v1/duplex"])
async def test_duplex_turns_by_commit_without_any_playback_ack(path: str) -> None:
    async with deployed() as deployment, connected(deployment, path) as client:
        await client.say("session.update", session={"model": "synthetic-sessions"})
        created, updated = await client.hear(), await client.hear()
        assert created["session"]["capabilities"]["supports_session_resume"] is True
        assert created["session"]["id"].startswith("duplex-")
        assert "server_event_seq" not in created
        assert (updated["type"], updated["server_event_seq"]) == ("session.updated", 1)
        for _ in range(2):
            await client.speak(LOUD, 500, rate_hz=16_000)
            await client.say("input.commit")
            done = await client.until("response.done")
            assert done["response"]["id"] == done["response_id"]
        await client.say("session.heartbeat")
        await client.until("session.heartbeat_ack")
        await client.say("session.close", reason="enough")
        assert await client.end() == (1000, "enough")

        assert client.kinds()[-1] == "session.closed"
        numbers = [frame["server_event_seq"] for frame in client.frames if "server_event_seq" in frame]
        assert numbers == list(range(1, len(numbers) + 1))
        deltas = client.of("response.output_audio.delta")
        assert {frame["item_id"] for frame in deltas} == {f"item_{frame['response_id']}" for frame in deltas}
        assert len(client.of("response.speak")) == 2


async def test_openais_client_on_a_duplex_session() -> None:
    async with deployed() as deployment:
        openai = AsyncOpenAI(api_key="x", base_url=f"{deployment.url}/v1")
        async with openai.realtime.connect(model="synthetic-sessions", extra_query={"duplex": "1"}) as connection:
            assert (await connection.recv()).type == "session.created"
            await connection.session.update(session={"type": "realtime"})
            for _ in range(2):
                for sample, num_ms in ((LOUD, 600), (QUIET, 900)):
                    audio = base64.b64encode(sample * 24 * num_ms).decode()
                    await connection.input_audio_buffer.append(audio=audio)
                while (event := await connection.recv()).type != "response.done":
                    assert event.type != "error", event
                assert event.response.status == "completed"


async def test_barge_in_on_a_duplex_session() -> None:
    async with deployed(("tokens = 3", "tokens = 400")) as deployment, connected(deployment, DUPLEX) as client:
        session = {"turn_detection": {"type": "server_vad"}}
        await client.say("session.update", session=session)
        await client.ask("Hello")
        await client.until("response.output_audio.delta")
        await client.say("barge_in")
        done = await client.until("response.done")
        assert done["response"]["status"] == "cancelled"
        assert done["response"]["metadata"]["reason"] == "barge_in"
        await client.say("playback.ack", played_ms=100, response_id=done["response_id"])
        acknowledged = await client.until("playback.acknowledged")
        assert acknowledged["event"]["committed_ms"] == 100
        await client.say("barge_in", event_id="again")
        refused = await client.error()
        assert (refused["error"]["code"], refused["error"]["event_id"]) == ("response_not_active", "again")


def credentials_of(frame: dict[str, Any]) -> dict[str, Any]:
    return {"session_id": frame["session"]["id"], "resume_token": frame["resume_token"]}


async def test_a_cut_connection_is_resumed_without_a_lost_or_doubled_event() -> None:
    async with deployed(("tokens = 3", "tokens = 15")) as deployment:
        async with connected(deployment, f"{DUPLEX}&model=synthetic-sessions") as first:
            created = await first.hear()
            await first.ask("Hello")
            for _ in range(3):
                await first.until("response.output_audio.delta")
            first.socket.transport.abort()  # no goodbye
        seq = max(frame.get("server_event_seq", 0) for frame in first.frames)
        async with connected(deployment, f"{DUPLEX}&autostart=0") as second:
            await second.say("session.resume", last_received_server_event_seq=seq, **credentials_of(created))
            again = await second.hear()
            assert again["type"] == "session.resumed"
            assert again["attachment_generation"] == 2
            await second.until("response.done")

            frames = [frame for frame in first.frames + second.frames if "server_event_seq" in frame]
            assert [frame["server_event_seq"] for frame in frames] == list(range(1, len(frames) + 1))
            words = "".join(f["delta"] for f in frames if f["type"] == "response.output_audio_transcript.delta")
            sound = first.sound() + second.sound()
            assert len(sound) == 960 * len(words)
            assert words == second.frames[-1]["response"]["output"][0]["content"][0]["transcript"]

            await second.say("session.heartbeat")  # which shows that it has its token
            await second.until("session.heartbeat_ack")
            async with connected(deployment, f"{DUPLEX}&autostart=0") as late:
                await late.say("session.resume", last_received_server_event_seq=seq, **credentials_of(created))
                assert (await late.error())["error"]["code"] == "invalid_resume_token"  # it was used
                assert (await late.end())[0] == 1000
            async with connected(deployment, f"{DUPLEX}&autostart=0") as third:
                await third.say("session.resume", last_received_server_event_seq=0, **credentials_of(again))
                assert (await third.hear())["type"] == "session.resumed"
                assert await second.end() == (1000, "session_replaced")
                assert second.kinds()[-1] == "session.replaced"
                await third.say("session.heartbeat")
                await third.until("session.heartbeat_ack")


FIRST_FRAMES: list[tuple[Any, str]] = [
    ({"type": "session.resume", "session_id": "x"}, "invalid_session_resume"),
    (
        {"type": "session.resume", "session_id": "x", "resume_token": "y", "last_received_server_event_seq": 0},
        "session_resume_expired",
    ),
    ({"type": "session.update", "session": {"input_audio_format": "mp3"}}, "unsupported_audio_format"),
    ({"type": "session.update", "session": {"speed": 99}}, "bad_event"),
    ({"type": "session.update", "session": 5}, "bad_event"),
    ([], "bad_event"),
    ({"type": 7}, "bad_event"),
    ({"type": "session.create", "session": {"ref_audio": "data:audio/wav;base64,"}}, "unsupported"),
    ({"type": "session.create", "speed": 99}, "bad_event"),
]


async def test_first_frames_of_duplex_clients_that_open_nothing() -> None:
    async with deployed() as deployment:
        for frame, code in FIRST_FRAMES:
            async with connected(deployment, "/v1/duplex") as client:
                await client.socket.send(json.dumps(frame))
                refused = await client.error()
                is_native = isinstance(frame, dict) and frame["type"] == "session.create"
                assert (refused if is_native else refused["error"])["code"] == code, frame
                assert (await client.end())[0] == 1000


async def test_a_duplex_client_that_says_nothing_is_let_go() -> None:
    change = ("port = 0", "port = 0\nrealtime_first_event_timeout_s = 0.05")
    async with deployed(change) as deployment, connected(deployment, "/v1/duplex") as client:
        assert (await client.error())["error"]["code"] == "config_timeout"
        assert (await client.end())[0] == 1000


# --- the door ---------------------------------------------------------------------------------------------------


async def test_without_a_session_pipeline() -> None:
    change = ('pipelines = ["voice", "sessions", "transcription"]', 'pipelines = ["voice"]')
    async with deployed(change) as deployment:
        for path in ("/v1/realtime", DUPLEX, "/v1/duplex"):
            async with connected(deployment, path) as client:
                refused = await client.hear()
                assert refused["code"] == "unsupported"
                assert isinstance(refused["error"], str)
                assert (await client.end())[0] == 1008


async def test_queries_that_are_refused() -> None:
    async with deployed() as deployment:
        for query, code in (
            ("?model=a%2Fb", "model_not_found"),
            ("?model=synthetic-voice", "model_not_found"),
            ("?call_id=x", "unsupported"),
        ):
            async with connected(deployment, f"/v1/realtime{query}") as client:
                refused = await client.hear()
                assert (refused["error"]["code"], refused["code"]) == (code, code)
                assert (await client.end())[0] == 1008


async def test_keys_and_subprotocols() -> None:
    async with deployed(("port = 0", 'port = 0\napi_keys = ["secret"]')) as deployment:
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with connected(deployment):
                pass
        assert caught.value.response.status_code == 401
        offered: list[Any] = ["realtime", "openai-insecure-api-key.secret", "openai-beta.realtime-v1"]
        async with connected(deployment, subprotocols=offered) as client:
            assert client.socket.subprotocol == "realtime"
            assert "modalities" in (await client.hear())["session"]  # beta, as offered


async def test_the_list_of_models_has_the_pipeline() -> None:
    async with (
        deployed() as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.get("/v1/models") as response,
    ):
        assert "synthetic-sessions" in [model["id"] for model in (await response.json())["data"]]


@pytest.mark.parametrize(
    ("former", "new", "code"),
    [
        ('chat = "voice"', 'chat = "voice"\nmax_sessions = 1', 1000),  # the session stage says so
        ("max_in_flight = 512", "max_in_flight = 1\nmax_queued = 0", 1013),  # the coordinator does
    ],
)
async def test_a_full_deployment_says_so(former: str, new: str, code: int) -> None:
    async with deployed((former, new)) as deployment, connected(deployment) as first:
        await first.hear()
        async with connected(deployment) as second:
            refused = await second.error()
            assert refused["error"]["type"] == "rate_limit_error"
            assert (await second.end())[0] == code


# --- flow and ends ----------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_holds_nobody_else() -> None:
    long = ("tokens = 3", "tokens = 2000"), ('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 60000')
    async with deployed(*long) as deployment, connected(deployment) as slow, connected(deployment) as quick:
        slow.socket.transport.pause_reading()
        await slow.ask("Hello")
        await quick.ask("Hi", output_modalities=["text"], max_output_tokens=20)
        await quick.until("response.done")
        slow.socket.transport.resume_reading()
        await slow.until("response.output_audio.delta")
        await slow.say("response.cancel")
        done = await slow.until("response.done")

        assert done["response"]["status"] == "cancelled"
        assert len(slow.sound()) % 2 == 0
        check_ga(slow.frames)


async def test_a_gateway_that_stops_lets_an_answer_end_and_says_goodbye() -> None:
    long = ("tokens = 3", "tokens = 60")
    async with deployed(long) as deployment, connected(deployment) as busy, connected(deployment) as idle:
        await idle.hear()
        await busy.ask("Hello", output_modalities=["text"])
        await busy.until("response.output_text.delta")
        stopping = asyncio.create_task(deployment.gateway.drain(30))

        assert await idle.end() == (1001, "the server is stopping")
        assert idle.frames[-1]["error"]["code"] == "server_stopping"
        check_ga(idle.frames)
        await busy.until("response.done")
        assert (await busy.end())[0] == 1001
        assert await stopping


@asynccontextmanager
async def drained(deployment: Running, *replicas: str) -> AsyncIterator[None]:
    """Be the supervisor that takes replicas out of service for a while."""
    about = deployment.deployment
    connection = BusClient.connect(
        "supervisor", about.listen("supervisor"), about.coordinator_endpoint, role="supervisor", timeout_s=20
    )
    async with await connection as supervisor:
        await supervisor.admin("arrange", drained=list(replicas))
        yield
        await supervisor.admin("arrange", drained=[])


async def test_conversations_leave_a_replica_that_is_drained_and_new_ones_go_to_another() -> None:
    two = ("[stages.sessions]", "[stages.sessions]\nreplicas = 2"), ("tokens = 3", "tokens = 60")
    async with (
        deployed(*two) as deployment,
        connected(deployment) as busy,
        connected(deployment) as idle,
        connected(deployment, f"{DUPLEX}&model=synthetic-sessions") as duplex,
        connected(deployment) as other,
    ):
        clients = (busy, idle, duplex, other)
        for client in clients:
            await client.hear()

        def num_sessions() -> list[int]:
            engines = [deployment.stages[f"sessions.{number}"].engine for number in range(2)]
            return [len(engine._sessions) for engine in engines if isinstance(engine, Sessions)]

        assert num_sessions() == [2, 2]
        await busy.ask("Hello", output_modalities=["text"])
        await busy.until("response.output_text.delta")
        async with drained(deployment, "sessions.0", "sessions.1"):
            assert await idle.end() == (1001, "shutdown")
            assert idle.frames[-1]["error"]["code"] == "server_stopping"
            check_ga(idle.frames)
            assert await duplex.end() == (1000, "shutdown")
            assert [frame["type"] for frame in duplex.frames[-2:]] == ["error", "session.closed"]
            await busy.until("response.done")
            assert (await busy.end())[0] == 1001
        async with drained(deployment, "sessions.0"), connected(deployment) as new, connected(deployment) as newer:
            for client in (new, newer):
                await client.ask("Hello", output_modalities=["text"])
                await client.until("response.done")
            assert num_sessions() == [0, 2]


async def test_detectors_leave_a_replica_that_is_drained_without_a_word_lost() -> None:
    """One client is silent, one says nothing at all, one is in the midst of a turn."""
    async with (
        deployed(("[stages.vad]", "[stages.vad]\nreplicas = 2"), ("tokens = 3", "tokens = 1")) as deployment,
        connected(deployment) as silent,
        connected(deployment) as mute,
        connected(deployment) as speaking,
    ):
        cores = [deployment.stages[f"vad.{number}"]._core for number in range(2)]
        for client in (silent, mute, speaking):
            await client.until("session.created")
        for client in (silent, mute, speaking):
            await client.speak(QUIET, 300)
        await speaking.speak(LOUD, 400)
        await speaking.until("input_audio_buffer.speech_started")
        while sum(len(core.running) for core in cores) < 3:
            await deployment.gateway.client.admin("health")
        for away, stays in ((0, 1), (1, 0)):
            async with drained(deployment, f"vad.{away}"):
                await silent.speak(QUIET, 100)
                await speaking.speak(LOUD, 200)
                await speaking.speak(QUIET, 900)
                await speaking.until("response.done")
                while cores[away].running:
                    await deployment.gateway.client.admin("health")
                for client in (silent, speaking):
                    await client.speak(LOUD, 400)
                    await client.until("input_audio_buffer.speech_started")
                assert len(cores[stays].running) >= 2
                await silent.speak(QUIET, 900)
                await silent.until("response.done")
        assert [len(client.of("input_audio_buffer.speech_started")) for client in (silent, speaking)] == [2, 3]
        assert not any(client.of("error") for client in (silent, mute, speaking))


async def test_a_gateway_with_a_successor_sends_those_there_who_can_come_back() -> None:
    async with deployed() as deployment, connected(deployment) as stays:
        await stays.hear()
        async with connected(deployment, f"{DUPLEX}&model=synthetic-sessions") as goes:
            await goes.hear()
            retiring = asyncio.create_task(deployment.gateway.retire())
            assert (await goes.end())[0] == 1001
        await stays.ask("Hello")
        await stays.until("response.done")
        await stays.socket.close()
        await retiring


async def test_who_leaves_takes_the_session_and_all_its_work_along() -> None:
    async with deployed(("tokens = 3", "tokens = 4000")) as deployment:
        async with connected(deployment) as client:
            await client.ask("Hello")
            await client.until("response.output_audio.delta")
            stages = [deployment.stages[name]._core for name in ("sessions.0", "llm.0", "voice.0")]
            assert all(len(core.running) == 1 for core in stages)
        while any(core.running for core in stages):
            await deployment.gateway.client.admin("health")  # a round trip
