"""``POST /v1/audio/speech/batch``: several texts under the same fields, each with its own outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateways import openapi
from gateways.fields import refusal
from gateways.http import BODY_BYTES, KEY_NAME, REQUEST_ID, Terms, read_json, terms_of
from gateways.openai_audio_answers import SpeechBatch
from gateways.openai_chat import HEADERS
from gateways.openai_fields import flatten, optional
from gateways.openai_speech_body import schema as speech_schema
from gateways.problems import Problem, to_problem
from omni_bus.errors import OmniBusError
from omni_bus.media.encoder import MEDIA_TYPES
from omni_bus.wire.payloads import Audio

if TYPE_CHECKING:
    from gateways.http import HttpOptions
    from gateways.openai_speech import SpeechRoute
    from omni_bus.media.encode import EncodingPool

MAX_ITEMS = 32

STREAMING = ("stream", "stream_format")
"""Fields that only one text can have."""

SHARED_ONLY = ("model", "session_id", "priority", "user")
"""Fields that all items have in common."""

OPERATION = openapi.Operation(
    method="post",
    path="/v1/audio/speech/batch",
    name="create_speech_batch",
    summary="Several texts, read aloud: a file or an error for each",
    body={"$ref": "#/components/schemas/SpeechBatchRequest"},
    answers={
        200: openapi.Answer(
            description="A result for each item, in their order, even if all of them failed",
            content={"application/json": SpeechBatch},
        )
    },
    errors=(404, 422),
    headers=HEADERS,
)
"""For the OpenAPI document."""


class SpeechBatchRoute:
    """The route's handler; each item is what `SpeechRoute` does with one text."""

    def __init__(self, speech: SpeechRoute, pool: EncodingPool, options: HttpOptions) -> None:
        self._speech = speech
        self._pool = pool
        self._options = options

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one batch: an item that fails leaves the others alone; a client that leaves ends all of them."""
        shared, items = split(await read_json(request, self._options))
        # What is wrong with what they have in common is told once; and its reference is read once.
        common = await self._speech.read(shared | {"input": "-"}, request[KEY_NAME])
        batch = _Batch(
            shared=shared,
            reference=common.reference,
            sound=await self._speech.read_reference(common),
            terms={**terms_of(request), "input_bytes": request[BODY_BYTES] // len(items)},
            max_bytes=self._options.max_answer_bytes // len(items),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._result(index, item, batch)) for index, item in enumerate(items)]
        results = [task.result() for task in tasks]
        num_succeeded = sum(result["status"] == "success" for result in results)
        document = {
            "id": f"speech-batch-{request[REQUEST_ID]}",
            "total": len(results),
            "succeeded": num_succeeded,
            "failed": len(results) - num_succeeded,
            "results": results,
        }
        body = await self._pool.run(msgspec.json.encode, document)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _result(self, index: int, item: dict[str, Any], batch: _Batch) -> dict[str, Any]:
        try:
            return {"index": index, "status": "success", **await self._speak(item, batch)}
        except (OmniBusError, Problem) as error:
            return {"index": index, "status": "error", "error": to_problem(error).message}

    async def _speak(self, item: dict[str, Any], batch: _Batch) -> dict[str, Any]:
        _refuse(item, (*SHARED_ONLY, *STREAMING), "all items have it in common, or a batch has none")
        own = {name: value for name, value in item.items() if value is not None}
        speech = await self._speech.read(batch.shared | own, batch.terms["key"])
        is_common = speech.reference == batch.reference
        reference = batch.sound if is_common else await self._speech.read_reference(speech)
        utterance = self._speech.utterance(speech, reference, batch.max_bytes)
        file = await utterance.collect(batch.terms)
        audio = await self._pool.base64(file)
        return {
            "audio_data": msgspec.Raw(b'"' + audio + b'"'),
            "media_type": MEDIA_TYPES[speech.format],
            "usage": utterance.usage,
        }


class _Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What the items of a batch have in common."""

    shared: dict[str, Any]
    """Fields."""
    reference: str | bytes | None
    """Where the sound of their voice is."""
    sound: Audio | None
    """What was read there."""
    terms: Terms
    """Of each item."""
    max_bytes: int
    """Of each item's file."""


def split(document: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the items of a body have in common, and each item's own fields.

    Raises:
        BadInput: no list of items, or fields that a batch has not.
    """
    shared = {**flatten(document)}
    items = shared.pop("items", None)
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
        raise refusal("items", items, f"a list of 1 to {MAX_ITEMS} objects, each with its input")
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise refusal(f"items[{i}]", item, "an object with its input")
    _refuse(shared, ("input", *STREAMING), "each item has an input, and a batch is answered in one piece")
    return shared, items


def _refuse(body: dict[str, Any], names: tuple[str, ...], allowed: str) -> None:
    for name in names:
        if body.get(name) not in (None, False):
            raise refusal(name, body[name], f"null: {allowed}")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    found = speech_schema()
    text = found["properties"]["input"]
    own = {name: schema for name, schema in found["properties"].items() if name not in (*STREAMING, "input")}
    item = {
        "type": "object",
        "properties": {"input": text, **{name: own[name] for name in own if name not in SHARED_ONLY}},
        "required": ["input"],
    }
    items = {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": item}
    only = optional({"stream": {"enum": [False]}})
    return found | {
        "title": "SpeechBatchRequest",
        "properties": {"items": items, **own, **only},
        "required": ["items"],
    }
