from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_benchmark_prints_every_ratio() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench_bus.py", "--quick"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    ratios = done.stdout.partition("\nratios\n")[2].splitlines()
    assert len(ratios) == 6
    for line in ratios:
        what, _, rest = line.strip().partition("  ")
        assert "ours / " in what
        assert float(rest.split()[0]) > 0
