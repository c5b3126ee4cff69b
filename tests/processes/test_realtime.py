"""A gateway that is killed in an answer, or restarted: its successor goes on, without a lost or doubled event."""

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
    import subprocess
    from collections.abc import Callable

    from processes.conftest import Up  # pyright: ignore[reportMissingImports]

    from omni_bus.core.session.server_events import ServerEvent

pytestmark = pytest.mark.processes

TOML = (
    (Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("port = 8000", "port = 0")
    .replace("tokens = 32", "tokens = 12")
    .replace('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 200')
)

TURN = b"\0\x20" * (24 * 600) + bytes(2 * 24 * 900)
"""Speech and a pause, at 24 kHz."""


async def test_gateway_that_is_killed_or_restarted_is_succeeded(
    up: Callable[..., Up], omni_bus: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
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
            if isinstance(event, AudioDelta) and len([e for e in events if isinstance(e, AudioDelta)]) == 3:
                os.kill(deployment.pid_of("gateway.openai.0"), signal.SIGKILL)
        check_whole(events, first)
        with pytest.raises(ConnectionLost) as caught:
            await mortal.until(ResponseDone)
        assert caught.value.close_code == 1006
        assert len([event for event in events if isinstance(event, SessionResumed)]) == 1

        # One that is asked to leave says so, which the caller does not hear of.
        restarting = asyncio.create_task(asyncio.to_thread(omni_bus, "restart", "gateway.openai"))
        await live.until(SessionResumed)
        first = live.last_event + 1
        await live.ask("Again")
        check_whole([event async for event in live.through(ResponseDone)], first)
        assert (await restarting).returncode == 0

        # The only detector of speech goes and comes back: what is said meanwhile waits for it.
        async with connect_realtime(url) as talking:
            await talking.append(TURN)
            await talking.until(ResponseDone)
            restarting = asyncio.create_task(asyncio.to_thread(omni_bus, "restart", "vad", "--timeout", "25"))
            await deployment.told("process", process="vad.0", phase="starting")
            await talking.append(TURN)
            await talking.until(ResponseDone)
            assert (await restarting).returncode == 0
            await talking.append(TURN)
            await talking.until(ResponseDone)
    assert await asyncio.to_thread(deployment.stop) == 0
