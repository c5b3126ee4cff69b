from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.tool_calls import CallFilter, Said, grammar_of_calls
from omni_bus.errors import BadInput
from omni_bus.wire.prompt import FunctionTool, Tool


def read(*pieces: str, max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Return the text, and each call's name and arguments; checks how calls are announced."""
    calls = CallFilter(max_calls=max_calls)
    found = [item for piece in pieces for item in calls.feed(piece)] + calls.flush()
    text = ""
    named: list[tuple[str, str]] = []
    for item in found:
        if isinstance(item, Said):
            text += item.text
        elif item.name is not None:
            assert (item.index, bool(item.id)) == (len(named), True)
            named.append((item.name, item.arguments))
        else:
            assert (item.index, item.id) == (len(named) - 1, None)
            named[-1] = (named[-1][0], named[-1][1] + item.arguments)
    assert calls.num_calls == len(named)
    return text, named


TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "no call": ("Just words <b>", "Just words <b>", []),
    "one call": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    "words around": (
        'Sure. \n<tool_call>{"name":"f","arguments":{}}</tool_call>\nDone.\n',
        "Sure.Done.\n",
        [("f", "{}")],
    ),
    "two calls": (
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{"x":[1,{}]}}</tool_call>',
        "",
        [("f", "{}"), ("g", '{"x":[1,{}]}')],
    ),
    "a list, as SmolLM2 writes it": (
        '<tool_call>[{"name": "f", "arguments": {"a": "b"}}, {"name": "g", "arguments": {}}]</tool_call>',
        "",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"z": 1}, "name": "g"}</tool_call>',
        "",
        [("g", '{"z": 1}')],
    ),
    "parameters as Llama calls them": (
        '<tool_call>{"name":"f","parameters":{"q":0}}</tool_call>',
        "",
        [("f", '{"q":0}')],
    ),
    "arguments in a string": ('<tool_call>{"name":"f","arguments":"{\\"q\\":1}"}</tool_call>', "", [("f", '{"q":1}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "other members": (
        '<tool_call>{"id": -1.5e3, "name": "f", "arguments": {}, "ok": true}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "quotes, tags and brackets in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "}]\\"\\\\</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "}]\\"\\\\</tool_call>"}')],
    ),
    "no JSON": ("x <tool_call>nonsense</tool_call> y", "x <tool_call>nonsense</tool_call> y", []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "nothing between the tags": ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    "cut before the name": ('<tool_call>{"nam', '<tool_call>{"nam', []),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "cut in the tag": ("a <tool_c", "a <tool_c", []),
    "blanks at the end": ("a \n", "a \n", []),
    "rubbish after a call": (
        '<tool_call>{"name":"f","arguments":{}} what</tool_call>',
        "what</tool_call>",
        [("f", "{}")],
    ),
}


@pytest.mark.parametrize(("written", "text", "calls"), TEXTS.values(), ids=TEXTS)
def test_call_is_read_however_it_is_cut(written: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read(written) == (text, calls)
    assert read(*written) == (text, calls)
    for cut in range(len(written)):
        assert read(written[:cut], written[cut:]) == (text, calls)


@given(st.text(alphabet='<>/tool_ca"{}[]:,\\ name\n1', max_size=60), st.integers(0, 60))
def test_any_text_is_read_the_same_however_it_is_cut(written: str, cut: int) -> None:
    assert read(written[:cut], written[cut:]) == read(written)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5), st.integers(0, 200))
def test_arguments_come_out_as_they_were_written(value: Any, cut: int) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    written = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

    assert read(written[:cut], written[cut:]) == ("", [("f", arguments)])


def test_arguments_stream_while_they_are_written() -> None:
    calls = CallFilter()
    calls.feed('<tool_call>{"name": "f", "arguments": {"a"')

    [delta] = calls.feed(': "long te')

    assert not isinstance(delta, Said)
    assert delta.arguments == ': "long te'


def test_nothing_follows_the_last_allowed_call() -> None:
    calls = CallFilter(max_calls=1)
    written = (
        '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call> more'
    )

    assert read(written, max_calls=1) == ("", [("f", "{}")])
    calls.feed(written)
    assert calls.is_full
    assert calls.feed("x") == calls.flush() == []


# --- grammars -----------------------------------------------------------------------------------------------


def tool(name: str, **parameters: Any) -> Tool:
    return Tool(function=FunctionTool(name=name, parameters=parameters))


def test_only_a_duty_to_call_has_a_grammar() -> None:
    tools = [tool("f"), tool("g")]

    assert grammar_of_calls(tools, "none", is_one=False) is None
    assert grammar_of_calls(tools, "auto", is_one=False) is None
    assert "call_1" in str(grammar_of_calls(tools, "required", is_one=False))
    assert "call_1" not in str(grammar_of_calls(tools, "function:g", is_one=False))


def test_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^tools\[1\]\.function\.parameters\.type: 'array' came \(allowed: 'object'\)"):
        grammar_of_calls([tool("f"), tool("g", type="array")], "required", is_one=False)
