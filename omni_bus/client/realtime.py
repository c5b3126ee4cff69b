"""``WS /v1/realtime``: a live conversation in OpenAI's GA events, with our server or another one.

::

    async with connect_realtime("http://127.0.0.1:8000", model="smollm2-live") as live:
        await live.append(sound)
        async for event in live:
            match event:
                case AudioDelta():
                    play(event.delta)
                case ErrorEvent():
                    print(event.body.message)
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from omni_bus.client.failures import ConnectFailed, ConnectionLost, EventRefused
from omni_bus.client.realtime_events import (
    EVENTS,
    ErrorEvent,
    RealtimeEvent,
    Session,
    SessionCreated,
    SessionResumed,
    SessionUpdated,
    Unknown,
)
from omni_bus.client.socket import PATIENCE, address, open_socket
from omni_bus.core.session.server_events import ServerEvent
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from omni_bus.client.realtime_events import Format
    from omni_bus.client.socket import EventSocket, Patience

    Sound: TypeAlias = bytes | bytearray | memoryview | NDArray[np.int16] | NDArray[np.float32]

PATH = "/v1/realtime"

PIECE_BYTES = 256 * 1024
"""Longer sound is appended in pieces, which servers take as it comes; a multiple of every sample's size."""

E = TypeVar("E", bound=ServerEvent)


class Realtime:
    """A conversation; see `connect_realtime`. Iterate over it in one task; any task may speak.

    Iteration ends when the server closes as it should, and raises `ConnectionLost` otherwise. Methods that send return
    the ``event_id`` by which an `ErrorEvent` names what it refuses, and raise `ConnectionLost` when there is nobody to
    send it to.
    """

    def __init__(self, socket: EventSocket) -> None:
        self.session = Session()
        """As the server last described it."""
        self._socket = socket
        self._num_sent = 0

    # --- listening --------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RealtimeEvent | Unknown:
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, SessionCreated | SessionUpdated | SessionResumed):
            self.session = event.session
        return event

    async def until(self, *kinds: type[E]) -> E:
        """Return the next event of one of these types; those before it are dropped.

        Raises:
            EventRefused: an `ErrorEvent` came, and was not asked for.
            ConnectionLost: none came any more.
        """
        while True:
            event = await self._expected(kinds)
            if isinstance(event, kinds):
                return event

    async def through(self, *kinds: type[ServerEvent]) -> AsyncGenerator[RealtimeEvent | Unknown]:
        """Iterate over the events up to the next one of these types, and that one; raises as `until` does."""
        while True:
            event = await self._expected(kinds)
            yield event
            if isinstance(event, kinds):
                return

    async def _expected(self, kinds: tuple[type[ServerEvent], ...]) -> RealtimeEvent | Unknown:
        async for event in self:
            if isinstance(event, ErrorEvent) and not isinstance(event, kinds):
                raise refusal_of(event)
            return event
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConnectionLost(f"the conversation ended without {names}", close_code=1000)

    async def _next(self) -> RealtimeEvent | Unknown | None:
        data = await self._socket.receive()
        return None if data is None else EVENTS.decode(data)

    # --- speaking ---------------------------------------------------------------------------------------------

    async def send(self, kind: str, **fields: Any) -> str:
        """Send any event; one without an ``event_id`` gets one. Waits while the server takes nothing."""
        self._num_sent += 1
        event = {"type": kind, "event_id": f"client_{self._num_sent}", **fields}
        await self._transmit(event)
        return event["event_id"]

    async def _transmit(self, event: Mapping[str, Any]) -> None:
        await self._socket.send(event)

    async def update(self, session: Mapping[str, Any]) -> str:
        """Change the session's configuration: a merge patch in OpenAI's shape."""
        return await self.send("session.update", session={"type": self.session.type, **session})

    async def append(self, sound: Sound, **fields: Any) -> str:
        """Let the user speak: sound in the session's input format, as bytes or as an array of samples of one channel.

        Raises:
            BadInput: the array is not of that format; resampling is the caller's.
        """
        data = sound_bytes(sound, self.session.input_format)
        event_id = ""
        for start in range(0, len(data), PIECE_BYTES):
            piece = base64.b64encode(data[start : start + PIECE_BYTES]).decode()
            event_id = await self.send("input_audio_buffer.append", audio=piece, **fields)
        return event_id

    async def commit(self, **fields: Any) -> str:
        """End the user's turn, where the server does not find its end."""
        return await self.send("input_audio_buffer.commit", **fields)

    async def clear(self) -> str:
        """Forget what was appended and not committed."""
        return await self.send("input_audio_buffer.clear")

    async def write(self, text: str, role: str = "user") -> str:
        """Say something in writing, without asking for an answer."""
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        return await self.send("conversation.item.create", item=item)

    async def respond(self, **response: Any) -> str:
        """Ask for an answer, with these differences from the session."""
        return await self.send("response.create", response=response)

    async def ask(self, text: str, **response: Any) -> str:
        """Say something in writing and ask for an answer."""
        await self.write(text)
        return await self.respond(**response)

    async def cancel(self, response_id: str | None = None) -> str:
        """Stop an answer; without an id the conversation's own."""
        return await self.send("response.cancel", **({} if response_id is None else {"response_id": response_id}))

    async def truncate(self, item_id: str, played_ms: int, *, content_index: int = 0) -> str:
        """Tell that only the beginning of an answer was heard; see `PlaybackClock.cut`."""
        fields = {"item_id": item_id, "content_index": content_index, "audio_end_ms": played_ms}
        return await self.send("conversation.item.truncate", **fields)

    async def retrieve(self, item_id: str) -> str:
        """Ask for all of an item, its sound included: `ItemRetrieved`."""
        return await self.send("conversation.item.retrieve", item_id=item_id)

    async def delete(self, item_id: str) -> str:
        """Forget an item."""
        return await self.send("conversation.item.delete", item_id=item_id)

    async def give_output(self, call_id: str, output: str) -> str:
        """Tell what a function returned that the model called; `respond` lets it go on."""
        item = {"type": "function_call_output", "call_id": call_id, "output": output}
        return await self.send("conversation.item.create", item=item)

    async def close(self) -> None:
        """Leave; what was not received is dropped. Harmless when closed."""
        await self._socket.close()


