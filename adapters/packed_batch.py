"""One forward pass over tokens of many requests, laid end to end, with keys and values in fixed slots.

A batch is a row of T tokens: one token of each request that decodes, some more of each whose prompt is still being
read. All that a transformer does token by token (projections, feed-forward, norms) then runs once over the T tokens
without padding. Only attention has to know where a request begins, and transformers lets a model's attention function
be chosen by name: the one registered here gives each request the keys and values of its own slot. The model's code is
used as it is.

Keys and values live in one pool per layer, (slots * context_length, kv_heads, head_dim), where a slot is
context_length consecutive places. New ones are written in place and a request's history is read as a view, so nothing
is copied as it grows. The pool is allocated without being touched: on a CPU the system backs a place with memory when
it is first written.

transformers' own continuous batching keeps pages in the same spirit, but decides itself which requests run, in a
thread of its own, with one random generator for all of them, and on a CPU gathers a copy of all histories for each
layer of each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

ATTENTION = "omni_bus_packed"
"""The name under which transformers finds `attend`."""


MIN_ROWS = 4
MAX_ROWS = 15
"""Between these a CPU's matrix product gives each row the same bits, however many there are.

Measured with MKL and SmolLM2's shapes on one and two threads: with AVX2 rows are equal from 4 to 32 and more, with
AVX-512 from 2 to 15 and, by another kernel, from 16 or 57 on. Products of one row have a kernel of their own, those of
two and three are no faster than of four (AVX2: a step takes 38, 57, 74, 58, 69 and 71 ms for 1, 2, 3, 4, 6 and 8
rows). So two and three are always filled up, and one only where a request asks to be reproducible whoever it runs
beside. Elsewhere nothing is filled up and nothing of this is promised.
"""


class Piece(NamedTuple):
    """Consecutive tokens of one request in a batch."""

    slot: int
    first_position: int
    """How many tokens of the request are in the slot already."""
    ids: Sequence[int]
    is_whole: bool = False
    """Whether the logits after each of its tokens are wanted, not only after the last."""

    @property
    def num_rows(self) -> int:
        """Rows of logits that are wanted."""
        return len(self.ids) if self.is_whole else 1


class KvPool:
    """Keys and values of all resident requests.

    Allocated layer by layer at the first write, when the model shows their shapes.
    """

    def __init__(self, num_slots: int, context_length: int) -> None:
        self.num_slots = num_slots
        self.context_length = context_length
        self.spare_slot = num_slots
        """Where the tokens that only fill up a batch go."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        """Put keys and values, each (1, kv_heads, T, head_dim), into their places, (T,)."""
        if layer not in self._layers:
            self._layers[layer] = (
                keys.new_empty((self.num_places, keys.shape[1], keys.shape[3])),
                values.new_empty((self.num_places, values.shape[1], values.shape[3])),
            )
        key_pool, value_pool = self._layers[layer]
        key_pool.index_copy_(0, places, keys[0].transpose(0, 1))
        value_pool.index_copy_(0, places, values[0].transpose(0, 1))

    def read(self, layer: int, slot: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a slot's keys and values from begin to end, each (1, kv_heads, end - begin, head_dim)."""
        offset = slot * self.context_length
        keys, values = self._layers[layer]
        return (
            keys[offset + begin : offset + end].transpose(0, 1).unsqueeze(0),
            values[offset + begin : offset + end].transpose(0, 1).unsqueeze(0),
        )

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Put the keys and values of a slot's first tokens into another slot."""
        begin, to = source * self.context_length, target * self.context_length
        for pools in self._layers.values():
            for pool in pools:
                pool[to : to + num_tokens] = pool[begin : begin + num_tokens]

    def slots(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of whole slots' keys and values, each (slots, context_length, kv_heads, head_dim)."""
        keys, values = (
            found.view(self.num_slots + 1, self.context_length, *found.shape[1:]).index_select(0, slots)
            for found in self._layers[layer]
        )
        return keys, values

    @property
    def num_places(self) -> int:
        """Tokens that fit in, those of the spare slot included."""
        return (self.num_slots + 1) * self.context_length

    @property
    def size_bytes(self) -> int:
        """Memory that the pool takes when every place has been used; 0 before the first write."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    @property
    def place_bytes(self) -> int:
        """Memory of one token's keys and values in all layers."""
        return self.size_bytes // self.num_places


class Attending(ABC):
    """The tokens of one forward pass."""

    pool: KvPool
    places: torch.Tensor
    """Where the keys and values of each token go."""

    @abstractmethod
    def attend(self, module: Any, query: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the attention of each token over its own slot, (1, T, heads, head_dim).

        Args:
            module: the model's attention layer.
            query: (1, heads, T, head_dim).
            arguments: the layer's own.
        """


class Batch(Attending):
    """The pieces of one forward pass and where each is."""

    def __init__(self, pieces: Sequence[Piece], pool: KvPool, device: Any) -> None:
        import torch

        self.pieces = pieces
        self.pool = pool
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for piece in pieces:
            check_room(piece, pool)
            end = piece.first_position + len(piece.ids)
            offset = piece.slot * pool.context_length
            ids.extend(piece.ids)
            positions.extend(range(piece.first_position, end))
            places.extend(range(offset + piece.first_position, offset + end))
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.places = torch.tensor(places, device=device)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def rows_of(self, num_pieces: int, num_rows: int) -> torch.Tensor:
        """Return which tokens of the first pieces have wanted logits, the last of them repeated: (num_rows,)."""
        import torch

        rows = rows_of_pieces(self.pieces[:num_pieces])
        return torch.tensor(rows + rows[-1:] * (num_rows - len(rows)), device=self.ids.device)

    def mask(self, index: int, first_key: int, window: int) -> torch.Tensor:
        """Return which of the keys from `first_key` on each token of a piece may see: bool, (1, 1, tokens, keys)."""
        import torch

        if (index, window) not in self._masks:
            piece = self.pieces[index]
            end = piece.first_position + len(piece.ids)
            device = self.ids.device
            queries = torch.arange(piece.first_position, end, device=device)[:, None]
            keys = torch.arange(first_key, end, device=device)[None, :]
            self._masks[index, window] = ((keys <= queries) & (keys > queries - window))[None, None]
        return self._masks[index, window]

    def attend(self, module: Any, query: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the attention of each token over its own slot; see `Attending`."""
        import torch
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        window: int = arguments.pop("sliding_window", None) or self.pool.context_length
        outputs: list[torch.Tensor] = []
        begin = 0
        for index, piece in enumerate(self.pieces):
            num_tokens = len(piece.ids)
            end = piece.first_position + num_tokens
            first_key = max(0, piece.first_position + 1 - window)
            keys, values = self.pool.read(module.layer_idx, piece.slot, first_key, end)
            # One token sees all the keys; tokens without a history are plainly causal: both have kernels that need no
            # mask.
            is_plain = num_tokens == 1 or (piece.first_position == 0 and end <= window)
            mask = None if is_plain else self.mask(index, first_key, window)
            queries = query[:, :, begin : begin + num_tokens]
            outputs.append(sdpa_attention_forward(module, queries, keys, values, mask, **arguments)[0])
            begin += num_tokens
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each piece over its own slot; the function that transformers' models call.

    Args:
        module: the model's attention layer.
        query: (1, heads, T, head_dim).
        key: of the new tokens, in the pool already.
        value: likewise.
        attention_mask: None; each piece has its own.
        kwargs: `packed_batch`, which was passed to the model; the rest is the layer's own.

    Returns:
        (1, T, heads, head_dim), and no weights.
    """
    del key, value, attention_mask
    batch: Attending = kwargs.pop("packed_batch")
    return batch.attend(module, query, kwargs), None


def register_attention() -> None:
    """Make `attend` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


class PackedForward:
    """Runs a causal language model of transformers, loaded with `ATTENTION`, on batches."""

    def __init__(self, model: Any, pool: KvPool) -> None:
        self._model = model
        self._pool = pool
        self._cache_argument = cache_argument(model)

    def __call__(self, pieces: Sequence[Piece], *, is_exact: bool = False) -> torch.Tensor:
        """Append the pieces to their slots.

        Args:
            pieces: at most one of each slot, each following on what the slot holds.
            is_exact: fill up to `MIN_ROWS`, so that a token has the same logits in any company of up to `MAX_ROWS`.

        Returns:
            The logits after the last token of each piece, or after each token of a whole one, (rows, vocabulary).
        """
        batch = filled_batch(pieces, self._pool, self._model.device, is_exact=is_exact)
        num_wanted = sum(piece.num_rows for piece in pieces)
        num_rows = _filled_up(num_wanted, self._model.device, is_exact=is_exact)
        arguments = {
            "input_ids": batch.ids,
            "position_ids": batch.positions,
            "use_cache": True,
            "logits_to_keep": batch.rows_of(len(pieces), num_rows),
            "packed_batch": batch,
            self._cache_argument: cache_of(batch),
        }
        return self._model(**arguments).logits[0, :num_wanted]


def check_room(piece: Piece, pool: KvPool) -> None:
    """Refuse a piece that its slot can't hold.

    Raises:
        ValueError: that is so.
    """
    end = piece.first_position + len(piece.ids)
    if end > pool.context_length:
        raise ValueError(f"slot {piece.slot}: position {end} is beyond the slot's {pool.context_length}")


def rows_of_pieces(pieces: Sequence[Piece]) -> list[int]:
    """Return which tokens of a batch have wanted logits: the last of each piece, or all of a whole one."""
    rows: list[int] = []
    end = 0
    for piece in pieces:
        end += len(piece.ids)
        rows.extend(range(end - piece.num_rows, end))
    return rows


def with_filling(rows: torch.Tensor, *, is_exact: bool) -> torch.Tensor:
    """Return rows, (n, width), with zeros behind them where there are too few."""
    num_filling = _filled_up(len(rows), rows.device, is_exact=is_exact) - len(rows)
    return rows if not num_filling else _cat_zeros(rows, num_filling)


def _cat_zeros(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    import torch

    return torch.cat([rows, rows.new_zeros(num_rows, *rows.shape[1:])])


def cache_argument(model: Any) -> str:
    """Return what `forward` calls the cache: transformers renamed it in the 5.2x releases, model by model."""
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def filled_batch(pieces: Sequence[Piece], pool: KvPool, device: Any, *, is_exact: bool) -> Batch:
    """Return the pieces as a batch, with tokens of the spare slot behind them where there are too few."""
    num_tokens = sum(len(piece.ids) for piece in pieces)
    num_filling = _filled_up(num_tokens, device, is_exact=is_exact) - num_tokens
    filling = [Piece(pool.spare_slot, 0, [0] * num_filling)] if num_filling else []
    return Batch([*pieces, *filling], pool, device)


def _filled_up(num_rows: int, device: torch.device, *, is_exact: bool) -> int:
    """Return how many rows a batch of so many has once it is filled up; see `MIN_ROWS`."""
    if device.type != "cpu" or num_rows >= MIN_ROWS or (num_rows == 1 and not is_exact):
        return num_rows
    return MIN_ROWS


def cache_of(batch: Attending) -> Any:
    """Return the batch as the cache object that transformers' attention layers write to."""
    from transformers.cache_utils import Cache

    class PackedCache(Cache):
        """Takes the new keys and values into the pool; `attend` reads them there."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            del args, kwargs
            batch.pool.write(layer_idx, key_states, value_states, batch.places)
            return key_states, value_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            """Positions are given explicitly, so nothing is counted from here."""
            del layer_idx
            return 0

    return PackedCache(layers=[])
