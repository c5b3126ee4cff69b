"""One request as a stage knows it; what moves it is in `test_stage`."""

from omni_bus.core.edge import InEdge, OutEdge
from omni_bus.core.stage_request import TRANSITIONS, StageRequest, State
from omni_bus.ids import Peer
from omni_bus.wire.frames import Chunk, Close, Finish, Route, RouteEdge, Usage
from omni_bus.wire.payloads import Text

LLM, GATEWAY = Peer("llm.0", 1, "l"), Peer("gateway.0", 2, "g")
ROUTE = Route(
    "r",
    "chat",
    GATEWAY,
    {"llm": LLM},
    (
        RouteEdge("in", "prompt", "llm", "prompt", "text", 4, 4096),
        RouteEdge("in", "image", "llm", "image", "text", 4, 4096),
        RouteEdge("llm", "text", "out", "text", "text", 1, 4096),
    ),
)


def reachable(state: State) -> set[State | None]:
    """States that lie after `state`, at any distance."""
    found: set[State | None] = set()
    frontier: list[State | None] = [state]
    while frontier:
        at = frontier.pop()
        new = set(TRANSITIONS[at].values()) - found if at is not None else set()
        found |= new
        frontier += new
    return found


def test_every_state_leads_to_the_end():
    assert set(TRANSITIONS) == set(State)
    assert all(None in reachable(state) for state in State)


def test_input_is_complete_once_each_edge_has_ended_and_lets_the_engine_go_on_before():
    request = StageRequest(ROUTE, "llm", 10.0, state=State.RUNNING)
    assert list(request.in_edges) == [0, 1]
    assert not request.can_advance

    for number in (0, 1):
        edge = request.in_edges[number] = InEdge(ROUTE, number)
        edge.accept(Chunk("r", number, 0, Text("a")))
    assert request.can_advance
    assert not request.is_input_complete
    request.is_suspended = True
    assert not request.can_advance, "its reader holds it back"

    for number, edge in request.in_edges.items():
        assert edge is not None
        edge.close(Close("r", number, 1, Finish(), "text"))
    assert request.is_input_complete


def test_one_output_without_credit_blocks_and_all_is_counted():
    request = StageRequest(ROUTE, "llm", 10.0, state=State.RUNNING)
    out = request.out_edges[2] = OutEdge(ROUTE, 2, {})
    assert not request.is_blocked

    out.push(Text("a"))
    out.push(Text("b"))
    request.first_output_at, request.finish = 10.5, Finish(usage=Usage(3, 2))

    assert request.is_blocked
    stats = request.stats(12.0)
    assert (stats.first_output_s, stats.total_s, stats.chunks_in, stats.chunks_out) == (0.5, 2.0, 0, 1)
    assert stats.usage == Usage(3, 2)


def test_end_keeps_the_last_state():
    request = StageRequest(ROUTE, "llm", 0.0, state=State.WAITING)
    request.move("slot free")
    assert request.state is State.RUNNING
    request.move("engine finished")
    request.move("edges closed")
    assert request.state is State.FLUSHING
