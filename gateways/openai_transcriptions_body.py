"""The forms of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``: fields checked, the file spooled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from gateways.fields import refusal
from gateways.forms import FRAMING_BYTES, read_form
from gateways.openai_models import SEGMENTS, can_transcribe, find_model
from omni_bus.core.pipeline import OUT
from omni_bus.errors import BadInput, did_you_mean
from omni_bus.media.store import disk_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from aiohttp import web

    from gateways.forms import FormOptions, Part
    from gateways.openapi import Schema
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.spool import Spool

Task: TypeAlias = Literal["transcribe", "translate"]
Format: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]

FORMATS: tuple[Format, ...] = ("json", "text", "srt", "verbose_json", "vtt")
TIMED: tuple[Format, ...] = ("srt", "verbose_json", "vtt")
"""Formats that say when something was said."""

GRANULARITIES = ("segment", "word")
GRANULARITY = "timestamp_granularities[]"

MAX_PROMPT_CHARACTERS = 4096
MAX_NEW_TOKENS = 65_536

_REFUSED = {
    "include[]": "nothing: no model here gives log-probabilities of its tokens",
    "known_speaker_names[]": "nothing: no model here tells speakers apart",
    "known_speaker_references[]": "nothing: no model here tells speakers apart",
}
"""Fields of OpenAI's that nothing here can honour, and what is allowed."""

