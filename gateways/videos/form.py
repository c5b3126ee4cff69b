"""Requests for videos as they come: a form with files, or JSON; what they bring or name is decoded here."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from gateways.forms import FRAMING_BYTES, read_form
from gateways.http import read_json
from gateways.openai_fields import flatten
from gateways.openai_models import PROMPT, inputs_for
from gateways.problems import to_problem
from gateways.videos import body
from omni_bus.errors import BadInput, MediaTooLarge, OmniBusError
from omni_bus.media.sniff import HEAD_BYTES, IMAGES, kind_of
from omni_bus.media.spool import Spool
from omni_bus.media.store import disk_error
from omni_bus.wire.payloads import Text, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from gateways.forms import FormOptions, Part
    from gateways.media import MediaReader
    from gateways.openai_media import MessageMedia
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.h264 import Settings
    from omni_bus.wire.payloads import Payload

_TEXTS = frozenset({"prompt", "model", "negative_prompt", "seconds", "size", "quality", "user"})
"""Fields whose text is their value; that of others is read as JSON."""

_VIDEOS = ("mp4", "webm", "avi")
_PORT_WORDS = {"images": "pictures", "video": "videos", "audio": "sound"}


class Request(msgspec.Struct, frozen=True):
    """A checked request and what its stages read."""

    wanted: body.Wanted
    inputs: dict[str, list[Payload]]
    """By input port; those that nothing came for are empty."""
    num_bytes: int
    """Of all inputs, which wait with the request."""


class Reader:
    """Reads requests.

    Args:
        models: pipelines by every name that clients may use.
        media: decodes uploads, in processes of its own.
        named: reads what is named by URL or file id.
        options: the gateway's limits.
        settings: how files are encoded unless a request says otherwise.
    """

    def __init__(
        self,
        models: Mapping[str, Pipeline],
        media: MediaReader,
        named: MessageMedia,
        options: FormOptions,
        settings: Settings,
    ) -> None:
        self._models = models
        self._media = media
        self._named = named
        self._options = options
        self.settings = settings

    @property
    def max_body_bytes(self) -> int:
        """Limit of a form."""
        return max(self._options.max_video_bytes, self._options.max_body_bytes) + FRAMING_BYTES

    async def read(self, request: web.Request, caller: str) -> Request:
        """Return a checked request.

        Raises:
            Problem: 400, 408, 413, 415.
            BadInput: a field, or a file, is not what is allowed.
        """
        try:
            async with AsyncExitStack() as stack:
                uploads: list[tuple[str, Spool]] = []
                if request.content_type == "application/json":
                    fields = flatten(await read_json(request, self._options))
                else:
                    fields = await self._form(request, uploads, stack)
                wanted = body.parse(fields, self._models, settings=self.settings)
                return await self.complete(wanted, uploads, caller)
        except OmniBusError as error:
            problem = to_problem(error)
            problem.must_close = request.can_read_body
            raise problem from error

    async def complete(self, wanted: body.Wanted, uploads: list[tuple[str, Spool]], caller: str) -> Request:
        """Decode what a request brings and names.

        Raises:
            BadInput: it is damaged, of another kind, or nothing that the model takes.
            MediaTooLarge: it is beyond a limit.
            Unreachable: an address does not give it.
        """
        ports = inputs_for(wanted.pipeline, wanted.outputs)
        for source in wanted.sources:
            _check_port(wanted.pipeline, ports, source.port, source.place)
        inputs: dict[str, list[Payload]] = {port: [] for port in ports}
        num_bytes = 0
        for name, spool in uploads:
            port = _port_of(os.pread(spool.fileno(), HEAD_BYTES, 0), name)
            _check_port(wanted.pipeline, ports, port, name)
            payload = await self._decode(port, spool, name)
            num_bytes += size_of(payload)
            self._check_size(num_bytes, name)
            inputs[port].append(payload)
        for port, payloads in (await self._named.read(wanted.sources, caller)).items():
            num_bytes += sum(map(size_of, payloads))
            self._check_size(num_bytes, next(source.place for source in wanted.sources if source.port == port))
            inputs[port] += payloads
        for port in ("video", "audio"):
            if len(inputs.get(port, ())) > 1:
                field = f"{port}_reference"
                raise BadInput(f"{field}: {len(inputs[port])} came (allowed: one)", field=field)
        inputs[PROMPT] = [Text(wanted.prompt)]
        return Request(wanted, inputs, num_bytes)

    def _check_size(self, num_bytes: int, name: str) -> None:
        most = self._options.max_decoded_bytes
        if num_bytes > most:
            message = f"{name}: with it the references are {num_bytes} bytes once decoded (allowed: {most})"
            raise MediaTooLarge(message, field=name)

    async def _decode(self, port: str, spool: Spool, name: str) -> Payload:
        match port:
            case "images":
                return await self._media.image(spool, field=name)
            case "video":
                return await self._media.video(spool, field=name)
            case _:
                return await self._media.audio(spool, field=name)

    async def _form(
        self, request: web.Request, uploads: list[tuple[str, Spool]], stack: AsyncExitStack
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        async for part in read_form(request, self._options, max_bytes=self.max_body_bytes):
            name = part.name.removesuffix("[]")
            if part.filename is not None:
                if name not in body.UPLOADS:
                    known = ", ".join(body.UPLOADS)
                    raise BadInput(f"{name[:80]}: a file came (allowed as files: {known})", field=name[:80])
                if len(uploads) >= body.MAX_REFERENCES:
                    raise BadInput(f"{name}: more than {body.MAX_REFERENCES} files came", field=name)
                uploads.append((name, await self._keep(part, stack, name)))
                continue
            name, value = _read(name, await part.text(body.MAX_FIELD_BYTES))
            if name in fields:
                raise BadInput(f"{name[:80]}: it came twice (allowed: once)", field=name[:80])
            fields[name] = value
        _check_company(fields, [name for name, _ in uploads])
        return fields

    async def _keep(self, part: Part, stack: AsyncExitStack, name: str) -> Spool:
        spool = stack.enter_context(Spool(self._options.max_video_bytes, what=name))
        try:
            async for piece in part.pieces():
                await spool.write(piece)
            await spool.flush()
        except OSError as error:
            raise disk_error(error) from error
        if not spool.num_bytes:
            raise BadInput(f"{name}: an empty file came (allowed: a picture, a video or a sound)", field=name)
        return spool


def _read(name: str, text: str) -> tuple[str, Any]:
    """Return a field of a form with the value that JSON would have."""
    field, bracket, key = name.partition("[")
    if bracket and key.endswith("]"):  # as OpenAI's SDK writes an object
        return field, {key[:-1]: text}
    if name in _TEXTS or (name in body.REFERENCES and text[:1] not in "{["):
        return name, text
    try:
        return name, msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return name, text  # refused for its type, with what is allowed


def _check_company(fields: dict[str, Any], uploads: list[str]) -> None:
    """Refuse references that exclude each other.

    Raises:
        BadInput: names one of them.
    """
    named = [name for name in body.REFERENCES if name in fields]
    if "input_references" in uploads and (named or "input_reference" in uploads or "input_reference" in fields):
        raise BadInput("input_references: it came with another reference (allowed: alone)", field="input_references")
    single = uploads.count("input_reference") + ("input_reference" in fields)
    if single > 1:
        raise BadInput(f"input_reference: {single} came (allowed: one)", field="input_reference")
    if single and (clash := [name for name in named if name != "audio_reference"]):
        raise BadInput(f"input_reference: it came with {clash[0]} (allowed: one of both)", field="input_reference")


def _port_of(head: bytes, name: str) -> str:
    kind = kind_of(head)
    if kind is None:
        raise BadInput(f"{name}: a file of an unknown kind came (allowed: pictures, videos, sound)", field=name)
    return "images" if kind in IMAGES else "video" if kind in _VIDEOS else "audio"


def _check_port(pipeline: Pipeline, ports: tuple[str, ...], port: str, name: str) -> None:
    if port not in ports:
        words = _PORT_WORDS[port]
        raise BadInput(f"{name}: '{pipeline.serve_as}' takes no {words} (allowed: none)", field=name)
