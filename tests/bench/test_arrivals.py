from __future__ import annotations

import itertools
import math
import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.arrivals import offsets

rates = st.floats(0.01, 1e5)
bursts = st.floats(0.05, 100) | st.just(math.inf)


@given(st.integers(1, 200), rates, bursts, st.integers(0, 2**32))
def test_first_is_at_once_and_none_goes_back(count: int, rate: float, burstiness: float, seed: int) -> None:
    found = offsets(count, rate, burstiness, random.Random(seed))

    assert len(found) == count
    assert found[0] == 0.0
    assert all(earlier <= later for earlier, later in itertools.pairwise(found))
    assert found == offsets(count, rate, burstiness, random.Random(seed))


@given(st.integers(2, 500), rates)
def test_infinite_burstiness_is_a_constant_rate(count: int, rate: float) -> None:
    found = offsets(count, rate, math.inf, random.Random(0))

    assert all(math.isclose(at, number / rate, rel_tol=1e-9) for number, at in enumerate(found))


@given(st.integers(1, 50), bursts)
def test_infinite_rate_sends_all_at_once(count: int, burstiness: float) -> None:
    assert offsets(count, math.inf, burstiness, random.Random(0)) == [0.0] * count


@given(rates, st.sampled_from([0.5, 1.0, 4.0]), st.integers(0, 50))
def test_rate_and_burstiness_are_those_asked_for(rate: float, burstiness: float, seed: int) -> None:
    """Gaps of a gamma distribution: mean 1/rate, variance mean²/burstiness."""
    found = offsets(5_001, rate, burstiness, random.Random(seed))
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]

    mean = statistics.fmean(gaps)
    # Seven standard errors of a mean of 5,000, and a wide band for the variance.
    assert math.isclose(mean * rate, 1.0, abs_tol=7 / math.sqrt(burstiness * 5_000))
    assert math.isclose(statistics.pvariance(gaps) / mean**2 * burstiness, 1.0, rel_tol=0.4)
