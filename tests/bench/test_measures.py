from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.measures import METRICS, measure
from omni_bus.bench.record import Record, StageTiming


def record_of(**fields) -> Record:
    return Record(**({"index": 0, "intended_at": 10.0, "sent_at": 10.2, "ended_at": 11.0} | fields))


def test_figures_of_a_text_answer() -> None:
    """Sent at 10.2; tokens at 10.5, 10.6 and 10.9; the end at 11.0."""
    found = measure(record_of(texts=[(10.5, 3), (10.6, 3), (10.9, 3)], output_tokens=3))

    assert found.values("ttft") == (pytest.approx(0.3),)
    assert found.values("tpot") == (pytest.approx(0.2),)
    assert found.values("itl") == pytest.approx((0.1, 0.3))
    assert found.values("e2el") == (pytest.approx(0.8),)
    assert found.values("intended_ttft") == (pytest.approx(0.5),)
    assert found.values("intended_e2el") == (pytest.approx(1.0),)
    assert all(found.values(name) == () for name in METRICS if name.startswith("audio"))


def test_figures_of_a_spoken_answer() -> None:
    """One second of sound at 10.4, half a second at 11.5: 0.1 s too late, 1.3 s after sending for 1.5 s of it."""
    found = measure(record_of(sounds=[(10.4, 1.0), (11.5, 0.5)], ended_at=11.6))

    assert found.values("audio_ttfp") == (pytest.approx(0.2),)
    assert found.values("audio_rtf") == (pytest.approx(1.3 / 1.5),)
    assert found.values("audio_duration") == (1.5,)
    assert found.values("audio_underrun") == (pytest.approx(0.1),)
    assert found.values("ttft") == found.values("tpot") == found.values("itl") == ()


def test_gaps_of_a_spoken_answer() -> None:
    found = measure(Record(index=0, intended_at=0.0, sounds=[(1.0, 1.0), (2.5, 1.0), (3.75, 1.0)], ended_at=4.0))

    assert (found.values("audio_gaps"), found.values("audio_longest_gap")) == ((2.0,), (0.5,))


def test_sound_that_was_heard_has_a_real_time_factor() -> None:
    found = measure(Record(index=0, intended_at=0.0, sent_at=1.0, ended_at=2.0, texts=[(1.5, 3)], heard_s=4.0))

    assert (found.values("audio_rtf"), found.values("audio_duration")) == ((0.25,), ())


def test_bundled_tokens_have_the_servers_time() -> None:
    timing = StageTiming(4, (0.010, 0.011, 0.012), 0.011)
    found = measure(record_of(texts=[(10.5, 20)], output_tokens=4, timing=timing))

    assert found.values("ttft") == (pytest.approx(0.3),)
    assert found.values("tpot") == (pytest.approx(0.011),)
    assert found.values("itl") == (0.010, 0.011, 0.012)


def test_bundled_tokens_without_it_have_none() -> None:
    found = measure(record_of(texts=[(10.5, 20)], output_tokens=4))

    assert found.values("tpot") == found.values("itl") == ()


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=40))
def test_first_token_and_the_rest_make_the_text_latency(gaps: list[float]) -> None:
    """TTFT + TPOT × (n − 1) is when the last token came; with one token a chunk TPOT is the mean ITL."""
    at, texts = 0.0, []
    for gap in gaps:
        at += gap
        texts.append((at, 1))
    found = measure(Record(index=0, intended_at=0.0, ended_at=at, texts=texts, output_tokens=len(texts)))

    [ttft], [tpot] = found.values("ttft"), found.values("tpot")
    assert ttft + tpot * (len(texts) - 1) == pytest.approx(at)
    assert tpot == pytest.approx(sum(found.values("itl")) / (len(texts) - 1))
