from __future__ import annotations

import time
from typing import Any

import pytest
from aiohttp import web

from omni_bus.bench.audio_dialects import Speech
from omni_bus.bench.client import Server
from omni_bus.bench.dialects import Completions
from omni_bus.bench.record import Record
from omni_bus.errors import BadInput, UnknownName, Unreachable
from tests.bench.servers import DONE, Scripted, completion, usage


def server_at(url: str, **headers: str) -> Server:
    return Server(url, Completions(), Completions.path, headers, 30.0)


async def ask(server: Scripted, body: dict[str, Any] | None = None, **how: Any) -> Record:
    record = Record(index=0, intended_at=0.0)
    async with server.serving() as url, server_at(url) as client:
        await client.ask(record, body or {"prompt": "Hi"}, time.perf_counter, **how)
    return record


async def test_completion_is_read_to_its_end() -> None:
    record = await ask(Scripted(lambda body: [completion("a"), completion(" b"), usage(3, 2), DONE]))

    assert record.is_complete
    assert [length for _, length in record.texts] == [1, 2]
    assert (record.prompt_tokens, record.output_tokens) == (3, 2)
    assert record.sent_at <= record.texts[0][0] <= record.texts[1][0] <= record.ended_at


@pytest.mark.parametrize(
    ("told", "failure", "message"),
    [
        ([completion("a")], "cut", "ended before it said that it was whole"),
        ([DONE], "empty answer", "neither text nor sound came"),
        (
            [completion("a"), {"error": {"type": "StageLost", "message": "gone"}}, DONE],
            "error in the stream: StageLost",
            "gone",
        ),
        ([completion("a"), "{", DONE], "unreadable event", "Input data was truncated"),
    ],
)
async def test_answer_that_is_not_whole_is_a_named_failure(told: list[Any], failure: str, message: str) -> None:
    record = await ask(Scripted(lambda body: told))

    assert record.failure == failure
    assert message in record.message
    assert not record.is_complete


async def test_answer_of_an_end_token_only_is_complete() -> None:
    record = await ask(Scripted(lambda body: [usage(3, 1), DONE]))

    assert record.is_complete
    assert (record.texts, record.output_tokens) == ([], 1)


@pytest.mark.parametrize(
    ("status", "body", "failure", "message"),
    [
        (503, {"error": {"type": "ServiceUnavailableError", "message": "busy"}}, "503 ServiceUnavailableError", "busy"),
        (429, {"error": {"message": "slow"}}, "429 Too Many Requests", "slow"),
        (500, {"detail": "x"}, "500 Internal Server Error", '{"detail": "x"}'),
        (404, [], "404 Not Found", "[]"),
        (401, {"error": "no"}, "401 Unauthorized", '{"error": "no"}'),
    ],
)
async def test_refusals_are_named_by_status_and_type(status: int, body: Any, failure: str, message: str) -> None:
    record = await ask(Scripted(lambda _: web.json_response(body, status=status)))

    assert (record.failure, record.message) == (failure, message)


async def test_server_that_is_not_there_is_a_named_failure(unused_tcp_port: int) -> None:
    record = Record(index=0, intended_at=0.0)
    async with server_at(f"http://127.0.0.1:{unused_tcp_port}") as client:
        await client.ask(record, {}, time.perf_counter)

        with pytest.raises(
            Unreachable, match=rf"--base-url http://127.0.0.1:{unused_tcp_port}: can't connect.*allowed"
        ):
            await client.choose_model(None)
    assert record.failure == "ClientConnectorError"


async def test_address_may_end_like_an_openai_clients() -> None:
    async with Scripted(lambda body: []).serving() as url, server_at(f"{url}/v1/") as client:
        assert await client.choose_model(None) == "m"


async def test_model_must_be_one_that_the_server_lists() -> None:
    async with Scripted(lambda body: [], models=["llama", "qwen"]).serving() as url, server_at(url) as client:
        assert await client.choose_model(None) == "llama"
        assert await client.choose_model("qwen") == "qwen"
        with pytest.raises(UnknownName, match=r"--model: 'lama'; did you mean 'llama'\? \(known: llama, qwen\)"):
            await client.choose_model("lama")


async def test_route_with_a_model_of_its_own_is_sent_no_name_of_several() -> None:
    """The list doesn't tell which one speaks."""
    for models, chosen in ((["llama", "qwen"], ""), (["hibari"], "hibari"), ([], "")):
        async with (
            Scripted(lambda body: [], models=models).serving() as url,
            Server(url, Speech(), Speech.path, {}, 30.0) as client,
        ):
            assert await client.choose_model(None) == chosen


async def test_server_that_lists_none_is_taken_at_the_users_word() -> None:
    async with Scripted(lambda body: [], models=[]).serving() as url, server_at(url) as client:
        assert await client.choose_model("any") == "any"
        with pytest.raises(BadInput, match=r"--model: .*/v1/models lists no model, so one must be named"):
            await client.choose_model(None)


async def test_headers_go_with_every_request() -> None:
    server = Scripted(lambda body: [completion("a"), DONE])
    async with server.serving() as url, server_at(url, Authorization="Bearer x") as client:
        await client.ask(Record(index=0, intended_at=0.0), {}, time.perf_counter)

    assert server.headers[0]["Authorization"] == "Bearer x"
    assert server.headers[0]["Content-Type"] == "application/json"


async def test_pace_is_asked_after_each_read() -> None:
    """A slow reader reads little at a time, so each chunk of some 200 bytes is one read or two."""
    read: list[int] = []

    async def pace(num_pieces: int) -> None:
        read.append(num_pieces)

    record = await ask(Scripted(lambda body: [completion("a" * 150) for _ in range(20)] + [DONE]), pace=pace)

    assert record.is_complete
    assert sum(read) == len(record.texts) == 20
    assert max(read) <= 2


async def test_tokens_are_counted_by_the_server_or_not_at_all() -> None:
    async with Scripted(lambda body: [], tokenize=len).serving() as url, server_at(url) as client:
        assert await client.count_tokens("m", "four") == 4
    async with Scripted(lambda body: []).serving() as url, server_at(url) as client:
        assert await client.count_tokens("m", "four") is None


async def test_server_that_says_nothing_of_its_load_has_no_occupancy() -> None:
    async with Scripted(lambda body: []).serving() as url, server_at(url) as client:
        assert await client.occupancy() is None
