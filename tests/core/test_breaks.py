"""Breaks from their first word to their answer; what they mean for requests in full is in `test_coordinator_broken`."""

from typing import Any

import pytest

from omni_bus.core.absence import Absences
from omni_bus.core.breaks import Breaks
from omni_bus.core.deaths import Deaths
from omni_bus.core.effects import Report, Send, SetTimer
from omni_bus.core.links import NONCE
from omni_bus.core.membership import Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.core.request import Request, State
from omni_bus.errors import LinkBroken
from omni_bus.ids import Peer
from omni_bus.wire.frames import Broken, Hello, Ping, Route, RouteEdge, Submit

LLM, GATEWAY = Peer("llm.0", 1, "l"), Peer("gateway.0", 2, "g")
EDGES = (
    RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
    RouteEdge("llm", "text", "out", "text", "text", 4, 4096),
)
PATIENCE_S = 5.0
BROKEN = Broken(LLM, GATEWAY, 1)


class Host:
    """The tables of a coordinator with a request over one stage, and what it was told to give up."""

    def __init__(self) -> None:
        self.membership, self.deaths = Membership(), Deaths()
        route = Route("r", "chat", GATEWAY, {"llm": LLM}, EDGES)
        pipeline = Pipeline("chat", "chat", (), EDGES)
        entry = Request(Submit("r", "chat", ()), GATEWAY, pipeline, EDGES, 0.0, None, State.RUNNING, route)
        entry.pending = {"llm": LLM}
        self.requests = {"r": entry}
        self.given_up: list[tuple[str, str]] = []
        self.breaks = Breaks(
            self.membership, Absences(self.membership), self.deaths, self.requests, self.give_up, PATIENCE_S
        )

    def give_up(self, request: str, entry: Request, error: Any, now: float) -> list[Any]:
        assert isinstance(error, LinkBroken)
        self.given_up.append((request, error.stage))
        return []

    def join(self, *peers: Peer) -> None:
        for peer in peers:
            stage = "llm" if peer == LLM else ""
            self.membership.join(Hello(1, peer, "stage" if stage else "gateway", stage), 0.0)

    def actor(self, peer: Peer):
        found = self.membership.get(peer.sender)
        assert found is not None
        return found


@pytest.fixture
def host() -> Host:
    host = Host()
    host.join(LLM, GATEWAY)
    return host


def test_break_is_answered_once_all_who_were_told_have_confirmed(host: Host) -> None:
    assert host.breaks.on_broken(host.actor(LLM), BROKEN, 1.0) == [Send(GATEWAY, Ping(NONCE))]
    assert host.given_up == [], "first it must be known that the target lives"

    told = host.breaks.on_pong(host.actor(GATEWAY), NONCE, 1.1)
    assert host.given_up == [("r", "llm")]
    (ping,) = [effect.frame for effect in told if isinstance(effect, Send) and isinstance(effect.frame, Ping)]

    assert host.breaks.on_pong(host.actor(GATEWAY), ping.nonce, 1.2) == [Send(LLM, BROKEN)]
    assert host.breaks.on_broken(host.actor(LLM), BROKEN, 1.3) == [Send(LLM, BROKEN)], "its answer was lost"


def test_hello_is_a_sign_of_life_and_has_what_was_not_confirmed_repeated(host: Host) -> None:
    host.breaks.on_broken(host.actor(LLM), BROKEN, 1.0)

    first = host.breaks.on_hello(host.actor(GATEWAY), 1.1)
    again = host.breaks.on_hello(host.actor(GATEWAY), 1.2)

    assert host.given_up == [("r", "llm")]
    for effects in (first, again):
        assert Send(GATEWAY, BROKEN) in effects


def test_nobody_is_asked_who_is_gone_or_has_not_come(host: Host) -> None:
    host.membership.leave(host.actor(GATEWAY))
    assert host.breaks.on_broken(host.actor(LLM), BROKEN, 1.0) == [SetTimer(("alive", "gateway.0"), 1.0 + PATIENCE_S)]
    assert host.breaks.on_name("gateway.0", None) == [Send(LLM, BROKEN)]

    host.deaths.note(GATEWAY.sender, is_settled=False)
    assert host.breaks.on_broken(host.actor(LLM), BROKEN, 2.0) == [Send(LLM, BROKEN)]
    assert host.given_up == []


def test_target_that_goes_settles_its_breaks_and_answers_only_who_is_here(host: Host) -> None:
    host.breaks.on_broken(host.actor(LLM), BROKEN, 1.0)
    assert host.breaks.on_gone(GATEWAY.sender) == [Send(LLM, BROKEN)]

    host.breaks.on_broken(host.actor(LLM), BROKEN, 2.0)
    host.membership.leave(host.actor(LLM))
    assert host.breaks.on_gone(GATEWAY.sender) == []


def test_new_coordinator_keeps_its_answer_and_what_a_break_means_for_whom_it_adopts(host: Host) -> None:
    assert host.breaks.start(0.0) == [SetTimer(("breaks", ""), 2 * PATIENCE_S)]
    adopted = host.requests.pop("r")
    host.breaks.on_broken(host.actor(LLM), BROKEN, 1.0)
    told = host.breaks.on_alive(host.actor(GATEWAY), 1.1)
    (ping,) = [effect.frame for effect in told if isinstance(effect, Send) and isinstance(effect.frame, Ping)]
    assert host.breaks.on_pong(host.actor(GATEWAY), ping.nonce, 1.2) == []

    broken, error = host.breaks.former(adopted, 2.0)
    assert broken == BROKEN
    assert isinstance(error, LinkBroken)
    assert host.breaks.former(adopted, 1.2 + 2 * PATIENCE_S) == (None, None)
    assert host.breaks.lose_patience() == [Send(LLM, BROKEN)]


def test_word_of_somebody_else_is_not_taken(host: Host) -> None:
    (report,) = host.breaks.on_broken(host.actor(GATEWAY), BROKEN, 1.0)

    assert isinstance(report, Report)
    assert report.event == "a break of somebody else"
