"""What no engine may see, on every route that takes JSON: refused as the caller's fault, in OpenAI's words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE, CHAT, HELLO, chat, post  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.problems import TYPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    "/v1/chat/completions/batch": {"messages": [HELLO]},
    "/v1/completions": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [int.from_bytes(b"\1hi")]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/audio/generate": {"input": "hi"},
    "/v1/audio/speech": {"input": "hi"},
    "/v1/audio/speech/batch": {"items": [{"input": "hi"}]},
}
"""Routes that take JSON, and a body that each of them answers."""

DEPTH = 10_000

BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"hello",
    "cut off": b'{"messages": [',
    "an array": b"[]",
    "a string": b'"hello"',
    "null": b"null",
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "invalid UTF-8 in a name": b'{"\xff": 1}',
    "deep arrays": b'{"messages": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    "deep objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
    "deep in a field that is passed on": b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": '
    + b'{"a":' * DEPTH
    + b"1"
    + b"}" * DEPTH
    + b"}",
    "a long number": b'{"seed": ' + b"9" * 5000 + b"}",
    "not a number": b'{"temperature": NaN}',
    "twice the same end": b'{"messages": []}}',
    "an unknown field": b'{"nonsense": 1}',
    "a very long unknown field": b'{"' + b"x" * 100_000 + b'": 1}',
    "empty": b"{}",
    "an unknown model": b'{"model": "nope"}',
}


@pytest.fixture
async def able() -> AsyncIterator[Running]:
    async with running(ABLE) as deployment:
        yield deployment


def check(status: int, document: Any) -> None:
    error = document["error"]
    assert 400 <= status < 500
    assert error["code"] == status
    assert error["type"] == TYPES[status]
    assert error["message"]
    assert len(error["message"]) <= 2100
    assert "Traceback" not in error["message"]
    assert set(error) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", GOOD)
async def test_broken_bodies_are_refused_and_the_next_request_is_served(able: Running, path: str) -> None:
    async with aiohttp.ClientSession(able.url) as session:
        for body in BODIES.values():
            async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                check(response.status, json.loads(await response.read()))
        stats = able.stages["llm.0"].stats
        assert (stats.done, stats.failed, stats.active, stats.waiting) == (0, 0, 0, 0)
        async with session.post(path, json=GOOD[path]) as response:
            assert response.status == 200


@pytest.mark.parametrize("path", GOOD)
async def test_other_media_types_are_refused(able: Running, path: str) -> None:
    async with aiohttp.ClientSession(able.url) as session:
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
            async with session.post(path, data=b"{}", headers={"Content-Type": kind}) as response:
                check(response.status, await response.json())
        async with session.get(path) as response:
            assert response.status == 405


@pytest.mark.parametrize("path", GOOD)
async def test_every_field_of_every_route_bears_any_value(able: Running, path: str) -> None:
    """A field of any other type or size is refused, or taken; the server does not fail."""
    async with aiohttp.ClientSession(able.url) as session:
        async with session.get("/openapi.json") as response:
            document = await response.json()
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        names = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
        assert len(names) > 1
        # Bounds of lengths are left alone: so many tokens would be made.
        strange = [[], {}, "", "x" * 10_000, "\ud800", -1, 0.5, 2**63, -(2**70), [[]], [None], {"a": {"b": []}}, False]
        for name in names:
            for value in strange:
                async with session.post(path, json=GOOD[path] | {name: value}) as response:
                    assert response.status < 500, (name, value, await response.text())
                    if response.status >= 400:
                        check(response.status, await response.json())


@pytest.mark.parametrize("stream", [False, True])
async def test_limits_of_the_model_are_told_before_an_answer_begins(able: Running, *, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * 1001}]
    status, document = await post(able, CHAT, {"messages": messages, "stream": stream})

    check(status, document)
    assert document["error"]["param"] == "messages"
    assert "(allowed: 1000)" in document["error"]["message"]


async def test_refusals_of_the_stage_come_under_the_bodys_names(able: Running) -> None:
    for fields, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"documents": [{"a": 1}]}, "documents"),
        ({"continue_final_message": True}, "continue_final_message"),
    ):
        status, document = await post(able, CHAT, {"messages": HELLO} | fields)
        assert (status, document["error"]["param"]) == (400, param), document
        assert document["error"]["message"].startswith(f"{param}: ")


async def test_load_counts_what_is_under_way(able: Running) -> None:
    async with aiohttp.ClientSession(able.url) as session:

        async def load() -> Any:
            async with session.get("/load") as response:
                assert response.status == 200
                return await response.json()

        assert await load() == {"server_load": 0}
        endless = {"messages": HELLO, "n": 3, "stream": True, "sampling_params_list": [{"tokens": 1_000_000}]}
        async with session.post(CHAT, json=endless) as response:
            for _ in range(20):  # lines: by then each of them has spoken
                await response.content.readline()
            while (await load())["server_load"] < 3:
                pass
    assert (await chat(able))["choices"]
