"""OpenPI's sockets: ``WS /v1/realtime/robot/openpi``, and ``/`` for the stock client, which knows a host and a port.

Each socket is one request on the bus. The server speaks first, with the policy's metadata; from then on exactly one
frame answers each of the client's.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from gateways import websockets
from gateways.http import terms_of
from gateways.openai_models import ACTIONS, OBSERVATION, can_act
from gateways.problems import to_problem
from gateways.robot import messages
from gateways.robot.sessions import Sessions
from omni_bus.client import Item
from omni_bus.errors import BadInput, DeadlineExceeded, OmniBusError, Unavailable, unknown_name
from omni_bus.gateway import STOPPING
from omni_bus.media.numpy_frames import MAX_FRAME_BYTES, TooManyValues, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import WSMessage

    from gateways.http import Terms
    from omni_bus.client import BusClient, Request
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool
    from omni_bus.wire.payloads import Payload, Record

PATH, ROOT = "/v1/realtime/robot/openpi", "/"

ROOM_BYTES = 2 * 1024 * 1024
"""Beyond the limit of a message: what is a little too long is answered, what is longer closes the socket (1009)."""

MAX_MOVES = 4
"""Replicas that let go of a socket one after the other before one message is answered: more are not asked."""

LIGHT_VALUES = 2000
"""A message with more values is read on a thread."""


class RobotRouteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway's options say of these sockets."""

    idle_timeout_s: float
    is_multi_session: bool
    write_timeout_s: float


class Profile(msgspec.Struct, frozen=True):
    """How a socket's answers look: by its path, and by ``?errors=``, ``?wrap=``, ``?timing=``."""

    errors: Literal["msgpack", "text"]
    is_bare: bool
    has_timing: bool
    closes_on_error: bool
    idle_timeout_s: float | None


class RobotRoute:
    """Serves the sockets.

    Args:
        client: the connection to the bus.
        models: the gateway's pipelines by every name; those that act are served.
        draining: set once the server is about to stop.
        pool: threads for messages that take long to read.
        options: how.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        draining: asyncio.Event,
        pool: EncodingPool,
        options: RobotRouteOptions,
    ) -> None:
        self.client = client
        self.draining = draining
        self.options = options
        self._models = {name: pipeline for name, pipeline in models.items() if can_act(pipeline)}
        self._pool = pool

    @property
    def is_served(self) -> bool:
        """Whether any pipeline acts."""
        return bool(self._models)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve a socket to its end.

        Raises:
            Problem, BadInput: refused before the upgrade.
        """
        terms = terms_of(request)
        profile = profile_of(request, self.options.idle_timeout_s)
        params = params_of(request)
        pipeline = self._pipeline_of(request.query.get("model"))
        socket = await websockets.upgrade(request, max_message_bytes=MAX_FRAME_BYTES + ROOM_BYTES, may_compress=False)
        link = _Link(self.client, pipeline, terms, params)
        try:
            await _Conversation(self, socket, link, profile).hold()
        finally:
            link.close()
        return socket

    def _pipeline_of(self, name: str | None) -> Pipeline:
        pipelines = {pipeline.name: pipeline for pipeline in self._models.values()}
        if name is None and len(pipelines) == 1:
            return next(iter(pipelines.values()))
        if name is None:
            known = ", ".join(sorted(self._models)) or "there is none"
            raise BadInput(f"model: none is named (allowed in the address, as ?model=NAME: {known})", field="model")
        if name not in self._models:
            raise unknown_name("model", name, self._models, field="model")
        return self._models[name]

    async def read(self, frame: bytes) -> Record:
        """Read a message; on a thread where it would hold up other sockets.

        Raises:
            BadInput: it can't be read.
        """
        try:
            return decode(frame, max_values=LIGHT_VALUES)
        except TooManyValues:
            return await self._pool.run(decode, frame)


def profile_of(request: web.Request, idle_timeout_s: float) -> Profile:
    """Return how a socket's answers look.

    Raises:
        BadInput: a query that is not known, or with another value than allowed.
    """
    is_stock = request.path == ROOT
    query = request.query
    for name in query:
        if name not in ("errors", "wrap", "timing", "model", "deadline_ms"):
            raise unknown_name("query", name, ("errors", "wrap", "timing", "model", "deadline_ms"), field=name)
    errors = query.get("errors", "text" if is_stock else "msgpack")
    if errors not in ("msgpack", "text"):
        raise BadInput(f"errors: '{errors[:40]}' came (allowed: msgpack, text)", field="errors")
    return Profile(
        errors=errors,
        is_bare=not _flag(query, "wrap", default=True),
        has_timing=_flag(query, "timing", default=is_stock),
        closes_on_error=is_stock and errors == "text",
        idle_timeout_s=None if is_stock or not idle_timeout_s else idle_timeout_s,
    )


