"""The supervisor: starts every process of a deployment, watches it, restarts what dies, stops all in order.

It runs in the process of ``omni-bus up`` and touches no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.core.restart import RestartPolicy
from omni_bus.errors import StartFailed
from omni_bus.runtime.cores import environment
from omni_bus.runtime.deployment import COORDINATOR
from omni_bus.runtime.process import Child

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from omni_bus.runtime.deployment import Deployment

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0
"""After its work is done, a process gets so long to close before it is killed."""

MAX_LAST_LINES = 20
"""Lines of plain output that are kept of each process, to be shown if it dies without saying why."""


class Phase(StrEnum):
    """Of a process, where it is not a load phase of its own."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    DEGRADED = "degraded"
    STOPPED = "stopped"


class Process:
    """One process of the deployment, over all its incarnations."""

    def __init__(self, name: str, arguments: list[str], num_threads: int, fds: tuple[int, ...], max_restarts: int) -> None:
        self.name = name
        self.arguments = arguments
        self.num_threads = num_threads
        self.fds = fds
        self.restarts = RestartPolicy(max_restarts)
        self.child: Child | None = None
        self.phase: str = Phase.STARTING
        self.fraction = 0.0
        self.started_at = 0.0
        self.ready_at: float | None = None
        self.error = ""
        self.last_lines: list[str] = []
        self.num_restarts = 0
        self.watchdog: asyncio.TimerHandle | None = None
        self.backoff: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """It has a live child."""
        return self.child is not None and self.child.exit_code is None


