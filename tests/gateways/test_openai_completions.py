"""Completions against a running deployment, and every field of their body."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, WORDS, post, stream  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.openai_answers import Completion, CompletionChunk
from gateways.openai_completions_body import KNOWN, ONLY_COMPLETIONS, CompletionFields, schema
from gateways.openai_fields import INERT, Sampling, Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/completions"
HI = [int.from_bytes(b"\1hi")]


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


async def complete(deployment: Running, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    status, answer = await post(deployment, PATH, {"prompt": prompt} | fields)
    assert status == 200, answer
    msgspec.convert(answer, Completion)
    return answer


async def complete_stream(deployment: Running, prompt: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    chunks = await stream(deployment, PATH, {"prompt": prompt} | fields)
    for chunk in chunks:
        msgspec.convert(chunk, CompletionChunk)
    return chunks


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def streamed(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


@pytest.mark.parametrize("prompt", ["hi", HI, ["hi"], [HI]], ids=["text", "tokens", "texts", "token lists"])
async def test_prompt_is_taken_in_every_form(able: Running, prompt: Any) -> None:
    answer = await complete(able, prompt)

    assert texts(answer) == [WORDS]
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_choices_are_ordered_by_prompt_then_sample(able: Running) -> None:
    answer = await complete(able, ["a", "b c"], n=2, max_tokens=1)

    assert texts(answer) == ["a:0", "a:0", "b_c:0", "b_c:0"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 4


async def test_streamed_choices_end_once_each(able: Running) -> None:
    *chunks, usage = await complete_stream(able, ["a", "b"], n=2, max_tokens=2, stream_options={"include_usage": True})

    for index, text in enumerate(("a:0 a:1", "a:0 a:1", "b:0 b:1", "b:0 b:1")):
        pieces = streamed(chunks, index)
        assert "".join(piece["text"] for piece in pieces) == text
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}


async def test_sixteen_tokens_are_the_limit_by_default(able: Running) -> None:
    answer = await complete(able, sampling_params_list=None, min_tokens=100)

    assert answer["usage"]["completion_tokens"] == 16


async def test_echo_puts_the_prompt_first(able: Running) -> None:
    for prompt in ("hi", HI):
        assert texts(await complete(able, prompt, echo=True)) == ["hi" + WORDS]
        pieces = streamed(await complete_stream(able, prompt, echo=True))
        assert [piece["text"] for piece in pieces[:2]] == ["hi", "hi:0"]


async def test_echo_of_no_tokens_generates_nothing(able: Running) -> None:
    answer = await complete(able, "hi there", echo=True, max_tokens=0, logprobs=1)

    assert texts(answer) == ["hi there"]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["hi ", "the", "re"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    chunks = await complete_stream(able, "hi there", echo=True, max_tokens=0)
    assert [piece["text"] for piece in streamed(chunks)] == ["hi there", ""]


async def test_logprobs_say_where_each_token_is(able: Running) -> None:
    answer = await complete(able, logprobs=2)

    found = answer["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == WORDS
    assert found["token_logprobs"] == [0.0, -0.1, -0.2, -0.3]
    assert found["top_logprobs"][0] == {"hi:0": 0.0, "hi:0~1": -1.0}
    assert [WORDS[at:].startswith(token) for at, token in zip(found["text_offset"], found["tokens"], strict=True)]
    streamed_offsets = [
        offset
        for piece in streamed(await complete_stream(able, logprobs=2))
        if piece["logprobs"]
        for offset in piece["logprobs"]["text_offset"]
    ]
    assert streamed_offsets == found["text_offset"]


async def test_logprobs_of_an_echo_begin_with_the_prompts(able: Running) -> None:
    found = (await complete(able, "hi there", echo=True, logprobs=1))["choices"][0]["logprobs"]

    assert found["tokens"][:3] == ["hi ", "the", "re"]
    assert found["token_logprobs"][:3] == [None, -0.1, -0.2]
    assert found["text_offset"][:4] == [0, 3, 6, 8]
    assert "".join(found["tokens"]) == "hi there" + WORDS.replace("hi:", "hi_there:")


async def test_best_of_generates_more_than_it_answers(able: Running) -> None:
    answer = await complete(able, n=2, best_of=5)

    assert texts(answer) == [WORDS] * 2
    assert able.stages["llm.0"].stats.done == 5
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["choices"][0]["logprobs"] is None


async def test_tokens_of_prompt_and_answer_are_told(able: Running) -> None:
    (choice,) = (await complete(able, return_token_ids=True, prompt_logprobs=0))["choices"]
    pieces = streamed(await complete_stream(able, return_token_ids=True))

    assert choice["prompt_token_ids"] == pieces[0]["prompt_token_ids"] == HI
    assert choice["prompt_logprobs"] == [None]
    assert choice["token_ids"] == [token for piece in pieces for token in piece.get("token_ids", [])]


async def test_metrics_are_told(able: Running) -> None:
    answer = await complete(able, return_stage_metrics=True)

    assert answer["metrics"]["stage_metrics"]["0"]["num_tokens_out"] == 4


async def test_usage_comes_with_each_piece_where_asked_for(able: Running) -> None:
    chunks = await complete_stream(able, stream_options={"include_usage": True, "continuous_usage_stats": True})

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 4)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {1}


BAD: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [1, "a"]),
    ("prompt", [-1]),
    ("prompt", [2**31]),
    ("prompt", {"a": 1}),
    ("prompt", ["a"] * 1025),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("logprobs", 21),
    ("logprobs", True),
    ("n", 0),
    ("n", 1000),
    ("best_of", 0),
    ("best_of", 129),
    ("echo", "yes"),
    ("add_special_tokens", 1),
    ("suffix", "x"),
    ("prompt_embeds", "x"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("temperature", 3),
    ("top_p", 2),
    ("top_k", -5),
    ("min_p", 2),
    ("min_tokens", -1),
    ("seed", "x"),
    ("stop", ["a"] * 5),
    ("stop_token_ids", [-1]),
    ("ignore_eos", 1),
    ("frequency_penalty", 5),
    ("presence_penalty", 5),
    ("repetition_penalty", 0),
    ("logit_bias", {"a": 1}),
    ("bad_words", "x"),
    ("prompt_logprobs", 100),
    ("skip_special_tokens", 1),
    ("include_stop_str_in_output", 1),
    ("cache_salt", "@"),
    ("response_format", {"type": "xml"}),
    ("structured_outputs", {"json": 5}),
    ("return_token_ids", 1),
    ("sampling_params_list", {}),
    ("extra_body", 5),
    ("request_id", ""),
    ("priority", 5000),
    ("return_stage_metrics", 7),
    ("user", 7),
    ("messages", [{"role": "user", "content": "x"}]),
    ("tools", []),
]


@pytest.mark.parametrize("model", ["able", "plain"])
async def test_bad_fields_are_refused_by_name_before_any_stage_sees_them(able: Running, model: str) -> None:
    for name, value in BAD:
        status, document = await post(able, PATH, {"prompt": "hi", "model": model} | {name: value})
        error = document["error"]
        assert status == error["code"] == 400, (name, value)
        assert error["type"] == "BadRequestError"
        assert error["param"].partition(".")[0].partition("[")[0] == name, (name, value, error)
        assert "allowed: " in error["message"]
        assert "allowed: )" not in error["message"]

    stats = able.stages["llm.0"].stats
    assert (stats.done, stats.failed) == (0, 0)


def test_table_of_refusals_has_every_field() -> None:
    declared = {field for struct in (CompletionFields, Shared, Sampling) for field in struct.__struct_fields__}

    assert declared - {"model"} <= {name for name, _ in BAD}
    assert declared | ONLY_COMPLETIONS.keys() | set(INERT) == KNOWN == schema()["properties"].keys()


async def test_counts_that_contradict_each_other_are_refused(able: Running) -> None:
    for fields, param in (
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ):
        status, document = await post(able, PATH, {"prompt": "hi"} | fields)
        assert (status, document["error"]["param"]) == (400, param)


async def test_what_the_model_can_not_tell_is_refused(able: Running) -> None:
    for fields, param in (
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": HI}, "echo"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        status, document = await post(able, PATH, {"prompt": "hi", "model": "plain"} | fields)
        assert (status, document["error"]["param"]) == (400, param)
    assert texts(await complete(able, "hi", model="plain", echo=True)) == ["hi" + WORDS]


async def test_refusals_of_the_stage_come_under_the_bodys_names(able: Running) -> None:
    for fields, param in (
        ({"prompt": "word " * 2000}, "prompt"),
        ({"prompt": [5]}, "prompt"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ):
        status, document = await post(able, PATH, {"prompt": "hi"} | fields)
        assert (status, document["error"]["param"]) == (400, param), document
        assert param in document["error"]["message"] or param == "prompt"


async def test_model_that_writes_nothing_is_not_found(able: Running) -> None:
    status, document = await post(able, PATH, {"prompt": "hi", "model": "vectors"})

    assert (status, document["error"]["param"]) == (404, "model")
    assert "writes text" in document["error"]["message"]


async def test_more_prompts_than_run_at_once_are_answered(able: Running) -> None:
    answer = await complete(able, [f"p{i}" for i in range(200)], max_tokens=1)

    assert texts(answer) == [f"p{i}:0" for i in range(200)]
