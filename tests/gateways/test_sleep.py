"""The routes that put engines to sleep and wake them, as far as a gateway alone goes."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from actors.testing import running
from gateways.origins import Origins
from gateways.sleep import SleepRoutes
from omni_bus.core.pipeline import Pipeline
from omni_bus.runtime.control import DONE, NOT_CLEAN, NOT_POSSIBLE, ControlServer, Outcome, Sleep, Wake, control_path
from omni_bus.wire.frames import RouteEdge

TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""
EDGES = tuple(
    RouteEdge(source, "text", target, "text", "text", 8, 2**20)
    for source, target in (("in", "llm"), ("llm", "voice"), ("voice", "out"))
)


def row(stage: str, **fields: Any) -> dict[str, Any]:
    return {"role": "stage", "stage": stage, **fields}


@pytest.mark.parametrize(
    ("rows", "is_sleeping"),
    [
        ([row("llm"), row("voice")], False),
        ([row("llm", is_asleep=True), row("llm"), row("voice")], False),
        ([row("llm", is_asleep=True), row("llm", is_drained=True), row("voice")], True),
        ([row("llm", is_drained=True), row("voice")], False),
        ([row("llm"), row("voice"), row("other", is_asleep=True), {"role": "gateway"}], False),
    ],
)
def test_sleeping_is_a_pipeline_without_an_awake_replica(rows: list[dict[str, Any]], *, is_sleeping: bool) -> None:
    origins = Origins("openai", readers=(), with_credentials=False, sockets=())
    routes = SleepRoutes("", {"chat": Pipeline("chat", "chat", (), EDGES)}, origins)

    body = routes.is_sleeping(rows).body
    assert isinstance(body, bytes)
    assert msgspec.json.decode(body) == {"is_sleeping": is_sleeping}


async def post(session: aiohttp.ClientSession, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    async with session.post(path, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("path", "param", "words"),
    [
        ("/sleep?level=0", "level", "level: '0' came (allowed: 1, 2)"),
        ("/sleep?level=x", "level", "level: 'x' came (allowed: 1, 2)"),
        ("/sleep?mode=keep", "mode", "mode: 'keep' came (allowed: abort, wait)"),
        ("/sleep?tags=weights", "tags", "'tags': not a field of this route (allowed: level, mode, stage)"),
        ("/wake_up?tags=weights", "tags", "'tags': not a field of this route (allowed: stage)"),
        ("/sleep?stage=", "stage", "stage: '' came (allowed: STAGE or STAGE.REPLICA, of llm)"),
        (
            "/wake_up?stage=llm.0&stage=other.0",
            "stage",
            "stage: 'other.0' came (allowed: STAGE or STAGE.REPLICA, of llm)",
        ),
    ],
)
async def test_bad_query_is_refused_by_name(path: str, param: str, words: str) -> None:
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        status, answer = await post(session, path)

    assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, param, words)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("https://friend.example", 503), ("own", 503), (None, 503)],
)
async def test_pages_of_others_give_no_orders(origin: str | None, status: int) -> None:
    toml = TOML + 'cors_origins = ["https://friend.example"]\n'
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        headers = {} if origin is None else {"Origin": deployment.url.rstrip("/") if origin == "own" else origin}
        found = [(await post(session, path, **headers))[0] for path in ("/sleep", "/wake_up")]

    assert found == [status, status]  # 503: it went on to the supervisor, which is not there


async def test_without_a_supervisor_nobody_sleeps() -> None:
    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        status, answer = await post(session, "/sleep")

    assert (status, answer["error"]["message"]) == (503, "the deployment takes no orders: No such file or directory")


async def test_orders_are_the_supervisor_s_and_its_outcomes_are_answers() -> None:
    outcomes = [Outcome(DONE, "asleep"), Outcome(NOT_CLEAN, "cut"), Outcome(NOT_CLEAN, "busy"), Outcome(DONE, "awake")]
    outcomes.append(Outcome(NOT_POSSIBLE, "llm.0: level: 1 came (allowed: 2)"))
    orders: list[Any] = []

    async def carry_out(order: Any, say: Any) -> Outcome:
        orders.append(order)
        return outcomes[len(orders) - 1]

    async with running(TOML) as deployment, aiohttp.ClientSession(deployment.url) as session:
        server = ControlServer(control_path(deployment.deployment.run_dir), carry_out)
        await server.start()
        answers = [
            await post(session, path)
            for path in ("/sleep", "/sleep?level=2", "/sleep?mode=wait", "/wake_up?stage=llm.1", "/sleep")
        ]
        await server.close()

    assert orders[:4] == [
        Sleep(("llm",), 1, 0.0, is_forced=True),
        Sleep(("llm",), 2, 0.0, is_forced=True),
        Sleep(("llm",), 1),
        Wake(("llm.1",)),
    ]
    assert [status for status, _ in answers] == [200, 200, 409, 200, 409]
    assert [answer for _, answer in answers[:2]] == [{"status": "sleeping", "level": level} for level in (1, 2)]
    assert answers[3][1] == {"status": "awake", "tags": None}
    assert answers[4][1]["error"]["message"] == "llm.0: level: 1 came (allowed: 2)"


async def test_with_keys_they_want_one() -> None:
    toml = TOML + 'api_keys = ["k"]\n'
    async with running(toml) as deployment, aiohttp.ClientSession(deployment.url) as session:
        statuses = [(await post(session, path))[0] for path in ("/sleep", "/wake_up")]
        async with session.get("/is_sleeping") as response:
            statuses.append(response.status)
        async with session.get("/is_sleeping", headers={"Authorization": "Bearer k"}) as response:
            found = await response.json()

    assert statuses == [401, 401, 401]
    assert found == {"is_sleeping": False}
