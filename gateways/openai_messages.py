"""Messages of a chat body, checked one by one: what they say, and where their pictures, sound and video are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateways.fields import names_of, refusal, refuse_unknown, shown
from gateways.openai_models import MEDIA, are_beside_messages
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from omni_bus.core.pipeline import Pipeline

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MEDIA = 64
"""Pictures, sounds and videos of one conversation."""

SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm")

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Parts that are text, and the key of it."""

_MEDIA_PARTS = {"image_url": "images", "audio_url": "audio", "input_audio": "audio", "video_url": "video"}
"""Parts that are media, and the input port that reads them."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one picture, sound or video is."""

    port: str
    """The pipeline's input port for it."""
    place: str
    """The field, for refusals."""
    url: str = ""
    """``data:``, ``http``, ``https`` or ``file:``, or bare base64."""
    file_id: str = ""
    """Of a file that the caller has uploaded, instead."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Checked messages, as a `omni_bus.wire.prompt.Prompt` has them, and their media in reading order."""

    messages: list[dict[str, Any]]
    media: list[Source]


class TextPart(msgspec.Struct, frozen=True):
    """A piece of text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(msgspec.Struct, frozen=True):
    """A piece of an assistant's message that says why there is no answer."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(msgspec.Struct, frozen=True):
    """A picture: ``data:``, ``http``, ``https`` or ``file:``, as the gateway's options allow."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(msgspec.Struct, frozen=True):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


class MediaUrl(msgspec.Struct, frozen=True):
    """A sound or a video: ``data:``, ``http``, ``https`` or ``file:``, as the gateway's options allow."""

    url: str


class AudioUrlPart(msgspec.Struct, frozen=True):
    """A sound."""

    type: Literal["audio_url"]
    audio_url: MediaUrl | str


class VideoPart(msgspec.Struct, frozen=True):
    """A video."""

    type: Literal["video_url"]
    video_url: MediaUrl | str


class InputAudio(msgspec.Struct, frozen=True):
    """A sound in base64."""

    data: str
    format: Annotated[str, Meta(description=", ".join(SOUND_FORMATS))] | None = None


class InputAudioPart(msgspec.Struct, frozen=True):
    """A sound."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class FileRef(msgspec.Struct, frozen=True):
    """A file: uploaded before, or as a data URL."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class FilePart(msgspec.Struct, frozen=True):
    """A picture, sound or video from /v1/files; what it is, its first bytes tell."""

    type: Literal["file"]
    file: FileRef


PARTS = (TextPart, RefusalPart, ImagePart, AudioUrlPart, VideoPart, InputAudioPart, FilePart)


class CalledFunction(msgspec.Struct, frozen=True):
    """What was called."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message made."""

    id: str
    function: CalledFunction
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; an assistant's may have its words in ``audio.transcript``, or only tool calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    function_call: None = None


_KNOWN = names_of(ChatMessage)


def read_messages(
    given: list[Any],
    pipeline: Pipeline,
    inputs: Iterable[str],
    *,
    prefix: str = "messages",
    uploaded: Mapping[str, str] | None = None,
) -> Conversation:
    """Check messages.

    Args:
        given: as the body has them.
        pipeline: who answers.
        inputs: the input ports that the request will have.
        prefix: the field, for refusals.
        uploaded: the input port of each uploaded file that the messages name.

    Raises:
        BadInput: names the place and what is allowed.
    """
    reader = _Reader(pipeline, frozenset(inputs), uploaded or {})
    messages = [reader.message(message, f"{prefix}[{i}]") for i, message in enumerate(given)]
    return Conversation(messages=messages, media=reader.media)


