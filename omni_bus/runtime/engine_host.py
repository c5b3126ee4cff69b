"""Engines at work: one host per shape, between a stage's core on the loop and the engine's own thread or generators."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import aclosing
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from omni_bus.core.effects import Abort, Add, Feed, Resume, Start, Step, Suspend
from omni_bus.core.stage import stage_failed
from omni_bus.engine import (
    EngineRequest,
    Failure,
    Finished,
    Inputs,
    Output,
    SessionEngine,
    StepEngine,
    StreamingEngine,
)
from omni_bus.errors import OmniBusError, StageFailed
from omni_bus.runtime.engine_events import breach, checked
from omni_bus.wire.frames import Finish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from omni_bus.engine import Engine, Event
    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Payload

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears what the engine did; called on the loop."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Outputs, ends and failures."""
        ...

    def on_stepped(self) -> None:
        """The step is over, and the next may begin."""
        ...

    def on_aborted(self, request: RequestId) -> None:
        """Nothing of the request is left."""
        ...

    def on_taken(self, request: RequestId, port: str, payload: Payload) -> None:
        """The engine took an input."""
        ...

    def request(self, request: RequestId) -> EngineRequest:
        """The request as the engine sees it."""
        ...


class EngineThread:
    """One thread that runs calls in order. Daemonic: an engine that hangs must not keep its process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.post: Callable[[Callable[[], None]], None] = self._calls.put
        """Runs a call after the ones before it; it handles its own errors."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        return self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """No call waits behind the one that runs."""
        return self._calls.empty()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run `call` after the ones before it, and return or raise what it did."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def attempt() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 (handed to the waiter, whatever it is)
                self._loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                self._loop.call_soon_threadsafe(_settle, future, result, None)

        self.post(attempt)
        return await future

    def stop(self) -> None:
        """End the thread after the calls before."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:  # a call handles its own errors; one that does not must not be the last
                logger.exception("a call on the engine's thread failed")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


_RAISED = (BaseException,)
"""What an engine's call may raise at the cost of its requests only: some libraries exit where others raise, and a
panic in Rust is no `Exception`. Without this it would end the thread, and every later request would wait for ever."""

MAX_LAG_PERIODS = 8
"""A session engine that was held up makes up for so many periods, and lets go of what it missed before them."""


def _log_raised(stage: str, call: str, error: BaseException) -> None:
    """Say where an engine raised; not with what message, since it may quote a prompt."""
    fields = {"stage": stage, "call": call, "error": type(error).__name__}
    logger.error("the engine raised", exc_info=error, extra={"fields": fields})


EngineEffect: TypeAlias = Start | Add | Feed | Suspend | Resume | Step | Abort


