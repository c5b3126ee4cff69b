"""``POST /v1/embeddings``: a vector for each input."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateways import openapi
from gateways.fan_out import Call, run_all
from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.http import json_response, read_json, terms_of
from gateways.openai_answers import EmbeddingList
from gateways.openai_chat import TIMEOUT_HEADER
from gateways.openai_completions_body import prompt_schema, read_prompts
from gateways.openai_fields import String, flatten, optional, properties_of
from gateways.openai_models import MESSAGES, can_embed, find_model, inputs_for
from gateways.openai_refusals import renamed
from omni_bus.client import End, Item
from omni_bus.errors import BadFrame, BadInput
from omni_bus.wire.frames import Usage
from omni_bus.wire.payloads import Json, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

    from gateways.http import HttpOptions, Terms
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline

_OUTPUTS = ("embedding",)

OPERATION = openapi.Operation(
    method="post",
    path="/v1/embeddings",
    name="create_embeddings",
    summary="A vector for each input",
    body={"$ref": "#/components/schemas/EmbeddingRequest"},
    answers={200: openapi.Answer(description="the vectors", content={"application/json": EmbeddingList})},
    errors=(404, 429, 504),
    headers=TIMEOUT_HEADER,
)
"""For the OpenAPI document."""


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True):
    """All fields."""

    input: Annotated[
        str | list[Any], Meta(description="a string, a list of token ids, or a list of 1 to 1024 of either")
    ]
    model: String | None = None
    encoding_format: Annotated[Literal["float", "base64"], Meta(description="float, base64")] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=65_536, description="an integer, at least 1")] | None = None
    user: Annotated[str, Meta(max_length=4096, description="a string of at most 4096 characters")] | None = None


class EmbeddingsRoute:
    """The route's handler and what it needs.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        options: limits of the gateway.
    """

    def __init__(self, client: BusClient, models: Mapping[str, Pipeline], options: HttpOptions) -> None:
        self._client = client
        self._models = models
        self._options = options

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request; the first error, or a client that leaves, ends all of it."""
        body = flatten(await read_json(request, self._options))
        refuse_unknown(body, names_of(EmbeddingFields))
        fields = read_fields(EmbeddingFields, body)
        pipeline = find_model(fields.model, self._models, can_embed, "makes embeddings")
        prompts = read_prompts("input", fields.input)
        ports = [port for port in inputs_for(pipeline, _OUTPUTS) if port != MESSAGES]
        calls = [
            Call(
                pipeline=pipeline.name,
                outputs=_OUTPUTS,
                params={},
                inputs={MESSAGES: [Json(prompt)], **{port: [] for port in ports}},
            )
            for prompt in prompts
        ]
        try:
            vectors, usage = await self._collect(calls, terms_of(request))
        except BadInput as error:
            names = {"text": "input", "token_ids": "input", "messages": "input"}
            raise renamed(error, pipeline, names, prompt="input") from error
        cut = [_cut(vector, fields.dimensions) for vector in vectors]
        return json_response(
            {
                "object": "list",
                "data": [
                    {"index": i, "object": "embedding", "embedding": _written(vector, fields.encoding_format)}
                    for i, vector in enumerate(cut)
                ],
                "model": pipeline.serve_as,
                "usage": {"prompt_tokens": usage, "total_tokens": usage},
            }
        )

    async def _collect(self, calls: Sequence[Call], terms: Terms) -> tuple[list[array[float]], int]:
        """Return a vector for each call, and the tokens of all inputs."""
        vectors: dict[int, array[float]] = {}
        usages: dict[int, Usage] = {}
        async with aclosing(run_all(self._client, calls, terms)) as events:
            async for index, event in events:
                match event:
                    case Item(payload=Tensor(dtype="float32", shape=(_,), data=data)) if index not in vectors:
                        vectors[index] = _floats(data.view)
                    case Item():
                        raise BadFrame("embedding: another payload came (allowed: one float32 tensor of one dimension)")
                    case End(finish=finish):
                        usages[index] = finish.usage
        if len(vectors) < len(calls):
            raise BadFrame("embedding: nothing came (allowed: one tensor for each input)")
        return [vectors[i] for i in range(len(calls))], sum(usage.prompt_tokens for usage in usages.values())


def _floats(raw: memoryview) -> array[float]:
    """Return numbers that came little-endian."""
    found = array("f", bytes(raw))
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _cut(vector: array[float], dimensions: int | None) -> array[float]:
    """Return the first numbers of a vector, of length one again (what models trained for it are made to bear)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise refusal("dimensions", dimensions, f"an integer from 1 to {len(vector)}, the model's own")
    first = vector[:dimensions]
    norm = math.hypot(*first)
    return array("f", [number / norm for number in first]) if norm > 0 else first


def _written(vector: array[float], fmt: str) -> list[float] | str:
    if not all(map(math.isfinite, vector)):
        raise BadFrame("embedding: it holds numbers that are none")
    if fmt == "float":
        return vector.tolist()
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    properties = properties_of(EmbeddingFields)
    del properties["input"]
    extra = {"extra_body": {"type": "object"}}
    return {
        "title": "EmbeddingRequest",
        "type": "object",
        "properties": {"input": prompt_schema(), **optional(properties | extra)},
        "required": ["input"],
        "additionalProperties": {"type": "null"},
    }
