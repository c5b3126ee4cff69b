"""Output that nobody reads: it waits, is dropped and counted, and holds nobody up."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, TextIO

import pytest

from omni_bus.cli.writer import MAX_WAITING_BYTES, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    reading, writing = os.pipe()
    with open(reading) as read, open(writing, "w") as write:
        yield read, write


def dropped(count: int) -> str:
    return f"dropped {count}"


def test_full_pipe_holds_nobody_up_and_what_was_dropped_is_counted(pipe) -> None:
    read, write = pipe
    writer = Writer(write, dropped)
    num_lines = 2 * MAX_WAITING_BYTES // len(LINE)

    for _ in range(num_lines):
        writer.write(LINE)

    shown = []
    while not shown or not shown[-1].startswith("last"):
        shown.append(read.readline())
        if len(shown) == 1000:  # there is room again
            writer.write("last\n")
    assert sum(line == LINE for line in shown) + int(shown[-2].removeprefix("dropped ")) == num_lines
    assert int(shown[-2].removeprefix("dropped ")) > 0
    assert shown[-1] == "last\n"


def test_close_tells_what_was_dropped_to_a_reader_that_is_there(pipe) -> None:
    read, write = pipe
    writer = Writer(write, dropped)
    writer.write("a\n")
    writer.write("x" * MAX_WAITING_BYTES)
    writer.close()
    writer.write("never\n")

    write.close()
    assert read.read() == "a\ndropped 1\n"


def test_close_does_not_wait_for_a_reader_that_reads_nothing(pipe) -> None:
    read, write = pipe
    writer = Writer(write, dropped)
    for _ in range(500):
        writer.write(LINE)

    writer.close()

    assert [read.readline() for _ in range(500)] == [LINE] * 500


def test_reader_that_left_ends_it(pipe) -> None:
    read, write = pipe
    writer = Writer(write, dropped)
    read.close()
    for _ in range(10):
        writer.write(LINE)

    writer.close()


def test_stream_in_memory_is_written_to_at_once() -> None:
    out = io.StringIO()
    writer = Writer(out, dropped)
    writer.write("a\n")
    writer.close()

    assert out.getvalue() == "a\n"
