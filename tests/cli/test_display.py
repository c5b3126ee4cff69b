from __future__ import annotations

import io
import json
import logging
import os
import pty
from typing import TYPE_CHECKING

import pytest

from actors.process import Phase, Process
from omni_bus.cli.display import JsonDisplay, PlainDisplay, TableDisplay, make_display
from omni_bus.config.schema import DeploymentConfig
from omni_bus.core.pipeline import Pipeline
from omni_bus.runtime.deployment import Deployment
from omni_bus.wire.frames import RouteEdge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


def process(name: str) -> Process:
    return Process(name, [], fds=(), max_restarts=1, is_stage=True)


def record(text: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.WARNING, __file__, 1, text, (), None)
    made.fields = fields
    return made


def test_plain_says_each_phase_once() -> None:
    out = io.StringIO()
    display, one = PlainDisplay(out), process("llm.0")

    display.begin([one])
    for phase, fraction in [("starting", 0.0), ("weights", 0.1), ("weights", 0.9)]:
        one.phase, one.fraction = phase, fraction
        display.changed(one)
    one.phase, one.started_at, one.ready_at = Phase.READY, 10.0, 12.5
    display.changed(one)

    assert out.getvalue().splitlines() == [
        "starting 1 processes: llm.0",
        "  llm.0: starting",
        "  llm.0: weights",
        "  llm.0: ready after 2.5 s",
    ]


def test_plain_leaves_out_what_comes_with_every_request() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)

    display.line({"level": "INFO", "actor": "coordinator", "event": "request ended", "request": "r-1"})
    display.line({"level": "WARNING", "actor": "llm.0", "event": "slow", "after_s": 3, "time": 0})

    assert out.getvalue().endswith("warning llm.0: slow after_s=3\n")
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize("kind", [JsonDisplay, PlainDisplay])
def test_reader_that_left_ends_the_lines_only(kind) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=True) as out:
        display = kind(out)
        display.begin([process("llm.0")])
        display.handler("supervisor").emit(record("still here"))
        display.end()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # what is left in the file's buffer has to go somewhere


def test_json_keeps_own_log_lines_json() -> None:
    out = io.StringIO()
    display = JsonDisplay(out)

    display.handler("supervisor").emit(record("process died", process="llm.0"))
    display.line({"event": "x", "text": "ä\n"})

    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["process died", "x"]
    assert lines[0]["process"] == "llm.0"


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as out:
        yield ours, out
    os.close(ours)


def test_terminal_shows_a_table(terminal, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    ours, out = terminal
    display = make_display("auto", out)
    one = process("llm.0")
    one.phase, one.fraction = "weights", 0.5

    display.begin([one])
    display.handler("supervisor").emit(record("worth a line"))
    display.end()

    shown = ""
    while "stopped" not in shown:
        shown += os.read(ours, 65536).decode()
    assert isinstance(display, TableDisplay)
    assert "process" in shown
    assert "llm.0" in shown
    assert "weights" in shown
    assert "worth a line" in shown


@pytest.mark.parametrize(
    ("phase", "colour"), [("ready", "32"), ("failed", "1;31"), ("stopped", "2"), ("weights [1/2]", "33")]
)
def test_table_tells_the_failed_from_the_stopped(terminal, monkeypatch, phase: str, colour: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, out = terminal
    display = make_display("auto", out)
    one = process("llm.0")
    one.phase = phase
    one.ready_at = 1.0  # what was ready may have been stopped since

    display.begin([one])
    display.end()

    shown = ""
    while "stopped\r\n" not in shown:
        shown += os.read(ours, 65536).decode()
    assert f"\x1b[{colour}m{phase}\x1b[0m" in shown


@pytest.mark.parametrize(("port", "is_told"), [("messages", True), ("prompt", False)])
def test_terminal_says_what_to_do_next(terminal, monkeypatch, port: str, is_told) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, out = terminal
    display = make_display("auto", out)
    deployment = Deployment(
        config=DeploymentConfig(name="demo", stages={}, pipelines={}),
        pipelines={"p": Pipeline("p", "p", (), (RouteEdge("in", port, "llm", "prompt", "json", 8, 1024),))},
        run_dir="/nowhere",
        cache_dir="/nowhere",
        threads={},
        served={},
        coordinator_endpoint="ipc:///nowhere",
    )

    display.begin([process("llm.0")])
    display.ready(deployment, {}, 1.0)

    shown = ""
    while "Ctrl-C stops" not in shown or not shown.endswith("\n"):
        shown += os.read(ours, 65536).decode()
    assert ('omni-bus call "Hello"' in shown) is is_told


def test_no_terminal_gets_plain_lines() -> None:
    assert type(make_display("auto", io.StringIO())) is PlainDisplay
    assert type(make_display("plain", io.StringIO())) is PlainDisplay
    assert type(make_display("json", io.StringIO())) is JsonDisplay
