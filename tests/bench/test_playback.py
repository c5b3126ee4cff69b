from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.playback import play


def test_sound_that_comes_in_time_has_no_gap() -> None:
    found = play([(5.0, 1.0), (5.5, 1.0), (7.0, 0.5)])

    assert (found.duration_s, found.underrun_s, found.num_gaps, found.longest_gap_s) == (2.5, 0.0, 0, 0.0)
    assert found.is_continuous


def test_each_wait_moves_what_follows() -> None:
    """One second of sound each: the second piece is 0.5 s late, the third fits in, the fourth is 0.25 s late more."""
    found = play([(0.0, 1.0), (1.5, 1.0), (2.5, 1.0), (3.75, 1.0)])

    assert (found.duration_s, found.underrun_s, found.num_gaps, found.longest_gap_s) == (4.0, 0.75, 2, 0.5)
    assert not found.is_continuous


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), min_size=1, max_size=30))
def test_player_that_waits_is_silent_for_the_worst_deficit(pieces: list[tuple[float, float]]) -> None:
    ats = sorted(at for at, _ in pieces)
    sounds = [(at, length) for at, (_, length) in zip(ats, pieces, strict=True)]
    found = play(sounds)

    silence = longest = 0.0
    free_at = sounds[0][0]
    for at, length in sounds:
        silence += max(0.0, at - free_at)
        longest = max(longest, at - free_at)
        free_at = max(free_at, at) + length

    assert found.underrun_s == pytest.approx(silence, abs=1e-6)
    assert found.longest_gap_s == pytest.approx(longest, abs=1e-6)
    assert 0 <= found.num_gaps < len(sounds)
