"""One response, as the events that tell it, in the order that strict clients want.

::

    response.created
     response.output_item.added, conversation.item.added, response.content_part.added
     (response.output_audio_transcript.delta | response.output_audio.delta)*         or response.output_text.delta*
     response.output_audio.done, response.output_audio_transcript.done               or response.output_text.done
     response.content_part.done, response.output_item.done, conversation.item.done
     and for each call: output_item.added, item.added, arguments.delta*, arguments.done, output_item.done, item.done
    response.done, rate_limits.updated

Whatever happens, all that was opened is closed, `response.done` comes once, and nothing of the response comes after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from msgspec import Struct

from omni_bus.core.session import server_events as said
from omni_bus.core.session.items import FunctionCall, Item, ItemStatus, Message, OutputAudio, OutputText

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.session.config import AudioFormat, MaxTokens, Modality
    from omni_bus.core.session.conversation import Conversation
    from omni_bus.core.session.ids import Ids
    from omni_bus.core.session.playback import Cursor

    Emit = Callable[[said.AnyServerEvent], None]

Status = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]


class Frame(Struct, frozen=True, kw_only=True):
    """What of a response is known before it begins."""

    id: str
    conversation_id: str | None
    """None for one outside the conversation, which leaves no item there."""
    modalities: tuple[Modality, ...]
    max_output_tokens: MaxTokens
    metadata: dict[str, str] | None
    format: AudioFormat
    voice: str | None
    is_duplex: bool
    epoch: int


class _Place(TypedDict):
    response_id: str
    item_id: str
    output_index: int


class _Output:
    """An item that is being made."""

    def __init__(self, item_id: str, index: int) -> None:
        self.item_id = item_id
        self.index = index
        self.text = ""
        self.status: ItemStatus = "in_progress"

    @property
    def is_open(self) -> bool:
        """Its end was not told."""
        return self.status == "in_progress"


class _Speech(_Output):
    """The message."""


class _Call(_Output):
    """A call of a function."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, index)
        self.call_id = call_id
        self.name = name


