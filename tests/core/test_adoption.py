"""What a hello brings a coordinator; who ends what is in `test_coordinator`."""

import msgspec
import pytest

from omni_bus.core import adoption
from omni_bus.core.absence import Absences
from omni_bus.core.admission import Admission
from omni_bus.core.adoption import Adoption
from omni_bus.core.binding import Bindings
from omni_bus.core.deaths import Deaths
from omni_bus.core.effects import Report, Send, SetTimer
from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.request import Request
from omni_bus.core.tombstones import Tombstones
from omni_bus.errors import ErrorInfo, RequestCancelled, StageLost
from omni_bus.ids import Peer
from omni_bus.wire.frames import Hello, Inquire, Route, RouteEdge

LLM, VOICE, GATEWAY = Peer("llm.0", 1, "l"), Peer("voice.0", 2, "v"), Peer("gateway.0", 3, "g")
EDGES = (
    RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
    RouteEdge("llm", "text", "voice", "text", "text", 4, 4096),
    RouteEdge("voice", "audio", "out", "audio", "text", 4, 4096),
)
PIPELINE = Pipeline("chat", "chat", (), EDGES)


class New:
    """The tables of a coordinator that has just begun."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.membership = Membership()
        self.deaths = Deaths()
        self.bindings = Bindings()
        self.admission = Admission(PIPELINE)
        self.adoption = Adoption(
            {"chat": PIPELINE},
            self.membership,
            bindings=self.bindings,
            admission={"chat": self.admission},
            requests=self.requests,
            tombstones=Tombstones[ErrorInfo](),
            patience_s=5.0,
            absences=Absences(self.membership),
            deaths=self.deaths,
        )

    def hello(self, peer: Peer, *live: Route, ran_s: tuple[float, ...] = (), now: float = 100.0):
        name, _, _ = peer.actor.partition(".")
        hello = Hello(
            1, peer, "gateway" if peer is GATEWAY else "stage", "" if peer is GATEWAY else name, live=live, ran_s=ran_s
        )
        return self.adoption.on_hello(self.membership.join(hello, now), hello, now)


@pytest.fixture
def new() -> New:
    return New()


def route(request: str = "r", timeout_s: float | None = 30.0) -> Route:
    return Route(request, "chat", GATEWAY, {"llm": LLM, "voice": VOICE}, EDGES, timeout_s=timeout_s, key="team")


def deadlines(effects) -> list[float]:
    return [effect.at for effect in effects if isinstance(effect, SetTimer) and effect.key == ("deadline", "r")]


def test_adopted_request_gets_what_remains_of_its_limit(new):
    effects = new.hello(GATEWAY, route(), ran_s=(12.0,))

    assert deadlines(effects) == [118.0]
    assert (new.requests["r"].deadline, new.requests["r"].received_at) == (118.0, 88.0)
    assert new.admission.callers()[0]["caller"] == "team"


def test_request_whose_time_is_over_ends_at_once(new):
    assert deadlines(new.hello(GATEWAY, route(), ran_s=(99.0,))) == [100.0]


def test_limit_counts_from_who_has_had_the_request_longest(new):
    assert deadlines(new.hello(VOICE, route(), ran_s=(2.0,))) == [128.0]
    assert deadlines(new.hello(LLM, route(), ran_s=(9.0,), now=101.0)) == [122.0]
    assert deadlines(new.hello(GATEWAY, route(), ran_s=(8.0,), now=101.0)) == []


def test_request_without_a_limit_gets_none(new):
    assert deadlines(new.hello(GATEWAY, route(timeout_s=None), ran_s=(9.0,))) == []
    assert deadlines(new.hello(LLM, route(timeout_s=None), ran_s=(9.0,))) == []


@pytest.mark.parametrize("ran_s", [(), (-5.0,), (float("nan"),), (float("inf"),)], ids=str)
def test_time_that_is_not_said_or_makes_no_sense_counts_as_none(new, ran_s):
    assert deadlines(new.hello(GATEWAY, route(), ran_s=ran_s)) == [130.0]


def test_hello_brings_no_more_than_a_bounded_number(new, monkeypatch):
    monkeypatch.setattr(adoption, "MAX_ROUTES", 3)

    effects = new.hello(GATEWAY, *(route(f"r{number}") for number in range(10)))

    assert list(new.requests) == ["r0", "r1", "r2"]
    assert Report(
        "hello lists more requests than are taken over at once", {"name": "gateway.0", "listed": 10, "taken": 3}
    ) in list(effects)


def test_route_that_touches_no_stage_is_not_believed(new):
    for edges in ((), (RouteEdge("in", "prompt", "out", "text", "text", 4, 4096),)):
        assert new.hello(GATEWAY, msgspec.structs.replace(route(), edges=edges)) == []

    assert new.requests == {}


def test_only_those_who_are_here_are_asked(new):
    """A forged hello may name any peers: nothing is sent to them."""
    assert [e for e in new.hello(GATEWAY, route()) if isinstance(e, Send)] == []

    effects = new.hello(LLM)
    assert [e for e in effects if isinstance(e, Send)] == [Send(LLM, Inquire("r"))]


def test_who_is_missing_after_the_patience_is_told(new):
    new.hello(LLM, route())
    absent, error = new.adoption.missing(new.requests["r"])
    assert absent == ["voice"]
    assert isinstance(error, RequestCancelled), "nobody is there to hear of the stage"

    new.hello(GATEWAY, route())
    absent, error = new.adoption.missing(new.requests["r"])
    assert absent == ["voice"]
    assert isinstance(error, StageLost)

    new.hello(VOICE, route())
    assert new.adoption.missing(new.requests["r"]) == ([], None)
