import pytest

from omni_bus.core.client import ClientCore
from omni_bus.core.effects import Admitted, Answered, Deliver, Ended, PortEnded, Send, Writable
from omni_bus.core.member import coordinator_peer
from omni_bus.errors import BadFrame, BadInput, ErrorInfo, Overloaded, StageFailed, StageLost, Unavailable, UnknownName
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
    core.submit(SUBMIT, {"llm": {"max_tokens": 3}})
    return core


@pytest.fixture
def running(core) -> ClientCore:
    core.on_frame(COORDINATOR.sender, Admit(ROUTE))
    return core


def open_outputs(core: ClientCore) -> None:
    core.on_frame(LLM.sender, Open(ROUTE, 1))
    core.on_frame(VOICE.sender, Open(ROUTE, 3))


def ended(effects) -> list:
    return [effect.error for effect in effects if isinstance(effect, Ended)]


def test_submit_goes_to_the_coordinator_and_admit_opens_the_way():
    core = ClientCore(COORDINATOR)

    assert core.submit(SUBMIT, {}) == [Send(COORDINATOR, SUBMIT)]
    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE)) == [Admitted("r", ROUTE)]
    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE)) == []
    assert core.live_routes == (ROUTE,)


def test_input_carries_parameters_and_waits_for_credit(running):
    assert running.send("r", "prompt", A) == [
        Send(LLM, Open(ROUTE, 0, {"llm": {"max_tokens": 3}})),
        Send(LLM, Chunk("r", 0, 0, A)),
    ]
    assert running.send("r", "prompt", B) == []
    assert running.is_blocked("r", "prompt")

    assert running.on_frame(LLM.sender, Credit("r", 0, 2, 4161)) == [
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
    assert running.on_frame(LLM.sender, Chunk("r", 1, 0, A)) == [Deliver("r", "text", A)]
    assert running.on_frame(LLM.sender, Close("r", 1, 1, Finish("length"))) == [
        PortEnded("r", "text", Finish("length"))
    ]

    effects = running.on_frame(VOICE.sender, Close("r", 3, 0))

    assert effects[:2] == [PortEnded("r", "audio", Finish()), Ended("r", None)]
    assert effects[2:] == [
        Send(LLM, Open(ROUTE, 0, {"llm": {"max_tokens": 3}})),
        Send(LLM, Close("r", 0, 0, kind="text")),
    ]
    assert running.num_live == 0
    assert running.live_routes == ()


def test_consumed_payloads_give_credit_back(running):
    open_outputs(running)
    running.on_frame(LLM.sender, Chunk("r", 1, 0, A))

    assert running.consume("r", "text", A) == [Send(LLM, Credit("r", 1, 3, 4161))]
    running.cancel("r", "")
    assert running.consume("r", "text", A) == []


@pytest.mark.parametrize("frame", [Reject, Failed])
def test_refusal_and_failure_end_once_with_their_error(core, frame):
    info = ErrorInfo("overloaded", "busy", is_retry_safe=True, retry_after_s=2.0)

    (error,) = ended(core.on_frame(COORDINATOR.sender, frame("r", info)))

    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
    assert core.on_frame(COORDINATOR.sender, frame("r", info)) == []


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
        assert running.on_frame(sender.sender, frame) == []
    assert running.send("r", "prompt", A) == running.finish("r", "prompt") == []


@pytest.mark.parametrize(
    "frame", [Chunk("r", 1, 5, A), Chunk("r", 1, 0, Json({})), Close("r", 1, 4), Open(ROUTE, 1)], ids=str
)
def test_stage_that_breaks_the_protocol_ends_the_request(running, frame):
    open_outputs(running)

    effects = running.on_frame(LLM.sender, frame)

    (error,) = ended(effects)
    assert isinstance(error, BadFrame | BadInput)
    assert isinstance(effects[-1].frame, Cancel)


def test_credit_beyond_the_window_ends_the_request(running):
    running.send("r", "prompt", A)

    (error,) = ended(running.on_frame(LLM.sender, Credit("r", 0, 99, 1)))

    assert isinstance(error, BadFrame)


def test_frames_from_others_than_the_source_are_dropped(running):
    open_outputs(running)
    for frame in (Chunk("r", 1, 0, A), Close("r", 1, 0), Open(ROUTE, 1), Credit("r", 0, 1, 1)):
        assert running.on_frame(Peer("llm.0", 99, "").sender, frame) == []
    assert running.on_frame(VOICE.sender, Chunk("r", 77, 0, A)) == []
    assert running.num_stale_frames == 5


# --- a coordinator that changes -----------------------------------------------------------------------------


def test_what_was_not_admitted_is_submitted_again(core):
    assert core.on_coordinator_changed() == [Send(COORDINATOR, AGAIN)]

    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE, 1)) == [Admitted("r", ROUTE)]


