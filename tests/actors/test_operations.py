"""The order of steps in drain, restart and scale, with children and a coordinator that only remember."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from actors import operations as module
from actors import supervisor as supervisor_module
from actors.operations import Operations
from actors.process import Phase
from actors.supervisor import Supervisor
from omni_bus.config.schema import DeploymentConfig, GatewayConfig, PipelineConfig, StageConfig
from omni_bus.errors import Unavailable
from omni_bus.runtime.control import (
    BAD_ORDER,
    DONE,
    NOT_CLEAN,
    NOT_POSSIBLE,
    Drain,
    News,
    Order,
    Restart,
    Resume,
    Scale,
    Sleep,
    Wake,
)
from omni_bus.runtime.deployment import Deployment, read_deployment
from tests.actors.test_supervisor import FakeChild, FakeClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from omni_bus.runtime.control import Outcome


class Log(list[str]):
    """Steps, in their order."""

    def __init__(self) -> None:
        self._has_grown = asyncio.Event()

    def append(self, step: str) -> None:
        super().append(step)
        self._has_grown.set()

    async def until(self, step: str) -> None:
        while step not in self:
            self._has_grown.clear()
            await self._has_grown.wait()


class Coordinator(FakeClient):
    """Answers what the supervisor asks, and keeps the order in which it did."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.outstanding: dict[str, int] = {}
        self.sleepless: dict[str, str] = {}
        self.wakeless: dict[str, str] = {}
        self.during_rest: Callable[[], None] = lambda: None
        self.is_clinging = False
        """Replicas do not let go of requests that are cut."""
        self.arrangement: dict[str, Any] = {}
        self.is_lost_once = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    def tell_lost(self, peer, *, is_settled=False) -> None:
        self.log.append(f"lost {peer.actor}{' settled' if is_settled else ''}")

    async def heard(self) -> None:
        self.log.append("heard")

    async def admin(self, op: str, **args: Any) -> Any:
        await asyncio.sleep(0)
        if self.is_lost_once:
            self.is_lost_once = False
            raise Unavailable("the coordinator was lost before it answered")
        if op == "arrange":
            self.arrangement = args
            marks = (f"{key[0]}:{','.join(args[key])}" for key in ("drained", "returning", "asleep") if args[key])
            self.log.append(" ".join(["arrange", *marks]))
            return None
        if op == "rest":
            self.during_rest()
            self.log.append(f"rest {args['level']} {','.join(args['actors'])}")
            stubborn = self.sleepless if args["level"] else self.wakeless
            return {"failed": {name: why for name, why in stubborn.items() if name in args["actors"]}}
        self.log.append(f"drain {','.join(args['actors'])}")
        await self.is_idle.wait()
        left = {name: count for name in args["actors"] if (count := self.outstanding.get(name))}
        has_cut = bool(left) and args["is_forced"]
        return {"outstanding": {} if has_cut and not self.is_clinging else left, "has_cut": has_cut}


class Child(FakeChild):
    """Comes up by itself, and leaves when it is told to."""

    log: list[str]
    broken: set[str]
    clinging: set[str]

    def __init__(self, arguments, environment, **callbacks: Any) -> None:
        super().__init__(arguments, environment, **callbacks)
        kind = next(argument for argument in arguments if argument.startswith("actors."))
        words = {"actors.stage": arguments[-2:], "actors.gateway": ["gateway", *arguments[-4:-2]]}
        self.name = ".".join(words.get(kind, ["coordinator"]))
        self.log.append(f"start {self.name}")
        asyncio.get_running_loop().call_soon(self._come_up)

    def _come_up(self) -> None:
        if self.exit_code is not None:
            return
        if self.name in self.broken:
            self.say("start failed", error="the weights are damaged")
            self.end(2)
        elif self.name == "coordinator" or self.name.startswith("gateway"):
            self.say("phase", phase="ready", fraction=1.0)
        else:
            self.say("listening", endpoint=f"ipc:///nowhere/{self.name}", incarnation=f"{id(self):016x}")
            Made.now.coordinator_says("actor ready", name=self.name, incarnation=f"{id(self):016x}")

    def signal(self, number: int) -> None:
        super().signal(number)
        self.log.append(f"{signal.Signals(number).name} {self.name}")
        if self.name not in self.clinging or number == signal.SIGKILL:
            asyncio.get_running_loop().call_soon(self._leave, -number if number == signal.SIGKILL else 0)

    def _leave(self, code: int) -> None:
        if self.exit_code is None:
            self.end(code)


