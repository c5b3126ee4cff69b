"""Drives engines without a stage around them: for the authors of adapters and their tests."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from omni_bus.engine import Context, EngineRequest, Inputs
from omni_bus.wire import payloads
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from omni_bus.engine import Engine, StreamingEngine

    Source: TypeAlias = "Iterable[Payload] | AsyncIterator[Payload]"
    """What comes in on one port: payloads that are there already, or an iterator that makes them wait."""

_numbers = itertools.count(1)


def make_context(*, num_threads: int = 1, cache_dir: str = "") -> Context:
    """Return what a stage process would tell its engine; caches go to the temporary folder unless told otherwise."""
    return Context(stage="test", replica=0, num_threads=num_threads, cache_dir=cache_dir or tempfile.gettempdir())


def make_request(engine: Engine, params: Mapping[str, Any] | None = None) -> EngineRequest:
    """Return a request for all of the engine's output ports, its parameters validated as a stage does.

    Raises:
        msgspec.ValidationError: the engine's `Params` doesn't allow these.
    """
    converted = msgspec.convert(dict(params or {}), type(engine).Params)
    return EngineRequest(f"test-{next(_numbers)}", converted, frozenset(engine.emits))


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


class Collected(msgspec.Struct):
    """What a request put out, in order, and how it ended."""

    outputs: list[tuple[str, Payload]] = []
    finish: Finish = Finish()

    @property
    def text(self) -> str:
        """All text, joined."""
        return "".join(payload.text for _, payload in self.outputs if isinstance(payload, Text))

    @property
    def pcm(self) -> bytes:
        """All samples, joined."""
        return b"".join(bytes(payload.data.view) for _, payload in self.outputs if isinstance(payload, Audio))


async def run_streaming(
    engine: StreamingEngine, inputs: Mapping[str, Source], params: Mapping[str, Any] | None = None
) -> Collected:
    """Run one request on a loaded engine to its end and return all that it put out.

    Checks what a stage relies on: ports that the engine declares, their kinds, blobs as long as their headers say,
    nothing after `Finish`.

    Raises:
        OmniBusError: as the engine raised it.
        AssertionError: the engine broke its word.
    """
    collected = Collected()
    is_finished = False
    async with aclosing(engine.run(make_request(engine, params), ListedInputs(inputs))) as items:  # pyright: ignore[reportArgumentType] (an async generator, as the interface says)
        async for item in items:
            assert not is_finished, f"{item} came after Finish"
            if isinstance(item, Finish):
                collected.finish = item
                is_finished = True
                continue
            port, payload = item
            assert engine.emits.get(port) == kind_of(payload), (
                f"{kind_of(payload)} on '{port}' (declared: {engine.emits})"
            )
            payloads.check(payload)
            collected.outputs.append(item)
    return collected
