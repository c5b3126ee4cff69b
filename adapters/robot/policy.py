"""What a robot policy is: observations of several robots in, one chunk of actions for each out.

A policy is one class. It names a Struct of options (the table ``[stages.NAME.policy]``); what is heavy is imported in
`load`. The engine `robot-policy` (`adapters.robot.engine`) hosts it: it batches, transforms, checks and times; a policy
does none of that. A stage names its policy as ``policy.name = "module:Class"``, or by a short name of `POLICIES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from omni_bus.engine import Context, NoOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from omni_bus.engine import Report
    from omni_bus.errors import OmniBusError

Array: TypeAlias = "npt.NDArray[Any]"

Value: TypeAlias = "Array | np.generic | str | bytes | bool | int | float | list[Any] | dict[str, Any] | None"
"""What an observation has under a key."""

Actions: TypeAlias = "Mapping[str, Array]"
"""One answer: ``actions`` is (steps, action_dim), and whatever else has steps as its first dimension."""

OnStep: TypeAlias = Callable[[int, int], None]
"""Called after a denoise step: how many are done, and how many there will be."""

POLICIES: dict[str, str] = {
    "metaworld": "adapters.robot.metaworld:MetaworldPolicy",
    "pi0": "adapters.robot.pi0:Pi0Policy",
    "lerobot": "adapters.robot.lerobot:LerobotPolicy",
    "openpi": "adapters.robot.openpi:OpenPIPolicy",
}
"""A short name and where its class is; strings only, so that reading it loads nothing."""


class Previous(msgspec.Struct, frozen=True, eq=False):
    """What a robot still has of the chunk it was sent last, while it waits for the next one (real-time chunking)."""

    actions: Array
    """(steps left, action_dim), as they were sent; row 0 is the action at the moment of the observation."""
    delay_steps: int
    """Rows that the robot will have executed when the answer reaches it: the new chunk must begin with them."""


class Observation(msgspec.Struct, frozen=True, eq=False):
    """One robot's observation, transformed as the stage's options say."""

    session: str
    """Whose: unique among all that the policy serves at a time."""
    is_first: bool
    """The session's state, if any, begins anew with this."""
    values: dict[str, Value]
    """Arrays are writable, C-ordered, of the machine's byte order, and the policy's own."""
    prompt: str | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    """Denoise steps that the client asks for; the policy's own number if None."""
    previous: Previous | None = None


class Policy(ABC):
    """A policy; its methods run on one thread, never at once."""

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """The policy's own keys of the table ``[stages.NAME.policy]``, ``name`` apart; refuses unknown ones."""

    takes_previous: ClassVar[bool] = False
    """Whether it continues `Observation.previous` itself; where it doesn't, the engine blends."""

    metadata: Mapping[str, Any] = {}
    """The policy's part of the handshake, plain values only; set by `load`.

    Common keys: ``action_horizon``, ``action_dim``, ``image_resolution``. What the stage's options say wins.
    """

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @classmethod
    def check(cls, options: Any) -> list[str]:
        """Return every reason why these options can't work, found without loading anything (a missing file, say)."""
        del options
        return []

    @abstractmethod
    def load(self, report: Report) -> None:
        """Load weights and warm up; blocks.

        Raises:
            OmniBusError: with a message for the person who starts the deployment.
        """

    @abstractmethod
    def infer(
        self, observations: Sequence[Observation], *, deadline: float | None = None, on_step: OnStep | None = None
    ) -> Sequence[Actions | OmniBusError]:
        """Return what each robot shall do, in the observations' order.

        Args:
            observations: one per session, at most the stage's `max_batch_size`, at least one.
            deadline: monotonic seconds (`time.monotonic`) by which the answer is wanted: a policy that denoises takes
                fewer steps where it would be late. None: as long as it takes.
            on_step: called after each denoise step, if there are such.

        Returns:
            For each observation its actions, or the error (`BadInput`) that its robot alone shall read.

        Raises:
            OmniBusError: all of these observations fail.
        """

    def forget(self, session: str) -> None:
        """Drop what is held of a session; unknown ones are ignored."""
        del session

    def close(self) -> None:
        """Give everything back."""
