"""``POST /v1/chat/completions``: parse, submit, render."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateways import openapi
from gateways.event_stream import EventStream
from gateways.fan_out import Call, run_all, take_all
from gateways.http import (
    KEY_NAME,
    MAX_SESSION_CHARACTERS,
    MAX_TIMEOUT_S,
    REQUEST_ID,
    SESSION_HEADER,
    read_json,
    terms_of,
)
from gateways.openai_answers import ChatCompletion, ChatCompletionChunk
from gateways.openai_chat_answer import Answer, AudioDelta, ChunkWriter, render_blocking
from gateways.openai_chat_body import Chat, parse
from gateways.openai_choice import Choice, Ends, chat_usage, read_rendered, read_tool_call
from gateways.openai_fields import for_choice
from gateways.openai_messages import file_ids_of
from gateways.openai_metrics import stage_metrics
from gateways.openai_models import MESSAGES, inputs_for
from gateways.openai_refusals import PARAMS, renamed
from gateways.problems import Problem
from omni_bus.client import End, Item
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Audio, Json, Text, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateways.http import HttpOptions, Terms
    from gateways.images.chat import PictureChats
    from gateways.openai_media import MessageMedia
    from gateways.openai_messages import Conversation
    from omni_bus.client import BusClient, RequestEvent
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool
    from omni_bus.wire.payloads import Payload

HEADERS: dict[str, openapi.Schema] = {
    "X-Request-Timeout": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_TIMEOUT_S,
        "description": "Seconds that the answer may take.",
    },
    SESSION_HEADER: {
        "type": "string",
        "maxLength": MAX_SESSION_CHARACTERS,
        "description": "Requests of one session stay with their replicas; an empty name is none.",
    },
}

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
    errors=(404, 422, 429, 504),
    headers=HEADERS,
)
"""For the OpenAPI document."""


class ChatRoute:
    """The route's handler and what it needs.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use; the first is the default.
        pool: threads for encoding.
        media: reads what messages bring besides text.
        options: limits of the gateway.
        pictures: answers with pictures, where the model makes some.
        audio_delta: where a stream's sound goes.
        trusts_templates: whether a request may bring a chat template.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        pool: EncodingPool,
        media: MessageMedia,
        options: HttpOptions,
        pictures: PictureChats,
        *,
        audio_delta: AudioDelta = "content",
        trusts_templates: bool = False,
    ) -> None:
        self._client = client
        self._models = models
        self._pool = pool
        self._media = media
        self._options = options
        self._pictures = pictures
        self._audio_delta: AudioDelta = audio_delta
        self._trusts_templates = trusts_templates

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. When its client goes, this is cancelled, and with it the requests on the bus."""
        body = await read_json(request, self._options)
        if (drawer := self._pictures.drawer_named(body)) is not None:
            return await self._pictures.answer(request, body, drawer)
        chat = await self.parse(request, body)
        if "X-Request-Id" not in request.headers and chat.id_suffix is not None:
            request[REQUEST_ID] = chat.id_suffix
        calls = await self.calls_of(chat, request[KEY_NAME])
        try:
            if chat.is_streamed:
                return await self._stream(request, chat, calls)
            choices = await collect(self._client, calls, terms_of(request), self._options.max_answer_bytes)
        except BadInput as error:
            raise renamed(error, chat.pipeline, names_for(chat)) from error
        answer = Answer(
            id=f"chatcmpl-{request[REQUEST_ID]}",
            model=chat.pipeline.serve_as,
            chats=(chat,) * len(choices),
            choices=choices,
            usage=chat_usage([[choice.ends for choice in choices]]),
            metrics=stage_metrics(chat.pipeline, [choice.ends for choice in choices]) if chat.has_metrics else None,
        )
        return await self.respond(answer)

    async def parse(self, request: web.Request, body: dict[str, Any], prefix: str = "messages") -> Chat:
        """Check a body and find the files that it names; see `openai_chat_body.parse`."""
        messages = body.get("messages")
        file_ids = file_ids_of(messages) if isinstance(messages, list) else []
        uploaded = await self._media.ports_of(file_ids, request[KEY_NAME]) if file_ids else {}
        return parse(body, self._models, trusts_templates=self._trusts_templates, uploaded=uploaded, prefix=prefix)

    async def calls_of(self, chat: Chat, caller: str) -> list[Call]:
        """Return the requests on the bus that a chat comes to, one for each choice; reads its media first."""
        inputs = await prompt_inputs(chat.pipeline, chat.outputs, chat.prompt, chat.conversation, self._media, caller)
        # What the prompt came to is the same for all: the first one tells it.
        others = tuple(port for port in chat.outputs if port != "rendered")
        return [
            Call(
                pipeline=chat.pipeline.name,
                outputs=others if i else chat.outputs,
                params=for_choice(chat.params, i, without=("prompt_logprobs",)),
                inputs=inputs,
                priority=chat.priority,
                session=chat.session,
                wants_metrics=chat.has_metrics,
            )
            for i in range(chat.n)
        ]

    async def respond(self, answer: Answer) -> web.Response:
        """Render a whole answer."""
        for chat, choice in zip(answer.chats, answer.choices, strict=True):
            if chat.modalities == ("audio",) and not choice.sounds and not choice.calls:
                raise Problem(400, "the model found nothing to say aloud; no audio was made", param="modalities")
        body = await self._pool.run(render_blocking, answer) if answer.has_sound else render_blocking(answer)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _stream(self, request: web.Request, chat: Chat, calls: list[Call]) -> web.StreamResponse:
        stream = EventStream(request, self._options.write_timeout_s)
        answer_id = f"chatcmpl-{request[REQUEST_ID]}"
        chunks = ChunkWriter(answer_id, chat.pipeline.serve_as, chat, self._audio_delta)
        async with stream.telling_failures():
            events = _ChatStream(stream, chat, calls, chunks, self._pool)
            await take_all(self._client, calls, terms_of(request), events)
            await events.end()
        return stream.response


def names_for(chat: Chat) -> dict[str, str]:
    """Return what the body calls the parameters that engines call otherwise."""
    return PARAMS | {"structure": chat.structure_field}


async def prompt_inputs(
    pipeline: Pipeline,
    outputs: tuple[str, ...],
    prompt: dict[str, Any],
    conversation: Conversation,
    media: MessageMedia,
    caller: str,
) -> dict[str, list[Payload]]:
    """Return what goes to each input port of a request: the messages, and what they bring besides text."""
    found: dict[str, list[Payload]] = {MESSAGES: [Json({"messages": conversation.messages, **prompt})]}
    read = await media.read(conversation.media, caller) if conversation.media else {}
    return found | {port: read.get(port, []) for port in inputs_for(pipeline, outputs) if port != MESSAGES}


async def collect(client: BusClient, calls: Sequence[Call], terms: Terms, max_bytes: int) -> list[Choice]:
    """Run calls to their ends and return what came, by call.

    Raises:
        Problem: 400, it is more than `max_bytes`.
        OmniBusError: what any of them ended with.
    """
    choices = [Choice(call.outputs) for call in calls]
    num_bytes = 0
    async with aclosing(run_all(client, calls, terms)) as events:
        async for index, event in events:
            if isinstance(event, Item):
                num_bytes += size_of(event.payload)
            if num_bytes > max_bytes:
                message = f"the answer is longer than {max_bytes} bytes (allowed then: stream = true)"
                raise Problem(400, message, param="stream")
            choices[index].add(event)
    return choices


class _ChatStream:
    """The events of one streamed answer."""

    def __init__(
        self, stream: EventStream, chat: Chat, calls: Sequence[Call], chunks: ChunkWriter, pool: EncodingPool
    ) -> None:
        self._stream = stream
        self._chat = chat
        self._chunks = chunks
        self._pool = pool
        self._ends = [Ends(call.outputs) for call in calls]
        self._begun: set[int] = set()
        self._prompt_tokens = 0

    async def end(self) -> None:
        """Send what comes after all events, to the mark of the end."""
        if self._chat.stream_options.include_usage:
            usage = chat_usage([self._ends])
            await self._stream.send(self._chunks.usage(usage))
        await self._stream.send(b"[DONE]")
        await self._stream.end()

    def take_now(self, index: int, event: RequestEvent) -> bool:
        """Send a piece of text, if it is not the first and the client has room."""
        if type(event) is not Item or type(event.payload) is not Text or event.port == "reasoning":
            return False
        text, num_tokens, tokens = event.payload.text, event.payload.num_tokens, event.payload.tokens
        if index not in self._begun or not (text or tokens) or self._chat.stream_options.continuous_usage_stats:
            return False
        if not self._stream.try_send(self._chunks.text(index, text, tokens)):
            return False
        self._ends[index].num_tokens += num_tokens
        return True

    async def take(self, index: int, event: RequestEvent) -> None:
        """Send what the client should know of an event."""
        ends, chunks = self._ends[index], self._chunks
        match event:
            case Item(port="reasoning", payload=Text(text=text)):
                if text:
                    await self._write(index, chunks.reasoning(index, text, self._usage()))
            case Item(payload=Text(text=text, num_tokens=num_tokens, tokens=tokens)):
                ends.num_tokens += num_tokens
                if text or tokens:
                    await self._write(index, chunks.text(index, text, tokens, self._usage()))
            case Item(payload=Audio() as sound) if sound.num_frames:
                ends.hear(sound)
                file = await self._pool.encode(sound, self._chat.audio_format)
                data = await self._pool.base64(file)
                await self._write(index, chunks.audio(index, sound, data, self._chat.audio_format))
            case Item(port="tool_calls", payload=Json() as payload):
                await self._write(index, chunks.tool_call(index, read_tool_call(payload), self._usage()))
            case Item(port="rendered", payload=Json() as payload):
                rendered = read_rendered(payload)
                self._prompt_tokens = len(rendered.token_ids)
                await self._begin(index, chunks.role(index, rendered))
            case Item():
                pass
            case End(port=port, finish=finish):
                if ends.add(port, finish):
                    metrics = stage_metrics(self._chat.pipeline, [ends]) if self._chat.has_metrics else None
                    modality = "audio" if port == "audio" else "text"
                    await self._write(index, chunks.finish(index, modality, ends, metrics))

    async def _write(self, index: int, chunk: bytes) -> None:
        """Send a chunk, after the choice's role if it is the first; sound alone brings its own."""
        if index not in self._begun and self._chat.modalities != ("audio",):
            await self._begin(index, self._chunks.role(index))
        await self._stream.send(chunk)

    async def _begin(self, index: int, role: bytes) -> None:
        self._begun.add(index)
        await self._stream.send(role)
        if self._chat.echo:
            await self._stream.send(self._chunks.text(index, self._chat.echo))

    def _usage(self) -> dict[str, Any] | None:
        """Return the counts so far, for those who ask for them with each piece."""
        if not self._chat.stream_options.continuous_usage_stats:
            return None
        completion = sum(ends.num_tokens for ends in self._ends)
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion}
        return counts | {"total_tokens": self._prompt_tokens + completion}
