from __future__ import annotations

import os
import subprocess
import sys

import pytest

import omni_bus
from omni_bus.cli import COMMANDS, main


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_bus", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, **options)


def test_version_names_what_matters(capsys) -> None:
    assert main(["version"]) == 0

    said = capsys.readouterr().out
    assert said.startswith(f"omni-bus {omni_bus.__version__} (protocol ")
    assert "pyzmq " in said


def test_unknown_command_lists_the_known() -> None:
    done = run("upp")

    assert done.returncode == 2
    assert "invalid choice: 'upp'" in done.stderr
    assert all(command in done.stderr for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = run(command, "--help")

    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: omni-bus {command}")


def test_missing_configuration_is_told_without_traceback() -> None:
    done = run("up", "--config", "/nowhere.toml")

    assert done.returncode == 1
    assert "/nowhere.toml" in done.stderr
    assert "Traceback" not in done.stderr


def test_reader_that_left_costs_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "omni_bus", "check", "--config", "configs/synthetic_image.toml"]

    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)

    os.close(writing)
    assert "Traceback" not in done.stderr
