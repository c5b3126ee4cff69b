from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = {"PATH": os.environ["PATH"]}
"""All that the scripts may need of the environment."""

TOOLS = ("python", "ruff", "pyright", "lint-imports")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What an environment is made from, in a folder of its own."""
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def shell(root: Path, commands: str) -> list[str]:
    return ["/bin/bash", "-c", f'set -euo pipefail; source "{root}/scripts/venv"; {commands}']


def run(root: Path, commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(shell(root, commands), env=KNOWN | environment, capture_output=True, text=True, check=False)


def pretend_it_is_made(root: Path, profile: str) -> None:
    """Leave what a finished set-up leaves, without the minutes of pip."""
    made = run(
        root,
        'mkdir -p "$VENV/bin"; touch "$VENV/pyvenv.cfg"; ln -sf /bin/true "$VENV/bin/python"; '
        f'printf "%s {profile}\\n" "$(state_of_pins)" > "$VENV/state"',
    )
    assert made.returncode == 0, made.stderr


def test_missing_python_is_said(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    done = run(copy, "PATH=$EMPTY; find_python", EMPTY=str(tmp_path / "empty"))

    assert done.returncode == 1
    assert "No Python 3.11 or newer" in done.stderr


def test_too_old_python_is_passed_over(copy: Path, tmp_path: Path) -> None:
    for name, status in (("python3.11", 1), ("python3.12", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)

    done = run(copy, "find_python", PATH=f"{tmp_path}:{os.environ['PATH']}")

    assert done.stdout.strip() == str(tmp_path / "python3.12")


def test_foreign_folder_is_left_alone(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()

    done = run(copy, "prepare_venv serve", OMNI_BUS_VENV=str(tmp_path / "photos"))

    assert done.returncode == 1
    assert "OMNI_BUS_VENV" in done.stderr
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["cat.png"]


@pytest.mark.parametrize(("made", "wanted"), [("serve", "serve"), ("test", "test"), ("test", "serve")])
def test_second_start_does_nothing(copy: Path, made: str, wanted: str) -> None:
    pretend_it_is_made(copy, made)

    done = run(copy, f"find_python() {{ exit 9; }}; prepare_venv {wanted}; echo ready")

    assert (done.returncode, done.stdout) == (0, "ready\n")


def test_serving_environment_is_too_small_for_tests(copy: Path) -> None:
    pretend_it_is_made(copy, "serve")

    done = run(copy, 'install_test() { echo "installs with $1"; }; prepare_venv test; cat "$VENV/state"')

    assert done.stdout.startswith("installs with /")
    assert done.stdout.endswith(" test\n")


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/constraints-cpu.txt", "scripts/venv"])
def test_changed_pins_renew_the_environment(copy: Path, changed: str) -> None:
    pretend_it_is_made(copy, "serve")
    with (copy / changed).open("a") as file:
        file.write("\n# a change\n")

    first = run(copy, "install_serve() { echo installs; }; prepare_venv serve")
    second = run(copy, "install_serve() { echo installs; }; prepare_venv serve")

    assert first.stdout.startswith("installs\n")
    assert second.stdout == ""


def test_failed_step_shows_its_output(copy: Path) -> None:
    pretend_it_is_made(copy, "test")
    with (copy / "pyproject.toml").open("a") as file:
        file.write("\n# a change\n")

    failing = "install_serve() { step 1/1 Nothing bash -c 'echo no such package; exit 3'; }"
    done = run(copy, f"{failing}; prepare_venv serve")

    assert done.returncode == 1
    assert "[1/1] Nothing … failed" in done.stdout
    assert "no such package" in done.stderr
    assert not (copy / ".venv" / "state").exists()


def test_two_setups_of_one_folder_take_turns(copy: Path) -> None:
    """The first holds the folder until the second waits; the second then finds everything done."""
    run(copy, 'mkdir -p "$VENV"; touch "$VENV/pyvenv.cfg"; mkfifo "$VENV/gate"')
    make = (
        'install_serve() { echo installs; read -r <"$VENV/gate"; '
        'mkdir -p "$VENV/bin"; ln -sf /bin/true "$VENV/bin/python"; }; prepare_venv serve'
    )
    command = shell(copy, make)
    with subprocess.Popen(command, env=KNOWN, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "installs\n"
        with subprocess.Popen(command, env=KNOWN, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline().startswith("Waiting for another set-up")
            (copy / ".venv" / "gate").write_text("go\n")
            assert (first.wait(20), second.wait(20)) == (0, 0)
            assert second.stdout.read() == ""


@pytest.mark.parametrize(
    ("broken", "last", "code"),
    [
        ([], "All is well: the checks and the tests passed.", 0),
        (["python"], "Tests failed: pytest ended with exit code 1.", 1),
        (["ruff"], "Check failed: ruff check, ruff format.", 1),
    ],
)
def test_last_line_says_how_it_went(copy: Path, broken: list[str], last: str, code: int) -> None:
    pretend_it_is_made(copy, "test")
    tools = [f'ln -sf /bin/{"false" if tool in broken else "true"} "$VENV/bin/{tool}"' for tool in TOOLS]
    assert run(copy, "; ".join(tools)).returncode == 0

    done = subprocess.run([copy / "scripts" / "test"], env=KNOWN, capture_output=True, text=True, check=False)

    assert (done.stdout.splitlines()[-1], done.returncode) == (last, code), done.stderr
