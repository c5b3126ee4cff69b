"""A stage's side of sleep: it waits for the last request, obeys the last order, and answers each that it obeyed."""

from __future__ import annotations

import pytest

from omni_bus.core.effects import Send, SetLevel
from omni_bus.core.member import Member, coordinator_peer
from omni_bus.core.resting import Resting
from omni_bus.errors import BadInput
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, Rest, Rested


class Stage:
    """One that may be busy, and what it said."""

    def __init__(self) -> None:
        self.is_empty = True
        self.member = Member(Peer("llm.0", 1, "e"), "stage", coordinator_peer("c"))
        self.resting = Resting(self.member, lambda: self.is_empty)

    def gets(self, number: int, level: int) -> list[object]:
        return self.seen(self.resting.on_rest(Rest(number, level)))

    def has_done_it(self, error: BadInput | None = None, *, is_broken: bool = False) -> list[object]:
        return self.seen(self.resting.on_level(error, is_broken=is_broken))

    def seen(self, effects: list) -> list[object]:
        """Orders to the engine as they are; answers as number, level and what went wrong."""
        sent = [effect.frame if isinstance(effect, Send) else effect for effect in effects]
        return [
            (frame.number, frame.level, frame.error and frame.error.message) if isinstance(frame, Rested) else frame
            for frame in sent
            if isinstance(frame, Rested | SetLevel)
        ]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_engine_sleeps_and_wakes_and_each_order_is_answered_once(stage: Stage) -> None:
    assert stage.gets(1, 2) == [SetLevel(2)]
    assert stage.gets(1, 2) == [], "it came again"
    assert stage.has_done_it() == [(1, 2, None)]
    assert stage.gets(2, 2) == [(2, 2, None)]
    assert stage.gets(3, 1) == [(3, 2, "level: 1 came (allowed: 2, at which it sleeps, until it is woken)")]
    assert stage.gets(4, 0) == [SetLevel(0)]
    assert stage.has_done_it() == [(4, 0, None)]
    assert stage.resting.is_idle


def test_engine_is_not_put_to_sleep_with_a_request(stage: Stage) -> None:
    stage.is_empty = False
    assert stage.gets(1, 1) == []
    assert stage.seen(stage.resting.go_on()) == []
    stage.is_empty = True
    assert stage.seen(stage.resting.go_on()) == [SetLevel(1)]


def test_order_to_wake_takes_the_place_of_one_to_sleep_that_waits(stage: Stage) -> None:
    stage.is_empty = False
    stage.gets(1, 1)
    assert stage.gets(2, 0) == [(2, 0, None)]
    stage.is_empty = True
    assert (stage.seen(stage.resting.go_on()), stage.resting.is_idle) == ([], True)


def test_order_that_comes_while_another_is_carried_out_is_next(stage: Stage) -> None:
    stage.gets(1, 1)
    assert stage.gets(2, 0) == []
    assert stage.has_done_it() == [(1, 1, None), SetLevel(0)]
    assert stage.has_done_it() == [(2, 0, None)]


def test_engine_that_can_not_is_as_before(stage: Stage) -> None:
    stage.gets(1, 1)
    assert stage.has_done_it(BadInput("level: no")) == [(1, 0, "level: no")]
    assert stage.gets(2, 0) == [(2, 0, None)]


def test_engine_that_broke_on_its_way_to_sleep_counts_as_asleep_until_it_was_loaded_again(stage: Stage) -> None:
    stage.gets(1, 2)
    assert stage.has_done_it(BadInput("half of it is gone"), is_broken=True) == [(1, 2, "half of it is gone")]
    assert stage.gets(2, 0) == [SetLevel(0)]
    assert stage.has_done_it(BadInput("nor does it load"), is_broken=True) == [(2, 2, "nor does it load")]
    assert stage.gets(3, 0) == [SetLevel(0)]
    assert stage.has_done_it() == [(3, 0, None)]


def test_hello_says_that_the_engine_is_to_sleep(stage: Stage) -> None:
    """Whoever hears it for the first time may not know who has told it, and binds nothing to it."""

    def level() -> int:
        return next(
            e.frame.level for e in stage.member.start(1.0) if isinstance(e, Send) and isinstance(e.frame, Hello)
        )

    stage.is_empty = False
    stage.gets(1, 1)
    assert level() == 1, "once it is empty"
    stage.gets(2, 0)
    assert level() == 0, "no more"
    stage.is_empty = True
    stage.gets(3, 2)
    assert level() == 2, "the engine is at it"
    stage.has_done_it(BadInput("level: no"))
    assert level() == 0
    stage.gets(4, 2)
    stage.has_done_it()
    stage.gets(5, 0)
    assert level() == 2, "it wakes"
    stage.has_done_it()
    assert level() == 0
