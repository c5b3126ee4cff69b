"""What clients of the duplex dialect send, read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from gateways.fields import shown
from gateways.realtime_ga import GaDialect
from gateways.realtime_reading import base64_bytes, read_as, sound, table, type_of, unknown_event
from gateways.realtime_session import format_of, session_patch
from omni_bus.core.session import client_events as asked
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import Duplex, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.realtime_reading import Events

RATE_HZ = 16_000
GA_RATE_HZ = 24_000
"""Of sound that comes, unless the session says otherwise; the second where it has OpenAI's GA shape."""

ALIASES = {
    "close": "session.close",
    "close_session": "session.close",
    "input.commit": "input_audio_buffer.commit",
    "input_text.append": "input.text.append",
    "push_text": "input.text.append",
    "signal_turn": "turn.signal",
    "audio.playback_ack": "playback.ack",
}

CONFIG = frozenset(SessionConfig.__struct_fields__) - {"duplex"}
DUPLEX = frozenset(Duplex.__struct_fields__)

VENDOR = (DUPLEX - {"auto_response"}) | {
    "extra_body",
    "idle_timeout_s",
    "initial_user_text",
    "input_audio_format",
    "modalities",
    "output_audio_format",
    "playback_commit_policy",
    "ref_audio",
    "sample_rate",
    "sample_rate_hz",
    "turn_detection",
}
"""Fields of session objects that are none of OpenAI's GA dialect."""

TURN_DETECTION = frozenset(
    {
        "type",
        "threshold",
        "prefix_padding_ms",
        "silence_duration_ms",
        "create_response",
        "interrupt_response",
        "min_speech_duration_ms",
    }
)

FORMATS = ("pcm16", "pcm_s16le", "s16le", "pcm", "pcm_f32le", "g711_ulaw", "g711_alaw")

SIGNALS = ("user_started", "user_committed", "assistant_started", "assistant_done", "playback_ack", "timeout")

ROUTED = ("input.cancel", "barge_in", "response.cancel", "session.update")
"""Signals that are commands; so is all that begins with ``conversation.item.``."""

MAX_FRAMES = 2
MAX_FRAME_CHARACTERS = 4_000_000
PICTURES = (b"\xff\xd8", b"\x89PNG")
SPEECH_PROBABILITY = 0.5


