"""The native lifecycle of ``/v1/duplex``: fewer and flat events, an answer's words beside its sound.

Clients choose it by a ``session.create`` as their first event; what they send is otherwise the duplex dialect's. Such a
session ends with its connection: nothing is numbered, and nothing comes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from gateways.realtime.duplex import DuplexDialect, acknowledged, committed, judged
from gateways.realtime.ga import fields_of, status_details
from omni_bus.core.session import server_events as said

if TYPE_CHECKING:
    from gateways.realtime.reading import Events

UNTOLD = (
    said.SessionResumed,
    said.SessionReplaced,
    said.ResyncRequired,
    said.RateLimitsUpdated,
    said.OutputItemAdded,
    said.OutputItemDone,
    said.ContentPartAdded,
    said.ContentPartDone,
    said.TextDone,
    said.TranscriptDone,
    said.AudioDone,
    said.ArgumentsDelta,
    said.ItemDone,
)
"""What other events tell here, or what there is none of without a resume."""


class NativeDialect(DuplexDialect):
    """See `DuplexDialect`; only what the client is told is told otherwise."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._words: dict[str, str] = {}
        """Of each response that is being given, since its last sound."""
        self._marks: dict[str, dict[str, Any]] = {}
        """How far its last sound was."""
        self._item_id: str | None = None
        """Of the last commit."""

    def opening(self, session: dict[str, Any], model: str, event_id: str | None = None) -> Events:
        """Return what opens a session.

        Raises:
            SessionError: the session object is bad.
        """
        named = session.get("session_id")
        session = {"response_format": "wav", **session}
        if named is not None:
            session["client_session_id"] = named
        return [self._open(session, model, event_id, is_resumable=False), *self._begun()]

    def frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        """Return what a client is told of one event."""
        if isinstance(event, UNTOLD):
            return []
        frames = self._told(event)
        for frame in frames:
            for name in ("event_id", "server_event_seq"):
                frame.pop(name, None)
        return frames

    # --- inside -----------------------------------------------------------------------------------------------

    def _told(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        match event:
            case said.SessionCreated() | said.SessionUpdated():
                self._session_id, self._epoch = event.session.id, event.session.epoch
                self._reader.session.settle(event.session.config)
                return [self._frame(event, session=self._session(event.session))]
            case said.ErrorEvent():
                return [self._error(event)]
            case said.InputCommitted():
                self._item_id = event.item_id
                self._epoch = event.detail.epoch
                return [self._here("input.committed", **committed(event), native_audio=False)]
            case said.InputCleared():
                self._epoch = event.epoch
                return [self._here("input.cancelled", reason=event.reason, cancelled={"input": True})]
            case said.TranscriptionCompleted():
                return [self._here("input.transcribed", item_id=event.item_id, transcript=event.transcript)]
            case said.ItemAdded():
                return self._added(event)
            case said.ItemDeleted():
                return [self._frame(event, item_id=event.item_id, deleted=True)]
            case said.ItemTruncated():
                place = {"item_id": event.item_id, "content_index": event.content_index}
                return [self._frame(event, **place, audio_end_ms=event.audio_end_ms, truncated=True)]
            case said.OverlapDecision():
                self._epoch = event.epoch
                decision = {"policy": event.policy, "action": event.action, "reason": event.reason}
                return [self._frame(event, **decision, **judged(event))]
            case said.PlaybackAcknowledged():
                self._heard = {event.response_id: (event.played_ms, event.committed_ms)}
                return [self._frame(event, **acknowledged(event))]
            case _:
                return self._of_response(event)

    def _of_response(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        match event:
            case said.ResponseCreated(response=response):
                self._words[response.id] = ""
                shape = {"modalities": list(response.output_modalities), "metadata": response.metadata}
                return [self._frame(event, response_id=response.id, **shape)]
            case said.ResponseDone():
                return self._done(event)
            case said.OutputAudioCleared():
                if event.response_id in self._words:
                    return []  # its end tells
                former, self._epoch = self._epoch, event.epoch
                return [self._cancelled(event.response_id, event.reason, former, event.playback)]
            case said.Speak():
                self._epoch = event.epoch
                return [self._frame(event, response_id=event.response_id, model_speak=True)]
            case said.Listen():
                self._epoch = event.epoch
                named = {} if event.response_id is None else {"response_id": event.response_id}
                return [self._frame(event, reason=event.reason, model_listen=True, **named)]
            case said.TranscriptDelta():
                self._words[event.response_id] = self._words.get(event.response_id, "") + event.delta
                return []
            case said.AudioDelta():
                shape = {"format": self._format(event), "sample_rate_hz": event.format.rate_hz}
                self._marks[event.response_id] = {**shape, **self._progress(event)}
                return [self._spoken(event.response_id, self._sample(event), is_last=False)]
            case said.TextDelta():
                return [self._here("response.text.delta", response_id=event.response_id, delta=event.delta)]
            case said.ArgumentsDone():
                call = {"call_id": event.call_id, "name": event.name, "arguments": event.arguments}
                return [self._here("function_call.done", response_id=event.response_id, **call)]
            case _:
                # Speech that a detector hears, and the like: OpenAI's events as they are.
                return [fields_of(event)]

    def _here(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "session_id": self._session_id, "epoch": self._epoch, **fields}

    def _frame(self, event: said.AnyServerEvent, **fields: Any) -> dict[str, Any]:
        return self._here(str(type(event).__struct_config__.tag), **fields)

    def _error(self, event: said.ErrorEvent) -> dict[str, Any]:
        error = event.error
        frame = self._here("error", error=error.message, code=error.vendor_code)
        named = {"param": error.param, "client_event_id": error.event_id}
        return frame | {name: value for name, value in named.items() if value is not None}

    def _added(self, event: said.ItemAdded) -> list[dict[str, Any]]:
        item = event.item
        if item.id == self._item_id or item.status == "in_progress":
            return []  # a commit or a response tells
        return [self._here("conversation.item.created", item=fields_of(event)["item"], created=True)]

    def _spoken(self, response_id: str, audio: str, *, is_last: bool) -> dict[str, Any]:
        """Return a piece of an answer, with the words that came since the last one."""
        piece = {"response_id": response_id, "audio": audio, "text": self._words.get(response_id, "")}
        self._words[response_id] = ""
        marks = self._marks.get(response_id, {})
        return self._here("response.output_audio.delta", **piece, **(marks | {"end_of_turn": is_last}))

    def _done(self, event: said.ResponseDone) -> list[dict[str, Any]]:
        response = event.response
        is_spoken = response.id in self._marks or bool(self._words.get(response.id))
        last = [self._spoken(response.id, "", is_last=True)] if is_spoken else []
        self._words.pop(response.id, None)
        self._marks.pop(response.id, None)
        details = response.status_details
        if response.status == "cancelled" and details is not None:
            if response.conversation_id is not None:
                self._epoch = max(self._epoch, response.epoch + 1)
            cause = details.cause or details.reason or "client_cancelled"
            return [self._cancelled(response.id, cause, response.epoch, response.playback)]
        shape = {"status": response.status, "status_details": status_details(response)}
        return [
            *last,
            self._frame(
                event,
                response_id=response.id,
                committed=response.is_committed,
                **shape,
                usage=msgspec.to_builtins(response.usage),
                playback=msgspec.to_builtins(response.playback),
            ),
        ]

    def _cancelled(self, response_id: str, reason: str, epoch: int, playback: said.Playback) -> dict[str, Any]:
        shape = {"reason": reason, "cancelled_epoch": epoch, "committed_ms": playback.committed_ms}
        shown = cast("dict[str, Any]", msgspec.to_builtins(playback))
        return self._here("audio.cancelled", response_id=response_id, **shape, playback=shown)
