"""Sessions in a deployment: real sockets and stages, synthetic ears and voice; clients that come, go and come back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from actors.session_host import STALLED_BYTES
from actors.sessions import Sessions
from actors.testing import running
from omni_bus.client import BusClient, Item
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import payload_of, server_event
from omni_bus.core.session.items import InputText, Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running
    from omni_bus.client import Request

TOML = (
    (Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("8000", "0")
    .replace("tokens = 32", "tokens = 3")
)
LIMIT_S = 30
MS = 48
"""Bytes of a millisecond at 24 kHz."""
LOUD, QUIET = b"\0\x20" * 24, b"\0\0" * 24


class Socket:
    """An attachment as a gateway has it, and what came over it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: list[Any] = []

    async def say(self, event: asked.AnyClientEvent) -> None:
        await self.request.send("events", payload_of(event))

    async def speak(self, pattern: bytes, num_ms: int, step_ms: int = 100) -> None:
        for _ in range(0, num_ms, step_ms):
            await self.say(asked.AudioAppend(audio=pattern * step_ms))

    async def hear(self) -> Any:
        event = await anext(self.request)
        assert isinstance(event, Item), event
        self.events.append(server_event(event.payload))
        return self.events[-1]

    async def until(self, kind: Any) -> Any:
        while not isinstance(event := await self.hear(), kind):
            assert not isinstance(event, said.ErrorEvent), event
        return event

    async def end(self) -> None:
        """Read to the end."""
        async for event in self.request:
            if isinstance(event, Item):
                self.events.append(server_event(event.payload))

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Clients:
    """A deployment and a client in this loop."""

    def __init__(self, deployment: Running, bus: BusClient) -> None:
        self.deployment = deployment
        self.bus = bus

    async def attach(self, session_id: str) -> Socket:
        return Socket(await self.bus.submit("sessions", ["events"], session=session_id))

    async def open(self, session_id: str = "sess_1", *, is_resumable: bool = False, **session: Any) -> Socket:
        socket = await self.attach(session_id)
        await socket.say(asked.SessionOpen(session_id=session_id, session=session, is_resumable=is_resumable))
        assert isinstance(await socket.hear(), said.SessionCreated)
        return socket

    async def resume(self, created: Any, seq: int, session_id: str = "sess_1") -> Socket:
        socket = await self.attach(session_id)
        await socket.say(
            asked.SessionResume(
                session_id=session_id, resume_token=created.resume_token, last_received_server_event_seq=seq
            )
        )
        return socket

    def num_live(self, stage: str) -> int:
        return len(self.deployment.stages[f"{stage}.0"]._core.running)


@asynccontextmanager
async def deployed(*changes: tuple[str, str]) -> AsyncIterator[Clients]:
    toml = TOML
    for former, new in changes:
        assert former in toml
        toml = toml.replace(former, new)
    async with asyncio.timeout(LIMIT_S), running(toml) as deployment:
        found = deployment.deployment
        bus = await BusClient.connect("test", found.listen("test"), found.coordinator_endpoint, timeout_s=LIMIT_S)
        try:
            yield Clients(deployment, bus)
        finally:
            await bus.close()


def text_of(socket: Socket) -> str:
    return "".join(event.delta for event in socket.of(said.TranscriptDelta | said.TextDelta))


async def test_a_spoken_turn_is_heard_written_down_answered_and_spoken():
    async with deployed() as clients:
        socket = await clients.open(audio={"input": {"transcription": {}}})
        await socket.speak(QUIET, 300)
        await socket.speak(LOUD, 600)
        await socket.speak(QUIET, 900)

        done = await socket.until(said.ResponseDone)

        (started,), (stopped,) = socket.of(said.SpeechStarted), socket.of(said.SpeechStopped)
        assert started.audio_start_ms == pytest.approx(0, abs=40)
        assert stopped.audio_end_ms == pytest.approx(1100, abs=60)
        (heard,) = socket.of(said.TranscriptionCompleted)
        assert heard.transcript.startswith("heard 11")
        assert text_of(socket).startswith(f"{heard.transcript.replace(' ', '_')}:0")
        sound = b"".join(event.delta for event in socket.of(said.AudioDelta))
        assert len(sound) == 2 * 480 * len(text_of(socket))
        assert done.response.status == "completed"
        assert done.response.usage.output_tokens == 3
        assert done.response.timings["first_audio"] > 0


async def test_g711_in_and_out():
    async with deployed() as clients:
        form = {"format": {"type": "audio/pcmu"}}
        socket = await clients.open(audio={"input": {**form, "turn_detection": None}, "output": form})
        await socket.say(asked.AudioAppend(audio=b"\x90" * 4000))
        await socket.say(asked.AudioCommit(create_response=True))
        await socket.until(said.ResponseDone)

        heard_ms = int(text_of(socket).split("_")[1])
        assert heard_ms == pytest.approx(500, abs=3)
        sound = b"".join(event.delta for event in socket.of(said.AudioDelta))
        assert len(sound) == pytest.approx(160 * len(text_of(socket)), abs=8)


async def test_speech_stops_the_answer_in_every_stage():
    async with deployed(("tokens = 3", "tokens = 4000")) as clients:
        socket = await clients.open()
        await socket.say(asked.ItemCreate(item=Message(role="user", content=(InputText("Hello"),))))
        await socket.say(asked.ResponseCreate())
        await socket.until(said.AudioDelta)
        assert clients.num_live("voice") == 1

        await socket.speak(LOUD, 500)
        done = await socket.until(said.ResponseDone)

        assert done.response.status_details.reason == "turn_detected"
        while clients.num_live("llm") or clients.num_live("voice"):
            await clients.bus.admin("health")  # a round trip
        order = [type(event) for event in socket.events]
        assert said.AudioDelta not in order[order.index(said.SpeechStarted) :]


