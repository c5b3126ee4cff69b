"""``WS /v1/realtime/video``: a video that is watched while it is made, as fragments of an MP4 that play when they come.

One task reads what the client says, the other sends what the stages make. A client that takes little is asked to take
more before the next frames are, so that it slows down its own video and nothing else.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSMsgType

from gateways import websockets
from gateways.fan_out import opened
from gateways.fields import refusal
from gateways.http import KEY_NAME, terms_of
from gateways.openai_models import INTERACTIONS
from gateways.openai_refusals import renamed
from gateways.problems import Problem, to_problem
from gateways.videos import body
from gateways.videos import live_messages as messages
from gateways.videos.making import call_of
from omni_bus.client import Item
from omni_bus.errors import BadFrame, BadInput, OmniBusError
from omni_bus.media.mp4 import Fragment, Mp4Fragments
from omni_bus.media.video_pool import frame_slices
from omni_bus.wire.payloads import Json, Video

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aiohttp import WSMessage, web

    from gateways.videos.form import Reader, Request
    from gateways.videos.routes import VideosOptions
    from omni_bus.client import BusClient
    from omni_bus.client import Request as BusRequest
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.video_pool import VideoPool

PATH = "/v1/realtime/video"

_MOMENTS = ("started", "active", "completed")
"""Of an interaction; metadata says which ones a chunk has."""


class LiveVideoRoute:
    """The route's handler and what its sessions need.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        reader: decodes references.
        pool: encodes.
        options: limits.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        reader: Reader,
        pool: VideoPool,
        options: VideosOptions,
    ) -> None:
        self.client = client
        self.models = models
        self.reader = reader
        self.pool = pool
        self.options = options

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one socket. When its client goes, this is cancelled, and with it what is being made."""
        terms_of(request)  # refused before the upgrade, with a status
        limit = messages.MAX_START_BYTES
        socket = await websockets.upgrade(request, max_message_bytes=limit, may_compress=False)
        await _Session(self, request, socket).serve()
        await socket.close()
        return socket


class _Gone(Exception):
    """The client has closed."""


class _Session:
    """One socket, one video."""

    def __init__(self, route: LiveVideoRoute, request: web.Request, socket: web.WebSocketResponse) -> None:
        self._route = route
        self._http = request
        self._socket = socket
        self._id = f"video_live-{secrets.token_hex(12)}"
        self._sending = asyncio.Lock()
        self._is_interactive = False
        self._stall: asyncio.Timeout | None = None
        self._num_chunks = self._num_generated = 0
        self._event_ids: set[str] = set()
        self._happening: dict[int, dict[str, tuple[str, ...]]] = {}
        """What the metadata of chunks that are still to come says of interactions."""

    async def serve(self) -> None:
        """Make the video, or say why not.

        Raises:
            Problem: why the server ends the session.
        """
        try:
            is_stopped = await self._make(await self._start())
        except _Gone:
            return
        except (Problem, OmniBusError) as error:
            await self._send(_error(to_problem(error), self._id))
            raise
        done = {"type": "session.done", "request_id": self._id, "chunks": self._num_chunks, "stopped": is_stopped}
        await self._send(done)

    # --- the beginning ----------------------------------------------------------------------------------------

    async def _start(self) -> Request:
        limit_s = self._route.options.video_start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                received = await self._socket.receive()
        except TimeoutError:
            raise Problem(408, f"session.start: none came in time (allowed: {limit_s:g} s)") from None
        fields = messages.start_body(messages.read_object(_text(received)))
        settings = self._route.reader.settings
        wanted = body.parse(fields, self._route.models, settings=settings, is_live=True)
        return await self._route.reader.complete(wanted, [], self._http[KEY_NAME])

    async def _make(self, request: Request) -> bool:
        """Make the video; return whether it was ended before its end."""
        wanted = request.wanted
        call = call_of(request)
        # What happens in it comes, and is told, while it is made.
        inputs = {port: payloads for port, payloads in call.inputs.items() if port != INTERACTIONS}
        told = (INTERACTIONS,) if INTERACTIONS in wanted.pipeline.outputs else ()
        call = msgspec.structs.replace(call, outputs=(*call.outputs, *told), inputs=inputs)
        self._is_interactive = INTERACTIONS in wanted.pipeline.inputs
        terms = terms_of(self._http)
        terms["input_bytes"] = request.num_bytes
        try:
            async with opened(self._route.client, call, terms) as made:
                config = {"model": wanted.model, **wanted.told}
                await self._send(
                    {"type": "video.start", "request_id": self._id, "format": messages.FORMAT, "config": config}
                )
                return await self._run(made, request)
        except BadInput as error:
            raise renamed(error, wanted.pipeline, wanted.names) from error

    async def _run(self, made: BusRequest, request: Request) -> bool:
        stall_s = self._route.options.video_stall_timeout_s
        reading = asyncio.create_task(self._read(made))
        sending = asyncio.create_task(self._send_all(made, request))
        try:
            async with asyncio.timeout(stall_s) as self._stall:
                await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            problem = Problem(504, f"nothing was made, sent or pinged in time (allowed: {stall_s:g} s)")
            await self._send(_error(problem, self._id))
            return True
        finally:
            reading.cancel()
            sending.cancel()
            await asyncio.gather(reading, sending, return_exceptions=True)
        if sending.cancelled():
            return reading.result()
        sending.result()
        return False

    def _progress(self) -> None:
        """Something went on: the session has its whole patience again."""
        stall = self._stall
        if stall is not None and not stall.expired():
            now = asyncio.get_running_loop().time()
            stall.reschedule(now + self._route.options.video_stall_timeout_s)

    # --- what the client says ---------------------------------------------------------------------------------

    async def _read(self, made: BusRequest) -> bool:
        """Take messages until the client wants no more; return True then.

        Raises:
            _Gone: it has closed.
        """
        while True:
            received = await self._socket.receive()
            try:
                message = messages.read_object(_text(received, messages.MAX_CONTROL_BYTES))
                match message["type"]:
                    case "session.ping":
                        self._progress()
                        await self._send({"type": "session.pong"})
                    case "session.stop":
                        return True
                    case "session.interaction":
                        await self._interact(made, messages.read_interaction(message))
                    case kind:
                        raise refusal("type", kind, ", ".join(messages.CONTROLS))
            except (Problem, BadInput) as error:
                await self._send(_error(to_problem(error), self._id))

    async def _interact(self, made: BusRequest, interaction: messages.Interaction) -> None:
        """Pass an interaction on; its id may not come again unless it is refused."""
        event_id = interaction.event_id or f"event-{secrets.token_hex(8)}"
        if event_id in self._event_ids:
            problem = Problem(409, f"interaction.event_id: {event_id!r} came before (allowed: a new one)")
            await self._send(_error(problem, self._id, event_id, "event_id_conflict"))
            return
        try:
            if len(self._event_ids) >= messages.MAX_EVENTS:
                raise Problem(429, f"interaction: more than {messages.MAX_EVENTS} came")
            if not self._is_interactive:
                raise Problem(400, "interaction: the model takes none (allowed: none)")
            self._event_ids.add(event_id)
            await made.send(INTERACTIONS, Json(msgspec.structs.asdict(interaction) | {"event_id": event_id}))
        except (Problem, BadInput) as error:
            self._event_ids.discard(event_id)
            await self._send(_error(to_problem(error), self._id, event_id, "interaction_failed"))
            return
        await self._send({"type": "session.interaction.queued", "request_id": self._id, "event_id": event_id})

    # --- what the stages make ---------------------------------------------------------------------------------

    async def _send_all(self, made: BusRequest, request: Request) -> None:
        pool = self._route.pool
        fragments = Mp4Fragments(pool.converter, request.wanted.settings)
        async for event in made:
            self._progress()
            if not isinstance(event, Item):
                continue
            match event.payload:
                case Video() as video:
                    for piece in frame_slices(video):
                        await self._send_fragments(fragments.feed_blocking, piece, index=self._num_generated)
                    self._num_generated += 1
                case Json(value=value) if event.port == INTERACTIONS:
                    await self._on_told(value)
                case _:
                    pass  # how far it is shows by what is sent
        await self._send_fragments(fragments.finish_blocking, index=None)

    async def _on_told(self, value: Any) -> None:
        """Take what a stage says of interactions."""
        match value:
            case {"refused": str(event_id), "message": str(message)}:
                self._event_ids.discard(event_id)
                problem = Problem(400, f"interaction.{message}")
                await self._send(_error(problem, self._id, event_id, "interaction_failed"))
            case {"chunk": int(chunk), "started": list(), "active": list(), "completed": list()}:
                # Ports overtake each other: what comes after its chunk is told with the next one.
                place = self._happening.setdefault(max(chunk, self._num_generated), dict.fromkeys(_MOMENTS, ()))
                for moment in _MOMENTS:
                    place[moment] = tuple(dict.fromkeys((*place[moment], *value[moment])))
            case _:
                allowed = f"chunk, {', '.join(_MOMENTS)}; refused, message"
                raise BadFrame(f"{INTERACTIONS}: another object came (allowed: {allowed})")

    async def _send_fragments(self, make: Callable[..., Iterator[Fragment]], *args: Any, index: int | None) -> None:
        try:
            made = await self._route.pool.run(lambda: list(make(*args)))
        except (ValueError, OverflowError) as error:
            raise BadFrame(f"video: {error}") from error
        for fragment in made:
            happening = {} if index is None else self._happening.pop(index, {})
            metadata = {
                "type": "video.chunk_metadata",
                "request_id": self._id,
                "kind": "media" if index is not None else "trailer",
                "num_frames": fragment.num_frames,
                "byte_length": len(fragment.data),
                "generation_chunk_index": index,
                "transport_chunk_index": self._num_chunks,
                **{f"{moment}_event_ids": happening.get(moment, ()) for moment in _MOMENTS},
            }
            self._num_chunks += 1
            await self._send(metadata, fragment.data)
            self._progress()

    async def _send(self, event: dict[str, Any], data: bytes | None = None) -> None:
        """Send an event, and the bytes that belong to it with nothing in between.

        Raises:
            ConnectionError: the client is gone, or took nothing in time.
        """
        try:
            async with asyncio.timeout(self._route.options.write_timeout_s), self._sending:
                await self._socket.send_str(msgspec.json.encode(event).decode())
                if data is not None:
                    await self._socket.send_bytes(data)
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None


def _text(received: WSMessage, max_bytes: int = messages.MAX_START_BYTES) -> str:
    """Return a message's text.

    Raises:
        _Gone: the client has closed.
        Problem: it is binary, or too long.
    """
    match received.type:
        case WSMsgType.TEXT:
            if len(received.data) > max_bytes:
                raise Problem(413, f"message: {len(received.data)} characters came (allowed: {max_bytes})")
            return received.data
        case WSMsgType.BINARY:
            raise Problem(400, "message: binary came (allowed: JSON as text)")
        case _:
            raise _Gone


def _error(problem: Problem, request_id: str, event_id: str = "", code: str = "") -> dict[str, Any]:
    found = {"type": "error", "message": problem.message, "request_id": request_id, **problem.document}
    return found | ({"code": code} if code else {}) | ({"event_id": event_id} if event_id else {})
