"""The client library's speech stream, with a running deployment on a synthetic voice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from actors.testing import running
from omni_bus.client import ConnectFailed, EventRefused, connect_speech_stream
from omni_bus.client.speech_stream import (
    AudioDone,
    AudioStart,
    Configured,
    SegmentCommitted,
    Sound,
    SpeechError,
    UtteranceDone,
)
from tests.gateways.test_speech_stream import STREAMED, toml

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running


@pytest.fixture
async def deployment() -> AsyncIterator[Running]:
    async with running(toml()) as deployment:
        yield deployment


async def test_utterances_are_spoken_sentence_by_sentence(deployment: Running) -> None:
    async with connect_speech_stream(deployment.url, STREAMED | {"split_granularity": "sentence"}) as speech:
        for number in range(2):
            for word in ("Hi ", "there. ", "And bye."):
                await speech.write(word)
            await speech.flush()
            sentences: dict[str, int] = {}
            events = [event async for event in speech.through(UtteranceDone)]
            for event in events[:-1]:
                match event:
                    case AudioStart():
                        assert event.sample_rate == 16_000
                        sentences[event.sentence_text] = 0
                    case Sound():
                        sentences[event.start.sentence_text] += len(event.data)
                    case AudioDone():
                        assert event.total_bytes == list(sentences.values())[-1]
                    case _:
                        raise AssertionError(event)
            assert sentences == {"Hi there.": 2 * 100 * 9, "And bye.": 2 * 100 * 8}
            assert events[-1] == UtteranceDone(utterance_index=number, total_sentences=2)


async def test_commit_cancel_and_a_new_configuration(deployment: Running) -> None:
    async with connect_speech_stream(deployment.url, STREAMED) as speech:
        await speech.write("One")
        await speech.commit()
        assert (await speech.until(SegmentCommitted)).segment_sentences == 1
        await speech.write("Two")
        await speech.cancel()
        assert (await speech.until(UtteranceDone)).cancelled
        await speech.configure({"response_format": "wav"})
        assert (await speech.until(Configured)).response_format == "wav"
        await speech.write("Three")
        await speech.flush()
        assert (await speech.until(Sound)).data.startswith(b"RIFF")


async def test_refusals(deployment: Running) -> None:
    with pytest.raises(EventRefused, match="speed") as caught:
        async with connect_speech_stream(deployment.url, {"speed": 99}):
            pass
    assert (caught.value.param, caught.value.code) == ("speed", "400")
    async with connect_speech_stream(deployment.url, STREAMED) as speech:
        await speech.send("dance")
        with pytest.raises(EventRefused, match="'dance' came"):
            await speech.until(UtteranceDone)
        await speech.send("sing")
        assert "'sing' came" in (await speech.until(SpeechError)).message
        await speech.write("Still here.")
        await speech.flush()
        await speech.until(UtteranceDone)


async def test_nobody_there() -> None:
    async with running(toml()) as deployment:
        pass
    with pytest.raises(ConnectFailed):
        async with connect_speech_stream(deployment.url):
            pass
