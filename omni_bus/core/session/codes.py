"""Why something that a client sent was not done: one code, spelt as OpenAI's clients and as duplex clients know it."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

from msgspec import Struct

ErrorType: TypeAlias = Literal["invalid_request_error", "server_error", "rate_limit_error"]

INVALID: ErrorType = "invalid_request_error"
SERVER: ErrorType = "server_error"
LIMIT: ErrorType = "rate_limit_error"


class Code(Enum):
    """OpenAI's spelling, the duplex dialect's, and the type that both give."""

    INVALID_EVENT = ("invalid_event", "bad_event", INVALID)
    INVALID_JSON = ("invalid_json", "invalid_json", INVALID)
    UNKNOWN_EVENT = ("unknown_event", "unknown_event", INVALID)
    EVENT_TOO_LARGE = ("event_too_large", "event_too_large", INVALID)
    UNKNOWN_PARAMETER = ("unknown_parameter", "bad_event", INVALID)
    MISSING_PARAMETER = ("missing_required_parameter", "bad_event", INVALID)
    INVALID_VALUE = ("invalid_value", "bad_event", INVALID)
    INVALID_SESSION = ("invalid_value", "invalid_session_config", INVALID)
    INVALID_AUDIO = ("invalid_audio", "bad_audio", INVALID)
    UNSUPPORTED_FORMAT = ("invalid_value", "unsupported_audio_format", INVALID)
    UNSUPPORTED_TURN_DETECTION = ("invalid_value", "unsupported_turn_detection", INVALID)
    UNSUPPORTED_MODALITY = ("invalid_value", "invalid_input_modality", INVALID)
    INVALID_IMAGE = ("invalid_value", "invalid_image", INVALID)
    INVALID_VIDEO_FRAMES = ("invalid_value", "invalid_video_frames", INVALID)
    MODEL_IS_FIXED = ("cannot_update_model", "model_update_unsupported", INVALID)
    VOICE_IS_FIXED = ("cannot_update_voice", "voice_update_after_audio_unsupported", INVALID)
    REF_AUDIO_IS_FIXED = ("invalid_value", "ref_audio_update_unsupported", INVALID)
    BUFFER_EMPTY = ("input_audio_buffer_commit_empty", "input_audio_buffer_empty", INVALID)
    ITEM_NOT_FOUND = ("item_not_found", "item_not_found", INVALID)
    ITEM_EXISTS = ("item_already_exists", "bad_event", INVALID)
    MISSING_ITEM_ID = ("missing_required_parameter", "missing_item_id", INVALID)
    INVALID_CALL_ID = ("invalid_tool_call_id", "invalid_function_call_output", INVALID)
    RESPONSE_ACTIVE = ("conversation_already_has_active_response", "response_already_active", INVALID)
    RESPONSE_NOT_ACTIVE = ("response_cancel_not_active", "response_not_active", INVALID)
    NO_INPUT = ("response_create_without_input", "response_create_without_input", INVALID)
    TEXT_TURN_UNSUPPORTED = ("text_only_turn_unsupported", "text_only_turn_unsupported", INVALID)
    COMMIT_ABORTED = ("commit_aborted", "commit_aborted", SERVER)
    NOT_IN_TRANSCRIPTION = ("invalid_event", "unsupported", INVALID)
    BARGE_IN_UNSUPPORTED = ("barge_in_unsupported", "barge_in_unsupported", INVALID)
    TOO_MANY_RESPONSES = ("rate_limit_exceeded", "resource_exhausted", LIMIT)
    INPUT_BACKPRESSURE = ("rate_limit_exceeded", "input_backpressure", LIMIT)
    PLAYBACK_ITEM_MISMATCH = ("playback_item_mismatch", "playback_item_mismatch", INVALID)
    PLAYBACK_ITEM_NOT_FOUND = ("playback_item_not_found", "playback_item_not_found", INVALID)
    PLAYBACK_TOO_LATE = ("playback_ack_too_late", "playback_ack_too_late", INVALID)
    INVALID_ACK = ("invalid_event_ack", "invalid_event_ack", INVALID)
    INVALID_RESUME = ("invalid_session_resume", "invalid_session_resume", INVALID)
    RESUME_EXPIRED = ("session_resume_expired", "session_resume_expired", INVALID)
    RESUME_UNSUPPORTED = ("unsupported_session_resume", "unsupported_session_resume", INVALID)
    INVALID_TOKEN = ("invalid_resume_token", "invalid_resume_token", INVALID)
    RESUME_CONFLICT = ("session_resume_conflict", "session_resume_conflict", INVALID)
    SESSION_EXISTS = ("session_exists", "session_exists", INVALID)
    SESSION_CLOSED = ("session_closed", "session_closed", INVALID)
    SESSION_EXPIRED = ("session_expired", "session_closed", INVALID)
    MODEL_NOT_FOUND = ("model_not_found", "model_not_found", INVALID)
    MODEL_NOT_VALIDATED = ("model_not_validated", "model_not_validated", INVALID)
    CONFIG_TIMEOUT = ("config_timeout", "config_timeout", INVALID)
    STOPPING = ("server_stopping", "server_stopping", SERVER)
    UNSUPPORTED = ("unsupported", "unsupported", INVALID)
    VAD_UNAVAILABLE = ("server_error", "server_vad_unavailable", SERVER)
    ENGINE_FAILED = ("server_error", "engine_error", SERVER)

    @property
    def code(self) -> str:
        """As OpenAI spells it."""
        return self.value[0]

    @property
    def vendor_code(self) -> str:
        """As the duplex dialect spells it."""
        return self.value[1]

    @property
    def type(self) -> ErrorType:
        """Whose fault it is."""
        return self.value[2]


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What an ``error`` event says."""

    type: ErrorType
    code: str
    vendor_code: str
    message: str
    param: str | None = None
    event_id: str | None = None
    """The client event that it answers."""
    retryable: bool | None = None


class SessionError(Exception):
    """A client event can't be honoured: nothing changed, and the session goes on."""

    def __init__(self, code: Code, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def detail(self, event_id: str | None) -> ErrorDetail:
        """Return what the client is told."""
        return ErrorDetail(
            type=self.code.type,
            code=self.code.code,
            vendor_code=self.code.vendor_code,
            message=self.message,
            param=self.param,
            event_id=event_id,
        )
