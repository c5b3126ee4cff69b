import itertools

import msgspec
import pytest

from omni_bus.core.effects import (
    Abort,
    Add,
    Deliver,
    Feed,
    PortEnded,
    Report,
    Resume,
    SetTimer,
    Stall,
    Start,
    Step,
    Suspend,
)
from omni_bus.core.stage import EngineShape, stage_failed
from omni_bus.core.stage_request import State
from omni_bus.core.tombstones import MAX_TOMBSTONES
from omni_bus.core.watchdog import WATCH
from omni_bus.engine import Failure, Finished, Output, Starved
from omni_bus.errors import BadInput, StageFailed
from omni_bus.ids import Sender
from omni_bus.sim.pair import ActorPair
from omni_bus.wire.frames import (
    Cancel,
    Cancelled,
    Chunk,
    Close,
    Credit,
    Done,
    Failed,
    Finish,
    Inquire,
    Open,
    Unheard,
    Usage,
)
from omni_bus.wire.payloads import Text
from tests.core.test_stage_request import reachable

A, B, C = Text("a"), Text("b"), Text("c")


def engine_effects(pair: ActorPair) -> list:
    """Take what the stage asked of its engine since the last call."""
    effects, pair.stage_effects = pair.stage_effects, []
    return [effect for effect in effects if not isinstance(effect, Report)]


def events(pair: ActorPair, *some) -> None:
    pair.from_stage(pair.stage.on_events(some, pair.now))
    pair.settle()


def stepped(pair: ActorPair, *some) -> None:
    events(pair, *some)
    pair.from_stage(pair.stage.on_stepped(pair.now))
    pair.settle()


def control(pair: ActorPair, kind: type) -> list:
    return [frame for frame in pair.control if isinstance(frame, kind)]


# --- the three shapes ---------------------------------------------------------------------------------------


def test_step_engine_gets_whole_input_then_steps():
    pair = ActorPair(EngineShape.STEP)
    pair.open()
    pair.send("r", A)
    assert engine_effects(pair) == []

    pair.send("r", B, is_last=True)

    assert engine_effects(pair) == [Add("r", {"prompt": [A, B]}), Step(("r",))]


def test_streaming_engine_starts_at_the_open_and_is_fed():
    pair = ActorPair(EngineShape.STREAMING)
    pair.open()
    pair.send("r", A)
    pair.send("r", B, is_last=True)

    assert engine_effects(pair) == [
        Start("r"),
        Feed("r", "prompt", (A,), is_last=False),
        Feed("r", "prompt", (B,), is_last=False),
        Feed("r", "prompt", (), is_last=True),
    ]


def test_step_fed_engine_steps_while_input_comes():
    pair = ActorPair(EngineShape.STEP_FED)
    pair.open()
    pair.send("r", A)

    assert engine_effects(pair) == [Add("r", {}), Step(("r",)), Feed("r", "prompt", (A,), is_last=False)]


@pytest.mark.parametrize("shape", [EngineShape.STREAMING, EngineShape.STEP_FED])
def test_input_that_came_before_the_slot_is_fed_with_it(shape):
    pair = ActorPair(shape, width=1, max_resident=1)
    pair.open("first")
    pair.send("first", A)
    pair.open("second")
    pair.send("second", B, is_last=True)
    engine_effects(pair)
    pair.send("first", is_last=True)

    stepped(pair, Finished("first"))

    fed = [effect for effect in engine_effects(pair) if getattr(effect, "request", "") == "second"]
    assert fed[-1] == Feed("second", "prompt", (B,), is_last=True)


def test_chunks_arrive_in_order_and_the_end_completes_the_request():
    pair = ActorPair()
    pair.open()
    pair.send("r", A, is_last=True)
    stepped(pair, Output("r", "text", A), Output("r", "text", B))
    stepped(pair, Finished("r", Finish("length")))

    delivered = [effect.payload for effect in pair.client_effects if isinstance(effect, Deliver)]
    assert delivered == [A, B]
    assert pair.client.num_live == 0
    (done,) = control(pair, Done)
    assert (done.stats.chunks_in, done.stats.chunks_out, done.stats.bytes_out) == (1, 2, 130)
    assert pair.stage.stats.done == 1
    assert pair.stage.running == ()


class Curious(ActorPair):
    """A client that wants to know what the stage did."""

    def route(self, request):
        return msgspec.structs.replace(super().route(request), wants_metrics=True)


