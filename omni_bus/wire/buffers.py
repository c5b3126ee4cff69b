"""Blobs as NumPy arrays and back, without a copy and without torch.

bfloat16 and float8 are ml_dtypes' NumPy types. NumPy and ml_dtypes are imported at the first use, so that processes that only
pass payloads on never load them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
