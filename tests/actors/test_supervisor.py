"""The supervisor's judgement, with children that only remember what was done to them."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from msgspec.structs import replace

from actors import supervisor
from actors.process import Phase
from actors.supervisor import Supervisor
from omni_bus.config.schema import DeploymentConfig, PipelineConfig, StageConfig
from omni_bus.errors import StartFailed
from omni_bus.ids import Peer
from omni_bus.runtime.deployment import Deployment, ipc_endpoint
from omni_bus.wire.frames import Outlook


class FakeChild:
    """A child that runs until the test ends it."""

    def __init__(self, arguments, environment, *, on_line, on_exit, pass_fds) -> None:
        self.arguments = arguments
        self.environment = environment
        self.on_line = on_line
        self.on_exit = on_exit
        self.exit_code: int | None = None
        self.signals: list[int] = []
        self.pid = 1

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def say(self, event: str, **fields: Any) -> None:
        line = {"time": 1.0, "level": "INFO", "actor": "x", "event": event, **fields}
        self.on_line(json.dumps(line).encode())

    def end(self, code: int) -> None:
        self.exit_code = code
        self.on_exit(code)


class FakeClient:
    def __init__(self) -> None:
        self.lost: list[Peer] = []
        self.outlooks: list[Outlook] = []

    def tell_lost(self, peer: Peer, *, is_settled: bool = False) -> None:
        assert not is_settled
        self.lost.append(peer)

    def tell_outlook(self, outlook: Outlook) -> None:
        self.outlooks.append(outlook)


class Watched:
    """A supervisor of a coordinator and two replicas, and what it told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        monkeypatch.setattr(supervisor, "Child", FakeChild)
        deployment = Deployment(
            config=DeploymentConfig(
                name="demo",
                stages={"llm": StageConfig(adapter="a", replicas=2)},
                pipelines={"p": PipelineConfig(edges=("in.a -> llm.a", "llm.b -> out.b"))},
                **config,
            ),
            pipelines={},
            run_dir="/nowhere",
            cache_dir="/nowhere",
            threads={"llm": 3},
            served={},
            coordinator_endpoint="ipc:///nowhere",
        )
        self.lines: list[dict[str, Any]] = []
        self.supervisor = Supervisor(
            deployment, {}, {"HOME": "/x"}, on_line=self.lines.append, on_change=lambda process: None
        )
        self.client = self.supervisor._client = FakeClient()  # type: ignore[assignment]
        for process in self.supervisor.processes:
            self.supervisor.spawn(process)
        self.coordinator, self.one, self.two = self.supervisor.processes

    def close(self) -> None:
        for process in self.supervisor.processes:
            process.drop_timers()
        if self.supervisor._started.done():
            self.supervisor._started.exception()

    def child(self, name: str) -> Any:
        return next(process.child for process in self.supervisor.processes if process.name == name)

    def make_ready(self, name: str, incarnation: int = 7) -> None:
        if name == "coordinator":
            self.child(name).say("phase", phase="ready", fraction=1.0)
            return
        self.child(name).say("listening", endpoint=f"ipc:///{name}", incarnation=f"{incarnation:016x}")
        self.child("coordinator").say("actor ready", name=name, incarnation=f"{incarnation:016x}")

    def make_all_ready(self) -> None:
        for process in self.supervisor.processes:
            self.make_ready(process.name)


@pytest.fixture
async def watched(monkeypatch):
    made = Watched(monkeypatch)
    yield made
    made.close()


async def test_stage_is_ready_when_the_coordinator_says_so(watched: Watched) -> None:
    watched.child("llm.0").say("listening", endpoint="ipc:///a", incarnation=f"{7:016x}")
    watched.child("llm.0").say("phase", phase="ready", fraction=1.0)
    assert watched.one.ready_at is None

    watched.child("coordinator").say("actor ready", name="llm.0", incarnation=f"{6:016x}")
    assert watched.one.ready_at is None, "that was a former incarnation"

    watched.child("coordinator").say("actor ready", name="llm.0", incarnation=f"{7:016x}")
    assert watched.one.phase == Phase.READY


async def test_readiness_may_be_read_before_the_name(watched: Watched) -> None:
    """The lines of two processes come through two pipes, in any order; a former incarnation's still does not count."""
    watched.child("coordinator").say("actor ready", name="llm.0", incarnation=f"{7:016x}")
    watched.child("coordinator").say("actor ready", name="llm.1", incarnation=f"{6:016x}")
    assert watched.one.ready_at is None

    watched.child("llm.0").say("listening", endpoint="ipc:///a", incarnation=f"{7:016x}")
    watched.child("llm.1").say("listening", endpoint="ipc:///b", incarnation=f"{8:016x}")
    assert watched.one.phase == Phase.READY
    assert watched.two.ready_at is None


