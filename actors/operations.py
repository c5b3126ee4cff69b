"""Drain, restart and scale while requests come in: what a supervisor does in which order, so that none is lost.

A replica that is to go is first drained: the coordinator gives it nothing new, and tells when it has nothing left.
While it is away, requests for its stage go to the other replicas, or wait for it where there is none.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import asdict, replace

from actors.process import Phase
from actors.supervisor import EXIT_GRACE_S
from adapters import ADAPTERS
from omni_bus.config.graph import slot_problems
from omni_bus.config.layer import show_path
from omni_bus.core.administration import CUT_S, returning, stage_of
from omni_bus.core.member import COORDINATOR
from omni_bus.errors import BadInput, OmniBusError, unknown_name
from omni_bus.registry import ADAPTER_GROUP, load_class
from omni_bus.runtime.control import (
    BAD_ORDER,
    DONE,
    NOT_CLEAN,
    NOT_POSSIBLE,
    Drain,
    News,
    Order,
    Outcome,
    Restart,
    Resume,
    Say,
    Scale,
    Sleep,
    Wake,
)
from omni_bus.runtime.cores import available_cores, share
from omni_bus.runtime.signals import RETIRE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterable

    from actors.process import Process
    from actors.supervisor import Supervisor
    from omni_bus.runtime.deployment import Deployment

logger = logging.getLogger(__name__)

MAX_REPLICAS = 64
"""Of one stage on one host."""

RETIRE_S = 15.0
"""A replica without requests gets so long to see its last words delivered and to close; see `actors.stage`."""

LEVELS = (1, 2)
"""Of sleep."""

GATEWAY = "gateway."


class Unfinished(Exception):
    """An operation ends before its aim is reached.

    Args:
        code: of the outcome.
        message: for the person who asked.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _Patience:
    """How long one order waits for running requests, and what it has cut."""

    def __init__(self, timeout_s: float, *, is_forced: bool) -> None:
        self.timeout_s = timeout_s
        self.is_forced = is_forced
        self.has_cut = False


