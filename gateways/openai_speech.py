"""``POST /v1/audio/speech``: a text, read aloud; as a file, as raw bytes while they are made, or as events."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gateways import openapi
from gateways.event_stream import ByteStream, EventStream
from gateways.http import KEY_NAME, read_json, terms_of
from gateways.openai_audio_answers import SpeechEvent
from gateways.openai_chat import HEADERS
from gateways.openai_speech_body import Speech, parse, voice_named
from gateways.utterance import Utterance
from omni_bus.errors import BadInput
from omni_bus.media.encoder import MEDIA_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gateways.http import HttpOptions
    from gateways.media import MediaReader
    from gateways.problems import Problem
    from gateways.voices import Voices
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.encode import EncodingPool
    from omni_bus.wire.payloads import Audio

MIN_REFERENCE_S, MAX_REFERENCE_S = 1.0, 30.0
"""How long a sound that a voice is made after may be."""

WAV_HEADER_BYTES = 44

OPERATION = openapi.Operation(
    method="post",
    path="/v1/audio/speech",
    name="create_speech",
    summary="A text, read aloud: as a file, as raw bytes while they are made, or as events",
    body={"$ref": "#/components/schemas/SpeechRequest"},
    answers={
        200: openapi.Answer(
            description="The sound. With `stream_format` audio it is sent while it is made. With `stream` or "
            "`stream_format` sse there are events, each of them `event: `, a type, `data: ` and a SpeechEvent; after "
            "speech.audio.done and after speech.audio.error nothing follows.",
            content={media: {"type": "string", "format": "binary"} for media in dict.fromkeys(MEDIA_TYPES.values())},
            events=SpeechEvent,
        )
    },
    errors=(404, 422, 429, 504),
    headers=HEADERS,
)
"""For the OpenAPI document."""


class SpeechRoute:
    """The route's handler and what it needs.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        pool: threads for encoding.
        media: reads the sound that a voice is made after.
        options: limits of the gateway.
        max_chars: limit of a text.
        voices: those that callers uploaded.
    """

    def __init__(
        self,
        client: BusClient,
        models: Mapping[str, Pipeline],
        pool: EncodingPool,
        media: MediaReader,
        options: HttpOptions,
        max_chars: int,
        voices: Voices,
    ) -> None:
        self._client = client
        self._models = models
        self._pool = pool
        self._media = media
        self._options = options
        self._max_chars = max_chars
        self._voices = voices

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. When its client goes, this is cancelled, and with it the request on the bus."""
        speech = await self.read(await read_json(request, self._options), request[KEY_NAME])
        max_bytes = self._options.max_answer_bytes if speech.delivery == "whole" else None
        utterance = self.utterance(speech, await self.read_reference(speech), max_bytes)
        match speech.delivery:
            case "whole":
                return await self._whole(request, speech, utterance)
            case "audio":
                return await self._bytes(request, speech, utterance)
            case "sse":
                return await self._events(request, speech, utterance)

    async def read(self, body: dict[str, Any], caller: str) -> Speech:
        """Check a caller's body, which may name one of its uploaded voices; see `openai_speech_body.parse`."""
        name = voice_named(body)
        sample = None if name is None else await self._voices.resolve(name, caller)
        return parse(body, self._models, max_chars=self._max_chars, sample=sample)

    async def read_reference(self, speech: Speech) -> Audio | None:
        """Return the sound that a body names; see `read_reference`."""
        return await read_reference(speech, self._media)

    def utterance(self, speech: Speech, reference: Audio | None, max_bytes: int | None) -> Utterance:
        """Return what is to be spoken; see `Utterance`."""
        return Utterance(self._client, self._pool, speech, reference, max_bytes=max_bytes)

    async def _whole(self, request: web.Request, speech: Speech, utterance: Utterance) -> web.StreamResponse:
        body = await utterance.collect(terms_of(request))
        usage = utterance.usage
        counts = {
            "INPUT-TOKENS": usage["input_tokens"],
            "OUTPUT-TOKENS": usage["output_tokens"],
            "TOTAL-TOKENS": usage["total_tokens"],
            "INPUT-TEXT-TOKENS": usage["input_token_details"]["text_tokens"],
            "INPUT-AUDIO-TOKENS": usage["input_token_details"]["audio_tokens"],
        }
        headers = _headers(speech, utterance) | {f"X-VLLM-OMNI-{name}": str(count) for name, count in counts.items()}
        return web.Response(body=body, headers=headers)

    async def _bytes(self, request: web.Request, speech: Speech, utterance: Utterance) -> web.StreamResponse:
        stream = ByteStream(request, self._options.write_timeout_s, {})
        async with aclosing(utterance.pieces(terms_of(request))) as pieces:
            async for data in pieces:
                if not stream.has_begun:
                    stream.response.headers.update(_headers(speech, utterance))
                await stream.write(data)
        await stream.end()
        return stream.response

    async def _events(self, request: web.Request, speech: Speech, utterance: Utterance) -> web.StreamResponse:
        stream = _SpeechEvents(request, self._options.write_timeout_s)
        async with stream.telling_failures(), aclosing(utterance.pieces(terms_of(request))) as pieces:
            async for data in pieces:
                if not stream.has_begun and speech.format == "wav":
                    # Clients strip the first one.
                    await self._delta(stream, speech, data[:WAV_HEADER_BYTES])
                    await self._delta(stream, speech, data[WAV_HEADER_BYTES:])
                else:
                    await self._delta(stream, speech, data)
            await stream.tell({"type": "speech.audio.done", "usage": utterance.usage})
            await stream.end()
        return stream.response

    async def _delta(self, stream: _SpeechEvents, speech: Speech, data: bytes) -> None:
        if data:
            audio = await self._pool.base64(data)
            raw = msgspec.Raw(b'"' + audio + b'"')
            await stream.tell({"type": "speech.audio.delta", "audio": raw, "response_format": speech.format})


