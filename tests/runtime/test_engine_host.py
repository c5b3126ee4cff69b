"""Engines at work behind a host: what they yield, raise and leave hanging."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from omni_bus.core.effects import Abort, Add, Feed, Resume, Start, Step, Suspend
from omni_bus.engine import (
    Context,
    EngineRequest,
    Failure,
    Finished,
    NoOptions,
    Output,
    SessionEngine,
    Starved,
    StepEngine,
    StreamingEngine,
)
from omni_bus.errors import BadInput, StageFailed
from omni_bus.runtime.engine_host import MAX_LAG_PERIODS, EngineThread, StepHost, StreamingHost
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONTEXT = Context("llm", 0, 1, "/nowhere")


class Heard:
    """A listener that remembers, and wakes who waits."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.aborted: list[str] = []
        self.taken: list[str] = []
        self.num_steps = 0
        self.on_step: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def on_events(self, events: Sequence[Any]) -> None:
        self.events += events
        self._changed.set()

    def on_stepped(self) -> None:
        self.num_steps += 1
        self.on_step()
        self._changed.set()

    def on_aborted(self, request: str) -> None:
        self.aborted.append(request)
        self._changed.set()

    def on_taken(self, request: str, port: str, payload: Any) -> None:
        self.taken.append(payload.text)
        self._changed.set()

    def request(self, request: str) -> EngineRequest:
        return EngineRequest(request, NoOptions(), frozenset({"text"}))

    async def until(self, claim: Callable[[], bool]) -> None:
        while not claim():
            self._changed.clear()
            await self._changed.wait()


class Scripted(StepEngine):
    """Each step runs the script of each request."""

    accepts: ClassVar = {"text": "text"}
    emits: ClassVar = {"text": "text"}

    def __init__(self) -> None:
        super().__init__(NoOptions(), CONTEXT)
        self.held: set[str] = set()
        self.script: dict[str, Callable[[], Any]] = {}

    def load(self, report) -> None:
        pass

    def add(self, request, inputs) -> None:
        self.script.get(f"add {request.id}", lambda: None)()
        self.held.add(request.id)

    def step(self, requests) -> Any:
        events: list[Any] = []
        for request in requests:
            made = self.script.get(request, lambda r=request: [Output(r, "text", Text("x"))])()
            if made is None:
                return made
            events += made
        return events

    def run_ahead(self) -> None:
        self.script.get("ahead", lambda: None)()

    def abort(self, request) -> None:
        self.script.get(f"abort {request}", lambda: None)()
        self.held.discard(request)


@pytest.fixture
async def heard() -> Heard:
    return Heard()


@pytest.fixture
async def engine():
    return Scripted()


@pytest.fixture
async def host(engine: Scripted, heard: Heard):
    thread = EngineThread("llm.0")
    yield StepHost(engine, thread, "llm", heard)
    thread.stop()


