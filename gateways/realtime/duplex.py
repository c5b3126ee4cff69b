"""vLLM-Omni's duplex dialect: OpenAI's events with numbers, and more of them for who talks over whom.

Every event that a session keeps has its `server_event_seq` on one frame: on the last of those that tell of it, so that
a client which acknowledges a number, or resumes after it, has all of it.
"""

from __future__ import annotations

import secrets
from binascii import b2a_base64
from typing import TYPE_CHECKING, Any, cast

import msgspec

from gateways.realtime.beta import BETA_DELTAS
from gateways.realtime.capabilities import shown_capabilities
from gateways.realtime.duplex_reading import NATIVE_OPENINGS, DuplexReader, session_of
from gateways.realtime.ga import fields_of, ga_response
from gateways.realtime.reading import event_id_of, refusal, type_of
from gateways.realtime.session import beta_format, beta_session, ga_session
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import SessionError
from omni_bus.core.session.config import Duplex, Pcm
from omni_bus.core.session.items import InputText, Message
from omni_bus.media.encoder import wav_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.realtime.reading import Events
    from omni_bus.core.session.codes import ErrorDetail


class DuplexDialect:
    """Client frames to events, events to frames.

    Args:
        is_same_model: whether a client's name for a model is the one that it talks to.
        is_beta: sound goes out under the beta dialect's names.
        given: a session object; what the client says when it opens a session is laid over it.
    """

    def __init__(
        self, is_same_model: Callable[[str], bool], *, is_beta: bool, given: Mapping[str, Any] | None = None
    ) -> None:
        self._reader = DuplexReader(is_same_model)
        self._given = given or {}
        self._is_beta = is_beta
        self._session_id = ""
        self._epoch = 0
        self._heard: dict[str, Any] = {}
        """How much was played of the answer that was acknowledged last."""

    # --- from the client --------------------------------------------------------------------------------------

    @property
    def idle_timeout_s(self) -> float:
        """A client that says nothing for so long counts as gone."""
        return self._reader.session.config.idle_timeout_s

    def opening(self, session: dict[str, Any], model: str, event_id: str | None = None) -> Events:
        """Return what opens a session; the empty update is answered with the whole of it.

        Raises:
            SessionError: the session object is bad.
        """
        return [
            self._open(session, model, event_id, is_resumable=True),
            asked.SessionUpdate(session={}),
            *self._begun(),
        ]

    def _open(
        self, session: dict[str, Any], model: str, event_id: str | None, *, is_resumable: bool
    ) -> asked.SessionOpen:
        return asked.SessionOpen(
            session_id=f"duplex-{secrets.token_hex(16)}",
            session={**self._reader.session.opening_patch({**self._given, **session}), "model": model},
            is_resumable=is_resumable,
            event_id=event_id,
        )

    def _begun(self) -> Events:
        """Return what the user is to have said when a session opens."""
        text = self._reader.session.initial_text
        return [] if text is None else [asked.ItemCreate(item=Message(role="user", content=(InputText(text),)))]

    def first(self, fields: Mapping[str, Any], model: str) -> Events:
        """Return what the first frame of a connection comes to, where it opens or resumes a session.

        Raises:
            SessionError: it is none, or a bad one.
        """
        match type_of(fields):
            case "session.resume":
                names = ("session_id", "resume_token", "last_received_server_event_seq")
                return [self._reader.resume(fields, names)]
            case "session.update":
                return self.opening(session_of(fields), model, event_id_of(fields))
            case name if name in NATIVE_OPENINGS:
                return self.opening(session_of(fields), model, event_id_of(fields))
            case _:
                opening = self.opening({}, model)
                try:
                    return [*opening, *self.read(fields)]
                except SessionError as error:
                    return [*opening, refusal(error, event_id_of(fields))]

    def read(self, fields: Mapping[str, Any]) -> Events:
        """Return what a client says with one frame.

        Raises:
            SessionError: the frame can't be understood.
        """
        return self._reader.read(fields)

    # --- to the client ----------------------------------------------------------------------------------------

    def frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        """Return what a client is told of one event."""
        frames = self._frames(event)
        for index, frame in enumerate(frames):
            frame.pop("server_event_seq", None)
            frame["event_id"] = f"{event.event_id}_{index}" if index else event.event_id
        if event.server_event_seq is not None:
            numbered = frames[0] if isinstance(event, said.AudioDelta) else frames[-1]
            numbered["server_event_seq"] = event.server_event_seq
        return frames

    def _frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        frame = fields_of(event)
        match event:
            case said.SessionCreated() | said.SessionUpdated() | said.SessionResumed():
                self._session_id, self._epoch = event.session.id, event.session.epoch
                self._reader.session.settle(event.session.config)
                if frame.get("resume_token", "") is None:
                    del frame["resume_token"]
                return [frame | {"session": self._session(event.session)}]
            case said.ErrorEvent():
                return [frame | {"error": _error(event.error)}]
            case said.ItemAdded():
                return [frame | {"type": "conversation.item.created"}, frame]
            case said.ItemDeleted():
                return [frame | {"event": {"item_id": event.item_id, "deleted": True}}]
            case said.ItemTruncated():
                truncated = {"item_id": event.item_id, "truncated": True, "audio_end_ms": event.audio_end_ms}
                return [frame | {"event": truncated}]
            case said.InputCommitted():
                del frame["detail"]
                return [frame | {"event": committed(event)}]
            case said.SessionClosed() | said.SessionExpired():
                return [frame | {"event": {"session_id": event.session_id, "reason": event.reason}}]
            case _:
                return self._response_frames(event, frame)

    def _response_frames(self, event: said.AnyServerEvent, frame: dict[str, Any]) -> list[dict[str, Any]]:
        match event:
            case said.ResponseCreated() | said.ResponseDone():
                response = _response(event.response)
                return [frame | {"response_id": event.response.id, "response": response}]
            case said.AudioDelta():
                return self._sound(event, frame)
            case said.TranscriptDelta():
                return self._spelt(frame | {"metadata": {"session_id": self._session_id, "epoch": self._epoch}})
            case said.Speak():
                self._epoch = event.epoch
                place = {"response_id": event.response_id, "item_id": event.item_id, "output_index": 0}
                metadata = {"session_id": self._session_id, "epoch": event.epoch, "model_speak": True}
                return [{"type": "response.speak", **place, "content_index": 0, "metadata": metadata}]
            case said.Listen():
                self._epoch = event.epoch
                return [_listen(event, frame)]
            case said.OverlapDecision():
                self._epoch = event.epoch
                return [_overlap(event)]
            case said.PlaybackAcknowledged():
                self._heard = {event.response_id: (event.played_ms, event.committed_ms)}
                return [{"type": frame["type"], "event": acknowledged(event)}]
            case _:
                return self._spelt(frame)

    def _sound(self, event: said.AudioDelta, frame: dict[str, Any]) -> list[dict[str, Any]]:
        metadata = {"session_id": self._session_id, "epoch": self._epoch, **self._progress(event)}
        sound = {"delta": self._sample(event), "format": self._format(event), "sample_rate_hz": event.format.rate_hz}
        shape = {**sound, "metadata": metadata}
        # Clients of vLLM-Omni have a transcript delta after each of sound; the words come in events of their own.
        place = {name: frame[name] for name in ("response_id", "item_id", "output_index", "content_index")}
        pair = {"type": "response.output_audio_transcript.delta", **place, "delta": "", "metadata": metadata}
        return self._spelt(frame | shape, pair)

    def _spelt(self, *frames: dict[str, Any]) -> list[dict[str, Any]]:
        """Return frames under the names that the client wants: GA's, the beta dialect's, or both."""
        renamed = [frame | {"type": BETA_DELTAS[frame["type"]]} for frame in frames if frame["type"] in BETA_DELTAS]
        if self._is_beta and renamed:
            return renamed
        is_both = self._reader.session.config.extra_body.get("audio_event_names") == "both"
        return [*frames, *renamed] if is_both else list(frames)

    def _sample(self, event: said.AudioDelta) -> str:
        head = b""
        if self._has_wav_headers(event):
            head = wav_header(event.format.rate_hz, 1, len(event.delta))
        return b2a_base64(head + event.delta, newline=False).decode()

    def _format(self, event: said.AudioDelta) -> str:
        return "wav" if self._has_wav_headers(event) else beta_format(event.format)

    def _has_wav_headers(self, event: said.AudioDelta) -> bool:
        return self._reader.session.config.has_wav_headers and isinstance(event.format, Pcm)

    def _progress(self, event: said.AudioDelta) -> dict[str, Any]:
        """Return how far the answer is with this piece of it."""
        sent_ms = event.start_ms + event.duration_ms
        played_ms, committed_ms = self._heard.get(event.response_id, (0.0, 0.0))
        mark = {"text_chars": event.text_chars, "audio_end_ms": sent_ms}
        playback = said.Playback(generated_ms=sent_ms, sent_ms=sent_ms, played_ms=played_ms, committed_ms=committed_ms)
        return {
            "model_speak": True,
            "end_of_turn": False,
            "audio_duration_ms": sent_ms,
            "audio_text_marks": [] if event.text_chars is None else [mark],
            "playback": msgspec.to_builtins(playback),
        }

    def _session(self, view: said.SessionView) -> dict[str, Any]:
        config = view.config
        session = beta_session(view) | ga_session(view)
        session["audio"]["input"]["sample_rate_hz"] = config.audio.input.format.rate_hz
        if "output" in session["audio"]:
            session["audio"]["output"]["sample_rate_hz"] = config.audio.output.format.rate_hz
        duplex = cast("dict[str, Any]", msgspec.to_builtins(config.duplex or Duplex()))
        auto_response = duplex.pop("auto_response")
        extra_body, extras = duplex.pop("extra_body"), duplex.pop("extras")
        if duplex.pop("has_wav_headers"):
            session["output_audio_format"] = "wav"
        return (
            extras
            | session
            | {
                "output_modalities": list(config.output_modalities),
                "state": view.state,
                "turn_state": view.turn_state,
                "epoch": view.epoch,
                "turn_id": view.turn_id,
                "active_request_id": view.active_response_id,
                "active_response_id": view.active_response_id,
                "active_response_turn_id": view.active_response_turn_id,
                "sample_rate_hz": config.audio.input.format.rate_hz,
                **duplex,
                "extra_body": {**extra_body, "auto_response": auto_response},
                "playback_commit_policy": config.playback_commit_policy,
                "playback": msgspec.to_builtins(view.playback),
                "capabilities": shown_capabilities(view.capabilities),
            }
        )


