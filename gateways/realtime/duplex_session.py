"""Session objects of duplex clients, read: all spellings of OpenAI's, and what vLLM-Omni's clients add to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from gateways.fields import shown
from gateways.realtime.reading import table
from gateways.realtime.session import FLAT, READ_ONLY, format_of, session_patch
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import Duplex, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RATE_HZ = 16_000
GA_RATE_HZ = 24_000
"""Of sound that comes, unless the session says otherwise; the second where it has OpenAI's GA shape."""

POLICY = frozenset(
    {"overlap_policy", "overlap_short_ack_ms", "overlap_barge_in_ms", "overlap_silence_rms", "auto_response"}
)
"""Fields that stand in the session or in its `extra_body`."""

VENDOR = (POLICY - {"auto_response"}) | {
    "extra_body",
    "idle_timeout_s",
    "initial_user_text",
    "input_audio_format",
    "modalities",
    "output_audio_format",
    "playback_commit_policy",
    "ref_audio",
    "response_format",
    "sample_rate",
    "sample_rate_hz",
    "turn_detection",
}
"""Fields of session objects that are none of OpenAI's GA dialect."""

SHOWN = frozenset(
    {
        *READ_ONLY,
        "session_id",
        "state",
        "turn_state",
        "epoch",
        "turn_id",
        "active_request_id",
        "active_response_id",
        "active_response_turn_id",
        "playback",
        "capabilities",
    }
)
"""Fields that clients are shown, and that say nothing where they send them back."""

READ = VENDOR | POLICY | SHOWN | FLAT | frozenset(SessionConfig.__struct_fields__)

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

AUDIO_NAMES = ("ga", "both")
"""Values of `extra_body.audio_event_names`: OpenAI's GA names of events with sound, or the beta ones as well."""

MAX_EXTRAS_BYTES = 16 * 1024
"""Of a client's own keys, as JSON: each session event has them."""


class DuplexSession:
    """Remembers what of a session's configuration later frames depend on.

    Args:
        is_same_model: whether a client's name for a model is the one that it talks to.
    """

    def __init__(self, is_same_model: Callable[[str], bool]) -> None:
        self._is_same_model = is_same_model
        self._has_rate = False
        """The rate of sound was said, or is settled by the session's shape."""
        self._is_ga = False
        """The client speaks OpenAI's GA dialect, as far as that goes."""
        self._policy: str | None = None
        self.answers_commits = False
        """The model answers without being asked, which for models that take turns is at each commit."""
        self.initial_text: str | None = None
        """What the user is to have said before anything else."""
        self.config = Duplex()

    def resume(self) -> None:
        """Take what another connection said for settled."""
        self._has_rate = self._is_ga = True

    def settle(self, config: SessionConfig) -> None:
        """Take notice of what counts, which another connection may have said."""
        if config.duplex is not None:
            self.config = config.duplex
            self._policy = config.duplex.overlap_policy
            self.answers_commits = config.duplex.auto_response

    def opening_patch(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return what a new session is configured with, as a patch in the shape of `SessionConfig`.

        Raises:
            SessionError: a field has a value that is not allowed.
        """
        if session.get("ref_audio") is not None:
            message = "session.ref_audio: no voice here takes one"
            raise SessionError(Code.UNSUPPORTED, message, param="session.ref_audio")
        self.initial_text = _initial_text(session)
        patch = self._patch(self._completed(session))
        given = patch.setdefault("audio", {}).setdefault("input", {})
        if not self._is_ga:
            patch.setdefault("output_modalities", ["text", "audio"])
            given.setdefault("turn_detection", None)
            given.setdefault("format", {"type": "audio/pcm", "rate": RATE_HZ})
        return patch

    def update_patch(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return what changes of a session.

        Raises:
            SessionError: a field has a value that is not allowed, or can't change any more.
        """
        if session.get("ref_audio") is not None:
            message = "session.ref_audio: it can't change"
            raise SessionError(Code.REF_AUDIO_IS_FIXED, message, param="session.ref_audio")
        text = _initial_text(session)
        if text is not None and text != self.initial_text:
            message = "session.initial_user_text: the session has begun (allowed: where it opens)"
            raise SessionError(Code.INVALID_VALUE, message, param="session.initial_user_text")
        return self._patch(self._completed(session))

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
        extra = _extra_body(session)
        fields = {**session, **{name: extra[name] for name in (*POLICY, "playback_commit_policy") if name in extra}}
        duplex = {name: fields[name] for name in (*POLICY, "idle_timeout_s") if fields.get(name) is not None}
        output = _first(session, "output_audio_format", "response_format")
        if output is not None:
            duplex["has_wav_headers"] = isinstance(output, str) and output.lower() == "wav"
            fields["output_audio_format"] = "pcm16" if duplex["has_wav_headers"] else output
        patch = session_patch({name: value for name, value in fields.items() if name in READ})
        patch = {name: value for name, value in patch.items() if name in SessionConfig.__struct_fields__}
        patch.pop("duplex", None)
        model = patch.get("model")
        if isinstance(model, str) and self._is_same_model(model):
            del patch["model"]
        patch["duplex"] = duplex | _extras(session, extra)
        self.answers_commits = duplex.get("auto_response", self.answers_commits) is True
        self._set_rates(patch, session)
        self._check_turns(patch)
        return patch

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

    def _check_turns(self, patch: dict[str, Any]) -> None:
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


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _initial_text(session: dict[str, Any]) -> str | None:
    extra = table(session, "extra_body", at="session.")
    text = _first({**extra, **session}, "initial_user_text", "duplex_initial_user_text")
    if text is None or isinstance(text, str):
        return text or None
    message = f"session.initial_user_text: {shown(text)} came (allowed: a string)"
    raise SessionError(Code.INVALID_VALUE, message, param="session.initial_user_text")


def _extra_body(session: dict[str, Any]) -> dict[str, Any]:
    """Return a session's `extra_body`; its private keys are for servers among themselves.

    Raises:
        SessionError: it has such a key, or a value that is not allowed.
    """
    extra = table(session, "extra_body", at="session.")
    for name in extra:
        if name.startswith("_"):
            param = f"session.extra_body.{name}"
            raise SessionError(Code.UNKNOWN_PARAMETER, f"{param}: it is private", param=param)
    names = extra.get("audio_event_names")
    if names is not None and names not in AUDIO_NAMES:
        param = "session.extra_body.audio_event_names"
        message = f"{param}: {shown(names)} came (allowed: {', '.join(AUDIO_NAMES)})"
        raise SessionError(Code.INVALID_VALUE, message, param=param)
    return extra


def _extras(session: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return what is only shown again, where there is any.

    Raises:
        SessionError: it is too much.
    """
    read = (*POLICY, "playback_commit_policy")
    found = {
        "extra_body": {name: value for name, value in extra.items() if name not in read},
        "extras": {name: value for name, value in session.items() if name not in READ or name == "initial_user_text"},
    }
    num_bytes = len(msgspec.json.encode(found))
    if num_bytes > MAX_EXTRAS_BYTES:
        message = f"session: {num_bytes} bytes of keys came that nobody here knows (allowed: {MAX_EXTRAS_BYTES})"
        raise SessionError(Code.EVENT_TOO_LARGE, message, param="session")
    return {name: fields for name, fields in found.items() if fields}


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
    threshold = fields.get("threshold", 0.5)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.15 < threshold <= 1:
        raise _turns(f"turn_detection.threshold: {shown(threshold)} came (allowed: above 0.15, to 1)")
    if fields.get("interrupt_response") is False:
        raise _turns("turn_detection.interrupt_response: false came (allowed: true)")
    return fields
