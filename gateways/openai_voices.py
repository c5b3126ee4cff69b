"""``/v1/audio/voices``: which voices there are, and uploads of new ones."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from gateways import openai_audio_answers as answers
from gateways.forms import FRAMING_BYTES, read_form
from gateways.http import KEY_NAME, json_response
from gateways.openai_files import FilesOptions
from gateways.openai_models import DEFAULT_VOICE, REFERENCE, SOUND, find_model
from gateways.openai_speech import check_reference_length
from gateways.openapi import Answer, Operation, Schema
from gateways.problems import Problem, to_problem
from gateways.voices import Policy, key_of, read_name
from omni_bus.errors import BadInput, OmniBusError
from omni_bus.media.spool import Spool
from omni_bus.media.store import disk_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from gateways.forms import Part
    from gateways.media import MediaReader
    from gateways.voices import Voices
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.store import Entry

PATH = "/v1/audio/voices"

ENDINGS = {
    ".mp3": "audio/mpeg",
    ".wav": "audio/wav",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".aac": "audio/aac",
    ".flac": "audio/flac",
    ".webm": "audio/webm",
    ".mp4": "audio/mp4",
    ".m4a": "audio/mp4",
}
"""What a file is whose part doesn't say it."""

MIME_TYPES = tuple(dict.fromkeys([*ENDINGS.values(), "audio/x-wav"]))

MAX_TEXT_BYTES = 8 * 1024

FIELDS = ("name", "consent", "ref_text", "speaker_description", "type")