class _Reader:
    def __init__(self, pipeline: Pipeline, inputs: frozenset[str], uploaded: Mapping[str, str]) -> None:
        self._pipeline = pipeline
        self._inputs = inputs
        self._uploaded = uploaded
        self.media: list[Source] = []

    def message(self, message: Any, place: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise refusal(place, message, "an object with 'role' and 'content'")
        role = message.get("role")
        if role not in ROLES:
            raise refusal(f"{place}.role", role, ", ".join(ROLES))
        refuse_unknown(message, _KNOWN, prefix=f"{place}.")
        if message.get("function_call") is not None:
            raise refusal(f"{place}.function_call", message["function_call"], "null; 'tool_calls' has calls")
        found: dict[str, Any] = {"role": role}
        if calls := _tool_calls(message, place):
            found["tool_calls"] = calls
        content = self._content(message, place, may_be_absent=bool(calls))
        if content is not None:
            found["content"] = content
        for name in ("name", "tool_call_id"):
            if (text := _string(message, name, place)) is not None:
                found[name] = text
        if role != "tool" and "tool_call_id" in found:
            raise refusal(f"{place}.tool_call_id", message["tool_call_id"], f"null, as the role is {role}")
        for name in ("reasoning", "reasoning_content"):
            if (text := _string(message, name, place)) is None:
                continue
            if role != "assistant":
                raise refusal(f"{place}.{name}", text, f"null, as the role is {role}")
            found.setdefault("reasoning", text)
        return found

    def _content(
        self, message: dict[str, Any], place: str, *, may_be_absent: bool
    ) -> str | list[dict[str, Any]] | None:
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            # An earlier answer of ours, as SDKs send it back: what was only spoken is in its transcript.
            audio = message.get("audio")
            spoken = audio.get("transcript") if isinstance(audio, dict) else None
            content = spoken or message.get("refusal")
            if content is None and may_be_absent:
                return None
        match content:
            case str():
                return content
            case [_, *_]:
                parts = [part for i, each in enumerate(content) for part in self._part(each, f"{place}.content[{i}]")]
                if all(part["type"] == "text" for part in parts):
                    return "".join(part["text"] for part in parts)
                return parts
            case _:
                raise refusal(f"{place}.content", content, "a string or a list of parts")

    def _part(self, part: Any, place: str) -> list[dict[str, Any]]:
        """Return what a part is to the stage that reads messages; nothing if another stage alone gets it."""
        if isinstance(part, str):
            return [{"type": "text", "text": part}]
        if not isinstance(part, dict):
            raise refusal(place, part, "an object with 'type' and 'text'")
        kind = part.get("type")
        if kind is None:  # shorthand parts name their type by their key
            kind = next((key for key in _MEDIA_PARTS if key in part), None)
        if kind in _TEXTS:
            refuse_unknown(part, ("type", _TEXTS[kind]), prefix=f"{place}.")
            text = part.get(_TEXTS[kind])
            if not isinstance(text, str):
                raise refusal(f"{place}.{_TEXTS[kind]}", text, "a string")
            return [{"type": "text", "text": text}]
        if kind not in _MEDIA_PARTS and kind != "file":
            allowed = ", ".join(("text", *(key for key, port in _MEDIA_PARTS.items() if port in self._inputs)))
            raise BadInput(f"{place}.type: {shown(kind)} came (allowed: {allowed})", field=f"{place}.type")
        refuse_unknown(part, ("type", kind), prefix=f"{place}.")
        source = _file(part, place, self._uploaded) if kind == "file" else _media(part, kind, place)
        if source.port not in self._inputs:
            reads = ", ".join(("text", *(MEDIA[port] for port in MEDIA if port in self._inputs)))
            raise BadInput(
                f"{place}.type: {shown(kind)} came (allowed: parts that are {reads}, as this model takes nothing else)",
                field=f"{place}.type",
            )
        if len(self.media) >= MAX_MEDIA:
            raise BadInput(f"{place}: one more came (allowed: {MAX_MEDIA} pictures, sounds and videos)", field=place)
        self.media.append(source)
        return [{"type": MEDIA[source.port]}] if are_beside_messages(self._pipeline, source.port) else []


def _media(part: dict[str, Any], kind: str, place: str) -> Source:
    """Return where a part's medium is."""
    value = part.get(kind)
    port, inner = _MEDIA_PARTS[kind], f"{place}.{kind}"
    if kind == "input_audio":
        if not isinstance(value, dict):
            raise refusal(inner, value, "an object with 'data' and 'format'")
        refuse_unknown(value, ("data", "format"), prefix=f"{inner}.")
        data, fmt = value.get("data"), value.get("format")
        if fmt is not None and fmt not in SOUND_FORMATS:
            raise refusal(f"{inner}.format", fmt, ", ".join(SOUND_FORMATS))
        if not isinstance(data, str) or not data or "://" in data[:64]:
            raise refusal(f"{inner}.data", data, "base64")
        return Source(port=port, place=f"{inner}.data", url=data)
    if isinstance(value, str):
        return _located(port, inner, value)
    if not isinstance(value, dict):
        raise refusal(inner, value, "an object with 'url'")
    refuse_unknown(value, ("url", "detail") if kind == "image_url" else ("url",), prefix=f"{inner}.")
    if value.get("detail") not in (None, "auto", "low", "high"):
        raise refusal(f"{inner}.detail", value["detail"], "auto, low, high")
    return _located(port, f"{inner}.url", value.get("url"))


def _located(port: str, place: str, url: Any) -> Source:
    if not isinstance(url, str) or not url:
        raise refusal(place, url, "a URL: data:, http://, https:// or file:///")
    return Source(port=port, place=place, url=url)


_PORT_OF_MEDIA_TYPE = {"image": "images", "audio": "audio", "video": "video"}


def _file(part: dict[str, Any], place: str, uploaded: Mapping[str, str]) -> Source:
    """Return where a file part's medium is."""
    value, inner = part.get("file"), f"{place}.file"
    if not isinstance(value, dict):
        raise refusal(inner, value, "an object with 'file_data'")
    refuse_unknown(value, ("file_id", "file_data", "filename"), prefix=f"{inner}.")
    file_id, data = value.get("file_id"), value.get("file_data")
    if (file_id is None) == (data is None):
        raise refusal(inner, value, "an object with one of 'file_id' and 'file_data'")
    _string(value, "filename", inner)
    if file_id is not None:
        port = uploaded.get(file_id) if isinstance(file_id, str) else None
        if not port:
            allowed = "the id of a picture, a sound or a video that you have uploaded"
            raise refusal(f"{inner}.file_id", file_id, allowed)
        return Source(port=port, place=f"{inner}.file_id", file_id=file_id)
    url = data if isinstance(data, str) else ""
    kind = url[5:64].partition("/")[0].strip().lower() if url[:5].lower() == "data:" else ""
    if kind not in _PORT_OF_MEDIA_TYPE:
        raise refusal(f"{inner}.file_data", data, "a data URL of a picture, a sound or a video")
    return Source(port=_PORT_OF_MEDIA_TYPE[kind], place=f"{inner}.file_data", url=url)


def file_ids_of(given: list[Any]) -> list[str]:
    """Return the ids of uploaded files that messages name, before anything of them is checked."""
    return [
        part["file"]["file_id"]
        for message in given
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict)
        and isinstance(part.get("file"), dict)
        and isinstance(part["file"].get("file_id"), str)
    ]


