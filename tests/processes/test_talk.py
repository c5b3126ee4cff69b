"""``omni-bus talk`` with a running deployment on synthetic engines: loud is speech, the answer is a ramp."""

from __future__ import annotations

import array
import json
import os
import signal
import subprocess
import sys
import wave
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from processes.conftest import Up  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.processes

TOML = (
    (Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("port = 8000", "port = 0")
    .replace("tokens = 32", "tokens = 4")
)
SPEECH_S, BREAK_S = 0.4, 1.5


def speak(path: Path, *, times: int) -> str:
    """Write a file in which somebody speaks so often, with a break that is long enough for an answer to begin."""
    loud = array.array("h", [8000, -8000] * int(8000 * SPEECH_S))
    quiet = array.array("h", bytes(2 * int(16_000 * BREAK_S)))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        for number in range(times):
            file.writeframes((quiet + loud if number else loud).tobytes())
    return str(path)


def test_turns_are_spoken_heard_and_timed(
    up: Callable[..., Up], omni_bus: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Two turns, the second of which interrupts the answer to what it said first."""
    deployment = up(TOML)
    address = deployment.wait_for("ready")["gateways"]["openai"]
    once, twice = speak(tmp_path / "once.wav", times=1), speak(tmp_path / "twice.wav", times=2)
    wav, log, picture = tmp_path / "heard.wav", tmp_path / "events.jsonl", tmp_path / "turn.png"

    talked = omni_bus(
        *("talk", "--input", once, "--input", twice),
        *("--output", str(wav), "--events", str(log), "--plot", str(picture)),
    )

    assert (talked.returncode, talked.stderr) == (0, f"wrote {picture}\n")
    assert talked.stdout.count("heard: heard ") == 3
    assert talked.stdout.count("(interrupted: ") == 1
    assert [row.split()[0] for row in talked.stdout.splitlines()[-3:]] == ["1", "2", "3"]
    assert picture.read_bytes().startswith(b"\x89PNG")

    entries = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [entry["event"]["type"] for entry in entries]
    assert {"conversation.item.truncate", "conversation.item.truncated"} <= set(kinds)
    assert "error" not in kinds
    assert all(entry["event"]["delta"].endswith(" ms of sound") for entry in entries if "audio.delta" in str(entry))
    with wave.open(str(wav)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        heard = array.array("h", file.readframes(file.getnframes()))
    # The first answer comes after what was asked, without a gap: a ramp.
    began = next(place for place, sample in enumerate(heard) if sample)
    assert began > SPEECH_S * 24_000
    assert heard[began : began + 24_000].tolist() == list(range(1, 24_001))

    refusals = {
        ("--model", "synthetic-voice"): "unknown model 'synthetic-voice'; did you mean 'synthetic-sessions'?",
        ("--url", address, "--model", "nothing"): "nothing",
        ("--url", f"{address}/v1/models"): "200 came instead of a WebSocket",
        ("--url", "ws://127.0.0.1:1"): "ws://127.0.0.1:1/v1/realtime: ",
    }
    for arguments, words in refusals.items():
        refused = omni_bus("talk", "--input", once, *arguments)
        assert (refused.returncode, refused.stdout) == (1, ""), (arguments, refused)
        assert words in refused.stderr
        assert "Traceback" not in refused.stderr
    assert deployment.stop() == 0


@pytest.mark.parametrize("who", ["user", "server"])
def test_conversation_that_is_ended_leaves_what_was_heard(
    up: Callable[..., Up], environ: dict[str, str], tmp_path: Path, who: str
) -> None:
    deployment = up(TOML.replace("tokens = 4", "tokens = 400"))
    deployment.wait_for("ready")
    once, wav = speak(tmp_path / "once.wav", times=1), tmp_path / "heard.wav"
    command = [sys.executable, "-m", "omni_bus", "talk", "--input", once, "--output", str(wav)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as talk:
        assert talk.stdout is not None
        assert talk.stdout.readline().startswith(b"heard: ")
        assert talk.stdout.read(5) == b"said:"

        if who == "user":
            talk.send_signal(signal.SIGINT)
        else:
            os.kill(deployment.pid_of("gateway.openai.0"), signal.SIGKILL)

        why = talk.communicate()[1]
    assert talk.returncode == (130 if who == "user" else 1)
    assert (b"the server ended the conversation" in why) == (who == "server")
    assert b"Traceback" not in why
    with wave.open(str(wav)) as file:
        assert file.getnframes() > SPEECH_S * 24_000
    assert deployment.stop() == 0
