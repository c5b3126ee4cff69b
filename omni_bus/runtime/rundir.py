"""Where a running deployment keeps its sockets and its lock, and how others find it.

Each deployment has a directory of its own below one that only the user can enter. Its supervisor holds a lock on a file
in it as long as it lives, so a directory whose lock can be taken is left over from a crash and is removed at the next
start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_bus.errors import BadInput, StartFailed, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOCK = "lock"
ABOUT = "supervisor.json"

ROOT_LOCK = ".lock"
"""In the directory of all deployments. Whoever makes, sweeps or removes a deployment's directory holds it alone,
whoever only looks holds it with others; each for milliseconds. So nobody takes a look or a sweep for a supervisor."""

NONE_RUNS = "no deployment is running: start one with `omni-bus up`"


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
        StartFailed: it exists and is not a directory of this user, or it can't be made.
    """
    base = environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "omni-bus" if base else Path(tempfile.gettempdir()) / f"omni-bus-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not followed: in a directory that all may write to, somebody could have put a link there before us.
        status = path.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise StartFailed(f"{path} is not a directory of yours; set XDG_RUNTIME_DIR to one that is")
        path.chmod(0o700)
    except OSError as error:
        raise StartFailed(f"can't use {path}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of yours") from error
    return path


def cache(environ: Mapping[str, str]) -> Path:
    """Return where converted weights are kept (the XDG cache directory)."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "omni-bus"


def state(environ: Mapping[str, str], name: str) -> Path:
    """Return where a deployment keeps what can't be made again (the XDG state directory); not made yet."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "omni-bus" / name


def write_privately(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read; others see all of it or nothing."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    draft.rename(path)


class RunDir:
    """A deployment's own directory, locked while this object lives.

    Raises:
        StartFailed: a deployment of that name is running.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self._parent = parent
        self.path = parent / name
        with _root_lock(parent, fcntl.LOCK_EX):
            _sweep(parent)
            self._lock = self._take()

    def announce(self, about: About) -> None:
        """Let others find this deployment; they see all of it or nothing."""
        write_privately(self.path / ABOUT, msgspec.json.encode(about))

    def remove(self) -> None:
        """Remove the directory and let the name go."""
        with _root_lock(self._parent, fcntl.LOCK_EX):
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    def _take(self) -> int:
        self.path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if not _is_locked_by(lock):
            os.close(lock)
            raise StartFailed(_running(self.path), field="--name")
        return lock


@contextmanager
def _root_lock(parent: Path, how: int) -> Iterator[None]:
    lock = os.open(parent / ROOT_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _is_locked_by(lock: int) -> bool:
    """Try to lock an open lock file; False if somebody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
    """Whether a live supervisor holds the directory's lock; only under the root lock."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _is_locked_by(lock)
    finally:
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what crashed deployments left; only under the root lock."""
    for path in parent.iterdir():
        if path.is_dir() and not path.is_symlink() and not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)


def running(parent: Path) -> dict[str, About]:
    """Return the running deployments of this user, by name."""
    with _root_lock(parent, fcntl.LOCK_SH):
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
    if not deployments and name is None:
        raise BadInput(NONE_RUNS, field="--name")
    if name is None and len(deployments) != 1:
        raise BadInput(f"say which deployment with --name (running: {', '.join(deployments)})", field="--name")
    name = name if name is not None else next(iter(deployments))
    return parent / name, deployments[name]
