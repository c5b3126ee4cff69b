"""What every engine with SmolLM2-135M-Instruct must answer through the official client; a class for each kind."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PARIS: Any = [
    {"role": "system", "content": "You are a friendly assistant. Answer in one or two short, plain English sentences."},
    {"role": "user", "content": "What is the capital of France?"},
]
COUNT: Any = [{"role": "user", "content": "Count from one to ten."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
FORCED: Any = {"type": "function", "function": {"name": "weather"}}
ANIMAL: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "animal",
        "schema": {
            "type": "object",
            "properties": {
                "kind": {"type": "string", "enum": ["cat", "dog", "bird"]},
                "legs": {"type": "integer", "minimum": 2, "maximum": 4},
            },
            "required": ["kind", "legs"],
            "additionalProperties": False,
        },
    },
}


async def with_one_thread() -> None:
    """Give a loop that several tests share its thread now: none may be left behind by the first test that needs one."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    await loop.run_in_executor(None, int)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=200)


async def answer(client: openai.AsyncOpenAI, messages: Any = PARIS, **fields: Any) -> ChatCompletion:
    create: Any = client.chat.completions.create
    found = await create(model="text", messages=messages, **{"temperature": 0, "max_tokens": 32} | fields)
    ChatCompletion.model_validate(found.model_dump(), strict=True)
    return found


async def texts(client: openai.AsyncOpenAI, messages: Any = PARIS, **fields: Any) -> list[str]:
    return [choice.message.content or "" for choice in (await answer(client, messages, **fields)).choices]


async def post(client: openai.AsyncOpenAI, path: str, **body: Any) -> Any:
    """A route that the client has no method for."""
    root = str(client.base_url).removesuffix("v1/")
    return await client.post(root + path, body={"model": "text"} | body, cast_to=object)