async def test_sound_is_sent_only_so_far_ahead_of_what_is_heard():
    async with deployed(('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 200')) as clients:
        socket = await clients.open(audio={"input": {"turn_detection": None}})
        await socket.say(asked.ItemCreate(item=Message(role="user", content=(InputText("x"),))))
        await socket.say(asked.ResponseCreate())
        await socket.until(said.ResponseDone)

        deltas = socket.of(said.AudioDelta)
        leads = [event.start_ms - (event.at - deltas[0].at) * 1000 for event in deltas]
        assert max(leads) < 300


async def test_a_client_that_does_not_read_holds_up_nobody_else_and_only_so_much_is_kept_for_it():
    changes = (("tokens = 3", "tokens = 600"), ('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 60000'))
    async with deployed(*changes) as clients:
        silent, reader = await clients.open("silent"), await clients.open("reader")
        await silent.say(asked.ResponseCreate())
        options = asked.ResponseOptions(max_output_tokens=100)
        await reader.say(asked.ResponseCreate(response=options))

        await reader.until(said.ResponseDone)

        engine = clients.deployment.stages["sessions.0"].engine
        assert isinstance(engine, Sessions)
        (attachment,) = engine._sessions["silent"]._attachments.values()
        assert attachment.num_bytes < 2 * STALLED_BYTES
        assert sum(len(event.delta) for event in reader.of(said.AudioDelta)) > 4 * STALLED_BYTES


async def test_a_lost_attachment_is_resumed_without_a_lost_or_doubled_event():
    async with deployed() as clients:
        first = await clients.open(is_resumable=True)
        (created,) = first.events
        await first.say(asked.ItemCreate(item=Message(role="user", content=(InputText("Hello"),))))
        await first.say(asked.ResponseCreate())
        await first.until(said.AudioDelta)
        seq = first.events[-1].server_event_seq
        first.request.cancel("the gateway was killed")

        second = await clients.resume(created, seq)
        await second.until(said.ResponseDone)

        heard = [event for event in first.events + second.events if event.server_event_seq is not None]
        assert [event.server_event_seq for event in heard] == list(range(1, len(heard) + 1))
        assert len({event.event_id for event in heard}) == len(heard)
        deltas = [event for event in heard if isinstance(event, said.AudioDelta)]
        text = "".join(event.delta for event in heard if isinstance(event, said.TranscriptDelta))
        assert sum(len(event.delta) for event in deltas) == 960 * len(text)


async def test_a_takeover_ends_the_former_attachment_well():
    async with deployed() as clients:
        first = await clients.open(is_resumable=True)
        second = await clients.resume(first.events[0], 0)
        assert isinstance(await second.hear(), said.SessionResumed)

        await first.end()

        assert isinstance(first.events[-1], said.SessionReplaced)
        await second.say(asked.Heartbeat())
        assert isinstance(await second.hear(), said.HeartbeatAck)


async def test_who_has_no_session_is_turned_away():
    async with deployed(('chat = "voice"', 'chat = "voice"\nmax_sessions = 1')) as clients:
        socket = await clients.open()
        codes = []
        for event in (
            asked.SessionOpen(session_id="sess_1"),
            asked.SessionOpen(session_id="sess_2"),
            asked.SessionResume(session_id="sess_9", resume_token="x", last_received_server_event_seq=0),
            asked.Heartbeat(),
        ):
            other = await clients.attach("other")
            await other.say(event)
            await other.end()
            codes += [found.error.vendor_code for found in other.events]
        assert codes == ["session_exists", "resource_exhausted", "session_resume_expired", "bad_event"]

        await socket.say(asked.SessionClose())
        await socket.end()
        assert isinstance(socket.events[-1], said.SessionClosed)
        await clients.open("sess_2")


async def test_a_stage_that_fails_fails_its_response_and_the_session_goes_on():
    async with deployed(("tokens = 3", "tokens = 3\nfail_at_step = 1")) as clients:
        socket = await clients.open(output_modalities=["text"])
        await socket.say(asked.ItemCreate(item=Message(role="user", content=(InputText("Hello"),))))
        await socket.say(asked.ResponseCreate())

        done = await socket.until(said.ResponseDone)

        assert done.response.status == "failed"
        assert done.response.status_details.error.code == "stage_failed"
        await socket.say(asked.Heartbeat())
        await socket.until(said.HeartbeatAck)


async def test_a_detector_that_fails_is_told_and_another_one_listens():
    async with deployed(("max_num_seqs = 256", "max_num_seqs = 256\nfail_at_step = 10")) as clients:
        socket = await clients.open()
        await socket.speak(QUIET, 300)

        event = await socket.until(said.ErrorEvent)

        assert event.error.vendor_code == "server_vad_unavailable"
        await socket.say(asked.Heartbeat())
        await socket.until(said.HeartbeatAck)


async def test_closing_leaves_nothing_in_any_stage():
    async with deployed(("tokens = 3", "tokens = 4000")) as clients:
        sockets = [await clients.open(f"sess_{i}") for i in range(3)]
        for socket in sockets:
            await socket.say(asked.ResponseCreate())
            await socket.speak(QUIET, 100)
            await socket.until(said.AudioDelta)
        sockets[0].request.cancel("gone")
        await sockets[1].say(asked.SessionClose())
        sockets[2].request.finish("events")
        await sockets[1].end()
        await sockets[2].end()

        while any(clients.num_live(stage) for stage in ("sessions", "vad", "llm", "voice")):
            await clients.bus.admin("health")
        engine = clients.deployment.stages["sessions.0"].engine
        assert isinstance(engine, Sessions)
        assert engine._sessions == {}
