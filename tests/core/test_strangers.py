from omni_bus.core.effects import Forget, SetTimer
from omni_bus.core.membership import Membership
from omni_bus.core.strangers import MAX_STRANGERS, Strangers
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello

STRANGER, OTHER = Peer("a", 1, "a"), Peer("b", 2, "b")


def test_way_is_closed_when_its_time_since_the_last_frame_is_over():
    strangers = Strangers(Membership(), 5.0)
    assert strangers.met(STRANGER, 0.0) == [SetTimer(("strangers", ""), 5.0)]
    assert strangers.met(OTHER, 1.0) == strangers.met(STRANGER, 2.0) == []

    assert strangers.on_timer(5.0) == [SetTimer(("strangers", ""), 6.0)]
    assert strangers.on_timer(6.0) == [Forget(OTHER), SetTimer(("strangers", ""), 7.0)]
    assert strangers.on_timer(7.0) == [Forget(STRANGER)]
    assert strangers.met(STRANGER, 8.0) == [SetTimer(("strangers", ""), 13.0)]


def test_way_to_who_became_a_member_stays_open():
    membership = Membership()
    strangers = Strangers(membership, 5.0)
    strangers.met(STRANGER, 0.0)
    membership.join(Hello(1, STRANGER, "gateway"), 1.0)

    assert strangers.on_timer(5.0) == []


def test_ways_are_limited():
    strangers = Strangers(Membership(), 5.0)
    for number in range(MAX_STRANGERS):
        strangers.met(Peer("a", number, "a"), 0.0)

    assert strangers.met(OTHER, 0.0) == [Forget(Peer("a", 0, "a"))]
    assert len(strangers) == MAX_STRANGERS
