"""What the user said, as words: for the client if it asks, and for models that don't hear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from omni_bus.core.session import server_events as said
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.effects import StopTranscribing, Transcribe
from omni_bus.core.session.input_buffer import BYTES_PER_MS
from omni_bus.core.session.items import InputAudio, Item, Message

if TYPE_CHECKING:
    from omni_bus.core.session.shared import Shared


class _Pending(Struct):
    seconds: float
    content_index: int
    is_told: bool
    text: str = ""


class Transcripts:
    """Items that are being written down."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._pending: dict[str, _Pending] = {}

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._pending

    @property
    def is_busy(self) -> bool:
        """Whether anything is being written down."""
        return bool(self._pending)

    def begin(self, item: Item) -> None:
        """Write down what an item says, if anybody wants that and it isn't known."""
        found = untranscribed(item)
        shared = self._shared
        config = shared.config.audio.input.transcription
        is_told = config is not None or shared.config.type == "transcription"
        if found is None or not (is_told or not shared.capabilities.hears_audio):
            return
        if not shared.capabilities.supports_transcription:
            return
        assert item.id is not None
        index, audio = found
        pending = _Pending(len(audio) / BYTES_PER_MS / 1000, index, is_told)
        if len(self._pending) >= shared.limits.max_transcriptions:
            self._fail(item.id, pending, Code.INPUT_BACKPRESSURE, "too much waits to be written down")
            return
        self._pending[item.id] = pending
        shared.outlet.do(
            Transcribe(
                item.id,
                audio,
                language=config.language if config is not None else None,
                prompt=config.prompt if config is not None else None,
                model=config.model if config is not None else None,
            )
        )

    def stop(self, item_id: str) -> bool:
        """Nobody wants it any more; return whether it was pending."""
        if self._pending.pop(item_id, None) is None:
            return False
        self._shared.outlet.do(StopTranscribing(item_id))
        return True

    def stop_all(self) -> None:
        """The session ends."""
        for item_id in list(self._pending):
            self.stop(item_id)

    def on_delta(self, item_id: str, delta: str) -> None:
        """More words."""
        pending = self._pending.get(item_id)
        if pending is None or not delta:
            return
        pending.text += delta
        if pending.is_told:
            self._shared.outlet.emit(
                said.TranscriptionDelta(item_id=item_id, content_index=pending.content_index, delta=delta)
            )

    def on_segment(self, item_id: str, segment_id: str, start: float, end: float, text: str) -> None:
        """Words and when they were said, in seconds of the item's sound."""
        pending = self._pending.get(item_id)
        if pending is not None and pending.is_told:
            self._shared.outlet.emit(
                said.TranscriptionSegment(
                    item_id=item_id,
                    content_index=pending.content_index,
                    id=segment_id,
                    speaker="",
                    start=start,
                    end=end,
                    text=text,
                )
            )

    def on_done(self, item_id: str) -> str | None:
        """All words came: those of the deltas. Return them; None if nobody waits."""
        pending = self._pending.pop(item_id, None)
        if pending is None:
            return None
        text = pending.text.strip()
        conversation = self._shared.conversation
        if item_id in conversation:
            conversation.replace(with_transcript(conversation.get(item_id), pending.content_index, text))
        if pending.is_told:
            self._shared.outlet.emit(
                said.TranscriptionCompleted(
                    item_id=item_id,
                    content_index=pending.content_index,
                    transcript=text,
                    usage=said.TranscriptionUsage(seconds=pending.seconds),
                )
            )
        return text

    def on_failed(self, item_id: str, message: str) -> bool:
        """It can't be written down; return whether anybody waited."""
        pending = self._pending.pop(item_id, None)
        if pending is None:
            return False
        self._fail(item_id, pending, Code.ENGINE_FAILED, message)
        return True

    def _fail(self, item_id: str, pending: _Pending, code: Code, message: str) -> None:
        if pending.is_told:
            detail = SessionError(code, message).detail(None)
            self._shared.outlet.emit(
                said.TranscriptionFailed(item_id=item_id, content_index=pending.content_index, error=detail)
            )


def untranscribed(item: Item) -> tuple[int, bytes] | None:
    """Return the content index and the sound of what an item says and nobody wrote down."""
    if not isinstance(item, Message):
        return None
    for index, part in enumerate(item.content):
        if isinstance(part, InputAudio) and part.audio and part.transcript is None:
            return index, part.audio
    return None


def with_transcript(item: Item, content_index: int, text: str) -> Item:
    """Return the item with what its sound says."""
    if not isinstance(item, Message):
        return item
    content = list(item.content)
    part = content[content_index]
    assert isinstance(part, InputAudio)
    content[content_index] = replace(part, transcript=text)
    return replace(item, content=tuple(content))
