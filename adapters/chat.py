"""The `Json` payload on a ``prompt`` port, checked: what adapters that write text accept (`omni_bus.wire.prompt`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Json, Payload, kind_of
from omni_bus.wire.prompt import MEDIA_PORTS, Message, Prompt, Role

if TYPE_CHECKING:
    from collections.abc import Collection

PLAIN = frozenset({"messages", "add_generation_prompt", "parallel_tool_calls"})
"""Fields of a `Prompt` that every adapter honours: conversations of plain text, answered in a new message."""

_DEFAULTS = Prompt()


def read_prompt(payload: Payload, adapter: str, honours: Collection[str] = PLAIN) -> Prompt:
    """Return a checked prompt; ``developer`` is read as ``system``, as OpenAI's models do.

    Args:
        payload: what came on the port.
        adapter: its name, for refusals.
        honours: the fields that it honours. Set ones that are not among them are refused, not dropped. Media parts
            need their port's name (``images``), tool calls and a tool's results need ``tools``.

    Raises:
        BadInput: the payload has another form or asks for more than the adapter does; names the place
            (``messages[2].content[0].type``) and what is allowed.
    """
    if not isinstance(payload, Json):
        raise BadInput(f"prompt: {kind_of(payload)} came (allowed: json)", field="prompt")
    if not isinstance(payload.value, dict):
        raise BadInput("prompt: no object came (allowed: an object with 'messages')", field="prompt")
    try:
        prompt = msgspec.convert(payload.value, Prompt)
    except msgspec.ValidationError as error:
        raise _refusal_of(error) from None
    forms = [name for name in ("messages", "text", "token_ids") if getattr(prompt, name) not in (None, [])]
    if len(forms) != 1:
        field = forms[1] if forms else "messages"
        raise BadInput(
            f"{field}: {' and '.join(forms) or 'nothing'} came (allowed: one of messages, text and token_ids, "
            "with something in it)",
            field=field,
        )
    for name in Prompt.__struct_fields__:
        value = getattr(prompt, name)
        if name not in honours and value != getattr(_DEFAULTS, name):
            raise BadInput(f"{name}: {adapter} can't honour it (allowed: {getattr(_DEFAULTS, name)!r})", field=name)
    messages = [_checked(message, f"messages[{i}]", adapter, honours) for i, message in enumerate(prompt.messages)]
    return msgspec.structs.replace(prompt, messages=messages)


def _checked(message: Message, place: str, adapter: str, honours: Collection[str]) -> Message:
    if "tools" not in honours:
        if message.role == "tool":
            raise BadInput(
                f"{place}.role: 'tool' came (allowed by {adapter}: system, developer, user, assistant)",
                field=f"{place}.role",
            )
        if message.tool_calls:
            raise BadInput(f"{place}.tool_calls: {adapter} calls no tools (allowed: none)", field=f"{place}.tool_calls")
    if message.content is None and not message.tool_calls:
        raise BadInput(
            f"{place}.content: nothing came (allowed: a string or a list of parts)", field=f"{place}.content"
        )
    if message.content == []:
        raise BadInput(f"{place}.content: an empty list came (allowed: at least one part)", field=f"{place}.content")
    if isinstance(message.content, list):
        for j, part in enumerate(message.content):
            _check_part(part.type, part.text, f"{place}.content[{j}]", adapter, honours)
    if message.role == "developer":
        return msgspec.structs.replace(message, role="system")
    return message


def _check_part(kind: str, text: str | None, place: str, adapter: str, honours: Collection[str]) -> None:
    if kind == "text":
        if text is None:
            raise BadInput(f"{place}.text: nothing came (allowed: a string)", field=f"{place}.text")
    elif MEDIA_PORTS[kind] not in honours:
        raise BadInput(
            f"{place}.type: '{kind}' came (allowed: 'text'; {adapter} reads nothing else here)", field=f"{place}.type"
        )


def text_of(message: Message) -> str:
    """Return a message's text parts, joined as they are."""
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


def plain_messages(prompt: Prompt) -> list[dict[str, str]]:
    """Return messages of text alone as role and content: what every chat template reads."""
    return [{"role": message.role, "content": text_of(message)} for message in prompt.messages]


def template_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Return messages as chat templates of transformers read them: all that is set, parts as parts."""
    return msgspec.to_builtins(prompt.messages)


_WORDS = {"role": ", ".join(get_args(Role)), "type": "text, image, audio, video"}
"""Allowed values of the fields that have a list of them."""


def _refusal_of(error: msgspec.ValidationError) -> BadInput:
    """Return msgspec's refusal under the place's name; it never quotes a value, which may be a prompt."""
    words, _, place = str(error).partition(" - at `$.")
    place = place.rstrip("`")
    if found := re.match(r"Object contains unknown field `(.{0,100})`", words, re.DOTALL):
        name = f"{place}.{found[1]}" if place else found[1]
        return BadInput(f"{name}: unknown field (allowed: those of a prompt)", field=name)
    if found := re.match(r"Object missing required field `(.*)`", words):
        name = f"{place}.{found[1]}" if place else found[1]
        return BadInput(f"{name}: nothing came (allowed: {_WORDS.get(found[1], 'a value')})", field=name)
    place = place or "prompt"
    if found := re.match(r"Expected (.*), got `(.*)`", words):
        return BadInput(f"{place}: {found[2]} came (allowed: {found[1]})", field=place)
    allowed = _WORDS.get(place.rpartition(".")[2], words.removeprefix("Expected "))
    return BadInput(f"{place}: another value came (allowed: {allowed})", field=place)
