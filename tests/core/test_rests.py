"""Orders to sleep and wake: each ends once, whoever leaves meanwhile."""

from __future__ import annotations

import pytest

from omni_bus.core.effects import DropTimer, Send, SetTimer
from omni_bus.core.membership import Membership
from omni_bus.core.rests import REPEAT_S, Rests
from omni_bus.errors import BadInput
from omni_bus.ids import Peer
from omni_bus.wire.frames import AdminReply, Hello, Rest, Rested

ASKER = Peer("supervisor", 1, "s")


@pytest.fixture
def members() -> Membership:
    membership = Membership()
    for n in range(2):
        membership.join(Hello(1, Peer(f"llm.{n}", 1, f"e{n}"), "stage", "llm", n, is_ready=True), 0.0)
    membership.join(Hello(1, Peer("voice.0", 1, "v"), "stage", "voice", 0), 0.0)
    return membership


def begin(rests: Rests, *actors: str, level: int = 2) -> list:
    return rests.begin(ASKER, 7, {"actors": list(actors), "level": level}, 10.0)


def reply(failed: dict[str, str]) -> list:
    return [DropTimer(("rest", "1")), Send(ASKER, AdminReply(7, {"failed": failed}))]


def test_order_ends_with_the_last_answer_and_says_what_failed(members: Membership) -> None:
    rests = Rests(members)
    one, other = members.present("llm")
    order = Rest(1, 2)
    told = [Send(one.peer, order), Send(other.peer, order), SetTimer(("rest", "1"), 10.0 + REPEAT_S)]
    assert begin(rests, "llm.0", "llm.1", "voice.0", "nobody") == told

    assert rests.on_rested(one, Rested(1)) == []
    assert rests.on_rested(one, Rested(1)) == [], "it says so twice"
    assert rests.repeat(1, 15.0) == [Send(other.peer, order), SetTimer(("rest", "1"), 15.0 + REPEAT_S)]

    failed = {"voice.0": "it is not ready", "nobody": "it is not ready", "llm.1": "level: no"}
    assert rests.on_rested(other, Rested(1, BadInput("level: no").to_info())) == reply(failed)
    assert (rests.repeat(1, 20.0), rests.on_rested(other, Rested(1))) == ([], [])


def test_order_to_nobody_who_can_is_answered_at_once(members: Membership) -> None:
    assert begin(Rests(members), "voice.0") == reply({"voice.0": "it is not ready"})
    assert begin(Rests(members)) == reply({})


def test_replica_that_is_gone_keeps_nobody_waiting(members: Membership) -> None:
    rests = Rests(members)
    begin(rests, "llm.0")

    assert rests.on_leave(members.present("voice")[0]) == []
    assert rests.on_leave(members.present("llm")[0]) == reply({"llm.0": "its process ended"})


def test_order_of_somebody_who_is_gone_leaves_no_timer(members: Membership) -> None:
    rests = Rests(members)
    begin(rests, "llm.0")
    asker = members.join(Hello(1, ASKER, "supervisor"), 0.0)

    assert rests.on_leave(asker) == [DropTimer(("rest", "1"))]
    assert rests.repeat(1, 15.0) == []


@pytest.mark.parametrize("args", [{}, {"actors": ["llm.0"], "level": 3}, {"actors": "llm.0", "level": 1}])
def test_malformed_order_is_refused(members: Membership, args: dict) -> None:
    with pytest.raises(BadInput, match="operation 'rest'"):
        Rests(members).begin(ASKER, 7, args, 10.0)
