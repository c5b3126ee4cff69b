"""A deployment whose models do all that the text routes can ask for, and speak, and how tests talk to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from actors.testing import Running

ABLE = """
[stages.llm]
adapter = "synthetic-text"
tokens = 4
max_prompt_tokens = 1000
[stages.mute]
adapter = "synthetic-text"
tokens = 4
[stages.speaker]
adapter = "synthetic-speech"
[pipelines.able]
serve_as = "able"
edges = [
  "in.messages -> llm.prompt",
  "in.images -> llm.images",
  "in.audio -> llm.audio",
  "in.video -> llm.video",
  "llm.text -> out.text",
  "llm.reasoning -> out.reasoning",
  "llm.tool_calls -> out.tool_calls",
  "llm.rendered -> out.rendered",
]
[pipelines.plain]
serve_as = "plain"
edges = ["in.messages -> mute.prompt", "mute.text -> out.text"]
[pipelines.vectors]
serve_as = "vectors"
edges = ["in.messages -> llm.prompt", "llm.embedding -> out.embedding"]
[stages.rain]
adapter = "synthetic-speech"
samples_per_character = 100
[pipelines.sound]
serve_as = "sound"
edges = ["in.prompt -> rain.text", "rain.audio -> out.audio"]
[pipelines.speaks]
serve_as = "speaks"
edges = ["in.text -> speaker.text", "speaker.audio -> out.audio"]
[gateways.openai]
"""
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
WORDS = "hi:0 hi:1 hi:2 hi:3"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


async def post(deployment: Running, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(deployment.url) as session,
        session.post(path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def chat(deployment: Running, **fields: Any) -> dict[str, Any]:
    status, answer = await post(deployment, CHAT, {"messages": HELLO} | fields)
    assert status == 200, answer
    return answer


async def stream(deployment: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ends well."""
    async with (
        aiohttp.ClientSession(deployment.url) as session,
        session.post(path, json=body | {"stream": True}) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    *events, done = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def chat_stream(deployment: Running, **fields: Any) -> list[dict[str, Any]]:
    return await stream(deployment, CHAT, {"messages": HELLO} | fields)


def deltas(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
