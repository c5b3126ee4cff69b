import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.core.credit import Grant, ReceiveCredit, SendCredit, Window
from omni_bus.errors import BadFrame


def test_sender_stops_when_chunks_run_out():
    credit = SendCredit(Window(2, 1000))
    for _ in range(2):
        assert credit.can_spend(10)
        credit.spend(10)

    assert not credit.can_spend(0)
    assert credit.left == Grant(0, 980)


def test_sender_stops_when_bytes_run_out():
    credit = SendCredit(Window(8, 100))
    credit.spend(40)
    credit.spend(40)

    assert not credit.can_spend(21)
    assert credit.can_spend(20)


def test_oversized_chunk_costs_half_the_window():
    credit = SendCredit(Window(8, 100))

    assert credit.can_spend(10_000)
    credit.spend(10_000)
    assert credit.left.bytes == 50


def test_old_and_repeated_grants_change_nothing():
    credit = SendCredit(Window(2, 100))
    credit.spend(10)
    credit.grant(Grant(3, 110))
    credit.grant(Grant(1, 20))
    credit.grant(Grant(3, 110))

    assert credit.left == Grant(2, 100)


@pytest.mark.parametrize("grant", [Grant(4, 100), Grant(3, 111)])
def test_grant_beyond_the_window_is_refused(grant):
    credit = SendCredit(Window(2, 100))
    credit.spend(10)

    with pytest.raises(BadFrame, match="beyond the window"):
        credit.grant(grant)
    assert credit.left == Grant(1, 90)


@pytest.mark.parametrize(("chunks", "num_bytes", "sizes"), [(1, 1000, [1, 1]), (8, 100, [60, 60, 60])])
def test_receiver_refuses_what_was_not_granted(chunks, num_bytes, sizes):
    credit = ReceiveCredit(Window(chunks, num_bytes))
    for size in sizes[:-1]:
        credit.receive(size)

    with pytest.raises(BadFrame, match="was granted"):
        credit.receive(sizes[-1])


def test_receiver_grants_in_batches_of_half_a_window():
    credit = ReceiveCredit(Window(4, 10_000))
    for _ in range(4):
        credit.receive(10)

    assert [credit.consume(10) for _ in range(4)] == [None, Grant(6, 10_020), None, Grant(8, 10_040)]
    assert credit.buffered == Grant(0, 0)


def test_discarding_grants_all_that_came_once():
    credit = ReceiveCredit(Window(4, 1000))
    credit.receive(10)
    credit.receive(600)

    assert credit.consume_all() == Grant(6, 1510)
    assert credit.consume_all() is None


@given(chunks=st.integers(1, 5), num_bytes=st.integers(1, 300), sizes=st.lists(st.integers(0, 700), max_size=40))
def test_sender_is_never_stuck_once_all_is_consumed(chunks, num_bytes, sizes):
    """Whatever was kept back of the grants, any next chunk may go."""
    window = Window(chunks, num_bytes)
    sender, receiver = SendCredit(window), ReceiveCredit(window)
    for size in sizes:
        assert sender.can_spend(size)
        sender.spend(size)
        receiver.receive(size)
        grant = receiver.consume(size)
        if grant is not None:
            sender.grant(grant)
        assert min(sender.left) >= 0
