from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_benchmark_prints_every_way_against_a_copy() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench_tensor.py", "--quick"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    for size in ("64 KiB", "1 MiB"):
        rows = done.stdout.partition(f"\n{size}\n")[2].splitlines()[1:12]
        assert [row[:19].strip() for row in rows] == [
            "copyto",
            "copyto, paced",
            "ours",
            "ours in place",
            "ours inline",
            "stage in place",
            "client in place",
            "stage",
            "client",
            "zeromq",
            "mp.Queue",
        ]
        for row in rows:
            median_us, best_us, *ratios = (float(number.replace(",", "")) for number in row[19:].split())
            assert median_us >= best_us > 0
            assert len(ratios) == 3
