"""The stage that is another server: ours, on a real model and on synthetic ones, and an aiohttp one that misbehaves."""

from __future__ import annotations

import asyncio
import base64
import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from aiohttp import web

from actors.testing import running
from adapters.remote_openai import RemoteOpenAI
from omni_bus.errors import BadInput, ConfigError, Overloaded, StageFailed, StartFailed, Unavailable
from omni_bus.testing import build_engine, run_streaming, start_streaming
from omni_bus.wire.payloads import Audio, Blob, Image, Json, Text, Tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

SYNTHETIC = """
[stages.llm]
adapter = "synthetic-text"
tokens = 5
[pipelines.chat]
serve_as = "counting"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""
LLAMA = """
[stages.llm]
adapter = "llamacpp"
[pipelines.chat]
serve_as = "smollm2"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
"""
FRONT = """
[stages.far]
adapter = "openai"
base_url = "{url}/v1"
[pipelines.chat]
serve_as = "front"
edges = ["in.messages -> far.prompt", "far.text -> out.text"]
[gateways.openai]
"""
HELLO: Any = [{"role": "user", "content": "hi"}]


def prompt(messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    return {"prompt": [Json({"messages": messages, **fields})]}


@asynccontextmanager
async def loaded(url: str, **options: Any) -> AsyncIterator[RemoteOpenAI]:
    engine = build_engine(RemoteOpenAI, {"base_url": f"{url}/v1", **options})
    await asyncio.to_thread(engine.load, lambda phase, fraction: None)
    try:
        yield engine
    finally:
        await engine.aclose()


# --- a real server -----------------------------------------------------------------------------------------


async def test_answer_streams_through_with_usage_and_reason() -> None:
    async with running(SYNTHETIC) as far, loaded(far.url) as engine:
        found = await run_streaming(engine, prompt(), {"max_tokens": 3}, outputs=["text"])

    assert found.text == "hi:0 hi:1 hi:2"
    assert len(found.outputs) == 3
    assert (found.finish.reason, found.finish.usage.completion_tokens) == ("length", 3)


async def test_pipeline_of_two_deployments_answers_the_official_client() -> None:
    async with (
        running(SYNTHETIC) as far,
        running(FRONT.format(url=far.url)) as near,
        openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(model="front", messages=HELLO, max_completion_tokens=2)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="front", messages=HELLO, stop="x")

    assert answer.choices[0].message.content == "hi:0 hi:1"
    assert refused.value.param == "stop"  # by the far stage, told through both


@pytest.mark.model
async def test_real_model_answers_as_it_does_directly() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = {"temperature": 0.0, "max_tokens": 12}
    async with running(LLAMA) as far, loaded(far.url) as engine:
        async with openai.AsyncOpenAI(base_url=f"{far.url}/v1", api_key="none") as client:
            direct = await client.chat.completions.create(model="smollm2", messages=question, **params)  # type: ignore[call-overload]
        found = await run_streaming(engine, prompt(question), params, outputs=["text"])

    assert found.text
    assert found.text == direct.choices[0].message.content
    assert found.finish.usage.prompt_tokens == direct.usage.prompt_tokens


async def test_closing_cancels_the_far_request() -> None:
    far_toml = SYNTHETIC.replace("tokens = 5", "tokens = 100000\nstep_time_s = 0.01")
    async with running(far_toml) as far, loaded(far.url) as engine:
        async with start_streaming(engine, prompt(), outputs=["text"]) as stream:
            assert await stream.pull() is not None
            assert far.stages["llm.0"].stats.active == 1
        assert engine.num_active == 0
        while far.stages["llm.0"].stats.active:  # each turn is a round trip through the far coordinator
            await far.gateway.client.admin("health")


# --- a server that shows what it was sent, or fails ---------------------------------------------------------


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    async def models(_request: web.Request) -> web.Response:
        card = {"id": "far", "object": "model", "created": 0, "owned_by": "test"}
        return web.json_response({"object": "list", "data": [card]})

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", handle)
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def chunk(delta: dict[str, Any], reason: str | None = None, **extra: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **extra}
    event = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "far", "choices": [choice]}
    return f"data: {msgspec.json.encode(event).decode()}\n\n"


async def stream(request: web.Request, *events: str, is_whole: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    if is_whole:
        await response.write(b"data: [DONE]\n\n")
    elif request.transport is not None:
        request.transport.abort()
    return response


async def body_sent(params: dict[str, Any], inputs: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the body that a request comes to."""
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request, chunk({"content": "ok"}, "stop"))

    async with serving(answer) as url, loaded(url, **options) as engine:
        await run_streaming(engine, inputs or prompt(), params)
    (body,) = seen
    return body