class StepHost:
    """Runs a step or session engine: every call on the engine's thread, in the order of the effects."""

    def __init__(self, engine: StepEngine, thread: EngineThread, stage: str, listener: Listener) -> None:
        self._engine = engine
        self._thread = thread
        self._stage = stage
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._period_s = engine.frame_period_s if isinstance(engine, SessionEngine) else 0.0
        self._due_at = 0.0
        """When the step under way was due."""
        self._is_on_time = False
        """A step asked for now follows the one before it at the period."""
        self._held: set[RequestId] = set()
        """Requests that the engine has; touched on its thread only."""
        self._calls: list[Callable[[], None]] = []
        """What the engine must do: handed over with the step or abort that follows, or at the end of the loop's turn.
        Handing over wakes the engine's thread, which costs more than most calls."""

    def perform(self, effect: EngineEffect) -> None:
        """Carry out an effect of the core."""
        match effect:
            case Step(requests=requests):
                if self._period_s and not self._is_on_time:
                    self._due_at = self._loop.time()
                self._calls.append(partial(self._step, requests))
                self._hand_over()
            case Feed(request=request, port=port, payloads=payloads, is_last=is_last):
                self._do_soon(lambda: self._feed(request, port, payloads, is_last=is_last))
            case Add(request=request, inputs=inputs):
                wanted = self._listener.request(request)
                self._do_soon(lambda: self._add(wanted, inputs))
            case Abort(request=request):
                self._calls.append(lambda: self._abort(request))
                self._hand_over()
            case _:
                raise AssertionError(f"a step engine has no {effect}")

    def _do_soon(self, call: Callable[[], None]) -> None:
        if not self._calls:
            self._loop.call_soon(self._hand_over)
        self._calls.append(call)

    def _hand_over(self) -> None:
        if self._calls:
            calls, self._calls = self._calls, []
            self._thread.post(calls[0] if len(calls) == 1 else partial(_call_all, calls))

    async def close(self) -> None:
        """Leave nothing to be called after the engine's own `close`; the thread ends with its calls."""
        self._hand_over()

    # --- on the engine's thread -------------------------------------------------------------------------------

    def _add(self, wanted: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        try:
            self._engine.add(wanted, inputs)
        except _RAISED as error:  # a request that can't be added ends alone
            self._tell([Failure(wanted.id, self._as_error("add", error))])
        else:
            self._held.add(wanted.id)

    def _feed(self, request: RequestId, port: str, payloads: tuple[Payload, ...], *, is_last: bool) -> None:
        if request not in self._held:
            return
        try:
            self._engine.feed(request, port, payloads, is_last=is_last)
        except _RAISED as error:  # input that the engine refuses ends its request alone
            self._drop(request)
            self._tell([Failure(request, self._as_error("feed", error))])

    def _step(self, requests: tuple[RequestId, ...]) -> None:
        held = [request for request in requests if request in self._held]
        events: Sequence[Event] = ()
        if held:
            try:
                events = self._judge(checked(self._engine.step(held)))
            except _RAISED as error:  # a step that raises ends the requests in it; others keep their state
                for request in held:
                    self._drop(request)
                said = self._as_error("step", error)
                if len(held) > 1 and not isinstance(error, OmniBusError):
                    # What it says may quote one of the prompts, and all of their clients would read it.
                    said = StageFailed(f"stage '{self._stage}' failed: {type(error).__name__}", stage=self._stage)
                events = [Failure(request, said) for request in held]
        for event in events:
            if isinstance(event, Finished | Failure):
                self._held.discard(event.request)
        self._loop.call_soon_threadsafe(self._stepped, events)
        if self._thread.is_idle:
            try:
                self._engine.run_ahead()
            except _RAISED as error:  # the step that comes next fails for it, or does better
                _log_raised(self._stage, "run_ahead", error)

    def _judge(self, events: Sequence[Event]) -> list[Event]:
        """Put a failure in the place of each event that breaks the engine's contract; it costs that request only."""
        judged: list[Event] = []
        for event in events:
            broken = breach(event, self._engine)
            if broken is None:
                judged.append(event)
                continue
            self._drop(event.request)
            judged.append(Failure(event.request, stage_failed(broken, self._stage)))
        return judged

    def _abort(self, request: RequestId) -> None:
        self._drop(request)
        self._loop.call_soon_threadsafe(self._listener.on_aborted, request)

    def _drop(self, request: RequestId) -> None:
        self._held.discard(request)
        try:
            self._engine.abort(request)
        except _RAISED as error:  # the slot's state is unknown, the requests in the others are not
            _log_raised(self._stage, "abort", error)

    def _as_error(self, call: str, error: BaseException) -> OmniBusError:
        if not isinstance(error, OmniBusError):
            _log_raised(self._stage, call, error)
        return stage_failed(error, self._stage)

    def _tell(self, events: Sequence[Event]) -> None:
        self._loop.call_soon_threadsafe(self._listener.on_events, events)

    # --- on the loop ------------------------------------------------------------------------------------------

    def _stepped(self, events: Sequence[Event]) -> None:
        try:
            if events:
                self._listener.on_events(events)
        finally:  # whatever became of these events, the next step must come
            if self._period_s:
                # Counted from when this step was due: the period holds on average although some steps take longer.
                self._due_at = max(self._due_at + self._period_s, self._loop.time() - MAX_LAG_PERIODS * self._period_s)
                self._loop.call_at(self._due_at, self._next_due)
            else:
                self._listener.on_stepped()

    def _next_due(self) -> None:
        self._is_on_time = True
        self._listener.on_stepped()
        self._is_on_time = False


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class _PortInput(msgspec.Struct):
    payloads: deque[Payload] = msgspec.field(default_factory=deque)
    is_ended: bool = False
    waiters: list[asyncio.Future[None]] = []
    """Of whoever iterates and has taken all; futures, since an `asyncio.Event` costs each chunk three times as much."""


class _StreamInputs(Inputs):
    """What `Feed` brought and the generator has not taken."""

    def __init__(self, request: RequestId, listener: Listener) -> None:
        self._request = request
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._ports: dict[str, _PortInput] = {}

    def feed(self, port: str, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Take what came."""
        held = self._port(port)
        held.payloads.extend(payloads)
        held.is_ended = held.is_ended or is_last
        waiters, held.waiters = held.waiters, []
        for waiter in waiters:
            if not waiter.done():  # cancelled with whoever waited
                waiter.set_result(None)

    async def port(self, name: str) -> AsyncIterator[Payload]:
        """Iterate as input comes."""
        held = self._port(name)
        while True:
            while held.payloads:
                self._listener.on_taken(self._request, name, held.payloads[0])
                yield held.payloads.popleft()  # in no variable, which would keep its memory until the next one comes
            if held.is_ended:
                return
            waiter: asyncio.Future[None] = self._loop.create_future()
            held.waiters.append(waiter)
            await waiter

    def _port(self, name: str) -> _PortInput:
        held = self._ports.get(name)
        if held is None:
            held = self._ports[name] = _PortInput()
        return held


class _Run:
    """One request's generator under way."""

    def __init__(self, inputs: _StreamInputs) -> None:
        self.inputs = inputs
        self.may_advance = asyncio.Event()
        self.may_advance.set()
        self.is_aborted = False
        self.task: asyncio.Task[None] | None = None


class StreamingHost:
    """Runs a streaming engine: one task per request on the loop, advanced only while the request may."""

    def __init__(self, engine: StreamingEngine, stage: str, listener: Listener) -> None:
        self._engine = engine
        self._stage = stage
        self._listener = listener
        self._runs: dict[RequestId, _Run] = {}

    def perform(self, effect: EngineEffect) -> None:
        """Carry out an effect of the core."""
        match effect:
            case Start(request=request):
                self._start(request)
            case Feed(request=request, port=port, payloads=payloads, is_last=is_last):
                if request in self._runs:
                    self._runs[request].inputs.feed(port, payloads, is_last=is_last)
            case Suspend(request=request):
                if request in self._runs:
                    self._runs[request].may_advance.clear()
            case Resume(request=request):
                if request in self._runs:
                    self._runs[request].may_advance.set()
            case Abort(request=request):
                self._abort(request)
            case _:
                raise AssertionError(f"a streaming engine has no {effect}")

    async def close(self) -> None:
        """Cancel every generator and wait for it, then close what the engine has on this loop."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for run in self._runs.values():
            run.is_aborted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.aclose()

    def _start(self, request: RequestId) -> None:
        run = self._runs[request] = _Run(_StreamInputs(request, self._listener))
        for port in self._engine.optional_inputs - self._listener.request(request).inputs:
            run.inputs.feed(port, (), is_last=True)  # no edge leads there
        run.task = asyncio.create_task(self._run(request, run), name=f"{self._stage} {request}")
        run.task.add_done_callback(lambda _: self._runs.pop(request, None))

    def _abort(self, request: RequestId) -> None:
        run = self._runs.get(request)
        if run is None or run.task is None:
            self._listener.on_aborted(request)
            return
        run.is_aborted = True
        run.task.add_done_callback(lambda _: self._listener.on_aborted(request))
        run.task.cancel()

    async def _run(self, request: RequestId, run: _Run) -> None:
        end: Event
        try:
            finish = Finish()
            async with aclosing(self._engine.run(self._listener.request(request), run.inputs)) as outputs:  # pyright: ignore[reportArgumentType] (run is an async generator)
                async for output in outputs:
                    if run.is_aborted:  # it swallowed the cancel and went on
                        raise asyncio.CancelledError
                    if isinstance(output, Finish):
                        finish = output
                        continue
                    event = Output(request, *output)
                    if (broken := breach(event, self._engine)) is not None:
                        raise broken
                    self._listener.on_events([event])
                    del output, event  # else its memory is kept while the request is suspended
                    if not run.may_advance.is_set():
                        await run.may_advance.wait()
            end = Finished(request, finish)
            if (broken := breach(end, self._engine)) is not None:
                raise broken
        except asyncio.CancelledError:
            if run.is_aborted:
                # Not raised: the task would keep the traceback, and that the last payload, until a garbage collection.
                return
            # Something within the engine was cancelled, not this request: it ends, and says so.
            end = Failure(request, StageFailed(f"stage '{self._stage}' failed: it was cancelled", stage=self._stage))
        except _RAISED as error:  # whatever an engine raises ends its request alone
            if not isinstance(error, OmniBusError):
                _log_raised(self._stage, "run", error)
            end = Failure(request, stage_failed(error, self._stage))
        self._listener.on_events([end])


def host_for(engine: Engine, thread: EngineThread, stage: str, listener: Listener) -> StepHost | StreamingHost:
    """Return the host of an engine's shape."""
    if isinstance(engine, StreamingEngine):
        return StreamingHost(engine, stage, listener)
    assert isinstance(engine, StepEngine)
    return StepHost(engine, thread, stage, listener)
