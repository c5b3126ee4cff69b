"""Figures of the first three tests are those of the contract on bundled tokens."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.record import StageTiming
from omni_bus.bench.timings import token_times


def test_one_chunk_with_four_tokens_has_the_servers_gaps() -> None:
    found = token_times([1.0], 4, StageTiming(4, (0.010, 0.011, 0.012), 0.011))

    assert found is not None
    assert found.itls_s == (0.010, 0.011, 0.012)
    assert found.span_s == pytest.approx(0.033)
    assert found.source == "server"


def test_gaps_that_the_client_saw_win() -> None:
    found = token_times([1.0, 1.010], 2, StageTiming(2, (1.0,), 1.0))

    assert found is not None
    assert found.itls_s == (pytest.approx(0.010),)
    assert found.source == "client"


@pytest.mark.parametrize(
    "timing",
    [
        StageTiming(5, (0.010, 0.011, 0.012), 0.020),  # not as many tokens
        StageTiming(4, (0.010, 0.011), 0.020),  # not as many gaps
        StageTiming(4, (0.010, -0.011, 0.012), 0.020),  # time that went back
        StageTiming(4, (0.0, 0.0, 0.0), 0.020),  # gaps that say nothing
        StageTiming(4, (), 0.020),
    ],
)
def test_gaps_that_do_not_fit_give_way_to_their_mean(timing: StageTiming) -> None:
    found = token_times([1.0], 4, timing)

    assert found is not None
    assert (found.itls_s, found.source) == ((), "server")
    assert found.span_s == pytest.approx(0.060)


@pytest.mark.parametrize("timing", [None, StageTiming(4), StageTiming(4, (), 0.0), StageTiming(3, (0.01, 0.01), -1.0)])
def test_what_nobody_tells_is_unmeasured(timing: StageTiming | None) -> None:
    assert token_times([1.0], 4, timing) is None
    assert token_times([1.0, 1.0], 4, timing) is None  # two chunks in one read


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_one_token_has_no_time_to_another(num_tokens: int) -> None:
    assert token_times([1.0], num_tokens, StageTiming(1, (), 0.01)) is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50).map(sorted), st.integers(2, 1000))
def test_gaps_add_up_to_the_span(arrivals_at: list[float], num_tokens: int) -> None:
    found = token_times(arrivals_at, num_tokens, None)

    if arrivals_at[0] == arrivals_at[-1]:
        assert found is None
    else:
        assert found is not None
        assert len(found.itls_s) == len(list(itertools.pairwise(arrivals_at)))
        assert min(found.itls_s) >= 0
        assert math.isclose(math.fsum(found.itls_s), found.span_s, rel_tol=1e-6, abs_tol=1e-6)
