import pytest
from msgspec.structs import replace

from omni_bus.core.client import ClientCore
from omni_bus.core.effects import Admitted, Answered, Deliver, Ended, PortEnded, Send, Writable
from omni_bus.core.kept import MAX_KEPT_BYTES
from omni_bus.core.member import coordinator_peer
from omni_bus.errors import (
    BadFrame,
    BadInput,
    ErrorInfo,
    LinkBroken,
    Overloaded,
    StageFailed,
    StageLost,
    Unavailable,
    UnknownName,
)
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    Admin,
    AdminReply,
    Admit,
    Cancel,
    Cancelled,
    Chunk,
    Close,
    Credit,
    Failed,
    Finish,
    Inquire,
    Open,
    Reject,
    Reroute,
    Route,
    RouteEdge,
    Submit,
)
from omni_bus.wire.payloads import Json, Text

COORDINATOR = coordinator_peer("c")
AGAIN = Submit("r", "p", ("text", "audio"), attempt=1)
ME = Peer("gateway", 1, "g")
LLM, VOICE = Peer("llm.0", 2, "l"), Peer("voice.0", 3, "v")
EDGES = (
    RouteEdge("in", "prompt", "llm", "prompt", "text", 1, 4096),
    RouteEdge("llm", "text", "out", "text", "text", 2, 4096),
    RouteEdge("llm", "text", "voice", "text", "text", 2, 4096),
    RouteEdge("voice", "audio", "out", "audio", "text", 2, 4096),
)
ROUTE = Route("r", "p", ME, {"llm": LLM, "voice": VOICE}, EDGES)
SUBMIT = Submit("r", "p", ("text", "audio"))
A, B = Text("a"), Text("b")


@pytest.fixture
def core() -> ClientCore:
    core = ClientCore(COORDINATOR)
    core.submit(SUBMIT, {"llm": {"max_tokens": 3}}, 0.0)
    return core


@pytest.fixture
def running(core) -> ClientCore:
    core.on_frame(COORDINATOR.sender, Admit(ROUTE), 0.0)
    return core


def open_outputs(core: ClientCore) -> None:
    core.on_frame(LLM.sender, Open(ROUTE, 1), 0.0)
    core.on_frame(VOICE.sender, Open(ROUTE, 3), 0.0)


def ended(effects) -> list:
    return [effect.error for effect in effects if isinstance(effect, Ended)]


def test_submit_goes_to_the_coordinator_and_admit_opens_the_way():
    core = ClientCore(COORDINATOR)

    assert core.submit(SUBMIT, {}, 0.0) == [Send(COORDINATOR, SUBMIT)]
    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE), 0.0) == [Admitted("r", ROUTE)]
    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE), 0.0) == []
    assert [each.route for each in core.running] == [ROUTE]


def test_input_carries_parameters_and_waits_for_credit(running):
    assert running.send("r", "prompt", A) == [
        Send(LLM, Open(ROUTE, 0, {"llm": {"max_tokens": 3}})),
        Send(LLM, Chunk("r", 0, 0, A)),
    ]
    assert running.send("r", "prompt", B) == []
    assert running.is_blocked("r", "prompt")

    assert running.on_frame(LLM.sender, Credit("r", 0, 2, 4161), 0.0) == [
        Send(LLM, Chunk("r", 0, 1, B)),
        Writable("r", "prompt"),
    ]
    assert running.finish("r", "prompt") == [Send(LLM, Close("r", 0, 2, kind="text"))]


def test_unknown_port_is_refused_with_the_known_ones(running):
    with pytest.raises(UnknownName, match=r"'promt'; did you mean 'prompt'"):
        running.send("r", "promt", A)


def test_payload_of_another_kind_is_refused_here(running):
    """The stage would fail the whole request for it."""
    with pytest.raises(BadInput, match=r"prompt.*json.*text"):
        running.send("r", "prompt", Json({}))
    assert running.num_live == 1


