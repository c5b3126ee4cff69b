"""A function of tensors that a GPU replays as one graph, instead of being told each of its thousands of kernels."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

NUM_WARM_UPS = 3
"""Calls before a recording, in which libraries choose their kernels and take their memory."""


class Recorded:
    """Calls a function; after `record` on CUDA, replays the kernels of one call instead.

    What the function keeps besides its arguments must stay where it is in memory, and nothing in it may wait for the
    device.

    Args:
        function: from tensors to a tuple of tensors.
    """

    def __init__(self, function: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: tuple[torch.Tensor, ...] = ()

    def record(self, *inputs: torch.Tensor) -> None:
        """Record what it does with arguments of these shapes; on a CPU nothing happens.

        Args:
            inputs: with which it changes nothing that it keeps.
        """
        import torch

        if inputs[0].device.type != "cuda":
            return
        self._inputs = tuple(value.clone() for value in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self._function(*self._inputs)
        self._graph = graph

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the function does; once recorded, in the same memory each time."""
        if self._graph is None:
            return self._function(*inputs)
        for held, new in zip(self._inputs, inputs, strict=True):
            held.copy_(new)
        self._graph.replay()
        return self._outputs


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Turn what goes wrong while something is recorded into advice.

    Raises:
        StartFailed: a RuntimeError came.
    """
    try:
        yield
    except RuntimeError as error:
        raise StartFailed(
            f"enforce_eager: a CUDA graph of the model can't be made, true is needed: {error}",
            field="enforce_eager",
        ) from error
