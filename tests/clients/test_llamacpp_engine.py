"""The official client and llama.cpp, started once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from text_engine import PARIS, AnswersChats, client_of, post, with_one_thread  # type: ignore[import-not-found] (put on the path above)

from actors.testing import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TOML = """
[stages.llm]
adapter = "llamacpp"
context_length = 1024
max_num_seqs = 2
[pipelines.chat]
serve_as = "text"
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> out.text",
  "llm.reasoning -> out.reasoning",
  "llm.tool_calls -> out.tool_calls",
]
[gateways.openai]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    pytest.importorskip("xllamacpp")
    await with_one_thread()
    async with running(TOML) as deployment, client_of(deployment.url) as found:
        yield found


class TestLlamaCpp(AnswersChats):
    async def test_next_turn_finds_the_last_one_cached(self, client: openai.AsyncOpenAI) -> None:
        turns = [*PARIS]
        first = await client.chat.completions.create(model="text", messages=turns, temperature=0, max_tokens=8)
        turns += [first.choices[0].message, {"role": "user", "content": "And of Italy?"}]
        second = await client.chat.completions.create(model="text", messages=turns, temperature=0, max_tokens=8)

        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens / 2

    async def test_completion_goes_on_from_text_and_tokens(self, client: openai.AsyncOpenAI) -> None:
        asked: Any = {"model": "text", "temperature": 0, "max_tokens": 4, "logprobs": 1}
        text = await client.completions.create(**asked, prompt="The capital of France is")
        ids = await client.completions.create(**asked, prompt=[504, 3575, 282, 4649, 314])

        assert text.choices[0].text.startswith(" Paris")
        assert ids.choices[0].text == text.choices[0].text
        assert text.choices[0].logprobs is not None
        assert (text.choices[0].logprobs.tokens or [])[0] == " Paris"

    async def test_what_it_lacks_is_refused_by_name(self, client: openai.AsyncOpenAI) -> None:
        for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
            with pytest.raises(openai.APIStatusError) as refused:
                await post(client, path, **body)
            assert refused.value.status_code in {400, 404}
        for name, value in (("min_tokens", 3), ("bad_words", ["a"]), ("stop_token_ids", [2]), ("cache_salt", "a")):
            with pytest.raises(openai.BadRequestError) as unable:
                await client.chat.completions.create(model="text", messages=PARIS, extra_body={name: value})
            assert unable.value.param == name
