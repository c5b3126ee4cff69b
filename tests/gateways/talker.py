"""A stage that holds conversations with models of the tests: an answer repeats what it was told, word by word.

Only the models are made up: the session core, the codec, the bus and the gateway are the deployment's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, ClassVar

import msgspec

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import client_event, encoded, payload_of
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import SessionConfig
from omni_bus.core.session.core import SessionCore
from omni_bus.core.session.effects import (
    CancelGeneration,
    Effect,
    Emit,
    EndAttachment,
    Generate,
    SetTimer,
    StopTranscribing,
    Transcribe,
)
from omni_bus.engine import EngineRequest, Inputs, Report, StreamingEngine
from omni_bus.wire.payloads import Payload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from omni_bus.wire.frames import Finish

MS = 40
"""Of sound for each word."""


class TalkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    words: int = 0
    """Of each answer; 0 for as many as it was told."""


class _Host:
    """One session and its present attachments."""

    def __init__(self, talker: Talker, event: asked.SessionOpen) -> None:
        self.core = SessionCore(
            event,
            seed=secrets.token_hex(4),
            defaults=SessionConfig(),
            capabilities=said.Capabilities(supports_tools=True, supports_image_input=True),
            new_token=secrets.token_urlsafe,
        )
        self.queues: dict[int, asyncio.Queue[bytes | None]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._talker = talker
        self._timer: asyncio.TimerHandle | None = None

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self.queues[effect.attachment].put_nowait(effect.data)
                case EndAttachment():
                    self.queues[effect.attachment].put_nowait(None)
                case Generate():
                    self.tasks[effect.response_id] = asyncio.create_task(self._generate(effect))
                case Transcribe():
                    self.tasks[effect.item_id] = asyncio.create_task(self._transcribe(effect))
                case CancelGeneration():
                    self.tasks.pop(effect.response_id).cancel()
                case StopTranscribing():
                    self.tasks.pop(effect.item_id).cancel()
                case SetTimer():
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = asyncio.get_running_loop().call_at(effect.at, self._on_timer)
                case _:
                    pass

    def _on_timer(self) -> None:
        self.do(self.core.on_timer(self._talker.now))

    async def _generate(self, effect: Generate) -> None:
        name, core, talker = effect.response_id, self.core, self._talker
        told = [part for message in effect.messages for part in message.content if isinstance(part, str)]
        text = told[-1] if told else "hello"
        if text == "fail":
            self.do(core.on_failed(name, "engine_error", "the model is unwell", talker.now))
            return
        if text == "call" and effect.options.tools:
            self.do(core.on_tool_call(name, 0, "call_1", effect.options.tools[0]["name"], "{}", talker.now))
            self.do(core.on_generated(name, "tool_calls", None, talker.now))
            return
        words = text.split()
        count = talker.options.words or len(words)
        for index in range(count):
            await talker.step(name)
            self.do(core.on_text(name, f"{words[index % len(words)]} ", talker.now))
            if "audio" in effect.options.modalities:
                samples = bytes(effect.options.format.rate_hz * MS // 1000 * 2)
                self.do(core.on_audio(name, samples, MS, talker.now))
        usage = said.ResponseUsage(total_tokens=count + 1, input_tokens=1, output_tokens=count)
        self.do(core.on_generated(name, "stop", usage, talker.now))

    async def _transcribe(self, effect: Transcribe) -> None:
        self.do(self.core.on_transcript(effect.item_id, f"{len(effect.audio)} bytes", self._talker.now))
        self.do(self.core.on_transcribed(effect.item_id, self._talker.now))


class Talker(StreamingEngine):
    """Each request is an attachment."""

    accepts: ClassVar[dict[str, str]] = {"events": "media"}
    emits: ClassVar[dict[str, str]] = {"events": "media"}
    Options = TalkerOptions
    max_num_seqs = 64
    gate: ClassVar[asyncio.Event | None] = None
    """Where a test wants to hold answers back."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.hosts: dict[str, _Host] = {}
        self._num_attachments = 0

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def load(self, report: Report) -> None:
        report("ready", 1.0)

    async def step(self, response_id: str) -> None:
        if self.gate is not None:
            await self.gate.wait()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        events = inputs.port("events")
        first = client_event(await anext(events))
        self._num_attachments += 1
        number, queue = self._num_attachments, asyncio.Queue[bytes | None]()
        host = self._attach(first, number, queue)
        if host is None:
            error = SessionError(Code.RESUME_EXPIRED, "no such session", param="session_id")
            yield "events", payload_of(said.ErrorEvent(error=error.detail(first.event_id)))
            return
        reader = asyncio.create_task(self._read(host, number, events))
        try:
            while (data := await queue.get()) is not None:
                yield "events", _payload(data)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            host.do(host.core.on_detached(number, self.now))
            host.queues.pop(number, None)

    def _attach(self, first: object, number: int, queue: asyncio.Queue[bytes | None]) -> _Host | None:
        if isinstance(first, asked.SessionOpen):
            host = self.hosts[first.session_id] = _Host(self, first)
            host.queues[number] = queue
            host.do(host.core.on_opened(number, self.now))
            return host
        assert isinstance(first, asked.SessionResume)
        host = self.hosts.get(first.session_id)
        if host is not None:
            host.queues[number] = queue
            host.do(host.core.on_resumed(number, first, self.now))
        return host

    async def _read(self, host: _Host, number: int, events: object) -> None:
        async for payload in events:
            host.do(host.core.on_client(number, client_event(payload), self.now))


def _payload(data: bytes) -> Payload:
    from omni_bus.core.session.codec import MEDIA_TYPE
    from omni_bus.wire.payloads import Blob, Media

    return Media(MEDIA_TYPE, Blob(data))


__all__ = ["Talker", "encoded"]
