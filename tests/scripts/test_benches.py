"""Each benchmark runs and says its ratios; what they come to is no business of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ratios(output: str) -> dict[str, float]:
    """What stands under ``ratios``: a text, at least two blanks, a number."""
    found = {}
    for line in output.partition("\nratios\n")[2].splitlines():
        what, _, rest = line.strip().partition("  ")
        if rest.strip():
            found[what] = float(rest.split()[0])
    return found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("pipeline", "coordinator frames per request of 1 chunk, in and out"),
        ("gateway", "gateway CPU per chunk, 10 clients / 1"),
        ("call", "call latency, pipe / ours"),
        ("curve", "round trip, with keys / without"),
        ("memory", "resident memory of all, after 200 requests / 20"),
        ("start", "start of coordinator / bare interpreter with its libraries"),
    ],
)
def test_quick_benchmark_prints_its_ratios(name: str, wanted: str) -> None:
    found = ratios(run(f"scripts/bench_{name}.py", "--quick"))

    assert found[wanted] > 0
    assert all(value > 0 for value in found.values())


def test_coordinator_frames_do_not_depend_on_the_chunks() -> None:
    """A count, so it may be asserted: the design promises at most six."""
    found = ratios(run("scripts/bench_pipeline.py", "--quick"))

    assert found["coordinator frames per request of 1 chunk, in and out"] <= 6
    assert found["coordinator frames per request of 20 chunks / of 1"] == 1


def test_page_of_all_benchmarks_has_their_ratios_and_a_machine(tmp_path: Path) -> None:
    run("scripts/bench_all", "--quick", "--only", "call", "start", "--out", str(tmp_path))

    page = (tmp_path / "bench_all.md").read_text()
    assert "| call latency, pipe / ours |" in page
    assert "| start of coordinator / bare interpreter with its libraries |" in page
    assert f"{os.cpu_count()} cores" in page
    assert (tmp_path / "bench_call.txt").read_text().startswith("command: ")


def test_picture_shows_every_load_that_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("scripts/bench_all", "--quick", "--only", "gateway", "--out", str(tmp_path))

    assert (tmp_path / "bench_all.png").read_bytes().startswith(b"\x89PNG")
    assert "(bench_all.png)" in (tmp_path / "bench_all.md").read_text()
