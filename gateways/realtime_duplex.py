"""vLLM-Omni's duplex dialect: OpenAI's events with numbers, and more of them for who talks over whom.

Every event that a session keeps has its `server_event_seq` on one frame: on the last of those that tell of it, so that
a client which acknowledges a number, or resumes after it, has all of it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from gateways.realtime_beta import BETA_DELTAS
from gateways.realtime_duplex_reading import DuplexReader, session_of
from gateways.realtime_ga import fields_of, ga_response
from gateways.realtime_reading import event_id_of, type_of
from gateways.realtime_session import beta_format, beta_session, ga_session
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.realtime_reading import Events
    from omni_bus.core.session.codes import ErrorDetail


class DuplexDialect:
    """Client frames to events, events to frames.

    Args:
        is_same_model: whether a client's name for a model is the one that it talks to.
        is_beta: sound goes out under the beta dialect's names.
    """

    def __init__(self, is_same_model: Callable[[str], bool], *, is_beta: bool) -> None:
        self._reader = DuplexReader(is_same_model)
        self._is_beta = is_beta
        self._session_id = ""
        self._epoch = 0

    # --- from the client --------------------------------------------------------------------------------------

    def opening(self, session: dict[str, Any], model: str, event_id: str | None = None) -> Events:
        """Return what opens a session; the empty update is answered with the whole of it.

        Raises:
            SessionError: the session object is bad.
        """
        patch = self._reader.opening_patch(session)
        open_ = asked.SessionOpen(
            session_id=f"duplex-{secrets.token_hex(16)}",
            session={**patch, "model": model},
            is_resumable=True,
            event_id=event_id,
        )
        return [open_, asked.SessionUpdate(session={})]

    def first(self, fields: Mapping[str, Any], model: str) -> Events:
        """Return what the first frame of a connection comes to, where it opens or resumes a session.

        Raises:
            SessionError: it is none, or a bad one.
        """
        match type_of(fields):
            case "session.resume":
                names = ("session_id", "resume_token", "last_received_server_event_seq")
                return [self._reader.resume(fields, names)]
            case "session.update" | "session.create":
                return self.opening(session_of(fields), model, event_id_of(fields))
            case _:
                return [*self.opening({}, model), *self.read(fields)]

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
                self._reader.settle(event.session.config)
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
                return [frame | {"event": _committed(event)}]
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
                return [self._named(frame | {"metadata": {"session_id": self._session_id, "epoch": self._epoch}})]
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
                return [{"type": frame["type"], "event": _acknowledged(event)}]
            case _:
                return [self._named(frame)]

    def _sound(self, event: said.AudioDelta, frame: dict[str, Any]) -> list[dict[str, Any]]:
        metadata = {
            "session_id": self._session_id,
            "epoch": self._epoch,
            "model_speak": True,
            "end_of_turn": False,
            "audio_duration_ms": event.start_ms + event.duration_ms,
        }
        shape = {"format": beta_format(event.format), "sample_rate_hz": event.format.rate_hz, "metadata": metadata}
        # Clients of vLLM-Omni have a transcript delta after each of sound; the words come in events of their own.
        place = {name: frame[name] for name in ("response_id", "item_id", "output_index", "content_index")}
        pair = {"type": "response.output_audio_transcript.delta", **place, "delta": "", "metadata": metadata}
        return [self._named(frame | shape), self._named(pair)]

    def _named(self, frame: dict[str, Any]) -> dict[str, Any]:
        return frame | {"type": BETA_DELTAS.get(frame["type"], frame["type"])} if self._is_beta else frame

    def _session(self, view: said.SessionView) -> dict[str, Any]:
        config = view.config
        session = beta_session(view) | ga_session(view)
        session["audio"]["input"]["sample_rate_hz"] = config.audio.input.format.rate_hz
        if "output" in session["audio"]:
            session["audio"]["output"]["sample_rate_hz"] = config.audio.output.format.rate_hz
        capabilities = msgspec.to_builtins(view.capabilities)
        capabilities |= {
            "required_input_modalities": ["audio"],
            "optional_input_modalities": ["video"] if view.capabilities.supports_image_input else [],
            "supports_session_lease": True,
            "session_admission_mode": "engine_managed",
        }
        duplex = {} if config.duplex is None else msgspec.to_builtins(config.duplex)
        auto_response = duplex.pop("auto_response", False)
        return session | {
            "state": view.state,
            "turn_state": view.turn_state,
            "epoch": view.epoch,
            "turn_id": view.turn_id,
            "active_response_id": view.active_response_id,
            "sample_rate_hz": config.audio.input.format.rate_hz,
            **duplex,
            "extra_body": {"auto_response": auto_response},
            "playback_commit_policy": config.playback_commit_policy,
            "playback": msgspec.to_builtins(view.playback),
            "capabilities": capabilities,
        }


def _error(error: ErrorDetail) -> dict[str, Any]:
    shape = {"type": error.type, "code": error.vendor_code, "message": error.message}
    extra = {"param": error.param, "event_id": error.event_id, "retryable": error.retryable}
    return shape | {name: value for name, value in extra.items() if value is not None}


def _response(view: said.ResponseView) -> dict[str, Any]:
    response = ga_response(view)
    response["modalities"] = list(view.output_modalities)
    cause = view.status_details.cause if view.status_details is not None else None
    if cause is not None:
        response["metadata"] = {**(view.metadata or {}), "reason": cause}
    return response


def _committed(event: said.InputCommitted) -> dict[str, Any]:
    detail = event.detail
    shown: dict[str, Any] = {"turn_id": detail.turn_id, "epoch": detail.epoch}
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
    metadata = {
        "duration_ms": event.duration_ms,
        "overlap_speech_ms": event.overlap_speech_ms,
        "buffer_audio": event.is_audio_kept,
    }
    head = {"type": "overlap.decision", "session_id": event.session_id, "epoch": event.epoch}
    return head | {"policy": event.policy, "action": event.action, "reason": event.reason, "metadata": metadata}


def _acknowledged(event: said.PlaybackAcknowledged) -> dict[str, Any]:
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
