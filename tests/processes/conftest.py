"""Real deployments: started as a person would, watched through their JSON lines, and nothing of them left after."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_bus.client import BusClient
from omni_bus.runtime import rundir
from omni_bus.runtime.deployment import read_deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "omni_bus"]
SILENCE_S = 40.0
"""Shorter than a test's time limit, so that the test can tell what it waited for."""

GRACE_S = 20.0
"""What is being waited for takes a second; a machine that is busy with other things may take this long."""


class Up:
    """An ``omni-bus up`` in a process of its own, started by the command `within` if there is one."""

    def __init__(
        self, config: Path, environ: dict[str, str], arguments: tuple[str, ...], within: tuple[str, ...] = ()
    ) -> None:
        self.environ = environ
        self.name = arguments[arguments.index("--name") + 1] if "--name" in arguments else config.stem
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [*within, *COMMAND, "up", "--config", str(config), "--log-format", "json", *arguments],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._streams = [stream for stream in (self.process.stdout, self.process.stderr) if stream is not None]
        self._rest = b""
        self._stderr = b""
        self._num_seen = 0

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """Return the next event of that name with these fields, after the last one that was waited for."""
        while True:
            while self._num_seen < len(self.events):
                line = self.events[self._num_seen]
                self._num_seen += 1
                if line["event"] == event and fields.items() <= line.items():
                    return line
            assert self._read(), f"no '{event}' with {fields} came before the end: {self.errors} {self.events}"

    async def told(self, event: str, **fields: Any) -> dict[str, Any]:
        """As `wait_for`, while the loop goes on: a client that does not beat is lost."""
        return await asyncio.to_thread(self.wait_for, event, **fields)

    async def ended(self) -> int:
        """As `end`, while the loop goes on."""
        return await asyncio.to_thread(self.end)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        while self._read():
            pass
        code = self.process.wait()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    @property
    def errors(self) -> str:
        """What came on standard error."""
        return self._stderr.decode()

    def stop(self) -> int:
        """Ask it to stop, wait for the end, return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        """End it if it still runs."""
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.kill()
            self.end()

    def pid_of(self, name: str) -> int:
        """Return the last process id that was told for a process."""
        return [e["pid"] for e in self.events if e["event"] == "process" and e["process"] == name and "pid" in e][-1]

    async def client(self, name: str = "test") -> BusClient:
        """Join the deployment's bus."""
        path, about = rundir.find(rundir.root(self.environ), self.name)
        deployment = read_deployment(path / "deployment.json")
        return await BusClient.connect(name, deployment.listen(name), about.coordinator_endpoint, timeout_s=GRACE_S)

    def _read(self) -> bool:
        """Take what comes next; False at the end of both streams."""
        if not self._streams:
            return False
        readable = select.select(list(self._streams), [], [], SILENCE_S)[0]
        assert readable, f"nothing came for {SILENCE_S:g} s after {self.events[-3:]}"
        for stream in readable:
            data = os.read(stream.fileno(), 65536)
            if not data:
                self._streams.remove(stream)
            elif stream is self.process.stderr:
                self._stderr += data
            else:
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.events += [json.loads(line) for line in lines]
        return True


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """An environment whose deployments are nobody else's; fails if anything of it is left."""
    # Short, because the paths of sockets are limited to 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ob", dir="/tmp"))
    ours = {"XDG_RUNTIME_DIR": str(directory), "PYTHONPATH": str(ROOT), "OMNI_BUS_TEST": directory.name}
    environ = {**os.environ, **ours}
    yield environ
    left = processes_of(directory.name)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    shutil.rmtree(directory)
    assert left == {}, "processes still run after the test"
    assert set(files) <= {"omni-bus", "omni-bus/.lock"}, "files are left after the test"


def processes_of(mark: str) -> dict[int, str]:
    """Return the running processes whose environment bears the mark, and their command lines."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"OMNI_BUS_TEST={mark}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.fixture
def up(tmp_path: Path, environ: dict[str, str]) -> Iterator[Callable[..., Up]]:
    """Start deployments from TOML text; those that still run after the test are ended."""
    started: list[Up] = []

    def start(toml: str, *arguments: str, file: str = "demo", within: tuple[str, ...] = ()) -> Up:
        config = tmp_path / f"{file}.toml"
        draft = tmp_path / f"{file}.draft"
        draft.write_text(toml)
        draft.replace(config)  # those that were started just before may be reading it: never a half file
        started.append(Up(config, environ, arguments, within))
        return started[-1]

    yield start
    for deployment in started:
        deployment.kill()
    # The kernel kills the children of a killed supervisor; that is soon, but not before `wait` returns.
    for pid in processes_of(environ["OMNI_BUS_TEST"]):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], GRACE_S)
            os.close(descriptor)
    if any(deployment.process.returncode == -signal.SIGKILL for deployment in started):
        rundir.RunDir(rundir.root(environ), "sweeper").remove()  # what every next start does


@pytest.fixture
def omni_bus(environ: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run an ``omni-bus`` command to its end."""

    def run(*arguments: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*within, *COMMAND, *arguments],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )

    return run
