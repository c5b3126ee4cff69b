from omni_bus.core.membership import Membership
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello


def hello(actor: str, incarnation: int = 1, *, stage: str = "llm", replica: int = 0, is_ready: bool = True) -> Hello:
    return Hello(1, Peer(actor, incarnation, "e"), "stage", stage, replica, is_ready)


def test_only_the_very_incarnation_is_known():
    membership = Membership()
    actor = membership.join(hello("llm.0"), 1.0)

    assert membership.get(Peer("llm.0", 1, "").sender) is actor
    assert membership.get(Peer("llm.0", 2, "").sender) is None


def test_newcomer_replaces_another_incarnation_or_stage():
    membership = Membership()
    actor = membership.join(hello("llm.0"), 1.0)

    assert membership.former(hello("llm.0")) is None
    assert membership.former(hello("llm.0", 2)) is actor
    assert membership.former(hello("llm.0", stage="voice")) is actor
    assert membership.former(hello("llm.1")) is None


def test_ready_replicas_come_in_order_of_number():
    membership = Membership()
    for number in (2, 0, 1):
        membership.join(hello(f"llm.{number}", replica=number, is_ready=number != 1), 0.0)

    assert [actor.replica for actor in membership.replicas("llm")] == [0, 2]
    assert membership.replicas("voice") == []


def test_repeated_hello_keeps_the_time_of_joining():
    membership = Membership()
    membership.join(hello("llm.0", is_ready=False), 1.0)
    again = membership.join(hello("llm.0"), 5.0)

    assert (again.since, again.seen_at, again.phase) == (1.0, 5.0, "ready")


def test_who_left_is_gone_from_every_table():
    membership = Membership()
    actor = membership.join(hello("llm.0"), 0.0)
    membership.leave(actor)
    membership.leave(actor)

    assert list(membership) == []
    assert membership.replicas("llm") == []


def test_former_actor_leaving_late_does_not_remove_the_new_one():
    membership = Membership()
    former = membership.join(hello("llm.0"), 0.0)
    actor = membership.join(hello("llm.0", 2), 1.0)
    membership.leave(former)

    assert membership.replicas("llm") == [actor]
