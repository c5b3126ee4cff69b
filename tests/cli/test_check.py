"""The check command: what a person sees, and what a program reads."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from omni_bus.cli import check, up
from omni_bus.core.pipeline import Pipeline
from omni_bus.engine import EngineRequest, Inputs, Memory, StreamingEngine
from omni_bus.errors import ConfigError
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Payload

ROOT = Path(__file__).parents[2]


class WriterOptions(msgspec.Struct):
    """Options with a docstring each."""

    model: str = "small"
    """Which weights
    to load."""


class Writer(StreamingEngine):
    """An adapter for these tests."""

    accepts: ClassVar = {"prompt": "json"}
    emits: ClassVar = {"text": "text"}
    Options = WriterOptions

    def load(self, report: Any) -> None:
        raise AssertionError("checking a deployment loads no engine")

    def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        raise AssertionError("checking a deployment runs nothing")


class Reader(Writer):
    """The second stage."""

    accepts: ClassVar = {"text": "text"}
    emits: ClassVar = {"audio": "audio"}


class Speaker(Reader):
    """A second stage that has voices."""

    @classmethod
    def voices(cls, options: WriterOptions) -> tuple[str, ...]:
        return (f"voice of {options.model}", "another")


class Heavy(Writer):
    """A first stage that takes memory."""

    @classmethod
    def memory(cls, options: WriterOptions, *, has_accelerator: bool) -> Memory:
        return Memory("cpu", int(options.model) * 10**9, 2 * 10**6)


class Door:
    """A gateway for these tests."""

    class Options(msgspec.Struct):
        """One secret."""

        api_keys: tuple[str, ...] = ()

    @classmethod
    def can_serve(cls, pipeline: Pipeline) -> bool:
        return bool(pipeline.outputs)


def _text(protocol: str = "") -> str:
    return f"""[stages.writer]
adapter = "{__name__}:Writer"
[stages.reader]
adapter = "{__name__}:Reader"
[pipelines.chat]
serve_as = "little-one"
edges = [
  "writer.text -> reader.text",
  "in.messages -> writer.prompt",
  "writer.text -> out.text",
  "reader.audio -> out.audio",
]
[gateways.door]
protocol = "{protocol or __name__ + ":Door"}"
api_keys = ["hush"]
"""


@pytest.fixture(autouse=True)
def _deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("OMNI_BUS__")]:
        monkeypatch.delenv(variable)
    Path("d.toml").write_text(_text())


def _check(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return check.run(parser.parse_args(["--config", "d.toml", *arguments]))


def test_good_deployment_is_printed_with_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("-o", "stages.writer.replicas=2") == 0

    out = capsys.readouterr().out
    assert "d.toml is good: 2 stages, 1 pipeline, 1 gateway" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "replicas = 2 # -o stages.writer.replicas=2" in lines
    assert 'serve_as = "little-one" # d.toml:6' in lines
    assert "# threads is not set # default" in lines
    assert 'model = "small" # default' in lines
    assert "hush" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_voices_are_printed_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("-o", f"stages.reader.adapter={__name__}:Speaker", "-o", "stages.reader.model=x") == 0
    assert "\n  voices  another, voice of x\n" in capsys.readouterr().out
    assert _check("-o", f"stages.reader.adapter={__name__}:Speaker", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pipelines"]["chat"]["voices"] == ["another", "voice of small"]


@pytest.mark.parametrize(
    "arguments", [(), ("--json",), ("--explain", "callers.gold"), ("--explain", "callers", "--json")]
)
def test_callers_are_printed_without_their_keys(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    Path("d.toml").write_text(f'{_text()}[callers.gold]\nkeys = ["hush"]\nkey_file = "gold.keys"\nweight = 4\n')

    assert _check(*arguments) == 0

    out = capsys.readouterr().out
    assert "hush" not in out
    assert "gold.keys" in out
    assert "weight" in out


def _heavy(gigabytes: int) -> tuple[str, ...]:
    return ("-o", f"stages.writer.adapter={__name__}:Heavy", "-o", f'stages.writer.model="{gigabytes}"')


def test_memory_is_printed_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(*_heavy(1), "-o", "stages.writer.replicas=2") == 0

    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-4:]]
    assert rows[:2] == ["memory device weights keys and values a step together", "writer host 2.0 GB 4.0 MB 2.0 GB"]
    assert rows[2].startswith("host: about 2.0 GB of ")
    assert rows[3] == "not known: reader"
    assert _check(*_heavy(1), "--json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["stages"]["writer"]["total"] == 1_002_000_000
    assert memory["stages"]["reader"]["memory"] is None


@pytest.mark.parametrize("command", [check, up])
def test_more_memory_than_there_is_is_refused_before_anything_starts(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(["--config", "d.toml", *_heavy(10**6)])
    if command is check:
        assert check.run(arguments) == 1
        problem = capsys.readouterr().err
    else:
        with pytest.raises(ConfigError) as caught:
            up.run(arguments)
        problem = str(caught.value)
    assert problem.startswith("d.toml:1: stages.writer: host has ")
    assert "its stages take 1000000.0 GB (writer 1000000.0 GB)" in problem


def test_pipeline_is_drawn_in_the_order_of_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check() == 0

    lines = capsys.readouterr().out.splitlines()
    at = lines.index("pipeline chat, served as little-one")
    assert lines[at + 1 : at + 5] == [
        "  in.messages  ─json──→ writer.prompt",
        "  writer.text  ─text──→ out.text",
        "  writer.text  ─text──→ reader.text",
        "  reader.audio ─audio─→ out.audio",
    ]


def test_stage_table_names_the_ports(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("-o", "stages.reader.threads=1") == 0

    out = capsys.readouterr().out
    rows = [line.split() for line in out[out.index("\nstage ") :].splitlines()]
    assert rows[1:8] == [
        ["stage", "adapter", "replicas", "threads"],
        ["writer", f"{__name__}:Writer", "1", "shared"],
        ["accepts", "prompt", "(json)"],
        ["emits", "text", "(text)"],
        ["reader", f"{__name__}:Reader", "1", "1"],
        ["accepts", "text", "(text)"],
        ["emits", "audio", "(audio)"],
    ]


def test_printed_tables_are_the_same_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed above the drawing is TOML, and checking it gives the same."""
    Path("d.toml").write_text(_text().replace("api_keys", "#"))
    assert _check() == 0
    printed = capsys.readouterr().out

    Path("again.toml").write_text(printed[printed.index("\n") : printed.index("\npipeline chat")])
    assert _check("--config", "again.toml") == 0

    def without_origins(text: str) -> list[str]:
        return [line.split(" # ")[0].rstrip() for line in text.splitlines()[1:]]

    assert without_origins(capsys.readouterr().out) == without_origins(printed)


