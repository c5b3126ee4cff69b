"""What requests for pictures share: their fields, checked one by one, and which stage each of them goes to.

A field reaches a stage that has a parameter of its name, or it is refused; so whether a model takes one is decided by
what the stages of its pipeline declare (`omni_bus.core.pipeline.Pipeline.params`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateways.fields import read_fields, refusal, refuse_unknown
from gateways.openai_fields import Object, String, given
from gateways.openai_models import IMAGE
from gateways.openai_refusals import renamed
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline

MAX_PICTURES = 10
"""Of one request."""

MAX_PIXELS = 33_177_600
"""Of a picture that is asked for: 7680 × 4320."""

MAX_SIDE = 16_384
NUM_SEEDS = 2**63
"""Seeds that stages take, from 0; a seed of 64 bits is folded into them."""

PREVIEWS = "num_previews"

Prompt = Annotated[str, Meta(max_length=100_000, description="a string of 1 to 100000 characters, not blank")]
Pictures = Annotated[int, Meta(ge=1, le=MAX_PICTURES, description=f"an integer from 1 to {MAX_PICTURES}")]
Guidance = Annotated[float, Meta(ge=0, le=20, description="a number from 0 to 20")]
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE, description=f"an integer from 1 to {MAX_SIDE}")]
Format: TypeAlias = Literal["png", "jpeg", "jpg", "webp"]


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, where it is given, to the stages, whose parameters have the same names."""

    negative_prompt: String | None = None
    num_inference_steps: (
        Annotated[
            int, Meta(ge=1, le=200, description="an integer greater than or equal to 1, less than or equal to 200")
        ]
        | None
    ) = None
    guidance_scale: Guidance | None = None
    strength: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")] | None = None
    lora: Object | None = None


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """What goes among the other arguments of the model's call (the parameter ``extra``), by diffusers' names."""

    true_cfg_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    layers: Annotated[int, Meta(ge=2, le=10, description="an integer from 2 to 10")] | None = None
    resolution: Annotated[Literal[640, 1024], Meta(description="640, 1024")] | None = None


ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "quality": (("auto", "standard"), "'auto', 'standard'; num_inference_steps says how much work is done"),
    "style": ((), "null"),
    "background": (("auto", "opaque"), "'auto', 'opaque'"),
    "moderation": (("auto", "low"), "'auto', 'low'"),
    "input_fidelity": ((), "null; strength says how much is replaced"),
    "system_prompt": ((), "null: no model here has one"),
    "use_system_prompt": ((), "null: no model here has one"),
    "sys_type": ((), "null: no model here has one"),
    "bot_task": ((), "null: no model here has one"),
    "flow_shift": ((), "null: it is a setting of the model's scheduler"),
    "generator_device": (("cpu",), "'cpu': a seed's noise is the same wherever the model computes"),
    "vae_use_slicing": ((False,), "false: the stage's table sets it"),
    "vae_use_tiling": ((False,), "false: the stage's table sets it"),
}
"""Fields that would change the answer and that nothing here honours: the values that ask for nothing."""

_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
_QUOTED = re.compile(r"'([^']*)'")


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Of the field of this name: one of the adapters that the stage's table names."""

    name: String
    scale: Annotated[float, Meta(ge=-10, le=10, description="a number from -10 to 10")] | None = None


_LORA_ALIASES = {"lora_name": "name", "adapter": "name", "lora_scale": "scale"}
_LORA_PLACES = ("path", "local_path", "lora_path", "lora_local_path", "int_id", "lora_int_id")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the stages of a pipeline are told for one picture, and the names by which the request knows it."""

    params: dict[str, dict[str, Any]]
    """By stage."""
    seed: int | None
    """Of the first picture."""
    names: dict[str, str]
    """Fields of the request, by the stages' parameters that have other names."""
    arguments: frozenset[str]
    """Fields of the request that are among ``extra``."""
    extra_field: str
    """Where the request has the rest of ``extra``."""

    def of_picture(self, index: int) -> dict[str, dict[str, Any]]:
        """Return the parameters of the picture at `index`: with a seed, each has the next one."""
        if self.seed is None or not index:
            return self.params
        seed = (self.seed + index) % NUM_SEEDS
        return {stage: own | ({"seed": seed} if "seed" in own else {}) for stage, own in self.params.items()}

    def refused(self, error: BadInput, pipeline: Pipeline) -> BadInput:
        """Return a stage's refusal under the field that the request has."""
        if error.field == "extra" and (found := _QUOTED.search(error.message)):
            name = found[1]
            if name in self.arguments:
                message = f"{name}: '{pipeline.serve_as}' has no such setting (allowed: null)"
                return BadInput(message, field=name, stage=error.stage)
            place = f"{self.extra_field}.{name}"
            return BadInput(f"{place}{error.message.removeprefix('extra')}", field=place, stage=error.stage)
        new = self.names.get(error.field, "")
        if new == "size":  # which says two things, so the message goes on to say which of them
            return BadInput(f"size: {error.message}", field="size", stage=error.stage)
        return renamed(error, pipeline, self.names)


