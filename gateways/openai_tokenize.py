"""``POST /tokenize`` and ``POST /detokenize``: what a prompt comes to, and what tokens say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateways import openapi
from gateways.fan_out import Call
from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.http import KEY_NAME, json_response, read_json, terms_of
from gateways.openai_answers import Detokenized, Tokenized
from gateways.openai_chat import TIMEOUT_HEADER, collect, prompt_inputs
from gateways.openai_chat_body import Template, read_template
from gateways.openai_fields import Bool, String, optional, properties_of
from gateways.openai_messages import Conversation, file_ids_of, message_schema, read_messages
from gateways.openai_models import can_render, find_model, inputs_for
from gateways.openai_refusals import renamed
from gateways.openai_structure import Tools, read_tools
from omni_bus.errors import BadFrame, BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiohttp import web

    from gateways.http import HttpOptions
    from gateways.openai_media import MessageMedia
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.prompt import Rendered

MAX_TOKENS = 1_048_576
"""Of one body; longer than any model's context."""

_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_OUTPUTS = ("rendered",)


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields besides those of the chat template."""

    model: String | None = None
    prompt: Annotated[str, Meta(min_length=1, description="a string with something in it")] | None = None
    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")] | None = None
    return_token_strs: Bool = False


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """All fields."""

    tokens: Annotated[
        list[_TokenId], Meta(max_length=MAX_TOKENS, description=f"a list of token ids, each from 0 to {2**31 - 1}")
    ]
    model: String | None = None


_STRUCTS = (TokenizeFields, Template, Tools)
_OF_MESSAGES = (names_of(Template, Tools) - {"add_special_tokens", "parallel_tool_calls"}) | {"messages"}
KNOWN = names_of(*_STRUCTS) - {"reasoning_effort", "parallel_tool_calls"}

OPERATIONS = [
    openapi.Operation(
        method="post",
        path="/tokenize",
        name="tokenize",
        summary="The tokens that a text or a conversation comes to",
        body={"$ref": "#/components/schemas/TokenizeRequest"},
        answers={200: openapi.Answer(description="the tokens", content={"application/json": Tokenized})},
        errors=(404, 422, 429, 504),
        headers=TIMEOUT_HEADER,
    ),
    openapi.Operation(
        method="post",
        path="/detokenize",
        name="detokenize",
        summary="The text that tokens stand for",
        body={"$ref": "#/components/schemas/DetokenizeRequest"},
        answers={200: openapi.Answer(description="the text", content={"application/json": Detokenized})},
        errors=(404, 429, 504),
        headers=TIMEOUT_HEADER,
    ),
]
"""For the OpenAPI document."""


class TokenRoutes:
    """The two handlers and what they need.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        media: reads what messages bring besides text.
        options: limits of the gateway.
        trusts_templates: whether a request may bring a chat template.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        media: MessageMedia,
        options: HttpOptions,
        *,
        trusts_templates: bool = False,
    ) -> None:
        self._client = client
        self._models = models
        self._media = media
        self._options = options
        self._trusts_templates = trusts_templates

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``."""
        body = await read_json(request, self._options)
        refuse_unknown(body, KNOWN)
        fields = read_fields(TokenizeFields, body)
        if (fields.prompt is None) == (fields.messages is None):
            raise refusal("messages" if fields.prompt else "prompt", body.get("messages"), "one of prompt and messages")
        template = read_template(body, trusts_templates=self._trusts_templates)
        pipeline = find_model(fields.model, self._models, can_render, "tells its prompts' tokens")
        if fields.messages is None:
            for name in sorted(_OF_MESSAGES):
                if body.get(name) is not None:
                    raise refusal(name, body[name], "null, beside prompt")
            prompt: dict[str, Any] = {"text": fields.prompt, **template}
            rendered = await self._render(request, pipeline, prompt, None, "prompt")
        else:
            caller = request[KEY_NAME]
            uploaded = await self._media.ports_of(file_ids_of(fields.messages), caller)
            inputs = inputs_for(pipeline, _OUTPUTS)
            conversation = read_messages(fields.messages, pipeline, inputs, uploaded=uploaded)
            rendered = await self._render(request, pipeline, template | read_tools(body), conversation, "messages")
        return json_response(
            {
                "count": len(rendered.token_ids),
                "max_model_len": rendered.context_length,
                "tokens": rendered.token_ids,
                "token_strs": rendered.token_strings if fields.return_token_strs else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """``POST /detokenize``."""
        body = await read_json(request, self._options)
        refuse_unknown(body, names_of(DetokenizeFields))
        fields = read_fields(DetokenizeFields, body)
        pipeline = find_model(fields.model, self._models, can_render, "tells its prompts' tokens")
        if not fields.tokens:
            return json_response({"prompt": ""})
        rendered = await self._render(request, pipeline, {"token_ids": fields.tokens}, None, "tokens")
        return json_response({"prompt": rendered.text})

    async def _render(
        self,
        request: web.Request,
        pipeline: Pipeline,
        prompt: dict[str, Any],
        conversation: Conversation | None,
        field: str,
    ) -> Rendered:
        said = conversation or Conversation(messages=[], media=[])
        inputs = await prompt_inputs(pipeline, _OUTPUTS, prompt, said, self._media, request[KEY_NAME])
        call = Call(pipeline=pipeline.name, outputs=_OUTPUTS, params={}, inputs=inputs)
        try:
            choices = await collect(self._client, [call], terms_of(request), self._options.max_answer_bytes)
        except BadInput as error:
            names = {"text": field, "token_ids": field}
            raise renamed(error, pipeline, names, prompt=field) from error
        rendered = choices[0].rendered
        if rendered is None:
            raise BadFrame("rendered: nothing came (allowed: one value)")
        return rendered


def tokenize_schema(pipelines: Iterable[Pipeline]) -> dict[str, Any]:
    """Return the JSON Schema of ``/tokenize``'s body."""
    properties = {name: schema for name, schema in properties_of(*_STRUCTS).items() if name in KNOWN}
    ports = dict.fromkeys(port for pipeline in pipelines for port in pipeline.inputs)
    properties["messages"] = {"type": "array", "minItems": 1, "items": message_schema(ports)}
    return {
        "title": "TokenizeRequest",
        "description": "With prompt or messages. Fields may be null, which means absent; others are refused.",
        "type": "object",
        "properties": optional(properties),
        "additionalProperties": {"type": "null"},
    }


def detokenize_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``/detokenize``'s body."""
    properties = properties_of(DetokenizeFields)
    tokens = properties.pop("tokens")
    return {
        "title": "DetokenizeRequest",
        "type": "object",
        "properties": {"tokens": tokens, **optional(properties)},
        "required": ["tokens"],
        "additionalProperties": {"type": "null"},
    }
