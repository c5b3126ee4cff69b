"""Links to those who died while there was no coordinator: whoever holds one says so, and is told."""

import pytest
from msgspec.structs import replace

from omni_bus.core.effects import Send
from omni_bus.core.member import Member, coordinator_peer
from omni_bus.core.ties import MAX_TIES
from omni_bus.ids import Peer
from omni_bus.wire.frames import PROTOCOL_VERSION, AnyFrame, Goodbye, Hello, Introduce, Lost, Outlook, Reroute, Welcome
from tests.core.test_coordinator import GATEWAY, LLM, PATIENCE_S, SUPERVISOR, VOICE, Deployment, route

LLM_1 = Peer("llm.1", 4, "l1")


@pytest.fixture
def new() -> Deployment:
    """A coordinator that comes after another and has met nobody."""
    return Deployment(awaited=("llm.0", "voice.0"))


def hello(peer: Peer, *linked: Peer, live=()) -> Hello:
    stage, _, _ = peer.actor.partition(".")
    role = "gateway" if stage == "gateway" else "stage"
    return Hello(PROTOCOL_VERSION, peer, role, "" if role == "gateway" else stage, 0, True, live, linked=linked)


def lost(deployment: Deployment, peer: Peer) -> list[Peer]:
    return [frame.peer for frame in deployment.to(peer, Lost)]


def frames(effects) -> list[AnyFrame]:
    return [effect.frame for effect in effects if isinstance(effect, Send)]


def test_who_says_no_hello_in_time_is_lost(new):
    new.frame(GATEWAY, hello(GATEWAY, LLM, VOICE))
    new.join(VOICE)
    new.beat_until(PATIENCE_S - 0.1, GATEWAY, VOICE)
    assert lost(new, GATEWAY) == []

    new.beat_until(PATIENCE_S, GATEWAY, VOICE)

    assert (lost(new, GATEWAY), lost(new, VOICE)) == ([LLM], [LLM])


@pytest.mark.parametrize("is_told_first", [True, False])
def test_who_is_known_to_be_dead_is_lost_at_once(new, is_told_first):
    new.join(SUPERVISOR)
    if is_told_first:
        new.frame(SUPERVISOR, Lost(LLM))
    new.frame(GATEWAY, hello(GATEWAY, LLM))
    if not is_told_first:
        assert lost(new, GATEWAY) == []
        new.frame(SUPERVISOR, Lost(LLM))

    assert lost(new, GATEWAY) == [LLM]
    assert ("ties", "") not in new.timers


def test_who_was_replaced_is_lost_at_once(new):
    new.frame(GATEWAY, hello(GATEWAY, LLM))
    new.join(replace(LLM, incarnation=77))

    assert lost(new, GATEWAY) == [LLM]


def test_request_that_waits_for_the_dead_is_told_of_its_successor_first(new):
    new.join(SUPERVISOR, LLM_1)
    new.join(VOICE, live=(route(),))
    new.frame(GATEWAY, hello(GATEWAY, LLM, live=(route(),)))
    new.frame(SUPERVISOR, Lost(LLM))
    assert lost(new, GATEWAY) == []

    new.wait_until(0.0)

    told = [send.frame for send in new.sent if send.peer == GATEWAY and isinstance(send.frame, Reroute | Lost)]
    assert [type(frame) for frame in told] == [Reroute, Lost]


def test_link_that_a_request_made_after_the_hello_is_told_of_too(new):
    """Its stage had sent nothing yet when it said hello."""
    new.join(SUPERVISOR, GATEWAY, LLM_1)
    new.join(VOICE, live=(route(),))
    new.frame(SUPERVISOR, Outlook("llm.0", "llm", 0, "backing off", "SIGKILL", 1.0))
    new.frame(SUPERVISOR, Lost(LLM))
    new.wait_until(PATIENCE_S - 0.1)

    assert lost(new, VOICE) == [LLM]


def test_hello_of_an_actor_that_was_there_all_the_time_names_whom_it_was_not_told_of():
    deployment = Deployment()
    deployment.join(GATEWAY, VOICE)
    deployment.frame(GATEWAY, hello(GATEWAY, LLM, VOICE))
    deployment.beat_until(PATIENCE_S, GATEWAY, VOICE)

    assert lost(deployment, GATEWAY) == [LLM]


def test_route_of_a_live_request_names_whom_it_may_link_to_a_moment_later():
    """Its client has the admission, and a broken link took along all that came after it."""
    deployment = Deployment()
    deployment.join(SUPERVISOR, GATEWAY, LLM, VOICE)
    deployment.submit("r")
    deployment.frame(SUPERVISOR, Lost(LLM))
    deployment.sent.clear()

    deployment.frame(GATEWAY, hello(GATEWAY, live=(route(),)))

    assert lost(deployment, GATEWAY) == [LLM]


@pytest.mark.parametrize("is_given_up", [True, False], ids=["given up", "new coordinator"])
@pytest.mark.parametrize("has_supervisor", [True, False])
@pytest.mark.parametrize(("role", "name"), [("stage", "llm.0"), ("gateway", "gateway.0")])
def test_link_made_after_a_hello_that_was_long_under_way_is_told_of(new, is_given_up, has_supervisor, role, name):
    """Who is at its other end was lost meanwhile, of which everybody heard who was known."""
    links: list[Peer] = []
    me = Peer(name, 7, "me")
    stage = "llm" if role == "stage" else ""
    member = Member(me, role, coordinator_peer("c"), stage=stage, linked=lambda: links)
    member.start(0.0)
    member.ready()
    others = [SUPERVISOR] if has_supervisor else []
    new.join(VOICE, *others)
    if is_given_up:
        new.frame(me, hello(me))
    (old,) = frames(member.on_frame(Introduce(), 0.0))
    links.append(VOICE)
    new.beat_until(PATIENCE_S + 1.0, VOICE, *others)
    new.frame(*((SUPERVISOR, Lost(VOICE)) if has_supervisor else (VOICE, Goodbye())))
    new.sent.clear()

    new.frame(me, old)
    for welcome in new.to(me, Welcome):
        for answer in frames(member.on_frame(welcome, new.now)):
            new.frame(me, answer)
    new.beat_until(new.now + PATIENCE_S, me, *others)

    assert lost(new, me) == [VOICE]


def test_any_number_of_links_costs_a_bounded_table(new):
    linked = [Peer(f"x.{number}", number, "x") for number in range(2 * MAX_TIES)]
    new.frame(GATEWAY, hello(GATEWAY, *linked))
    new.beat_until(PATIENCE_S, GATEWAY)
    assert lost(new, GATEWAY) == linked[:MAX_TIES]

    new.frame(GATEWAY, hello(GATEWAY, *linked[MAX_TIES:]))
    new.beat_until(2 * PATIENCE_S, GATEWAY)
    assert lost(new, GATEWAY) == linked[MAX_TIES:]
