import pytest

from omni_bus.core.admission import Admission, AdmissionCounts
from omni_bus.errors import Overloaded


def test_requests_run_up_to_the_limit_then_wait():
    admission = Admission("p", 2, 1)

    assert [admission.offer(request, 0) for request in "abc"] == [True, True, False]
    assert admission.counts == AdmissionCounts(2, 2, 1, 1)


def test_full_queue_refuses_at_once_and_says_so():
    admission = Admission("p", 1, 0)
    admission.offer("a", 0)

    with pytest.raises(Overloaded, match=r"max_in_flight 1.*max_queued 0") as caught:
        admission.offer("b", 0)
    assert caught.value.is_retry_safe
    assert caught.value.retry_after_s > 0


def test_newcomer_does_not_overtake_the_queue():
    admission = Admission("p", 1, 5)
    admission.offer("a", 0)
    admission.offer("b", 0)
    admission.leave("a")

    assert not admission.offer("c", 0)
    assert admission.next() == "b"


def test_higher_priority_goes_first_then_arrival():
    admission = Admission("p", 1, 5)
    for request, priority in [("a", 0), ("b", 0), ("c", 9), ("d", 9)]:
        admission.offer(request, priority)

    order = []
    for running in "abcd":
        admission.leave(order[-1] if order else running)
        order.append(admission.next())
    assert order == ["c", "d", "b", None]


def test_who_gave_up_is_skipped():
    admission = Admission("p", 1, 5)
    for request in "abc":
        admission.offer(request, 0)
    admission.leave("b")
    admission.leave("a")

    assert admission.next() == "c"
    assert admission.next() is None


def test_adopted_requests_count_whatever_the_limit():
    admission = Admission("p", 1, 5)
    admission.adopt("x")
    admission.adopt("y")

    assert not admission.offer("a", 0)
    admission.leave("x")
    assert admission.next() is None
    admission.leave("y")
    assert admission.next() == "a"


def test_giving_up_over_and_over_holds_no_memory():
    admission = Admission("p", 1, 5)
    admission.offer("running", 0)
    for number in range(10_000):
        admission.offer(f"r{number}", 0)
        admission.leave(f"r{number}")

    assert admission.counts.queued == 0
    assert len(admission._heap) < 50