class Made:
    """A supervisor that serves two replicas of llm, one of voice and two processes of a gateway."""

    now: Made

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Made.now = self
        self.log = Log()
        Child.log, Child.broken, Child.clinging = self.log, set(), set()
        monkeypatch.setattr(supervisor_module, "Child", Child)
        edges = ("in.a -> llm.prompt", "llm.text -> voice.text", "voice.audio -> out.audio")
        config = DeploymentConfig(
            name="demo",
            stages={
                "llm": StageConfig(adapter="synthetic-text", replicas=2),
                "voice": StageConfig(adapter="synthetic-speech"),
            },
            pipelines={"p": PipelineConfig(edges=edges)},
            gateways={"front": GatewayConfig(processes=2)},
            drain_timeout_s=9.0,
        )
        deployment = Deployment(
            config=config,
            pipelines={},
            run_dir=str(path),
            cache_dir=str(path),
            threads={"llm": 1, "voice": 1},
            served={},
            coordinator_endpoint=f"ipc://{path}/coordinator.sock",
        )
        self.socket = socket.socket()
        self.supervisor = Supervisor(
            deployment, {"front": self.socket}, {}, on_line=lambda line: None, on_change=lambda process: None
        )
        self.coordinator = Coordinator(self.log)
        self.supervisor._client = self.coordinator  # type: ignore[assignment]
        self.operations = Operations(self.supervisor)
        self.news: list[tuple[str, str]] = []

    def coordinator_says(self, event: str, **fields: Any) -> None:
        self.process("coordinator").child.say(event, **fields)

    def process(self, name: str) -> Any:
        return next(process for process in self.supervisor.processes if process.name == name)

    @property
    def names(self) -> list[str]:
        return [process.name for process in self.supervisor.processes]

    async def order(self, order: Order) -> Outcome:
        def hear(news: News) -> None:
            self.news.append((news.process, news.phase))

        return await self.operations.carry_out(order, hear)


@pytest.fixture
async def made(tmp_path: Path, monkeypatch) -> AsyncIterator[Made]:
    made = Made(tmp_path, monkeypatch)
    for process in made.supervisor.processes:
        made.supervisor.spawn(process)
    await made.supervisor._started
    made.log.clear()
    yield made
    made.supervisor._is_stopping = True
    for process in made.supervisor.processes:
        process.drop_timers()
    made.socket.close()


# --- sleep --------------------------------------------------------------------------------------------------


async def test_replica_is_idle_before_it_sleeps_and_gets_requests_once_awake(made: Made) -> None:
    assert (await made.order(Sleep(("llm.1",), level=2))).code == DONE
    assert (await made.order(Wake())).code == DONE

    assert made.log == ["arrange a:llm.1", "drain llm.1", "rest 2 llm.1", "rest 0 llm.1", "arrange"]
    assert made.news == [("llm.1", phase) for phase in ("draining", "asleep", "waking", "ready")]


async def test_where_one_can_not_sleep_all_serve_on(made: Made) -> None:
    """But those that slept before: an order that fails changes nothing."""
    await made.order(Sleep(("voice",)))
    made.coordinator.sleepless = {"llm.0": "level: 1 came (allowed: 2)"}
    made.news.clear()

    outcome = await made.order(Sleep(("llm", "voice")))

    assert (outcome.code, outcome.message) == (NOT_POSSIBLE, "llm.0: level: 1 came (allowed: 2)")
    assert made.log[-3:] == ["rest 1 llm.0,llm.1,voice.0", "rest 0 llm.1", "arrange a:voice.0"]
    assert made.news[3:] == [("llm.0", "ready"), ("llm.1", "ready"), ("voice.0", "asleep")]


