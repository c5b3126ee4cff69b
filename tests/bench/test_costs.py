from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from omni_bus.bench import costs
from omni_bus.bench.costs import ClientCost, ServerProcesses, Watch, process_name
from omni_bus.errors import BadInput, UnknownName

CHILD = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
PARENT = f"""
import subprocess, sys
input()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("done", flush=True)
input()
child.communicate(b"\\n")
"""


@pytest.mark.parametrize(
    ("name", "command", "wanted"),
    [
        (
            "python",
            ["python", "-P", "-u", "-X", "x", "-m", "actors.stage", "/run/d.json", "llm", "0"],
            "actors.stage llm 0",
        ),
        ("python3.11", ["python", "-m", "omni_bus", "up", "--config", "a.toml"], "omni_bus up"),
        ("python", ["/usr/bin/python", "/usr/bin/vllm", "serve", "org/model", "--port", "1"], "vllm serve"),
        ("python", ["python", "-W", "error", "a.py"], "a.py"),
        ("python", ["python", "-c", "from multiprocessing import x", "--fork"], "python"),
        ("python", ["python"], "python"),
        ("python", [], "python"),
        ("VLLM::EngineCore", ["VLLM::EngineCore"], "VLLM::EngineCore"),
    ],
)
def test_interpreters_are_called_after_what_they_run(name: str, command: list[str], wanted: str) -> None:
    assert process_name(name, command) == wanted


def test_processor_time_of_children_that_came_later_is_counted() -> None:
    pytest.importorskip("psutil")
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = ServerProcesses([process.pid])
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"done\n"

        found = before.cost()

        process.stdin.write(b"\n")
    assert found.cpu_s >= 0.29  # of the child, to the clock's hundredth
    assert sum(one.num_processes for one in found.processes.values()) == 2
    assert found.num_ended == 0


def test_process_that_is_not_there_is_named() -> None:
    pytest.importorskip("psutil")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass

    with pytest.raises(UnknownName, match=rf"--server-pid {process.pid}: there is no such process \(allowed: "):
        ServerProcesses([process.pid])


def test_missing_psutil_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)

    with pytest.raises(BadInput, match=r"--server-pid needs the package psutil.*omni-bus\[bench\]"):
        ServerProcesses([os.getpid()])


async def test_blocked_loop_shows_in_its_lag(monkeypatch) -> None:
    monkeypatch.setattr(costs, "BEAT_S", 0.001)
    watch = Watch([])
    async with watch.phase():
        await asyncio.sleep(0)
        burn_until = costs.time.process_time() + 0.1
        while costs.time.process_time() < burn_until:
            pass
        await asyncio.sleep(0.01)

    assert watch.client is not None
    assert watch.client.max_lag_ms >= 90
    assert watch.client.cpu_s >= 0.1
    assert watch.client.is_saturated
    assert watch.server is None


def test_client_is_saturated_by_processor_time_or_lag() -> None:
    idle = ClientCost(cpu_s=0.1, wall_s=1.0, median_lag_ms=0.1, p99_lag_ms=1.0, max_lag_ms=100.0)

    assert not idle.is_saturated
    assert ClientCost(0.95, 1.0, 0.1, 1.0, 1.0).is_saturated
    assert ClientCost(0.1, 1.0, 0.1, 21.0, 30.0).is_saturated
