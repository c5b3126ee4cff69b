"""Pipelines as OpenAI's models: which ones these routes can express, by which names, and what each of them does."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from gateways.fields import shown
from gateways.problems import Problem
from omni_bus.core.pipeline import IN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from omni_bus.core.pipeline import Pipeline

MESSAGES = "messages"
"""The input port of pipelines that chat, complete or embed: the prompt, in any of its forms."""

MEDIA = {"images": "image", "audio": "audio", "video": "video"}
"""Input ports of what messages bring besides text, and the payload kind of each."""

MODALITIES = ("text", "audio")
"""Outputs that a client asks for by `modalities`."""

OUTPUTS = {
    "text": "text",
    "audio": "audio",
    "reasoning": "text",
    "tool_calls": "json",
    "rendered": "json",
    "embedding": "tensor",
}
"""Output ports that answers to messages can express, and the payload kind of each."""

TEXT = "text"
"""The input port of pipelines that speak: what is to be said, in pieces that concatenate."""

DEFAULT_VOICE = "default"
"""A name that stands for each stage's own voice."""

REFERENCE = "reference"
"""The input port, of pipelines that speak, for a voice that is to be spoken with: sound, one payload."""

SOUND = "audio"
"""The input port of pipelines that transcribe, and the output port of those that speak or make sound."""

SEGMENTS = "segments"
"""The output port, of pipelines that transcribe, for what was said when."""

EVENTS = "events"
"""The port, both ways, of pipelines that hold live conversations: what `omni_bus.core.session.codec` writes."""

OBSERVATION, ACTIONS = "observation", "actions"
"""The ports of pipelines that act: robots' policies."""

PROMPT = "prompt"
"""The input port of pipelines that make sound, music, pictures or videos: the description."""

VIDEO_INPUTS = {PROMPT: "text", "images": "image", "mask": "image", "video": "video", "audio": "audio"}
VIDEO_OUTPUTS = {"video": "video", "audio": "audio", "progress": "json", "preview": "image"}
"""Ports that routes of videos can express, and the payload kind of each."""

INTERACTIONS = "interactions"
"""The port, both ways, of pipelines that make videos, for what happens in them while they are watched."""

IMAGE, PREVIEW = "image", "preview"
"""Output ports of pipelines that make pictures: each when it is done, and what it looks like until then."""

IMAGES, MASK = "images", "mask"
"""Input ports of pipelines that make pictures from others: those, and where the first one may change."""

PICTURE_INPUTS = {PROMPT: "text", IMAGES: "image", MASK: "image"}
PICTURE_OUTPUTS = {IMAGE: "image", PREVIEW: "image", "progress": "json"}
"""Ports that routes of pictures can express, and the payload kind of each."""


def can_serve(pipeline: Pipeline) -> bool:
    """Whether some route can express the pipeline."""
    does = (
        can_chat, can_embed, can_speak, can_transcribe, can_make_sound, can_draw, can_make_video, can_converse, can_act
    )  # fmt: skip
    return any(can(pipeline) for can in does)


def _takes_messages(pipeline: Pipeline) -> bool:
    inputs = {port: kind for port, kind in pipeline.inputs.items() if port != MESSAGES}
    return (
        pipeline.inputs.get(MESSAGES) == "json"
        and all(MEDIA.get(port) == kind for port, kind in inputs.items())
        and all(OUTPUTS.get(port) == kind for port, kind in pipeline.outputs.items())
    )


def can_chat(pipeline: Pipeline) -> bool:
    """Whether it answers messages in text, sound or both."""
    return _takes_messages(pipeline) and any(port in pipeline.outputs for port in MODALITIES)


def can_write(pipeline: Pipeline) -> bool:
    """Whether it answers messages in text."""
    return can_chat(pipeline) and "text" in pipeline.outputs


def can_render(pipeline: Pipeline) -> bool:
    """Whether it says which tokens a prompt comes to."""
    return _takes_messages(pipeline) and "rendered" in pipeline.outputs


def can_embed(pipeline: Pipeline) -> bool:
    """Whether it turns text into a vector."""
    return _takes_messages(pipeline) and "embedding" in pipeline.outputs


def can_speak(pipeline: Pipeline) -> bool:
    """Whether it reads a text aloud."""
    allowed = {TEXT: "text", REFERENCE: "audio"}
    return (
        TEXT in pipeline.inputs
        and all(allowed.get(port) == kind for port, kind in pipeline.inputs.items())
        and pipeline.outputs == {SOUND: "audio"}
    )


def can_transcribe(pipeline: Pipeline) -> bool:
    """Whether it writes down what is said."""
    allowed = {"text": "text", SEGMENTS: "json"}
    return (
        pipeline.inputs == {SOUND: "audio"}
        and "text" in pipeline.outputs
        and all(allowed.get(port) == kind for port, kind in pipeline.outputs.items())
    )


