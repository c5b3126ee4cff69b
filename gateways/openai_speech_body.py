"""The body of ``POST /v1/audio/speech``: checked field by field, turned into what the bus runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateways.fan_out import Call
from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.http import MAX_SESSION_CHARACTERS
from gateways.openai_fields import (
    SESSION_WORDS,
    Bool,
    Object,
    String,
    check_numbers,
    flatten,
    harmless_properties,
    optional,
    properties_of,
    refuse_unhonoured,
)
from gateways.openai_models import DEFAULT_VOICE, REFERENCE, SOUND, TEXT, can_speak, find_model
from omni_bus.errors import BadInput
from omni_bus.media.encoder import FORMATS, Format, allowed_rates
from omni_bus.wire.payloads import Audio, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.voices import VoiceSample
    from omni_bus.core.pipeline import Pipeline

MAX_SPEECH_CHARS = 100_000
"""Of the text of one request, unless the gateway's table says otherwise. OpenAI's limit is 4096."""

MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 192_000
"""Sample rates that may be asked for: what telephones and what studios use."""

MIN_SPEED, MAX_SPEED = 0.25, 4.0

MAX_SEED = 2**63 - 1
"""What a voice takes that names no limit of its own; others are folded into its range."""

MAX_LANGUAGE_CODE = 3
"""Letters of a language's code (ISO 639); its name is longer, and written with a capital."""

MAX_REFERENCES = 1
"""The port `reference` takes one sound."""

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
"""Of ASCII and Latin-1, those that are neither spaces nor ends of lines (Unicode's White_Space) nor separators."""

_REFERENCE_WORDS = "a URL (data:, http, https, file:) or base64"
_Source = Annotated[str, Meta(min_length=1)]


class SpeechFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a body."""

    input: Annotated[str, Meta(min_length=1, description="text with something to speak")]
    model: String | None = None
    voice: Annotated[str | dict[str, Any], Meta(description="a voice's name, or an object with its id")] | None = None
    speaker: Annotated[str | dict[str, Any], Meta(description="a voice's name, or an object with its id")] | None = None
    instructions: (
        Annotated[str, Meta(min_length=1, max_length=500, description="a string of 1 to 500 characters")] | None
    ) = None
    response_format: Annotated[Format, Meta(description=", ".join(FORMATS))] = "wav"
    sample_rate: (
        Annotated[
            int,
            Meta(ge=MIN_RATE_HZ, le=MAX_RATE_HZ, description=f"an integer from {MIN_RATE_HZ} to {MAX_RATE_HZ}, in Hz"),
        ]
        | None
    ) = None
    speed: Annotated[float, Meta(ge=MIN_SPEED, le=MAX_SPEED, description="a number from 0.25 to 4")] | None = None
    stream: Bool = False
    stream_format: Annotated[Literal["sse", "audio"], Meta(description="sse, audio")] | None = None
    task_type: (
        Annotated[Literal["CustomVoice", "VoiceDesign", "Base"], Meta(description="CustomVoice, VoiceDesign, Base")]
        | None
    ) = None
    language: String | None = None
    ref_audio: (
        Annotated[
            _Source | Annotated[list[_Source], Meta(min_length=1, max_length=MAX_REFERENCES)],
            Meta(description=f"{_REFERENCE_WORDS}, or a list of one"),
        ]
        | None
    ) = None
    ref_text: String | None = None
    references: (
        Annotated[
            list[dict[str, Any]],
            Meta(min_length=1, max_length=MAX_REFERENCES, description="a list of one object with audio_path, text"),
        ]
        | None
    ) = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=4096, description="an integer from 1 to 4096")] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")] | None = None
    extra_params: Object | None = None
    extra_body: Object = msgspec.field(default_factory=dict[str, Any])
    session_id: (
        Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARACTERS, description=SESSION_WORDS)] | None
    ) = None
    priority: Annotated[int, Meta(ge=-1000, le=1000, description="an integer from -1000 to 1000")] | None = None
    """As in vLLM: lower numbers go first."""
    user: Annotated[str, Meta(max_length=4096, description="a string of at most 4096 characters")] | None = None
    """Whom the caller asks for: nothing here depends on it."""


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "x_vector_only_mode": ((False,), "false"),
    "speaker_embedding": ((), "null"),
    "initial_codec_chunk_frames": ((), "null"),
    "non_streaming_mode": ((), "null"),
    "word_timestamps": ((False,), "false: there is no aligner"),
    "ref_audio_2": ((), "null"),
    "ambient_sound": ((), "null"),
    "duration_seconds": ((0, 0.0), "null or 0"),
}
"""Fields that would change the answer and that nothing here honours: the values that ask for nothing."""

INERT = ("metadata", "safety_identifier")
"""Fields that describe a request to its operator; they ask for nothing."""

KNOWN = names_of(SpeechFields) | ONLY.keys() | set(INERT)
"""Every field of a body."""


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request."""

    pipeline: Pipeline
    text: str
    params: dict[str, dict[str, Any]]
    """Parameters by stage."""
    format: Format = "wav"
    sample_rate: int | None = None
    """Of the answer, in Hz; None for the voice's own."""
    speed: float = 1.0
    """What remains to be done to the sound once it is made."""
    delivery: Literal["whole", "audio", "sse"] = "whole"
    reference: str | bytes | None = None
    """Where the sound of the voice is that is to be spoken with, or the file itself."""
    reference_field: str = ""
    """What the body calls it, for refusals."""
    names: dict[str, str] = {}
    """What the body calls the parameters and ports of the stage, where it is something else."""
    num_text_tokens: int = 0
    """What the text and its instructions count, where the voice counts nothing: their characters."""
    session: str = ""
    priority: int = 0
    """The bus's: higher goes first."""


