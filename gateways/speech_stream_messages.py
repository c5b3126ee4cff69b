"""Messages of ``WS /v1/audio/speech/stream``: the client's, checked, and what a configuration comes to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from gateways.fields import names_of, read_fields, refusal, refuse_unknown, shown
from gateways.json_body import MAX_JSON_WEIGHT, JsonWeight
from gateways.openai_fields import Bool, flatten
from gateways.problems import Problem, to_problem
from gateways.speech_units import Granularity
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateways.openai_speech_body import Speech

MAX_CONFIG_BYTES = 15 * 1024 * 1024
"""Of a configuration: a reference of 10 MiB in base64 fits. A longer message closes the socket."""

MAX_MESSAGE_CHARS = 128 * 1024
"""Of any other message."""

Kind: TypeAlias = Literal["session.config", "input.text", "input.done", "input.commit", "input.cancel", "session.close"]

KINDS: tuple[Kind, ...] = (
    "session.config",
    "input.text",
    "input.done",
    "input.commit",
    "input.cancel",
    "session.close",
)


class Message(msgspec.Struct, frozen=True):
    """One message of the client."""

    kind: Kind
    fields: dict[str, Any] = {}


class StreamFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration has besides the fields of ``POST /v1/audio/speech``."""

    stream_audio: Bool = False
    split_granularity: Annotated[Granularity, Meta(description="none, sentence, clause")] = "none"
    word_timestamps: Bool = False


OWN = names_of(StreamFields)

NOT_HERE = frozenset({"input", "stream", "stream_format"})
"""Fields of ``POST /v1/audio/speech`` that messages or `stream_audio` stand for here."""


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration: how each unit of text is spoken."""

    body: dict[str, Any]
    """Of a request to ``POST /v1/audio/speech``, all but the text."""
    stream: StreamFields
    format: str


def read_message(text: str) -> Message:
    """Read a message.

    Raises:
        Problem: it is too long for its type, no JSON object, or of no known type.
    """
    document = _decode(text)
    kind = document.pop("type", None)
    if kind not in KINDS:
        raise Problem(400, f"type: {shown(kind)} came (allowed: {', '.join(KINDS)})", param="type")
    if len(text) > MAX_MESSAGE_CHARS and kind != "session.config":
        raise Problem(413, f"{kind}: {len(text)} characters came (allowed: at most {MAX_MESSAGE_CHARS})", param=kind)
    if kind == "session.config":
        session = document.pop("session", None)
        if session is not None and not isinstance(session, dict):
            raise to_problem(refusal("session", session, "an object"))
        return Message(kind, document | (session or {}))
    try:
        refuse_unknown(document, {"text"} if kind == "input.text" else ())
        if kind == "input.text" and not isinstance(document.get("text"), str):
            raise refusal("text", document.get("text"), "a string")
    except BadInput as error:
        raise to_problem(error) from error
    return Message(kind, document)


def _decode(text: str) -> dict[str, Any]:
    raw = text.encode()
    weight = JsonWeight()
    weight.add(raw)
    if weight.total > MAX_JSON_WEIGHT:
        raise Problem(400, f"message: JSON of weight {weight.total} came (allowed: at most {MAX_JSON_WEIGHT})")
    try:
        try:
            document = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            if len(text) > MAX_MESSAGE_CHARS or "\\ud" not in text.lower():
                raise
            document = json.loads(text)  # perhaps one half of a pair, whose other half comes in the next message
    except (msgspec.DecodeError, ValueError) as error:
        raise Problem(400, f"message: {str(error)[:200]} (allowed: a JSON object)") from None
    except RecursionError:
        raise Problem(400, "message: JSON is nested too deeply") from None
    if not isinstance(document, dict):
        raise Problem(400, f"message: {shown(document)} came (allowed: a JSON object)")
    return document


async def read_config(fields: dict[str, Any], read: Callable[[dict[str, Any]], Awaitable[Speech]]) -> StreamConfig:
    """Check a configuration.

    Args:
        fields: of the message.
        read: checks the body of a request to ``POST /v1/audio/speech``.

    Raises:
        Problem: a field that can't be honoured, by name; or a model that is not served.
    """
    try:
        fields = flatten(fields)
        body = {name: value for name, value in fields.items() if name not in OWN and value is not None}
        for name in NOT_HERE & body.keys():
            raise refusal(name, body[name], "null: text comes in messages, and stream_audio says how sound is sent")
        stream = read_fields(StreamFields, fields)
        speech = await read({**body, "input": "a"})
    except BadInput as error:
        raise to_problem(error) from error
    if stream.stream_audio and speech.format not in ("pcm", "pcm16"):
        raise to_problem(refusal("response_format", speech.format, "pcm, with stream_audio"))
    if stream.stream_audio and body.get("speed", 1.0) != 1.0:
        raise to_problem(refusal("speed", body["speed"], "1 or null, with stream_audio"))
    return StreamConfig(body=body, stream=stream, format=speech.format)
