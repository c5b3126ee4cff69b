"""Clients of live conversations, and a deployment whose ears, models and voice are synthetic."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import websockets
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from actors.testing import running
from omni_bus.client.realtime_events import EVENTS, Unknown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from actors.testing import Running

CONFIG = Path(__file__).parents[2] / "configs" / "synthetic_sessions.toml"
TOML = CONFIG.read_text().replace("tokens = 32", "tokens = 3").replace("port = 8000", "port = 0")
LIMIT_S = 60
GA = TypeAdapter[Any](RealtimeServerEvent)
LOUD, QUIET = b"\0\x20", b"\0\0"

VENDOR = ("response.speak", "response.listen", "overlap.decision", "playback.acknowledged", "turn.event")


@asynccontextmanager
async def deployed(*changes: tuple[str, str]) -> AsyncIterator[Running]:
    """Run the deployment with some of its text replaced."""
    toml = TOML
    for former, new in changes:
        assert former in toml
        toml = toml.replace(former, new)
    async with asyncio.timeout(LIMIT_S), running(toml) as deployment:
        await deployment.until_ready()
        yield deployment


class Client:
    """A WebSocket that speaks JSON, and all that came over it."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket
        self.frames: list[dict[str, Any]] = []

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind} | fields))

    async def hear(self) -> dict[str, Any]:
        frame = json.loads(await self.socket.recv())
        self.frames.append(frame)
        return frame

    async def until(self, *kinds: str) -> dict[str, Any]:
        while (frame := await self.hear())["type"] not in kinds:
            assert frame["type"] != "error", frame
        return frame

    async def error(self) -> dict[str, Any]:
        """Return the next error."""
        while (frame := await self.hear())["type"] != "error":
            pass
        return frame

    async def end(self) -> tuple[int, str]:
        """Read to the end; return the close code and its reason."""
        try:
            while True:
                await self.hear()
        except websockets.ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code, closed.rcvd.reason

    async def ask(self, text: str, **response: Any) -> None:
        """Say something in writing and ask for an answer."""
        part = {"type": "input_text", "text": text}
        await self.say("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
        await self.say("response.create", response=response)

    async def speak(self, sample: bytes, num_ms: int, rate_hz: int = 24_000) -> None:
        piece = base64.b64encode(sample * (rate_hz // 10)).decode()
        for _ in range(0, num_ms, 100):
            await self.say("input_audio_buffer.append", audio=piece)

    def kinds(self, start: int = 0) -> list[str]:
        return [frame["type"] for frame in self.frames[start:]]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] in kinds]

    def text(self, kind: str = "response.output_audio_transcript.delta") -> str:
        return "".join(frame["delta"] for frame in self.of(kind))

    def sound(self, kind: str = "response.output_audio.delta", field: str = "delta") -> bytes:
        return b"".join(base64.b64decode(frame[field]) for frame in self.of(kind))


@asynccontextmanager
async def connected(deployment: Running, path: str = "/v1/realtime", **options: Any) -> AsyncIterator[Client]:
    url = deployment.url.replace("http", "ws") + path
    async with websockets.connect(url, max_size=None, compression=None, **options) as socket:
        client = Client(socket)
        yield client
    if "duplex=1" in path:  # the native lifecycle of /v1/duplex is another vocabulary
        check_typed(client.frames)


def check_typed(frames: list[dict[str, Any]]) -> None:
    """Check that our own client has a type for each frame."""
    for frame in frames:
        event = EVENTS.decode(json.dumps(frame))
        if isinstance(event, Unknown):  # names of OpenAI's beta are not among them
            assert event.kind not in EVENTS.kinds, (event.problem, frame)


def check_ga(frames: list[dict[str, Any]]) -> None:
    """Check frames against the types of OpenAI's client, and that their names are unique."""
    for frame in frames:
        parsed = GA.validate_python(frame)
        assert parsed.type == frame["type"]
        assert frame["type"] in str(type(parsed).model_fields["type"].annotation), frame
    check_typed(frames)
    names = [frame["event_id"] for frame in frames]
    assert len(set(names)) == len(names)
