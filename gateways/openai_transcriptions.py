"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: receive, decode, submit, render."""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateways import openai_transcriptions_body as body
from gateways.event_stream import EventStream
from gateways.fan_out import Call, run_all
from gateways.http import json_response, terms_of
from gateways.openai_audio_answers import (
    DurationUsage,
    TranscribedSegment,
    TranscribedWord,
    Transcription,
    TranscriptionDelta,
    TranscriptionDone,
    VerboseTranscription,
)
from gateways.openai_chat import HEADERS
from gateways.openai_models import SOUND
from gateways.openai_refusals import renamed
from gateways.openapi import Answer, Operation
from gateways.problems import Problem, to_problem
from gateways.subtitles import Cue, cues_of, srt, vtt
from omni_bus.client import End, Item
from omni_bus.errors import BadFrame, BadInput, OmniBusError
from omni_bus.media.sound import slices
from omni_bus.media.spool import Spool
from omni_bus.wire.payloads import Json, Text, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.forms import FormOptions
    from gateways.media import MediaReader
    from gateways.openai_transcriptions_body import Task
    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.payloads import Audio

PATHS: dict[Task, str] = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}

RATE_HZ = 16_000
"""What sound is brought to, with one channel: recognisers hear nothing above 8 kHz."""

PIECE_FRAMES = 5 * RATE_HZ
"""Sent at a time, so that a long file is read as the stages come to it."""

_FIELDS = {SOUND: "file", "word_timestamps": body.GRANULARITY}
"""What the form calls what adapters call otherwise."""


def _operation(task: Task, name: str, summary: str) -> Operation:
    whole = {"anyOf": [{"$ref": f"#/components/schemas/{each}"} for each in ("Transcription", "VerboseTranscription")]}
    subtitles = {media: {"type": "string"} for media in ("text/plain", "application/x-subrip", "text/vtt")}
    return Operation(
        method="post",
        path=PATHS[task],
        name=name,
        summary=summary,
        body=body.form_schema(task),
        body_type="multipart/form-data",
        answers={
            200: Answer(
                description="The text, as `response_format` says"
                + (
                    ", or with `stream` the events as they come, each `data: ` and a TranscriptionDelta, at last a "
                    "TranscriptionDone or an Error; then `data: [DONE]`."
                    if task == "transcribe"
                    else "."
                ),
                content={"application/json": whole, **subtitles},
                events=TranscriptionDelta if task == "transcribe" else None,
            )
        },
        errors=(404, 415, 429, 504, 507),
        headers=HEADERS,
    )


OPERATIONS = (
    _operation("transcribe", "create_transcription", "What is said in a sound"),
    _operation("translate", "create_translation", "What is said in a sound, in English"),
)
"""For the OpenAPI document."""


def schemas() -> list[dict[str, Any]]:
    """Return the schemas of answers, for the OpenAPI document."""
    structs = [Transcription, VerboseTranscription, TranscriptionDone]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    return [{"title": name, **schema} for name, schema in components.items()]


