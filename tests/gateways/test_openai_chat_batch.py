"""Batches of conversations: one choice for each, or one error for all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, HELLO, post, tool  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.openai_answers import ChatCompletion
from gateways.openai_chat_batch import ONLY_BATCH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/v1/chat/completions/batch"


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


def said(*texts: str) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": text}] for text in texts]


async def test_each_conversation_has_its_choice(able: Running) -> None:
    status, answer = await post(able, PATH, {"messages": said("a", "b c"), "max_tokens": 2, "logprobs": True})

    assert status == 200
    msgspec.convert(answer, ChatCompletion)
    assert answer["id"].startswith("chatcmpl-batch-")
    found = [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]]
    assert found == [(0, "a:0 a:1"), (1, "b_c:0 b_c:1")]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert all(len(choice["logprobs"]["content"]) == 2 for choice in answer["choices"])


async def test_spoken_conversations_have_text_and_sound_in_one_choice() -> None:
    spoken = """
[stages.llm]
adapter = "synthetic-text"
tokens = 2
[stages.voice]
adapter = "synthetic-speech"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
"""
    async with running(spoken) as deployment:
        _, answer = await post(deployment, PATH, {"messages": said("a", "b")})

    assert [c["message"]["audio"]["transcript"] for c in answer["choices"]] == ["a:0 a:1", "b:0 b:1"]
    assert len({c["message"]["audio"]["id"] for c in answer["choices"]}) == 2


@pytest.mark.parametrize("name", ONLY_BATCH)
async def test_what_a_batch_can_not_honour_is_refused(able: Running, name: str) -> None:
    harmless, _ = ONLY_BATCH[name]
    for value in harmless:
        status, _ = await post(able, PATH, {"messages": said("a"), name: value})
        assert status == 200
    wrong: Any = [tool("look")] if name == "tools" else 2 if name == "n" else "x"
    status, document = await post(able, PATH, {"messages": said("a"), name: wrong})

    assert (status, document["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("x", "messages"),
        ([[]], "messages[0]"),
        (HELLO, "messages[0]"),
        ([*said("a"), [{"role": "robot", "content": "x"}]], "messages[1][0].role"),
        (said(*["a"] * 129), "messages"),
    ],
)
async def test_bad_conversations_are_refused_at_their_place(able: Running, messages: Any, param: str) -> None:
    status, document = await post(able, PATH, {"messages": messages})

    assert (status, document["error"]["param"]) == (400, param), document


async def test_first_error_fails_the_whole_batch(able: Running) -> None:
    status, document = await post(able, PATH, {"messages": said("a", "word " * 2000)})

    assert (status, document["error"]["param"]) == (400, "messages")


async def test_fields_are_checked_as_in_chat(able: Running) -> None:
    for name, value in (("temperature", 3), ("unknown", 1), ("stream_options", {}), ("use_beam_search", True)):
        status, document = await post(able, PATH, {"messages": said("a"), name: value})
        assert (status, document["error"]["param"]) == (400, name)