@asynccontextmanager
async def connect_realtime(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    session: Mapping[str, Any] | None = None,
    patience: Patience = PATIENCE,
) -> AsyncGenerator[Realtime]:
    """Begin a conversation; it is over when the block is left.

    Args:
        url: of the server, ``http://HOST:PORT``, or of its WebSocket.
        model: the server's only one if None.
        api_key: sent as a bearer token.
        session: the first `Realtime.update`; its answer comes as an event.
        patience: how long to wait for the server.

    Raises:
        ConnectFailed: nobody answers there, or the server refuses.
        BadInput: `url` or `api_key` can't be one.
    """
    live = Realtime(await open_socket(address(url, PATH, model=model), api_key, patience))
    try:
        await begin(live, url, patience)
        if session is not None:
            await live.update(session)
        yield live
    finally:
        await live.close()


async def begin(live: Realtime, url: str, patience: Patience) -> SessionCreated:
    """Take the event that a session begins with.

    Raises:
        ConnectFailed: another came, or none in time.
    """
    try:
        async with asyncio.timeout(patience.open_s):
            event = await anext(live)
    except TimeoutError:
        raise ConnectFailed(f"{url}: no event came within {patience.open_s:g} s") from None
    except StopAsyncIteration:
        raise ConnectFailed(f"{url}: the server closed without an event") from None
    except ConnectionLost as error:
        raise ConnectFailed(f"{url}: {error.message}") from error
    match event:
        case SessionCreated():
            return event
        case ErrorEvent():
            refusal = refusal_of(event)
            raise ConnectFailed(refusal.message, code=refusal.code or "error", param=refusal.param)
        case Unknown():
            what = event.kind or "no event"
            raise ConnectFailed(f"{url}: {what} came ({event.problem}; allowed: session.created)")
        case _:
            raise ConnectFailed(f"{url}: {type(event).__name__} came (allowed: session.created)")


def refusal_of(event: ErrorEvent) -> EventRefused:
    """Return the exception that an error event stands for."""
    body = event.body
    code = None if body.code is None else str(body.code)
    return EventRefused(body.message or code or "error", code=code, param=body.param, event_id=body.event_id)


def sound_bytes(sound: Sound, form: Format) -> memoryview:
    """Return sound as a session takes it.

    Args:
        sound: bytes as they are, or an array: int16 for ``audio/pcm``, float32 in [-1, 1] for that and for
            ``audio/pcm_f32le``.
        form: the session's input format.

    Raises:
        BadInput: the array has another shape or type.
    """
    if isinstance(sound, bytes | bytearray | memoryview):
        return memoryview(bytes(sound))
    kind = (str(sound.dtype), form.type)
    if sound.ndim != 1 or kind not in _ARRAYS:
        allowed = " or ".join(name for name, taken in _ARRAYS if taken == form.type) or "bytes"
        raise BadInput(
            f"sound: {sound.dtype} of shape {sound.shape} came (allowed for {form.type}: one axis of {allowed})",
            field="sound",
        )
    if kind == ("float32", "audio/pcm"):
        sound = (sound.clip(-1, 1) * 32767).round().astype("<i2")
    return memoryview(sound.astype("<f4" if form.type == "audio/pcm_f32le" else "<i2", copy=False).tobytes())


_ARRAYS = (("int16", "audio/pcm"), ("float32", "audio/pcm"), ("float32", "audio/pcm_f32le"))
