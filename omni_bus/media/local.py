"""Files of this machine that a request names by ``file://``: regular ones below one folder that a person allowed.

The path is walked name by name from the folder's descriptor and no link is followed on the way (openat(2) with
O_NOFOLLOW), so nothing that changes meanwhile can lead out of it.
"""

from __future__ import annotations

import os
import stat
import urllib.parse
from typing import TYPE_CHECKING

from omni_bus.errors import BadInput
from omni_bus.media.spool import too_large

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOT_HERE = "no file came that may be read (allowed: file:///… of a regular file below the folder that is set for it)"
"""Said alike of what is outside, missing, no regular file, a link, or not readable: nobody learns what exists."""


def is_file_url(text: str) -> bool:
    """Whether a text is meant as a file's URL."""
    return text[:64].lstrip()[:5].lower() == "file:"


def read_file_url_blocking(url: str, *, root: str, field: str, max_bytes: int) -> bytes:
    """Return a file's bytes.

    Args:
        url: as the caller wrote it.
        root: the only folder whose files may be read; empty if there is none.
        field: the caller's field, for refusals.
        max_bytes: of a larger file nothing is read.

    Raises:
        BadInput: no such file may be read.
        MediaTooLarge: it is larger than `max_bytes`.
    """
    if not root:
        raise BadInput(f"{field}: a file address came, and this server reads none (allowed: a data: URL)", field=field)
    names = _names_below(os.path.realpath(root), url)
    try:
        if names is None:
            raise FileNotFoundError
        fd = _open_below(os.path.realpath(root), names)
    except (OSError, ValueError):
        raise BadInput(f"{field}: {_NOT_HERE}", field=field) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{field}: {_NOT_HERE}", field=field)
        if status.st_size > max_bytes:
            raise too_large(field, f"{status.st_size}", max_bytes)
        with open(fd, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(fd)
    if len(data) > max_bytes:  # it grew meanwhile
        raise too_large(field, f"more than {max_bytes}", max_bytes)
    return data


def _names_below(root: str, url: str) -> list[str] | None:
    """Return the names from `root` down to the file; None if the URL leads elsewhere."""
    try:
        parts = urllib.parse.urlsplit(url.strip())
        path = urllib.parse.unquote(parts.path, errors="strict")
    except ValueError:
        return None
    if parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        return None
    prefix = root.rstrip("/") + "/"
    if not path.startswith(prefix) or "\0" in path:
        return None
    names = path[len(prefix) :].split("/")
    return None if any(name in ("", ".", "..") for name in names) else names


def _open_below(root: str, names: Sequence[str]) -> int:
    """Open the file.

    Raises:
        OSError: it is not there, not readable, or a link is on the way.
    """
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        # O_NONBLOCK: a pipe without a writer would hold the thread for ever.
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
