"""A deployment that is watched while it suffers: its processes as they come and go, what they hold, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import msgspec

import measured
from omni_bus.bus.faulty import Shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.client import BusClient

RUN_FOLDER = "XDG_RUNTIME_DIR"
LEFT_ALONE = {"bench.toml", "omni-bus", "omni-bus/.lock"}
"""In the folder that a deployment was given: its file, and what all deployments of a user share."""

FIXED_SOCKETS = {"coordinator.sock", "control.sock"}
"""Bound by whichever coordinator and supervisor there is."""

FAULTY_SITE = Path(__file__).parent / "faulty_site"

SHM = Path("/dev/shm")  # noqa: S108 (only looked at)


def read_shares(text: str) -> Shares:
    """Read what messages suffer, as in ``delay=0.2 drop=0.001``.

    Raises:
        ValueError: not names of `Shares` with numbers.
    """
    try:
        values = {name: float(value) for name, _, value in (word.partition("=") for word in text.split())}
        return Shares(**values)
    except TypeError as error:
        raise ValueError(f"{text}: allowed: {', '.join(Shares.__struct_fields__)}") from error


class Watched(measured.Deployment):
    """A deployment whose log is followed and whose remains are listed.

    Args:
        toml: the deployment file's text.
        log: where every line of the log goes.
        on_event: called on another thread with each line, decoded.
        faults: what messages between all of its processes suffer.
    """

    def __init__(
        self,
        toml: str,
        *,
        log: Path | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        faults: Shares | None = None,
    ) -> None:
        super().__init__(toml)
        if faults is not None:
            self._environ["PYTHONPATH"] += f":{FAULTY_SITE}"
            self._environ["OMNI_BUS_FAULTS"] = msgspec.json.encode(faults).decode()
        self._log = log
        self._on_event = on_event
        self._shm_before = set(SHM.iterdir())
        self._all_pids: set[int] = set()
        self.phases: dict[str, str] = {}
        """What each process does, by its supervisor's word."""
        self.num_tracebacks = 0
        """Log lines with a traceback: failures that nobody had foreseen."""
        self._changed = threading.Condition()
        self.exit_code: int | None = None
        self.left: list[str] = []
        """After the stop: everything that it should have taken along."""

    @property
    def run_folder(self) -> Path:
        """Where the inboxes of its actors are."""
        return self._folder / "omni-bus" / "bench"

    @property
    def url(self) -> str:
        """Where its gateway listens."""
        return self.ready["gateways"]["openai"]

    def __enter__(self) -> Self:
        super().__enter__()
        self._all_pids.update(self.pids.values())
        with self._changed:
            self.phases = dict.fromkeys(self.pids, "ready") | self.phases
        return self

    def wait_until_ready(self, limit_s: float) -> None:
        """Block until all processes serve.

        Raises:
            TimeoutError: some do not within the limit.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: set(self.phases.values()) == {"ready"}, limit_s):
                raise TimeoutError(f"not ready after {limit_s:g} s: {self.phases}")

    def _read_on(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.ExitStack() as stack:
            out = None if self._log is None else stack.enter_context(self._log.open("wb"))
            for line in self._process.stdout:
                if out is not None:
                    out.write(line)
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "process":
            with self._changed:
                self.phases[event["process"]] = event["phase"]
                if "pid" in event:
                    self.pids[event["process"]] = event["pid"]
                    self._all_pids.add(event["pid"])
                self._changed.notify_all()
        self.num_tracebacks += "traceback" in event
        if self._on_event is not None:
            self._on_event(event)

    def _stop(self) -> None:
        super()._stop()
        assert self._process is not None
        self.exit_code = self._process.returncode
        self.left = self._leftovers()

    def stale_files(self) -> list[str]:
        """List sockets in the run directory that are of no process which lives: what its dead have left there."""
        ours = [f"-{pid}.sock" for pid in self.pids.values()]
        sockets = (self._folder / "omni-bus").rglob("*.sock")
        return [path.name for path in sockets if path.name not in FIXED_SOCKETS and not path.name.endswith(tuple(ours))]

    def _leftovers(self) -> list[str]:
        """List processes, files, segments and ports that outlived the deployment."""
        mark = f"{RUN_FOLDER}={self._folder}\0".encode()
        found = [f"process {pid}: {command}" for pid, command in processes_with(mark).items()]
        files = {str(path.relative_to(self._folder)) for path in self._folder.rglob("*")}
        found += [f"file {name}" for name in sorted(files - LEFT_ALONE)]
        own = {str(pid) for pid in self._all_pids}
        for path in set(SHM.iterdir()) - self._shm_before:
            # Others use this folder too: ours bear a name of ours or the number of a process of ours.
            if "omni" in path.name or own.intersection(path.name.replace("_", "-").replace(".", "-").split("-")):
                found.append(f"segment {path}")
        for url in self.ready.get("gateways", {}).values():
            address = urlsplit(url)
            with socket.socket() as probe:
                if probe.connect_ex((address.hostname, address.port)) == 0:
                    found.append(f"port {address.port}")
        return found


def processes_with(mark: bytes) -> dict[int, str]:
    """Return the running processes with a mark in their environment, and their command lines."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes() + b"\0":
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


async def held(bus: BusClient) -> dict[str, int]:
    """Return what a deployment holds of requests, by what and where; empty for nothing."""
    status = await bus.admin("status")
    found = {"requests": status["requests"]["live"]}
    for name, counts in status["pipelines"].items():
        found |= {f"{name} {what}": counts[what] for what in ("in_flight", "queued")}
    for row in await bus.admin("health"):
        if row["role"] == "stage" and row["is_live"]:
            stats = row["stats"]
            found |= {f"{row['actor']} {what}": stats[what] for what in ("active", "waiting", "buffered_bytes")}
    return {what: count for what, count in found.items() if count}


class Holdings(msgspec.Struct, frozen=True):
    """What one process holds (proc(5))."""

    own_bytes: int
    """Resident memory that is nobody else's."""
    shared_bytes: int
    """Resident pages of shared memory, its own arena's and others'; bounded by the arenas."""
    num_fds: int
    num_threads: int
    num_segments: int
    """Shared memory that it has mapped, its own and others'."""


def holdings(pid: int) -> Holdings:
    """Look at a process.

    Raises:
        OSError: it is gone.
    """
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Holdings(
        own_bytes=int(status["RssAnon"].split()[0]) * 1024,
        shared_bytes=int(status["RssShmem"].split()[0]) * 1024,
        num_fds=len(list((folder / "fd").iterdir())),
        num_threads=len(list((folder / "task").iterdir())),
        num_segments=(folder / "maps").read_text().count("/memfd:"),
    )
