from __future__ import annotations

import asyncio

import pytest

from omni_bus.runtime.signals import Stop


@pytest.mark.parametrize("is_clean", [True, False])
async def test_drain_says_how_it_ended(is_clean) -> None:
    stop = Stop(with_interrupt=True)
    stop.request()

    async def drain() -> bool:
        return is_clean

    assert await stop.drained(drain()) is is_clean


async def test_second_wish_cuts_a_drain_short() -> None:
    stop = Stop(with_interrupt=True)
    stop.request()
    was_cut = asyncio.Event()

    async def drain() -> bool:
        stop.forced.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cut.set()
        return True

    assert await stop.drained(drain()) is False
    await was_cut.wait()


async def test_drain_that_fails_says_so() -> None:
    stop = Stop(with_interrupt=True)

    async def drain() -> bool:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await stop.drained(drain())
