"""The answers of a session: at most one in the conversation, some beside it, and those that wait for their turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from omni_bus.core.session import server_events as said
from omni_bus.core.session.checks import check_item, check_metadata, check_modalities, check_prompt
from omni_bus.core.session.client_events import ResponseOptions
from omni_bus.core.session.codes import SERVER, Code, SessionError
from omni_bus.core.session.config import NamedTool, Tool
from omni_bus.core.session.conversation import has_sound
from omni_bus.core.session.effects import CancelGeneration, Generate, GenerateOptions
from omni_bus.core.session.history import messages_of, within_budget
from omni_bus.core.session.items import InputAudio, Item, ItemReference, Message
from omni_bus.core.session.ledger import Ledger
from omni_bus.core.session.playback import Cursor
from omni_bus.core.session.response import Frame, Response
from omni_bus.core.session.transcripts import with_transcript

if TYPE_CHECKING:
    from omni_bus.core.session.config import ToolChoice
    from omni_bus.core.session.shared import Shared
    from omni_bus.core.session.transcripts import Transcripts


class Turn(Struct, frozen=True):
    """What an answer is to, where the server decided that there is to be one."""

    item_id: str
    speech_end_at: float
    """When the user fell silent, as far as the sound tells."""
    detected_at: float
    """When that was known."""


class _Running:
    """A response and what it waits for."""

    def __init__(self, response: Response, options: ResponseOptions, turn: Turn | None, created_at: float) -> None:
        self.response = response
        self.options = options
        self.turn = turn
        self.created_at = created_at
        self.items: list[Item] | None = None
        """Its own input; None for the conversation."""
        self.is_generating = False
        self.is_generated = False


class Responses:
    """Creates, feeds, interrupts and ends responses."""

    def __init__(self, shared: Shared, transcripts: Transcripts) -> None:
        self._shared = shared
        self._transcripts = transcripts
        self._active: _Running | None = None
        self._beside: dict[str, _Running] = {}
        self.ledger = Ledger(shared)
        self.num_deferred = 0
        """Turns that are committed and wait for the answer under way to end."""
        self.listened_since: float | None = None
        """When the user had heard the last answer and it was their turn; None while that isn't so."""

    # --- what others ask --------------------------------------------------------------------------------------

    @property
    def active(self) -> Response | None:
        """The conversation's response that is being given."""
        return None if self._active is None else self._active.response

    @property
    def is_busy(self) -> bool:
        """Whether anything is being answered, or waits to be."""
        return self._active is not None or bool(self._beside) or self.num_deferred > 0

    @property
    def is_in_progress(self) -> bool:
        """Whether the model has the word: it answers, or what it said has yet to be acknowledged."""
        return self._active is not None or not self.ledger.is_settled

    def left_ms(self, response_id: str, now: float) -> float:
        """Return how long a client that plays at once has sound of a response left."""
        running = self._running(response_id)
        return 0.0 if running is None else running.response.cursor.left_ms(now)

    # --- creating ---------------------------------------------------------------------------------------------

    def create(self, options: ResponseOptions, turn: Turn | None = None) -> Response:
        """Begin a response.

        Raises:
            SessionError: it can't be given now, not by this deployment, or not with these options.
        """
        shared = self._shared
        self._check(options)
        items = self._own_items(options)
        is_beside = options.conversation == "none"
        response_id = shared.ids.new("resp")
        commit_number = shared.turn_id + shared.is_user_speaking  # what is said while the user speaks answers that
        cursor = Cursor(response_id, f"item_{response_id}", commit_number)
        frame = self._frame(response_id, options)
        response = Response(frame, cursor, shared.conversation, shared.ids, shared.outlet.emit)
        running = _Running(response, options, turn, shared.now)
        running.items = items
        if is_beside:
            self._beside[response_id] = running
        else:
            self._active = running
            self.listened_since = None
            self.ledger.add(cursor)
        response.begin()
        for item in items or ():
            self._transcripts.begin(item)
        self._generate_if_ready(running)
        return response

    def defer(self) -> None:
        """A turn waits for the answer under way to end.

        Raises:
            SessionError: too many do.
        """
        allowed = self._shared.limits.max_pending_turns
        if self.num_deferred >= allowed:
            message = f"{self.num_deferred} turns wait for an answer (allowed: {allowed})"
            raise SessionError(Code.INPUT_BACKPRESSURE, message)
        self.num_deferred += 1

    def on_transcribed(self, item_id: str, text: str | None) -> None:
        """An item was written down, or never will be (None)."""
        for running in self._all():
            if running.items is not None and text is not None:
                running.items = [_transcribed(item, item_id, text) for item in running.items]
            self._generate_if_ready(running)

    # --- what the model says ----------------------------------------------------------------------------------

    def on_text(self, response_id: str, delta: str) -> None:
        """More text."""
        running = self._running(response_id)
        if running is not None and delta:
            self._mark(running, "first_text")
            running.response.say(delta)

    def on_audio(self, response_id: str, audio: bytes, duration_ms: float, text_chars: int | None) -> None:
        """More sound, in the response's format."""
        running = self._running(response_id)
        if running is None or not audio:
            return
        self._mark(running, "first_audio")
        self._shared.has_sounded = True
        if running is self._active:
            self.ledger.last = running.response.cursor
        running.response.sound(audio, duration_ms, text_chars, self._shared.now)

    def on_tool_call(self, response_id: str, index: int, call_id: str | None, name: str | None, arguments: str) -> None:
        """More of a call."""
        running = self._running(response_id)
        if running is not None:
            running.response.call(index, call_id, name, arguments)

    def on_tool_calls_done(self, response_id: str) -> None:
        """No more calls."""
        running = self._running(response_id)
        if running is not None:
            running.response.close_calls()

    def on_generated(self, response_id: str, finish: str, usage: said.ResponseUsage | None) -> None:
        """The model is done, and so is its voice."""
        running = self._running(response_id)
        if running is None:
            return
        running.is_generated = True
        if finish in {"length", "max_output_tokens"}:
            details = said.StatusDetails(type="incomplete", reason="max_output_tokens")
            self._end(running, "incomplete", details, usage)
        elif finish == "content_filter":
            details = said.StatusDetails(type="incomplete", reason="content_filter")
            self._end(running, "incomplete", details, usage)
        else:
            self._end(running, "completed", None, usage)

    def on_failed(self, response_id: str, code: str, message: str) -> None:
        """The deployment can't go on with it."""
        running = self._running(response_id)
        if running is not None:
            running.is_generated = True
            self._fail(running, code, message)

    # --- ending -----------------------------------------------------------------------------------------------

    def cancel(self, response_id: str | None, cause: str) -> Response:
        """Stop a response because the client wants it.

        Raises:
            SessionError: that one isn't being given.
        """
        running = self._active if response_id is None else self._running(response_id)
        if running is None:
            what = "no response is being given" if response_id is None else f"{response_id!r} is not being given"
            raise SessionError(Code.RESPONSE_NOT_ACTIVE, f"response_id: {what}", param="response_id")
        self._cut(running, "client_cancelled", cause)
        return running.response

    def interrupt(self, cause: str, *, is_told: bool) -> bool:
        """The user speaks: stop the answer, and what of it is still to be heard; return whether there was any.

        With `is_told` a client whose player still has sound of a finished response is told to drop it.
        """
        now = self._shared.now
        if self._active is not None:
            reason = "turn_detected" if cause in {"turn_detected", "barge_in"} else "client_cancelled"
            self._cut(self._active, reason, cause)
            return True
        last = self.ledger.last
        if last is None or not self.ledger.is_playing(now):
            return False
        self._shared.epoch += 1
        last.stop(now)
        self.ledger.apply(last)
        if is_told:
            self._tell_cleared(last, cause)
        return True

    def clear_output(self, response_id: str | None) -> None:
        """A client's player drops what it has.

        Raises:
            SessionError: there is no such response.
        """
        running = self._active if response_id is None else self._running(response_id)
        if running is not None:
            cursor = running.response.cursor
        else:
            cursor = self.ledger.last if response_id is None else self.ledger.of_response(response_id)
        if cursor is None and response_id is not None:
            message = f"response_id: no response {response_id!r} is here"
            raise SessionError(Code.RESPONSE_NOT_ACTIVE, message, param="response_id")
        if cursor is None:
            return
        self._tell_cleared(cursor, "output_audio_buffer_clear")
        if running is not None:
            self._cut(running, "client_cancelled", "output_audio_buffer_clear")
        else:
            cursor.stop(self._shared.now)
            self.ledger.apply(cursor)

    def end_all(self, cause: str) -> None:
        """The session ends."""
        self.num_deferred = 0
        for running in self._all():
            self._cut(running, "client_cancelled", cause)

    def _tell_cleared(self, cursor: Cursor, reason: str) -> None:
        self._shared.outlet.emit(
            said.OutputAudioCleared(
                response_id=cursor.response_id, reason=reason, epoch=self._shared.epoch, playback=cursor.view
            )
        )

    # --- inside: creating -------------------------------------------------------------------------------------

    def _check(self, options: ResponseOptions) -> None:
        shared = self._shared
        if shared.config.type == "transcription":
            raise SessionError(Code.NOT_IN_TRANSCRIPTION, "response.create: a transcription session gives no answers")
        check_modalities(options.output_modalities or shared.config.output_modalities, shared.capabilities, "response")
        if options.tools and not shared.capabilities.supports_tools:
            raise SessionError(Code.INVALID_VALUE, "response.tools: this model calls none", param="response.tools")
        check_metadata(options.metadata)
        check_prompt(options.prompt, "response")
        allowed = shared.limits.max_out_of_band
        if options.conversation == "none":
            if len(self._beside) >= allowed:
                message = f"{len(self._beside)} responses outside the conversation are given (allowed: {allowed})"
                raise SessionError(Code.TOO_MANY_RESPONSES, message)
            return
        if self._active is not None:
            message = f"the response {self._active.response.id!r} is being given; cancel it first or wait for its end"
            raise SessionError(Code.RESPONSE_ACTIVE, message)
        if shared.is_duplex and not len(shared.conversation) and options.input is None:
            raise SessionError(Code.NO_INPUT, "response.create: nothing was committed yet")
        if not shared.capabilities.supports_text_only_turn and not any(map(has_sound, shared.conversation.items)):
            raise SessionError(Code.TEXT_TURN_UNSUPPORTED, "response.create: this model answers speech, and none came")
        shared.conversation.check_room()

    def _own_items(self, options: ResponseOptions) -> list[Item] | None:
        if options.input is None:
            return None
        items: list[Item] = []
        for index, item in enumerate(options.input):
            if isinstance(item, ItemReference):
                items.append(self._shared.conversation.get(item.id, param=f"response.input[{index}].id"))
            else:
                check_item(item, self._shared.capabilities, f"response.input[{index}]")
                items.append(replace(item, id=self._shared.ids.new("item")))
        return items

    def _frame(self, response_id: str, options: ResponseOptions) -> Frame:
        shared = self._shared
        config = shared.config
        output, own = config.audio.output, options.audio.output
        return Frame(
            id=response_id,
            conversation_id=None if options.conversation == "none" else shared.conversation_id,
            modalities=options.output_modalities or config.output_modalities,
            max_output_tokens=options.max_output_tokens or config.max_output_tokens,
            metadata=options.metadata,
            format=own.format or output.format,
            voice=own.voice or output.voice,
            is_duplex=shared.is_duplex,
            epoch=shared.epoch,
        )

    def _generate_if_ready(self, running: _Running) -> None:
        """Begin to generate once all that the model must read is written down."""
        if running.is_generating or running.response.status != "in_progress":
            return
        items = self._shared.conversation.items if running.items is None else running.items
        if not self._shared.capabilities.hears_audio and any(item.id in self._transcripts for item in items):
            return
        running.is_generating = True
        self._mark(running, "generation")
        if running.turn is not None and not self._said_anything(running.turn.item_id):
            # A detector took a noise for speech.
            running.is_generated = True
            self._end(running, "completed", None, None)
            return
        try:
            generate = self._generation(running, items)
        except SessionError as error:
            running.is_generated = True
            self._fail(running, error.code.code, error.message)
            return
        self._shared.outlet.do(generate)

    def _said_anything(self, item_id: str) -> bool:
        """Whether a turn has words, or is given to a model that hears."""
        conversation = self._shared.conversation
        if self._shared.capabilities.hears_audio or item_id not in conversation:
            return True
        item = conversation.get(item_id)
        parts = item.content if isinstance(item, Message) else ()
        # None is a transcript that failed: the model may make something of the rest of the conversation.
        return any(not isinstance(part, InputAudio) or part.transcript != "" for part in parts)

    def _generation(self, running: _Running, items: list[Item] | tuple[Item, ...]) -> Generate:
        shared, options, frame = self._shared, running.options, running.response.frame
        config = shared.config
        groups = messages_of(items, self.ledger.heard, hears_audio=shared.capabilities.hears_audio)
        instructions = config.instructions if options.instructions is None else options.instructions
        messages = within_budget(groups, instructions, config.truncation, shared.limits.max_history_characters)
        tools = config.tools if options.tools is None else options.tools
        choice = config.tool_choice if options.tool_choice is None else options.tool_choice
        return Generate(
            frame.id,
            messages,
            GenerateOptions(
                modalities=frame.modalities,
                tools=tuple(_function(tool) for tool in tools),
                tool_choice=_choice(choice) if tools else "none",
                parallel_tool_calls=config.parallel_tool_calls is not False,
                reasoning_effort=None if config.reasoning is None else config.reasoning.effort,
                max_output_tokens=None if frame.max_output_tokens == "inf" else frame.max_output_tokens,
                temperature=config.temperature if options.temperature is None else options.temperature,
                voice=frame.voice,
                speed=options.audio.output.speed or config.audio.output.speed,
                format=frame.format,
            ),
        )

    # --- inside: ending ---------------------------------------------------------------------------------------

    def _running(self, response_id: str) -> _Running | None:
        if self._active is not None and self._active.response.id == response_id:
            return self._active
        return self._beside.get(response_id)

    def _all(self) -> list[_Running]:
        active = [] if self._active is None else [self._active]
        return active + list(self._beside.values())

    def _cut(self, running: _Running, reason: Any, cause: str) -> None:
        """Cancel a response; what was not played by now was not heard."""
        shared, cursor = self._shared, running.response.cursor
        if running is self._active:
            shared.epoch += 1
        cursor.stop(shared.now)
        details = said.StatusDetails(type="cancelled", reason=reason, cause=cause)
        self._end(running, "cancelled", details, None)

    def _fail(self, running: _Running, code: str, message: str) -> None:
        error = said.StatusError(type=SERVER, code=code, message=message)
        self._end(running, "failed", said.StatusDetails(type="failed", error=error), None)

    def _end(
        self,
        running: _Running,
        status: Any,
        details: said.StatusDetails | None,
        usage: said.ResponseUsage | None,
    ) -> None:
        shared, response = self._shared, running.response
        if running.is_generating and not running.is_generated:
            shared.outlet.do(CancelGeneration(response.id))
        for item in running.items or ():
            if item.id is not None and item.id not in shared.conversation:
                self._transcripts.stop(item.id)
        self._mark(running, "done")
        response.cursor.is_committed = not shared.needs_ack
        if running is self._active:
            self._active = None
        else:
            self._beside.pop(response.id, None)
        response.end(status, details, usage)
        if response.item_id in shared.conversation:
            self.ledger.apply(response.cursor)
        else:
            self.ledger.forget(response.item_id)
        if response.frame.conversation_id is not None:
            self.listened_since = shared.now + response.cursor.left_ms(shared.now) / 1000
            if status == "cancelled":
                self.num_deferred = 0  # the turn that cut it off is answered with those that waited
            self.promote()

    def promote(self) -> None:
        """Answer the turns that waited, all at once."""
        if self.num_deferred and not self.is_in_progress:
            self.num_deferred = 0
            self.create(ResponseOptions())

    def _mark(self, running: _Running, what: str) -> None:
        """Note when something happened first, in ms from the end of the user's speech or from the client's wish."""
        timings, now = running.response.timings, self._shared.now
        if what in timings:
            return
        since = running.created_at if running.turn is None else running.turn.speech_end_at
        if not timings and running.turn is not None:
            timings["detected"] = _milliseconds(running.turn.detected_at - since)
        timings[what] = _milliseconds(now - since)


def _transcribed(item: Item, item_id: str, text: str) -> Item:
    if item.id != item_id or not isinstance(item, Message):
        return item
    for index, part in enumerate(item.content):
        if isinstance(part, InputAudio) and part.transcript is None:
            return with_transcript(item, index, text)
    return item


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {}}


def _choice(choice: ToolChoice) -> str:
    return f"function:{choice.name}" if isinstance(choice, NamedTool) else choice


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
