from typing import Any, cast

import pytest

from omni_bus.core.credit import Grant
from omni_bus.core.edge import InEdge, OutEdge
from omni_bus.errors import BadFrame, LinkBroken
from omni_bus.ids import Peer
from omni_bus.wire.frames import Chunk, Close, Credit, Finish, Open, Route, RouteEdge
from omni_bus.wire.payloads import Json, Text, Unreadable

ROUTE = Route(
    "r",
    "p",
    Peer("gateway", 1, ""),
    {"llm": Peer("llm.0", 2, "")},
    (RouteEdge("in", "prompt", "llm", "text", "text", 2, 1000),),
)


def chunk(seq: int, text: str = "") -> Chunk:
    return Chunk("r", 0, seq, Text(text))


@pytest.fixture
def sender() -> OutEdge:
    return OutEdge(ROUTE, 0, {"llm": {"a": 1}})


@pytest.fixture
def receiver() -> InEdge:
    return InEdge(ROUTE, 0)


def test_first_frame_opens_with_the_parameters(sender):
    assert sender.push(Text("a")) == [Open(ROUTE, 0, {"llm": {"a": 1}}), chunk(0, "a")]
    assert sender.push(Text("b")) == [chunk(1, "b")]


def test_empty_edge_opens_and_closes(sender):
    assert sender.finish(Finish("length")) == [
        Open(ROUTE, 0, {"llm": {"a": 1}}),
        Close("r", 0, 0, Finish("length"), "text"),
    ]
    assert sender.is_closed
    assert sender.finish(Finish()) == []


def test_chunks_beyond_credit_wait_in_order(sender):
    frames = [frame for text in "abcd" for frame in sender.push(Text(text))]
    frames += sender.finish(Finish())

    assert frames[1:] == [chunk(0, "a"), chunk(1, "b")]
    assert sender.is_blocked
    assert sender.pending_bytes == 2 * 65
    assert sender.credit_left == Grant(0, 870)
    assert sender.grant(Credit("r", 0, 3, 1065)) == [chunk(2, "c")]
    assert sender.grant(Credit("r", 0, 4, 1130)) == [chunk(3, "d"), Close("r", 0, 4, kind="text")]
    assert not sender.is_blocked


def test_abandoned_edge_closes_after_what_was_sent(sender):
    for text in "abc":
        sender.push(Text(text))

    assert sender.abandon() == [Close("r", 0, 2, kind="text")]
    assert sender.abandon() == []


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (Chunk("r", 0, 0, Json({})), "a json came where text was declared"),
        (Chunk("r", 0, 0, cast("Any", Unreadable("gone"))), "in.prompt -> llm.text: chunk 0 can't be read: gone"),
    ],
)
def test_receiver_refuses_what_it_can_not_take(receiver, frame, what):
    with pytest.raises(BadFrame, match=what):
        receiver.accept(frame)
    assert receiver.num_received == 0


def test_receiver_calls_a_gap_a_broken_connection(receiver):
    """Nothing else loses frames; who sent them is not at fault."""
    with pytest.raises(LinkBroken, match=r"edge in.prompt -> llm.text: chunk 1 came where 0 was due: some are lost"):
        receiver.accept(chunk(1))
    assert receiver.num_received == 0


def test_receiver_refuses_a_repeat(receiver):
    receiver.accept(chunk(0))

    with pytest.raises(BadFrame, match=r"edge in.prompt -> llm.text: chunk 0 came where 1 was due"):
        receiver.accept(chunk(0))


def test_receiver_refuses_more_than_credit(receiver):
    receiver.accept(chunk(0))
    receiver.accept(chunk(1))

    with pytest.raises(BadFrame, match="was granted"):
        receiver.accept(chunk(2))


def test_end_must_match_what_came(receiver):
    receiver.accept(chunk(0))

    with pytest.raises(LinkBroken, match="2 of 3 chunks are lost"):
        receiver.close(Close("r", 0, 3))
    with pytest.raises(BadFrame, match="end after 0 chunks, 1 came"):
        receiver.close(Close("r", 0, 0))
    receiver.close(Close("r", 0, 1, Finish("length")))
    assert receiver.is_closed
    assert receiver.finish == Finish("length")


def test_nothing_is_taken_after_the_end(receiver):
    receiver.close(Close("r", 0, 0))

    with pytest.raises(BadFrame, match="after the end"):
        receiver.accept(chunk(0))
    with pytest.raises(BadFrame):
        receiver.close(Close("r", 0, 0))


def test_consumed_chunks_give_credit_until_the_end(receiver):
    receiver.accept(chunk(0))
    receiver.accept(chunk(1))

    assert receiver.buffered == Grant(2, 128)
    assert receiver.consume(Text("")) == Credit("r", 0, 3, 1064)
    receiver.close(Close("r", 0, 2))
    assert receiver.consume(Text("")) is None
    assert receiver.buffered == Grant(0, 0)


def test_discarded_chunks_give_credit_once(receiver):
    receiver.accept(chunk(0))

    assert receiver.discard() == Credit("r", 0, 3, 1064)
    assert receiver.discard() is None