def test_ends_tell_what_the_stage_did_to_those_who_ask():
    pair = Curious(EngineShape.STEP)
    pair.open()
    pair.send("r", A, is_last=True)
    pair.now = 2.0
    stepped(pair, Output("r", "text", A))
    pair.now = 3.0
    stepped(pair, Finished("r", Finish("length", Usage(5, 7), {"stop_reason": 1})))

    (ended,) = [effect for effect in pair.client_effects if isinstance(effect, PortEnded)]
    assert ended.finish.detail == {
        "stop_reason": 1,
        "metrics": {
            "stage": {
                "finish_reason": "length",
                "first_output_s": 2.0,
                "total_s": 3.0,
                "chunks_out": 1,
                "prompt_tokens": 5,
                "completion_tokens": 7,
            }
        },
    }


def test_ends_tell_nothing_of_the_stage_to_others():
    pair = ActorPair(EngineShape.STEP)
    pair.open()
    pair.send("r", A, is_last=True)
    stepped(pair, Finished("r"))

    assert [effect.finish for effect in pair.client_effects if isinstance(effect, PortEnded)] == [Finish()]


# --- credit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(EngineShape))
def test_request_without_credit_is_suspended_and_resumed(shape):
    pair = ActorPair(shape, window_chunks=1)
    pair.open()
    pair.send("r", A, is_last=True)
    engine_effects(pair)
    stepped(pair, Output("r", "text", A), Output("r", "text", B))

    assert pair.stage.stats.suspended == 1
    expected = [Suspend("r")] if shape is EngineShape.STREAMING else []
    assert engine_effects(pair) == expected

    pair.from_client(pair.client.consume("r", "text", A))
    pair.settle()

    assert pair.stage.stats.suspended == 0
    assert engine_effects(pair)[-1] == (Resume("r") if shape is EngineShape.STREAMING else Step(("r",)))


def test_slow_reader_suspends_only_its_own_request():
    pair = ActorPair(window_chunks=1)
    for request in ("slow", "quick"):
        pair.open(request)
        pair.send(request, is_last=True)
    stepped(pair, Output("slow", "text", A), Output("slow", "text", B))

    assert engine_effects(pair)[-1] == Step(("quick",))


def test_streaming_input_gives_credit_when_taken():
    pair = ActorPair(EngineShape.STREAMING, window_chunks=1)
    pair.open()
    pair.send("r", A, B)
    assert pair.client.is_blocked("r", "prompt")

    pair.from_stage(pair.stage.on_taken("r", "prompt", A, 0.0))
    pair.settle()

    assert not pair.client.is_blocked("r", "prompt")


def test_step_fed_input_gives_credit_after_a_step_with_it():
    pair = ActorPair(EngineShape.STEP_FED, window_chunks=1)
    pair.open()
    pair.send("r", A, B)
    stepped(pair)
    assert pair.client.is_blocked("r", "prompt"), "that step had begun before the input came"

    stepped(pair)

    assert not pair.client.is_blocked("r", "prompt")


def test_suspended_step_fed_request_holds_its_sender_back():
    pair = ActorPair(EngineShape.STEP_FED, window_chunks=1)
    pair.open()
    pair.send("r", A)
    stepped(pair, Output("r", "text", A), Output("r", "text", B))
    assert pair.stage.stats.suspended == 1
    engine_effects(pair)

    pair.send("r", B)

    assert pair.client.is_blocked("r", "prompt")
    assert engine_effects(pair) == []


def test_input_during_a_step_outlives_its_starved():
    """Else the request would sleep on input that it has."""
    pair = ActorPair(EngineShape.STEP_FED)
    pair.open()
    pair.send("r", A)
    stepped(pair)
    engine_effects(pair)
    pair.send("r", B)

    stepped(pair, Starved("r"))

    assert engine_effects(pair) == [Feed("r", "prompt", (B,), is_last=False), Step(("r",))]


def test_starved_request_is_not_stepped_before_input():
    pair = ActorPair(EngineShape.STEP_FED)
    pair.open()
    pair.send("r", A)
    stepped(pair)
    engine_effects(pair)
    stepped(pair, Starved("r"))
    assert engine_effects(pair) == []

    pair.send("r", B)

    assert engine_effects(pair) == [Feed("r", "prompt", (B,), is_last=False), Step(("r",))]


