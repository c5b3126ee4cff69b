"""What all synthetic engines share: settable load time, step time, faults and memory growth, and counters of real work.

An engine's options are the defaults of its stage; a request's parameters of the same names override them. Crashes and
hangs can therefore be asked for by a client: these engines are for load and fault tests, not for a public address.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
import zlib
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import msgspec

from omni_bus.errors import StageFailed, StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from omni_bus.engine import Report

CRASH_EXIT_STATUS = 70
"""Exit status of ``crash_with = "exit"``: EX_SOFTWARE of sysexits."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
StepIndex = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Amount = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**30)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
CrashKind = Literal["exit", "kill"]


class WorkOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every synthetic engine."""

    step_time_s: Seconds = 0.0
    """Seconds that one step takes; a batch takes as long as its slowest request."""
    busy: bool = False
    """True: a step burns processor time; false: it waits."""
    fail_at_step: StepIndex | None = None
    """The request fails instead of running this step (its first is 0)."""
    hang_at_step: StepIndex | None = None
    """The engine hangs in this step of a request until it is closed; a step engine with `busy` burns time meanwhile."""
    crash_at_step: StepIndex | None = None
    """The process dies in this step of a request."""
    crash_with: CrashKind = "exit"
    """``exit``: at once with status 70; ``kill``: SIGKILL to itself."""
    grow_bytes_per_step: Bytes = 0
    """Memory that each step of each request leaves behind until the engine is closed."""
    load_time_s: Seconds = 0.0
    """Seconds that loading takes, with progress reported about ten times a second."""
    load_fails: str | None = None
    """Loading fails with this message, after `load_time_s`."""
    load_hangs: bool = False
    """Loading reports nothing more and does not return, after `load_time_s`."""
    max_num_seqs: Slots = 8
    """Requests in one step; of a streaming engine, requests that run at once."""


class WorkParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each request may set on any synthetic engine; what is left out is as in the stage's options."""

    step_time_s: Seconds | None = None
    busy: bool | None = None
    fail_at_step: StepIndex | None = None
    hang_at_step: StepIndex | None = None
    crash_at_step: StepIndex | None = None
    crash_with: CrashKind | None = None
    grow_bytes_per_step: Bytes | None = None


