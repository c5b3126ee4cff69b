"""Live conversations as a stage: each request is a client's attachment to a session, and sessions outlive them.

A pipeline ``in.events -> STAGE.events, STAGE.events -> out.events``, on whose edges each chunk is one event
(`omni_bus.core.session.codec`). Requests of a session have its id as their bus session, so that a client that comes
back finds the replica that has it. What a session needs done it asks other pipelines of the deployment for.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from actors.session_host import Attachment, Pipelines, SessionHost
from actors.session_requests import SPEECH, TURN
from omni_bus.core.session import client_events as asked
from omni_bus.core.session.codec import MEDIA_TYPE, client_event
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import AudioConfig, AudioOutput, SessionConfig
from omni_bus.core.session.core import SessionCore, no_session
from omni_bus.core.session.effects import Emit
from omni_bus.core.session.limits import Limits
from omni_bus.core.session.outlet import turned_away
from omni_bus.core.session.server_events import Capabilities
from omni_bus.engine import StreamingEngine
from omni_bus.errors import StartFailed, unknown_name
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Blob, Media

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.engine import Context, EngineRequest, Inputs, Report
    from omni_bus.wire.payloads import Payload

EVENTS = "events"
"""The port, in and out."""

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class SessionsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    chat: str
    """The pipeline that answers: ``in.messages``, ``in.audio`` if it hears, ``in.images`` if it sees; text, sound,
    tool_calls out. One stage may do all of it."""
    vad: str = ""
    """The pipeline that hears when somebody speaks: ``in.audio``, ``out.speech``; without it clients commit turns."""
    asr: str = ""
    """The pipeline that writes down what is said: ``in.audio``, ``out.text``."""
    turn: str = ""
    """The pipeline that says whether the user is done or only pauses, for ``semantic_vad``: ``in.audio``, ``out.turn``;
    without it such sessions get ``server_vad``."""
    instructions: str = ""
    """Of sessions that set none."""
    voice: str | None = None
    """Of sessions that set none; by default the voice's own."""
    transcribes_pauses: bool = True
    """Ask `asr` for a turn's words as soon as the user pauses, not only when the turn is over: answers come sooner, and
    pauses in the midst of a turn cost `asr` work for nothing."""
    max_sessions: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Of one replica, those included whose client is away."""
    output_lead_ms: Annotated[float, Meta(ge=100, le=60_000)] = 2000.0
    """So much sound may be with a client before it is played."""
    grace_s: Seconds = 30.0
    """A session whose client is away waits so long for it."""
    idle_ttl_s: Seconds | None = 300.0
    """A session whose client says nothing for so long ends."""
    max_duration_s: Seconds | None = 3600.0
    """Sessions end after this."""


class Sessions(StreamingEngine):
    """Hosts sessions."""

    accepts: ClassVar[dict[str, str]] = {EVENTS: "media"}
    emits: ClassVar[dict[str, str]] = {EVENTS: "media"}
    Options: ClassVar[type[msgspec.Struct]] = SessionsOptions
    is_idempotent: ClassVar[bool] = False

    def __init__(self, options: SessionsOptions, context: Context) -> None:
        super().__init__(options, context)
        # A session that is resumed has two attachments for a moment.
        self.max_num_seqs = self.num_slots(options)
        self._pipelines: Pipelines | None = None
        self._connecting: asyncio.Task[BusClient] | None = None
        self._sessions: dict[str, SessionHost] = {}
        self._num_attachments = 0
        self._is_drained = False

    @classmethod
    def num_slots(cls, options: SessionsOptions) -> int:
        """Return the attachments that one replica holds at once."""
        return options.max_sessions * 2

    @classmethod
    def check(cls, options: SessionsOptions) -> list[str]:
        """Return what is missing."""
        missing = importlib.util.find_spec("av") is None
        return ["adapter: realtime needs PyAV (pip install 'av>=14')"] if missing else []

    def load(self, report: Report) -> None:
        """Find the pipelines.

        Raises:
            StartFailed: there is none of that name, or it does something else.
        """
        report("pipelines", 0.0)
        import av  # noqa: F401 (loaded before the first client speaks)

        options: SessionsOptions = self.options
        chat = self._pipeline("chat", options.chat)
        vad = self._pipeline("vad", options.vad) if options.vad else None
        asr = self._pipeline("asr", options.asr) if options.asr else None
        turn = self._pipeline("turn", options.turn) if options.turn else None
        if chat.inputs.get("messages") != "json" or not {"text", "audio"} & set(chat.outputs):
            raise StartFailed(f"chat: pipeline '{chat.name}' answers no messages with text or sound")
        if vad is not None and (vad.inputs != {"audio": "audio"} or not set(SPEECH) & set(vad.outputs)):
            raise StartFailed(f"vad: pipeline '{vad.name}' does not say on out.speech when it hears speech in in.audio")
        if asr is not None and (asr.inputs != {"audio": "audio"} or asr.outputs.get("text") != "text"):
            raise StartFailed(f"asr: pipeline '{asr.name}' does not write down in.audio as out.text")
        if turn is not None and (turn.inputs != {"audio": "audio"} or turn.outputs.get(TURN) != "json"):
            raise StartFailed(f"turn: pipeline '{turn.name}' does not judge in.audio on out.turn")
        self._pipelines = Pipelines(chat, vad, asr, turn)
        report("pipelines", 1.0)

    @property
    def num_steps(self) -> int:
        """Attachments so far."""
        return self._num_attachments

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Serve one attachment, from its `SessionOpen` or `SessionResume` until either side is done with it.

        Raises:
            BadInput: a chunk is no event.
        """
        self._num_attachments += 1
        attachment = Attachment(self._num_attachments)
        hearing = asyncio.create_task(self._hear(attachment, inputs.port(EVENTS)))
        hearing.add_done_callback(lambda _: attachment.end())
        try:
            while (data := await attachment.next()) is not None:
                yield EVENTS, Media(MEDIA_TYPE, Blob(data))
            if hearing.done():
                hearing.result()
        finally:
            hearing.cancel()
            await asyncio.wait([hearing])
        yield Finish()

    def on_drained(self, *, is_drained: bool) -> None:
        """Have sessions end in their next pause; their clients open new ones, on another replica."""
        self._is_drained = is_drained
        for host in list(self._sessions.values()):
            host.drain(is_drained=is_drained)

    async def aclose(self) -> None:
        """End every session and leave the bus."""
        for host in list(self._sessions.values()):
            await host.close()
        if self._connecting is not None:
            await (await self._connecting).close()

    # --- inside -----------------------------------------------------------------------------------------------

    async def _hear(self, attachment: Attachment, events: AsyncIterator[Payload]) -> None:
        """Take what a client says until it is gone."""
        host: SessionHost | None = None
        try:
            async for payload in events:
                event = client_event(payload)
                if host is not None:
                    await host.hear(attachment, event)
                else:
                    host = await self._attach(attachment, event)
                if host is None or attachment.is_over:
                    return
        finally:
            if host is not None:
                host.detach(attachment)

    async def _attach(self, attachment: Attachment, event: asked.AnyClientEvent) -> SessionHost | None:
        """Open or resume a session; None if the attachment is turned away."""
        match event:
            case asked.SessionResume(session_id=session_id):
                host = self._sessions.get(session_id)
                if host is None:
                    self._tell(attachment, [e for e in no_session(attachment.number, event) if isinstance(e, Emit)])
                    return None
                host.resume(attachment, event)
                return host
            case asked.SessionOpen():
                return await self._open(attachment, event)
            case _:
                message = "the first event is session.open or session.resume"
                return self._refuse(attachment, event, SessionError(Code.INVALID_EVENT, message))

    async def _open(self, attachment: Attachment, event: asked.SessionOpen) -> SessionHost | None:
        options: SessionsOptions = self.options
        bus = await self._bus()
        if event.session_id in self._sessions:
            return self._refuse(attachment, event, SessionError(Code.SESSION_EXISTS, "session_id: it is taken"))
        if len(self._sessions) >= options.max_sessions:
            message = f"duplex_session_capacity_exhausted: limit={options.max_sessions}"
            return self._refuse(attachment, event, SessionError(Code.TOO_MANY_RESPONSES, message))
        assert self._pipelines is not None
        core = SessionCore(
            event,
            seed=secrets.token_hex(6),
            defaults=self._defaults(self._pipelines.chat),
            capabilities=capabilities_of(self._pipelines, options.max_sessions),
            new_token=lambda: secrets.token_urlsafe(32),
            limits=Limits(
                transcribes_pauses=options.transcribes_pauses,
                grace_s=options.grace_s,
                idle_ttl_s=options.idle_ttl_s,
                max_duration_s=options.max_duration_s,
            ),
        )
        host = SessionHost(
            core,
            bus,
            self._pipelines,
            caller=event.caller,
            output_lead_ms=options.output_lead_ms,
            on_over=self._forget,
        )
        self._sessions[event.session_id] = host
        host.open(attachment)
        if self._is_drained:  # it was on its way here
            host.drain(is_drained=True)
        return host

    def _forget(self, host: SessionHost) -> None:
        self._sessions.pop(host.core.id, None)

    def _defaults(self, chat: Pipeline) -> SessionConfig:
        options: SessionsOptions = self.options
        return SessionConfig(
            model=chat.serve_as,
            output_modalities=("audio",) if "audio" in chat.outputs else ("text",),
            instructions=options.instructions,
            audio=AudioConfig(output=AudioOutput(voice=options.voice)),
        )

    def _refuse(self, attachment: Attachment, event: asked.AnyClientEvent, error: SessionError) -> None:
        self._tell(
            attachment, [e for e in turned_away(attachment.number, error, event.event_id) if isinstance(e, Emit)]
        )

    @staticmethod
    def _tell(attachment: Attachment, emits: list[Emit]) -> None:
        for emit in emits:
            attachment.put(emit.data)
        attachment.end()

    async def _bus(self) -> BusClient:
        """Return the connection to other pipelines, made with the first session."""
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self.context.connect_bus())
        return await asyncio.shield(self._connecting)

    def _pipeline(self, key: str, name: str) -> Any:
        if name not in self.context.pipelines:
            raise StartFailed(f"{key}: {unknown_name('pipeline', name, self.context.pipelines).message}")
        return self.context.pipelines[name]


def capabilities_of(pipelines: Pipelines, max_sessions: int) -> Capabilities:
    """Return what sessions on these pipelines can do."""
    chat = pipelines.chat
    hears = chat.inputs.get("audio") == "audio"
    return Capabilities(
        supports_multi_session=max_sessions > 1,
        supports_image_input=chat.inputs.get("images") == "image",
        supports_audio_input=hears or pipelines.asr is not None,
        supports_audio_output="audio" in chat.outputs,
        supports_text_output="text" in chat.outputs,
        supports_tools="tool_calls" in chat.outputs,
        supports_transcription=pipelines.asr is not None,
        supports_semantic_vad=pipelines.turn is not None and pipelines.vad is not None,
        supports_server_vad=pipelines.vad is not None,
        hears_audio=hears,
    )
