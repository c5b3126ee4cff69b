"""Sessions on a pipeline of one stage that takes sound and pictures and gives text and sound, without a recogniser."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from actors.testing import running
from tests.gateways.conversation import LIMIT_S, LOUD, QUIET, check_ga, connected
from tests.gateways.omni import Omni
from tests.gateways.test_realtime_pictures import drawn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running

TOML = """
[stages.sessions]
adapter = "realtime"
chat = "omni"
vad = "vad"
[stages.vad]
adapter = "synthetic-vad"
[stages.omni]
adapter = "tests.gateways.omni:Omni"
[pipelines.live]
serve_as = "live"
edges = ["in.events -> sessions.events", "sessions.events -> out.events"]
[pipelines.vad]
edges = ["in.audio -> vad.audio", "vad.speech -> out.speech"]
[pipelines.omni]
edges = [
  "in.messages -> omni.prompt",
  "in.audio -> omni.audio",
  "in.images -> omni.images",
  "omni.text -> out.text",
  "omni.audio -> out.audio",
]
[gateways.openai]
port = 0
"""


@asynccontextmanager
async def live() -> AsyncIterator[Running]:
    Omni.seen.clear()
    async with asyncio.timeout(LIMIT_S), running(TOML) as deployment:
        await deployment.until_ready()
        yield deployment


async def test_speech_is_given_as_it_is_and_answered_in_text_and_sound() -> None:
    async with live() as deployment, connected(deployment) as client:
        # The client speaks faster than it can have heard the first answer.
        detection = {"type": "server_vad", "interrupt_response": False}
        await client.say("session.update", session={"audio": {"input": {"turn_detection": detection}}})
        for _ in range(2):
            await client.speak(LOUD, 600)
            await client.speak(QUIET, 900)
            await client.until("response.done")
        # 600 ms of speech, 300 of padding as far as there was sound before it, 200 of the pause
        assert client.text() == "heard 800 saw heard 800 1100 saw "
        assert len(client.sound()) == 2 * 24_000 // 100 * (3 + 4)
        messages, params, outputs = Omni.seen[-1]
        assert [message["content"] for message in messages] == [
            [{"type": "audio"}],
            "heard 800 saw ",
            [{"type": "audio"}],
        ]
        assert params.voice is None
        assert outputs == {"text", "audio"}
        assert client.of("response.done")[-1]["response"]["usage"]["output_tokens"] == 4
        await client.say("session.update", session={"audio": {"input": {"transcription": {"model": "whisper-1"}}}})
        assert (await client.error())["error"]["param"] == "session.audio.input.transcription"
        check_ga(client.frames)


async def test_pictures_and_sound_are_given_in_the_order_of_the_messages() -> None:
    async with live() as deployment, connected(deployment, "/v1/duplex") as client:
        await client.say("session.create", instructions="Be brief")
        sound = base64.b64encode(LOUD * 8000).decode()
        frames = [drawn(side=8), drawn(side=9)]
        await client.say("input_audio_buffer.append", audio=sound, video_frames=frames)
        await client.say("input.commit")
        await client.until("response.done")
        picture = {"type": "input_image", "image_url": f"data:image/png;base64,{drawn(side=7)}"}
        content = [{"type": "input_text", "text": "And"}, picture]
        await client.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await client.say("response.create", response={"modalities": ["text"], "max_response_output_tokens": 9})
        await client.until("response.done")

        assert "".join(frame["text"] for frame in client.of("response.output_audio.delta")) == "heard 500 saw 8x8 9x9 "
        assert client.text("response.text.delta") == "heard 500 saw 8x8 9x9 7x7 "
        messages, params, outputs = Omni.seen[-1]
        kinds = [
            [part["type"] for part in message["content"]] if isinstance(message["content"], list) else message["role"]
            for message in messages
        ]
        assert kinds == ["system", ["image", "image", "audio"], "assistant", ["text", "image"]]
        assert params.max_tokens == 9
        assert outputs == {"text"}


async def test_an_interrupted_stage_stops() -> None:
    async with live() as deployment, connected(deployment) as client:
        await client.ask("go on")
        await client.until("response.output_audio.delta")
        assert Omni.num_open == 1
        await client.speak(LOUD, 400)
        await client.until("input_audio_buffer.speech_started")
        done = await client.until("response.done")
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        while Omni.num_open:
            await deployment.gateway.client.admin("health")
