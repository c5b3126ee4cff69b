"""The flow of Qwen2.5-Omni's token2wav: noise to spectrograms, for windows of several streams in one pass.

The layers are transformers'. What they are given is computed here, because in the model's own `forward` most of it is
the same in all of the solver's 36 passes, and here is computed once: how the layers are modulated, which depends on the
time only; what the voice's encoder makes of its spectrogram; and what codes and voice add to the first projection. What
remains is a function of tensors that waits for nothing, and that a GPU replays as a graph (`adapters.recorded`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def solver_times() -> list[float]:
    """Return the points in time between which the solver steps, from 0 to 1."""
    import torch

    times = torch.linspace(0, 1, NUM_POINTS)
    return (times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)).tolist()


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
        times = torch.tensor(solver_times())
        begins, sizes = times[:-1], times.diff()
        moments = torch.stack([begins, begins + sizes / 3, begins + sizes * 2 / 3, times[1:]], dim=1).flatten()
        self._sizes = sizes.to(device)
        with torch.inference_mode():
            embedded = model.time_embed(moments.to(device))
            self._modulations = torch.stack([_modulation(layer.attn_norm, embedded) for layer in self._layers], dim=1)
            """(steps * `STAGES`, layers, 6, width)."""
            self._last_modulation = _modulation(model.norm_out, embedded)

    @property
    def _layers(self) -> Sequence[Any]:
        return self._model.transformer_blocks

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

        size = self._sizes[step]
        positions = torch.arange(state.shape[1], device=state.device)[None]
        rotary = self._model.rotary_embed(given, positions.expand(len(given), -1))
        masks = self._masks(positions[0], ends.repeat(2))

        def slope(stage: int, values: torch.Tensor) -> torch.Tensor:
            return self._slope(step * STAGES + stage, values, given, rotary, masks)

        first = slope(0, state)
        second = slope(1, state + size * first / 3)
        third = slope(2, state + size * (second - first / 3))
        fourth = slope(3, state + size * (first - second + third))
        return (state + size * (first + 3 * (second + third) + fourth) / 8,)

    def _masks(self, positions: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
        """Return for each layer which frames see which: bool, (rows, 1, frames, frames)."""
        blocks = positions // int(self._model.block_size)
        distance = blocks[None, :] - blocks[:, None]
        is_there = positions < ends[:, None]
        # What stands behind a window's end sees itself: softmax of nothing would be no number.
        may_see = is_there[:, None, :] | ~is_there[:, :, None]
        reaches = [(int(layer.look_backward_block), int(layer.look_ahead_block)) for layer in self._layers]
        made = {
            (back, ahead): (may_see & (distance >= -back) & (distance <= ahead))[:, None]
            for back, ahead in sorted(set(reaches))
        }
        return [made[reach] for reach in reaches]

    def _slope(
        self,
        moment: torch.Tensor,
        state: torch.Tensor,
        given: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return where the state moves at one of the moments, (1,)."""
        import torch

        project = self._model.input_embed.proj.weight[:, : self.bands]
        hidden = torch.nn.functional.linear(state, project).repeat(2, 1, 1) + given
        modulations = self._modulations[moment][0]
        for layer, mask, modulation in zip(self._layers, masks, modulations.unbind(), strict=True):
            shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.unbind()
            normed = layer.attn_norm.norm(hidden) * (1 + scale) + shift
            hidden = hidden + gate * layer.attn(normed, position_embeddings=rotary, attention_mask=mask)
            normed = layer.ff_norm(hidden) * (1 + ff_scale) + ff_shift
            hidden = hidden + ff_gate * layer.ff(normed)
        scale, shift = self._last_modulation[moment][0].unbind()
        guided, free = self._model.proj_out(self._model.norm_out.norm(hidden) * (1 + scale) + shift).chunk(2)
        return guided + GUIDANCE * (guided - free)


def _modulation(norm: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Return by what a norm is modulated at each moment, (moments, vectors, width)."""
    return norm.linear(norm.silu(embedded)).unflatten(1, (-1, norm.norm.normalized_shape[0]))


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 … and `most`."""
    return [*(2**i for i in range((most - 1).bit_length())), most]


def fitting(shapes: Any, num_windows: int, num_frames: int) -> tuple[int, int]:
    """Return the smallest of shapes (windows, frames) that holds so many; just these if none does."""
    found = [shape for shape in shapes if shape[0] >= num_windows and shape[1] >= num_frames]
    return min(found, key=lambda shape: (shape[0] * shape[1], shape), default=(num_windows, num_frames))