async def test_what_was_put_to_sleep_and_does_not_wake_is_said_to_sleep(made: Made) -> None:
    made.coordinator.sleepless, made.coordinator.wakeless = {"llm.0": "level: no"}, {"llm.1": "no memory"}

    outcome = await made.order(Sleep(("llm",)))

    assert outcome.message == "llm.0: level: no; llm.1: it was put to sleep and does not wake: no memory"
    assert made.coordinator.arrangement["asleep"] == {"llm.1": 1}
    assert made.news[2:] == [("llm.0", "ready"), ("llm.1", "asleep")]


async def test_person_who_wakes_a_replica_sees_how_far_it_is(made: Made) -> None:
    await made.order(Sleep(("llm.1",), level=2))
    process = made.process("llm.1")
    process.child.say("phase", phase="weights", fraction=0.2)
    assert process.phase == "ready", "nobody waits for it"
    made.coordinator.during_rest = lambda: process.child.say("phase", phase="weights", fraction=0.5)
    made.news.clear()

    await made.order(Wake())

    assert made.news == [("llm.1", phase) for phase in ("waking", "weights", "ready")]
    assert (process.phase, process.fraction) == ("ready", 1.0)


@pytest.mark.parametrize(
    ("is_forced", "is_clinging", "code"),
    [(False, False, NOT_CLEAN), (True, True, NOT_POSSIBLE), (True, False, NOT_CLEAN)],
)
async def test_replica_with_requests_does_not_sleep(
    made: Made, *, is_forced: bool, is_clinging: bool, code: int
) -> None:
    made.coordinator.outstanding, made.coordinator.is_clinging = {"llm.1": 1}, is_clinging

    outcome = await made.order(Sleep(("llm.1",), level=2, timeout_s=0.5, is_forced=is_forced))

    has_let_go = is_forced and not is_clinging
    assert outcome.code == code
    assert made.coordinator.arrangement["asleep"] == ({"llm.1": 2} if has_let_go else {})
    assert ("rest 2 llm.1" in made.log) == has_let_go
    assert ("awake" in outcome.message) != has_let_go


async def test_replica_that_sleeps_otherwise_sleeps_on(made: Made) -> None:
    await made.order(Sleep(("llm.0",), level=2))
    made.coordinator.sleepless = {"llm.0": "level: 1 came (allowed: 2, at which it sleeps, until it is woken)"}

    outcome = await made.order(Sleep(("llm.0",), level=1))

    assert outcome.code == NOT_POSSIBLE
    assert made.coordinator.arrangement["asleep"] == {"llm.0": 2}
    assert made.news[-1] == ("llm.0", "asleep")


# --- restart ------------------------------------------------------------------------------------------------


async def test_replica_is_drained_then_gone_then_bound_again(made: Made) -> None:
    outcome = await made.order(Restart(("llm.1",)))

    assert outcome.code == DONE
    assert made.log == [
        "arrange d:llm.1 r:llm.1",
        "drain llm.1",
        "SIGUSR1 llm.1",
        "lost llm.1 settled",
        "arrange r:llm.1",
        "start llm.1",
        "arrange",
    ]
    assert made.news == [
        ("llm.1", "draining"),
        ("llm.1", "stopped"),
        ("llm.1", "starting"),
        ("llm.1", "ready"),
    ]


@pytest.mark.parametrize("is_asleep", [False, True])
@pytest.mark.parametrize(
    "others",
    [
        [Sleep(("voice",)), Wake(("voice",))],
        [Scale({"voice": 2}), Sleep(("voice",)), Scale({"voice": 1})],
        [Drain(("voice",)), Resume(("voice",))],
        [Restart(("voice",))],
    ],
    ids=lambda orders: type(orders[0]).__name__,
)
async def test_replica_that_restarts_is_waited_for_whatever_other_stages_are_told(
    made: Made, others: list[Order], *, is_asleep: bool
) -> None:
    if is_asleep:  # its requests are refused, but for the moment in which it restarts
        await made.order(Sleep(("llm.0",)))
    Child.clinging.add("llm.0")
    restarting = asyncio.create_task(made.order(Restart(("llm.0",))))
    await made.log.until("SIGUSR1 llm.0")
    for other in others:
        assert (await made.order(other)).code == DONE
        assert made.coordinator.arrangement["returning"] == ["llm.0"]
    made.process("llm.0").child.end(0)

    assert (await restarting).code == DONE

    assert made.coordinator.arrangement["returning"] == []
    assert ("llm.0" in made.coordinator.arrangement["asleep"]) == is_asleep


