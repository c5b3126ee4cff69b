"""``WS /v1/audio/speech/stream``: text in as it is written, sound out, many utterances on one socket.

Two tasks serve a socket. One reads: it checks messages and cuts text into units. The other works through what the first
one queued, in order, so that sentences and answers never mix. Reading goes on meanwhile, so a client that leaves is
noticed at once, and `input.cancel` counts at once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSMsgType

from gateways import websockets
from gateways.http import KEY_NAME, REQUEST_ID, log_failure, terms_of
from gateways.problems import Problem, to_problem
from gateways.speech_stream_messages import MAX_CONFIG_BYTES, Message, StreamConfig, read_config, read_message
from gateways.speech_units import Joiner, UnitSplitter
from omni_bus.errors import Unavailable
from omni_bus.gateway import STOPPING

if TYPE_CHECKING:
    from aiohttp import WSMessage, web

    from gateways.openai_speech import SpeechRoute
    from gateways.openai_speech_body import Speech
    from omni_bus.wire.payloads import Audio

PATH = "/v1/audio/speech/stream"

MAX_HELD_CHARS = 256 * 1024
"""Text that waits to be spoken, on one socket."""

MAX_QUEUED = 16
"""Answers and ends of utterances that wait for what is spoken before them, on one socket."""


class _Unit(msgspec.Struct, frozen=True):
    """Something to speak."""

    utterance: int
    index: int
    text: str
    config: StreamConfig


class _Say(msgspec.Struct):
    """An event for the client once all before it is done."""

    event: dict[str, Any]


class _Close:
    """The end of the session, once all before it is done."""


class _Fatal(Problem):
    """Ends the session."""


class SpeechStreamRoute:
    """The route's handler.

    Args:
        speech: speaks each unit.
        draining: set when the server is about to stop.
        config_timeout_s: a client may take so long to send its first configuration.
        idle_timeout_s: a client may say nothing for so long while nothing is spoken.
        write_timeout_s: a client may take nothing for so long.
        max_file_bytes: limit of a sentence's sound that is sent as one file.
    """

    def __init__(
        self,
        speech: SpeechRoute,
        draining: asyncio.Event,
        *,
        config_timeout_s: float,
        idle_timeout_s: float,
        write_timeout_s: float,
        max_file_bytes: int,
    ) -> None:
        self.speech = speech
        self.draining = draining
        self.config_timeout_s = config_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.write_timeout_s = write_timeout_s
        self.max_file_bytes = max_file_bytes

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one socket. When its client goes, this is cancelled, and with it what is being spoken."""
        terms_of(request)  # refused before the upgrade, with a status
        socket = await websockets.upgrade(request, max_message_bytes=MAX_CONFIG_BYTES, may_compress=False)
        await _Session(self, request, socket).serve()
        return socket


