"""What benchmarks of whole deployments share: one to measure, what its processes cost, and how results are printed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from omni_bus.client import BusClient
from omni_bus.runtime import rundir
from omni_bus.runtime.deployment import read_deployment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

ROOT = Path(__file__).parents[1]
START_S = 60.0
STOP_S = 60.0


class Deployment:
    """An ``omni-bus up`` in processes of its own, as a context.

    Args:
        toml: the deployment file's text; engines of `stamped` are found.
        start_s: how long its start may take.
    """

    def __init__(self, toml: str, *, start_s: float = START_S) -> None:
        self._start_s = start_s
        # Short, because the paths of sockets are limited to 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="ob", dir="/tmp"))
        (self._folder / "bench.toml").write_text(toml, encoding="utf-8")
        self._environ = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self._folder),
            "PYTHONPATH": ":".join(filter(None, (str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")))),
        }
        self.pids: dict[str, int] = {}
        """Process ids by actor name, and the supervisor's."""
        self.ready: dict[str, Any] = {}
        """The event that said that all is ready."""
        self.ready_s: dict[str, float] = {}
        """Seconds from each process' start until it was ready, as the supervisor saw it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._num_clients = 0

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "omni_bus", "up", "--config", str(self._folder / "bench.toml")]
        self._process = subprocess.Popen(
            [*command, "--log-format", "json"], cwd=ROOT, env=self._environ, stdout=subprocess.PIPE
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            self._remove()
            raise
        self._reader = threading.Thread(target=self._read_on, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._remove()

    async def client(self) -> BusClient:
        """Join the deployment's bus."""
        self._num_clients += 1
        name = f"bench-{self._num_clients}"
        path, about = rundir.find(rundir.root(self._environ), "bench")
        listen = read_deployment(path / "deployment.json").listen(name)
        return await BusClient.connect(name, listen, about.coordinator_endpoint, timeout_s=START_S)

    def cpu_s(self) -> dict[str, float]:
        """Return the processor seconds of each process so far."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    def resident_bytes(self) -> dict[str, int]:
        """Return what each process holds in memory."""
        return {name: resident_bytes(pid) for name, pid in self.pids.items()}

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        begun: dict[str, float] = {}
        seen: list[str] = []
        alarm = threading.Timer(self._start_s, self._process.kill)
        alarm.start()
        try:
            for line in self._process.stdout:
                event = json.loads(line)
                seen = [*seen[-19:], line.decode()]
                if event["event"] == "process" and "pid" in event:
                    self.pids[event["process"]] = event["pid"]
                    begun.setdefault(event["process"], event["time"])
                    if event["phase"] == "ready":
                        self.ready_s[event["process"]] = event["time"] - begun[event["process"]]
                if event["event"] == "ready":
                    self.ready = event
                    self.pids["supervisor"] = self._process.pid
                    return
        finally:
            alarm.cancel()
        raise RuntimeError(f"the deployment did not start: {''.join(seen)}")

    def _read_on(self) -> None:
        """Read the log, so that nobody waits to write it."""
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed by `_stop`
            while os.read(self._process.stdout.fileno(), 1 << 20):
                pass

    def _stop(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        if self._reader is None:
            self._process.stdout.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join(5)
            self._process.stdout.close()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process' live threads, from the scheduler's own nanoseconds (proc(5))."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9


def resident_bytes(pid: int) -> int:
    """Return a process' resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def median(values: Iterable[float]) -> float:
    """Return the median; NaN of nothing."""
    listed = list(values)
    return statistics.median(listed) if listed else math.nan


LIBRARIES = ("pyzmq", "msgspec", "numpy", "uvloop", "aiohttp", "ray", "xoscar")
"""Whose versions matter, where they are installed."""


def machine() -> str:
    """Return what of the machine and its software can matter, and nothing that names it."""
    about = dict(re.findall(r"^([^\t:\n]+)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    maker = " ".join(about.get("model name", platform.machine()).replace("(R)", "").split()[:2])
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    kernel = re.match(r"\d+(\.\d+)*", platform.release())
    gibibytes = round(int(memory[1]) / 2**20) if memory else 0
    return (
        f"{os.cpu_count()} cores ({maker}), {gibibytes} GiB, Linux {kernel[0] if kernel else 'unknown'}, "
        f"Python {platform.python_version()}"
    )


def versions() -> str:
    """Return the versions of the libraries that are installed."""
    found = {name: importlib.util.find_spec({"pyzmq": "zmq"}.get(name, name)) for name in LIBRARIES}
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name, spec in found.items() if spec is not None)


def header() -> None:
    """Print the command and the machine."""
    print(f"command: python {' '.join(sys.argv)}")
    print(f"machine: {machine()}; load {os.getloadavg()[0]:.1f}")
    print(f"libraries: {versions()}")
    print(f"date: {time.strftime('%Y-%m-%d %H:%M')}")


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | str]]) -> None:
    """Print a table; one row for each thing that was measured."""
    shown = {name: [f"{v:,.4g}" if isinstance(v, float) else str(v) for v in row] for name, row in rows.items()}
    widths = [max(len(column), *(len(row[i]) for row in shown.values())) + 2 for i, column in enumerate(columns)]
    first = max(map(len, shown), default=0)
    print(f"\n{title}")
    print(f"  {'':<{first}}" + "".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)))
    for name, row in shown.items():
        print(f"  {name:<{first}}" + "".join(f"{v:>{width}}" for v, width in zip(row, widths, strict=True)))


_ratios: list[dict[str, Any]] = []


def ratio(what: str, value: float, aim: str = "", *, key: str = "") -> None:
    """Print one ratio, and keep it for `write_json`.

    Args:
        what: which over which.
        value: the ratio.
        aim: what it should be, in words.
        key: by which `bench_all` finds it for its table of aims.
    """
    _ratios.append({"what": what, "value": value, "aim": aim.removeprefix("aim: "), "key": key})
    print(f"  {what:<72}{value:>10.3f}   {aim}".rstrip())


def write_json(path: str | None, results: Any) -> None:
    """Write all ratios and every other number to a file, if one was asked for."""
    if path:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode({"ratios": _ratios, **results})))
