"""Bytes in a GPU's memory as a `Blob`.

Every consumer that asks for host memory gets it (`view` copies once, when first asked); one that goes through
`omni_bus.wire.buffers.to_torch` gets the tensor where it is. Nothing here imports torch: only who holds a tensor
already makes such a blob.
"""

from __future__ import annotations

from typing import Any

from omni_bus.wire.payloads import Blob


class DeviceBlob(Blob):
    """Raw bytes in device memory.

    The memory must not be modified once the blob was sent, as with every blob.

    Args:
        num_bytes: its length.
        device_index: the CUDA device, by its number in this process.
    """

    __slots__ = ("_host", "_num_bytes", "device_index")

    def __init__(self, num_bytes: int, device_index: int) -> None:
        # `view` is a property here, so the parent's constructor, which would set it, does not run.
        self._num_bytes = num_bytes
        self.device_index = device_index
        self._host: memoryview | None = None

    def __len__(self) -> int:
        return self._num_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._num_bytes} bytes)"

    def tensor(self) -> Any:
        """Return the bytes as a one-dimensional uint8 torch tensor on their device.

        Whatever the current stream does with it comes after whatever produced it: a tensor of this process makes the
        stream wait, one of a peer makes the caller wait until the peer's device has written it.

        Raises:
            BadFrame: they came from a peer and aren't there, or will never be written because the peer is gone.
        """
        raise NotImplementedError

    @property
    def view(self) -> memoryview:  # pyright: ignore[reportIncompatibleVariableOverride] (a slot there, computed here)
        """The bytes in host memory: copied at the first use, which waits for the device."""
        if self._host is None:
            self._host = memoryview(self.tensor().cpu().numpy()).toreadonly()
        return self._host


class LocalDeviceBlob(DeviceBlob):
    """A tensor of this process.

    Args:
        tensor: contiguous, one-dimensional, uint8, on a device.
        ready: a `torch.cuda.Event` recorded on the stream that produces it.
    """

    __slots__ = ("_tensor", "ready")

    def __init__(self, tensor: Any, ready: Any) -> None:
        super().__init__(tensor.numel(), tensor.device.index)
        self._tensor = tensor
        self.ready = ready

    def tensor(self) -> Any:
        """Return the tensor; the current stream of its device waits for `ready`."""
        import torch

        stream = torch.cuda.current_stream(self._tensor.device)
        stream.wait_event(self.ready)
        # So that the allocator doesn't hand the memory out again before this stream is done with it.
        self._tensor.record_stream(stream)
        return self._tensor
