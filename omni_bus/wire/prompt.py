"""What a gateway sends to a stage that writes text: the value of the `Json` payload on its ``prompt`` port.

One of three forms: `messages` (rendered by the model's chat template), `text` (taken as it is) or `token_ids`. Media
travel beside it as payloads of their own: the i-th part ``{"type": "image"}`` of all messages, in reading order, is the
i-th payload on the port ``images``; likewise ``{"type": "audio"}`` and ``audio`` (one payload for each clip), and
``{"type": "video"}`` and ``video``. Stages that have no such port read no such part.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

MEDIA_PORTS = {"image": "images", "audio": "audio", "video": "video"}
"""Content parts, and the port whose payloads they stand for."""

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _Exact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parent of structs that have no other fields than these."""


class Part(_Exact, frozen=True):
    """A piece of a message."""

    type: Literal["text", "image", "audio", "video"]
    text: str | None = None
    """Of text parts only."""


class Function(_Exact, frozen=True):
    """What a model wants called; `arguments` is a JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolCall(_Exact, frozen=True):
    """A call that an assistant's message made."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class Message(_Exact, frozen=True):
    """One message."""

    role: Role
    content: str | list[Part] | None = None
    """None only beside `tool_calls`."""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """Of a tool's message: whose result it is."""
    reasoning: str | None = None
    """What an assistant's message thought before it spoke."""


class FunctionTool(_Exact, frozen=True):
    """A function that the model may call; `parameters` is a JSON Schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(_Exact, frozen=True):
    """One entry of a request's tools."""

    function: FunctionTool
    type: Literal["function"] = "function"


class Prompt(_Exact, frozen=True):
    """Everything that decides the text that the model is given."""

    messages: list[Message] = []
    text: str | None = None
    token_ids: list[TokenId] | None = None
    tools: list[Tool] = []
    tool_choice: str = "none"
    """``none``, ``auto``, ``required``, or ``function:NAME``."""
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on in the last message instead of beginning a new one."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own; None leaves it to the form: not after a chat template, else yes."""
    documents: list[dict[str, Any]] = []
    chat_template: str | None = None
    """Instead of the model's own."""
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    mm_processor_kwargs: dict[str, Any] = {}


class Rendered(_Exact, frozen=True):
    """What a prompt came to: the value of the `Json` payload on the output port ``rendered``, emitted once.

    Who asks for this port alone gets it without any token being generated.
    """

    token_ids: list[TokenId]
    text: str
    """The tokens as text, special ones included."""
    token_strings: list[str]
    """One for each token, as the vocabulary spells it."""
    context_length: int
    logprobs: list[list[tuple[int, float, bytes]] | None] | None = None
    """With `prompt_logprobs`: for each token the candidates (id, natural log, bytes), the token itself first; None for
    the first token, which nothing predicts."""


class ToolCallDelta(_Exact, frozen=True):
    """A piece of a call: the value of a `Json` payload on the output port ``tool_calls``.

    The first piece of each call has `id` and `name`; the pieces of `arguments` concatenate.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