class Panic(BaseException):
    """As bindings to Rust raise it: no `Exception`."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it can't even say what it is")


BREACHES: list[tuple[Callable[[str], Any], str]] = [
    (lambda r: Output(r, "sound", Text("x")), "it emitted on port 'sound' (allowed: text)"),
    (lambda r: Output(r, 5, Text("x")), "it emitted on port 5 (allowed: text)"),  # type: ignore[arg-type]
    (lambda r: Output(r, "text", Json(1)), "it emitted a json on port 'text' (allowed: text)"),
    (lambda r: Output(r, "text", "x"), "it emitted a str on port 'text' (allowed: text)"),  # type: ignore[arg-type]
    (lambda r: Output(r, "text", Text("x", -1)), "num_tokens -1 is negative"),
    (lambda r: Finished(r, "stop"), "it finished with a str"),  # type: ignore[arg-type]
    (lambda r: Finished(r, Finish("stop", Usage(-1))), "prompt_tokens -1"),
    (lambda r: Finished(r, Finish("stop", Usage(0, 2**70))), "completion_tokens 1180591620717411303424"),
    (lambda r: Finished(r, Finish("stop", Usage(), {"a": object()})), "a object where only"),
    (lambda r: Finished(r, Finish("stop", Usage(), {"a": 2**70})), "can't serialize ints"),
    (lambda r: Finished(r, Finish(5)), "a int as the reason"),  # type: ignore[arg-type]
    (lambda r: Failure(r, ValueError("x")), "a Failure carries a ValueError"),  # type: ignore[arg-type]
    (Starved, "it starved"),
]
"""What an engine may say against its own contract, and what its request ends with."""


def raise_(error: BaseException) -> Callable[[], Any]:
    def script() -> None:
        raise error

    return script


async def test_engine_runs_ahead_after_a_step_when_nothing_waits(host, engine, heard) -> None:
    ahead = threading.Event()
    engine.script["ahead"] = ahead.set
    host.perform(Add("r", {}))
    host.perform(Step(("r",)))

    await asyncio.to_thread(ahead.wait)
    await heard.until(lambda: heard.num_steps == 1)


async def test_engine_does_not_run_ahead_of_what_waits(host, engine, heard) -> None:
    """An abort, say, goes first; the step that was asked for next is not ahead of anybody."""
    order: list[str] = []
    in_step, may_go_on = threading.Event(), threading.Event()

    def first() -> list[Any]:
        in_step.set()
        may_go_on.wait()
        return []

    engine.script |= {"first": first, "ahead": lambda: order.append("ahead")}
    engine.script["abort second"] = lambda: order.append("abort")
    for request in ("first", "second"):
        host.perform(Add(request, {}))
    host.perform(Step(("first",)))
    await asyncio.to_thread(in_step.wait)
    host.perform(Abort("second"))
    may_go_on.set()
    await heard.until(lambda: heard.aborted == ["second"])

    assert order == ["abort"]


async def test_engine_that_fails_ahead_goes_on(host, engine, heard) -> None:
    engine.script["ahead"] = raise_(Panic("ahead"))
    host.perform(Add("r", {}))
    for number in (1, 2):
        host.perform(Step(("r",)))
        await heard.until(lambda number=number: heard.num_steps == number)

    assert heard.events == [Output("r", "text", Text("x"))] * 2


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (raise_(ValueError("boom")), "ValueError: boom"),
        (raise_(SystemExit("no more")), "SystemExit: no more"),
        (raise_(Panic("in Rust")), "Panic: in Rust"),
        (raise_(Speechless()), "Speechless"),
        (lambda: None, "TypeError"),
        (lambda: ["text"], "a step returned a str among its events"),
    ],
)
async def test_failing_step_fails_only_its_requests(host, engine, heard, script, said: str) -> None:
    for request in ("good", "bad"):
        host.perform(Add(request, {}))
    engine.script["bad"] = script

    host.perform(Step(("bad",)))
    host.perform(Step(("good", "bad")))
    await heard.until(lambda: heard.num_steps == 2)

    failure, output = heard.events
    assert isinstance(failure, Failure)
    assert failure.request == "bad"
    assert isinstance(failure.error, StageFailed)
    assert said in failure.error.message
    assert output == Output("good", "text", Text("x"))
    assert engine.held == {"good"}


@pytest.mark.parametrize(("event", "said"), BREACHES)
async def test_event_against_the_contract_fails_only_its_request(host, engine, heard, event, said: str) -> None:
    """Sent on it would be lost silently, or could not be sent and leave the client waiting for ever."""
    for request in ("good", "bad"):
        host.perform(Add(request, {}))
    engine.script["bad"] = lambda: [event("bad")]

    host.perform(Step(("good", "bad")))
    await heard.until(lambda: heard.num_steps == 1)

    output, failure = heard.events
    assert output == Output("good", "text", Text("x"))
    assert isinstance(failure, Failure)
    assert failure.request == "bad"
    assert isinstance(failure.error, StageFailed)
    assert said in failure.error.message
    assert engine.held == {"good"}


async def test_failing_batch_tells_nobody_of_the_others(host, engine, heard) -> None:
    """An exception's message may quote the prompt of one of them."""
    for request in ("mine", "theirs"):
        host.perform(Add(request, {}))
    engine.script["mine"] = raise_(ValueError("can't read 'my secret'"))
    host.perform(Step(("mine", "theirs")))
    await heard.until(lambda: heard.num_steps == 1)

    assert [event.error.message for event in heard.events] == ["stage 'llm' failed: ValueError"] * 2


async def test_call_that_raises_does_not_end_the_thread() -> None:
    thread = EngineThread("llm.0")
    thread.post(raise_(Panic("unforeseen")))

    assert await thread.run(lambda: "goes on") == "goes on"
    thread.stop()


async def test_refused_request_ends_alone(host, engine, heard) -> None:
    engine.script["add bad"] = raise_(BadInput("prompt: too odd", field="prompt"))
    host.perform(Add("bad", {}))
    host.perform(Add("good", {}))
    host.perform(Step(("bad", "good")))
    await heard.until(lambda: heard.num_steps == 1)

    assert heard.events[0].error.message == "prompt: too odd"
    assert heard.events[1:] == [Output("good", "text", Text("x"))]


