"""One live session: its core, its timer, its requests on the bus, and whoever is attached to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from actors.session_requests import Answer, Asking, Detector, Judge, Recogniser, encoding_of
from omni_bus.core.session import client_events as asked
from omni_bus.core.session import effects as done
from omni_bus.core.session.codec import encoded
from omni_bus.core.session.conversation import has_sound
from omni_bus.core.session.input_buffer import RATE_HZ
from omni_bus.core.session.items import InputAudio, Message
from omni_bus.core.session.server_events import ItemRetrieved
from omni_bus.media.telephony import Ear, Mouth
from omni_bus.wire.payloads import Audio, Blob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_bus.client import BusClient
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.core.session.config import AudioFormat
    from omni_bus.core.session.core import SessionCore
    from omni_bus.core.session.effects import Effect
    from omni_bus.core.session.server_events import ResponseUsage
    from omni_bus.wire.prompt import ToolCallDelta

logger = logging.getLogger(__name__)

STALLED_BYTES = 256 * 1024
"""Of events that an attachment has not taken; beyond this no more sound is made for it."""

LOST_BYTES = 8 * 2**20
"""An attachment that leaves so much is as good as gone."""

LARGE_BYTES = 64 * 1024
"""Sound from here on is converted on a thread."""


class Pipelines(Struct, frozen=True):
    """Where a session's work is done; None where nobody does it."""

    chat: Pipeline
    vad: Pipeline | None
    asr: Pipeline | None
    turn: Pipeline | None