async def test_replicas_restart_one_after_the_other(made: Made) -> None:
    await made.order(Restart(("llm",)))

    steps = [step for step in made.log if step.startswith(("SIGUSR1", "start"))]
    assert steps == ["SIGUSR1 llm.0", "start llm.0", "SIGUSR1 llm.1", "start llm.1"]


async def test_everything_is_stages_then_gateways_then_the_coordinator(made: Made) -> None:
    outcome = await made.order(Restart())

    assert (outcome.code, outcome.message) == (DONE, "restarted everything")
    started = [step.removeprefix("start ") for step in made.log if step.startswith("start")]
    assert started == ["llm.0", "llm.1", "voice.0", "gateway.front.2", "gateway.front.0", "coordinator"]
    assert set(made.names) == {"coordinator", "llm.0", "llm.1", "voice.0", "gateway.front.0", "gateway.front.2"}


async def test_next_gateway_serves_before_the_former_leaves(made: Made) -> None:
    await made.order(Restart(("gateway.front",)))

    assert made.log == [
        "start gateway.front.2",
        "SIGUSR1 gateway.front.0",
        "start gateway.front.0",
        "SIGUSR1 gateway.front.1",
    ]


async def test_gateway_that_can_not_start_leaves_the_former_in_place(made: Made) -> None:
    Child.broken.add("gateway.front.2")

    outcome = await made.order(Restart(("gateway.front",)))

    assert outcome.code == NOT_POSSIBLE
    assert "the weights are damaged" in outcome.message
    assert "gateway.front.2" not in made.names
    assert made.process("gateway.front.0").phase == Phase.READY


async def test_new_coordinator_is_told_who_serves_and_who_asks(made: Made) -> None:
    for event, name in (("joined", "visitor"), ("joined", "gateway.front.0"), ("left", "visitor"), ("joined", "call")):
        made.coordinator_says(f"client {event}", name=name)

    await made.order(Restart(("coordinator",)))

    assert made.log == ["SIGUSR1 coordinator", "start coordinator", "arrange"]
    arguments = made.process("coordinator").child.arguments
    assert arguments[-5:] == [
        *(f"--awaits={name}" for name in ("llm.0", "llm.1", "voice.0")),
        *(f"--awaits-client={name}" for name in ("call", "gateway.front.0")),
    ]


async def test_busy_replica_serves_on_when_its_time_is_over(made: Made) -> None:
    made.coordinator.outstanding = {"llm.0": 2}

    outcome = await made.order(Restart(("llm.0",), timeout_s=3.0))

    assert outcome.code == NOT_CLEAN
    assert outcome.message == ("llm.0 still works on 2 requests after 3 s, so it goes on serving (--force ends them)")
    assert made.log == ["arrange d:llm.0 r:llm.0", "drain llm.0", "arrange"]


async def test_force_goes_on_and_tells(made: Made) -> None:
    made.coordinator.outstanding = {"llm.0": 2}

    outcome = await made.order(Restart(("llm.0",), is_forced=True))

    assert (outcome.code, outcome.message) == (NOT_CLEAN, "restarted llm.0; what took too long was ended")
    assert "start llm.0" in made.log


async def test_replica_that_does_not_leave_is_killed_and_told(made: Made, monkeypatch) -> None:
    monkeypatch.setattr(module, "RETIRE_S", 0.01)
    Child.clinging.add("llm.0")

    outcome = await made.order(Restart(("llm.0",)))

    assert outcome.code == NOT_CLEAN
    assert "SIGKILL llm.0" in made.log
    assert "lost llm.0" in made.log, "nobody knows what was missing"
    assert made.process("llm.0").phase == Phase.READY


