"""What servers send: no message raises, and whatever is of a known type and shape is of its type."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.client.realtime_events import EVENTS, ErrorEvent, ResponseDone, Unknown
from omni_bus.client.speech_stream import SPEECH_EVENTS, UnknownSpeechEvent

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["event_id", "server_event_seq", "session", "item", "response", "error", "delta", "item_id", "usage", "event"]
MESSAGES = st.dictionaries(st.sampled_from(FIELDS) | st.text(), VALUES, max_size=5).flatmap(
    lambda fields: st.sampled_from(sorted(EVENTS.kinds | SPEECH_EVENTS.kinds)).map(lambda kind: fields | {"type": kind})
)


@given(st.binary() | st.text() | VALUES.map(json.dumps) | MESSAGES.map(json.dumps))
def test_no_message_raises(data: str | bytes) -> None:
    for decoder, unknown in ((EVENTS, Unknown), (SPEECH_EVENTS, UnknownSpeechEvent)):
        event = decoder.decode(data)
        if isinstance(event, unknown):
            assert event.problem


@pytest.mark.parametrize("data", ['{"type": "\\ud800"}', '{"type": "response.done", "n": 1' + "0" * 400 + "}"])
def test_what_is_no_json_for_us_is_unknown(data: str) -> None:
    assert isinstance(EVENTS.decode(data), Unknown)


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"error": {"type": "server_error", "code": "x", "message": "why", "new": 1}}, "x", "why"),
        ({"error": "why", "code": "x"}, "x", "why"),
        ({"error": {"code": 429, "message": "why"}}, 429, "why"),
    ],
)
def test_errors_of_all_shapes_have_a_body(fields: dict[str, Any], code: Any, message: str) -> None:
    event = EVENTS.decode(json.dumps({"type": "error"} | fields))
    assert isinstance(event, ErrorEvent)
    assert (event.body.code, event.body.message) == (code, message)


def test_a_response_of_another_server() -> None:
    item = {
        "id": "i",
        "type": "function_call",
        "object": "realtime.item",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
    }
    details = {"type": "failed", "error": {"type": "t", "code": None}}
    response = {"id": "r", "status": "failed", "status_details": details, "output": [item], "max_output_tokens": "inf"}
    event = EVENTS.decode(json.dumps({"type": "response.done", "event_id": "e", "response": response}))
    assert isinstance(event, ResponseDone)
    assert (event.response.output[0].name, event.response.output[0].text) == ("f", "")
    assert event.response.status_details is not None
