"""Requests on the bus for one of a client."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from actors.testing import running
from gateways.fan_out import Call, run_all, take_all
from gateways.http import Terms
from omni_bus.client import End, Item, RequestEvent
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Json, Payload, Text

TOML = """
[stages.relay]
adapter = "synthetic-relay"
[stages.voice]
adapter = "synthetic-speech"
[pipelines.relay]
edges = ["in.text -> relay.text", "relay.text -> out.text"]
window_chunks = 2
[pipelines.speech]
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
[gateways.openai]
"""
TERMS = Terms(key="", timeout_s=20.0, input_bytes=0, session="")


def call(payloads: list[Payload]) -> Call:
    return Call(pipeline="relay", outputs=("text",), params={}, inputs={"text": payloads})


@pytest.mark.parametrize("num_calls", [1, 3])
async def test_input_in_many_pieces_is_sent_while_outputs_are_read(num_calls: int) -> None:
    """Sent first, it would fill the windows on either side of a stage that answers before its input ends."""
    words = [f"{i} " for i in range(100)]
    heard = [""] * num_calls
    async with running(TOML) as deployment:
        calls = [call([Text(word) for word in words]) for _ in range(num_calls)]
        async with aclosing(run_all(deployment.gateway.client, calls, TERMS)) as events:
            async for index, event in events:
                if isinstance(event, Item) and isinstance(event.payload, Text):
                    heard[index] += event.payload.text

    assert heard == ["".join(words)] * num_calls


@pytest.mark.parametrize("num_calls", [1, 3])
async def test_taker_gets_what_it_can_not_take_at_once_again(num_calls: int) -> None:
    class Heard:
        def __init__(self) -> None:
            self.texts = [""] * num_calls
            self.num_ends = self.num_now = self.num_later = 0

        def take_now(self, index: int, event: RequestEvent) -> bool:
            if isinstance(event, Item) and isinstance(event.payload, Text) and len(self.texts[index]) % 2:
                self.texts[index] += event.payload.text
                self.num_now += 1
                return True
            return False

        async def take(self, index: int, event: RequestEvent) -> None:
            self.num_later += 1
            if isinstance(event, Item) and isinstance(event.payload, Text):
                self.texts[index] += event.payload.text
            self.num_ends += isinstance(event, End)

    words = [f"{i} " for i in range(100)]
    heard = Heard()
    async with running(TOML) as deployment:
        calls = [call([Text(word) for word in words]) for _ in range(num_calls)]
        await take_all(deployment.gateway.client, calls, TERMS, heard)
        assert not deployment.gateway.client.requests

    assert heard.texts == ["".join(words)] * num_calls
    assert heard.num_ends == num_calls
    assert heard.num_now > 20
    assert heard.num_later > 20
    assert heard.num_now + heard.num_later == 101 * num_calls


async def test_input_that_can_not_be_sent_ends_its_request() -> None:
    async with running(TOML) as deployment:
        events = run_all(deployment.gateway.client, [call([Text("a"), Json({})])], TERMS)
        with pytest.raises(BadInput, match="input 'text' got a json"):
            async for _ in events:
                pass
        assert not deployment.gateway.client.requests