class Response:
    """What the model said so far; each method emits what follows from it."""

    def __init__(self, frame: Frame, cursor: Cursor, conversation: Conversation, ids: Ids, emit: Emit) -> None:
        self.frame = frame
        self.cursor = cursor
        self.status: Status = "in_progress"
        self.status_details: said.StatusDetails | None = None
        self.usage: said.ResponseUsage | None = None
        self.timings: dict[str, float] = {}
        self._conversation = conversation
        self._ids = ids
        self._emit = emit
        self._outputs: list[_Speech | _Call] = []
        self._calls: dict[int, _Call] = {}
        self._speech: _Speech | None = None
        self._has_spoken = False

    @property
    def id(self) -> str:
        """Its name."""
        return self.frame.id

    @property
    def item_id(self) -> str:
        """The name of its message; duplex clients make it up themselves."""
        return f"item_{self.frame.id}"

    @property
    def text(self) -> str:
        """What its message says so far."""
        return self._speech.text if self._speech is not None else ""

    @property
    def is_spoken(self) -> bool:
        """Whether its message is sound."""
        return "audio" in self.frame.modalities

    @property
    def view(self) -> said.ResponseView:
        """As its client sees it."""
        return said.ResponseView(
            id=self.id,
            status=self.status,
            status_details=self.status_details,
            output=tuple(self._item(output) for output in self._outputs),
            usage=self.usage,
            conversation_id=self.frame.conversation_id,
            output_modalities=self.frame.modalities,
            max_output_tokens=self.frame.max_output_tokens,
            metadata=self.frame.metadata,
            output_audio=said.OutputAudioView(format=self.frame.format, voice=self.frame.voice),
            timings=self.timings or None,
            epoch=self.frame.epoch,
            playback=self.cursor.view,
            is_committed=self.cursor.is_committed,
        )

    def begin(self) -> None:
        """Tell that it exists."""
        self._emit(said.ResponseCreated(response=self.view))

    def say(self, delta: str) -> None:
        """More text of the message: what is spoken, where it is spoken."""
        speech = self._open_speech()
        speech.text += delta
        self.cursor.text = speech.text
        kind = said.TranscriptDelta if self.is_spoken else said.TextDelta
        self._emit(kind(response_id=self.id, item_id=speech.item_id, output_index=speech.index, delta=delta))

    def sound(self, audio: bytes, duration_ms: float, text_chars: int | None, now: float) -> None:
        """More sound of the message."""
        speech = self._open_speech()
        if self.frame.is_duplex and not self._has_spoken:
            self._emit(said.Speak(response_id=self.id, item_id=speech.item_id, epoch=self.frame.epoch))
        self._has_spoken = True
        start_ms = self.cursor.sent_ms
        self.cursor.on_sent(duration_ms, text_chars, now)
        self._emit(
            said.AudioDelta(
                response_id=self.id,
                item_id=speech.item_id,
                output_index=speech.index,
                delta=audio,
                format=self.frame.format,
                start_ms=start_ms,
                duration_ms=duration_ms,
                at=now,
                text_chars=text_chars,
            )
        )

    def call(self, index: int, call_id: str | None, name: str | None, arguments: str) -> None:
        """More of a call; the model's `index` tells calls apart, and the first piece of each names it."""
        call = self._calls.get(index)
        if call is None:
            call = self._open_call(index, call_id or self._ids.new("call"), name or "")
        if not arguments or not call.is_open:
            return
        call.text += arguments
        self._emit(
            said.ArgumentsDelta(
                response_id=self.id,
                item_id=call.item_id,
                output_index=call.index,
                call_id=call.call_id,
                delta=arguments,
            )
        )

    def close_calls(self) -> None:
        """The model makes no more calls; those there are may be run while it still speaks."""
        for call in self._calls.values():
            self._close(call, is_complete=True)

    def end(
        self,
        status: Status,
        details: said.StatusDetails | None,
        usage: said.ResponseUsage | None,
    ) -> None:
        """Close what is open and tell that it is over."""
        for output in self._outputs:
            self._close(output, is_complete=status == "completed")
        self.status = status
        self.status_details = details
        self.usage = usage
        self._emit(said.ResponseDone(response=self.view))
        self._emit(said.RateLimitsUpdated())

    # --- inside -----------------------------------------------------------------------------------------------

    def _open_speech(self) -> _Speech:
        if self._speech is None:
            self._speech = _Speech(self.item_id, len(self._outputs))
            self._add(self._speech)
            part = said.Part(type="audio", transcript="") if self.is_spoken else said.Part(type="text", text="")
            self._emit(
                said.ContentPartAdded(
                    response_id=self.id, item_id=self.item_id, output_index=self._speech.index, part=part
                )
            )
        return self._speech

    def _open_call(self, index: int, call_id: str, name: str) -> _Call:
        call = _Call(self._ids.new("item"), len(self._outputs), call_id, name)
        self._calls[index] = call
        self._add(call)
        return call

    def _add(self, output: _Speech | _Call) -> None:
        self._outputs.append(output)
        item = self._item(output)
        if isinstance(item, Message):
            item = Message(id=item.id, role="assistant", status="in_progress")
        self._emit(said.OutputItemAdded(response_id=self.id, output_index=output.index, item=item))
        if self.frame.conversation_id is not None:
            previous_id = self._conversation.insert(item)
            self._emit(said.ItemAdded(item=item, previous_item_id=previous_id))

    def _close(self, output: _Speech | _Call, *, is_complete: bool) -> None:
        if not output.is_open:
            return
        if isinstance(output, _Speech):
            self._close_part(output)
        else:
            self._emit(
                said.ArgumentsDone(
                    response_id=self.id,
                    item_id=output.item_id,
                    output_index=output.index,
                    call_id=output.call_id,
                    name=output.name,
                    arguments=output.text,
                )
            )
        self._finish_item(output, is_complete=is_complete)

    def _close_part(self, speech: _Speech) -> None:
        at = _Place(response_id=self.id, item_id=speech.item_id, output_index=speech.index)
        if self.is_spoken:
            self._emit(said.AudioDone(**at))
            self._emit(said.TranscriptDone(**at, transcript=speech.text))
            part = said.Part(type="audio", transcript=speech.text)
        else:
            self._emit(said.TextDone(**at, text=speech.text))
            part = said.Part(type="text", text=speech.text)
        self._emit(said.ContentPartDone(**at, part=part))

    def _finish_item(self, output: _Speech | _Call, *, is_complete: bool) -> None:
        output.status = "completed" if is_complete else "incomplete"
        item = self._item(output)
        self._emit(said.OutputItemDone(response_id=self.id, output_index=output.index, item=item))
        if self.frame.conversation_id is None or output.item_id not in self._conversation:
            return  # outside the conversation, or its client deleted the item meanwhile
        self._conversation.replace(item)
        previous_id = self._conversation.previous_id(output.item_id)
        self._emit(said.ItemDone(item=item, previous_item_id=previous_id))

    def _item(self, output: _Speech | _Call) -> Item:
        if isinstance(output, _Call):
            return FunctionCall(
                id=output.item_id,
                status=output.status,
                call_id=output.call_id,
                name=output.name,
                arguments=output.text,
            )
        part = OutputAudio(transcript=output.text) if self.is_spoken else OutputText(text=output.text)
        return Message(id=output.item_id, role="assistant", status=output.status, content=(part,))