def test_request_ends_after_its_last_port(running):
    open_outputs(running)
    assert running.on_frame(LLM.sender, Chunk("r", 1, 0, A), 0.0) == [Deliver("r", "text", A)]
    assert running.on_frame(LLM.sender, Close("r", 1, 1, Finish("length")), 0.0) == [
        PortEnded("r", "text", Finish("length"))
    ]

    effects = running.on_frame(VOICE.sender, Close("r", 3, 0), 0.0)

    assert effects[:2] == [PortEnded("r", "audio", Finish()), Ended("r", None)]
    assert effects[2:] == [
        Send(LLM, Open(ROUTE, 0, {"llm": {"max_tokens": 3}})),
        Send(LLM, Close("r", 0, 0, kind="text")),
    ]
    assert running.num_live == 0
    assert running.running == ()


def test_consumed_payloads_give_credit_back(running):
    open_outputs(running)
    running.on_frame(LLM.sender, Chunk("r", 1, 0, A), 0.0)

    assert running.consume("r", "text", A) == [Send(LLM, Credit("r", 1, 3, 4161))]
    running.cancel("r", "")
    assert running.consume("r", "text", A) == []


@pytest.mark.parametrize("frame", [Reject, Failed])
def test_refusal_and_failure_end_once_with_their_error(core, frame):
    info = ErrorInfo("overloaded", "busy", is_retry_safe=True, retry_after_s=2.0)

    (error,) = ended(core.on_frame(COORDINATOR.sender, frame("r", info), 0.0))

    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
    assert core.on_frame(COORDINATOR.sender, frame("r", info), 0.0) == []


def test_cancelled_request_delivers_nothing_more(running):
    open_outputs(running)

    assert running.cancel("r", "gone") == [Send(COORDINATOR, Cancel("r", "gone"))]
    assert running.cancel("r", "gone") == []
    for sender, frame in [
        (LLM, Chunk("r", 1, 0, A)),
        (LLM, Close("r", 1, 1)),
        (LLM, Credit("r", 0, 9, 9999)),
        (COORDINATOR, Failed("r", ErrorInfo("stage_failed", "x"))),
        (COORDINATOR, Cancelled("r", 1)),
    ]:
        assert running.on_frame(sender.sender, frame, 0.0) == []
    assert running.send("r", "prompt", A) == running.finish("r", "prompt") == []


@pytest.mark.parametrize(
    "frame", [Chunk("r", 1, 5, A), Chunk("r", 1, 0, Json({})), Close("r", 1, 4), Open(ROUTE, 1)], ids=str
)
def test_stage_that_breaks_the_protocol_ends_the_request(running, frame):
    open_outputs(running)

    effects = running.on_frame(LLM.sender, frame, 0.0)

    (error,) = ended(effects)
    assert isinstance(error, BadFrame | LinkBroken)
    assert isinstance(effects[-1].frame, Cancel)


def test_credit_beyond_the_window_ends_the_request(running):
    running.send("r", "prompt", A)

    (error,) = ended(running.on_frame(LLM.sender, Credit("r", 0, 99, 1), 0.0))

    assert isinstance(error, BadFrame)


def test_frames_from_others_than_the_source_are_dropped(running):
    open_outputs(running)
    for frame in (Chunk("r", 1, 0, A), Close("r", 1, 0), Open(ROUTE, 1), Credit("r", 0, 1, 1)):
        assert running.on_frame(Peer("llm.0", 99, "").sender, frame, 0.0) == []
    assert running.on_frame(VOICE.sender, Chunk("r", 77, 0, A), 0.0) == []
    assert running.num_stale_frames == 5


# --- a coordinator that changes -----------------------------------------------------------------------------


def test_what_was_not_admitted_is_submitted_again(core):
    assert core.on_coordinator_changed(0.0) == [Send(COORDINATOR, AGAIN)]

    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE, 1), 0.0) == [Admitted("r", ROUTE)]


