"""One request as the coordinator knows it: its states, what is bound to it, and the account of how it ended.

It is QUEUED, then RUNNING over a bound route, then, when something ends it early, ENDING until every stage has said
that it let go. HELD comes between for one whose turn came while a replica that it needs is being restarted. RECOVERING
comes before QUEUED for the successor of a request that lost a replica, and after it for one whose turn came while a
stage had none.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.core.effects import Report
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.frames import RequestStats, Route, RouteEdge, Submit

if TYPE_CHECKING:
    from omni_bus.errors import OmniBusError


class State(Enum):
    """Of a request; `TRANSITIONS` says what leads where."""

    QUEUED = "queued"
    """Waits for a place under the pipeline's limit."""
    HELD = "held"
    """Has its place, and waits for a replica that is being restarted."""
    RECOVERING = "recovering"
    """Waits, not for long, for a replica of a stage that has lost its last one."""
    RUNNING = "running"
    """Bound; its stages work."""
    ENDING = "ending"
    """Its client has the answer; stages were told to let go and have not all said so."""


TRANSITIONS: dict[State, dict[str, State | None]] = {
    State.QUEUED: {
        "admitted": State.RUNNING,
        "held": State.HELD,
        "no replica": State.RECOVERING,
        "ended early": None,
    },
    State.HELD: {"admitted": State.RUNNING, "no replica": State.RECOVERING, "ended early": None},
    State.RECOVERING: {"replicas ready": State.QUEUED, "ended early": None},
    State.RUNNING: {"all stages done": None, "ended early": State.ENDING},
    State.ENDING: {"all stages let go": None},
}
"""State, event, next state; None is the end."""


class Request(msgspec.Struct):
    """One request, from its submit until the coordinator has nothing of it."""

    submit: Submit
    client: Peer
    pipeline: Pipeline
    edges: tuple[RouteEdge, ...]
    received_at: float
    deadline: float | None
    state: State = State.QUEUED
    route: Route | None = None
    pending: dict[str, Peer] = {}
    """Stages that have not ended, and the replica of each."""
    wants_ack: bool = False
    """The client cancelled and is told when all is freed."""
    freed: int = 0
    error: ErrorInfo | None = None
    """Why it ends early."""
    is_adopted: bool = False
    """A former coordinator admitted it."""
    received: dict[str, set[str]] = {}
    """Of an adopted one: the stages whose whole output has come, by the target that has said so."""
    recover_by: float | None = None
    """Until then it waits for a replica; None before it ever had to."""
    cause: ErrorInfo | None = None
    """Of a successor: the loss that it recovers from."""
    is_moved: bool = False
    """It gets the place of a former request, which its stages let go of."""
    is_followed: bool = False
    """It is such a former request; one other gets its place."""
    has_client_left: bool = False
    """The client said goodbye: nothing can be sent to it."""
    stats: dict[str, RequestStats] = {}
    """Accounts of the stages that are done."""

    @property
    def is_back(self) -> bool:
        """It had its turn before, and lost its place through no fault of its own."""
        return self.cause is not None or self.recover_by is not None or self.is_moved

    def move(self, event: str) -> None:
        """Take a transition; the end keeps the last state."""
        self.state = TRANSITIONS[self.state][event] or self.state

    def account(self, outcome: str, error: OmniBusError | None, now: float) -> Report:
        """The one log line of the request: its end, and what each stage that was done did; nothing of its contents."""
        fields: dict[str, Any] = {"request": self.submit.request, "pipeline": self.pipeline.name, "outcome": outcome}
        if error is not None:
            fields |= {"code": error.code, "stage": error.stage}
        fields["total_s"] = round(now - self.received_at, 4)
        fields["stages"] = {
            stage: {
                "first_output_s": round(stats.first_output_s, 4),
                "total_s": round(stats.total_s, 4),
                "chunks_in": stats.chunks_in,
                "chunks_out": stats.chunks_out,
                "bytes_out": stats.bytes_out,
                "prompt_tokens": stats.usage.prompt_tokens,
                "completion_tokens": stats.usage.completion_tokens,
            }
            for stage, stats in self.stats.items()
        }
        return Report("request ended", fields)
