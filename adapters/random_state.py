"""Random numbers of one request, where a library draws them from the generators of the process."""

from __future__ import annotations

import secrets
from typing import Any

MAX_SEED = 2**63 - 1


class RandomState:
    """One request's random numbers: in the context, torch's generators go on where the request's last step left them.

    Models draw from the generators of the process, which `torch.manual_seed` sets; so does this.
    """

    def __init__(self, seed: int | None, device: Any) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        self._cuda = device if device.type == "cuda" else None
        self._states: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        import torch

        if self._states is None:
            torch.manual_seed(self._seed)
            return
        torch.set_rng_state(self._states[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._states[1], self._cuda)

    def __exit__(self, *exception: object) -> None:
        import torch

        on_device = torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None
        self._states = (torch.get_rng_state(), on_device)
