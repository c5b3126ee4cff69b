from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.record import MAX_MESSAGE, Record


def record() -> Record:
    return Record(index=0, intended_at=0.0)


def test_first_failure_counts() -> None:
    found = record()
    found.fail("503 Busy", "full")
    found.fail("cut", "ended")

    assert (found.failure, found.message, found.is_complete) == ("503 Busy", "full", False)


def test_client_that_left_has_no_whole_answer() -> None:
    found = record()
    assert found.is_complete
    found.has_left = True
    assert not found.is_complete


@given(st.text(min_size=1, max_size=400), st.text(max_size=400))
def test_what_a_server_says_is_one_line_for_a_terminal(name: str, message: str) -> None:
    found = record()
    found.fail(f"500 {name}", message)

    assert found.failure.startswith("500")
    assert f"{found.failure}{found.message}".isprintable()
    assert len(found.message) <= MAX_MESSAGE + 1


def test_page_as_an_error_is_put_on_one_line() -> None:
    found = record()
    found.fail("501 Unsupported", "<html>\n  <h1>\x1b[31mError</h1>\n</html>")

    assert found.message == "<html> <h1> [31mError</h1> </html>"
