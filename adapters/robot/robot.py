"""What a stage remembers of one connection: its sessions, and of each what came and what was sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from adapters.robot.chunks import Ensemble, Sent, join
from adapters.robot.options import Ensembling, RealTime
from adapters.robot.policy import Previous
from adapters.robot.safety import Freshness, RateLimit, number_at
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from adapters.robot.options import RobotOptions

    Chunk = npt.NDArray[Any]

MAX_SESSIONS = 4096
"""Of one connection: more than a gateway keeps."""

PATIENCE = 0.2
"""Weight of the newest answer in the running mean of how long answers take."""


class Session:
    """One session of a connection."""

    def __init__(self, options: RobotOptions) -> None:
        self._options = options
        self._freshness = Freshness(options.sequence_key, options.timestamp_key, options.max_age_s)
        smoothing = options.smoothing
        self._ensemble = Ensemble(smoothing.coefficient) if isinstance(smoothing, Ensembling) else None
        self._real_time = smoothing if isinstance(smoothing, RealTime) else None
        self._sent = Sent()
        self._began_at: float | None = None
        self._latency_s = self._real_time.latency_budget_s if self._real_time is not None else 0.0
        self._last_step = 0
        self.was_served = False
        """The policy has seen it."""

    def admit(self, values: dict[str, Any], unix_now: float) -> None:
        """Let an observation pass, or not.

        Raises:
            BadInput: it is stale.
        """
        self._freshness.check(values, unix_now)

    def step_of(self, values: dict[str, Any], now: float) -> int:
        """Return how many actions the robot has executed in this session.

        Raises:
            BadInput: the observation does not say it, where it must.
        """
        if self._began_at is None:
            self._began_at = now
        options = self._options
        if options.smoothing is None:
            return 0
        if not options.step_key:
            assert options.control_hz is not None
            return round((now - self._began_at) * options.control_hz)
        step = number_at(values, options.step_key)
        if step < self._last_step or step != int(step):
            allowed = f"whole numbers that don't fall, at least {self._last_step}"
            raise BadInput(f"{options.step_key}: {step:g} came (allowed: {allowed})", field=options.step_key)
        self._last_step = int(step)
        return int(step)

    def delay_steps(self) -> int:
        """Return the rows that a robot executes until an answer reaches it."""
        return math.ceil(self._latency_s * (self._options.control_hz or 0.0))

    def previous(self, step: int) -> Previous | None:
        """Return what a policy that goes on from the last chunk itself is told of it."""
        left = self._sent.left_at(step) if self._real_time is not None else None
        return None if left is None else Previous(left, min(self.delay_steps(), len(left)))

    def smooth(self, step: int, chunk: Chunk, *, continues: bool) -> Chunk:
        """Return the chunk as it is sent."""
        if self._ensemble is not None:
            return self._ensemble.add(step, chunk)
        if self._real_time is None or continues:
            return chunk
        left = self._sent.left_at(step)
        if left is None or left.shape[1:] != chunk.shape[1:]:
            return chunk
        return join(left, chunk, self.delay_steps())

    def served(self, step: int, chunk: Chunk, took_s: float) -> None:
        """A chunk is sent."""
        self.was_served = True
        if self._real_time is not None:
            self._sent.keep(step, chunk)
            mean = self._latency_s + PATIENCE * (took_s - self._latency_s)
            self._latency_s = max(self._real_time.latency_budget_s, mean)


class Robot:
    """One connection.

    Args:
        id: of its request.
        options: the stage's.
        deadline_s: of each observation, from its arrival.
    """

    def __init__(self, id: str, options: RobotOptions, *, deadline_s: float | None) -> None:  # noqa: A002
        self.id = id
        self.deadline_s = deadline_s
        self._options = options
        self._sessions: dict[str, Session] = {}
        self._rates: dict[str, RateLimit] = {}

    def session(self, name: str, *, is_first: bool, now: float) -> Session:
        """Return a session, a new one if it begins.

        Raises:
            BadInput: there are too many.
            QuotaExceeded: its observations come too fast.
        """
        if self._options.max_rate_hz is not None:
            # Kept beyond the session: else a reset before each observation would be a way around it.
            rate = self._rates.pop(name, None) or RateLimit(self._options.max_rate_hz, self._options.burst)
            self._rates[name] = rate
            if len(self._rates) > MAX_SESSIONS:
                del self._rates[next(iter(self._rates))]
            rate.spend(now)
        if is_first or name not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                raise BadInput(f"session_id: more than {MAX_SESSIONS} are open (allowed: {MAX_SESSIONS})")
            self._sessions[name] = Session(self._options)
        return self._sessions[name]

    def forget(self, names: Sequence[str]) -> list[str]:
        """Drop sessions; returns them as the policy knows them."""
        for name in names:
            self._sessions.pop(name, None)
        return [f"{self.id}/{name}" for name in names]

    def forget_all(self) -> list[str]:
        """Drop all of them."""
        return self.forget(list(self._sessions))
