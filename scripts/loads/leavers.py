"""Clients that break their connection at any moment: before the head of the answer, in the middle of it, unread."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from loads.chats import CHAT

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable


async def leave_once(
    port: int, dice: random.Random, *, wait: Callable[[], Awaitable[None]], may_read: Callable[[], bool]
) -> None:
    """Send a request, streamed or not, whole or half; wait; read some of the answer, or none; break the connection.

    Args:
        port: of a gateway on 127.0.0.1.
        dice: decides.
        wait: lets the deployment have a moment.
        may_read: whether there is, or will be, something to read.
    """
    is_streamed = dice.random() < 0.7
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "stream": is_streamed}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost:\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    is_whole = dice.random() < 2 / 3
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + (body if is_whole else body[: len(body) // 2]))
        await wait()
        if is_whole and is_streamed and dice.random() < 0.5 and may_read():
            await reader.read(dice.randrange(1, 20_000))
    finally:
        writer.transport.abort()
