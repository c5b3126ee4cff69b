"""A process that decodes media for one gateway, and may be lost: ``FD PARENT_PID MEMORY_BYTES``.

FD is a SOCK_SEQPACKET socket. Each message is a `Task` with the file's descriptor; its answer is an `Answer` with the
descriptor of a sealed memory file that holds the samples. The process has little memory, no core dump, no secrets in
its environment and a low priority; the kernel kills it with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from omni_bus.errors import BadInput, ErrorInfo, OmniBusError
from omni_bus.media.decode import Request, decode
from omni_bus.media.spool import write_all
from omni_bus.runtime.process import die_with_parent
from omni_bus.wire.payloads import Audio, Image, Video

MESSAGE_BYTES = 64 * 1024
READY = b"ready"

NICE = 5
"""Decoding gives way to the gateway's loop where both want the same core."""

PR_SET_NO_NEW_PRIVS = 38
"""prctl(2)"""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
"""A mapping of a file that can't shrink can't end in SIGBUS (memfd_create(2))."""


class Answer(msgspec.Struct, frozen=True):
    """What became of a file."""

    kind: str = ""
    """``image``, ``audio`` or ``video``."""
    header: dict[str, Any] = {}
    """The payload's fields without `data`."""
    num_bytes: int = 0
    error: ErrorInfo | None = None
    unforeseen: str = ""
    """The traceback of an error that nobody thought of."""


class MemoryFile:
    """Samples on their way out."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("omni-bus-samples", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.num_bytes = 0

    def write(self, data: memoryview) -> None:
        """Add samples."""
        write_all(self.fd, data)
        self.num_bytes += len(data)


def answer(request: Request, file: io.BufferedReader, out: MemoryFile) -> Answer:
    """Decode; never raises for what a file holds."""
    try:
        payload = decode(file, request, out)
    except OmniBusError as error:
        return Answer(error=error.to_info())
    except Exception:  # noqa: BLE001 (logged by the other side) whatever a damaged file does to a decoder is the file's fault, but worth a look
        message = f"{request.field}: the file is damaged: it can't be decoded"
        return Answer(error=BadInput(message, field=request.field).to_info(), unforeseen=traceback.format_exc())
    fcntl.fcntl(out.fd, fcntl.F_ADD_SEALS, SEALS)
    kind = {Image: "image", Audio: "audio", Video: "video"}[type(payload)]
    header = {name: getattr(payload, name) for name in payload.__struct_fields__ if name != "data"}
    return Answer(kind, header, out.num_bytes)


def serve(channel: socket.socket) -> None:
    """Answer until the other side is gone."""
    to_request = msgspec.json.Decoder(Request)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
        if not message:
            return
        out = MemoryFile()
        try:
            with open(fds[0], "rb") as file:
                file.seek(0)
                reply = answer(to_request.decode(message), file, out)
            socket.send_fds(channel, [msgspec.json.encode(reply)], [] if reply.error else [out.fd])
        finally:
            os.close(out.fd)


def confine(memory_bytes: int) -> None:
    """Take from this process what it does not need, and bound what it does."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the end comes with the gateway's
    with contextlib.suppress(OSError):  # where priorities are fixed
        os.nice(NICE)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve the descriptor of the command line."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    import av
    import numpy as np

    del av, np  # loaded here, so that the limit is for the files alone
    confine(int(sys.argv[3]))
    channel.send(READY)
    with contextlib.suppress(ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main()
