"""What the user said, as words: for the client if it asks, and for models that don't hear.

A model that doesn't hear waits for them, so they are asked for as soon as the user pauses (a guess that this was all);
nothing of a guess is told before the turn is over and was just that, and it is dropped when the user goes on.
"""

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
    from omni_bus.core.session.config import Transcription
    from omni_bus.core.session.shared import Shared


class _Pending(Struct):
    seconds: float
    content_index: int
    is_told: bool
    text: str = ""
    guessed_with: tuple[Transcription | None] | None = None
    """Of a guess: the configuration that it was made with."""
    held: list[said.TranscriptionDelta | said.TranscriptionSegment] = []
    """What is told if it was right."""
    is_done: bool = False
    """All words came."""


class Transcripts:
    """Items that are being written down."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._pending: dict[str, _Pending] = {}

    def __contains__(self, item_id: object) -> bool:
        pending = self._pending.get(str(item_id))
        return pending is not None and pending.guessed_with is None

    @property
    def is_busy(self) -> bool:
        """Whether anything is being written down."""
        return bool(self._pending)

    @property
    def _config(self) -> Transcription | None:
        return self._shared.config.audio.input.transcription

    @property
    def _is_told(self) -> bool:
        return self._config is not None or self._shared.config.type == "transcription"

    def begin(self, item: Item) -> None:
        """Write down what an item says, if anybody wants that and it isn't known.

        A guess that is there under its name was right.
        """
        found = untranscribed(item)
        shared = self._shared
        if found is None or not (self._is_told or not shared.capabilities.hears_audio):
            return
        if not shared.capabilities.supports_transcription:
            return
        assert item.id is not None
        index, audio = found
        pending = _Pending(len(audio) / BYTES_PER_MS / 1000, index, self._is_told)
        if self._adopt(item.id, pending):
            return
        if len(self._pending) >= shared.limits.max_transcriptions:
            self._fail(item.id, pending, Code.INPUT_BACKPRESSURE, "too much waits to be written down")
            return
        self._start(item.id, audio, pending)

    def guess(self, item_id: str, audio: bytes) -> None:
        """Write down what may become this item, if an answer would wait for its words."""
        shared = self._shared
        self.drop_guess(item_id)
        is_waited_for = not shared.capabilities.hears_audio or shared.config.type == "transcription"
        if not (audio and is_waited_for and shared.capabilities.supports_transcription):
            return
        if shared.limits.transcribes_pauses and len(self._pending) < shared.limits.max_transcriptions:
            self._start(item_id, audio, _Pending(0.0, 0, self._is_told, guessed_with=(self._config,)))

    def drop_guess(self, item_id: str) -> None:
        """The user went on; what is no guess any more stays."""
        pending = self._pending.get(item_id)
        if pending is not None and pending.guessed_with is not None:
            self.stop(item_id)

    def _start(self, item_id: str, audio: bytes, pending: _Pending) -> None:
        config = self._config
        self._pending[item_id] = pending
        self._shared.outlet.do(
            Transcribe(
                item_id,
                audio,
                language=config.language if config is not None else None,
                prompt=config.prompt if config is not None else None,
                model=config.model if config is not None else None,
            )
        )

    def _adopt(self, item_id: str, actual: _Pending) -> bool:
        """Go on with a guess, if there is one that was made as it would be now."""
        pending = self._pending.get(item_id)
        if pending is None or pending.guessed_with is None:
            return False
        if pending.guessed_with != (self._config,) or pending.is_told != actual.is_told:
            self.stop(item_id)
            return False
        pending.guessed_with = None
        pending.seconds, pending.content_index = actual.seconds, actual.content_index
        for event in pending.held:
            self._shared.outlet.emit(replace(event, content_index=pending.content_index))
        pending.held.clear()
        if pending.is_done:
            self.on_done(item_id)
        return True

    def _tell(self, pending: _Pending, event: said.TranscriptionDelta | said.TranscriptionSegment) -> None:
        if not pending.is_told:
            return
        if pending.guessed_with is not None:
            pending.held.append(event)
        else:
            self._shared.outlet.emit(event)

    def stop(self, item_id: str) -> bool:
        """Nobody wants it any more; return whether it was pending."""
        pending = self._pending.pop(item_id, None)
        if pending is None:
            return False
        if not pending.is_done:
            self._shared.outlet.do(StopTranscribing(item_id))
        return True

    def stop_all(self) -> None:
        """The session ends."""
        for item_id in list(self._pending):
            self.stop(item_id)

    def on_delta(self, item_id: str, delta: str) -> None:
        """More words."""
        pending = self._pending.get(item_id)
        if pending is None or not delta or pending.is_done:
            return
        pending.text += delta
        self._tell(pending, said.TranscriptionDelta(item_id=item_id, content_index=pending.content_index, delta=delta))

    def on_segment(self, item_id: str, segment_id: str, start: float, end: float, text: str) -> None:
        """Words and when they were said, in seconds of the item's sound."""
        pending = self._pending.get(item_id)
        if pending is not None and not pending.is_done:
            self._tell(
                pending,
                said.TranscriptionSegment(
                    item_id=item_id,
                    content_index=pending.content_index,
                    id=segment_id,
                    speaker="",
                    start=start,
                    end=end,
                    text=text,
                ),
            )

    def on_done(self, item_id: str) -> str | None:
        """All words came: those of the deltas. Return them; None if nobody waits."""
        pending = self._pending.get(item_id)
        if pending is None:
            return None
        pending.is_done = True
        if pending.guessed_with is not None:
            return None
        del self._pending[item_id]
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
        if pending is None or pending.guessed_with is not None:
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
