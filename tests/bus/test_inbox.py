from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from omni_bus.bus.inbox import COPY_BELOW_BYTES, Inbox
from omni_bus.bus.outbox import Outbox
from omni_bus.bus.sockets import SocketLimits
from omni_bus.errors import BadInput, StartFailed
from omni_bus.ids import Peer, Sender, new_incarnation
from omni_bus.wire.frames import AnyFrame, Chunk, Goodbye, Ping
from omni_bus.wire.payloads import Blob, Media, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 30
ANN = Sender("ann.0", 0x0123456789ABCDEF)
PING = msgspec.msgpack.encode(["Ping", 1])


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Received:
    """Collects what an inbox delivers and wakes whoever waits for more."""

    def __init__(self) -> None:
        self.frames: list[tuple[Sender, AnyFrame]] = []
        self._arrived = asyncio.Event()

    def __call__(self, sender: Sender, frame: AnyFrame) -> None:
        self.frames.append((sender, frame))
        self._arrived.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def count(self, num_frames: int) -> list[AnyFrame]:
        await self.until(lambda: len(self.frames) >= num_frames)
        return [frame for _, frame in self.frames]


def stranger(
    context: zmq.Context[zmq.Socket[bytes]], inbox: Inbox, routing_id: bytes = ANN.encode()
) -> zmq.Socket[bytes]:
    """A plain DEALER that may send whatever it likes."""
    dealer = context.socket(zmq.DEALER)
    if routing_id:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
    dealer.connect(inbox.endpoint)
    return dealer


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_delivers_frame_with_its_sender(context: Any, tmp_path: Path, scheme: str) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path}/a", received)
    dealer = stranger(context, inbox)

    dealer.send(PING)

    await received.count(1)
    assert received.frames == [(ANN, Ping(1))]
    assert inbox.statistics() == (1, 0, {})
    inbox.close()


async def test_port_zero_gives_a_connectable_endpoint(context: Any) -> None:
    inboxes = [Inbox(context, "tcp://127.0.0.1:0", Received()) for _ in range(2)]

    ports = {int(inbox.endpoint.rpartition(":")[2]) for inbox in inboxes}

    assert len(ports) == 2
    assert 0 not in ports
    for inbox in inboxes:
        assert inbox.endpoint.startswith("tcp://127.0.0.1:")
        inbox.close()


async def test_advertised_host_replaces_the_wildcard(context: Any) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://0.0.0.0:0", received, advertise_host="127.0.0.1")

    stranger(context, inbox).send(PING)

    assert await received.count(1) == [Ping(1)]
    inbox.close()


async def test_wildcard_without_advertised_host_is_refused(context: Any) -> None:
    for endpoint in ("tcp://0.0.0.0:0", "tcp://*:0"):
        with pytest.raises(BadInput, match="advertise_host"):
            Inbox(context, endpoint, Received())


@pytest.mark.parametrize(
    "endpoint",
    ["", "ipc://", "inproc://x", "udp://1.2.3.4:5", "tcp://127.0.0.1", "tcp://:80", "tcp://h:99999", "tcp://h:-1"],
)
async def test_malformed_endpoint_is_refused(context: Any, endpoint: str) -> None:
    with pytest.raises(BadInput) as caught:
        Inbox(context, endpoint, Received())

    assert caught.value.field == "endpoint"


