"""What a client says to a session, whatever its dialect; gateways translate.

The names are OpenAI's where it has one. The first event of an attachment is `SessionOpen` or `SessionResume`. Sound is
raw bytes. `event_id` is the client's own; only ``error`` events give it back.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from omni_bus.core.session.codes import Code
from omni_bus.core.session.config import AudioFormat, MaxTokens, Modality, Tool, ToolChoice
from omni_bus.core.session.items import Item, ItemReference

Position: TypeAlias = Annotated[float, Meta(ge=0)]
"""Milliseconds of sound; fractions are allowed."""


class ClientEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all have."""

    event_id: str | None = None


# --- the session --------------------------------------------------------------------------------------------


class SessionOpen(ClientEvent, frozen=True, kw_only=True, tag="session.open"):
    """A new session; answered with ``session.created``.

    `session` is a merge patch on the defaults, in the shape of `SessionConfig`. Without `is_resumable` the session
    closes with its attachment.
    """

    session_id: Annotated[str, Meta(min_length=1, max_length=128)]
    session: dict[str, Any] = {}
    is_resumable: bool = False
    caller: str = ""
    """Who asks, for fairness among the requests that the session makes; never a secret."""


class SessionResume(ClientEvent, frozen=True, kw_only=True, tag="session.resume"):
    """Another attachment to a session that lives; answered with ``session.resumed`` and what was missed."""

    session_id: str
    resume_token: str
    last_received_server_event_seq: Annotated[int, Meta(ge=0)]


class SessionUpdate(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    """A merge patch in the shape of `SessionConfig`."""

    session: dict[str, Any]


class EventAck(ClientEvent, frozen=True, kw_only=True, tag="session.event_ack"):
    """Everything up to this one arrived; not answered."""

    server_event_seq: int


class Heartbeat(ClientEvent, frozen=True, kw_only=True, tag="session.heartbeat"):
    """The client lives."""


class SessionClose(ClientEvent, frozen=True, kw_only=True, tag="session.close"):
    """The end; answered with ``session.closed``, after which nothing comes."""

    reason: str = "client_close"


class Refuse(ClientEvent, frozen=True, kw_only=True, tag="gateway.refuse"):
    """What a gateway could not read or express, so that its error comes in order with what was done before."""

    code: str
    """The name of a `Code`."""
    message: str
    param: str | None = None
    is_append: bool = False
    """It was sound, which is now missing from the turn."""

    @property
    def as_code(self) -> Code:
        """The code; of an unknown name ``INVALID_EVENT``."""
        return Code.__members__.get(self.code, Code.INVALID_EVENT)


# --- the input buffer ---------------------------------------------------------------------------------------


class AudioAppend(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Sound of the user, in `format` (None: the session's); the rest are hints that duplex clients give."""

    audio: bytes = b""
    format: AudioFormat | None = None
    is_speech: bool | None = None
    """The client's own verdict; None leaves it to the server."""
    transcript: str | None = None
    overlap_action: str | None = None
    force_barge_in: bool = False
    force_listen: bool = False
    video_frames: tuple[bytes, ...] = ()
    """JPEG or PNG."""


class AudioCommit(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """The buffer becomes a user item; `create_response` also asks for an answer."""

    create_response: bool = False
    is_speech: bool | None = None


class AudioClear(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    """Forget the buffer."""


class InputCancel(ClientEvent, frozen=True, kw_only=True, tag="input.cancel"):
    """Forget the buffer and whatever is being answered."""


# --- the conversation ---------------------------------------------------------------------------------------


class ItemCreate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.create"):
    """A new item: at the end, after another, or first of all with ``previous_item_id = "root"``."""

    item: Item
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.retrieve"):
    """Show an item, its sound included."""

    item_id: str


class ItemDelete(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.delete"):
    """Forget an item."""

    item_id: str


class ItemTruncate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.truncate"):
    """Only the beginning of an answer was heard."""

    item_id: str
    audio_end_ms: Position
    content_index: Annotated[int, Meta(ge=0)] = 0


# --- responses ----------------------------------------------------------------------------------------------


class OutputAudioOptions(Struct, frozen=True):
    """What one response does differently."""

    format: AudioFormat | None = None
    voice: str | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None


class ResponseAudioOptions(Struct, frozen=True):
    """The nesting of OpenAI's shape."""

    output: OutputAudioOptions = OutputAudioOptions()


class ResponseOptions(Struct, frozen=True, kw_only=True):
    """What one response does differently from the session; None does not differ."""

    conversation: Literal["auto", "none"] = "auto"
    output_modalities: Annotated[tuple[Modality, ...], Meta(min_length=1, max_length=2)] | None = None
    instructions: str | None = None
    audio: ResponseAudioOptions = ResponseAudioOptions()
    tools: tuple[Tool, ...] | None = None
    tool_choice: ToolChoice | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    metadata: dict[str, str] | None = None
    input: tuple[Item | ItemReference, ...] | None = None
    """Instead of the conversation; empty is an empty context."""
    prompt: dict[str, Any] | None = None


class ResponseCreate(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    """Answer now."""

    response: ResponseOptions = ResponseOptions()


class ResponseCancel(ClientEvent, frozen=True, kw_only=True, tag="response.cancel"):
    """Stop a response; the conversation's own if no id is given."""

    response_id: str | None = None


class OutputAudioClear(ClientEvent, frozen=True, kw_only=True, tag="output_audio_buffer.clear"):
    """Stop what is heard."""

    response_id: str | None = None


class BargeIn(ClientEvent, frozen=True, kw_only=True, tag="barge_in"):
    """The user interrupts."""


class PlaybackAck(ClientEvent, frozen=True, kw_only=True, tag="playback.ack"):
    """So much of an answer was played; `committed_ms`, of which it counts as heard, is `played_ms` if not given."""

    played_ms: Position
    committed_ms: Position | None = None
    response_id: str | None = None
    item_id: str | None = None
    truncate: bool = False


class TurnSignal(ClientEvent, frozen=True, kw_only=True, tag="turn.signal"):
    """A client that knows turns itself says where it is; those that are commands come as these."""

    event: Literal["user_started", "user_committed", "assistant_started", "assistant_done", "playback_ack", "timeout"]


AnyClientEvent: TypeAlias = (
    SessionOpen
    | SessionResume
    | SessionUpdate
    | EventAck
    | Heartbeat
    | SessionClose
    | Refuse
    | AudioAppend
    | AudioCommit
    | AudioClear
    | InputCancel
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | OutputAudioClear
    | BargeIn
    | PlaybackAck
    | TurnSignal
)
