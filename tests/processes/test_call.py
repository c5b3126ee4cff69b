"""``omni-bus call`` and ``status`` against a running deployment."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import wave

import pytest

pytestmark = pytest.mark.processes

VOICE = """
[stages.llm]
adapter = "synthetic-text"
tokens = 4

[stages.voice]
adapter = "synthetic-speech"

[pipelines.voice]
serve_as = "synthetic-voice"
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> out.text",
  "llm.text -> voice.text",
  "voice.audio -> out.audio",
]

[stages.writer]
adapter = "synthetic-text"
[pipelines.text]
edges = ["in.messages -> writer.prompt", "writer.text -> out.text"]

[stages.painter]
adapter = "synthetic-image"
[pipelines.image]
edges = ["in.prompt -> painter.prompt", "painter.image -> out.image"]
"""


def test_answers_and_refusals(up, omni_bus, tmp_path) -> None:
    """One deployment for all of them: each call is its own, and starting takes longer than calling."""
    deployment = up(VOICE)
    deployment.wait_for("ready")
    voice = ("--model", "synthetic-voice")

    said = omni_bus("call", "hello", *voice)
    assert (said.returncode, said.stdout) == (0, "hello:0 hello:1 hello:2 hello:3\n")

    wav = tmp_path / "a.wav"
    spoken = omni_bus("call", "hello", *voice, "--audio-out", str(wav), "-p", "llm.tokens=2")
    assert (spoken.returncode, spoken.stdout) == (0, "hello:0 hello:1\n")
    assert re.fullmatch(rf"wrote {wav}: 0\.\d+ s at 24000 Hz\n", spoken.stderr)
    with wave.open(str(wav)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        samples = memoryview(file.readframes(file.getnframes())).cast("h")
        assert list(samples) == list(range(len(samples)))
        assert len(samples) == len("hello:0 hello:1") * 480

    # Steps really executed, of engines that are stepped and of those that stream, read from outside.
    rows = json.loads(omni_bus("status", "--json").stdout)["actors"]
    steps = {row["actor"]: row["stats"]["steps"] for row in rows}
    assert (steps["llm.0"], steps["voice.0"]) == (4 + 2, 2)

    refusals = {
        ("hi",): "say which model with --model (those that take messages: synthetic-voice, text)",
        ("hi", "--model", "synthetic-voise"): "unknown model 'synthetic-voise'; did you mean 'synthetic-voice'?",
        ("hi", "--model", "image"): "unknown model 'image' (known: synthetic-voice, text, voice)",
        ("hi", "--model", "text", "--audio-out", str(wav)): "pipeline 'text' has no audio (outputs: text)",
        ("hi", *voice, "--audio-out", "/nowhere/a.wav"): "there is no directory '/nowhere'",
        ("hi", *voice, "--audio-out", str(tmp_path)): "that is a directory, not a file",
        ("hi", *voice, "-p", "llm"): "-p llm: expected STAGE.NAME=VALUE",
        ("hi", *voice, "-p", "lm.tokens=1"): "unknown stage of 'synthetic-voice' 'lm'; did you mean 'llm'?",
        ("hi", *voice, "-p", "llm.token=1"): "unknown parameter 'token'; did you mean 'tokens'?",
        ("hi", *voice, "-p", "llm.tokens=0"): "tokens: Expected `int` >= 1",
        ("hi", *voice, "-p", "llm.fail_at_step=1"): "synthetic failure at step 1",
        ("hi", *voice, "--timeout", "-1"): "--timeout -1: not a positive number of seconds",
        ("hi", *voice, "--timeout", "0.05", "-p", "llm.hang_at_step=0"): "the request's time limit passed",
        ("hi", "--name", "demi"): "unknown running deployment 'demi'; did you mean 'demo'?",
    }
    for arguments, message in refusals.items():
        refused = omni_bus("call", *arguments)
        assert (refused.returncode, "Traceback" in refused.stderr) == (1, False), arguments
        assert message in refused.stderr

    # No prompt in any line, and one line for each request that came to the coordinator.
    assert deployment.stop() == 0
    ended = [e for e in deployment.events if e["event"] == "request ended"]
    assert [e["outcome"] for e in ended] == ["done", "done", "failed", "failed", "failed", "failed"]
    assert [e.get("code") for e in ended[2:]] == ["unknown_name", "bad_input", "stage_failed", "deadline_exceeded"]
    assert ended[1]["stages"]["llm"]["completion_tokens"] == 2
    assert ended[1]["stages"]["voice"]["bytes_out"] > len(samples) * 2
    assert len({e["request"] for e in ended}) == 6
    assert "hello" not in json.dumps(deployment.events)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_call_cancels_its_request(up, environ, number: signal.Signals) -> None:
    deployment = up(VOICE)
    deployment.wait_for("ready")
    arguments = ["call", "hi", "--model", "text", "-p", "writer.tokens=100000", "-p", "writer.step_time_s=0.01"]
    with subprocess.Popen(
        [sys.executable, "-m", "omni_bus", *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as call:
        assert call.stdout is not None
        assert call.stdout.read(4) == b"hi:0"

        call.send_signal(number)

        ended = deployment.wait_for("request ended")
        assert call.communicate()[1] == b""
        assert call.returncode == 130
    assert ended["outcome"] == "cancelled"
    assert deployment.stop() == 0


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGKILL,)])
def test_call_of_a_deployment_that_ends_does_not_wait_for_ever(up, environ, numbers: tuple[int, ...]) -> None:
    deployment = up(VOICE)
    deployment.wait_for("ready")
    arguments = ["call", "hi", "--model", "text", "-p", "writer.tokens=100000", "-p", "writer.step_time_s=0.01"]
    with subprocess.Popen(
        [sys.executable, "-m", "omni_bus", *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as call:
        assert call.stdout is not None
        assert call.stdout.read(4) == b"hi:0"

        for number in numbers:
            deployment.process.send_signal(number)

        said, why = call.communicate()
        assert (call.returncode, said[-1:]) == (1, b"\n")
        assert why == b"omni-bus call: the deployment 'demo' has ended\n"
    assert deployment.end() == (-signal.SIGKILL if signal.SIGKILL in numbers else 3)


def test_status_fits_eighty_columns(up, omni_bus, environ) -> None:
    environ["COLUMNS"] = "80"
    deployment = up(VOICE)
    deployment.wait_for("ready")

    shown = omni_bus("status")
    told = omni_bus("status", "--json")

    assert (shown.returncode, told.returncode) == (0, 0)
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"actor +phase +for +answers +active +wait +susp +done +failed +canc", lines[0].strip())
    assert re.fullmatch(r"llm\.0 +ready +[\d.]+ s +[\d.]+ ms( +0){6}", lines[1].strip())
    status = json.loads(told.stdout)
    assert {actor["actor"]: actor["is_ready"] for actor in status["actors"]} == {
        "llm.0": True,
        "painter.0": True,
        "voice.0": True,
        "writer.0": True,
    }
    assert status["requests"]["live"] == 0
    assert deployment.stop() == 0


def test_status_shows_what_is_missing(up, omni_bus) -> None:
    deployment = up(VOICE, "-o", "max_restarts=0")
    deployment.wait_for("ready")

    omni_bus("call", "hi", "--model", "text", "-p", "writer.crash_at_step=0")
    deployment.wait_for("process", process="writer.0", phase="degraded")
    shown = omni_bus("status")

    assert shown.returncode == 1
    assert re.search(r"^writer\.0 +degraded +[\d.]+ s +NO", shown.stdout, re.MULTILINE)
    assert "writer.0: exit code 70" in shown.stdout
    assert deployment.stop() == 0


def test_status_without_a_deployment_says_so(omni_bus) -> None:
    shown = omni_bus("status")

    assert shown.returncode == 1
    assert "no deployment is running: start one with `omni-bus up`" in shown.stderr
