import pytest

from omni_bus.core.effects import Forget, Leave, Send, SetTimer
from omni_bus.core.member import FIRST_HEARTBEAT_S, Member, Running, coordinator_peer
from omni_bus.errors import BadFrame, BadInput, ErrorInfo
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Broken,
    Goodbye,
    Heartbeat,
    Hello,
    Introduce,
    Lost,
    Outlook,
    Ping,
    Pong,
    Progress,
    Range,
    Ready,
    Refused,
    Rested,
    Route,
    StageStats,
    Stalled,
    Welcome,
)

ME, COORDINATOR = Peer("llm.0", 5, "me"), coordinator_peer("c")
ROUTE = Route("r", "p", Peer("gateway", 1, "g"), {"llm": ME}, ())


@pytest.fixture
def member() -> Member:
    running = (Running(ROUTE, 4.0),)
    return Member(ME, "stage", COORDINATOR, stage="llm", live=lambda: running, stats=lambda: StageStats(active=2))


def test_start_says_hello_and_beats(member):
    hello = Hello(PROTOCOL_VERSION, ME, "stage", "llm", 0, is_ready=False, live=(ROUTE,), ran_s=(6.0,), received=((),))

    assert member.start(10.0) == [
        Send(COORDINATOR, hello),
        SetTimer(("heartbeat", ""), 10.0 + FIRST_HEARTBEAT_S),
    ]
    assert member.on_timer(11.0) == [
        Send(COORDINATOR, Heartbeat("me", 1)),
        SetTimer(("heartbeat", ""), 11.0 + FIRST_HEARTBEAT_S),
    ]


def test_welcome_sets_the_pace_from_the_last_beat(member):
    member.start(10.0)

    assert member.on_frame(Welcome(PROTOCOL_VERSION, COORDINATOR, 0.1), 0.0) == [SetTimer(("heartbeat", ""), 10.1)]
    assert member.on_frame(Welcome(PROTOCOL_VERSION, COORDINATOR, 0.1), 0.0) == []
    assert member.on_timer(10.1)[1] == SetTimer(("heartbeat", ""), 10.2)


def test_welcome_tells_whether_this_replica_is_drained(member):
    for is_drained in (True, False):
        member.on_frame(Welcome(PROTOCOL_VERSION, COORDINATOR, 1.0, is_drained), 0.0)
        assert member.is_drained == is_drained


@pytest.mark.parametrize("is_new", [True, False])
def test_welcome_of_a_newcomer_is_answered_with_a_hello_if_that_would_name_more_links(is_new):
    links: list[Peer] = [COORDINATOR]
    member = Member(ME, "stage", COORDINATOR, stage="llm", linked=lambda: links)
    welcome = Welcome(PROTOCOL_VERSION, COORDINATOR, FIRST_HEARTBEAT_S, False, is_new)
    member.start(0.0)
    assert member.on_frame(welcome, 0.0) == []

    links.append(Peer("voice.0", 3, "v"))

    frames = [effect.frame for effect in member.on_frame(welcome, 0.0) if isinstance(effect, Send)]
    told = [frame.linked for frame in frames if isinstance(frame, Hello)]
    assert told == ([(Peer("voice.0", 3, "v"),)] if is_new else [])
    assert member.on_frame(welcome, 0.0) == [], "it has been told"
    links.clear()
    assert member.on_frame(welcome, 0.0) == []


def test_introduce_is_answered_with_what_is_true_now(member):
    member.start(0.0)
    assert member.ready() == [Send(COORDINATOR, Ready())]

    (answer,) = member.on_frame(Introduce(), 0.0)

    hello = Hello(PROTOCOL_VERSION, ME, "stage", "llm", 0, is_ready=True, live=(ROUTE,), ran_s=(0.0,), received=((),))
    assert answer.frame == hello


def test_context_length_is_told_and_told_again(member):
    assert member.ready(2048) == [Send(COORDINATOR, Ready(2048))]

    (answer,) = member.on_frame(Introduce(), 0.0)

    assert answer.frame.context_length == 2048


def test_values_that_a_model_takes_are_told_and_told_again(member):
    ranges = {"width": Range(16, 64, 16)}
    assert member.ready(None, ranges) == [Send(COORDINATOR, Ready(None, ranges))]

    (answer,) = member.on_frame(Introduce(), 0.0)

    assert answer.frame.ranges == ranges