def _flag(query: Any, name: str, *, default: bool) -> bool:
    value = query.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise BadInput(f"{name}: '{value[:40]}' came (allowed: 0, 1)", field=name)
    return value == "1"


def params_of(request: web.Request) -> dict[str, Any]:
    """Return what the address sets for its policy.

    Raises:
        BadInput: a deadline that is none.
    """
    value = request.query.get("deadline_ms")
    if value is None:
        return {}
    try:
        deadline_ms = float(value)
    except ValueError:
        deadline_ms = 0.0
    if not 1 <= deadline_ms <= 3_600_000:
        raise BadInput(f"deadline_ms: '{value[:40]}' came (allowed: 1 to 3600000)", field="deadline_ms")
    return {"deadline_s": deadline_ms / 1e3}


class _Link:
    """A socket's request on the bus, made anew where its replica was lost or is to go."""

    def __init__(self, client: BusClient, pipeline: Pipeline, terms: Terms, params: dict[str, Any]) -> None:
        self._client = client
        self._pipeline = pipeline
        self._terms = terms
        stage = next(edge.target for edge in pipeline.edges if edge.source_port == OBSERVATION)
        self._params = {stage: params} if params else {}
        self._call: Request | None = None
        self.deadline_s: float | None = None
        """Of each message, as the policy's stage has told."""

    @property
    def is_open(self) -> bool:
        """There is a request that has not ended, so far as is known."""
        return self._call is not None and not self._call.is_over

    async def tell(self, record: Record) -> None:
        """Send what isn't answered.

        Raises:
            OmniBusError: the request has ended so.
        """
        assert self._call is not None
        await self._call.send(OBSERVATION, record)

    async def ask(self, record_of: Callable[[], Record], on_new: Callable[[], None]) -> Payload:
        """Send a message and wait for its answer. A replica that lets go of the request has not taken it: another does.

        Args:
            record_of: returns the message, asked anew for each replica.
            on_new: called before that where the replica knows nothing of the socket yet.

        Raises:
            OmniBusError: there is no room or no policy, or the request has ended so.
        """
        for _ in range(MAX_MOVES):
            if not self.is_open:
                self._call = await self._submitted()
                on_new()
            assert self._call is not None
            await self.tell(record_of())
            async for event in self._call:
                if isinstance(event, Item):
                    return event.payload
        raise Unavailable("the policy's replicas let go of every connection", is_retry_safe=True)

    async def _submitted(self) -> Request:
        former = "" if self._call is None else self._call.id
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._client.submit(
                    self._pipeline.name, [ACTIONS], self._params, former=former, **self._terms
                )
        except TimeoutError:
            what = f"no policy was to be had within {self.deadline_s:.3f} s, hold or stop the robot"
            raise DeadlineExceeded(f"the policy missed its deadline: {what}") from None

    def close(self) -> None:
        """End the request; harmless without one."""
        if self._call is not None and not self._call.is_over:
            self._call.cancel("the client left")
        self._call = None


