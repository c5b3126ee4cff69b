"""Synthetic robot actions: a session engine for load and fault tests, not a policy (`adapters.synthetic_work`)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from adapters.synthetic_marks import MARK_COLUMNS, action_tensor, floats_of, marker_of
from adapters.synthetic_shapes import SyntheticSteps
from adapters.synthetic_work import StepOptions, WorkParams, plan_of
from omni_bus.engine import Context, EngineRequest, Finished, Output, SessionEngine, Starved
from omni_bus.errors import BadInput
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Json, Payload, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.engine import Event
    from omni_bus.ids import RequestId

Horizon = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Dof = Annotated[int, msgspec.Meta(ge=MARK_COLUMNS, le=1024)]


class ActionsOptions(StepOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticActions`."""

    horizon: Horizon = 16
    """Rows of each action array."""
    dof: Dof = 8
    """Columns of each action array; the first four carry the mark."""
    frame_period_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.05
    """Seconds from one step of the open sessions to the next; 0: as soon as an observation comes."""
    max_observations: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64
    """Observations of one session that may wait; one more fails the session."""


class ActionsParams(WorkParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session may set on `SyntheticActions`."""

    horizon: Horizon | None = None
    dof: Dof | None = None


class _Session(msgspec.Struct):
    plan: ActionsOptions
    is_wanted: bool
    index: int = 0
    """Steps executed; faults count by it."""
    chunk: int = 0
    """Index of the next action array; `truncate` sets it back."""
    state: tuple[float, ...] = ()
    waiting: deque[tuple[str, tuple[float, ...]]] = msgspec.field(default_factory=deque)
    """(marker, state when the observation came), oldest first."""
    is_input_over: bool = False


class SyntheticActions(SyntheticSteps, SessionEngine):
    """Answers each observation with one action array, (horizon, dof) float32, that says its number and the marker.

    ``observation`` is ``{"marker": text}``, other keys are free; ``state`` is a float32 vector of which the columns
    from the fifth on repeat what came last before the observation. A frame in which nothing waits emits nothing.
    """

    accepts: ClassVar[dict[str, str]] = {"observation": "json", "state": "tensor"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"state"})
    emits: ClassVar[dict[str, str]] = {"actions": "tensor"}
    Options: ClassVar[type[msgspec.Struct]] = ActionsOptions
    Params: ClassVar[type[msgspec.Struct]] = ActionsParams
    is_idempotent: ClassVar[bool] = False

    def __init__(self, options: ActionsOptions, context: Context) -> None:
        super().__init__(options, context)
        self.frame_period_s = options.frame_period_s

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Open a session; what came with it is fed first, states before observations.

        Raises:
            BadInput: an input that can't be read.
        """
        session = _Session(plan_of(self.options, request.params), "actions" in request.outputs)
        for port in ("state", "observation"):
            for payload in inputs.get(port, []):
                _take(session, port, payload)
        self._batch.add(request.id, session)

    def feed(self, request: RequestId, port: str, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Bring observations or states. Unknown ids are ignored.

        Raises:
            BadInput: an input that can't be read, or too many that wait; the session is dropped.
        """
        session = self._batch.get(request)
        if session is None:
            return
        try:
            for payload in payloads:
                _take(session, port, payload)
        except BadInput as error:
            self._batch.fail(request, error)
            raise
        if is_last and port == "observation":
            session.is_input_over = True

    def step(self, requests: Sequence[RequestId]) -> list[Event]:
        """Answer one waiting observation of each named session."""
        events: list[Event] = []
        due: list[RequestId] = []
        for request in requests:
            session = self._batch.get(request)
            if session is None:
                continue
            if session.waiting:
                due.append(request)
            elif session.is_input_over:
                self._batch.finish(request)
                events.append(_finished(request, session))
            else:
                events.append(Starved(request))
        return events + self._batch.step(due, self._advance)

    def truncate(self, session: RequestId, port: str, position: int) -> None:
        """Forget the action arrays from number `position` on: the next one gets that number. Unknown ids are ignored.

        Raises:
            BadInput: another port, or a position that wasn't reached.
        """
        live = self._batch.get(session)
        if live is None:
            return
        if port != "actions":
            raise BadInput(f"port: '{port}' came (allowed: actions)", field="port")
        if not 0 <= position <= live.chunk:
            raise BadInput(f"position: {position} came (allowed: 0 to {live.chunk})", field="position")
        live.chunk = position

    def _advance(self, request: RequestId, live: _Session) -> list[Event]:
        marker, state = live.waiting.popleft()
        events: list[Event] = []
        if live.is_wanted:
            tensor = action_tensor(marker, live.chunk, live.plan.horizon, live.plan.dof, state)
            events.append(Output(request, "actions", tensor))
        live.chunk += 1
        if live.is_input_over and not live.waiting:
            events.append(_finished(request, live))
        return events


def _finished(request: RequestId, session: _Session) -> Finished:
    return Finished(request, Finish(detail={"chunks": session.chunk}))


def _take(session: _Session, port: str, payload: Payload) -> None:
    """Keep one input."""
    if port == "state":
        session.state = _read_state(payload)
    elif port == "observation":
        session.waiting.append((_read_observation(payload), session.state))
    else:
        raise BadInput(f"port: '{port}' came (allowed: observation, state)", field="port")
    if len(session.waiting) > session.plan.max_observations:
        raise BadInput(
            f"observation: more wait than are allowed ({session.plan.max_observations})", field="observation"
        )


def _read_state(payload: Payload) -> tuple[float, ...]:
    if not isinstance(payload, Tensor) or len(payload.shape) != 1:
        raise BadInput("state: allowed is a float32 tensor of one dimension", field="state")
    try:
        return tuple(floats_of(payload))
    except ValueError as error:
        raise BadInput(f"state: {error}", field="state") from error


def _read_observation(payload: Payload) -> str:
    value: Any = payload.value if isinstance(payload, Json) else None
    marker = value.get("marker") if isinstance(value, dict) else None
    if not isinstance(marker, str):
        raise BadInput("observation: allowed is an object with a string 'marker'", field="observation")
    return marker_of(marker)
