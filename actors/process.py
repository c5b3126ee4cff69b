"""What a supervisor keeps of each process of a deployment, over all its incarnations."""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import TYPE_CHECKING

from omni_bus.core.absence import DEGRADED
from omni_bus.core.restart import MAX_DELAY_S, RestartPolicy

if TYPE_CHECKING:
    import asyncio

    from omni_bus.ids import Peer
    from omni_bus.runtime.process import Child

FIRST_START_S = 1.0
"""What a start takes, as far as is known before the first one."""


class Phase(StrEnum):
    """Of a process, where it is not a load phase of its own."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    DEGRADED = DEGRADED
    FAILED = "failed"
    STOPPED = "stopped"


class Process:
    """One process of the deployment, over all its incarnations."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        fds: tuple[int, ...],
        max_restarts: int,
        is_stage: bool,
        max_restart_delay_s: float = MAX_DELAY_S,
    ) -> None:
        self.name = name
        self.is_stage = is_stage
        self.arguments = arguments
        self.fds = fds
        self.max_restarts = max_restarts
        self.max_restart_delay_s = max_restart_delay_s
        self.restarts = RestartPolicy(max_restarts, max_restart_delay_s)
        self.child: Child | None = None
        self.phase: str = Phase.STARTING
        self.fraction = 0.0
        self.started_at = 0.0
        self.start_s = FIRST_START_S
        """What its last start took."""
        self.ready_at: float | None = None
        self.error = ""
        self.exit = ""
        """How its last child ended, in words."""
        self.last_lines: list[str] = []
        self.peer: Peer | None = None
        """Its incarnation on the bus."""
        self.bindable: int | None = None
        """The incarnation that the coordinator last called ready."""
        self.num_restarts = 0
        self.is_waking = False
        """A person has its engine woken, and watches."""
        self.is_leaving = False
        """Its end is wanted."""
        self.is_surplus = False
        """And no other incarnation is to follow."""
        self.retry_at = 0.0
        """When whoever needs it may find it again."""
        self.watchdog: asyncio.TimerHandle | None = None
        self.backoff: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """It has a live child."""
        return self.child is not None and self.child.exit_code is None

    @property
    def pid(self) -> int | None:
        """Of its last child."""
        return None if self.child is None else self.child.pid

    def renew(self) -> None:
        """Forget its deaths: a person wants it to start."""
        self.restarts = RestartPolicy(self.max_restarts, self.max_restart_delay_s)

    @property
    def has_left(self) -> bool:
        """It ended as it should: with 0, or by the signal if it had not begun to serve."""
        code = None if self.child is None else self.child.exit_code
        return code == 0 or (code == -signal.SIGTERM and self.ready_at is None)

    def why(self, how: str) -> str:
        """Return why it did not start: its own error, else how it ended and what it printed last."""
        if self.error:
            return f"{self.name}: {self.error}"
        printed = "".join(f"\n    {line}" for line in self.last_lines)
        return f"{self.name}: ended with {how} in phase '{self.phase}'{printed}"

    def drop_timers(self) -> None:
        """Wait for nothing of it any more."""
        for handle in (self.watchdog, self.backoff):
            if handle is not None:
                handle.cancel()
        self.watchdog = self.backoff = None


def exit_name(code: int) -> str:
    """Return how a process ended, in a word or two."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {-code}"