async def test_replica_that_does_not_come_back_is_not_waited_for(made: Made) -> None:
    Child.broken.add("voice.0")

    outcome = await made.order(Restart(("voice",)))

    assert (outcome.code, outcome.message) == (NOT_POSSIBLE, "voice.0 did not come up: the weights are damaged")
    assert made.log[-1] == "arrange", "who waited for it is refused"
    assert made.process("voice.0").phase == Phase.BACKING_OFF


async def test_replica_that_is_down_is_started_with_all_its_restarts(made: Made) -> None:
    process = made.process("llm.1")
    process.max_restarts = 0
    process.renew()
    process.child.end(1)
    assert process.phase == Phase.DEGRADED

    outcome = await made.order(Restart(("llm.1",)))

    assert outcome.code == DONE
    assert process.phase == Phase.READY


async def test_crash_while_it_is_drained_changes_nothing_of_the_aim(made: Made) -> None:
    ordered = asyncio.create_task(made.order(Restart(("llm.1",))))
    made.coordinator.is_idle.clear()
    await made.log.until("drain llm.1")
    made.process("llm.1").child.end(-signal.SIGSEGV)
    made.coordinator.is_idle.set()

    assert (await ordered).code == DONE
    assert made.process("llm.1").phase == Phase.READY
    assert made.process("llm.1").backoff is None


async def test_question_that_a_coordinator_lost_is_asked_again(made: Made) -> None:
    made.coordinator.is_lost_once = True

    outcome = await made.order(Restart(("llm.1",)))

    assert outcome.code == DONE
    assert made.log[:2] == ["heard", "arrange d:llm.1 r:llm.1"], "not before somebody is there"


# --- drain --------------------------------------------------------------------------------------------------


async def test_drained_replica_stays_so_through_a_restart(made: Made) -> None:
    assert (await made.order(Drain(("llm.0",)))).message == "llm.0: drained"

    await made.order(Restart(("llm.0",)))
    assert made.coordinator.arrangement["drained"] == ["llm.0"]
    assert read_deployment(made.supervisor.deployment.path).drained == {"llm.0"}, "the next coordinator reads it"

    outcome = await made.order(Resume(("llm",)))
    assert (outcome.code, made.coordinator.arrangement["drained"]) == (DONE, [])


async def test_drain_tells_what_still_runs(made: Made) -> None:
    made.coordinator.outstanding = {"llm.1": 1, "voice.0": 3}

    outcome = await made.order(Drain(("llm", "voice"), timeout_s=0.5))

    assert outcome.code == NOT_CLEAN
    assert outcome.message == (
        "llm.0, llm.1, voice.0: drained; llm.1 still works on 1 request, voice.0 still works on 3 requests after "
        "0.5 s (--force ends them)"
    )


async def test_drain_that_is_undone_meanwhile_says_so(made: Made) -> None:
    made.coordinator.is_idle.clear()
    draining = asyncio.create_task(made.order(Drain(("llm",))))
    await made.log.until("drain llm.0,llm.1")

    assert (await made.order(Resume(("llm",)))).code == DONE
    made.coordinator.is_idle.set()
    assert (await draining).code == NOT_POSSIBLE


# --- scale --------------------------------------------------------------------------------------------------


async def test_more_replicas_start_together_and_get_their_share_of_cores(made: Made, monkeypatch) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 10)

    outcome = await made.order(Scale({"llm": 4}))

    assert (outcome.code, outcome.message) == (DONE, "scaled llm from 2 to 4")
    assert made.log == ["arrange", "start llm.2", "start llm.3"]
    assert made.coordinator.arrangement["wanted"] == {"llm": 4, "voice": 1}
    assert made.process("llm.3").child.environment["OMP_NUM_THREADS"] == "2"
    written = read_deployment(made.supervisor.deployment.path)
    assert (written.config.stages["llm"].replicas, written.threads) == (4, {"llm": 2, "voice": 2})


