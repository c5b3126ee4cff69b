"""What a policy takes out of an observation, or refuses by its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from adapters.robot.policy import Array, Observation


def read_vector(observation: Observation, key: str, max_dim: int, *, min_dim: int = 1) -> Array:
    """Return finite numbers: float32, (dim,), `dim` from `min_dim` to `max_dim`.

    Raises:
        BadInput: names the key, what came and what is allowed.
    """
    given = observation.values.get(key)
    dims = f"{max_dim}" if min_dim == max_dim else f"{min_dim} to {max_dim}"
    allowed = f"{dims} finite numbers"
    vector = _numbers_of(given)
    if vector is None or vector.ndim != 1 or not min_dim <= len(vector) <= max_dim:
        raise BadInput(f"{key}: {_described(given)} came (allowed: {allowed})", field=key)
    broken = np.flatnonzero(~np.isfinite(vector))
    if broken.size:
        raise BadInput(f"{key}[{broken[0]}]: {vector[broken[0]]} came (allowed: {allowed})", field=key)
    return vector


def read_picture(observation: Observation, key: str, height: int, width: int) -> Array:
    """Return a picture: uint8, (height, width, 3).

    Raises:
        BadInput: names the key, what came and what is allowed.
    """
    given = observation.values.get(key)
    if not isinstance(given, np.ndarray) or given.dtype != np.uint8 or given.shape != (height, width, 3):
        allowed = f"RGB, uint8 of shape ({height}, {width}, 3)"
        raise BadInput(f"{key}: {_described(given)} came (allowed: {allowed})", field=key)
    return given


def _numbers_of(given: Any) -> Array | None:
    try:
        with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, and is refused as that
            array = np.asarray(given)
            return array.astype(np.float32) if array.dtype.kind in "fiu" else None
    except ValueError:  # lists of different lengths
        return None


def _described(given: Any) -> str:
    match given:
        case None:
            return "nothing"
        case np.ndarray():
            return f"{given.dtype} of shape {given.shape}"
        case list():
            return f"a list of {len(given)}"
        case _:
            return f"a {type(given).__name__}"
