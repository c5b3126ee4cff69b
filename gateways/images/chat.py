"""``POST /v1/chat/completions`` for models that make pictures: the answer's content is a list of them."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateways.event_stream import EventStream
from gateways.http import KEY_NAME, REQUEST_ID, terms_of
from gateways.images.chat_body import PictureChat, drawer_named, parse
from gateways.images.making import Making, Picture, data_url
from gateways.openai_messages import file_ids_of
from gateways.openai_models import IMAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.http import HttpOptions
    from gateways.openai_media import MessageMedia
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool


class PictureChats:
    """Answers chats with pictures.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        pool: threads for encoding.
        media: reads the pictures that messages bring.
        options: limits of the gateway.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        pool: EncodingPool,
        media: MessageMedia,
        options: HttpOptions,
    ) -> None:
        self._client = client
        self._models = models
        self._pool = pool
        self._media = media
        self._options = options

    def drawer_named(self, body: Mapping[str, Any]) -> Pipeline | None:
        """Return the pipeline that a body wants a picture of; None where it wants an answer in words."""
        return drawer_named(body, self._models)

    async def answer(self, request: web.Request, body: dict[str, Any], pipeline: Pipeline) -> web.StreamResponse:
        """Answer one request. When its client goes, this is cancelled, and with it the requests on the bus.

        Raises:
            BadInput: names the field.
        """
        messages = body.get("messages")
        caller = request[KEY_NAME]
        file_ids = file_ids_of(messages) if isinstance(messages, list) else []
        chat = parse(body, pipeline, await self._media.ports_of(file_ids, caller) if file_ids else {})
        if "X-Request-Id" not in request.headers and chat.id_suffix is not None:
            request[REQUEST_ID] = chat.id_suffix
        images: Any = (await self._media.read(chat.sources, caller)).get(IMAGES, []) if chat.sources else []
        wanted = msgspec.structs.replace(chat.wanted, images=tuple(images))
        chat = msgspec.structs.replace(chat, wanted=wanted)
        making = Making(self._client, self._pool, wanted, terms_of(request))
        if chat.is_streamed:
            return await self._stream(request, chat, making)
        pictures = await making.collect(self._options.max_answer_bytes)
        message = {"role": "assistant", "content": [await self._part(each) for each in pictures], "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        document = self._head(request, chat, "chat.completion") | {
            "choices": [choice],
            "usage": _usage(chat, len(pictures)),
            "metrics": making.metrics() if wanted.has_metrics else None,
        }
        rendered = await self._pool.run(msgspec.json.encode, document)
        return web.Response(body=rendered, content_type="application/json", charset="utf-8")

    async def _stream(self, request: web.Request, chat: PictureChat, making: Making) -> web.StreamResponse:
        stream = EventStream(request, self._options.write_timeout_s)
        head = self._head(request, chat, "chat.completion.chunk")
        num_pictures = 0
        async with stream.telling_failures(), aclosing(making.pictures()) as pictures:
            async for picture in pictures:
                delta = {} if num_pictures else {"role": "assistant"}
                await stream.send(_chunk(head, delta | {"content": [await self._part(picture)]}))
                num_pictures += 1
            metrics = {"metrics": making.metrics()} if chat.wanted.has_metrics else {}
            last = [_chunk(head | metrics, {}, "stop")]
            if chat.includes_usage:
                usage = {"choices": [], "usage": _usage(chat, num_pictures)}
                last.append(msgspec.json.encode(head | usage))
            await stream.send_last(*last, b"[DONE]")
        return stream.response

    def _head(self, request: web.Request, chat: PictureChat, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{request[REQUEST_ID]}",
            "object": kind,
            "created": int(time.time()),
            "model": chat.wanted.pipeline.serve_as,
        }

    async def _part(self, picture: Picture) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(picture, await self._pool.base64(picture.file))}}


def _chunk(head: dict[str, Any], delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return msgspec.json.encode({**head, "modality": "image", "choices": [choice]})


def _usage(chat: PictureChat, num_pictures: int) -> dict[str, int]:
    tokens = chat.wanted.usage(num_pictures).as_tokens()
    return {
        "prompt_tokens": tokens["input_tokens"],
        "completion_tokens": tokens["output_tokens"],
        "total_tokens": tokens["total_tokens"],
    }