class _Conversation:
    """One socket."""

    def __init__(self, route: RobotRoute, socket: web.WebSocketResponse, link: _Link, profile: Profile) -> None:
        self._route = route
        self._socket = socket
        self._link = link
        self._profile = profile
        self._sessions = Sessions(is_multi=route.options.is_multi_session)
        self._total_ms: float | None = None

    async def hold(self) -> None:
        """Serve the client until it leaves, is idle too long, or the server stops.

        Raises:
            Problem, OmniBusError: why it ends otherwise.
        """
        # A message is always waited for, also while the policy runs or a place is waited for: pings are answered by who
        # waits. Of a client that sends ahead, two messages are held, then its socket is read no further.
        inbox: asyncio.Queue[WSMessage | None] = asyncio.Queue(1)
        tasks = [asyncio.create_task(self._read(inbox)), asyncio.create_task(self._stop(inbox))]
        try:
            if not await self._greet(*tasks):
                return
            while (message := await self._next(inbox)) is not None:
                if not await self._answer(message):
                    return
        except TimeoutError:
            await self._hush(tasks[0])
            reason = f"idle: no message within {self._profile.idle_timeout_s:g} s (setting idle_timeout_s)"
            await self._socket.close(code=WSCloseCode.OK, message=reason.encode())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _greet(self, reading: asyncio.Task[None], stopping: asyncio.Task[None]) -> bool:
        """Send the metadata once there is a place; returns False where there is none, and the socket is closed.

        A client that leaves, or a server that stops, is not kept waiting: the inbox says so.
        """
        opening = asyncio.create_task(self._link.ask(lambda: messages.OPEN, self._sessions.restart))
        try:
            await asyncio.wait([opening, reading, stopping], return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                metadata, self._link.deadline_s = messages.welcome_of(opening.result())
                await self._send(metadata)
        except OmniBusError as error:
            await self._send(messages.UNAVAILABLE)
            await self._hush(reading)
            await websockets.close(self._socket, to_problem(error))
            return False
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        return True

    @staticmethod
    async def _hush(reading: asyncio.Task[None]) -> None:
        """Take in no more: nobody else receives while a socket is closed."""
        reading.cancel()
        await asyncio.wait([reading])

    async def _read(self, inbox: asyncio.Queue[WSMessage | None]) -> None:
        """Take in messages, the last of which says that the client has left."""
        message = None
        while message is None or message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
            message = await self._socket.receive()
            await inbox.put(message)

    async def _stop(self, inbox: asyncio.Queue[WSMessage | None]) -> None:
        """Take in the end of the server."""
        await self._route.draining.wait()
        await inbox.put(None)

    async def _next(self, inbox: asyncio.Queue[WSMessage | None]) -> WSMessage | None:
        """Return the client's next message; None once it has left.

        Raises:
            TimeoutError: it is idle.
            Unavailable: the server stops.
        """
        async with asyncio.timeout(self._profile.idle_timeout_s):
            message = await inbox.get()
        if message is None:
            raise Unavailable(STOPPING)
        return message if message.type in (WSMsgType.BINARY, WSMsgType.TEXT) else None

    async def _answer(self, message: WSMessage) -> bool:
        """Answer with exactly one frame; returns whether the socket goes on."""
        began_at = perf_counter()
        try:
            frame = await self._frame(message, began_at)
        except OmniBusError as error:
            if self._profile.errors == "msgpack":
                await self._send(messages.error_frame(error))
                return True
            await self._send(messages.error_text(error))
            if self._profile.closes_on_error:
                await self._socket.close(code=WSCloseCode.INTERNAL_ERROR, message=messages.message_of(error).encode())
            return not self._profile.closes_on_error
        await self._send(frame)
        self._total_ms = (perf_counter() - began_at) * 1e3
        return True

    async def _frame(self, message: WSMessage, began_at: float) -> bytes:
        """Return the answer to a message.

        Raises:
            OmniBusError: what is wrong with it, or with the policy.
        """
        if message.type is not WSMsgType.BINARY or not message.data:
            raise BadInput("message: text or nothing came (allowed: MessagePack in a binary frame)", field="message")
        received = await self._route.read(message.data)
        if messages.is_reset(received):
            self._sessions.reset()
            if self._link.is_open:
                await self._link.tell(messages.RESET)
            return messages.RESET_ANSWER

        def observation() -> Record:
            return messages.observation_of(received, self._sessions, perf_counter() - began_at)

        answer = messages.answer_of(await self._link.ask(observation, self._sessions.restart))
        timing = self._timing(answer.timing, began_at) if self._profile.has_timing else None
        return messages.actions_frame(answer, is_bare=self._profile.is_bare, server_timing=timing)

    def _timing(self, stage: dict[str, Any], began_at: float) -> dict[str, Any]:
        timing = {"infer_ms": (perf_counter() - began_at) * 1e3, **stage}
        if self._total_ms is not None:
            timing["prev_total_ms"] = self._total_ms
        return timing

    async def _send(self, data: str | bytes) -> None:
        try:
            async with asyncio.timeout(self._route.options.write_timeout_s):
                await (self._socket.send_str(data) if isinstance(data, str) else self._socket.send_bytes(data))
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None