@pytest.mark.parametrize("late", [Admit(ROUTE), Reject("r", ErrorInfo("overloaded", "x"))])
def test_late_answer_of_a_former_coordinator_does_not_count(core, late):
    """The next one gives its own, perhaps with other replicas: it would wait for them for ever."""
    core.on_coordinator_changed(0.0)

    assert core.on_frame(COORDINATOR.sender, late, 0.0) == []
    assert core.num_live == 1


def test_time_limit_runs_on_through_attempts():
    core = ClientCore(COORDINATOR)
    core.submit(Submit("r", "p", (), timeout_s=10.0), {}, 100.0)

    assert core.on_coordinator_changed(103.0) == [Send(COORDINATOR, Submit("r", "p", (), timeout_s=7.0, attempt=1))]
    assert core.on_coordinator_changed(105.0) == [Send(COORDINATOR, Submit("r", "p", (), timeout_s=5.0, attempt=2))]


def test_successor_that_a_lost_coordinator_did_not_admit_ends_retry_safe(running):
    running.on_frame(COORDINATOR.sender, Reroute("r", "r.2", ErrorInfo("stage_lost", "x")), 0.0)

    (error,) = ended(running.on_coordinator_changed(1.0))

    assert isinstance(error, Unavailable)
    assert error.is_retry_safe


def test_successor_is_admitted_whatever_the_attempt_of_its_predecessor(core):
    """An adopting coordinator does not know how often the first one was submitted."""
    core.on_coordinator_changed(0.0)
    core.on_frame(COORDINATOR.sender, Admit(ROUTE, 1), 0.0)
    core.on_frame(COORDINATOR.sender, Reroute("r", "r.2", ErrorInfo("stage_lost", "x")), 0.0)

    (admitted, *_) = core.on_frame(COORDINATOR.sender, Admit(replace(ROUTE, request="r.2")), 0.0)

    assert isinstance(admitted, Admitted)


def test_admitted_requests_go_on(running):
    assert running.on_coordinator_changed(0.0) == []
    assert [each.route for each in running.running] == [ROUTE]


def test_admission_that_nobody_waits_for_is_given_back(core):
    """Else the coordinator would keep its place for ever."""
    core.cancel("r", "changed my mind")

    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE), 0.0) == [Send(COORDINATOR, Cancel("r", "no longer wanted"))]


def test_cancel_is_repeated_until_answered(running):
    running.cancel("r", "gone")
    # A new coordinator learns of it, so that it can cancel it.
    assert [each.route for each in running.running] == [ROUTE]

    assert running.on_coordinator_changed(0.0) == [Send(COORDINATOR, Cancel("r", "again"))]
    running.on_frame(COORDINATOR.sender, Cancelled("r", 1), 0.0)
    assert running.on_coordinator_changed(0.0) == []
    assert running.running == ()


def test_inquiry_about_an_ended_request_is_answered_with_cancel(running):
    assert running.on_frame(COORDINATOR.sender, Inquire("r"), 0.0) == []
    assert running.on_frame(COORDINATOR.sender, Inquire("x"), 0.0) == [Send(COORDINATOR, Cancel("x", "ended"))]


def test_question_is_answered_once(core):
    assert core.admin(1, "status", {}) == [Send(COORDINATOR, Admin(1, "status"))]
    assert core.on_frame(COORDINATOR.sender, AdminReply(1, {"a": 1}), 0.0) == [Answered(1, {"a": 1}, None)]
    assert core.on_frame(COORDINATOR.sender, AdminReply(1, {"a": 1}), 0.0) == []


def test_question_to_a_lost_coordinator_has_an_answer(core):
    core.admin(4, "status", {})

    (answer,) = (effect for effect in core.on_coordinator_changed(0.0) if isinstance(effect, Answered))

    assert answer.call == 4
    assert isinstance(answer.error, Unavailable)