class StepOptions(WorkOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the synthetic step engines."""

    max_resident: Slots = 32
    """Requests that the engine holds at once, suspended ones included; at least `max_num_seqs`."""


class StreamingOptions(WorkOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the synthetic streaming engines."""

    hang_blocks_loop: bool = False
    """True: `hang_at_step` blocks the whole process' loop; false: only the request."""


OptionsT = TypeVar("OptionsT", bound=WorkOptions)
StateT = TypeVar("StateT")


def plan_of(options: OptionsT, params: msgspec.Struct) -> OptionsT:
    """Return the options with what the request's parameters override."""
    names = options.__struct_fields__
    values = {name: getattr(params, name) for name in params.__struct_fields__ if name in names}
    return msgspec.structs.replace(options, **{name: value for name, value in values.items() if value is not None})


def check_work(options: WorkOptions) -> list[str]:
    """Return what contradicts itself in the options of any synthetic engine."""
    problems: list[str] = []
    if options.load_hangs and options.load_fails is not None:
        problems.append("load_hangs: true beside load_fails (allowed: one of the two)")
    if isinstance(options, StepOptions) and options.max_resident < options.max_num_seqs:
        problems.append(
            f"max_resident: {options.max_resident} is below max_num_seqs (allowed: at least {options.max_num_seqs})"
        )
    return problems


class Statistics(NamedTuple):
    """Counters of one engine since its load."""

    num_active: int
    """Requests that the engine holds now."""
    steps: int
    """Steps executed, whatever the number of requests in each."""
    request_steps: int
    """Steps executed, summed over the requests in each."""
    finished: int
    failed: int
    aborted: int
    hung: int
    """Steps that hang now."""
    grown_bytes: int
    """Memory left behind by `grow_bytes_per_step`."""


def burn(duration_s: float, is_over: Callable[[], bool]) -> None:
    """Keep one core busy for `duration_s` seconds, or until `is_over`.

    Most of it is a CRC over a buffer large enough for zlib to release the interpreter's lock, as a model's kernels do.
    """
    buffer = bytes(64 * 1024)
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end and not is_over():
        zlib.crc32(buffer)


class Workload:
    """Time, faults and counters of one engine.

    `statistics` may be called from any thread; counters are written by the engine's own thread (or loop) only.
    """

    def __init__(self, options: WorkOptions, num_threads: int) -> None:
        self._options = options
        self._num_threads = num_threads
        self._closing = threading.Event()
        self._grown: list[bytes] = []
        self._pool: ThreadPoolExecutor | None = None
        self._hanging: set[asyncio.Future[None]] = set()
        self._hung = 0
        self._steps = 0
        self._request_steps = 0
        self._grown_bytes = 0
        self.active = 0
        self.finished = 0
        self.failed = 0
        self.aborted = 0

    def statistics(self) -> Statistics:
        """Return the counters as they are now."""
        return Statistics(
            num_active=self.active,
            steps=self._steps,
            request_steps=self._request_steps,
            finished=self.finished,
            failed=self.failed,
            aborted=self.aborted,
            hung=self._hung,
            grown_bytes=self._grown_bytes,
        )

    def load(self, report: Report) -> None:
        """Take the time that the options say, then hang, fail or return; a close ends it.

        Raises:
            StartFailed: as the options ask, or closed meanwhile.
        """
        options = self._options
        parts = max(1, math.ceil(options.load_time_s * 10))
        for part in range(parts):
            report("synthetic weights", part / parts)
            self._closing.wait(options.load_time_s / parts)
        if options.load_hangs:
            self._closing.wait()
        if self._closing.is_set():
            raise StartFailed("closed while it loaded")
        if options.load_fails is not None:
            raise StartFailed(f"{options.load_fails} (load_fails is set)", field="load_fails")
        report("synthetic weights", 1.0)

    def close(self) -> None:
        """End every wait, hang and burn, and give the grown memory back; may be called from any thread, and again."""
        self._closing.set()
        for future in list(self._hanging):
            loop = future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._grown.clear()
        self._grown_bytes = 0

    def refuse_if_closed(self) -> None:
        """Raise `StageFailed` after `close`."""
        if self._closing.is_set():
            raise StageFailed("the synthetic engine is closed")

    # --- a step on the engine's thread

    def spend_blocking(self, plans: Sequence[tuple[WorkOptions, int]]) -> None:
        """Execute one step of a batch: (plan, the request's step index) each. Failing plans are the caller's to handle.

        Raises:
            StageFailed: the engine was closed meanwhile.
        """
        for plan, index in plans:
            _crash_if_due(plan, index)
        is_busy = any(plan.busy for plan, _ in plans)
        if any(plan.hang_at_step == index for plan, index in plans):
            self._hung += 1
            if is_busy:
                burn(math.inf, self._closing.is_set)
            self._closing.wait()
            self._hung -= 1
        slowest = max(plan.step_time_s for plan, _ in plans)
        if is_busy:
            burn(slowest, self._closing.is_set)
        elif slowest:
            self._closing.wait(slowest)
        self.refuse_if_closed()
        self._count(plans)

    # --- a step on the loop

    async def spend(self, plan: WorkOptions, index: int, extra_s: float = 0.0) -> None:
        """Execute one step of one request, `extra_s` longer than the plan says.

        Raises:
            StageFailed: the plan fails at this step, or the engine was closed meanwhile.
        """
        _crash_if_due(plan, index)
        if plan.fail_at_step == index:
            raise step_failure(index)
        if plan.hang_at_step == index:
            await self._hang(plan)
        duration_s = plan.step_time_s + extra_s
        if duration_s and plan.busy:
            await asyncio.get_running_loop().run_in_executor(self._threads(), burn, duration_s, self._closing.is_set)
        elif duration_s:
            await asyncio.sleep(duration_s)
        self.refuse_if_closed()
        self._count([(plan, index)])

    async def _hang(self, plan: WorkOptions) -> None:
        self._hung += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if isinstance(plan, StreamingOptions) and plan.hang_blocks_loop:
                self._closing.wait()
            elif not self._closing.is_set():
                self._hanging.add(future)
                await future
        finally:
            self._hanging.discard(future)
            self._hung -= 1

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="synthetic")
        return self._pool

    def _count(self, plans: Sequence[tuple[WorkOptions, int]]) -> None:
        self._steps += 1
        self._request_steps += len(plans)
        for plan, _ in plans:
            if plan.grow_bytes_per_step:
                # Not zeros: the system gives those pages out only when they are written.
                self._grown.append(b"\x01" * plan.grow_bytes_per_step)
                self._grown_bytes += plan.grow_bytes_per_step


def step_failure(index: int) -> StageFailed:
    """Return the error of a request whose plan fails at `index`."""
    return StageFailed(f"synthetic failure at step {index}", field="fail_at_step")


def _crash_if_due(plan: WorkOptions, index: int) -> None:
    if plan.crash_at_step != index:
        return
    if plan.crash_with == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(CRASH_EXIT_STATUS)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
