"""``POST /v1/chat/completions/batch``: several conversations under the same fields, one choice for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateways import openapi
from gateways.fields import refusal
from gateways.http import KEY_NAME, REQUEST_ID, HttpOptions, read_json, terms_of
from gateways.openai_answers import ChatCompletion
from gateways.openai_chat import HEADERS, ChatRoute, collect, names_for
from gateways.openai_chat_answer import Answer
from gateways.openai_chat_body import schema as chat_schema
from gateways.openai_choice import chat_usage
from gateways.openai_fields import MAX_CHOICES, flatten, harmless_properties, optional, refuse_unhonoured
from gateways.openai_refusals import renamed
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp import web

    from gateways.fan_out import Call
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline

MAX_CONVERSATIONS = MAX_CHOICES

OPERATION = openapi.Operation(
    method="post",
    path="/v1/chat/completions/batch",
    name="create_chat_completion_batch",
    summary="One answer to each of several conversations, or an error for all",
    body={"$ref": "#/components/schemas/ChatCompletionBatchRequest"},
    answers={
        200: openapi.Answer(
            description="A choice for each conversation, in their order", content={"application/json": ChatCompletion}
        )
    },
    errors=(404, 422, 429, 504),
    headers=HEADERS,
)
"""For the OpenAPI document."""

ONLY_BATCH: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "1: each conversation has one answer"),
    "stream": ((False,), "false: a batch is answered in one piece"),
    "stream_options": ((), "null, without a stream"),
    "tools": ((), "null: a batch calls no tools"),
    "tool_choice": (("none",), "'none'"),
    "return_stage_metrics": ((False,), "false"),
    "return_token_ids": ((False,), "false"),
    "return_prompt_text": ((False,), "false"),
    "prompt_logprobs": ((), "null"),
}
"""Fields of chat that a batch can't honour: the values that ask for nothing."""


class ChatBatchRoute:
    """The route's handler; it shares all but the fan-out with `ChatRoute`."""

    def __init__(self, client: BusClient, chat: ChatRoute, options: HttpOptions) -> None:
        self._client = client
        self._chat = chat
        self._options = options

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one batch. The first error, or a client that leaves, ends all of it."""
        bodies = split(await read_json(request, self._options))
        chats = [await self._chat.parse(request, body, f"messages[{i}]") for i, body in enumerate(bodies)]
        if "X-Request-Id" not in request.headers and chats[0].id_suffix is not None:
            request[REQUEST_ID] = chats[0].id_suffix
        calls: list[Call] = []
        for chat in chats:
            calls += await self._chat.calls_of(chat, request[KEY_NAME])
        try:
            choices = await collect(self._client, calls, terms_of(request), self._options.max_answer_bytes)
        except BadInput as error:
            raise renamed(error, chats[0].pipeline, names_for(chats[0])) from error
        answer = Answer(
            id=f"chatcmpl-batch-{request[REQUEST_ID]}",
            model=chats[0].pipeline.serve_as,
            chats=tuple(chats),
            choices=choices,
            usage=chat_usage([[choice.ends] for choice in choices]),
        )
        return await self._chat.respond(answer)


def split(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a body of chat for each conversation; what a batch has in common is in each of them.

    Raises:
        BadInput: a field that a batch can't honour, or no list of conversations.
    """
    body = flatten(body)
    refuse_unhonoured(body, ONLY_BATCH)
    given = body.get("messages")
    allowed = f"a list of 1 to {MAX_CONVERSATIONS} conversations"
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_CONVERSATIONS:
        raise refusal("messages", given, allowed)
    for i, conversation in enumerate(given):
        if not isinstance(conversation, list) or not conversation:
            raise refusal(f"messages[{i}]", conversation, "a list of at least one message")
    return [body | {"messages": conversation} for conversation in given]


def schema(pipelines: Iterable[Pipeline]) -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    found = chat_schema(pipelines, "ChatCompletionBatchRequest")
    properties = found["properties"]
    messages = {"type": "array", "minItems": 1, "maxItems": MAX_CONVERSATIONS, "items": properties["messages"]}
    only = optional({name: schema for name, schema in harmless_properties(ONLY_BATCH).items() if name in ONLY_BATCH})
    return found | {"properties": properties | only | {"messages": messages}}