def parse(
    document: dict[str, Any],
    models: Mapping[str, Pipeline],
    *,
    max_chars: int = MAX_SPEECH_CHARS,
    sample: VoiceSample | None = None,
) -> Speech:
    """Check a body.

    Args:
        document: the JSON object.
        models: pipelines by every name that clients may use; the first one that speaks is the default.
        max_chars: limit of the text.
        sample: the uploaded voice that the body names, if it names one.

    Raises:
        BadInput: a field that can't be honoured, by name.
        Problem: 404 for a model that is not served.
    """
    body = flatten(document)
    refuse_unhonoured(body, ONLY)
    refuse_unknown(body, KNOWN)
    fields = read_fields(SpeechFields, body)
    check_text(fields.input, max_chars)
    if fields.sample_rate is not None and (allowed := allowed_rates(fields.response_format, fields.sample_rate)):
        raise refusal("sample_rate", fields.sample_rate, f"{allowed}, as {fields.response_format}")
    pipeline = find_model(fields.model, models, can_speak, "speaks")
    given_as = "voice" if fields.speaker is None else "speaker"
    if sample is not None:
        fields = _with_sample(fields, sample, pipeline)
    reference, reference_field, reference_text = _reference(fields, pipeline)
    own_speed, speed = share_speed(pipeline, fields.speed)
    own = _params(fields, pipeline, own_speed, reference_text)
    own |= _extra_params(fields, body)
    names = _names(fields, reference_field, given_as)
    _refuse_unhonoured(own, pipeline, names)
    return Speech(
        pipeline=pipeline,
        text=fields.input,
        params={stage: own for stage in pipeline.speakers_of(SOUND) if own},
        format=fields.response_format,
        sample_rate=fields.sample_rate,
        speed=speed,
        delivery=_delivery(fields),
        reference=reference if sample is None else sample.data,
        reference_field=reference_field if sample is None else names["voice"],
        names=names,
        num_text_tokens=len(fields.input) + len(fields.instructions or ""),
        session=_session(fields),
        priority=-(fields.priority or 0),
    )


def calls(speech: Speech, reference: Audio | None = None) -> list[Call]:
    """Return the request on the bus that a body comes to.

    Args:
        speech: the checked body.
        reference: the sound that its `reference` names.
    """
    inputs: dict[str, list[Any]] = {TEXT: [Text(speech.text)]}
    if REFERENCE in speech.pipeline.inputs:
        inputs[REFERENCE] = [] if reference is None else [reference]
    return [
        Call(
            pipeline=speech.pipeline.name,
            outputs=(SOUND,),
            params=speech.params,
            inputs=inputs,
            priority=speech.priority,
            session=speech.session,
        )
    ]


def check_text(text: str, max_chars: int, name: str = "input") -> None:
    """Refuse a text that is too long, has nothing in it, or has characters that stand for no sound and no pause.

    Raises:
        BadInput: names the field.
    """
    if len(text) > max_chars:
        raise refusal(name, text, f"1 to {max_chars} characters")
    if not text.strip():
        raise refusal(name, text, "text with something to speak")
    if found := _CONTROL.search(text):
        message = f"{name}: the control character U+{ord(found[0]):04X} came at {found.start()}"
        raise BadInput(f"{message} (allowed: text, spaces and line breaks)", field=name)


