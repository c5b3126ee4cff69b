"""``WS /v1/audio/speech/stream``: text in as it is written, sound out, many utterances on one connection.

::

    async with connect_speech_stream(url, {"response_format": "pcm", "stream_audio": True}) as speech:
        await speech.write("Good morning. ")
        await speech.flush()
        async for event in speech:
            match event:
                case Sound():
                    play(event.data)
                case UtteranceDone():
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

PATH = "/v1/audio/speech/stream"


class SpeechEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all are."""


class Configured(SpeechEvent, frozen=True, kw_only=True, tag="session.configured"):
    """A configuration was taken."""

    session_id: str
    response_format: str
    stream_audio: bool = False
    split_granularity: str = "none"


class AudioStart(SpeechEvent, frozen=True, kw_only=True, tag="audio.start"):
    """A sentence's sound follows; `sentence_index` counts within its utterance."""

    sentence_text: str = ""
    utterance_index: int = 0
    sentence_index: int = 0
    format: str = ""
    sample_rate: int | None = None


class Sound(SpeechEvent, frozen=True, kw_only=True):
    """A piece of a sentence, or a whole file, in the format of its `AudioStart`."""

    data: bytes
    start: AudioStart


class AudioDone(SpeechEvent, frozen=True, kw_only=True, tag="audio.done"):
    """A sentence is over; with `error` or `cancelled` before its end."""

    utterance_index: int = 0
    sentence_index: int = 0
    total_bytes: int = 0
    error: bool = False
    cancelled: bool = False


class SegmentCommitted(SpeechEvent, frozen=True, kw_only=True, tag="input.committed"):
    """All that was written before `SpeechStream.commit` was spoken."""

    segment_index: int
    segment_sentences: int
    total_sentences: int


class UtteranceDone(SpeechEvent, frozen=True, kw_only=True, tag="session.done"):
    """An utterance was spoken; the connection is good for another."""

    utterance_index: int = 0
    total_sentences: int = 0
    cancelled: bool = False


class SpeechErrorBody(Struct, frozen=True, kw_only=True):
    """In OpenAI's shape."""

    message: str = ""
    type: str = ""
    param: str | None = None
    code: str | int | None = None


class SpeechError(SpeechEvent, frozen=True, kw_only=True, tag="error"):
    """A message was not honoured, or a sentence could not be spoken; the connection stays."""

    message: str = ""
    error: SpeechErrorBody | str | None = None
    utterance_index: int | None = None
    sentence_index: int | None = None

    @property
    def refusal(self) -> EventRefused:
        """The exception that it stands for."""
        if isinstance(self.error, SpeechErrorBody):
            code = None if self.error.code is None else str(self.error.code)
            return EventRefused(self.error.message or self.message, code=code, param=self.error.param)
        return EventRefused(self.message or self.error or "error", code=None)


class UnknownSpeechEvent(SpeechEvent, frozen=True, kw_only=True):
    """An event that this client does not know."""

    kind: str
    fields: Mapping[str, Any]
    problem: str
    """Why it is not one of the others."""


_Tagged: TypeAlias = Configured | AudioStart | AudioDone | SegmentCommitted | UtteranceDone | SpeechError
AnySpeechEvent: TypeAlias = _Tagged | Sound | UnknownSpeechEvent

E = TypeVar("E", bound=SpeechEvent)


def _unknown(fields: Mapping[str, Any], problem: str) -> UnknownSpeechEvent:
    return UnknownSpeechEvent(kind=text_of(fields, "type"), fields=fields, problem=problem)


SPEECH_EVENTS: EventDecoder[_Tagged, UnknownSpeechEvent] = EventDecoder(_Tagged, _unknown)


class SpeechStream:
    """A connection; see `connect_speech_stream`. Iterate over it in one task; any task may write.

    Iteration ends when the server closes as it should, and raises `ConnectionLost` otherwise, as do the methods that
    send.
    """

    def __init__(self, socket: EventSocket) -> None:
        self._socket = socket
        self._start = AudioStart()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnySpeechEvent:
        data = await self._socket.receive()
        if data is None:
            raise StopAsyncIteration
        if isinstance(data, bytes):
            return Sound(data=data, start=self._start)
        event = SPEECH_EVENTS.decode(data)
        if isinstance(event, AudioStart):
            self._start = event
        return event

    async def until(self, *kinds: type[E]) -> E:
        """Return the next event of one of these types; those before it are dropped.

        Raises:
            EventRefused: a `SpeechError` came, and was not asked for.
            ConnectionLost: none came any more.
        """
        while True:
            event = await self._expected(kinds)
            if isinstance(event, kinds):
                return event

    async def through(self, *kinds: type[SpeechEvent]) -> AsyncGenerator[AnySpeechEvent]:
        """Iterate over the events up to the next one of these types, and that one; raises as `until` does."""
        while True:
            event = await self._expected(kinds)
            yield event
            if isinstance(event, kinds):
                return

    async def _expected(self, kinds: tuple[type[SpeechEvent], ...]) -> AnySpeechEvent:
        async for event in self:
            if isinstance(event, SpeechError) and not isinstance(event, kinds):
                raise event.refusal
            return event
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConnectionLost(f"the stream ended without {names}", close_code=1000)

    async def send(self, kind: str, **fields: Any) -> None:
        """Send any message; waits while the server takes nothing."""
        await self._socket.send({"type": kind, **fields})

    async def configure(self, config: Mapping[str, Any]) -> None:
        """Speak from now on like this, between utterances; answered with `Configured`."""
        await self.send("session.config", **config)

    async def write(self, text: str) -> None:
        """Write more of an utterance."""
        await self.send("input.text", text=text)

    async def flush(self) -> None:
        """End the utterance: what was written is spoken to its end, then `UtteranceDone` comes."""
        await self.send("input.done")

    async def commit(self) -> None:
        """Speak what was written now, within the utterance; answered with `SegmentCommitted`."""
        await self.send("input.commit")

    async def cancel(self) -> None:
        """Stop what is spoken and forget what waits; `UtteranceDone` comes, cancelled."""
        await self.send("input.cancel")

    async def close(self) -> None:
        """Leave; what is being spoken is stopped. Harmless when closed."""
        await self._socket.close()


@asynccontextmanager
async def connect_speech_stream(
    url: str,
    config: Mapping[str, Any] | None = None,
    *,
    api_key: str | None = None,
    patience: Patience = PATIENCE,
) -> AsyncGenerator[SpeechStream]:
    """Connect and configure; the connection is closed when the block is left.

    Args:
        url: of the server, ``http://HOST:PORT``, or of its WebSocket.
        config: fields of ``POST /v1/audio/speech`` (``voice``, ``response_format``, …), and ``stream_audio``,
            ``split_granularity``.
        api_key: sent as a bearer token.
        patience: how long to wait for the server.

    Raises:
        ConnectFailed: nobody answers there.
        EventRefused: the server does not take the configuration.
        BadInput: `url` or `api_key` can't be one.
    """
    speech = SpeechStream(await open_socket(address(url, PATH), api_key, patience))
    try:
        await speech.configure(config or {})
        try:
            async with asyncio.timeout(patience.open_s):
                await speech.until(Configured)
        except TimeoutError:
            raise ConnectFailed(f"{url}: no event came within {patience.open_s:g} s") from None
        yield speech
    finally:
        await speech.close()
