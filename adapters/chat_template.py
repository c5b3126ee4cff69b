"""A prompt as the text that its model reads: the model's chat template, with all that a request may tell it."""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from adapters.chat import text_of
from adapters.tool_calls import CLOSE, OPEN
from omni_bus.errors import BadInput
from omni_bus.wire.prompt import Prompt

if TYPE_CHECKING:
    from omni_bus.wire.prompt import Message

HONOURS = frozenset(Prompt.__struct_fields__) - {"mm_processor_kwargs"}
"""Fields of a `Prompt` that `ChatTemplate` honours."""

OF_MESSAGES = (
    "tools",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields that only a chat template can honour."""

_DEFAULTS = Prompt()


class ChatTemplate:
    """The chat template of a tokenizer or processor of transformers."""

    def __init__(self, owner: Any, *, keeps_parts: bool, is_request_trusted: bool) -> None:
        """Prepare.

        Args:
            owner: the tokenizer or processor.
            keeps_parts: the template reads lists of parts; otherwise it is given their text.
            is_request_trusted: requests may bring templates of their own.
        """
        self._owner = owner
        self._keeps_parts = keeps_parts
        self._is_request_trusted = is_request_trusted
        self._arguments = frozenset(inspect.signature(owner.apply_chat_template).parameters) | {"reasoning_effort"}

    def render(self, prompt: Prompt) -> str:
        """Return the text of a prompt that has messages.

        Raises:
            BadInput: the template refuses it, or reads nothing of what the request tells it.
        """
        import jinja2

        check_fields(prompt)
        template = self._template(prompt)
        tools = [] if prompt.tool_choice == "none" else prompt.tools
        variables = self._variables(prompt, template)
        messages = [
            as_template_reads(message, i, keeps_parts=self._keeps_parts) for i, message in enumerate(prompt.messages)
        ]
        if not _reads(template, "tools"):
            messages = with_tools_as_text(messages, tools)
            tools = []
        if prompt.documents:
            variables["documents"] = prompt.documents
        if tools:
            variables["tools"] = msgspec.to_builtins(tools)
        try:
            return self._owner.apply_chat_template(
                messages,
                tokenize=False,
                chat_template=template,
                add_generation_prompt=prompt.add_generation_prompt and not prompt.continue_final_message,
                continue_final_message=prompt.continue_final_message,
                **variables,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            field = "chat_template" if prompt.chat_template is not None else "messages"
            whose = "the chat template" if prompt.chat_template is not None else "the model's chat template"
            raise BadInput(f"{field}: {whose} refuses them: {_short(error)}", field=field) from error

    def _template(self, prompt: Prompt) -> str:
        if prompt.chat_template is not None and not self._is_request_trusted:
            raise BadInput(
                "chat_template: a template came (allowed: none, unless the stage sets trust_request_chat_template)",
                field="chat_template",
            )
        own = self._owner.chat_template
        if prompt.chat_template is not None:
            return (
                own.get(prompt.chat_template, prompt.chat_template) if isinstance(own, dict) else prompt.chat_template
            )
        if isinstance(own, dict):
            return own.get("tool_use" if prompt.tools and "tool_use" in own else "default") or next(iter(own.values()))
        if own is None:
            raise BadInput("messages: this model has no chat template (allowed: text or token_ids)", field="messages")
        return own

    def _variables(self, prompt: Prompt, template: str) -> dict[str, Any]:
        """Return the template's own variables, refusing what it doesn't read."""
        variables = dict(prompt.chat_template_kwargs)
        for name in variables:
            if name in self._arguments or not _reads(template, name):
                field = f"chat_template_kwargs.{name}"
                raise BadInput(f"{field}: the chat template reads no such variable (allowed: its own)", field=field)
        if prompt.reasoning_effort is not None:
            variables["reasoning_effort"] = prompt.reasoning_effort
        for name, value in (("reasoning_effort", prompt.reasoning_effort), ("documents", prompt.documents)):
            if value and not _reads(template, name):
                raise BadInput(f"{name}: the model's chat template reads none (allowed: nothing)", field=name)
        return variables


def as_template_reads(message: Message, index: int, *, keeps_parts: bool) -> dict[str, Any]:
    """Return a message as chat templates of transformers read it.

    Args:
        message: checked.
        index: which of the prompt's messages it is, for refusals.
        keeps_parts: the template reads lists of parts; otherwise it is given their text.

    Raises:
        BadInput: the arguments of a call are no JSON.
    """
    value: dict[str, Any] = msgspec.to_builtins(message)
    if not keeps_parts or not isinstance(message.content, list):
        value["content"] = text_of(message)
    if message.reasoning is not None:
        value["reasoning_content"] = value.pop("reasoning")
    for i, call in enumerate(value.get("tool_calls", ())):
        place = f"messages[{index}].tool_calls[{i}].function.arguments"
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            raise BadInput(f"{place}: no JSON came (allowed: a JSON text)", field=place) from None
    return value


def check_fields(prompt: Prompt) -> None:
    """Refuse what contradicts itself.

    Raises:
        BadInput: names the field.
    """
    if not prompt.messages:
        for name in OF_MESSAGES:
            if getattr(prompt, name) != getattr(_DEFAULTS, name):
                raise BadInput(f"{name}: only messages can have it (allowed: nothing)", field=name)
    names = [tool.function.name for tool in prompt.tools]
    if prompt.tool_choice not in {"none", "auto", "required", *(f"function:{name}" for name in names)}:
        allowed = ", ".join(["none, auto, required", *(f"function:{name}" for name in names)])
        raise BadInput(f"tool_choice: {prompt.tool_choice!r} came (allowed: {allowed})", field="tool_choice")
    if prompt.tool_choice != "none" and not names:
        raise BadInput(f"tool_choice: {prompt.tool_choice!r} came without tools (allowed: none)", field="tool_choice")


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def with_tools_as_text(messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """Return the messages for a template that knows no tools: calls, and what can be called, are plain text."""
    for message in messages:
        if calls := message.pop("tool_calls", None):
            written = "\n".join(f"{OPEN}\n{json.dumps(call['function'])}\n{CLOSE}" for call in calls)
            message["content"] = _joined(message["content"], written)
    if not tools:
        return messages
    described = "\n".join(json.dumps(msgspec.to_builtins(tool), ensure_ascii=False) for tool in tools)
    words = (
        f"You can call functions. Each line between <tools> and </tools> describes one:\n"
        f"<tools>\n{described}\n</tools>\n"
        f'To call one, write {OPEN}\n{{"name": its name, "arguments": an object}}\n{CLOSE}'
    )
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": _joined(messages[0]["content"], words)}, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]


def _joined(content: str | list[dict[str, Any]], words: str) -> str | list[dict[str, Any]]:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": words}]
    return f"{content}\n\n{words}" if content else words


def _short(error: Any) -> str:
    return str(error)[:300]
