"""The adapter around the program flite; what needs the program is skipped where it is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from adapters import flite as adapter
from adapters.flite import FliteOptions, FliteParams, FliteVoice, plain
from omni_bus.errors import BadInput, StageFailed, StartFailed
from omni_bus.testing import ListedInputs, make_context, make_request, run_streaming
from omni_bus.wire.payloads import Audio, Text

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_flite = pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed (apt-get install flite)")


def written(*pieces: str) -> dict[str, list[Text]]:
    return {"text": [Text(piece) for piece in pieces]}


def open_files() -> list[str]:
    folder = "/proc/self/fd"
    return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder) if os.path.islink(f"{folder}/{name}")]


def test_missing_program_and_packages_say_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert FliteVoice.check(FliteOptions()) == ["adapter: flite needs the program flite (apt-get install flite)"]
    with pytest.raises(StartFailed, match="apt-get install flite"):
        FliteVoice(FliteOptions(), make_context()).load(lambda phase, fraction: None)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/flite")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    [problem] = FliteVoice.check(FliteOptions())
    assert problem.startswith("adapter: flite needs anyascii, hibari, sentencex (pip install")


@pytest.mark.parametrize("params", [{"speed": 0.4}, {"speed": "fast"}, {"seed": 1}, {"voice": 3}])
def test_parameter_that_is_not_honoured_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(params))):
        msgspec.convert(params, FliteParams)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It’s “fine” — really…", 'It\'s "fine" - really...'),
        ("cafe\u0301 naïve", "cafe naive"),
        ("Привет", "Privet"),
        ("a\x00b\x1b[1m", "ab[1m"),
        ("…!?", ""),
        ("at 3:45 pm on 12/05/2021", "at three forty-five P.M. on December fifth, 2021"),
        ("5 km at 10°C", "5 kilometers at 10 degrees Celsius"),
        ("£20 or €5, $3.50", "20 pounds or 5 euros, $3.50"),
        ("odd digits: ²³ ٣", "odd digits: squared cubed 3"),
    ],
)
def test_text_is_spoken_in_ascii(text: str, expected: str) -> None:
    pytest.importorskip("anyascii")
    pytest.importorskip("hibari")
    assert plain(text) == expected


@pytest.fixture
def engine() -> Iterator[FliteVoice]:
    engine = FliteVoice(FliteOptions(), make_context())
    engine.load(lambda phase, fraction: None)
    yield engine
    engine.close()


@needs_flite
class TestSpeech:
    def test_voices_are_the_programs(self) -> None:
        voices = FliteVoice.voices(FliteOptions())

        assert {"slt", "rms"} <= set(voices)
        assert "awb_time" not in voices
        [problem] = FliteVoice.check(FliteOptions(voice="slx"))
        assert "voice: unknown voice 'slx'" in problem

    async def test_sentences_are_spoken_one_by_one_at_each_speed(self, engine: FliteVoice) -> None:
        one = await run_streaming(engine, written("Hello there."))
        two = await run_streaming(engine, written("Hello the", "re. Hello there."))
        fast = await run_streaming(engine, written("Hello there."), {"speed": 2.0})

        assert len(one.pcm) > 16_000
        assert two.pcm == one.pcm * 2
        assert len(fast.pcm) < 0.7 * len(one.pcm)

    async def test_voices_differ_and_unknown_ones_are_refused(self, engine: FliteVoice) -> None:
        kal = await run_streaming(engine, written("Hello."), {"voice": "kal"})
        assert {piece.rate_hz for _, piece in kal.outputs if isinstance(piece, Audio)} == {8000}
        with pytest.raises(BadInput, match=r"unknown voice 'heart'.*slt"):
            await run_streaming(engine, written("Hello."), {"voice": "heart"})

    async def test_text_is_no_option_and_nothing_speakable_is_silence(self, engine: FliteVoice) -> None:
        option = await run_streaming(engine, written("-voice rms -o /tmp/x"))
        assert len(option.pcm) > 16_000
        assert (await run_streaming(engine, written("…!"))).pcm == b""

    async def test_cancel_kills_the_program_and_leaves_nothing(
        self, engine: FliteVoice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[asyncio.subprocess.Process] = []
        has_begun = asyncio.Event()
        start = asyncio.create_subprocess_exec

        async def held(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
            begun.append(await start("sleep", "1000", **kwargs))
            has_begun.set()
            return begun[0]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", held)
        run = engine.run(make_request(engine), ListedInputs(written("Hello.")))
        running = asyncio.ensure_future(anext(run))
        await has_begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert begun[0].returncode == -9
        assert not [file for file in open_files() if "omni-bus-flite" in file]

    async def test_program_that_fails_is_a_failure_of_the_stage(
        self, engine: FliteVoice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(adapter, "PROGRAM", "false")
        with pytest.raises(StageFailed, match="flite ended with 1"):
            await run_streaming(engine, written("Hello."))