@pytest.mark.parametrize("late", [Admit(ROUTE), Reject("r", ErrorInfo("overloaded", "x"))])
def test_late_answer_of_a_former_coordinator_does_not_count(core, late):
    """The next one gives its own, perhaps with other replicas: it would wait for them for ever."""
    core.on_coordinator_changed()

    assert core.on_frame(COORDINATOR.sender, late) == []
    assert core.num_live == 1


def test_admitted_requests_go_on(running):
    assert running.on_coordinator_changed() == []
    assert running.live_routes == (ROUTE,)


def test_admission_that_nobody_waits_for_is_given_back(core):
    """Else the coordinator would keep its place for ever."""
    core.cancel("r", "changed my mind")

    assert core.on_frame(COORDINATOR.sender, Admit(ROUTE)) == [Send(COORDINATOR, Cancel("r", "no longer wanted"))]


def test_cancel_is_repeated_until_answered(running):
    running.cancel("r", "gone")
    assert running.live_routes == (ROUTE,), "a new coordinator learns of it, so that it can cancel it"

    assert running.on_coordinator_changed() == [Send(COORDINATOR, Cancel("r", "again"))]
    running.on_frame(COORDINATOR.sender, Cancelled("r", 1))
    assert running.on_coordinator_changed() == []
    assert running.live_routes == ()


def test_inquiry_about_an_ended_request_is_answered_with_cancel(running):
    assert running.on_frame(COORDINATOR.sender, Inquire("r")) == []
    assert running.on_frame(COORDINATOR.sender, Inquire("x")) == [Send(COORDINATOR, Cancel("x", "ended"))]


def test_question_is_answered_once(core):
    assert core.admin(1, "status", {}) == [Send(COORDINATOR, Admin(1, "status"))]
    assert core.on_frame(COORDINATOR.sender, AdminReply(1, {"a": 1})) == [Answered(1, {"a": 1}, None)]
    assert core.on_frame(COORDINATOR.sender, AdminReply(1, {"a": 1})) == []


def test_question_to_a_lost_coordinator_has_an_answer(core):
    core.admin(4, "status", {})

    (answer,) = (effect for effect in core.on_coordinator_changed() if isinstance(effect, Answered))

    assert answer.call == 4
    assert isinstance(answer.error, Unavailable)


def test_admin_error_comes_as_an_error(core):
    core.admin(1, "zzz", {})
    (answer,) = core.on_frame(COORDINATOR.sender, AdminReply(1, None, ErrorInfo("stage_failed", "x")))

    assert isinstance(answer.error, StageFailed)


# --- a stage that dies --------------------------------------------------------------------------------------


def test_lost_stage_with_output_missing_ends_the_request(running):
    """It may have said Done and died before its last chunks were out."""
    open_outputs(running)
    running.on_frame(LLM.sender, Close("r", 1, 0))

    assert running.on_peer_lost(LLM) == [], "all of its output is here"
    effects = running.on_peer_lost(VOICE)

    (error,) = ended(effects)
    assert isinstance(error, StageLost)
    assert error.stage == "voice"
    assert effects[-1].frame == Cancel("r", error.message)


def test_loss_of_a_stranger_changes_nothing(running):
    running.submit(Submit("waiting", "p", ()), {})

    assert running.on_peer_lost(Peer("llm.0", 99, "l")) == []
    assert running.num_live == 2
