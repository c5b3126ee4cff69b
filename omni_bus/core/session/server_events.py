"""What a session says to its client, whatever the dialect; gateways translate.

The names and the order are OpenAI's, see `response` for the order within a response. Events with a `server_event_seq`
are kept for a while and come again after a resume; the numbers have no gap. Sound is raw bytes in the session's output
format.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from omni_bus.core.session.codes import ErrorDetail
from omni_bus.core.session.config import AudioFormat, MaxTokens, Modality, SessionConfig
from omni_bus.core.session.items import Item

TurnState: TypeAlias = Literal[
    "idle", "user_speaking", "user_committed", "assistant_generating", "assistant_playing", "barge_in"
]


class ServerEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all have; `server_event_seq` is None for what is not kept."""

    event_id: str = ""
    server_event_seq: int | None = None


# --- values -------------------------------------------------------------------------------------------------


class Capabilities(Struct, frozen=True, kw_only=True):
    """What the deployment's pipelines can do; clients branch on these, never on the name of a model."""

    implementation_level: Literal["turn_based_duplex", "model_native_duplex"] = "turn_based_duplex"
    chunk_period_ms: int = 20
    supports_barge_in: bool = True
    supports_playback_ack: bool = True
    supports_session_resume: bool = True
    supports_multi_session: bool = True
    supports_audio_truncate: bool = True
    supports_input_append: bool = True
    supports_text_only_turn: bool = True
    supports_image_input: bool = False
    supports_audio_input: bool = True
    """Speech is understood: by the model itself, or written down for it."""
    supports_audio_output: bool = True
    supports_text_output: bool = True
    supports_tools: bool = False
    supports_transcription: bool = True
    supports_server_vad: bool = True
    supports_semantic_vad: bool = False
    hears_audio: bool = False
    """The model takes sound itself; else it waits for what a recogniser writes."""


class Playback(Struct, frozen=True, kw_only=True):
    """How far the sound of a response is, in ms: made, sent, played, and counted as heard."""

    generated_ms: float = 0.0
    sent_ms: float = 0.0
    played_ms: float = 0.0
    committed_ms: float = 0.0


class SessionView(Struct, frozen=True, kw_only=True):
    """A session as its client sees it; times are seconds of the epoch's clock that the host counts by."""

    id: str
    config: SessionConfig
    capabilities: Capabilities
    created_at: float
    expires_at: float | None
    state: Literal["open", "closing", "closed"] = "open"
    turn_state: TurnState = "idle"
    epoch: int = 0
    turn_id: int = 0
    active_response_id: str | None = None
    active_response_turn_id: int | None = None
    """The commit that it answers."""
    playback: Playback = Playback()


class InputTokens(Struct, frozen=True, kw_only=True):
    """What went in."""

    text_tokens: int = 0
    audio_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


class OutputTokens(Struct, frozen=True, kw_only=True):
    """What came out."""

    text_tokens: int = 0
    audio_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Of one response."""

    total_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    input_token_details: InputTokens = InputTokens()
    output_token_details: OutputTokens = OutputTokens()


class TranscriptionUsage(Struct, frozen=True, kw_only=True):
    """Of one transcription: how long the sound was."""

    type: Literal["duration"] = "duration"
    seconds: float


class StatusError(Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    type: str
    code: str
    message: str


class StatusDetails(Struct, frozen=True, kw_only=True):
    """Why a response is not complete; `cause` is finer than OpenAI's enumeration and may be null."""

    type: Literal["completed", "cancelled", "incomplete", "failed"]
    reason: Literal["turn_detected", "client_cancelled", "max_output_tokens", "content_filter"] | None = None
    error: StatusError | None = None
    cause: str | None = None


class OutputAudioView(Struct, frozen=True, kw_only=True):
    """How a response sounds."""

    format: AudioFormat
    voice: str | None


class ResponseView(Struct, frozen=True, kw_only=True):
    """A response as its client sees it."""

    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
    status_details: StatusDetails | None = None
    output: tuple[Item, ...] = ()
    usage: ResponseUsage | None = None
    conversation_id: str | None
    output_modalities: tuple[Modality, ...]
    max_output_tokens: MaxTokens
    metadata: dict[str, str] | None
    output_audio: OutputAudioView
    timings: dict[str, float] | None = None
    """Milliseconds from the end of the user's speech to each step of the answer, once it is done."""
    epoch: int = 0
    """In which it was begun."""
    playback: Playback = Playback()
    is_committed: bool = False
    """All of it counts as heard."""


