"""``WS /v1/realtime?duplex=1``: a live conversation that outlives its connection.

Events have numbers. When the connection is cut, or its gateway dies, another one takes up the session after the last
event that the caller took, and the server says what was missed: the caller sees `SessionResumed` and then what it would
have seen without the cut, nothing lost and nothing doubled. What the client was sending in the moment of the cut may be
lost; who must know asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from omni_bus.client.failures import RESUMABLE, ConnectFailed, ConnectionLost, ResumeFailed
from omni_bus.client.realtime import PATH, Realtime, begin, refusal_of
from omni_bus.client.realtime_events import (
    EVENTS,
    ErrorEvent,
    ResyncRequired,
    SessionClosed,
    SessionCreated,
    SessionExpired,
    SessionReplaced,
    SessionResumed,
)
from omni_bus.client.socket import CLOSE_S, PATIENCE, address, open_socket

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from omni_bus.client.playback import PlaybackClock
    from omni_bus.client.realtime_events import RealtimeEvent, Unknown
    from omni_bus.client.socket import EventSocket, Patience

ACK_EVENTS = 32
"""So many events are taken before the server is told that it need not keep them; it keeps 8 MiB of them."""

FIRST_WAIT_S, MAX_WAIT_S = 0.05, 2.0
"""Between attempts to come back."""

ALIVE = {"type": "session.heartbeat"}
"""Keeps a session that nothing happens in; the server answers with `HeartbeatAck`."""

PASSING = ("server_stopping", "resource_exhausted", "engine_error", "config_timeout")
"""Codes of refusals to resume that may pass."""

LAST = (SessionClosed, SessionExpired, SessionReplaced)
"""Events after which nothing comes."""


class Duplex(Realtime):
    """A conversation with numbered events; see `connect_duplex`.

    Raises, besides what `Realtime` does, `ResumeFailed` where the session could not be taken up again.
    """

    def __init__(self, socket: EventSocket, door: Door, resume_for_s: float) -> None:
        super().__init__(socket)
        self._door = door
        self._resume_for_s = resume_for_s
        self._token: str | None = None
        self._last_seq = 0
        self._acked_seq = 0
        self._acking: asyncio.Task[None] | None = None
        self._since_numbered: deque[str] = deque(maxlen=16)
        """Events without a number since the last that had one: after a cut they come again."""
        self._resuming = asyncio.Lock()
        self._resumed: SessionResumed | None = None
        """Not taken yet."""
        self._is_over = False

    @property
    def last_event(self) -> int:
        """The number of the last event that was taken; 0 before the first."""
        return self._last_seq

    @property
    def resume_token(self) -> str | None:
        """By which the session is resumed, once; None if it can't be."""
        return self._token

    # --- speaking ---------------------------------------------------------------------------------------------

    async def barge_in(self) -> str:
        """Interrupt the answer that is being given."""
        return await self.send("barge_in")

    async def cancel_input(self) -> str:
        """Forget the buffer and whatever is being answered."""
        return await self.send("input.cancel")

    async def acknowledge(self, clock: PlaybackClock, *, truncate: bool = False) -> str | None:
        """Tell how much was heard; None if nothing was yet. `truncate` also ends the answer there."""
        if (heard := clock.heard) is None:
            return None
        return await self.send(
            "playback.ack", item_id=heard.item_id, played_ms=heard.played_ms, **({"truncate": True} if truncate else {})
        )

    async def end(self, reason: str = "client_close") -> None:
        """End the session, not only the connection; what comes until its end is dropped."""
        if self._is_over or self._socket.is_closed:
            return
        self._is_over = True
        with contextlib.suppress(ConnectionLost):
            await self._socket.send({"type": "session.close", "reason": reason})
            while await self._socket.receive() is not None:
                pass

    async def close(self) -> None:
        """Leave the connection; the session waits for a while for who resumes it."""
        self._is_over = True
        if self._acking is not None:
            self._acking.cancel()
        await super().close()

    async def _transmit(self, event: Mapping[str, Any]) -> None:
        while True:
            socket = self._socket
            try:
                return await socket.send(event)
            except ConnectionLost as error:
                await self._recover(socket, error)

    # --- listening --------------------------------------------------------------------------------------------

    async def _next(self) -> RealtimeEvent | Unknown | None:
        self._ack()  # who asks for the next event is done with the last
        while True:
            if self._resumed is not None:
                event, self._resumed = self._resumed, None
                return event
            socket = self._socket
            try:
                data = await socket.receive()
            except ConnectionLost as error:
                await self._recover(socket, error)
                continue
            if socket is not self._socket:
                continue
            if data is None:
                return None
            if self._resuming.locked():
                continue  # the server is asked for all after the last event, so this comes again
            event = EVENTS.decode(data)
            if self._is_new(event) and not self._is_farewell(event):
                return event

    def _is_new(self, event: RealtimeEvent | Unknown) -> bool:
        """Take note of an event's number.

        Raises:
            ResumeFailed: one before it did not come.
        """
        seq = event.server_event_seq
        if isinstance(event, SessionCreated):
            self._token = event.resume_token
        self._is_over |= isinstance(event, LAST)
        if isinstance(event, ResyncRequired):
            self._token = None  # from here on nothing is kept, and numbers end
        if seq is None:
            is_new = not event.event_id or event.event_id not in self._since_numbered
            self._since_numbered.append(event.event_id)
            return is_new
        if seq <= self._last_seq:
            return False
        if seq > self._last_seq + 1:
            raise ResumeFailed(f"event {seq} came after event {self._last_seq}", code="events_lost")
        self._last_seq = seq
        self._since_numbered.clear()
        return True

    def _is_farewell(self, event: RealtimeEvent | Unknown) -> bool:
        """Whether a gateway only says that it leaves, and the session goes on elsewhere."""
        return isinstance(event, ErrorEvent) and event.body.code == "server_stopping" and self._can_resume

    def _ack(self) -> None:
        """Tell the server that it need not keep what was taken; beside the reader, which must not wait to send."""
        is_due = self._token is not None and self._last_seq - self._acked_seq >= ACK_EVENTS
        if not is_due or self._resuming.locked() or (self._acking is not None and not self._acking.done()):
            return
        self._acked_seq = self._last_seq
        self._acking = asyncio.create_task(self._send_ack(self._socket, self._last_seq))

    async def _send_ack(self, socket: EventSocket, seq: int) -> None:
        with contextlib.suppress(ConnectionLost):  # the reader hears of it as well
            await socket.send({"type": "session.event_ack", "server_event_seq": seq})

    # --- coming back ------------------------------------------------------------------------------------------

    @property
    def _can_resume(self) -> bool:
        return self._token is not None and self._resume_for_s > 0 and not self._is_over

    async def _recover(self, socket: EventSocket, error: ConnectionLost) -> None:
        """Have another connection than `socket`, which was lost.

        Raises:
            ConnectionLost: there can't be one.
        """
        if not self._can_resume or error.close_code not in RESUMABLE:
            raise error
        async with self._resuming:
            if self._socket is not socket:
                return
            if self._is_over:
                raise error
            found, resumed = await self._come_back(error)
            if self._is_over:  # closed meanwhile
                await found.close()
                raise error
            self._socket, self._resumed, self._token = found, resumed, resumed.resume_token
        await socket.close()

    async def _come_back(self, cause: ConnectionLost) -> tuple[EventSocket, SessionResumed]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._resume_for_s
        why = cause.message
        for wait_s in _waits():
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._attach()
            except ResumeFailed:
                raise
            except TimeoutError:
                break
            except ConnectFailed as error:
                if not error.may_pass:
                    raise ResumeFailed(error.message, code=error.code) from error
                why = error.message
            except ConnectionLost as error:
                why = error.message
            if loop.time() + wait_s >= deadline:
                break
            await asyncio.sleep(wait_s)
        raise ResumeFailed(f"the session could not be resumed within {self._resume_for_s:g} s: {why}") from cause

    async def _attach(self) -> tuple[EventSocket, SessionResumed]:
        """Take up the session on a connection of its own.

        Raises:
            ResumeFailed: the server does not let it go on.
            ConnectFailed, ConnectionLost: it may later.
        """
        socket = await self._door.open(autostart="0")
        try:
            resume = {"session_id": self.session.id, "resume_token": self._token}
            await socket.send({"type": "session.resume", "last_received_server_event_seq": self._last_seq, **resume})
            data = await socket.receive()
            event = None if data is None else EVENTS.decode(data)
            match event:
                case SessionResumed():
                    return socket, event
                case ErrorEvent() if event.body.code in PASSING:
                    raise ConnectionLost(event.body.message)
                case ErrorEvent():
                    refusal = refusal_of(event)
                    raise ResumeFailed(refusal.message, code=refusal.code)
                case ResyncRequired():
                    raise ResumeFailed("the server does not keep what was missed any more", code=event.reason)
                case _:
                    raise ConnectionLost(f"{type(event).__name__} came (allowed: session.resumed)")
        except BaseException:
            await socket.close()
            raise


