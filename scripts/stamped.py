"""Engines for benchmarks: chunks that say when they were made, sources with a settable pace, and stages to cross.

A request's prompt holds two numbers in its last message: how many chunks to make, and the seconds between two of them
(0: as fast as credit lets it). A chunk is a `Text` with the monotonic nanosecond of its making, which all processes of
a host share (clock_gettime(2), CLOCK_MONOTONIC), and a blank.

Found by name, as anybody's engines are: ``adapter = "stamped:EvenSource"`` with this folder in PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec

from omni_bus.engine import (
    Context,
    EngineRequest,
    Finished,
    Inputs,
    Output,
    Starved,
    StepEngine,
    StreamingEngine,
)
from omni_bus.errors import BadInput
from omni_bus.wire.buffers import view
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Blob, Json, Payload, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from omni_bus.engine import Event, Report
    from omni_bus.ids import RequestId


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of every engine here."""

    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 4096
    """Requests that run at once."""


STAMP_BYTES = 8


class Plan(NamedTuple):
    """What a prompt asks for."""

    num_chunks: int
    period_s: float


def prompt(num_chunks: int, period_s: float) -> dict[str, Any]:
    """Return what a client sends: one chat message."""
    return {"messages": [{"role": "user", "content": f"{num_chunks} {period_s}"}]}


def read_plan(payload: Payload) -> Plan:
    """Read what `prompt` wrote.

    Raises:
        BadInput: it is not two numbers in a chat message.
    """
    try:
        assert isinstance(payload, Json)
        num_chunks, period_s = payload.value["messages"][-1]["content"].split()
        return Plan(int(num_chunks), float(period_s))
    except (AssertionError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(
            "prompt: not a message with a count and seconds (allowed: '100 0.02')", field="prompt"
        ) from error


def stamp() -> Text:
    """Return a chunk made now."""
    return Text(f"{time.monotonic_ns()} ", 1)


class EvenSource(StreamingEngine):
    """Each request makes its chunks on a clock of its own, with a random beginning: requests that share nothing."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = Options

    def __init__(self, options: Options, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs

    def load(self, report: Report) -> None:
        """Nothing is loaded."""
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Make the chunks."""
        loop = asyncio.get_running_loop()
        async for payload in inputs.port("prompt"):
            plan = read_plan(payload)
            due = loop.time() + plan.period_s * random.random()
            for _ in range(plan.num_chunks):
                if plan.period_s:
                    await asyncio.sleep(due - loop.time())
                    due += plan.period_s
                yield "text", stamp()


class StepSource(StepEngine):
    """Every step makes one chunk of each request in it, as a language model does, and takes the longest period."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = Options

    def __init__(self, options: Options, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = self.max_resident = options.max_num_seqs
        self._plans: dict[RequestId, Plan] = {}
        self._made: dict[RequestId, int] = {}

    def load(self, report: Report) -> None:
        """Nothing is loaded."""
        report("ready", 1.0)

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request."""
        self._plans[request.id] = read_plan(inputs["prompt"][0])
        self._made[request.id] = 0

    def step(self, requests: Sequence[RequestId]) -> list[Event]:
        """Make one chunk of each."""
        period_s = max((self._plans[request].period_s for request in requests), default=0.0)
        if period_s:
            time.sleep(period_s)
        events: list[Event] = []
        for request in requests:
            self._made[request] += 1
            events.append(Output(request, "text", stamp()))
            if self._made[request] >= self._plans[request].num_chunks:
                events.append(Finished(request))
                self.abort(request)
        return events

    def abort(self, request: RequestId) -> None:
        """Drop a request."""
        self._plans.pop(request, None)
        self._made.pop(request, None)


class Relay(StreamingEngine):
    """Passes text on, piece by piece."""

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = Options

    def __init__(self, options: Options, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs

    def load(self, report: Report) -> None:
        """Nothing is loaded."""
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Take a piece, pass it on."""
        async for piece in inputs.port("text"):
            yield "text", piece


class StepRelay(StepEngine):
    """Passes text on in steps: each gives out all that came of every request in it, as a vocoder would."""

    is_input_streamed: ClassVar[bool] = True
    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = Options

    def __init__(self, options: Options, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = self.max_resident = options.max_num_seqs
        self._held: dict[RequestId, deque[Payload]] = {}
        self._ended: set[RequestId] = set()

    def load(self, report: Report) -> None:
        """Nothing is loaded."""
        report("ready", 1.0)

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request."""
        self._held[request.id] = deque()

    def feed(self, request: RequestId, port: str, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Keep it for the next step."""
        self._held[request].extend(payloads)
        if is_last:
            self._ended.add(request)

    def step(self, requests: Sequence[RequestId]) -> list[Event]:
        """Give out what came."""
        events: list[Event] = []
        for request in requests:
            held = self._held[request]
            events += [Output(request, "text", payload) for payload in held]
            held.clear()
            if request in self._ended:
                events.append(Finished(request))
                self.abort(request)
            else:
                events.append(Starved(request))
        return events

    def abort(self, request: RequestId) -> None:
        """Drop a request."""
        self._held.pop(request, None)
        self._ended.discard(request)


class TensorSource(StreamingEngine):
    """Sends a tensor of uint8 for each ``{"num_bytes": n, "is_in_place": b}``; its first eight bytes say when.

    In place it is made in the memory that the stage allocates, otherwise in the engine's own.
    """

    accepts: ClassVar[dict[str, str]] = {"ask": "json"}
    emits: ClassVar[dict[str, str]] = {"tensor": "tensor"}
    Options = Options

    def load(self, report: Report) -> None:
        """Nothing is loaded."""
        self._made: dict[int, Any] = {}
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Make each, then tell the time, then let it go."""
        import numpy as np

        async for payload in inputs.port("ask"):
            assert isinstance(payload, Json)
            size = payload.value["num_bytes"]
            if size not in self._made:
                self._made[size] = np.arange(size, dtype=np.uint8), np.empty(size, np.uint8)
            source, own = self._made[size]
            blob = self.context.allocate(size) if payload.value["is_in_place"] else Blob(own.data)
            np.copyto(np.frombuffer(blob.view, np.uint8), source)  # stands for the work that makes it
            blob.view[:STAMP_BYTES] = time.monotonic_ns().to_bytes(STAMP_BYTES, "little")
            yield "tensor", Tensor("uint8", (size,), blob)
            del blob


class TensorSink(StreamingEngine):
    """Says when each tensor was there as an array."""

    accepts: ClassVar[dict[str, str]] = {"tensor": "tensor"}
    emits: ClassVar[dict[str, str]] = {"came": "json"}
    Options = Options

    def load(self, report: Report) -> None:
        """Nothing is loaded."""
        report("ready", 1.0)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Look at the last element, and tell the time."""
        async for payload in inputs.port("tensor"):
            assert isinstance(payload, Tensor)
            assert view(payload)[-1] >= 0
            came = time.monotonic_ns()
            del payload
            yield "came", Json(came)