async def test_started_means_all_are_ready(watched: Watched) -> None:
    watched.make_ready("llm.0")
    watched.make_ready("coordinator")
    assert not watched.supervisor._started.done()

    watched.make_ready("llm.1")
    assert watched.supervisor._started.done()


async def test_repeating_oneself_is_no_progress(watched: Watched) -> None:
    watched.child("llm.0").say("phase", phase="weights", fraction=0.5)
    watchdog = watched.one.watchdog

    watched.child("llm.0").say("phase", phase="weights", fraction=0.5)
    assert watched.one.watchdog is watchdog

    watched.child("llm.0").say("phase", phase="weights", fraction=0.6)
    assert watched.one.watchdog is not watchdog


async def test_first_failure_of_a_start_is_the_one_told(watched: Watched) -> None:
    watched.child("llm.1").say("start failed", error="no such file: weights.gguf")
    watched.child("llm.1").end(2)
    watched.child("llm.0").end(-signal.SIGSEGV)

    with pytest.raises(StartFailed, match=r"^llm\.1: no such file: weights\.gguf$"):
        await watched.supervisor._started
    assert watched.two.phase == Phase.FAILED


@pytest.mark.parametrize(
    ("code", "how"), [(-11, "SIGSEGV"), (-40, "signal 40"), (0, "exit code 0"), (70, "exit code 70")]
)
async def test_silent_death_is_told_with_what_was_printed(watched: Watched, code: int, how: str) -> None:
    watched.child("llm.0").on_line(b"Traceback: \xff")
    watched.child("llm.0").end(code)

    with pytest.raises(StartFailed) as failed:
        await watched.supervisor._started
    assert failed.value.message == f"llm.0: ended with {how} in phase 'starting'\n    Traceback: \ufffd"


async def test_only_the_last_lines_are_kept(watched: Watched) -> None:
    for i in range(1000):
        watched.child("llm.0").on_line(b"line %d" % i)

    assert watched.one.last_lines == [f"line {i}" for i in range(980, 1000)]


@pytest.mark.parametrize(
    "line",
    [b'{"event": "phase", "phase": "ready", "fraction": 1}', b"{}", b"[]", b'{"event"', b"\xff\xfe", b'{"a": NaN}'],
)
async def test_lines_that_only_look_like_ours_are_output(watched: Watched, line: bytes) -> None:
    watched.child("coordinator").on_line(line)

    assert watched.coordinator.ready_at is None
    assert watched.lines[-1]["event"] == "output"


async def test_lines_with_odd_fields_change_nothing(watched: Watched) -> None:
    child = watched.child("coordinator")

    child.say("phase", phase=3, fraction="x")
    child.say("phase")
    child.say("listening", endpoint=None)
    child.say("actor ready", name=["llm.0"])

    assert watched.coordinator.phase == Phase.STARTING


async def test_dead_stage_is_told_at_once(watched: Watched) -> None:
    watched.make_all_ready()

    watched.child("llm.0").end(-signal.SIGKILL)

    assert watched.client.lost == [Peer("llm.0", 7, "ipc:///llm.0")]
    assert watched.one.phase == Phase.BACKING_OFF
    assert watched.two.phase == Phase.READY


async def test_inbox_of_the_killed_is_removed(watched: Watched, tmp_path) -> None:
    """Files of former incarnations would pile up, and a coordinator's would take frames that nobody reads."""
    watched.make_all_ready()
    deployment = replace(
        watched.supervisor.deployment,
        run_dir=str(tmp_path),
        coordinator_endpoint=ipc_endpoint(str(tmp_path), "coordinator"),
    )
    watched.supervisor._deployment = deployment
    names = ("coordinator.sock", "llm.0-1.sock", "llm.1-1.sock", "llm.0-99.sock")
    for name in names:
        (tmp_path / name).touch()

    watched.child("llm.0").end(-signal.SIGKILL)
    watched.child("coordinator").end(1)

    assert {path.name for path in tmp_path.iterdir()} == {"llm.1-1.sock", "llm.0-99.sock"}


