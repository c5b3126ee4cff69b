"""What holds for every route: limits, keys, names, errors, and what happens when clients misbehave or leave."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import tracemalloc
import zlib
from typing import Any

import aiohttp
import pytest

from actors.testing import Running, running

CHAT = "/v1/chat/completions"
TEXT = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
{pipeline}
[gateways.openai]
{gateway}
"""
HALF_A_BODY = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
)
ENDLESS = {"tokens": 1_000_000, "step_time_s": 0.001}


def text_deployment(gateway: str = "", pipeline: str = "") -> str:
    return TEXT.format(gateway=gateway, pipeline=pipeline)


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "sampling_params_list": [{"tokens": 3}]} | fields


async def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes and return everything that comes until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def parse_response(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, rest = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


async def stage_stats(session: aiohttp.ClientSession, stage: str = "llm") -> dict[str, int]:
    async with session.get("/health") as response:
        return (await response.json())["stages"][stage]["replicas"][0]["stats"]


async def until(session: aiohttp.ClientSession, stage: str = "llm", **wanted: int) -> dict[str, int]:
    """Ask the stage itself, round trip by round trip, until it counts this; the test's time limit bounds it."""
    while True:
        stats = await stage_stats(session, stage)
        if all(stats[name] == value for name, value in wanted.items()):
            return stats


async def is_alive(deployment: Running) -> bool:
    async with aiohttp.ClientSession(deployment.url) as session, session.post(CHAT, json=body()) as response:
        return (
            response.status == 200 and (await response.json())["choices"][0]["message"]["content"] == "hi:0 hi:1 hi:2"
        )


# --- bodies -------------------------------------------------------------------------------------------------


async def test_large_body_is_refused_before_it_is_sent() -> None:
    async with running(text_deployment()) as deployment:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50000000\r\n"
        )

        for expect in ("", "Expect: 100-continue\r\n"):
            status, document = parse_response(await exchange(deployment.port, f"{head}{expect}\r\n".encode()))
            assert status == 413
            assert "50000000 bytes came (allowed: at most 33554432)" in document["error"]["message"]
        assert await is_alive(deployment)


async def test_body_of_unsaid_length_is_cut_at_the_limit() -> None:
    async def pieces():
        for _ in range(100):
            yield b" " * 1000

    async with (
        running(text_deployment("max_body_bytes = 2000")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, data=pieces(), headers={"Content-Type": "application/json"}) as response,
    ):
        assert response.status == 413
        assert "more than 2000 bytes" in (await response.json())["error"]["message"]


async def test_unknown_expectation_is_refused() -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nExpect: a-miracle\r\nContent-Length: 5\r\n\r\n".encode()
    async with running(text_deployment()) as deployment:
        status, document = parse_response(await exchange(deployment.port, head))

        assert status == 417
        assert "a-miracle came (allowed: 100-continue)" in document["error"]["message"]
        assert await is_alive(deployment)


async def test_expected_body_is_asked_for() -> None:
    async with (
        running(text_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, json=body(), expect100=True) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-", "head did not come within 0.1 s"),
        (HALF_A_BODY, "1 of 9 bytes came"),
    ],
)
async def test_half_a_request_is_answered_and_closed(sent: bytes, words: str) -> None:
    async with running(text_deployment("header_timeout_s = 0.1\nbody_timeout_s = 0.1")) as deployment:
        status, document = parse_response(await exchange(deployment.port, sent))

        assert status == 408
        assert document["error"]["code"] == 408
        assert words in document["error"]["message"]
        assert await is_alive(deployment)


@pytest.mark.parametrize(
    "line",
    [
        b"Content-Type: te\xffxt",
        b"Content-Encoding: g\xffzip",
        b"Expect: a-m\xffracle",
        b"X-Request-Id: \xff",
        b"\xff: a",
    ],
)
async def test_header_that_is_no_utf8_is_refused_in_shape(line: bytes) -> None:
    """What is repeated of it must have a form in JSON."""
    sent = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n".encode()
        + line
        + b"\r\n\r\n{}"
    )
    async with running(text_deployment()) as deployment:
        status, document = parse_response(await exchange(deployment.port, sent))

        assert status in {400, 417}
        assert document["error"]["code"] == status
        assert await is_alive(deployment)


