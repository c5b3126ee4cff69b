"""What payloads and frames are made of besides raw bytes: JSON-like values, and shapes."""

from __future__ import annotations

import math
from typing import Any, cast

MAX_DIMENSIONS = 16
MAX_EXTENT_BYTES = 1 << 62
"""What the sides of a shape other than zero may come to: an empty array of a huge shape has no view otherwise."""
MAX_NESTING = 64
"""Lists and maps inside each other in a JSON-like value; leaves room on the stack for whoever encodes it again."""


def check_extent(shape: tuple[int, ...]) -> None:
    """Refuse a shape that no array has.

    Raises:
        ValueError: names it.
    """
    if len(shape) > MAX_DIMENSIONS or any(side < 0 for side in shape):
        raise ValueError(f"shape {shape[:MAX_DIMENSIONS]} has a negative side or more than {MAX_DIMENSIONS} dimensions")
    if math.prod(side for side in shape if side) > MAX_EXTENT_BYTES // 8:
        raise ValueError(f"shape {shape} is larger than any array")


def check_plain(value: Any, depth: int = 0) -> None:
    """Refuse what JSON has no form for (NaN and infinities apart): extensions, bytes, dates, keys that aren't text.

    Raises:
        ValueError: names the type, or the depth.
    """
    if value is None or isinstance(value, (str, bool, int, float)):
        return
    if depth >= MAX_NESTING:
        raise ValueError(f"a value is nested more than {MAX_NESTING} deep")
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                kind = type(key).__name__
                raise ValueError(f"a map has a key of type {kind}, only text is allowed")  # noqa: TRY004 (bad data)
            check_plain(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            check_plain(item, depth + 1)
    else:
        kind = type(value).__name__
        allowed = "maps, lists, text, numbers, booleans and null"
        raise ValueError(f"a {kind} where only {allowed} are allowed")  # noqa: TRY004 (bad data)
