"""What a request for a video says, as a form, as JSON or as a socket's first message; what goes to which stage."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jsonschema_rs
import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.openai_fields import String, given, optional, properties_of
from gateways.openai_messages import Source
from gateways.openai_models import PROMPT, can_make_video, find_model
from gateways.problems import Problem
from omni_bus.errors import BadInput
from omni_bus.media.h264 import LIVE, Preset, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline

VIDEO, SOUND, PROGRESS = "video", "audio", "progress"
"""Ports of pipelines that make videos."""

FPS = 24
"""Frames a second where a request gives seconds and no rate."""

MAX_PIXELS = 33_177_600
"""Of a frame: 7680 × 4320."""

MAX_FRAMES = 10_000
MAX_REFERENCES = 12

MAX_FIELD_BYTES = 512 * 1024
"""Of a field of a form; a prompt of 100,000 characters is less."""

MAX_SEED = 2**63

QUALITIES = {"high": 16, "lossless": 0}
"""Constant rate factors (`omni_bus.media.h264.Settings.quality`)."""

_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")

Side = Annotated[int, Meta(ge=1, le=16384, description="an integer from 1 to 16384")]
Frames = Annotated[int, Meta(ge=1, le=MAX_FRAMES, description=f"an integer from 1 to {MAX_FRAMES}")]
Rate = Annotated[float, Meta(ge=1, le=240, description="a number from 1 to 240")]
Guidance = Annotated[float, Meta(ge=0, le=20, description="a number from 0 to 20")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Object = Annotated[dict[str, Any], Meta(description="a JSON object")]


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """What goes to the stages, where it is given."""

    num_frames: Frames | None = None
    fps: Rate | None = None
    width: Side | None = None
    height: Side | None = None
    negative_prompt: String | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=200, description="an integer from 1 to 200")] | None = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    boundary_ratio: Share | None = None
    flow_shift: Annotated[float, Meta(gt=0, le=100, description="a number above 0, at most 100")] | None = None
    strength: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")] | None = None
    sound_duration: Annotated[float, Meta(gt=0, le=3600, description="seconds, above 0, at most 3600")] | None = None
    lora: Object | None = None
    extra_params: Object | None = None


class VideoFields(msgspec.Struct, frozen=True, kw_only=True):
    """All other fields."""

    prompt: Annotated[str, Meta(min_length=1, max_length=100_000, description="a string, not blank")]
    model: String | None = None
    seconds: (
        Annotated[str, Meta(pattern=r"^[1-9]\d{0,3}$", description="a whole number of seconds, from 1 to 9999")] | None
    ) = None
    size: Annotated[str, Meta(pattern=r"^\d{1,6}x\d{1,6}$", description="WIDTHxHEIGHT, in pixels")] | None = None
    quality: Literal["high", "lossless"] | None = None
    num_outputs_per_prompt: Annotated[int, Meta(ge=1, le=1, description="1")] | None = None
    generate_sound: Annotated[bool, Meta(description="true or false")] | None = None
    user: Annotated[str, Meta(max_length=4096, description="a string of at most 4096 characters")] | None = None


class CodecOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``extra_params.video_codec_options``: how the file is encoded."""

    preset: Annotated[Preset, Meta(description="one of libx264's presets")] | None = None
    crf: Annotated[int, Meta(ge=0, le=51, description="an integer from 0 to 51")] | None = None


STAGE_NAMES = {"sound_duration": "audio_length"}
"""Fields that stages call otherwise."""

FIELD_NAMES = {"audio_length": "sound_duration", PROMPT: "prompt", "text": "prompt"}
"""The way back, for refusals."""

REFERENCES = {"image_reference": "images", "video_reference": "video", "audio_reference": "audio"}
"""Fields with references, and the input port of each."""

UPLOADS = ("input_reference", "input_references")
"""Parts of a form that are files, pictures or videos by what they hold."""

NOT_SERVED = (
    *("aspect_ratio", "short_edge", "start_time_seconds", "enable_frame_interpolation"),
    *("frame_interpolation_exp", "frame_interpolation_scale", "frame_interpolation_model_path"),
    *("control_reference", "control_type", "source_video", "source_audio"),
    *("video_noise_mask", "audio_noise_mask", "return_stage_metrics"),
)
"""Fields of other servers that no model here knows."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for a video."""

    pipeline: Pipeline
    model: str
    prompt: str
    seconds: str | None
    size: str
    quality: str
    num_frames: int | None
    """If the request says it."""
    outputs: tuple[str, ...]
    params: dict[str, dict[str, Any]]
    settings: Settings
    sources: tuple[Source, ...]
    told: dict[str, Any]
    """What was given of `Clip`."""
    names: dict[str, str]
    """Parameters of stages that the request calls otherwise."""


