"""A gateway that is killed in the middle of an answer: its successor goes on, without a lost or doubled event."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import websockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from processes.conftest import Up  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.processes

TOML = (
    (Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml")
    .read_text()
    .replace("port = 8000", "port = 0")
    .replace('chat = "voice"', 'chat = "voice"\noutput_lead_ms = 200')
    .replace("samples_per_character = 480", "samples_per_character = 48")
)


async def hear(socket: websockets.ClientConnection, frames: list[dict[str, Any]], kind: str) -> None:
    """Take frames until one of that kind came."""
    while not frames or frames[-1]["type"] != kind:
        frames.append(json.loads(await socket.recv()))


async def test_killed_gateway_is_succeeded(up: Callable[..., Up]) -> None:
    deployment = up(TOML)
    ready = await deployment.told("ready")
    url = ready["gateways"]["openai"].replace("http", "ws") + "/v1/realtime?duplex=1"
    first: list[dict[str, Any]] = []
    async with websockets.connect(f"{url}&model=synthetic-sessions") as socket:
        await hear(socket, first, "session.created")
        await socket.send(json.dumps({"type": "input.text.append", "text": "Hello"}))
        await socket.send(json.dumps({"type": "response.create"}))
        for _ in range(3):
            await hear(socket, first, "response.output_audio.delta")
            first.append(json.loads(await socket.recv()))
        os.kill(deployment.pid_of("gateway.openai.0"), signal.SIGKILL)
        with pytest.raises(websockets.ConnectionClosedError):
            await hear(socket, first, "response.done")
    await deployment.told("process", process="gateway.openai.0", phase="ready", restarts=1)
    seq = max(frame.get("server_event_seq", 0) for frame in first)

    second: list[dict[str, Any]] = []
    async with websockets.connect(f"{url}&autostart=0") as socket:
        resume = {"session_id": first[0]["session"]["id"], "resume_token": first[0]["resume_token"]}
        await socket.send(json.dumps({"type": "session.resume", "last_received_server_event_seq": seq} | resume))
        await hear(socket, second, "response.done")
        await socket.send(json.dumps({"type": "session.close"}))
        await hear(socket, second, "session.closed")

    assert second[0]["type"] == "session.resumed"
    frames = [frame for frame in first + second if "server_event_seq" in frame]
    assert [frame["server_event_seq"] for frame in frames] == list(range(1, len(frames) + 1))
    assert len({frame["event_id"] for frame in frames}) == len(frames)
    assert await asyncio.to_thread(deployment.stop) == 0