class Operations:
    """Carries out orders for a deployment that serves; one at a time for each stage, gateway and the coordinator."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._busy: dict[str, str] = {}
        """What is worked on, and by what."""
        self._restarting: set[str] = set()
        """Replicas that will be back in a moment."""
        self._is_closed = False

    def close(self) -> None:
        """Change nothing any more: the deployment stops, and orders that are being carried out are broken off."""
        self._is_closed = True

    async def carry_out(self, order: Order, say: Say) -> Outcome:
        """Carry an order out, telling what becomes of each process."""
        if not self._supervisor.is_serving:
            phase = "stopping" if self._supervisor.is_stopping else "still starting"
            return Outcome(NOT_POSSIBLE, f"the deployment is {phase}")

        def tell(process: Process) -> None:
            say(News(process.name, process.phase, process.fraction, process.pid))

        fields = {"order": type(order).__name__.lower(), **asdict(order)}
        logger.info("order", extra={"fields": fields})
        try:
            with self._watched_by(tell):
                outcome = await self._obey(order, say)
        except BadInput as error:
            outcome = Outcome(BAD_ORDER, error.message)
        except Unfinished as end:
            outcome = Outcome(end.code, end.message)
        except OmniBusError as error:
            outcome = Outcome(NOT_POSSIBLE, error.message)
        logger.info("order ended", extra={"fields": {**fields, "code": outcome.code, "message": outcome.message}})
        return outcome

    async def _obey(self, order: Order, say: Say) -> Outcome:
        match order:
            case Drain():
                return await self._drain(order, say)
            case Resume():
                return await self._resume(order)
            case Restart():
                return await self._restart(order, say)
            case Scale():
                return await self._scale(order, say)
            case Sleep():
                return await self._sleep(order, say)
            case Wake():
                return await self._wake(order, say)

    # --- drain ------------------------------------------------------------------------------------------------

    async def _drain(self, order: Drain, say: Say) -> Outcome:
        patience = self._patience(order)
        names = self._replicas(order.targets)
        with self._claimed({stage_of(name) for name in names}, "drain"):
            await self._arrange(drained=self._deployment.drained | set(names))
            for name in names:
                say(News(name, "draining"))
            left = await self._until_idle(names, patience)
        if not self._deployment.drained.issuperset(names):
            raise Unfinished(NOT_POSSIBLE, f"{', '.join(names)}: another order undid it")
        words = f"{', '.join(names)}: drained"
        if left:
            return Outcome(NOT_CLEAN, f"{words}; {_in_words(left, patience)} (--force ends them)")
        return _done(words, patience)

    async def _resume(self, order: Resume) -> Outcome:
        names = self._replicas(order.targets)
        busy = {stage_of(name) for name in names if self._busy.get(stage_of(name), "drain") != "drain"}
        with self._claimed(busy, "undo"):  # only a drain may be undone while it lasts
            await self._arrange(drained=self._deployment.drained.difference(names))
        return Outcome(DONE, f"{', '.join(names)}: new requests are given again")

    # --- restart ----------------------------------------------------------------------------------------------

    async def _restart(self, order: Restart, say: Say) -> Outcome:
        patience = self._patience(order)
        replicas, gateways, has_coordinator = self._parts(order.targets)
        claimed = {*(stage_of(name) for name in replicas), *(GATEWAY + name for name in gateways)}
        with self._claimed(claimed | ({COORDINATOR} if has_coordinator else set()), "restart"):
            for name in replicas:
                await self._restart_replica(name, patience, say)
            for name in gateways:
                await self._restart_gateway(name, patience, say)
            if has_coordinator:
                await self._restart_coordinator()
        return _done(f"restarted {', '.join(order.targets) or 'everything'}", patience)

    async def _restart_replica(self, name: str, patience: _Patience, say: Say) -> None:
        process = self._named(name)
        async with self._drained(name, is_returning=True) as give_back:
            say(News(name, "draining"))
            await self._empty(process, patience)
            await self._retire(process, patience)
            await give_back()  # it is gone; its next incarnation is bound as soon as it is ready
            process.renew()
            self._supervisor.spawn(process)
            await self._until_ready(process)

    async def _restart_gateway(self, gateway: str, patience: _Patience, say: Say) -> None:
        """Start another process beside each, on the same socket, and then have the former one leave it."""
        supervisor = self._supervisor
        for former in [process for process in self._gateway_processes(gateway) if not process.is_leaving]:
            taken = {process.name for process in self._gateway_processes(gateway)}
            index = next(n for n in range(len(taken) + 1) if f"{GATEWAY}{gateway}.{n}" not in taken)
            process = supervisor.gateway(gateway, index)
            supervisor.add(process)
            try:
                await self._until_ready(process)
            except Unfinished:
                await self._discard(process)
                raise
            if former.ready_at is None:  # it is down, or about to come up
                await self._discard(former)
                continue
            say(News(former.name, "draining"))
            former.is_surplus = True
            supervisor.dismiss(former, RETIRE)
            if not await supervisor.has_ended(former, patience.timeout_s):
                await self._cut_gateway(former, patience)

    async def _cut_gateway(self, former: Process, patience: _Patience) -> None:
        """End what still runs in a gateway whose time is over, with an error that tells why."""
        if not patience.is_forced:
            raise Unfinished(
                NOT_CLEAN,
                f"{former.name} takes nothing new and leaves when its connections have ended, which they have not "
                f"after {patience.timeout_s:g} s (--force ends them)",
            )
        patience.has_cut = True
        await self._until_idle([former.name], _Patience(0.0, is_forced=True))
        await self._supervisor.end(former, signal.SIGTERM, CUT_S + EXIT_GRACE_S)

    async def _restart_coordinator(self) -> None:
        process = self._named(COORDINATOR)
        await self._supervisor.end(process, RETIRE, EXIT_GRACE_S)
        process.renew()
        self._supervisor.spawn(process)
        await self._until_ready(process)
        await self._arrange()  # its answer tells that it has begun to meet the others

    # --- sleep ------------------------------------------------------------------------------------------------

    async def _sleep(self, order: Sleep, say: Say) -> Outcome:
        patience = self._patience(order)
        if order.level not in LEVELS:
            raise BadInput(f"level: {order.level} came (allowed: 1 or 2)", field="level")
        names = self._replicas(order.targets)
        with self._claimed({stage_of(name) for name in names}, "sleep"):
            new = {name: order.level for name in names if name not in self._deployment.asleep}
            await self._arrange(asleep={**new, **self._deployment.asleep})
            for name in names:
                say(News(name, "draining"))
            left = await self._until_idle(names, patience)
            if left:
                await self._arrange(asleep=_without(self._deployment.asleep, new))
                words = f"{_in_words(left, patience)}, so it stays awake"
                if patience.is_forced:
                    raise Unfinished(NOT_POSSIBLE, f"{words}; told to end them, it has not after {CUT_S:g} s more")
                raise Unfinished(NOT_CLEAN, f"{words} (--force ends them)")
            failed = await self._rest(names, order.level)
            if failed:
                sleeping = await self._undo(new.keys() - failed.keys())
                failed |= sleeping
                await self._arrange(asleep=_without(self._deployment.asleep, new.keys() - sleeping.keys()))
            for name in names:
                say(News(name, "asleep" if name in self._deployment.asleep else "ready"))
            _raise_failed(failed)
        return _done(f"{', '.join(names)}: asleep at level {order.level}", patience)

    async def _undo(self, names: Collection[str]) -> dict[str, str]:
        """Wake those who sleep by an order that not all could carry out; return who does not, and why."""
        if not names:
            return {}
        failed = await self._rest(sorted(names), 0)
        return {name: f"it was put to sleep and does not wake: {why}" for name, why in failed.items()}

    async def _wake(self, order: Wake, say: Say) -> Outcome:
        names = self._replicas(order.targets) if order.targets else list(self._deployment.asleep)
        if not self._deployment.asleep.keys() & set(names):
            return Outcome(DONE, "nothing to do: none of them sleeps")
        with self._claimed({stage_of(name) for name in names}, "wake"), self._waking(names):
            for name in names:
                say(News(name, "waking"))
            failed = await self._rest(names, 0)
            await self._arrange(asleep=_without(self._deployment.asleep, set(names) - failed.keys()))
        for name in names:
            say(News(name, "asleep" if name in failed else "ready"))
        _raise_failed(failed)
        return Outcome(DONE, f"{', '.join(names)}: awake")

    @contextmanager
    def _waking(self, names: Collection[str]) -> Generator[None]:
        """Show how far these are."""
        processes = [process for process in self._supervisor.processes if process.name in names]
        for process in processes:
            process.is_waking = process.ready_at is not None
        try:
            yield
        finally:
            for process in processes:
                if process.is_waking and process.ready_at is not None:
                    process.phase, process.fraction = Phase.READY, 1.0
                process.is_waking = False

    async def _rest(self, names: list[str], level: int) -> dict[str, str]:
        """Have engines sleep, or wake with level 0; return whom it failed with, and why."""
        timeout_s = self._deployment.config.start_timeout_s
        answer = await self._supervisor.ask("rest", lambda: {"actors": names, "level": level, "timeout_s": timeout_s})
        return answer["failed"]

    # --- scale ------------------------------------------------------------------------------------------------

    async def _scale(self, order: Scale, say: Say) -> Outcome:
        patience = self._patience(order)
        with self._claimed(set(order.wanted), "scale"):
            self._check_scale(order.wanted)
            changed: list[str] = []
            for stage, wanted in order.wanted.items():
                now = self._deployment.config.stages[stage].replicas
                if wanted > now:
                    await self._add_replicas(stage, now, wanted)
                for number in reversed(range(wanted, now)):
                    await self._remove_replica(stage, number, patience, say)
                if wanted != now:
                    changed.append(f"{stage} from {now} to {wanted}")
        return _done(f"scaled {', '.join(changed)}" if changed else "nothing to do: it is so already", patience)

    def _check_scale(self, wanted: dict[str, int]) -> None:
        """Refuse what can't be.

        Raises:
            BadInput: no stage, an unknown one, or a number that is not allowed.
            Unfinished: the pipelines need more than that.
        """
        stages = dict(self._deployment.config.stages)
        if not wanted:
            raise BadInput("no stage came (allowed: STAGE=N, at least one)", field="stage")
        for stage, number in wanted.items():
            if stage not in stages:
                raise unknown_name("stage", stage, stages, field="stage")
            if not 1 <= number <= MAX_REPLICAS:
                raise BadInput(f"{stage}={number}: {number} replicas came (allowed: 1 to {MAX_REPLICAS})", field=stage)
            stages[stage] = replace(stages[stage], replicas=number)
        adapters = {
            name: load_class("adapter", config.adapter, ADAPTERS, ADAPTER_GROUP) for name, config in stages.items()
        }
        problems = list(slot_problems(self._deployment.pipelines, stages, adapters))
        if problems:
            words = (f"{show_path(problem.path)}: {problem.message}" for problem in problems)
            raise Unfinished(NOT_POSSIBLE, "\n".join(words))

    async def _add_replicas(self, stage: str, now: int, wanted: int) -> None:
        await self._resize(stage, wanted)
        added = [self._supervisor.replica(stage, number) for number in range(now, wanted)]
        for process in added:
            self._supervisor.add(process)
        try:
            for process in added:
                await self._until_ready(process)
        except Unfinished:
            # Numbers have no gaps, so those from the first that failed on go.
            num_good = next(n for n, process in enumerate(added) if process.ready_at is None)
            await self._resize(stage, now + num_good)
            await asyncio.gather(*(self._discard(process) for process in added[num_good:]))
            raise

    async def _remove_replica(self, stage: str, number: int, patience: _Patience, say: Say) -> None:
        process = self._named(f"{stage}.{number}")
        async with self._drained(process.name):
            await self._resize(stage, number)
            say(News(process.name, "draining"))
            try:
                await self._empty(process, patience)
            except Unfinished:
                await self._resize(stage, number + 1)
                raise
            process.is_surplus = True
            await self._retire(process, patience)
        await self._arrange(
            drained=self._deployment.drained - {process.name}, asleep=_without(self._deployment.asleep, {process.name})
        )

    async def _resize(self, stage: str, replicas: int) -> None:
        """Have a stage want so many replicas, and share the cores out anew; who runs keeps the share that it has."""
        config = self._deployment.config
        stages = {**config.stages, stage: replace(config.stages[stage], replicas=replicas)}
        await self._arrange(config=replace(config, stages=stages), threads=share(stages, available_cores()))

    # --- steps ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _drained(
        self, name: str, *, is_returning: bool = False
    ) -> AsyncGenerator[Callable[[], Coroutine[None, None, None]]]:
        """Keep new requests from a replica inside; what it yields ends that earlier.

        A replica that a person has drained stays so. With `is_returning`, requests wait for it where its stage has no
        other one.
        """
        given_back = set[str]() if name in self._deployment.drained else {name}

        async def give_back() -> None:
            await self._arrange(drained=self._deployment.drained - given_back)

        if is_returning:
            self._restarting.add(name)
        await self._arrange(drained=self._deployment.drained | {name})
        try:
            yield give_back
        finally:
            self._restarting.discard(name)
            await give_back()

    async def _empty(self, process: Process, patience: _Patience) -> None:
        """Wait until a drained replica has no request left.

        Raises:
            Unfinished: it has some when the time is over, and they are not to be cut.
        """
        left = await self._until_idle([process.name], patience)
        if left and not patience.is_forced:
            raise Unfinished(NOT_CLEAN, f"{_in_words(left, patience)}, so it goes on serving (--force ends them)")

    async def _until_idle(self, names: list[str], patience: _Patience) -> dict[str, int]:
        """Wait until actors take part in no request, or the time is over; return in how many they do."""
        now = asyncio.get_running_loop().time
        ends_at = now() + patience.timeout_s

        def args() -> dict[str, Any]:  # with what is left of the time, should another coordinator be asked again
            left_s = max(0.0, ends_at - now())
            return {"actors": names, "timeout_s": left_s, "is_forced": patience.is_forced}

        answer = await self._supervisor.ask("drain", args)
        patience.has_cut = patience.has_cut or answer["has_cut"]
        return answer["outstanding"]

    async def _retire(self, process: Process, patience: _Patience) -> None:
        """End a replica that has nothing left to do."""
        is_serving = process.is_running and process.ready_at is not None
        number = RETIRE if is_serving else signal.SIGTERM
        is_clean = await self._supervisor.end(process, number, RETIRE_S)
        patience.has_cut = patience.has_cut or (is_serving and not is_clean)

    async def _discard(self, process: Process) -> None:
        """End a process that does not serve, for good."""
        process.is_surplus = True
        await self._supervisor.end(process, signal.SIGTERM, EXIT_GRACE_S)

    async def _until_ready(self, process: Process) -> None:
        """Wait until a process serves.

        Raises:
            Unfinished: it ended before.
        """
        over = (Phase.BACKING_OFF, Phase.DEGRADED, Phase.STOPPED)
        await self._supervisor.until(lambda: process.ready_at is not None or process.phase in over)
        if process.ready_at is None:
            raise Unfinished(NOT_POSSIBLE, f"{process.name} did not come up: {process.error or process.exit}")

    async def _arrange(self, **changes: Any) -> None:
        """Change the deployment, and tell the coordinator: at once for who starts now, before this returns for it.

        For whom requests wait follows from what sleeps and from what is being restarted.
        """
        if self._is_closed:
            return
        changed = replace(self._deployment, **changes)
        stages = changed.config.stages
        waited_for = returning(
            self._restarting,
            changed.asleep,
            lambda stage: stage in stages and stages[stage].while_asleep == "queue",
        )
        self._supervisor.redeploy(replace(changed, returning=waited_for))
        await self._supervisor.ask("arrange", lambda: to_builtins(self._deployment.arrangement))

    # --- who is meant -----------------------------------------------------------------------------------------

    @property
    def _deployment(self) -> Deployment:
        return self._supervisor.deployment

    def _patience(self, order: Drain | Restart | Scale | Sleep) -> _Patience:
        timeout_s = self._deployment.config.drain_timeout_s if order.timeout_s is None else order.timeout_s
        if not 0 <= timeout_s < float("inf"):
            raise BadInput(f"timeout: {timeout_s:g} came (allowed: seconds, at least 0)", field="timeout")
        return _Patience(timeout_s, is_forced=order.is_forced)

    def _named(self, name: str) -> Process:
        return next(process for process in self._supervisor.processes if process.name == name)

    def _gateway_processes(self, gateway: str) -> list[Process]:
        of_it = f"{GATEWAY}{gateway}."
        others = (process for process in self._supervisor.processes if not process.is_stage)
        return [process for process in others if process.name.startswith(of_it)]

    def _replicas(self, targets: Iterable[str]) -> list[str]:
        """Return the replicas that are meant by stages' and replicas' own names.

        Raises:
            BadInput: one of them is unknown, or none was named.
        """
        found: dict[str, None] = {}
        for target in targets:
            replicas = self._replicas_of(target)
            if replicas is None:
                raise unknown_name("stage or replica", target, self._deployment.config.stages, field="target")
            found |= dict.fromkeys(replicas)
        if not found:
            raise BadInput("no target came (allowed: STAGE or STAGE.REPLICA)", field="target")
        return list(found)

    def _replicas_of(self, target: str) -> list[str] | None:
        stages = self._deployment.config.stages
        stage, number = (target, "") if target in stages else (stage_of(target), target.rpartition(".")[2])
        if stage not in stages:
            return None
        names = [f"{stage}.{replica}" for replica in range(stages[stage].replicas)]
        if number and target not in names:
            message = f"stage '{stage}' has no replica {number} (allowed: 0 to {len(names) - 1})"
            raise BadInput(message, field="target")
        return [target] if number else names

    def _parts(self, targets: Iterable[str]) -> tuple[list[str], list[str], bool]:
        """Return the replicas, the gateways, and whether the coordinator is meant; all where nothing is named."""
        config = self._deployment.config
        replicas: dict[str, None] = {}
        gateways: dict[str, None] = {}
        has_coordinator = False
        for target in tuple(targets) or (*config.stages, *(GATEWAY + name for name in config.gateways), COORDINATOR):
            found = self._replicas_of(target)
            if found is not None:
                replicas |= dict.fromkeys(found)
            elif target.removeprefix(GATEWAY) in config.gateways and target.startswith(GATEWAY):
                gateways[target.removeprefix(GATEWAY)] = None
            elif target == COORDINATOR:
                has_coordinator = True
            else:
                known = (*config.stages, *(GATEWAY + name for name in config.gateways), COORDINATOR)
                raise unknown_name("target", target, known, field="target")
        return list(replicas), list(gateways), has_coordinator

    @contextmanager
    def _claimed(self, targets: set[str], what: str) -> Generator[None]:
        """Keep other orders off these.

        Raises:
            Unfinished: one of them is being worked on.
        """
        for target in sorted(targets):
            if target in self._busy:
                message = f"'{target}' is busy: a {self._busy[target]} of it is under way"
                raise Unfinished(NOT_POSSIBLE, message)
        self._busy |= dict.fromkeys(targets, what)
        try:
            yield
        finally:
            for target in targets:
                del self._busy[target]

    @contextmanager
    def _watched_by(self, tell: Callable[[Process], None]) -> Generator[None]:
        self._supervisor.watchers.add(tell)
        try:
            yield
        finally:
            self._supervisor.watchers.discard(tell)


def _without(levels: dict[str, int], names: Collection[str]) -> dict[str, int]:
    return {name: level for name, level in levels.items() if name not in names}


def _raise_failed(failed: dict[str, str]) -> None:
    if failed:
        raise Unfinished(NOT_POSSIBLE, "; ".join(f"{name}: {why}" for name, why in failed.items()))


def _in_words(left: dict[str, int], patience: _Patience) -> str:
    parts = [f"{name} still works on {count} request{'' if count == 1 else 's'}" for name, count in left.items()]
    return f"{', '.join(parts)} after {patience.timeout_s:g} s"


def _done(words: str, patience: _Patience) -> Outcome:
    return Outcome(NOT_CLEAN, f"{words}; what took too long was ended") if patience.has_cut else Outcome(DONE, words)
