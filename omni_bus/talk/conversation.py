"""A live conversation over a WebSocket, in OpenAI's GA events."""

from __future__ import annotations

import asyncio
import base64
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.client.failures import ConnectFailed, ConnectionLost
from omni_bus.client.realtime import PATH
from omni_bus.client.socket import PATIENCE, address, open_socket
from omni_bus.errors import BadInput, OmniBusError, Unavailable, Unreachable
from omni_bus.talk.dialogue import SOUND, TRANSCRIPTION
from omni_bus.talk.piece import PIECE_BYTES, PIECE_S, RATE_HZ, seconds_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from omni_bus.client.playback import PlaybackClock
    from omni_bus.talk.dialogue import Dialogue
    from omni_bus.talk.voice import Voice

READY_S = 30.0
"""A server answers the first event within milliseconds, also one far away."""

MAX_SHOWN = 120
"""Characters of what came, in an error."""


class Conversation:
    """One socket.

    Args:
        dialogue: follows what the server says.
        playback: has the answer's sound.
        on_heard: gets each 20 ms that the listener hears.
        log: gets the events of both sides with their moments, without sound.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        playback: PlaybackClock,
        on_heard: Callable[[bytes], object],
        log: Callable[[dict[str, Any]], object],
    ) -> None:
        self._dialogue = dialogue
        self._playback = playback
        self._on_heard = on_heard
        self._log = log
        self._ready = asyncio.Event()
        self._began_at: float | None = None

    @asynccontextmanager
    async def connected(self, url: str, api_key: str | None, session: dict[str, Any]) -> AsyncGenerator[None]:
        """Open the socket and set the session up; close it at the end.

        Raises:
            Unreachable: nobody answers there as a live conversation does.
        """
        try:
            self._socket = await open_socket(address(url, PATH), api_key, PATIENCE)
        except ConnectFailed as error:
            hint = ": --api-key, or OPENAI_API_KEY" if error.status in (401, 403) else ""
            raise Unreachable(
                f"{error.message}{hint} (allowed: the address of a server with live conversations, as "
                f"ws://127.0.0.1:8000{PATH})",
                field="--url",
            ) from error
        hearing = asyncio.create_task(self._hear())
        try:
            await self._send({"type": "session.update", "session": session})
            await self._send(TRANSCRIPTION)
            await _first_of(hearing, asyncio.create_task(self._until_ready()))
            self._hearing = hearing
            yield
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            await self._socket.close()

    async def hold(self, voice: Voice) -> None:
        """Speak and listen until the voice has nothing more to say.

        Raises:
            Unavailable: the server ended it.
        """
        self._began_at = asyncio.get_running_loop().time()
        await _first_of(self._hearing, asyncio.create_task(self._speak(voice)))

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._ready.wait()
        except TimeoutError:
            raise Unreachable(f"no event came within {READY_S:g} s", field="--url") from None
        if not self._dialogue.is_ready:
            raise BadInput(self._dialogue.problems[-1])

    async def _speak(self, voice: Voice) -> None:
        for number in itertools.count():
            at = number * PIECE_S
            spoken = await voice.piece(at)
            if spoken is None:
                return
            if not self._playback.is_empty:
                self._dialogue.on_played(at + PIECE_S, at + 2 * PIECE_S)  # this piece was spoken until now
            heard = self._playback.take(PIECE_BYTES)
            voice.play(heard)
            self._on_heard(heard)
            sound = base64.b64encode(spoken).decode()
            await self._send_unnoted({"type": "input_audio_buffer.append", "audio": sound})

    async def _hear(self) -> None:
        while (data := await self._received()) is not None:
            try:
                answers = self._take(data)
            except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
                came = f"{data[:MAX_SHOWN]!r} came"
                raise Unreachable(f"{came} (allowed: OpenAI's realtime events)", field="--url") from error
            for answer in answers:
                await self._send(answer)
            if self._dialogue.is_ready or self._dialogue.problems:
                self._ready.set()
        raise self._ended("the server ended the conversation")

    async def _received(self) -> str | bytes | None:
        try:
            return await self._socket.receive()
        except ConnectionLost as error:
            raise self._ended(f"the server ended the conversation: {error.message}") from error

    def _take(self, data: str | bytes) -> list[dict[str, Any]]:
        event = msgspec.json.decode(data, type=dict[str, Any])
        at = self._now()
        self._note("server", _without_sound(event), at)
        return self._dialogue.on_event(event, at)

    def _ended(self, why: str) -> OmniBusError:
        if self._dialogue.problems and not self._dialogue.is_ready:
            return BadInput(self._dialogue.problems[-1])
        return Unavailable(why)

    async def _send(self, event: dict[str, Any]) -> None:
        self._note("client", event, self._now())
        await self._send_unnoted(event)

    async def _send_unnoted(self, event: dict[str, Any]) -> None:
        try:
            await self._socket.send(event)
        except ConnectionLost as error:
            raise self._ended(f"the server ended the conversation: {error.message}") from error

    def _now(self) -> float:
        """Return the seconds since the first piece of sound; 0 before it."""
        return 0.0 if self._began_at is None else asyncio.get_running_loop().time() - self._began_at

    def _note(self, side: str, event: dict[str, Any], at: float) -> None:
        self._log({"at": round(at, 3), "from": side, "event": event})


def session_of(voice: str | None, instructions: str | None) -> dict[str, Any]:
    """Return what the session is told at its beginning."""
    sound = {"type": "audio/pcm", "rate": RATE_HZ}
    said: dict[str, Any] = {"format": sound}
    if voice is not None:
        said["voice"] = voice
    session: dict[str, Any] = {"type": "realtime", "audio": {"input": {"format": sound}, "output": said}}
    return session if instructions is None else {**session, "instructions": instructions}


async def _first_of(going_on: asyncio.Task[None], task: asyncio.Task[None]) -> None:
    """Wait until the second is over, or the first has failed.

    Raises:
        OmniBusError: what one of them failed with.
    """
    try:
        done, _ = await asyncio.wait([going_on, task], return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _without_sound(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with the length of its sound instead."""
    if event["type"] != SOUND:
        return event
    duration = seconds_of(len(base64.b64decode(event["delta"]))) * 1000
    return {**event, "delta": f"{duration:g} ms of sound"}
