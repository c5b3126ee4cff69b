"""The bus as a gateway, a script or a test uses it: submit a request, send its input, iterate over its output, cancel.

::

    async with await BusClient.connect("cli.1", listen, coordinator_endpoint) as client:
        async with await client.submit("voice_chat", ["text"], {"llm": {"max_tokens": 20}}) as request:
            await request.send("messages", Json({"messages": [...]}))
            request.finish("messages")
            async for item in request:
                ...

Leaving the ``async with`` block of a request before its end cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec

from omni_bus.bus.arena import DEFAULT_ARENA_LIMITS, ArenaLimits
from omni_bus.core.client import ClientCore
from omni_bus.core.effects import Admitted, Answered, Deliver, Ended, PortEnded, Writable
from omni_bus.core.member import Member, coordinator_peer
from omni_bus.errors import (
    BadInput,
    DeadlineExceeded,
    InputTooLarge,
    OmniBusError,
    RequestCancelled,
    Unavailable,
    from_info,
)
from omni_bus.ids import new_request_id
from omni_bus.runtime.driver import Driver
from omni_bus.wire.frames import (
    CLIENT_FRAMES,
    Broken,
    Chunk,
    Credit,
    Finish,
    Introduce,
    Lost,
    Outlook,
    Ping,
    Refused,
    Route,
    Submit,
    Welcome,
)
from omni_bus.wire.payloads import Payload, kind_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from omni_bus.bus.curve import Curve
    from omni_bus.core.effects import TimerKey
    from omni_bus.ids import Peer, RequestId, Sender
    from omni_bus.wire.frames import AnyFrame, Role
    from omni_bus.wire.payloads import Blob

logger = logging.getLogger(__name__)


class Item(msgspec.Struct, frozen=True, gc=False):
    """A payload from an output port."""

    port: str
    payload: Payload


class End(msgspec.Struct, frozen=True, gc=False):
    """An output port is complete."""

    port: str
    finish: Finish


RequestEvent: TypeAlias = Item | End

OVERDUE_S = 1.0
"""The coordinator ends a request whose time limit passed; a client that is not told so within this gives it up, since
the submit, the answer or the news of the end may have been lost."""


class Request:
    """One admitted request.

    Iterate over it once, or use `each`; asking for the next item gives the last one's credit back.
    """

    def __init__(self, client: BusClient, request: RequestId) -> None:
        self.id = request
        self._client = client
        self._admitted: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._events: deque[RequestEvent] = deque()
        self._has_event = asyncio.Event()
        self._writable: dict[str, asyncio.Event] = {}
        self._unconsumed: Item | None = None
        self._take_now: Callable[[RequestEvent], bool] | None = None
        """Takes what comes while nothing waits in `_events`."""
        self._take_error: Exception | None = None
        """What it raised."""
        self._error: OmniBusError | None = None
        self._is_over = False
        self._route: Route | None = None
        self._overdue: asyncio.TimerHandle | None = None

    @property
    def route(self) -> Route:
        """Where the request runs; another one after a replica was lost before the first output."""
        return self._admitted.result() if self._route is None else self._route

    @property
    def is_over(self) -> bool:
        """It ended, well or not; buffered events may still be read."""
        return self._is_over

    async def send(self, port: str, payload: Payload) -> None:
        """Send input; waits while the port is out of credit.

        Raises:
            UnknownName: the request has no such input.
            BadInput: the payload has no form on the wire, or is too large for it; the request goes on without it.
            OmniBusError: the request ended with that error.
        """
        try:
            effects = self._client.core.send(self.id, port, payload)
        except InputTooLarge as error:
            raise InputTooLarge(f"{port}: {error.message}", field=port) from error
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadInput(f"{port}: the {kind_of(payload)} can't be encoded: {error}", field=port) from error
        self._client.perform(effects)
        while self._client.core.is_blocked(self.id, port):
            event = self._writable.setdefault(port, asyncio.Event())
            event.clear()
            await event.wait()
        self._raise_error()

    def finish(self, port: str) -> None:
        """End an input port."""
        self._client.perform(self._client.core.finish(self.id, port))

    def cancel(self, reason: str = "") -> None:
        """End the request now; harmless after its end."""
        self._end(RequestCancelled(reason or "cancelled"))
        self._client.perform(self._client.core.cancel(self.id, reason))
        self._client.requests.pop(self.id, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestEvent:
        if self._unconsumed is not None:
            item, self._unconsumed = self._unconsumed, None
            self._client.perform(self._client.core.consume(self.id, item.port, item.payload))
        while not self._events:
            if self._is_over:
                self._raise_error()
                raise StopAsyncIteration
            self._has_event.clear()
            await self._has_event.wait()
        event = self._events.popleft()
        if isinstance(event, Item):
            self._unconsumed = event
        return event

    async def each(
        self, take_now: Callable[[RequestEvent], bool], take: Callable[[RequestEvent], Awaitable[None]]
    ) -> None:
        """Take all events to the end, one after the other; no task is woken for those that need no waiting.

        Args:
            take_now: called with each event in the turn of the loop that brings it; must not wait. Returns False, and
                does nothing, if it can't take that event without waiting; it may be asked again.
            take: awaited for those that it can't take, before the next event is looked at. Each payload's credit goes
                back once it was taken, either way.

        Raises:
            OmniBusError: the request ended with that error.
            Exception: what the functions raise.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                if not take_now(event):
                    await take(event)
                if isinstance(event, Item):
                    self._client.perform(self._client.core.consume(self.id, event.port, event.payload))
            if self._is_over:
                self._raise_error()
                return
            self._take_now = take_now
            self._has_event.clear()
            try:
                await self._has_event.wait()
            finally:
                self._take_now = None
            if self._take_error is not None:
                error, self._take_error = self._take_error, None
                raise error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self.cancel("the client left")

    async def admitted(self) -> Route:
        """Wait for the coordinator's answer; giving up the wait cancels the request.

        Raises:
            Refused: no capacity, a limit of the caller's own, a stage is missing, or the coordinator does not answer.
            BadInput: the pipeline or an output is unknown.
            DeadlineExceeded: the time limit passed while it waited, or certainly would.
            RequestCancelled: somebody else cancelled it, or the client closed.
        """
        try:
            return await self._admitted
        except asyncio.CancelledError:
            self.cancel("the client left before the request was admitted")
            raise

    # --- called by the client ---------------------------------------------------------------------------------

    def limit(self, timeout_s: float | None) -> None:
        """Give it up if nobody ends it in time; its limit may become known, or be counted anew, when it is admitted."""
        if timeout_s is None or self._is_over:
            return
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = asyncio.get_running_loop().call_later(timeout_s + OVERDUE_S, self._give_up)

    def on_admitted(self, route: Route) -> None:
        """The coordinator admitted it, once or, over another route, twice."""
        self._route = route
        self.limit(route.timeout_s)
        if not self._admitted.done():
            self._admitted.set_result(route)

    def on_event(self, event: RequestEvent) -> None:
        """An output came."""
        if self._take_now is None or not self._is_taken(self._take_now, event):
            self._events.append(event)
            self._has_event.set()

    def on_writable(self, port: str) -> None:
        """An input port has credit again."""
        if port in self._writable:
            self._writable[port].set()

    def on_ended(self, error: OmniBusError | None) -> None:
        """It is over."""
        self._end(error)

    def _is_taken(self, take_now: Callable[[RequestEvent], bool], event: RequestEvent) -> bool:
        """Whether the event needs no task."""
        try:
            if not take_now(event):
                self._take_now = None  # what comes before the task runs waits behind this event
                return False
        except Exception as error:  # noqa: BLE001 (raised where the events are asked for)
            self._take_now, self._take_error = None, error
            self._has_event.set()
            return True
        if type(event) is Item:
            effects = self._client.core.consume(self.id, event.port, event.payload)
            if effects:  # credit goes back every few chunks
                self._client.perform(effects)
        return True

    def _raise_error(self) -> None:
        """Raise what the request ended with, if it did badly.

        A new one each time: a traceback holds its callers' variables, their last payload among them, and kept here it
        would hold them, and another actor's memory, until a garbage collection.
        """
        if self._error is not None:
            raise from_info(self._error.to_info())

    def _give_up(self) -> None:
        message = "the request's time limit passed, and the coordinator did not say so"
        self._end(DeadlineExceeded(message))
        self.cancel(message)

    def _end(self, error: OmniBusError | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._overdue is not None:
            self._overdue.cancel()
        self._error = error
        self._has_event.set()
        for event in self._writable.values():
            event.set()
        if not self._admitted.done():
            self._admitted.set_exception(error or RequestCancelled("ended before it was admitted"))
            self._admitted.exception()  # whoever gave up waiting is not there to retrieve it


class BusClient:
    """An actor that submits requests."""

    def __init__(
        self,
        name: str,
        listen: str,
        coordinator_endpoint: str,
        role: Role = "client",
        on_lost: Callable[[Peer, str], None] | None = None,
        arena: ArenaLimits = DEFAULT_ARENA_LIMITS,
        on_introduce: Callable[[], None] | None = None,
        on_silent: Callable[[], None] | None = None,
        curve: Curve | None = None,
    ) -> None:
        self.requests: dict[RequestId, Request] = {}
        self._on_lost = on_lost
        self._on_introduce = on_introduce
        self._on_silent = on_silent
        self._driver = Driver(
            name,
            listen,
            on_frame=self._on_frame,
            on_timer=self._on_timer,
            on_unsent=self._on_unsent,
            arena=arena,
            understands=CLIENT_FRAMES,
            on_broken=self._on_broken,
            curve=curve,
        )
        coordinator = coordinator_peer(coordinator_endpoint)
        self.core = ClientCore(coordinator)
        self._member = Member(
            self._driver.me,
            role,
            coordinator,
            live=lambda: self.core.running,
            linked=lambda: self._driver.linked,
        )
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._heard = asyncio.Event()
        self._welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        """The actor's name on the bus."""
        return self._driver.me.actor

    @classmethod
    async def connect(
        cls,
        name: str,
        listen: str,
        coordinator_endpoint: str,
        *,
        role: Role = "client",
        timeout_s: float | None = None,
        on_lost: Callable[[Peer, str], None] | None = None,
        arena: ArenaLimits = DEFAULT_ARENA_LIMITS,
        on_introduce: Callable[[], None] | None = None,
        on_silent: Callable[[], None] | None = None,
        curve: Curve | None = None,
    ) -> Self:
        """Join the deployment.

        Args:
            name: the actor's name, unique in the deployment.
            listen: address of the inbox.
            coordinator_endpoint: where the coordinator listens; it may start later.
            role: ``gateway`` for what outlives requests, ``client`` for a visitor.
            timeout_s: wait for the coordinator's welcome so long; None does not wait.
            on_lost: called with each actor that the coordinator calls lost or that left, and why.
            arena: what this client may lend through shared memory.
            on_introduce: called when a coordinator that may not know this client has been told who it is.
            on_silent: called with each heartbeat while the coordinator has left several unanswered.
            curve: the keys of a deployment that listens on TCP with keys: its own, or a client's whose name then begins
                with ``client.KEY``.

        Raises:
            Unavailable: no welcome within `timeout_s`.
            OmniBusError: the coordinator refused this client (another protocol version) within `timeout_s`.
        """
        client = cls(
            name,
            listen,
            coordinator_endpoint,
            role,
            on_lost,
            arena,
            on_introduce=on_introduce,
            on_silent=on_silent,
            curve=curve,
        )
        client.perform(client._member.start(client._driver.now))
        if timeout_s is not None:
            try:
                await client._join(timeout_s)
            except BaseException:
                await client.close()
                raise
        return client

    async def _join(self, timeout_s: float) -> None:
        await asyncio.wait({self._welcomed, self.leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.leaving.done():
            raise self.leaving.result()
        if not self._welcomed.done():
            raise Unavailable(f"no coordinator answers (waited {timeout_s:g} s)")

    async def submit(
        self,
        pipeline: str,
        outputs: Sequence[str] = (),
        params: dict[str, dict[str, Any]] | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        key: str = "",
        trace: str = "",
        input_bytes: int = 0,
        tokens: int = 0,
        prefix: tuple[int, ...] = (),
        session: str = "",
        wants_metrics: bool = False,
        former: RequestId = "",
    ) -> Request:
        """Run a request; returns when it is admitted.

        Args:
            pipeline: the pipeline's name.
            outputs: wanted output ports; all when empty.
            params: parameters by stage name.
            priority: higher goes first, whatever waits below it.
            timeout_s: the request's time limit from now.
            key: who asks, for fairness; never a secret.
            trace: W3C trace context.
            input_bytes: what is held for the request until it is admitted.
            tokens: what prompt and answer may come to; 0 is not known.
            prefix: of the prompt, for replicas that have it cached (`omni_bus.wire.prefix`).
            session: requests with the same name and key stay with their replicas.
            wants_metrics: the ends of outputs say what the stages did, as ``detail["metrics"]``.
            former: a request whose place this one takes, since its stages ended it before its time.

        Raises:
            Refused, BadInput, DeadlineExceeded: see `Request.admitted`.
        """
        request = Request(self, new_request_id())
        self.requests[request.id] = request
        request.limit(timeout_s)
        submit = Submit(
            request.id,
            pipeline,
            tuple(outputs),
            priority,
            timeout_s,
            key=key,
            trace=trace,
            input_bytes=input_bytes,
            tokens=tokens,
            prefix=prefix,
            session=session,
            wants_metrics=wants_metrics,
            former=former,
        )
        self.perform(self.core.submit(submit, params or {}, self._driver.now))
        await request.admitted()
        return request

    async def admin(self, op: str, **args: Any) -> Any:
        """Ask the coordinator for an operation and wait for its answer; bound it with a timeout.

        Raises:
            UnknownName: no such operation.
            Unavailable: the coordinator was lost, or has not answered for several heartbeats.
        """
        self._num_calls += 1
        call = self._num_calls
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self.perform(self.core.admin(call, op, args))
            return await future
        finally:
            del self._calls[call]

    @property
    def address(self) -> dict[str, str]:
        """This client as a supervisor reads it from the log."""
        return self._driver.address

    async def heard(self) -> None:
        """Wait until the coordinator says something: within a heartbeat, if there is one."""
        self._heard.clear()
        await self._heard.wait()

    def tell_lost(self, peer: Peer, *, is_settled: bool = False) -> None:
        """Tell the coordinator that an actor's process has ended; only a supervisor is believed.

        Args:
            peer: whose.
            is_settled: all that it sent has arrived.
        """
        self.perform(self._member.lost(peer, is_settled=is_settled))

    def allocate(self, num_bytes: int) -> Blob:
        """Return writable memory for an input of so many bytes, from any thread.

        A large payload made in it reaches stages of the same host without a copy: write it, send it with this `Blob`,
        and write no more. What it holds at first is undefined. It is taken back when no view of it is left, sent or
        not.

        Raises:
            ValueError: `num_bytes` is negative.
        """
        return self._driver.allocate(num_bytes)

    def tell_outlook(self, outlook: Outlook) -> None:
        """Tell the coordinator what becomes of a replica that does not serve; only a supervisor is believed."""
        self.perform(self._member.outlook(outlook))

    def ready(self) -> None:
        """Tell the coordinator that this gateway serves."""
        self.perform(self._member.ready())

    @property
    def leaving(self) -> asyncio.Future[OmniBusError]:
        """Done when the coordinator refused this actor."""
        return self._driver.leaving

    async def close(self, linger_s: float = 1.0) -> None:
        """Cancel what runs, say goodbye, close; what can't be sent within `linger_s` is dropped."""
        for request in list(self.requests.values()):
            request.cancel("the client closed")
        for call in self._calls.values():
            if not call.done():
                call.set_exception(Unavailable("the client closed"))
        self.perform(self._member.goodbye("closed"))
        await self._driver.close(linger_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def perform(self, effects: Sequence[Any]) -> None:
        """Carry out effects of the core."""
        self._driver.perform(effects, self._perform)

    # --- inside -----------------------------------------------------------------------------------------------

    def _on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> None:
        match frame:
            case Chunk() | Credit():
                self._driver.perform(self.core.on_frame(sender, frame, now), self._perform)
            case Welcome() | Refused() | Introduce() | Ping() | Lost() | Broken():
                if isinstance(frame, Welcome) and not self._welcomed.done():
                    self._welcomed.set_result(None)
                self.core.on_coordinator_heard()
                self._heard.set()
                self.perform(self._member.on_frame(frame, now))
                if isinstance(frame, Introduce):
                    self.perform(self.core.on_coordinator_changed(now))
                    if self._on_introduce is not None:
                        self._on_introduce()
                elif isinstance(frame, Broken) and frame.target == self._driver.me:
                    self.perform(self.core.on_link_broken(frame.source))
                elif isinstance(frame, Lost):
                    self.perform(self.core.on_peer_lost(frame.peer))
                    if self._on_lost is not None:
                        self._on_lost(frame.peer, frame.reason)
            case _:
                self.perform(self.core.on_frame(sender, frame, now))  # pyright: ignore[reportArgumentType] (others are refused there)

    def _on_unsent(self, request: RequestId, error: OmniBusError) -> None:
        self.perform(self.core.on_unsent(request, error))

    def _on_broken(self, peer: Peer) -> None:
        self.perform(self._member.on_link_broken(peer, self._driver.now))
        if peer == self._member.coordinator:
            self.perform(self.core.on_coordinator_changed(self._driver.now))
            if self._on_introduce is not None:
                self._on_introduce()

    def _on_timer(self, key: TimerKey, now: float) -> None:
        del key
        self.perform(self._member.on_timer(now))
        if self._member.is_coordinator_silent:
            self.perform(self.core.on_coordinator_silent())
            if self._on_silent is not None:
                self._on_silent()

    def _perform(self, effect: Any) -> None:
        match effect:
            case Deliver(request=request, port=port, payload=payload):
                handle = self.requests.get(request)
                if handle is not None:
                    handle.on_event(Item(port, payload))
            case Answered(call=call, result=result, error=error):
                future = self._calls.get(call)
                if future is None or future.done():
                    return
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            case Ended(request=request, error=error):
                handle = self.requests.pop(request, None)
                if handle is not None:
                    handle.on_ended(error)
            case Admitted() | PortEnded() | Writable():
                handle = self.requests.get(effect.request)
                if handle is not None:
                    _tell(handle, effect)
            case _:
                raise AssertionError(f"nobody carries out {effect}")


def _tell(handle: Request, effect: Admitted | PortEnded | Writable) -> None:
    match effect:
        case Admitted(route=route):
            handle.on_admitted(route)
        case PortEnded(port=port, finish=finish):
            handle.on_event(End(port, finish))
        case Writable(port=port):
            handle.on_writable(port)