async def test_fed_input_that_raises_fails_its_request(host, engine, heard) -> None:
    host.perform(Add("bad", {}))
    host.perform(Feed("bad", "text", (Text("x"),), is_last=False))  # it does not stream its input
    await heard.until(lambda: bool(heard.events))

    assert isinstance(heard.events[0].error, StageFailed)
    assert engine.held == set()


async def test_failing_abort_is_still_acknowledged(host, engine, heard) -> None:
    engine.script["abort bad"] = raise_(RuntimeError("stuck"))
    host.perform(Add("bad", {}))
    host.perform(Abort("bad"))
    await heard.until(lambda: heard.aborted == ["bad"])


async def test_aborted_request_is_left_out_of_the_step(host, engine, heard) -> None:
    host.perform(Add("gone", {}))
    host.perform(Abort("gone"))
    host.perform(Step(("gone",)))
    await heard.until(lambda: heard.num_steps == 1)

    assert heard.events == []


async def test_hanging_step_acknowledges_no_abort(host, engine, heard) -> None:
    """What the engine has not let go of is not free; the loop goes on meanwhile."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> list[Any]:
        hangs.set()
        goes_on.wait()
        return [Finished("stuck")]

    engine.script["stuck"] = hang
    host.perform(Add("stuck", {}))
    host.perform(Step(("stuck",)))
    await asyncio.to_thread(hangs.wait)
    host.perform(Abort("stuck"))
    await asyncio.wait_for(host.close(), 10)
    assert (heard.aborted, heard.num_steps) == ([], 0)

    goes_on.set()
    await heard.until(lambda: heard.aborted == ["stuck"])


async def test_listener_that_raises_does_not_stop_the_steps(host, engine, heard) -> None:
    def refuse(events: Sequence[Any]) -> None:
        raise RuntimeError("core")

    heard.on_events = refuse
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    host.perform(Add("one", {}))
    host.perform(Step(("one",)))
    await heard.until(lambda: heard.num_steps == 1)


class FakeLoop:
    """Only what pacing uses: a clock, and calls in time order."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        self.calls.append((at, call))

    def run_next(self) -> float:
        at, call = self.calls.pop(0)
        self.now = max(self.now, at)
        call()
        return self.now


class Paced(SessionEngine):
    accepts: ClassVar = {"text": "text"}
    emits: ClassVar = {"text": "text"}
    frame_period_s = 0.1

    def load(self, report) -> None:
        raise NotImplementedError

    def add(self, request, inputs) -> None:
        raise NotImplementedError

    def step(self, requests) -> Any:
        raise NotImplementedError

    def abort(self, request) -> None:
        raise NotImplementedError


class FakeThread:
    """Takes calls and does not run them."""

    def post(self, call: Callable[[], None]) -> None:
        pass


