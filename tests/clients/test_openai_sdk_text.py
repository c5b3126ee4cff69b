"""The official client with all that the text routes do, each feature as its users write it."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

sys.path.insert(0, str(Path(__file__).parents[1] / "gateways"))
sys.path.insert(0, str(Path(__file__).parents[1] / "media"))

from able import ABLE, HELLO, WORDS, tool  # type: ignore[import-not-found] (put on the path above)
from samples import png  # type: ignore[import-not-found]

from actors.testing import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOOLS: Any = [tool("look"), tool("buy")]
WRONG = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}}
WANTS_TOOLS: Any = [{"role": "user", "content": "look and buy"}]


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running(ABLE) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


async def test_every_pipeline_is_a_model(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["able", "plain", "vectors", "sound", "speaks"]


async def test_several_choices_with_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="able", messages=HELLO, n=2, logprobs=True, top_logprobs=3, seed=7, user="me"
    )

    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    for choice in answer.choices:
        assert choice.message.content == WORDS
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * 4


async def test_tools_are_called_and_answered(client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    first = await create(model="able", messages=WANTS_TOOLS, tools=TOOLS, tool_choice="auto")
    message = first.choices[0].message
    assert message.tool_calls is not None
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    more: list[Any] = [*WANTS_TOOLS, message, *results, {"role": "user", "content": "well?"}]
    second = await create(model="able", messages=more, tools=TOOLS)

    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.content == "well?:0 well?:1 well?:2 well?:3"


async def test_streaming_helper_puts_calls_together(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="able", messages=WANTS_TOOLS, tools=TOOLS) as events:
        final = await events.get_final_completion()

    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("look", '{"marker":"look_and_buy"}'),
        ("buy", '{"marker":"look_and_buy"}'),
    ]


async def test_chunks_are_the_clients_own_type(client: openai.AsyncOpenAI) -> None:
    chunks = await client.chat.completions.create(
        model="able",
        messages=HELLO,
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "sampling_params_list": [{"thoughts": 2}]},
    )
    said: dict[int, str] = {0: "", 1: ""}
    thoughts: dict[int, str] = {0: "", 1: ""}
    usage = None
    async for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            thoughts[choice.index] += getattr(choice.delta, "reasoning", None) or ""

    assert said == {0: WORDS, 1: WORDS}
    assert thoughts == {0: "hi?:0 hi?:1", 1: "hi?:0 hi?:1"}
    assert usage is not None
    assert usage.completion_tokens == 8


async def test_completions_in_every_form(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="able", prompt=["a", "b"], n=2, max_tokens=1, logprobs=1, echo=True)
    chunks = await client.completions.create(model="able", prompt="a", max_tokens=2, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in chunks])

    assert [choice.text for choice in whole.choices] == ["aa:0", "aa:0", "bb:0", "bb:0"]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == ["a", "a:0"]
    assert text == "a:0 a:1"


async def test_embeddings_as_the_client_asks_for_them(client: openai.AsyncOpenAI) -> None:
    """Unless told otherwise it asks for base64 and unpacks it."""
    found = await client.embeddings.create(model="vectors", input=["one", "two"])
    plain = await client.embeddings.create(model="vectors", input="one", encoding_format="float", dimensions=4)

    assert [len(item.embedding) for item in found.data] == [8, 8]
    assert len(plain.data[0].embedding) == 4
    assert found.usage.prompt_tokens == 2


async def test_pictures_in_messages(client: openai.AsyncOpenAI) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(5, 3)).decode()}"
    content: Any = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
    answer = await client.chat.completions.create(
        model="able", messages=[{"role": "user", "content": content}], extra_body={"return_prompt_text": True}
    )

    assert answer.choices[0].message.content == "what:0 what:1 what:2 what:3"
    assert "<image:5x3:" in (answer.model_extra or {})["prompt_text"]


class Verdict(pydantic.BaseModel):
    """What an answer is to hold."""

    good: bool


async def test_refusals_name_the_field(client: openai.AsyncOpenAI) -> None:
    create: Any = client.chat.completions.create
    for fields, param in (
        ({"n": 1000}, "n"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"response_format": WRONG}, "response_format.json_schema.schema.type"),
        ({"extra_body": {"top_z": 1}}, "top_z"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="able", messages=HELLO, **fields)
        assert caught.value.param == param
        assert caught.value.type == "BadRequestError"


async def test_schema_of_a_pydantic_class_reaches_the_engine(client: openai.AsyncOpenAI) -> None:
    """The synthetic engine can't honour one, and says so under the name that the client sent."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.parse(model="able", messages=HELLO, response_format=Verdict)
    assert caught.value.param == "response_format"
    assert "'good'" in caught.value.message