def test_admin_error_comes_as_an_error(core):
    core.admin(1, "zzz", {})
    (answer,) = core.on_frame(COORDINATOR.sender, AdminReply(1, None, ErrorInfo("stage_failed", "x")), 0.0)

    assert isinstance(answer.error, StageFailed)


# --- a stage that dies --------------------------------------------------------------------------------------


def test_lost_stage_with_output_missing_ends_the_request(running):
    """It may have said Done and died before its last chunks were out."""
    open_outputs(running)
    running.on_frame(LLM.sender, Close("r", 1, 0), 0.0)

    assert running.on_peer_lost(LLM) == [], "all of its output is here"
    effects = running.on_peer_lost(VOICE)

    (error,) = ended(effects)
    assert isinstance(error, StageLost)
    assert error.stage == "voice"
    assert effects[-1].frame == Cancel("r", error.message)


def test_broken_connection_from_a_stage_ends_what_may_miss_its_last_output(running):
    open_outputs(running)
    running.on_frame(LLM.sender, Close("r", 1, 0), 1.0)

    assert running.on_link_broken(LLM) == [], "all of its output is here"
    effects = running.on_link_broken(VOICE)

    (error,) = ended(effects)
    assert isinstance(error, LinkBroken)
    assert error.stage == "voice"
    assert "voice.0" in error.message
    assert effects[-1].frame == Cancel("r", error.message)


def test_broken_connection_before_any_output_ends_it_too(running):
    """The stage may have opened and ended the edge, and all of that was lost."""
    (error,) = ended(running.on_link_broken(LLM))

    assert isinstance(error, LinkBroken)


def test_loss_of_a_stranger_changes_nothing(running):
    running.submit(Submit("waiting", "p", ()), {}, 0.0)

    assert running.on_peer_lost(Peer("llm.0", 99, "l")) == []
    assert running.on_link_broken(Peer("llm.0", 99, "l")) == []
    assert running.num_live == 2


# --- a coordinator that is silent ---------------------------------------------------------------------------


def test_silent_coordinator_is_not_waited_for(core):
    core.admin(4, "status", {})

    effects = core.on_coordinator_silent()

    (error,) = ended(effects)
    assert (type(error), error.is_retry_safe) == (Unavailable, True)
    (answer,) = (effect for effect in effects if isinstance(effect, Answered))
    assert isinstance(answer.error, Unavailable)
    assert effects[-1] == Send(COORDINATOR, Cancel("r", "no longer wanted")), (
        "it may have been stopped for a while only"
    )
    assert core.on_coordinator_silent() == []


def test_admitted_request_goes_on_without_a_coordinator(running):
    assert running.on_coordinator_silent() == []

    open_outputs(running)
    assert running.on_frame(LLM.sender, Chunk("r", 1, 0, A), 0.0) == [Deliver("r", "text", A)]


def test_request_that_is_rerouted_while_the_coordinator_is_silent_waits_for_one_more_beat(running):
    """Only beats and their answers count: a word of a loss came, of one that has not heard from us for as long."""
    assert running.on_coordinator_silent() == []
    assert from_coordinator(running, REROUTE) == []

    effects = running.on_coordinator_silent()

    (error,) = ended(effects)
    assert (type(error), error.is_retry_safe) == (Unavailable, True)
    assert effects[-1] == Send(COORDINATOR, Cancel("r.2", "no longer wanted"))
    assert running.num_live == 0


def test_silent_coordinator_is_not_asked_until_it_is_heard(core):
    core.on_coordinator_silent()

    (refused,) = core.submit(Submit("s", "p", ()), {}, 0.0)
    assert (refused.request, type(refused.error)) == ("s", Unavailable)
    (answer,) = core.admin(5, "status", {})
    assert isinstance(answer.error, Unavailable)

    core.on_coordinator_heard()
    assert core.submit(Submit("t", "p", ()), {}, 0.0) == [Send(COORDINATOR, Submit("t", "p", ()))]


