"""Listening sockets of gateways: bound once, before anything starts, and handed to the processes that serve them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from omni_bus.errors import StartFailed

BACKLOG = 1024
"""Connections that may wait to be accepted; the kernel caps it at net.core.somaxconn."""

LISTEN = "0A"
"""The state column of /proc/net/tcp for a listening socket (proc(5))."""


def bind_port(name: str, host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        StartFailed: the address can't be bound; names who holds a busy port, if that can be seen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        is_busy = error.errno == errno.EADDRINUSE
        holder = _holder(port) if is_busy else ""
        is_port_at_fault = is_busy or error.errno == errno.EACCES
        hint = f"; choose another with -o gateways.{name}.port=N (0 takes a free one)" if is_port_at_fault else ""
        raise StartFailed(
            f"gateway '{name}' can't listen on {host}:{port}: {error.strerror or error}"
            f"{f' (held by {holder})' if holder else ''}{hint}",
            field=f"gateways.{name}.{'port' if is_port_at_fault else 'host'}",
        ) from error
    listener.setblocking(False)
    return listener


def _holder(port: int) -> str:
    """Return who listens on a TCP port, as far as /proc shows it to this user."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            if any(_target(link) in inodes for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name}: {command[:80]}"
    return ""


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""
