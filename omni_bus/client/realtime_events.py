"""What a live conversation tells its client, as it is on the wire: OpenAI's GA events, and those of duplex sessions.

Events that look on the wire as in `omni_bus.core.session.server_events` are those; the others are here. What a server
may leave out has a default, what it adds is passed over, and what is of no known type, or not in its shape, is
`Unknown`. Sound is raw bytes in the session's output format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from omni_bus.client.decoding import EventDecoder, text_of
from omni_bus.core.session.server_events import (
    ArgumentsDelta,
    AudioDone,
    ContentPartAdded,
    ContentPartDone,
    HeartbeatAck,
    InputCleared,
    ItemDeleted,
    ItemTruncated,
    OutputAudioCleared,
    PartEvent,
    ResyncRequired,
    ServerEvent,
    SessionClosed,
    SessionExpired,
    SessionReplaced,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TextDone,
    TimeoutTriggered,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionDelta,
    TranscriptionSegment,
    TurnEvent,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULT_RATE_HZ",
    "EVENTS",
    "Acknowledged",
    "ArgumentsDelta",
    "ArgumentsDone",
    "AudioDelta",
    "AudioDone",
    "Content",
    "ContentPartAdded",
    "ContentPartDone",
    "ErrorBody",
    "ErrorEvent",
    "Format",
    "HeartbeatAck",
    "InputAudio",
    "InputCleared",
    "InputCommitted",
    "Item",
    "ItemAdded",
    "ItemCreated",
    "ItemDeleted",
    "ItemDone",
    "ItemEvent",
    "ItemRetrieved",
    "ItemTruncated",
    "Listen",
    "OutputAudio",
    "OutputAudioCleared",
    "OutputItemAdded",
    "OutputItemDone",
    "Overlap",
    "OverlapDecision",
    "PlaybackAcknowledged",
    "RateLimitsUpdated",
    "RealtimeEvent",
    "Response",
    "ResponseCreated",
    "ResponseDone",
    "ResyncRequired",
    "ServerEvent",
    "Session",
    "SessionAudio",
    "SessionClosed",
    "SessionCreated",
    "SessionExpired",
    "SessionReplaced",
    "SessionResumed",
    "SessionUpdated",
    "Speak",
    "SpeechStarted",
    "SpeechStopped",
    "StatusDetails",
    "TextDelta",
    "TextDone",
    "TimeoutTriggered",
    "TranscriptDelta",
    "TranscriptDone",
    "TranscriptionCompleted",
    "TranscriptionDelta",
    "TranscriptionFailed",
    "TranscriptionSegment",
    "TurnEvent",
    "Unknown",
]

DEFAULT_RATE_HZ = 24_000
"""Of sound, where a server does not say."""

G711_RATE_HZ = 8_000


# --- values -------------------------------------------------------------------------------------------------


class Format(Struct, frozen=True):
    """How sound is encoded: ``audio/pcm`` (s16 little-endian), ``audio/pcm_f32le``, ``audio/pcmu``, ``audio/pcma``."""

    type: str = "audio/pcm"
    rate: int | None = None

    @property
    def rate_hz(self) -> int:
        """Samples a second."""
        if self.type in ("audio/pcmu", "audio/pcma"):
            return G711_RATE_HZ
        return DEFAULT_RATE_HZ if self.rate is None else self.rate


class InputAudio(Struct, frozen=True):
    """What a session takes."""

    format: Format | None = None
    transcription: dict[str, Any] | None = None
    turn_detection: dict[str, Any] | None = None


class OutputAudio(Struct, frozen=True):
    """What a session gives."""

    format: Format | None = None
    voice: str | dict[str, Any] | None = None
    speed: float | None = None


class SessionAudio(Struct, frozen=True):
    """Both directions."""

    input: InputAudio = InputAudio()
    output: OutputAudio = OutputAudio()


class Session(Struct, frozen=True, kw_only=True):
    """A session's configuration; `capabilities` and `epoch` are those of duplex sessions."""

    id: str = ""
    type: str = "realtime"
    model: str | None = None
    instructions: str | None = None
    output_modalities: tuple[str, ...] = ()
    audio: SessionAudio = SessionAudio()
    tools: tuple[dict[str, Any], ...] = ()
    capabilities: dict[str, Any] = {}
    epoch: int = 0

    @property
    def input_format(self) -> Format:
        """Of sound that is appended."""
        return self.audio.input.format or Format()

    @property
    def output_format(self) -> Format:
        """Of sound that comes."""
        return self.audio.output.format or Format()