class Door:
    """Where a session's connections are opened."""

    def __init__(self, url: str, api_key: str | None, patience: Patience) -> None:
        self._url = url
        self._api_key = api_key
        self._patience = patience

    async def open(self, **query: str | None) -> EventSocket:
        """Open one.

        Raises:
            ConnectFailed, BadInput: see `open_socket`.
        """
        url = address(self._url, PATH, duplex="1", **query)
        return await open_socket(url, self._api_key, self._patience, alive=ALIVE)


@asynccontextmanager
async def connect_duplex(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    session: Mapping[str, Any] | None = None,
    resume_for_s: float = 30.0,
    patience: Patience = PATIENCE,
) -> AsyncGenerator[Duplex]:
    """Begin a session; it is over when the block is left.

    Args:
        url: of the server, ``http://HOST:PORT``, or of its WebSocket.
        model: the server's only one if None.
        api_key: sent as a bearer token.
        session: its configuration. With ``"type": "realtime"`` it begins as OpenAI's do, with sound at 24 kHz and a
            detector of turns; without, as vLLM-Omni's do, with 16 kHz and turns by `Realtime.commit`.
        resume_for_s: after a cut, so long it is tried to come back (servers keep a session for 30 s); 0 does not try.
        patience: how long to wait for the server.

    Raises:
        ConnectFailed: nobody answers there, or the server refuses.
        BadInput: `url` or `api_key` can't be one.
    """
    door = Door(url, api_key, patience)
    live = Duplex(await door.open(autostart="0", model=model), door, resume_for_s)
    try:
        with contextlib.suppress(ConnectionLost):  # why it is, was said before
            await live.send("session.update", session=session or {})
        await begin(live, url, patience)
        yield live
    finally:
        with contextlib.suppress(TimeoutError):  # then the server ends it, once it has waited for who resumes it
            async with asyncio.timeout(CLOSE_S):
                await live.end()
        await live.close()


def _waits() -> Iterator[float]:
    """Longer and longer ones, at random, so that the clients of a dead gateway do not come back all at once."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s * random.uniform(0.5, 1.5)
        wait_s = min(2 * wait_s, MAX_WAIT_S)