class _Session:
    """One socket."""

    def __init__(self, route: SpeechStreamRoute, request: web.Request, socket: web.WebSocketResponse) -> None:
        self.route = route
        self.request = request
        self._socket = socket
        self._id = f"speech-{secrets.token_hex(12)}"
        self._config: StreamConfig | None = None
        self._splitter = UnitSplitter("none")
        self._joiner = Joiner()
        self._utterance = 0
        self._num_units = 0
        self._num_segments = self._segment_start = 0
        self._is_open = False
        """Text came since the last utterance ended."""
        self._is_closing = False
        """The client said its last word; what comes after it is dropped."""
        self._queue: deque[_Unit | _Say | _Close] = deque()
        self._num_says = 0
        """Events in the queue."""
        self._reference: tuple[str | bytes | None, Audio | None] | None = None
        self._has_work = asyncio.Event()
        self._queued_chars = 0
        self._is_working = False
        self._patience: asyncio.Timeout | None = None
        self._speaking: asyncio.Timeout | None = None

    async def serve(self) -> None:
        """Read and work until the client closes.

        Raises:
            Problem: why the server ends the session.
        """
        stopping = asyncio.create_task(self.route.draining.wait())
        stopping.add_done_callback(lambda _: self._set_patience())
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._work())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    # --- reading ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while (received := await self._receive()) is not None:
                await self._take(received)
        except (Problem, Unavailable) as error:
            await self._send(_error(to_problem(error)))
            raise

    async def _take(self, received: WSMessage) -> None:
        if self._is_closing:
            return
        try:
            if received.type is not WSMsgType.TEXT:
                raise Problem(400, "message: binary came (allowed: JSON as text)")
            message = read_message(received.data)
            if self._config is None and message.kind not in ("session.config", "session.close"):
                raise Problem(400, f"type: '{message.kind}' came (allowed at first: session.config)", param="type")
            await self._on_message(message)
        except _Fatal:
            raise
        except Problem as problem:
            if self._config is None:
                raise
            self._say(_error(problem))

    async def _receive(self) -> WSMessage | None:
        """Return the next message; None when the client has closed."""
        try:
            async with asyncio.timeout(None) as self._patience:
                self._set_patience()
                received = await self._socket.receive()
        except TimeoutError:
            raise self._end_of_patience() from None
        finally:
            self._patience = None
        return received if received.type in (WSMsgType.TEXT, WSMsgType.BINARY) else None

    def _set_patience(self) -> None:
        """Give the client its time from now on; none is counted while something is spoken."""
        limit = self._patience
        if limit is None or limit.expired():
            return
        now = asyncio.get_running_loop().time()
        if self._is_working or self._queue:
            limit.reschedule(None)
        elif self.route.draining.is_set() and not self._is_open:
            limit.reschedule(now)
        else:
            allowed_s = self.route.config_timeout_s if self._config is None else self.route.idle_timeout_s
            limit.reschedule(now + allowed_s)

    def _end_of_patience(self) -> Problem | Unavailable:
        if self.route.draining.is_set() and not self._is_open:
            return Unavailable(STOPPING)
        what = "session.config" if self._config is None else "message"
        allowed_s = self.route.config_timeout_s if self._config is None else self.route.idle_timeout_s
        return Problem(408, f"{what}: none came in time (allowed: {allowed_s:g} s)")

    async def _on_message(self, message: Message) -> None:
        match message.kind:
            case "session.config":
                await self._on_config(message.fields)
            case "input.text":
                self._on_text(self._joiner.feed(message.fields["text"]))
            case "input.done":
                self._flush()
                self._end_utterance()
            case "input.commit":
                self._on_commit()
            case "input.cancel":
                self._on_cancel()
            case "session.close":
                self._is_closing = True
                self._put(_Close())

    async def _on_config(self, fields: dict[str, Any]) -> None:
        if self._is_open:
            raise Problem(400, "session.config: it came within an utterance (allowed: after input.done)")
        self._config = await read_config(fields, self.read)
        self._splitter = UnitSplitter(self._config.stream.split_granularity)
        answer = {"response_format": self._config.format} | msgspec.structs.asdict(self._config.stream)
        self._say({"type": "session.configured", "session_id": self._id} | answer)

    async def read(self, body: dict[str, Any]) -> Speech:
        """Check a body of a request to ``POST /v1/audio/speech``."""
        return await self.route.speech.read(body, self.request[KEY_NAME])

    async def read_reference(self, speech: Speech) -> Audio | None:
        """Return the sound of the voice to speak with, read once for all sentences that have it."""
        if self._reference is None or self._reference[0] != speech.reference:
            self._reference = (speech.reference, await self.route.speech.read_reference(speech))
        return self._reference[1]

    def _on_text(self, text: str) -> None:
        if not text:
            return
        held = self._queued_chars + self._splitter.num_chars + len(text)
        if held > MAX_HELD_CHARS:
            raise _Fatal(413, f"text: {held} characters would wait (allowed: {MAX_HELD_CHARS})", param="text")
        self._is_open = True
        self._queue_units(self._splitter.feed(text))

    def _queue_units(self, units: list[str]) -> None:
        assert self._config is not None
        for text in units:
            self._put(_Unit(self._utterance, self._num_units, text, self._config))
            self._queued_chars += len(text)
            self._num_units += 1

    def _flush(self) -> None:
        self._on_text(self._joiner.flush())
        self._queue_units(self._splitter.flush())

    def _end_utterance(self, *, is_cancelled: bool = False) -> None:
        event = {"type": "session.done", "utterance_index": self._utterance, "total_sentences": self._num_units}
        self._say(event | ({"cancelled": True} if is_cancelled else {}))
        self._utterance += 1
        self._num_units = self._num_segments = self._segment_start = 0
        self._is_open = False

    def _on_commit(self) -> None:
        self._flush()
        self._say(
            {
                "type": "input.committed",
                "session_id": self._id,
                "segment_index": self._num_segments,
                "segment_sentences": self._num_units - self._segment_start,
                "total_sentences": self._num_units,
            }
        )
        self._num_segments += 1
        self._segment_start = self._num_units

    def _on_cancel(self) -> None:
        """Drop all that is not spoken yet; each utterance still ends with its event, and one at least does."""
        self._splitter.flush()
        self._joiner.flush()
        self._queued_chars = 0
        self._queue = deque(item for item in self._queue if not isinstance(item, _Unit))
        ends = [item for item in self._queue if isinstance(item, _Say) and item.event["type"] == "session.done"]
        for item in ends:
            item.event["cancelled"] = True
        if self._is_open or not ends:
            self._end_utterance(is_cancelled=True)
        if self._speaking is not None and not self._speaking.expired():
            self._speaking.reschedule(asyncio.get_running_loop().time())

    def _say(self, event: dict[str, Any]) -> None:
        if self._num_says >= MAX_QUEUED:
            raise _Fatal(400, f"message: {MAX_QUEUED} answers wait already (allowed: at most {MAX_QUEUED})")
        self._num_says += 1
        self._put(_Say(event))

    def _put(self, item: _Unit | _Say | _Close) -> None:
        self._queue.append(item)
        self._has_work.set()

    # --- working ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            self._is_working = False
            if not self._queue:
                self._set_patience()
            while not self._queue:
                self._has_work.clear()
                await self._has_work.wait()
            self._is_working = True
            self._set_patience()
            match self._queue.popleft():
                case _Say(event=event):
                    self._num_says -= 1
                    await self._send(event)
                case _Unit() as unit:
                    self._queued_chars -= len(unit.text)
                    await self._speak(unit)
                case _Close():
                    return

    async def _speak(self, unit: _Unit) -> None:
        sound = _Sound(self, unit, f"{self._id}-{unit.utterance}-{unit.index}")
        if unit.config.stream.word_timestamps:
            problem = Problem(400, "word_timestamps: true came (allowed: false: there is no aligner)")
            await self._send(sound.place | _error(problem))
            return
        end: dict[str, Any] = {"error": False}
        stop = asyncio.timeout(None)
        try:
            async with stop:
                await self._cancellable(stop, sound)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 (one sentence fails, the socket stays)
            if isinstance(error, TimeoutError) and stop.expired():
                end["cancelled"] = True
            else:
                end["error"] = True
                await self._tell_failure(sound, error)
        if sound.has_begun:
            await self._send({"type": "audio.done", **sound.place, "total_bytes": sound.num_bytes, **end})

    async def _cancellable(self, stop: asyncio.Timeout, sound: _Sound) -> None:
        """Send a sound; a cancel ends it by `stop`, which it must not touch afterwards."""
        self._speaking = stop
        try:
            await sound.send_all()
        finally:
            self._speaking = None

    async def _tell_failure(self, sound: _Sound, error: Exception) -> None:
        problem = to_problem(error)
        log_failure(problem, error, self.request[REQUEST_ID])
        partial = {"partial_audio": True, "action": "discard"} if sound.num_bytes else {}
        await sound.begin(None)
        await self._send(sound.place | _error(problem) | partial)

    async def _send(self, event: dict[str, Any]) -> None:
        await self.send(msgspec.json.encode(event).decode())

    async def send(self, data: str | bytes) -> None:
        """Send text or bytes and wait until the client has taken enough of what came before.

        Raises:
            ConnectionError: the client is gone, or took nothing in time.
        """
        try:
            async with asyncio.timeout(self.route.write_timeout_s):
                if isinstance(data, str):
                    await self._socket.send_str(data)
                else:
                    await self._socket.send_bytes(data)
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None


