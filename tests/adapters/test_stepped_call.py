from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from adapters.stepped_call import SteppedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_call_goes_on_only_when_it_is_advanced(pool: ThreadPoolExecutor) -> None:
    done: list[int] = []

    def count(put: Callable[[int], None]) -> None:
        for i in range(3):
            done.append(i)
            put(10 * i)

    call = SteppedCall(pool, count)
    assert done == []
    assert [call.advance(), list(done)] == [0, [0]]
    assert [call.advance(), call.advance(), list(done)] == [10, 20, [0, 1, 2]]
    assert [call.advance(), call.advance()] == [None, None]


class Held:
    """Something that a call holds."""


@pytest.mark.parametrize("num_turns", [0, 1, 3, 4])
def test_what_a_call_held_is_gone_when_it_is_over(pool: ThreadPoolExecutor, num_turns: int) -> None:
    """At once: nothing waits for the collector, whether it was closed, came to its end or failed."""

    class Work:
        """As a request: it has the call that runs it, and goes on in what the call handed out."""

        def __init__(self) -> None:
            self.held = Held()
            self.call = SteppedCall(pool, self.run)

        def run(self, put: Callable[[int], None]) -> None:
            held = Held()
            seen.add(held)
            for i in range(2):
                put(i)
            raise ValueError(held)

    seen: weakref.WeakSet[Held] = weakref.WeakSet()
    work = Work()
    seen.add(work.held)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            for _ in range(num_turns):
                work.call.advance()
        work.call.close()
        del work
        pool.submit(int).result()  # the thread has let go of the call that it ran
        assert len(seen) == 0
    finally:
        gc.enable()


def test_calls_take_turns(pool: ThreadPoolExecutor) -> None:
    running: list[str] = []

    def work(name: str) -> Callable[[Callable[[int], None]], None]:
        def run(put: Callable[[int], None]) -> None:
            for i in range(5):
                running.append(name)
                assert len(running) == 1
                running.clear()
                put(i)

        return run

    left, right = SteppedCall(pool, work("left")), SteppedCall(pool, work("right"))
    assert [(left.advance(), right.advance()) for _ in range(5)] == [(i, i) for i in range(5)]
    assert (left.advance(), right.advance()) == (None, None)


def test_error_is_raised_where_it_is_advanced(pool: ThreadPoolExecutor) -> None:
    def fail(put: Callable[[int], None]) -> None:
        put(1)
        raise ValueError("no")

    call = SteppedCall(pool, fail)
    assert call.advance() == 1
    with pytest.raises(ValueError, match="no"):
        call.advance()
    assert call.advance() is None
    call.close()


def test_close_ends_it_where_it_waits_and_frees_its_thread(pool: ThreadPoolExecutor) -> None:
    is_cleaned = threading.Event()

    def endless(put: Callable[[int], None]) -> None:
        try:
            while True:
                with contextlib.suppress(Exception):  # a library that goes on whatever happens
                    put(1)
        finally:
            is_cleaned.set()

    for _ in range(5):
        call = SteppedCall(pool, endless)
        call.advance()
        is_cleaned.clear()
        call.close()
        call.close()
        assert is_cleaned.is_set()
        assert call.advance() is None


def test_call_that_never_began_closes(pool: ThreadPoolExecutor) -> None:
    call: SteppedCall[int] = SteppedCall(pool, lambda put: put(1))
    call.close()

    assert call.advance() is None
