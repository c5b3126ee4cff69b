"""What a machine says of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_bus.config.ledger import HOST, Capacity
from omni_bus.runtime.memory import GROUP, MEMINFO, capacities, gpu_memory, host_memory

TABLE = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


def group(folder: Path, limit: str, used: str) -> Path:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(used + "\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "used", "total", "free"),
    [
        ("max", "5", 1000 * 1024, 600 * 1024),
        ("512000", "2000", 512_000, 510_000),
        ("512000", "600000", 512_000, 0),
        ("9999999999", "5", 1000 * 1024, 600 * 1024),
    ],
)
def test_control_groups_limit_counts_if_it_is_lower(
    tmp_path: Path, limit: str, used: str, total: int, free: int
) -> None:
    (tmp_path / "meminfo").write_text(TABLE)

    assert host_memory(tmp_path / "meminfo", group(tmp_path, limit, used)) == Capacity(total, free)


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemTotal: many kB\nMemAvailable: 1 kB\n"])
def test_system_that_does_not_tell_is_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)

    assert host_memory(tmp_path / "meminfo", tmp_path) is None


def test_this_machine_has_memory() -> None:
    found = capacities("cpu")

    assert list(found) == [HOST]
    assert found[HOST] == host_memory(MEMINFO, GROUP) or found[HOST].total > found[HOST].free > 0


def test_gpus_are_read_line_by_line() -> None:
    table = "0, 143771, 143000\n1, 143771, 5\n2, [N/A], [N/A]\nsome warning\n"

    assert gpu_memory(table) == {
        "cuda:0": Capacity(143_771 << 20, 143_000 << 20),
        "cuda:1": Capacity(143_771 << 20, 5 << 20),
    }
