from __future__ import annotations

import textwrap

import msgspec
import pytest

from omni_bus.bench.costs import ClientCost, ProcessCost, ServerCost
from omni_bus.bench.occupancy import Occupancy
from omni_bus.bench.record import Record
from omni_bus.bench.report import as_json, as_table, ratios, read_rate
from omni_bus.bench.round_trip import compared
from omni_bus.bench.run import Outcome, Phase, SlowReaders, Storm
from omni_bus.bench.summary import Summary, summarise

CLIENT = ClientCost(cpu_s=0.2, wall_s=2.0, median_lag_ms=0.1, p99_lag_ms=1.2, max_lag_ms=3.0)
SERVER = ServerCost({"actors.stage llm 0": ProcessCost(1, 0.06), "actors.gateway": ProcessCost(2, 0.03)}, 0)
NAMES = ("ttft", "tpot", "itl", "e2el")


def records(slower: float = 1.0) -> list[Record]:
    """Two answers of three tokens and one failure."""
    told = {"intended_at": 0.0, "prompt_tokens": 5, "output_tokens": 3, "tokens_from": "usage"}
    return [
        Record(index=0, texts=[(0.1 * slower, 1), (0.2, 1), (0.4, 1)], ended_at=0.5 * slower, **told),
        Record(index=1, texts=[(0.3 * slower, 1), (0.8, 1), (1.4, 1)], ended_at=2.0 * slower, **told),
        Record(index=2, intended_at=0.0, ended_at=0.1, failure="503 Busy", message="full: later"),
    ]


def phase_of(label: str, found: list[Record], server: ServerCost | None = None) -> tuple[Phase, Summary]:
    phase = Phase(label=label, records=found, client=CLIENT, server=server)
    return phase, summarise(found, label=label, names=NAMES, percentiles=[99], limits={"ttft": 200.0})


def outcome_of(*told: tuple[Phase, Summary], **more) -> Outcome:
    return Outcome(model="m", phases=[phase for phase, _ in told], **more)


def test_table_says_all_of_it() -> None:
    told = phase_of("load", records(), SERVER)

    assert as_table(outcome_of(told), [told], "m at http://x: 3 requests") == textwrap.dedent("""\
        m at http://x: 3 requests

        Requests              2 completed, 1 failed
        Duration              2.00 s
        Request throughput    1.00 requests/s
        Goodput               0.50 requests/s (1 of 3 kept the limits)
        Output                6 tokens, 3.0 tokens/s (best second 5)
        Input                 10 tokens
        Most at once          3 requests
          failed: 1 × 503 Busy: full: later

                          mean     median        p99        max
        ttft (ms)       200.00     200.00     298.00     300.00
        tpot (ms)       350.00     350.00     546.00     550.00
        itl (ms)        350.00     350.00     597.00     600.00
        e2el (ms)      1250.00    1250.00    1985.00    2000.00
        tokens counted by the server's usage (2); 1.00 tokens in a chunk

        client: 10% of a core; event loop late by 0.1 ms (median), 1.2 ms (p99), 3.0 ms (most)

        server process       processes     CPU s  CPU s / 1,000 tokens
        actors.stage llm 0           1      0.06                10.000
        actors.gateway               2      0.03                 5.000
        all                          3      0.09                15.000""")


def test_json_has_the_keys_that_scripts_know() -> None:
    told = phase_of("load", records(), SERVER)
    document = as_json(outcome_of(told), [told], {"label": "x"}, is_detailed=True)

    assert msgspec.json.decode(msgspec.json.encode(document)) == document
    wanted = {
        "label": "x",
        "model_id": "m",
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "failures": {"503 Busy": {"count": 1, "message": "full: later"}},
        "total_input_tokens": 10,
        "total_output_tokens": 6,
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 3.0,
        "total_token_throughput": 8.0,
        "max_output_tokens_per_s": 5.0,
        "max_concurrent_requests": 3,
        "tokens_from": {"usage": 2},
        "token_times_from": {"client": 2},
    }
    assert {key: document[key] for key in wanted} == wanted
    assert document["mean_ttft_ms"] == pytest.approx(200)
    assert document["p99_ttft_ms"] == pytest.approx(298)
    assert document["std_e2el_ms"] == pytest.approx(750)
    assert document["client"]["cpu_share"] == pytest.approx(0.1)
    assert document["server"]["cpu_s_per_1000_output_tokens"] == pytest.approx(15)
    assert document["server"]["processes"]["actors.gateway"]["cpu_s_per_1000_output_tokens"] == pytest.approx(5)
    first, _, failed = document["requests"]
    assert (first["text_at_s"], first["output_tokens"]) == ([0.1, 0.2, 0.4], 3)
    assert first["ttft_ms"] == pytest.approx(100)
    assert first["itl_ms"] == pytest.approx([100, 200])
    assert (failed["failure"], failed["left"]) == ("503 Busy", False)


