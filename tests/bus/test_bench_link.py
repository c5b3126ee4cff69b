from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_benchmark_prints_each_link_alone_and_beside_video() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench_link.py", "--quick"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    rows = done.stdout.partition("video frames/s\n")[2].splitlines()[:6]
    links = ("ipc, arena", "ipc, inline", "tcp")
    assert [row[:28].strip() for row in rows] == [
        f"{link}, {case}" for link in links for case in ("alone", "beside video")
    ]
    assert [len(row[28:].split()) for row in rows] == [4, 5] * 3
    assert len(done.stdout.partition("\nratios\n")[2].splitlines()) == 2 * len(links)