class Part(Struct, frozen=True, kw_only=True):
    """A content part as its own events show it."""

    type: Literal["audio", "text"]
    text: str | None = None
    transcript: str | None = None


# --- the session --------------------------------------------------------------------------------------------


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    """First of all; not kept. The token resumes the session, once."""

    session: SessionView
    attachment_generation: int
    resume_token: str | None


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    """The whole effective configuration."""

    session: SessionView


class SessionResumed(ServerEvent, frozen=True, kw_only=True, tag="session.resumed"):
    """First of a later attachment; not kept. What was missed follows."""

    session_id: str
    session: SessionView
    attachment_generation: int
    resume_token: str


class SessionReplaced(ServerEvent, frozen=True, kw_only=True, tag="session.replaced"):
    """To the former attachment, which ends; not kept."""

    session_id: str
    attachment_generation: int


class ResyncRequired(ServerEvent, frozen=True, kw_only=True, tag="session.resync_required"):
    """What was missed is not kept any more; not kept itself."""

    session_id: str
    reason: Literal["journal_gap", "journal_overflow"]


class SessionClosed(ServerEvent, frozen=True, kw_only=True, tag="session.closed"):
    """The end."""

    session_id: str
    reason: str


class SessionExpired(ServerEvent, frozen=True, kw_only=True, tag="session.expired"):
    """The end, by time."""

    session_id: str
    reason: Literal["disconnect_grace_expired", "idle_ttl_expired", "max_duration", "request_cleanup"]


class HeartbeatAck(ServerEvent, frozen=True, kw_only=True, tag="session.heartbeat_ack"):
    """The session lives."""

    session_id: str


class ErrorEvent(ServerEvent, frozen=True, kw_only=True, tag="error"):
    """A client event was not honoured, or something of the deployment failed; the session goes on."""

    error: ErrorDetail


# --- items --------------------------------------------------------------------------------------------------


