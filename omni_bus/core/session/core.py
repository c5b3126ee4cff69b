"""One session: client events, what models say, and time in; effects out. The same inputs give the same outputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.checks import check_config, check_item
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import SessionConfig, merged
from omni_bus.core.session.conversation import image_urls, size_of, without_media
from omni_bus.core.session.effects import Effect, Ended, SetTimer
from omni_bus.core.session.journal import JournalConflict
from omni_bus.core.session.limits import Limits
from omni_bus.core.session.listening import Listening, effective
from omni_bus.core.session.outlet import Outlet, turned_away
from omni_bus.core.session.responses import Responses
from omni_bus.core.session.shared import Shared
from omni_bus.core.session.transcripts import Transcripts, untranscribed

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.session.turns import Heard

SETTLE_S = 2.0
"""Whoever has just said or heard something may go on for so long before a pause is one: by then a client has played
what it has, and has sent what belongs to what it sent."""

DRAINED = "this conversation's process is taken out of service; please open another session"

_ACTS = (asked.AudioCommit, asked.ItemCreate, asked.ResponseCreate, asked.TurnSignal)
"""What a client sends that may have a sequel."""

Expiry = Literal["disconnect_grace_expired", "idle_ttl_expired", "max_duration"]


def no_session(attachment: int, event: asked.SessionResume) -> list[Effect]:
    """Turn an attachment away whose session is over or never was."""
    message = f"session_id: {event.session_id!r} is over or never was"
    return turned_away(attachment, SessionError(Code.RESUME_EXPIRED, message, param="session_id"), event.event_id)


class SessionCore:
    """Opened by its first attachment, over with `Ended`.

    Times are seconds; which clock they are of is the host's choice.

    Args:
        event: what opened it.
        seed: part of every name that is made here; no other session has it.
        defaults: the configuration that the client's is merged into.
        capabilities: what the deployment can do.
        limits: what the session may take.
        new_token: returns a secret; called for each attachment of a resumable session.
    """

    def __init__(
        self,
        event: asked.SessionOpen,
        *,
        seed: str,
        defaults: SessionConfig,
        capabilities: said.Capabilities,
        new_token: Callable[[], str],
        limits: Limits | None = None,
    ) -> None:
        self.id = event.session_id
        self.is_over = False
        limits = limits or Limits()
        self._event = event
        self._outlet = Outlet(event.session_id, limits, new_token, is_resumable=event.is_resumable)
        capabilities = replace(capabilities, supports_session_resume=event.is_resumable)
        self._shared = Shared(event.session_id, seed, defaults, capabilities, limits, self._outlet)
        self._transcripts = Transcripts(self._shared)
        self._responses = Responses(self._shared, self._transcripts)
        self._listening = Listening(self._shared, self._transcripts, self._responses)
        self._created_at = 0.0
        self._detached_at: float | None = None
        self._alive_at = 0.0
        self._timer: float | None = None
        self._is_drained = False
        self._acted_at = -math.inf
        """When somebody's turn went on or ended."""

    @property
    def config(self) -> SessionConfig:
        """What counts now."""
        return self._shared.config

    @property
    def attachment(self) -> int | None:
        """Who listens."""
        return self._outlet.attachment

    def left_ms(self, response_id: str, now: float) -> float:
        """Return how long a client that plays at once has sound of a response left; 0 for one that is over.

        By the clock alone: many clients acknowledge only at the end of a turn, and would wait for sound until then.
        """
        return self._responses.left_ms(response_id, now)

    # --- attachments ------------------------------------------------------------------------------------------

    def on_opened(self, attachment: int, now: float) -> list[Effect]:
        """Begin, for the attachment whose event the session was made of; a bad configuration ends it at once."""
        self._outlet.now = self._created_at = self._alive_at = now
        event, shared = self._event, self._shared
        try:
            config = effective(merged(shared.config, event.session), shared.capabilities)
            check_config(config, shared.capabilities)
        except SessionError as error:
            self._outlet.refuse(attachment, error, event.event_id)
            self._finish("open_failed")
            return self._outlet.take()
        shared.config = config
        shared.needs_ack = config.playback_commit_policy == "ack_only"
        token = self._outlet.attach(attachment)
        created = said.SessionCreated(
            session=self._view(), attachment_generation=self._outlet.generation, resume_token=token
        )
        self._outlet.tell(attachment, created)
        return self._taken()

    def on_resumed(self, attachment: int, event: asked.SessionResume, now: float) -> list[Effect]:
        """Go on with another attachment, or turn it away; only before the end."""
        self._outlet.now = now
        try:
            self._outlet.resume(attachment, event, self._view)
        except SessionError as error:
            self._outlet.refuse(attachment, error, event.event_id)
        else:
            if self._outlet.attachment == attachment:
                self._detached_at = None
                self._alive_at = now
        return self._taken()

    def on_detached(self, attachment: int, now: float) -> list[Effect]:
        """An attachment is gone; one that was replaced does not count."""
        self._outlet.now = now
        if attachment != self._outlet.attachment or self.is_over:
            return []
        self._outlet.attachment = None
        self._detached_at = now
        if not self._outlet.is_resumable or self._outlet.journal.has_overflowed:
            self._close("disconnect")
        return self._taken()

    # --- the client -------------------------------------------------------------------------------------------

    def on_client(self, attachment: int, event: asked.AnyClientEvent, now: float) -> list[Effect]:
        """Do what a client asks for; what can't be done is answered with an ``error`` event."""
        self._outlet.now = now
        if attachment != self._outlet.attachment or self.is_over:
            return []
        self._alive_at = now
        if isinstance(event, _ACTS) or (isinstance(event, asked.AudioAppend) and not self._listening.has_detector):
            self._acted_at = now
        self._outlet.confirm()
        return self._guarded(lambda: self._on_client(event), event.event_id)

    def _on_client(self, event: asked.AnyClientEvent) -> None:
        match event:
            case asked.AudioAppend():
                self._listening.append(event)
            case asked.AudioCommit():
                self._listening.commit(event)
            case asked.AudioClear():
                self._listening.clear()
            case asked.InputCancel():
                self._cancel_input()
            case asked.SessionUpdate():
                self._update(event.session)
            case asked.SessionClose():
                self._close(event.reason)
            case asked.Heartbeat():
                self._outlet.emit(said.HeartbeatAck(session_id=self.id))
            case asked.EventAck():
                self._acknowledge(event.server_event_seq)
            case asked.Refuse():
                self._listening.lose(is_append=event.is_append)
                raise SessionError(event.as_code, event.message, param=event.param)
            case asked.SessionOpen():
                raise SessionError(Code.SESSION_EXISTS, "this attachment has its session")
            case asked.SessionResume():
                raise SessionError(Code.RESUME_UNSUPPORTED, "session.resume: only as the first event")
            case _:
                self._on_conversation(event)

    def _on_conversation(self, event: asked.AnyClientEvent) -> None:
        match event:
            case asked.ItemCreate():
                self._create_item(event)
            case asked.ItemRetrieve():
                item = self._shared.conversation.get(event.item_id)
                self._outlet.emit(said.ItemRetrieved(item=item))
            case asked.ItemDelete():
                self._delete_item(event.item_id)
            case asked.ItemTruncate():
                self._responses.ledger.truncate(event.item_id, event.content_index, event.audio_end_ms)
            case asked.ResponseCreate():
                self._responses.create(event.response)
            case asked.ResponseCancel():
                self._responses.cancel(event.response_id, "client_cancelled")
            case asked.OutputAudioClear():
                self._responses.clear_output(event.response_id)
            case asked.BargeIn():
                self._barge_in()
            case asked.PlaybackAck():
                active = self._responses.active
                self._responses.ledger.acknowledge(event, None if active is None else active.cursor)
                self._responses.promote()
            case asked.TurnSignal():
                self._signal(event.event)
            case _:
                raise AssertionError(f"nobody does {event}")

    # --- models -----------------------------------------------------------------------------------------------

    def on_vad(
        self,
        stream: int,
        kind: Heard,
        at_ms: float,
        heard_ms: float,
        now: float,
    ) -> list[Effect]:
        """A detector hears speech begin, pause or end; see `Listening.on_vad`."""
        return self._heard(now, lambda: self._listening.on_vad(stream, kind, at_ms, heard_ms))

    def on_judged(self, pause: int, score: float, now: float) -> list[Effect]:
        """A pause, as in `JudgeTurn`, sounds so much like the end of a turn: in [0, 1]."""
        return self._heard(now, lambda: self._listening.on_judged(pause, score))

    def on_vad_left(self, stream: int, heard_ms: float, now: float) -> list[Effect]:
        """A detector's process is taken out of service; see `Listening.on_vad_left`."""
        return self._heard(now, lambda: self._listening.on_vad_left(stream, heard_ms))

    def on_vad_failed(self, stream: int, message: str, now: float) -> list[Effect]:
        """A detector ended without being asked to."""
        return self._heard(now, lambda: self._listening.on_vad_failed(stream, message))

    def on_transcript(self, item_id: str, delta: str, now: float) -> list[Effect]:
        """More of what the user said."""
        return self._heard(now, lambda: self._transcripts.on_delta(item_id, delta))

    def on_segment(
        self, item_id: str, segment_id: str, start: float, end: float, text: str, now: float
    ) -> list[Effect]:
        """What the user said from `start` to `end`, in seconds of the item's sound."""
        return self._heard(now, lambda: self._transcripts.on_segment(item_id, segment_id, start, end, text))

    def on_transcribed(self, item_id: str, now: float) -> list[Effect]:
        """All of what the user said came."""
        return self._heard(now, lambda: self._transcribed(item_id))

    def on_transcript_failed(self, item_id: str, message: str, now: float) -> list[Effect]:
        """What the user said can't be written down."""
        return self._heard(now, lambda: self._not_transcribed(item_id, message))

    def on_text(self, response_id: str, delta: str, now: float) -> list[Effect]:
        """More text of an answer."""
        return self._heard(now, lambda: self._responses.on_text(response_id, delta))

    def on_audio(
        self, response_id: str, audio: bytes, duration_ms: float, now: float, *, text_chars: int | None = None
    ) -> list[Effect]:
        """More sound of an answer, in its format; it says the first `text_chars` characters, where that is known."""
        return self._heard(now, lambda: self._responses.on_audio(response_id, audio, duration_ms, text_chars))

    def on_tool_call(
        self, response_id: str, index: int, call_id: str | None, name: str | None, arguments: str, now: float
    ) -> list[Effect]:
        """More of a call; the first piece of each has its id and name."""
        return self._heard(now, lambda: self._responses.on_tool_call(response_id, index, call_id, name, arguments))

    def on_tool_calls_done(self, response_id: str, now: float) -> list[Effect]:
        """The model makes no more calls."""
        return self._heard(now, lambda: self._responses.on_tool_calls_done(response_id))

    def on_generated(self, response_id: str, finish: str, usage: said.ResponseUsage | None, now: float) -> list[Effect]:
        """An answer is complete; `finish` is ``stop``, ``length``, ``tool_calls`` or ``content_filter``."""
        self._acted_at = now
        return self._heard(now, lambda: self._responses.on_generated(response_id, finish, usage))

    def on_failed(self, response_id: str, code: str, message: str, now: float) -> list[Effect]:
        """An answer can't be completed."""
        return self._heard(now, lambda: self._responses.on_failed(response_id, code, message))

    def on_timer(self, now: float) -> list[Effect]:
        """The time of `SetTimer` has come."""
        self._outlet.now = now
        self._timer = None
        if self.is_over:
            return []
        expiry = self._expiry(now)
        if expiry is not None:
            self._expire(expiry)
            return self._taken()
        return self._guarded(self._listening.on_timer, None)

    def on_drained(self, now: float, *, is_drained: bool) -> list[Effect]:
        """The process gets nothing new and is to end: so does the session in its first pause, unless this is undone.

        One whose client is away is left as it is; it keeps nobody waiting.
        """
        self._outlet.now = now
        self._is_drained = is_drained
        return [] if self.is_over else self._taken()

    def on_shutdown(self, now: float) -> list[Effect]:
        """The process ends."""
        self._outlet.now = now
        if not self.is_over:
            self._close("shutdown")
        return self._taken()

    # --- inside: calls ----------------------------------------------------------------------------------------

    def _heard(self, now: float, call: Callable[[], None]) -> list[Effect]:
        """A model did something; what comes after the end is ignored."""
        self._outlet.now = now
        if self.is_over:
            return []
        self._alive_at = now
        return self._guarded(call, None)

    def _guarded(self, call: Callable[[], None], event_id: str | None) -> list[Effect]:
        try:
            call()
        except SessionError as error:
            self._outlet.emit(said.ErrorEvent(error=error.detail(event_id)))
        return self._taken()

    def _taken(self) -> list[Effect]:
        """Return what is to be done, with the timer where it has to come earlier."""
        pauses_at = self._pauses_at()
        if pauses_at is not None and pauses_at <= self._outlet.now:
            self._outlet.emit(said.ErrorEvent(error=SessionError(Code.STOPPING, DRAINED).detail(None)))
            self._close("shutdown")
        at = self._next_time()
        # One that comes too early finds nothing to do and sets the next.
        if at is not None and (self._timer is None or at < self._timer) and not self.is_over:
            self._timer = at
            self._outlet.do(SetTimer(at))
        return self._outlet.take()

    # --- inside: time -----------------------------------------------------------------------------------------

    def _deadlines(self) -> dict[Expiry, float]:
        limits = self._shared.limits
        found: dict[Expiry, float] = {}
        if self._detached_at is not None:
            found["disconnect_grace_expired"] = self._detached_at + limits.grace_s
        if limits.idle_ttl_s is not None and self._responses.active is None:
            found["idle_ttl_expired"] = self._alive_at + limits.idle_ttl_s
        if limits.max_duration_s is not None:
            found["max_duration"] = self._created_at + limits.max_duration_s
        return found

    def _next_time(self) -> float | None:
        others = (self._listening.next_time, self._pauses_at())
        return min([*self._deadlines().values(), *(at for at in others if at is not None)], default=None)

    def _pauses_at(self) -> float | None:
        """Return from when on a drained session may end; None while somebody speaks or is answered."""
        if not self._is_drained or self.is_over or self._outlet.attachment is None:
            return None
        is_busy = self._listening.is_speaking or self._responses.is_busy or self._transcripts.is_busy
        return None if is_busy else self._acted_at + SETTLE_S

    def _expiry(self, now: float) -> Expiry | None:
        return next((name for name, at in self._deadlines().items() if at <= now), None)

    # --- inside: commands -------------------------------------------------------------------------------------

    def _view(self) -> said.SessionView:
        limits, active = self._shared.limits, self._responses.active
        return said.SessionView(
            id=self.id,
            config=self._shared.config,
            capabilities=self._shared.capabilities,
            created_at=self._created_at,
            expires_at=None if limits.max_duration_s is None else self._created_at + limits.max_duration_s,
            state="closed" if self.is_over else "open",
            turn_state=self._turn_state(),
            epoch=self._shared.epoch,
            turn_id=self._shared.turn_id,
            active_response_id=None if active is None else active.id,
            active_response_turn_id=None if active is None else active.cursor.commit_number,
            playback=self._responses.ledger.playback,
        )

    def _turn_state(self) -> said.TurnState:
        if self._listening.is_speaking:
            return "user_speaking"
        if self._responses.active is not None:
            return "assistant_generating"
        if self._responses.ledger.is_playing(self._outlet.now):
            return "assistant_playing"
        return self._shared.signalled or "idle"

    def _update(self, patch: dict[str, Any]) -> None:
        shared = self._shared
        former = shared.config
        config = effective(merged(former, patch), shared.capabilities)
        check_config(config, shared.capabilities)
        if config.model != former.model:
            message = f"session.model: {config.model!r} came (allowed: {former.model!r}, it can't change)"
            raise SessionError(Code.MODEL_IS_FIXED, message, param="session.model")
        if config.type != former.type:
            message = f"session.type: {config.type!r} came (allowed: {former.type!r}, it can't change)"
            raise SessionError(Code.INVALID_SESSION, message, param="session.type")
        if former.tracing is not None and config.tracing != former.tracing:
            message = "session.tracing: it is on and can't change"
            raise SessionError(Code.INVALID_SESSION, message, param="session.tracing")
        if shared.has_sounded and config.audio.output.voice != former.audio.output.voice:
            param = "session.audio.output.voice"
            raise SessionError(Code.VOICE_IS_FIXED, f"{param}: it was heard and can't change", param=param)
        shared.config = config
        if config.playback_commit_policy != former.playback_commit_policy:
            shared.needs_ack = config.playback_commit_policy == "ack_only"
        self._listening.configure(former)
        self._outlet.emit(said.SessionUpdated(session=self._view()))

    def _acknowledge(self, seq: int) -> None:
        try:
            self._outlet.journal.ack(seq)
        except JournalConflict:
            message = f"server_event_seq: {seq} came (allowed: 0 to {self._outlet.journal.head})"
            raise SessionError(Code.INVALID_ACK, message, param="server_event_seq") from None

    def _create_item(self, event: asked.ItemCreate) -> None:
        shared, item = self._shared, event.item
        check_item(item, shared.capabilities)
        if size_of(item) > shared.limits.max_item_bytes:
            message = f"item: {size_of(item)} bytes came (allowed: {shared.limits.max_item_bytes})"
            raise SessionError(Code.EVENT_TOO_LARGE, message, param="item")
        shared.conversation.check_new(item, event.previous_item_id)
        if shared.is_duplex:
            self._check_images(image_urls(item))
        item = replace(item, id=item.id or shared.ids.new("item"), status="completed")
        previous_id = shared.conversation.insert(item, event.previous_item_id)
        shown = without_media(item)
        self._outlet.emit(said.ItemAdded(item=shown, previous_item_id=previous_id))
        self._outlet.emit(said.ItemDone(item=shown, previous_item_id=previous_id))
        self._transcripts.begin(item)

    def _check_images(self, urls: list[str]) -> None:
        limits, (num_images, num_bytes) = self._shared.limits, self._shared.conversation.images
        num_images, num_bytes = num_images + len(urls), num_bytes + sum(len(url) for url in urls)
        if urls and (num_images > limits.max_images or num_bytes > limits.max_image_bytes):
            message = (
                f"item.content: {num_images} pictures of {num_bytes} characters would be in the conversation "
                f"(allowed: {limits.max_images} of {limits.max_image_bytes}); delete some"
            )
            raise SessionError(Code.INPUT_BACKPRESSURE, message, param="item.content")

    def _delete_item(self, item_id: str) -> None:
        self._shared.conversation.delete(item_id)
        self._responses.ledger.forget(item_id)
        self._outlet.emit(said.ItemDeleted(item_id=item_id))
        if self._transcripts.stop(item_id):
            self._responses.on_transcribed(item_id, None)

    def _cancel_input(self) -> None:
        """Forget what was said and what is being answered."""
        self._responses.interrupt("barge_in", is_told=True)
        self._shared.epoch += 1
        self._listening.clear("input_cancel")

    def _barge_in(self) -> None:
        if not self._shared.capabilities.supports_barge_in:
            raise SessionError(Code.BARGE_IN_UNSUPPORTED, "barge_in: this model can't be interrupted")
        if not self._responses.interrupt("barge_in", is_told=True):
            raise SessionError(Code.RESPONSE_NOT_ACTIVE, "barge_in: nothing is being said")
        self._listening.clear("barge_in")

    def _signal(self, name: str) -> None:
        states: dict[str, said.TurnState] = {
            "user_started": "user_speaking",
            "user_committed": "user_committed",
            "assistant_started": "assistant_generating",
            "assistant_done": "idle",
        }
        if name in states:
            self._shared.signalled = states[name]
        state = states.get(name) or self._turn_state()
        event = said.TurnEvent(session_id=self.id, event=name, turn_state=state, epoch=self._shared.epoch)
        self._outlet.emit(event)

    def _transcribed(self, item_id: str) -> None:
        text = self._transcripts.on_done(item_id)
        if text is None:
            return
        conversation = self._shared.conversation
        if item_id in conversation and untranscribed(conversation.get(item_id)) is not None:
            self._transcripts.begin(conversation.get(item_id))  # its next sound
            return
        self._responses.on_transcribed(item_id, text)

    def _not_transcribed(self, item_id: str, message: str) -> None:
        if self._transcripts.on_failed(item_id, message):
            self._responses.on_transcribed(item_id, None)

    # --- inside: the end --------------------------------------------------------------------------------------

    def _close(self, reason: str) -> None:
        self._stop_work(reason)
        self._outlet.emit(said.SessionClosed(session_id=self.id, reason=reason))
        self._finish(reason)

    def _expire(self, reason: Expiry) -> None:
        self._stop_work(reason)
        self._outlet.emit(said.SessionExpired(session_id=self.id, reason=reason))
        self._finish(reason)

    def _stop_work(self, reason: str) -> None:
        self._responses.end_all(reason)
        self._transcripts.stop_all()
        self._listening.stop()

    def _finish(self, reason: str) -> None:
        self.is_over = True
        if self._outlet.attachment is not None:
            self._outlet.end(self._outlet.attachment, reason)
            self._outlet.attachment = None
        self._outlet.do(Ended(reason))