class Supervisor:
    """All processes of one deployment, on the running loop.

    Args:
        deployment: written to its run directory already.
        sockets: listening sockets by gateway name.
        environ: the environment that children start from.
        on_line: called with each line of a child's log, decoded; plain output has the event ``output``.
        on_change: called whenever a process changes phase.
    """

    def __init__(
        self,
        deployment: Deployment,
        sockets: Mapping[str, socket.socket],
        environ: Mapping[str, str],
        *,
        on_line: Callable[[dict[str, Any]], None],
        on_change: Callable[[Process], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deployment = deployment
        self._environ = environ
        self._on_line = on_line
        self._on_change = on_change
        self._is_stopping = False
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._exits: dict[str, asyncio.Event] = {}
        self.processes = self._plan(sockets)

    def _plan(self, sockets: Mapping[str, socket.socket]) -> list[Process]:
        config = self._deployment.config
        path = str(self._deployment.path)

        def process(name: str, *arguments: str, threads: int = 1, fds: tuple[int, ...] = ()) -> Process:
            return Process(name, ["-P", "-m", *arguments], threads, fds, config.max_restarts)

        found = [process(COORDINATOR, "actors.coordinator", path)]
        for stage, settings in config.stages.items():
            threads = self._deployment.threads[stage]
            for replica in range(settings.replicas):
                found.append(process(f"{stage}.{replica}", "actors.stage", path, stage, str(replica), threads=threads))
        for gateway, settings in config.gateways.items():
            fd = sockets[gateway].fileno()
            for index in range(settings.processes):
                arguments = ("actors.gateway", path, gateway, str(index), "--fd", str(fd))
                found.append(process(f"gateway.{gateway}.{index}", *arguments, fds=(fd,)))
        return found

    async def start(self) -> None:
        """Start everything and wait until all of it is ready.

        Raises:
            StartFailed: the first process that failed, with its own error; nothing is left running then.
        """
        for process in self.processes:
            self._spawn(process)
        try:
            await self._started
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> bool:
        """Drain and stop, in order: the coordinator finishes the running requests, then everybody leaves.

        Returns:
            True if no request had to be cut and no process killed.
        """
        self._is_stopping = True
        for process in self.processes:
            self._drop_timers(process)
        coordinator, *others = self.processes
        is_clean = await self._end([coordinator], self._deployment.config.drain_timeout_s + EXIT_GRACE_S)
        return await self._end(others, EXIT_GRACE_S) and is_clean

    async def kill(self) -> None:
        """End everything at once."""
        self._is_stopping = True
        for process in self.processes:
            self._drop_timers(process)
            if process.child is not None:
                process.child.signal(signal.SIGKILL)
        await self._all_ended(self.processes)

    # --- inside -----------------------------------------------------------------------------------------------

    async def _end(self, processes: list[Process], limit_s: float) -> bool:
        """Ask processes to leave; kill those that have not within the limit."""
        for process in processes:
            if process.child is not None:
                process.child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await self._all_ended(processes)
        except TimeoutError:
            for process in processes:
                if process.is_running and process.child is not None:
                    logger.warning("killed", extra={"fields": {"process": process.name, "after_s": limit_s}})
                    process.child.signal(signal.SIGKILL)
            await self._all_ended(processes)
        return all(process.child is None or process.child.exit_code == 0 for process in processes)

    async def _all_ended(self, processes: list[Process]) -> None:
        for process in processes:
            if process.is_running:
                await self._exits[process.name].wait()

    def _spawn(self, process: Process) -> None:
        process.phase, process.fraction, process.error = Phase.STARTING, 0.0, ""
        process.started_at, process.ready_at = self._loop.time(), None
        process.last_lines = []
        process.backoff = None
        self._exits[process.name] = asyncio.Event()
        process.child = Child(
            process.arguments,
            environment(self._environ, process.num_threads),
            on_line=lambda line: self._line(process, line),
            on_exit=lambda code: self._exited(process, code),
            pass_fds=process.fds,
        )
        self._watch(process)
        self._on_change(process)

    def _watch(self, process: Process) -> None:
        """The start limit is time without progress, so each sign of progress begins it anew."""
        if process.watchdog is not None:
            process.watchdog.cancel()
        limit_s = self._deployment.config.start_timeout_s
        process.watchdog = self._loop.call_later(limit_s, self._stalled, process, limit_s)

    def _stalled(self, process: Process, limit_s: float) -> None:
        process.watchdog = None
        process.error = f"no progress for {limit_s:g} s in phase '{process.phase}' (start_timeout_s)"
        if process.child is not None:
            process.child.signal(signal.SIGKILL)

    def _line(self, process: Process, line: bytes) -> None:
        fields = _parse(line)
        if fields is None:
            text = line.decode(errors="replace")
            process.last_lines = [*process.last_lines[-MAX_LAST_LINES + 1 :], text]
            self._on_line({"level": "DEBUG", "actor": process.name, "event": "output", "line": text})
            return
        match fields.get("event"):
            case "phase":
                self._progressed(process, str(fields.get("phase")), float(fields.get("fraction", 0.0)))
            case "start failed":
                process.error = str(fields.get("error"))
            case _:
                pass
        self._on_line(fields)

    def _progressed(self, process: Process, phase: str, fraction: float) -> None:
        process.phase, process.fraction = phase, fraction
        if phase == Phase.READY:
            process.ready_at = self._loop.time()
            if process.watchdog is not None:
                process.watchdog.cancel()
                process.watchdog = None
        else:
            self._watch(process)
        self._on_change(process)
        is_all_ready = all(other.ready_at is not None for other in self.processes)
        if is_all_ready and not self._started.done():
            self._started.set_result(None)

    def _exited(self, process: Process, code: int) -> None:
        self._drop_timers(process)
        self._exits[process.name].set()
        if self._is_stopping:
            process.phase = Phase.STOPPED
        elif not self._started.done():
            process.phase = Phase.STOPPED
            self._started.set_exception(StartFailed(_why(process, code), stage=process.name))
        else:
            self._restart(process, code)
        self._on_change(process)

    def _restart(self, process: Process, code: int) -> None:
        now = self._loop.time()
        process.ready_at = None
        delay_s = process.restarts.on_death(now, random.random())  # noqa: S311 (spreads load, guards nothing)
        fields = {"process": process.name, "exit": _exit_name(code), "error": process.error, "restart_in_s": delay_s}
        if delay_s is None:
            process.phase = Phase.DEGRADED
            logger.error("process stays down: its restarts are used up", extra={"fields": fields})
            return
        process.phase = Phase.BACKING_OFF
        process.num_restarts += 1
        logger.warning("process died", extra={"fields": fields})
        process.backoff = self._loop.call_later(delay_s, self._spawn, process)

    def _drop_timers(self, process: Process) -> None:
        for handle in (process.watchdog, process.backoff):
            if handle is not None:
                handle.cancel()
        process.watchdog = process.backoff = None


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a log line's fields; None for output that is no log line."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return fields if isinstance(fields, dict) and "event" in fields else None


def _exit_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _why(process: Process, code: int) -> str:
    """Return why a process did not start: its own error, else how it ended and what it printed last."""
    if process.error:
        return f"{process.name}: {process.error}"
    printed = "".join(f"\n    {line}" for line in process.last_lines)
    return f"{process.name}: ended with {_exit_name(code)} in phase '{process.phase}'{os.linesep if printed else ''}{printed.lstrip(os.linesep)}"
