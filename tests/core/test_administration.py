from typing import Any

import pytest

from omni_bus.core.administration import CUT_S, Administration, Arrangement, error_for_cut, stage_of
from omni_bus.core.effects import DropTimer, Send, SetTimer
from omni_bus.core.membership import Actor, Membership
from omni_bus.core.pipeline import Pipeline
from omni_bus.errors import BadInput
from omni_bus.ids import Peer
from omni_bus.wire.frames import AdminReply, Hello, Route, RouteEdge

SUPERVISOR = Peer("supervisor", 1, "s")
EDGES = (RouteEdge("in", "a", "llm", "a", "text", 4, 64), RouteEdge("llm", "b", "out", "b", "text", 4, 64))


def replicas(*names: str) -> list[Actor]:
    membership = Membership()
    hellos = [Hello(1, Peer(name, 1, "e"), "stage", *split(name), is_ready=True) for name in names]
    return [membership.join(hello, 0.0) for hello in hellos]


def split(name: str) -> tuple[str, int]:
    stage, _, number = name.rpartition(".")
    return stage, int(number)


def reply(effects: list[Any]) -> dict[str, Any]:
    (found,) = [e.frame.result for e in effects if isinstance(e, Send) and isinstance(e.frame, AdminReply)]
    return found


# --- which replicas may be bound ----------------------------------------------------------------------------


def test_drained_replicas_are_not_bindable():
    administration = Administration(Arrangement(drained=frozenset({"llm.1"})))

    assert [actor.replica for actor in administration.bindable(replicas("llm.0", "llm.1", "llm.2"))] == [0, 2]
    assert administration.is_drained("llm.1")
    assert not administration.is_drained("llm.0")


def test_stage_is_awaited_until_its_replicas_said_hello():
    administration = Administration(Arrangement(), awaited=("llm.0", "llm.1"))
    assert administration.is_awaited("llm")
    administration.heard_of("llm.0")
    assert administration.is_awaited("llm")
    administration.heard_of("llm.1")

    assert not administration.is_awaited("llm")
    assert not administration.is_waiting


def test_stage_is_coming_back_while_a_replica_restarts():
    administration = Administration(Arrangement())
    administration.arrange({"returning": ["my-llm.0"]})
    assert administration.is_coming_back("my-llm")
    assert not administration.is_coming_back("llm")

    administration.arrange({})
    assert not administration.is_coming_back("my-llm")


@pytest.mark.parametrize(
    "args", [{"drained": "llm.0"}, {"drained": [3]}, {"wanted": {"llm": "two"}}, {"draind": []}, {"wanted": []}]
)
def test_malformed_arrangement_is_refused_and_changes_nothing(args):
    administration = Administration(Arrangement(drained=frozenset({"llm.0"})))

    with pytest.raises(BadInput, match="operation 'arrange'"):
        administration.arrange(args)

    assert administration.is_drained("llm.0")


# --- what is told -------------------------------------------------------------------------------------------


def test_rows_tell_who_is_drained_and_how_many_are_wanted():
    administration = Administration(Arrangement({"llm": 2}, frozenset({"llm.1"})))
    zero, one = replicas("llm.0", "llm.1")

    assert administration.describe(zero, 3) == {"is_drained": False, "wanted": 2}
    assert administration.describe(one, 3) == {"is_drained": True, "wanted": 2, "phase": "draining"}
    assert administration.describe(one, 0) == {"is_drained": True, "wanted": 2, "phase": "drained"}


def test_wanted_replicas_of_which_nothing_was_heard_have_a_row():
    administration = Administration(Arrangement({"llm": 3}, frozenset({"llm.2"}), frozenset({"llm.2"})))

    rows = administration.unheard({"llm.0", "voice.0"})

    assert [(row["actor"], row["phase"], row["is_live"], row["elapsed_s"]) for row in rows] == [
        ("llm.1", "down", False, None),
        ("llm.2", "restarting", False, None),
    ]
    assert administration.marks("llm.2", "llm") == {"is_drained": True, "wanted": 3}
    assert administration.marks("voice.0", "voice") == {"is_drained": False}


