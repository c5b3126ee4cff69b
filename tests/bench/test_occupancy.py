from __future__ import annotations

import pytest

from omni_bus.bench.occupancy import Occupancy, from_health, from_load, from_metrics


def test_our_health_counts_pipelines() -> None:
    pipeline = {"in_flight": 3, "max_in_flight": 64, "queued": 2, "max_queued": 256}
    found = from_health({"status": "healthy", "pipelines": {"a": pipeline, "b": pipeline}})

    assert found == Occupancy(10, 128, "/health")
    assert Occupancy(10, 128, "/health").free == 118


def test_prometheus_gauges_are_added_up() -> None:
    text = (
        "# HELP vllm:num_requests_running Requests\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 7.0\n'
        "vllm:kv_cache_usage_perc 0.5\n"
    )

    assert from_metrics(text) == Occupancy(6, None, "/metrics")
    assert Occupancy(6, None, "/metrics").free is None


def test_load_is_one_number() -> None:
    assert from_load({"server_load": 4}) == Occupancy(4, None, "/load")


@pytest.mark.parametrize("document", [None, [], {}, {"pipelines": 3}, {"pipelines": {"a": {}}}, {"server_load": "x"}])
def test_what_says_nothing_is_none(document) -> None:
    assert from_health(document) is None
    assert from_load(document) is None
    assert from_metrics(str(document)) is None
