"""What must hold for a submit before it becomes a request: its id, pipeline, outputs and time, and replicas for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.admission import RETRY_AFTER_S
from omni_bus.core.recovery import needed_stages
from omni_bus.core.request import Request
from omni_bus.errors import BadInput, DeadlineExceeded, RequestCancelled, Unavailable, from_info, unknown_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from omni_bus.core.absence import Absences
    from omni_bus.core.administration import Administration
    from omni_bus.core.membership import Actor, Membership
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.core.tombstones import Tombstones
    from omni_bus.errors import ErrorInfo, OmniBusError
    from omni_bus.ids import Peer, RequestId
    from omni_bus.wire.frames import RouteEdge, Submit


class Intake:
    """Reads the coordinator's tables; changes nothing.

    Args:
        pipelines: by name.
        membership: who is here.
        administration: which replicas may be bound, are awaited, or come back.
        absences: why a stage has no replica.
        requests: ids that live.
        tombstones: ids that ended lately.
    """

    def __init__(
        self,
        pipelines: dict[str, Pipeline],
        membership: Membership,
        *,
        administration: Administration,
        absences: Absences,
        requests: Container[RequestId],
        tombstones: Tombstones[ErrorInfo],
    ) -> None:
        self._pipelines = pipelines
        self._membership = membership
        self._administration = administration
        self._absences = absences
        self._requests = requests
        self._tombstones = tombstones
        self.is_closed = False
        """Nothing new is taken any more."""

    def accept(self, client: Peer, submit: Submit, now: float) -> Request:
        """Check a submit against what can be known before its turn, and return it as a request.

        Raises:
            UnknownName: there is no such pipeline or output.
            BadInput: its id was used.
            DeadlineExceeded: its time has passed.
            Unavailable: the deployment stops, a stage has no replica, or an attempt of the request was given up.
            OmniBusError: what the request ended with, of which its client was not told.
        """
        pipeline = self._pipelines.get(submit.pipeline)
        if pipeline is None:
            raise unknown_name("pipeline", submit.pipeline, self._pipelines, field="pipeline")
        if self.is_used(submit.request):
            raise self._used(submit)
        if self.is_closed:
            raise stopping()
        edges = pipeline.needed(submit.outputs)
        self.replicas(edges, now)
        timeout_s = submit.timeout_s if submit.timeout_s is not None else pipeline.timeout_s
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceeded(f"timeout_s is {timeout_s:g}: the time limit had passed before the request came")
        deadline = None if timeout_s is None else now + timeout_s
        return Request(submit, client, pipeline, edges, now, deadline)

    def is_used(self, request: RequestId) -> bool:
        """Whether an id is known: its request lives, or ended lately."""
        return request in self._requests or request in self._tombstones

    def bindable(self, stage: str) -> list[Actor]:
        """Return the stage's replicas that may get new requests."""
        return self._administration.bindable(self._membership.replicas(stage))

    def replicas(self, edges: Iterable[RouteEdge], now: float) -> dict[str, list[Actor]] | None:
        """Return the replicas of every stage that the edges touch which may be bound; None while one is coming back.

        Raises:
            Unavailable: a stage has none, and none is coming back.
        """
        names = needed_stages(edges)
        if any(self._administration.is_awaited(name) for name in names):
            return None
        replicas = {name: self.bindable(name) for name in names}
        if all(replicas.values()):
            return replicas
        missing = self.missing(edges)
        if missing is not None:
            raise self._absences.unavailable(missing, now)
        return None

    def missing(self, edges: Iterable[RouteEdge]) -> str | None:
        """Return a stage that has no replica which may be bound, and none that is coming back; None if there is none.

        Without one, a request may have its turn: it runs, or is held until those that come back are here.
        """
        names = needed_stages(edges)
        if any(self._administration.is_awaited(name) for name in names):
            return None
        return next((name for name in names if not self.bindable(name) and not self._is_coming_back(name)), None)

    def _is_coming_back(self, stage: str) -> bool:
        """Whether requests wait for a stage, however long it takes: a replica wakes, or is arranged to return."""
        is_waking = self._administration.is_waking(self._membership.replicas(stage))
        return is_waking or self._administration.is_coming_back(stage)

    def _used(self, submit: Submit) -> OmniBusError:
        """Return the error for an id that is known: who repeats what ended was not there to be told."""
        epitaph = self._tombstones.epitaph(submit.request) if submit.attempt else None
        if epitaph is None:
            return BadInput(f"request id {submit.request} was used already", field="request")
        error = from_info(epitaph)
        if not isinstance(error, RequestCancelled):
            return error
        return Unavailable(
            f"the request was given up: {error.message}", is_retry_safe=True, retry_after_s=RETRY_AFTER_S
        )


def stopping() -> Unavailable:
    """Return the error of what a deployment that stops does not do any more."""
    return Unavailable("the deployment is stopping", is_retry_safe=True, retry_after_s=RETRY_AFTER_S)
