"""Each way in which a file can change is told, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from omni_bus.runtime.watch import MAX_LINKS, FileWatch, steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Watched:
    """One file under watch, and what it held each time that a change was told."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen: list[str | None] = []
        self._told = asyncio.Event()
        self.watch = FileWatch([str(file)], self._on_change)

    def _on_change(self) -> None:
        self.seen.append(self.file.read_text() if self.file.exists() else None)
        self._told.set()

    async def until(self, content: str | None) -> None:
        while not self.seen or self.seen[-1] != content:
            self._told.clear()
            await self._told.wait()


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    file = tmp_path / "file"
    file.write_text("first")
    found = Watched(file)
    yield found
    found.watch.close()


async def test_writing_replacing_removing_and_linking_are_told(watched: Watched) -> None:
    file = watched.file
    file.write_text("written")
    await watched.until("written")

    (file.parent / "new").write_text("replaced")
    (file.parent / "new").replace(file)
    await watched.until("replaced")

    file.unlink()
    await watched.until(None)

    (file.parent / "target").write_text("linked")
    file.symlink_to("target")
    await watched.until("linked")

    (file.parent / "target").write_text("through the link")
    await watched.until("through the link")

    file.unlink()
    file.hardlink_to(file.parent / "target")
    await watched.until("through the link")

    file.rename(file.parent / "elsewhere")
    await watched.until(None)


async def test_half_written_file_is_not_told(watched: Watched) -> None:
    with watched.file.open("w") as stream:
        stream.write("ha")
        stream.flush()
        (watched.file.parent / "other").write_text("x")
        stream.write("lf and whole")
    await watched.until("half and whole")

    assert watched.seen == ["half and whole"]


async def test_link_that_moves_is_followed(tmp_path: Path) -> None:
    """Folders of versions and a link to the newest, as Kubernetes mounts secrets."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "file").write_text(version)
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "file").symlink_to("data/file")
    watched = Watched(tmp_path / "file")

    (tmp_path / "data.new").symlink_to("v2")
    (tmp_path / "data.new").replace(tmp_path / "data")
    await watched.until("v2")
    (tmp_path / "v2" / "file").write_text("changed where it leads now")
    await watched.until("changed where it leads now")
    watched.watch.close()


async def test_file_that_is_not_there_yet_may_come(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "file")
    (tmp_path / "file").write_text("now")

    await watched.until("now")
    watched.watch.close()
    watched.watch.close()


async def test_missing_folder_is_said_and_no_failure(tmp_path: Path, caplog) -> None:
    watch = FileWatch([str(tmp_path / "none" / "file")], lambda: None)
    watch.close()

    assert "can't be watched" in caplog.text


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert len(list(steps(str(tmp_path / "a" / "file")))) <= MAX_LINKS + 1


async def test_whatever_changes_in_a_folder_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    told = asyncio.Event()
    watch = FileWatch((), told.set, folders=(str(folder),))

    async def changed() -> None:
        await told.wait()
        told.clear()

    folder.mkdir()  # it comes later than its watch
    await changed()
    (folder / "a.key").write_text("a")
    await changed()
    (folder / "a.key").rename(folder / "b.key")
    await changed()
    (folder / "b.key").unlink()
    await changed()
    watch.close()


async def test_folder_that_is_not_for_us_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inotify_simple import INotify

    folder = tmp_path / "allowed"
    folder.mkdir()
    add_watch = INotify.add_watch

    def refuse(self: INotify, path: str, mask: int) -> int:
        if path == str(folder):
            raise PermissionError(13, "Permission denied", path)
        return add_watch(self, path, mask)

    monkeypatch.setattr(INotify, "add_watch", refuse)
    told = asyncio.Event()
    watch = FileWatch((), told.set, folders=(str(folder),))
    folder.rename(tmp_path / "former")  # the way to it is watched
    await told.wait()
    watch.close()
