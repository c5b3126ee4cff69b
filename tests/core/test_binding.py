from omni_bus.core.binding import Bindings
from omni_bus.core.membership import Membership
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello


def replicas(count: int):
    membership = Membership()
    for number in range(count):
        membership.join(Hello(1, Peer(f"llm.{number}", 1, "e"), "stage", "llm", number, is_ready=True), 0.0)
    return membership.replicas("llm")


def test_least_outstanding_replica_is_chosen():
    bindings = Bindings()
    three = replicas(3)

    assert [bindings.bind(three).actor for _ in range(4)] == ["llm.0", "llm.1", "llm.2", "llm.0"]
    bindings.release(three[1].sender)
    assert bindings.bind(three).actor == "llm.1"
    assert bindings.total == 4


def test_adopted_work_counts():
    bindings = Bindings()
    two = replicas(2)
    bindings.rebind(two[0].sender)

    assert bindings.bind(two).actor == "llm.1"
    assert bindings.outstanding(two[0].sender) == 1


def test_released_work_leaves_nothing():
    bindings = Bindings()
    two = replicas(2)
    peer = bindings.bind(two)
    bindings.release(peer.sender)

    assert bindings.total == 0
    assert bindings._outstanding == {}
