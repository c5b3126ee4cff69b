"""The engine shapes with a synthetic workload: what the engines of `adapters.synthetic` have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from adapters.synthetic_work import Statistics, StepOptions, StreamingOptions, Workload, check_work, step_failure
from omni_bus.engine import Context, Failure, Finished, StepEngine, StreamingEngine
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import msgspec

    from adapters.synthetic_work import WorkOptions
    from omni_bus.engine import Event, Report
    from omni_bus.errors import OmniBusError
    from omni_bus.ids import RequestId


class _Live(Protocol):
    """What a step engine keeps of one request: its plan, and the steps that it has executed."""

    plan: Any
    index: int


LiveT = TypeVar("LiveT", bound=_Live)


class Batch(Generic[LiveT]):
    """The live requests of a synthetic step engine."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._live: dict[RequestId, LiveT] = {}

    def add(self, request: RequestId, live: LiveT) -> None:
        """Take a request.

        Raises:
            BadInput: a request of this id is live already.
            StageFailed: the engine is closed.
        """
        self._workload.refuse_if_closed()
        if request in self._live:
            raise BadInput(f"id: '{request}' is live already (allowed: a new id)", field="id")
        self._live[request] = live
        self._workload.active = len(self._live)

    def get(self, request: RequestId) -> LiveT | None:
        """Return what is kept of a request; None if it isn't live."""
        return self._live.get(request)

    def abort(self, request: RequestId) -> None:
        """Drop a request; unknown ids are ignored."""
        if self._drop(request):
            self._workload.aborted += 1

    def step(self, requests: Sequence[RequestId], advance: Callable[[RequestId, LiveT], list[Event]]) -> list[Event]:
        """Execute one step of the named live requests, then let `advance` say what came of it for each.

        `advance` sees the index of the step just executed.

        Raises:
            StageFailed: the engine was closed meanwhile.
        """
        events: list[Event] = []
        running: list[tuple[RequestId, LiveT]] = []
        for request in requests:
            live = self._live.get(request)
            if live is None:
                continue
            if live.plan.fail_at_step == live.index:
                events.append(self.fail(request, step_failure(live.index)))
            else:
                running.append((request, live))
        if running:
            self._workload.spend_blocking([(live.plan, live.index) for _, live in running])
        for request, live in running:
            new = advance(request, live)
            live.index += 1
            events += new
            if new and isinstance(new[-1], Finished):
                self.finish(request)
        return events

    def finish(self, request: RequestId) -> None:
        """Drop a request that is complete."""
        self._workload.finished += self._drop(request)

    def fail(self, request: RequestId, error: OmniBusError) -> Failure:
        """Drop a request that can't go on, and return the event that says so."""
        self._workload.failed += self._drop(request)
        return Failure(request, error)

    def _drop(self, request: RequestId) -> bool:
        was_live = self._live.pop(request, None) is not None
        self._workload.active = len(self._live)
        return was_live


class Progress:
    """One request on a streaming engine, as a context: counted as active inside, and by its outcome on the way out."""

    def __init__(self, workload: Workload, plan: WorkOptions) -> None:
        self._workload = workload
        self._plan = plan
        self.index = 0
        """Steps executed so far."""

    def __enter__(self) -> Self:
        self._workload.refuse_if_closed()
        self._workload.active += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._workload.active -= 1
        if kind is None:
            self._workload.finished += 1
        elif issubclass(kind, Exception):
            self._workload.failed += 1
        else:  # GeneratorExit and CancelledError
            self._workload.aborted += 1

    async def step(self, extra_s: float = 0.0) -> None:
        """Execute the request's next step; see `Workload.spend`."""
        await self._workload.spend(self._plan, self.index, extra_s)
        self.index += 1


class SyntheticSteps(StepEngine):
    """What the synthetic step and session engines share: a workload, and a batch on which it is spent."""

    Options: ClassVar[type[msgspec.Struct]] = StepOptions
    sleep_levels: ClassVar[frozenset[int]] = frozenset({1, 2})

    def __init__(self, options: StepOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.max_resident
        self._workload = Workload(options, context.num_threads)
        self._batch: Batch[Any] = Batch(self._workload)

    @classmethod
    def check(cls, options: StepOptions) -> list[str]:
        """Return what contradicts itself in the options."""
        return check_work(options)

    def load(self, report: Report) -> None:
        """Take the time that the options say."""
        self._workload.load(report)

    def unload(self) -> None:
        """Give nothing back, for there is nothing; `wake` takes the time of a load again."""

    def close(self) -> None:
        """End every hang and wait; harmless when repeated."""
        self._workload.close()

    def statistics(self) -> Statistics:
        """Return the counters; from any thread."""
        return self._workload.statistics()

    def step(self, requests: Sequence[RequestId]) -> list[Event]:
        """Advance each named request by one step."""
        return self._batch.step(requests, self._advance)

    def abort(self, request: RequestId) -> None:
        """Drop a request; unknown ids are ignored."""
        self._batch.abort(request)

    @abstractmethod
    def _advance(self, request: RequestId, live: Any) -> list[Event]:
        """Say what the step just executed gave for one request; ``live.index`` is the step's."""


class SyntheticStream(StreamingEngine):
    """What the synthetic streaming engines share: a workload, on which each request spends through `Progress`."""

    Options: ClassVar[type[msgspec.Struct]] = StreamingOptions

    sleep_levels: ClassVar[frozenset[int]] = frozenset({1, 2})

    def __init__(self, options: StreamingOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._workload = Workload(options, context.num_threads)

    @property
    def num_steps(self) -> int:
        """Steps executed since the load, summed over the requests."""
        return self._workload.statistics().request_steps

    @classmethod
    def check(cls, options: StreamingOptions) -> list[str]:
        """Return what contradicts itself in the options."""
        return check_work(options)

    def load(self, report: Report) -> None:
        """Take the time that the options say."""
        self._workload.load(report)

    def unload(self) -> None:
        """Give nothing back, for there is nothing; `wake` takes the time of a load again."""

    def close(self) -> None:
        """End every hang and wait; harmless when repeated."""
        self._workload.close()

    def statistics(self) -> Statistics:
        """Return the counters; from any thread."""
        return self._workload.statistics()
