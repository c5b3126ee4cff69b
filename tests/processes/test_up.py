"""Starts of real deployments: what is told, what is refused, what a failed one leaves."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PAINTER = """
[stages.painter]
adapter = "synthetic-image"
steps = 2
{options}

[pipelines.image]
edges = ["in.prompt -> painter.prompt", "painter.image -> out.image"]
{more}
"""

TEXT_WITH_GATEWAY = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
port = {port}
"""


def painter(options: str = "", more: str = "") -> str:
    return PAINTER.format(options=options, more=more)


def test_ready_comes_after_all_processes_are(up) -> None:
    deployment = up(painter("replicas = 2"))

    ready = deployment.wait_for("ready")

    told = [(e["process"], e["phase"]) for e in deployment.events if e["event"] == "process"]
    assert {name for name, phase in told if phase == "ready"} == {"coordinator", "painter.0", "painter.1"}
    assert ready["models"] == ["image"]
    assert deployment.stop() == 0
    assert deployment.errors == ""


def test_every_level_shows_readiness(up) -> None:
    deployment = up(painter(), "--log-level", "ERROR")

    deployment.wait_for("ready")

    assert deployment.stop() == 0


def test_port_zero_is_told_and_answers(up) -> None:
    deployment = up(TEXT_WITH_GATEWAY.format(port=0))

    url = deployment.wait_for("ready")["gateways"]["openai"]

    port = int(url.removeprefix("http://127.0.0.1:"))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert deployment.stop() == 0


def test_busy_port_names_its_holder(up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        deployment = up(TEXT_WITH_GATEWAY.format(port=port))

        assert deployment.end() == 2

    assert f"127.0.0.1:{port}: Address already in use (held by process {os.getpid()}:" in deployment.errors
    assert "-o gateways.openai.port=N" in deployment.errors
    assert deployment.events == []


def test_second_deployment_of_a_name_is_refused(up) -> None:
    first = up(painter())
    first.wait_for("ready")

    second = up(painter())

    assert second.end() == 2
    assert f"a deployment named 'demo' is running (process {first.process.pid}," in second.errors
    assert first.stop() == 0


@pytest.mark.slow
def test_eight_of_one_name_leave_one(up) -> None:
    together = [up(painter()) for _ in range(8)]

    # Only the one that won stays, so the others' ends can be waited for.
    losers = []
    while len(losers) < 7:
        pid, status = os.waitpid(-1, 0)
        losers.append(next(one for one in together if one.process.pid == pid))
        losers[-1].process.returncode = os.waitstatus_to_exitcode(status)
    (winner,) = [one for one in together if one not in losers]
    winner.wait_for("ready")

    refused = "omni-bus up: a deployment named 'demo' is running"
    assert [(loser.end(), loser.errors[: len(refused)]) for loser in losers] == [(2, refused)] * 7
    assert winner.stop() == 0


@pytest.mark.slow
def test_eight_names_at_one_instant_all_start(up) -> None:
    together = [up(painter(), file=f"demo{i}") for i in range(8)]

    for one in together:
        one.wait_for("ready")

    assert [one.stop() for one in together] == [0] * 8


@pytest.mark.slow
def test_long_load_with_progress_is_no_failure(up) -> None:
    deployment = up(painter("load_time_s = 7"), "-o", "start_timeout_s=5")

    assert deployment.wait_for("ready")["after_s"] > 5
    assert deployment.stop() == 0


@pytest.mark.slow
def test_load_that_hangs_is_named(up) -> None:
    deployment = up(painter("load_hangs = true"), "-o", "start_timeout_s=5")

    assert deployment.end() == 2
    assert deployment.errors.splitlines()[0] == (
        "omni-bus up: painter.0: no progress for 5 s in phase 'synthetic weights' (start_timeout_s)"
    )


def test_failed_load_says_its_own_error(up) -> None:
    deployment = up(painter('load_fails = "no such weights"'))

    assert deployment.end() == 2
    assert deployment.errors == "omni-bus up: painter.0: no such weights (load_fails is set)\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os, signal; print('about to fall'); os.kill(os.getpid(), signal.SIGSEGV)", "ended with SIGSEGV"),
        ("import os; print('about to fall'); os._exit(9)", "ended with exit code 9"),
    ],
)
def test_crash_at_load_says_how_and_what_was_printed(up, environ, tmp_path: Path, body: str, said: str) -> None:
    module = f"""
from typing import ClassVar
from omni_bus.engine import StreamingEngine
class Falling(StreamingEngine):
    accepts: ClassVar = {{"text": "text"}}
    emits: ClassVar = {{"text": "text"}}
    def load(self, report):
        report("falling", 0.5)
        {body}
    async def run(self, request, inputs):
        yield "text", None
"""
    (tmp_path / "falling.py").write_text(module)
    environ["PYTHONPATH"] += f":{tmp_path}"
    toml = """
[stages.one]
adapter = "falling:Falling"
[pipelines.p]
edges = ["in.text -> one.text", "one.text -> out.text"]
"""

    deployment = up(toml)

    assert deployment.end() == 2
    first, *printed = deployment.errors.splitlines()
    assert first == f"omni-bus up: one.0: {said} in phase 'falling'"
    assert "    about to fall" in printed