class VoicesOptions(FilesOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table of a gateway that keeps voices."""

    max_voice_bytes: Annotated[int, msgspec.Meta(ge=1)] = 10 * 1024 * 1024
    """A larger sample of a voice is refused with 413."""

    max_caller_voices: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """Voices that one caller may keep."""

    voice_policy: Policy = "replace"
    """Whether an upload takes the place of the caller's voice of that name (``replace``) or is refused
    (``immutable``)."""


_JSON = "application/json"
_TEXT: Schema = {"type": "string", "minLength": 1}
_FORM: Schema = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "consent": _TEXT | {"description": "the id of the speaker's consent"},
        "audio_sample": {"type": "string", "contentMediaType": "application/octet-stream"},
        "type": {"enum": ["audio_sample"]},
        "ref_text": {"type": "string", "description": "what is said in the sample"},
        "speaker_description": {"type": "string"},
    },
    "required": ["name", "consent", "audio_sample"],
    "additionalProperties": False,
}
_QUERIES: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1, "description": "voices of this model only"},
    "names_only": {"enum": ["true", "false"], "description": "without what is known of uploaded ones"},
}

OPERATIONS = (
    Operation(
        method="get",
        path=PATH,
        name="list_voices",
        summary="Built-in voices, and the caller's own",
        queries=_QUERIES,
        answers={200: Answer(description="the voices", content={_JSON: answers.VoiceList})},
        errors=(404,),
    ),
    Operation(
        method="post",
        path=PATH,
        name="create_voice",
        summary="Upload a voice, as a sample of 1 to 30 s; the form's parts may come in any order",
        body=_FORM,
        body_type="multipart/form-data",
        answers={200: Answer(description="the voice is kept", content={_JSON: answers.VoiceCreated})},
        errors=(415, 507),
    ),
    Operation(
        method="delete",
        path=f"{PATH}/{{name}}",
        name="delete_voice",
        summary="Delete an uploaded voice",
        parameters={"name": "as it was uploaded, in any case"},
        answers={200: Answer(description="it is gone", content={_JSON: answers.VoiceDeleted})},
        errors=(404,),
    ),
)
"""What the routes are, for ``/openapi.json``."""


def built_in(pipelines: Mapping[str, Pipeline]) -> frozenset[str]:
    """Return the names of all voices that pipelines have by themselves, in lower case."""
    found = {voice.lower() for pipeline in pipelines.values() for voice in pipeline.voices}
    return frozenset({DEFAULT_VOICE, *found})


class VoicesRoutes:
    """The routes' handlers.

    Args:
        voices: the uploaded ones.
        models: pipelines by every name that clients may use.
        media: reads samples.
        options: limits.
    """

    def __init__(
        self, voices: Voices, models: Mapping[str, Pipeline], media: MediaReader, options: VoicesOptions
    ) -> None:
        self._voices = voices
        self._models = models
        self._media = media
        self._options = options

    @property
    def max_body_bytes(self) -> int:
        """Limit of an upload's body."""
        return self._options.max_voice_bytes + FRAMING_BYTES

    async def list(self, request: web.Request) -> web.Response:
        """``GET /v1/audio/voices``."""
        names_only = request.query.get("names_only", "false")
        if names_only not in ("true", "false"):
            raise BadInput(f"names_only: {names_only[:40]!r} came (allowed: true, false)", field="names_only")
        models = self._models
        if (name := request.query.get("model")) is not None:
            models = {name: find_model(name, models, lambda pipeline: bool(pipeline.speakers_of(SOUND)), "speaks")}
        takes_reference = name is None or REFERENCE in models[name].inputs
        uploaded = await self._voices.entries(request[KEY_NAME]) if takes_reference else {}
        names = sorted({*built_in(models), *uploaded})
        if names_only == "true":
            return json_response({"voices": names})
        return json_response(
            {"voices": names, "uploaded_voices": [_listed(entry) for _, entry in sorted(uploaded.items())]}
        )

    async def create(self, request: web.Request) -> web.Response:
        """``POST /v1/audio/voices``: a form with the name, the consent and the sample, in any order."""
        try:
            with Spool(self._options.max_voice_bytes, what="audio_sample") as sample:
                entry = await self._receive(request, sample)
        except (OmniBusError, OSError) as error:
            problem = to_problem(disk_error(error) if isinstance(error, OSError) else error)
            problem.must_close = request.can_read_body
            raise problem from error
        about = entry.metadata
        names = ("name", "consent", "created_at", "mime_type", "ref_text", "speaker_description")
        voice = {name: about[name] for name in names if name in about} | {"file_size": entry.num_bytes}
        # OpenAI's own fields, whose id is what ``voice={"id": …}`` of a request to speak takes.
        openai = {"id": key_of(about["name"]), "object": "audio.voice", "type": "audio_sample"}
        openai |= {name: about[name] for name in ("name", "created_at")}
        return json_response({"success": True, "voice": voice, **openai})

    async def _receive(self, request: web.Request, sample: Spool) -> Entry:
        fields: dict[str, str] = {}
        mime_type = ""
        async for part in read_form(request, self._options, max_bytes=self.max_body_bytes):
            if part.name in fields or (part.name == "audio_sample" and mime_type):
                raise BadInput(f"{part.name}: it came twice (allowed: once)", field=part.name)
            if part.name == "audio_sample":
                mime_type = _mime_type(part)
                async for piece in part.pieces():
                    await sample.write(piece)
            elif part.name == "speaker_embedding":
                message = "speaker_embedding: no voice here is made of one (allowed: audio_sample)"
                raise BadInput(message, field="speaker_embedding")
            elif part.name in FIELDS:
                fields[part.name] = (await part.text(MAX_TEXT_BYTES)).strip()
            else:
                known = ", ".join(("audio_sample", *FIELDS))
                raise BadInput(f"{part.name[:80]}: unknown field (allowed: {known})", field=part.name[:80])
        if (kind := fields.pop("type", "audio_sample")) != "audio_sample":
            raise BadInput(f"type: {kind[:40]!r} came (allowed: audio_sample)", field="type")
        for name in ("name", "consent"):
            if not fields.get(name):
                raise BadInput(f"{name}: missing (allowed: text)", field=name)
        if not mime_type:
            raise BadInput("audio_sample: missing (allowed: a file of sound)", field="audio_sample")
        name = read_name(fields["name"])
        await self._voices.check(name, request[KEY_NAME])
        await sample.flush()
        check_reference_length(await self._media.audio(sample, field="audio_sample", channels=1), "audio_sample")
        about = {key: value for key, value in fields.items() if value and key != "name"}
        return await self._voices.add(name, request[KEY_NAME], sample, about | {"mime_type": mime_type})

    async def delete(self, request: web.Request) -> web.Response:
        """``DELETE /v1/audio/voices/NAME``."""
        name = request.match_info["name"]
        if not await self._voices.delete(name, request[KEY_NAME]):
            raise Problem(404, f"name: no uploaded voice {name[:80]!r}", param="name")
        gone = {"id": key_of(name), "object": "audio.voice.deleted", "deleted": True}
        return json_response({"success": True, "message": f"Voice {name!r} deleted", **gone})


def _mime_type(part: Part) -> str:
    """Return what a sample's part says that it is.

    Raises:
        BadInput: it is no file, or no sound.
    """
    if part.filename is None:
        raise BadInput("audio_sample: a text came (allowed: a file of sound)", field="audio_sample")
    said = part.content_type
    if said in ("", "application/octet-stream"):
        said = ENDINGS.get(PurePosixPath(part.filename).suffix.lower(), said or "none")
    if said not in MIME_TYPES:
        allowed = ", ".join(MIME_TYPES)
        raise BadInput(f"audio_sample: Content-Type {said[:80]} came (allowed: {allowed})", field="audio_sample")
    return said


def _listed(entry: Entry) -> dict[str, Any]:
    about = entry.metadata
    found = {name: about[name] for name in ("name", "consent", "created_at", "mime_type")}
    found |= {"file_size": entry.num_bytes, "embedding_source": "audio", "embedding_dim": None}
    return found | {name: about[name] for name in ("ref_text", "speaker_description") if name in about}
