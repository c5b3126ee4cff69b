"""Models that come inside Python packages, written once in the form that an engine reads, and kept."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def convert_once(target: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return `target`, and have it written first where that hasn't been done.

    Processes that start together wait for one of them to write. The folder gets its name when it is complete; what a
    killed process left is removed by the next one.

    Args:
        target: exists only once it is complete; the folder around it is made if missing.
        name: of the model, without a slash; other names in the same folder are left alone.
        write: fills an empty folder.

    Raises:
        StartFailed: the folder can't be written.
    """
    if target.is_dir():
        return target
    try:
        with _alone_in(target.parent, name):
            if not target.is_dir():
                _write_into(target, name, write)
    except OSError as error:
        raise StartFailed(f"model: '{name}' can't be converted into {target}: {error}", field="model") from error
    return target


@contextmanager
def _alone_in(folder: Path, name: str) -> Iterator[None]:
    """Hold the folder's lock; the system takes it back from a process that dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_into(target: Path, name: str, write: Callable[[Path], None]) -> None:
    """Write beside `target` and rename; runs under the lock, so whatever is beside it is a leftover."""
    prefix = f".{name}-part-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        write(part)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
