"""Orders to sleep and wake: each ends once, whoever leaves meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_bus.core.effects import DropTimer, Report, Send, SetTimer
from omni_bus.core.membership import Membership
from omni_bus.core.rests import MAX_REPEAT_S, REPEAT_S, Rests
from omni_bus.errors import BadInput
from omni_bus.ids import Peer
from omni_bus.wire.frames import AdminReply, Hello, Rest, Rested

if TYPE_CHECKING:
    from omni_bus.core.membership import Actor

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

    assert rests.on_rested(one, Rested(1, level=2), 11.0) == []
    assert rests.on_rested(one, Rested(1, level=2), 11.0) == [], "it says so twice"
    assert rests.on_timer(1, 15.0) == [Send(other.peer, order), SetTimer(("rest", "1"), 15.0 + REPEAT_S)]

    failed = {"voice.0": "it is not ready", "nobody": "it is not ready", "llm.1": "level: no"}
    assert rests.on_rested(other, Rested(1, BadInput("level: no").to_info()), 16.0) == reply(failed)
    assert (rests.on_timer(1, 20.0), rests.on_rested(other, Rested(1), 20.0)) == ([], [])


def test_answer_to_a_former_coordinator_is_taken_for_what_it_says(members: Membership) -> None:
    """Orders of each coordinator are numbered from 1, and a replica may still carry out one of the last."""
    rests = Rests(members)
    one = members.present("llm")[0]

    assert rests.on_rested(one, Rested(4, level=2), 10.0) == []
    assert one.level == 2
    woken = rests.settle(lambda _: 0, lambda _: 0, 10.0)
    assert woken[0] == Send(one.peer, Rest(1, 0)), "nobody here has it sleep"

    assert rests.on_rested(one, Rested(1, level=2), 11.0) == [], "a former coordinator's order 1"
    assert (one.level, one.told) == (2, 1)
    assert rests.on_rested(one, Rested(1, level=0), 12.0) == [DropTimer(("rest", "1"))]
    assert (one.level, one.told) == (0, 0)


@pytest.mark.parametrize("incarnation", [1, 2])
def test_order_may_still_be_on_its_way_to_whoever_was_taken_for_gone(members: Membership, incarnation: int) -> None:
    """Its hello may be older than that; a new process of its name is told nothing by the old one's connection."""
    rests = Rests(members)
    begin(rests, "llm.0")
    gone = members.present("llm")[0]
    members.leave(gone)
    rests.on_leave(gone)

    back = members.join(Hello(1, Peer("llm.0", incarnation, "e0"), "stage", "llm", 0, is_ready=True), 20.0)
    rests.on_join(back)
    assert back.level == (2 if incarnation == 1 else 0)
    rests.compare("llm.0")
    woken = rests.settle(lambda _: 0, lambda _: 0, 20.0)
    if incarnation != 1:
        assert woken == []
        return
    assert woken[0] == Send(back.peer, Rest(2, 0)), "nobody has it sleep any more"
    assert rests.on_rested(back, Rested(1, level=2), 21.0) == [], "what it was told before"
    assert back.level == 2
    rests.on_rested(back, Rested(2, level=0), 22.0)
    assert (back.level, back.told) == (0, 0)


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
    assert rests.on_timer(1, 15.0) == []


def none(name: str) -> int:
    """Nothing is outstanding, or everybody is to be awake."""
    return 0


def unasked(members: Membership, name: str) -> tuple[Rests, Actor]:
    """Have a replica woken that nobody asked for: it sleeps, and is arranged to be awake."""
    rests, actor = Rests(members), members.named(name)
    assert actor is not None
    actor.level = 2
    rests.compare(name)
    assert Send(actor.peer, Rest(1, 0)) in rests.settle(none, none, 10.0)
    return rests, actor


def test_replica_that_does_not_wake_is_reported_once_for_each_reason_and_tried_ever_more_rarely(
    members: Membership,
) -> None:
    rests, actor = unasked(members, "llm.0")
    now, pauses, told = 10.0, [], []
    for why in ["no memory"] * 6 + ["no file", "no memory"]:
        *reports, timer = rests.on_rested(actor, Rested(1, BadInput(why).to_info(), 2), now)
        told += [report.fields for report in reports if isinstance(report, Report)]
        assert isinstance(timer, SetTimer)
        pauses.append(timer.at - now)
        now = timer.at
        assert rests.on_timer(1, now)[0] == Send(actor.peer, Rest(1, 0))

    assert told == [{"name": "llm.0", "error": why} for why in ("no memory", "no file", "no memory")]
    assert pauses == [5.0, 10.0, 20.0, 40.0, MAX_REPEAT_S, MAX_REPEAT_S, MAX_REPEAT_S, MAX_REPEAT_S]
    assert rests.on_rested(actor, Rested(1), now) == [DropTimer(("rest", "1"))]
    assert actor.level == 0


@pytest.mark.parametrize("level", [0, 2])
def test_order_is_over_when_nobody_makes_progress_any_more(members: Membership, level: int) -> None:
    """Each has the time anew from its own last sign of progress; what is given up is named, the others count."""
    rests = Rests(members)
    one, other = members.present("llm")
    begun = rests.begin(ASKER, 7, {"actors": ["llm.0", "llm.1"], "level": level, "timeout_s": 12.0}, 10.0)
    assert begun[-1] == SetTimer(("rest", "1"), 15.0)
    one.phase = "weights"
    rests.on_progress(one, 14.0)
    rests.on_timer(1, 15.0)
    assert rests.on_timer(1, 20.0)[-1] == SetTimer(("rest", "1"), 22.0), "not later than somebody's time is over"

    assert rests.on_timer(1, 22.0) == [Send(one.peer, Rest(1, level)), SetTimer(("rest", "1"), 26.0)]
    failed = {name: f"no progress for 12 s in phase '{phase}' (start_timeout_s)" for name, phase in PHASES}
    assert rests.on_timer(1, 26.0) == reply(failed)
    # One that wakes after all is what it is arranged to be, which is told to it at once.
    told = rests.settle(lambda name: 2, none, 26.0)
    assert [effect.peer for effect in told if isinstance(effect, Send)] == ([] if level else [other.peer, one.peer])


PHASES = (("llm.1", "ready"), ("llm.0", "weights"))


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"actors": ["llm.0"], "level": 3},
        {"actors": "llm.0", "level": 1},
        {"actors": [], "level": 1, "timeout_s": 0},
    ],
)
def test_malformed_order_is_refused(members: Membership, args: dict) -> None:
    with pytest.raises(BadInput, match="operation 'rest'"):
        Rests(members).begin(ASKER, 7, args, 10.0)
