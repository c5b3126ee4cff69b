"""The harness refuses engines that break the interface, so that tests which only look at results still check it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from omni_bus.engine import Event, Failure, Finished, Output, Starved, StepEngine, StreamingEngine
from omni_bus.errors import ConfigError, StageFailed
from omni_bus.testing import (
    ContractBroken,
    ListedInputs,
    StepDriver,
    build_engine,
    make_engine,
    make_request,
    run_streaming,
    start_streaming,
)
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Json, Payload, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from omni_bus.engine import EngineRequest, Inputs, Report
    from omni_bus.ids import RequestId


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fraction: float = 1.0
    is_wrong: bool = False


class FakeStream(StreamingEngine):
    """Says what a test tells it to say."""

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"text": "text", "audio": "audio"}
    Options = FakeOptions
    says: tuple[Any, ...] = ()
    is_closed = False

    @classmethod
    def check(cls, options: Any) -> list[str]:
        return ["is_wrong: true (allowed: false)"] if options.is_wrong else []

    def load(self, report: Report) -> None:
        report("weights", self.options.fraction)

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        try:
            for item in self.says:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


class FakeSteps(StepEngine):
    """Answers each step with what a test prepared, by the position of the request."""

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    events: tuple[Event, ...] = ()

    def load(self, report: Report) -> None:
        report("weights", 1.0)

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        pass

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        return self.events

    def abort(self, request: RequestId) -> None:
        pass


def stream(*says: Any) -> FakeStream:
    engine = make_engine(FakeStream)
    engine.says = says
    return engine


@pytest.fixture
def driver() -> StepDriver:
    return StepDriver(make_engine(FakeSteps))


def answer(driver: StepDriver, *events: Event) -> None:
    """Let the next step give these events."""
    engine: Any = driver.engine
    engine.events = events


# --- engines


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_report_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ContractBroken, match="report"):
        make_engine(FakeStream, {"fraction": fraction})


def test_options_are_checked_as_a_stage_does() -> None:
    with pytest.raises(msgspec.ValidationError, match="no_such"):
        build_engine(FakeStream, {"no_such": 1})
    with pytest.raises(ConfigError, match="is_wrong"):
        build_engine(FakeStream, {"is_wrong": True})


def test_requests_get_ids_of_their_own() -> None:
    engine = stream()

    assert make_request(engine).id != make_request(engine).id
    assert make_request(engine, outputs=["text"]).outputs == {"text"}


# --- streaming engines


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (("video", Text("a")), "declared: text, audio"),
        (("audio", Audio(1, 1, "s16", Blob(b""))), "wanted: text"),
        (("text", Json("a")), "json on port 'text'"),
    ],
)
async def test_output_that_was_not_agreed_is_refused(item: Any, words: str) -> None:
    with pytest.raises(ContractBroken, match=words):
        await run_streaming(stream(item), {}, outputs=["text"])


async def test_payload_with_a_wrong_size_is_refused() -> None:
    with pytest.raises(ContractBroken, match="whole s16"):
        await run_streaming(stream(("audio", Audio(1, 1, "s16", Blob(b"a")))), {})


@pytest.mark.parametrize("late", [("text", Text("a")), Finish()])
async def test_anything_after_the_finish_is_refused(late: Any) -> None:
    with pytest.raises(ContractBroken, match="after the Finish"):
        await run_streaming(stream(Finish(), late), {})


async def test_stream_is_collected_to_its_end() -> None:
    audio = Audio(8000, 1, "s16", Blob(b"ab"))
    engine = stream(("text", Text("a")), ("audio", audio), ("text", Text("b")), Finish("length"))
    collected = await run_streaming(engine, {})

    assert (collected.text, collected.pcm, collected.port("audio")) == ("ab", b"ab", [audio])
    assert (collected.finish.reason, collected.is_finished) == ("length", True)


async def test_stream_without_finish_ends_well() -> None:
    collected = await run_streaming(stream(("text", Text("a"))), {})

    assert (collected.is_finished, collected.finish) == (True, Finish())


async def test_error_of_a_stream_is_raised() -> None:
    engine = stream(("text", Text("a")), StageFailed("no"))
    with pytest.raises(StageFailed, match="no"):
        await run_streaming(engine, {})


async def test_leaving_a_stream_closes_it() -> None:
    engine = stream(("text", Text("a")), ("text", Text("b")))
    async with start_streaming(engine, {}) as running:
        await running.pull()
        assert not engine.is_closed

    assert engine.is_closed


async def test_listed_inputs_count_what_was_taken() -> None:
    async def slowly() -> AsyncIterator[Payload]:
        yield Text("c")

    inputs = ListedInputs({"text": [Text("a"), Text("b")], "more": slowly()})
    async for _ in inputs.port("text"):
        break
    assert [piece async for piece in inputs.port("more")] == [Text("c")]
    assert [piece async for piece in inputs.port("unknown")] == []
    assert inputs.num_taken == {"text": 1, "more": 1}


# --- step engines


def test_event_for_a_request_that_was_not_stepped_is_refused(driver: StepDriver) -> None:
    stepped, other = driver.add({}), driver.add({})
    answer(driver, Output(other, "text", Text("a")))

    with pytest.raises(ContractBroken, match="not live in this step"):
        driver.step(stepped)


@pytest.mark.parametrize("end", [Finished, lambda request: Failure(request, StageFailed("no"))])
def test_output_after_the_end_is_refused(driver: StepDriver, end: Any) -> None:
    request = driver.add({})
    answer(driver, end(request), Output(request, "text", Text("a")))

    with pytest.raises(ContractBroken, match="not live in this step"):
        driver.step(request)


def test_event_for_an_aborted_request_is_refused(driver: StepDriver) -> None:
    request = driver.add({})
    driver.abort(request)
    answer(driver, Finished(request))

    with pytest.raises(ContractBroken, match="not live in this step"):
        driver.step(request)


def test_complete_input_cannot_starve(driver: StepDriver) -> None:
    request = driver.add({})
    answer(driver, Starved(request))

    with pytest.raises(ContractBroken, match="Starved"):
        driver.step(request)


def test_engine_that_never_ends_is_refused(driver: StepDriver) -> None:
    request = driver.add({})

    with pytest.raises(ContractBroken, match="not over after 5 steps"):
        driver.run(request, max_steps=5)


def test_failure_is_kept_with_what_came_before(driver: StepDriver) -> None:
    request = driver.add({})
    error = StageFailed("no")
    answer(driver, Output(request, "text", Text("a")), Failure(request, error))
    [collected] = driver.run(request)

    assert (collected.text, collected.error, collected.is_over, collected.is_finished) == ("a", error, True, False)
    assert driver.live == []
