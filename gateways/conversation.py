"""A live conversation on a WebSocket: sound goes in all the time, sound and words come out all the time.

Three tasks serve it: one reads the socket, one sends what was heard to the bus at the pace at which it was spoken, one
writes what comes back. Nobody waits for another but where something is full: a client that takes nothing stops its own
pipeline by credit, and sound that comes faster than it was spoken waits, is dropped or stops the reading.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType

from gateways.problems import Problem
from omni_bus.client import Item
from omni_bus.media.opus import RATE_HZ
from omni_bus.media.sound import Resampler, floats_of
from omni_bus.wire.payloads import Audio, Blob, Text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from aiohttp import WSMessage, web

    from omni_bus.client import Request
    from omni_bus.media.encode import EncodingPool
    from omni_bus.media.opus import Samples

AUDIO, TEXT = "audio", "text"


class Microphone:
    """Sound on its way to a pipeline.

    Args:
        call: the conversation on the bus.
        max_waiting_s: sound that may wait here.
        max_lead_s: sound that may be sent before it could have been spoken; 0 sends all at once, as credit allows.
        drops_oldest: what happens when too much waits: the oldest is dropped, or `put` waits.
    """

    def __init__(self, call: Request, *, max_waiting_s: float, max_lead_s: float, drops_oldest: bool) -> None:
        self._call = call
        self._max_waiting = max(1, round(max_waiting_s * RATE_HZ))
        self._max_lead_s = max_lead_s
        self._drops_oldest = drops_oldest
        self._pieces: deque[Samples] = deque()
        self._num_waiting = 0
        self._changed = asyncio.Event()
        self._is_over = False
        self.num_dropped = 0

    async def put(self, samples: Samples) -> None:
        """Take sound of the client, (samples,) float32."""
        if not len(samples) or self._is_over:
            return
        self._pieces.append(samples)
        self._add(len(samples))
        while self._num_waiting > self._max_waiting:
            if self._drops_oldest:
                self._drop(self._num_waiting - self._max_waiting)
            else:
                await self._until_changed()

    def end(self) -> None:
        """The client will say no more."""
        self._is_over = True
        self._changed.set()

    async def run(self) -> None:
        """Send until the end."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        # Stages hear of a request with its first input: the model may speak first, and refuses what it can't honour.
        await self._send(b"")
        while True:
            while not self._pieces:
                if self._is_over:
                    self._call.finish(AUDIO)
                    return
                await self._until_changed()
            piece = self._pieces.popleft()
            self._add(-len(piece))
            if self._max_lead_s:
                # What is sent was spoken by `due_at`; a pause of the client gives no right to a longer lead later.
                due_at = max(due_at, loop.time()) + len(piece) / RATE_HZ
                await asyncio.sleep(due_at - loop.time() - self._max_lead_s)
            await self._send(piece.astype("<f4").tobytes())

    async def _send(self, data: bytes) -> None:
        await self._call.send(AUDIO, Audio(RATE_HZ, 1, "f32", Blob(data)))

    def _drop(self, excess: int) -> None:
        oldest = self._pieces.popleft()
        if len(oldest) > excess:
            self._pieces.appendleft(oldest[excess:])
        num_dropped = min(excess, len(oldest))
        self.num_dropped += num_dropped
        self._add(-num_dropped)

    def _add(self, num_samples: int) -> None:
        self._num_waiting += num_samples
        self._changed.set()

    async def _until_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Loudspeaker:
    """Sound of a pipeline, of any rate and format, as (samples,) float32 at 24 kHz, mono."""

    def __init__(self) -> None:
        self._resampler: Resampler | None = None
        self._rate_hz = 0

    def feed_blocking(self, audio: Audio) -> Samples:
        """Return what is ready."""
        samples = floats_of(audio).mean(axis=1, keepdims=True)
        if audio.rate_hz != RATE_HZ:
            if self._resampler is None or self._rate_hz != audio.rate_hz:
                self._resampler, self._rate_hz = Resampler(audio.rate_hz, RATE_HZ, 1), audio.rate_hz
            samples = self._resampler.feed(samples)
        return samples[:, 0].clip(-1.0, 1.0)


class Dialect(ABC):
    """How a route's messages say it."""

    def __init__(self, socket: web.WebSocketResponse, pool: EncodingPool, *, write_timeout_s: float) -> None:
        self._socket = socket
        self._write_timeout_s = write_timeout_s
        self.pool = pool

    @abstractmethod
    async def hear(self, message: WSMessage) -> Samples | None:
        """Return the sound in a message, maybe none; None if the client says that no more will come.

        Raises:
            Problem, BadInput: it ends the conversation.
        """

    @abstractmethod
    async def say_audio(self, samples: Samples) -> None:
        """Send sound."""

    @abstractmethod
    async def say_text(self, text: str) -> None:
        """Send words."""

    @abstractmethod
    async def say_error(self, message: str) -> None:
        """Tell of a mistake or of the end."""

    async def send(self, data: str | bytes) -> None:
        """Send a message and wait until the client has taken enough of what came before.

        Raises:
            ConnectionError: the client is gone, or took nothing in time.
        """
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await (self._socket.send_str(data) if isinstance(data, str) else self._socket.send_bytes(data))
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None

    async def receive(self, timeout_s: float) -> WSMessage | None:
        """Return the client's next message; None when it has closed.

        Raises:
            Problem: 408, none came in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._socket.receive()
        except TimeoutError:
            raise Problem(408, f"message: none came in time (allowed: {timeout_s:g} s)") from None
        return message if message.type in (WSMsgType.TEXT, WSMsgType.BINARY) else None


async def converse(
    call: Request,
    dialect: Dialect,
    microphone: Microphone,
    *,
    idle_timeout_s: float,
    begin: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Serve a conversation until the client closes or the pipeline ends it; returns whether the pipeline did.

    Args:
        call: the conversation on the bus.
        dialect: of the client.
        microphone: for the client's sound.
        idle_timeout_s: for which the client may send nothing.
        begin: called before the pipeline's first output, be it empty.

    Raises:
        Problem, OmniBusError: why it ends otherwise.
    """

    async def read() -> bool:
        while (message := await dialect.receive(idle_timeout_s)) is not None:
            samples = await dialect.hear(message)
            if samples is None:
                microphone.end()
            else:
                await microphone.put(samples)
        return False

    async def write() -> bool:
        nonlocal begin
        loudspeaker = Loudspeaker()
        async for event in call:
            if begin is not None:
                await begin()
                begin = None
            if not isinstance(event, Item):
                continue
            match event.payload:
                case Audio() as audio if audio.num_frames:
                    await dialect.say_audio(await dialect.pool.run(loudspeaker.feed_blocking, audio))
                case Text(text=text) if text:
                    await dialect.say_text(text)
                case _:
                    pass
        return True

    async def speak() -> bool | None:
        await microphone.run()
        return None

    return await _first(read(), write(), speak())


async def _first(*works: Coroutine[Any, Any, bool | None]) -> bool:
    """Return the first answer that is not None, and end the others."""
    tasks = {asyncio.ensure_future(work) for work in works}
    pending = tasks
    try:
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            answers = [task.result() for task in done]
            if any(answer is not None for answer in answers):
                return any(answers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