class AnswersChats:
    """Needs a fixture `client` of a deployment whose model `text` has text, reasoning and tool calls."""

    async def test_answer_is_right_and_counted(self, client: openai.AsyncOpenAI) -> None:
        found = await answer(client)

        assert "Paris" in (found.choices[0].message.content or ""), found
        assert found.choices[0].finish_reason == "stop"
        assert found.usage is not None
        assert found.usage.prompt_tokens > 10
        assert 0 < found.usage.completion_tokens < 32
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens

    async def test_stream_says_the_same(self, client: openai.AsyncOpenAI) -> None:
        whole = await answer(client)
        stream: AsyncIterator[ChatCompletionChunk] = await client.chat.completions.create(
            model="text",
            messages=PARIS,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
        assert "".join(pieces) == whole.choices[0].message.content
        assert len(pieces) > 3
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    async def test_each_choice_draws_numbers_of_its_own(self, client: openai.AsyncOpenAI) -> None:
        found = await answer(client, COUNT, n=2, temperature=1.5, seed=7, max_tokens=24)
        one, other = (choice.message.content for choice in found.choices)

        assert [choice.index for choice in found.choices] == [0, 1]
        assert one
        assert other
        assert one != other
        assert found.usage is not None
        assert found.usage.completion_tokens > 24

    async def test_seed_repeats(self, client: openai.AsyncOpenAI) -> None:
        drawn = {"temperature": 1.5, "max_tokens": 16}
        first, again, other = [await texts(client, COUNT, seed=seed, **drawn) for seed in (3, 3, 4)]

        assert first == again
        assert first != other

    async def test_stop_string_ends_the_text_before_it(self, client: openai.AsyncOpenAI) -> None:
        [whole] = await texts(client)
        stop = whole.split()[2]
        found = await answer(client, stop=[stop])

        assert found.choices[0].message.content == whole.partition(stop)[0]
        assert found.choices[0].finish_reason == "stop"

    async def test_limit_is_told(self, client: openai.AsyncOpenAI) -> None:
        found = await answer(client, max_tokens=3)

        assert found.choices[0].finish_reason == "length"
        assert found.usage is not None
        assert found.usage.completion_tokens == 3

    async def test_log_probabilities_are_of_the_text(self, client: openai.AsyncOpenAI) -> None:
        choice = (await answer(client, logprobs=True, top_logprobs=3)).choices[0]

        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        said = "".join(token.token for token in tokens)
        assert said.removesuffix("<|im_end|>") == choice.message.content
        for token in tokens:
            assert [each.logprob for each in token.top_logprobs] == sorted(
                (each.logprob for each in token.top_logprobs), reverse=True
            )
            assert len(token.top_logprobs) == 3
            assert token.logprob <= 0
            assert token.top_logprobs[0].token == token.token  # the greedy choice

    async def test_schema_is_kept(self, client: openai.AsyncOpenAI) -> None:
        [text] = await texts(
            client, [{"role": "user", "content": "Name an animal, as JSON."}], response_format=ANIMAL, max_tokens=60
        )
        found = json.loads(text)

        assert found.keys() == {"kind", "legs"}
        assert found["kind"] in {"cat", "dog", "bird"}
        assert found["legs"] in {2, 3, 4}

    async def test_forced_tool_is_called(self, client: openai.AsyncOpenAI) -> None:
        asked: Any = {
            "messages": [{"role": "user", "content": "What is the weather in Rome on the next two days?"}],
            "tools": [WEATHER],
            "tool_choice": FORCED,
            "max_tokens": 80,
        }
        whole = (await answer(client, **asked)).choices[0]
        async with client.chat.completions.stream(model="text", temperature=0, **asked) as events:
            streamed = (await events.get_final_completion()).choices[0]

        for choice in (whole, streamed):
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "weather"
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in {"Paris", "Rome"}
            assert isinstance(arguments["days"], int)
            assert arguments.keys() == {"city", "days"}
            assert choice.finish_reason == "stop"  # OpenAI's, where a tool is named
            assert not choice.message.content
        [one], [other] = whole.message.tool_calls or [], streamed.message.tool_calls or []
        assert one.type == "function"
        assert other.type == "function"
        assert json.loads(one.function.arguments) == json.loads(other.function.arguments)

    async def test_refusals_name_the_field(self, client: openai.AsyncOpenAI) -> None:
        too_long = [{"role": "user", "content": "word " * 5000}]
        for messages, fields, param in (
            (PARIS, {"extra_body": {"lora": "x"}}, "lora"),
            (PARIS, {"extra_body": {"structured_outputs": {"grammar": "no grammar"}}}, "structured_outputs.grammar"),
            (too_long, {}, "messages"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await answer(client, messages, **fields)
            assert caught.value.param == param, caught.value.message


class AnswersPrompts(AnswersChats):
    """Of engines that also take text and token ids, and tell their prompts' tokens."""

    async def test_completion_comes_after_its_prompt(self, client: openai.AsyncOpenAI) -> None:
        asked: Any = {"model": "text", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
        plain = (await client.completions.create(**asked)).choices[0]
        echoed = (await client.completions.create(**asked, echo=True, logprobs=1)).choices[0]

        assert "Paris" in plain.text
        assert echoed.text == asked["prompt"] + plain.text
        assert echoed.logprobs is not None
        assert "".join(echoed.logprobs.tokens or []) == echoed.text
        logprobs: Any = echoed.logprobs.token_logprobs
        assert logprobs[0] is None
        assert all(logprob <= 0 for logprob in logprobs[1:])

    async def test_prompt_alone_can_be_scored(self, client: openai.AsyncOpenAI) -> None:
        found = await client.completions.create(
            model="text", prompt="The capital of France is Paris", max_tokens=0, echo=True, logprobs=0
        )

        assert found.choices[0].text == "The capital of France is Paris"
        assert found.usage is not None
        assert found.usage.completion_tokens == 0

    async def test_token_ids_are_the_same_prompt(self, client: openai.AsyncOpenAI) -> None:
        prompt = "The capital of France is"
        ids = (await post(client, "tokenize", prompt=prompt))["tokens"]
        asked: Any = {"model": "text", "temperature": 0, "max_tokens": 4}

        by_text, by_ids = [await client.completions.create(**asked, prompt=each) for each in (prompt, ids)]
        assert by_text.choices[0].text == by_ids.choices[0].text

    async def test_tokens_go_there_and_back(self, client: openai.AsyncOpenAI) -> None:
        text = "Grüße aus Köln, 你好 🚌!"
        found = await post(client, "tokenize", prompt=text, return_token_strs=True)
        back = await post(client, "detokenize", tokens=found["tokens"])

        assert back["prompt"] == text
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 5

    async def test_conversation_is_tokenized_as_it_is_answered(self, client: openai.AsyncOpenAI) -> None:
        found = await post(client, "tokenize", messages=PARIS)
        usage = (await answer(client, max_tokens=1)).usage

        assert usage is not None
        assert found["count"] == usage.prompt_tokens
        assert "France" in (await post(client, "detokenize", tokens=found["tokens"]))["prompt"]