# --- a replica that is lost before the first output ---------------------------------------------------------


LLM2 = Peer("llm.1", 7, "l2")
ROUTE2 = Route("r.2", "p", ME, {"llm": LLM2, "voice": VOICE}, EDGES, is_retry=True)
LOST = ErrorInfo("stage_lost", "llm is gone", stage="llm", is_retry_safe=True)
REROUTE = Reroute("r", "r.2", LOST)


def from_coordinator(core, *frames) -> list:
    return [effect for frame in frames for effect in core.on_frame(COORDINATOR.sender, frame, 5.0)]


def test_all_input_is_sent_again_over_the_new_route(running):
    running.send("r", "prompt", A)
    running.finish("r", "prompt")

    assert from_coordinator(running, REROUTE) == []
    effects = from_coordinator(running, Admit(ROUTE2))

    assert effects == [
        Admitted("r", ROUTE2),
        Send(LLM2, Open(ROUTE2, 0, {"llm": {"max_tokens": 3}})),
        Send(LLM2, Chunk("r.2", 0, 0, A)),
        Send(LLM2, Close("r.2", 0, 1, kind="text")),
        Writable("r", "prompt"),
    ]


def test_application_knows_the_request_by_its_first_name(running):
    from_coordinator(running, REROUTE, Admit(ROUTE2))
    running.on_frame(LLM2.sender, Open(ROUTE2, 1), 5.0)
    running.on_frame(VOICE.sender, Open(ROUTE2, 3), 5.0)

    assert running.on_frame(LLM2.sender, Chunk("r.2", 1, 0, A), 5.0) == [Deliver("r", "text", A)]
    assert running.consume("r", "text", A) == [Send(LLM2, Credit("r.2", 1, 3, 4161))]
    assert running.send("r", "prompt", B)[-1] == Send(LLM2, Chunk("r.2", 0, 0, B))
    assert running.on_frame(LLM2.sender, Close("r.2", 1, 1), 5.0) == [PortEnded("r", "text", Finish())]
    assert running.on_frame(VOICE.sender, Close("r.2", 3, 0), 5.0)[:2] == [
        PortEnded("r", "audio", Finish()),
        Ended("r", None),
    ]
    assert running.num_live == 0
    assert running._renamed == {}


def test_input_under_way_waits_for_the_new_route(running):
    from_coordinator(running, REROUTE)

    assert running.is_blocked("r", "prompt")
    assert running.send("r", "prompt", A) == []
    assert running.send("r", "prompt", B) == []
    with pytest.raises(BadInput, match=r"prompt.*json.*text"):
        running.send("r", "prompt", Json({}))
    with pytest.raises(UnknownName):
        running.finish("r", "promt")
    assert running.finish("r", "prompt") == []

    effects = from_coordinator(running, Admit(ROUTE2))

    assert [effect.frame for effect in effects if isinstance(effect, Send)] == [
        Open(ROUTE2, 0, {"llm": {"max_tokens": 3}}),
        Chunk("r.2", 0, 0, A),
    ]
    assert Writable("r", "prompt") not in effects, "the window takes one"
    assert running.on_frame(LLM2.sender, Credit("r.2", 0, 2, 4161), 5.0) == [
        Send(LLM2, Chunk("r.2", 0, 1, B)),
        Send(LLM2, Close("r.2", 0, 2, kind="text")),
        Writable("r", "prompt"),
    ]


@pytest.mark.parametrize("frame", [Chunk("r", 1, 0, A), Close("r", 1, 0)], ids=["chunk", "end of a port"])
def test_request_that_put_something_out_ends_with_the_loss(running, frame):
    open_outputs(running)
    running.on_frame(LLM.sender, frame, 1.0)

    effects = from_coordinator(running, REROUTE)

    (error,) = ended(effects)
    assert (type(error), error.stage, error.is_retry_safe) == (StageLost, "llm", True)
    assert effects[-1] == Send(COORDINATOR, Cancel("r.2", "not wanted"))
    assert from_coordinator(running, Admit(ROUTE2))[0].frame == Cancel("r.2", "no longer wanted")


