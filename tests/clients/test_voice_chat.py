"""The shipped spoken chat with its real models, through the official client."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path

import openai
import pytest

from actors.testing import running

VOICE_CHAT = Path(__file__).parents[2] / "configs" / "voice_chat.toml"


@pytest.mark.model
async def test_voice_begins_before_the_text_is_complete() -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("hibari")
    toml = VOICE_CHAT.read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    async with (
        running(toml) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none") as client,
    ):
        chunks = await client.chat.completions.create(
            model="smollm2-voice",
            messages=[{"role": "user", "content": "Tell me three facts about the moon."}],
            temperature=0,
            max_tokens=80,
            stream=True,
        )
        # `modality` is an extension, which the client keeps.
        order = [chunk.modality async for chunk in chunks if chunk.choices[0].delta.content]  # type: ignore[attr-defined]
        answer = await client.chat.completions.create(
            model="smollm2-voice",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            audio={"voice": "heart", "format": "wav"},
            temperature=0,
            max_completion_tokens=30,
        )

    assert order.index("audio") < len(order) - 1 - order[::-1].index("text")
    message = answer.choices[0].message
    assert message.content is not None
    assert "Paris" in message.content
    assert message.audio is not None
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert file.getframerate() == 24000
        assert 1.0 < file.getnframes() / 24000 < 6.0
