"""Tensors of torch as payloads, and back; their bytes are never converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.wire.payloads import Blob, Hidden, Tensor

if TYPE_CHECKING:
    import torch

    from omni_bus.engine import Allocate


def as_hidden(rows: torch.Tensor, first_position: int, allocate: Allocate) -> Hidden:
    """Return hidden states, (tokens, width), of consecutive positions."""
    return Hidden(first_position, _dtype(rows), tuple(rows.shape), _blob(rows, allocate))


def as_tensor(values: torch.Tensor, allocate: Allocate) -> Tensor:
    """Return any tensor."""
    return Tensor(_dtype(values), tuple(values.shape), _blob(values, allocate))


def to_torch(payload: Hidden | Tensor, device: Any) -> torch.Tensor:
    """Return a payload's values, of its own type and shape, in memory of their own."""
    import numpy as np
    import torch

    data = np.frombuffer(payload.data.view, np.uint8).copy()
    return torch.from_numpy(data).view(getattr(torch, payload.dtype)).reshape(payload.shape).to(device)


def _dtype(values: torch.Tensor) -> Any:
    return str(values.dtype).removeprefix("torch.")


def _blob(values: torch.Tensor, allocate: Allocate) -> Blob:
    import numpy as np
    import torch

    values = values.detach().contiguous().cpu()
    blob = allocate(values.nbytes)
    if values.nbytes:
        np.frombuffer(blob.view, np.uint8)[:] = values.reshape(-1).view(torch.uint8).numpy()
    return blob
