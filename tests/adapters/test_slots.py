"""Slots of keys and values, and whose beginnings go on where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapters.slots import Slots

PROMPT = list(range(40))


def read(slots: Slots, ids: list[int], key: object = "k") -> int:
    """Take a slot for a prompt, and read all of it."""
    slot = slots.take(ids, key).slot
    slots.hold(slot, len(ids))
    return slot


def test_prompt_goes_on_where_one_that_begins_so_was_read() -> None:
    slots = Slots(4, 8)
    slot = read(slots, PROMPT)
    slots.give_back(slot)

    assert slots.take([*PROMPT[:19], 99, 99], "k") == (slot, 16, slot)


def test_slot_that_is_in_use_is_copied() -> None:
    slots = Slots(4, 8)
    slot = read(slots, PROMPT)

    taken = slots.take(PROMPT, "k")
    assert (taken.source, taken.num_shared) == (slot, 32)
    assert taken.slot != slot


def test_last_token_is_always_computed() -> None:
    slots = Slots(4, 8)
    read(slots, PROMPT)

    assert slots.take(PROMPT[:16], "k").num_shared == 8
    assert slots.take(PROMPT[:17], "k").num_shared == 16


def test_only_what_was_read_is_shared() -> None:
    slots = Slots(4, 8)
    slot = slots.take(PROMPT, "k").slot
    assert slots.take(PROMPT, "k").num_shared == 0

    slots.hold(slot, 15)
    assert slots.take(PROMPT, "k").num_shared == 8


def test_another_key_and_none_share_nothing() -> None:
    slots = Slots(4, 8)
    read(slots, PROMPT)
    slots.take(PROMPT, None)

    assert [slots.take(PROMPT, key).num_shared for key in ("other", None)] == [0, 0]


def test_forgotten_slot_is_not_gone_on_from() -> None:
    slots = Slots(4, 8)
    slot = read(slots, PROMPT)
    slots.forget(slot)
    slots.give_back(slot)

    assert slots.take(PROMPT, "k").num_shared == 0


def test_what_was_read_last_is_kept_longest() -> None:
    slots = Slots(2, 8)
    first, second = read(slots, PROMPT), read(slots, PROMPT[::-1])
    slots.give_back(second)
    slots.give_back(first)

    assert slots.take([77] * 9, "k").slot == second
    assert slots.take(PROMPT, "k") == (first, 32, first)


def test_memory_that_was_used_last_is_used_first() -> None:
    slots = Slots(9, 8)
    slot = slots.take([1, 2], "k").slot
    slots.give_back(slot)

    assert slots.take([3, 4], "k").slot == slot


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(st.tuples(PROMPTS, st.integers(0, 12), st.booleans()), max_size=40))
def test_shared_tokens_are_those_that_the_source_holds(script: list[tuple[list[int], int, bool]]) -> None:
    """Against a pool that is written out: what is there after a take is what the prompt begins with."""
    slots = Slots(3, 2)
    pool: dict[int, list[int]] = {i: [] for i in range(3)}
    taken: list[int] = []
    for ids, num_read, is_over in script:
        if not slots.num_free:
            slots.give_back(taken.pop(0))
        found = slots.take(ids, "k")
        assert found.slot not in taken
        assert pool[found.source][: found.num_shared] == ids[: found.num_shared]
        assert found.num_shared < len(ids)
        num = max(found.num_shared, min(num_read, len(ids)))
        pool[found.slot] = ids[:num]
        slots.hold(found.slot, num)
        taken.append(found.slot)
        if is_over:
            slots.give_back(taken.pop())
    assert slots.num_free == 3 - len(taken)
