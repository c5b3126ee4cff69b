"""``POST /v1/chat/completions``: parse, submit, render."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from gateways import openapi
from gateways.http import MAX_TIMEOUT_S, REQUEST_ID, EventStream, HttpOptions, Terms, read_json, terms_of
from gateways.openai_answers import ChatCompletion, ChatCompletionChunk
from gateways.openai_chat_answer import Answer, AudioDelta, ChunkWriter, Ends, render_blocking
from gateways.openai_chat_body import MESSAGES, Chat, parse
from gateways.problems import Problem
from omni_bus.client import End, Item
from omni_bus.errors import BadInput, Unavailable
from omni_bus.gateway import STOPPING
from omni_bus.wire.payloads import Audio, Json, Text, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.client import BusClient, Request, RequestEvent
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool

KINDS = {"text": "text", "audio": "audio"}
"""Output ports that chat can express, and the payload kind of each."""


OPERATION = openapi.Operation(
    method="post",
    path="/v1/chat/completions",
    name="create_chat_completion",
    summary="Text, sound or both in answer to messages; in one piece or streamed",
    body={"$ref": "#/components/schemas/ChatCompletionRequest"},
    answers={
        200: openapi.Answer(
            description="The whole answer, or with `stream` the events as they come. Each is `data: ` and a "
            "ChatCompletionChunk, or an Error after which nothing follows; the last one is `data: [DONE]`.",
            content={"application/json": ChatCompletion},
            events=ChatCompletionChunk,
        )
    },
    errors=(404, 429, 504),
    headers={
        "X-Request-Timeout": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": MAX_TIMEOUT_S,
            "description": "Seconds that the answer may take.",
        }
    },
)
"""For the OpenAPI document."""


def can_serve(pipeline: Pipeline) -> bool:
    """Whether a pipeline takes messages and gives text, sound or both, under those names."""
    outputs = pipeline.outputs
    return (
        pipeline.inputs == {MESSAGES: "json"}
        and bool(outputs)
        and all(KINDS.get(port) == kind for port, kind in outputs.items())
    )


class ChatRoute:
    """The route's handler and what it needs.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use; the first is the default.
        pool: threads for encoding.
        options: limits of the gateway.
        audio_delta: where a stream's sound goes.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        pool: EncodingPool,
        options: HttpOptions,
        audio_delta: AudioDelta = "content",
    ) -> None:
        self._client = client
        self._models = models
        self._pool = pool
        self._options = options
        self._audio_delta: AudioDelta = audio_delta

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. When its client goes, this is cancelled, and with it the request on the bus."""
        chat = parse(await read_json(request, self._options), self._models)
        if "X-Request-Id" not in request.headers and chat.id_suffix is not None:
            request[REQUEST_ID] = chat.id_suffix
        try:
            async with await self._submit(chat, terms_of(request)) as call:
                await call.send(MESSAGES, Json({"messages": chat.messages}))
                call.finish(MESSAGES)
                if chat.is_streamed:
                    return await self._stream(request, chat, call)
                return await self._collect(request, chat, call)
        except BadInput as error:
            raise _renamed(error, chat.pipeline) from error

    async def _submit(self, chat: Chat, terms: Terms) -> Request:
        pipeline = chat.pipeline.name
        try:
            return await self._client.submit(pipeline, chat.outputs, chat.params, priority=chat.priority, **terms)
        except asyncio.CancelledError:
            # Either the client is gone and this task is cancelled, or the request was cancelled while it was queued.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable(STOPPING) from None

    # --- streamed ---------------------------------------------------------------------------------------------

    async def _stream(self, request: web.Request, chat: Chat, call: Request) -> web.StreamResponse:
        stream = EventStream(request, self._options.write_timeout_s)
        try:
            await self._send_all(stream, chat, call, ChunkWriter(*_identity(request, chat), self._audio_delta))
        except ConnectionError:
            raise
        except Exception as error:  # once a stream has begun only it can tell of its failure; before, the edge does
            if not stream.has_begun:
                raise
            await stream.fail(error)
        return stream.response

    async def _send_all(self, stream: EventStream, chat: Chat, call: Request, chunks: ChunkWriter) -> None:
        ends = Ends(chat.outputs)
        async for event in call:
            match event:
                case Item(payload=Text(text=text, num_tokens=num_tokens)):
                    ends.num_tokens += num_tokens
                    if text:
                        await self._begin(stream, chat, chunks)
                        await stream.send(chunks.text(text))
                case Item(payload=Audio() as sound) if sound.num_frames:
                    await self._begin(stream, chat, chunks)
                    file = await self._pool.encode(sound, chat.audio_format)
                    await stream.send(chunks.audio(sound, await self._pool.base64(file), chat.audio_format))
                case Item():
                    pass
                case End(port=port, finish=finish):
                    if ends.add(port, finish):
                        await self._begin(stream, chat, chunks)
                        await stream.send(chunks.finish(port, ends.reason))
        if chat.has_usage_chunk:
            await stream.send(chunks.usage(ends.usage))
        await stream.send(b"[DONE]")
        await stream.end()

    async def _begin(self, stream: EventStream, chat: Chat, chunks: ChunkWriter) -> None:
        """Send the role first; only if text was asked for, sound brings its own."""
        if not stream.has_begun and "text" in chat.outputs:
            await stream.send(chunks.role())

    # --- in one piece -----------------------------------------------------------------------------------------

    async def _collect(self, request: web.Request, chat: Chat, call: Request) -> web.StreamResponse:
        ends = Ends(chat.outputs)
        texts: list[str] = []
        pieces: list[Audio] = []
        num_bytes = 0
        async for event in call:
            num_bytes += self._charge(event, num_bytes)
            match event:
                case Item(payload=Text(text=text, num_tokens=num_tokens)):
                    texts.append(text)
                    ends.num_tokens += num_tokens
                case Item(payload=Audio() as sound) if sound.num_frames:
                    pieces.append(sound)
                case Item():
                    pass
                case End(port=port, finish=finish):
                    ends.add(port, finish)
        if chat.outputs == ("audio",) and not pieces:
            raise Problem(400, "the model found nothing to say aloud; no audio was made", param="modalities")
        answer_id, model = _identity(request, chat)
        answer = Answer(
            id=answer_id,
            model=model,
            text="".join(texts) if "text" in chat.outputs else None,
            pieces=pieces,
            audio_format=chat.audio_format,
            reason=ends.reason,
            usage=ends.usage,
        )
        body = await self._pool.run(render_blocking, answer) if pieces else render_blocking(answer)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    def _charge(self, event: RequestEvent, num_bytes: int) -> int:
        size = size_of(event.payload) if isinstance(event, Item) else 0
        if num_bytes + size > self._options.max_answer_bytes:
            message = f"the answer is longer than {self._options.max_answer_bytes} bytes (allowed then: stream = true)"
            raise Problem(400, message, param="stream")
        return size


def _identity(request: web.Request, chat: Chat) -> tuple[str, str]:
    return f"chatcmpl-{request[REQUEST_ID]}", chat.pipeline.serve_as


def _renamed(error: BadInput, pipeline: Pipeline) -> BadInput:
    """Return an adapter's refusal of its input port under the name that the client knows."""
    ports = {edge.target_port for edge in pipeline.edges if edge.source_port == MESSAGES}
    if error.field not in ports:
        return error
    return type(error)(error.message, field=MESSAGES, stage=error.stage)
