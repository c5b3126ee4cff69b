"""What is asked of a submit before it becomes a request."""

from collections.abc import Callable

import pytest

from omni_bus.core.absence import Absences
from omni_bus.core.administration import Administration, Arrangement
from omni_bus.core.coordinator import NOTHING_ARRANGED
from omni_bus.core.intake import Intake
from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.tombstones import Tombstones
from omni_bus.errors import (
    BadInput,
    DeadlineExceeded,
    ErrorInfo,
    OmniBusError,
    RequestCancelled,
    StageFailed,
    Unavailable,
    UnknownName,
)
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, RouteEdge, Submit

CLIENT = Peer("client", 9, "c")
EDGES = (
    RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
    RouteEdge("llm", "text", "out", "text", "text", 4, 4096),
    RouteEdge("llm", "text", "voice", "text", "text", 4, 4096),
    RouteEdge("voice", "audio", "out", "audio", "text", 4, 4096),
)


class Door:
    """An intake, and the tables that it reads."""

    def __init__(self, arrangement: Arrangement = NOTHING_ARRANGED, awaited: tuple[str, ...] = ()) -> None:
        self.membership = Membership()
        self.administration = Administration(arrangement, awaited)
        self.requests: set[str] = set()
        self.tombstones: Tombstones[ErrorInfo] = Tombstones()
        self.intake = Intake(
            {"chat": Pipeline("chat", "chat", (), EDGES, timeout_s=30.0)},
            self.membership,
            administration=self.administration,
            absences=Absences(self.membership),
            requests=self.requests,
            tombstones=self.tombstones,
        )

    def join(self, *names: str) -> None:
        for number, name in enumerate(names):
            stage, _, replica = name.rpartition(".")
            self.membership.join(Hello(1, Peer(name, number + 1, name), "stage", stage, int(replica), True), 0.0)

    def accept(self, request: str = "r", pipeline: str = "chat", outputs=("text",), **fields):
        return self.intake.accept(CLIENT, Submit(request, pipeline, outputs, **fields), 100.0)


@pytest.fixture
def door() -> Door:
    door = Door()
    door.join("llm.0")
    return door


def test_submit_becomes_a_request_with_what_its_outputs_need(door: Door) -> None:
    request = door.accept(timeout_s=2.0)

    assert (request.client, request.received_at, request.deadline) == (CLIENT, 100.0, 102.0)
    assert request.edges == EDGES[:2]
    assert door.accept().deadline == 130.0, "the pipeline's limit"


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"pipeline": "chta"}, UnknownName, "chat"),
        ({"outputs": ("image",)}, OmniBusError, "image"),
        ({"timeout_s": 0.0}, DeadlineExceeded, "had passed"),
        ({"outputs": ("audio",)}, Unavailable, "'voice' has no replica"),
    ],
)
def test_submit_that_can_never_run_is_refused(door: Door, fields, kind, says: str) -> None:
    with pytest.raises(kind, match=says):
        door.accept(**fields)


def test_id_is_used_once_and_who_was_not_told_of_its_end_is_told(door: Door) -> None:
    door.requests.add("lives")
    door.tombstones.bury("done")
    door.tombstones.bury("failed", StageFailed("broke").to_info())
    door.tombstones.bury("cancelled", RequestCancelled("gone").to_info())

    cases: list[tuple[str, int, type[OmniBusError]]] = [
        ("lives", 0, BadInput),
        ("done", 1, BadInput),
        ("failed", 0, BadInput),
        ("failed", 1, StageFailed),
        ("cancelled", 1, Unavailable),
    ]
    for request, attempt, kind in cases:
        assert door.intake.is_used(request)
        with pytest.raises(kind):
            door.accept(request, attempt=attempt)
    assert not door.intake.is_used("new")


def test_nothing_is_taken_once_it_is_closed(door: Door) -> None:
    door.intake.is_closed = True

    with pytest.raises(Unavailable, match="stopping"):
        door.accept()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Door(awaited=("llm.0",)),
        lambda: Door(Arrangement(returning=frozenset({"llm.0"}))),
    ],
    ids=["awaited", "restarted"],
)
def test_stage_whose_replica_comes_back_has_requests_wait(make: Callable[[], Door]) -> None:
    door = make()

    assert door.intake.replicas(EDGES[:2], 0.0) is None
    assert door.accept().edges == EDGES[:2]


def test_drained_replica_is_not_bindable() -> None:
    door = Door(Arrangement(drained=frozenset({"llm.0"})))
    door.join("llm.0", "llm.1")

    assert [actor.peer.actor for actor in door.intake.bindable("llm")] == ["llm.1"]
    replicas = door.intake.replicas(EDGES[:2], 0.0)
    assert replicas is not None
    assert list(replicas) == ["llm"]
