"""The supervisor: starts every process of a deployment, watches it, restarts what dies, stops all in order.

It runs in the process of ``omni-bus up`` and touches no request.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.process import Phase, Process, exit_name
from omni_bus.client import BusClient
from omni_bus.core.administration import stage_of
from omni_bus.core.deaths import MAX_DEATHS
from omni_bus.core.member import COORDINATOR
from omni_bus.core.membership import MISSED_HEARTBEATS
from omni_bus.errors import StartFailed, Unavailable
from omni_bus.ids import Peer
from omni_bus.runtime.cores import environment
from omni_bus.runtime.deployment import SUPERVISOR
from omni_bus.runtime.process import Child
from omni_bus.wire.frames import Outlook

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from omni_bus.runtime.deployment import Deployment

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0
"""After its work is done, a process gets so long to close before it is killed."""

HANG_GRACE_S = 3.0
"""A process that the coordinator lost is ended after this; one that left of its own will is gone by then."""

DEGRADED_RETRY_S = 60.0
"""Whoever needs a process that stays down is told to ask again after this: a person has to look first."""

MAX_LAST_LINES = 20
"""Lines of plain output that are kept of each process, to be shown if it dies without saying why."""


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
        self._sockets = dict(sockets)
        self._environ = environ
        self._on_line = on_line
        self._on_change = on_change
        self._is_stopping = False
        self._client: BusClient | None = None
        self.failed: asyncio.Future[StartFailed] = self._loop.create_future()
        """Done when the deployment can't go on."""
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._exits: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._deaths: deque[tuple[Peer, bool]] = deque(maxlen=MAX_DEATHS)
        """Incarnations that ended, and whether all that each had sent has arrived."""
        self._clients: set[str] = set()
        """Who may have requests, by the word of all coordinators so far."""
        self.watchers: set[Callable[[Process], None]] = set()
        """Called with each process that changes its phase."""
        self.processes = self._plan()

    def _plan(self) -> list[Process]:
        config = self._deployment.config
        found = [self._process(COORDINATOR, "actors.coordinator")]
        for stage, settings in config.stages.items():
            found += [self.replica(stage, number) for number in range(settings.replicas)]
        for gateway, settings in config.gateways.items():
            found += [self.gateway(gateway, index) for index in range(settings.processes)]
        return found

    def _process(self, name: str, module: str, *arguments: str, fds: tuple[int, ...] = ()) -> Process:
        return Process(
            name,
            # Unbuffered, and with the place of a fault, so that a process that dies has said what it could.
            ["-P", "-u", "-X", "faulthandler", "-m", module, str(self._deployment.path), *arguments],
            fds=fds,
            max_restarts=self._deployment.config.max_restarts,
            max_restart_delay_s=self._deployment.config.max_restart_delay_s,
            is_stage=module == "actors.stage",
        )

    def replica(self, stage: str, number: int) -> Process:
        """Return a replica's process, not yet started."""
        return self._process(f"{stage}.{number}", "actors.stage", stage, str(number))

    def gateway(self, gateway: str, index: int) -> Process:
        """Return a gateway's process, not yet started; it inherits the listening socket, as its siblings do."""
        fd = self._sockets[gateway].fileno()
        arguments = (gateway, str(index), "--fd", str(fd))
        return self._process(f"gateway.{gateway}.{index}", "actors.gateway", *arguments, fds=(fd,))

    async def start(self) -> None:
        """Start everything and wait until all of it is ready.

        Raises:
            StartFailed: the first process that failed, with its own error; nothing is left running then.
        """
        try:
            self._client = await BusClient.connect(
                SUPERVISOR,
                self._deployment.listen(SUPERVISOR),
                self._deployment.coordinator_endpoint,
                role="supervisor",
                on_lost=self._lost,
                curve=self._deployment.curve(),
                on_introduce=self._tell_all,
                on_silent=self._end_silent_coordinator,
            )
            for process in self.processes:
                self.spawn(process)
            await self._started
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> bool:
        """Drain and stop, in order: gateways and the coordinator take nothing new and finish; then stages leave.

        Returns:
            True if no request had to be cut and no process killed.
        """
        self._is_stopping = True
        for process in self.processes:
            process.drop_timers()
        stages = [process for process in self.processes if process.is_stage]
        others = [process for process in self.processes if not process.is_stage]
        is_clean = await self._end(others, self._deployment.config.drain_timeout_s + EXIT_GRACE_S)
        is_clean = await self._end(stages, EXIT_GRACE_S) and is_clean
        await self._leave_bus()
        return is_clean

    async def kill(self) -> None:
        """End everything at once."""
        self._is_stopping = True
        for process in self.processes:
            process.drop_timers()
            if process.child is not None:
                process.child.signal(signal.SIGKILL)
        await self._all_ended(self.processes)
        await self._leave_bus()

    # --- while it serves: `actors.operations` decides, this carries out -----------------------------------------

    @property
    def deployment(self) -> Deployment:
        """As the next process that starts will read it."""
        return self._deployment

    def redeploy(self, deployment: Deployment) -> None:
        """Have processes that start from now on read another deployment; those that run keep what they have read."""
        self._deployment = deployment
        deployment.write()

    @property
    def is_stopping(self) -> bool:
        """A stop has begun."""
        return self._is_stopping

    @property
    def is_serving(self) -> bool:
        """The start is over, and no stop has begun."""
        has_started = self._started.done() and not self._started.cancelled() and self._started.exception() is None
        return has_started and not self._is_stopping

    async def ask(self, op: str, args: Callable[[], dict[str, Any]]) -> Any:
        """Ask the coordinator for an operation, and if it is lost before it answers, the next one.

        Args:
            op: the operation.
            args: called each time for its arguments.

        Raises:
            BadInput: it can't be carried out.
            Unavailable: the deployment is stopping.
        """
        while self._client is not None and not self._is_stopping:
            try:
                return await self._client.admin(op, **args())
            except Unavailable:  # it is lost, or silent
                await self._client.heard()
        raise Unavailable("the deployment is stopping")

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so that can only become so when a process changes its phase."""
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    def add(self, process: Process) -> None:
        """Take a new process in and start it."""
        self.processes.append(process)
        self.spawn(process)

    async def end(self, process: Process, number: signal.Signals, limit_s: float) -> bool:
        """Have a process leave by a signal, and kill it if it has not within the limit.

        Returns:
            Whether it left by itself, and well.
        """
        process.is_leaving = True
        process.drop_timers()
        if not process.is_running:
            self._died(process, "")
            self._tell_change(process)
        return await self._end([process], limit_s, number)

    def dismiss(self, process: Process, number: signal.Signals) -> None:
        """Tell a process to leave, and let it take its time."""
        process.is_leaving = True
        if process.child is not None:
            process.child.signal(number)

    async def has_ended(self, process: Process, limit_s: float) -> bool:
        """Wait for a process that was told to leave; False if it has not within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._all_ended([process])
        except TimeoutError:
            return False
        return True

    # --- inside -----------------------------------------------------------------------------------------------

    async def _leave_bus(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close(linger_s=0.0)  # nobody is left to hear it

    async def _end(self, processes: list[Process], limit_s: float, number: signal.Signals = signal.SIGTERM) -> bool:
        """Ask processes to leave; kill those that have not within the limit.

        Returns:
            Whether all that ran ended as they should: with 0, or by the signal if they had not begun to serve.
        """
        processes = [process for process in processes if process.is_running]
        for process in processes:
            if process.child is not None:
                process.child.signal(number)
        try:
            async with asyncio.timeout(limit_s):
                await self._all_ended(processes)
        except TimeoutError:
            for process in processes:
                if process.is_running and process.child is not None:
                    logger.warning("killed", extra={"fields": {"process": process.name, "after_s": limit_s}})
                    process.child.signal(signal.SIGKILL)
            await self._all_ended(processes)
        return all(process.has_left for process in processes)

    async def _all_ended(self, processes: list[Process]) -> None:
        for process in processes:
            if process.is_running:
                await self._exits[process.name].wait()

    def spawn(self, process: Process) -> None:
        """Start a process, or its next incarnation."""
        process.drop_timers()
        process.is_leaving = False
        process.phase, process.fraction, process.error = Phase.STARTING, 0.0, ""
        process.started_at, process.ready_at = self._loop.time(), None
        process.last_lines = []
        process.peer = None
        self._exits[process.name] = asyncio.Event()
        try:
            process.child = Child(
                [*process.arguments, *self._awaited(process)],
                environment(self._environ, self._threads(process)),
                on_line=lambda line: self._line(process, line),
                on_exit=lambda code: self._exited(process, code),
                pass_fds=process.fds,
            )
        except OSError as error:
            process.child = None
            process.error = f"can't be started: {error.strerror or error}"
            self._died(process, "")
            self._tell_change(process)
            return
        self._watch(process)
        self._tell(process, process.start_s)
        self._tell_change(process)

    def _awaited(self, process: Process) -> list[str]:
        """Tell a coordinator that comes after another who serves or asks already, and will say hello to it."""
        if process.name != COORDINATOR or not self._started.done():
            return []
        serving = (
            other for other in self.processes if other.is_stage and other.is_running and other.ready_at is not None
        )
        clients = [f"--awaits-client={name}" for name in sorted(self._clients)]
        return [f"--awaits={other.name}" for other in serving] + clients

    def _threads(self, process: Process) -> int:
        return self._deployment.threads[stage_of(process.name)] if process.is_stage else 1

    def _tell_change(self, process: Process) -> None:
        self._changed.set()
        self._on_change(process)
        for watcher in list(self.watchers):
            watcher(process)

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
        if not line:
            return
        fields = _parse(line)
        if fields is None:
            text = line.decode(errors="replace")
            process.last_lines = [*process.last_lines[-MAX_LAST_LINES + 1 :], text]
            self._on_line({"level": "DEBUG", "actor": process.name, "event": "output", "line": text})
            return
        match fields:
            case {"event": "phase", "phase": str(phase), "fraction": float() | int() as fraction}:
                self._progressed(process, phase, float(fraction))
            case {"event": "listening", "endpoint": str(endpoint), "incarnation": str(incarnation)}:
                process.peer = Peer(process.name, int(incarnation, 16), endpoint)
                self._on_line(fields)
                self._compare(process)
            case {"event": "actor ready", "name": str(name), "incarnation": str(incarnation)}:
                self._on_line(fields)
                for other in self.processes:
                    if other.name == name:
                        other.bindable = int(incarnation, 16)
                        self._compare(other)
            case {"event": "client joined", "name": str(name)}:
                self._clients.add(name)
            case {"event": "client left", "name": str(name)}:
                self._clients.discard(name)
            case {"event": "start failed", "error": str(error)}:
                process.error = error
                if "traceback" in fields or self._started.done():
                    self._on_line(fields)  # else it is all that the failed start will say
            case _:
                self._on_line(fields)

    def _compare(self, process: Process) -> None:
        """A process is ready when the coordinator says so of its incarnation; its own word would be too early.

        Who it is and that it is ready come through the pipes of two processes, so either may be read first.
        """
        if process.peer is not None and process.peer.incarnation == process.bindable:
            self._ready(process)

    def _progressed(self, process: Process, phase: str, fraction: float) -> None:
        if phase == Phase.READY:
            if not process.is_stage:  # of a stage, the coordinator says it
                self._ready(process)
        elif (phase, fraction) == (process.phase, process.fraction):
            return
        elif process.ready_at is None:
            process.phase, process.fraction = phase, fraction
            self._watch(process)
            self._tell_change(process)
        elif process.is_waking:  # the coordinator watches it
            process.phase, process.fraction = phase, fraction
            self._tell_change(process)

    def _ready(self, process: Process) -> None:
        if process.ready_at is not None:
            return
        process.phase, process.fraction, process.ready_at = Phase.READY, 1.0, self._loop.time()
        process.start_s = process.ready_at - process.started_at
        if process.watchdog is not None:
            process.watchdog.cancel()
            process.watchdog = None
        self._tell_change(process)
        is_all_ready = all(other.ready_at is not None for other in self.processes)
        if is_all_ready and not self._started.done():
            self._started.set_result(None)

    def _exited(self, process: Process, code: int) -> None:
        process.drop_timers()
        self._exits[process.name].set()
        self._unlink_inbox(process)
        if process.peer is not None and self._client is not None and process.name != COORDINATOR:
            # Before anything else that is told of its successor; its own goodbye goes another way and may come later.
            is_settled = process.is_leaving and code == 0
            self._deaths.append((process.peer, is_settled))
            self._client.tell_lost(process.peer, is_settled=is_settled)
        process.exit = exit_name(code)
        self._died(process, process.exit)
        self._tell_change(process)

    def _unlink_inbox(self, process: Process) -> None:
        """A process that was killed has left the file of its inbox."""
        is_coordinator = process.name == COORDINATOR
        deployment = self._deployment
        endpoint = deployment.coordinator_endpoint if is_coordinator else deployment.listen(process.name, process.pid)
        scheme, _, path = endpoint.partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)

    def _died(self, process: Process, how: str) -> None:
        if self._is_stopping or process.is_leaving:
            process.phase = Phase.STOPPED
            self._tell(process, 0.0)
            if process.is_surplus and process in self.processes:
                self.processes.remove(process)
        elif not self._started.done():
            why = process.why(how)
            process.phase = Phase.FAILED
            self._started.set_exception(StartFailed(why, stage=process.name))
        else:
            process.ready_at = None
            self._restart(process, how)

    def _restart(self, process: Process, how: str) -> None:
        delay_s = process.restarts.on_death(self._loop.time(), random.random())
        fields = {"process": process.name, "exit": how, "error": process.error, "restart_in_s": delay_s}
        if not process.error and process.last_lines:
            fields["printed"] = "\n".join(process.last_lines)
        if delay_s is None:
            why = process.why(how)
            process.phase = Phase.DEGRADED
            logger.error("process stays down: its restarts are used up", extra={"fields": fields})
            process.error = process.error or how
            self._tell(process, DEGRADED_RETRY_S)
            if process.name == COORDINATOR and not self.failed.done():
                lost = "nothing works without the coordinator, and its restarts are used up"
                self.failed.set_result(StartFailed(f"{lost}\n{why}"))
            return
        process.phase = Phase.BACKING_OFF
        process.error = process.error or how
        self._tell(process, delay_s + process.start_s)
        process.num_restarts += 1
        logger.warning("process died", extra={"fields": fields})
        process.backoff = self._loop.call_later(delay_s, self.spawn, process)

    def _tell(self, process: Process, retry_after_s: float) -> None:
        """Have the coordinator know what becomes of a replica that it does not hear."""
        process.retry_at = self._loop.time() + retry_after_s
        if self._client is not None and process.is_stage and not self._is_stopping:
            stage, _, replica = process.name.rpartition(".")
            outlook = Outlook(process.name, stage, int(replica), process.phase, process.error, retry_after_s)
            self._client.tell_outlook(outlook)

    def _tell_all(self) -> None:
        """A new coordinator knows nothing of those that are away, nor of whom former requests wait for in vain."""
        if self._client is not None:
            for peer, is_settled in self._deaths:
                self._client.tell_lost(peer, is_settled=is_settled)
        for process in self.processes:
            if process.ready_at is None:
                self._tell(process, max(0.0, process.retry_at - self._loop.time()))

    def _lost(self, peer: Peer, reason: str) -> None:
        """The coordinator hears nothing of an actor any more: a process that hangs is ended, to be restarted.

        One that still loads has the start limit instead: loading may keep a process from its heartbeats.
        """
        for process in self.processes:
            is_it = process.peer is not None and process.peer.sender == peer.sender
            is_serving = process.ready_at is not None and not self._is_stopping and not process.is_leaving
            if is_it and is_serving and process.child is not None:
                self._loop.call_later(HANG_GRACE_S, self._end_hung, process, process.child, reason)

    def _end_silent_coordinator(self) -> None:
        """It answers nobody; unless it has only just come, it hangs."""
        for process in self.processes:
            if process.name != COORDINATOR or process.child is None or process.ready_at is None:
                continue
            patience_s = MISSED_HEARTBEATS * self._deployment.config.heartbeat_s
            if self._loop.time() - process.ready_at > patience_s:
                self._end_hung(process, process.child, "it answers no heartbeats")

    def _end_hung(self, process: Process, child: Child, reason: str) -> None:
        if child.exit_code is None and not self._is_stopping:
            process.error = f"it hung: {reason}"
            child.signal(signal.SIGKILL)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a log line's fields; None for output that is no log line."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return fields if isinstance(fields, dict) and {"time", "level", "actor", "event"} <= fields.keys() else None
