"""Children: what is seen of their lines and ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from omni_bus.runtime.process import MAX_LINE_BYTES, Child


async def run_child(code: str, *, stop_with: signal.Signals | None = None) -> tuple[int, list[bytes]]:
    """Run Python code as a child; return its exit code and its lines. A signal is sent after its first line."""
    lines: list[bytes] = []
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_line(line: bytes) -> None:
        lines.append(line)
        if stop_with is not None:
            child.signal(stop_with)

    child = Child(["-c", code], dict(os.environ), on_line=on_line, on_exit=ended.set_result)
    code_ = await ended
    child.signal(signal.SIGKILL)  # harmless now
    return code_, lines


async def test_lines_come_before_the_exit() -> None:
    code, lines = await run_child("import os; os.write(1, b'one\\ntwo\\n'); os.write(2, b'last'); os._exit(7)")

    assert (code, lines) == (7, [b"one", b"two", b"last"])


async def test_signal_is_the_exit_code() -> None:
    code, _ = await run_child("print('up', flush=True); import signal; signal.pause()", stop_with=signal.SIGTERM)

    assert code == -signal.SIGTERM


async def test_flood_without_newline_is_cut() -> None:
    size = 3 * MAX_LINE_BYTES

    _, lines = await run_child(f"print('x' * {size})")

    assert max(len(line) for line in lines) <= MAX_LINE_BYTES + 65536
    assert sum(len(line) for line in lines) == size


async def test_grandchildren_end_with_the_child() -> None:
    code, lines = await run_child(
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); sys.exit(0)"
    )

    assert code == 0
    try:
        descriptor = os.pidfd_open(int(lines[0]))
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 20)[0], "it was killed, and ends"
    os.close(descriptor)


async def test_child_that_can_not_start_is_an_error() -> None:
    with pytest.raises(OSError, match="Argument list too long"):
        Child(["-c", "x" * 3_000_000], {}, on_line=lambda _: None, on_exit=lambda _: None)


ORPHAN = """
import os, sys
from omni_bus.runtime.process import die_with_parent
parent = os.getpid()
if os.fork() == 0:
    os.setsid()
    os.read(int(sys.argv[1]), 1)  # until the parent is gone
    die_with_parent(parent)
    os.write(int(sys.argv[2]), b"lives on")
os._exit(0)
"""


def test_orphan_of_a_dead_supervisor_does_not_begin() -> None:
    """Its parent died before the kernel was told to send a signal; whoever adopted it is not process 1 everywhere."""
    go_read, go_write = os.pipe()
    said_read, said_write = os.pipe()
    command = [sys.executable, "-c", ORPHAN, str(go_read), str(said_write)]
    subprocess.run(command, check=True, pass_fds=(go_read, said_write))
    os.close(go_read)
    os.close(said_write)

    os.close(go_write)

    assert os.read(said_read, 100) == b""
    os.close(said_read)