def test_run_in_which_all_failed_says_so() -> None:
    told = phase_of("load", records()[2:])

    table = as_table(outcome_of(told), [told], "m")
    assert "no request completed, so there is nothing to measure" in table
    assert "0 completed, 1 failed" in table
    assert as_json(outcome_of(told), [told], {}, is_detailed=False)["request_throughput"] == 0.0


def test_bundles_and_a_saturated_client_are_told() -> None:
    bundled = Record(index=0, intended_at=0.0, texts=[(0.5, 9)], ended_at=1.0, output_tokens=4, tokens_from="chunks")
    busy = msgspec.structs.replace(CLIENT, cpu_s=1.9)
    phase, summary = phase_of("load", [bundled])
    phase.client = busy

    table = as_table(outcome_of((phase, summary)), [(phase, summary)], "m")
    assert "times between tokens of 1 answers are not known: their tokens came bundled" in table
    assert "tokens counted by chunks, one token each (1); 4.00 tokens in a chunk" in table
    assert "warning: the client itself was busy, so these times are partly its own" in table
    phase.client = msgspec.structs.replace(CLIENT, p99_lag_ms=25.0)
    table = as_table(outcome_of((phase, summary)), [(phase, summary)], "m")
    assert "warning: the client itself had to wait for a processor" in table


def test_slow_readers_are_told_by_what_the_others_suffer() -> None:
    alone, beside = phase_of("alone", records()), phase_of("beside slow readers", records(1.5))
    slow = Record(index=0, intended_at=0.0, texts=[(1.0, 1), (2.0, 1), (3.0, 1)], ended_at=4.0, has_left=True)
    refused = Record(index=1, intended_at=0.0, failure="503 Busy", message="full")
    outcome = outcome_of(alone, beside, slow=SlowReaders(records=[slow, refused], rate=1.0))

    table = as_table(outcome, [alone, beside], "m")
    assert "── beside slow readers / alone ──" in table
    assert "ttft         1.50       1.50       1.50       1.50" in table
    assert "slow readers: 2 answers, read at 1.0 pieces a second each (told: 1)" in table
    assert "  failed: 503 Busy: full" in table
    document = as_json(outcome, [alone, beside], {}, is_detailed=False)
    assert list(document["phases"]) == ["alone", "beside slow readers"]
    assert document["ratios"]["e2el"]["median"] == pytest.approx(1.5)
    assert document["mean_ttft_ms"] == pytest.approx(300)  # the measured phase's
    assert document["slow_readers"] == {
        "requests": 2,
        "pieces_per_s": 1.0,
        "pieces_per_s_read": 1.0,
        "failures": {"503 Busy": "full"},
    }


def storm_of(at_once: Occupancy | None, after: list[Record]) -> Storm:
    return Storm(calm=records()[:2], after=after, at_once=at_once, at_last=at_once, answered_s=0.004, spread_s=0.5)


def test_storm_is_told_by_what_it_left() -> None:
    left = [Record(index=0, intended_at=0.0, ended_at=0.2, has_left=True)]
    told = phase_of("storm", left)
    outcome = outcome_of(told, storm=storm_of(Occupancy(2, 64, "/health"), records()[:1]))

    table = as_table(outcome, [told], "m")
    assert "0 completed, 0 failed, 1 left by their clients" in table
    assert "when the last had left    2 requests held, 62 of 64 places free (/health)" in table
    assert "TTFT of the next request  100.00 ms (median before: 300.00 ms)" in table
    storm = as_json(outcome, [told], {}, is_detailed=False)["storm"]
    assert storm["occupancy_at_once"] == {"held": 2, "places": 64, "free": 62, "source": "/health"}
    assert (storm["left"], storm["failed_after"]) == (1, 0)
    assert storm["next_ttft_ms"] == pytest.approx(100)


