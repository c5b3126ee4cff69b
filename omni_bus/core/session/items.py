"""Items of a conversation, in OpenAI's shapes; sound is raw bytes, never base64."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]

ItemId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]


class InputText(Struct, frozen=True, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """Text of the user or the system."""

    text: str


class InputAudio(Struct, frozen=True, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    """Speech of the user: s16, 16 kHz, one channel inside; the session's input format at its edge.

    `audio` is left out of all events but ``conversation.item.retrieved``.
    """

    audio: bytes | None = None
    transcript: str | None = None


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image", forbid_unknown_fields=True):
    """A picture of the user: a ``data:`` URL, PNG or JPEG.

    `image_url` is left out of all events but ``conversation.item.retrieved``, and of items that are remembered no more.
    """

    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """Text of the assistant."""

    text: str = ""


class OutputAudio(Struct, frozen=True, tag_field="type", tag="output_audio", forbid_unknown_fields=True):
    """Speech of the assistant, as its words."""

    transcript: str | None = None


Content: TypeAlias = InputText | InputAudio | InputImage | OutputText | OutputAudio


class Message(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """Something said; `id` may be the client's choice."""

    id: ItemId | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"
    role: Literal["system", "user", "assistant"]
    content: tuple[Content, ...] = ()


class FunctionCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """The model asks the client to run a function; `arguments` is JSON as text."""

    id: ItemId | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"
    call_id: str
    name: str
    arguments: str = ""


class FunctionCallOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """What the function returned."""

    id: ItemId | None = None
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"
    call_id: str
    output: str


class ItemReference(Struct, frozen=True, kw_only=True, tag_field="type", tag="item_reference"):
    """An item of the conversation; only as input of a response."""

    id: ItemId


Item: TypeAlias = Message | FunctionCall | FunctionCallOutput
