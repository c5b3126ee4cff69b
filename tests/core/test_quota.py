import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.core.quota import Quota, TokenBucket


def test_burst_passes_at_once_then_the_rate_holds():
    bucket = TokenBucket(rate_hz=2.0, burst=3, now=10.0)
    for _ in range(3):
        assert bucket.wait_s(10.0) == 0.0
        bucket.take(10.0)

    assert bucket.wait_s(10.0) == pytest.approx(0.5)
    assert bucket.wait_s(10.25) == pytest.approx(0.25)
    assert bucket.wait_s(10.5) == 0.0


def test_idle_bucket_holds_no_more_than_its_burst():
    bucket = TokenBucket(rate_hz=1.0, burst=2, now=0.0)
    for _ in range(2):
        bucket.take(1000.0)

    assert bucket.wait_s(1000.0) == pytest.approx(1.0)


def test_clock_that_stands_or_steps_back_gives_nothing():
    bucket = TokenBucket(rate_hz=1.0, burst=1, now=5.0)
    bucket.take(5.0)

    assert bucket.wait_s(4.0) == pytest.approx(1.0)
    assert bucket.wait_s(5.5) == pytest.approx(0.5)


@given(
    rate_hz=st.floats(0.01, 100.0),
    burst=st.integers(1, 20),
    pauses=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=100),
)
def test_any_stretch_lets_through_at_most_burst_and_rate(rate_hz, burst, pauses):
    """Whoever sends whenever a token is there gets, from any moment on, the burst and the rate times the time."""
    bucket, now = TokenBucket(rate_hz, burst, 0.0), 0.0
    taken = []
    for pause in pauses:
        now += pause
        while bucket.wait_s(now) == 0.0:
            bucket.take(now)
            taken.append(now)

    for i, first in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate_hz * (taken[j] - first) + 1e-6


@given(rate_hz=st.floats(0.01, 100.0), burst=st.integers(1, 20), times=st.integers(1, 50))
def test_who_waits_as_told_gets_in(rate_hz, burst, times):
    bucket, now = TokenBucket(rate_hz, burst, 0.0), 0.0
    for _ in range(times):
        now += bucket.wait_s(now) + 1e-9
        assert bucket.wait_s(now) <= 1e-6
        bucket.take(now)


@pytest.mark.parametrize(("per_minute", "burst", "at_once"), [(600, None, 60), (3, None, 1), (60, 20, 20)])
def test_default_burst_is_six_seconds_worth(per_minute, burst, at_once):
    bucket = Quota(requests_per_minute=per_minute, burst=burst).bucket(0.0)
    assert bucket is not None
    for _ in range(at_once):
        assert bucket.wait_s(0.0) == 0.0
        bucket.take(0.0)

    assert bucket.wait_s(0.0) == pytest.approx(60 / per_minute)


def test_no_rate_means_no_bucket():
    assert Quota().bucket(0.0) is None
