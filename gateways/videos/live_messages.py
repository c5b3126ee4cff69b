"""What clients of ``WS /v1/realtime/video`` say, checked. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gateways.fields import names_of, refusal
from gateways.problems import Problem
from gateways.videos import body

MAX_START_BYTES = 4 * 1024 * 1024
MAX_CONTROL_BYTES = 128 * 1024
MAX_EVENTS = 1000
"""Interactions of one session: each id is remembered, since none may come twice."""

FORMAT = "m4s"

CONTROLS = ("session.ping", "session.interaction", "session.stop")

_LIFTED = ("sampling_params", "video_params")
"""Objects whose fields count as the message's own; what it doesn't know goes to ``extra_params``."""


class Interaction(msgspec.Struct, frozen=True):
    """Something that is to happen in the video."""

    event_id: str
    """Empty if the client gave none."""
    event: dict[str, Any]
    transition_chunks: int
    """Chunks over which it sets in."""


def read_object(data: str) -> dict[str, Any]:
    """Return a message.

    Raises:
        Problem: it is no JSON object with a type.
    """
    try:
        message = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Problem(400, f"message: it is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise Problem(400, "message: JSON that is no object came (allowed: an object)")
    if not isinstance(message.get("type"), str):
        raise refusal("type", message.get("type"), f"session.start, {', '.join(CONTROLS)}")
    return message


def start_body(message: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a video that ``session.start`` is.

    Raises:
        BadInput: another type, or a format or an option that is not for streams.
    """
    if message["type"] != "session.start":
        raise refusal("type", message["type"], "session.start")
    found = {name: value for name, value in message.items() if name not in ("type", "format", *_LIFTED)}
    if (came := message.get("format")) not in (None, FORMAT):
        raise refusal("format", came, FORMAT)
    extra = found.get("extra_params")
    if not isinstance(extra, dict | None):
        raise refusal("extra_params", extra, "an object")
    known = names_of(body.VideoFields, body.Clip) | body.REFERENCES.keys()
    lifted: dict[str, Any] = {}
    for name in _LIFTED:
        given = message.get(name)
        if not isinstance(given, dict | None):
            raise refusal(name, given, "an object")
        lifted |= given or {}
    more = {name: value for name, value in lifted.items() if name not in known and value is not None}
    found = {name: value for name, value in lifted.items() if name in known} | found
    if extra or more:
        found["extra_params"] = more | (extra or {})
    if "preencode_mp4" in found.get("extra_params", {}):
        raise refusal("extra_params.preencode_mp4", True, "nothing: frames are encoded as they come")
    if isinstance(images := found.get("image_reference"), list) and len(images) != 1:
        raise refusal("image_reference", images, "exactly one picture")
    return found


def read_interaction(message: dict[str, Any]) -> Interaction:
    """Return what is to happen.

    Raises:
        BadInput: names the field.
    """
    place = "interaction"
    raw = message.get(place)
    if not isinstance(raw, dict):
        raise refusal(place, raw, "an object")
    event_id = raw.get("event_id", "")
    if not isinstance(event_id, str) or len(event_id) > 256 or ("event_id" in raw and not event_id):
        raise refusal(f"{place}.event_id", event_id, "a string of 1 to 256 characters")
    event = raw.get("event")
    if not isinstance(event, dict):
        raise refusal(f"{place}.event", event, "an object")
    _check_event(event, f"{place}.event")
    chunks = raw.get("transition_chunks", 0)
    is_whole = isinstance(chunks, int | float) and not isinstance(chunks, bool) and math.isfinite(chunks)
    if not is_whole or chunks < 0 or chunks != int(chunks) or chunks > 10_000:
        raise refusal(f"{place}.transition_chunks", chunks, "an integer from 0 to 10000")
    return Interaction(event_id, event, int(chunks))


def _check_event(event: dict[str, Any], place: str) -> None:
    for name, value in event.items():
        if name not in ("prompt", "multi_modal_data"):
            raise refusal(f"{place}.{name[:80]}", value, "prompt, multi_modal_data")
    prompt, media = event.get("prompt"), event.get("multi_modal_data")
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise refusal(f"{place}.prompt", prompt, "a string that is not blank")
    is_media = isinstance(media, dict) and media and all(isinstance(value, dict) for value in media.values())
    if media is not None and not is_media:
        raise refusal(f"{place}.multi_modal_data", media, "an object of objects")
    if prompt is None and media is None:
        raise refusal(f"{place}.prompt", None, "a prompt, multi_modal_data, or both")
