from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omni_bus.wire.buffers import blob, numpy_dtype, tensor, view
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import Chunk
from omni_bus.wire.payloads import DTYPE_BYTES, Audio, Codes, Hidden, Image, Latents, Tensor, Tokens, Video, check

codec = Codec()


def over_the_wire(payload: Any) -> Any:
    """Encode and decode a payload, its blob as the bytes that a socket would bring."""
    frame = codec.decode([bytes(part) for part in codec.encode(Chunk("r-1", 0, 0, payload))])
    assert isinstance(frame, Chunk)
    return frame.payload


@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_element_type_survives_the_wire(name: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(numpy_dtype(name))

    received = view(over_the_wire(tensor(array)))

    assert received.dtype == array.dtype
    assert received.shape == (2, 3, 4)
    assert received.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_keep_their_values(name: str) -> None:
    values = [0.0, -0.5, 1.5, 2.0, -4.0, 16.0]
    array = np.array(values, getattr(ml_dtypes, name))

    received = view(over_the_wire(tensor(array)))

    assert received.dtype.name == name
    assert received.astype(np.float64).tolist() == values


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1, 1, 1)], ids=str)
def test_scalars_and_empty_arrays_survive(shape: tuple[int, ...]) -> None:
    received = view(over_the_wire(tensor(np.ones(shape, np.float32))))

    assert received.shape == shape
    assert received.dtype == np.float32


def test_blob_views_contiguous_memory() -> None:
    array = np.zeros(4, np.int32)
    lent = blob(array)
    array[1] = 258

    assert bytes(lent.view[4:6]) == b"\2\1"


def test_blob_copies_what_is_strided_or_big_endian() -> None:
    strided = np.arange(10, dtype=np.int16)[::2]
    swapped = np.arange(5, dtype=">i4")

    assert bytes(blob(strided).view) == strided.tobytes()
    assert bytes(blob(swapped).view) == np.arange(5, dtype="<i4").tobytes()


def test_big_endian_tensor_keeps_its_values() -> None:
    received = view(over_the_wire(tensor(np.array([1.5, -2.0], ">f8"))))

    assert received.tolist() == [1.5, -2.0]


def test_unknown_element_type_is_refused() -> None:
    with pytest.raises(ValueError, match="complex128"):
        tensor(np.zeros(2, np.complex128))


def test_view_is_read_only_and_not_a_copy() -> None:
    data = bytearray(8)
    array = view(Tokens(blob(np.frombuffer(data, np.uint8))))
    data[0] = 3

    assert array.tolist() == [3, 0]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize(
    ("payload", "shape", "dtype"),
    [
        (Tokens(blob(np.zeros(5, np.int32))), (5,), "int32"),
        (Audio(24_000, 2, "s16", blob(np.zeros((7, 2), np.int16))), (7, 2), "int16"),
        (Audio(24_000, 1, "f32", blob(np.zeros((7, 1), np.float32))), (7, 1), "float32"),
        (Audio(24_000, 1024, "f32", blob(np.zeros(0, np.float32))), (0, 1024), "float32"),
        (Image(4, 6, 3, blob(np.zeros((4, 6, 3), np.uint8))), (4, 6, 3), "uint8"),
        (Video(9, 2, 4, 6, 1, 25, blob(np.zeros((2, 4, 6, 3), np.uint8))), (2, 4, 6, 3), "uint8"),
        (Codes(3, 8, 12.5, blob(np.zeros((3, 8), np.int32))), (3, 8), "int32"),
        (Hidden(4, "bfloat16", (2, 8), blob(np.zeros((2, 8), ml_dtypes.bfloat16))), (2, 8), "bfloat16"),
        (Latents(1, 4, "float16", (1, 4, 2), blob(np.zeros((1, 4, 2), np.float16))), (1, 4, 2), "float16"),
        (Tensor("uint8", (0, 2**61 // 8), blob(np.zeros(0, np.uint8))), (0, 2**58), "uint8"),
        (Tensor("float64", (0, 2**59), blob(np.zeros(0, np.uint8))), (0, 2**59), "float64"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (tuple, str)) else str(value),
)
def test_each_payload_has_its_documented_shape(payload: Any, shape: tuple[int, ...], dtype: str) -> None:
    check(payload)

    array = view(over_the_wire(payload))

    assert array.shape == shape
    assert array.dtype.name == dtype


def test_importing_the_wire_loads_no_numpy() -> None:
    code = "import sys, omni_bus.wire.buffers, omni_bus.wire.codec; sys.exit('numpy' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
