"""OpenAI's GA dialect of live conversations; its events are nearly those of `omni_bus.core.session`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from gateways.fields import shown
from gateways.realtime.reading import (
    read_as,
    refuse_keys,
    sound,
    table,
    type_of,
    unknown_event,
    without_nulls,
)
from gateways.realtime.session import ga_modalities, ga_session, session_patch
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import converted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateways.realtime.reading import Events

DUPLEX_ONLY = (
    said.Speak,
    said.Listen,
    said.OverlapDecision,
    said.PlaybackAcknowledged,
    said.TurnEvent,
    said.HeartbeatAck,
    said.SessionResumed,
    said.SessionReplaced,
    said.ResyncRequired,
    said.SessionClosed,
)
"""What OpenAI's clients have no word for."""

RESPONSE_FIELDS = frozenset(
    {
        "conversation",
        "output_modalities",
        "instructions",
        "audio",
        "tools",
        "tool_choice",
        "max_output_tokens",
        "temperature",
        "metadata",
        "input",
        "prompt",
    }
)

_BETA_CONTENT = {"assistant": {"text": "output_text", "audio": "output_audio"}}
_USER_CONTENT = {"text": "input_text", "audio": "input_audio"}


class GaDialect:
    """Client frames to events, events to frames.

    Args:
        is_same_model: whether a client's name for a model is the one that it talks to.
    """

    is_beta = False

    def __init__(self, is_same_model: Callable[[str], bool]) -> None:
        self.is_same_model = is_same_model
        self._readers: dict[str, Callable[[Mapping[str, Any]], Events]] = {
            "session.update": self._session_update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": lambda fields: [read_as(fields, asked.AudioCommit)],
            "input_audio_buffer.clear": lambda fields: [read_as(fields, asked.AudioClear)],
            "conversation.item.create": self._item_create,
            "conversation.item.retrieve": lambda fields: [read_as(fields, asked.ItemRetrieve, "item_id")],
            "conversation.item.delete": lambda fields: [read_as(fields, asked.ItemDelete, "item_id")],
            "conversation.item.truncate": lambda fields: [
                read_as(fields, asked.ItemTruncate, "item_id", "audio_end_ms", "content_index")
            ],
            "response.create": self._response_create,
            "response.cancel": lambda fields: [read_as(fields, asked.ResponseCancel, "response_id")],
            "output_audio_buffer.clear": lambda fields: [read_as(fields, asked.OutputAudioClear, "response_id")],
            "transcription_session.update": self._session_update,
        }

    @property
    def known(self) -> frozenset[str]:
        """Types of events that clients may send."""
        return frozenset(self._readers)

    # --- from the client --------------------------------------------------------------------------------------

    def read(self, fields: Mapping[str, Any]) -> Events:
        """Return what a client says with one frame.

        Raises:
            SessionError: the frame can't be understood.
        """
        name = type_of(fields)
        reader = self._readers.get(name)
        if reader is None:
            raise unknown_event(name, self._readers)
        return reader(fields)

    def _session_update(self, fields: Mapping[str, Any]) -> Events:
        if fields.get("session") is None:
            raise SessionError(Code.MISSING_PARAMETER, "session: is missing (allowed: an object)", param="session")
        patch = session_patch(table(fields, "session"))
        model = patch.get("model")
        if isinstance(model, str) and self.is_same_model(model):
            del patch["model"]  # the same, by another of its names
        return [read_as(fields, asked.SessionUpdate, session=patch)]

    def _append(self, fields: Mapping[str, Any]) -> Events:
        return [read_as(fields, asked.AudioAppend, audio=sound(fields, "audio"))]

    def _item_create(self, fields: Mapping[str, Any]) -> Events:
        item = read_item(fields.get("item"), "item")
        return [read_as(fields, asked.ItemCreate, "previous_item_id", item=item)]

    def _response_create(self, fields: Mapping[str, Any]) -> Events:
        options = response_options(table(fields, "response"))
        return [read_as(fields, asked.ResponseCreate, response=options)]

    # --- to the client ----------------------------------------------------------------------------------------

    def frames(self, event: said.AnyServerEvent) -> list[dict[str, Any]]:
        """Return what a client is told of one event."""
        if isinstance(event, DUPLEX_ONLY):
            return []
        frame = fields_of(event)
        frame.pop("server_event_seq")
        match event:
            case said.SessionCreated() | said.SessionUpdated():
                return [self._session(event, frame)]
            case said.SessionExpired():
                return [expired(frame)]
            case said.ResponseCreated() | said.ResponseDone():
                frame["response"] = self.response(event.response)
            case said.InputCommitted():
                if event.item_id is None:
                    return []
                del frame["detail"]
            case _:
                pass
        return [frame]

    def _session(self, event: said.SessionCreated | said.SessionUpdated, frame: dict[str, Any]) -> dict[str, Any]:
        for name in ("attachment_generation", "resume_token"):
            frame.pop(name, None)
        frame["session"] = self.session(event.session)
        if isinstance(event, said.SessionCreated):
            # What clients of the turn dialect look for; the others don't mind.
            frame |= {"id": event.session.id, "created": int(event.session.created_at)}
        return frame

    def session(self, view: said.SessionView) -> dict[str, Any]:
        """Return a session as this dialect shows it."""
        return ga_session(view)

    def response(self, view: said.ResponseView) -> dict[str, Any]:
        """Return a response as this dialect shows it."""
        return ga_response(view)


