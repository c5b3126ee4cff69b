from __future__ import annotations

import asyncio

import pytest

from adapters.turns import Listener, Turns


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_listener_plays_what_came_in_real_time() -> None:
    clock = Clock()
    listener = Listener(clock)
    assert listener.runs_dry_at() == 100.0

    listener.gets(2.0)
    clock.now = 101.0
    listener.gets(3.0)

    assert listener.runs_dry_at() == 105.0


def test_silence_is_no_debt() -> None:
    clock = Clock()
    listener = Listener(clock)
    listener.gets(1.0)
    clock.now = 160.0

    assert listener.runs_dry_at() == 160.0
    listener.gets(1.0)
    assert listener.runs_dry_at() == 161.0


async def order_of(turns: Turns, *due: float, cancelled: int | None = None) -> list[int]:
    """Let several wait while one has its turn; return in which order theirs came."""
    came: list[int] = []

    async def wait(number: int, due_at: float) -> None:
        async with turns.turn(due_at):
            await asyncio.sleep(0)
            came.append(number)

    async with turns.turn(0.0):
        tasks = [asyncio.create_task(wait(number, due_at)) for number, due_at in enumerate(due)]
        await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return came


async def test_earliest_is_next_and_equals_keep_their_order() -> None:
    assert await order_of(Turns(), 3.0, 1.0, 2.0, 1.0) == [1, 3, 2, 0]


async def test_who_asks_again_at_once_may_be_next() -> None:
    turns = Turns()
    came: list[str] = []

    async def work(name: str, *due: float) -> None:
        for due_at in due:
            async with turns.turn(due_at):
                came.append(name)
                await asyncio.sleep(0)

    await asyncio.gather(work("urgent", 1.0, 1.0, 1.0), work("patient", 2.0))

    assert came == ["urgent", "urgent", "urgent", "patient"]


async def test_nobody_waits_for_one_who_left() -> None:
    turns = Turns()

    assert await order_of(turns, 3.0, 1.0, 2.0, cancelled=1) == [2, 0]
    assert await order_of(turns, 1.0) == [0]


async def test_turn_that_comes_with_the_cancel_is_passed_on() -> None:
    turns = Turns()
    has_it, leaves = asyncio.Event(), asyncio.Event()

    async def have() -> None:
        async with turns.turn(0.0):
            has_it.set()
            await leaves.wait()

    holder = asyncio.create_task(have())
    await has_it.wait()
    waiting = asyncio.create_task(order_of(turns, 1.0))
    await asyncio.sleep(0)
    leaves.set()
    await holder  # the turn is the waiting one's now, which has not run since
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert await order_of(turns, 1.0) == [0]


async def test_failure_in_a_turn_passes_it_on() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="odd"):
        async with turns.turn(0.0):
            raise ValueError("odd")

    assert await order_of(turns, 1.0) == [0]