def voice_of(given: str | dict[str, Any] | None, name: str = "voice") -> str | None:
    """Return a voice's name in lower case; None for the stage's own.

    Raises:
        BadInput: it is neither a string nor an object with one.
    """
    if isinstance(given, dict):
        refuse_unknown(given, {"id"}, prefix=f"{name}.")
        given = given.get("id")
        name = f"{name}.id"
        if not isinstance(given, str):
            raise refusal(name, given, "a string")
    if given is None:
        return None
    voice = given.strip().lower()
    if not voice or len(voice) > 256 or not voice.isprintable():
        raise refusal(name, given, "1 to 256 printable characters")
    return None if voice == DEFAULT_VOICE else voice


def _delivery(fields: SpeechFields) -> Literal["whole", "audio", "sse"]:
    """A stream format alone asks for a stream; a stream alone is one of events."""
    if fields.stream_format is not None:
        return fields.stream_format
    return "sse" if fields.stream else "whole"


def share_speed(pipeline: Pipeline, speed: float | None) -> tuple[float | None, float]:
    """Return which part of a speed the stage that speaks does itself, and what remains to be done to its sound.

    A voice that speaks faster sounds better than a sound that is made shorter, so the stage does what its range allows.
    """
    if speed is None or "speed" not in params_of(pipeline):
        return None, speed or 1.0
    lowest, highest = _range_of(pipeline, "speed", (MIN_SPEED, MAX_SPEED))
    own = min(max(speed, lowest), highest)
    return own, speed / own


def params_of(pipeline: Pipeline) -> dict[str, Any]:
    """Return the JSON Schemas of the parameters of the stage that speaks."""
    return {
        name: schema for stage in pipeline.speakers_of(SOUND) for name, schema in pipeline.params.get(stage, {}).items()
    }


def _range_of(pipeline: Pipeline, name: str, otherwise: tuple[float, float]) -> tuple[float, float]:
    """Return the least and greatest value of a parameter of the stage that speaks."""
    known = params_of(pipeline).get(name, {})
    schema = next((each for each in (known, *known.get("anyOf", ())) if "minimum" in each or "maximum" in each), {})
    return schema.get("minimum", otherwise[0]), schema.get("maximum", otherwise[1])


def _refuse_unhonoured(params: dict[str, Any], pipeline: Pipeline, names: Mapping[str, str]) -> None:
    """Refuse what the stage that speaks has no parameter for, before anything is started for it."""
    known = params_of(pipeline)
    for name, value in params.items():
        if known and name not in known:
            allowed = f"null: the voice of {pipeline.serve_as} can't be told so; it takes {', '.join(sorted(known))}"
            raise refusal(names.get(name, name), value, allowed)


def _params(
    fields: SpeechFields, pipeline: Pipeline, speed: float | None, reference_text: str | None
) -> dict[str, Any]:
    """Return what the stage that speaks is told; only what the body has, so that its own defaults hold for the rest."""
    if fields.voice is not None and fields.speaker is not None:
        raise BadInput("speaker: also at voice (allowed: one of them)", field="speaker")
    voice = voice_of(fields.voice) if fields.speaker is None else voice_of(fields.speaker, "speaker")
    language = fields.language or "Auto"
    if language.isalpha() and len(language) > MAX_LANGUAGE_CODE:
        language = language.title()
    _, max_seed = _range_of(pipeline, "seed", (0, MAX_SEED))
    found = {
        "voice": voice,
        "speed": speed,
        "instructions": fields.instructions,
        "language": None if language == "Auto" else language,
        "task_type": _task_type(fields, pipeline),
        "reference_text": reference_text,
        "max_new_tokens": fields.max_new_tokens,
        "seed": None if fields.seed is None else fields.seed % (int(max_seed) + 1),
    }
    return {name: value for name, value in found.items() if value is not None}