def _error(error: ErrorDetail) -> dict[str, Any]:
    shape = {"type": error.type, "code": error.vendor_code, "message": error.message}
    extra = {"param": error.param, "event_id": error.event_id, "retryable": error.retryable}
    return shape | {name: value for name, value in extra.items() if value is not None}


def _response(view: said.ResponseView) -> dict[str, Any]:
    response = ga_response(view)
    response["modalities"] = response["output_modalities"] = list(view.output_modalities)
    cause = view.status_details.cause if view.status_details is not None else None
    if cause is not None:
        response["metadata"] = {**(view.metadata or {}), "reason": cause}
    return response


def committed(event: said.InputCommitted) -> dict[str, Any]:
    """Return what a commit came to."""
    detail = event.detail
    shown: dict[str, Any] = {"turn_id": detail.turn_id, "epoch": detail.epoch, "history_len": detail.history_len}
    if not detail.is_empty:
        shown["message"] = {"role": "user", "content": [{"type": "input_audio"}]}
    flags = {
        "empty": detail.is_empty,
        "no_response": detail.no_response,
        "overlap_ack": detail.overlap_ack,
        "overlap_deferred": detail.overlap_deferred,
        "response_create_deferred": detail.response_create_deferred,
    }
    shown |= {name: True for name, is_set in flags.items() if is_set}
    return shown if detail.is_speech is None else shown | {"is_speech": detail.is_speech}


