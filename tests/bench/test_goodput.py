from __future__ import annotations

import pytest

from omni_bus.bench.goodput import KEYS, is_good, parse_limits
from omni_bus.bench.measures import METRICS, Measures
from omni_bus.bench.playback import play
from omni_bus.bench.timings import TokenTimes
from omni_bus.errors import BadInput


def test_keys_are_metrics_of_one_value() -> None:
    assert set(KEYS) < METRICS.keys() - {"itl"}


def test_limits_are_read_in_the_metrics_units() -> None:
    assert parse_limits(["ttft:500", "tpot:50.5", "audio_rtf:1"]) == {"ttft": 500.0, "tpot": 50.5, "audio_rtf": 1.0}
    assert parse_limits(["audio_gaps:0", "audio_longest_gap:0"]) == {"audio_gaps": 0.0, "audio_longest_gap": 0.0}
    assert parse_limits([]) == {}


@pytest.mark.parametrize(
    "word",
    [
        *("ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:inf", "ttft:nan", "audio_rtf:0", "audio_gaps:-1"),
        *("itl:5", ":5", "", "ttft:5:6"),
    ],
)
def test_malformed_limit_is_refused_with_what_is_allowed(word: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_limits(["e2el:5", word])

    assert f"--goodput {word} came (allowed: KEY:VALUE; keys ttft, tpot, e2el" in refused.value.message


def test_key_that_comes_twice_is_refused() -> None:
    with pytest.raises(BadInput, match="ttft came twice"):
        parse_limits(["ttft:5", "ttft:6"])


def test_good_requests_keep_every_limit() -> None:
    one = Measures(e2el_s=1.0, output_tokens=3, ttft_s=0.5, times=TokenTimes((0.05, 0.05), 0.1, "client"))

    assert is_good(one, {"ttft": 500.0, "tpot": 50.0, "e2el": 1000.0})
    assert not is_good(one, {"ttft": 499.0, "tpot": 50.0})
    assert not is_good(one, {"ttft": 500.0, "tpot": 49.0})


def test_what_was_not_measured_keeps_no_limit() -> None:
    bundled = Measures(e2el_s=1.0, output_tokens=3, ttft_s=0.5)
    single = Measures(e2el_s=1.0, output_tokens=1, ttft_s=0.5)

    assert not is_good(bundled, {"tpot": 1e9})
    assert is_good(single, {"tpot": 1e-9})
    assert not is_good(single, {"audio_ttfp": 1e9})


def test_no_gap_is_a_limit() -> None:
    through = Measures(e2el_s=1.0, output_tokens=0, playback=play([(0.0, 1.0), (1.0, 1.0)]))
    broken = Measures(e2el_s=1.0, output_tokens=0, playback=play([(0.0, 1.0), (1.25, 1.0)]))

    assert is_good(through, {"audio_gaps": 0.0, "audio_longest_gap": 0.0})
    assert is_good(broken, {"audio_gaps": 1.0, "audio_longest_gap": 250.0})
    assert not is_good(broken, {"audio_gaps": 0.0})
    assert not is_good(broken, {"audio_longest_gap": 249.0})
