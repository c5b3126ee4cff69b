from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

CONFTEST = Path(__file__).with_name("conftest.py").read_text()


async def test_async_tests_run_on_uvloop() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


@given(st.integers())
def test_leak_check_goes_with_hypothesis(number: int) -> None:
    assert number == int(str(number))


def test_time_limit_ends_a_waiting_coroutine(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\ntimeout = 0.2")
    pytester.makepyfile(
        """
        import asyncio

        async def test_waits_for_ever():
            await asyncio.Event().wait()

        async def test_next_one_runs():
            await asyncio.sleep(0)
        """
    )

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=30)

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Failed: Timeout*"])


def test_left_process_or_thread_fails_its_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
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
