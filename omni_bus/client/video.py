"""``WS /v1/realtime/video``: a video that is watched while it is made.

::

    async with connect_video(url, "a lake at dawn", {"size": "640x384", "num_frames": 96}) as video:
        async for event in video:
            match event:
                case VideoChunk():
                    player.write(event.data)
                case VideoDone():
                    break
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from msgspec import Struct

from omni_bus.client.decoding import EventDecoder, text_of
from omni_bus.client.failures import ConnectFailed, ConnectionLost, EventRefused
from omni_bus.client.socket import PATIENCE, address, open_socket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from omni_bus.client.socket import EventSocket, Patience

PATH = "/v1/realtime/video"


class VideoEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all are."""

    request_id: str = ""


class VideoStart(VideoEvent, frozen=True, kw_only=True, tag="video.start"):
    """The video is being made; `config` is what it was asked for with."""

    format: str = ""
    config: dict[str, Any] = {}


class ChunkMetadata(VideoEvent, frozen=True, kw_only=True, tag="video.chunk_metadata"):
    """What is known of a `VideoChunk`."""

    kind: str = "media"
    num_frames: int = 0
    byte_length: int = 0
    generation_chunk_index: int | None = None
    transport_chunk_index: int = 0
    started_event_ids: tuple[str, ...] = ()
    active_event_ids: tuple[str, ...] = ()
    completed_event_ids: tuple[str, ...] = ()


class VideoChunk(VideoEvent, frozen=True, kw_only=True):
    """A fragment of an MP4, which a player may have once it has those before; the first begins with the head."""

    data: bytes
    metadata: ChunkMetadata


class InteractionQueued(VideoEvent, frozen=True, kw_only=True, tag="session.interaction.queued"):
    """An interaction will be seen; chunks tell when."""

    event_id: str = ""


class VideoPong(VideoEvent, frozen=True, kw_only=True, tag="session.pong"):
    """The answer to a ping."""


class VideoDone(VideoEvent, frozen=True, kw_only=True, tag="session.done"):
    """The last event; `stopped` before the video's end."""

    chunks: int = 0
    stopped: bool = False


class VideoError(VideoEvent, frozen=True, kw_only=True, tag="error"):
    """A message was not honoured, or the video can't go on, which ends the connection."""

    message: str = ""
    code: str | int | None = None
    event_id: str | None = None
    error: dict[str, Any] = {}

    @property
    def refusal(self) -> EventRefused:
        """The exception that it stands for."""
        code = None if self.code is None else str(self.code)
        return EventRefused(self.message, code=code, param=self.error.get("param"), event_id=self.event_id)


class UnknownVideoEvent(VideoEvent, frozen=True, kw_only=True):
    """An event that this client does not know."""

    kind: str
    fields: Mapping[str, Any]
    problem: str
    """Why it is not one of the others."""


_Tagged: TypeAlias = VideoStart | ChunkMetadata | InteractionQueued | VideoPong | VideoDone | VideoError
AnyVideoEvent: TypeAlias = _Tagged | VideoChunk | UnknownVideoEvent

E = TypeVar("E", bound=VideoEvent)


def _unknown(fields: Mapping[str, Any], problem: str) -> UnknownVideoEvent:
    return UnknownVideoEvent(kind=text_of(fields, "type"), fields=fields, problem=problem)


VIDEO_EVENTS: EventDecoder[_Tagged, UnknownVideoEvent] = EventDecoder(_Tagged, _unknown)


class LiveVideo:
    """A connection; see `connect_video`. Iterate over it in one task; any task may send.

    Iteration ends when the server closes as it should, and raises `ConnectionLost` otherwise, as do the methods that
    send.
    """

    def __init__(self, socket: EventSocket) -> None:
        self._socket = socket
        self._metadata = ChunkMetadata()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyVideoEvent:
        while True:
            data = await self._socket.receive()
            if data is None:
                raise StopAsyncIteration
            if isinstance(data, bytes):
                metadata = self._metadata
                return VideoChunk(request_id=metadata.request_id, data=data, metadata=metadata)
            event = VIDEO_EVENTS.decode(data)
            if not isinstance(event, ChunkMetadata):
                return event
            self._metadata = event  # its bytes come next

    async def until(self, *kinds: type[E]) -> E:
        """Return the next event of one of these types; those before it are dropped.

        Raises:
            EventRefused: a `VideoError` came, and was not asked for.
            ConnectionLost: none came any more.
        """
        async for event in self:
            if isinstance(event, kinds):
                return event
            if isinstance(event, VideoError):
                raise event.refusal
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConnectionLost(f"the stream ended without {names}", close_code=1000)

    async def send(self, kind: str, **fields: Any) -> None:
        """Send any message; waits while the server takes nothing."""
        await self._socket.send({"type": kind, **fields})

    async def interact(self, prompt: str, *, event_id: str | None = None, transition_chunks: int = 0) -> None:
        """Let something happen in the video, where the model can; answered with `InteractionQueued`.

        Args:
            prompt: what.
            event_id: its name in the metadata of chunks; none twice.
            transition_chunks: over how many chunks it sets in.
        """
        named = {} if event_id is None else {"event_id": event_id}
        event = {"event": {"prompt": prompt}, "transition_chunks": transition_chunks, **named}
        await self.send("session.interaction", interaction=event)

    async def ping(self) -> None:
        """Say that the session is wanted although nothing is made for long; answered with `VideoPong`."""
        await self.send("session.ping")

    async def stop(self) -> None:
        """End the video before its end; `VideoDone` comes."""
        await self.send("session.stop")

    async def close(self) -> None:
        """Leave; what is being made is given up. Harmless when closed."""
        await self._socket.close()


@asynccontextmanager
async def connect_video(
    url: str,
    prompt: str,
    config: Mapping[str, Any] | None = None,
    *,
    api_key: str | None = None,
    patience: Patience = PATIENCE,
) -> AsyncGenerator[LiveVideo]:
    """Connect and begin; the connection is closed when the block is left.

    Args:
        url: of the server, ``http://HOST:PORT``, or of its WebSocket.
        prompt: what the video shows.
        config: other fields of ``POST /v1/videos`` (``model``, ``size``, ``num_frames``, ``seed``, …).
        api_key: sent as a bearer token.
        patience: how long to wait for the server; the video begins once it is its turn.

    Raises:
        ConnectFailed: nobody answers there, or the video did not begin in time.
        EventRefused: the server does not make this video.
        BadInput: `url` or `api_key` can't be one.
    """
    video = LiveVideo(await open_socket(address(url, PATH), api_key, patience))
    try:
        await video.send("session.start", **{**(config or {}), "prompt": prompt})
        try:
            async with asyncio.timeout(patience.open_s):
                await video.until(VideoStart)
        except TimeoutError:
            raise ConnectFailed(f"{url}: no event came within {patience.open_s:g} s") from None
        yield video
    finally:
        await video.close()