class ItemAdded(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.added"):
    """An item is in the conversation; null before it is the first place."""

    item: Item
    previous_item_id: str | None


class ItemDone(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.done"):
    """An item is complete."""

    item: Item
    previous_item_id: str | None


class ItemRetrieved(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.retrieved"):
    """All of an item; its sound in the session's input format."""

    item: Item


class ItemDeleted(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.deleted"):
    """An item is gone."""

    item_id: str


class ItemTruncated(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.truncated"):
    """An answer ends there."""

    item_id: str
    content_index: int
    audio_end_ms: float


class TranscriptionDelta(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.delta"
):
    """More of what the user said."""

    item_id: str
    content_index: int
    delta: str


class TranscriptionCompleted(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.completed"
):
    """What the user said."""

    item_id: str
    content_index: int
    transcript: str
    usage: TranscriptionUsage


class TranscriptionSegment(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.segment"
):
    """A piece of it, in seconds."""

    item_id: str
    content_index: int
    id: str
    speaker: str
    start: float
    end: float
    text: str


class TranscriptionFailed(
    ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.failed"
):
    """What the user said could not be written down."""

    item_id: str
    content_index: int
    error: ErrorDetail


# --- buffers ------------------------------------------------------------------------------------------------


class CommitDetail(Struct, frozen=True, kw_only=True):
    """What duplex dialects say of a commit."""

    turn_id: int = 0
    epoch: int = 0
    history_len: int = 0
    """Items of the conversation, with this one."""
    is_empty: bool = False
    is_speech: bool | None = None
    no_response: bool = False
    overlap_ack: bool = False
    overlap_deferred: bool = False
    response_create_deferred: bool = False


class InputCommitted(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    """The buffer became an item; null where nothing was in it that anybody said."""

    item_id: str | None
    previous_item_id: str | None
    detail: CommitDetail


class InputCleared(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.cleared"):
    """The buffer is empty."""

    reason: Literal["clear", "input_cancel", "barge_in"] = "clear"
    epoch: int = 0


class SpeechStarted(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.speech_started"):
    """The user speaks; ms of all sound that was ever appended, padding included."""

    item_id: str
    audio_start_ms: int


class SpeechStopped(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.speech_stopped"):
    """The user does not speak any more."""

    item_id: str
    audio_end_ms: int


class TimeoutTriggered(ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.timeout_triggered"):
    """The user said nothing for long after an answer was heard."""

    item_id: str
    audio_start_ms: int
    audio_end_ms: int


class OutputAudioCleared(ServerEvent, frozen=True, kw_only=True, tag="output_audio_buffer.cleared"):
    """Players drop what they have of a response."""

    response_id: str
    reason: str = "output_audio_buffer_clear"
    epoch: int = 0
    playback: Playback = Playback()


# --- responses ----------------------------------------------------------------------------------------------


class ResponseCreated(ServerEvent, frozen=True, kw_only=True, tag="response.created"):
    """A response begins."""

    response: ResponseView


class ResponseDone(ServerEvent, frozen=True, kw_only=True, tag="response.done"):
    """A response is over; the last event of it."""

    response: ResponseView


class RateLimitsUpdated(ServerEvent, frozen=True, kw_only=True, tag="rate_limits.updated"):
    """After each response; there are none."""

    rate_limits: tuple[str, ...] = ()


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


class PartEvent(ServerEvent, frozen=True, kw_only=True):
    """Where in an answer."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int = 0


class ContentPartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """Sound or text begins."""

    part: Part


class ContentPartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """Sound or text is over."""

    part: Part


class TextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str


class TextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All text."""

    text: str


class AudioDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_audio.delta"):
    """More sound, in `format`."""

    delta: bytes
    format: AudioFormat
    start_ms: float
    """Where it begins in the response's sound."""
    duration_ms: float
    at: float
    """Seconds of the host's clock."""
    text_chars: int | None = None
    """So much of the response's text is said by its end, where that is known."""


class AudioDone(PartEvent, frozen=True, kw_only=True, tag="response.output_audio.done"):
    """All sound was sent."""


class TranscriptDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_audio_transcript.delta"):
    """More of what is said."""

    delta: str


class TranscriptDone(PartEvent, frozen=True, kw_only=True, tag="response.output_audio_transcript.done"):
    """All that is said."""

    transcript: str


class ArgumentsDelta(ServerEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    response_id: str
    item_id: str
    output_index: int
    call_id: str
    delta: str


class ArgumentsDone(ServerEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    response_id: str
    item_id: str
    output_index: int
    call_id: str
    name: str
    arguments: str


# --- duplex -------------------------------------------------------------------------------------------------


class Speak(ServerEvent, frozen=True, kw_only=True, tag="response.speak"):
    """Once, before the first sound of a response."""

    response_id: str
    item_id: str
    epoch: int


class Listen(ServerEvent, frozen=True, kw_only=True, tag="response.listen"):
    """The session goes on listening instead of answering."""

    session_id: str
    epoch: int
    reason: str
    response_id: str | None = None


class OverlapDecision(ServerEvent, frozen=True, kw_only=True, tag="overlap.decision"):
    """What is done with sound of the user that falls on an answer."""

    session_id: str
    epoch: int
    policy: str
    action: Literal["listen", "drop", "barge_in"]
    reason: str
    duration_ms: float
    overlap_speech_ms: float
    is_audio_kept: bool


class PlaybackAcknowledged(ServerEvent, frozen=True, kw_only=True, tag="playback.acknowledged"):
    """How much of an answer counts as heard."""

    session_id: str
    epoch: int
    response_id: str
    item_id: str
    played_ms: float
    committed_ms: float
    is_truncated: bool
    playback: Playback
    history_committed: bool


class TurnEvent(ServerEvent, frozen=True, kw_only=True, tag="turn.event"):
    """A signal was taken."""

    session_id: str
    event: str
    turn_state: TurnState
    epoch: int


AnyServerEvent: TypeAlias = (
    SessionCreated
    | SessionUpdated
    | SessionResumed
    | SessionReplaced
    | ResyncRequired
    | SessionClosed
    | SessionExpired
    | HeartbeatAck
    | ErrorEvent
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

UNKEPT = (SessionCreated, SessionResumed, SessionReplaced, ResyncRequired)
"""Events of one attachment: they have no number and never come again."""