_ONCE = ("model", "language", "prompt", "response_format", "temperature", "repetition_penalty", "max_new_tokens")
_KNOWN: dict[Task, tuple[str, ...]] = {
    "transcribe": ("file", *_ONCE, "stream", "chunking_strategy", GRANULARITY),
    "translate": ("file", *(name for name in _ONCE if name != "language")),
}


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of a sound."""

    pipeline: Pipeline
    task: Task
    format: Format
    is_streamed: bool
    granularities: tuple[str, ...]
    params: dict[str, Any]
    """Of the stage that writes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Wanted output ports."""
        return ("text", SEGMENTS) if self.format in TIMED else ("text",)

    @property
    def writers(self) -> tuple[str, ...]:
        """Stages that write the text."""
        edges = self.pipeline.edges
        return tuple(dict.fromkeys(edge.source for edge in edges if edge.target == OUT))


async def read(
    request: web.Request, task: Task, models: Mapping[str, Pipeline], options: FormOptions, spool: Spool
) -> Transcription:
    """Read a form, whose parts come in any order; its file goes to `spool`.

    Raises:
        Problem: 404 for the model, 408, 413, 415, and 400 for what is no form.
        BadInput: a field that is unknown, came twice, or has a value that is not allowed.
        StorageFull: there is no room for the file.
    """
    fields: dict[str, Any] = {}
    async for part in read_form(request, options, max_bytes=max_body_bytes(options)):
        if part.name not in _KNOWN[task]:
            raise _unknown(part.name, task)
        if part.name == GRANULARITY:
            fields.setdefault(GRANULARITY, []).append(await part.text())
            continue
        if part.name in fields:
            raise BadInput(f"{part.name}: it came twice (allowed: once)", field=part.name)
        fields[part.name] = await (_keep(part, spool) if part.name == "file" else part.text())
    if "file" not in fields:
        raise BadInput("file: missing (allowed: a sound file)", field="file")
    return parse(fields, task, models)


def max_body_bytes(options: FormOptions) -> int:
    """Return the limit of a form."""
    return options.max_audio_bytes + FRAMING_BYTES


async def _keep(part: Part, spool: Spool) -> str:
    if part.filename is None:
        raise BadInput("file: a text came (allowed: a file with its name)", field="file")
    async for piece in part.pieces():
        await _on_disk(spool.write(piece))
    await _on_disk(spool.flush())
    return part.filename


async def _on_disk(step: Awaitable[None]) -> None:
    try:
        await step
    except OSError as error:
        raise disk_error(error) from error


def _unknown(name: str, task: Task) -> BadInput:
    name = name[:80]
    if name in _REFUSED:
        return BadInput(f"{name}: it came (allowed: {_REFUSED[name]})", field=name)
    known = _KNOWN[task]
    return BadInput(f"{name}: unknown field{did_you_mean(name, known)} (allowed: {', '.join(known)})", field=name)


def parse(fields: Mapping[str, Any], task: Task, models: Mapping[str, Pipeline]) -> Transcription:
    """Check a form's fields.

    Raises:
        Problem: 404, no such model, or none that transcribes.
        BadInput: names the field, its value and what is allowed.
    """
    pipeline = find_model(fields.get("model"), models, can_transcribe, "transcribes")
    fmt = _one_of("response_format", fields.get("response_format", "json"), FORMATS)
    is_streamed = _one_of("stream", fields.get("stream", "false").lower(), ("true", "false")) == "true"
    _one_of("chunking_strategy", fields.get("chunking_strategy", "auto"), ("auto",))
    if fmt in TIMED and SEGMENTS not in pipeline.outputs:
        raise refusal("response_format", fmt, "json, text; this model doesn't say when something was said")
    if fmt in TIMED and is_streamed:
        raise refusal("response_format", fmt, "json, text, with stream = true")
    granularities = tuple(_one_of(GRANULARITY, each, GRANULARITIES) for each in fields.get(GRANULARITY, ()))
    if granularities and fmt != "verbose_json":
        raise refusal(GRANULARITY, granularities[0], "with response_format = verbose_json")
    params = _params(fields)
    if task == "translate":
        params["task"] = task
    if "word" in granularities:
        params["word_timestamps"] = True
    return Transcription(
        pipeline=pipeline,
        task=task,
        format=fmt,
        is_streamed=is_streamed,
        granularities=granularities or ("segment",),
        params=params,
    )


def _params(fields: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    # Empty fields are those of web pages' forms that nobody filled in.
    if language := fields.get("language"):
        if not (language.isascii() and language.isalpha() and len(language) <= 3):
            raise refusal("language", language, "an ISO 639-1 code, as en")
        params["language"] = language.lower()
    if prompt := fields.get("prompt"):
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            raise refusal("prompt", prompt, f"at most {MAX_PROMPT_CHARACTERS} characters")
        params["prompt"] = prompt
    if "temperature" in fields:
        params["temperature"] = _number("temperature", fields["temperature"], "a number from 0 to 1", 0, 1)
    if "repetition_penalty" in fields:
        allowed = "a number above 0, at most 2"
        params["repetition_penalty"] = _number("repetition_penalty", fields["repetition_penalty"], allowed, 1e-6, 2)
    if "max_new_tokens" in fields:
        text, allowed = fields["max_new_tokens"], f"an integer from 1 to {MAX_NEW_TOKENS}"
        if not (text.isascii() and text.isdecimal() and len(text) <= 6):
            raise refusal("max_new_tokens", text, allowed)
        params["max_new_tokens"] = int(_number("max_new_tokens", text, allowed, 1, MAX_NEW_TOKENS))
    return params


def _one_of(name: str, text: Any, allowed: tuple[Any, ...]) -> Any:
    if text not in allowed:
        raise refusal(name, text, ", ".join(allowed))
    return text


def _number(name: str, text: str, allowed: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise refusal(name, text, allowed)
    return value


def form_schema(task: Task) -> Schema:
    """Return the JSON Schema of a form."""
    strings: dict[str, Schema] = {
        "file": {"type": "string", "minLength": 1, "contentMediaType": "application/octet-stream"},
        "model": {"type": "string"},
        "language": {"type": "string", "pattern": "^[A-Za-z]{2,3}$", "description": "ISO 639-1"},
        "prompt": {"type": "string", "maxLength": MAX_PROMPT_CHARACTERS},
        "response_format": {"enum": list(FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        "max_new_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_NEW_TOKENS},
        "stream": {"type": "boolean"},
        "chunking_strategy": {"enum": ["auto"], "description": "what the pipeline does"},
        GRANULARITY: {"type": "array", "items": {"enum": list(GRANULARITIES)}},
    }
    return {
        "type": "object",
        "properties": {name: strings[name] for name in _KNOWN[task]},
        "required": ["file"],
        "additionalProperties": False,
    }