class Pacing:
    """A session engine's host on a clock of its own; `begun` says when each step began, in seconds."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.is_busy = True
        self.loop = FakeLoop()
        heard = Heard()
        heard.on_step = self.begin
        self.host = StepHost(Paced(NoOptions(), CONTEXT), FakeThread(), "s", heard)  # type: ignore[arg-type]
        self.host._loop = self.loop  # type: ignore[assignment]

    def begin(self) -> None:
        if self.is_busy:
            self.begun.append(round(self.loop.now - 100.0, 6))
            self.host.perform(Step(("r",)))

    def steps(self, *times_s: float) -> list[float]:
        for time_s in times_s:
            self.loop.now += time_s
            self.host._stepped(())
            self.loop.run_next()
        return self.begun


@pytest.fixture
async def pacing() -> Pacing:
    pacing = Pacing()
    pacing.begin()
    return pacing


async def test_session_steps_keep_their_period(pacing: Pacing) -> None:
    assert pacing.steps(0.01, 0.02, 0.03) == [0.0, 0.1, 0.2, 0.3]


async def test_slow_session_step_is_made_up_for(pacing: Pacing) -> None:
    assert pacing.steps(0.25, 0.01, 0.01, 0.01) == [0.0, 0.25, 0.26, 0.3, 0.4]


async def test_long_stall_is_not_made_up_for_wholly(pacing: Pacing) -> None:
    begun = pacing.steps(100.0, *[0.0] * 20)

    assert sum(at == 100.0 for at in begun) == MAX_LAG_PERIODS + 1
    assert begun[-1] == pytest.approx(100.0 + (20 - MAX_LAG_PERIODS) * 0.1)


async def test_idle_session_engine_owes_no_steps(pacing: Pacing) -> None:
    pacing.steps(0.01)
    pacing.is_busy = False
    pacing.steps(0.01)
    pacing.loop.now += 5.0
    pacing.is_busy = True
    pacing.begin()

    assert pacing.steps(0.01) == [0.0, 0.1, 5.2, 5.3]


class Speaking(StreamingEngine):
    """Answers each input; words of its input make it misbehave."""

    accepts: ClassVar = {"text": "text"}
    emits: ClassVar = {"text": "text"}

    def __init__(self) -> None:
        super().__init__(NoOptions(), CONTEXT)
        self.ended: list[str] = []

    def load(self, report) -> None:
        pass

    async def run(self, request, inputs):
        nonsense: Any = 42
        try:
            async for piece in inputs.port("text"):
                assert isinstance(piece, Text)
                match piece.text:
                    case "raise":
                        raise ValueError("boom")
                    case "exit":
                        raise SystemExit("no more")
                    case "panic":
                        raise Panic("in Rust")
                    case "cancelled":
                        raise asyncio.CancelledError
                    case "wrong port":
                        yield "sound", Text("x")
                    case "wrong kind":
                        yield "text", Json(1)
                    case "wrong finish":
                        yield "text", Text("x")
                        yield Finish("stop", Usage(-1))
                        return
                    case "nonsense":
                        yield nonsense
                    case "hang":
                        await asyncio.Event().wait()
                    case "swallow":
                        try:
                            await asyncio.Event().wait()
                        except asyncio.CancelledError:
                            yield "text", Text("not yet")
                yield "text", Text(piece.text.upper())
            yield Finish("enough")
        finally:
            self.ended.append(request.id)


@pytest.fixture
async def speaking() -> Speaking:
    return Speaking()


@pytest.fixture
async def streaming(speaking: Speaking, heard: Heard):
    host = StreamingHost(speaking, "voice", heard)
    yield host
    await host.close()


def feed(host: StreamingHost, *texts: str, is_last: bool = False) -> None:
    host.perform(Feed("r", "text", tuple(Text(text) for text in texts), is_last))


async def test_stream_ends_with_its_finish(streaming, heard) -> None:
    streaming.perform(Start("r"))
    feed(streaming, "a", "b", is_last=True)
    await heard.until(lambda: bool(heard.events) and isinstance(heard.events[-1], Finished))

    assert [event.payload.text for event in heard.events[:-1]] == ["A", "B"]
    assert heard.events[-1].finish.reason == "enough"
    assert heard.taken == ["a", "b"]


async def test_stream_with_a_finish_that_cannot_be_sent_fails(streaming, heard) -> None:
    streaming.perform(Start("r"))
    feed(streaming, "wrong finish", is_last=True)
    await heard.until(lambda: len(heard.events) == 2)

    assert isinstance(heard.events[1], Failure)
    assert "prompt_tokens -1" in heard.events[1].error.message


@pytest.mark.parametrize("word", ["raise", "exit", "nonsense", "panic", "cancelled", "wrong port", "wrong kind"])
async def test_generator_that_raises_fails_its_request(streaming, heard, speaking, word: str) -> None:
    streaming.perform(Start("r"))
    feed(streaming, "a", word)
    await heard.until(lambda: isinstance(heard.events[-1:] and heard.events[-1], Failure))

    assert isinstance(heard.events[-1].error, StageFailed)
    assert speaking.ended == ["r"]


async def test_suspended_stream_takes_nothing_more(streaming, heard) -> None:
    streaming.perform(Start("r"))
    feed(streaming, "a")
    streaming.perform(Suspend("r"))
    feed(streaming, "b")
    await heard.until(lambda: len(heard.events) == 1)
    assert heard.taken == ["a"]

    streaming.perform(Resume("r"))
    await heard.until(lambda: len(heard.events) == 2)


@pytest.mark.parametrize("point", ["before it runs", "waiting for input", "suspended", "hanging", "swallowing"])
async def test_abort_is_acknowledged_at_each_point(streaming, heard, speaking, point: str) -> None:
    streaming.perform(Start("r"))
    match point:
        case "waiting for input":
            feed(streaming, "a")
            await heard.until(lambda: len(heard.events) == 1)
        case "suspended":
            feed(streaming, "a", "b")
            streaming.perform(Suspend("r"))
            await heard.until(lambda: len(heard.events) == 1)
        case "hanging" | "swallowing":
            feed(streaming, "hang" if point == "hanging" else "swallow")
            await heard.until(lambda: len(heard.taken) == 1)
            await asyncio.sleep(0)

    streaming.perform(Abort("r"))
    await heard.until(lambda: heard.aborted == ["r"])

    assert speaking.ended == ([] if point == "before it runs" else ["r"])
    assert not any(isinstance(event, Finished | Failure) for event in heard.events)


async def test_abort_of_an_unknown_request_is_acknowledged(streaming, heard) -> None:
    streaming.perform(Abort("never"))

    assert heard.aborted == ["never"]
