"""A request for pictures on the bus, and its pictures as files: encoded as they come, so that no raw one is kept."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from gateways.fan_out import Call, run_all
from gateways.openai_choice import Ends
from gateways.openai_metrics import stage_metrics
from gateways.openai_models import IMAGE, IMAGES, MASK, PREVIEW, PROMPT, inputs_for
from gateways.problems import Problem
from omni_bus.client import Item
from omni_bus.errors import BadFrame, BadInput
from omni_bus.media.picture import PICTURE_TYPES, encode_picture_blocking
from omni_bus.wire.payloads import Image, Payload, Text, size_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from gateways.http import Terms
    from gateways.images.fields import Settings
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool
    from omni_bus.media.picture import PictureFormat


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for pictures."""

    pipeline: Pipeline
    prompt: str
    settings: Settings
    images: tuple[Image, ...] = ()
    """What the picture is made from, the first one before all."""
    mask: Image | None = None
    n: int = 1
    num_previews: int = 0
    format: PictureFormat = "png"
    compression: int = 100
    has_metrics: bool = False
    priority: int = 0
    """The bus's: higher goes first."""
    session: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Wanted output ports."""
        return outputs_for(self.num_previews)

    @property
    def media(self) -> tuple[Image, ...]:
        """Pictures that come with the request."""
        return self.images if self.mask is None else (*self.images, self.mask)

    def calls(self) -> list[Call]:
        """Return the requests on the bus, one for each picture: models that make one at a time make several so."""
        found: dict[str, list[Payload]] = {PROMPT: [Text(self.prompt)], IMAGES: [*self.images], MASK: []}
        if self.mask is not None:
            found[MASK] = [self.mask]
        inputs = {port: found[port] for port in inputs_for(self.pipeline, self.outputs)}
        return [
            Call(
                pipeline=self.pipeline.name,
                outputs=self.outputs,
                params=self.settings.of_picture(index),
                inputs=inputs,
                priority=self.priority,
                session=self.session,
                wants_metrics=self.has_metrics,
            )
            for index in range(self.n)
        ]

    def usage(self, num_pictures: int) -> Usage:
        """Return what pictures cost: no model here counts tokens, so words and pictures are counted."""
        return Usage(len(self.prompt.split()), len(self.media), num_pictures)


class Usage(msgspec.Struct, frozen=True):
    """What went in and came out."""

    words: int
    images: int
    pictures: int

    def as_tokens(self) -> dict[str, Any]:
        """Return it by OpenAI's names."""
        num_in = self.words + self.images
        return {
            "input_tokens": num_in,
            "input_tokens_details": {"text_tokens": self.words, "image_tokens": self.images},
            "output_tokens": self.pictures,
            "output_tokens_details": {"text_tokens": 0, "image_tokens": self.pictures},
            "total_tokens": num_in + self.pictures,
        }


class Picture(msgspec.Struct, frozen=True):
    """One picture as a file."""

    index: int
    """Which of the pictures that were asked for."""
    is_final: bool
    width: int
    height: int
    format: PictureFormat
    file: bytes

    @property
    def size(self) -> str:
        """As the API writes it."""
        return f"{self.width}x{self.height}"

    @property
    def media_type(self) -> str:
        """Of the file."""
        return PICTURE_TYPES[self.format]


class Making:
    """The pictures of one request; leaving `pictures` early cancels what still runs.

    Args:
        client: the bus.
        pool: threads for encoding.
        wanted: what to make.
        terms: of whoever asks.
    """

    def __init__(self, client: BusClient, pool: EncodingPool, wanted: Wanted, terms: Terms) -> None:
        self._client = client
        self._pool = pool
        self._wanted = wanted
        self._terms: Terms = {**terms, "input_bytes": terms["input_bytes"] + sum(map(size_of, wanted.media))}
        self._ends = [Ends(wanted.outputs) for _ in range(wanted.n)]

    async def pictures(self) -> AsyncGenerator[Picture, None]:
        """Yield pictures as they come, those among them that are not final.

        Raises:
            BadInput: what a stage refuses, by the request's own field.
            BadFrame: a request ended without a picture.
            OmniBusError: what any of them ended with.
        """
        missing = set(range(self._wanted.n))
        try:
            async with aclosing(run_all(self._client, self._wanted.calls(), self._terms)) as events:
                async for index, event in events:
                    if not isinstance(event, Item):
                        self._ends[index].add(event.port, event.finish)
                    elif isinstance(event.payload, Image):
                        is_final = event.port == IMAGE
                        missing -= {index} if is_final else set()
                        yield await self._encoded(index, event.payload, is_final=is_final)
        except BadInput as error:
            raise self._wanted.settings.refused(error, self._wanted.pipeline) from error
        if missing:
            raise BadFrame(f"image: nothing came for {len(missing)} of {self._wanted.n} (allowed: a picture for each)")

    async def collect(self, max_bytes: int) -> list[Picture]:
        """Return the pictures in the order of their indices.

        Raises:
            Problem: 400, they are more than `max_bytes`.
            OmniBusError: see `pictures`.
        """
        found: list[Picture] = []
        async with aclosing(self.pictures()) as pictures:
            async for picture in pictures:
                found.append(picture)
                if sum(len(each.file) for each in found) > max_bytes:
                    message = f"the answer is longer than {max_bytes} bytes (allowed then: stream = true)"
                    raise Problem(400, message, param="stream")
        return sorted(found, key=lambda each: each.index)

    def metrics(self) -> dict[str, Any]:
        """Return what the stages did, if the request asked."""
        found: dict[str, Any] = {"stage_durations": None, "peak_memory_mb": None}
        if self._wanted.has_metrics:
            accounts = stage_metrics(self._wanted.pipeline, self._ends)
            stages = accounts["stage_metrics"].values()
            found |= accounts
            found["stage_durations"] = {each["stage_name"]: each["stage_gen_time_ms"] / 1000 for each in stages}
        return found

    async def _encoded(self, index: int, image: Image, *, is_final: bool) -> Picture:
        wanted = self._wanted
        file = await self._pool.run(encode_picture_blocking, image, wanted.format, wanted.compression)
        return Picture(index, is_final, image.width, image.height, wanted.format, file)


def outputs_for(num_previews: int) -> tuple[str, ...]:
    """Return the output ports of a request."""
    return (IMAGE, PREVIEW) if num_previews else (IMAGE,)


def data_url(picture: Picture, base64: bytes) -> str:
    """Return a picture as an address that holds it."""
    return f"data:{picture.media_type};base64,{base64.decode('ascii')}"


async def encoded(pool: EncodingPool, pictures: Sequence[Picture]) -> list[bytes]:
    """Return the base64 of pictures."""
    return [await pool.base64(picture.file) for picture in pictures]
