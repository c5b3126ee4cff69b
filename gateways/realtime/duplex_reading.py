"""What clients of the duplex dialect send, read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from gateways.fields import shown
from gateways.realtime.duplex_session import DuplexSession
from gateways.realtime.ga import GaDialect
from gateways.realtime.reading import base64_bytes, read_as, sound, table, type_of, unknown_event
from gateways.realtime.session import format_of
from omni_bus.core.session import client_events as asked
from omni_bus.core.session.codes import Code, SessionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.realtime.reading import Events

NATIVE_OPENINGS = ("session.create", "open_session", "session.config")
"""First events of clients that speak the native lifecycle."""

ALIASES = {
    **dict.fromkeys(NATIVE_OPENINGS, "session.create"),
    "close": "session.close",
    "close_session": "session.close",
    "input.commit": "input_audio_buffer.commit",
    "input_text.append": "input.text.append",
    "push_text": "input.text.append",
    "signal_turn": "turn.signal",
    "audio.playback_ack": "playback.ack",
}

SIGNALS = ("user_started", "user_committed", "assistant_started", "assistant_done", "playback_ack", "timeout")

ROUTED = ("input.cancel", "barge_in", "response.cancel", "session.update")
"""Signals that are commands; so is all that begins with ``conversation.item.``."""

MAX_FRAMES = 2
MAX_FRAME_CHARACTERS = 4_000_000
PICTURES = (b"\xff\xd8", b"\x89PNG")
SPEECH_PROBABILITY = 0.5


class DuplexReader:
    """Turns frames into events.

    Args:
        is_same_model: whether a client's name for a model is the one that it talks to.
    """

    def __init__(self, is_same_model: Callable[[str], bool]) -> None:
        self._ga = GaDialect(is_same_model)
        self.session = DuplexSession(is_same_model)
        self._readers: dict[str, Callable[[Mapping[str, Any]], Events]] = {
            "session.update": self._update,
            "session.event_ack": self._event_ack,
            "session.heartbeat": lambda fields: [read_as(fields, asked.Heartbeat)],
            "session.close": lambda fields: [read_as(fields, asked.SessionClose, "reason")],
            "session.resume": self._late_resume,
            "session.create": self._late_open,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input.cancel": lambda fields: [read_as(fields, asked.InputCancel)],
            "input.text.append": self._text,
            "response.create": self._response_create,
            "barge_in": lambda fields: [read_as(fields, asked.BargeIn)],
            "turn.signal": self._signal,
            "playback.ack": self._playback,
        }

    def read(self, fields: Mapping[str, Any]) -> Events:
        """Return what a client says with one frame.

        Raises:
            SessionError: the frame can't be understood.
        """
        name = type_of(fields)
        reader = self._readers.get(ALIASES.get(name, name))
        if reader is not None:
            return reader(fields)
        if name not in self._ga.known:
            raise unknown_event(name, {*self._readers, *self._ga.known})
        return self._ga.read(fields)

    def resume(self, fields: Mapping[str, Any], names: tuple[str, ...]) -> asked.SessionResume:
        """Return a resume that is a connection's first frame.

        Raises:
            SessionError: it has not the shape of one.
        """
        self.session.resume()
        try:
            return read_as(fields, asked.SessionResume, *names)
        except SessionError as error:
            raise SessionError(Code.INVALID_RESUME, error.message, param=error.param) from None

    # --- the session ------------------------------------------------------------------------------------------

    def _update(self, fields: Mapping[str, Any]) -> Events:
        return [read_as(fields, asked.SessionUpdate, session=self.session.update_patch(session_of(fields)))]

    def _event_ack(self, fields: Mapping[str, Any]) -> Events:
        try:
            return [read_as(fields, asked.EventAck, "server_event_seq")]
        except SessionError as error:
            raise SessionError(Code.INVALID_ACK, error.message, param=error.param) from None

    def _late_open(self, fields: Mapping[str, Any]) -> Events:
        message = f"{fields['type']}: this connection has its session (allowed: as its first event)"
        raise SessionError(Code.SESSION_EXISTS, message)

    def _late_resume(self, fields: Mapping[str, Any]) -> Events:
        raise SessionError(Code.RESUME_UNSUPPORTED, "session.resume: allowed as the first event of a connection only")

    # --- the input --------------------------------------------------------------------------------------------

    def _append(self, fields: Mapping[str, Any]) -> Events:
        values: dict[str, Any] = {"audio": sound(fields, "audio", "delta")}
        rate = _first(fields, "sample_rate_hz", "sample_rate")
        name = _first(fields, "format", "input_audio_format")
        if rate is not None or name is not None:
            form = format_of("pcm16" if name is None else name, "format", rate)
            if form != {"type": "audio/pcm"}:  # then the session's rate counts
                values["format"] = form
        hints = {
            "is_speech": _speech(fields),
            "transcript": _first(fields, "transcript", "text"),
            "overlap_action": _first(fields, "overlap_action", "overlap"),
        }
        values |= {name: hint for name, hint in hints.items() if hint is not None}
        values["video_frames"] = _pictures(fields)
        return [read_as(fields, asked.AudioAppend, "force_barge_in", "force_listen", **values)]

    def _commit(self, fields: Mapping[str, Any]) -> Events:
        wanted = _first(fields, "response_create", "create_response")
        is_final = True if fields.get("final") is None else fields["final"]
        if not isinstance(is_final, bool):
            message = f"final: {shown(is_final)} came (allowed: true or false)"
            raise SessionError(Code.INVALID_VALUE, message, param="final")
        if wanted is None:
            wanted = is_final and (self.session.answers_commits or fields.get("type") == "input.commit")
        return [read_as(fields, asked.AudioCommit, "is_speech", create_response=wanted)]

    def _text(self, fields: Mapping[str, Any]) -> Events:
        text = fields.get("text")
        if not isinstance(text, str):
            raise SessionError(Code.INVALID_VALUE, f"text: {shown(text)} came (allowed: a string)", param="text")
        part = {"type": "input_text", "text": text}
        return [read_as(fields, asked.ItemCreate, item={"type": "message", "role": "user", "content": [part]})]

    def _response_create(self, fields: Mapping[str, Any]) -> Events:
        options = dict(table(fields, "response"))
        table(options, "extra_body", at="response.")  # for models that answer by themselves; ours ask nothing of it
        options.pop("extra_body", None)
        return self._ga.read({**fields, "response": options})

    def _playback(self, fields: Mapping[str, Any]) -> Events:
        names = ("played_ms", "committed_ms", "response_id", "item_id", "truncate")
        return [read_as(fields, asked.PlaybackAck, *names)]

    def _signal(self, fields: Mapping[str, Any]) -> Events:
        event = fields.get("event")
        payload = table(fields, "payload")
        if event == "close":
            return [read_as({**fields, **payload}, asked.SessionClose, "reason")]
        if isinstance(event, str) and (event in ROUTED or event.startswith("conversation.item.")):
            return self.read({**payload, "type": event, "event_id": fields.get("event_id")})
        if event not in SIGNALS:
            allowed = ", ".join((*SIGNALS, *ROUTED, "conversation.item.*", "close"))
            raise SessionError(Code.INVALID_VALUE, f"event: {shown(event)} came (allowed: {allowed})", param="event")
        return [read_as(fields, asked.TurnSignal, "event")]


def session_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's session object: the field, or all of the event but what every event has.

    Raises:
        SessionError: the field is no object.
    """
    if "session" in fields:
        return table(fields, "session")
    return {name: value for name, value in fields.items() if name not in ("type", "event_id")}


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _speech(fields: Mapping[str, Any]) -> bool | None:
    """Return the client's own verdict; None where it gives none."""
    vad = table(fields, "vad")
    verdict = _first(fields, "is_speech", "speech")
    verdict = vad.get("is_speech") if verdict is None else verdict
    if verdict is not None:
        if not isinstance(verdict, bool):
            message = f"is_speech: {shown(verdict)} came (allowed: true or false)"
            raise SessionError(Code.INVALID_VALUE, message, param="is_speech")
        return verdict
    score = _first(vad, "speech_probability", "probability")
    score = fields.get("speech_probability") if score is None else score
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float):
        message = f"speech_probability: {shown(score)} came (allowed: a number from 0 to 1)"
        raise SessionError(Code.INVALID_VALUE, message, param="speech_probability")
    return score >= SPEECH_PROBABILITY


