"""The nightly clients' script refuses what it has no part for, before it sets anything up."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "nightly_clients"


def test_unknown_part_is_named_with_what_is_allowed() -> None:
    done = subprocess.run([SCRIPT, "moshi", "nothing"], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "nothing: no such part (allowed: moshi realtime)\n"
