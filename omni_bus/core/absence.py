"""Replicas that are not here, and why: what health shows of them, and what whoever needs them is told.

It is learnt from how an actor left and from its supervisor, whose word comes later and knows more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.core.admission import RETRY_AFTER_S
from omni_bus.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.membership import Actor, Membership
    from omni_bus.wire.frames import Outlook

DEGRADED = "degraded"
"""The phase of a replica that its supervisor does not start again."""

STOPPED = "stopped"
"""The phase of a replica that is not wanted any more."""

ASLEEP = "asleep"
"""What keeps a replica whose engine sleeps from new requests."""

RESTARTING = "restarting"
"""The phase of a replica that a person has restarted, until its next incarnation starts."""

MAX_ABSENCES = 1024
"""Replicas that are remembered; the longest absent one is forgotten first."""

MAX_REASON_CHARACTERS = 200
"""Of a reason that a caller reads in an error: an engine's own words may be a page."""


class Absence(msgspec.Struct):
    """One replica that is not on the bus."""

    actor: str
    stage: str
    replica: int
    phase: str
    reason: str
    since: float
    retry_after_s: float
    """Before that it is of no use to ask again; counted from `since`, unless it stays away."""

    @property
    def words(self) -> str:
        """Who, what and why."""
        return f"{self.actor}: {self.phase}" + (f", {self.reason}" if self.reason else "")

    def wait_s(self, now: float) -> float:
        """Seconds from now until it may be back."""
        return self.retry_after_s - (0.0 if self.phase == DEGRADED else now - self.since)


class Absences:
    """By actor name; one that is a member is not absent, whatever was said of it before."""

    def __init__(self, membership: Membership, kept: Callable[[str], str] = lambda name: "") -> None:
        self._membership = membership
        self._kept = kept
        self._by_name: dict[str, Absence] = {}

    def leave(self, actor: Actor, reason: str, now: float, *, is_returning: bool = False) -> None:
        """Note that an actor left or was given up; with `is_returning` it is being restarted."""
        if actor.role == "stage":
            phase = RESTARTING if is_returning else "lost"
            self._note(Absence(actor.peer.actor, actor.stage, actor.replica, phase, reason, now, 0.0))

    def take(self, outlook: Outlook, now: float) -> None:
        """Note what a supervisor says."""
        if outlook.phase == STOPPED:
            self._by_name.pop(outlook.actor, None)
            return
        reason = outlook.reason[:MAX_REASON_CHARACTERS]
        who = (outlook.actor, outlook.stage, outlook.replica)
        self._note(Absence(*who, outlook.phase, reason, now, outlook.retry_after_s))

    def join(self, actor: Actor) -> None:
        """Forget why it was not here."""
        self._by_name.pop(actor.peer.actor, None)

    def is_away(self, actor: str) -> bool:
        """Whether an actor left, or its supervisor says that its process does not serve."""
        return actor in self._by_name

    def is_degraded(self, stage: str) -> bool:
        """Whether no replica of the stage is here or will come without a person's help."""
        absent = self._of(stage)
        return bool(absent) and all(one.phase == DEGRADED for one in absent) and not self._membership.present(stage)

    def is_asleep(self, stage: str) -> bool:
        """Whether all replicas of the stage sleep, which may last for hours."""
        present = self._membership.present(stage)
        return bool(present) and not self._of(stage) and all(self._kept(one.peer.actor) == ASLEEP for one in present)

    def unavailable(self, stage: str, now: float) -> Unavailable:
        """Return the error of a request that needs a stage without a replica that can serve."""
        absent = self._of(stage)
        words = [
            f"{actor.peer.actor}: {self._kept(actor.peer.actor) or actor.phase}"
            for actor in self._membership.present(stage)
        ]
        words += [one.words for one in absent]
        # Replicas that are here and load say nothing of how long that takes.
        wait_s = min((one.wait_s(now) for one in absent), default=0.0) if len(words) == len(absent) else 0.0
        return Unavailable(
            f"stage '{stage}' has no replica that can serve" + (f" ({'; '.join(words)})" if words else ""),
            stage=stage,
            is_retry_safe=True,
            retry_after_s=max(RETRY_AFTER_S, wait_s),
        )

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return a row of health for each."""
        return [
            {
                "actor": one.actor,
                "role": "stage",
                "stage": one.stage,
                "replica": one.replica,
                "phase": one.phase,
                "fraction": 0.0,
                "is_ready": False,
                "elapsed_s": round(now - one.since, 3),
                "is_live": False,
                "reason": one.reason,
            }
            for one in self._by_name.values()
            if self._membership.named(one.actor) is None
        ]

    def _of(self, stage: str) -> list[Absence]:
        absent = (one for one in self._by_name.values() if one.stage == stage)
        return [one for one in absent if self._membership.named(one.actor) is None]

    def _note(self, absence: Absence) -> None:
        self._by_name.pop(absence.actor, None)
        self._by_name[absence.actor] = absence
        if len(self._by_name) > MAX_ABSENCES:
            del self._by_name[next(iter(self._by_name))]
