"""Chat in full against a running deployment: what each field of the request does to the answer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import (  # type: ignore[import-not-found] (put on the path above)
    ABLE,
    CHAT,
    HELLO,
    WORDS,
    chat,
    chat_stream,
    deltas,
    post,
    tool,
)

from actors.testing import Running, running
from gateways.openai_answers import ChatCompletion, ChatCompletionChunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


def reasons(chunks: list[dict[str, Any]], index: int) -> list[str]:
    found = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [reason for reason in found if reason is not None]


async def test_several_choices_are_requests_of_their_own(able: Running) -> None:
    answer = await chat(able, n=3)

    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in answer["choices"]] == [WORDS] * 3
    assert able.stages["llm.0"].stats.done == 3
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["usage"]["completion_tokens"] == 12


async def test_each_streamed_choice_begins_with_its_role_and_ends_once(able: Running) -> None:
    *chunks, usage = await chat_stream(able, n=3, stream_options={"include_usage": True})

    for index in range(3):
        first, *others = deltas(chunks, index)
        assert first == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in others)
        assert "".join(delta.get("content", "") for delta in others) == WORDS
        assert reasons(chunks, index) == ["stop"]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 12, "total_tokens": 13}


async def test_first_failure_fails_all_choices(able: Running) -> None:
    failing = [{"tokens": 100_000, "fail_at_step": 3}]
    status, document = await post(able, CHAT, {"messages": HELLO, "n": 4, "sampling_params_list": failing})

    assert status == 500
    assert document["error"]["stage"] == "llm"
    assert await until_idle(able)


async def until_idle(deployment: Running) -> bool:
    """Wait until the coordinator holds no request; ask it, round trip by round trip."""
    while True:
        status = await deployment.gateway.client.admin("status")
        if not any(counts["in_flight"] or counts["queued"] for counts in status["pipelines"].values()):
            return True


async def test_choices_are_all_admitted_or_none() -> None:
    limited = ABLE.replace('serve_as = "able"', 'serve_as = "able"\nmax_in_flight = 2\nmax_queued = 1')
    async with running(limited) as deployment:
        status, document = await post(deployment, CHAT, {"messages": HELLO, "n": 4})
        assert (status, document["error"]["type"]) == (503, "ServiceUnavailableError")
        assert await until_idle(deployment)

        assert len((await chat(deployment, n=3))["choices"]) == 3  # one of them waits for its turn


async def test_client_that_leaves_cancels_every_choice(able: Running) -> None:
    endless = {"messages": HELLO, "n": 3, "stream": True, "sampling_params_list": [{"tokens": 1_000_000}]}
    async with aiohttp.ClientSession(able.url) as session, session.post(CHAT, json=endless) as response:
        await response.content.readline()
        assert len(able.gateway.client.requests) == 3

    assert await until_idle(able)
    assert able.stages["llm.0"].stats.done == 0


async def test_logprobs_are_those_of_the_tokens(able: Running) -> None:
    answer = await chat(able, logprobs=True, top_logprobs=2)

    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == WORDS
    assert [token["logprob"] for token in content] == [0.0, -0.1, -0.2, -0.3]
    assert bytes(content[1]["bytes"]) == b" hi:1"
    assert [[top["token"] for top in token["top_logprobs"]] for token in content[:2]] == [
        ["hi:0", "hi:0~1"],
        [" hi:1", " hi:1~1"],
    ]
    bare = await chat(able, logprobs=True)
    assert [token["top_logprobs"] for token in bare["choices"][0]["logprobs"]["content"]] == [[]] * 4


async def test_logprobs_stream_with_their_text(able: Running) -> None:
    chunks = await chat_stream(able, logprobs=True, top_logprobs=1)

    told = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert ["".join(token["token"] for token in content) for content in told] == ["hi:0", " hi:1", " hi:2", " hi:3"]


async def test_without_logprobs_there_are_none(able: Running) -> None:
    answer = await chat(able)
    chunks = await chat_stream(able)

    assert answer["choices"][0]["logprobs"] is None
    assert all(c["logprobs"] is None for chunk in chunks for c in chunk["choices"])


async def test_reasoning_is_no_content(able: Running) -> None:
    thoughts = [{"thoughts": 2}]
    message = (await chat(able, sampling_params_list=thoughts))["choices"][0]["message"]
    found = deltas(await chat_stream(able, sampling_params_list=thoughts))
    without = (await chat(able, sampling_params_list=thoughts, include_reasoning=False))["choices"][0]["message"]

    assert (message["reasoning"], message["content"]) == ("hi?:0 hi?:1", WORDS)
    assert found[0]["role"] == "assistant"
    kinds = ["reasoning" if "reasoning" in delta else "content" for delta in found[1:-1]]
    assert kinds == ["reasoning"] * 2 + ["content"] * 4
    assert "".join(delta.get("reasoning", "") for delta in found) == message["reasoning"]
    assert without["reasoning"] is None


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "look"}}, "stop")],
    ids=["required", "named"],
)
async def test_tool_that_must_be_called_is_called(able: Running, choice: Any, reason: str) -> None:
    answer = await chat(able, tools=[tool("look"), tool("buy")], tool_choice=choice)

    (found,) = answer["choices"]
    (call,) = found["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"marker": "hi"}
    assert found["message"]["content"] is None
    assert found["finish_reason"] == reason


async def test_calls_stream_as_deltas_that_concatenate(able: Running) -> None:
    messages = [{"role": "user", "content": "look and buy"}]
    chunks = await chat_stream(able, messages=messages, tools=[tool("look"), tool("buy")])

    pieces = [call for delta in deltas(chunks) for call in delta.get("tool_calls", [])]
    for index, name in enumerate(("look", "buy")):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", name)
        assert first["id"]
        assert all("id" not in piece and "name" not in piece["function"] for piece in rest)
        arguments = "".join(piece["function"]["arguments"] for piece in (first, *rest))
        assert json.loads(arguments) == {"marker": "look_and_buy"}
    assert reasons(chunks, 0) == ["tool_calls"]


async def test_single_calls_are_single(able: Running) -> None:
    messages = [{"role": "user", "content": "look and buy"}]
    tools = [tool("look"), tool("buy")]
    answer = await chat(able, messages=messages, tools=tools, parallel_tool_calls=False)

    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_tools_that_may_not_be_called_are_not(able: Running) -> None:
    messages = [{"role": "user", "content": "look"}]
    answer = await chat(able, messages=messages, tools=[tool("look")], tool_choice="none")

    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_conversation_goes_on_after_a_call(able: Running) -> None:
    called = (await chat(able, tools=[tool("look")], tool_choice="required"))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "a cat"}
    messages = [*HELLO, called, result, {"role": "user", "content": "so?"}]
    answer = await chat(able, messages=messages, tools=[tool("look")])

    assert answer["choices"][0]["message"]["content"] == "so?:0 so?:1 so?:2 so?:3"


async def test_tokens_and_prompt_are_told(able: Running) -> None:
    answer = await chat(able, return_token_ids=True, return_prompt_text=True, prompt_logprobs=1)
    chunks = await chat_stream(able, return_token_ids=True, return_prompt_text=True)

    assert answer["prompt_text"] == chunks[0]["prompt_text"] == "hi"
    assert answer["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == [int.from_bytes(b"\1hi")]
    assert answer["prompt_logprobs"] == [None]
    ids = [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", [])]
    assert answer["choices"][0]["token_ids"] == ids
    assert len(ids) == 4
    assert all("prompt_text" not in chunk for chunk in chunks[1:])


async def test_usage_comes_with_each_piece_where_asked_for(able: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await chat_stream(able, stream_options=options)

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert counts == [1, 2, 3, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks if "usage" in chunk} == {1}


async def test_echo_comes_first(able: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    answer = await chat(able, messages=messages, echo=True)
    found = deltas(await chat_stream(able, messages=messages, echo=True))

    assert answer["choices"][0]["message"]["content"] == "Well, " + WORDS
    assert [delta.get("content") for delta in found[:3]] == ["", "Well, ", "hi:0"]


async def test_metrics_say_what_the_stages_did(able: Running) -> None:
    answer = await chat(able, n=2, extra_body={"return_stage_metrics": "yes"})
    chunks = await chat_stream(able, return_stage_metrics=True)

    stage = answer["metrics"]["stage_metrics"]["0"]
    assert (stage["stage_name"], stage["num_tokens_in"], stage["num_tokens_out"]) == ("llm", 1, 8)
    assert stage["finish_reason"] == "stop"
    assert stage["stage_gen_time_ms"] >= stage["serving_time_to_first_output_ms"] > 0
    assert (answer["metrics"]["stage_id"], answer["metrics"]["num_tokens_out"]) == (0, 8)
    assert [chunk["metrics"]["num_tokens_out"] for chunk in chunks if "metrics" in chunk] == [4]
    assert (await chat(able))["metrics"] is None


SPOKEN = """
[stages.llm]
adapter = "synthetic-text"
tokens = 4
[stages.voice]
adapter = "synthetic-speech"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
"""


async def test_metrics_have_the_stages_before_the_last_one_too() -> None:
    async with running(SPOKEN) as deployment:
        answer = await chat(deployment, modalities=["audio"], return_stage_metrics=True)

    stages = answer["metrics"]["stage_metrics"]
    assert [stage["stage_name"] for stage in stages.values()] == ["llm", "voice"]
    assert stages["0"]["num_tokens_out"] == 4
    voice = stages["1"]
    assert voice["audio_frames"] == answer["choices"][0]["audio_metadata"]["frame_count"]
    assert voice["audio_duration_s"] == voice["audio_frames"] / voice["audio_sample_rate"]


async def test_whole_answers_and_chunks_are_what_the_document_says(able: Running) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    fields |= {"tools": [tool("look")], "return_stage_metrics": True, "sampling_params_list": [{"thoughts": 1}]}
    for content in ("hi", "look"):
        messages = [{"role": "user", "content": content}]
        answer = await chat(able, messages=messages, prompt_logprobs=2, n=2, **fields)
        msgspec.convert(answer, ChatCompletion)
        for chunk in await chat_stream(able, messages=messages, stream_options={"include_usage": True}, **fields):
            msgspec.convert(chunk, ChatCompletionChunk)


async def test_busy_choices_do_not_hold_up_each_other() -> None:
    """A slow reader of many choices gets all of them, whatever their order."""
    async with running(ABLE) as deployment:
        answers = await asyncio.gather(*(chat(deployment, n=20) for _ in range(3)))

    assert [[c["message"]["content"] for c in answer["choices"]] for answer in answers] == [[WORDS] * 20] * 3