async def test_fewer_replicas_go_from_the_highest_number_on(made: Made) -> None:
    await made.order(Scale({"llm": 3}))
    made.log.clear()

    outcome = await made.order(Scale({"llm": 1}))

    assert (outcome.code, outcome.message) == (DONE, "scaled llm from 3 to 1")
    assert [step for step in made.log if "arrange" not in step] == [
        "drain llm.2",
        "SIGUSR1 llm.2",
        "lost llm.2 settled",
        "drain llm.1",
        "SIGUSR1 llm.1",
        "lost llm.1 settled",
    ]
    assert made.names.count("llm.0") == 1
    assert not {"llm.1", "llm.2"} & set(made.names)
    assert made.coordinator.arrangement == {
        "wanted": {"llm": 1, "voice": 1},
        "drained": [],
        "returning": [],
        "asleep": {},
    }


async def test_replica_that_is_still_busy_stays(made: Made) -> None:
    made.coordinator.outstanding = {"llm.1": 1}

    outcome = await made.order(Scale({"llm": 1}, timeout_s=0.5))

    assert outcome.code == NOT_CLEAN
    assert made.coordinator.arrangement == {
        "wanted": {"llm": 2, "voice": 1},
        "drained": [],
        "returning": [],
        "asleep": {},
    }
    assert made.process("llm.1").phase == Phase.READY


async def test_new_replica_that_fails_is_taken_back_with_all_after_it(made: Made) -> None:
    Child.broken.add("llm.3")

    outcome = await made.order(Scale({"llm": 5}))

    assert (outcome.code, outcome.message) == (NOT_POSSIBLE, "llm.3 did not come up: the weights are damaged")
    assert [name for name in made.names if name.startswith("llm")] == ["llm.0", "llm.1", "llm.2"]
    assert made.coordinator.arrangement["wanted"]["llm"] == 3


@pytest.mark.parametrize("wanted", [{}, {"llm": 0}, {"llm": 65}, {"nope": 2}, {"voice": 2, "llm": -1}])
async def test_size_that_is_not_allowed_changes_nothing(made: Made, wanted: dict[str, int]) -> None:
    assert (await made.order(Scale(wanted))).code == BAD_ORDER
    assert made.log == []


# --- one at a time ------------------------------------------------------------------------------------------


async def test_stage_takes_one_order_at_a_time_and_others_go_on(made: Made) -> None:
    Child.clinging.add("llm.0")
    first = asyncio.create_task(made.order(Restart(("llm.0",))))
    await made.log.until("SIGUSR1 llm.0")

    for order in (Restart(("llm.1",)), Scale({"llm": 3}), Drain(("llm",)), Resume(("llm",)), Restart()):
        outcome = await made.order(order)
        assert (outcome.code, outcome.message) == (NOT_POSSIBLE, "'llm' is busy: a restart of it is under way")
    assert (await made.order(Restart(("voice", "gateway.front")))).code == DONE

    made.process("llm.0").child.end(0)
    assert (await first).code == DONE
    assert (await made.order(Restart(("llm.1",)))).code == DONE


async def test_closed_operations_change_nothing_more(made: Made) -> None:
    Child.clinging.add("llm.0")
    ordered = asyncio.create_task(made.order(Restart(("llm.0",))))
    await made.log.until("SIGUSR1 llm.0")
    made.operations.close()
    made.log.clear()

    ordered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ordered

    assert made.log == []


async def test_deployment_that_stops_takes_no_orders(made: Made) -> None:
    made.supervisor._is_stopping = True

    assert (await made.order(Restart())).code == NOT_POSSIBLE


async def test_orders_and_outcomes_are_logged(made: Made, caplog) -> None:
    caplog.set_level("INFO")
    await made.order(Scale({"llm": 3}))

    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert [f["order"] for f in fields if "order" in f] == ["scale", "scale"]
    assert fields[-1]["message"] == "scaled llm from 2 to 3"
