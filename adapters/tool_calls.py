"""Calls of tools in the text that a model writes, read while it is written.

The format is that of Hermes, Qwen and SmolLM2: between ``<tool_call>`` and ``</tool_call>`` stands a JSON object with
``name`` and ``arguments`` (or ``parameters``), or a list of such objects. A request that must call a tool is held to
the same format by a grammar.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from adapters.detokenize import longest_beginning
from adapters.structure import WHITESPACE, grammar_of
from omni_bus.errors import BadInput
from omni_bus.wire.prompt import ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from adapters.sampling import Structure
    from omni_bus.wire.prompt import Prompt, Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class Said(NamedTuple):
    """Text that is no part of a call."""

    text: str


class MalformedCall(Exception):
    """What stands between the tags is no call."""


class CallFilter:
    """Splits a text, as it comes, into calls and the rest; how it was cut into pieces makes no difference.

    A call is announced with its name, then its arguments follow as they are written. What stands between the tags and
    can't be read is text like any other, from the tag on if no call was announced there. Blanks beside calls are left
    out.
    """

    def __init__(self, *, max_calls: int | None = None) -> None:
        """Begin.

        Args:
            max_calls: after so many nothing more is passed on, and `is_full` says so.
        """
        self._max_calls = max_calls
        self._kept = ""
        self._block: _Block | None = None
        self._is_after_call = False
        self.num_calls = 0
        """Calls that were announced."""
        self.is_full = False
        """Whether `max_calls` are complete."""

    def feed(self, text: str) -> list[Said | ToolCallDelta]:
        """Return what became certain."""
        found: list[Said | ToolCallDelta] = []
        self._kept += text
        while self._kept and not self.is_full:
            if self._block is None:
                if not self._read_text(found):
                    break
            elif not self._read_block(self._block, found):
                break
        return _joined(found)

    def flush(self) -> list[Said | ToolCallDelta]:
        """Return what is kept back: no more text comes."""
        if self.is_full:
            return []
        text, self._kept = self._kept, ""
        if self._block is not None and not self._block.has_announced:
            text = self._block.seen + text
        elif self._is_after_call:
            text = text.strip(BLANKS)
        self._block = None
        return [Said(text)] if text else []

    def _read_text(self, found: list[Said | ToolCallDelta]) -> bool:
        """Pass text on up to the next block; True if one begins."""
        text, tag, rest = self._kept.partition(OPEN)
        if tag:
            text, blanks = text.rstrip(BLANKS), text[len(text.rstrip(BLANKS)) :]
            self._kept, self._block = rest, _Block(self.num_calls, blanks)
        else:
            certain = text[: len(text) - longest_beginning(text, (OPEN,))].rstrip(BLANKS)
            self._kept = text[len(certain) :]
            text = certain
        if self._is_after_call:
            text = text.lstrip(BLANKS)
        if text:
            self._is_after_call = False
            found.append(Said(text))
        return bool(tag)

    def _read_block(self, block: _Block, found: list[Said | ToolCallDelta]) -> bool:
        """Read on in a block; True if it ended."""
        for position, character in enumerate(self._kept):
            try:
                deltas = block.feed(character)
            except MalformedCall:
                text = character + self._kept[position + 1 :]
                # From the tag on it is text, and is passed on as such: no tag in it is looked for again.
                found.append(Said(text[:1] if block.has_announced else block.seen))
                self._kept, self._block = text[1:], None
                self._is_after_call = False
                return True
            found.extend(deltas)
            self.num_calls = block.num_calls
            if self._max_calls is not None and block.num_complete >= self._max_calls:
                self.is_full = True
                self._kept, self._block = "", None
                return False
            if block.is_over:
                self._kept, self._block = self._kept[position + 1 :], None
                self._is_after_call = block.has_announced
                return True
        self._kept = ""
        return False


class _Block:
    """What stands between two tags, read character by character."""

    def __init__(self, num_calls: int, blanks: str) -> None:
        self.num_calls = num_calls
        self.num_complete = num_calls
        self.seen = blanks + OPEN
        """Everything so far, and the blanks before; no longer kept up once a call was announced."""
        self.has_announced = False
        self.is_over = False
        self._call: _Call | None = None
        self._tag = ""
        self._is_list = False

    def feed(self, character: str) -> list[ToolCallDelta]:
        """Take a character.

        Raises:
            MalformedCall: it can't stand here.
        """
        if not self.has_announced:
            self.seen += character
        if self._call is not None:
            deltas = self._call.feed(character)
            if deltas and not self._call.was_counted:
                self._call.was_counted = self.has_announced = True
                self.num_calls += 1
            if self._call.is_over:
                self._call = None
                self.num_complete += 1
            return deltas
        if self._tag or character == "<":
            self._tag += character
            if not CLOSE.startswith(self._tag):
                raise MalformedCall
            self.is_over = self._tag == CLOSE
            if self.is_over and not self.has_announced:
                raise MalformedCall
        elif character == "{":
            self._call = _Call(self.num_calls)
        elif character == "[" and not self._is_list:
            self._is_list = True
        elif character not in BLANKS + ",]":
            raise MalformedCall
        return []


class _Call:
    """One JSON object with a name and arguments, read character by character after its first brace."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._state: Literal["key", "colon", "value", "comma"] = "key"
        self._key = ""
        self._value: _Value | None = None
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""
        self._has_arguments = False
        self.was_counted = False
        self.is_over = False

    def feed(self, character: str) -> list[ToolCallDelta]:
        """Take a character.

        Raises:
            MalformedCall: it can't stand here.
        """
        deltas: list[ToolCallDelta] = []
        if self._value is not None:
            value, is_taken = self._value, self._value.feed(character)
            if is_taken and self._is_streamed(value):
                deltas.append(self._delta(character))
            if value.is_over:
                self._value = None
                deltas += self._end_value(value)
            if is_taken:
                return deltas
        return deltas + self._between_values(character)

    def _between_values(self, character: str) -> list[ToolCallDelta]:
        if character in BLANKS:
            return []
        match self._state, character:
            case "key", '"':
                self._state, self._value = "colon", _Value(character)
            case "colon", ":":
                self._state = "value"
            case "value", _:
                self._state, self._value = "comma", _Value(character)
                if self._is_streamed(self._value):
                    return [self._delta(character)]
            case "comma", ",":
                self._state = "key"
            case (("key" | "comma"), "}"):
                return self._end()
            case _:
                raise MalformedCall
        return []

    def _is_streamed(self, value: _Value) -> bool:
        """Whether the value is arguments that are passed on as they come."""
        return self._state == "comma" and self._key in _ARGUMENTS and self._name is not None and not value.is_string

    def _end_value(self, value: _Value) -> list[ToolCallDelta]:
        """Take a value, or a key, that is whole."""
        if self._state == "colon":
            self._key = _string(value.text)
        elif self._key == "name":
            self._name = _string(value.text)
            announced = ToolCallDelta(index=self._index, id=f"call_{uuid.uuid4().hex[:24]}", name=self._name)
            return [announced, *([] if self._early is None else [self._delta(self._early)])]
        elif self._key in _ARGUMENTS:
            self._has_arguments = True
            # Some models write their JSON into a string.
            whole = _string(value.text) if value.is_string else value.text
            if self._name is None:
                self._early = whole
            elif value.is_string:
                return [self._delta(whole)]
        return []

    def _end(self) -> list[ToolCallDelta]:
        if self._name is None:
            raise MalformedCall
        self.is_over = True
        return [] if self._has_arguments else [self._delta("{}")]

    def _delta(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(index=self._index, arguments=arguments)


class _Value:
    """One JSON value, of which only the end is looked for; its first character is known."""

    def __init__(self, first: str) -> None:
        self.text = first
        self.is_string = first == '"'
        self.is_over = False
        self._is_in_string = self.is_string
        self._is_escaped = False
        self._depth = 1 if first in "{[" else 0
        self._is_scalar = first.isalnum() or first == "-"
        if not (self._is_scalar or self._depth or self.is_string):
            raise MalformedCall

    def feed(self, character: str) -> bool:
        """Take a character; False if it isn't the value's, which then is over."""
        if self._is_scalar and character in ",}" + BLANKS:
            self.is_over = True
            return False
        self.text += character
        if self._is_scalar:
            return True
        if self._is_in_string:
            if self._is_escaped or character == "\\":
                self._is_escaped = not self._is_escaped
            elif character == '"':
                self._is_in_string = False
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        self.is_over = not (self._is_in_string or self._depth)
        return True


def _string(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        raise MalformedCall from None
    if not isinstance(value, str):
        raise MalformedCall
    return value


def _joined(found: Iterable[Said | ToolCallDelta]) -> list[Said | ToolCallDelta]:
    """Return the same with neighbours that belong together made one."""
    joined: list[Said | ToolCallDelta] = []
    for item in found:
        last = joined[-1] if joined else None
        match last, item:
            case Said(text=before), Said(text=text):
                joined[-1] = Said(before + text)
            case ToolCallDelta(index=index), ToolCallDelta(id=None) if index == item.index:
                joined[-1] = msgspec.structs.replace(last, arguments=last.arguments + item.arguments)
            case _:
                joined.append(item)
    return joined


def calls_of(prompt: Prompt, outputs: Collection[str], parser: str) -> CallFilter | None:
    """Return the reader of an answer's calls; None where it has none.

    Args:
        prompt: what is asked.
        outputs: ports that are wanted.
        parser: how the stage reads calls that the model makes by itself; ``none`` if it doesn't.

    Raises:
        BadInput: the model is to decide by itself, and the stage doesn't read that.
    """
    if prompt.tool_choice == "none" or "tool_calls" not in outputs:
        return None
    if prompt.tool_choice == "auto" and parser == "none":
        raise BadInput(
            "tool_choice: 'auto' came (allowed: none, required, function:NAME; the stage has no tool_call_parser)",
            field="tool_choice",
        )
    is_one = not prompt.parallel_tool_calls or prompt.tool_choice.startswith("function:")
    return CallFilter(max_calls=1 if is_one else None)


# --- calls that must be made --------------------------------------------------------------------------------


def grammar_of_calls(tools: Sequence[Tool], tool_choice: str, *, is_one: bool) -> str | None:
    """Return a grammar of answers that call tools, in llguidance's notation; None where the model decides.

    Args:
        tools: what can be called.
        tool_choice: of a `Prompt`.
        is_one: at most one call.

    Raises:
        BadInput: a tool's parameters aren't the schema of an object.
    """
    if tool_choice in {"none", "auto"}:
        return None
    name = tool_choice.removeprefix("function:")
    callable_ = [tool.function for tool in tools if tool_choice == "required" or tool.function.name == name]
    rules: list[str] = []
    for i, function in enumerate(callable_):
        if function.parameters.get("type", "object") != "object":
            place = f"tools[{[tool.function for tool in tools].index(function)}].function.parameters.type"
            raise BadInput(f"{place}: {function.parameters['type']!r} came (allowed: 'object')", field=place)
        begin = json.dumps(f'{OPEN}\n{{"name": {json.dumps(function.name)}, "arguments": ')
        rules.append(f"call_{i}: {begin} %json {json.dumps(_closed(function.parameters))} {json.dumps('}' + CLOSE)}")
    more = "" if is_one or tool_choice != "required" else ' ("\\n" call)*'
    names = " | ".join(f"call_{i}" for i in range(len(callable_)))
    return "\n".join([f"start: call{more}", f"call: {names}", *rules])


def grammar_of_answer(prompt: Prompt, structure: Structure | None) -> tuple[str, str] | None:
    """Return which field asks for it, and the Lark grammar that the answer is held to; None for free text.

    Raises:
        BadInput: calls and a structure are both asked for, or one of them can't be written as a grammar.
    """
    calls = grammar_of_calls(prompt.tools, prompt.tool_choice, is_one=not prompt.parallel_tool_calls)
    if calls is None:
        return None if structure is None else grammar_of(structure)
    if structure is not None:
        raise BadInput(
            "structure: it came with a tool_choice that asks for calls (allowed: one of them)", field="structure"
        )
    return "tools", calls


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments: without a word on other members it has none."""
    closed = {"type": "object", "additionalProperties": False, **parameters}
    if not closed.get("properties") and "$ref" not in closed and "additionalProperties" not in parameters:
        closed["properties"] = {}
    return {**closed, "x-guidance": {"whitespace_pattern": WHITESPACE}}