ALWAYS = {"model": "far", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.0, "seed": 3}, {"temperature": 0.0, "seed": 3}),
        ({"max_tokens": 7}, {"max_completion_tokens": 7}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"logit_bias": {"7": 1.5}}, {"logit_bias": {"7": 1.5}}),
        ({"logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
        ({"lora": "far-pirate"}, {"model": "far-pirate"}),
        ({"structure": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        (
            {"structure": {"json": SCHEMA}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
    ],
)
async def test_params_become_the_apis_fields(params: dict[str, Any], expected: dict[str, Any]) -> None:
    assert await body_sent(params) == ALWAYS | expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_tokens": 7, "top_k": 5, "min_p": 0.5}, {"max_tokens": 7, "top_k": 5, "min_p": 0.5}),
        ({"ignore_eos": True, "min_tokens": 2}, {"ignore_eos": True, "min_tokens": 2}),
        ({"stop_token_ids": [4]}, {"stop_token_ids": [4]}),
        ({"structure": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ],
)
async def test_vllms_dialect_has_more(params: dict[str, Any], expected: dict[str, Any]) -> None:
    assert await body_sent(params, dialect="vllm") == ALWAYS | expected
    with pytest.raises(BadInput) as refused:
        await body_sent(params)
    assert refused.value.field in params


async def test_extra_body_goes_with_every_request() -> None:
    assert (await body_sent({}, extra_body={"service_tier": "flex"}))["service_tier"] == "flex"


async def test_tools_and_what_they_answered_are_sent() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    tools = [{"function": {"name": "now", "parameters": {"type": "object"}}}]
    body = await body_sent({}, prompt(messages, tools=tools, tool_choice="function:now"))

    assert body["tools"] == [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "now"}}
    assert body["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert body["messages"][2] == {"role": "tool", "tool_call_id": "1", "content": "noon"}


async def test_pictures_and_sound_are_sent_in_the_order_of_their_parts() -> None:
    import PIL.Image

    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "audio"}]
    inputs = prompt([{"role": "user", "content": content}])
    inputs["images"] = [Image(1, 2, 3, Blob(bytes([9] * 6))), Image(2, 1, 1, Blob(b"\x01\x02"))]
    inputs["audio"] = [Audio(8000, 1, "s16", Blob(b"\x01\x00\x02\x00"))]
    parts = (await body_sent({}, inputs))["messages"][0]["content"]

    pictures = [PIL.Image.open(io.BytesIO(base64.b64decode(parts[i]["image_url"]["url"][22:]))) for i in (0, 2)]
    assert [(picture.size, picture.mode) for picture in pictures] == [((2, 1), "RGB"), ((1, 2), "L")]
    assert pictures[1].tobytes() == b"\x01\x02"
    assert parts[1] == {"type": "text", "text": "and"}
    assert base64.b64decode(parts[3]["input_audio"]["data"]).endswith(b"\x01\x00\x02\x00")


@pytest.mark.parametrize("num_pictures", [0, 2])
async def test_pictures_must_match_their_parts(num_pictures: int) -> None:
    inputs = prompt([{"role": "user", "content": [{"type": "image"}]}])
    inputs["images"] = [Image(1, 1, 3, Blob(b"\x00" * 3))] * num_pictures

    with pytest.raises(BadInput, match="one for each"):
        await body_sent({}, inputs)


async def test_reasoning_calls_and_logprobs_come_back_on_their_ports() -> None:
    entry = {"token": "ok", "bytes": [111, 107], "logprob": -0.5}
    content = [entry | {"top_logprobs": [entry, {"token": "é", "bytes": None, "logprob": -1.0}]}]
    start = {"index": 0, "id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}
    events = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "hm"}),
        chunk({"content": "ok"}, logprobs={"content": content}),
        chunk({"tool_calls": [start]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        chunk({}, "tool_calls", stop_reason=7),
    ]

    async with serving(lambda request: stream(request, *events)) as url, loaded(url) as engine:
        found = await run_streaming(engine, prompt(), {"logprobs": 2})

    assert [piece.text for piece in found.port("reasoning")] == ["hm"]
    (text,) = found.port("text")
    assert (text.text, text.tokens[0].raw, text.tokens[0].logprob) == ("ok", b"ok", -0.5)
    assert [other.raw for other in text.tokens[0].candidates] == [b"ok", "é".encode()]
    assert [payload.value for payload in found.port("tool_calls")] == [
        {"index": 0, "id": "c1", "name": "now"},
        {"index": 0, "arguments": "{}"},
    ]
    assert (found.finish.reason, found.finish.detail) == ("tool_calls", {"stop_reason": 7})


async def test_plain_text_goes_to_completions() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/completions"
        assert (await request.json())["prompt"] == "Once"
        choice = {"index": 0, "text": " upon", "finish_reason": "length", "logprobs": None}
        event = {"id": "c", "object": "text_completion", "created": 0, "model": "far", "choices": [choice]}
        return await stream(request, f"data: {msgspec.json.encode(event).decode()}\n\n")

    async with serving(answer) as url, loaded(url) as engine:
        found = await run_streaming(engine, {"prompt": [Json({"text": "Once"})]})

    assert (found.text, found.finish.reason) == (" upon", "length")


def problem(status: int, **fields: Any) -> web.Response:
    error = {"message": "no", "type": "x", "param": None, "code": status} | fields
    return web.json_response({"error": error}, status=status)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadInput),
        (422, BadInput),
        (401, StageFailed),
        (403, StageFailed),
        (404, StageFailed),
        (429, Overloaded),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
async def test_refusals_keep_whose_fault_it_is(status: int, kind: type[Exception]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return problem(status, param="temperature")

    async with serving(answer) as url, loaded(url, max_retries=0) as engine:
        with pytest.raises(kind) as caught:
            await run_streaming(engine, prompt())
        assert engine.num_active == 0

    assert "no" in str(caught.value)
    if kind is BadInput:
        assert caught.value.field == "temperature"  # type: ignore[attr-defined]


async def test_server_that_has_no_room_is_asked_again() -> None:
    answers = [problem(503), problem(429)]

    async def answer(request: web.Request) -> web.StreamResponse:
        if answers:
            refusal = answers.pop()
            refusal.headers["Retry-After-Ms"] = "1"
            return refusal
        return await stream(request, chunk({"content": "at last"}, "stop"))

    async with serving(answer) as url, loaded(url, max_retries=2) as engine:
        assert (await run_streaming(engine, prompt())).text == "at last"


async def test_answer_that_breaks_off_fails_and_says_that_a_retry_is_not_safe() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, chunk({"content": "half"}), is_whole=False)

    async with serving(answer) as url, loaded(url, max_retries=0) as engine:
        with pytest.raises(StageFailed, match="broke off") as caught:
            await run_streaming(engine, prompt())

    assert not caught.value.is_retry_safe


async def test_error_within_a_stream_fails_the_request() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, chunk({"content": "a"}), 'data: {"error": {"message": "engine died"}}\n\n')

    async with serving(answer) as url, loaded(url) as engine:
        with pytest.raises(StageFailed, match="engine died"):
            await run_streaming(engine, prompt())


