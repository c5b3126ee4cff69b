"""``/v1/images/generations`` and ``/v1/images/edits``: fields of a body or a form, turned into what is to be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.images.fields import (
    ONLY,
    Arguments,
    Drawing,
    Format,
    Pictures,
    Prompt,
    read_prompt,
    read_settings,
    read_size,
)
from gateways.images.making import Wanted, outputs_for
from gateways.openai_fields import (
    INERT,
    Bool,
    Object,
    String,
    harmless_properties,
    optional,
    properties_of,
    refuse_unhonoured,
)
from gateways.openai_models import MASK, PREVIEW, can_draw, can_edit, find_model
from gateways.problems import Problem
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateways.openapi import Schema
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.media.picture import PictureFormat
    from omni_bus.wire.payloads import Image

MAX_PREVIEWS = 3
"""OpenAI's limit."""


class ImageFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields besides those that go to the stages."""

    prompt: Prompt
    model: String | None = None
    n: Pictures = 1
    size: Annotated[str, Meta(max_length=40, description="WIDTHxHEIGHT, in pixels")] | None = None
    response_format: Annotated[
        Literal["b64_json", "url", "file"], Meta(description="b64_json, url (a data URL), file")
    ] = "b64_json"
    output_format: Annotated[Format, Meta(description="png, jpeg, webp")] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100, description="an integer from 0 to 100")] = 100
    stream: Bool = False
    partial_images: Annotated[int, Meta(ge=0, le=MAX_PREVIEWS, description=f"an integer from 0 to {MAX_PREVIEWS}")] = 0
    extra_params: Object | None = None
    return_stage_metrics: Bool = False
    user: Annotated[str, Meta(max_length=4096, description="a string of at most 4096 characters")] | None = None


STRUCTS = (ImageFields, Drawing, Arguments)
KNOWN = names_of(*STRUCTS) | ONLY.keys() | set(INERT)
"""Every field of a body."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body."""

    fields: ImageFields
    pipeline: Pipeline
    format: PictureFormat
    size: tuple[int, int] | None
    body: dict[str, Any]

    def wanted(self, images: Sequence[Image] = (), mask: Image | None = None) -> Wanted:
        """Return what is to be made.

        Args:
            images: what it is made from.
            mask: where the first of them may change.

        Raises:
            BadInput: a field for the stages has another type or value, or no stage takes it.
        """
        fields = self.fields
        settings = read_settings(
            self.body,
            self.pipeline,
            outputs_for(fields.partial_images),
            size=self.size,
            num_previews=fields.partial_images,
            extra=fields.extra_params,
        )
        return Wanted(
            pipeline=self.pipeline,
            prompt=fields.prompt,
            settings=settings,
            images=tuple(images),
            mask=mask,
            n=fields.n,
            num_previews=fields.partial_images,
            format=self.format,
            compression=fields.output_compression,
            has_metrics=fields.return_stage_metrics,
        )


def read(body: dict[str, Any], models: Mapping[str, Pipeline], *, is_edit: bool = False) -> Asked:
    """Check a body.

    Args:
        body: fields by name, with JSON's values.
        models: pipelines by every name that clients may use.
        is_edit: there are pictures to begin with, so that the size may be ``auto``.

    Raises:
        BadInput: names the field, its value and what is allowed.
        Problem: 400 for a model that is not served, 404 where none makes pictures.
    """
    refuse_unhonoured(body, ONLY)
    refuse_unknown(body, KNOWN)
    fields = read_fields(ImageFields, body)
    read_prompt(fields.prompt)
    if fields.partial_images and not fields.stream:
        raise refusal("partial_images", fields.partial_images, "0, unless stream is true")
    if fields.stream and fields.response_format != "b64_json":
        raise refusal("response_format", fields.response_format, "b64_json, with stream = true")
    pipeline = model_named(fields.model, models, is_edit=is_edit)
    if fields.partial_images and PREVIEW not in pipeline.outputs:
        raise refusal("partial_images", fields.partial_images, f"0: '{pipeline.serve_as}' shows none")
    follows = is_edit and fields.size == "auto"
    return Asked(
        fields=fields,
        pipeline=pipeline,
        format="jpeg" if fields.output_format == "jpg" else fields.output_format,
        size=None if fields.size is None or follows else read_size(fields.size),
        body=body,
    )


def model_named(name: str | None, models: Mapping[str, Pipeline], *, is_edit: bool) -> Pipeline:
    """Return the pipeline that makes the pictures.

    Raises:
        Problem: 400 for a name that stands for none, as vLLM-Omni has it; 404 where there is none at all.
    """
    try:
        if is_edit:
            return find_model(name, models, can_edit, "makes pictures from pictures")
        return find_model(name, models, can_draw, "makes pictures")
    except Problem as problem:
        raise Problem(400 if name is not None else 404, problem.message, param=problem.param) from None


def check_mask(pipeline: Pipeline, field: str) -> None:
    """Refuse a mask where nothing takes one.

    Raises:
        BadInput: names the field.
    """
    if MASK not in pipeline.inputs:
        message = f"{field}: a mask came (allowed: none, as '{pipeline.serve_as}' changes whole pictures)"
        raise BadInput(message, field=field)


def _properties() -> dict[str, Schema]:
    return properties_of(*STRUCTS) | harmless_properties(ONLY)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a body of ``/v1/images/generations``."""
    properties = _properties()
    needed = {"prompt": properties.pop("prompt") | {"minLength": 1}}
    return {
        "title": "ImageRequest",
        "type": "object",
        "properties": {**needed, **optional(properties | {"extra_body": {"type": "object"}})},
        "required": ["prompt"],
        "additionalProperties": {"type": "null"},
    }


def form_schema() -> Schema:
    """Return the JSON Schema of a form of ``/v1/images/edits``."""
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    several: Schema = {"type": "array", "items": file}
    files: dict[str, Schema] = {"image": several, "image[]": several, "url": several, "url[]": several, "mask": file}
    return {
        "type": "object",
        "properties": _properties() | files | {"mask_image": file},
        "required": ["prompt"],
        "additionalProperties": False,
    }
