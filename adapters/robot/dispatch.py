"""Observations of all connections to one policy: batches begin and end on the loop, the policy runs on its thread."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from adapters.handover import on_thread
from adapters.robot.batching import Batcher, Waiting
from adapters.robot.safety import stale
from omni_bus.errors import DeadlineExceeded, OmniBusError, StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import ThreadPoolExecutor

    from adapters.robot.policy import Actions, Observation, Policy


TICK_S = 0.001
"""Loops count in milliseconds: what is due sooner is due now."""


class Answer(msgspec.Struct, frozen=True, eq=False):
    """What became of an observation."""

    actions: Actions
    queue_s: float
    policy_s: float
    batch_size: int
    num_steps: int
    """Denoise steps that were taken; 0 for a policy without."""


class Call(msgspec.Struct, eq=False):
    """An observation and who waits for its answer."""

    observation: Observation
    answer: asyncio.Future[Answer]


class Counts(msgspec.Struct):
    """What was done since the load."""

    batches: int = 0
    observations: int = 0
    missed: int = 0
    policy_s: float = 0.0


class Dispatcher:
    """Batches observations and runs the policy; every method on the stage's loop.

    Args:
        policy: loaded.
        thread: a pool of one, on which alone the policy runs.
        batcher: decides.
        stage: for errors.
        timeout_s: a call of the policy that takes longer hangs.
        max_age_s: what has waited longer when its batch begins is stale.
    """

    def __init__(
        self,
        policy: Policy,
        thread: ThreadPoolExecutor,
        batcher: Batcher[Call],
        stage: str,
        *,
        timeout_s: float,
        max_age_s: float | None,
    ) -> None:
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._policy = policy
        self._thread = thread
        self._batcher = batcher
        self._stage = stage
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        self._running_since = 0.0
        self.counts = Counts()

    async def infer(self, robot: str, observation: Observation, *, came_at: float, deadline: float | None) -> Answer:
        """Return the policy's answer.

        Args:
            robot: whose connection.
            observation: transformed.
            came_at: when it reached the deployment, monotonic seconds.
            deadline: monotonic seconds.

        Raises:
            DeadlineExceeded: the policy had no answer by then.
            OmniBusError: what it said instead.
        """
        call = Call(observation, self._loop.create_future())
        waiting = Waiting(call, robot, _shape(observation), came_at, deadline)
        now = time.monotonic()
        ends_at = now + self._timeout_s if deadline is None else min(deadline, now + self._timeout_s)
        if ends_at <= now:  # it waited for a replica
            raise self._missed(ends_at - came_at)
        self._batcher.add(waiting)
        self._schedule()
        try:
            async with asyncio.timeout_at(ends_at):
                return await call.answer
        except TimeoutError:
            raise self._missed(ends_at - came_at) from None
        finally:
            self._batcher.drop(waiting)
            if self._running is None:
                self._schedule()

    def _missed(self, allowed_s: float) -> DeadlineExceeded:
        self.counts.missed += 1
        return DeadlineExceeded(
            f"the policy missed its deadline: no actions within {allowed_s:.3f} s, hold or stop the robot",
            stage=self._stage,
        )

    async def until_responsive(self) -> None:
        """Return at once unless the policy hangs; then when it does no more.

        Input that is not taken meanwhile is what the stage's watchdog goes by.
        """
        while self._running is not None and time.monotonic() - self._running_since > self._timeout_s:
            await asyncio.wait([self._running])

    def leave(self, robot: str, sessions: Sequence[str]) -> None:
        """A connection is over, or some of its sessions are: what the policy holds of them goes."""
        self._batcher.leave(robot)
        self.forget(sessions)
        if self._running is None:
            self._schedule()

    def forget(self, sessions: Sequence[str]) -> None:
        """Have the policy drop what it holds of these, before the next batch."""
        if sessions:
            self._thread.submit(_forget_blocking, self._policy, tuple(sessions))

    async def close(self) -> None:
        """Wait for the batch that runs."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            await asyncio.wait([self._running])

    def _schedule(self) -> None:
        """Begin a batch now, or set the timer for it; the end of the one that runs asks again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None:
            return
        now = time.monotonic()
        due_at = self._batcher.due_at(now)
        if due_at is None:
            return
        if due_at > now + TICK_S:
            self._timer = self._loop.call_at(due_at, self._schedule)
            return
        self._running_since = now
        self._running = asyncio.ensure_future(self._run(self._batcher.take(), now))
        self._running.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del task
        self._running = None
        self._batcher.free(time.monotonic())
        self._schedule()

    async def _run(self, batch: Sequence[Waiting[Call]], began_at: float) -> None:
        batch = [waiting for waiting in batch if not self._is_stale(waiting, began_at)]
        if not batch:
            return
        calls = [waiting.item for waiting in batch]
        deadlines = [waiting.deadline for waiting in batch if waiting.deadline is not None]
        took = _Timed(self._policy, [call.observation for call in calls], min(deadlines, default=None))
        try:
            answers = await on_thread(self._thread, took.run_blocking)
        except OmniBusError as error:
            answers = [error] * len(calls)
        self._batcher.durations.add(len(calls), took.seconds)
        self.counts.batches += 1
        self.counts.observations += len(calls)
        self.counts.policy_s += took.seconds
        for waiting, answer in zip(batch, answers, strict=True):
            future = waiting.item.answer
            if future.done():  # it missed its deadline, or its robot left
                continue
            if isinstance(answer, OmniBusError):
                future.set_exception(answer)
                future.exception()  # whoever is cancelled in this moment does not retrieve it
                continue
            queue_s = began_at - waiting.arrived_at
            future.set_result(Answer(answer, queue_s, took.seconds, len(calls), took.num_steps))

    def _is_stale(self, waiting: Waiting[Call], now: float) -> bool:
        age_s = now - waiting.arrived_at
        if self._max_age_s is None or age_s <= self._max_age_s:
            return False
        if not waiting.item.answer.done():
            waiting.item.answer.set_exception(stale("observation", age_s, self._max_age_s))
        return True


class _Timed:
    """One call of the policy, on its thread."""

    def __init__(self, policy: Policy, observations: Sequence[Observation], deadline: float | None) -> None:
        self._policy = policy
        self._observations = observations
        self._deadline = deadline
        self.num_steps = 0
        self.seconds = 0.0

    def run_blocking(self) -> Sequence[Actions | OmniBusError]:
        """Ask the policy.

        Raises:
            OmniBusError: all of the batch failed.
        """
        began_at = time.monotonic()
        try:
            answers = self._policy.infer(self._observations, deadline=self._deadline, on_step=self._count)
        except OmniBusError:
            raise
        except Exception as error:
            # What it says may quote one robot's prompt, and all of them would read it.
            raise StageFailed(f"the policy failed: {type(error).__name__}") from error
        finally:
            self.seconds = time.monotonic() - began_at
        if len(answers) != len(self._observations):
            raise StageFailed(f"the policy gave {len(answers)} answers to {len(self._observations)} observations")
        return answers

    def _count(self, step: int, num_steps: int) -> None:
        del num_steps
        self.num_steps = step


def _forget_blocking(policy: Policy, sessions: Sequence[str]) -> None:
    for session in sessions:
        policy.forget(session)


def _shape(observation: Observation) -> Any:
    """Return what two observations must share to be stacked: keys, shapes and types of arrays, the knobs."""
    values = tuple(
        (key, getattr(value, "shape", None), str(getattr(value, "dtype", type(value).__name__)))
        for key, value in sorted(observation.values.items())
    )
    return values, observation.prompt is None, observation.num_inference_steps
