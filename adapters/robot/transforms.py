"""Observations from a client's form to a policy's, and actions back: checked, resized, normalised, renamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from adapters.robot.policy import Previous
from adapters.robot.safety import check_finite
from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from adapters.robot.options import ImageKey, RobotOptions, VectorKey

Array = "npt.NDArray[Any]"

SMALL = 1e-6
"""Keeps a dimension that never changes from being divided by zero (openpi's normalisation)."""

MAX_PIXELS = 64 * 1024 * 1024


class Scale(msgspec.Struct, frozen=True, eq=False):
    """``normal = (value - offset) / factor``, by dimension."""

    offset: npt.NDArray[np.float32]
    factor: npt.NDArray[np.float32]

    def normalise(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the policy's form of a robot's value; dimensions beyond the statistics stay."""
        count = min(value.shape[-1], len(self.offset))
        result = value.astype(np.float32)
        result[..., :count] = (value[..., :count] - self.offset[:count]) / self.factor[:count]
        return result

    def restore(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a robot's form of the policy's value."""
        count = min(value.shape[-1], len(self.offset))
        result = value.astype(np.float32)
        result[..., :count] = value[..., :count] * self.factor[:count] + self.offset[:count]
        return result


class _Statistics(msgspec.Struct, frozen=True):
    mean: list[float] = []
    std: list[float] = []
    q01: list[float] = []
    q99: list[float] = []

    def scale(self, normalisation: str) -> Scale:
        if normalisation == "mean_std":
            mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
            if not len(mean) or mean.shape != std.shape:
                raise ValueError("it has no 'mean' and 'std' of one length")
            return Scale(mean, std + np.float32(SMALL))
        low, high = np.asarray(self.q01, np.float32), np.asarray(self.q99, np.float32)
        if not len(low) or low.shape != high.shape:
            raise ValueError("it has no 'q01' and 'q99' of one length")
        half = (high - low + SMALL) / 2  # to [-1, 1]
        return Scale((low + half).astype(np.float32), half.astype(np.float32))


class _File(msgspec.Struct, frozen=True):
    norm_stats: dict[str, _Statistics]


def scales_of(options: RobotOptions) -> dict[str, Scale]:
    """Read the statistics that the options name.

    Raises:
        StartFailed: the file or a name in it is not there, or is no statistics.
    """
    names = {key.statistics for key in options.states.values()} | {options.action_statistics}
    names.discard("")
    if not names:
        return {}
    try:
        raw = Path(options.statistics).read_bytes()
        try:
            found = msgspec.json.decode(raw, type=_File).norm_stats
        except msgspec.ValidationError:
            found = msgspec.json.decode(raw, type=dict[str, _Statistics])
    except (OSError, msgspec.MsgspecError) as error:
        raise StartFailed(f"statistics: {options.statistics} can't be read: {error}") from error
    scales: dict[str, Scale] = {}
    for name in sorted(names):
        if name not in found:
            known = ", ".join(sorted(found))
            raise StartFailed(f"statistics: {options.statistics} has no '{name}' (it has: {known})")
        try:
            scales[name] = found[name].scale(options.normalisation)
        except ValueError as error:
            raise StartFailed(f"statistics: '{name}' in {options.statistics}: {error}") from error
    return scales


class Transforms:
    """What one stage does to observations and actions.

    Raises:
        StartFailed: the statistics can't be read.
    """

    def __init__(self, options: RobotOptions) -> None:
        self._options = options
        self._scales = scales_of(options)

    def observation(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return an observation as the policy wants it.

        Raises:
            BadInput: names the key, what came and what is allowed.
        """
        options = self._options
        check_finite({key: value for key, value in values.items() if key not in options.images})
        result = {
            key: value for key, value in values.items() if key not in options.images and key not in options.states
        }
        for key, wanted in options.images.items():
            if _is_there(values, key, is_required=wanted.is_required):
                result[wanted.to or key] = image(key, values[key], wanted)
        for key, wanted in options.states.items():
            if _is_there(values, key, is_required=wanted.is_required):
                result[wanted.to or key] = vector(key, values[key], wanted, self._scales.get(wanted.statistics))
        return result

    def prompt(self, values: dict[str, Any]) -> str | None:
        """Take the instruction out of an observation.

        Raises:
            BadInput: it is no text, or missing where one is needed.
        """
        options = self._options
        prompt = values.pop(options.prompt_key, None)
        if prompt is None:
            prompt = options.default_prompt
        if prompt is not None and not isinstance(prompt, str):
            raise BadInput(
                f"{options.prompt_key}: a {type(prompt).__name__} came (allowed: text)", field=options.prompt_key
            )
        if prompt is None and options.is_prompt_required:
            raise BadInput(f"{options.prompt_key}: nothing came (allowed: text)", field=options.prompt_key)
        return None if prompt is None else str(prompt)

    def previous(self, previous: Previous | None) -> Previous | None:
        """Return what is left of a chunk in the policy's units."""
        if previous is None or not self._options.action_statistics:
            return previous
        return Previous(self._scales[self._options.action_statistics].normalise(previous.actions), previous.delay_steps)

    def actions(self, actions: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Return a policy's answer in the robot's units, as wide and as long as it wants; floats as float32."""
        options = self._options
        result = {name: np.asarray(array) for name, array in actions.items()}
        if "actions" in result and result["actions"].ndim == 2:
            chunk = result["actions"]
            if options.action_statistics:
                chunk = self._scales[options.action_statistics].restore(chunk)
            result["actions"] = chunk[:, : options.action_dim]
        if options.n_action_steps is not None:
            result = {name: array[: options.n_action_steps] if array.ndim else array for name, array in result.items()}
        with np.errstate(over="ignore"):  # what is infinite then is not sent
            return {
                name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in result.items()
            }


def _is_there(values: Mapping[str, Any], key: str, *, is_required: bool) -> bool:
    if key in values:
        return True
    if is_required:
        came = ", ".join(sorted(values)[:20]) or "nothing"
        raise BadInput(f"{key}: it is missing (came: {came})", field=key)
    return False


def image(key: str, value: Any, wanted: ImageKey) -> npt.NDArray[Any]:
    """Return a picture as the policy wants it.

    Args:
        key: the client's, for errors.
        value: (height, width, 3), uint8 or float in [0, 1].
        wanted: size, layout and type.

    Raises:
        BadInput: another shape or type, or floats out of range.
    """
    if not isinstance(value, np.ndarray) or value.ndim != 3 or value.shape[2] != 3 or not value.size:
        came = f"shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise BadInput(f"{key}: {came} came (allowed: a picture of shape (height, width, 3))", field=key)
    if value.shape[0] * value.shape[1] > MAX_PIXELS:
        raise BadInput(f"{key}: {value.shape[0]} x {value.shape[1]} pixels came (allowed: {MAX_PIXELS})", field=key)
    if value.dtype.kind == "f":
        # Not `any(value < 0)`, which NaN passes.
        if not (value >= 0).all() or not (value <= 1).all():
            raise BadInput(f"{key}: floats out of range came (allowed: uint8, or floats in [0, 1])", field=key)
        value = np.rint(value * 255).astype(np.uint8)
    if value.dtype != np.uint8:
        raise BadInput(f"{key}: type {value.dtype} came (allowed: uint8, or floats in [0, 1])", field=key)
    if wanted.size is not None and value.shape[:2] != wanted.size:
        value = resize_with_padding(value, *wanted.size)
    if wanted.layout == "chw":
        value = np.ascontiguousarray(value.transpose(2, 0, 1))
    return value.astype(np.float32) / np.float32(255) if wanted.dtype == "float32" else value


def resize_with_padding(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return (height, width, 3): the picture as large as it fits, bilinear, in the middle of black."""
    from PIL import Image

    old_height, old_width = pixels.shape[:2]
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = max(1, int(old_height / ratio)), max(1, int(old_width / ratio))
    scaled = Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BILINEAR)
    result = np.zeros((height, width, 3), np.uint8)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    result[top : top + new_height, left : left + new_width] = np.asarray(scaled)
    return result


def vector(key: str, value: Any, wanted: VectorKey, scale: Scale | None) -> npt.NDArray[np.float32]:
    """Return numbers as the policy wants them: (dim,) or (pad_to,) float32.

    Raises:
        BadInput: no numbers, more dimensions, or another length.
    """
    try:
        numbers = np.asarray(value)
    except ValueError:
        numbers = np.zeros(0, object)  # lists of different lengths
    allowed = f"a vector of {wanted.dim if wanted.dim is not None else 'any number of'} numbers"
    if numbers.dtype.kind not in "fiu" or numbers.ndim != 1 or wanted.dim not in (None, len(numbers)):
        came = f"shape {numbers.shape} of type {numbers.dtype}"
        raise BadInput(f"{key}: {came} came (allowed: {allowed})", field=key)
    with np.errstate(over="ignore"):
        result = numbers.astype(np.float32)
        if scale is not None:
            result = scale.normalise(result)
    if not np.isfinite(result).all():
        raise BadInput(f"{key}: numbers beyond float32 came (allowed: finite numbers)", field=key)
    if wanted.pad_to is not None:
        if len(result) > wanted.pad_to:
            raise BadInput(f"{key}: {len(result)} numbers came (allowed: at most {wanted.pad_to})", field=key)
        result = np.pad(result, (0, wanted.pad_to - len(result)))
    return result
