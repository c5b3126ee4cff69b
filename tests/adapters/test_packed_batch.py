"""Small models with random weights, against the same model with its own cache and attention."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers

from adapters.packed_batch import ATTENTION, KvPool, PackedForward, Piece, register_attention

VOCABULARY = 97
CONTEXT = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    # Weights of the usual size give logits so flat that every prompt looks alike.
    "initializer_range": 0.4,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral with a window": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "qwen3 with its own head size": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
    "gemma3 with both kinds of layers": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    "experts": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
}


class Pair:
    """A model twice: as it is, and with a pool."""

    def __init__(self, config: Any, num_slots: int = 3) -> None:
        torch.manual_seed(0)
        self.plain = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager"
        ).eval()
        register_attention()
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
        model.load_state_dict(self.plain.state_dict())
        self.pool = KvPool(num_slots, CONTEXT)
        self._forward = PackedForward(model, self.pool)

    def expected(self, ids: list[int]) -> torch.Tensor:
        """Return the logits after the last token of a whole text."""
        with torch.inference_mode():
            return self.plain(input_ids=torch.tensor([ids])).logits[0, -1]

    def forward(self, *pieces: Piece, is_exact: bool = False) -> torch.Tensor:
        with torch.inference_mode():
            return self._forward(pieces, is_exact=is_exact)


def draw(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(CONFIGS[request.param]())


@pytest.fixture
def llama() -> Pair:
    return Pair(CONFIGS["llama"]())


def test_mixed_batch_equals_each_request_alone(pair: Pair) -> None:
    """A whole prompt, the second part of another, and a request that decodes, in one pass."""
    new, halved, decoding = draw(9, 1), draw(14, 2), draw(11, 3)
    pair.forward(Piece(1, 0, halved[:8]), Piece(2, 0, decoding[:-1]))

    logits = pair.forward(Piece(0, 0, new), Piece(1, 8, halved[8:]), Piece(2, 10, decoding[-1:]))

    for row, ids in zip(logits, (new, halved, decoding), strict=True):
        assert torch.allclose(row, pair.expected(ids), atol=1e-4)


def test_text_token_by_token_equals_the_whole(pair: Pair) -> None:
    ids = draw(CONTEXT, 4)
    for position, token in enumerate(ids):
        logits = pair.forward(Piece(1, position, [token]))

        assert torch.allclose(logits[0], pair.expected(ids[: position + 1]), atol=1e-4)


def test_used_slot_gives_nothing_to_the_next_request(llama: Pair) -> None:
    ids = draw(12, 5)
    fresh = llama.forward(Piece(0, 0, ids))
    llama.forward(Piece(0, 0, draw(CONTEXT, 6)))

    assert torch.equal(llama.forward(Piece(0, 0, ids)), fresh)


def test_filling_up_changes_no_slot(llama: Pair) -> None:
    """One exact row is filled up to four; all slots are in use meanwhile."""
    texts = [draw(10, seed) for seed in range(3)]
    for slot, ids in enumerate(texts):
        llama.forward(Piece(slot, 0, ids[:-1]))

    rows = [llama.forward(Piece(slot, 9, ids[-1:]), is_exact=True)[0] for slot, ids in enumerate(texts)]

    for row, ids in zip(rows, texts, strict=True):
        assert torch.allclose(row, llama.expected(ids), atol=1e-4)


def test_logits_have_one_row_for_each_piece(llama: Pair) -> None:
    assert llama.forward(Piece(0, 0, [1])).shape == (1, VOCABULARY)
    assert llama.forward(Piece(0, 0, [1]), Piece(1, 0, [2, 3])).shape == (2, VOCABULARY)


def test_piece_beyond_its_slot_is_refused(llama: Pair) -> None:
    with pytest.raises(ValueError, match="position 41 is beyond"):
        llama.forward(Piece(1, 1, [0] * CONTEXT))


def test_pool_size_is_known_after_a_pass(llama: Pair) -> None:
    """Layers, keys and values, slots and the spare one, positions, heads, head size, bytes."""
    llama.forward(Piece(0, 0, [1]))

    assert llama.pool.size_bytes == 3 * 2 * 4 * CONTEXT * 2 * 8 * 4