class Attachment:
    """A client's stream of events, on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_bytes = 0
        self.is_over = False
        """Nothing more is said to it."""
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()

    def put(self, data: bytes) -> None:
        """Say one event."""
        if self.is_over:
            return
        self._events.append(data)
        self.num_bytes += len(data)
        if self.num_bytes > STALLED_BYTES:
            self.has_room.clear()
        self._changed.set()

    def end(self) -> None:
        """Let it go once it has all."""
        self.is_over = True
        self.has_room.set()
        self._changed.set()

    async def next(self) -> bytes | None:
        """Return the next event; None at the end."""
        while not self._events:
            if self.is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._events.popleft()
        self.num_bytes -= len(data)
        if self.num_bytes <= STALLED_BYTES:
            self.has_room.set()
        return data


class SessionHost:
    """Carries out what a session's core asks for.

    Args:
        core: the session, not yet opened.
        bus: for its requests.
        pipelines: that do its work.
        caller: whose requests they are.
        output_lead_ms: so much sound may be with the client before it is played.
        on_over: called once, when the session is over.
    """

    def __init__(
        self,
        core: SessionCore,
        bus: BusClient,
        pipelines: Pipelines,
        *,
        caller: str,
        output_lead_ms: float,
        on_over: Callable[[SessionHost], None],
    ) -> None:
        self.core = core
        self.caller = caller
        self._bus = bus
        self._pipelines = pipelines
        self._output_lead_ms = output_lead_ms
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._epoch = time.time() - self._loop.time()
        self._attachments: dict[int, Attachment] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._detector: Detector | None = None
        self._judge: Judge | None = None
        self._recognisers: dict[str, Recogniser] = {}
        self._answers: dict[str, Answer] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ear: Ear | None = None
        self._ear_format: AudioFormat | None = None

    @property
    def now(self) -> float:
        """Seconds since 1970 when the session began, then by the loop's clock, which never jumps."""
        return self._epoch + self._loop.time()

    # --- attachments ------------------------------------------------------------------------------------------

    def open(self, attachment: Attachment) -> None:
        """Begin, for the first attachment."""
        self._attachments[attachment.number] = attachment
        self.perform(self.core.on_opened(attachment.number, self.now))

    def resume(self, attachment: Attachment, event: asked.SessionResume) -> None:
        """Go on with another one, if it may."""
        self._attachments[attachment.number] = attachment
        self.perform(self.core.on_resumed(attachment.number, event, self.now))

    def detach(self, attachment: Attachment) -> None:
        """An attachment is gone."""
        self._attachments.pop(attachment.number, None)
        self.perform(self.core.on_detached(attachment.number, self.now))

    async def hear(self, attachment: Attachment, event: asked.AnyClientEvent) -> None:
        """Take what a client says; waits where it speaks faster than it can be listened to."""
        if attachment.number != self.core.attachment:
            return  # it was replaced
        if isinstance(event, asked.AudioAppend):
            event = await self._appended(event)
        elif isinstance(event, asked.ItemCreate) and has_sound(event.item):
            event = replace(event, item=await asyncio.to_thread(self._taken_in, event.item))
        elif isinstance(event, asked.ResponseCreate) and any(map(has_sound, event.response.input or ())):
            items = await asyncio.to_thread(lambda given: tuple(map(self._taken_in, given)), event.response.input)
            event = replace(event, response=replace(event.response, input=items))
        self.perform(self.core.on_client(attachment.number, event, self.now))
        if self._detector is not None:
            await self._detector.has_room.wait()

    def drain(self, *, is_drained: bool) -> None:
        """The process is to end, or not any more."""
        self.perform(self.core.on_drained(self.now, is_drained=is_drained))

    async def close(self) -> None:
        """The process ends."""
        self.perform(self.core.on_shutdown(self.now))
        if self._ending:
            await asyncio.wait(self._ending)

    # --- what models say --------------------------------------------------------------------------------------

    def on_vad(self, stream: int, kind: Any, at_ms: float, heard_ms: float) -> None:
        """Speech begins, pauses or ends."""
        self.perform(self.core.on_vad(stream, kind, at_ms, heard_ms, self.now))

    def on_judged(self, pause: int, score: float) -> None:
        """So complete the turn sounds."""
        self.perform(self.core.on_judged(pause, score, self.now))

    def on_vad_left(self, stream: int, heard_ms: float) -> None:
        """The detector's replica is drained."""
        self._detector = None
        self.perform(self.core.on_vad_left(stream, heard_ms, self.now))

    def on_vad_failed(self, stream: int, message: str) -> None:
        """The detector is gone."""
        self._detector = None
        self.perform(self.core.on_vad_failed(stream, message, self.now))

    def on_transcript(self, item_id: str, text: str) -> None:
        """More of what the user said."""
        self.perform(self.core.on_transcript(item_id, text, self.now))

    def on_transcribed(self, item_id: str) -> None:
        """All of it."""
        self._recognisers.pop(item_id, None)
        self.perform(self.core.on_transcribed(item_id, self.now))

    def on_transcript_failed(self, item_id: str, message: str) -> None:
        """It can't be written down."""
        self._recognisers.pop(item_id, None)
        self.perform(self.core.on_transcript_failed(item_id, message, self.now))

    def on_text(self, response_id: str, text: str) -> None:
        """More text of an answer."""
        self.perform(self.core.on_text(response_id, text, self.now))

    def on_audio(self, response_id: str, audio: bytes, duration_ms: float) -> None:
        """More sound of an answer, in the client's form."""
        self.perform(self.core.on_audio(response_id, audio, duration_ms, self.now))

    def on_tool_call(self, response_id: str, delta: ToolCallDelta) -> None:
        """More of a call."""
        effects = self.core.on_tool_call(response_id, delta.index, delta.id, delta.name, delta.arguments, self.now)
        self.perform(effects)

    def on_tool_calls_done(self, response_id: str) -> None:
        """No more calls."""
        self.perform(self.core.on_tool_calls_done(response_id, self.now))

    def on_generated(self, response_id: str, finish: str, usage: ResponseUsage) -> None:
        """An answer is complete."""
        self._answers.pop(response_id, None)
        self.perform(self.core.on_generated(response_id, finish, usage, self.now))

    def on_failed(self, response_id: str, code: str, message: str) -> None:
        """An answer can't be completed."""
        self._answers.pop(response_id, None)
        self.perform(self.core.on_failed(response_id, code, message, self.now))

    async def until_time_for_more(self, response_id: str) -> None:
        """Wait until the client has room for more sound: what it has not played, and what it has not even taken."""
        while True:
            number = self.core.attachment
            attachment = None if number is None else self._attachments.get(number)
            if attachment is not None and not attachment.has_room.is_set():
                await attachment.has_room.wait()
                continue
            early_ms = self.core.left_ms(response_id, self.now) - self._output_lead_ms
            if early_ms <= 0:
                return
            await asyncio.sleep(early_ms / 1000)

    # --- effects ----------------------------------------------------------------------------------------------

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out, in order."""
        for effect in effects:
            match effect:
                case done.Emit():
                    self._emit(effect)
                case done.EndAttachment(attachment=number):
                    attachment = self._attachments.pop(number, None)
                    if attachment is not None:
                        attachment.end()
                case done.SetTimer(at=at):
                    self._set_timer(at)
                case done.Ended():
                    self._end()
                case _:
                    self._ask(effect)

    def _emit(self, effect: done.Emit) -> None:
        attachment = self._attachments.get(effect.attachment)
        if attachment is None:
            return
        data = effect.data
        if isinstance(effect.event, ItemRetrieved):
            data = encoded(replace(effect.event, item=self._given_out(effect.event.item)))
        attachment.put(data)
        if attachment.num_bytes > LOST_BYTES:
            logger.warning("a client takes nothing and is let go")
            attachment.end()
            self._loop.call_soon(self.detach, attachment)

    def _ask(self, effect: Effect) -> None:
        """Begin or end work in other stages."""
        match effect:
            case done.StartVad(stream=stream, config=config):
                assert self._pipelines.vad is not None
                self._detector = Detector(self, self._bus, self._pipelines.vad, stream, config)
                self._detector.start()
            case done.FeedVad(audio=audio):
                assert self._detector is not None
                self._detector.feed(audio)
            case done.StopVad():
                self._stop(self._detector)
                self._detector = None
            case done.JudgeTurn():
                assert self._pipelines.turn is not None
                self._stop(self._judge)  # of a former pause, if it still thinks
                self._judge = Judge(self, self._bus, self._pipelines.turn, effect)
                self._judge.start()
            case done.Transcribe(item_id=item_id):
                assert self._pipelines.asr is not None
                self._recognisers[item_id] = Recogniser(self, self._bus, self._pipelines.asr, effect)
                self._recognisers[item_id].start()
            case done.StopTranscribing(item_id=item_id):
                self._stop(self._recognisers.pop(item_id, None))
            case done.Generate(response_id=response_id):
                self._answers[response_id] = Answer(self, self._bus, self._pipelines.chat, effect)
                self._answers[response_id].start()
            case done.CancelGeneration(response_id=response_id):
                self._stop(self._answers.pop(response_id, None))
            case _:
                raise AssertionError(f"nobody carries out {effect}")

    def _stop(self, asking: Asking | None) -> None:
        """End a request at once; its task is kept until it has told the stages."""
        if asking is None:
            return
        task = asyncio.create_task(asking.stop())
        asking.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, at - self.now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.perform(self.core.on_timer(self.now))

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stop(self._judge)
        for attachment in self._attachments.values():
            attachment.end()
        self._attachments.clear()
        self._on_over(self)

    # --- sound at the session's edge --------------------------------------------------------------------------

    async def _appended(self, event: asked.AudioAppend) -> asked.AudioAppend:
        """Return the event with its sound as the core has it."""
        form = event.format or self.core.config.audio.input.format
        if self._ear is None or form != self._ear_format:
            self._ear, self._ear_format = Ear(encoding_of(form), form.rate_hz, RATE_HZ), form
        ear = self._ear
        if len(event.audio) >= LARGE_BYTES:
            return replace(event, audio=await asyncio.to_thread(ear.feed, event.audio))
        return replace(event, audio=ear.feed(event.audio))

    def _taken_in(self, item: Any) -> Any:
        """Return a client's item with its sound as the core has it."""
        form = self.core.config.audio.input.format

        def heard(audio: bytes) -> bytes:
            ear = Ear(encoding_of(form), form.rate_hz, RATE_HZ)
            return ear.feed(audio) + ear.finish()

        return _with_sound(item, heard)

    def _given_out(self, item: Any) -> Any:
        """Return an item with its sound as the client has it."""
        form = self.core.config.audio.input.format

        def told(audio: bytes) -> bytes:
            sound = Audio(RATE_HZ, 1, "s16", Blob(audio))
            mouth = Mouth(sound, encoding_of(form), form.rate_hz)
            return mouth.feed(sound) + mouth.finish()

        return _with_sound(item, told)


def _with_sound(item: Any, convert: Callable[[bytes], bytes]) -> Any:
    if not isinstance(item, Message):
        return item
    content = tuple(
        replace(part, audio=convert(part.audio)) if isinstance(part, InputAudio) and part.audio else part
        for part in item.content
    )
    return replace(item, content=content)
