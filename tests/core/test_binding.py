from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.core import binding
from omni_bus.core.binding import BLOCK_TOKENS, MAX_REMEMBERED_BLOCKS, UNTOLD_TOKENS, Bindings, Routing
from omni_bus.core.membership import Actor, Membership
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, Submit


def replicas(count: int) -> list[Actor]:
    membership = Membership()
    for number in range(count):
        membership.join(Hello(1, Peer(f"llm.{number}", 1, "e"), "stage", "llm", number, is_ready=True), 0.0)
    return list(membership.replicas("llm"))


NUMBERS = count()


def asks(**fields: Any) -> Submit:
    return Submit(f"r{next(NUMBERS)}", "chat", (), **fields)


def again(submit: Submit) -> Submit:
    """Another request for the same."""
    return msgspec.structs.replace(submit, request=f"r{next(NUMBERS)}")


PLAIN = asks()


class Stage:
    """Binds to the replicas of one stage, and says which by number."""

    def __init__(self, count: int, routing: Routing = "prefix") -> None:
        self.bindings = Bindings()
        self.bound: dict[int, list[str]] = {}
        self.replicas = replicas(count)
        self.routing: Routing = routing

    def bind(self, submit: Submit = PLAIN, *, among: tuple[int, ...] = (), is_entry: bool = True) -> int:
        found = [actor for actor in self.replicas if not among or actor.replica in among]
        request = again(submit)
        peer = self.bindings.bind("llm", found, request, self.routing, is_entry=is_entry)
        number = int(peer.actor.removeprefix("llm."))
        self.bound.setdefault(number, []).append(request.request)
        return number

    def release(self, number: int) -> None:
        """End what was bound first there."""
        self.bindings.release("llm", self.replicas[number].sender, self.bound[number].pop(0))

    def work(self, number: int) -> int:
        return self.bindings._tokens[self.replicas[number].sender]


def test_least_outstanding_replica_is_chosen() -> None:
    stage = Stage(3)

    assert [stage.bind() for _ in range(4)] == [0, 1, 2, 0]
    stage.release(1)
    assert stage.bind() == 1
    assert stage.bindings.total == 4


def test_tokens_weigh_not_requests() -> None:
    stage = Stage(2)
    long, short = asks(tokens=1000), asks(tokens=100)

    assert stage.bind(long) == 0
    assert [stage.bind(short) for _ in range(9)] == [1] * 9
    assert stage.bind(short) == 1  # 900 there, 1000 here
    stage.release(0)
    assert stage.bind(short) == 0


def test_untold_work_counts_as_much_as_told_work_of_that_size() -> None:
    stage = Stage(2)

    assert stage.bind() == 0
    assert stage.bind(asks(tokens=UNTOLD_TOKENS)) == 1
    assert stage.bind() == 0


def test_adopted_work_counts() -> None:
    stage = Stage(2)
    stage.bindings.rebind("llm", stage.replicas[0].sender, PLAIN)

    assert stage.bind() == 1
    assert stage.bindings.outstanding(stage.replicas[0].sender) == 1


def test_prompt_goes_where_its_beginning_was_seen_until_that_replica_is_busier_by_what_it_saves() -> None:
    stage = Stage(2)
    shared = tuple(range(10))
    ask = asks(tokens=11 * BLOCK_TOKENS, prefix=shared)
    assert stage.bind(ask) == 0
    stage.release(0)
    stage.bind(asks(tokens=9 * BLOCK_TOKENS), among=(0,))

    assert stage.bind(ask) == 0  # nine blocks of work there, ten are saved
    assert stage.bind(ask) == 1  # ten blocks of work there, and fewer requests here
    assert stage.bindings.num_cached(stage.replicas[1].sender, shared) == 10


def test_running_requests_count_without_what_was_cached_for_them() -> None:
    stage = Stage(2)
    ask = asks(tokens=11 * BLOCK_TOKENS, prefix=tuple(range(10)))
    assert stage.bind(ask) == 0
    assert stage.work(0) == 11 * BLOCK_TOKENS
    assert stage.bind(ask) == 1  # both compute it
    stage.release(0)

    assert [stage.bind(ask) for _ in range(10)] == [0] * 10
    assert (stage.work(0), stage.work(1)) == (10 * BLOCK_TOKENS, 11 * BLOCK_TOKENS)
    stage.release(1)
    assert [stage.bind(ask) for _ in range(9)] == [1] * 9


def test_more_blocks_than_tokens_count_as_no_work() -> None:
    stage = Stage(1)
    ask = asks(tokens=BLOCK_TOKENS, prefix=(1, 2, 3))
    stage.bind(ask)
    stage.bind(ask)

    assert stage.work(0) == BLOCK_TOKENS