def parse(body: dict[str, Any], models: Mapping[str, Pipeline], *, settings: Settings, is_live: bool = False) -> Wanted:
    """Return what a body asks for; whatever it uploads is not part of it.

    Args:
        body: fields by name, with JSON's values.
        models: pipelines by every name that clients may use.
        settings: how files are encoded unless the request says otherwise.
        is_live: the video is watched while it is made, and has no sound.

    Raises:
        BadInput: a field is unknown, has a value that is not allowed, or one that no stage of the model takes.
        Problem: 400 or 404, the model.
    """
    for name in NOT_SERVED:
        if body.get(name) is not None:
            raise refusal(name, body[name], "nothing: no model here knows it")
    refuse_unknown(body, names_of(VideoFields, Clip) | REFERENCES.keys() | {"input_reference"})
    if type(body.get("seconds")) is int:
        body = {**body, "seconds": str(body["seconds"])}
    fields = read_fields(VideoFields, body)
    if not fields.prompt.strip():
        raise refusal("prompt", fields.prompt, "a string that is not blank")
    clip = _sized(read_fields(Clip, body), fields)
    names = _names(body)
    pipeline = _model(fields.model, models)
    extra = dict(clip.extra_params or {})
    codec = _codec(extra.pop("video_codec_options", None))
    told = given(clip)
    told.pop("extra_params", None)
    return Wanted(
        pipeline=pipeline,
        model=fields.model or pipeline.serve_as,
        prompt=fields.prompt,
        seconds=fields.seconds,
        size=f"{clip.width}x{clip.height}" if clip.width and clip.height else "",
        quality=fields.quality or "default",
        num_frames=clip.num_frames,
        outputs=_outputs(pipeline, wants_sound=fields.generate_sound, is_live=is_live),
        params=_params(pipeline, told, extra, names),
        settings=_settings(LIVE if is_live else settings, codec, fields.quality),
        sources=tuple(_sources(body)),
        told=told,
        names=names,
    )


def _names(body: dict[str, Any]) -> dict[str, str]:
    """Return what a request calls parameters that it gives by other fields."""
    sides = {"width": "size", "height": "size"} if body.get("size") is not None else {}
    is_timed = body.get("seconds") is not None and body.get("num_frames") is None
    return FIELD_NAMES | sides | ({"num_frames": "seconds"} if is_timed else {})


def _model(name: str | None, models: Mapping[str, Pipeline]) -> Pipeline:
    try:
        return find_model(name, models, can_make_video, "makes videos")
    except Problem as problem:
        # As vLLM-Omni's routes of pictures and videos answer.
        raise Problem(400 if name is not None else 404, problem.message, param=problem.param) from None


def _sized(clip: Clip, fields: VideoFields) -> Clip:
    """Return the clip with what `size` and `seconds` say."""
    found: dict[str, Any] = {}
    if fields.size is not None:
        match = _SIZE.fullmatch(fields.size)
        assert match is not None
        found = {"width": int(match[1]), "height": int(match[2])}
        for name, side in found.items():
            if not 1 <= side <= 16384:
                raise refusal("size", fields.size, f"a {name} from 1 to 16384")
    if fields.seconds is not None and clip.num_frames is None:
        fps = clip.fps or FPS
        found |= {"fps": fps, "num_frames": max(1, round(int(fields.seconds) * fps))}
        if found["num_frames"] > MAX_FRAMES:
            raise refusal("seconds", fields.seconds, f"at most {MAX_FRAMES} frames: {int(MAX_FRAMES / fps)} s")
    clip = msgspec.structs.replace(clip, **found)
    if (clip.width is None) != (clip.height is None):
        missing = "height" if clip.height is None else "width"
        raise BadInput(f"{missing}: missing (allowed: width and height, or neither)", field=missing)
    if clip.width and clip.height and clip.width * clip.height > MAX_PIXELS:
        name = "size" if fields.size is not None else "width"
        raise refusal(name, f"{clip.width}x{clip.height}", f"at most {MAX_PIXELS} pixels")
    return clip


def _outputs(pipeline: Pipeline, *, wants_sound: bool | None, is_live: bool) -> tuple[str, ...]:
    has_sound = SOUND in pipeline.outputs
    if wants_sound and (is_live or not has_sound):
        allowed = "false: a stream has no sound" if is_live else f"false: '{pipeline.serve_as}' makes no sound"
        raise refusal("generate_sound", True, allowed)
    sound = (SOUND,) if has_sound and wants_sound is not False and not is_live else ()
    progress = (PROGRESS,) if PROGRESS in pipeline.outputs else ()
    return (VIDEO, *sound, *progress)