# --- waits for actors to have nothing left ------------------------------------------------------------------


def test_wait_is_answered_once_nothing_is_left():
    administration, left = Administration(Arrangement()), {"llm.0": 2}
    begun = administration.drain(SUPERVISOR, 7, {"actors": ["llm.0"], "timeout_s": 5}, 10.0)
    assert begun == [SetTimer(("drain", "1"), 15.0)]
    assert administration.settled(lambda name: left[name]) == []

    left["llm.0"] = 0
    effects = administration.settled(lambda name: left[name])

    assert effects[0] == DropTimer(("drain", "1"))
    assert effects[1] == Send(SUPERVISOR, AdminReply(7, {"outstanding": {}, "has_cut": False}))
    assert administration.settled(lambda name: 0) == []


def test_wait_that_is_over_says_what_is_left():
    administration = Administration(Arrangement())
    administration.drain(SUPERVISOR, 7, {"actors": ["llm.0", "llm.1"], "timeout_s": 5}, 0.0)

    effects, cut = administration.on_timer("1", {"llm.0": 2, "llm.1": 0}.__getitem__, 5.0)

    assert reply(effects) == {"outstanding": {"llm.0": 2}, "has_cut": False}
    assert cut == []
    assert administration.on_timer("1", lambda name: 1, 6.0) == ([], [])


def test_force_names_whom_to_cut_and_waits_a_little_more():
    administration = Administration(Arrangement())
    administration.drain(SUPERVISOR, 7, {"actors": ["llm.0", "llm.1"], "timeout_s": 5, "is_forced": True}, 0.0)

    effects, cut = administration.on_timer("1", {"llm.0": 2, "llm.1": 0}.__getitem__, 5.0)
    assert effects == [SetTimer(("drain", "1"), 5.0 + CUT_S)]
    assert cut == ["llm.0"]

    effects, cut = administration.on_timer("1", {"llm.0": 1, "llm.1": 0}.__getitem__, 7.0)
    assert reply(effects) == {"outstanding": {"llm.0": 1}, "has_cut": True}
    assert cut == []


def test_wait_of_whom_is_gone_is_forgotten():
    administration = Administration(Arrangement())
    administration.drain(SUPERVISOR, 7, {"actors": ["llm.0"], "timeout_s": 5}, 0.0)

    assert administration.forget(Peer("gateway", 1, "g")) == []
    assert administration.forget(SUPERVISOR) == [DropTimer(("drain", "1"))]
    assert administration.settled(lambda name: 0) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "missing required field `actors`"),
        ({"actors": ["a"], "timeout_s": -1}, r"timeout_s: -1\.0 came \(allowed: seconds, at least 0\)"),
        ({"actors": ["a"], "timeout_s": float("inf")}, "timeout_s: inf came"),
        ({"actors": ["a"], "timeout_s": float("nan")}, "timeout_s: nan came"),
        ({"actors": "a", "timeout_s": 1}, "Expected `array`"),
    ],
)
def test_malformed_wait_is_refused(args, words):
    administration = Administration(Arrangement())

    with pytest.raises(BadInput, match=words):
        administration.drain(SUPERVISOR, 7, args, 0.0)


@pytest.mark.parametrize(("non_idempotent", "is_safe"), [(frozenset(), True), (frozenset({"llm"}), False)])
def test_cut_request_may_be_tried_again_where_its_work_may_be_repeated(non_idempotent, is_safe):
    route = Route("r", "p", Peer("gateway.0", 1, "g"), {"llm": Peer("llm.0", 1, "l")}, EDGES)
    pipeline = Pipeline("p", "p", (), EDGES, non_idempotent)

    error = error_for_cut("llm.0", route, pipeline)

    assert (error.code, error.stage, error.is_retry_safe) == ("unavailable", "llm", is_safe)
    assert error_for_cut("gateway.0", route, pipeline).stage == ""
    assert error_for_cut("gateway.0", None, pipeline).is_retry_safe


def test_stage_of_a_replica_is_what_stands_before_its_number():
    assert [stage_of(name) for name in ("llm.0", "my_llm-2.13", "llm")] == ["llm", "my_llm-2", ""]
