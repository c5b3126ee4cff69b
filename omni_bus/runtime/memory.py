"""Memory that this machine has: the host's, within the limit of our control group, and that of its GPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from omni_bus.config.ledger import HOST, Capacity

_QUERY = ("nvidia-smi", "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10.0

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def capacities(platform: str) -> dict[str, Capacity]:
    """Return the memory of each device, the first GPU right after the host; GPUs on the platform ``cuda`` only."""
    found = {}
    if (host := host_memory(MEMINFO, GROUP)) is not None:
        found[HOST] = host
    if platform == "cuda":
        found |= gpu_memory(_ask_gpus())
    return found


def host_memory(meminfo: Path, group: Path) -> Capacity | None:
    """Return the host's memory, None where the system doesn't tell.

    Args:
        meminfo: the system's table, ``/proc/meminfo``.
        group: the folder of our control group (version 2), whose limit counts if it is lower.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, free = (1024 * int(lines[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return Capacity(total, free)
    return Capacity(min(total, limit), max(0, min(free, limit - used)))


def gpu_memory(table: str) -> dict[str, Capacity]:
    """Return each GPU's memory, from what nvidia-smi writes: lines of index, total and free in MiB."""
    found: dict[str, Capacity] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and all(cell.isdigit() for cell in cells):  # "[N/A]" where a GPU shares the host's
            index, total, free = (int(cell) for cell in cells)
            found[f"cuda:{index}"] = Capacity(total << 20, free << 20)
    return found


def _ask_gpus() -> str:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