# --- shared with the other dialects ---------------------------------------------------------------------------


def read_item(item: Any, at: str) -> dict[str, Any]:
    """Return a client's item, with the content types of either OpenAI dialect, as GA has it.

    Raises:
        SessionError: it is no object, or its content is no list of objects.
    """
    if not isinstance(item, dict):
        code = Code.MISSING_PARAMETER if item is None else Code.INVALID_VALUE
        raise SessionError(code, f"{at}: {shown(item)} came (allowed: an object)", param=at)
    fields = cast("dict[str, Any]", without_nulls(item))
    content = fields.get("content")
    if isinstance(content, list):
        names = _BETA_CONTENT.get(str(fields.get("role")), _USER_CONTENT)
        fields["content"] = [_renamed(part, names) for part in cast("list[Any]", content)]
    return fields


def _renamed(part: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(part, dict):
        return part
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    return {**fields, "type": names.get(kind, kind)} if isinstance(kind, str) else fields


def response_options(response: dict[str, Any]) -> asked.ResponseOptions:
    """Return the options of a response, GA or beta.

    Raises:
        SessionError: a field is unknown or has a value that is not allowed.
    """
    fields = session_patch({name: value for name, value in response.items() if value is not None})
    refuse_keys(fields, RESPONSE_FIELDS, "response")
    for side in fields.get("audio", {}):
        if side != "output":
            raise SessionError(Code.UNKNOWN_PARAMETER, f"response.audio.{side}: no such field", param="response.audio")
    if isinstance(fields.get("input"), list):
        items = cast("list[Any]", fields["input"])
        fields["input"] = [read_item(item, f"response.input[{index}]") for index, item in enumerate(items)]
    return converted(fields, asked.ResponseOptions, at="response")


def expired(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error that tells OpenAI's clients of a session that ended by time."""
    error = {
        "type": "invalid_request_error",
        "code": "session_expired",
        "message": f"the session is over: {frame['reason']}",
        "param": None,
        "event_id": None,
    }
    return {"type": "error", "event_id": frame["event_id"], "error": error}


def ga_response(view: said.ResponseView) -> dict[str, Any]:
    """Return a response in OpenAI's GA shape; ``timings`` is ours."""
    response = cast("dict[str, Any]", msgspec.to_builtins(view))
    audio = response.pop("output_audio")
    for name in ("epoch", "playback", "is_committed"):
        del response[name]
    response["output"] = [without_nulls(item) for item in response["output"]]
    response["output_modalities"] = ga_modalities(view.output_modalities)
    response["audio"] = {"output": audio}
    response["status_details"] = status_details(view)
    if response["timings"] is None:
        del response["timings"]
    return response


def status_details(view: said.ResponseView) -> dict[str, Any] | None:
    """Return why a response is not complete, in OpenAI's words."""
    details = view.status_details
    if details is None:
        return None
    shape: dict[str, Any] = {"type": details.type}
    if details.reason is not None:
        shape["reason"] = details.reason
    if details.error is not None:
        shape["error"] = msgspec.to_builtins(details.error)
    return shape


def fields_of(event: said.AnyServerEvent) -> dict[str, Any]:
    """Return an event as JSON values: sound as base64, items and parts without what they do not have."""
    frame = cast("dict[str, Any]", msgspec.to_builtins(event))
    for name in ("item", "part"):
        if name in frame:
            frame[name] = without_nulls(frame[name])
    match event:
        case said.AudioDelta():
            for name in ("format", "start_ms", "duration_ms", "at", "text_chars"):
                del frame[name]
        case said.InputCleared() | said.OutputAudioCleared():
            for name in ("reason", "epoch", "playback"):
                frame.pop(name, None)
        case said.ItemTruncated():
            frame["audio_end_ms"] = round(event.audio_end_ms)
        case said.ErrorEvent():
            if event.error.retryable is None:
                del frame["error"]["retryable"]
        case said.TranscriptionFailed():
            kept = ("type", "code", "message", "param")
            frame["error"] = {name: frame["error"][name] for name in kept}
        case _:
            pass
    return frame
