"""A `Json` payload with chat messages, checked: what text-generating adapters accept on their ``prompt`` port."""

from __future__ import annotations

from typing import Any

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Json, Payload, kind_of

ROLES = ("system", "user", "assistant")
"""What every chat template knows; ``developer`` is read as ``system``, as OpenAI's models do."""


def read_messages(payload: Payload) -> list[dict[str, str]]:
    """Return the messages of ``{"messages": [...]}`` with plain-text contents, in order.

    Contents are strings or lists of ``{"type": "text", "text": ...}`` parts, which are joined as they are. What a text
    model can't honour (pictures, tool calls, names) is refused, not dropped.

    Raises:
        BadInput: the payload has another form; names the place (``messages[2].content[0].type``) and what is allowed.
    """
    if not isinstance(payload, Json):
        raise BadInput(f"prompt: {kind_of(payload)} came (allowed: json)", field="prompt")
    if not isinstance(payload.value, dict):
        raise BadInput(f"prompt: {_shown(payload.value)} came (allowed: an object with 'messages')", field="prompt")
    value: dict[Any, Any] = payload.value
    _refuse_unknown(value, ("messages",), "")
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadInput(f"messages: {_shown(messages)} came (allowed: a list of at least one message)", field="messages")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _refusal(place, message, "an object with 'role' and 'content'")
    _refuse_unknown(message, ("role", "content"), f"{place}.")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise _refusal(f"{place}.role", role, ", ".join((*ROLES, "developer")))
    return {"role": role, "content": _read_content(message.get("content"), f"{place}.content")}


def _read_content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _refusal(place, content, "a string or a list of text parts")
    return "".join(_read_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise _refusal(place, part, "an object with 'type' and 'text'")
    if part.get("type") != "text":
        raise _refusal(f"{place}.type", part.get("type"), "'text'; this model reads nothing else")
    _refuse_unknown(part, ("type", "text"), f"{place}.")
    if not isinstance(part.get("text"), str):
        raise _refusal(f"{place}.text", part.get("text"), "a string")
    return part["text"]


def _refuse_unknown(value: dict[Any, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in value:
        if key not in known:
            place = f"{prefix}{key}"[:100]
            raise BadInput(f"{place}: unknown field (allowed: {', '.join(known)})", field=place)


def _refusal(place: str, value: Any, allowed: str) -> BadInput:
    return BadInput(f"{place}: {_shown(value)} came (allowed: {allowed})", field=place)


def _shown(value: Any) -> str:
    """Return a value as an error message may show it: short, and without the text of a prompt."""
    match value:
        case None:
            return "nothing"
        case str():
            return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
        case bool() | int() | float():
            return repr(value)[:40]
        case list():
            return f"a list of {len(value)}"
        case _:
            return f"a {type(value).__name__}"