def test_rest_is_answered_with_the_level_that_a_hello_tells_too(member):
    awake = Send(COORDINATOR, Progress("ready", 1.0))
    error = BadInput("level: no")

    assert member.rested(3, None) == [awake, Send(COORDINATOR, Rested(3))]
    assert member.rested(3, error) == [awake, Send(COORDINATOR, Rested(3, error.to_info()))]
    member.level = 2
    assert member.rested(4, None) == [awake, Send(COORDINATOR, Rested(4, None, 2))]
    (answer,) = member.on_frame(Introduce(), 0.0)
    assert answer.frame.level == 2


def test_stalled_actor_says_so_and_never_hello_again(member):
    stalled = Send(COORDINATOR, Stalled(ME, "llm", 0, 61.5))
    member.start(0.0)
    member.ready()

    assert member.stalled(61.5, 5.0) == [stalled]
    assert member.on_frame(Introduce(), 6.0) == [stalled]
    assert not member.is_ready


def test_coordinator_is_silent_after_four_unanswered_beats(member):
    member.start(0.0)
    for beat in range(1, 4):
        member.on_timer(float(beat))
    assert not member.is_coordinator_silent

    member.on_timer(4.0)
    assert member.is_coordinator_silent

    member.on_frame(Welcome(PROTOCOL_VERSION, COORDINATOR, 1.0), 4.5)
    assert not member.is_coordinator_silent


def test_actor_that_was_held_up_does_not_blame_the_coordinator(member):
    member.start(0.0)
    member.on_timer(1.0)
    member.on_timer(500.0)

    assert not member.is_coordinator_silent


def test_outlook_goes_to_the_coordinator(member):
    outlook = Outlook("llm.1", "llm", 1, "degraded", "exit code 70", 60.0)

    assert member.outlook(outlook) == [Send(COORDINATOR, outlook)]


def test_ping_is_answered_with_stats(member):
    assert member.on_frame(Ping(3), 0.0) == [Send(COORDINATOR, Pong(3, StageStats(active=2)))]


def test_refused_actor_leaves_with_the_reason(member):
    (leave,) = member.on_frame(Refused(ErrorInfo("bad_frame", "version 9")), 0.0)

    assert isinstance(leave, Leave)
    assert isinstance(leave.error, BadFrame)


def test_lost_peer_is_forgotten(member):
    assert member.on_frame(Lost(ROUTE.gateway), 0.0) == [Forget(ROUTE.gateway)]


def test_broken_connection_is_told_until_the_coordinator_says_that_it_knows(member):
    broken = Broken(ME, ROUTE.gateway, 1)
    assert member.on_link_broken(ROUTE.gateway, 0.0) == [Send(COORDINATOR, broken)]

    assert [send.frame for send in member.on_frame(Introduce(), 0.0)][1:] == [broken]
    assert member.on_frame(Broken(ROUTE.gateway, ME), 0.0) == [], "somebody else's"
    assert [send.frame for send in member.on_frame(Introduce(), 0.0)][1:] == [broken]

    assert member.on_frame(broken, 0.0) == []
    assert [send.frame for send in member.on_frame(Introduce(), 0.0)][1:] == []


def test_answer_to_a_former_break_of_a_connection_is_none_to_the_next(member):
    member.on_link_broken(ROUTE.gateway, 0.0)
    member.on_link_broken(ROUTE.gateway, 1.0)
    member.on_frame(Broken(ME, ROUTE.gateway, 1), 2.0)

    assert [send.frame for send in member.on_frame(Introduce(), 3.0)][1:] == [Broken(ME, ROUTE.gateway, 2)]


def test_broken_connection_to_a_lost_peer_is_told_no_more(member):
    member.on_link_broken(ROUTE.gateway, 0.0)
    member.on_frame(Lost(ROUTE.gateway), 0.0)

    assert len(member.on_frame(Introduce(), 0.0)) == 1


def test_broken_connection_to_the_coordinator_is_answered_with_a_new_introduction(member):
    member.on_link_broken(ROUTE.gateway, 0.0)

    hello, broken = (send.frame for send in member.on_link_broken(COORDINATOR, 0.0))

    assert isinstance(hello, Hello)
    assert hello.live == (ROUTE,)
    assert broken == Broken(ME, ROUTE.gateway, 1)


def test_progress_and_goodbye_go_to_the_coordinator(member):
    assert member.progress("loading", 0.5) == [Send(COORDINATOR, Progress("loading", 0.5))]
    member.ready()
    assert member.goodbye("drain") == [Send(COORDINATOR, Goodbye("drain"))]
    assert not member.is_ready
