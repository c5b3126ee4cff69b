"""Simulated robots: what they count, on servers that answer, err, dawdle and hang up."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.asyncio.server import ServerConnection, serve

from omni_bus.bench.robots import RobotOutcome, RobotPlan, drive, frames_of, summary_of, table_of
from omni_bus.errors import Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

packb: Any = msgpack_numpy.packb  # it has no types

PLAN = RobotPlan(
    num_robots=3,
    hz=math.inf,
    seconds=0.2,
    images={"camera": (4, 6)},
    states={"state": 7},
    prompt="go",
    deadline_s=math.inf,
)
GOOD: dict[str, Any] = {
    "actions": np.zeros((2, 3), np.float32),
    "server_timing": {"batch_size": 2, "policy_ms": 4.0},
}


@asynccontextmanager
async def serving(answer: Callable[[int], Awaitable[Any]], first: Any = b"\x80") -> AsyncIterator[str]:
    """A server whose nth answer on a socket is this; None hangs up."""

    async def talk(link: ServerConnection) -> None:
        await link.send(first)
        count = 0
        async for _ in link:
            told = await answer(count)
            count += 1
            if told is None:
                return
            await link.send(packb(told))

    async with serve(talk, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_observations_are_what_the_plan_says_and_differ() -> None:
    values = [msgpack_numpy.unpackb(frame) for frame in frames_of(PLAN, 0)]

    for value in values:
        assert value["camera"].shape == (4, 6, 3)
        assert value["camera"].dtype == np.uint8
        assert value["state"].shape == (7,)
        assert value["prompt"] == "go"
    assert not np.array_equal(values[0]["camera"], values[1]["camera"])


async def test_answers_errors_and_batches_are_counted() -> None:
    async def answer(count: int) -> Any:
        return {"type": "error", "message": "m", "detail": "no"} if count % 2 else GOOD

    async with serving(answer) as url:
        outcome = await drive(url, PLAN)

    assert outcome.errors.keys() == {"no"}
    assert abs(len(outcome.latencies_s) - outcome.errors["no"]) <= 3
    assert outcome.batch_sizes == {2: len(outcome.latencies_s)}
    assert outcome.mean_batch == 2
    assert summary_of(outcome)["policy_p50_ms"] == 4.0
    assert outcome.num_late == outcome.num_skipped == 0


async def test_what_is_due_while_a_robot_waits_is_missed() -> None:
    async def answer(count: int) -> Any:
        await asyncio.sleep(0.05 if count else 0)
        return GOOD

    async with serving(answer) as url:
        plan = RobotPlan(num_robots=1, hz=100.0, seconds=0.3)
        outcome = await drive(url, plan)

    assert outcome.num_late == len(outcome.latencies_s)
    assert outcome.num_skipped >= 3 * len(outcome.latencies_s)


async def test_robot_whose_server_hangs_up_is_done() -> None:
    async def answer(count: int) -> Any:
        return GOOD if count < 3 else None

    async with serving(answer) as url:
        outcome = await drive(url, PLAN)

    assert len(outcome.latencies_s) == 2 * 3
    assert sum(outcome.errors.values()) == 3


async def test_what_does_not_begin_with_metadata_is_no_server_of_this() -> None:
    async def answer(count: int) -> Any:
        return GOOD

    async with serving(answer, first="hello") as url:
        with pytest.raises(Unreachable, match="begins with no metadata: hello"):
            await drive(url, PLAN)
    with pytest.raises(Unreachable, match="does not answer"):
        await drive(url, PLAN)


def test_table_of_two_has_ratios_and_says_what_is_not_known() -> None:
    ours = RobotOutcome([0.01, 0.01], batch_sizes={2: 2}, policy_s=[0.005], seconds=1.0)
    theirs = RobotOutcome([0.02], errors={"it broke": 2}, seconds=1.0)

    lines = table_of({"ours": ours, "theirs": theirs}).splitlines()

    assert lines[0].split() == ["ours", "theirs", "ratio"]
    assert lines[1].split() == ["Actions", "a", "second", "2.0", "1.0", "2.00"]
    assert lines[2].split() == ["Latency", "p50", "(ms)", "10.00", "20.00", "0.50"]
    assert lines[7].split() == ["Batch,", "mean", "2.00", "-"]
    assert lines[9] == "Observations by batch size, ours: 2: 2"
    assert lines[10] == "Error of theirs, 2 times: it broke"