class _Sound:
    """The sound of one unit on its way to the client."""

    def __init__(self, session: _Session, unit: _Unit, name: str) -> None:
        self._session = session
        self._unit = unit
        self.place = {"id": name, "utterance_index": unit.utterance, "sentence_index": unit.index}
        self.num_bytes = 0
        self.has_begun = False

    async def begin(self, rate_hz: int | None) -> None:
        """Tell of it, once."""
        if self.has_begun:
            return
        self.has_begun = True
        event = {"type": "audio.start", **self.place, "sentence_text": self._unit.text}
        rate = {} if rate_hz is None else {"sample_rate": rate_hz}
        event |= {"format": self._unit.config.format, **rate}
        await self._session.send(msgspec.json.encode(event).decode())

    async def send_all(self) -> None:
        """Have it made and send it: piece by piece, or as one file."""
        config, session = self._unit.config, self._session
        route, request = session.route.speech, session.request
        is_whole = not config.stream.stream_audio
        body = {**config.body, "input": self._unit.text}
        speech = await session.read(body)
        reference = await session.read_reference(speech)
        utterance = route.utterance(speech, reference, session.route.max_file_bytes if is_whole else None)
        if is_whole:
            data = await utterance.collect(terms_of(request))
            await self.begin(utterance.rate_hz)
            await self._send(data)
            return
        async with aclosing(utterance.pieces(terms_of(request))) as pieces:
            async for piece in pieces:
                await self.begin(utterance.rate_hz)
                await self._send(piece)

    async def _send(self, data: bytes) -> None:
        self.num_bytes += len(data)  # the frame is written whole, whatever becomes of the wait after it
        await self._session.send(data)


def _error(problem: Problem) -> dict[str, Any]:
    """Return the event that tells of a problem, in both forms that clients read."""
    return {"type": "error", "message": problem.message, **problem.document}
