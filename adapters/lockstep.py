"""State of many streams that advance together, a row of each tensor for each stream.

Every call computes all rows, also those of no stream, so shapes never change and a row has the same numbers whoever is
beside it. Which rows count is said by a mask: the others keep their state. State stays where it is in memory, and no
call waits for the device, so that a GPU can replay calls as a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class RingCache:
    """Keys and values of each row's last positions, as the cache object of transformers' attention layers.

    Of a layer (rows, kv_heads, places, head_dim), where position p is at place p modulo their number. Positions are
    encoded into the keys before they come here, so their order among the places does not matter.

    Args:
        num_rows: streams.
        window: positions that one sees, itself included.
        num_new: positions of each call.
        device: where the masks are made.
    """

    def __init__(self, num_rows: int, window: int, num_new: int, device: Any) -> None:
        import torch

        self._window = window
        self._num_places = window + num_new - 1
        self._rows = torch.arange(num_rows, device=device)[:, None]
        self._new = torch.arange(num_new, device=device)[None]
        self._index = torch.arange(self._num_places, device=device)[None]
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.positions: torch.Tensor
        """Of the call, (rows, num_new)."""
        self.mask: torch.Tensor
        """Which places each position sees: bool, (rows, 1, num_new, places)."""

    def begin(self, first: torch.Tensor) -> None:
        """Begin a call at these positions, (rows,). What rows of no stream write, nobody sees."""
        self.positions = first[:, None] + self._new
        last = self.positions[:, -1:]
        held = (last - (last - self._index) % self._num_places)[:, None]
        mine = self.positions[:, :, None]
        self.mask = ((held >= 0) & (held <= mine) & (held > mine - self._window))[:, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what is new, each (rows, kv_heads, num_new, head_dim), and return all places."""
        if layer_idx not in self._layers:
            shape = (keys.shape[0], keys.shape[1], self._num_places, keys.shape[3])
            self._layers[layer_idx] = (keys.new_zeros(shape), values.new_zeros(shape))
        places = self.positions % self._num_places
        held = self._layers[layer_idx]
        for all_, new in zip(held, (keys, values), strict=True):
            all_[self._rows, :, places] = new.transpose(1, 2)
        return held


class GrowingCache:
    """Keys and values of a few positions, as the cache object of transformers' attention layers.

    Its own holds numbers on the CPU, which it copies to a device at each beginning.

    Args:
        window: positions that one sees, itself included.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_seen = 0

    def get_seq_length(self) -> int:
        """Return how many positions came, by the name that transformers' models know."""
        return self._num_seen

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append what is new, each (rows, kv_heads, positions, head_dim), and return what is seen."""
        import torch

        if layer_idx == 0:
            self._num_seen += keys.shape[2]
        if layer_idx in self._layers:
            old_keys, old_values = self._layers[layer_idx]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self._layers[layer_idx] = keys[:, :, -self._window :], values[:, :, -self._window :]
        return self._layers[layer_idx]


class ConvStreams:
    """A chain of Mimi's causal convolutions that is run piece by piece.

    A convolution needs the end of what came before, a transposed one the sum that reaches into what comes next; both
    are zero before a stream begins, as the padding of the whole sound is.

    Args:
        layers: modules of transformers' Mimi.
        num_rows: streams.
    """

    def __init__(self, layers: Iterable[Any], num_rows: int) -> None:
        self._layers = list(layers)
        self._sizes: dict[Any, int] = {}
        self._states: dict[Any, torch.Tensor] = {}
        for layer in self._layers:
            for part in layer.modules():
                self._begin(part, num_rows)

    def _begin(self, layer: Any, num_rows: int) -> None:
        name = type(layer).__name__
        if name not in ("MimiConv1d", "MimiConvTranspose1d"):
            return
        is_transposed = name == "MimiConvTranspose1d"
        if not layer.causal or (is_transposed and layer.padding_left):
            raise ValueError("its convolutions are not causal")
        if not is_transposed and layer.pad_mode not in ("constant", "replicate"):
            raise ValueError(f"its convolutions are padded by '{layer.pad_mode}'")
        channels = layer.conv.out_channels if is_transposed else layer.conv.in_channels
        size = int(layer.padding_right if is_transposed else layer.padding_total)
        self._sizes[layer] = size
        self._states[layer] = layer.conv.weight.new_zeros((num_rows, channels, size))

    def reset(self, row: int) -> None:
        """Begin a stream in this row."""
        for state in self._states.values():
            state[row] = 0

    def __call__(self, values: torch.Tensor, active: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Run the chain.

        Args:
            values: the next piece of each row, (rows, channels, length).
            active: rows that go on, bool, (rows,).
            fresh: rows whose stream begins, bool, (rows,).
        """
        masks = active[:, None, None], fresh[:, None, None]
        for layer in self._layers:
            values = self._run(layer, values, *masks)
        return values

    def _run(self, layer: Any, values: torch.Tensor, active: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        match type(layer).__name__:
            case "MimiConv1d":
                return self._convolve(layer, values, active, fresh)
            case "MimiConvTranspose1d":
                return self._transpose(layer, values, active)
            case "MimiResnetBlock":
                inner = values
                for part in layer.block:
                    inner = self._run(part, inner, active, fresh)
                return self._run(layer.shortcut, values, active, fresh) + inner
            case _:
                return layer(values)

    def _convolve(self, layer: Any, values: torch.Tensor, active: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        import torch

        before = self._states[layer]
        if layer.pad_mode == "replicate":
            before = torch.where(fresh, values[..., :1], before)
        joined = torch.cat([before, values], dim=2)
        self._states[layer].copy_(torch.where(active, joined[..., joined.shape[2] - self._sizes[layer] :], before))
        return layer.conv(joined)

    def _transpose(self, layer: Any, values: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        import torch

        size, before = self._sizes[layer], self._states[layer]
        sums = layer.conv(values)
        sums[..., :size] += before
        end = sums.shape[2] - size
        rest = sums[..., end:] if layer.conv.bias is None else sums[..., end:] - layer.conv.bias[None, :, None]
        before.copy_(torch.where(active, rest, before))
        return sums[..., :end]
