"""What holds for every test: uvloop, no network for model hubs, one thread per engine, and nothing left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import uvloop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping

pytest_plugins = ["pytester"]

# Before any test imports torch, which reads them once. Idle threads that spin slow everything else on two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A deadline or a slow-input check would be a claim about the machine's load.
hypothesis.settings.register_profile(
    "omni-bus", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("omni-bus")


class TimeLimitedLoop(uvloop.Loop):
    """uvloop that ends with the failure which pytest-timeout's signal handler raises; its own only logs that."""

    _failure: BaseException | None = None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        failure = context.get("exception")
        if isinstance(failure, pytest.fail.Exception):
            self._failure = failure
            self.stop()
        else:
            super().call_exception_handler(context)

    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        except RuntimeError:  # stopped before the future was done
            if self._failure is None:
                raise
            failure, self._failure = self._failure, None
            raise failure from None


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test on the loop that the processes run on."""
    return {"uvloop": TimeLimitedLoop}


def _live_children() -> dict[int, str]:
    """Return process id and name of each child; one that ended but was not waited for holds nothing."""
    children: dict[int, str] = {}
    for pid in _child_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # waited for by another thread meanwhile
            # proc(5): "pid (name) state …"; the name may hold parentheses. The command line is empty at first.
            before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
            if after[0] not in "ZX":
                children[pid] = before.partition("(")[2]
    # Started once by the standard library at the first shared-memory segment, ends with us.
    children.pop(getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None) or 0, None)
    return children


def _child_pids() -> Iterator[int]:
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            yield from map(int, listing.read_text().split())


def _lasting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


GRACE_S = 5.0
"""A thread that was told to end does so within this, on a machine that is busy with other things."""


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Fail a test that ends with a child process or a non-daemon thread of its own still running, or with a priority.

    A library that makes this a real-time process (SVT-AV1 does, for root) has it go before all those under test.
    """
    children_before, threads_before = _live_children(), _lasting_threads()
    yield
    children = {pid: command for pid, command in _live_children().items() if pid not in children_before}
    for pid in children:  # so that the next test has the machine to itself
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert children == {}, "child processes still run after the test"
    for thread in _lasting_threads() - threads_before:
        thread.join(GRACE_S)  # a pool that was told to end may still be ending
    assert _lasting_threads() <= threads_before, "threads still run after the test"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the tests run before everything else on the machine"
