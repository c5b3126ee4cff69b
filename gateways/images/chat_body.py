"""The body of a chat whose model makes pictures: parameters of diffusion from six places, each at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown
from gateways.images.fields import (
    ONLY,
    Arguments,
    Drawing,
    Pictures,
    Side,
    check_pixels,
    read_prompt,
    read_settings,
    read_size,
)
from gateways.images.making import Wanted, outputs_for
from gateways.openai_fields import (
    INERT,
    Shared,
    optional,
    properties_of,
    read_session,
    read_stream_options,
    refuse_unhonoured,
    wants_metrics,
)
from gateways.openai_messages import Source, read_messages
from gateways.openai_models import can_chat, can_draw, inputs_for
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateways.openapi import Schema
    from omni_bus.core.pipeline import Pipeline

NESTED = ("extra_args", "extra_params")
"""Objects whose unknown names are arguments of the model's call."""

ALIASES = {"cfg_scale": "true_cfg_scale"}

ONLY_CHAT: dict[str, tuple[tuple[Any, ...], str]] = ONLY | {
    "quality": (("lossless",), "'lossless': pictures in chats are PNG"),
    "num_frames": ((), "null: no videos are made here"),
    "n": ((1,), "1; num_outputs_per_prompt says how many pictures the answer has"),
}


class PictureFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields besides those that are shared, and those that go to the stages."""

    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")]
    modalities: Annotated[list[str], Meta(description="a list of strings")] | None = None
    num_outputs_per_prompt: Pictures = 1
    width: Side | None = None
    height: Side | None = None
    size: Annotated[str, Meta(max_length=40, description="WIDTHxHEIGHT, in pixels")] | None = None


_SHARED = (
    "model", "stream", "stream_options", "request_id", "session_id", "priority", "return_stage_metrics", "user",
)  # fmt: skip
"""Of the fields that all routes of text have."""

_KNOWN = names_of(PictureFields, Drawing, Arguments) | {*_SHARED, *ONLY_CHAT, *INERT}


class PictureChat(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request; its pictures are still to be read."""

    wanted: Wanted
    sources: tuple[Source, ...]
    is_streamed: bool
    includes_usage: bool
    id_suffix: str | None


def drawer_named(body: Mapping[str, Any], models: Mapping[str, Pipeline]) -> Pipeline | None:
    """Return the pipeline that a chat's body wants a picture of; None where it wants an answer in words."""
    extra = body.get("extra_body")
    name = body.get("model") or (extra.get("model") if isinstance(extra, dict) else None)
    if name is None and not any(map(can_chat, models.values())):
        return next(filter(can_draw, models.values()), None)
    pipeline = models.get(name) if isinstance(name, str) else None
    return pipeline if pipeline is not None and can_draw(pipeline) else None


def parse(body: dict[str, Any], pipeline: Pipeline, uploaded: Mapping[str, str]) -> PictureChat:
    """Check a body.

    Args:
        body: the JSON object.
        pipeline: who draws.
        uploaded: the input port of each uploaded file that the messages name.

    Raises:
        BadInput: names the field; no field for a parameter that came from several places.
    """
    found, extra, extra_field = gather(body)
    refuse_unhonoured(found, ONLY_CHAT)
    refuse_unknown(found, _KNOWN)
    fields, shared = read_fields(PictureFields, found), read_fields(Shared, found)
    for modality in fields.modalities or ():
        if modality != "image":
            raise refusal("modalities", modality, f"image, as {pipeline.serve_as} makes nothing else")
    conversation = read_messages(fields.messages, pipeline, inputs_for(pipeline, outputs_for(0)), uploaded=uploaded)
    settings = read_settings(found, pipeline, outputs_for(0), size=_size(fields), extra=extra, extra_field=extra_field)
    return PictureChat(
        wanted=Wanted(
            pipeline=pipeline,
            prompt=read_prompt(_prompt(fields.messages), "messages"),
            settings=msgspec.structs.replace(
                settings, names=settings.names | {"prompt": "messages", "images": "messages"}
            ),
            n=fields.num_outputs_per_prompt,
            has_metrics=wants_metrics(shared),
            priority=-(shared.priority or 0),
            session=read_session(shared),
        ),
        sources=tuple(conversation.media),
        is_streamed=shared.stream,
        includes_usage=read_stream_options(shared).include_usage,
        id_suffix=shared.request_id,
    )


def gather(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return a body's fields from all places that may have them, the model's arguments, and where the last were.

    Raises:
        BadInput: a place is no object, or a name came more than once, under whatever alias and value.
    """
    places = _places(body)
    seen: dict[str, list[str]] = {}
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    extra_field = "extra_args"
    for place, values in places.items():
        for given_name, value in values.items():
            name = ALIASES.get(given_name, given_name)
            seen.setdefault(name, []).append(f"{place}{given_name}")
            if name in _KNOWN or not place.rstrip(".").endswith(NESTED):
                fields[name] = value
            else:
                extra[name] = value
                extra_field = place.rstrip(".")
    doubled = {name: paths for name, paths in seen.items() if len(paths) > 1}
    if doubled:
        words = "; ".join(
            f"{name[:80]} at {', '.join(path[:120] for path in paths)}" for name, paths in doubled.items()
        )
        raise BadInput(f"parameters came more than once: {words} (allowed: one place for each)")
    return fields, extra, extra_field


def properties() -> dict[str, Schema]:
    """Return the schemas of the fields that only chats with pictures have."""
    own = properties_of(PictureFields, Drawing, Arguments)
    del own["messages"], own["modalities"]
    nested: dict[str, Schema] = {name: {"type": "object"} for name in NESTED}
    return optional(own | nested | {alias: own[name] for alias, name in ALIASES.items()})


def _places(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the objects that may have parameters, by what comes before a name in them."""
    found: dict[str, dict[str, Any]] = {}
    for prefix, holder in (("", body), ("extra_body.", _object("extra_body", body.get("extra_body")))):
        found[prefix] = {name: value for name, value in holder.items() if name not in ("extra_body", *NESTED)}
        for name in NESTED:
            found[f"{prefix}{name}."] = _object(f"{prefix}{name}", holder.get(name))
    return found


def _object(field: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refusal(field, value, "an object")
    return value


def _size(fields: PictureFields) -> tuple[int, int] | None:
    """Return the width and height; those alone go before a size."""
    width, height = fields.width, fields.height
    if width is None and height is None:
        return None if fields.size is None else read_size(fields.size)
    if width is None or height is None:
        name = "width" if width is None else "height"
        raise BadInput(f"{name}: missing (allowed: width and height, or neither)", field=name)
    if fields.size is not None:
        raise refusal("size", fields.size, "null, with width and height")
    check_pixels("width", width, height)
    return width, height


def _prompt(messages: list[Any]) -> str:
    """Return what the user says in all turns of checked messages, each piece of text after a blank."""
    contents = [message["content"] for message in messages if message["role"] == "user"]
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    return " ".join(text for text in texts if text)