def _tool_calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return []
    place = f"{place}.tool_calls"
    if message.get("role") != "assistant":
        raise refusal(place, calls, f"null, as the role is {message.get('role')}")
    try:
        found = msgspec.convert(calls, list[MessageCall])
    except msgspec.ValidationError as error:
        words, _, where = str(error).partition(" - at `$")
        field = place + where.rstrip("`")
        raise BadInput(f"{field}: {words} (allowed: calls with 'id' and 'function')", field=field) from None
    return [
        {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
        for call in found
    ]


def _string(message: dict[str, Any], name: str, place: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise refusal(f"{place}.{name}", value, "a string")
    return value


def message_schema(media_ports: Iterable[str]) -> dict[str, Any]:
    """Return the schema of one message of models that have these input ports, without references."""
    _, found = msgspec.json.schema_components([ChatMessage, *PARTS], ref_template="{name}")
    inline: dict[str, Any] = {name: _inlined(schema, found) for name, schema in found.items()}
    ports = set(media_ports)
    parts = [inline["TextPart"], inline["RefusalPart"]]
    parts += [inline[name] for name, port in _PART_PORTS.items() if port in ports]
    parts += [inline["FilePart"]] if ports else []
    message = inline["ChatMessage"]
    message["additionalProperties"] = {"type": "null"}
    items = {"anyOf": [{"type": "string"}, *parts]}
    listed = {"type": "array", "minItems": 1, "items": items}
    message["properties"]["content"] = {"anyOf": [{"type": "string"}, listed, {"type": "null"}]}
    return message


_PART_PORTS = {"ImagePart": "images", "AudioUrlPart": "audio", "InputAudioPart": "audio", "VideoPart": "video"}


def _inlined(schema: Any, found: dict[str, Any]) -> Any:
    """Return a schema with every reference replaced by what it refers to."""
    match schema:
        case {"$ref": name}:
            return _inlined(found[name], found)
        case dict():
            return {key: _inlined(value, found) for key, value in schema.items()}
        case list():
            return [_inlined(value, found) for value in schema]
        case _:
            return schema
