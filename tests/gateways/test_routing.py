from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from able import CHAT, post  # type: ignore[import-not-found] (put on the path above)

from actors.testing import Running, running
from gateways.fan_out import Call
from gateways.routing import ANSWER_TOKENS, MAX_ANSWER_TOKENS, MAX_BYTES, beginning_of, routing_of
from omni_bus.wire.payloads import Blob, Image, Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SYSTEM = {"role": "system", "content": "You know everything about buses. " * 40}
HELLO = {"role": "user", "content": "hello"}


def call(prompt: dict[str, Any], *, outputs: tuple[str, ...] = ("text",), **params: Any) -> Call:
    return Call(
        pipeline="chat", outputs=outputs, params={"llm": params} if params else {}, inputs={"messages": [Json(prompt)]}
    )


def beginning(*messages: dict[str, Any], pictures: list[Any] | None = None, **fields: Any) -> bytes:
    return beginning_of({"messages": list(messages), **fields}, {"images": pictures or []})


def test_a_text_to_speak_counts_as_long_as_it_is() -> None:
    def speech(text: str) -> Call:
        return Call(pipeline="speech", outputs=("audio",), params={}, inputs={"text": [Text(text)]})

    assert routing_of(speech("x" * 4000)) == {"tokens": 1000, "prefix": ()}
    assert routing_of(speech("x")) == {"tokens": 1, "prefix": ()}


# --- how a prompt begins ------------------------------------------------------------------------------------

_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=300)},
        optional={"name": st.text(max_size=5), "reasoning": st.text(max_size=50)},
    ),
    max_size=6,
)


@given(_MESSAGES, _MESSAGES)
def test_conversation_that_goes_on_begins_as_it_was(first: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    assert beginning(*first, *more).startswith(beginning(*first))


@given(_MESSAGES, st.randoms())
def test_order_of_fields_is_no_difference(messages: list[dict[str, Any]], dice: Any) -> None:
    def shuffled(message: dict[str, Any]) -> dict[str, Any]:
        items = list(message.items())
        dice.shuffle(items)
        return dict(items)

    assert beginning(*map(shuffled, messages)) == beginning(*messages)


def test_last_message_that_begins_the_same_has_the_same_bytes() -> None:
    one, other = (beginning(SYSTEM, HELLO | {"content": "Tell me of " + what}) for what in ("Rome", "Paris"))

    assert one != other
    assert len(commonprefix(one, other)) == len(one) - len("Rome")


def commonprefix(one: bytes, other: bytes) -> bytes:
    return one[: next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]


def test_tools_come_before_the_first_message() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with_tools = beginning(SYSTEM, tools=tools)

    assert not with_tools.startswith(beginning(SYSTEM)[:100])
    assert beginning(SYSTEM, HELLO, tools=tools).startswith(with_tools)


def test_what_is_asked_of_the_answer_is_no_difference() -> None:
    assert beginning(SYSTEM, tool_choice="required", continue_final_message=True) == beginning(SYSTEM)


def test_calls_and_their_results_count() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "done"}

    assert beginning(HELLO, calls, result).startswith(beginning(HELLO, calls))
    assert beginning(HELLO, calls) != beginning(HELLO, calls | {"tool_calls": []})


