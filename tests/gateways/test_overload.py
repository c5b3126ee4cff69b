"""Far more requests than can be served, over HTTP: each is answered, each is counted, weights decide who gets in."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp

from actors.testing import Running, running

CHAT = "/v1/chat/completions"
TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
max_in_flight = {max_in_flight}
max_queued = {max_queued}
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
[callers.one]
keys = ["one"]
[callers.two]
keys = ["two"]
weight = 2
[callers.four]
keys = ["four"]
weight = 4
[callers.rated]
keys = ["rated"]
requests_per_minute = 1
"""


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "sampling_params_list": [{"tokens": 3}]} | fields


async def status_of(deployment: Running) -> dict[str, Any]:
    return await deployment.gateway.client.admin("status")


async def ask(session: aiohttp.ClientSession, caller: str, **fields: Any) -> tuple[int, str | None]:
    """Return the answer's status and when to come back."""
    headers = {"Authorization": f"Bearer {caller}"}
    async with session.post(CHAT, json=body(**fields), headers=headers) as response:
        await response.read()
        return response.status, response.headers.get("Retry-After")


async def test_every_request_of_a_flood_is_answered_and_counted(caplog) -> None:
    async with (
        running(TOML.format(max_in_flight=2, max_queued=4)) as deployment,
        aiohttp.ClientSession(deployment.url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        callers = ["one", "two", "four", "rated"] * 75
        answers = await asyncio.gather(*(ask(session, caller) for caller in callers))
        while (status := await status_of(deployment))["requests"]["live"]:
            pass

        by_status = Counter(answered for answered, _ in answers)
        assert by_status.keys() == {200, 429, 503}
        assert by_status[429] == 74, "one a minute"
        assert all((retry_after is None) == (answered == 200) for answered, retry_after in answers)
        requests = status["requests"]
        assert requests["done"] == by_status[200]
        assert requests["rejected"] + requests["failed"] == by_status[429] + by_status[503]
        assert requests["cancelled"] == 0
        for row in status["callers"]:
            mine = Counter(
                answered for (answered, _), caller in zip(answers, callers, strict=True) if caller == row["caller"]
            )
            assert row["refused"] == mine[429] + mine[503]
            assert row["refused_by"].get("quota_exceeded", 0) == mine[429]
            assert (row["in_flight"], row["queued"]) == (0, 0)
        assert status["pipelines"]["chat"]["queued_bytes"] == 0
        assert deployment.gateway.client.requests == {}
    assert [record for record in caplog.records if record.levelname != "INFO"] == [], "to refuse is no failure"


async def test_places_and_turns_follow_the_weights() -> None:
    """One runs, seven may wait, and each caller asks ten times, the lightest first."""
    async with (
        running(TOML.format(max_in_flight=1, max_queued=7)) as deployment,
        aiohttp.ClientSession(deployment.url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        endless = body(stream=True, sampling_params_list=[{"tokens": 1_000_000, "step_time_s": 0.001}])
        served: list[str] = []

        async def one(caller: str) -> int:
            status, _ = await ask(session, caller)
            if status == 200:
                served.append(caller)
            return status

        async with session.post(CHAT, json=endless, headers={"Authorization": "Bearer one"}) as first:
            await first.content.readline()
            asked: list[asyncio.Task[int]] = []
            for caller in ("one", "two", "four"):
                for _ in range(10):
                    asked.append(asyncio.create_task(one(caller)))
                    while not await _has_decided(deployment, len(asked)):
                        pass
            rows = {row["caller"]: row for row in (await status_of(deployment))["callers"]}
            assert {caller: row["queued"] for caller, row in rows.items()} == {"one": 1, "two": 2, "four": 4}
        statuses = await asyncio.gather(*asked)

        assert Counter(statuses) == {200: 7, 503: 23}
        assert Counter(served) == {"one": 1, "two": 2, "four": 4}


async def _has_decided(deployment: Running, num_asked: int) -> bool:
    """Whether the coordinator has seen so many requests besides the first."""
    rows = (await status_of(deployment))["callers"]
    return sum(row["queued"] + row["refused"] for row in rows) >= num_asked
