"""What ``omni-bus talk`` refuses before a word is spoken; the rest: tests/processes, tests/talk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omni_bus.cli import main


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No deployment is there, and the files of these tests are."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("no sound")


FILE = ("--input", "words.txt")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*FILE, "--output", "a.doc"), "--output a.doc: no format of sound ends in .doc (allowed: .wav, .mp3, "),
        ((*FILE, "--output", "/nowhere/a.wav"), "--output /nowhere/a.wav: there is no directory '/nowhere'"),
        ((*FILE, "--events", "a.txt"), "--events a.txt came (allowed: a file that ends in .jsonl)"),
        ((*FILE, "--plot", "a.doc"), "--plot a.doc came (allowed: a file that ends in .png, .svg, .pdf)"),
        ((*FILE, "--api-key", "a\nb"), "--api-key: it has characters that no HTTP header holds (allowed: printable)"),
        (("--input", "-", "--input", "-"), "--input - came twice"),
        ((*FILE, "--url", "ftp://a"), "--url ftp://a came (allowed: ws://HOST:PORT or wss://HOST:PORT"),
        ((*FILE, "--url", "localhost:8000"), "--url localhost:8000 came (allowed: ws://HOST:PORT"),
        ((*FILE, "--url", "ws://[::1"), "--url ws://[::1 came (allowed: ws://HOST:PORT"),
        (("--input", "none.wav", "--url", "ws://127.0.0.1:1"), "can't read none.wav: No such file or directory"),
        ((*FILE, "--url", "ws://127.0.0.1:1"), "words.txt: "),
        (FILE, "no deployment is running"),
        ((*FILE, "--name", "demo"), "unknown running deployment 'demo'"),
    ],
)
def test_bad_option_is_named_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["talk", *arguments]) == 1

    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


@pytest.mark.parametrize(("package", "option"), [("sounddevice", ()), ("matplotlib", (*FILE, "--plot", "a.png"))])
def test_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, option: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    assert main(["talk", *option]) == 1

    assert f"the package {package}" in (said := capsys.readouterr().err)
    assert "pip install" in said