def _task_type(fields: SpeechFields, pipeline: Pipeline) -> str | None:
    """Return which of a model's ways to speak is meant; a model that has one way speaks with voices of its own."""
    has_reference = fields.ref_audio is not None or fields.ref_text is not None or fields.references is not None
    if has_reference and fields.task_type not in (None, "Base"):
        raise refusal("task_type", fields.task_type, "Base, with a reference")
    wanted = "Base" if has_reference else fields.task_type
    if wanted is None or "task_type" in params_of(pipeline):
        return wanted
    return None if wanted == ("Base" if has_reference else "CustomVoice") else wanted


def _extra_params(fields: SpeechFields, body: dict[str, Any]) -> dict[str, Any]:
    """Return parameters that the body gives the stage as they are."""
    found = fields.extra_params or {}
    for name, value in found.items():
        place = f"extra_params.{name[:80]}"
        if name in KNOWN:
            both = f"also at {name}" if body.get(name) is not None else "a field of the body"
            raise BadInput(f"{place}: {both} (allowed: {name})", field=place)
        check_numbers(place, value)
    return found


def voice_named(body: dict[str, Any]) -> str | None:
    """Return the voice that a body names, in lower case; None for the stage's own, and where `parse` will refuse it."""
    try:
        body = flatten(body)
        return voice_of(body.get("voice") if body.get("speaker") is None else body["speaker"])
    except (BadInput, AttributeError):
        return None


def _with_sample(fields: SpeechFields, sample: VoiceSample, pipeline: Pipeline) -> SpeechFields:
    """Return fields that name an uploaded voice's sample as the reference; its words go where they are understood."""
    name = "voice" if fields.speaker is None else "speaker"
    if fields.voice is not None and fields.speaker is not None:
        return fields  # refused where both are read
    for other in ("ref_audio", "ref_text", "references"):
        if (value := getattr(fields, other)) is not None:
            raise refusal(other, value, f"null, as {name} is an uploaded voice")
    if REFERENCE not in pipeline.inputs:
        own = ", ".join(pipeline.voices) or "null"
        raise refusal(name, sample.name, f"{own}, as {pipeline.serve_as} takes no reference, and so no uploaded voice")
    known = params_of(pipeline)
    text = sample.text if not known or "reference_text" in known else None
    return msgspec.structs.replace(fields, voice=None, speaker=None, ref_audio=sample.name, ref_text=text)


def _reference(fields: SpeechFields, pipeline: Pipeline) -> tuple[str | None, str, str | None]:
    """Return where the reference is, what the body calls it, and its words."""
    source, place, text = fields.ref_audio, "ref_audio", fields.ref_text
    if fields.references is not None:
        if source is not None or text is not None:
            raise BadInput("references: also at ref_audio, ref_text (allowed: one of them)", field="references")
        refuse_unknown(fields.references[0], {"audio_path", "text"}, prefix="references[0].")
        source, text = fields.references[0].get("audio_path"), fields.references[0].get("text")
        place = "references[0].audio_path"
        if not isinstance(source, str) or not source:
            raise refusal(place, source, _REFERENCE_WORDS)
        if text is not None and not isinstance(text, str):
            raise refusal("references[0].text", text, "a string")
    if isinstance(source, list):
        source, place = source[0], "ref_audio[0]"
    if REFERENCE not in pipeline.inputs:
        for name in ("ref_audio", "ref_text", "references"):
            if (value := getattr(fields, name)) is not None:
                raise refusal(name, value, f"null, as {pipeline.serve_as} takes no reference")
    if text is not None and source is None:
        raise BadInput("ref_text: it came without ref_audio (allowed: both)", field="ref_text")
    return source, place, text


def _names(fields: SpeechFields, reference_field: str, given_as: str) -> dict[str, str]:
    """Return what the body calls the parameters and ports of the stage, where it is something else."""
    return {
        "text": "input",
        "reference": reference_field,
        "reference_text": "ref_text" if fields.references is None else "references[0].text",
        "voice": given_as,
        **{name: f"extra_params.{name}" for name in fields.extra_params or ()},
    }


def _session(fields: SpeechFields) -> str:
    name = fields.session_id or ""
    if not name.isprintable():
        raise refusal("session_id", name, SESSION_WORDS)
    return name


# --- the schema ---------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    properties = properties_of(SpeechFields)
    text = properties.pop("input")
    properties |= harmless_properties(ONLY)
    return {
        "title": "SpeechRequest",
        "description": "Fields may be null, which means absent; others than these are refused.",
        "type": "object",
        "properties": {"input": text, **optional(properties)},
        "required": ["input"],
        "additionalProperties": {"type": "null"},
    }
