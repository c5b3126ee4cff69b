from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from omni_bus.wire.buffers import blob, from_torch, numpy_dtype, tensor, to_torch, view
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import Chunk
from omni_bus.wire.payloads import DTYPE_BYTES, Audio, Blob, Codes, Hidden, Image, Latents, Tensor, Tokens, Video, check

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


TORCH_NAMES = sorted(name for name in DTYPE_BYTES if hasattr(torch, name))


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_torch_type_survives_the_wire(name: str) -> None:
    array = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name))

    received = to_torch(over_the_wire(from_torch(array)))

    assert received.dtype == array.dtype
    assert received.shape == (2, 3, 4)
    assert torch.equal(received.view(torch.uint8), array.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1, 1, 1)], ids=str)
def test_scalar_and_empty_torch_tensors_survive(shape: tuple[int, ...]) -> None:
    received = to_torch(over_the_wire(from_torch(torch.ones(shape, dtype=torch.bfloat16))))

    assert received.shape == shape
    assert received.dtype == torch.bfloat16


def test_torch_tensors_share_memory_with_their_payload() -> None:
    source = torch.arange(6, dtype=torch.int32)

    received = to_torch(from_torch(source))

    assert received.data_ptr() == source.data_ptr()


def test_torch_view_keeps_received_bytes_alive() -> None:
    part = bytearray(range(64))
    received = to_torch(Tensor("uint8", (64,), Blob(part)))[3:5]

    with pytest.raises(BufferError):  # as long as anybody views it
        part.append(0)
    assert received.tolist() == [3, 4]
    del received
    part.append(0)


def test_unaligned_bytes_become_an_aligned_tensor() -> None:
    part = memoryview(bytes(1) + np.arange(4, dtype="<f8").tobytes())[1:]

    received = to_torch(Tensor("float64", (4,), Blob(part)))

    assert received.data_ptr() % 8 == 0
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_strided_torch_tensor_is_sent_in_row_order() -> None:
    received = to_torch(over_the_wire(from_torch(torch.arange(6).reshape(2, 3).T)))

    assert received.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(torch.zeros(2, dtype=torch.complex64), "complex64"), (torch.zeros(2, 2).to_sparse(), "torch.sparse_coo")],
)
def test_torch_tensor_without_a_form_on_the_wire_is_refused(wrong: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} can't be sent"):
        from_torch(wrong)
