"""Passes of a fixed number of rows against passes over the pieces themselves, and what a GPU needs to replay them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from adapters.packed_batch import KvPool, Piece
from adapters.packed_decoder import PackedDecoder

VOCABULARY, CONTEXT, NUM_ROWS = 97, 40, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral with a window": transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma3 with both kinds of layers": transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
}


class Axis:
    """A decoder that is given positions of three axes, all alike, as omni models' text is."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.config, self.parameters = decoder.config, decoder.parameters
        self.set_attn_implementation = decoder.set_attn_implementation
        self.forward = decoder.forward

    def __call__(self, *, position_ids: torch.Tensor, **arguments: Any) -> Any:
        return self._decoder(position_ids=position_ids[0].long(), **arguments)


class Pair:
    """A decoder twice, with the same weights: with passes of a fixed number of rows, and without."""

    def __init__(self, config: Any) -> None:
        torch.manual_seed(0)
        decoder: Any = transformers.AutoModel.from_config(config).eval()
        self._embed = decoder.get_input_embeddings()
        self.fixed, self.plain = (PackedDecoder(Axis(decoder), KvPool(5, CONTEXT)) for _ in range(2))
        self.fixed.record(NUM_ROWS)

    def states(self, decoder: PackedDecoder, *pieces: Piece) -> torch.Tensor:
        positions = [p for piece in pieces for p in range(piece.first_position, piece.first_position + len(piece.ids))]
        ids = torch.tensor([id_ for piece in pieces for id_ in piece.ids])
        with torch.inference_mode():
            return decoder(pieces, self._embed(ids), torch.tensor(positions, dtype=torch.float32).expand(3, -1))

    def both(self, *pieces: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states(self.fixed, *pieces), self.states(self.plain, *pieces)


def draw(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(CONFIGS[request.param])


@pytest.fixture
def llama() -> Pair:
    return Pair(CONFIGS["llama"])


def test_fixed_rows_give_what_pieces_give(pair: Pair) -> None:
    """More single tokens than rows, then prompts among them, in an order in which neither stands together."""
    texts = [draw(12, seed) for seed in range(5)]
    pair.both(*(Piece(slot, 0, ids[:8]) for slot, ids in enumerate(texts[:4])))

    alone = pair.both(*(Piece(slot, 8, ids[8:9]) for slot, ids in enumerate(texts[:4])))
    mixed = pair.both(
        Piece(3, 9, texts[3][9:10]),
        Piece(4, 0, texts[4]),
        Piece(1, 9, texts[1][9:10]),
        Piece(0, 9, texts[0][9:12]),
        Piece(2, 9, texts[2][9:10]),
    )

    for fixed, plain in (alone, mixed):
        assert plain.std() > 0.1
        assert torch.allclose(fixed, plain, atol=1e-4)


def test_token_has_the_same_bits_in_any_company(llama: Pair) -> None:
    texts = [draw(10, seed) for seed in range(3)]
    for slot, ids in enumerate(texts):
        llama.states(llama.fixed, Piece(slot, 0, ids[:9]))
    pieces = [Piece(slot, 9, ids[9:]) for slot, ids in enumerate(texts)]

    [alone] = llama.states(llama.fixed, pieces[1])

    assert torch.equal(llama.states(llama.fixed, *pieces)[1], alone)
    assert torch.equal(llama.states(llama.fixed, pieces[2], pieces[1])[1], alone)


def test_numbers_that_are_none_stay_in_their_row(llama: Pair) -> None:
    """Neither beside it, nor for the next request in its slot."""
    embeddings = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    embeddings[1] = float("nan")
    with torch.inference_mode():
        for position in range(3):
            pieces = [Piece(slot, position, [0]) for slot in range(3)]
            states = llama.fixed(pieces, embeddings, torch.full((3, 3), float(position)))
            assert states.isnan().all(dim=1).tolist() == [False, True, False]
    ids = draw(3, 1)

    fixed, plain = llama.both(*(Piece(slot, 0, [id_]) for slot, id_ in enumerate(ids)))

    assert torch.allclose(fixed, plain, atol=1e-4)


def test_token_beyond_its_slot_is_refused(llama: Pair) -> None:
    with pytest.raises(ValueError, match="position 41 is beyond"):
        llama.states(llama.fixed, Piece(1, CONTEXT, [0]))


def test_nothing_in_a_pass_waits_for_the_device(pair: Pair) -> None:
    """Tensors without contents: whatever asks for a number of theirs fails, as it would while a GPU records."""
    decoder = pair.fixed
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        [states] = decoder._decode(torch.zeros(2, 32), torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.long))

    assert states.shape == (2, 32)