@pytest.mark.parametrize("shape", [EngineShape.STREAMING, EngineShape.STEP_FED])
def test_engine_that_finishes_early_uses_up_the_rest_unread(shape):
    pair = ActorPair(shape, window_chunks=1)
    pair.open()
    pair.send("r", A, B, C)
    pair.from_stage(pair.stage.on_events([Finished("r")], 0.0))
    assert control(pair, Done) == [], "input has not ended"

    pair.settle()

    assert not pair.client.is_blocked("r", "prompt")
    assert len(control(pair, Done)) == 1


# --- cancel and failure -------------------------------------------------------------------------------------


def test_cancel_of_a_running_request_is_acknowledged_when_freed():
    pair = ActorPair()
    pair.open()
    pair.send("r", is_last=True)
    engine_effects(pair)
    pair.to_stage(Cancel("r"))
    pair.to_stage(Cancel("r"))
    assert engine_effects(pair) == [Abort("r")]
    assert control(pair, Cancelled) == []

    pair.from_stage(pair.stage.on_aborted("r", 0.0))

    assert control(pair, Cancelled) == [Cancelled("r", 1)]
    assert pair.stage.stats.active == 0


def test_aborted_request_is_in_no_further_step_and_its_events_are_ignored():
    pair = ActorPair()
    for request in ("a", "b"):
        pair.open(request)
        pair.send(request, is_last=True)
    pair.to_stage(Cancel("a"))
    engine_effects(pair)

    stepped(pair, Output("a", "text", A), Finished("a"), Failure("a", StageFailed("x")))

    assert engine_effects(pair) == [Step(("b",))]
    assert control(pair, Done) == control(pair, Failed) == []


def test_slot_of_an_aborting_request_stays_taken():
    pair = ActorPair(width=1, max_resident=1)
    for request in ("a", "b"):
        pair.open(request)
        pair.send(request, is_last=True)
    pair.to_stage(Cancel("a"))
    stepped(pair)
    engine_effects(pair)

    pair.from_stage(pair.stage.on_aborted("a", 0.0))

    assert engine_effects(pair) == [Add("b", {}), Step(("b",))]


@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "gathering"])
def test_cancel_before_a_slot_is_acknowledged_at_once(is_waiting):
    pair = ActorPair(width=1, max_resident=1)
    pair.open("other")
    pair.send("other", is_last=True)
    pair.open()
    pair.send("r", A, is_last=is_waiting)

    pair.to_stage(Cancel("r"))

    assert control(pair, Cancelled) == [Cancelled("r", 0)]


def test_cancel_that_overtook_the_open_keeps_the_request_out():
    pair = ActorPair()
    pair.open()
    pair.to_stage(Cancel("r"))

    pair.send("r", A, is_last=True)

    assert set(control(pair, Cancelled)) == {Cancelled("r", 0)}
    assert pair.stage.running == ()
    assert engine_effects(pair) == []


def test_open_of_what_was_cancelled_before_is_answered():
    """A former coordinator cancelled an attempt; a new one, which does not know, would wait for this stage for ever."""
    pair = ActorPair()
    pair.to_stage(Cancel("r"))
    pair.control.clear()

    pair.open()
    pair.send("r", A, is_last=True)

    assert control(pair, Cancelled) == [Cancelled("r", 0)]
    assert pair.stage.running == ()


def test_late_open_by_somebody_else_is_not_answered():
    pair = ActorPair()
    pair.to_stage(Cancel("r"))
    pair.control.clear()
    pair.open()
    (route,) = [running.route for running in pair.client.running]
    pair.control.clear()

    assert pair.stage.on_frame(Sender("stranger", 1), Open(route, 0), pair.now) == []


def test_failure_is_reported_once_and_frees_the_slot():
    pair = ActorPair()
    pair.open()
    pair.send("r", is_last=True)

    stepped(pair, Failure("r", StageFailed("out of memory")), Failure("r", StageFailed("again")))

    (failed,) = control(pair, Failed)
    assert (failed.error.message, failed.error.stage) == ("out of memory", "stage")
    assert pair.stage.stats.failed == 1
    assert pair.stage.stats.active == 0


