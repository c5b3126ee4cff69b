"""The answers of the conversation that were spoken, and what of them counts as heard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.items import Message, OutputAudio, OutputText

if TYPE_CHECKING:
    from omni_bus.core.session.client_events import PlaybackAck
    from omni_bus.core.session.playback import Cursor
    from omni_bus.core.session.shared import Shared


class Ledger:
    """A cursor for each answer, as long as its item is in the conversation."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._cursors: dict[str, Cursor] = {}
        """By item."""
        self.last: Cursor | None = None
        """Of the latest answer that was heard."""

    def add(self, cursor: Cursor) -> None:
        """An answer begins."""
        self._cursors[cursor.item_id] = cursor

    def forget(self, item_id: str) -> None:
        """An item is deleted."""
        self._cursors.pop(item_id, None)

    def of_response(self, response_id: str) -> Cursor | None:
        """Return the cursor of a response."""
        return self._cursors.get(f"item_{response_id}")

    def heard(self, item: Message, text: str) -> str:
        """Return what counts of an assistant's message."""
        cursor = self._cursors.get(item.id or "")
        return text if cursor is None else cursor.heard(needs_ack=self._shared.needs_ack)

    @property
    def playback(self) -> said.Playback:
        """How far the sound of the last answer is."""
        return said.Playback() if self.last is None else self.last.view

    @property
    def is_settled(self) -> bool:
        """Whether nothing has yet to be acknowledged of the last answer."""
        return self.last is None or self.last.is_settled(needs_ack=self._shared.needs_ack)

    def is_playing(self, now: float) -> bool:
        """Whether sound of the last answer is still heard, by the clock or by what the client says."""
        return self.last is not None and self.last.lead_ms(now) > 0

    def acknowledge(self, event: PlaybackAck, active: Cursor | None) -> None:
        """Take what the client says that it played; `active` is the answer that is being given.

        Raises:
            SessionError: it can't be of this answer, or comes too late.
        """
        shared = self._shared
        cursor = self._acknowledged(event, active)
        if cursor.acked_ms is None and shared.turn_id > cursor.commit_number:
            message = f"item_id: the user has spoken since {cursor.item_id!r}, and nothing was said of it before"
            raise SessionError(Code.PLAYBACK_TOO_LATE, message, param="item_id")
        shared.needs_ack = True
        committed_ms = event.played_ms if event.committed_ms is None else event.committed_ms
        cursor.on_ack(event.played_ms, committed_ms, is_final=event.truncate)
        self.apply(cursor)
        shared.outlet.emit(
            said.PlaybackAcknowledged(
                session_id=shared.id,
                epoch=shared.epoch,
                response_id=cursor.response_id,
                item_id=cursor.item_id,
                played_ms=event.played_ms,
                committed_ms=cursor.committed_ms,
                is_truncated=event.truncate,
                playback=cursor.view,
                history_committed=cursor.item_id in shared.conversation,
            )
        )

    def truncate(self, item_id: str, content_index: int, audio_end_ms: float) -> None:
        """Forget what an answer said after a position.

        Raises:
            SessionError: it is no spoken answer, or was never that long.
        """
        item = self._shared.conversation.get(item_id)
        if not isinstance(item, Message) or item.role != "assistant":
            raise SessionError(Code.INVALID_VALUE, f"item_id: {item_id!r} is no answer", param="item_id")
        cursor = self._cursors.get(item_id)
        if content_index != 0 or cursor is None or not cursor.sent_ms:
            message = f"content_index: {content_index} of {item_id!r} is no sound"
            raise SessionError(Code.INVALID_VALUE, message, param="content_index")
        if audio_end_ms > cursor.sent_ms + 1:  # clients count samples and round
            message = f"audio_end_ms: {audio_end_ms:g} came (allowed: at most {cursor.sent_ms:g}, its length)"
            raise SessionError(Code.INVALID_VALUE, message, param="audio_end_ms")
        cursor.cut(audio_end_ms)
        self.apply(cursor)
        self._shared.outlet.emit(
            said.ItemTruncated(item_id=item_id, content_index=content_index, audio_end_ms=audio_end_ms)
        )

    def apply(self, cursor: Cursor) -> None:
        """What wasn't heard of a finished answer is no part of the conversation any more."""
        conversation = self._shared.conversation
        if cursor.item_id not in conversation or not cursor.is_cut:
            return
        item = conversation.get(cursor.item_id)
        if isinstance(item, Message) and item.status != "in_progress":
            content = tuple(_cut(part, cursor.heard(needs_ack=self._shared.needs_ack)) for part in item.content)
            conversation.replace(replace(item, content=content))

    def _acknowledged(self, event: PlaybackAck, active: Cursor | None) -> Cursor:
        item_id, response_id = event.item_id, event.response_id
        if item_id is None and response_id is not None:
            item_id = f"item_{response_id}"
        elif item_id is None:
            pending = [cursor for cursor in self._cursors.values() if not cursor.is_settled(needs_ack=True)]
            chosen = pending[0] if len(pending) == 1 else active or self.last
            item_id = "" if chosen is None else chosen.item_id
        if response_id is not None and item_id != f"item_{response_id}":
            message = f"item_id: {item_id!r} is not the item of {response_id!r}"
            raise SessionError(Code.PLAYBACK_ITEM_MISMATCH, message, param="item_id")
        if item_id not in self._cursors:
            message = f"item_id: no answer {item_id!r} is here" if item_id else "item_id: no answer is pending"
            raise SessionError(Code.PLAYBACK_ITEM_NOT_FOUND, message, param="item_id")
        return self._cursors[item_id]


def _cut(part: Any, text: str) -> Any:
    match part:
        case OutputAudio():
            return OutputAudio(transcript=text)
        case OutputText():
            return OutputText(text=text)
        case _:
            return part