async def test_long_ipc_path_is_refused_with_the_limit(context: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/" + "a" * 120

    with pytest.raises(BadInput, match="107") as caught:
        Inbox(context, f"ipc://{path}", Received())

    assert path in caught.value.message


async def test_longest_ipc_path_works(context: Any) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/".ljust(107, "a")
        received = Received()
        inbox = Inbox(context, f"ipc://{path}", received)

        stranger(context, inbox).send(PING)

        assert await received.count(1) == [Ping(1)]
        inbox.close()


async def test_busy_port_is_a_start_failure(context: Any) -> None:
    first = Inbox(context, "tcp://127.0.0.1:0", Received())

    with pytest.raises(StartFailed, match="Address already in use"):
        Inbox(context, first.endpoint, Received())

    first.close()


async def test_missing_directory_is_a_start_failure(context: Any, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"can't listen on ipc://.*No such file"):
        Inbox(context, f"ipc://{tmp_path}/missing/a", Received())


HOSTILE: dict[str, list[bytes]] = {
    "empty": [b""],
    "not MessagePack": [b"\xc1\xc1"],
    "no frame": [msgspec.msgpack.encode({"a": 1})],
    "unknown tag": [msgspec.msgpack.encode(["Explode", 1])],
    "wrong type": [msgspec.msgpack.encode(["Ping", "one"])],
    "blob too many": [PING, b"x"],
    "blob missing": [msgspec.msgpack.encode(["Chunk", "r", 0, 0, ["tokens", 1]])],
    "too many parts": [PING] * 1000,
    "big blob nobody asked for": [PING, bytes(100_000)],
    "deep": [b"\x91" * 100_000],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_message_is_counted_and_dropped(
    context: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0", received)
    dealer = stranger(context, inbox)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            dealer.send_multipart(HOSTILE[name])
        dealer.send(PING)
        assert await received.count(1) == [Ping(1)]

    assert inbox.statistics() == (1, 3, {ANN.encode(): 3})
    assert len([record for record in caplog.records if "dropped a message" in record.message]) == 1
    inbox.close()


@pytest.mark.parametrize(
    "routing_id",
    [
        b"",  # ZeroMQ makes one up
        b"ann.0",
        b"ann.0:123",
        b":0123456789abcdef",
        b"ann.0:0123456789ABCDEF",
        b"ann.0:-123456789abcdef",
        b"ann.0:0x23456789abcdef",
        b"ann.0:0_23456789abcdef",
        b"\xff\xfe:0123456789abcdef",
    ],
)
async def test_stranger_without_an_actors_identity_is_dropped(context: Any, routing_id: bytes) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0", received)
    bad = stranger(context, inbox, routing_id)

    bad.send(PING)
    bad.send(b"")
    # The bad messages wake nobody here, so the good ones do until both have been seen; each is from another sender, since the
    # inbox takes turns between senders.
    while inbox.statistics().bad < 2:
        stranger(context, inbox, Sender("ann.0", new_incarnation()).encode()).send(PING)
        await received.count(len(received.frames) + 1)

    assert all(sender.actor == "ann.0" for sender, _ in received.frames)
    assert sum(inbox.statistics().bad_by_peer.values()) == 2
    inbox.close()


async def test_each_incarnation_is_another_sender(context: Any) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0", received)
    senders = [Sender("ann.0", new_incarnation()) for _ in range(3)]
    outboxes = [Outbox(context, sender, on_stuck=lambda peer: None) for sender in senders]

    for i, outbox in enumerate(outboxes):
        outbox.send(Peer("bob", 1, inbox.endpoint), Ping(i))

    await received.count(3)
    assert dict(received.frames) == {sender: Ping(i) for i, sender in enumerate(senders)}
    for outbox in outboxes:
        await outbox.close(0)
    inbox.close()


async def test_failing_delivery_does_not_stop_the_next(context: Any) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reported.append(report))
    received = Received()

    def deliver(sender: Sender, frame: AnyFrame) -> None:
        received(sender, frame)
        if isinstance(frame, Ping) and frame.nonce % 2:
            raise RuntimeError(f"no {frame.nonce}")

    inbox = Inbox(context, "tcp://127.0.0.1:0", deliver)
    dealer = stranger(context, inbox)

    for nonce in range(6):
        dealer.send(msgspec.msgpack.encode(["Ping", nonce]))

    assert await received.count(6) == [Ping(nonce) for nonce in range(6)]
    await asyncio.sleep(0)
    assert [str(report["exception"]) for report in reported] == ["no 1", "no 3", "no 5"]
    inbox.close()


async def test_long_queue_leaves_the_loop_its_turns(context: Any) -> None:
    """With a thousand messages there already, other callbacks run after each batch."""
    received = Received()
    turns: list[int] = []

    def take_turn() -> None:
        turns.append(len(received.frames))
        if len(received.frames) < 1000:
            asyncio.get_running_loop().call_soon(take_turn)

    inbox = Inbox(context, "tcp://127.0.0.1:0", received, max_batch=10)
    dealer = stranger(context, inbox)
    for nonce in range(1000):
        dealer.send(msgspec.msgpack.encode(["Ping", nonce]))
    take_turn()

    assert await received.count(1000) == [Ping(nonce) for nonce in range(1000)]
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= 20  # a turn may see the descriptor's callback and the continuation
    inbox.close()


async def test_delivery_may_close_the_inbox(context: Any) -> None:
    received = Received()

    def deliver(sender: Sender, frame: AnyFrame) -> None:
        received(sender, frame)
        inbox.close()

    inbox = Inbox(context, "tcp://127.0.0.1:0", deliver)
    dealer = stranger(context, inbox)
    for _ in range(5):
        dealer.send(PING)

    await received.count(1)
    inbox.close()
    assert len(received.frames) == 1


async def test_big_blob_arrives_as_a_read_only_view(context: Any, tmp_path: Path) -> None:
    received = Received()
    inbox = Inbox(context, f"ipc://{tmp_path}/a", received)
    outbox = Outbox(context, ANN, on_stuck=lambda peer: None)
    data = bytes(range(256)) * (64 * 1024 * 4)

    outbox.send(Peer("bob", 1, inbox.endpoint), Chunk("r", 0, 0, Media("x/y", Blob(data))))

    (frame,) = await received.count(1)
    assert isinstance(frame, Chunk)
    assert isinstance(frame.payload, Media)
    view = frame.payload.data.view
    assert isinstance(view.obj, zmq.Frame)
    assert view.readonly
    assert len(view) == 64 * 1024 * 1024
    inbox.close()
    await outbox.close(0)
    assert view == data  # the view outlives the socket


async def test_small_blob_is_copied_out_of_its_message(context: Any) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0", received)
    outbox = Outbox(context, ANN, on_stuck=lambda peer: None)

    for num_bytes in (0, 4, COPY_BELOW_BYTES - 4, COPY_BELOW_BYTES):
        outbox.send(Peer("bob", 1, inbox.endpoint), Chunk("r", 0, 0, Tokens(Blob(b"\7" * num_bytes))))

    frames = await received.count(4)
    kinds = [type(frame.payload.ids.view.obj) for frame in frames]  # type: ignore[union-attr]
    assert kinds == [bytes, bytes, bytes, zmq.Frame]
    assert [len(frame.payload.ids) for frame in frames] == [0, 4, COPY_BELOW_BYTES - 4, COPY_BELOW_BYTES]  # type: ignore[union-attr]
    await outbox.close(0)
    inbox.close()


async def test_message_over_the_limit_never_arrives(context: Any) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0", received, limits=SocketLimits(max_message_bytes=1000))
    monitor_of = stranger(context, inbox)
    monitor = monitor_of.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    monitor_of.send(bytes(1001))

    assert await asyncio.to_thread(monitor.poll, LIMIT_S * 1000)  # disconnected, as a peer out of its mind
    monitor_of.disable_monitor()
    stranger(context, inbox, Sender("ann.0", 7).encode()).send(msgspec.msgpack.encode(["Goodbye", "x" * 900]))
    assert await received.count(1) == [Goodbye("x" * 900)]
    inbox.close()


async def test_reconnecting_peer_is_not_locked_out_by_its_old_connection(context: Any) -> None:
    received = Received()
    inbox = Inbox(context, "tcp://127.0.0.1:0", received)
    first = stranger(context, inbox)
    first.send(PING)
    await received.count(1)

    first.close(0)  # the inbox may hear of this before or after the new connection
    second = stranger(context, inbox)
    second.send(msgspec.msgpack.encode(["Ping", 2]))

    assert await received.count(2) == [Ping(1), Ping(2)]
    inbox.close()


async def test_terminated_context_closes_the_inbox(context: Any) -> None:
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda _, report: ended.set_result(report["exception"]))
    own = zmq.Context()
    inbox = Inbox(own, "tcp://127.0.0.1:0", Received())

    term = asyncio.create_task(asyncio.to_thread(own.term))

    async with asyncio.timeout(LIMIT_S):
        assert isinstance(await ended, zmq.ContextTerminated)
        await term
    inbox.close()