def can_make_sound(pipeline: Pipeline) -> bool:
    """Whether it makes the sound or music that a text describes."""
    return pipeline.inputs == {PROMPT: "text"} and pipeline.outputs == {SOUND: "audio"}


def can_make_video(pipeline: Pipeline) -> bool:
    """Whether it makes the video that a text describes, as it is or as a message to whoever rewrites it."""
    inputs, outputs = {**VIDEO_INPUTS, MESSAGES: "json", INTERACTIONS: "json"}, {**VIDEO_OUTPUTS, INTERACTIONS: "json"}
    return (
        bool({(PROMPT, "text"), (MESSAGES, "json")} & pipeline.inputs.items())
        and "video" in pipeline.outputs
        and all(inputs.get(port) == kind for port, kind in pipeline.inputs.items())
        and all(outputs.get(port) == kind for port, kind in pipeline.outputs.items())
    )


def can_draw(pipeline: Pipeline) -> bool:
    """Whether it makes the picture that a text describes."""
    return (
        pipeline.inputs.get(PROMPT) == "text"
        and pipeline.outputs.get(IMAGE) == "image"
        and all(PICTURE_INPUTS.get(port) == kind for port, kind in pipeline.inputs.items())
        and all(PICTURE_OUTPUTS.get(port) == kind for port, kind in pipeline.outputs.items())
    )


def can_edit(pipeline: Pipeline) -> bool:
    """Whether it makes a picture from others, as a text says."""
    return can_draw(pipeline) and IMAGES in pipeline.inputs


def can_act(pipeline: Pipeline) -> bool:
    """Whether it turns a robot's observations into actions."""
    return pipeline.inputs == {OBSERVATION: "record"} and pipeline.outputs.get(ACTIONS) == "record"


def can_converse(pipeline: Pipeline) -> bool:
    """Whether it holds live conversations."""
    return pipeline.inputs == {EVENTS: "media"} and pipeline.outputs == {EVENTS: "media"}


def models_of(pipelines: Iterable[Pipeline]) -> dict[str, Pipeline]:
    """Return pipelines by every name that clients may use: what each is served as first, then the aliases."""
    pipelines = list(pipelines)
    models = {pipeline.serve_as: pipeline for pipeline in pipelines}
    for pipeline in pipelines:
        for alias in pipeline.aliases:
            models.setdefault(alias, pipeline)
    return models


def find_model(
    name: str | None,
    models: Mapping[str, Pipeline],
    can: Callable[[Pipeline], bool] | None = None,
    does: str = "",
) -> Pipeline:
    """Return the pipeline that a name stands for; for none the first that can do what is wanted.

    Args:
        name: as the client gave it.
        models: pipelines by every name that clients may use.
        can: whether a pipeline can do what is wanted.
        does: what that is, as in ``makes no embeddings``.

    Raises:
        Problem: 404, listing what is served.
    """
    if name is not None and (found := models.get(name)) is not None and (can is None or can(found)):
        return found
    able = {known: pipeline for known, pipeline in models.items() if can is None or can(pipeline)}
    if name is None and able:
        return next(iter(able.values()))
    served = ", ".join(able) or "none that is served here"
    if name is None:
        raise Problem(404, f"model: no model here {does} (allowed: {served})", param="model")
    if name in models:
        raise Problem(404, f"model: {shown(name)} is none that {does} (allowed: {served})", param="model")
    raise Problem(404, f"model: {shown(name)} is not served here (allowed: {served})", param="model")


def inputs_for(pipeline: Pipeline, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the input ports that a request for these outputs has: those of stages that it needs."""
    return tuple(dict.fromkeys(e.source_port for e in pipeline.needed(outputs) if e.source == IN))


def are_beside_messages(pipeline: Pipeline, port: str) -> bool:
    """Whether a stage that reads the messages also reads this port, and so looks for its parts among them."""
    readers = pipeline.readers_of(MESSAGES)
    return any(e.target in readers for e in pipeline.edges if e.source == IN and e.source_port == port)


def model_card(name: str, pipeline: Pipeline, context_lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return one entry of the list of models.

    Args:
        name: one of the pipeline's.
        pipeline: what it stands for.
        context_lengths: tokens of prompt and answer together, by stage.
    """
    lengths = [context_lengths[stage] for stage in pipeline.readers_of(MESSAGES) if stage in context_lengths]
    created = int(time.time())
    permission = {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": can_chat(pipeline),
        "allow_logprobs": can_write(pipeline),
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "omni-bus",
        "root": pipeline.serve_as,
        "parent": None,
        "max_model_len": min(lengths, default=None),
        "permission": [permission],
    }
