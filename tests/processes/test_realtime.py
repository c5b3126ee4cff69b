"""A gateway that is killed in the middle of an answer: its successor goes on, without a lost or doubled event."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_bus.client import ConnectionLost, connect_duplex, connect_realtime
from omni_bus.client.realtime_events import AudioDelta, ResponseDone, SessionResumed, SessionUpdated
from tests.client.test_duplex import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from processes.conftest import Up  # pyright: ignore[reportMissingImports]

    from omni_bus.core.session.server_events import ServerEvent

pytestmark = pytest.mark.processes

TOML = (
    (Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("port = 8000", "port = 0")
    .replace('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 200')
)


async def test_killed_gateway_is_succeeded(up: Callable[..., Up]) -> None:
    """The client comes back by itself, while nobody serves for a moment."""
    deployment = up(TOML)
    url = (await deployment.told("ready"))["gateways"]["openai"]
    async with connect_duplex(url, model="synthetic-sessions") as live, connect_realtime(url) as mortal:
        await live.until(SessionUpdated)
        first = live.last_event + 1
        events: list[ServerEvent] = []
        await live.ask("Hello")
        async for event in live.through(ResponseDone):
            events.append(event)
            num_sounds = len([event for event in events if isinstance(event, AudioDelta)])
            if isinstance(event, AudioDelta) and num_sounds in (3, 6):
                if num_sounds == 6:  # it serves already; now its process id is known as well
                    await deployment.told("process", process="gateway.openai.0", phase="ready", restarts=1)
                os.kill(deployment.pid_of("gateway.openai.0"), signal.SIGKILL)
        check_whole(events, first)
        with pytest.raises(ConnectionLost) as caught:
            await mortal.until(ResponseDone)
        assert caught.value.close_code == 1006
        assert len([event for event in events if isinstance(event, SessionResumed)]) == 2
    assert await asyncio.to_thread(deployment.stop) == 0