def test_request_with_more_input_than_is_kept_ends_with_the_loss(running):
    running.send("r", "prompt", Text("x" * MAX_KEPT_BYTES))
    running.send("r", "prompt", A)

    (error,) = ended(from_coordinator(running, REROUTE))

    assert isinstance(error, StageLost)


def test_input_that_is_nowhere_else_is_kept_whatever_its_size(running):
    from_coordinator(running, REROUTE)
    large = Text("x" * (MAX_KEPT_BYTES + 1))
    running.send("r", "prompt", large)

    effects = from_coordinator(running, Admit(ROUTE2))

    assert Send(LLM2, Chunk("r.2", 0, 0, large)) in effects


def test_cancelled_request_wants_no_successor(running):
    running.cancel("r", "gone")

    assert from_coordinator(running, REROUTE) == [Send(COORDINATOR, Cancel("r.2", "not wanted"))]


def test_cancel_reaches_the_successor_before_and_after_its_admission(running):
    from_coordinator(running, REROUTE)
    assert running.cancel("r", "gone") == [Send(COORDINATOR, Cancel("r.2", "gone"))]
    assert running.cancel("r", "gone") == []
    assert running.running == ()

    again = ClientCore(COORDINATOR)
    again.submit(SUBMIT, {}, 0.0)
    from_coordinator(again, Admit(ROUTE), REROUTE, Admit(ROUTE2))
    assert again.cancel("r", "gone") == [Send(COORDINATOR, Cancel("r.2", "gone"))]
    assert [each.route for each in again.running] == [ROUTE2]
    from_coordinator(again, Cancelled("r.2"))
    assert again.running == ()


def test_word_of_the_loss_does_not_end_what_goes_on(running):
    """It comes after the new route from this coordinator, and may come before it is there."""
    from_coordinator(running, REROUTE)
    assert running.on_peer_lost(LLM) == []

    from_coordinator(running, Admit(ROUTE2))
    assert running.on_peer_lost(LLM) == []
    assert len(ended(running.on_peer_lost(LLM2))) == 1


@pytest.mark.parametrize("is_admitted", [False, True])
def test_second_loss_or_refusal_ends_the_request_under_its_first_name(running, is_admitted):
    from_coordinator(running, REROUTE, *([Admit(ROUTE2)] if is_admitted else []))

    frame = Failed("r.2", LOST) if is_admitted else Reject("r.2", LOST)
    (effect,) = from_coordinator(running, frame)

    assert (effect.request, effect.error.message) == ("r", "llm is gone")
    assert running.num_live == 0


def test_frames_of_the_former_route_change_nothing(running):
    from_coordinator(running, REROUTE, Admit(ROUTE2))

    for frame in (Open(ROUTE, 1), Chunk("r", 1, 0, A), Close("r", 1, 0), Credit("r", 0, 9, 9999)):
        assert running.on_frame(LLM.sender, frame, 5.0) == []
    assert from_coordinator(running, Failed("r", LOST)) == []
    assert running.num_live == 1


def test_successor_that_a_lost_coordinator_knew_ends_retry_safe(running):
    from_coordinator(running, REROUTE)

    (error,) = ended(running.on_coordinator_changed(0.0))

    assert (type(error), error.is_retry_safe) == (Unavailable, True)


def test_admitted_successor_is_told_to_a_new_coordinator(running):
    from_coordinator(running, REROUTE, Admit(ROUTE2))

    assert running.on_coordinator_changed(0.0) == []
    assert [(each.route, each.since) for each in running.running] == [(ROUTE2, 5.0)]
