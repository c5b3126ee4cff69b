"""A server of models that says what a test tells it to, for what none of ours says yet."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

DONE = "[DONE]"


class Scripted:
    """Answers each request with the events that a function of its body returns.

    Args:
        script: from a body to the events, JSON documents or text; or to a response.
        tokenize: from a text to its number of tokens; None has no such route.
    """

    def __init__(
        self,
        script: Callable[[dict[str, Any]], Sequence[Any] | web.Response],
        tokenize: Callable[[str], int] | None = None,
        models: Sequence[str] = ("m",),
    ) -> None:
        self._script = script
        self._tokenize = tokenize
        self._models = models
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; yields the address."""
        app = web.Application()
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        if self._tokenize is not None:
            app.router.add_post("/tokenize", self._count)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    async def _get_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self._models]})

    async def _count(self, request: web.Request) -> web.Response:
        assert self._tokenize is not None
        return web.json_response({"count": self._tokenize((await request.json())["prompt"])})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        told = self._script(body)
        if isinstance(told, web.Response):
            return told
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in told:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        return response


def completion(text: str, **top: Any) -> dict[str, Any]:
    """Return a chunk of a plain completion."""
    return {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": text}], **top}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the chunk after the last one."""
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}
