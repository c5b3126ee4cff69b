"""Time, faults and counters that all synthetic engines share, shown on one step and one streaming engine."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from adapters.synthetic import SyntheticRelay, SyntheticText
from adapters.synthetic_work import CRASH_EXIT_STATUS, StepOptions, WorkOptions, WorkParams, burn, plan_of
from omni_bus.errors import BadInput, ConfigError, OmniBusError, StageFailed, StartFailed
from omni_bus.testing import StepDriver, build_engine, make_engine, make_request, run_streaming, start_streaming
from omni_bus.wire.payloads import Json, Payload, Text

PROMPT: dict[str, list[Payload]] = {"prompt": [Json({"marker": "m"})]}
PIECES: dict[str, list[Payload]] = {"text": [Text("a"), Text("b"), Text("c")]}


async def announced(taken: asyncio.Event) -> AsyncIterator[Payload]:
    """One piece of text; whoever waits for `taken` runs after the engine has gone as far as it can with it."""
    taken.set()
    yield Text("a")


class WaitingThread(threading.Thread):
    """Runs one call that blocks, and keeps what it raised."""

    def __init__(self, call: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._call = (call, args)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call[0](*self._call[1])
        except OmniBusError as error:
            self.error = error


# --- options and parameters


def test_parameters_override_options() -> None:
    plan = plan_of(WorkOptions(step_time_s=1.0, fail_at_step=4, busy=True), WorkParams(step_time_s=0.0, busy=False))

    assert (plan.step_time_s, plan.fail_at_step, plan.busy) == (0.0, 4, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_time_s", -0.1),
        ("step_time_s", float("nan")),
        ("fail_at_step", -1),
        ("grow_bytes_per_step", 2**30 + 1),
        ("crash_with", "bang"),
        ("busy", 1),
        ("max_num_seqs", 0),
    ],
)
def test_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
        msgspec.convert({field: value}, StepOptions)


def test_options_that_contradict_are_refused_together() -> None:
    with pytest.raises(ConfigError) as refused:
        build_engine(SyntheticText, {"load_hangs": True, "load_fails": "no", "max_num_seqs": 9, "max_resident": 8})

    assert [problem.partition(":")[0] for problem in refused.value.problems] == ["load_hangs", "max_resident"]


# --- loading


def test_load_reports_progress_to_its_end() -> None:
    reports: list[float] = []
    engine = build_engine(SyntheticText, {"load_time_s": 0.25})
    engine.load(lambda phase, fraction: reports.append(fraction))

    assert reports == sorted(reports)
    assert (reports[0], reports[-1], len(reports)) == (0.0, 1.0, 4)


def test_failing_load_says_its_message() -> None:
    with pytest.raises(StartFailed, match="no such weights"):
        make_engine(SyntheticText, {"load_fails": "no such weights"})


def test_hanging_load_ends_with_close() -> None:
    engine = build_engine(SyntheticText, {"load_hangs": True})
    reported = threading.Event()
    thread = WaitingThread(engine.load, lambda phase, fraction: reported.set())
    thread.start()
    assert reported.wait(30)
    assert thread.is_alive()

    engine.close()
    thread.join(30)

    assert isinstance(thread.error, StartFailed)


# --- faults of a step engine


def test_failure_comes_at_its_step() -> None:
    driver = StepDriver(make_engine(SyntheticText, {"fail_at_step": 3}))

    [collected] = driver.run(driver.add(PROMPT))

    assert collected.text == "m:0 m:1 m:2"
    assert isinstance(collected.error, StageFailed)
    assert collected.error.message == "synthetic failure at step 3"


@pytest.mark.parametrize("busy", [False, True], ids=["waits", "spins"])
def test_hang_holds_the_step_until_close(*, busy: bool) -> None:
    engine = make_engine(SyntheticText, {"hang_at_step": 1, "tokens": 3, "busy": busy})
    request = make_request(engine)
    engine.add(request, PROMPT)
    engine.step([request.id])
    thread = WaitingThread(engine.step, [request.id])
    thread.start()
    while engine.statistics().hung == 0:
        time.sleep(0)
    assert (engine.statistics().steps, engine.statistics().num_active) == (1, 1)

    engine.close()
    thread.join(30)

    assert isinstance(thread.error, StageFailed)
    assert engine.statistics().hung == 0


def test_waiting_step_ends_with_close() -> None:
    engine = make_engine(SyntheticText, {"step_time_s": 3600})
    request = make_request(engine)
    engine.add(request, PROMPT)
    thread = WaitingThread(engine.step, [request.id])
    thread.start()

    engine.close()
    thread.join(30)

    assert isinstance(thread.error, StageFailed)


@pytest.mark.parametrize(("how", "status"), [("exit", CRASH_EXIT_STATUS), ("kill", -signal.SIGKILL)])
def test_crash_takes_the_process_with_it(how: str, status: int) -> None:
    script = f"""
from adapters.synthetic import SyntheticText
from omni_bus.testing import StepDriver, make_engine
from omni_bus.wire.payloads import Json
driver = StepDriver(make_engine(SyntheticText))
request = driver.add({{"prompt": [Json({{"marker": "m"}})]}}, {{"crash_at_step": 1, "crash_with": "{how}"}})
driver.step()
print(driver.results[request].text, flush=True)
driver.step()
print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (status, "m:0\n")