def read_prompt(text: str, field: str = "prompt") -> str:
    """Return a prompt.

    Raises:
        BadInput: it is blank.
    """
    if not text.strip():
        raise refusal(field, text, "a string that is not blank")
    return text


def read_size(size: str) -> tuple[int, int]:
    """Return the width and height that a size says.

    Raises:
        BadInput: it says none, or more than any picture may have.
    """
    match = _SIZE.fullmatch(size)
    if match is None:
        raise refusal("size", size, "WIDTHxHEIGHT, in pixels")
    width, height = int(match[1]), int(match[2])
    check_pixels("size", width, height)
    return width, height


def check_pixels(field: str, width: int, height: int) -> None:
    """Refuse a size that no picture may have.

    Raises:
        BadInput: names the field.
    """
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > MAX_PIXELS:
        allowed = f"1 to {MAX_SIDE} a side, at most {MAX_PIXELS} pixels"
        raise BadInput(f"{field}: {width}x{height} came (allowed: {allowed})", field=field)


def read_settings(
    body: Mapping[str, Any],
    pipeline: Pipeline,
    outputs: tuple[str, ...],
    *,
    size: tuple[int, int] | None = None,
    num_previews: int = 0,
    extra: Mapping[str, Any] | None = None,
    extra_field: str = "extra_params",
) -> Settings:
    """Return what a body tells the stages.

    Args:
        body: fields by name, of `Drawing` and `Arguments` among others.
        pipeline: whose stages they are.
        outputs: the output ports that are wanted.
        size: the picture's width and height; None leaves them to the model.
        num_previews: pictures that show how far it is.
        extra: more arguments of the model's call.
        extra_field: where the body has these.

    Raises:
        BadInput: a field has another type or value, or no stage takes it.
    """
    body = dict(body)
    drawing, arguments = read_fields(Drawing, body), given(read_fields(Arguments, body))
    told: dict[str, Any] = given(drawing)
    if drawing.lora is not None:
        told["lora"] = read_lora(drawing.lora)
    if drawing.seed is not None:
        told["seed"] = drawing.seed % NUM_SEEDS
    if num_previews:
        told[PREVIEWS] = num_previews
    names = {PREVIEWS: "partial_images", "images": "image", "text": "prompt"}
    if size is not None:
        told |= {"width": size[0], "height": size[1]}
        if body.get("size") is not None:
            names |= {"width": "size", "height": "size"}
    if both := arguments.keys() & (extra or {}).keys():
        name = min(both)
        raise BadInput(f"{extra_field}.{name}: also at {name} (allowed: one of them)", field=f"{extra_field}.{name}")
    if more := arguments | dict(extra or {}):
        told["extra"] = more
        if "true_cfg_scale" in more and "guidance_scale" in told:
            # Two settings then: a stage would take the one for the other where the model has both.
            more["guidance_scale"] = told.pop("guidance_scale")
            arguments["guidance_scale"] = more["guidance_scale"]
    return Settings(
        params=_by_stage(told, pipeline, outputs, names, tuple(arguments), extra_field),
        seed=told.get("seed"),
        names=names,
        arguments=frozenset(arguments),
        extra_field=extra_field,
    )


def read_lora(lora: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter that a request names.

    Raises:
        BadInput: it names none, or a file: adapters are the deployment's.
    """
    lora = {_LORA_ALIASES.get(name, name): value for name, value in lora.items()}
    for name in _LORA_PLACES:
        if lora.get(name) is not None:
            raise refusal(f"lora.{name}", lora[name], "null; the stage's table says where its adapters are")
    refuse_unknown(lora, Lora.__struct_fields__, prefix="lora.")
    return given(read_fields(Lora, lora, prefix="lora."))


def _by_stage(
    told: Mapping[str, Any],
    pipeline: Pipeline,
    outputs: tuple[str, ...],
    names: Mapping[str, str],
    arguments: tuple[str, ...],
    extra_field: str,
) -> dict[str, dict[str, Any]]:
    needed = {edge.source for edge in pipeline.needed(outputs)} | {edge.target for edge in pipeline.needed(outputs)}
    stages = [stage for stage in pipeline.stages if stage in needed]
    found: dict[str, dict[str, Any]] = {}
    for name, value in told.items():
        takers = [stage for stage in stages if name in pipeline.params.get(stage, {})]
        if name in ("width", "height"):
            takers = _sizers(pipeline, takers)
        if not takers:
            field = names.get(name, name)
            if name == "extra":
                field = arguments[0] if arguments else extra_field
            raise refusal(
                field,
                value.get(field, value) if isinstance(value, dict) else value,
                f"null: '{pipeline.serve_as}' has no such setting",
            )
        for stage in takers:
            found.setdefault(stage, {})[name] = value
    return found


def _sizers(pipeline: Pipeline, takers: list[str]) -> list[str]:
    """Return the stages that decide how large the picture is: where it is enlarged at last, that stage alone."""
    last = [
        stage
        for stage in pipeline.sources_of(IMAGE)
        if stage in takers and all(edge.kind == "image" for edge in pipeline.edges if edge.target == stage)
    ]
    return last or takers