def test_bad_parameters_fail_the_request_alone():
    def parse(params):
        if params:
            raise BadInput("temperature is -1 (at least 0)", field="temperature")

    pair = ActorPair(parse_params=parse)
    pair.open("bad", {"temperature": -1})
    pair.open("good")
    pair.send("bad", is_last=True)
    pair.send("good", is_last=True)

    (failed,) = control(pair, Failed)
    assert (failed.request, failed.error.field) == ("bad", "temperature")
    assert engine_effects(pair) == [Add("good", {}), Step(("good",))]


def test_input_over_its_limit_is_refused():
    pair = ActorPair(max_input_bytes=200)
    pair.open()
    pair.send("r", A, B, C, Text("d"))

    (failed,) = control(pair, Failed)
    assert failed.error.code == "input_too_large"
    assert pair.stage.stats.buffered_bytes == 0


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(Chunk("r", 0, 7, A), "link_broken", id="chunk after a gap"),
        pytest.param(Close("r", 0, 9), "link_broken", id="end after a gap"),
        pytest.param(Chunk("r", 0, 0, A), "bad_frame", id="chunk again"),
        pytest.param(Close("r", 0, 0), "bad_frame", id="end too soon"),
        pytest.param(Credit("r", 1, 999, 1), "bad_frame", id="too much credit"),
    ],
)
@pytest.mark.parametrize("shape", list(EngineShape))
def test_frame_that_breaks_the_protocol_fails_its_request(frame, code, shape):
    pair = ActorPair(shape)
    pair.open()
    pair.send("r", A)
    pair.from_stage(pair.stage.on_frame(pair.client_peer.sender, frame, 0.0))
    pair.from_stage(pair.stage.on_frame(pair.client_peer.sender, frame, 0.0))

    assert [failed.error.code for failed in control(pair, Failed)] == [code]


def test_frames_of_a_former_incarnation_are_dropped():
    pair = ActorPair()
    pair.open()
    pair.send("r", A)
    stranger = Sender("client", 999)
    for frame in (Open(pair.route("other"), 0), Chunk("r", 0, 0, A), Close("r", 0, 0), Credit("r", 1, 5, 5)):
        pair.from_stage(pair.stage.on_frame(stranger, frame, 0.0))

    assert pair.stage.num_stale_frames == 4
    assert control(pair, Failed) == []
    assert len(pair.stage.running) == 1


def test_second_open_of_an_edge_fails_the_request():
    pair = ActorPair()
    pair.open()
    pair.send("r", A)
    pair.from_stage(pair.stage.on_frame(pair.client_peer.sender, Open(pair.route("r"), 0), 0.0))

    assert [failed.error.code for failed in control(pair, Failed)] == ["bad_frame"]


# --- a new coordinator --------------------------------------------------------------------------------------


def test_inquiry_is_answered_with_how_it_ended():
    pair = ActorPair()
    for request in ("done", "failed", "cancelled", "live"):
        pair.open(request)
    pair.send("done", is_last=True)
    stepped(pair, Finished("done"))
    pair.send("failed", is_last=True)
    stepped(pair, Failure("failed", StageFailed("x")))
    pair.to_stage(Cancel("cancelled"))
    pair.send("live", A)
    before = pair.control
    pair.control = []

    for request in ("done", "failed", "cancelled", "live", "never seen"):
        pair.to_stage(Inquire(request))

    assert [type(frame) for frame in pair.control[:3]] == [Done, Failed, Cancelled]
    assert all(frame in before for frame in pair.control[:3])
    assert pair.control[3:] == [Unheard("never seen")]


def test_failed_request_that_is_being_freed_is_not_announced_as_live():
    """Its end was reported; a new coordinator that asks hears it again."""
    pair = ActorPair(EngineShape.STREAMING)
    pair.open()
    pair.send("r", A)
    pair.from_stage(pair.stage.on_frame(pair.client_peer.sender, Chunk("r", 0, 9, A), 0.0))

    assert pair.stage.running == ()
    pair.to_stage(Inquire("r"))
    assert len(control(pair, Failed)) == 2
    assert pair.stage.stats.active == 1


def test_tombstones_are_bounded():
    pair = ActorPair()
    for number in range(MAX_TOMBSTONES + 10):
        pair.to_stage(Cancel(f"r{number}"))

    assert len(pair.stage._tombstones) == MAX_TOMBSTONES


# --- an engine that is stuck --------------------------------------------------------------------------------


LIMIT_S = 10.0


