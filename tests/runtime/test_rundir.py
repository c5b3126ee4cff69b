"""Directories of deployments: one owner of a name, nothing of the living swept, everything of the dead."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_bus.errors import BadInput, StartFailed, UnknownName
from omni_bus.runtime import rundir

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

FORK = multiprocessing.get_context("fork")


def about(name: str) -> rundir.About:
    return rundir.About(name=name, pid=os.getpid(), config="c.toml", coordinator_endpoint="ipc://x", gateways={})


def test_name_is_taken_until_removed(tmp_path: Path) -> None:
    first = rundir.RunDir(tmp_path, "one")
    first.announce(about("one"))

    with pytest.raises(StartFailed, match=rf"'one' is running \(process {os.getpid()}, c.toml\)"):
        rundir.RunDir(tmp_path, "one")
    first.remove()

    rundir.RunDir(tmp_path, "one").remove()
    assert [path.name for path in tmp_path.iterdir()] == [rundir.ROOT_LOCK]


def test_what_a_crash_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "crashed").mkdir()
    (tmp_path / "crashed" / rundir.LOCK).touch()
    (tmp_path / "crashed" / "llm.0-1.sock").touch()
    (tmp_path / "half-made").mkdir()

    living = rundir.RunDir(tmp_path, "living")

    assert {path.name for path in tmp_path.iterdir()} == {rundir.ROOT_LOCK, "living"}
    living.remove()


def test_only_announced_and_living_ones_are_found(tmp_path: Path) -> None:
    one, two = rundir.RunDir(tmp_path, "one"), rundir.RunDir(tmp_path, "two")
    (tmp_path / "crashed").mkdir()
    (tmp_path / "crashed" / rundir.LOCK).touch()
    one.announce(about("one"))

    assert rundir.running(tmp_path) == {"one": about("one")}
    assert rundir.find(tmp_path, None) == (tmp_path / "one", about("one"))
    with pytest.raises(UnknownName, match=r"unknown running deployment 'tow' \(known: one\)"):
        rundir.find(tmp_path, "tow")
    two.announce(about("two"))
    with pytest.raises(BadInput, match=r"--name \(running: one, two\)"):
        rundir.find(tmp_path, None)
    one.remove()
    two.remove()
    with pytest.raises(BadInput, match="no deployment is running: start one with"):
        rundir.find(tmp_path, None)


def _take_and_leave(parent: Path, name: str, rounds: int, report: Connection) -> None:
    """Take the name again and again; tell of each refusal and of each time that it was swept while held."""
    refused = swept = 0
    for _ in range(rounds):
        try:
            directory = rundir.RunDir(parent, name)
        except StartFailed:
            refused += 1
            continue
        (directory.path / "mark").write_text(str(os.getpid()))
        rundir.running(parent)
        try:
            swept += (directory.path / "mark").read_text() != str(os.getpid())
        except FileNotFoundError:
            swept += 1
        directory.remove()
    report.send((refused, swept))


def test_starts_looks_and_sweeps_do_not_disturb_one_another(tmp_path: Path) -> None:
    """Names of their own are never refused and never swept, however many come and go beside them."""
    pipes, children = [], []
    for i in range(6):
        ours, theirs = FORK.Pipe(duplex=False)
        children.append(FORK.Process(target=_take_and_leave, args=(tmp_path, f"name{i}", 200, theirs)))
        pipes.append(ours)
    for child in children:
        child.start()
    for _ in range(100):
        rundir.running(tmp_path)
        # `exist_ok` looks again and fails if one of them has swept the folder in between.
        with contextlib.suppress(FileExistsError):
            (tmp_path / "stale").mkdir()

    assert [pipe.recv() for pipe in pipes] == [(0, 0)] * 6
    for child in children:
        child.join()


def test_contested_name_has_one_owner_at_a_time(tmp_path: Path) -> None:
    pipes, children = [], []
    for _ in range(6):
        ours, theirs = FORK.Pipe(duplex=False)
        children.append(FORK.Process(target=_take_and_leave, args=(tmp_path, "same", 100, theirs)))
        pipes.append(ours)
    for child in children:
        child.start()

    assert sum(swept for _, swept in [pipe.recv() for pipe in pipes]) == 0
    for child in children:
        child.join()


def _hold(parent: Path, ready: Connection) -> None:
    rundir.RunDir(parent, "held")
    ready.send(None)
    signal.pause()


def test_death_gives_the_name_back(tmp_path: Path) -> None:
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_hold, args=(tmp_path, theirs))
    child.start()
    ours.recv()
    with pytest.raises(StartFailed):
        rundir.RunDir(tmp_path, "held")

    child.kill()
    child.join()

    rundir.RunDir(tmp_path, "held").remove()


def test_root_that_is_a_link_is_refused() -> None:
    with tempfile.TemporaryDirectory() as base:
        (Path(base) / "elsewhere").mkdir()
        (Path(base) / "omni-bus").symlink_to(Path(base) / "elsewhere")

        with pytest.raises(StartFailed, match="set XDG_RUNTIME_DIR"):
            rundir.root({"XDG_RUNTIME_DIR": base})


def test_root_is_for_this_user_only(tmp_path: Path) -> None:
    root = rundir.root({"XDG_RUNTIME_DIR": str(tmp_path)})

    assert root.stat().st_mode & 0o777 == 0o700


def test_root_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StartFailed, match="Not a directory; set XDG_RUNTIME_DIR"):
        rundir.root({"XDG_RUNTIME_DIR": str(tmp_path / "file")})
