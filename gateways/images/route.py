"""``POST /v1/images/generations`` and ``/v1/images/edits``: receive, submit, render."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateways.event_stream import EventStream
from gateways.http import read_json, terms_of
from gateways.images import body
from gateways.images.answers import ImagesResponse, PictureEvent, file_blocking, render_blocking
from gateways.images.form import EditReader
from gateways.images.making import Making, Picture, Wanted, encoded
from gateways.openai_chat import HEADERS
from gateways.openai_fields import flatten
from gateways.openapi import Answer, Operation, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.forms import FormOptions
    from gateways.images.body import Asked
    from gateways.media import MediaReader
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


def _operation(
    path: str, name: str, summary: str, form: type | Schema, form_type: str, errors: tuple[int, ...]
) -> Operation:
    files = {media: {"type": "string", "format": "binary"} for media in ("image/png", "image/jpeg", "image/webp")}
    return Operation(
        method="post",
        path=path,
        name=name,
        summary=summary,
        body=form,
        body_type=form_type,
        answers={
            200: Answer(
                description="The pictures, as `response_format` says; `file` gives several as a zip archive. With "
                "`stream` events as they come, each its name, `data: ` and a PictureEvent; or an Error after which "
                "nothing follows; at last `data: [DONE]`.",
                content={"application/json": ImagesResponse, **files, "application/zip": files["image/png"]},
                events=PictureEvent,
            )
        },
        errors=errors,
        headers=HEADERS,
    )


OPERATIONS = (
    _operation(
        GENERATIONS,
        "create_image",
        "Pictures from a text",
        {"$ref": "#/components/schemas/ImageRequest"},
        "application/json",
        (404, 429, 504),
    ),
    _operation(
        EDITS,
        "edit_image",
        "Pictures from other pictures and a text",
        body.form_schema(),
        "multipart/form-data",
        (404, 415, 422, 429, 504, 507),
    ),
)
"""For the OpenAPI document."""


class ImageRoutes:
    """The routes' handlers and what they need.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        pool: threads for encoding.
        media: decodes what comes with a request.
        options: limits of the gateway.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        pool: EncodingPool,
        media: MediaReader,
        options: FormOptions,
    ) -> None:
        self._client = client
        self._models = models
        self._pool = pool
        self._options = options
        self._edits = EditReader(models, media, options)

    @property
    def max_body_bytes(self) -> int:
        """Limit of a form of edits."""
        return self._edits.max_body_bytes

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Make pictures from a text. When its client goes, this is cancelled, and with it the requests on the bus."""
        asked = body.read(flatten(await read_json(request, self._options)), self._models)
        return await self._answer(request, asked, asked.wanted(), "image_generation")

    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Make pictures from others; see `generate`."""
        asked, wanted = await self._edits.read(request)
        return await self._answer(request, asked, wanted, "image_edit")

    async def _answer(self, request: web.Request, asked: Asked, wanted: Wanted, kind: str) -> web.StreamResponse:
        making = Making(self._client, self._pool, wanted, terms_of(request))
        if asked.fields.stream:
            return await self._stream(request, wanted, making, kind)
        pictures = await making.collect(self._options.max_answer_bytes)
        if asked.fields.response_format == "file":
            name, media_type, file = await self._pool.run(file_blocking, pictures)
            headers = {"Content-Disposition": f'attachment; filename="{name}"'}
            return web.Response(body=file, content_type=media_type, headers=headers)
        document: dict[str, Any] = {
            "created": int(time.time()),
            "output_format": wanted.format,
            "size": pictures[0].size,
            "background": "opaque",
            "usage": wanted.usage(len(pictures)).as_tokens(),
            "cot_output": None,
            "metrics": making.metrics(),
        }
        files = await encoded(self._pool, pictures)
        by_url = asked.fields.response_format == "url"
        rendered = await self._pool.run(lambda: render_blocking(document, pictures, files, by_url=by_url))
        return web.Response(body=rendered, content_type="application/json", charset="utf-8")

    async def _stream(self, request: web.Request, wanted: Wanted, making: Making, kind: str) -> web.StreamResponse:
        stream = EventStream(request, self._options.write_timeout_s)
        num_previews: Counter[int] = Counter()
        async with stream.telling_failures(), aclosing(making.pictures()) as pictures:
            async for picture in pictures:
                document = await self._event(picture)
                if picture.is_final:
                    name = f"{kind}.completed"
                    document["usage"] = wanted.usage(1).as_tokens()
                else:
                    name = f"{kind}.partial_image"
                    document["partial_image_index"] = num_previews[picture.index]
                    num_previews[picture.index] += 1
                await stream.send(msgspec.json.encode({"type": name, **document}), event=name)
            await stream.send_last(b"[DONE]")
        return stream.response

    async def _event(self, picture: Picture) -> dict[str, Any]:
        return {
            "b64_json": msgspec.Raw(b'"%b"' % await self._pool.base64(picture.file)),
            "background": "opaque",
            "created_at": int(time.time()),
            "output_format": picture.format,
            "quality": "auto",
            "size": picture.size,
            "index": picture.index,
        }
