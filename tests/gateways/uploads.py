"""Forms written by hand, and a deployment that takes them.

Import as ``from uploads import …`` in a test that puts this folder on the path.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

    from actors.testing import Running

FILES = "/v1/files"


TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
{gateway}
"""


HEAD = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=abc\r\n"


def files_deployment(gateway: str = "") -> str:
    return TOML.format(gateway=gateway)


def folder_of(deployment: Running) -> Path:
    return Path(deployment.deployment.state_dir) / "gateways" / "openai" / "files"


def names(deployment: Running) -> list[str]:
    """Endings of what is kept, and of what is under way."""
    if not folder_of(deployment).exists():
        return []
    return sorted(path.name.partition(".")[2] for path in folder_of(deployment).iterdir() if path.name != ".lock")


def field(name: str, value: str | bytes, *, filename: str | None = None, more: str = "") -> bytes:
    data = value.encode() if isinstance(value, str) else value
    label = "" if filename is None else f'; filename="{filename}"'
    return f'--abc\r\nContent-Disposition: form-data; name="{name}"{label}\r\n{more}\r\n'.encode() + data + b"\r\n"


PURPOSE = field("purpose", "user_data")


A_FILE = field("file", b"hello", filename="a.txt")


END = b"--abc--\r\n"


async def post(session: aiohttp.ClientSession, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    sent = {"Content-Type": "multipart/form-data; boundary=abc"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with session.post(FILES, data=body, headers=sent) as response:
        return response.status, await response.json()


async def put(session: aiohttp.ClientSession, data: bytes = b"hello") -> str:
    status, document = await post(session, io.BytesIO(PURPOSE + field("file", data, filename="a.txt") + END))
    assert status == 200, document
    return document["id"]


async def exchange(port: int, sent: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes and return the answer; the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        raw = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, rest = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


async def turn(session: aiohttp.ClientSession) -> None:
    """Let the gateway's loop go round."""
    async with session.get("/version"):
        pass
