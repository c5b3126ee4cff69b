"""What a client of Moshi sets for its conversation, and the stages that honour it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateways.fields import read_fields, refuse_unknown
from omni_bus.errors import BadInput, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline

IGNORED = frozenset(
    {"audio_seed", "pad_mult", "repetition_penalty", "repetition_penalty_context", "email", "worker_auth_id"}
)
"""What web clients always send, and no stage here has: taken and without effect."""

OPTIONAL = frozenset({"text_temperature", "text_topk", "audio_temperature", "audio_topk", "text_seed"})
"""What web clients always send as well: without effect where no stage has it."""

WORDS = frozenset({"text_prompt", "voice_prompt", "model"})
"""Settings that are no numbers."""

NAMES = {"text_prompt": "instructions", "voice_prompt": "voice", "text_seed": "seed"}
"""Parameters of stages that the protocol calls otherwise."""

VOICE_FILES = (".pt", ".wav")
"""What PersonaPlex's clients end the name of a voice with; stages' voices have no such ending."""

Temperature = Annotated[float, Meta(ge=0, le=10, description="a number from 0 to 10")]
TopK = Annotated[int, Meta(ge=1, le=100_000, description="an integer from 1 to 100000")]
Seed = Annotated[int, Meta(ge=-1, le=2**63 - 1, description="an integer from -1, which is none, to 2**63 - 1")]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """By the names of ``/api/chat``; nothing, or an empty text, leaves it to the model."""

    text_prompt: Annotated[str, Meta(max_length=10_000, description="a string of at most 10000 characters")] = ""
    voice_prompt: Annotated[
        str, Meta(max_length=255, pattern=r"^[^/\\\x00]*$", description="the name of a file, without a folder")
    ] = ""
    seed: Seed = -1
    text_seed: Seed = -1
    text_temperature: Temperature | None = None
    text_topk: TopK | None = None
    audio_temperature: Temperature | None = None
    audio_topk: TopK | None = None
    model: Annotated[str, Meta(max_length=1000, description="a model's name")] = ""


def settings_of(query: Mapping[str, str]) -> Settings:
    """Read a query string.

    Raises:
        BadInput: a name that nobody knows, or a value that is not allowed.
    """
    names = msgspec.structs.fields(Settings)
    refuse_unknown(dict(query), frozenset(field.encode_name for field in names) | IGNORED)
    values: dict[str, Any] = {}
    for field in names:
        text = query.get(field.encode_name, "")
        if text and text != "null":
            values[field.encode_name] = text if field.encode_name in WORDS else _number(text)
    return read_fields(Settings, values)


def _number(text: str) -> int | float | str:
    """Return the number that a text says; the text itself, which no field takes, if it says none."""
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            if math.isfinite(number := kind(text)):
                return number
    return text


def model_of(name: str, models: Mapping[str, Pipeline]) -> Pipeline:
    """Return the pipeline of this name, or the first.

    Raises:
        UnknownName: there is none.
    """
    if not name:
        return next(iter(models.values()))
    if name not in models:
        raise unknown_name("model", name, models, field="model")
    return models[name]


def params_of(settings: Settings, pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """Return the parameters of each stage.

    Raises:
        BadInput: something that no stage of the pipeline can honour.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in msgspec.structs.asdict(settings).items():
        is_set = value not in ("", -1, None) and name != "model"
        if not is_set or (name == "text_seed" and settings.seed != -1):
            continue
        parameter = NAMES.get(name, name)
        stages = [stage for stage in pipeline.stages if parameter in pipeline.params.get(stage, {})]
        if not stages and name not in OPTIONAL:
            allowed = "nothing, or an empty string" if isinstance(value, str) else "nothing"
            shown = f"'{value[:40]}'" if isinstance(value, str) else value
            raise BadInput(f"{name}: {shown} came (allowed with '{pipeline.serve_as}': {allowed})", field=name)
        honoured = _voice(str(value), pipeline) if name == "voice_prompt" else value
        for stage in stages:
            found.setdefault(stage, {})[parameter] = honoured
    return found


def _voice(name: str, pipeline: Pipeline) -> str:
    """Return the voice that a file's name means.

    Raises:
        BadInput: there is no such voice, where it is known which there are.
    """
    stem = next((name.removesuffix(end) for end in VOICE_FILES if name.endswith(end)), name)
    voice = stem if name not in pipeline.voices else name
    if pipeline.voices and voice not in pipeline.voices:
        allowed = ", ".join(pipeline.voices)
        raise BadInput(
            f"voice_prompt: '{name[:40]}' came (allowed with '{pipeline.serve_as}': {allowed})", field="voice_prompt"
        )
    return voice
