"""The document that the gateway serves of itself: every route, true schemas, and Schemathesis' judgement."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from able import ABLE  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways import speech_stream
from gateways.http import OPEN
from gateways.openai import operations
from gateways.openai_answers import (
    ChatCompletion,
    ChatCompletionChunk,
    File,
    FileDeleted,
    FileList,
    Health,
    Model,
    ModelList,
    Version,
)
from gateways.openapi import Answer, Error, Operation, document
from gateways.realtime.route import PATHS
from gateways.robot import route as robots
from gateways.videos import live
from loads.fuzz import schemathesis

SPOKEN = """
[stages.llm]
adapter = "synthetic-text"
tokens = 3
[stages.voice]
adapter = "synthetic-speech"
[pipelines.chat]
serve_as = "org/spoken"
aliases = ["also-spoken"]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.text -> voice.text", "voice.audio -> out.audio"]
timeout_s = 20.0
[gateways.openai]
{gateway}
"""
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def get(deployment: Running, path: str) -> bytes:
    async with aiohttp.ClientSession(deployment.url) as session, session.get(path) as response:
        return await response.read()


async def post(deployment: Running, **fields: Any) -> bytes:
    async with aiohttp.ClientSession(deployment.url) as session, session.post(CHAT, json=BODY | fields) as response:
        return await response.read()


async def test_every_route_is_described_and_nothing_else() -> None:
    """Whoever adds a route describes it in `gateways.openai.operations`."""
    async with running(SPOKEN.format(gateway="")) as deployment:
        routes = list(deployment.gateway.gateway.app().router.routes())
        found = msgspec.json.decode(await get(deployment, "/openapi.json"))

    served = {(route.method.lower(), route.resource.canonical) for route in routes if route.resource is not None}
    served -= {("head", path) for _, path in served}  # aiohttp's, for each get
    served -= {("*", "/ping")}  # a handler that refuses some
    sockets = (speech_stream.PATH, robots.PATH, live.PATH, *PATHS)
    served -= {("get", path) for path in sockets}
    served |= {("get", "/ping"), ("head", "/ping"), ("post", "/ping")}
    assert {(method, path) for path, methods in found["paths"].items() for method in methods} == served
    assert len({operation.name for operation in operations()}) == len(operations())


async def test_answers_are_what_the_document_says() -> None:
    async with running(SPOKEN.format(gateway="")) as deployment:
        msgspec.json.decode(await get(deployment, "/version"), type=Version)
        msgspec.json.decode(await get(deployment, "/health"), type=Health)
        msgspec.json.decode(await get(deployment, "/v1/models"), type=ModelList)
        msgspec.json.decode(await get(deployment, "/v1/models/org/spoken"), type=Model)
        msgspec.json.decode(await get(deployment, "/v1/models/another"), type=Error)
        whole = msgspec.json.decode(await post(deployment), type=ChatCompletion)
        msgspec.json.decode(await post(deployment, modalities=["text"]), type=ChatCompletion)
        events = (await post(deployment, stream=True, stream_options={"include_usage": True})).split(b"\n\n")

    assert whole.choices[0].message.audio is not None
    chunks = [event.removeprefix(b"data: ") for event in events if event]
    assert chunks.pop() == b"[DONE]"
    for chunk in chunks:
        msgspec.json.decode(chunk, type=ChatCompletionChunk)


async def test_answers_about_files_are_what_the_document_says() -> None:
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", b"hello", filename="a.txt")
    async with running(SPOKEN.format(gateway="")) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.post("/v1/files", data=form) as response:
            made = msgspec.json.decode(await response.read(), type=File)
        msgspec.json.decode(await get(deployment, "/v1/files?limit=1&order=asc"), type=FileList)
        msgspec.json.decode(await get(deployment, f"/v1/files/{made.id}"), type=File)
        async with session.delete(f"/v1/files/{made.id}") as response:
            msgspec.json.decode(await response.read(), type=FileDeleted)
        msgspec.json.decode(await get(deployment, f"/v1/files/{made.id}"), type=Error)


async def test_sound_in_its_own_field_is_described_too() -> None:
    async with running(SPOKEN.format(gateway='audio_delta = "audio"')) as deployment:
        events = (await post(deployment, stream=True)).split(b"\n\n")

    for event in events[:-2]:
        msgspec.json.decode(event.removeprefix(b"data: "), type=ChatCompletionChunk)


async def test_keys_are_declared_where_they_are_wanted() -> None:
    async with running(SPOKEN.format(gateway='api_keys = ["secret"]')) as deployment:
        found = msgspec.json.decode(await get(deployment, "/openapi.json"))
    async with running(SPOKEN.format(gateway="")) as deployment:
        is_open = msgspec.json.decode(await get(deployment, "/openapi.json"))

    assert found["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in found["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == ("401" in operation["responses"]) == (path not in OPEN)
    assert "securitySchemes" not in is_open["components"]
    assert "401" not in is_open["paths"][CHAT]["post"]["responses"]


async def test_outputs_that_may_be_asked_for_are_those_that_are_served() -> None:
    text_only = SPOKEN.replace(', "voice.audio -> out.audio"', "").replace(', "llm.text -> voice.text"', "")
    text_only = text_only.replace('[stages.voice]\nadapter = "synthetic-speech"\n', "")
    async with running(text_only.format(gateway="")) as deployment:
        found = msgspec.json.decode(await get(deployment, "/openapi.json"))

    modalities = found["components"]["schemas"]["ChatCompletionRequest"]["properties"]["modalities"]
    assert modalities["anyOf"][0]["items"] == {"enum": ["text"]}


def test_references_lead_somewhere() -> None:
    class Thing(msgspec.Struct):
        inner: Version

    ask = Operation(
        method="post",
        path="/v1/things/{name:.+}",
        name="make",
        summary="Makes a thing",
        parameters={"name": "of the thing"},
        body=Thing,
        answers={200: Answer(description="made", content={"application/json": Thing}, events=Model)},
        errors=(404,),
    )

    found = document("things", "1", [ask])

    text = msgspec.json.encode(found).decode()
    wanted = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert wanted <= found["components"]["schemas"].keys()
    assert {"Thing", "Version", "Model", "Error", "ErrorDetail"} <= found["components"]["schemas"].keys()
    made = found["paths"]["/v1/things/{name}"]["post"]
    assert made["parameters"][0]["name"] == "name"
    assert {"200", "400", "404", "413", "500"} <= made["responses"].keys()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("gateway", ["", 'api_keys = ["secret"]'], ids=["open", "with keys"])
async def test_schemathesis_finds_nothing(gateway: str, tmp_path: Path) -> None:
    """Statuses and shapes of all answers, refusals of wrong input, keys, methods; the same inputs each time."""
    pytest.importorskip("schemathesis")
    spoken, _, _ = SPOKEN.replace("llm", "writer").partition("[gateways.openai]")
    toml = f"{spoken}{ABLE}{gateway}\nheader_timeout_s = 1.0\nbody_timeout_s = 1.0"
    async with running(toml) as deployment:
        command, environ = schemathesis(deployment.url, 1)
        command += ["--max-examples", "20"]
        command += ["--header", "Authorization: Bearer secret"] if gateway else []
        done = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await done.communicate()

    assert done.returncode == 0, said.decode()
