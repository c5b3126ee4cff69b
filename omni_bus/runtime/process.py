"""Processes: what each child does first, and how a supervisor starts one and learns of its end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import uvloop

from omni_bus.bus.cuda_memory import remove_remains
from omni_bus.errors import OmniBusError
from omni_bus.observe.log import log_to_stderr
from omni_bus.runtime.deployment import Deployment, read_deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent dies."""

MAX_LINE_BYTES = 256 * 1024
"""A line of a child's output that is longer is cut: its supervisor's memory is bounded."""

EXIT_START_FAILED = 2
"""Exit code of a child whose last log line says why it can't serve, and of an ``omni-bus up`` that could not start."""

EXIT_CUT = 3
"""Exit code of a drain, or of a whole stop, that had to end requests."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however stuck an engine is by then.

    Args:
        parent: its process id as the parent itself knows it. Whoever adopts an orphan is not always process 1, and a
            supervisor that is the first process of a container is.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def child_main(name: str, run: Callable[[Deployment, Sequence[str]], Coroutine[None, None, int]]) -> NoReturn:
    """Be a child of a supervisor: ``DEPLOYMENT_JSON [ARGUMENTS…]`` on the command line, JSON lines on standard error.

    Ends with ``os._exit``: threads of an engine that hangs must not keep the process.
    """
    try:
        deployment = read_deployment(sys.argv[1])
    except FileNotFoundError:  # the supervisor died and its directory is swept
        os._exit(1)
    die_with_parent(deployment.supervisor_pid)
    arguments = sys.argv[2:]
    words = [] if name == "stage" else [name]
    words += itertools.takewhile(lambda argument: not argument.startswith("--"), arguments)
    log_to_stderr(".".join(words), deployment.log_level)
    try:
        code = uvloop.run(run(deployment, arguments))
    except OmniBusError as error:
        logger.error("start failed", extra={"fields": {"error": error.message, "code": error.code}})  # noqa: TRY400 (a message for a person, not a traceback)
        code = EXIT_START_FAILED
    except Exception as error:  # the last chance to say why before the process is gone
        logger.exception("start failed", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
        code = EXIT_START_FAILED
    logging.shutdown()
    os._exit(code)


def settle() -> None:
    """Tell the garbage collector that what is loaded stays; call it once, when a process begins to serve.

    Later collections look only at what came since. Of a stage with torch a full one would otherwise stop the loop for a
    tenth of a second, again and again.
    """
    gc.collect()
    gc.freeze()


class Child:
    """A running child: its end is seen through a pidfd, what it prints line by line.

    It leads a process group of its own: a terminal's Ctrl-C reaches the supervisor only, and what the child started and
    left behind is killed with the group at its end.

    Args:
        arguments: after the interpreter, ``-m MODULE …``.
        environment: of the child, whole.
        on_line: called on the loop with each line of standard output and error, which share a pipe.
        on_exit: called on the loop, once, with the exit code (negative for a signal), after the last line.
        pass_fds: descriptors that the child inherits.

    Raises:
        OSError: it can't be started (no more processes or descriptors).
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        *,
        on_line: Callable[[bytes], None],
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_line = on_line
        self._on_exit = on_exit
        self._rest = b""
        self.exit_code: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=tuple(pass_fds),
            process_group=0,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._output, self._read)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; harmless after its end."""
        if self.exit_code is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _read(self) -> bool:
        """Take what is there; False when there is no more, now or ever."""
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._output)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._on_line(line)
        return True

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Before it is waited for: until then its id can't be given to another process or group.
        os.killpg(self._process.pid, signal.SIGKILL)
        self.exit_code = self._process.wait()
        remove_remains(self._process.pid)  # here too of one that ended well: the CUDA driver doesn't always
        while self._read():  # a grandchild in a group of its own may keep the pipe open, so only what is there
            pass
        if self._rest:
            self._on_line(self._rest)
        self._loop.remove_reader(self._output)
        os.close(self._pidfd)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._on_exit(self.exit_code)