class Content(Struct, frozen=True, kw_only=True):
    """A part of an item: ``input_text``, ``input_audio``, ``input_image``, ``output_text`` or ``output_audio``."""

    type: str
    text: str | None = None
    transcript: str | None = None
    audio: bytes | None = None
    image_url: str | None = None


class Item(Struct, frozen=True, kw_only=True):
    """Something said (``message``), a ``function_call`` of the model or its ``function_call_output``."""

    id: str = ""
    type: str = "message"
    status: str | None = None
    role: str | None = None
    content: tuple[Content, ...] = ()
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str = ""

    @property
    def text(self) -> str:
        """What is written and said in it."""
        return "".join(part.text or part.transcript or "" for part in self.content)


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Why something was not done; `event_id` is that of the client's event."""

    type: str = ""
    code: str | int | None = None
    message: str = ""
    param: str | None = None
    event_id: str | None = None


class StatusDetails(Struct, frozen=True, kw_only=True):
    """Why a response is not complete."""

    type: str | None = None
    reason: str | None = None
    error: ErrorBody | None = None


class Response(Struct, frozen=True, kw_only=True):
    """A response; `timings` are milliseconds from the end of the user's speech to each step of the answer."""

    id: str
    status: str | None = None
    status_details: StatusDetails | None = None
    output: tuple[Item, ...] = ()
    usage: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    conversation_id: str | None = None
    timings: dict[str, float] | None = None


# --- the session --------------------------------------------------------------------------------------------


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    """First of all. The token resumes a duplex session, once."""

    session: Session
    resume_token: str | None = None
    attachment_generation: int | None = None


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    """The whole effective configuration."""

    session: Session


class SessionResumed(ServerEvent, frozen=True, kw_only=True, tag="session.resumed"):
    """First after a cut; what was missed follows."""

    session_id: str
    session: Session
    resume_token: str
    attachment_generation: int


class ErrorEvent(ServerEvent, frozen=True, kw_only=True, tag="error"):
    """An event of the client was not honoured, or something of the server failed; the session goes on."""

    error: ErrorBody | str
    code: str | int | None = None
    message: str | None = None

    @property
    def body(self) -> ErrorBody:
        """What it says, also where the server has it flat."""
        if isinstance(self.error, ErrorBody):
            return self.error
        return ErrorBody(code=self.code, message=self.error)


class Unknown(ServerEvent, frozen=True, kw_only=True):
    """An event that this client does not know."""

    kind: str
    fields: Mapping[str, Any]
    problem: str
    """Why it is not one of the others."""


# --- items --------------------------------------------------------------------------------------------------


class ItemEvent(ServerEvent, frozen=True, kw_only=True):
    """About one item of the conversation."""

    item: Item
    previous_item_id: str | None = None


class ItemCreated(ItemEvent, frozen=True, kw_only=True, tag="conversation.item.created"):
    """An item is in the conversation; duplex sessions say so besides `ItemAdded`."""


class ItemAdded(ItemEvent, frozen=True, kw_only=True, tag="conversation.item.added"):
    """An item is in the conversation."""


class ItemDone(ItemEvent, frozen=True, kw_only=True, tag="conversation.item.done"):
    """An item is complete."""


class ItemRetrieved(ItemEvent, frozen=True, kw_only=True, tag="conversation.item.retrieved"):
    """All of an item, its sound included."""


class TranscriptionCompleted(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.completed"
):
    """What the user said."""

    item_id: str
    content_index: int = 0
    transcript: str
    usage: dict[str, Any] | None = None


class TranscriptionFailed(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.failed"
):
    """What the user said could not be written down."""

    item_id: str
    content_index: int = 0
    error: ErrorBody


