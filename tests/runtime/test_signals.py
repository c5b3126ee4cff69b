"""The wish to stop: one signal, its echo, and a second one that is meant."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from omni_bus.runtime.signals import ECHO_S, RETIRE, Stop


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def clock_and_stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, RETIRE)}
    clock = Clock()
    yield clock, Stop(clock=clock)
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_signal_asks_to_drain(clock_and_stop) -> None:
    _, stop = clock_and_stop

    os.kill(os.getpid(), signal.SIGTERM)
    await stop.requested.wait()

    assert not stop.forced.is_set()


@pytest.mark.parametrize("after_s", [0.0, ECHO_S * 0.9])
async def test_echo_of_a_signal_forces_nothing(clock_and_stop, after_s: float) -> None:
    clock, stop = clock_and_stop

    stop.request(signal.SIGTERM)
    clock.now_s += after_s
    stop.request(signal.SIGTERM)

    assert not stop.forced.is_set()


@pytest.mark.parametrize("after_s", [ECHO_S * 1.1, 60.0])
async def test_second_signal_forces(clock_and_stop, after_s: float) -> None:
    clock, stop = clock_and_stop

    stop.request(signal.SIGTERM)
    clock.now_s += after_s
    stop.request(signal.SIGTERM)

    assert stop.forced.is_set()


async def test_echo_does_not_put_the_second_wish_off(clock_and_stop) -> None:
    clock, stop = clock_and_stop

    stop.request(signal.SIGTERM)
    for _ in range(3):
        clock.now_s += ECHO_S * 0.6
        stop.request(signal.SIGTERM)

    assert stop.forced.is_set()


async def test_another_signal_forces_at_once(clock_and_stop) -> None:
    _, stop = clock_and_stop

    stop.request(signal.SIGTERM)
    stop.request(signal.SIGINT)

    assert stop.forced.is_set()


@pytest.mark.parametrize("is_clean", [True, False])
async def test_drain_says_how_it_ended(is_clean) -> None:
    stop = Stop(with_interrupt=True)
    stop.request(signal.SIGTERM)

    async def drain() -> bool:
        return is_clean

    assert await stop.drained(drain()) is is_clean


async def test_second_wish_cuts_a_drain_short() -> None:
    stop = Stop(with_interrupt=True)
    stop.request(signal.SIGTERM)
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


# --- only this process is to leave --------------------------------------------------------------------------


async def test_retiring_is_a_wish_of_its_own(clock_and_stop) -> None:
    _, stop = clock_and_stop
    assert not stop.is_retiring

    os.kill(os.getpid(), RETIRE)
    await stop.requested.wait()

    assert stop.is_retiring
    assert not stop.ordered.is_set()


async def test_stop_of_all_comes_before_retiring_and_is_not_yet_a_second_wish(clock_and_stop) -> None:
    _, stop = clock_and_stop
    os.kill(os.getpid(), RETIRE)
    await stop.requested.wait()

    stop.request(signal.SIGTERM)

    assert not stop.is_retiring
    assert not stop.forced.is_set()
    stop.request(signal.SIGINT)
    assert stop.forced.is_set()


async def test_supervisor_does_not_retire() -> None:
    assert signal.getsignal(RETIRE) is signal.SIG_DFL
    Stop(with_interrupt=True)

    assert signal.getsignal(RETIRE) is signal.SIG_DFL


async def test_work_goes_on_unless_all_stop(clock_and_stop) -> None:
    _, stop = clock_and_stop
    was_cut, has_begun = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            has_begun.set()
            await asyncio.Event().wait()
        finally:
            was_cut.set()

    working = asyncio.create_task(stop.unless_ordered(work()))
    await has_begun.wait()
    stop.request(signal.SIGTERM)
    await working
    await was_cut.wait()


async def test_work_that_is_done_is_not_waited_for_twice_and_its_failure_is_told(clock_and_stop) -> None:
    _, stop = clock_and_stop

    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    await stop.unless_ordered(work(None))
    with pytest.raises(RuntimeError, match="no"):
        await stop.unless_ordered(work(RuntimeError("no")))