def test_explain_shows_value_origin_default_and_docstring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_BUS__STAGES__WRITER__MODEL", "large")

    assert _check("--explain", "stages.writer.model") == 0

    assert capsys.readouterr().out.splitlines() == [
        'stages.writer.model = "large"',
        "  from     environment OMNI_BUS__STAGES__WRITER__MODEL",
        '  default  "small"',
        "  allowed  text",
        "  Which weights to load.",
    ]


def test_explain_of_a_table_explains_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("--explain", "pipelines.chat", "--json") == 0

    found = {entry["key"]: entry for entry in msgspec.json.decode(capsys.readouterr().out)["settings"]}
    assert found["pipelines.chat.serve_as"]["origin"] == "d.toml:6"
    assert found["pipelines.chat.max_in_flight"]["is_default"]
    assert all(entry["doc"] for entry in found.values())


def test_explain_of_an_unknown_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("--explain", "stages.writer.modle") == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "--explain stages.writer.modle: no such key; did you mean 'stages.writer.model'?\n"


def test_problems_go_to_stderr_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("d.toml").write_text(_text().replace("reader.text", "raeder.text").replace("serve_as", "serve_s"))

    assert _check() == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.startswith("d.toml:6: pipelines.chat.serve_s: unknown key; did you mean 'serve_as'?")
    assert second.startswith("d.toml:8: pipelines.chat.edges[0]: unknown stage 'raeder'; did you mean 'reader'?")


def test_problems_are_also_there_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("d.toml").write_text(_text("nothing"))

    assert _check("--json") == 1

    captured = capsys.readouterr()
    assert msgspec.json.decode(captured.out)["problems"] == captured.err.splitlines()


def test_json_has_edges_and_hides_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("--json") == 0

    out = capsys.readouterr().out
    assert "hush" not in out
    found = msgspec.json.decode(out)
    assert found["served"] == {"door": ["chat"]}
    assert found["pipelines"]["chat"]["edges"][0]["kind"] == "text"


def test_too_many_threads_are_a_warning_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check("-o", "stages.writer.threads=100000") == 0

    assert capsys.readouterr().err.startswith("warning: stages ask for 100000 threads")


def test_terminal_without_unicode_gets_plain_arrows() -> None:
    code = (
        "import argparse, sys; from omni_bus.cli import check; p = argparse.ArgumentParser(); check.add_arguments(p);"
        "sys.exit(check.run(p.parse_args()))"
    )
    text = _text().replace(__name__, "deployment_parts")
    Path("ascii.toml").write_text(text)
    Path("deployment_parts.py").write_text(Path(__file__).read_text())
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
    }

    done = subprocess.run(
        [sys.executable, "-c", code, "--config", "ascii.toml"],
        capture_output=True,
        env=environ,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert b"in.messages  -json--> writer.prompt" in done.stdout


def test_checking_imports_no_heavy_module() -> None:
    code = (
        "import sys; import omni_bus.cli.check;"
        "print(*{'torch', 'numpy', 'transformers', 'zmq', 'aiohttp'} & set(sys.modules))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={"PYTHONPATH": str(ROOT)}, timeout=60, check=False
    )

    assert (done.stdout.strip(), done.stderr) == (b"", b"")
