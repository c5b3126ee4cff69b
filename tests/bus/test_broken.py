"""What an outbox tells of TCP connections that break while both ends live."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from omni_bus.bus.curve import Curve, make_deployment_keys
from omni_bus.bus.link import Link
from omni_bus.ids import Peer
from omni_bus.wire.frames import Ping
from tests.bus.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

LIMIT_S = 30


class End:
    """A link that collects what comes, and the peers to whom its connections broke."""

    def __init__(self, name: str, listen: str, curve: Curve | None) -> None:
        self.nonces: list[int] = []
        self.broken: list[Peer] = []
        self._changed = asyncio.Event()
        self.unreachable: list[Peer] = []
        self.link = Link(
            name,
            listen,
            self._deliver,
            self._on_stuck,
            curve=curve,
            on_broken=self._on_broken,
            on_unreachable=self._on_unreachable,
        )

    def _deliver(self, _: Any, frame: Any) -> None:
        self.nonces.append(frame.nonce)
        self._changed.set()

    def _on_stuck(self, peer: Peer) -> None:
        raise AssertionError(f"{peer} is stuck")

    def _on_broken(self, peer: Peer) -> None:
        self.broken.append(peer)
        self._changed.set()

    def _on_unreachable(self, peer: Peer) -> None:
        self.unreachable.append(peer)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture(params=["plain", "curve"])
def curve(request: pytest.FixtureRequest, tmp_path: Path) -> Curve | None:
    if request.param == "plain":
        return None
    make_deployment_keys(tmp_path / "keys", may_replace=False)
    return Curve(tmp_path / "keys")


@pytest.fixture
async def ann(curve: Curve | None) -> AsyncIterator[End]:
    end = End("ann.0", "tcp://127.0.0.1:0", curve)
    yield end
    await end.link.close(0)


@pytest.fixture
async def bob(curve: Curve | None) -> AsyncIterator[End]:
    end = End("bob.0", "tcp://127.0.0.1:0", curve)
    yield end
    await end.link.close(0)


@pytest.fixture
async def proxy(bob: End) -> AsyncIterator[Proxy]:
    proxy = Proxy(bob.link.me.endpoint)
    await proxy.start()
    yield proxy
    await proxy.close()


def behind(proxy: Proxy, bob: End) -> Peer:
    return Peer("bob.0", bob.link.me.incarnation, proxy.endpoint)


async def test_a_break_is_told_once_and_later_frames_arrive(ann: End, bob: End, proxy: Proxy) -> None:
    peer = behind(proxy, bob)
    ann.link.send(peer, Ping(1))
    await bob.until(lambda: bob.nonces == [1])

    proxy.hold()
    ann.link.send(peer, Ping(2))
    proxy.cut()
    await ann.until(lambda: ann.broken == [peer])
    ann.link.send(peer, Ping(3))
    await bob.until(lambda: 3 in bob.nonces)

    assert bob.nonces == [1, 3]
    assert ann.broken == [peer]
    assert bob.broken == []


async def test_each_break_is_told(ann: End, bob: End, proxy: Proxy) -> None:
    peer = behind(proxy, bob)
    for number in range(3):
        ann.link.send(peer, Ping(number))
        await bob.until(lambda number=number: number in bob.nonces)
        proxy.cut()
        await ann.until(lambda number=number: len(ann.broken) == number + 1)

    assert ann.broken == [peer] * 3


async def test_a_connection_that_was_never_made_does_not_break(ann: End, bob: End, proxy: Proxy) -> None:
    """Nothing left through it, so nothing is lost: the frames wait until there is one."""
    peer = behind(proxy, bob)
    proxy.cut(may_return=False)
    ann.link.send(peer, Ping(1))
    await proxy.accepted()
    proxy.cut(may_return=False)
    await proxy.heal()

    await bob.until(lambda: bob.nonces == [1])
    assert ann.broken == []


async def test_a_peer_that_listens_late_is_no_break(ann: End, curve: Curve | None) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    ann.link.send(Peer("bob.0", 1, endpoint), Ping(1))

    bob = End("bob.0", endpoint, curve)
    await bob.until(lambda: bob.nonces == [1])

    assert ann.broken == []
    await bob.link.close(0)


async def test_a_peer_that_can_not_be_reached_is_told_again_and_again_until_it_can(
    ann: End, bob: End, proxy: Proxy
) -> None:
    peer = behind(proxy, bob)
    await proxy.refuse()
    ann.link.send(peer, Ping(1))

    await ann.until(lambda: len(ann.unreachable) == 2)
    assert set(ann.unreachable) == {peer}
    assert ann.broken == []
    await proxy.heal()
    await bob.until(lambda: bob.nonces == [1])
    num_told = len(ann.unreachable)
    ann.link.send(peer, Ping(2))
    await bob.until(lambda: bob.nonces == [1, 2])
    assert len(ann.unreachable) == num_told


async def test_a_peer_that_leaves_and_is_forgotten_is_told_of_no_more(ann: End, bob: End, proxy: Proxy) -> None:
    peer = behind(proxy, bob)
    ann.link.send(peer, Ping(1))
    await bob.until(lambda: bob.nonces == [1])

    ann.link.forget(peer)
    proxy.cut()
    ann.link.send(peer, Ping(2))
    await bob.until(lambda: 2 in bob.nonces)

    assert ann.broken == []


async def test_watched_lanes_leave_no_socket_behind(ann: End, bob: End, proxy: Proxy) -> None:
    """Terminating the context waits for every socket, so a monitor that stays open would hang this."""
    peer = behind(proxy, bob)
    for _ in range(20):
        ann.link.send(peer, Ping(1))
        ann.link.forget(peer)
    ann.link.send(peer, Ping(2))

    async with asyncio.timeout(LIMIT_S):
        await ann.link.close(1)

    assert ann.link._context.closed


@pytest.mark.parametrize("curve", ["plain"], indirect=True)
async def test_a_lane_over_ipc_is_not_watched(ann: End, tmp_path: Path) -> None:
    """The kernel keeps what a Unix socket has taken; only the end of its process breaks it."""
    bob = End("bob.0", f"ipc://{tmp_path}/bob", None)
    ann.link.send(bob.link.me, Ping(1))
    await bob.until(lambda: bob.nonces == [1])

    assert [lane.monitor for lane in ann.link._outbox._all_lanes()] == [None]
    assert bob.link._context.get(zmq.MAX_SOCKETS) > 8000
    await bob.link.close(0)
    assert ann.broken == []