def test_pictures_tell_conversations_apart() -> None:
    looks = {"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]}
    red, blue, wide = Image(1, 2, 1, Blob(b"aa")), Image(1, 2, 1, Blob(b"ab")), Image(2, 1, 1, Blob(b"aa"))
    found = [beginning(looks, HELLO, pictures=[picture]) for picture in (red, blue, wide)]

    assert len(set(found)) == 3
    assert found[0] == beginning(looks, HELLO, pictures=[Image(1, 2, 1, Blob(bytearray(b"aa")))])
    assert beginning(looks, looks, pictures=[red, blue]).startswith(beginning(looks, pictures=[red]))


def test_no_more_is_read_than_is_looked_at() -> None:
    assert len(beginning(HELLO | {"content": "é" * 10_000_000}, HELLO)) == MAX_BYTES
    assert len(beginning_of({"token_ids": list(range(100_000))}, {})) == MAX_BYTES


def test_halves_of_surrogate_pairs_do_no_harm() -> None:
    assert beginning(HELLO | {"content": "a\ud800"}) != beginning(HELLO | {"content": "a"})


# --- what is told of a call ---------------------------------------------------------------------------------


def test_tokens_are_those_of_prompt_and_answer() -> None:
    prompt = {"text": "abcd" * 100}

    assert routing_of(call(prompt))["tokens"] == 100 + ANSWER_TOKENS
    assert routing_of(call(prompt, max_tokens=10))["tokens"] == 110
    assert routing_of(call(prompt, max_tokens=2**31 - 1))["tokens"] == 100 + MAX_ANSWER_TOKENS
    assert routing_of(call({"token_ids": [1] * 100}, max_tokens=10))["tokens"] == 110
    assert routing_of(call({"messages": [HELLO | {"content": "abcd" * 100}]}, max_tokens=10))["tokens"] == 110
    parts = [{"type": "text", "text": "abcd" * 100}, {"type": "image"}]
    assert routing_of(call({"messages": [HELLO | {"content": parts}]}, max_tokens=10))["tokens"] == 110


@pytest.mark.parametrize("output", ["rendered", "embedding"])
def test_prompt_that_nothing_is_written_to_has_no_prefix(output: str) -> None:
    assert routing_of(call({"text": "abcd" * 100}, outputs=(output,))) == {"tokens": 100, "prefix": ()}


def test_prompts_for_other_adapters_and_salts_share_nothing() -> None:
    prompt = {"messages": [SYSTEM, HELLO]}
    salts: list[dict[str, Any]] = [
        {},
        {"lora": "a"},
        {"lora": "b"},
        {"cache_salt": "a"},
        {"lora": "b", "cache_salt": "a"},
    ]
    found = [routing_of(call(prompt, **params))["prefix"] for params in salts]

    assert all(found)
    assert len(set().union(*found)) == sum(map(len, found))
    assert routing_of(call(prompt, temperature=0.5, max_tokens=9))["prefix"] == found[0]


# --- two replicas -------------------------------------------------------------------------------------------

TOML = """
[stages.llm]
adapter = "synthetic-text"
replicas = 2
tokens = 2
[pipelines.chat]
serve_as = "chat"
routing = "{routing}"
edges = ["in.messages -> llm.prompt", "llm.text -> out.text", "llm.rendered -> out.rendered"]
[gateways.openai]
"""
ENDLESS: dict[str, Any] = {"tokens": 1_000_000, "step_time_s": 0.01}


def done(deployment: Running) -> list[int]:
    return [deployment.stages[name].stats.done for name in ("llm.0", "llm.1")]


@asynccontextmanager
async def first_is_busy(deployment: Running) -> AsyncIterator[None]:
    """While this is open, the first replica writes a text without an end; afterwards it is free again."""
    body = {"messages": [HELLO], "stream": True, "sampling_params_list": [ENDLESS]}
    async with (
        aiohttp.ClientSession(deployment.url) as session,
        session.post(CHAT, json=body) as response,
    ):
        assert (await response.content.readline()).startswith(b"data: ")
        yield
    while (await deployment.gateway.client.admin("status"))["requests"]["live"]:
        pass  # each question is a round trip; the test's time limit bounds them


async def ask(deployment: Running, path: str, body: dict[str, Any], **headers: str) -> int:
    """Return which replica answered."""
    before = done(deployment)
    status, answer = await post(deployment, path, body, **headers)
    assert status == 200, answer
    while done(deployment) == before:
        await deployment.gateway.client.admin("health")
    now = done(deployment)
    assert sum(now) == sum(before) + 1
    return int(now[1] > before[1])


BODIES = {
    CHAT: {"messages": [SYSTEM, HELLO]},
    "/v1/chat/completions/batch": {"messages": [[SYSTEM, HELLO]]},
    "/v1/completions": {"prompt": SYSTEM["content"] + "hello"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_prompt_goes_where_its_beginning_was_seen(path: str) -> None:
    async with running(TOML.format(routing="prefix")) as deployment:
        async with first_is_busy(deployment):
            assert await ask(deployment, path, BODIES[path]) == 1

        assert await ask(deployment, path, {"prompt" if "prompt" in BODIES[path] else "messages": _other(path)}) == 0
        assert await ask(deployment, path, BODIES[path]) == 1


def _other(path: str) -> Any:
    other = {"role": "system", "content": "You know nothing about anything. " * 40}
    return {CHAT: [other, HELLO], "/v1/completions": other["content"]}.get(path, [[other, HELLO]])


async def test_conversation_goes_on_where_it_began() -> None:
    turns = [SYSTEM, HELLO, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "And now?"}]
    async with running(TOML.format(routing="prefix")) as deployment:
        async with first_is_busy(deployment):
            assert await ask(deployment, CHAT, {"messages": turns[:2]}) == 1

        assert await ask(deployment, CHAT, {"messages": turns}) == 1


@pytest.mark.parametrize("routing", ["prefix", "least_tokens", "round_robin"])
@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
async def test_session_stays_with_its_replica(path: str, routing: str) -> None:
    """However short its prompts are; the header goes before the body."""
    body: dict[str, Any] = {"messages": [[HELLO]] if path.endswith("batch") else [HELLO]}
    if path == "/v1/completions":
        body = {"prompt": "hello"}
    named = {} if path == "/tokenize" else {"session_id": "mine"}
    async with running(TOML.format(routing=routing)) as deployment:
        async with first_is_busy(deployment):
            assert await ask(deployment, path, body, **{"X-Session-ID": "mine"}) == 1

        assert await ask(deployment, path, body | named, **({} if named else {"X-Session-ID": "mine"})) == 1
        assert await ask(deployment, path, body | named, **{"X-Session-ID": "yours"}) == 0
        assert await ask(deployment, path, body, **{"X-Session-ID": "mine"}) == 1


async def test_replicas_take_turns() -> None:
    async with running(TOML.format(routing="round_robin")) as deployment:
        found = [await ask(deployment, CHAT, BODIES[CHAT]) for _ in range(6)]

    assert found == [0, 1, 0, 1, 0, 1]


async def test_work_that_is_not_known_to_be_equal_is_balanced_by_tokens() -> None:
    """One long prompt weighs more than two short ones."""
    async with running(TOML.format(routing="least_tokens")) as deployment:
        long = {"messages": [SYSTEM], "stream": True, "sampling_params_list": [ENDLESS | {"max_tokens": 10_000}]}
        async with aiohttp.ClientSession(deployment.url) as session, session.post(CHAT, json=long) as response:
            await response.content.readline()
            short = {"messages": [HELLO], "stream": True, "sampling_params_list": [ENDLESS | {"max_tokens": 100}]}
            async with session.post(CHAT, json=short) as second:
                await second.content.readline()

                assert await ask(deployment, CHAT, {"messages": [HELLO]}) == 1


@pytest.mark.parametrize("name", ["a" * 257, "mine\u2028"])
async def test_session_that_is_none_is_refused(name: str) -> None:
    body = {"messages": [HELLO]}
    async with running(TOML.format(routing="prefix")) as deployment:
        for fields, headers, param in (
            ({"session_id": name}, {}, "session_id"),
            ({}, {"X-Session-ID": name}, "X-Session-ID"),
        ):
            status, answer = await post(deployment, CHAT, body | fields, **headers)

            assert (status, answer["error"]["param"]) == (400, param), json.dumps(answer)
            assert "1 to 256 printable characters" in answer["error"]["message"]