class Watched(ActorPair):
    """A pair whose stage is watched; the test plays the timer."""

    def __init__(self, shape: EngineShape, **limits) -> None:
        super().__init__(shape, step_timeout_s=LIMIT_S, **limits)
        self.open()

    def due_at(self) -> float | None:
        """Take the moment of the last timer that was set."""
        timers = [effect.at for effect in self.stage_effects if isinstance(effect, SetTimer) and effect.key == WATCH]
        self.stage_effects = [effect for effect in self.stage_effects if not isinstance(effect, SetTimer)]
        return timers[-1] if timers else None

    def at(self, now: float) -> list:
        """Fire the timer at a moment; return for how long the engine is said to be stuck."""
        self.now = now
        self.from_stage(self.stage.on_timer(now))
        return [effect.seconds for effect in self.stage_effects if isinstance(effect, Stall)]


@pytest.mark.parametrize("shape", [EngineShape.STEP, EngineShape.STEP_FED])
def test_step_that_does_not_end_is_a_stall(shape):
    pair = Watched(shape)
    pair.now = 2.0
    pair.send("r", A, is_last=True)
    assert pair.due_at() == 2.0 + LIMIT_S
    assert pair.at(1.0 + LIMIT_S) == []

    assert pair.at(2.0 + LIMIT_S) == [LIMIT_S]
    assert pair.at(50.0) == [LIMIT_S], "it is told once"


@pytest.mark.parametrize("shape", [EngineShape.STEP, EngineShape.STEP_FED])
def test_steps_that_end_are_no_stall_however_many(shape):
    pair = Watched(shape)
    pair.send("r", A, is_last=True)
    for pair.now in (6.0, 12.0, 18.0):
        stepped(pair)
        assert pair.at(pair.now + 1.0) == []
    assert pair.due_at() == 18.0 + LIMIT_S


def test_starved_request_may_wait_for_ever():
    pair = Watched(EngineShape.STEP_FED)
    pair.send("r", A)
    stepped(pair)
    stepped(pair, Starved("r"))

    assert pair.at(1000.0) == []
    assert pair.due_at() == 1000.0 + LIMIT_S, "it may be aborted and never let go"


@pytest.mark.parametrize("shape", list(EngineShape))
def test_abort_that_is_never_confirmed_is_a_stall(shape):
    pair = Watched(shape)
    pair.send("r", A, is_last=True)
    pair.now = 1.0
    stepped(pair)
    pair.now = 5.0
    pair.from_stage(pair.stage.on_stepped(5.0))
    pair.to_stage(Cancel("r"))

    assert pair.at(4.0 + LIMIT_S) == []
    assert pair.at(5.0 + LIMIT_S) == [LIMIT_S]


def test_request_that_has_all_it_needs_and_makes_nothing_is_a_stall():
    pair = Watched(EngineShape.STREAMING)
    pair.now = 3.0
    pair.send("r", A)

    assert pair.at(LIMIT_S) == []
    assert pair.at(3.0 + LIMIT_S) == [LIMIT_S]


def test_more_input_does_not_hide_a_stall():
    pair = Watched(EngineShape.STREAMING)
    for pair.now in (3.0, 6.0, 9.0):
        pair.send("r", A)

    assert pair.at(3.0 + LIMIT_S) == [LIMIT_S]


@pytest.mark.parametrize("event", [Output("r", "text", B), "taken"], ids=["output", "taken"])
def test_whatever_a_request_does_counts_from_then_on(event):
    pair = Watched(EngineShape.STREAMING)
    pair.send("r", A, is_last=True)
    pair.now = 7.0
    if event == "taken":
        pair.from_stage(pair.stage.on_taken("r", "prompt", A, 7.0))
    else:
        events(pair, event)

    assert pair.at(LIMIT_S) == []
    assert pair.at(7.0 + LIMIT_S) == [LIMIT_S]


def test_request_that_took_all_its_input_and_may_get_more_is_no_stall():
    pair = Watched(EngineShape.STREAMING)
    pair.send("r", A)
    pair.from_stage(pair.stage.on_taken("r", "prompt", A, 1.0))
    assert pair.at(1000.0) == []

    pair.send("r", is_last=True)
    assert pair.at(999.0 + LIMIT_S) == []
    assert pair.at(1000.0 + LIMIT_S) == [LIMIT_S]


