"""A decoder of transformers without its head, on batches of embeddings at positions of several axes.

Prompts run as in `adapters.packed_batch`. Where `PackedDecoder.record` was called, tokens that follow on an answer run
in passes of a fixed number of rows, which a GPU replays as a graph: a pass of a small model is a thousand kernels,
and launching them one by one takes longer than computing them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.packed_batch import (
    ATTENTION,
    Attending,
    KvPool,
    cache_argument,
    cache_of,
    check_room,
    filled_batch,
    register_attention,
    with_filling,
)
from adapters.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.packed_batch import Piece


class Rows(Attending):
    """One token of each of a fixed number of slots: a batch that is all tensors, so that a GPU can replay its pass.

    Args:
        pool: keys and values; the spare slot may come several times.
        slots: (rows,).
        positions: of the tokens in their slots, (rows,).
    """

    def __init__(self, pool: KvPool, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self.pool = pool
        self.places = slots * pool.context_length + positions
        self._slots = slots
        self._positions = positions[:, None]
        self._seen: dict[int, torch.Tensor] = {}

    def attend(self, module: Any, query: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the attention of each token over all places of its slot up to its own; see `Attending`."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        sees = self._sees(arguments.pop("sliding_window", None) or self.pool.context_length)
        # Whatever else a slot holds, be it no number, must not reach the sums, not even times nothing.
        keys, values = (
            found.masked_fill(~sees[:, :, None, None], 0).transpose(1, 2)
            for found in self.pool.slots(module.layer_idx, self._slots)
        )
        queries = query[0].transpose(0, 1)[:, :, None]
        found = sdpa_attention_forward(module, queries, keys, values, sees[:, None, None], **arguments)[0]
        return found.transpose(0, 1)

    def _sees(self, window: int) -> torch.Tensor:
        """Return which places of its slot each row may see: bool, (rows, context_length)."""
        import torch

        if window not in self._seen:
            places = torch.arange(self.pool.context_length, device=self._positions.device)
            self._seen[window] = (places <= self._positions) & (places > self._positions - window)
        return self._seen[window]


class PackedDecoder:
    """Runs a decoder of transformers without its head on batches of embeddings, at positions of several axes."""

    def __init__(self, decoder: Any, pool: KvPool) -> None:
        """Let the decoder attend by slots.

        Args:
            decoder: a text model whose `forward` takes ``inputs_embeds``.
            pool: its keys and values.
        """
        register_attention()
        decoder.set_attn_implementation(ATTENTION)
        self.pool = pool
        self._decoder = decoder
        self._cache_argument = cache_argument(decoder)
        self._num_rows = 0
        self._decodes = Recorded(self._decode)

    def record(self, num_rows: int) -> None:
        """Compute single tokens in passes of so many rows, however many there are, which a GPU remembers.

        So the states of a token have the same bits in any company.

        Args:
            num_rows: at most so many are in one pass.

        Raises:
            RuntimeError: something in the decoder can't be recorded.
        """
        import torch

        weight = next(self._decoder.parameters())
        embeddings = torch.zeros(num_rows, self._decoder.config.hidden_size, dtype=weight.dtype, device=weight.device)
        positions = torch.zeros(3, num_rows, device=weight.device)
        places = torch.tensor([[self.pool.spare_slot] * num_rows, [0] * num_rows], device=weight.device)
        with torch.inference_mode():
            self._decodes.record(embeddings, positions, places)
        self._num_rows = num_rows

    def __call__(
        self,
        pieces: Sequence[Piece],
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        *,
        is_exact: bool = False,
        **arguments: Any,
    ) -> torch.Tensor:
        """Append the pieces to their slots.

        Args:
            pieces: at most one of each slot, each following on what the slot holds.
            embeddings: of their tokens, (T, width).
            positions: of their tokens, (axes, T).
            is_exact: as in `PackedForward`.
            arguments: more for the decoder.

        Returns:
            The last layer's states, normed, (T, width).
        """
        if not self._num_rows or arguments:
            return self._pass(pieces, embeddings, positions, is_exact=is_exact, **arguments)
        tokens = list(zip(pieces, _tokens_of(pieces), strict=True))
        single = [(piece, at[0]) for piece, at in tokens if len(at) == 1]
        parts = [single[begin : begin + self._num_rows] for begin in range(0, len(single), self._num_rows)]
        if len(parts) == 1 and len(single) == len(pieces):
            return self._single(pieces, embeddings, positions)
        found = embeddings.new_empty(embeddings.shape)
        for part in parts:
            at = [token for _, token in part]
            found[at] = self._single([piece for piece, _ in part], embeddings[at], positions[:, at])
        longer = [(piece, at) for piece, at in tokens if len(at) > 1]
        if longer:
            at = [token for _, run in longer for token in run]
            pieces = [piece for piece, _ in longer]
            found[at] = self._pass(pieces, embeddings[at], positions[:, at], is_exact=is_exact)
        return found

    def _single(self, pieces: Sequence[Piece], embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Append one token to each of a few slots, (tokens, width) → (tokens, width)."""
        import torch

        for piece in pieces:
            check_room(piece, self.pool)
        num_more = self._num_rows - len(pieces)
        slots = [piece.slot for piece in pieces] + [self.pool.spare_slot] * num_more
        firsts = [piece.first_position for piece in pieces] + [0] * num_more
        pad = torch.nn.functional.pad
        [states] = self._decodes(
            pad(embeddings, (0, 0, 0, num_more)),
            pad(positions.float(), (0, num_more)),
            torch.tensor([slots, firsts], device=embeddings.device),
        )
        return states[: len(pieces)].clone()

    def _decode(self, embeddings: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor]:
        """Append one token to each slot of a row.

        Args:
            embeddings: (rows, width).
            positions: (3, rows).
            places: slots, and positions in them, (2, rows).

        Returns:
            The last layer's states, normed, (rows, width).
        """
        batch = Rows(self.pool, places[0], places[1])
        found = self._decoder(
            inputs_embeds=embeddings[None],
            position_ids=positions[:, None],
            use_cache=True,
            packed_batch=batch,
            **{self._cache_argument: cache_of(batch)},
        )
        return (found.last_hidden_state[0],)

    def _pass(
        self,
        pieces: Sequence[Piece],
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        *,
        is_exact: bool,
        **arguments: Any,
    ) -> torch.Tensor:
        num_tokens = len(embeddings)
        batch = filled_batch(pieces, self.pool, embeddings.device, is_exact=is_exact)
        found = self._decoder(
            inputs_embeds=with_filling(embeddings, is_exact=is_exact)[None],
            position_ids=with_filling(positions.T, is_exact=is_exact).T[:, None],
            use_cache=True,
            packed_batch=batch,
            **{self._cache_argument: cache_of(batch)},
            **arguments,
        )
        return found.last_hidden_state[0, :num_tokens]


def _tokens_of(pieces: Sequence[Piece]) -> list[range]:
    """Return which tokens of a batch are of each piece."""
    found: list[range] = []
    for piece in pieces:
        begin = found[-1].stop if found else 0
        found.append(range(begin, begin + len(piece.ids)))
    return found
