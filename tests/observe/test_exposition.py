"""The text that Prometheus reads, judged by its own parser."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from omni_bus.observe.exposition import exposition, labels_of
from omni_bus.wire.metrics import Metric, Sample


def test_parser_reads_what_was_written() -> None:
    nasty = 'a "b"\\n \n c'
    text = exposition(
        [
            Metric("a_requests", "counter", "How\nmany \\.", (Sample("a_requests_total", 3.0, {"of": nasty}),)),
            Metric("b_now", "gauge", "Now.", (Sample("b_now", 0.25), Sample("b_now", math.inf, {"x": "1"}))),
            Metric("c_s", "histogram", "Took.", (Sample("c_s_bucket", 1e20, {"le": "+Inf"}), Sample("c_s_sum", -1.5))),
        ]
    )

    requests, now, took = text_string_to_metric_families(text)
    assert (requests.name, requests.type, requests.documentation) == ("a_requests", "counter", "How\nmany \\.")
    assert [(found.name, found.labels, found.value) for found in requests.samples] == [
        ("a_requests_total", {"of": nasty}, 3.0)
    ]
    assert [(found.labels, found.value) for found in now.samples] == [({}, 0.25), ({"x": "1"}, math.inf)]
    assert [(found.name, found.value) for found in took.samples] == [("c_s_bucket", 1e20), ("c_s_sum", -1.5)]


def test_one_family_for_the_same_measure_of_several_replicas() -> None:
    replicas = [Metric("up", "gauge", "Up.", (Sample("up", 1.0, {"replica": str(n)}),)) for n in range(2)]
    between = Metric("other", "unknown", "?", (Sample("other", math.nan),))

    lines = exposition([replicas[0], between, replicas[1]]).splitlines()

    assert lines[:4] == ["# HELP up Up.", "# TYPE up gauge", 'up{replica="0"} 1', 'up{replica="1"} 1']
    assert lines[4:] == ["# HELP other ?", "# TYPE other untyped", "other NaN"]


def test_no_labels_no_braces() -> None:
    assert (labels_of({}), labels_of({"a": "b", "c": "d"})) == ("", '{a="b",c="d"}')
