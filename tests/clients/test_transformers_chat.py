"""The shipped chat on transformers, staged and batched, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from actors.testing import running
from adapters import smollm2

CONFIG = Path(__file__).parents[2] / "configs" / "transformers_chat.toml"
NUM_TOKENS = 24
QUESTIONS = [
    "Hi",
    "What is the capital of France?",
    "Count from one to ten.",
    "Name three colours, and for each one thing that has it.",
    "Why is the sky blue? Answer for a child who has never seen the sea, in a few words.",
    "Say something in French.",
    "List the planets.",
    "Write a short poem about a bus that carries pictures, sounds and words to everyone who waits at its stops.",
]


def generated(folder: Path, question: str) -> str:
    """Return transformers' own greedy answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        ids = cast("Any", model).generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_eight_at_once_equal_generate() -> None:
    """Through gateway, coordinator and stage, eight requests in one batch say what each says alone."""
    pytest.importorskip("transformers")
    toml = CONFIG.read_text(encoding="utf-8").replace("port = 8000", "port = 0")
    async with (
        running(toml) as deployment,
        openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", timeout=200) as client,
    ):
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="smollm2",
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_tokens=NUM_TOKENS,
                )
                for question in QUESTIONS
            )
        )
        steps = deployment.stages["llm.0"].stats.steps
        folder = smollm2.folder_for(deployment.deployment.cache_dir)
        wanted = [await asyncio.to_thread(generated, folder, question) for question in QUESTIONS]

    assert [answer.choices[0].message.content for answer in answers] == wanted
    assert steps < 3 * NUM_TOKENS, "they did not share their steps"
