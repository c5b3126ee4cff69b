"""``GET /metrics`` and what ``/v1/models`` tells of stages, through a real deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from actors.testing import running
from adapters.synthetic import SyntheticText
from omni_bus.wire.metrics import Metric, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.engine import Report

TOML = """
[stages.llm]
adapter = "tests.gateways.test_metrics:Measured"
tokens = 4
[stages.other]
adapter = "synthetic-text"
replicas = 2
[pipelines.chat]
serve_as = "some/model"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[pipelines.plain]
edges = ["in.messages -> other.prompt", "other.text -> out.text"]
[gateways.openai]
api_keys = ["k"]
"""
BEARER = {"Authorization": "Bearer k"}


class Measured(SyntheticText):
    """Measures something, and has a context."""

    def load(self, report: Report) -> None:
        super().load(report)
        self.context_length = 4096

    def metrics(self) -> Sequence[Metric]:
        finished = float(self.statistics().finished)
        return [Metric("lib:finished", "counter", "Finished.", (Sample("lib:finished_total", finished, {"a": "b"}),))]


async def scrape(session: aiohttp.ClientSession) -> dict[str, list[tuple[dict[str, str], float]]]:
    async with session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = text_string_to_metric_families(await response.text())
    return {
        sample.name: [(found.labels, found.value) for found in family.samples if found.name == sample.name]
        for family in families
        for sample in family.samples
    }


async def test_counts_and_measures_are_told_without_a_key() -> None:
    body: Any = {"model": "some/model", "messages": [{"role": "user", "content": "hi"}]}
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for headers, status in ((BEARER, 200), (BEARER, 200), ({}, 401)):
            async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == status
        async with session.get("/nobody/knows/this", headers=BEARER) as response:
            assert response.status == 404
        found = await scrape(session)

    llm = {"model_name": "some/model", "stage": "llm", "replica": "0"}
    assert found["lib:finished_total"] == [({**llm, "a": "b"}, 2.0)]
    assert found["omni_bus_requests_total"][0] == ({"outcome": "done"}, 2.0)
    assert {labels["outcome"] for labels, _ in found["omni_bus_requests_total"]} == {
        *("done", "failed", "cancelled", "rejected")
    }
    assert found["omni_bus_requests_rerouted_total"] == [({}, 0.0)]  # those go on, and end once
    assert found["omni_bus_coordinator_up"] == [({}, 1.0)]
    assert ({**llm, "outcome": "done"}, 2.0) in found["omni_bus_stage_requests_total"]
    assert [(labels["stage"], labels["replica"], value) for labels, value in found["omni_bus_stage_up"]] == [
        ("llm", "0", 1.0),
        ("other", "0", 1.0),
        ("other", "1", 1.0),
    ]
    counted = {tuple(labels.values())[1:]: value for labels, value in found["omni_bus_http_requests_total"]}
    assert counted == {
        ("POST", "/v1/chat/completions", "200"): 2.0,
        ("POST", "/v1/chat/completions", "401"): 1.0,
        ("any", "none", "404"): 1.0,
    }


async def test_models_say_how_long_prompt_and_answer_may_be() -> None:
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url, headers=BEARER) as session:
        async with session.get("/v1/models") as response:
            cards = (await response.json())["data"]
        async with session.get("/v1/models/some/model") as response:
            card = await response.json()

    assert [(card["id"], card["max_model_len"]) for card in cards] == [("some/model", 4096), ("plain", None)]
    assert card["max_model_len"] == 4096


async def test_without_a_coordinator_a_gateway_tells_what_it_knows() -> None:
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        await deployment.coordinator.close()
        found = await scrape(session)

    assert found["omni_bus_coordinator_up"] == [({}, 0.0)]
    assert found["omni_bus_http_requests_open"][0][1] == 1.0
    assert "omni_bus_stage_up" not in found
