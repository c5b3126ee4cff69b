from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from omni_bus.bus.inbox import Inbox
from omni_bus.bus.outbox import BacklogLimits, Outbox
from omni_bus.bus.sockets import SocketLimits
from omni_bus.config.graph import WINDOWS
from omni_bus.errors import BadFrame, BadInput, InputTooLarge
from omni_bus.ids import Peer, Sender
from omni_bus.wire.frames import Chunk, Goodbye, Ping
from omni_bus.wire.payloads import Blob, Media, Text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 60
ANN = Sender("ann.0", 1)

# Prints its endpoint, then each nonce or sequence number as it comes; ends at the wanted count or with a Goodbye.
READER = """
import asyncio, sys, zmq
from omni_bus.bus.inbox import Inbox

async def main():
    count, over = 0, asyncio.Event()
    def deliver(sender, frame):
        nonlocal count
        if type(frame).__name__ == "Goodbye":
            over.set()
            return
        print(frame.nonce if hasattr(frame, "nonce") else frame.seq, flush=True)
        count += 1
        if count == int(sys.argv[2]):
            over.set()
    inbox = Inbox(zmq.Context(), sys.argv[1], deliver)
    print(inbox.endpoint, flush=True)
    await over.wait()
    inbox.close()

asyncio.run(main())
"""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Child:
    """An inbox in a process of its own that can be stopped, resumed and killed."""

    def __init__(self, endpoint: str, num_frames: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, endpoint, str(num_frames)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.peer = Peer("bob.0", 2, self.process.stdout.readline().strip())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Pause it, and return when it is paused."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    async def next_nonces(self, num_frames: int) -> list[int]:
        """Wait for that many more."""
        stdout = self.process.stdout
        assert stdout is not None
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.to_thread(lambda: [int(stdout.readline()) for _ in range(num_frames)])

    async def nonces(self) -> list[int]:
        """Wait for its end."""
        async with asyncio.timeout(LIMIT_S):
            text, _ = await asyncio.to_thread(self.process.communicate)
        return [int(word) for word in text.split()]

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/bob" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def children() -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.kill()


def assert_counts_up(nonces: list[int], num_frames: int) -> None:
    """Like comparing with a range, which pytest would take minutes to explain when it fails."""
    wrong = [(i, nonce) for i, nonce in enumerate(nonces) if i != nonce][:3]
    assert (len(nonces), wrong) == (num_frames, [])


def refuse_stuck(peer: Peer) -> None:
    raise AssertionError(f"{peer} is stuck")


async def test_paused_peer_gets_every_frame_in_order(context: Any, endpoint: str, children: list[Child]) -> None:
    child = Child(endpoint, 5000)
    children.append(child)
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=100))

    for nonce in range(1000):
        outbox.send(child.peer, Ping(nonce))
    child.stop()
    for nonce in range(1000, 5000):
        outbox.send(child.peer, Chunk("r", 0, nonce, Text("x" * 2000)))
    before = outbox.statistics()
    child.signal(signal.SIGCONT)

    assert_counts_up(await child.nonces(), 5000)
    after = outbox.statistics()
    assert before.waiting > 0
    assert before.handed_over + before.waiting == 5000
    assert (after.handed_over, after.waiting, after.waiting_bytes, after.dropped) == (5000, 0, 0, 0)
    await outbox.close(0)


async def test_stuck_peer_gets_a_prefix_and_the_rest_is_counted(
    context: Any, endpoint: str, children: list[Child]
) -> None:
    child = Child(endpoint, 1_000_000)
    children.append(child)
    stuck: list[Peer] = []
    outbox = Outbox(
        context, ANN, on_stuck=stuck.append, limits=SocketLimits(send_hwm=100), backlog=BacklogLimits(max_frames=200)
    )
    child.stop()

    for nonce in range(5000):
        outbox.send(child.peer, Chunk("r", 0, nonce, Text("x" * 5000)))
    assert stuck == []  # told later, never inside `send`
    await asyncio.sleep(0)

    counts = outbox.statistics()
    assert stuck == [child.peer]
    assert counts.stuck == 1
    assert counts.waiting == 0
    assert counts.dropped > 0
    assert counts.handed_over + counts.dropped == 5000
    child.signal(signal.SIGCONT)
    assert_counts_up(await child.next_nonces(counts.handed_over), counts.handed_over)
    outbox.forget(child.peer)
    outbox.send(child.peer, Goodbye())
    assert await child.nonces() == []
    assert outbox.statistics().stuck == 0
    await outbox.close(0)


