"""``POST /v1/audio/generate``: the sound or music that a text describes, as one file."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from aiohttp import web
from msgspec import Meta

from gateways import openapi
from gateways.fan_out import Call, run_all
from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.http import read_json, terms_of
from gateways.openai_chat import HEADERS
from gateways.openai_fields import MAX_SEED, String, flatten, given, optional, properties_of
from gateways.openai_models import PROMPT, SOUND, can_make_sound, find_model
from gateways.openai_refusals import renamed
from gateways.problems import Problem
from omni_bus.client import Item
from omni_bus.errors import BadFrame, BadInput
from omni_bus.media.encoder import MEDIA_TYPES, StreamEncoder
from omni_bus.media.sound import slices
from omni_bus.wire.payloads import Audio, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.http import HttpOptions, Terms
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool

_Format: TypeAlias = Literal["wav", "pcm", "flac", "mp3", "opus", "aac"]

OPERATION = openapi.Operation(
    method="post",
    path="/v1/audio/generate",
    name="create_sound",
    summary="The sound or music that a text describes",
    body={"$ref": "#/components/schemas/SoundRequest"},
    answers={
        200: openapi.Answer(
            description="a file; its rate and channels are the model's",
            content={MEDIA_TYPES[fmt]: {"type": "string", "format": "binary"} for fmt in get_args(_Format)},
        )
    },
    errors=(404, 429, 504),
    headers=HEADERS,
)
"""For the OpenAPI document."""


class Sound(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, where it is given, to the stages that read the description."""

    audio_length: Annotated[float, Meta(gt=0, le=3600, description="seconds, above 0 and at most 3600")] | None = None
    audio_start: Annotated[float, Meta(ge=0, le=3600, description="seconds, from 0 to 3600")] | None = None
    negative_prompt: String | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=1000, description="a number from 0 to 1000")] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000, description="an integer from 1 to 1000")] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")] | None = None


class SoundFields(msgspec.Struct, frozen=True, kw_only=True):
    """All other fields."""

    input: Annotated[str, Meta(max_length=100_000, description="a string of 1 to 100000 characters, not blank")]
    model: String | None = None
    response_format: Annotated[_Format, Meta(description=", ".join(get_args(_Format)))] = "wav"
    speed: Annotated[float, Meta(ge=0.25, le=4, description="a number from 0.25 to 4")] = 1.0
    stream_format: Annotated[
        Literal["audio"], Meta(description="audio: a sound is made as a whole, so there is nothing to stream")
    ] = "audio"
    user: Annotated[str, Meta(max_length=4096, description="a string of at most 4096 characters")] | None = None


class SoundRoute:
    """The route's handler and what it needs.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        pool: threads for encoding.
        options: limits of the gateway.
    """

    def __init__(
        self, client: BusClient, models: Mapping[str, Pipeline], pool: EncodingPool, options: HttpOptions
    ) -> None:
        self._client = client
        self._models = models
        self._pool = pool
        self._options = options

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request; a client that leaves ends it."""
        body = flatten(await read_json(request, self._options))
        refuse_unknown(body, names_of(SoundFields, Sound))
        fields = read_fields(SoundFields, body)
        if not fields.input.strip():
            raise refusal("input", fields.input, "a string that is not blank")
        params = _params(body)
        pipeline = find_model(fields.model, self._models, can_make_sound, "makes sound")
        call = Call(
            pipeline=pipeline.name,
            outputs=(SOUND,),
            params=dict.fromkeys(pipeline.readers_of(PROMPT), params) if params else {},
            inputs={PROMPT: [Text(fields.input)]},
        )
        encoder = StreamEncoder(
            fields.response_format,
            speed=fields.speed,
            is_cut="audio_length" in params,
            is_whole=True,
            field="response_format",
        )
        try:
            file = await self._collect(call, terms_of(request), encoder)
        except BadInput as error:
            raise renamed(error, pipeline, {PROMPT: "input", "text": "input"}) from error
        return web.Response(body=file, content_type=MEDIA_TYPES[fields.response_format])

    async def _collect(self, call: Call, terms: Terms, encoder: StreamEncoder) -> bytes:
        """Return the file.

        Raises:
            BadInput: a format that can't hold the sound, or what the stage refuses.
            Problem: 400, it is more than an answer may be.
            OmniBusError: what the call ended with.
        """
        most = self._options.max_answer_bytes
        made: list[bytes] = []
        async with aclosing(run_all(self._client, [call], terms)) as events:
            async for _, event in events:
                if not isinstance(event, Item) or not isinstance(event.payload, Audio):
                    continue
                # In slices, as a slow speed makes much more of it.
                for piece in slices(event.payload, event.payload.rate_hz) if event.payload.num_frames else ():
                    made.append(await self._feed(encoder, piece))
                    if encoder.num_bytes > most:
                        raise Problem(
                            400, f"input: its sound has more than {most} bytes (allowed: less)", param="input"
                        )
        if not encoder.channels:
            raise BadFrame("audio: nothing came (allowed: sound)")
        return b"".join([*made, await self._pool.finish(encoder)])

    async def _feed(self, encoder: StreamEncoder, piece: Audio) -> bytes:
        try:
            return await self._pool.feed(encoder, piece)
        except ValueError as error:
            raise BadFrame(f"audio: {error}") from error


def _params(body: dict[str, Any]) -> dict[str, Any]:
    """Return what goes to the stages; without a length the start means nothing.

    Raises:
        BadInput: a field has another type or value.
    """
    found = given(read_fields(Sound, body))
    if "audio_length" not in found:
        found.pop("audio_start", None)
    if "seed" in found:
        found["seed"] %= MAX_SEED + 1
    return found


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    properties = properties_of(SoundFields, Sound)
    needed = {"input": properties.pop("input") | {"minLength": 1}}
    extra = {"extra_body": {"type": "object"}}
    return {
        "title": "SoundRequest",
        "type": "object",
        "properties": {**needed, **optional(properties | extra)},
        "required": ["input"],
        "additionalProperties": {"type": "null"},
    }
