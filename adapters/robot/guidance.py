"""Real-time chunking for policies that denoise: a new chunk is drawn to what the robot still executes of the last one.

From Black et al. 2025 (https://arxiv.org/abs/2506.07339), equations 2 to 5. The paper's time goes from 0 at the noise
to 1 at the actions; here, as in openpi and transformers, from 1 to 0, and velocities point from actions to noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from adapters.robot.chunks import soft_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from adapters.robot.policy import Previous

MAX_WEIGHT = 5.0
"""Where the paper's weight would grow without bound, at the noise."""


class Guidance:
    """What the robots of a batch still have, and how much each row of their new chunks is bound to it.

    Args:
        previous: of each robot, None for one whose last chunk is over.
        shape: (robots, rows of a chunk, the model's columns).
        device: where it is computed.
    """

    def __init__(self, previous: Sequence[Previous | None], shape: Sequence[int], device: Any) -> None:
        import torch

        wanted, weights = (np.zeros(tuple(shape), np.float32) for _ in range(2))
        for i, each in enumerate(previous):
            if each is None:
                continue
            left = np.asarray(each.actions)[: shape[1], : shape[2]]
            rows, columns = left.shape
            wanted[i, :rows, :columns] = left
            weights[i, :, :columns] = soft_mask(shape[1], each.delay_steps, rows)[:, None]
        self._wanted = torch.from_numpy(wanted).to(device)
        self._weights = torch.from_numpy(weights).to(device)

    def velocity(
        self, noisy: torch.Tensor, at: torch.Tensor, model: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the model's velocity at `noisy`, drawn to what is wanted.

        Args:
            noisy: float32, (robots, rows, columns).
            at: float32, (robots,), each robot's time.
            model: the velocity at noisy actions; differentiable.
        """
        import torch

        time = at[:, None, None]
        with torch.enable_grad():
            given = noisy.detach().requires_grad_()
            velocity = model(given)
            clean = given - time * velocity  # where the whole way at this velocity leads
            error = (self._wanted - clean.detach()) * self._weights
            (pull,) = torch.autograd.grad(clean, given, error)
        # (1 - tau) / (tau * r^2) with tau = 1 - time and r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2)
        weight = ((1 - time) ** 2 + time**2) / ((1 - time) * time)
        return velocity.detach() - weight.nan_to_num(posinf=MAX_WEIGHT).clamp(max=MAX_WEIGHT) * pull