def _codec(raw: Any) -> CodecOptions:
    if raw is None:
        return CodecOptions()
    name = "extra_params.video_codec_options"
    if not isinstance(raw, dict):
        raise refusal(name, raw, "an object")
    refuse_unknown(raw, names_of(CodecOptions), prefix=f"{name}.")
    return read_fields(CodecOptions, raw, prefix=f"{name}.")


def _settings(settings: Settings, codec: CodecOptions, quality: str | None) -> Settings:
    changes: dict[str, Any] = {}
    if quality is not None:
        changes["quality"] = QUALITIES[quality]
    if codec.crf is not None:
        changes["quality"] = codec.crf
    if codec.preset is not None:
        changes["preset"] = codec.preset
    return msgspec.structs.replace(settings, **changes)


def _params(
    pipeline: Pipeline, told: dict[str, Any], extra: dict[str, Any], names: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Return each stage's parameters: of what was told, those that it knows.

    A field that no stage has as a parameter goes among the arguments (``extra``) of those that have these.

    Raises:
        BadInput: no stage takes it, or none of them the value.
    """
    values = {STAGE_NAMES.get(name, name): value for name, value in told.items()}
    if "seed" in values:
        values["seed"] %= MAX_SEED
    if float(values.get("fps", 0.5)).is_integer():
        values["fps"] = int(values["fps"])
    open_stages = [stage for stage in pipeline.stages if "extra" in pipeline.params.get(stage, {})]
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        field = names.get(name, name)
        stages = [stage for stage in pipeline.stages if name in pipeline.params.get(stage, {})]
        for stage in stages:
            _check(field, value, pipeline.params[stage][name])
            found.setdefault(stage, {})[name] = value
        if not stages:
            extra = {name: value, **extra} if open_stages else _refuse(pipeline, field, value)
    if extra and not open_stages:
        _refuse(pipeline, "extra_params", extra)
    for stage in open_stages if extra else ():
        found.setdefault(stage, {})["extra"] = extra
    return found


def _refuse(pipeline: Pipeline, field: str, value: Any) -> Any:
    raise refusal(field, value, f"nothing: no stage of '{pipeline.serve_as}' takes it")


def _check(field: str, value: Any, schema: dict[str, Any]) -> None:
    """Refuse what a stage's own schema refuses, before a job is made of it."""
    try:
        is_valid = jsonschema_rs.is_valid(schema, value)
    except (jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError, ValueError):
        return  # it refers to what is not here; the stage looks itself
    if not is_valid:
        raise refusal(field, value, _words(schema))


def _words(schema: dict[str, Any]) -> str:
    """Return a schema in words: its type and bounds."""
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    kind = kinds[0] if kinds else schema
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    said = [f"{words} {kind[key]:g}" for key, words in bounds.items() if key in kind]
    return ", ".join([str(kind.get("type", "another value")), *said])


def _sources(body: dict[str, Any]) -> list[Source]:
    """Return what a body names instead of bringing it.

    Raises:
        BadInput: it is no reference.
    """
    found: list[Source] = []
    for field, port in {**REFERENCES, "input_reference": ""}.items():
        raw = body.get(field)
        if raw is None:
            continue
        each = raw if isinstance(raw, list) else [raw]
        if not each or len(each) > MAX_REFERENCES:
            raise refusal(field, raw, f"1 to {MAX_REFERENCES} references")
        for index, value in enumerate(each):
            place = f"{field}[{index}]" if isinstance(raw, list) else field
            found.append(_source(place, value, port or "images"))
    return found


def _source(place: str, value: Any, port: str) -> Source:
    key = {"images": "image_url", "video": "video_url", "audio": "audio_url"}[port]
    match value:
        case str(url) if url:
            return Source(port=port, place=place, url=url)
        case {"file_id": str(file_id), **rest} if not rest and file_id:
            return Source(port=port, place=f"{place}.file_id", file_id=file_id)
        case dict() if len(value) == 1 and isinstance(url := value.get(key), str) and url:
            return Source(port=port, place=f"{place}.{key}", url=url)
        case _:
            raise refusal(place, value, f"an object with either {key} or file_id")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body."""
    properties = properties_of(VideoFields, Clip)
    needed = {"prompt": properties.pop("prompt")}
    references = {name: {"type": ["object", "array", "string"]} for name in (*REFERENCES, "input_reference")}
    return {
        "title": "VideoRequest",
        "type": "object",
        "properties": {**needed, **optional(properties | references)},
        "required": ["prompt"],
        "additionalProperties": {"type": "null"},
    }
