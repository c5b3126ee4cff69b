from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st


async def test_async_tests_run_on_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


@given(st.integers())
def test_leak_check_goes_with_hypothesis(number: int) -> None:
    assert number == int(str(number))


def test_left_process_or_thread_fails_its_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(
        """
        import subprocess
        import threading

        left = threading.Event()
        processes = []

        def test_process():
            processes.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

        def test_thread():
            threading.Thread(target=left.wait).start()

        def test_neither():
            subprocess.run(["true"], check=True)
            thread = threading.Thread(target=left.wait, daemon=True)
            thread.start()

        def test_waited_for():
            left.set()
            thread = threading.Thread(target=left.wait)
            thread.start()
            thread.join()
        """
    )

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")

    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(["*child processes still run after the test*", "*threads still run after the test*"])