async def test_bytes_that_are_no_http_get_an_error_in_shape() -> None:
    async with running(text_deployment()) as deployment:
        status, document = parse_response(await exchange(deployment.port, b"\x16\x03\x01 hello\r\n\r\n"))

        assert status == 400
        assert document["error"]["type"] == "BadRequestError"
        assert await is_alive(deployment)


@pytest.mark.parametrize(
    ("content_type", "raw", "words"),
    [
        ("text/plain", b"{}", "text/plain came (allowed: application/json)"),
        ("application/json", b'{"messages": [1,}', "byte 16"),
        ("application/json", b'{"messages": ', "truncated after 13 bytes"),
        ("application/json", b"", "truncated after 0 bytes"),
        ("application/json", rb'{"model": "\ud800"}', "surrogate pair (byte 11)"),
        ("application/json", b"[]", "a JSON array came (allowed: an object)"),
        ("application/json", b"null", "a JSON null came"),
        ("application/json", b'{"a": "\xff"}', "UTF-8"),
        ("application/json", b'{"temperature": NaN}', "byte 16"),
        ("application/json", b"[" * 100_000, "nested too deeply"),
        ("application/json", b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        ("application/json", b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested too deeply"),
    ],
)
async def test_body_that_is_no_json_object_is_refused(content_type: str, raw: bytes, words: str) -> None:
    async with (
        running(text_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, data=raw, headers={"Content-Type": content_type}) as response,
    ):
        assert response.status == 400
        assert words in (await response.json())["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_damaged_compression_is_the_clients_fault(caplog, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding, "Content-Length": "4"}
    async with (
        running(text_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, data=b"nope", headers=headers) as response,
    ):
        assert response.status == 400
        assert "its content encoding" in (await response.json())["error"]["message"]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == [], "nothing of ours failed"


async def test_unknown_compression_is_refused() -> None:
    """Passed on undecoded, a body would be taken for what it is not."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip, gzip"}
    async with (
        running(text_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, data=b"{}", headers=headers) as response,
    ):
        assert response.status == 400
        assert "gzip, gzip came (allowed: identity, gzip" in (await response.json())["error"]["message"]


def bomb(encoding: str, size: int) -> bytes:
    """A JSON object of one long string, in a two-hundredth of its size."""
    deflater = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16 if encoding == "gzip" else zlib.MAX_WBITS)
    parts = [deflater.compress(b'{"a": "')]
    parts += [deflater.compress(b"a" * 1_000_000) for _ in range(size // 1_000_000)]
    return b"".join([*parts, deflater.compress(b'"}'), deflater.flush()])


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_bomb_is_unfolded_to_the_limit_and_no_further(encoding: str) -> None:
    sent = bomb(encoding, 100_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with (
        running(text_deployment("max_body_bytes = 1000000")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        tracemalloc.start()
        async with session.post(CHAT, data=sent, headers=headers) as response:
            document = await response.json()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert response.status == 413
        assert "more than 1000000 bytes came" in document["error"]["message"]
        assert peak < 20_000_000
        assert await is_alive(deployment)


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
)


@pytest.mark.parametrize(
    ("first", "again", "statuses"),
    [
        (CHUNKED + b"\r\n", b"3e8\r\n" + b" " * 1000 + b"\r\n", {413}),
        (CHUNKED + b"\r\n", b"1\r\n \r\n", {408, 413}),
        (CHUNKED + b"\r\n1", b";name=value" * 1000, {400, 408}),
        (CHUNKED + b"\r\n0", b"0" * 1000, {400, 408}),
        (CHUNKED + b"\r\n2\r\n{}\r\n0\r\n", b"Trailer: x\r\n" * 1000, {400, 408, 413}),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-Header: y\r\n" * 1000, {400, 431}),
        (b"GET /health HTTP/1.1\r\nX: ", b"y" * 10_000, {400, 431}),
        (b"GET /", b"y" * 10_000, {400, 414}),
        (b"", b"\0" * 10_000, {400}),
    ],
    ids=["chunks", "tiny chunks", "chunk extension", "chunk size", "trailers", "headers", "header", "path", "noise"],
)
async def test_request_without_end_is_cut_off(first: bytes, again: bytes, statuses: set[int]) -> None:
    """Within the limits of bytes or of time, in bounded memory, whatever part of it has no end."""
    async with running(text_deployment("max_body_bytes = 100000\nbody_total_timeout_s = 0.5")) as deployment:
        tracemalloc.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        writer.write(first)
        answer = asyncio.create_task(reader.read())
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while not answer.done() and num_sent < 1_000_000_000:
                writer.write(again)
                num_sent += len(again)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        with contextlib.suppress(ConnectionError):
            raw = await answer
            assert raw == b"" or int(raw.split()[1]) in statuses
        assert num_sent < 1_000_000_000
        assert peak < 20_000_000
        assert await is_alive(deployment)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: -2\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: 2x\r\n",
        b"Content-Length: " + b"9" * 5000 + b"\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nX : y\r\n",
    ],
)
async def test_body_of_doubtful_length_is_refused(head: bytes) -> None:
    """Two servers in a row that read it differently would see two different requests."""
    sent = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + head
        + b"\r\n{}"
    )
    async with running(text_deployment("body_timeout_s = 0.2")) as deployment:
        status, document = parse_response(await exchange(deployment.port, sent))

        assert status in {400, 413}
        assert document["error"]["code"] == status
        assert await is_alive(deployment)


@pytest.mark.parametrize("chunk", [b"-1\r\n{}\r\n", b"x\r\n{}\r\n", b"ffffffffffffffffff\r\n{}", b"2\r\n{}xx0\r\n\r\n"])
async def test_damaged_chunk_is_refused(chunk: bytes) -> None:
    async with running(text_deployment("body_timeout_s = 0.2")) as deployment:
        status, document = parse_response(await exchange(deployment.port, CHUNKED + b"\r\n" + chunk))

        assert status == 400
        assert document["error"]["code"] == 400
        assert await is_alive(deployment)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /%ff\xff HTTP/1.1\r\n",
        b"GET /v1/models/%ff HTTP/1.1\r\n",
        b"GET /v1/files/%ff HTTP/1.1\r\n",
        b"GET /v1/files?order=%ff&after=%ff HTTP/1.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Type: \xff/\xfe\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Encoding: \xff\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nExpect: \xff\r\nContent-Length: 2\r\n",
        b"POST /v1/files HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=\xff\r\n",
        b"POST /v1/files HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=a\r\nContent-Encoding: \xff\r\n",
        b"GET /v1/models HTTP/1.1\r\nAuthorization: \xff \xff\r\n",
    ],
)
async def test_bytes_that_are_no_text_in_a_head_are_refused_as_any_other(head: bytes) -> None:
    async with running(text_deployment('api_keys = ["k"]')) as deployment:
        keyed = b"" if b"Authorization" in head else b"Authorization: Bearer k\r\n"
        sent = head + keyed + b"Host: localhost\r\nX-Request-Id: \xff\r\nConnection: close\r\n\r\n"
        status, document = parse_response(await exchange(deployment.port, sent))

        assert 400 <= status < 500
        assert document["error"]["code"] == status


async def test_body_that_only_drips_is_answered() -> None:
    """Each byte comes in time; all of them would take for ever."""
    async with running(text_deployment("body_timeout_s = 20\nbody_total_timeout_s = 0.5")) as deployment:
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        writer.write(HALF_A_BODY.replace(b"Content-Length: 9", b"Content-Length: 99999"))
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.05)
        writer.close()

        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert await is_alive(deployment)


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([{"role": "user", "content": "x" * 20_000_000}], "messages", "bytes came (allowed: at most 15728640)"),
        ([{"role": "user", "content": "x" * 1000}] * 16_000, "messages", "bytes came (allowed: at most 15728640)"),
        ([[]] * 500_000, None, "JSON of weight 2000"),
        ([{"a": {"b": []}}] * 100_000, None, "allowed: at most 1600000; a comma weighs 1"),
        ([{f"k{i}": 1 for i in range(300_000)}], None, "JSON of weight 1800"),
        ([10**4200] * 700, None, "twenty digits in a row 12"),
    ],
    ids=["a long one", "many", "a great many values", "nested objects", "different keys", "long numbers"],
)
async def test_body_beyond_the_bus_is_refused(messages: Any, param: str | None, words: str) -> None:
    """Within the limit of bodies, and more than a frame holds or than may be decoded on the loop."""
    async with running(text_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        sent = io.BytesIO(json.dumps(body(messages=messages)).encode())
        async with session.post(CHAT, data=sent, headers={"Content-Type": "application/json"}) as response:
            document = await response.json()

        assert response.status == 400
        assert document["error"]["param"] == param
        assert words in document["error"]["message"]
        assert await is_alive(deployment)


# --- routes, ids, keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/nope", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)],
)
async def test_wrong_route_gets_the_envelope(method: str, path: str, status: int) -> None:
    async with (
        running(text_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.request(method, path) as response,
    ):
        assert response.status == status
        assert (await response.json())["error"]["code"] == status


@pytest.mark.parametrize("streamed", [False, True])
async def test_request_id_is_carried_through(streamed) -> None:
    async with running(text_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        sent = body(stream=streamed, request_id="from-body")
        async with session.post(CHAT, json=sent, headers={"X-Request-Id": "abc.1"}) as response:
            assert response.headers["X-Request-Id"] == "abc.1"
            assert '"id":"chatcmpl-abc.1"' in await response.text()
        async with session.post(CHAT, json=sent) as response:
            assert response.headers["X-Request-Id"] == "from-body"
            assert '"id":"chatcmpl-from-body"' in await response.text()
        async with session.post(CHAT, json=sent | {"temperature": 9}, headers={"X-Request-Id": "bad id"}) as response:
            assert response.status == 400
            assert response.headers["X-Request-Id"] not in {"", "bad id"}


async def test_key_guards_every_v1_route() -> None:
    async with (
        running(text_deployment('api_keys = ["one", "two"]')) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for path, method in (("/v1/models", "GET"), (CHAT, "POST"), ("/v1/nope", "GET")):
            for header in (
                {},
                {"Authorization": "Bearer no"},
                {"Authorization": "Basic one"},
                {"Authorization": "one"},
            ):
                async with session.request(method, path, json=body(), headers=header) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["type"] == "AuthenticationError"
        for path in ("/health", "/ping", "/version"):
            async with session.get(path) as response:
                assert response.status == 200
        for header in ("Bearer one", "bearer two", "Bearer  two "):
            async with session.post(CHAT, json=body(), headers={"Authorization": header}) as response:
                assert response.status == 200


async def test_every_path_wants_a_key_but_those_of_watchers() -> None:
    """Whatever a gateway adds is closed until somebody says otherwise."""
    async with (
        running(text_deployment('api_keys = ["one"]')) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for path in ("/", "/nope", "/v1", "/healthy", "/health/"):
            async with session.get(path) as response:
                assert response.status == 401
        async with session.options("/v1/models") as response:
            assert response.status == 405
        async with session.get("/v1/models", headers={"Authorization": "Api-Key one"}) as response:
            assert response.status == 200


# --- callers, time limits -----------------------------------------------------------------------------------

CALLERS = """
[callers.small]
keys = ["small"]
max_in_flight = 1
max_queued = 0
[callers.rated]
keys = ["rated"]
requests_per_minute = 1
burst = 1
[callers.low]
keys = ["low"]
max_priority = -1
[callers.other]
keys = ["other"]
"""


def as_caller(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} | headers


async def test_callers_own_limit_is_429_and_the_pipelines_503() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 2\nmax_queued = 0") + CALLERS) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        endless = body(stream=True, sampling_params_list=[ENDLESS])
        async with session.post(CHAT, json=endless, headers=as_caller("small")) as first:
            await first.content.readline()
            async with session.post(CHAT, json=body(), headers=as_caller("small")) as response:
                document = await response.json()
                assert (response.status, document["error"]["type"]) == (429, "RateLimitError")
                assert "can't run one more of caller 'small'" in document["error"]["message"]
                assert int(response.headers["Retry-After"]) >= 1
            async with session.post(CHAT, json=endless, headers=as_caller("other")) as second:
                await second.content.readline()
                async with session.post(CHAT, json=body(), headers=as_caller("other")) as response:
                    assert response.status == 503
                    assert int(response.headers["Retry-After"]) >= 1
                async with session.get("/health", headers=as_caller("small")) as response:
                    document = await response.json()
        assert document["caller"] == {"name": "small", "uses": {"chat": {"in_flight": 1, "queued": 0, "refused": 1}}}
        assert document["pipelines"]["chat"]["in_flight"] == 2
        async with session.get("/health") as response:
            document = await response.json()
        assert "caller" not in document, "who has no key is told of no caller"
        assert document["pipelines"]["chat"]["max_queued_bytes"] == 256 * 2**20


async def test_rate_is_429_with_the_time_to_wait() -> None:
    async with (
        running(text_deployment() + CALLERS) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        async with session.post(CHAT, json=body(), headers=as_caller("rated")) as response:
            assert response.status == 200
        async with session.post(CHAT, json=body(), headers=as_caller("rated")) as response:
            assert response.status == 429
            assert 50 <= int(response.headers["Retry-After"]) <= 60


async def test_body_that_waits_counts_against_the_queue() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1\nmax_queued_bytes = 1000")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        async with session.post(CHAT, json=body(stream=True, sampling_params_list=[ENDLESS])) as first:
            await first.content.readline()
            long = [{"role": "user", "content": "x" * 1000}]
            async with session.post(CHAT, json=body(messages=long)) as response:
                assert response.status == 503
                assert "max_queued_bytes 1000" in (await response.json())["error"]["message"]
            waiting = asyncio.create_task(session.post(CHAT, json=body()))
            while True:
                async with session.get("/health") as response:
                    counts = (await response.json())["pipelines"]["chat"]
                if counts["queued"]:
                    break
            assert 0 < counts["queued_bytes"] <= 1000
        async with await waiting as response:
            assert response.status == 200


async def test_time_limit_of_a_header_ends_what_waits_and_what_runs() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        endless = body(sampling_params_list=[ENDLESS])
        async with session.post(CHAT, json=endless, headers={"X-Request-Timeout": "0.2"}) as response:
            assert response.status == 504
            assert (await response.json())["error"]["type"] == "GatewayTimeoutError"
        await until(session, active=0, cancelled=1)
        async with session.post(CHAT, json=endless | {"stream": True}) as first:
            await first.content.readline()
            async with session.post(CHAT, json=body(), headers={"X-Request-Timeout": "0.05"}) as response:
                assert response.status == 504


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "86401", "1e400"])
async def test_time_limit_that_is_none_is_refused(value: str) -> None:
    async with (
        running(text_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, json=body(), headers={"X-Request-Timeout": value}) as response,
    ):
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "X-Request-Timeout")
        assert "above 0 and at most 86400" in error["message"]


async def test_priority_goes_first_as_in_vllm_and_only_as_far_as_allowed() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1") + CALLERS) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        order: list[int] = []

        async def ask(priority: int) -> None:
            async with session.post(CHAT, json=body(priority=priority), headers=as_caller("other")) as response:
                assert response.status == 200
                order.append(priority)

        endless = body(stream=True, sampling_params_list=[ENDLESS])
        async with session.post(CHAT, json=endless, headers=as_caller("other")) as first:
            await first.content.readline()
            waiting = []
            for priority in (5, 0, -5):
                waiting.append(asyncio.create_task(ask(priority)))
                while len(deployment.gateway.client.requests) < 1 + len(waiting):
                    await stage_stats(session)
            async with session.post(CHAT, json=body(), headers=as_caller("low")) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "priority"
        await asyncio.gather(*waiting)
        assert order == [-5, 0, 5]


# --- leaving, slowness, stopping ----------------------------------------------------------------------------


async def send_and_leave(deployment: Running, session: aiohttp.ClientSession, sent: dict[str, Any]) -> None:
    """Close the connection once the stage works on the request and before anything of the answer is read."""
    payload = json.dumps(sent).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await until(session, active=1)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("streamed", [False, True])
async def test_leaving_client_frees_the_stage(streamed, caplog) -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1\nmax_queued = 1")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for times in (1, 2, 3):
            await send_and_leave(deployment, session, body(stream=streamed, sampling_params_list=[ENDLESS]))
            await until(session, active=0, cancelled=times)
        assert await is_alive(deployment)
        assert deployment.gateway.client.requests == {}
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


async def test_queued_request_of_a_client_that_left_never_starts() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1\nmax_queued = 1")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        async with session.post(CHAT, json=body(stream=True, sampling_params_list=[ENDLESS])) as running_response:
            await running_response.content.readline()
            queued = asyncio.create_task(session.post(CHAT, json=body()))
            while len(deployment.gateway.client.requests) < 2:
                await stage_stats(session)
            queued.cancel()
            await asyncio.wait({queued})
            while len(deployment.gateway.client.requests) > 1:
                await stage_stats(session)
        stats = await until(session, active=0, cancelled=1)

        assert await is_alive(deployment)
        assert stats["done"] == 0
        assert (await stage_stats(session))["done"] == 1


async def test_overload_is_said_at_once_with_a_time() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1\nmax_queued = 0")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, json=body(stream=True, sampling_params_list=[ENDLESS])) as first,
    ):
        await first.content.readline()
        for streamed in (False, True):
            async with session.post(CHAT, json=body(stream=streamed)) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, {"messages": [{"role": "user", "content": "hi"}]}), ("/v1/completions", {"prompt": "hi"})],
)
async def test_slow_reader_suspends_only_its_own_request(path: str, asked: dict[str, Any]) -> None:
    """Eight megabytes for a client that reads none of them: its request stops, others pass, nothing is lost."""
    num_tokens, chunk_bytes = 2000, 4096
    own = [{"tokens": num_tokens, "chunk_bytes": chunk_bytes}]
    sent = json.dumps({**asked, "stream": True, "sampling_params_list": own})
    head = f"POST {path} HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    async with running(text_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        await loop.sock_connect(slow, ("127.0.0.1", deployment.port))
        await loop.sock_sendall(slow, (head + sent).encode())
        stats = await until(session, suspended=1)

        assert stats["steps"] < num_tokens / 2
        for _ in range(3):
            assert await is_alive(deployment)
        assert (await stage_stats(session))["suspended"] == 1

        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # it wakes up and reads fast
        received = bytearray()
        while b"[DONE]" not in received[-64:]:
            received += await loop.sock_recv(slow, 65536)
        at = 0
        for i in range(num_tokens):
            at = received.find(f"hi:{i}.".encode(), at)
            assert at >= 0, f"word {i} is missing or out of order"
        slow.close()


async def test_reader_that_takes_nothing_for_too_long_is_dropped() -> None:
    sent = json.dumps(body(stream=True, sampling_params_list=[{"tokens": 2000, "chunk_bytes": 4096}]))
    head = f"POST {CHAT} HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    async with (
        running(text_deployment("write_timeout_s = 0.2")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        with socket.create_connection(("127.0.0.1", deployment.port)) as stuck:
            stuck.sendall((head + sent).encode())
            await until(session, cancelled=1, active=0, suspended=0)


async def test_drain_lets_open_streams_finish_and_refuses_new_ones() -> None:
    async with running(text_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        sent = body(stream=True, sampling_params_list=[{"tokens": 200, "step_time_s": 0.001}])
        async with session.post(CHAT, json=sent) as response:
            await response.content.readline()
            drain = asyncio.create_task(deployment.gateway.drain(30.0))
            rest = (await response.read()).decode()

        assert await drain
        assert rest.endswith("data: [DONE]\n\n")
        assert "hi:199" in rest
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("/health")


@pytest.mark.parametrize("streamed", [False, True])
async def test_drain_ends_what_takes_too_long_with_a_reason(streamed) -> None:
    async with running(text_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        sent = body(stream=streamed, sampling_params_list=[ENDLESS])
        posting = asyncio.create_task(session.post(CHAT, json=sent))
        await until(session, active=1)
        is_clean = await deployment.gateway.drain(0.05)
        async with await posting as response:
            text = await response.text()

        assert not is_clean
        assert "the server is stopping" in text
        assert "[DONE]" not in text
        assert response.status == (200 if streamed else 503)


async def test_drain_ends_queued_requests_with_a_reason() -> None:
    async with (
        running(text_deployment(pipeline="max_in_flight = 1\nmax_queued = 1")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        first = asyncio.create_task(session.post(CHAT, json=body(sampling_params_list=[ENDLESS])))
        await until(session, active=1)
        queued = asyncio.create_task(session.post(CHAT, json=body()))
        while len(deployment.gateway.client.requests) < 2:
            await stage_stats(session)
        await deployment.gateway.drain(0.0)

        for task in (first, queued):
            async with await task as response:
                assert response.status == 503
                assert "the server is stopping" in (await response.json())["error"]["message"]