class _SpeechEvents(EventStream):
    """Events that have names, and no mark after the last one."""

    async def tell(self, document: dict[str, Any]) -> None:
        await self.send(msgspec.json.encode(document), event=document["type"])

    async def send_problem(self, problem: Problem) -> None:
        """Send the event that tells of a failure: what came before it is not to be used."""
        error = problem.document["error"] | {"partial_audio": True, "action": "discard"}
        await self.tell({"type": "speech.audio.error", "error": error})


async def read_reference(speech: Speech, media: MediaReader) -> Audio | None:
    """Return the sound of the voice that is to be spoken with, mixed down to one channel; None where none is named.

    Raises:
        BadInput: it is damaged, of another kind, or not to be read; or too short or too long.
        MediaTooLarge: beyond a limit of the gateway.
        Unreachable: an address that doesn't give it.
    """
    if speech.reference is None:
        return None
    sound = await media.audio(speech.reference, field=speech.reference_field, channels=1)
    check_reference_length(sound, speech.reference_field)
    return sound


def check_reference_length(sound: Audio, field: str) -> None:
    """Refuse a sound that is too short or too long for a voice to be made after it.

    Raises:
        BadInput: names the field.
    """
    seconds = sound.num_frames / sound.rate_hz
    if not MIN_REFERENCE_S <= seconds <= MAX_REFERENCE_S:
        allowed = f"{MIN_REFERENCE_S:g} to {MAX_REFERENCE_S:g} s"
        raise BadInput(f"{field}: {seconds:.2f} s of sound came (allowed: {allowed})", field=field)


def _headers(speech: Speech, utterance: Utterance) -> dict[str, str]:
    """Say what the bytes are, once they have begun."""
    headers = {
        "Content-Type": MEDIA_TYPES[speech.format],
        "X-Sample-Rate": str(utterance.rate_hz),
        "X-Channels": str(utterance.channels),
    }
    return headers | ({"X-Bit-Depth": "16"} if speech.format in ("wav", "pcm", "pcm16", "flac") else {})