def test_request_without_credit_is_no_stall_until_it_has_some():
    pair = Watched(EngineShape.STREAMING, window_chunks=1)
    pair.send("r", A, is_last=True)
    events(pair, Output("r", "text", A), Output("r", "text", B))
    assert pair.at(1000.0) == []

    pair.from_client(pair.client.consume("r", "text", A))
    pair.settle()
    assert pair.at(999.0 + LIMIT_S) == []
    assert pair.at(1000.0 + LIMIT_S) == [LIMIT_S]


def test_request_that_waits_for_a_slot_is_no_stall():
    pair = Watched(EngineShape.STREAMING, width=1, max_resident=1)
    pair.send("r", A)
    pair.from_stage(pair.stage.on_taken("r", "prompt", A, 0.0))
    pair.open("second")
    pair.send("second", A, is_last=True)

    assert pair.at(1000.0) == []


@pytest.mark.parametrize("shape", list(EngineShape))
def test_idle_engine_is_not_watched(shape):
    pair = Watched(shape)
    pair.send("r", is_last=True)
    stepped(pair, Finished("r"))
    pair.due_at()

    assert pair.at(1000.0) == []
    assert pair.due_at() is None


# --- the transition table -----------------------------------------------------------------------------------


def into(state: State, shape: EngineShape) -> ActorPair | None:
    """A pair whose request 'r' is in a state; None where the shape does not know it."""
    pair = ActorPair(shape, width=1, max_resident=1)
    if state is State.GATHERING and shape is not EngineShape.STEP:
        return None
    if state is State.WAITING:
        pair.open("other")
        pair.send("other", is_last=True)
    pair.open()
    if state is State.GATHERING:
        pair.send("r", A)
        return pair
    pair.send("r", A, is_last=True)
    if state is State.FLUSHING:
        some = [Output("r", "text", A)] * 6
        stepped(pair, *some, Finished("r"))
    if state is State.ABORTING:
        pair.to_stage(Cancel("r"))
    return pair


def acts(pair: ActorPair):
    """Every public call that may concern a request."""
    stage, client = pair.stage, pair.client_peer.sender
    frames = [
        Open(pair.route("r"), 0),
        Chunk("r", 0, 1, B),
        Chunk("r", 0, 0, B),
        Close("r", 0, 1),
        Close("r", 0, 2),
        Credit("r", 1, 5, 5000),
        Credit("r", 1, 10_000, 1),
        Cancel("r"),
        Inquire("r"),
    ]
    for frame in frames:
        yield lambda frame=frame: stage.on_frame(client, frame, 0.0)
    for event in (Output("r", "text", C), Finished("r"), Starved("r"), Failure("r", StageFailed("x"))):
        yield lambda event=event: stage.on_events([event], 0.0)
    yield lambda: stage.on_stepped(0.0)
    yield lambda: stage.on_aborted("r", 0.0)
    yield lambda: stage.on_timer(0.0)
    yield lambda: stage.on_taken("r", "prompt", A, 0.0)


NUM_ACTS = len(list(acts(ActorPair())))


@pytest.mark.parametrize("shape", list(EngineShape))
@pytest.mark.parametrize("state", list(State))
def test_no_call_leaves_the_transition_table(state, shape):
    """Each pair of public calls in each state: only moves of the table happen, and the end is reached once."""
    if into(state, shape) is None:
        return
    for first, second in itertools.product(range(NUM_ACTS), repeat=2):
        pair = into(state, shape)
        assert pair is not None
        assert pair.stage._live["r"].state is state
        for act in (first, second):
            live = pair.stage._live.get("r")
            before = None if live is None else live.state
            pair.from_stage(list(acts(pair))[act]())  # a KeyError here is a move that the table does not know
            live = pair.stage._live.get("r")
            if before is None:
                assert live is None, "an ended request came back"
            elif live is None:
                assert None in reachable(before)
            else:
                assert live.state is before or live.state in reachable(before)
        ends = [f for f in pair.control if isinstance(f, Done | Failed) and f.request == "r"]
        assert len(ends) <= 1 + (8 in {first, second}), "only an inquiry repeats an end"


def test_engine_exceptions_become_stage_failed():
    error = BadInput("x")

    assert stage_failed(error, "llm") is error
    assert isinstance(stage_failed(ValueError("boom"), "llm"), StageFailed)
    assert "llm" in stage_failed(ValueError("boom"), "llm").message
