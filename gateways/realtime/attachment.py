"""One socket of a live conversation: an attachment to its session.

It is one request on the bus, whose input are the client's events and whose output are the session's. The session itself
lives in a stage, and may outlive the socket and this process. One task reads and waits while the session has no credit
for more; another writes and waits while the client takes nothing, and by that holds its own session and no other.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from aiohttp import WSCloseCode, WSMsgType

from gateways import websockets
from gateways.http import Terms
from gateways.openai_models import EVENTS
from gateways.problems import scrub, to_problem
from gateways.realtime.beta import BetaDialect
from gateways.realtime.client_secrets import CLIENT_SECRET
from gateways.realtime.duplex import DuplexDialect
from gateways.realtime.duplex_reading import NATIVE_OPENINGS
from gateways.realtime.ga import GaDialect
from gateways.realtime.native import NativeDialect
from gateways.realtime.pictures import check_pictures
from gateways.realtime.reading import event_id_of, read_frame, refusal, with_plain_numbers
from gateways.realtime.session import session_patch
from gateways.realtime.turn import TurnAudioEvents, TurnDialect, is_turn
from omni_bus.client import Item
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import payload_of, server_event
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.errors import OmniBusError, Refused
from omni_bus.gateway import STOPPING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import WSMessage, web

    from gateways.realtime.reading import Events
    from gateways.realtime.route import RealtimeRoute
    from omni_bus.client import Request
    from omni_bus.core.pipeline import Pipeline

DUPLEX_PATH = "/v1/duplex"

BETA_PROTOCOL = "openai-beta.realtime-v1"

YES = ("1", "true", "on", "yes")
NO = ("0", "false", "off", "no")


class Dialect(Protocol):
    """Client frames to events, events to frames."""

    def read(self, fields: Mapping[str, Any]) -> Events:
        """Return what a client says with one frame."""
        ...

    def frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        """Return what a client is told of one event."""
        ...


class _GoingAway(Exception):
    """The server stops, and the conversation has a pause."""


class Attachment:
    """One socket."""

    def __init__(self, route: RealtimeRoute, request: web.Request, socket: web.WebSocketResponse, terms: Terms) -> None:
        self._route = route
        self._query = request.query
        self._socket = socket
        self._terms = terms
        secret = request.get(CLIENT_SECRET)
        self._given: dict[str, Any] = {} if secret is None else secret.session
        """The session object that the client's secret brings."""
        self._is_beta = "realtime=v1" in request.headers.get("OpenAI-Beta", "") or (
            BETA_PROTOCOL in websockets.offered(request)
        )
        self._path = request.path
        self._is_duplex = self._wants_duplex(request.path)
        self._dialect: Dialect = GaDialect(lambda _: False)
        self._is_latched = self._is_beta or self._is_duplex
        self._active: set[str] = set()
        """Responses that are being given."""
        self._paused = asyncio.Event()
        self._paused.set()
        self._patience: asyncio.Timeout | None = None
        """Until the client's next frame."""
        self._reason = ""

    def _wants_duplex(self, path: str) -> bool:
        wanted = self._query.get("duplex", "").lower()
        if wanted in YES or path == DUPLEX_PATH:
            return True
        return self._route.options.is_duplex and wanted not in NO

    async def serve(self) -> None:
        """Attach, and carry events both ways until one side is done.

        Raises:
            Problem: why the server ends it.
        """
        if not self._route.has_sessions():
            what = "Duplex API is not available" if self._is_duplex else "no model here holds live conversations"
            await self._send({"type": "error", "error": what, "code": "unsupported"})
            await self._close(WSCloseCode.POLICY_VIOLATION, what)
            return
        try:
            if "call_id" in self._query:
                raise SessionError(Code.UNSUPPORTED, "call_id: calls can't be joined here", param="call_id")
            first = await self._first_frame() if self._waits else {}
            if first is None:
                return
            pipeline = self._route.find(self._query.get("model") or _model_of(first) or self._given.get("model"))
            self._dialect = self._first_dialect(pipeline, first)
            opening = self._opening(pipeline, first)
            await check_pictures(opening, self._route.media)
        except SessionError as error:
            await self._tell(error)
            # Duplex clients take another close than a good one for a broken connection, and come again.
            await self._close(WSCloseCode.OK if self._is_duplex else WSCloseCode.POLICY_VIOLATION, error.message)
            return
        await self._attached(pipeline, opening)

    def _first_dialect(self, pipeline: Pipeline, first: Mapping[str, Any]) -> Dialect:
        def is_same_model(name: str) -> bool:
            return self._route.models.get(name) is pipeline

        if self._is_duplex:
            is_native = self._path == DUPLEX_PATH and first.get("type") in NATIVE_OPENINGS
            return (NativeDialect if is_native else DuplexDialect)(
                is_same_model, is_beta=self._is_beta, given=self._given
            )
        return (BetaDialect if self._is_beta else GaDialect)(is_same_model)

    # --- the beginning ----------------------------------------------------------------------------------------

    @property
    def _waits(self) -> bool:
        """Whether the client's first frame says what session there is to be."""
        if not self._is_duplex:
            return False
        starts = self._query.get("autostart", "").lower()
        if starts in NO or self._query.get("resume", "").lower() in YES or "model" not in self._query:
            return True
        return self._path == DUPLEX_PATH and starts not in YES

    async def _first_frame(self) -> dict[str, Any] | None:
        """Return what a duplex client says first; None if it left before that.

        Raises:
            SessionError: it is no event, or did not come.
        """
        allowed_s = self._route.options.first_event_timeout_s
        try:
            async with asyncio.timeout(allowed_s):
                received = await self._socket.receive()
        except TimeoutError:
            message = f"event: none came in time (allowed: {allowed_s:g} s)"
            raise SessionError(Code.CONFIG_TIMEOUT, message) from None
        if received.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return None
        return with_plain_numbers(await read_frame(_text(received)))

    def _opening(self, pipeline: Pipeline, first: Mapping[str, Any]) -> Events:
        """Return the session's first events.

        Raises:
            SessionError: the client's first frame can't open a session.
        """
        model = self._query.get("model") or pipeline.serve_as
        dialect = self._dialect
        if not isinstance(dialect, DuplexDialect):
            kind = {"type": "transcription"} if self._query.get("intent") == "transcription" else {}
            name = f"sess_{secrets.token_hex(12)}"
            session = {**session_patch(self._given), "model": model, **kind}
            return [asked.SessionOpen(session_id=name, session=session)]
        return dialect.first(first, model) if self._waits else dialect.opening({}, model)

    async def _attached(self, pipeline: Pipeline, opening: Events) -> None:
        first = opening[0]
        assert isinstance(first, asked.SessionOpen | asked.SessionResume)
        terms = Terms(**{**self._terms, "session": first.session_id})
        try:
            async with await self._route.client.submit(pipeline.name, [EVENTS], **terms) as call:
                for event in opening:
                    await call.send(EVENTS, payload_of(event))
                await self._carry(call)
        except _GoingAway:
            await self._tell(SessionError(Code.STOPPING, STOPPING))
            await self._close(WSCloseCode.GOING_AWAY, STOPPING)
        except OmniBusError as error:
            code = Code.TOO_MANY_RESPONSES if isinstance(error, Refused) else Code.ENGINE_FAILED
            await self._tell(SessionError(code, scrub(to_problem(error).message)))
            if self._route.draining.is_set():
                await self._close(WSCloseCode.GOING_AWAY, STOPPING)
            raise
        else:
            # A duplex client reads why from `session.closed`, and its protocol has one code for every end.
            is_leaving = self._reason == "shutdown" and not self._is_duplex
            await self._close(WSCloseCode.GOING_AWAY if is_leaving else WSCloseCode.OK, self._reason)

    async def _carry(self, call: Request) -> None:
        """Carry events both ways until the client leaves, the session lets it go, or the server stops."""
        runs = [self._read(call), self._write(call), self._leave_after(self._route.draining)]
        if self._is_duplex and not isinstance(self._dialect, NativeDialect):  # the client comes back to its session
            runs.append(self._leave_after(self._route.retiring))
        tasks = [asyncio.create_task(run) for run in runs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave_after(self, event: asyncio.Event) -> None:
        """End the attachment in the first pause after the event."""
        await event.wait()
        await self._paused.wait()
        raise _GoingAway

    # --- client to session ------------------------------------------------------------------------------------

    async def _read(self, call: Request) -> None:
        while True:
            try:
                async with asyncio.timeout_at(self._idle_at()) as self._patience:
                    received = await self._socket.receive()
            except TimeoutError:
                self._reason = "idle_timeout"
                return
            finally:
                self._patience = None
            if received.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            for event in await self._understood(received):
                await call.send(EVENTS, payload_of(event))

    def _idle_at(self) -> float | None:
        """Return when a client that says nothing from now on counts as gone; its session waits for it."""
        if not isinstance(self._dialect, DuplexDialect):
            return None
        return asyncio.get_running_loop().time() + self._dialect.idle_timeout_s

    async def _understood(self, received: WSMessage) -> Events:
        """Return what a frame says; what can't be read is for the session to refuse, in its turn."""
        event_id, is_append = None, False
        try:
            fields = await read_frame(_text(received))
            event_id, is_append = event_id_of(fields), fields.get("type") == "input_audio_buffer.append"
            fields = with_plain_numbers(fields)
            self._latch(fields)
            events = self._dialect.read(fields)
            await check_pictures(events, self._route.media)
            return events
        except SessionError as error:
            return [refusal(error, event_id, is_append=is_append)]

    def _latch(self, fields: Mapping[str, Any]) -> None:
        """Settle the dialect at the first frame."""
        if self._is_latched:
            return
        self._is_latched = True
        if is_turn(fields):
            pipeline = self._route.find(self._query.get("model"))
            self._dialect = TurnDialect(lambda name: self._check(name, pipeline), self._turn_audio_events())

    def _check(self, model: str, pipeline: Pipeline) -> None:
        if self._route.find(model) is not pipeline:
            message = f"model: {model!r} came (allowed here: {pipeline.serve_as!r}; others as ?model=)"
            raise SessionError(Code.MODEL_NOT_FOUND, message, param="model")

    def _turn_audio_events(self) -> TurnAudioEvents:
        asked_for = self._query.get("turn_audio_events", "")
        match asked_for:
            case "both" | "seed" | "ga":
                return asked_for
            case _:
                return self._route.options.turn_audio_events

    # --- session to client ------------------------------------------------------------------------------------

    async def _write(self, call: Request) -> None:
        async for item in call:
            if isinstance(item, Item):
                event = server_event(item.payload)
                for frame in self._dialect.frames(event):
                    await self._send(self._for_anybody(frame))
                self._note(event)

    def _for_anybody(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return a frame that clients of every dialect can read, as long as it isn't known whose this is."""
        error = frame.get("error")
        if self._is_latched or not isinstance(error, dict):
            return frame
        fields = cast("dict[str, Any]", error)
        return {**frame, "code": fields["code"], "message": fields["message"]}

    def _note(self, event: said.AnyServerEvent) -> None:
        match event:
            case said.SessionCreated() | said.SessionUpdated() | said.SessionResumed():
                if self._patience is not None and not self._patience.expired():
                    self._patience.reschedule(self._idle_at())
            case said.ResponseCreated():
                self._active.add(event.response.id)
                self._paused.clear()
            case said.ResponseDone():
                self._active.discard(event.response.id)
                if not self._active:
                    self._paused.set()
            case said.SessionClosed() | said.SessionExpired() | said.ResyncRequired():
                self._reason = event.reason
            case said.SessionReplaced():
                self._reason = "session_replaced"
            case _:
                pass

    async def _send(self, frame: dict[str, Any]) -> None:
        """Send one frame and wait until the client has taken enough of what came before.

        Raises:
            ConnectionError: the client is gone, or took nothing in time.
        """
        try:
            async with asyncio.timeout(self._route.options.write_timeout_s):
                await self._socket.send_str(msgspec.json.encode(frame).decode())
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None

    async def _tell(self, error: SessionError) -> None:
        """Tell of something that no session tells of, in a form that clients of every dialect can read."""
        code = error.code.vendor_code if self._is_duplex else error.code.code
        if isinstance(self._dialect, TurnDialect | NativeDialect):
            await self._send({"type": "error", "error": error.message, "code": code})
            return
        shape = {"type": error.code.type, "code": code, "message": error.message, "param": error.param}
        frame = {"type": "error", "event_id": f"event_{secrets.token_hex(8)}", "error": {**shape, "event_id": None}}
        await self._send(self._for_anybody(frame))

    async def _close(self, code: int, reason: str) -> None:
        message = reason.encode()[: websockets.MAX_REASON_BYTES].decode(errors="ignore").encode()
        await self._socket.close(code=int(code), message=message)


def _model_of(first: Mapping[str, Any]) -> str | None:
    """Return the model that a first frame names."""
    session = first.get("session", first)
    model = cast("dict[str, Any]", session).get("model") if isinstance(session, dict) else None
    return model if isinstance(model, str) else None


def _text(received: WSMessage) -> str:
    if received.type is not WSMsgType.TEXT:
        raise SessionError(Code.INVALID_EVENT, "event: a binary frame came (allowed: JSON as text)")
    return received.data
