"""vLLM's turn dialect of live conversations: one stream of sound in, one answer out, flat events.

A turn is appended between ``commit`` and ``commit`` with ``final``; the answer's text comes as ``transcription.delta``,
whatever the name says, and its sound under the name that older clients know, the one that newer ones know, or both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gateways.fields import shown
from gateways.realtime.ga import fields_of, ga_session
from gateways.realtime.reading import event_id_of, read_as, sound, type_of, unknown_event
from gateways.realtime.session import beta_format
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import Code, SessionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.realtime.reading import Events

TurnAudioEvents: TypeAlias = Literal["both", "seed", "ga"]
"""Names of events with sound: ``response.audio.*`` (seed), ``response.output_audio.*`` (ga)."""

RATE_HZ = 16_000
"""Of sound that comes, unless the client says otherwise."""

NAMES: dict[str, tuple[str, ...]] = {
    "seed": ("response.audio",),
    "ga": ("response.output_audio",),
    "both": ("response.audio", "response.output_audio"),
}

KNOWN = ("session.update", "input_audio_buffer.append", "input_audio_buffer.commit", "response.cancel")

CODES = {
    Code.INVALID_JSON: "invalid_json",
    Code.UNKNOWN_EVENT: "unknown_event",
    Code.INVALID_AUDIO: "invalid_audio",
    Code.BUFFER_EMPTY: "invalid_audio",
    Code.UNSUPPORTED_FORMAT: "invalid_audio",
    Code.INPUT_BACKPRESSURE: "invalid_audio",
    Code.EVENT_TOO_LARGE: "invalid_audio",
}
"""This dialect's words where they are not OpenAI's; by OpenAI's code."""

_CODES = {code.code: name for code, name in CODES.items() if code is not Code.UNSUPPORTED_FORMAT}

_TURN = "turn:"
"""Begins our own names of commits, by which errors tell that no answer follows."""


def is_turn(fields: Mapping[str, Any]) -> bool:
    """Whether a connection's first frame is of this dialect."""
    match fields.get("type"):
        case "session.update":
            return "session" not in fields and "model" in fields
        case "input_audio_buffer.commit":
            return "final" in fields
        case _:
            return False


