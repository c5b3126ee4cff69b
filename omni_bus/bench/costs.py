"""What a run costs: the client's own processor time and its loop's lag, and the server's processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from omni_bus.errors import BadInput, UnknownName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

BEAT_S = 0.02
"""Often enough to see what delays requests, seldom enough to cost nothing."""

BUSY_SHARE = 0.9
LATE_MS = 20.0
"""Beyond these, what is measured is the client."""


class ClientCost(msgspec.Struct, frozen=True):
    """Of this process, over one phase."""

    cpu_s: float
    wall_s: float
    median_lag_ms: float
    p99_lag_ms: float
    max_lag_ms: float
    """How late the event loop came to what was due."""

    @property
    def cpu_share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it used most of a core."""
        return self.cpu_share > BUSY_SHARE

    @property
    def is_saturated(self) -> bool:
        """Whether the client was so busy, or so late, that its times are partly its own rather than the server's."""
        return self.is_busy or self.p99_lag_ms > LATE_MS


class Watch:
    """Fills `client` and `server` when its context ends."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.client: ClientCost | None = None
        self.server: ServerCost | None = None

    @contextlib.asynccontextmanager
    async def phase(self) -> AsyncIterator[None]:
        """Watch what runs inside."""
        lags_ms: list[float] = []
        before = ServerProcesses(self._pids) if self._pids else None
        cpu_s, begun_at = time.process_time(), time.perf_counter()
        beat = asyncio.create_task(_beat(lags_ms))
        try:
            yield
        finally:
            beat.cancel()
            wall_s = time.perf_counter() - begun_at
            found = np.asarray(lags_ms or [0.0])
            self.client = ClientCost(
                time.process_time() - cpu_s,
                wall_s,
                float(np.median(found)),
                float(np.percentile(found, 99)),
                float(found.max()),
            )
            self.server = before.cost() if before is not None else None


async def _beat(lags_ms: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + BEAT_S
        await asyncio.sleep(BEAT_S)
        lags_ms.append(max(0.0, loop.time() - due_at) * 1000)


_INTERPRETER_OPTIONS = ("-X", "-W")
"""Options of Python that have a value as the next argument."""


class ProcessCost(msgspec.Struct):
    """Of all processes of one name."""

    num_processes: int
    cpu_s: float


class ServerCost(msgspec.Struct, frozen=True):
    """Of the server's processes, over one phase."""

    processes: dict[str, ProcessCost]
    num_ended: int
    """Processes that ended meanwhile, whose time since the start of the phase is not known."""

    @property
    def cpu_s(self) -> float:
        """Of all."""
        return sum(process.cpu_s for process in self.processes.values())


class ServerProcesses:
    """The processes with these ids and all their children, as they are now.

    Raises:
        BadInput: psutil is missing, or a process may not be looked at.
        UnknownName: there is no such process.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._psutil = _psutil()
        self._roots = [self._find(pid) for pid in pids]
        self._before = self._cpu_s()

    def cost(self) -> ServerCost:
        """Return what they, and those that they started since, have used since."""
        after = self._cpu_s()
        found: defaultdict[str, ProcessCost] = defaultdict(lambda: ProcessCost(0, 0.0))
        for process, (name, cpu_s) in after.items():
            cost = found[name]
            cost.num_processes += 1
            cost.cpu_s += cpu_s - self._before.get(process, (name, 0.0))[1]
        return ServerCost(dict(found), len(self._before.keys() - after.keys()))

    def _find(self, pid: int) -> Any:
        try:
            process = self._psutil.Process(pid)
            process.cpu_times()
        except self._psutil.NoSuchProcess as error:
            raise UnknownName(
                f"--server-pid {pid}: there is no such process (allowed: the id of a running one)", field="--server-pid"
            ) from error
        except self._psutil.AccessDenied as error:
            raise BadInput(
                f"--server-pid {pid}: no permission to look at it (allowed: a process of your own)",
                field="--server-pid",
            ) from error
        return process

    def _cpu_s(self) -> dict[Any, tuple[str, float]]:
        """Return name and processor seconds of each process; psutil tells a process from a later one with its id."""
        found: dict[Any, tuple[str, float]] = {}
        for root in self._roots:
            with contextlib.suppress(self._psutil.NoSuchProcess):
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(self._psutil.NoSuchProcess, self._psutil.AccessDenied):
                        times = process.cpu_times()
                        found[process] = (process_name(process.name(), process.cmdline()), times.user + times.system)
        return found


def process_name(name: str, command: Sequence[str]) -> str:
    """Return what a process is called: an interpreter after what it runs, with the plain words that follow.

    ``python -m actors.stage /run/deployment.json llm 0`` is ``actors.stage llm 0``.
    """
    if not name.startswith("python"):
        return name
    words = iter(command[1:])
    for word in words:
        if word == "-c":
            break
        if word in _INTERPRETER_OPTIONS:
            next(words, "")
        elif word == "-m" or not word.startswith("-"):
            program = next(words, "") if word == "-m" else PurePath(word).name
            plain = itertools.takewhile(lambda argument: not argument.startswith("-"), words)
            return " ".join([program, *(argument for argument in plain if "/" not in argument)])
    return name


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise BadInput(
            "--server-pid needs the package psutil, which is not installed (pip install 'omni-bus[bench]')",
            field="--server-pid",
        ) from error
    return psutil