class _Heard:
    """What came of a sound."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._texts: list[str] = []
        self.segments: list[dict[str, Any]] = []
        self.language: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._texts).strip()

    def add(self, event: Item | End) -> str:
        """Take an event; return the text that it brings.

        Raises:
            Problem: 400, it is too much.
            BadFrame: a segment that is none.
        """
        if isinstance(event, End):
            self.language = event.finish.detail.get("language", self.language)
            return ""
        self._num_bytes += size_of(event.payload)
        if self._num_bytes > self._max_bytes:
            raise Problem(400, f"the answer is longer than {self._max_bytes} bytes (allowed: a shorter sound)")
        match event.payload:
            case Text(text=text):
                self._texts.append(text)
                return text
            case Json(value=dict() as value):
                self.segments.append(value)
            case _:
                raise BadFrame("segments: another payload came (allowed: one object for each segment)")
        return ""


class TranscriptionRoutes:
    """The routes' handlers and what they need.

    Args:
        client: the bus.
        models: pipelines by every name that clients may use.
        media: decodes, in processes of its own.
        options: limits of the gateway.
    """

    def __init__(
        self, client: BusClient, models: Mapping[str, Pipeline], media: MediaReader, options: FormOptions
    ) -> None:
        self._client = client
        self._models = models
        self._media = media
        self._options = options

    async def transcribe(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/audio/transcriptions``."""
        return await self._handle(request, "transcribe")

    async def translate(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/audio/translations``."""
        return await self._handle(request, "translate")

    async def _handle(self, request: web.Request, task: Task) -> web.StreamResponse:
        wanted, sound = await self._receive(request, task)
        call = Call(
            pipeline=wanted.pipeline.name,
            outputs=wanted.outputs,
            params=dict.fromkeys(wanted.writers, wanted.params) if wanted.params else {},
            inputs={SOUND: list(slices(sound, PIECE_FRAMES))},
        )
        try:
            if wanted.is_streamed:
                return await self._stream(request, call, sound)
            heard = _Heard(self._options.max_answer_bytes)
            async with aclosing(run_all(self._client, [call], self._terms(request, sound))) as events:
                async for _, event in events:
                    heard.add(event)
        except BadInput as error:
            raise _refused(error, wanted) from error
        return _rendered(wanted, heard, sound)

    async def _receive(self, request: web.Request, task: Task) -> tuple[body.Transcription, Audio]:
        """Return what is wanted, and the sound; what was uploaded is given back before anything is submitted."""
        with Spool(self._options.max_audio_bytes, what="file") as spool:
            try:
                wanted = await body.read(request, task, self._models, self._options, spool)
            except OmniBusError as error:
                problem = to_problem(error)
                problem.must_close = request.can_read_body
                raise problem from error
            return wanted, await self._media.audio(spool, field="file", rate_hz=RATE_HZ, channels=1)

    @staticmethod
    def _terms(request: web.Request, sound: Audio) -> Any:
        return {**terms_of(request), "input_bytes": len(sound.data)}

    async def _stream(self, request: web.Request, call: Call, sound: Audio) -> web.StreamResponse:
        stream = EventStream(request, self._options.write_timeout_s)
        heard = _Heard(self._options.max_answer_bytes)
        terms = self._terms(request, sound)
        async with stream.telling_failures(), aclosing(run_all(self._client, [call], terms)) as events:
            async for _, event in events:
                if text := heard.add(event):
                    await stream.send(msgspec.json.encode(TranscriptionDelta("transcript.text.delta", text)))
            done = TranscriptionDone("transcript.text.done", heard.text, _usage(sound))
            await stream.send_last(msgspec.json.encode(done), b"[DONE]")
        return stream.response


def _refused(error: BadInput, wanted: body.Transcription) -> BadInput:
    if error.field == "task":
        name = wanted.pipeline.serve_as
        return BadInput(f"model: '{name}' does not translate: {error.message}", field="model", stage=error.stage)
    return renamed(error, wanted.pipeline, _FIELDS)


def _seconds(sound: Audio) -> float:
    return sound.num_frames / sound.rate_hz


def _usage(sound: Audio) -> DurationUsage:
    return DurationUsage("duration", math.ceil(_seconds(sound)))


def _rendered(wanted: body.Transcription, heard: _Heard, sound: Audio) -> web.Response:
    match wanted.format:
        case "text":
            return web.Response(text=heard.text + "\n", content_type="text/plain", charset="utf-8")
        case "srt":
            return web.Response(text=srt(_cues(heard)), content_type="application/x-subrip", charset="utf-8")
        case "vtt":
            return web.Response(text=vtt(_cues(heard)), content_type="text/vtt", charset="utf-8")
        case "verbose_json":
            return json_response(_verbose(wanted, heard, sound))
        case _:
            usage = _usage(sound) if wanted.task == "transcribe" else msgspec.UNSET
            return json_response(Transcription(heard.text, usage))


def _cues(heard: _Heard) -> list[Cue]:
    try:
        return cues_of(heard.segments)
    except (KeyError, AttributeError) as error:
        raise _no_segment() from error


def _verbose(wanted: body.Transcription, heard: _Heard, sound: Audio) -> VerboseTranscription:
    try:
        words = [word for each in heard.segments for word in each.pop("words", ())]
        segments = msgspec.convert(heard.segments, list[TranscribedSegment])
        words = msgspec.convert(words, list[TranscribedWord])
    except msgspec.ValidationError as error:
        raise _no_segment() from error
    return VerboseTranscription(
        task=wanted.task,
        language=heard.language,
        duration=round(_seconds(sound), 3),
        text=heard.text,
        segments=segments if "segment" in wanted.granularities else None,
        words=words if "word" in wanted.granularities else None,
        usage=_usage(sound) if wanted.task == "transcribe" else msgspec.UNSET,
    )


def _no_segment() -> BadFrame:
    return BadFrame("segments: an object came that is no segment (allowed: id, start, end, text, and known others)")
