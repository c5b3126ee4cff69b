"""Drives engines without a stage around them: for the authors of adapters and their tests.

`make_engine` builds and loads an engine as a stage does, `StepDriver` plays the scheduler of a step or session engine,
`start_streaming` and `run_streaming` the stage of a streaming engine. All of them check each value that the engine
gives out and raise `ContractBroken`, so that a test which only looks at results checks the rules as well.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import msgspec

from omni_bus.engine import Context, Engine, EngineRequest, Failure, Finished, Inputs, Output, Starved
from omni_bus.errors import ConfigError, OmniBusError
from omni_bus.wire import payloads
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from types import TracebackType

    from omni_bus.engine import Event, StepEngine, StreamingEngine
    from omni_bus.ids import RequestId

    Source: TypeAlias = "Iterable[Payload] | AsyncIterator[Payload]"
    """What comes in on one port: payloads that are there already, or an iterator that makes them wait."""

EngineT = TypeVar("EngineT", bound=Engine)
_numbers = itertools.count(1)


class ContractBroken(AssertionError):
    """An engine did what `omni_bus.engine` forbids."""


# --- engines and requests -----------------------------------------------------------------------------------


def make_context(*, num_threads: int = 1, cache_dir: str = "") -> Context:
    """Return what a stage process would tell its engine; caches go to the temporary folder unless told otherwise.

    The memory that it allocates is full of rubbish, as shared memory that was used before is.
    """
    cache_dir = cache_dir or tempfile.gettempdir()
    return Context("test", 0, num_threads, cache_dir, allocate=lambda num_bytes: Blob(bytearray(b"\xa5" * num_bytes)))


def build_engine(engine_class: type[EngineT], options: Mapping[str, Any] | None = None, **context: Any) -> EngineT:
    """Return an engine that is not loaded.

    Args:
        engine_class: the adapter.
        options: its own keys, as in the TOML.
        context: what `make_context` takes.

    Raises:
        msgspec.ValidationError: the engine's `Options` doesn't allow these.
        ConfigError: the engine's `check` refuses them.
    """
    converted = msgspec.convert(dict(options or {}), engine_class.Options)
    if problems := engine_class.check(converted):
        raise ConfigError(problems)
    return engine_class(converted, make_context(**context))


def make_engine(engine_class: type[EngineT], options: Mapping[str, Any] | None = None, **context: Any) -> EngineT:
    """Return a loaded engine; otherwise as `build_engine`.

    Raises:
        ContractBroken: the load reported no phase, or a fraction outside [0, 1].
    """
    engine = build_engine(engine_class, options, **context)
    engine.load(check_report)
    return engine


def check_report(phase: str, fraction: float) -> None:
    """Take a load's report.

    Raises:
        ContractBroken: no phase, or a fraction outside [0, 1].
    """
    if not phase or not 0.0 <= fraction <= 1.0:
        raise ContractBroken(f"report({phase!r}, {fraction!r}) (allowed: a phase, and a fraction in [0, 1])")


def make_request(
    engine: Engine, params: Mapping[str, Any] | None = None, *, outputs: Iterable[str] | None = None
) -> EngineRequest:
    """Return a request for these output ports (by default all), its parameters validated as a stage does.

    Raises:
        msgspec.ValidationError: the engine's `Params` doesn't allow these.
    """
    converted = msgspec.convert(dict(params or {}), type(engine).Params)
    return EngineRequest(f"test-{next(_numbers)}", converted, frozenset(engine.emits if outputs is None else outputs))


def check_output(engine: Engine, request: EngineRequest, port: str, payload: Payload) -> None:
    """Refuse an output that the engine's declaration, the request or the wire doesn't allow.

    Raises:
        ContractBroken: an undeclared or unwanted port, another kind than declared, or a size that its header denies.
    """
    if port not in engine.emits:
        raise ContractBroken(f"output on port '{port}' (declared: {', '.join(engine.emits)})")
    if port not in request.outputs:
        raise ContractBroken(f"output on port '{port}' (wanted: {', '.join(sorted(request.outputs)) or 'none'})")
    if kind_of(payload) != engine.emits[port]:
        raise ContractBroken(f"{kind_of(payload)} on port '{port}' (declared: {engine.emits[port]})")
    try:
        payloads.check(payload)
    except ValueError as error:
        raise ContractBroken(f"port '{port}': {error}") from error


class Collected(msgspec.Struct):
    """What a request put out, in order, and how it ended."""

    outputs: list[tuple[str, Payload]] = []
    finish: Finish = Finish()
    is_finished: bool = False
    error: OmniBusError | None = None

    @property
    def is_over(self) -> bool:
        """True once the request finished or failed."""
        return self.is_finished or self.error is not None

    @property
    def text(self) -> str:
        """All text, joined."""
        return "".join(payload.text for _, payload in self.outputs if isinstance(payload, Text))

    @property
    def pcm(self) -> bytes:
        """All samples, joined."""
        return b"".join(bytes(payload.data.view) for _, payload in self.outputs if isinstance(payload, Audio))

    def port(self, name: str) -> list[Any]:
        """Return the payloads of one output port."""
        return [payload for port, payload in self.outputs if port == name]


# --- streaming engines --------------------------------------------------------------------------------------


class ListedInputs(Inputs):
    """Inputs of one request from lists or iterators; ports that are not named are empty."""

    def __init__(self, ports: Mapping[str, Source]) -> None:
        self._ports = dict(ports)
        self.num_taken = dict.fromkeys(ports, 0)
        """Payloads that the engine took so far, by port."""

    async def port(self, name: str) -> AsyncIterator[Payload]:
        """Iterate over one port."""
        source = self._ports.get(name, ())
        if hasattr(source, "__aiter__"):
            async for payload in source:  # pyright: ignore[reportGeneralTypeIssues] (checked above)
                self.num_taken[name] += 1
                yield payload
        else:
            for payload in source:  # pyright: ignore[reportGeneralTypeIssues]
                self.num_taken[name] += 1
                yield payload


class Stream:
    """One request on a `StreamingEngine`, pulled output by output; close it (or use it as a context) at any point."""

    def __init__(self, engine: StreamingEngine, request: EngineRequest, inputs: Inputs) -> None:
        self._engine = engine
        self._request = request
        self._outputs: Any = engine.run(request, inputs)
        self.result = Collected()

    async def pull(self) -> tuple[str, Payload] | None:
        """Return the next output, None at the end (`result.is_finished` then).

        Raises:
            OmniBusError: what the engine ended the request with.
            ContractBroken: an output that the interface forbids, or one after the `Finish`.
        """
        async for item in self._outputs:
            if self.result.is_finished:
                raise ContractBroken(f"{item} came after the Finish")
            if isinstance(item, Finish):
                self.result.finish = item
                self.result.is_finished = True
                continue
            port, payload = item
            check_output(self._engine, self._request, port, payload)
            self.result.outputs.append((port, payload))
            return port, payload
        self.result.is_finished = True
        return None

    async def close(self) -> None:
        """Close the generator, as a cancel does."""
        await self._outputs.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


def start_streaming(
    engine: StreamingEngine,
    inputs: Mapping[str, Source] | Inputs,
    params: Mapping[str, Any] | None = None,
    *,
    outputs: Iterable[str] | None = None,
) -> Stream:
    """Return a request that has not begun; nothing runs before the first `pull`.

    Raises:
        msgspec.ValidationError: the engine's `Params` doesn't allow these.
    """
    request = make_request(engine, params, outputs=outputs)
    return Stream(engine, request, inputs if isinstance(inputs, Inputs) else ListedInputs(inputs))


async def run_streaming(
    engine: StreamingEngine,
    inputs: Mapping[str, Source] | Inputs,
    params: Mapping[str, Any] | None = None,
    *,
    outputs: Iterable[str] | None = None,
) -> Collected:
    """Run one request on a loaded engine to its end and return all that it put out.

    Raises:
        OmniBusError: as the engine raised it.
        ContractBroken: the engine broke its word (see `check_output`).
    """
    async with start_streaming(engine, inputs, params, outputs=outputs) as stream:
        while await stream.pull() is not None:
            pass
        return stream.result


# --- step and session engines -------------------------------------------------------------------------------


class StepDriver:
    """Plays the scheduler of a `StepEngine` or `SessionEngine`, synchronously.

    With `is_input_streamed` a request is added empty and `add` feeds its inputs and their end at once; pass
    ``is_complete=False`` to go on with `feed`.
    """

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self.results: dict[RequestId, Collected] = {}
        self._requests: dict[RequestId, EngineRequest] = {}
        self._starved: set[RequestId] = set()

    @property
    def live(self) -> list[RequestId]:
        """Requests that are neither over nor aborted."""
        return list(self._requests)

    def add(
        self,
        inputs: Mapping[str, Sequence[Payload]],
        params: Mapping[str, Any] | None = None,
        *,
        outputs: Iterable[str] | None = None,
        is_complete: bool = True,
    ) -> RequestId:
        """Give the engine a request.

        Raises:
            msgspec.ValidationError: the engine's `Params` doesn't allow these.
            OmniBusError: whatever the engine's `add` refuses it with.
        """
        request = make_request(self.engine, params, outputs=outputs)
        if not self.engine.is_input_streamed:
            self.engine.add(request, {port: list(payloads) for port, payloads in inputs.items()})
        else:
            self.engine.add(request, {})
        self._requests[request.id] = request
        self.results[request.id] = Collected()
        if self.engine.is_input_streamed:
            for port, payloads in inputs.items():
                self.feed(request.id, port, payloads, is_last=is_complete)
        return request.id

    def feed(self, request: RequestId, port: str, payloads: Sequence[Payload], *, is_last: bool = False) -> None:
        """Bring more input of a request whose input is streamed; input that is refused ends it, as in a stage."""
        if request not in self._requests:
            return
        try:
            self.engine.feed(request, port, payloads, is_last=is_last)
        except OmniBusError as error:
            self.results[request].error = error
            self.abort(request)
        self._starved.discard(request)

    def step(self, *requests: RequestId) -> list[Event]:
        """Run one step of these requests (by default of all live ones that are not starved), and let it run ahead.

        Raises:
            ContractBroken: an event that the interface forbids.
        """
        named = requests or tuple(request for request in self._requests if request not in self._starved)
        events = list(self.engine.step(named))
        for event in events:
            self._take(event, named)
        self.engine.run_ahead()
        return events

    def _take(self, event: Event, named: Sequence[RequestId]) -> None:
        request = self._requests.get(event.request)
        if event.request not in named or request is None:
            raise ContractBroken(f"{type(event).__name__} for '{event.request}', which was not live in this step")
        result = self.results[event.request]
        match event:
            case Output(port=port, payload=payload):
                check_output(self.engine, request, port, payload)
                result.outputs.append((port, payload))
            case Finished(finish=finish):
                result.finish = finish
                result.is_finished = True
                self._requests.pop(event.request)
            case Failure(error=error):
                result.error = error
                self._requests.pop(event.request)
            case Starved():
                if not self.engine.is_input_streamed:
                    raise ContractBroken(f"Starved for '{event.request}', whose input was complete")
                self._starved.add(event.request)

    def abort(self, request: RequestId) -> None:
        """Abort a request; unknown ids go to the engine too."""
        self.engine.abort(request)
        self._requests.pop(request, None)
        self._starved.discard(request)

    def run(self, *requests: RequestId, max_steps: int = 10_000) -> list[Collected]:
        """Step all live requests until these (by default all) are over; return their results.

        Raises:
            ContractBroken: they are not over after `max_steps`, or wait for input that won't come.
        """
        wanted = requests or tuple(self._requests)
        for _ in range(max_steps):
            if all(self.results[request].is_over for request in wanted):
                return [self.results[request] for request in wanted]
            if not any(request not in self._starved for request in self._requests):
                raise ContractBroken("every live request is starved; no more input will come")
            self.step()
        raise ContractBroken(f"not over after {max_steps} steps")