async def test_all_that_credit_allows_may_wait_for_a_peer_that_is_held_up(
    context: Any, endpoint: str, children: list[Child]
) -> None:
    child = Child(endpoint, 1)
    children.append(child)
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck)
    child.stop()

    for seq in range(WINDOWS["text"]):
        for i in range(10_000):
            outbox.send(child.peer, Chunk(f"r{i}", 0, seq, Text(" word")))
    await asyncio.sleep(0)

    counts = outbox.statistics()
    assert (counts.stuck, counts.dropped) == (0, 0)
    assert counts.waiting > 100_000
    await outbox.close(0)


async def test_two_peers_do_not_wait_for_each_other(context: Any, tmp_path: Path, children: list[Child]) -> None:
    paused, live = Child(f"ipc://{tmp_path}/paused", 300), Child(f"ipc://{tmp_path}/live", 300)
    children.extend([paused, live])
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=10))
    paused.stop()

    for nonce in range(300):
        outbox.send(paused.peer, Chunk("r", 0, nonce, Text("x" * 5000)))
        outbox.send(live.peer, Ping(nonce))

    assert await live.nonces() == list(range(300))
    assert outbox.statistics().waiting > 0
    paused.signal(signal.SIGCONT)
    assert await paused.nonces() == list(range(300))
    await outbox.close(0)


@pytest.mark.parametrize("linger_s", [0, 0.2])
async def test_closing_does_not_hang_on_a_dead_peer(endpoint: str, children: list[Child], linger_s: float) -> None:
    context = zmq.Context()
    child = Child(endpoint, 1_000_000)
    children.append(child)
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=100))
    outbox.send(child.peer, Ping(0))
    assert await child.next_nonces(1) == [0]
    child.kill()
    for nonce in range(1, 5000):
        outbox.send(child.peer, Ping(nonce))

    async with asyncio.timeout(LIMIT_S):
        await outbox.close(linger_s)
        await asyncio.to_thread(context.term)

    counts = outbox.statistics()
    assert counts.peers == counts.waiting == counts.waiting_bytes == 0
    assert counts.dropped >= 4000
    assert counts.handed_over + counts.dropped == 5000


async def test_closing_does_not_hang_on_a_peer_that_never_was(tmp_path: Path) -> None:
    context = zmq.Context()
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=10))
    for nonce in range(100):
        outbox.send(Peer("bob", 1, f"ipc://{tmp_path}/nobody"), Ping(nonce))
        outbox.send(Peer("bob", 1, "tcp://127.0.0.1:1"), Ping(nonce))

    async with asyncio.timeout(LIMIT_S):
        await outbox.close(0.1)
        await asyncio.to_thread(context.term)

    assert outbox.statistics().dropped == 180


async def test_closing_sends_what_waits(endpoint: str, children: list[Child]) -> None:
    context = zmq.Context()
    child = Child(endpoint, 900)
    children.append(child)
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=50))

    for nonce in range(900):
        outbox.send(child.peer, Ping(nonce))
    async with asyncio.timeout(LIMIT_S):
        await outbox.close(LIMIT_S)
        await asyncio.to_thread(context.term)

    assert_counts_up(await child.nonces(), 900)
    assert outbox.statistics().dropped == 0


async def test_frame_after_closing_is_counted_as_dropped(context: Any) -> None:
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck)
    await outbox.close(0)
    await outbox.close(0)

    outbox.send(Peer("bob", 1, "tcp://127.0.0.1:1"), Ping(1))

    assert outbox.statistics() == (0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "bad", ["", "nonsense", "inproc://x", "tcp://127.0.0.1", "tcp://300.1.1.1.1.1:x", "ipc://" + "a" * 200]
)
async def test_address_without_sense_makes_the_peer_stuck(context: Any, bad: str) -> None:
    stuck: list[Peer] = []
    outbox = Outbox(context, ANN, on_stuck=stuck.append)
    peer = Peer("bob", 1, bad)

    outbox.send(peer, Ping(1))
    outbox.send(peer, Ping(2))
    await asyncio.sleep(0)

    assert stuck == [peer]
    assert outbox.statistics().dropped == 2
    outbox.forget(peer)
    await outbox.close(0)


