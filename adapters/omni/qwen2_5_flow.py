"""The flow of Qwen2.5-Omni's token2wav: noise to spectrograms, for windows of several streams in one pass.

The weights are transformers'. Its `forward` is not used, because most of what that computes is the same in all of the
solver's 36 passes, and here is computed once: how the layers are modulated, which depends on the time only; what the
voice's encoder makes of its spectrogram; and what codes and voice add to the first projection. What remains is a
function of tensors that waits for nothing, and that a GPU replays as a graph (`adapters.recorded`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

NUM_POINTS = 10
GUIDANCE = 0.5
SWAY = -1.0
"""The published solver: points in time, weight of guidance, and how far the points lean to the beginning."""

STAGES = 4
"""Slopes of one of its steps (Kutta's rule of three eighths)."""


class Voice(NamedTuple):
    """What the flow knows of a voice; each has a row with guidance and one without."""

    vector: torch.Tensor
    """(2, width)."""
    style: torch.Tensor
    """What the encoder makes of its spectrogram, (2, width)."""


class Window(NamedTuple):
    """Consecutive codes of one stream, and noise for their spectrogram."""

    codes: torch.Tensor
    """(codes,)."""
    noise: torch.Tensor
    """(frames, bands)."""
    voice: Voice


class Rotary(NamedTuple):
    """How far the frames' pairs of numbers are turned, (frames, 1, head_dim)."""

    cos: torch.Tensor
    sin: torch.Tensor
    """Of each pair's first number negative."""


class _Layer:
    """One layer, as its weights say; queries, keys and values are one projection."""

    def __init__(self, layer: Any) -> None:
        import torch

        attention = layer.attn
        parts = (attention.to_q, attention.to_k, attention.to_v)
        self.reach = int(layer.look_backward_block), int(layer.look_ahead_block)
        self.num_heads = int(attention.heads)
        self.weight = torch.cat([part.weight.data for part in parts])
        self.bias = torch.cat([part.bias.data for part in parts])
        for part, own in zip(parts, self.weight.chunk(3), strict=True):
            part.weight.data = own  # so that nothing is there twice
        self.output = attention.to_out[0]
        self.feed_forward = layer.ff

    def __call__(
        self, hidden: torch.Tensor, modulation: torch.Tensor, rotary: Rotary, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the next states, (rows, frames, width)."""
        import torch

        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.unbind()
        hidden = torch.addcmul(hidden, gate, self._attend(_normed(hidden, scale, shift), rotary, mask))
        return torch.addcmul(hidden, ff_gate, self.feed_forward(_normed(hidden, ff_scale, ff_shift)))

    def _attend(self, hidden: torch.Tensor, rotary: Rotary, mask: torch.Tensor) -> torch.Tensor:
        import torch

        joined = torch.nn.functional.linear(hidden, self.weight, self.bias).unflatten(2, (3, self.num_heads, -1))
        # As the model was trained, only the first head knows where it is; its pairs are neighbours.
        first = joined[:, :, :2, 0]
        turned = first.unflatten(3, (-1, 2)).flip(4).flatten(3)
        joined[:, :, :2, 0] = torch.addcmul(first * rotary.cos, turned, rotary.sin)
        queries, keys, values = joined.permute(2, 0, 3, 1, 4)
        found = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask)
        return self.output(found.transpose(1, 2).flatten(2))


def solver_times() -> torch.Tensor:
    """Return the points in time between which the solver steps, from 0 to 1, (NUM_POINTS,)."""
    import torch

    times = torch.linspace(0, 1, NUM_POINTS)
    return times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)


class Flow:
    """Solves the flow.

    Args:
        model: transformers' ``Qwen2_5OmniToken2WavDiTModel``, in float32.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self._model = model
        self.repeats, self.bands = int(model.repeats), int(model.mel_dim)
        self._advances: dict[tuple[int, int], Recorded] = {}
        """By windows and frames of a pass."""
        device = model.proj_out.weight.device
        times = solver_times()
        begins, sizes = times[:-1], times.diff()
        moments = torch.stack([begins, begins + sizes / 3, begins + sizes * 2 / 3, times[1:]], dim=1).flatten()
        self._sizes = sizes.to(device)
        self._layers = [_Layer(layer) for layer in model.transformer_blocks]
        with torch.inference_mode():
            embedded = model.time_embed(moments.to(device))
            norms = [layer.attn_norm for layer in model.transformer_blocks]
            self._modulations = torch.stack([_modulation(norm, embedded) for norm in norms], dim=1)
            """(steps * `STAGES`, layers, 6, width)."""
            self._modulations[:, :, [1, 4]] += 1  # scales
            self._last_modulation = _modulation(model.norm_out, embedded)
            self._last_modulation[:, 0] += 1

    def voice(self, vector: torch.Tensor, spectrogram: torch.Tensor) -> Voice:
        """Return what is known of a voice by its vector, (1, width), and a spectrogram, (1, frames, bands)."""
        import torch

        encode = self._model.input_embed.spk_encoder
        with torch.inference_mode():
            both = torch.cat([spectrogram, torch.zeros_like(spectrogram)])
            return Voice(torch.cat([vector, torch.zeros_like(vector)]), encode(both))

    def record(self, lengths: Sequence[int], most: int) -> None:
        """Have a GPU remember passes of up to `most` windows with these numbers of frames.

        Raises:
            RuntimeError: something in them can't be recorded.
        """
        import torch

        device = self._sizes.device
        for num_frames in lengths:
            for num_windows in powers_of_two(most):
                state = torch.zeros(num_windows, num_frames, self.bands, device=device)
                given = torch.zeros(2 * num_windows, num_frames, self._model.hidden_size, device=device)
                ends = torch.full((num_windows,), num_frames, device=device)
                advance = Recorded(self._advance)
                with torch.inference_mode():
                    advance.record(torch.zeros(1, dtype=torch.long, device=device), state, given, ends)
                self._advances[num_windows, num_frames] = advance

    def solve(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Return the windows' spectrograms, (bands, frames) each."""
        import torch

        num_windows, num_frames = fitting(self._advances, len(windows), max(len(window.noise) for window in windows))
        advance = self._advances.get((num_windows, num_frames), self._advance)
        device = self._sizes.device
        state = torch.zeros(num_windows, num_frames, self.bands, device=device)
        given = torch.zeros(2, num_windows, num_frames, self._model.hidden_size, device=device)
        for index, window in enumerate(windows):
            state[index, : len(window.noise)] = window.noise
            given[:, index, : len(window.noise)] = self._given(window)
        ends = torch.tensor([len(window.noise) for window in windows] + [num_frames] * (num_windows - len(windows)))
        ends = ends.to(device)
        for step in torch.arange(NUM_POINTS - 1, device=device).split(1):
            [state] = advance(step, state, given.flatten(0, 1), ends)
        return [state[index, : len(window.noise)].T.clone() for index, window in enumerate(windows)]

    def _given(self, window: Window) -> torch.Tensor:
        """Return what codes and voice add to the first projection: (2, frames, width)."""
        import torch

        codes = torch.stack([window.codes, torch.zeros_like(window.codes)])
        embedded = self._model.text_embed(codes)
        num_frames = embedded.shape[1]
        style, vector = (part[:, None].expand(-1, num_frames, -1) for part in (window.voice.style, window.voice.vector))
        project = self._model.input_embed.proj
        joined = torch.cat([style, embedded, vector], dim=-1)
        return torch.nn.functional.linear(joined, project.weight[:, self.bands :], project.bias)

    def _advance(
        self, step: torch.Tensor, state: torch.Tensor, given: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """Go one step of the solver.

        Args:
            step: its index, (1,).
            state: (windows, frames, bands).
            given: what codes and voices add to the first projection, with guidance, then without:
                (2 * windows, frames, width).
            ends: frames that each window has, (windows,); what stands behind them is no concern of theirs.

        Returns:
            The next state.
        """
        import torch

        size = self._sizes.index_select(0, step)
        positions = torch.arange(state.shape[1], device=state.device)
        rotary = self._rotary(positions)
        masks = self._masks(positions, ends.repeat(2))

        def slope(stage: int, values: torch.Tensor) -> torch.Tensor:
            return self._slope(step * STAGES + stage, values, given, rotary, masks)

        first = slope(0, state)
        second = slope(1, state + size * first / 3)
        third = slope(2, state + size * (second - first / 3))
        fourth = slope(3, state + size * (first - second + third))
        return (state + size * (first + 3 * (second + third) + fourth) / 8,)

    def _rotary(self, positions: torch.Tensor) -> Rotary:
        cos, sin = (
            found[0, :, None, : found.shape[2] // 2].repeat_interleave(2, dim=2)
            for found in self._model.rotary_embed(self._sizes, positions[None])
        )
        sin[:, :, ::2] *= -1
        return Rotary(cos, sin)

    def _masks(self, positions: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
        """Return for each layer what is added where a frame looks at another: 0 or -inf, (rows, 1, frames, frames)."""
        import torch

        blocks = positions // int(self._model.block_size)
        distance = blocks[None, :] - blocks[:, None]
        is_there = positions < ends[:, None]
        # What stands behind a window's end sees itself: softmax of nothing would be no number.
        may_see = is_there[:, None, :] | ~is_there[:, :, None]
        made: dict[tuple[int, int], torch.Tensor] = {}
        for back, ahead in sorted({layer.reach for layer in self._layers}):
            sees = (may_see & (distance >= -back) & (distance <= ahead))[:, None]
            made[back, ahead] = torch.zeros_like(sees, dtype=torch.float32).masked_fill(~sees, float("-inf"))
        return [made[layer.reach] for layer in self._layers]

    def _slope(
        self,
        moment: torch.Tensor,
        state: torch.Tensor,
        given: torch.Tensor,
        rotary: Rotary,
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return where the state moves at one of the moments, (1,)."""
        import torch

        project = self._model.input_embed.proj.weight[:, : self.bands]
        hidden = torch.nn.functional.linear(state, project).repeat(2, 1, 1) + given
        modulations = self._modulations.index_select(0, moment)[0]
        for layer, mask, modulation in zip(self._layers, masks, modulations, strict=True):
            hidden = layer(hidden, modulation, rotary, mask)
        scale, shift = self._last_modulation.index_select(0, moment)[0]
        guided, free = self._model.proj_out(_normed(hidden, scale, shift)).chunk(2)
        return guided + GUIDANCE * (guided - free)


def _normed(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.layer_norm(hidden, scale.shape, scale, shift, eps=1e-6)


def _modulation(norm: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Return by what a norm is modulated at each moment, (moments, vectors, width)."""
    return norm.linear(norm.silu(embedded)).unflatten(1, (-1, norm.norm.normalized_shape[0]))


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 … and `most`."""
    return [*(2**i for i in range((most - 1).bit_length())), most]


def fitting(shapes: Iterable[tuple[int, int]], num_windows: int, num_frames: int) -> tuple[int, int]:
    """Return the smallest of shapes (windows, frames) that holds so many; just these if none does."""
    found = [shape for shape in shapes if shape[0] >= num_windows and shape[1] >= num_frames]
    return min(found, key=lambda shape: (shape[0] * shape[1], shape), default=(num_windows, num_frames))
