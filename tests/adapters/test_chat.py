from __future__ import annotations

from typing import Any

import pytest

from adapters.chat import plain_messages, read_prompt
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Json, Text


def test_strings_and_text_parts_become_plain_messages() -> None:
    payload = Json(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "One, "}, {"type": "text", "text": "two."}]},
                {"role": "assistant", "content": ""},
            ]
        }
    )

    assert plain_messages(read_prompt(payload, "some-engine")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One, two."},
        {"role": "assistant", "content": ""},
    ]


PICTURE = {"type": "image"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "x"}], "text": "x"}, "text"),
        ({"text": "x"}, "text"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "colour": 1}, "colour"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": None}]}, "messages[1].content"),
    ],
)
def test_other_forms_are_refused_by_place(value: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_prompt(Json(value), "some-engine")

    assert caught.value.field == field
    assert "allowed" in caught.value.message


def test_payload_that_is_not_json_is_refused() -> None:
    with pytest.raises(BadInput, match=r"prompt: text came \(allowed: json\)"):
        read_prompt(Text("hello"), "some-engine")


def test_refusal_does_not_repeat_the_prompt() -> None:
    secret = "my password is swordfish, and this goes on for a while"

    with pytest.raises(BadInput) as caught:
        read_prompt(Json({"messages": secret}), "some-engine")

    assert "swordfish" not in caught.value.message
