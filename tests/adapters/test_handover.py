"""Calls on threads whose callers give up."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adapters.handover import on_thread


async def test_call_that_fails_after_its_caller_left_is_waited_for_and_no_news() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    has_begun, may_end = threading.Event(), threading.Event()

    def fail() -> None:
        has_begun.set()
        may_end.wait()
        raise ValueError("nobody asked")

    with ThreadPoolExecutor(1) as pool:
        caller = asyncio.ensure_future(on_thread(pool, fail))
        await asyncio.to_thread(has_begun.wait)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
    del caller
    gc.collect()
    await asyncio.sleep(0)

    assert told == []


async def test_call_that_has_not_begun_is_dropped() -> None:
    may_end = threading.Event()
    called: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        first = asyncio.ensure_future(on_thread(pool, may_end.wait))
        second = asyncio.ensure_future(on_thread(pool, called.append, 2))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        may_end.set()
        await first

    assert called == []