async def test_silence_is_bounded() -> None:
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return problem(500)

    async with serving(answer) as url, loaded(url, max_retries=0, idle_timeout_s=0.2) as engine:
        with pytest.raises(StageFailed, match="silent") as caught:
            await run_streaming(engine, prompt())
        over.set()

    assert caught.value.is_retry_safe


# --- the start ----------------------------------------------------------------------------------------------


async def test_model_that_is_not_served_is_named_with_those_that_are() -> None:
    async with serving(stream) as url:
        with pytest.raises(StartFailed, match=r"model: 'nope' is not served at .* \(allowed: far\)"):
            async with loaded(url, model="nope"):
                pass


def test_server_that_is_not_there_fails_the_start() -> None:
    engine = build_engine(RemoteOpenAI, {"base_url": "http://127.0.0.1:9/v1", "max_retries": 0})

    with pytest.raises(StartFailed, match="base_url"):
        engine.load(lambda phase, fraction: None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"base_url": "ftp://host/v1"}, "base_url"),
        ({"base_url": "http://host:99999/v1"}, "base_url"),
        ({"base_url": "http://h/v1", "api_key_env": "NOT_SET_ANYWHERE"}, "api_key_env"),
        ({"base_url": "http://h/v1", "api_key_file": "/nowhere/key"}, "api_key_file"),
        ({"base_url": "http://h/v1", "api_key_file": "/nowhere/key", "api_key_env": "HOME"}, "api_key_file"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_engine(RemoteOpenAI, options)


async def test_key_from_a_file_is_sent(tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")
    guarded = SYNTHETIC + 'api_keys = ["sesame"]\n'
    async with running(guarded) as far:
        async with loaded(far.url, api_key_file=str(file)) as engine:
            assert (await run_streaming(engine, prompt(), outputs=["text"])).text
        with pytest.raises(StartFailed, match="base_url"):
            async with loaded(far.url):
                pass


@pytest.mark.parametrize("payload", [Text("hi"), Tokens(Blob(b"")), Json({"messages": []})])
async def test_other_prompts_are_refused(payload: Any) -> None:
    async with serving(stream) as url, loaded(url) as engine:
        with pytest.raises(BadInput):
            await run_streaming(engine, {"prompt": [payload]})
