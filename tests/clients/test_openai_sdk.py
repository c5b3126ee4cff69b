"""The official client, asynchronous and not, against a running deployment."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from actors.testing import Running, running

SPOKEN = """
[stages.llm]
adapter = "synthetic-text"
[stages.voice]
adapter = "synthetic-speech"
[pipelines.chat]
serve_as = "spoken"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
api_keys = ["secret"]
"""
HELLO: Any = [{"role": "user", "content": "hi"}]
AUDIO: Any = {"voice": "alloy", "format": "wav"}
PCM16: Any = {"voice": "alloy", "format": "pcm16"}


def client_of(deployment: Running, key: str = "secret") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key=key)


async def test_models_are_listed_and_retrieved() -> None:
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        assert [model.id async for model in client.models.list()] == ["spoken"]
        assert (await client.models.retrieve("spoken")).owned_by == "omni-bus"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")


async def test_answer_with_text_and_sound() -> None:
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        answer = await client.chat.completions.create(
            model="spoken", messages=HELLO, modalities=["text", "audio"], audio=AUDIO, max_completion_tokens=3
        )

    ChatCompletion.model_validate(answer.model_dump())
    message = answer.choices[0].message
    assert message.content == "hi:0 hi:1 hi:2"
    assert message.audio is not None
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert file.getframerate() == 24000
        assert file.getnframes() > 0
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_stream_of_text_and_sound() -> None:
    text, sound, reasons = "", b"", []
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        chunks = await client.chat.completions.create(
            model="spoken", messages=HELLO, audio=PCM16, max_tokens=3, stream=True
        )
        async for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
            delta = chunk.choices[0].delta
            if chunk.modality == "audio":  # type: ignore[attr-defined] (an extension, kept by the client)
                sound += base64.b64decode(delta.content or "")
            else:
                text += delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)

    assert text == "hi:0 hi:1 hi:2"
    assert len(sound) > 0
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


async def test_usage_comes_in_a_chunk_of_its_own() -> None:
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        chunks = await client.chat.completions.create(
            model="spoken", messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        usages = [(chunk.usage, chunk.choices) async for chunk in chunks]

    assert [usage for usage, _ in usages[:-1]] == [None] * (len(usages) - 1)
    usage, choices = usages[-1]
    assert choices == []
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens) == (3, 4)


async def test_streaming_helper_of_the_client_understands_the_stream() -> None:
    async with (
        running(SPOKEN) as deployment,
        client_of(deployment) as client,
        client.chat.completions.stream(
            model="spoken", messages=HELLO, modalities=["text"], extra_body={"sampling_params_list": [{"tokens": 3}]}
        ) as events,
    ):
        final = await events.get_final_completion()

    assert final.choices[0].message.content == "hi:0 hi:1 hi:2"
    assert final.choices[0].finish_reason == "stop"


async def test_blocking_client_works_alike() -> None:
    def ask(url: str) -> str | None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            answer = client.chat.completions.create(model="spoken", messages=HELLO, modalities=["text"], max_tokens=2)
            chunks = client.chat.completions.create(
                model="spoken", messages=HELLO, modalities=["text"], max_tokens=2, stream=True
            )
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
            return answer.choices[0].message.content

    async with running(SPOKEN) as deployment:
        assert await asyncio.to_thread(ask, deployment.url) == "hi:0 hi:1"


async def test_refusals_are_the_clients_own_error_classes() -> None:
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="spoken", messages=HELLO, temperature=-1)
        assert bad.value.param == "temperature"
        assert bad.value.status_code == 400
        assert "from 0 to 2" in bad.value.message
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-5", messages=HELLO)
        assert missing.value.param == "model"
        with pytest.raises(openai.BadRequestError):
            await create(model="spoken", messages=[], stream=True)
        async with client_of(deployment, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError, match="valid API key"):
                await stranger.models.list()


async def test_failed_stage_is_not_asked_again() -> None:
    """The client retries any 500 unless it is told not to."""
    extra = {"sampling_params_list": [{"fail_at_step": 1}]}
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="spoken", messages=HELLO, extra_body=extra)

        assert deployment.stages["llm.0"].stats.failed == 1


async def test_failure_in_mid_stream_raises_in_the_client() -> None:
    # Several windows of 8 chunks on: a failure may overtake the first of them.
    extra = {"sampling_params_list": [{"tokens": 100, "fail_at_step": 40}]}
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        chunks = await client.chat.completions.create(
            model="spoken", messages=HELLO, modalities=["text"], stream=True, extra_body=extra
        )
        with pytest.raises(openai.APIError, match="synthetic failure at step 40"):
            async for _ in chunks:
                pass


async def test_conversation_goes_on_with_our_own_answer() -> None:
    async with running(SPOKEN) as deployment, client_of(deployment) as client:
        create = client.chat.completions.create
        first = await create(model="spoken", messages=HELLO, audio=AUDIO, max_tokens=2)
        messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "more"}]
        second = await create(model="spoken", messages=messages, max_tokens=2)

    assert second.choices[0].message.content == "more:0 more:1"
