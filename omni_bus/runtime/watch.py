"""Says when files change: the kernel tells (inotify(7)), nothing asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

logger = logging.getLogger(__name__)

MAX_LINKS = 40
"""Symbolic links that are followed on the way to a file, as path_resolution(7) has it."""

_UNWATCHABLE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What a folder raises that is not there, or not for us; anything else is the kernel's refusal."""


class FileWatch:
    """Calls back whenever what a path leads to was written, replaced, removed or linked anew.

    Folders are watched, not files: editors and secret stores put a new file in the old one's place, or move a symbolic
    link on the way to it. A file that is being written is not read half: the end of the writing counts.

    Args:
        paths: the files; they need not be there.
        on_change: called on the running loop, once for all that happened together.
        folders: whatever changes in these counts as well.

    Raises:
        OSError: the kernel gives no more watches.
    """

    def __init__(self, paths: Iterable[str], on_change: Callable[[], None], folders: Iterable[str] = ()) -> None:
        # Here, since few processes watch anything, and finding the C library takes a while.
        from inotify_simple import INotify

        self._folders = tuple(folders)
        self._paths = (*paths, *self._folders)
        self._on_change = on_change
        self._inotify = INotify(nonblocking=True)
        self._names: dict[int, set[str]] = {}
        self._wholes: set[int] = set()
        try:
            self._watch()
        except OSError:
            self._inotify.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inotify.fileno(), self._on_readable)

    def close(self) -> None:
        """Watch no more."""
        if not self._inotify.closed:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()

    def _watch(self) -> None:
        """Watch every folder on the way; those that are watched already stay so."""
        from inotify_simple import flags

        wanted = flags.CLOSE_WRITE | flags.MOVED_TO | flags.MOVED_FROM | flags.DELETE | flags.CREATE
        for path in self._paths:
            for folder, name in steps(path):
                try:
                    watch = self._inotify.add_watch(folder, wanted)
                except _UNWATCHABLE as error:
                    logger.warning("a folder can't be watched", extra={"fields": {"why": str(error)}})
                    continue
                self._names.setdefault(watch, set()).add(name)
        self._wholes = set()
        for folder in self._folders:
            with contextlib.suppress(*_UNWATCHABLE):  # one that comes is seen
                self._wholes.add(self._inotify.add_watch(folder, wanted))

    def _on_readable(self) -> None:
        from inotify_simple import flags

        has_changed = False
        for event in self._inotify.read(timeout=0):
            is_folder = bool(event.mask & flags.ISDIR)
            if event.mask & flags.CREATE and not is_folder and not self._is_link(event.name):
                continue  # an empty file so far; its writer closes it when it is whole
            has_lost_track = event.mask & (flags.Q_OVERFLOW | flags.IGNORED)
            is_watched = event.wd in self._wholes or event.name in self._names.get(event.wd, ())
            has_changed |= bool(has_lost_track) or is_watched
            if event.mask & flags.IGNORED:
                self._names.pop(event.wd, None)
        if has_changed:
            self._watch()
            self._on_change()

    def _is_link(self, name: str) -> bool:
        """Whether a new name stands for a file that was there before: by a symbolic link, or another hard one."""
        for path in self._paths:
            for folder, part in steps(path):
                if part == name:
                    try:
                        status = os.lstat(os.path.join(folder, name))
                    except OSError:
                        continue
                    if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
                        return True
        return False


def steps(path: str) -> Iterator[tuple[str, str]]:
    """Yield folder and name of everything whose change may change what a path leads to: its links, and the file."""
    parts = os.path.abspath(path).split(os.sep)[1:]
    folder = os.sep
    num_links = 0
    while parts:
        name, *parts = parts
        here = os.path.join(folder, name)
        is_link = os.path.islink(here) and num_links < MAX_LINKS
        if is_link or not parts:
            yield folder, name
        if is_link:
            num_links += 1
            target = os.path.normpath(os.path.join(folder, os.readlink(here)))
            parts = [*target.split(os.sep)[1:], *parts]
            folder = os.sep
        else:
            folder = here