async def test_used_up_restarts_degrade_a_stage_and_end_a_coordinator(monkeypatch) -> None:
    watched = Watched(monkeypatch, max_restarts=0)
    watched.make_all_ready()

    watched.child("llm.0").end(1)
    assert watched.one.phase == Phase.DEGRADED
    assert not watched.supervisor.failed.done()
    watched.child("coordinator").end(1)

    assert "restarts are used up\ncoordinator: ended with exit code 1" in watched.supervisor.failed.result().message
    watched.close()


async def test_child_that_can_not_be_started_is_tried_again(watched: Watched, monkeypatch) -> None:
    watched.make_all_ready()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "Child", refuse)
    watched.supervisor.spawn(watched.one)

    assert watched.one.phase == Phase.BACKING_OFF
    assert watched.one.error == "can't be started: Resource temporarily unavailable"


async def test_hung_process_is_ended_unless_it_loads(watched: Watched, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "HANG_GRACE_S", 0.0)
    watched.make_ready("llm.0")
    loading = Peer("llm.1", 7, "ipc:///llm.1")
    watched.child("llm.1").say("listening", endpoint=loading.endpoint, incarnation=f"{7:016x}")

    reason = "its engine has made no progress for 60 s"
    watched.supervisor._lost(Peer("llm.0", 7, "ipc:///llm.0"), reason)
    watched.supervisor._lost(Peer("llm.0", 6, "ipc:///llm.0"), "replaced")
    watched.supervisor._lost(loading, "no heartbeat for 5 s")
    while not watched.child("llm.0").signals:
        await supervisor.asyncio.sleep(0)

    assert watched.child("llm.0").signals == [signal.SIGKILL]
    assert watched.one.error == f"it hung: {reason}"
    assert watched.child("llm.1").signals == []


async def test_coordinator_is_told_what_becomes_of_a_replica(watched: Watched, monkeypatch) -> None:
    monkeypatch.setattr(supervisor.random, "random", lambda: 0.5)
    watched.make_all_ready()
    watched.client.outlooks.clear()
    watched.one.start_s = 2.0

    watched.child("llm.0").end(-9)
    watched.supervisor.spawn(watched.one)

    assert watched.client.outlooks == [
        Outlook("llm.0", "llm", 0, "backing off", "SIGKILL", 2.1),
        Outlook("llm.0", "llm", 0, "starting", "", 2.0),
    ]


async def test_degraded_replica_is_told_and_told_again_to_a_new_coordinator(monkeypatch) -> None:
    watched = Watched(monkeypatch, max_restarts=0)
    watched.make_all_ready()
    watched.client.outlooks.clear()

    watched.child("llm.0").end(70)
    watched.supervisor._tell_all()

    first, again = watched.client.outlooks
    for told in (first, again):  # what is left to wait for, of which some has gone by since
        assert told == Outlook("llm.0", "llm", 0, "degraded", "exit code 70", told.retry_after_s)
        assert 0.0 < told.retry_after_s <= supervisor.DEGRADED_RETRY_S
    watched.close()


async def test_every_death_is_told_again_to_a_new_coordinator(watched: Watched) -> None:
    watched.make_all_ready()
    peers = [process.peer for process in (watched.one, watched.two)]
    for name in ("llm.0", "llm.1"):
        watched.child(name).end(-9)
    assert watched.client.lost == peers

    watched.supervisor._tell_all()

    assert watched.client.lost == [*peers, *peers]


async def test_coordinator_that_answers_nobody_is_ended_unless_it_has_just_come(watched: Watched) -> None:
    watched.supervisor._end_silent_coordinator()
    watched.make_all_ready()
    watched.supervisor._end_silent_coordinator()
    assert watched.child("coordinator").signals == []

    assert watched.coordinator.ready_at is not None
    watched.coordinator.ready_at -= 5.1
    watched.supervisor._end_silent_coordinator()

    assert watched.child("coordinator").signals == [signal.SIGKILL]
    assert watched.coordinator.error == "it hung: it answers no heartbeats"


async def test_only_replicas_have_an_outlook(watched: Watched) -> None:
    watched.make_all_ready()
    watched.client.outlooks.clear()

    watched.child("coordinator").end(1)

    assert watched.client.outlooks == []


async def test_stages_share_of_cores_reaches_its_process(watched: Watched) -> None:
    environment = watched.child("llm.0").environment

    assert (environment["OMP_NUM_THREADS"], environment["HOME"]) == ("3", "/x")
    assert watched.child("coordinator").environment["OMP_NUM_THREADS"] == "1"
