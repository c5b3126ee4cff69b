"""The form of ``/v1/images/edits``: fields with the values that JSON would have, and pictures, spooled then decoded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from gateways.forms import FRAMING_BYTES, read_form
from gateways.images import body
from gateways.json_body import decode_json
from gateways.openai_models import IMAGES
from gateways.problems import Problem, to_problem
from omni_bus.errors import BadInput, MediaTooLarge, OmniBusError, did_you_mean
from omni_bus.media.spool import Spool
from omni_bus.media.store import disk_error
from omni_bus.wire.payloads import size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from aiohttp import web

    from gateways.forms import FormOptions, Part
    from gateways.images.making import Wanted
    from gateways.media import MediaReader
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.payloads import Image

MAX_IMAGES = 16
"""Pictures to begin with; OpenAI's limit."""

MAX_FIELD_BYTES = 512 * 1024
"""Of a field of a form; a prompt of 100,000 characters is less."""

IMAGE_FIELDS = ("image", "image[]", "url", "url[]")
MASK_FIELDS = ("mask", "mask_image")

_TEXTS = frozenset({
    "prompt", "model", "size", "response_format", "output_format", "negative_prompt", "user", "quality", "style",
    "background", "moderation", "input_fidelity", "generator_device",
})  # fmt: skip
"""Fields whose text is their value; that of others is read as JSON."""


class _Form:
    """What came in a form."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.images: list[tuple[str, Spool | str]] = []
        self.mask: tuple[str, Spool | str] | None = None

    def take(self, name: str, text: str) -> None:
        """Take a field.

        Raises:
            BadInput: it came before.
        """
        if name in self.fields:
            raise BadInput(f"{name[:80]}: it came twice (allowed: once)", field=name[:80])
        if text or name == "prompt":  # empty fields are those of web pages' forms that nobody filled in
            self.fields[name] = _value(name, text)


class EditReader:
    """Reads requests for edits.

    Args:
        models: pipelines by every name that clients may use.
        media: decodes pictures, in processes of its own.
        options: the gateway's limits.
    """

    def __init__(self, models: Mapping[str, Pipeline], media: MediaReader, options: FormOptions) -> None:
        self._models = models
        self._media = media
        self._options = options

    @property
    def max_body_bytes(self) -> int:
        """Limit of a form."""
        return max(self._options.max_image_bytes, self._options.max_body_bytes) + FRAMING_BYTES

    async def read(self, request: web.Request) -> tuple[body.Asked, Wanted]:
        """Return what a form asks for; what was uploaded is given back.

        Raises:
            Problem: 400, 404, 408, 413, 415; 422 without a picture.
            BadInput: a field, or a picture, is not what is allowed.
            MediaTooLarge: a picture is beyond a limit, or all together are.
            Unreachable: an address doesn't give one.
        """
        with ExitStack() as stack:
            try:
                form = await self._form(request, stack)
                asked = body.read(form.fields, self._models, is_edit=True)
            except OmniBusError as error:
                problem = to_problem(error)
                problem.must_close = request.can_read_body
                raise problem from error
            except Problem as problem:
                problem.must_close = problem.must_close or request.can_read_body
                raise
            if not form.images:
                raise Problem(422, f"image: none came (allowed: 1 to {MAX_IMAGES} pictures)", param="image")
            if form.mask is not None:
                body.check_mask(asked.pipeline, form.mask[0])
            asked.wanted()  # so that what is refused is refused before anything is decoded or fetched
            return asked, await self._decoded(form, asked)

    async def _decoded(self, form: _Form, asked: body.Asked) -> Wanted:
        images: list[Image] = []
        num_bytes = 0
        for i, (name, source) in enumerate(form.images):
            place = f"{name.removesuffix('[]')}[{i}]" if len(form.images) > 1 else name.removesuffix("[]")
            image, num_bytes = await self._decode(place, source, 3, num_bytes)
            images.append(image)
        mask = None
        if form.mask is not None:
            # Its transparency, if it has some, says where the picture may change.
            mask, _ = await self._decode(*form.mask, 0, num_bytes)
        wanted = asked.wanted(images, mask)
        names = wanted.settings.names | {IMAGES: form.images[0][0].removesuffix("[]")}
        if form.mask is not None:
            names["mask"] = form.mask[0]
        return msgspec.structs.replace(wanted, settings=msgspec.structs.replace(wanted.settings, names=names))

    async def _decode(self, place: str, source: Spool | str, channels: Literal[0, 3], before: int) -> tuple[Image, int]:
        """Return a picture, and the bytes of all so far."""
        image = await self._media.image(source, field=place, channels=channels)
        num_bytes, most = before + size_of(image), self._options.max_decoded_bytes
        if num_bytes > most:
            message = f"{place}: with it the pictures are {num_bytes} bytes once decoded (allowed: {most})"
            raise MediaTooLarge(message, field=place)
        return image, num_bytes

    async def _form(self, request: web.Request, stack: ExitStack) -> _Form:
        form = _Form()
        async for part in read_form(request, self._options, max_bytes=self.max_body_bytes):
            name = part.name
            if name in MASK_FIELDS:
                if form.mask is not None:
                    raise BadInput(f"{name}: a mask came before (allowed: one)", field=name)
                form.mask = (name, await self._source(part, stack))
            elif name in IMAGE_FIELDS:
                if len(form.images) >= MAX_IMAGES:
                    raise BadInput(f"{name}: one more came (allowed: {MAX_IMAGES} pictures)", field=name)
                form.images.append((name, await self._source(part, stack)))
            elif name in body.KNOWN:
                form.take(name, await part.text(MAX_FIELD_BYTES))
            else:
                raise _unknown(name)
        return form

    async def _source(self, part: Part, stack: ExitStack) -> Spool | str:
        """Return a file, or the address in a field of text."""
        if part.filename is None:
            # Base64 takes four bytes for three.
            return await part.text(self._options.max_image_bytes * 4 // 3 + MAX_FIELD_BYTES)
        spool = stack.enter_context(Spool(self._options.max_image_bytes, what=part.name))
        try:
            async for piece in part.pieces():
                await spool.write(piece)
            await spool.flush()
        except OSError as error:
            raise disk_error(error) from error
        return spool


def _value(name: str, text: str) -> Any:
    """Return a field's value as JSON would have it; one that is none is refused later, for its type."""
    if name in _TEXTS:
        return text
    try:
        return decode_json(text.lower().encode() if text in ("True", "False") else text.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text


def _unknown(name: str) -> BadInput:
    name = name[:80]
    known = sorted({*body.KNOWN, *IMAGE_FIELDS, *MASK_FIELDS})
    return BadInput(
        f"{name}: unknown field{did_you_mean(name, known)} (allowed: the fields in /openapi.json)", field=name
    )
