"""Policies whose answers show what they saw, for tests of what lies around a policy; not policies.

Row r of a chunk is: the session's count of observations, the sum of the state, the mean of the picture, r.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from adapters.robot.policy import Observation, Policy
from omni_bus.errors import BadInput, OmniBusError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.robot.policy import Actions, OnStep
    from omni_bus.engine import Report


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `FakePolicy`."""

    horizon: int = 4
    is_float64: bool = False


class FakePolicy(Policy):
    """Answers at once; a state that begins with one of the numbers below makes it go wrong."""

    Options = FakeOptions

    NAN, RAISES, BAD, HUGE, HANGS = 901.0, 902.0, 903.0, 904.0, 905.0

    seen: ClassVar[list[Observation]] = []
    batches: ClassVar[list[int]] = []
    forgotten: ClassVar[list[str]] = []
    gate: ClassVar[threading.Event] = threading.Event()
    """A hanging policy waits for it."""

    def load(self, report: Report) -> None:
        report("weights", 1.0)
        self.counts: dict[str, int] = {}
        self.metadata = {"action_horizon": self.options.horizon, "action_dim": 4}

    def infer(
        self, observations: Sequence[Observation], *, deadline: float | None = None, on_step: OnStep | None = None
    ) -> Sequence[Actions | OmniBusError]:
        del deadline
        self.batches.append(len(observations))
        self.seen.extend(observations)
        answers = [self._answer(observation) for observation in observations]
        if on_step is not None:
            on_step(1, 1)
        return answers

    def forget(self, session: str) -> None:
        self.forgotten.append(session)
        self.counts.pop(session, None)

    def _answer(self, observation: Observation) -> Actions | OmniBusError:
        if observation.is_first:
            self.counts[observation.session] = 0
        self.counts[observation.session] += 1
        state: Any = observation.values.get("state")
        number = float(np.asarray(state).reshape(-1)[0]) if state is not None else 0.0
        if number == self.RAISES:
            raise RuntimeError("secret")
        if number == self.BAD:
            return BadInput("state: this one is not for me", field="state")
        if number == self.HANGS:
            self.gate.wait()
        rows: Any = np.zeros((self.options.horizon, 4), np.float64 if self.options.is_float64 else np.float32)
        rows[:, 0] = self.counts[observation.session]
        rows[:, 1] = np.sum(state) if state is not None else 0
        pixels: Any = observation.values.get("image")
        rows[:, 2] = np.mean(pixels) if pixels is not None else 0
        rows[:, 3] = np.arange(self.options.horizon)
        if number == self.NAN:
            rows[1, 1] = np.nan
        return {"actions": rows}