class TurnDialect:
    """Client frames to events, events to frames, and where the turn is.

    Args:
        find_model: raises `SessionError` unless a client's name for a model is the one that it talks to.
        audio_events: under which names sound goes out.
    """

    is_beta = False

    def __init__(self, find_model: Callable[[str], None], audio_events: TurnAudioEvents) -> None:
        self._find_model = find_model
        self._names = NAMES[audio_events]
        self._is_validated = False
        self._has_rate = False
        self._num_turns = 0
        self._is_answering = False
        """An answer was asked for, and its end was not told."""
        self._text: list[str] = []
        self._has_audio = False

    # --- from the client --------------------------------------------------------------------------------------

    def read(self, fields: Mapping[str, Any]) -> Events:
        """Return what a client says with one frame.

        Raises:
            SessionError: the frame can't be understood, or comes too early.
        """
        match type_of(fields):
            case "session.update":
                return self._update(fields)
            case "input_audio_buffer.append":
                return self._append(fields)
            case "input_audio_buffer.commit":
                return self._commit(fields)
            case "response.cancel":
                return [read_as(fields, asked.ResponseCancel)]
            case name:
                raise unknown_event(name, KNOWN)

    def _update(self, fields: Mapping[str, Any]) -> Events:
        model = fields.get("model")
        if not isinstance(model, str):
            raise SessionError(Code.INVALID_EVENT, f"model: {shown(model)} came (allowed: a string)", param="model")
        self._find_model(model)
        self._is_validated = True
        patch: dict[str, Any] = {"audio": {"input": {"turn_detection": None}}}
        rate = _rate(fields)
        if rate is not None or not self._has_rate:
            self._has_rate = True
            patch["audio"]["input"]["format"] = {"type": "audio/pcm", "rate": RATE_HZ if rate is None else rate}
        return [read_as(fields, asked.SessionUpdate, session=patch)]

    def _append(self, fields: Mapping[str, Any]) -> Events:
        audio = sound(fields, "audio")
        if not audio:
            raise SessionError(Code.INVALID_AUDIO, "audio: an empty string came (allowed: sound)", param="audio")
        rate = _rate(fields)
        values = {} if rate is None else {"format": {"type": "audio/pcm", "rate": rate}}
        return [read_as(fields, asked.AudioAppend, audio=audio, **values)]

    def _commit(self, fields: Mapping[str, Any]) -> Events:
        if not self._is_validated:
            message = "input_audio_buffer.commit: no model yet (allowed: after session.update with model)"
            raise SessionError(Code.MODEL_NOT_VALIDATED, message)
        is_final = fields.get("final", False)
        if not isinstance(is_final, bool):
            message = f"final: {shown(is_final)} came (allowed: true or false)"
            raise SessionError(Code.INVALID_EVENT, message, param="final")
        if not is_final:
            return []  # the turn begins with its first sound anyway
        self._num_turns += 1
        self._is_answering = True
        name = event_id_of(fields) or ""
        return [asked.AudioCommit(create_response=True, event_id=f"{_TURN}{self._num_turns}:{name}")]

    # --- to the client ----------------------------------------------------------------------------------------

    def frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        """Return what a client is told of one event."""
        frames = self._frames(event)
        for index, frame in enumerate(frames):
            frame["event_id"] = f"{event.event_id}_{index}" if index else event.event_id
        return frames

    def _frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        match event:
            case said.SessionCreated():
                view = event.session
                head = {"type": "session.created", "id": view.id}
                return [head | {"created": int(view.created_at), "session": ga_session(view)}]
            case said.TextDelta() | said.TranscriptDelta():
                self._text.append(event.delta)
                return [{"type": "transcription.delta", "delta": event.delta}]
            case said.AudioDelta():
                return self._sound(event)
            case said.ResponseDone():
                return self._done(event)
            case said.ErrorEvent():
                return self._error(event)
            case said.SessionExpired():
                message = f"the session is over: {event.reason}"
                return [_flat("session_expired", message, None)]
            case _:
                return []

    def _sound(self, event: said.AudioDelta) -> list[dict[str, Any]]:
        self._has_audio = True
        delta = fields_of(event)["delta"]
        common = {
            "audio": delta,
            "delta": delta,
            "format": beta_format(event.format),
            "sample_rate_hz": event.format.rate_hz,
        }
        return [{"type": f"{name}.delta"} | common for name in self._names]

    def _done(self, event: said.ResponseDone) -> list[dict[str, Any]]:
        frames: list[dict[str, Any]] = []
        response = event.response
        details = response.status_details
        if response.status == "failed":
            message = details.error.message if details is not None and details.error is not None else "no answer"
            frames.append(_flat("processing_error", message, None))
        used = response.usage or said.ResponseUsage()
        usage = {
            "prompt_tokens": used.input_tokens,
            "completion_tokens": used.output_tokens,
            "total_tokens": used.total_tokens,
        }
        text = "".join(self._text)
        frames.append({"type": "transcription.done", "text": text, "usage": usage})
        return frames + self._end()

    def _end(self) -> list[dict[str, Any]]:
        frames = [{"type": f"{name}.done", "has_audio": self._has_audio} for name in self._names]
        self._is_answering = self._has_audio = False
        self._text.clear()
        return frames

    def _error(self, event: said.ErrorEvent) -> list[dict[str, Any]]:
        error = event.error
        code, name = _CODES.get(error.code, error.code), error.event_id
        if error.type == "server_error":
            code = "processing_error"
        is_turn_lost = name is not None and name.startswith(_TURN)
        if name is not None and is_turn_lost:
            name = name.split(":", 2)[2] or None
        frames = [_flat(code, error.message, name)]
        return frames + self._end() if is_turn_lost and self._is_answering else frames


def _rate(fields: Mapping[str, Any]) -> Any:
    rate = fields.get("sample_rate_hz")
    return fields.get("sample_rate") if rate is None else rate


def _flat(code: str, message: str, client_event_id: str | None) -> dict[str, Any]:
    frame: dict[str, Any] = {"type": "error", "error": message, "code": code}
    return frame if client_event_id is None else frame | {"client_event_id": client_event_id}