class InputCommitted(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    """The buffer became an item; null where nobody said anything."""

    item_id: str | None = None
    previous_item_id: str | None = None


# --- responses ----------------------------------------------------------------------------------------------


class ResponseCreated(ServerEvent, frozen=True, kw_only=True, tag="response.created"):
    """A response begins."""

    response: Response


class ResponseDone(ServerEvent, frozen=True, kw_only=True, tag="response.done"):
    """A response is over; the last event of it."""

    response: Response


class RateLimitsUpdated(ServerEvent, frozen=True, kw_only=True, tag="rate_limits.updated"):
    """After each response."""

    rate_limits: tuple[Any, ...] = ()


class OutputItemAdded(ServerEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item of the answer begins."""

    response_id: str
    output_index: int
    item: Item


class OutputItemDone(ServerEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item of the answer is over."""

    response_id: str
    output_index: int
    item: Item


class AudioDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_audio.delta"):
    """More sound, in the session's output format; duplex sessions say again at which rate."""

    delta: bytes
    sample_rate_hz: int | None = None


class ArgumentsDone(ServerEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    response_id: str
    item_id: str
    output_index: int
    call_id: str
    name: str = ""
    arguments: str


# --- duplex -------------------------------------------------------------------------------------------------


class Speak(ServerEvent, frozen=True, kw_only=True, tag="response.speak"):
    """Once, before the first sound of a response."""

    response_id: str
    item_id: str


class Listen(ServerEvent, frozen=True, kw_only=True, tag="response.listen"):
    """The session goes on listening instead of answering."""

    session_id: str
    epoch: int
    response_id: str | None = None
    response: dict[str, Any] | None = None


class Overlap(Struct, frozen=True, kw_only=True):
    """How much of the user's speech fell on an answer."""

    duration_ms: float = 0.0
    overlap_speech_ms: float = 0.0
    buffer_audio: bool = False


class OverlapDecision(ServerEvent, frozen=True, kw_only=True, tag="overlap.decision"):
    """What is done with sound of the user that falls on an answer: `action` is listen, drop or barge_in."""

    session_id: str
    epoch: int
    policy: str
    action: str
    reason: str
    metadata: Overlap = Overlap()


class Acknowledged(Struct, frozen=True, kw_only=True):
    """How much of an answer counts as heard."""

    session_id: str
    epoch: int
    response_id: str
    item_id: str
    played_ms: float
    committed_ms: float
    truncate: bool = False
    history_committed: bool = False


class PlaybackAcknowledged(ServerEvent, frozen=True, kw_only=True, tag="playback.acknowledged"):
    """An acknowledgement of playback was taken."""

    event: Acknowledged


RealtimeEvent: TypeAlias = (
    SessionCreated
    | SessionUpdated
    | SessionResumed
    | SessionReplaced
    | ResyncRequired
    | SessionClosed
    | SessionExpired
    | HeartbeatAck
    | ErrorEvent
    | ItemCreated
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | ItemTruncated
    | TranscriptionDelta
    | TranscriptionCompleted
    | TranscriptionSegment
    | TranscriptionFailed
    | InputCommitted
    | InputCleared
    | SpeechStarted
    | SpeechStopped
    | TimeoutTriggered
    | OutputAudioCleared
    | ResponseCreated
    | ResponseDone
    | RateLimitsUpdated
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | TextDelta
    | TextDone
    | AudioDelta
    | AudioDone
    | TranscriptDelta
    | TranscriptDone
    | ArgumentsDelta
    | ArgumentsDone
    | Speak
    | Listen
    | OverlapDecision
    | PlaybackAcknowledged
    | TurnEvent
)


def _unknown(fields: Mapping[str, Any], problem: str) -> Unknown:
    seq = fields.get("server_event_seq")
    return Unknown(
        event_id=text_of(fields, "event_id"),
        server_event_seq=seq if isinstance(seq, int) else None,
        kind=text_of(fields, "type"),
        fields=fields,
        problem=problem,
    )


EVENTS: EventDecoder[RealtimeEvent, Unknown] = EventDecoder(RealtimeEvent, _unknown)
