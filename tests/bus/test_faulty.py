"""Each fault does to messages what it says, to its own link only, and no longer than it lasts."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from omni_bus.bus.faulty import Fault, Faults, FaultyLink, Shares, damage
from omni_bus.errors import BadFrame
from omni_bus.ids import Peer, Sender
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import Admit, Chunk, Goodbye, Hello, Ping, Route, RouteEdge
from omni_bus.wire.payloads import Blob, Media, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LIMIT_S = 30
NUM_FRAMES = 200


class End:
    """A link that notes what comes; a `Goodbye` is always the last."""

    def __init__(self, name: str, folder: Path) -> None:
        self.came: list[Any] = []
        self._ended = asyncio.Event()
        self.link = FaultyLink(name, f"ipc://{folder}/{name}", self._deliver, self._stuck)

    async def until_goodbye(self) -> list[Any]:
        """Return what came before the `Goodbye`."""
        async with asyncio.timeout(LIMIT_S):
            await self._ended.wait()
        return self.came

    def _deliver(self, sender: Sender, frame: Any) -> None:
        if isinstance(frame, Goodbye):
            self._ended.set()
        else:
            self.came.append(frame.nonce if isinstance(frame, Ping) else frame)

    def _stuck(self, peer: Peer) -> None:
        raise AssertionError(f"{peer} is stuck")


class Ends:
    """Two links that suffer the same faults."""

    def __init__(self, faults: Faults, folder: Path) -> None:
        self.faults = faults
        self.ann, self.bob = End("ann.0", folder), End("bob.0", folder)

    def send(self, first: int = 0) -> None:
        """Send numbers from Ann to Bob."""
        for number in range(first, first + NUM_FRAMES):
            self.ann.link.send(self.bob.link.me, Ping(number))

    async def come_through(self) -> list[Any]:
        """End all faults once all came to the receiver's socket; return what it took."""
        await self.faults.until_came("ann.0", "bob.0", NUM_FRAMES)
        self.faults.heal()
        self.ann.link.send(self.bob.link.me, Goodbye())
        return await self.bob.until_goodbye()


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    with Faults(seed=3).installed() as faults:
        ends = Ends(faults, tmp_path)
    yield ends
    await ends.ann.link.close(0)
    await ends.bob.link.close(0)


async def test_without_faults_everything_comes_in_order(ends: Ends) -> None:
    ends.send()

    assert await ends.come_through() == list(range(NUM_FRAMES))
    assert ends.faults.counts.total() == 0


async def test_dropped_messages_are_lost_and_others_keep_their_order(ends: Ends) -> None:
    ends.faults.set("ann.*", "bob.0", Shares(drop=0.3))
    ends.send()

    came = await ends.come_through()

    assert came == sorted(set(came))
    assert len(came) == NUM_FRAMES - ends.faults.counts[Fault.DROP] < NUM_FRAMES


async def test_doubled_messages_come_twice_in_a_row(ends: Ends) -> None:
    ends.faults.set("*", "*", Shares(duplicate=0.3))
    ends.send()

    came = await ends.come_through()

    assert came == sorted(came)
    assert set(came) == set(range(NUM_FRAMES))
    assert len(came) == NUM_FRAMES + ends.faults.counts[Fault.DUPLICATE] > NUM_FRAMES


async def test_late_messages_hold_up_their_own_link_only(ends: Ends) -> None:
    ends.faults.set("ann.0", "bob.0", Shares(delay=0.1, delay_s=3600))
    ends.send()
    ends.bob.link.send(ends.ann.link.me, Goodbye())

    await ends.ann.until_goodbye()
    await ends.faults.until_struck()
    assert len(ends.bob.came) < NUM_FRAMES
    assert await ends.come_through() == list(range(NUM_FRAMES))


async def test_late_messages_come_by_themselves(ends: Ends) -> None:
    ends.faults.set("ann.0", "bob.0", Shares(delay=0.5, delay_s=0.001))
    ends.send()
    ends.ann.link.send(ends.bob.link.me, Goodbye())

    assert await ends.bob.until_goodbye() == list(range(NUM_FRAMES))
    assert ends.faults.counts[Fault.DELAY] > 0


@pytest.mark.parametrize("holds", [False, True])
async def test_partition_lasts_until_it_heals(ends: Ends, *, holds: bool) -> None:
    ends.faults.partition("ann.0", "*", holds=holds)
    ends.send()
    await ends.faults.until_struck(NUM_FRAMES)
    assert ends.bob.came == []

    assert await ends.come_through() == (list(range(NUM_FRAMES)) if holds else [])


async def test_damaged_messages_are_refused_by_the_codec(ends: Ends) -> None:
    ends.faults.set("ann.0", "bob.0", Shares(corrupt=0.5))
    ends.send()

    came = await ends.come_through()

    bad = ends.bob.link.statistics().inbox.bad
    assert bad == ends.faults.counts[Fault.CORRUPT] > 0
    assert len(came) == NUM_FRAMES - bad


async def test_links_without_installed_faults_suffer_none(ends: Ends, tmp_path: Path) -> None:
    ends.faults.partition("*", "*")
    cat = End("cat.0", tmp_path)

    ends.ann.link.send(cat.link.me, Goodbye())
    await cat.until_goodbye()

    await cat.link.close(0)


EDGES = (RouteEdge("in", "prompt", "llm", "prompt", "text", 1, 4096),)
ROUTE = Route("r", "p", Peer("gateway", 1, "ipc://g"), {"llm": Peer("llm.0", 2, "ipc://l")}, EDGES)


@pytest.mark.parametrize(
    "frame",
    [
        Ping(3),
        Admit(ROUTE),
        Chunk("r", 0, 1, Text("word")),
        Chunk("r", 0, 1, Media("image/png", Blob(b"\x89PNG" * 99))),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_damage_is_noticed_or_makes_another_frame(frame: Any) -> None:
    codec, dice = Codec(), Random(5)
    parts: list[Any] = codec.encode(frame)
    sent = [bytes(part) for part in parts]
    for _ in range(300):
        damaged = damage(parts, dice, codec, is_noticed=True)
        assert damaged is not None
        with pytest.raises(BadFrame):
            codec.decode(damaged)

        altered = damage(parts, dice, codec, is_noticed=False)
        assert altered is None or codec.decode(altered) != frame
    assert [bytes(part) for part in parts] == sent


def test_altered_frames_name_the_same_actors() -> None:
    codec, dice = Codec(), Random(5)
    hello = Hello(1, Peer("llm.0", 2, "ipc://l"), "stage", "llm", live=(ROUTE,))
    for _ in range(300):
        altered = damage(codec.encode(hello), dice, codec, is_noticed=False)  # pyright: ignore[reportArgumentType]
        if altered is not None:
            found: Any = codec.decode(altered)
            assert found.peer == hello.peer
            assert [list(route.stages.values()) for route in found.live] in ([], [[ROUTE.stages["llm"]]])
