"""The loop around a core: who may say what to which actor."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from omni_bus.errors import ErrorInfo, Unavailable
from omni_bus.ids import Peer, Sender
from omni_bus.runtime.driver import Driver
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import (
    CLIENT_FRAMES,
    STAGE_FRAMES,
    Admit,
    AnyFrame,
    Cancel,
    Close,
    Credit,
    Done,
    Failed,
    Goodbye,
    Hello,
    Introduce,
    Lost,
    Ready,
    Refused,
    Reject,
    Route,
    Submit,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ERROR = ErrorInfo("stage_failed", "boom")
SOMEBODY = Peer("voice.0", 7, "ipc:///nowhere")
ROUTE = Route("r", "chat", SOMEBODY, {"voice": SOMEBODY}, ())
COORDINATOR = Sender("coordinator", 1)
ORDERS: list[AnyFrame] = [
    Welcome(1, SOMEBODY, 0.001),
    Refused(ERROR),
    Introduce(),
    Lost(SOMEBODY),
    Cancel("r"),
    Admit(ROUTE),
    Reject("r", ERROR),
    Failed("r", ERROR),
]
"""What only a coordinator may say: each changes what an actor does."""

NOT_FOR_MEMBERS: list[AnyFrame] = [
    Hello(1, SOMEBODY, "stage"),
    Ready(),
    Goodbye(),
    Submit("r", "chat", ()),
    Done("r"),
]
LAST = Close("last", 0, 0)


class Listening:
    """A driver that remembers what it passes on, and a plain socket that claims to be whoever it likes."""

    def __init__(self, directory: Path, understands: frozenset[type]) -> None:
        self.heard: list[AnyFrame] = []
        self.has_last = asyncio.Event()
        self.driver = Driver(
            "llm.0",
            f"ipc://{directory}/llm.sock",
            on_frame=self._on_frame,
            on_timer=lambda key, now: None,
            understands=understands,
        )
        self._context: zmq.Context[Any] = zmq.Context()

    def _on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> None:
        del sender, now
        if frame == LAST:
            self.has_last.set()
        else:
            self.heard.append(frame)

    async def hears(self, sender: Sender, *frames: AnyFrame) -> list[AnyFrame]:
        """Send frames under a name and return those of them that were passed on."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, sender.encode())
        socket.connect(self.driver.me.endpoint)
        for frame in (*frames, LAST):
            socket.send_multipart([bytes(part) for part in Codec().encode(frame)])
        await self.has_last.wait()
        socket.close()
        return self.heard

    async def close(self) -> None:
        self._context.term()
        await self.driver.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="ob", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=[STAGE_FRAMES, CLIENT_FRAMES], ids=["stage", "client"])
async def listening(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Listening]:
    listening = Listening(directory, request.param)
    yield listening
    await listening.close()


async def test_orders_of_a_stranger_are_dropped(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    """One forged `Refused` would end the process, one `Lost` its requests."""
    with caplog.at_level(logging.WARNING):
        assert await listening.hears(Sender("voice.0", 7), *ORDERS, *ORDERS) == []

    assert listening.driver.num_refused == 2 * len(ORDERS)
    named = [record.fields["frame"] for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(named) == sorted(type(frame).__name__ for frame in ORDERS), "one line each"


async def test_orders_of_the_coordinator_are_passed_on(listening: Listening) -> None:
    understood = [frame for frame in ORDERS if type(frame) in listening.driver._understands]  # type: ignore[operator]

    assert await listening.hears(COORDINATOR, *ORDERS) == understood
    assert len(understood) >= 5


async def test_frames_for_others_are_dropped_whoever_sends_them(listening: Listening) -> None:
    assert await listening.hears(COORDINATOR, *NOT_FOR_MEMBERS) == []
    assert listening.driver.num_refused == len(NOT_FOR_MEMBERS)


async def test_data_of_anybody_is_passed_on(listening: Listening) -> None:
    """The request's route decides about it."""
    assert await listening.hears(Sender("voice.0", 7), Credit("r", 0, 1, 1)) == [Credit("r", 0, 1, 1)]


async def test_actor_that_the_coordinator_stopped_hearing_leaves(listening: Listening) -> None:
    """Its supervisor starts it anew; going on, it would be bound to nothing and never know."""
    listening.driver._stuck(SOMEBODY)
    assert not listening.driver.leaving.done(), "another peer's own trouble"

    listening.driver._stuck(Peer(COORDINATOR.actor, 0, "ipc:///nowhere"))

    assert isinstance(listening.driver.leaving.result(), Unavailable)