def test_only_the_beginning_counts() -> None:
    stage = Stage(2)
    ask = asks(tokens=640, prefix=(1, 2, 3))
    stage.release(stage.bind(ask))
    seen = stage.replicas[0].sender

    assert [stage.bindings.num_cached(seen, prefix) for prefix in [(1, 2, 3, 4), (1, 9, 3), (9,), ()]] == [3, 1, 0, 0]


@pytest.mark.parametrize(("routing", "is_entry"), [("least_tokens", True), ("prefix", False)])
def test_prefixes_matter_only_where_they_are_asked_for_and_read(routing: Routing, is_entry: bool) -> None:  # noqa: FBT001
    stage = Stage(2, routing)
    ask = asks(tokens=640, prefix=(1, 2, 3))

    assert [stage.bind(ask, is_entry=is_entry) for _ in range(4)] == [0, 1, 0, 1]
    assert not stage.bindings._seen


def test_lost_replica_has_seen_nothing() -> None:
    stage = Stage(1)
    ask = asks(prefix=(1, 2))
    stage.bind(ask)
    stage.bindings.forget(stage.replicas[0].sender)

    assert stage.bindings.num_cached(stage.replicas[0].sender, (1, 2)) == 0


def test_memory_of_prefixes_is_bounded_and_keeps_what_is_shared() -> None:
    stage = Stage(1)
    for i in range(MAX_REMEMBERED_BLOCKS):
        ask = asks(prefix=(-1, -2, i))
        stage.release(stage.bind(ask))

    seen = stage.bindings._seen[stage.replicas[0].sender]
    assert len(seen) == MAX_REMEMBERED_BLOCKS
    assert -1 in seen
    assert 0 not in seen


def test_session_stays_with_its_replica_while_that_may_be_bound() -> None:
    stage = Stage(3)
    mine, other = asks(session="s", key="me"), asks(session="s", key="you")

    assert stage.bind(mine) == 0
    assert [stage.bind(mine) for _ in range(3)] == [0, 0, 0]
    assert stage.bind(other) == 1  # another caller's session of the same name
    assert stage.bind(mine, among=(1, 2)) == 2
    assert stage.bind(mine) == 2  # where it went, its state is now


def test_memory_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "MAX_SESSIONS", 2)
    stage = Stage(2)
    for name in ("a", "b", "c"):
        stage.bind(asks(session=name))

    assert [session for _, session, _ in stage.bindings._sessions] == ["b", "c"]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    stage = Stage(3, "round_robin")

    assert [stage.bind(asks(tokens=n)) for n in (1000, 1, 1, 1)] == [0, 1, 2, 0]
    assert [stage.bind(among=(0, 2)) for _ in range(3)] == [2, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 5000), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["", "s"]))))
def test_released_work_leaves_nothing(work: list[tuple[int, list[int], str]]) -> None:
    stage = Stage(3)
    bound = [stage.bind(asks(tokens=tokens, prefix=tuple(prefix), session=session)) for tokens, prefix, session in work]
    assert stage.bindings.total == len(bound)
    for number in bound:
        stage.release(number)

    assert (stage.bindings.total, stage.bindings._outstanding, stage.bindings._tokens) == (0, {}, {})
    assert not stage.bindings._work


PROMPTS = [(), (1,), (1, 2), (1, 2, 3), (1, 4), (5, 6, 7, 8)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 600), st.sampled_from(PROMPTS))))
def test_work_is_what_each_request_was_told_less_what_its_replica_had_seen(
    steps: list[tuple[bool, int, tuple[int, ...]]],
) -> None:
    stage = Stage(3)
    expected: list[list[int]] = [[], [], []]
    seen: list[set[int]] = [set(), set(), set()]
    for ends, tokens, prefix in steps:
        busy = next((number for number in range(3) if expected[number]), None)
        if ends and busy is not None:
            stage.release(busy)
            expected[busy].pop(0)
        else:
            todo = [
                max(0, tokens - BLOCK_TOKENS * sum(set(prefix[: i + 1]) <= known for i in range(len(prefix))))
                for known in seen
            ]
            costs = [(sum(expected[i]) + todo[i], len(expected[i]), i) for i in range(3)]
            chosen = stage.bind(asks(tokens=tokens, prefix=prefix))
            assert chosen == min(costs)[2]
            expected[chosen].append(todo[chosen])
            seen[chosen] |= set(prefix)
        assert [stage.work(number) for number in range(3)] == [sum(counts) for counts in expected]
