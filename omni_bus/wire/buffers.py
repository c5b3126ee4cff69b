"""Blobs as NumPy arrays or torch tensors and back, without a copy.

bfloat16 and float8 are ml_dtypes' NumPy types; torch has its own. NumPy, ml_dtypes and torch are imported at the first
use, so that processes that only pass payloads on never load them, and the NumPy half never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.wire.device import DeviceBlob, LocalDeviceBlob
from omni_bus.wire.payloads import Audio, Blob, Codes, Dtype, Hidden, Image, Latents, Tensor, Tokens, Video

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def numpy_dtype(name: Dtype) -> np.dtype[Any]:
    """Return the NumPy type of a wire type; bfloat16 and float8 come from ml_dtypes."""
    import numpy as np

    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name).newbyteorder("<")


def view(payload: Tensor | Hidden | Latents | Image | Video | Codes | Tokens | Audio) -> Array:
    """Return the payload's data as a read-only array over the received bytes.

    Shapes: tensors, hidden states and latents their own; an image (height, width, channels); video (frames, height,
    width, 3); codes (frames, codebooks); tokens (n,); audio (frames, channels).
    """
    import numpy as np

    match payload:
        case Tensor() | Hidden() | Latents():
            array = np.frombuffer(payload.data.view, numpy_dtype(payload.dtype)).reshape(payload.shape)
        case Image():
            array = np.frombuffer(payload.data.view, np.uint8).reshape(payload.height, payload.width, payload.channels)
        case Video():
            array = np.frombuffer(payload.data.view, np.uint8)
            array = array.reshape(payload.num_frames, payload.height, payload.width, 3)
        case Codes():
            array = np.frombuffer(payload.data.view, "<i4").reshape(payload.num_frames, payload.num_codebooks)
        case Tokens():
            array = np.frombuffer(payload.ids.view, "<i4")
        case Audio():
            kind = "<i2" if payload.format == "s16" else "<f4"
            array = np.frombuffer(payload.data.view, kind).reshape(-1, payload.channels)
    array.flags.writeable = False
    return array


def blob(array: Array) -> Blob:
    """Return an array's bytes: a view where it is contiguous and little-endian, else a copy."""
    import numpy as np

    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return Blob(array.reshape(-1).view(np.uint8).data)


def tensor(array: Array) -> Tensor:
    """Return an array as a payload.

    Raises:
        ValueError: the element type has no name on the wire.
    """
    from omni_bus.wire.payloads import DTYPE_BYTES

    name = array.dtype.name
    if name not in DTYPE_BYTES:
        raise ValueError(f"element type {name} can't be sent (allowed: {', '.join(DTYPE_BYTES)})")
    return Tensor(name, tuple(array.shape), blob(array))  # pyright: ignore[reportArgumentType] (checked above)


class _Lent:
    """Host bytes offered through NumPy's array interface, kept alive by whoever views them.

    The interface calls them writeable although they may not be: torch has no read-only tensors, and warns of a buffer
    that says so.
    """

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, data: memoryview) -> None:
        import numpy as np

        self._owner = np.frombuffer(data, np.uint8)
        interface = dict(self._owner.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def to_torch(payload: Tensor | Hidden | Latents, device: Any = None) -> Any:
    """Return the payload as a torch tensor of its shape and type.

    Without `device` nothing is copied: a tensor over the received bytes, on the GPU where they are or else on the host.
    On a GPU this returns when their producer has written them, so call it on an engine's thread.

    The tensor must not be written to: torch can't forbid that, and others may read the same memory. Clone it to own it.
    The bytes stay until the last tensor that views them is gone; on a GPU they must have been used on the stream that
    is current now, or on one that it waits for before that moment (`torch.cuda.Stream.wait_stream`).

    Host bytes that are not aligned to the element are copied.

    Args:
        payload: a dense array.
        device: where it shall be; copied if it is elsewhere.

    Raises:
        ValueError: this torch has no such element type.
        BadFrame: device memory of a peer that can't be reached, or that died before it was written.
    """
    import torch

    from omni_bus.wire.payloads import DTYPE_BYTES

    dtype = getattr(torch, payload.dtype, None)
    if dtype is None:
        raise ValueError(f"torch {torch.__version__} has no element type {payload.dtype}")
    if not len(payload.data):
        return torch.empty(payload.shape, dtype=dtype, device=device)
    if isinstance(payload.data, DeviceBlob):
        flat = payload.data.tensor()
    else:
        import numpy as np

        flat = torch.as_tensor(np.asarray(_Lent(payload.data.view)))
        if flat.data_ptr() % DTYPE_BYTES[payload.dtype]:
            flat = flat.clone()
    whole = flat.view(dtype).view(payload.shape)
    return whole if device is None else whole.to(device)


def from_torch(tensor: Any) -> Tensor:
    """Return a torch tensor as a payload: CUDA memory as a `DeviceBlob`, host memory as a view, others copied to host.

    A tensor that isn't contiguous is made so on its device first. Nothing may write to it once the payload was sent.

    Raises:
        ValueError: sparse or quantised, or an element type that has no name on the wire.
    """
    import torch

    from omni_bus.wire.payloads import DTYPE_BYTES

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"element type {name} can't be sent (allowed: {', '.join(DTYPE_BYTES)})")
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} can't be sent (allowed: torch.strided)")
    shape = tuple(tensor.shape)
    flat = tensor.detach().resolve_neg().contiguous().view(-1)
    if not flat.numel():
        return Tensor(name, shape, Blob(b""))  # pyright: ignore[reportArgumentType] (checked above)
    flat = flat.view(torch.uint8)
    if flat.is_cuda:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        return Tensor(name, shape, LocalDeviceBlob(flat, ready))  # pyright: ignore[reportArgumentType]
    return Tensor(name, shape, Blob(flat.cpu().numpy().data))  # pyright: ignore[reportArgumentType]