def test_memory_grows_by_step_until_close() -> None:
    engine = make_engine(SyntheticText, {"grow_bytes_per_step": 1000, "tokens": 3})
    driver = StepDriver(engine)
    driver.run(driver.add(PROMPT), driver.add(PROMPT))
    assert engine.statistics().grown_bytes == 6000

    engine.close()

    assert engine.statistics().grown_bytes == 0


def test_closed_engine_refuses_requests() -> None:
    engine = make_engine(SyntheticText)
    engine.close()

    with pytest.raises(StageFailed, match="closed"):
        StepDriver(engine).add(PROMPT)


def test_request_id_is_used_once() -> None:
    engine = make_engine(SyntheticText)
    request = make_request(engine)
    engine.add(request, PROMPT)

    with pytest.raises(BadInput, match="id: "):
        engine.add(request, PROMPT)
    assert engine.statistics().num_active == 1


def test_counters_tell_batch_steps_from_request_steps() -> None:
    driver = StepDriver(engine := make_engine(SyntheticText, {"tokens": 2}))
    driver.run(driver.add(PROMPT), driver.add(PROMPT, {"tokens": 4}), driver.add(PROMPT, {"fail_at_step": 0}))
    driver.abort(driver.add(PROMPT))

    counted = engine.statistics()
    assert (counted.steps, counted.request_steps) == (4, 6)
    assert (counted.finished, counted.failed, counted.aborted, counted.num_active) == (2, 1, 1, 0)


def test_failed_request_costs_no_step() -> None:
    driver = StepDriver(engine := make_engine(SyntheticText, {"fail_at_step": 0}))
    driver.run(driver.add(PROMPT))

    assert engine.statistics().steps == 0


def test_busy_step_burns_processor_time() -> None:
    """At least what it was told, in processor time of this thread: a wait would burn next to none."""
    before = time.thread_time()
    rounds = 0

    def is_over() -> bool:
        nonlocal rounds
        rounds += 1
        return time.thread_time() - before > 0.02

    burn(3600, is_over)

    assert rounds > 1
    assert time.thread_time() - before > 0.02


# --- faults of a streaming engine


async def test_stream_fails_at_its_step() -> None:
    engine = make_engine(SyntheticRelay, {"fail_at_step": 2})
    stream = start_streaming(engine, PIECES)
    assert [await stream.pull(), await stream.pull()] == [("text", Text("a")), ("text", Text("b"))]

    with pytest.raises(StageFailed, match="step 2"):
        await stream.pull()
    assert (engine.statistics().failed, engine.statistics().num_active) == (1, 0)


async def test_hanging_stream_holds_nobody_else() -> None:
    engine = make_engine(SyntheticRelay)
    taken = asyncio.Event()
    hanging = asyncio.create_task(run_streaming(engine, {"text": announced(taken)}, {"hang_at_step": 0}))
    await taken.wait()
    assert engine.statistics().hung == 1

    assert (await run_streaming(engine, PIECES)).text == "abc"
    assert engine.statistics().num_active == 1

    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (engine.statistics().num_active, engine.statistics().hung, engine.statistics().aborted) == (0, 0, 1)


async def test_hanging_stream_ends_with_close_from_another_thread() -> None:
    engine = make_engine(SyntheticRelay)
    taken = asyncio.Event()
    hanging = asyncio.create_task(run_streaming(engine, {"text": announced(taken)}, {"hang_at_step": 0}))
    await taken.wait()
    assert engine.statistics().hung == 1

    await asyncio.to_thread(engine.close)

    with pytest.raises(StageFailed, match="closed"):
        await hanging


async def test_hang_may_block_the_loop() -> None:
    """Another thread sees the hang and closes; meanwhile the loop can't run what was due before."""
    engine = make_engine(SyntheticRelay, {"hang_at_step": 0, "hang_blocks_loop": True})
    ran_at_hang: list[bool] = []
    ran = False

    def mark() -> None:
        nonlocal ran
        ran = True

    def close_when_hung() -> None:
        while engine.statistics().hung == 0:
            time.sleep(0)
        ran_at_hang.append(ran)
        engine.close()

    thread = threading.Thread(target=close_when_hung)
    thread.start()
    asyncio.get_running_loop().call_soon(mark)
    with pytest.raises(StageFailed, match="closed"):
        await run_streaming(engine, PIECES)
    thread.join(30)

    assert ran_at_hang == [False]


async def test_busy_stream_leaves_the_loop_free() -> None:
    engine = make_engine(SyntheticRelay, {"busy": True, "step_time_s": 0.02})
    running = asyncio.create_task(run_streaming(engine, PIECES))
    turns = 0
    while not running.done():
        turns += 1
        await asyncio.sleep(0)
    engine.close()

    assert running.result().text == "abc"
    assert turns > 10


async def test_stream_grows_memory_by_step() -> None:
    engine = make_engine(SyntheticRelay, {"grow_bytes_per_step": 10, "steps_per_piece": 4})
    await run_streaming(engine, PIECES)

    assert (engine.statistics().grown_bytes, engine.statistics().steps) == (120, 12)
