from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import zmq

from omni_bus.bus.arena import Arena, ArenaLimits
from omni_bus.bus.link import Link
from omni_bus.bus.outbox import BacklogLimits, Outbox, _is_bulky
from omni_bus.bus.sockets import SocketLimits
from omni_bus.errors import BadFrame
from omni_bus.ids import Peer, Sender
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import (
    Chunk,
    Close,
    Confirm,
    Confirmed,
    Goodbye,
    Mapped,
    Offer,
    Open,
    Release,
    Route,
    RouteEdge,
)
from omni_bus.wire.payloads import KINDS, PAYLOAD_TYPES, Blob, Media, Tensor, Text, Unreadable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

LIMIT_S = 30
LIMITS = ArenaLimits(4 << 20, 64 << 10)
LARGE = 100_000


def no_peer_is_stuck(peer: Peer) -> None:
    raise AssertionError(f"{peer} is stuck")


class End:
    """A link that collects what comes."""

    def __init__(self, name: str, listen: str, arena: ArenaLimits = LIMITS) -> None:
        self.frames: list[tuple[Sender, Any]] = []
        self._arrived = asyncio.Event()
        self.link = Link(name, listen, self._deliver, no_peer_is_stuck, arena)
        self.answers: dict[Any, Callable[[Sender, Any], None]] = dict(self.link._inbox._handlers)
        self.link._inbox._handlers = dict.fromkeys(self.answers, self._answer)

    def _deliver(self, sender: Sender, frame: Any) -> None:
        self.frames.append((sender, frame))
        self._arrived.set()

    def _answer(self, sender: Sender, frame: Any) -> None:
        self.answers[type(frame)](sender, frame)
        self._arrived.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that a frame to this end makes true, one of the transport's too."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def next_frame(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not self.frames:
                self._arrived.clear()
                await self._arrived.wait()
        return self.frames.pop(0)[1]


@pytest.fixture(params=["ipc"])
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[End, End]]:
    listen = ["tcp://127.0.0.1:0"] * 2 if request.param == "tcp" else [f"ipc://{tmp_path}/{name}" for name in "ab"]
    ann, bob = End("ann.0", listen[0]), End("bob.0", listen[1])
    yield ann, bob
    await ann.link.close(0)
    await bob.link.close(0)


def media(seq: int, data: bytes) -> Chunk:
    return Chunk("r", 0, seq, Media("x/y", Blob(data)))


async def share(ann: End, bob: End) -> None:
    """Send one large chunk, which travels in a message, and wait until the arena is agreed on."""
    ann.link.send(bob.link.me, media(0, b"-" * LARGE))
    await bob.next_frame()
    await ann.until(lambda: ann.link.statistics().inbox.delivered == 1)


def arena_of(end: End) -> Any:
    return end.link.statistics().arena


async def test_large_payload_arrives_by_reference(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)
    array = np.arange(LARGE, dtype=np.float32)

    ann.link.send(bob.link.me, Chunk("r", 0, 1, Tensor("float32", (LARGE,), Blob(array.data))))
    frame = await bob.next_frame()

    assert np.array_equal(np.frombuffer(frame.payload.data.view, np.float32), array)
    assert (arena_of(ann).lent, arena_of(ann).slots, bob.link.statistics().borrowed.views) == (1, 1, 1)
    del frame
    await ann.until(lambda: arena_of(ann).slots == 0)


async def test_first_large_payload_does_not_wait_for_the_arena(ends: tuple[End, End]) -> None:
    ann, bob = ends

    for seq in range(3):
        ann.link.send(bob.link.me, media(seq, bytes([seq]) * LARGE))

    assert [(await bob.next_frame()).payload.data.view[0] for _ in range(3)] == [0, 1, 2]
    assert arena_of(ann).lent == 0


async def test_order_holds_between_references_and_messages(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)
    lengths = [LARGE, 10, LARGE, LARGE, 100, LIMITS.threshold_bytes, LIMITS.threshold_bytes - 1] * 30

    for seq, length in enumerate(lengths):
        ann.link.send(bob.link.me, media(seq, seq.to_bytes(2, "big") * length))

    for seq in range(len(lengths)):
        frame = await bob.next_frame()
        assert (frame.seq, bytes(frame.payload.data.view[:2])) == (seq, seq.to_bytes(2, "big"))
    assert arena_of(ann).full > 0


@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
async def test_arena_is_not_offered_over_tcp(ends: tuple[End, End]) -> None:
    ann, bob = ends

    for seq in range(3):
        ann.link.send(bob.link.me, media(seq, b"x" * LARGE))
        await bob.next_frame()

    assert (ann.link.statistics().inbox.delivered, arena_of(ann).lent) == (0, 0)


