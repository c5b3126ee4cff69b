"""A constant stream of chat requests over HTTP, each of which must be answered, and answered right."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CHAT = "/v1/chat/completions"


class Load:
    """Workers that each ask one request after the other; the first wrong or missing answer fails all."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = False
        self.num_done = 0
        self.failures: list[str] = []
        self._moved = asyncio.Event()

    async def worker(self, name: str, model: str, *, tokens: int, is_streamed: bool, keeps_connection: bool) -> None:
        """Ask until it is over; every answer names its question."""
        async with contextlib.AsyncExitStack() as stack:
            session: aiohttp.ClientSession | None = None
            number = 0
            while not self._is_over and not self.failures:
                marker = f"{name}-{number}"
                number += 1
                if session is None or not keeps_connection:
                    connector = aiohttp.TCPConnector(force_close=not keeps_connection)
                    session = await stack.enter_async_context(aiohttp.ClientSession(self._url, connector=connector))
                body: dict[str, Any] = {
                    "model": model,
                    "messages": [{"role": "user", "content": marker}],
                    "max_tokens": tokens,
                    "stream": is_streamed,
                }
                wanted = " ".join(f"{marker}:{i}" for i in range(tokens))
                try:
                    got = await answer(session, body)
                except (aiohttp.ClientError, AssertionError) as error:
                    got = repr(error)
                if got != wanted:
                    self.failures.append(f"{marker} of {model}: {got[:300]}")
                self.num_done += 1
                self._moved.set()
                if not keeps_connection:
                    await session.close()

    async def more(self, count: int) -> None:
        """Wait until so many more requests are answered; the first failure ends the wait."""
        until = self.num_done + count
        while self.num_done < until and not self.failures:
            self._moved.clear()
            await self._moved.wait()
        assert self.failures == []

    def end(self) -> None:
        """Have the workers finish what they are at."""
        self._is_over = True


async def answer(session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    """Return the answer's text; whatever is no complete answer raises."""
    async with session.post(CHAT, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    if not body["stream"]:
        return json.loads(text)["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]", text[-300:]
    deltas = [json.loads(event) for event in events[:-1]]
    assert not any("error" in delta for delta in deltas), text[-300:]
    return "".join(delta["choices"][0]["delta"].get("content") or "" for delta in deltas if delta["choices"])


@contextlib.asynccontextmanager
async def load(url: str, models: tuple[str, ...], *, tokens: int = 12) -> AsyncGenerator[Load]:
    """Keep requests of each kind under way inside; none of them may fail."""
    made = Load(url)
    kinds = [(is_streamed, keeps) for is_streamed in (False, True) for keeps in (False, True)]
    async with asyncio.TaskGroup() as workers:
        for model in models:
            for is_streamed, keeps_connection in kinds:
                name = f"{model}{'s' if is_streamed else 'w'}{'k' if keeps_connection else 'f'}"
                run = made.worker(
                    name, model, tokens=tokens, is_streamed=is_streamed, keeps_connection=keeps_connection
                )
                workers.create_task(run)
        try:
            await made.more(2 * len(models))
            yield made
        finally:
            made.end()
    assert made.failures == []


async def until_healthy(session: aiohttp.ClientSession) -> None:
    """Ask until all is served."""
    while True:
        async with session.get("/health") as response:
            if response.status == 200:
                return