def _listen(event: said.Listen, frame: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "object": "realtime.response",
        "status": "listening",
        "metadata": {"reason": event.reason, "model_listen": True},
    }
    shape = {"type": frame["type"], "session_id": event.session_id, "epoch": event.epoch, "response": response}
    if event.response_id is None:
        return shape
    response["id"] = event.response_id
    return shape | {"response_id": event.response_id}


def _overlap(event: said.OverlapDecision) -> dict[str, Any]:
    head = {"type": "overlap.decision", "session_id": event.session_id, "epoch": event.epoch}
    return head | {"policy": event.policy, "action": event.action, "reason": event.reason, "metadata": judged(event)}


def judged(event: said.OverlapDecision) -> dict[str, Any]:
    """Return what a decision was made of, and what follows."""
    causes = {"server_vad_speech_started": "turn_detected"}
    return {
        "duration_ms": event.duration_ms,
        "overlap_speech_ms": event.overlap_speech_ms,
        "buffer_audio": event.is_audio_kept,
        "defer_runtime_append": event.action == "listen" and event.is_audio_kept,
        "force_listen": event.reason == "client_force_listen",
        "preserve_realtime_input": event.is_audio_kept,
        "cancel_reason": causes.get(event.reason, "barge_in") if event.action == "barge_in" else None,
    }


def acknowledged(event: said.PlaybackAcknowledged) -> dict[str, Any]:
    """Return how much of an answer counts as heard."""
    return {
        "session_id": event.session_id,
        "epoch": event.epoch,
        "response_id": event.response_id,
        "item_id": event.item_id,
        "played_ms": event.played_ms,
        "committed_ms": event.committed_ms,
        "truncate": event.is_truncated,
        "playback": msgspec.to_builtins(event.playback),
        "history_committed": event.history_committed,
    }
