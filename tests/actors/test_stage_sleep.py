"""A stage whose engine is told to sleep, through a real coordinator; the test is the supervisor."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from actors.testing import running
from adapters.synthetic import SyntheticText
from omni_bus.client import BusClient
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running
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


class Stubborn(SyntheticText):
    """Refuses to wake, or takes its time, as the test wants."""

    refusal = ""
    may_go_on = threading.Event()

    def unload(self) -> None:
        pass

    def wake(self, report: Report) -> None:
        report("weights", 0.5)
        if self.refusal:
            raise BadInput(self.refusal)
        self.may_go_on.wait(30)


@asynccontextmanager
async def supervised(toml: str) -> AsyncIterator[tuple[Running, BusClient]]:
    """A deployment, and its supervisor."""
    async with running(toml) as deployment:
        about = deployment.deployment
        connection = BusClient.connect(
            "supervisor", about.listen("supervisor"), about.coordinator_endpoint, role="supervisor", timeout_s=20
        )
        async with await connection as supervisor:
            yield deployment, supervisor


@pytest.mark.timeout(40)
async def test_engine_that_does_not_wake_is_told_of_by_name_and_logged_once_for_each_reason(caplog) -> None:
    async with supervised(TOML.replace("Fragile", "Stubborn")) as (deployment, supervisor):
        engine = deployment.stages["llm.0"].engine
        assert isinstance(engine, Stubborn)
        await supervisor.admin("arrange", asleep={"llm.0": 2})
        assert (await supervisor.admin("rest", actors=["llm.0"], level=2))["failed"] == {}
        for reason in ("no memory", "no memory", "no file", "no memory"):
            engine.refusal = reason
            answer = await supervisor.admin("rest", actors=["llm.0"], level=0)
            assert answer["failed"] == {"llm.0": reason}

        logged = [r.fields["why"] for r in caplog.records if r.msg == "the engine could not rest"]
        assert logged == ["no memory", "no file", "no memory"]

        engine.refusal = ""
        answer = await supervisor.admin("rest", actors=["llm.0"], level=0, timeout_s=1.0)
        assert answer["failed"] == {"llm.0": "no progress for 1 s in phase 'weights' (start_timeout_s)"}

        # It is on its way all the same, and is what the deployment is arranged to be when it is done.
        engine.may_go_on.set()
        await supervisor.admin("arrange", asleep={})
        assert (await supervisor.admin("rest", actors=["llm.0"], level=0))["failed"] == {}
        async with (
            aiohttp.ClientSession(deployment.url) as session,
            session.post("/v1/chat/completions", json=BODY) as response,
        ):
            assert response.status == 200


@pytest.mark.timeout(40)
async def test_engine_that_breaks_on_its_way_to_sleep_is_loaded_again() -> None:
    async with supervised(TOML) as (deployment, supervisor), aiohttp.ClientSession(deployment.url) as session:
        await supervisor.admin("arrange", wanted={"llm": 1}, asleep={"llm.0": 2})
        answer = await supervisor.admin("rest", actors=["llm.0"], level=2)
        assert list(answer["failed"]) == ["llm.0"]

        await supervisor.admin("arrange", wanted={"llm": 1})
        async with session.post("/v1/chat/completions", json=BODY) as response:
            found = await response.json()

    assert (response.status, found.get("error")) == (200, None)