async def test_backlog_is_bounded_in_bytes(context: Any, tmp_path: Path) -> None:
    stuck: list[Peer] = []
    peer = Peer("bob", 1, f"ipc://{tmp_path}/nobody")
    outbox = Outbox(
        context, ANN, on_stuck=stuck.append, limits=SocketLimits(send_hwm=1), backlog=BacklogLimits(max_bytes=10_000)
    )
    blob = Chunk("r", 0, 0, Media("x/y", Blob(bytes(4000))))

    for _ in range(3):
        outbox.send(peer, blob)
    most = outbox.statistics()
    outbox.send(peer, blob)
    await asyncio.sleep(0)

    assert (most.handed_over, most.waiting, most.dropped) == (1, 2, 0)
    assert 8000 < most.waiting_bytes <= 10_000
    assert stuck == [peer]
    assert outbox.statistics() == (1, 1, 1, 0, 0, 3)
    await outbox.close(0)


async def test_frame_longer_than_the_backlog_may_wait_alone(context: Any, tmp_path: Path) -> None:
    peer = Peer("bob", 1, f"ipc://{tmp_path}/nobody")
    outbox = Outbox(
        context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=1), backlog=BacklogLimits(max_bytes=100)
    )

    for _ in range(2):
        outbox.send(peer, Chunk("r", 0, 0, Media("x/y", Blob(bytes(4000)))))

    assert outbox.statistics().waiting == 1
    await outbox.close(0)


async def test_forgetting_counts_what_waited_and_opens_anew(context: Any, tmp_path: Path) -> None:
    arrived = asyncio.get_running_loop().create_future()
    endpoint = f"ipc://{tmp_path}/bob"
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=1))
    peer = Peer("bob", 1, endpoint)
    for nonce in range(10):
        outbox.send(peer, Ping(nonce))

    outbox.forget(peer)
    outbox.forget(peer)
    counts = outbox.statistics()
    inbox = Inbox(context, endpoint, lambda _, frame: arrived.set_result(frame))
    outbox.send(peer, Ping(99))

    assert (counts.peers, counts.waiting, counts.dropped) == (0, 0, 9)
    async with asyncio.timeout(LIMIT_S):
        assert await arrived == Ping(99)
    inbox.close()
    await outbox.close(0)


async def test_frames_wait_for_a_peer_that_comes_later(context: Any, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/bob"
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=5))
    for nonce in range(100):
        outbox.send(Peer("bob", 1, endpoint), Ping(nonce))
    nonces: list[int] = []
    complete = asyncio.Event()

    def deliver(_: Sender, frame: Any) -> None:
        nonces.append(frame.nonce)
        if len(nonces) == 100:
            complete.set()

    inbox = Inbox(context, endpoint, deliver)

    async with asyncio.timeout(LIMIT_S):
        await complete.wait()
    assert nonces == list(range(100))
    inbox.close()
    await outbox.close(0)


async def test_lent_memory_lives_until_it_is_sent(context: Any, tmp_path: Path) -> None:
    """The sender may drop its array at once; the bytes that arrive are still the right ones."""
    endpoint = f"ipc://{tmp_path}/bob"
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(send_hwm=2))
    peer = Peer("bob", 1, endpoint)
    for i in range(20):
        outbox.send(peer, Chunk("r", 0, i, Media("x/y", Blob(bytearray([i]) * 100_000))))
    chunks: list[Any] = []
    complete = asyncio.Event()

    def deliver(_: Sender, frame: Any) -> None:
        chunks.append(frame)
        if len(chunks) == 20:
            complete.set()

    inbox = Inbox(context, endpoint, deliver)

    async with asyncio.timeout(LIMIT_S):
        await complete.wait()
    assert [chunk.seq for chunk in chunks] == list(range(20))
    assert all(bytes(chunk.payload.data.view) == bytes([chunk.seq]) * 100_000 for chunk in chunks)
    inbox.close()
    await outbox.close(0)


async def test_blob_over_the_limit_is_refused_at_the_sender(context: Any, tmp_path: Path) -> None:
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck, limits=SocketLimits(max_message_bytes=1000))

    with pytest.raises(InputTooLarge, match=r"1001 bytes.*allowed: 1000"):
        outbox.send(Peer("bob", 1, f"ipc://{tmp_path}/b"), Chunk("r", 0, 0, Media("x/y", Blob(bytes(1001)))))

    await outbox.close(0)


async def test_frame_without_a_form_on_the_wire_is_refused(context: Any, tmp_path: Path) -> None:
    outbox = Outbox(context, ANN, on_stuck=refuse_stuck)

    with pytest.raises(BadFrame, match="can't be encoded"):
        outbox.send(Peer("bob", 1, f"ipc://{tmp_path}/b"), Ping(2**64))

    await outbox.close(0)


async def test_name_too_long_for_a_routing_id_is_refused(context: Any) -> None:
    with pytest.raises(BadInput, match="200 bytes"):
        Outbox(context, Sender("a" * 201, 1), on_stuck=refuse_stuck)
