"""Tokens of texts and conversations, and back; no word is generated for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, HELLO, post, tool  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.openai_answers import Detokenized, Tokenized
from gateways.openai_tokenize import KNOWN, tokenize_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


async def tokenize(deployment: Running, **fields: Any) -> dict[str, Any]:
    status, answer = await post(deployment, "/tokenize", fields)
    assert status == 200, answer
    msgspec.convert(answer, Tokenized)
    return answer


async def test_text_becomes_tokens_and_text_again(able: Running) -> None:
    answer = await tokenize(able, prompt="Hello, wörld", return_token_strs=True)
    status, back = await post(able, "/detokenize", {"tokens": answer["tokens"]})

    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1000
    assert status == 200
    assert msgspec.convert(back, Detokenized).prompt == "Hello, wörld"
    assert able.stages["llm.0"].stats.steps == 2


async def test_conversation_becomes_the_tokens_that_chat_would_read(able: Running) -> None:
    answer = await tokenize(able, messages=HELLO, tools=[tool("look")])
    status, chat = await post(able, "/v1/chat/completions", {"messages": HELLO, "return_token_ids": True})

    assert status == 200
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["token_strs"] is None


async def test_no_tokens_are_no_text(able: Running) -> None:
    assert await post(able, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": "a", "messages": HELLO}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "robot"}]}, "messages[0].role"),
    ({"prompt": "a", "tools": [tool("x")]}, "tools"),
    ({"prompt": "a", "tool_choice": "none"}, "tool_choice"),
    ({"prompt": "a", "documents": []}, "documents"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ({"prompt": "a", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
    ({"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"messages": HELLO, "chat_template": "x"}, "chat_template"),
    ({"messages": HELLO, "tool_choice": "auto"}, "tool_choice"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ({"prompt": "a", "model": 5}, "model"),
    ({"prompt": "a", "temperature": 1}, "temperature"),
    ({"prompt": "word " * 1001}, "prompt"),
    ({"messages": [{"role": "user", "content": "word " * 1001}]}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=range(len(BAD)))
async def test_bad_bodies_are_refused_by_name(able: Running, body: dict[str, Any], param: str) -> None:
    status, document = await post(able, "/tokenize", body)

    assert (status, document["error"]["param"]) == (400, param), document
    assert "allowed: " in document["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "x"}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [5]}, "tokens"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [2**31]}, "tokens"),
        ({"tokens": [], "prompt": "x"}, "prompt"),
    ],
)
async def test_bad_tokens_are_refused(able: Running, body: dict[str, Any], param: str) -> None:
    status, document = await post(able, "/detokenize", body)

    assert (status, document["error"]["param"]) == (400, param), document


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_model_without_a_tokenizer_is_not_found(able: Running, path: str) -> None:
    status, document = await post(
        able, path, {"prompt": "a", "model": "plain"} if path == "/tokenize" else {"tokens": [1], "model": "plain"}
    )

    assert (status, document["error"]["param"]) == (404, "model")


def test_document_has_every_field() -> None:
    assert tokenize_schema([])["properties"].keys() == KNOWN
