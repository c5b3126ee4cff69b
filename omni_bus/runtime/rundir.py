"""Where a running deployment keeps its sockets and its lock, and how others find it.

Each deployment has a directory of its own below one that only the user can enter. Its supervisor holds a lock on a file
in it as long as it lives, so a directory whose lock can be taken is left over from a crash and is removed at the next start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_bus.errors import BadInput, StartFailed, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCK = "lock"
ABOUT = "supervisor.json"


class About(msgspec.Struct, frozen=True):
    """What a supervisor tells about itself."""

    name: str
    pid: int
    config: str
    coordinator_endpoint: str
    gateways: dict[str, str]


def root(environ: Mapping[str, str]) -> Path:
    """Return the directory of all deployments of this user, made if needed.

    Raises:
        StartFailed: it exists and belongs to somebody else.
    """
    base = environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "omni-bus" if base else Path(tempfile.gettempdir()) / f"omni-bus-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid() or path.is_symlink():
        raise StartFailed(f"{path} belongs to another user; set XDG_RUNTIME_DIR to a directory of yours")
    path.chmod(0o700)
    return path


def cache(environ: Mapping[str, str]) -> Path:
    """Return where converted weights are kept (the XDG cache directory)."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omni-bus"


class RunDir:
    """A deployment's own directory, locked while this object lives.

    Raises:
        StartFailed: a deployment of that name is running.
    """

    def __init__(self, parent: Path, name: str) -> None:
        _sweep(parent)
        self.path = parent / name
        self._lock = self._take()

    def announce(self, about: About) -> None:
        """Let others find this deployment."""
        (self.path / ABOUT).write_bytes(msgspec.json.encode(about))

    def remove(self) -> None:
        """Remove the directory and let the name go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _take(self) -> int:
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # somebody's sweep removed the directory under us
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise StartFailed(_running(self.path)) from None
            if _is_same_file(lock, self.path / LOCK):
                return lock
            os.close(lock)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _running(path: Path) -> str:
    about = _about(path)
    who = f" (process {about.pid}, {about.config})" if about else ""
    return (
        f"a deployment named '{path.name}' is running{who}: stop it with `omni-bus down --name {path.name}` "
        "or choose another name with --name"
    )


def _about(path: Path) -> About | None:
    try:
        return msgspec.json.decode((path / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_held(path: Path) -> bool:
    """Whether a live supervisor holds the directory's lock."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _sweep(parent: Path) -> None:
    """Remove what crashed deployments left; a directory that is just being made has no lock file and stays."""
    for path in parent.iterdir():
        try:
            lock = os.open(path / LOCK, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(lock, path / LOCK):
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # it is running
        finally:
            os.close(lock)


def running(parent: Path) -> dict[str, About]:
    """Return the running deployments of this user, by name."""
    found = {path.name: _about(path) for path in parent.iterdir() if path.is_dir() and _is_held(path)}
    return {name: about for name, about in sorted(found.items()) if about is not None}


def find(parent: Path, name: str | None) -> tuple[Path, About]:
    """Return a running deployment: that of the name, or the only one.

    Raises:
        UnknownName: none of that name runs.
        BadInput: no name was given, and none or several run.
    """
    deployments = running(parent)
    if name is not None and name not in deployments:
        raise unknown_name("running deployment", name, deployments, field="--name")
    if name is None and len(deployments) != 1:
        which = ", ".join(deployments) or "none"
        raise BadInput(f"say which deployment with --name (running: {which})", field="--name")
    name = name if name is not None else next(iter(deployments))
    return parent / name, deployments[name]