def test_status_works_while_stages_load(up, omni_bus) -> None:
    deployment = up(painter("load_time_s = 600"))
    deployment.wait_for("process", process="painter.0", phase="synthetic weights")

    shown = omni_bus("status")

    assert shown.returncode == 1
    assert re.search(r"^painter\.0 +synthetic weights.* s +[\d.]+ ms", shown.stdout, re.MULTILINE)
    assert deployment.stop() == 0


def test_stop_while_loading_leaves_nothing(up) -> None:
    deployment = up(painter("load_time_s = 600"))
    deployment.wait_for("process", process="painter.0", phase="synthetic weights")

    assert deployment.stop() == 0


def test_output_of_engines_keeps_lines_json(up, environ, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "from adapters.synthetic import SyntheticImage\n"
        "class Loud(SyntheticImage):\n"
        "    def load(self, report):\n"
        "        print('half a line', end='')\n"
        '        print(\' and {"event": "phase"}\')\n'
        "        super().load(report)\n"
    )
    environ["PYTHONPATH"] += f":{tmp_path}"

    deployment = up(painter().replace("synthetic-image", "loud:Loud"))
    deployment.wait_for("ready")

    printed = [e["line"] for e in deployment.events if e["event"] == "output"]
    assert printed == ['half a line and {"event": "phase"}']
    assert deployment.stop() == 0


def test_what_an_engine_started_ends_with_it(up, environ, tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(
        "import subprocess\n"
        "from adapters.synthetic import SyntheticImage\n"
        "class Forking(SyntheticImage):\n"
        "    def load(self, report):\n"
        "        subprocess.Popen(['sleep', '600'])\n"
        "        super().load(report)\n"
    )
    environ["PYTHONPATH"] += f":{tmp_path}"

    deployment = up(painter().replace("synthetic-image", "forking:Forking"))
    deployment.wait_for("ready")

    assert deployment.stop() == 0  # and the fixture finds no process


def test_deployment_outlives_the_reader_of_its_lines(up, omni_bus) -> None:
    deployment = up(painter())
    deployment.wait_for("ready")

    deployment.process.stdout.close()
    shown = omni_bus("status")  # its coming and going is told in lines that nobody reads
    down = omni_bus("down")

    assert (shown.returncode, down.returncode) == (0, 0)
    assert deployment.process.wait() == 0
    deployment.process.stderr.close()


def test_coordinator_and_gateway_stay_small(up) -> None:
    deployment = up(TEXT_WITH_GATEWAY.format(port=0))
    deployment.wait_for("ready")

    for pid in (deployment.process.pid, deployment.pid_of("coordinator"), deployment.pid_of("gateway.openai.0")):
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" not in loaded
        assert "torch" not in loaded
        (resident,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert int(resident) < 100_000
    assert deployment.stop() == 0


def test_children_ignore_the_terminals_interrupt(up) -> None:
    deployment = up(painter())
    deployment.wait_for("ready")

    groups = {os.getpgid(deployment.pid_of(name)) for name in ("coordinator", "painter.0")}
    deployment.process.send_signal(signal.SIGINT)

    assert os.getpgid(0) not in groups
    assert deployment.end() == 0


def test_bad_name_is_refused(omni_bus) -> None:
    done = omni_bus("up", "--config", "configs/synthetic_image.toml", "--name", "../x")

    assert done.returncode == 1
    assert "--name ../x: not 1 to 64 letters" in done.stderr