def _pictures(fields: Mapping[str, Any]) -> list[bytes]:
    """Return the pictures of an append, JPEG or PNG.

    Raises:
        SessionError: they are too many or too large, or no pictures.
    """
    frames, slices = fields.get("video_frames"), fields.get("max_slice_nums")
    if slices is not None and (slices != 1 or isinstance(slices, bool)):
        message = f"max_slice_nums: {shown(slices)} came (allowed: 1)"
        raise SessionError(Code.INVALID_VIDEO_FRAMES, message, param="max_slice_nums")
    if frames is None:
        return []
    if not isinstance(frames, list) or len(cast("list[Any]", frames)) > MAX_FRAMES:
        message = f"video_frames: {shown(frames)} came (allowed: up to {MAX_FRAMES} pictures)"
        raise SessionError(Code.INVALID_VIDEO_FRAMES, message, param="video_frames")
    return [_picture(frame, f"video_frames[{index}]") for index, frame in enumerate(cast("list[Any]", frames))]


def _picture(frame: Any, param: str) -> bytes:
    if isinstance(frame, str) and len(frame) <= MAX_FRAME_CHARACTERS:
        data = frame.partition(",")[2] if frame.startswith("data:") else frame
        with contextlib.suppress(SessionError):
            if (picture := base64_bytes(data, param)).startswith(PICTURES):
                return picture
    message = f"{param}: {shown(frame)} came (allowed: JPEG or PNG in base64, {MAX_FRAME_CHARACTERS} characters)"
    raise SessionError(Code.INVALID_VIDEO_FRAMES, message, param=param)