def test_server_that_failed_after_the_storm_is_told() -> None:
    told = phase_of("storm", records()[:1])
    table = as_table(outcome_of(told, storm=storm_of(None, records()[2:])), [told], "m")

    assert "TTFT of the next request  failed (median" in table
    assert "1 of the 1 requests after it failed: 503 Busy" in table
    assert "unknown: the server has no /health with pipelines, /metrics with requests, or /load" in table


def test_ratios_leave_out_what_one_phase_lacks() -> None:
    _, whole = phase_of("a", records())
    _, failed = phase_of("b", records()[2:])

    assert ratios(whole, failed) == {}
    assert ratios(whole, whole)["ttft"] == {"mean": 1.0, "median": 1.0, "p99": 1.0, "max": 1.0}


def test_read_rate_wants_two_pieces() -> None:
    assert read_rate([Record(index=0, intended_at=0.0, texts=[(1.0, 1)])]) is None


def spoken() -> list[Record]:
    """An answer that plays through, and one with a gap of half a second."""
    return [
        Record(index=0, intended_at=0.0, sounds=[(0.25, 1.0), (1.0, 1.0)], ended_at=1.0),
        Record(index=1, intended_at=0.0, sounds=[(0.5, 1.0), (2.0, 1.0)], ended_at=2.0),
    ]


def test_sound_and_its_words_are_told() -> None:
    phase = Phase(label="load", records=spoken(), client=CLIENT, server=None)
    names = ("audio_ttfp", "audio_gaps")
    told = (phase, summarise(phase.records, label="load", names=names, percentiles=[99], limits={"audio_gaps": 0.0}))
    heard = compared([("Hello there.", "hello"), ("You", "you")], ["500 Odd: no"])
    outcome = outcome_of(told, heard=heard)

    assert as_table(outcome, [told], "m") == textwrap.dedent("""\
        m

        Requests              2 completed, 0 failed
        Duration              2.00 s
        Request throughput    1.00 requests/s
        Goodput               0.50 requests/s (1 of 2 kept the limits)
        Most at once          2 requests
        Sound                 4.00 s, 2.00 s of sound a second
        Gaps in playback      1 (longest 500 ms); 1 of 2 answers continuous

                                mean     median        p99        max
        audio_ttfp (ms)       375.00     375.00     497.50     500.00
        audio_gaps              0.50       0.50       0.99       1.00

        client: 10% of a core; event loop late by 0.1 ms (median), 1.2 ms (p99), 3.0 ms (most)

        word errors: 33.33% (0 substituted, 1 left out, 0 put in; of 3 words in 2 texts)
          said:  Hello there.
          heard: hello
        1 texts were not recognised: 500 Odd: no""")
    document = msgspec.json.decode(msgspec.json.encode(as_json(outcome, [told], {}, is_detailed=True)))
    assert (document["audio_gaps"], document["longest_audio_gap_ms"]) == (1, 500.0)
    assert (document["word_error_rate"], document["word_errors"]["left_out"]) == (pytest.approx(1 / 3), 1)
    assert document["requests"][1]["audio_longest_gap_ms"] == 500.0


def test_sound_that_was_heard_is_told() -> None:
    found = [Record(index=0, intended_at=0.0, texts=[(0.5, 3)], ended_at=2.0, heard_s=10.0)]
    phase = Phase(label="load", records=found, client=CLIENT, server=None)
    told = (phase, summarise(found, label="load", names=["audio_rtf"], percentiles=[99], limits={}))

    assert "Sound heard           10.00 s, 5.00 s of sound a second" in as_table(outcome_of(told), [told], "m")
    assert as_json(outcome_of(told), [told], {}, is_detailed=False)["rtfx"] == 5.0


def test_slow_readers_of_sound_have_a_rate() -> None:
    assert read_rate(spoken()) == pytest.approx(2 / 2.25)
