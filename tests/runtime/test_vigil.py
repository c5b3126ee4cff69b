from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_bus.errors import Unavailable
from omni_bus.runtime import vigil
from omni_bus.runtime.vigil import Vigil

if TYPE_CHECKING:
    from collections.abc import Callable


class Waiters:
    """Requests that wait, and a coordinator that answers as told."""

    def __init__(self, *waiting: str, answers: Callable[[], None] | None) -> None:
        self.waiting = set(waiting)
        self.given_up: list[set[str]] = []
        self.num_asked = 0
        self.changed = asyncio.Event()
        self._answers = answers
        self.vigil = Vigil(waiting=lambda: set(self.waiting), ask=self._ask, give_up=self._give_up)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _ask(self) -> None:
        self.num_asked += 1
        self.changed.set()
        if self._answers is None:
            await asyncio.get_running_loop().create_future()
        else:
            self._answers()

    def _give_up(self, requests: set[str]) -> None:
        self.given_up.append(requests)
        self.waiting -= requests
        self.changed.set()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "ANSWER_S", 0.01)


def _fails() -> None:
    raise Unavailable("the coordinator was lost before it answered")


@pytest.mark.parametrize("answers", [lambda: None, _fails], ids=["answer", "error"])
async def test_who_waits_for_a_coordinator_that_answers_waits_on(answers: Callable[[], None]) -> None:
    waiters = Waiters("a", answers=answers)
    waiters.vigil.begin()

    await waiters.until(lambda: waiters.num_asked == 5)
    assert waiters.given_up == []
    waiters.vigil.close()


async def test_silence_ends_the_wait_of_those_who_were_there_when_it_was_asked() -> None:
    waiters = Waiters("a", "b", answers=None)
    waiters.vigil.begin()
    await waiters.until(lambda: waiters.num_asked == 1)
    waiters.waiting -= {"b"}
    waiters.waiting |= {"c"}

    await waiters.until(lambda: len(waiters.given_up) == 2)
    assert waiters.given_up == [{"a"}, {"c"}]
    waiters.vigil.close()


async def test_nobody_is_asked_while_nobody_waits() -> None:
    waiters = Waiters(answers=None)
    waiters.vigil.begin()
    waiters.vigil.begin()
    assert waiters.vigil._timer is not None
    waiters.vigil._timer.cancel()

    waiters.vigil._look()

    assert waiters.num_asked == 0
    assert waiters.vigil._timer is None


async def test_closing_drops_the_question() -> None:
    waiters = Waiters("a", answers=None)
    waiters.vigil.begin()
    await waiters.until(lambda: waiters.num_asked == 1)
    question = waiters.vigil._question
    assert question is not None

    waiters.vigil.close()

    with pytest.raises(asyncio.CancelledError):
        await question
    assert waiters.given_up == []
