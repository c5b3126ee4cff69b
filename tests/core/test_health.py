from typing import Any

import msgspec

from omni_bus.core.effects import DropTimer, Send, SetTimer
from omni_bus.core.health import ROUND_TRIP_S, Health
from omni_bus.core.membership import Membership
from omni_bus.ids import Peer
from omni_bus.wire.frames import AdminReply, Hello, Ping, Pong, StageStats
from omni_bus.wire.metrics import Metric, Sample

ASKER = Peer("gateway", 1, "g")


def actors(count: int):
    membership = Membership()
    return [
        membership.join(Hello(1, Peer(f"llm.{n}", 1, "e"), "stage", "llm", n, is_ready=True), 0.0) for n in range(count)
    ]


def test_all_answers_end_the_round_at_once():
    health, two = Health(), actors(2)
    begun = health.begin(ASKER, 7, two, [], 10.0)
    assert begun == [
        Send(two[0].peer, Ping(1)),
        Send(two[1].peer, Ping(1)),
        SetTimer(("health", "1"), 10.0 + ROUND_TRIP_S),
    ]

    assert health.on_pong(two[0].sender, Pong(1, StageStats(active=3)), 10.25) == []
    ended: list[Any] = health.on_pong(two[1].sender, Pong(1), 10.5)

    assert ended[0] == DropTimer(("health", "1"))
    reply: Any = ended[1].frame
    assert isinstance(reply, AdminReply)
    assert reply.call == 7
    assert [row["is_live"] for row in reply.result] == [True, True]
    assert [row["round_trip_s"] for row in reply.result] == [0.25, 0.5]
    assert reply.result[0]["stats"]["active"] == 3
    assert reply.result[0]["is_ready"]
    assert health._rounds == {}


def test_silent_actor_is_reported_not_live():
    health, two = Health(), actors(2)
    health.begin(ASKER, 7, two, [], 0.0)
    health.on_pong(two[0].sender, Pong(1), 0.5)

    ended: list[Any] = health.on_timer(1)
    reply = ended[1].frame

    assert [row["is_live"] for row in reply.result] == [True, False]
    assert [row.get("reason") for row in reply.result] == [None, "does not answer (waited 1 s)"]
    assert health.on_timer(1) == []


def test_rows_of_the_absent_are_in_the_answer():
    health, one = Health(), actors(1)
    absent = {"actor": "llm.7", "is_live": False, "reason": "SIGKILL"}
    health.begin(ASKER, 7, one, [absent], 0.0)

    ended: list[Any] = health.on_pong(one[0].sender, Pong(1), 0.5)

    assert [row["actor"] for row in ended[1].frame.result] == ["llm.0", "llm.7"]


def test_late_doubled_and_strange_pongs_change_nothing():
    health, two = Health(), actors(2)
    health.begin(ASKER, 7, two, [], 0.0)

    assert health.on_pong(two[0].sender, Pong(99), 0.1) == []
    assert health.on_pong(Peer("other", 1, "").sender, Pong(1), 0.1) == []
    health.on_pong(two[0].sender, Pong(1), 0.1)
    assert health.on_pong(two[0].sender, Pong(1), 0.1) == []
    health.on_timer(1)
    assert health.on_pong(two[1].sender, Pong(1), 5.0) == []


def test_nobody_to_ask_answers_at_once():
    ended: list[Any] = Health().begin(ASKER, 7, [], [], 0.0)
    reply = ended[-1].frame

    assert reply == AdminReply(7, [])


def test_what_engines_measure_comes_where_it_is_wanted():
    health, two = Health(), actors(2)
    begun: list[Any] = health.begin(ASKER, 7, two, [], 0.0, wants_metrics=True)
    assert begun[0] == Send(two[0].peer, Ping(1, wants_metrics=True))
    measured = Metric("vllm:requests", "gauge", "Some.", (Sample("vllm:requests", 2.0, {"engine": "0"}),))

    health.on_pong(two[0].sender, Pong(1, metrics=(measured,)), 0.5)
    ended: list[Any] = health.on_pong(two[1].sender, Pong(1), 0.5)

    one, other = ended[1].frame.result
    assert msgspec.convert(one["metrics"], tuple[Metric, ...]) == (measured,)
    assert "metrics" not in other
