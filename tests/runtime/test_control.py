"""Orders over a socket file: news, outcomes, and ends of either side."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from omni_bus.errors import BadInput, Unavailable
from omni_bus.runtime.control import (
    BAD_ORDER,
    DONE,
    MAX_ORDER_BYTES,
    NOT_POSSIBLE,
    ControlServer,
    Drain,
    News,
    Order,
    Outcome,
    Restart,
    Resume,
    Say,
    Scale,
    control_path,
    give_order,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Supervisor:
    """Carries orders out as the test wishes, and remembers them."""

    def __init__(self, run_dir: str) -> None:
        self.path = control_path(run_dir)
        self.orders: list[Order] = []
        self.news: list[News] = []
        self.may_end = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        self.num_ended = 0
        self.server = ControlServer(self.path, self.carry_out)

    @property
    def leaves_anything(self) -> bool:
        return os.path.exists(self.path)

    async def carry_out(self, order: Order, say: Say) -> Outcome:
        self.orders.append(order)
        for news in self.news:
            say(news)
        self.begun.release()
        await self.may_end.wait()
        self.num_ended += 1
        return Outcome(DONE, "did it")


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    made = Supervisor(str(tmp_path))
    await made.server.start()
    yield made
    await made.server.close()
    assert not made.leaves_anything


def nothing(news: News) -> None:
    raise AssertionError(news)


@pytest.mark.parametrize(
    "order",
    [
        Drain(("llm", "voice.0"), 2.5, is_forced=True),
        Resume(("llm",)),
        Restart(),
        Restart(("gateway.openai", "coordinator"), 0.0),
        Scale({"llm": 3, "voice": 1}),
    ],
)
async def test_order_arrives_and_its_outcome_comes_back(supervisor: Supervisor, order: Order) -> None:
    supervisor.may_end.set()

    assert await give_order(supervisor.path, order, nothing) == Outcome(DONE, "did it")
    assert supervisor.orders == [order]


async def test_news_come_before_the_outcome(supervisor: Supervisor) -> None:
    supervisor.news = [News("llm.0", "draining"), News("llm.0", "weights", 0.5, 77)]
    heard: list[News] = []
    all_heard = asyncio.Event()

    def hear(news: News) -> None:
        heard.append(news)
        if len(heard) == 2:
            all_heard.set()

    giving = asyncio.create_task(give_order(supervisor.path, Restart(), hear))
    await all_heard.wait()
    assert not giving.done()
    supervisor.may_end.set()

    assert (await giving).code == DONE
    assert heard == supervisor.news


async def test_orders_are_carried_out_beside_each_other(supervisor: Supervisor) -> None:
    giving = [asyncio.create_task(give_order(supervisor.path, Scale({"llm": n}), nothing)) for n in range(3)]
    for _ in giving:
        await supervisor.begun.acquire()
    supervisor.may_end.set()

    assert {(await each).code for each in giving} == {DONE}


async def test_order_goes_on_when_its_giver_leaves(supervisor: Supervisor) -> None:
    giving = asyncio.create_task(give_order(supervisor.path, Restart(), nothing))
    await supervisor.begun.acquire()
    giving.cancel()
    supervisor.may_end.set()

    assert (await give_order(supervisor.path, Restart(), nothing)).code == DONE
    assert supervisor.num_ended == 2


async def test_close_breaks_orders_off_and_says_so(supervisor: Supervisor) -> None:
    giving = asyncio.create_task(give_order(supervisor.path, Restart(), nothing))
    await supervisor.begun.acquire()

    await supervisor.server.close()

    assert await giving == Outcome(NOT_POSSIBLE, "the deployment is stopping")
    assert supervisor.num_ended == 0
    with pytest.raises(Unavailable, match="takes no orders: No such file or directory"):
        await give_order(supervisor.path, Restart(), nothing)


async def test_failure_in_an_order_is_told_and_logged(supervisor: Supervisor, caplog) -> None:
    async def fail(order: Order, say: Say) -> Outcome:
        raise ZeroDivisionError

    supervisor.server._carry_out = fail

    outcome = await give_order(supervisor.path, Restart(), nothing)

    assert outcome == Outcome(NOT_POSSIBLE, "it failed; the supervisor's log says why")
    assert "could not be carried out" in caplog.text


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"restart", b'{"type":"Restart","targets":"llm"}', b'{"type":"Dance"}', b'{"type":"Restart","x":1}'],
)
async def test_what_is_no_order_is_refused(supervisor: Supervisor, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(supervisor.path)
    writer.write(line + b"\n")

    outcome = msgspec.json.decode(await reader.read(), type=Outcome)

    assert outcome.code == BAD_ORDER
    assert supervisor.orders == []
    writer.close()


async def test_endless_line_is_refused(supervisor: Supervisor) -> None:
    reader, writer = await asyncio.open_unix_connection(supervisor.path)
    writer.write(b"x" * (3 * MAX_ORDER_BYTES))

    assert msgspec.json.decode(await reader.readline(), type=Outcome).code == BAD_ORDER
    writer.close()


async def test_order_that_is_too_long_is_not_sent(supervisor: Supervisor) -> None:
    with pytest.raises(BadInput, match=f"allowed: {MAX_ORDER_BYTES}"):
        await give_order(supervisor.path, Restart(("x" * MAX_ORDER_BYTES,)), nothing)


async def test_end_of_the_supervisor_is_noticed(tmp_path: Path) -> None:
    async def vanish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(msgspec.json.encode(News("llm.0", "draining")) + b"\n")
        writer.close()

    path = control_path(str(tmp_path))
    server = await asyncio.start_unix_server(vanish, path)
    heard: list[News] = []

    with pytest.raises(Unavailable, match="ended before the order was carried out"):
        await give_order(path, Restart(), heard.append)

    assert heard == [News("llm.0", "draining")]
    server.close()
