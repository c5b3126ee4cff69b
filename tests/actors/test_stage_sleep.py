"""A stage whose engine is told to sleep, through a real coordinator; the test is the supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from actors.testing import running
from adapters.synthetic import SyntheticText
from omni_bus.client import BusClient

if TYPE_CHECKING:
    from omni_bus.engine import EngineRequest, Report
    from omni_bus.wire.payloads import Payload

TOML = """
[stages.llm]
adapter = "tests.actors.test_stage_sleep:Fragile"
tokens = 2
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""
BODY: Any = {"messages": [{"role": "user", "content": "hi"}]}


class Fragile(SyntheticText):
    """Breaks when it is unloaded, and is whole again once it was loaded."""

    is_whole = True

    def load(self, report: Report) -> None:
        super().load(report)
        self.is_whole = True

    def unload(self) -> None:
        self.is_whole = False
        raise RuntimeError("half of it is gone")

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        assert self.is_whole
        super().add(request, inputs)


@pytest.mark.timeout(40)
async def test_engine_that_breaks_on_its_way_to_sleep_is_loaded_again() -> None:
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        about = deployment.deployment
        async with await BusClient.connect(
            "supervisor", about.listen("supervisor"), about.coordinator_endpoint, role="supervisor", timeout_s=20
        ) as supervisor:
            arrangement = {"wanted": {"llm": 1}, "drained": [], "returning": []}
            await supervisor.admin("arrange", **arrangement, asleep={"llm.0": 2})
            answer = await supervisor.admin("rest", actors=["llm.0"], level=2)
            assert list(answer["failed"]) == ["llm.0"]

            await supervisor.admin("arrange", **arrangement, asleep={})
            async with session.post("/v1/chat/completions", json=BODY) as response:
                found = await response.json()

    assert (response.status, found.get("error")) == (200, None)