async def test_switched_off_arena_sends_everything_in_messages(tmp_path: Path) -> None:
    ann, bob = End("ann.0", f"ipc://{tmp_path}/a", ArenaLimits(0)), End("bob.0", f"ipc://{tmp_path}/b")

    ann.link.send(bob.link.me, media(0, b"x" * LARGE))

    assert len((await bob.next_frame()).payload.data) == LARGE
    assert arena_of(ann) is None
    await ann.link.close(0)
    await bob.link.close(0)


async def test_full_arena_goes_on_in_messages(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)
    leaked: list[Any] = []

    for seq in range(40):
        ann.link.send(bob.link.me, media(seq, bytes([seq]) * LARGE))
        leaked.append(await bob.next_frame())

    assert [frame.payload.data.view[-1] for frame in leaked] == list(range(40))
    assert arena_of(ann).full == 40 - arena_of(ann).lent == 24
    leaked.clear()
    await ann.until(lambda: arena_of(ann).slots == 0)


async def test_forgotten_receiver_leaves_no_lease(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)
    ann.link.send(bob.link.me, media(0, b"x" * LARGE))
    frame = await bob.next_frame()

    ann.link.forget(bob.link.me)

    assert (arena_of(ann).slots, arena_of(ann).taken_back) == (0, 1)
    del frame  # given back too late
    await ann.until(lambda: arena_of(ann).stale == 1)


async def test_receiver_that_was_given_up_by_mistake_reads_on(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)
    bob.link.forget(ann.link.me)

    ann.link.send(bob.link.me, media(1, b"x" * LARGE))
    frame = await bob.next_frame()

    assert len(frame.payload.data) == LARGE
    assert arena_of(ann).lent == 1
    del frame
    await ann.until(lambda: arena_of(ann).slots == 0)


async def test_frame_that_can_not_be_sent_lends_nothing(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)

    with pytest.raises(BadFrame):
        ann.link.send(bob.link.me, Chunk("\ud800", 0, 1, Media("x/y", Blob(b"x" * LARGE))))
    with pytest.raises(BadFrame):
        ann.link.send(bob.link.me, Chunk("r", 1 << 70, 1, Media("x/y", Blob(b"x" * LARGE))))

    assert arena_of(ann).slots == 0
    ann.link.send(bob.link.me, media(1, b"y" * LARGE))
    assert (await bob.next_frame()).payload.data.view[0] == ord("y")


