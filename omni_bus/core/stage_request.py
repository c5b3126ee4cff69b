"""One request as a stage knows it: its states, its edges, and the input that waits for the engine."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from omni_bus.wire.frames import Finish, RequestStats

if TYPE_CHECKING:
    from omni_bus.core.edge import InEdge, OutEdge
    from omni_bus.engine import EngineRequest
    from omni_bus.ids import EdgeId
    from omni_bus.wire.frames import Failed, Route
    from omni_bus.wire.payloads import Payload


class State(Enum):
    """Of one request in one stage; `TRANSITIONS` says what leads where."""

    GATHERING = "gathering"
    """Input is incomplete and the engine wants it whole."""
    WAITING = "waiting"
    """For a slot of the engine."""
    RUNNING = "running"
    """In the engine."""
    FLUSHING = "flushing"
    """Out of the engine; outputs wait for credit, and what still comes in is used up unread."""
    ABORTING = "aborting"
    """The engine was told to drop it and has not yet said that it did."""


TRANSITIONS: dict[State, dict[str, State | None]] = {
    State.GATHERING: {"input complete": State.WAITING, "failed": None, "cancelled": None},
    State.WAITING: {"slot free": State.RUNNING, "failed": None, "cancelled": None},
    State.RUNNING: {"engine finished": State.FLUSHING, "failed": State.ABORTING, "cancelled": State.ABORTING},
    State.FLUSHING: {"edges closed": None, "failed": None, "cancelled": None},
    State.ABORTING: {"engine let go": None},
}
"""State, event, next state; None is the end."""


class StageRequest:
    """One live request of a stage, on its way through `TRANSITIONS`."""

    def __init__(self, route: Route, stage: str, now: float, *, state: State) -> None:
        self.route = route
        self.state = state
        self.opened_at = now
        self.moved_at = now
        """When the engine last did something for it, or came to owe that."""
        self.first_output_at: float | None = None
        self.engine_request: EngineRequest | None = None
        self.in_edges: dict[EdgeId, InEdge | None] = dict.fromkeys(route.incoming(stage))
        self.out_edges: dict[EdgeId, OutEdge] = {}
        self.out_ports: dict[str, list[OutEdge]] = {}
        self.inputs: dict[str, list[Payload]] = {}
        self.input_bytes = 0
        self.finish = Finish()
        self.is_suspended = False
        self.is_cancel_owed = False
        self.outcome = "done"
        self.report: Failed | None = None
        """What the coordinator was told when the request failed."""
        self.is_fed = False
        """Input came since the engine's last step began."""
        self.untaken: list[tuple[InEdge, Payload]] = []
        """Input that a step-fed engine got and has not yet run a step with."""
        self.in_step: list[tuple[InEdge, Payload]] = []
        """Input that it uses in the step under way."""

    def move(self, event: str) -> None:
        """Take a transition; the end keeps the last state."""
        self.state = TRANSITIONS[self.state][event] or self.state

    @property
    def is_input_complete(self) -> bool:
        """Every input has come to its end."""
        return all(edge is not None and edge.is_closed for edge in self.in_edges.values())

    @property
    def can_advance(self) -> bool:
        """Nothing that others do can be what an engine waits for which runs it by itself."""
        has_input = all(edge is not None and (edge.is_closed or edge.num_unconsumed) for edge in self.in_edges.values())
        return has_input and not self.is_suspended

    @property
    def is_blocked(self) -> bool:
        """An output waits for credit."""
        for edge in self.out_edges.values():  # noqa: SIM110 (asked for every output; `any` takes twice as long)
            if edge.is_blocked:
                return True
        return False

    def stats(self, now: float) -> RequestStats:
        """Return what is told of it when it is done."""
        first = self.first_output_at
        return RequestStats(
            first_output_s=0.0 if first is None else first - self.opened_at,
            total_s=now - self.opened_at,
            chunks_in=sum(edge.num_received for edge in self.in_edges.values() if edge is not None),
            chunks_out=sum(edge.num_sent for edge in self.out_edges.values()),
            bytes_out=sum(edge.num_bytes for edge in self.out_edges.values()),
            usage=self.finish.usage,
        )