class DuplexReader:
    """Remembers what of a session's configuration later frames depend on."""

    def __init__(self, is_same_model: Callable[[str], bool]) -> None:
        self._ga = GaDialect(is_same_model)
        self._has_rate = False
        """The rate of sound was said, or is settled by the session's shape."""
        self._is_ga = False
        """The client speaks OpenAI's GA dialect, as far as that goes."""
        self._policy: str | None = None
        self._answers_commits = False
        """The model answers without being asked, which for models that take turns is at each commit."""
        self._readers: dict[str, Callable[[Mapping[str, Any]], Events]] = {
            "session.update": self._update,
            "session.event_ack": lambda fields: [read_as(fields, asked.EventAck, "server_event_seq")],
            "session.heartbeat": lambda fields: [read_as(fields, asked.Heartbeat)],
            "session.close": lambda fields: [read_as(fields, asked.SessionClose, "reason")],
            "session.resume": self._late_resume,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input.cancel": lambda fields: [read_as(fields, asked.InputCancel)],
            "input.text.append": self._text,
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
        self._has_rate = self._is_ga = True  # whatever it is, it is settled
        try:
            return read_as(fields, asked.SessionResume, *names)
        except SessionError as error:
            raise SessionError(Code.INVALID_RESUME, error.message, param=error.param) from None

    # --- the session ------------------------------------------------------------------------------------------

    def settle(self, config: SessionConfig) -> None:
        """Take notice of what counts, which another connection may have said."""
        if config.duplex is not None:
            self._policy = config.duplex.overlap_policy
            self._answers_commits = config.duplex.auto_response

    def opening_patch(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return what a new session is configured with.

        Raises:
            SessionError: a field has a value that is not allowed.
        """
        patch = self._patch(self._completed(session))
        given = patch.setdefault("audio", {}).setdefault("input", {})
        if not self._is_ga:
            patch.setdefault("output_modalities", ["text", "audio"])
            given.setdefault("turn_detection", None)
            given.setdefault("format", {"type": "audio/pcm", "rate": RATE_HZ})
        return patch

    def _update(self, fields: Mapping[str, Any]) -> Events:
        return [read_as(fields, asked.SessionUpdate, session=self._patch(self._completed(session_of(fields))))]

    def _completed(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return a session object with what OpenAI's clients take for granted, once, if it is of one of them.

        Such a client may say late who it is: its session is opened before its first event.
        """
        if self._is_ga or session.get("type") != "realtime" or not VENDOR.isdisjoint(session):
            return session
        self._is_ga = True
        audio = table(session, "audio", at="session.")
        given = dict(table(audio, "input", at="session.audio."))
        given.setdefault("turn_detection", {"type": "server_vad"})
        if not self._has_rate:
            given.setdefault("format", {"type": "audio/pcm", "rate": GA_RATE_HZ})
        return {**session, "audio": {**audio, "input": given}}

    def _patch(self, session: dict[str, Any]) -> dict[str, Any]:
        extra = table(session, "extra_body", at="session.")
        fields = {**session, **{name: extra[name] for name in (*DUPLEX, "playback_commit_policy") if name in extra}}
        if fields.get("ref_audio") is not None:
            raise SessionError(
                Code.UNSUPPORTED, "session.ref_audio: no voice here takes one", param="session.ref_audio"
            )
        patch = {name: value for name, value in session_patch(fields).items() if name in CONFIG}
        if self._is_same(patch):
            del patch["model"]
        patch["duplex"] = {name: fields[name] for name in DUPLEX if fields.get(name) is not None}
        self._answers_commits = patch["duplex"].get("auto_response", self._answers_commits) is True
        self._set_rates(patch, session)
        self._check_turns(patch, session)
        return patch

    def _is_same(self, patch: dict[str, Any]) -> bool:
        model = patch.get("model")
        return isinstance(model, str) and self._ga.is_same_model(model)

    def _set_rates(self, patch: dict[str, Any], session: dict[str, Any]) -> None:
        audio = cast("dict[str, Any]", patch.get("audio", {}))
        for side in ("input", "output"):
            fields = cast("dict[str, Any]", audio.get(side, {}))
            rate = fields.pop("sample_rate_hz", None)
            if side == "input":
                rate = _first(session, "sample_rate_hz", "sample_rate") if rate is None else rate
                self._has_rate |= rate is not None or (fields.get("format") or {}).get("rate") is not None
            if rate is not None:
                former = fields.get("format") or {"type": "audio/pcm"}
                fields["format"] = format_of(former, f"session.audio.{side}.format", rate)
            if fields:
                audio[side] = fields
        if audio:
            patch["audio"] = audio

    def _check_turns(self, patch: dict[str, Any], session: dict[str, Any]) -> None:
        """Check turn detection as vLLM-Omni does; what is spoken over an answer follows from it."""
        given = cast("dict[str, Any]", patch.get("audio", {}).get("input", {}))
        policy = patch["duplex"].get("overlap_policy")
        if "turn_detection" not in given:
            if policy == "barge_in_on_speech" and self._policy != policy:
                raise _turns("overlap_policy: 'barge_in_on_speech' came (allowed with turn_detection)")
            return
        detection = given["turn_detection"]
        wanted = "listen_only" if detection is None else "barge_in_on_speech"
        if policy is not None and policy != wanted:
            raise _turns(f"overlap_policy: {shown(policy)} came (allowed with this turn_detection: '{wanted}')")
        patch["duplex"]["overlap_policy"] = wanted
        if isinstance(detection, dict):
            given["turn_detection"] = _detection(cast("dict[str, Any]", detection))

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
        values["video_frames"] = _pictures(fields.get("video_frames"))
        return [read_as(fields, asked.AudioAppend, "force_barge_in", "force_listen", **values)]

    def _commit(self, fields: Mapping[str, Any]) -> Events:
        wanted = _first(fields, "response_create", "create_response")
        if wanted is None:
            wanted = self._answers_commits or fields.get("type") == "input.commit"
        return [read_as(fields, asked.AudioCommit, "is_speech", create_response=wanted)]

    def _text(self, fields: Mapping[str, Any]) -> Events:
        text = fields.get("text")
        if not isinstance(text, str):
            raise SessionError(Code.INVALID_VALUE, f"text: {shown(text)} came (allowed: a string)", param="text")
        part = {"type": "input_text", "text": text}
        return [read_as(fields, asked.ItemCreate, item={"type": "message", "role": "user", "content": [part]})]

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


def _turns(message: str) -> SessionError:
    return SessionError(Code.UNSUPPORTED_TURN_DETECTION, message, param="turn_detection")


def _detection(detection: dict[str, Any]) -> dict[str, Any]:
    """Return a detector's configuration; a semantic one becomes the one that there is."""
    fields = {name: value for name, value in detection.items() if value is not None}
    if fields.get("type") == "semantic_vad":
        fields = {name: fields[name] for name in ("create_response", "interrupt_response") if name in fields}
    fields["type"] = detection.get("type", "server_vad") if detection.get("type") != "semantic_vad" else "server_vad"
    for name, value in fields.items():
        if name not in TURN_DETECTION:
            raise _turns(f"turn_detection.{name}: no such field (allowed: {', '.join(sorted(TURN_DETECTION))})")
        if name == "type" and value != "server_vad":
            raise _turns(f"turn_detection.type: {shown(value)} came (allowed: 'server_vad')")
    threshold = fields.get("threshold", SPEECH_PROBABILITY)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.15 < threshold <= 1:
        raise _turns(f"turn_detection.threshold: {shown(threshold)} came (allowed: above 0.15, to 1)")
    if fields.get("interrupt_response") is False:
        raise _turns("turn_detection.interrupt_response: false came (allowed: true)")
    return fields


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


def _pictures(frames: Any) -> list[bytes]:
    """Return the pictures of an append, JPEG or PNG.

    Raises:
        SessionError: they are too many or too large, or no pictures.
    """
    if frames is None:
        return []
    if not isinstance(frames, list) or len(cast("list[Any]", frames)) > MAX_FRAMES:
        message = f"video_frames: {shown(frames)} came (allowed: up to {MAX_FRAMES} pictures)"
        raise SessionError(Code.UNSUPPORTED_MODALITY, message, param="video_frames")
    return [_picture(frame, f"video_frames[{index}]") for index, frame in enumerate(cast("list[Any]", frames))]


def _picture(frame: Any, param: str) -> bytes:
    if isinstance(frame, str) and len(frame) <= MAX_FRAME_CHARACTERS:
        data = base64_bytes(frame.partition(",")[2] if frame.startswith("data:") else frame, param)
        if data.startswith(PICTURES):
            return data
    message = f"{param}: {shown(frame)} came (allowed: JPEG or PNG in base64, {MAX_FRAME_CHARACTERS} characters)"
    raise SessionError(Code.UNSUPPORTED_MODALITY, message, param=param)
