"""Which whole numbers a range has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.wire.frames import Range

small = st.integers(0, 50)


@given(small, small, st.integers(1, 9), st.integers(-100, 100))
def test_nearest_is_the_nearest_of_those_it_has(first: int, length: int, step: int, value: int) -> None:
    allowed = Range(first, first + length, step)
    members = [number for number in range(-200, 200) if number in allowed]
    assert members == list(range(first, first + length + 1, step))
    nearest = allowed.nearest(value)
    assert nearest in allowed
    assert abs(nearest - value) == min(abs(each - value) for each in members)


@pytest.mark.parametrize(("allowed", "said"), [(Range(1, 9), "1 to 9"), (Range(1, 1024, 4), "1, 5, … up to 1021")])
def test_range_says_what_it_has(allowed: Range, said: str) -> None:
    assert str(allowed) == said