WRONG = {
    "no such process": {"pid": 2**22 + 1},
    "no such descriptor": {"fd": 9999},
    "outside": {"offset": 1 << 40},
    "between slots": {"offset": 5},
    "another generation": {"generation": 99},
    "a later generation's slot": {"offset": 32 * 16384},
    "longer than lent": {"length": LARGE + 1},
    "shorter than lent": {"length": LARGE - 1},
    "not positive": {"length": 0},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
async def test_wrong_reference_fails_its_request_only(ends: tuple[End, End], change: dict[str, int]) -> None:
    ann, bob = ends
    arena = Arena(ann.link.me, LIMITS)
    reference = arena.lend(Blob(b"x" * LARGE), bob.link.me.sender)
    assert reference is not None
    wrong = msgspec.structs.replace(reference, **change)
    evil = Outbox(ann.link._context, ann.link.me.sender, on_stuck=no_peer_is_stuck)
    evil._encode = Codec(store=lambda _: wrong).encode

    evil.send(bob.link.me, Chunk("r", 3, 7, Media("x/y", Blob(b"x" * LARGE))))
    frame = await bob.next_frame()

    assert (frame.request, frame.edge, frame.seq) == ("r", 3, 7)
    assert isinstance(frame.payload, Unreadable)
    assert "arena" in frame.payload.reason or "can't be opened" in frame.payload.reason
    evil._encode = Codec(store=lambda _: reference).encode
    evil.send(bob.link.me, media(8, b"x" * LARGE))
    assert len((await bob.next_frame()).payload.data) == LARGE
    assert bob.link.statistics().inbox.bad == 1
    await evil.close(0)
    arena.close()


async def test_buffer_shorter_than_its_shape_fails_its_request(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)

    ann.link.send(bob.link.me, Chunk("r", 0, 1, Tensor("uint8", (2 * LARGE,), Blob(b"x" * LARGE))))
    frame = await bob.next_frame()

    assert frame.payload == Unreadable(f"tensor: {LARGE} bytes came where the header says {2 * LARGE}")
    del frame
    await ann.until(lambda: arena_of(ann).slots == 0)


async def test_arena_that_can_not_be_read_is_declined(ends: tuple[End, End]) -> None:
    ann, bob = ends
    answers: list[Any] = []
    ann.answers[Mapped] = lambda _, frame: answers.append(frame)

    for offer in (Offer(ann.link.me, os.getpid(), 9999), Offer(ann.link.me, 0, 0)):
        ann.link.send(bob.link.me, offer)
    await ann.until(lambda: len(answers) == 2)

    assert [bool(answer.reason) for answer in answers] == [True, True]
    assert "can't be opened" in answers[0].reason


async def test_sender_that_was_declined_uses_messages(ends: tuple[End, End], caplog: pytest.LogCaptureFixture) -> None:
    ann, bob = ends
    bob.answers[Offer] = lambda _, frame: bob.link.send(frame.peer, Mapped("another world"))

    await share(ann, bob)
    ann.link.send(bob.link.me, media(1, b"x" * LARGE))

    assert len((await bob.next_frame()).payload.data) == LARGE
    assert arena_of(ann).lent == 0
    assert "bob.0 can't read shared memory (sent in messages): another world" in caplog.messages


async def test_stranger_s_answers_change_nothing(ends: tuple[End, End]) -> None:
    ann, bob = ends
    await share(ann, bob)
    ann.link.send(bob.link.me, media(1, b"x" * LARGE))
    frame = await bob.next_frame()
    eve = Outbox(ann.link._context, Sender("eve.0", 66), on_stuck=no_peer_is_stuck)

    eve.send(ann.link.me, Release((1, 2, 3)))
    eve.send(ann.link.me, Mapped("no"))
    eve.send(ann.link.me, Offer(bob.link.me, os.getpid(), 1))
    eve.send(ann.link.me, Goodbye())
    assert isinstance(await ann.next_frame(), Goodbye)

    assert (arena_of(ann).slots, arena_of(ann).stale) == (1, 3)
    ann.link.send(bob.link.me, media(2, b"y" * LARGE))
    assert len((await bob.next_frame()).payload.data) == len(frame.payload.data)
    assert arena_of(ann).lent == 2
    await eve.close(0)


async def test_backlog_of_a_stuck_peer_gives_its_slots_back(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    me = Peer("ann.0", 1, f"ipc://{tmp_path}/a")
    bob = Peer("bob.0", 2, f"ipc://{tmp_path}/nobody")
    arena = Arena(me, LIMITS)
    stuck: list[Peer] = []
    outbox = Outbox(
        context,
        me.sender,
        on_stuck=stuck.append,
        limits=SocketLimits(send_hwm=4),
        backlog=BacklogLimits(max_frames=5),
        arena=arena,
        lend_from_bytes=1,
    )
    outbox.send(bob, media(0, b"x"))
    lane = outbox._bulk_lanes[bob]
    outbox.mapped(bob.sender, "")

    for seq in range(1, 12):
        outbox.send(bob, media(seq, bytes([seq]) * 100))

    assert lane.is_stuck
    in_zeromq = outbox.statistics().handed_over - 1
    assert arena.statistics().slots == in_zeromq
    outbox.forget(bob)
    assert arena.statistics().slots == 0
    await outbox.close(0)
    context.destroy(0)
    arena.close()


async def test_closed_link_leaves_no_descriptor(tmp_path: Path) -> None:
    def memory_descriptors() -> list[str]:
        names: list[str] = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue  # the listing's own
        return [name for name in names if "omni-bus closing" in name]

    ann, bob = End("closing.0", f"ipc://{tmp_path}/a"), End("bob.0", f"ipc://{tmp_path}/b")
    await share(ann, bob)
    assert memory_descriptors() != []

    await ann.link.close(0)
    await bob.link.close(0)

    assert memory_descriptors() == []


async def test_allocated_memory_reaches_two_receivers_uncopied(ends: tuple[End, End], tmp_path: Path) -> None:
    ann, bob = ends
    eve = End("eve.0", f"ipc://{tmp_path}/e")
    await share(ann, bob)
    ann.link.send(eve.link.me, media(0, b"-" * LARGE))
    await eve.next_frame()
    await ann.until(lambda: ann.link.statistics().inbox.delivered == 2)
    written = arena_of(ann).written
    blob = ann.link.allocate(LARGE)
    blob.view[:] = b"x" * LARGE

    for receiver in (bob, eve, bob):
        ann.link.send(receiver.link.me, Chunk("r", 0, 1, Media("x/y", blob)))
    del blob
    held = [await receiver.next_frame() for receiver in (bob, eve, bob)]

    assert all(frame.payload.data.view == b"x" * LARGE for frame in held)
    assert (arena_of(ann).written - written, arena_of(ann).slots) == (1, 1)
    while held:
        assert arena_of(ann).slots == 1
        held.pop()
        await ann.until(lambda: arena_of(ann).released == arena_of(ann).lent - len(held))
    assert arena_of(ann).slots == 0
    await eve.link.close(0)


async def test_allocated_memory_that_is_not_shared_can_be_sent(tmp_path: Path) -> None:
    ann, bob = End("ann.0", f"ipc://{tmp_path}/a", ArenaLimits(0)), End("bob.0", f"ipc://{tmp_path}/b")
    blob = ann.link.allocate(LARGE)
    blob.view[:] = b"x" * LARGE

    ann.link.send(bob.link.me, Chunk("r", 0, 1, Media("x/y", blob)))

    assert (await bob.next_frame()).payload.data.view == b"x" * LARGE
    with pytest.raises(ValueError, match=r"num_bytes -1 is negative \(allowed: 0 or more\)"):
        ann.link.allocate(-1)
    assert len(ann.link.allocate(0)) == 0
    await ann.link.close(0)
    await bob.link.close(0)


async def test_allocating_never_fails_for_want_of_shared_memory(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ann, bob = ends
    held = [ann.link.allocate(LIMITS.max_bytes // 2) for _ in range(3)]
    assert arena_of(ann).slots == 2
    ann.link.send(bob.link.me, Chunk("r", 0, 1, Media("x/y", held[2])))
    assert len((await bob.next_frame()).payload.data) == LIMITS.max_bytes // 2
    held.clear()
    assert arena_of(ann).slots == 0

    def no_memory(*_: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(bob.link._arena, "_own_segment", no_memory)
    assert len(bob.link.allocate(LARGE)) == LARGE
    assert "no shared memory to write 100000 bytes in (sent in messages): [Errno 24] Too many open files" in caplog.text


async def test_allocated_memory_outlives_its_link(tmp_path: Path) -> None:
    ann = End("ann.0", f"ipc://{tmp_path}/a")
    early = ann.link.allocate(LARGE)

    await ann.link.close(0)
    late = ann.link.allocate(LARGE)
    for blob in (early, late):
        blob.view[:] = b"x" * LARGE

    assert early == late


def route(kind: str) -> Route:
    return Route("r", "p", Peer("g", 1, ""), {}, (RouteEdge("in", "a", "out", "a", kind, 1, 1),))


@pytest.mark.parametrize("ends", ["ipc", "tcp"], indirect=True)
async def test_each_edge_keeps_its_order_on_two_lanes(ends: tuple[End, End]) -> None:
    ann, bob = ends
    expected: dict[str, list[Any]] = {"text": [], "tensor": []}

    for round_ in range(20):
        for kind, payload in (("text", Text("x")), ("tensor", Tensor("uint8", (LARGE,), Blob(bytes(LARGE))))):
            request = f"{kind} {round_}"
            frames = [
                Open(msgspec.structs.replace(route(kind), request=request), 0),
                *(Chunk(request, 0, seq, payload) for seq in range(5)),
                Close(request, 0, 5, kind=kind),
            ]
            for frame in frames:
                ann.link.send(bob.link.me, frame)
            expected[kind] += [(type(frame), getattr(frame, "seq", None), request) for frame in frames]

    came: dict[str, list[Any]] = {"text": [], "tensor": []}
    for _ in range(2 * 20 * 7):
        frame = await bob.next_frame()
        request = frame.route.request if isinstance(frame, Open) else frame.request
        came[request.partition(" ")[0]].append((type(frame), getattr(frame, "seq", None), request))
    assert came == expected
    assert ann.link.statistics().outbox.peers == 1


@pytest.mark.parametrize("ends", ["ipc", "tcp"], indirect=True)
async def test_words_do_not_wait_behind_tensors(ends: tuple[End, End]) -> None:
    ann, bob = ends
    ann.link._outbox._arena = None  # in messages, as between hosts
    ann.link._outbox._encode = Codec().encode
    data = Blob(bytes(64 << 20))
    for seq in range(2):  # both lanes are connected
        ann.link.send(bob.link.me, Chunk("r", seq, 0, Text("") if seq else Tensor("uint8", (0,), Blob(b""))))
        await bob.next_frame()

    for seq in range(4):
        ann.link.send(bob.link.me, Chunk("tensor", 0, seq, Tensor("uint8", (64 << 20,), data)))
    ann.link.send(bob.link.me, Chunk("word", 0, 0, Text("now")))
    came = [(await bob.next_frame()).request for _ in range(5)]

    assert came.index("word") < 4
    assert sorted(came) == ["tensor"] * 4 + ["word"]


async def test_peer_that_is_stuck_on_one_lane_is_on_both(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bob = Peer("bob.0", 2, f"ipc://{tmp_path}/nobody")
    stuck: list[Peer] = []
    limits, backlog = SocketLimits(send_hwm=2), BacklogLimits(max_frames=3)
    outbox = Outbox(context, Sender("ann.0", 1), on_stuck=stuck.append, limits=limits, backlog=backlog)

    for seq in range(9):
        outbox.send(bob, media(seq, b"x"))
    handed_over = outbox.statistics().handed_over
    outbox.send(bob, Chunk("r", 0, 0, Text("x")))
    await asyncio.sleep(0)

    assert stuck == [bob]
    assert (outbox.statistics().handed_over, outbox.statistics().stuck) == (handed_over, 1)
    outbox.forget(bob)
    assert outbox.statistics().peers == 0
    await outbox.close(0)
    context.destroy(0)


def test_every_frame_of_an_edge_takes_the_same_lane() -> None:
    for kind in KINDS:
        payload_type = next(cls for cls in PAYLOAD_TYPES if cls.__struct_config__.tag == kind)
        make: Any = payload_type
        payload = make(*[None] * len(payload_type.__struct_fields__))
        frames = (Open(route(kind), 0), Chunk("r", 0, 0, payload), Close("r", 0, 0, kind=kind))
        assert len({_is_bulky(frame) for frame in frames}) == 1
    assert not _is_bulky(Open(route("tensor"), 5))
    assert not _is_bulky(Goodbye())


# --- what has been delivered --------------------------------------------------------------------------------


async def test_delivered_comes_after_everything_before_it_on_both_ways(ends: tuple[End, End]) -> None:
    ann, bob = ends
    sent = [Chunk("r", 0, seq, Text(str(seq))) for seq in range(2000)]
    for chunk in sent:
        ann.link.send(bob.link.me, chunk)
        ann.link.send(bob.link.me, media(chunk.seq, b"-" * 100))

    assert await ann.link.delivered(LIMIT_S)

    frames = [frame for _, frame in bob.frames]
    assert [frame for frame in frames if isinstance(frame.payload, Text)] == sent
    assert len(frames) == 2 * len(sent), "the way for bulky payloads is waited for too"


async def test_who_sent_nothing_has_nothing_to_wait_for(ends: tuple[End, End]) -> None:
    ann, _ = ends

    assert await ann.link.delivered(0.0)


async def test_peer_that_is_not_there_is_not_delivered_to(ends: tuple[End, End], tmp_path: Path) -> None:
    ann, _ = ends
    ann.link.send(Peer("eve.0", 7, f"ipc://{tmp_path}/nobody"), Goodbye())

    assert not await ann.link.delivered(0.01)


async def test_peer_that_is_forgotten_meanwhile_is_not_waited_for(ends: tuple[End, End], tmp_path: Path) -> None:
    ann, bob = ends
    gone = Peer("eve.0", 7, f"ipc://{tmp_path}/nobody")
    ann.link.send(gone, Goodbye())
    ann.link.send(bob.link.me, Goodbye())
    waiting = asyncio.create_task(ann.link.delivered(LIMIT_S))
    await bob.until(lambda: bob.link.statistics().inbox.delivered == 2)

    ann.link.forget(gone)

    assert await waiting


async def test_coordinator_confirms_whatever_its_incarnation(ends: tuple[End, End]) -> None:
    """Its address outlives it, so it is known by name and the incarnation 0."""
    ann, bob = ends
    ann.link.send(Peer("bob.0", 0, bob.link.me.endpoint), Goodbye())

    assert await ann.link.delivered(LIMIT_S)


async def test_word_of_others_confirms_nothing(ends: tuple[End, End], tmp_path: Path) -> None:
    ann, bob = ends
    gone = Peer("eve.0", 7, f"ipc://{tmp_path}/nobody")
    ann.link.send(gone, Goodbye())
    waiting = asyncio.create_task(ann.link.delivered(LIMIT_S))
    await asyncio.sleep(0)
    bob.link.send(ann.link.me, Confirmed(1))
    bob.link.send(ann.link.me, Confirmed(99))
    bob.link.send(ann.link.me, Confirm(5, Peer("eve.0", 7, bob.link.me.endpoint)))  # an answer to who did not ask
    bob.link.send(ann.link.me, Goodbye())
    assert isinstance(await ann.next_frame(), Goodbye)

    assert not waiting.done()
    assert bob.link.statistics().inbox.delivered == 0
    ann.link.forget(gone)
    assert await waiting
