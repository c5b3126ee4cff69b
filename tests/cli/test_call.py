"""What ``omni-bus call`` and its two-word kin refuse before they look for a deployment; the rest: tests/processes."""

from __future__ import annotations

import pytest

from omni_bus.cli import main

SPEECH = ("speech", "Hi", "--audio-out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Hi", "-p", "llm"), "-p llm: expected STAGE.NAME=VALUE"),
        (("Hi", "--timeout", "0"), "--timeout 0: not a positive number of seconds"),
        (("Hi", "--audio-out", "a.doc"), "--audio-out a.doc: no format of sound ends in .doc (allowed: .wav, .mp3, "),
        ((*SPEECH, "a.doc"), "--audio-out a.doc: no format of sound ends in .doc (allowed: .wav, .mp3, .flac, .opus, "),
        ((*SPEECH, "/nowhere/a.wav"), "there is no directory '/nowhere'"),
        ((*SPEECH, "-", "--speed", "9"), "--speed 9 came (allowed: a number from 0.25 to 4)"),
        ((*SPEECH, "-", "--speed", "nan"), "--speed nan came (allowed: a number from 0.25 to 4)"),
        ((*SPEECH, "-", "-p", "voice.speed"), "-p voice.speed: expected STAGE.NAME=VALUE"),
        (("transcribe", "a.wav", "--format", "doc"), "unknown value of --format: 'doc' (known: json, srt, text, vtt)"),
        (("transcribe", "a.wav", "--timeout", "inf"), "--timeout inf: not a positive number of seconds"),
    ],
)
def test_bad_option_is_named_with_what_is_allowed(capsys, arguments: tuple[str, ...], words: str) -> None:
    assert main(["call", *arguments]) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["call", "speech"], "omni-bus call speech [-h] --audio-out FILE"),
        (["call", "transcribe"], "omni-bus call transcribe [-h]"),
        (["call", "speech", "--help"], "omni-bus call speech [-h] --audio-out FILE"),
        (["call"], "omni-bus call [-h]"),
    ],
)
def test_words_next_to_each_other_are_a_command(capsys, arguments: list[str], usage: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments)

    said = capsys.readouterr()
    assert usage in said.out + said.err


@pytest.mark.parametrize("arguments", [["--", "speech"], ["--model", "m", "speech"], ["--model=m", "transcribe"]])
def test_the_same_words_elsewhere_are_a_text(capsys, monkeypatch, tmp_path, arguments: list[str]) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert main(["call", *arguments]) == 1

    assert capsys.readouterr().err.startswith("omni-bus call: no deployment is running")
