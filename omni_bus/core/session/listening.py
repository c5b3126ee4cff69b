"""The user's side: sound comes in, speech is found in it, and turns are committed."""

from __future__ import annotations

from binascii import b2a_base64
from collections import deque
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from omni_bus.core.session import server_events as said
from omni_bus.core.session import turns
from omni_bus.core.session.client_events import ResponseOptions
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.config import SemanticVad, ServerVad, SessionConfig, TurnDetection
from omni_bus.core.session.conversation import image_urls, without_media
from omni_bus.core.session.effects import FeedVad, JudgeTurn, StartVad, StopVad
from omni_bus.core.session.input_buffer import BYTES_PER_MS, InputBuffer
from omni_bus.core.session.items import InputAudio, InputImage, Message
from omni_bus.core.session.overlap import ACTIONS, BARGE_IN, Decision, Overlap, decide, rms
from omni_bus.core.session.responses import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.session.client_events import AudioAppend, AudioCommit
    from omni_bus.core.session.responses import Responses
    from omni_bus.core.session.shared import Shared
    from omni_bus.core.session.transcripts import Transcripts

    Take = Callable[[], bytes]

LATENESS_MS = 30_000
"""A detector may be so far behind, where a client sends faster than it speaks (hosts see to it that it is no more);
sound before that, and before the padding, is forgotten while nobody speaks."""

RETRY_S = 1.0
"""A detector that failed is asked again after this."""


class Listening:
    """Input buffer, turn detection, commits, and speech that falls on an answer."""

    def __init__(self, shared: Shared, transcripts: Transcripts, responses: Responses) -> None:
        self._shared = shared
        self._transcripts = transcripts
        self._responses = responses
        self._buffer = InputBuffer()
        self._stream: int | None = None
        """The detector's stream that counts; None while none listens."""
        self._num_streams = 0
        self._origin_ms = 0
        """Where it begins."""
        self._vad_retry_at = 0.0
        self._item_id: str | None = None
        """Of the turn that is being spoken."""
        self._started_ms = 0
        self._pause: tuple[float, int] | None = None
        """A pause that ends the turn at this time, if it lasts; it began at this position."""
        self._num_pauses = 0
        self._guess: tuple[str, int] | None = None
        """The item that is written down in case it is over, and where its speech would have ended."""
        self._speech_ms = 0.0
        """Since the last commit, as far as is known without a detector."""
        self._overlap_ms = 0.0
        """Speech during the present answer."""
        self._overlap_response: str | None = None
        self._frames: deque[str] = deque()
        """Pictures of what the user sees, as URLs, since the last commit."""
        self._has_lost = False
        """Sound that came since the last commit was refused."""

    @property
    def _detection(self) -> TurnDetection | None:
        return self._shared.config.audio.input.turn_detection

    @property
    def is_speaking(self) -> bool:
        """A detector hears the user."""
        return self._item_id is not None

    @property
    def has_detector(self) -> bool:
        """The server finds turns; else the client says where they end."""
        return self._detection is not None

    @property
    def next_time(self) -> float | None:
        """When `on_timer` has something to do."""
        times = [] if self._pause is None else [self._pause[0]]
        idle_at = self._idle_at()
        return min(times if idle_at is None else [*times, idle_at], default=None)

    # --- what the client does ---------------------------------------------------------------------------------

    def append(self, event: AudioAppend) -> None:
        """Take sound: s16, 16 kHz, one channel; and pictures.

        Raises:
            SessionError: more waits for a commit than may, or a hint is unknown.
        """
        try:
            self._append(event)
        except SessionError:
            self.lose(is_append=True)
            raise

    def lose(self, *, is_append: bool) -> None:
        """An event was refused."""
        self._has_lost |= is_append and self._shared.is_duplex

    def _append(self, event: AudioAppend) -> None:
        audio, allowed = event.audio, self._shared.limits.max_buffer_bytes
        if event.overlap_action is not None and event.overlap_action not in ACTIONS:
            message = f"overlap_action: {event.overlap_action!r} came (allowed: {', '.join(sorted(ACTIONS))})"
            raise SessionError(Code.INVALID_VALUE, message, param="overlap_action")
        if not self._shared.capabilities.supports_audio_input:
            raise SessionError(Code.UNSUPPORTED_MODALITY, "audio: nothing here understands speech", param="audio")
        if event.video_frames and not self._shared.capabilities.supports_image_input:
            raise SessionError(Code.UNSUPPORTED_MODALITY, "video_frames: this model sees nothing", param="video_frames")
        if len(self._buffer) + len(audio) > allowed:
            held = len(self._buffer) + len(audio)
            message = f"audio: {held} bytes of sound would wait for a commit (allowed: {allowed})"
            raise SessionError(Code.INPUT_BACKPRESSURE, message, param="audio")
        self._see(event.video_frames)
        self._listen(audio)
        is_alone = not len(self._buffer)
        self._buffer.append(audio)
        if self._shared.is_duplex and not self._overlap(event) and is_alone:
            self._buffer.take_all()  # positions go on counting
            return
        if self._detection is not None and not self.is_speaking:
            self._buffer.keep_last(turns.prefix_ms(self._detection) + LATENESS_MS)

    def commit(self, event: AudioCommit) -> None:
        """Make the buffer a user item, and answer it if that is wanted.

        Raises:
            SessionError: nothing is in it, or there is no room.
        """
        if self._shared.is_duplex:
            self._commit_duplex(event)
            return
        if not len(self._buffer):
            raise SessionError(Code.BUFFER_EMPTY, "input_audio_buffer.commit: the buffer is empty")
        item_id = self._commit(self._buffer.take_all, said.CommitDetail())
        if event.create_response:
            self._answer(item_id, self._shared.now, is_refused_aloud=True)

    def clear(self, reason: Literal["clear", "input_cancel", "barge_in"] = "clear") -> None:
        """Forget the buffer."""
        self._forget()
        self._shared.outlet.emit(said.InputCleared(reason=reason, epoch=self._shared.epoch))

    def configure(self, former: SessionConfig) -> None:
        """The configuration was changed."""
        if former.audio.input.turn_detection != self._detection:
            self._stop_vad()

    def stop(self) -> None:
        """The session ends."""
        self._stop_vad()

    # --- what a detector says ---------------------------------------------------------------------------------

    def on_vad(self, stream: int, kind: turns.Heard, at_ms: float, heard_ms: float) -> None:
        """Speech begins, pauses, is resumed or ends; positions are milliseconds of the detector's stream.

        A pause is silence that is too short for an end; detectors need not tell of it, nor that speech is resumed.

        Args:
            stream: as in `StartVad`; a former one is ignored.
            kind: what happened.
            at_ms: where.
            heard_ms: how much the detector had heard when it knew.
        """
        detection = self._detection
        if stream != self._stream or detection is None:
            return
        position = self._origin_ms + int(at_ms)
        if kind == "start":
            self._on_speech(detection, position)
        elif kind == "pause":
            self._on_maybe_over(detection, position)
        elif kind == "resume":
            self._forget_guess()
        elif self.is_speaking:
            self._on_pause(detection, position, began_at=self._shared.now - max(0.0, heard_ms - at_ms) / 1000)

    def on_judged(self, pause: int, score: float) -> None:
        """A pause, as in `JudgeTurn`, sounds so much like the end of a turn: in [0, 1]."""
        detection = self._detection
        if self._pause is None or pause != self._num_pauses or detection is None:
            return
        unknown_at, position = self._pause
        shift_ms = turns.pause_ms(detection, score) - turns.pause_ms(detection, None)
        ends_at = unknown_at + shift_ms / 1000
        self._pause = (ends_at, position)
        if ends_at <= self._shared.now:
            self._on_silence(position)

    def on_vad_left(self, stream: int, heard_ms: float) -> None:
        """The detector's process is taken out of service; another one hears what came since.

        Args:
            stream: as in `StartVad`; a former one is ignored.
            heard_ms: how much of it was heard. Nobody spoke at its end; a turn that is over if a pause lasts, still is.
        """
        if stream != self._stream or self._detection is None:
            return
        self._stream = None
        start_ms = max(self._buffer.start_ms, self._origin_ms + int(heard_ms))
        if audio := self._buffer.look(start_ms, self._buffer.end_ms):
            self._start_vad(self._detection, start_ms)
            self._shared.outlet.do(FeedVad(self._num_streams, audio))

    def on_vad_failed(self, stream: int, message: str) -> None:
        """The detector is gone; another one is asked with the next sound."""
        if stream != self._stream:
            return
        self._stream = None
        self._vad_retry_at = self._shared.now + RETRY_S
        self._pause = None
        self._forget_guess()
        error = SessionError(Code.VAD_UNAVAILABLE, message, param="session.audio.input.turn_detection")
        self._shared.outlet.emit(said.ErrorEvent(error=error.detail(None)))

    def on_timer(self) -> None:
        """A pause may have lasted long enough, or the user may have been silent for too long."""
        now = self._shared.now
        if self._pause is not None and self._pause[0] <= now:
            self._on_silence(self._pause[1])
        idle_at = self._idle_at()
        if idle_at is not None and idle_at <= now:
            self._on_idle()

    # --- inside: turns ----------------------------------------------------------------------------------------

    def _see(self, frames: tuple[bytes, ...]) -> None:
        """Keep pictures for the turn that is being spoken: the latest, where there are more than may be."""
        limits = self._shared.limits
        urls = [_url(frame) for frame in frames]
        if any(len(url) > limits.max_image_bytes for url in urls):
            message = f"video_frames: a picture is too large (allowed: {limits.max_image_bytes} characters)"
            raise SessionError(Code.INPUT_BACKPRESSURE, message, param="video_frames")
        self._frames += urls
        while len(self._frames) > limits.max_images or sum(map(len, self._frames)) > limits.max_image_bytes:
            self._frames.popleft()

    def _forget(self) -> None:
        self._buffer.take_all()
        self._frames.clear()
        self._end_turn()
        self._speech_ms = self._overlap_ms = 0.0
        self._has_lost = False

    def _listen(self, audio: bytes) -> None:
        """Give sound to the detector, which is asked for one with the first."""
        if self._detection is None or not audio:
            return
        if self._stream is None:
            if self._shared.now < self._vad_retry_at:
                return
            self._start_vad(self._detection, self._buffer.end_ms)
        self._shared.outlet.do(FeedVad(self._num_streams, audio))

    def _start_vad(self, detection: TurnDetection, origin_ms: int) -> None:
        self._num_streams += 1
        self._stream, self._origin_ms = self._num_streams, origin_ms
        self._shared.outlet.do(StartVad(self._stream, detection))

    def _stop_vad(self) -> None:
        if self._stream is not None:
            self._shared.outlet.do(StopVad(self._stream))
        self._stream = None
        self._end_turn()

    def _on_speech(self, detection: TurnDetection, position: int) -> None:
        self._responses.listened_since = None
        if self.is_speaking:
            self._pause = None  # it was no end
            self._forget_guess()
            return
        self._item_id = self._shared.ids.new("item")
        self._shared.is_user_speaking = True
        self._started_ms = max(self._buffer.start_ms, position - turns.prefix_ms(detection))
        self._shared.outlet.emit(said.SpeechStarted(item_id=self._item_id, audio_start_ms=self._started_ms))
        if self._shared.is_duplex and self._responses.is_in_progress and detection.interrupt_response:
            self._decided(Decision("barge_in", "server_vad_speech_started"), "barge_in_on_speech", 0.0)
        if detection.interrupt_response:
            self._responses.interrupt("turn_detected", is_told=self._shared.is_duplex)

    def _on_pause(self, detection: TurnDetection, position: int, *, began_at: float) -> None:
        """The user's turn is over if this lasts."""
        ends_at = began_at + turns.pause_ms(detection, None) / 1000
        if ends_at <= self._shared.now:
            self._on_silence(position)
            return
        self._pause = (ends_at, position)
        self._num_pauses += 1
        self._on_maybe_over(detection, position)
        if isinstance(detection, SemanticVad):
            start_ms = max(self._started_ms, self._buffer.end_ms - turns.JUDGED_MS)
            sound = self._buffer.look(start_ms, self._buffer.end_ms)
            self._shared.outlet.do(JudgeTurn(self._num_pauses, sound))

    def _on_maybe_over(self, detection: TurnDetection, position: int) -> None:
        """The turn's words are wanted soon, if this was all of it."""
        guess = None if self._item_id is None else (self._item_id, position)
        if guess is None or guess == self._guess:
            return
        self._forget_guess()
        self._guess = guess
        sound = self._buffer.look(self._started_ms, self._end_ms(detection, position))
        self._transcripts.guess(guess[0], sound)

    def _forget_guess(self) -> None:
        if self._guess is not None:
            self._transcripts.drop_guess(self._guess[0])
            self._guess = None

    def _end_ms(self, detection: TurnDetection, position: int) -> int:
        """Return where a turn ends whose speech ended here: a bit of the silence belongs to it."""
        return min(self._buffer.end_ms, position + min(200, turns.candidate_ms(detection)))

    def _on_silence(self, position: int) -> None:
        """The user's turn is over."""
        detection, item_id = self._detection, self._item_id
        assert detection is not None
        assert item_id is not None
        now = self._shared.now
        speech_end_at = now - max(0, self._buffer.end_ms - position) / 1000
        end_ms = self._end_ms(detection, position)
        if self._guess != (item_id, position):
            self._forget_guess()
        self._shared.outlet.emit(said.SpeechStopped(item_id=item_id, audio_end_ms=end_ms))
        try:
            self._commit(
                lambda: self._buffer.take(self._started_ms, end_ms), said.CommitDetail(is_speech=True), is_guessed=True
            )
        finally:
            self._end_turn()
        if detection.create_response and self._shared.config.type == "realtime":
            self._answer(item_id, speech_end_at, is_refused_aloud=False)

    def _end_turn(self, *, keeps_guess: bool = False) -> None:
        if not keeps_guess:
            self._forget_guess()
        self._item_id = None
        self._pause = None
        self._shared.is_user_speaking = False

    def _idle_at(self) -> float | None:
        detection, since = self._detection, self._responses.listened_since
        if not isinstance(detection, ServerVad) or detection.idle_timeout_ms is None or since is None:
            return None
        if self.is_speaking or self._responses.active is not None:
            return None
        return since + detection.idle_timeout_ms / 1000

    def _on_idle(self) -> None:
        start_ms, end_ms = self._buffer.start_ms, self._buffer.end_ms
        self._responses.listened_since = None
        item_id = self._item_id = self._shared.ids.new("item")
        self._shared.outlet.emit(said.TimeoutTriggered(item_id=item_id, audio_start_ms=start_ms, audio_end_ms=end_ms))
        self._commit(self._nothing, said.CommitDetail(is_empty=True))
        self._end_turn()
        if self._shared.config.type == "realtime":
            self._responses.create(ResponseOptions())

    def _nothing(self) -> bytes:
        self._buffer.take_all()
        return b""

    # --- inside: commits --------------------------------------------------------------------------------------

    def _commit(self, take: Take, detail: said.CommitDetail, *, is_guessed: bool = False) -> str:
        """Turn sound into an item of the user; return its name. Its words may have been guessed already."""
        shared = self._shared
        shared.conversation.check_room()
        item_id = self._item_id or shared.ids.new("item")
        audio = take()
        self._end_turn(keeps_guess=is_guessed)
        self._speech_ms = 0.0
        shared.turn_id += 1
        shared.signalled = None
        content = (InputAudio(audio=audio),) if audio else ()
        item = Message(id=item_id, role="user", content=(*map(InputImage, self._frames), *content))
        self._frames.clear()
        self._has_lost = False
        shown = without_media(item)
        previous_id = shared.conversation.last_id
        history_len = len(shared.conversation) + 1
        detail = replace(detail, turn_id=shared.turn_id, epoch=shared.epoch, history_len=history_len)
        shared.outlet.emit(said.InputCommitted(item_id=item_id, previous_item_id=previous_id, detail=detail))
        shared.conversation.insert(item)
        if image_urls(item):
            shared.conversation.forget_images(shared.limits.max_images, shared.limits.max_image_bytes)
        shared.outlet.emit(said.ItemAdded(item=shown, previous_item_id=previous_id))
        shared.outlet.emit(said.ItemDone(item=shown, previous_item_id=previous_id))
        self._transcripts.begin(item)
        return item_id

    def _answer(self, item_id: str, speech_end_at: float, *, is_refused_aloud: bool) -> None:
        """Answer a turn now, or when the answer under way is over."""
        if self._responses.active is not None and not is_refused_aloud:
            self._responses.defer()
            return
        self._responses.create(ResponseOptions(), Turn(item_id, speech_end_at, self._shared.now))

    def _commit_duplex(self, event: AudioCommit) -> None:
        """Resolve a commit as the duplex dialect does."""
        shared, responses = self._shared, self._responses
        assert shared.config.duplex is not None
        if self._has_lost:
            self._has_lost = False
            message = "input_audio_buffer.commit: sound of this turn was refused; commit again to go without it"
            raise SessionError(Code.COMMIT_ABORTED, message)
        is_silent = event.is_speech is False or (
            self._detection is None and bool(len(self._buffer)) and not self._speech_ms and event.is_speech is None
        )
        if is_silent:
            self._discard(said.CommitDetail(is_empty=True, is_speech=False, no_response=True))
            shared.outlet.emit(said.Listen(session_id=shared.id, epoch=shared.epoch, reason="silence_or_noise"))
            return
        if not len(self._buffer):
            raise SessionError(Code.BUFFER_EMPTY, "input_audio_buffer.commit: the buffer is empty")
        if responses.is_in_progress and 0 < self._overlap_ms <= shared.config.duplex.overlap_short_ack_ms:
            self._discard(said.CommitDetail(is_empty=True, overlap_ack=True, no_response=True))
            return
        is_deferred = responses.is_in_progress
        if is_deferred and event.create_response:
            responses.defer()
        detail = said.CommitDetail(
            is_speech=event.is_speech,
            no_response=not event.create_response,
            overlap_deferred=is_deferred,
            response_create_deferred=is_deferred and event.create_response,
        )
        self._overlap_ms = 0.0
        item_id = self._commit(self._buffer.take_all, detail)
        if event.create_response and not is_deferred:
            self._answer(item_id, shared.now, is_refused_aloud=True)

    def _discard(self, detail: said.CommitDetail) -> None:
        """Nothing that anybody said is committed."""
        shared = self._shared
        self._forget()
        history_len = len(shared.conversation)
        detail = replace(detail, turn_id=shared.turn_id, epoch=shared.epoch, history_len=history_len)
        previous_id = shared.conversation.last_id
        shared.outlet.emit(said.InputCommitted(item_id=None, previous_item_id=previous_id, detail=detail))

    # --- inside: speech on an answer ----------------------------------------------------------------------------

    def _overlap(self, event: AudioAppend) -> bool:
        """Judge sound of a duplex client; return whether it is kept for a turn."""
        shared, responses = self._shared, self._responses
        config = shared.config.duplex
        assert config is not None
        duration_ms = len(event.audio) / BYTES_PER_MS
        is_speech = event.is_speech if event.is_speech is not None else rms(event.audio) >= config.overlap_silence_rms
        self._speech_ms += duration_ms * is_speech
        has_hint = event.overlap_action is not None or event.force_barge_in or event.force_listen
        if not responses.is_in_progress or not event.audio or (self._detection is not None and not has_hint):
            return True  # a detector's own verdict comes later
        response_id = None if responses.active is None else responses.active.id
        if response_id != self._overlap_response:
            self._overlap_response, self._overlap_ms = response_id, 0.0
        self._overlap_ms += duration_ms * is_speech
        decision = decide(
            Overlap(
                client_action=event.overlap_action,
                force_barge_in=event.force_barge_in,
                force_listen=event.force_listen,
                is_speech=is_speech,
                transcript=event.transcript,
                duration_ms=duration_ms,
                overlap_speech_ms=self._overlap_ms,
                policy=config.overlap_policy,
                short_ack_ms=config.overlap_short_ack_ms,
                barge_in_ms=config.overlap_barge_in_ms,
                can_barge_in=shared.capabilities.supports_barge_in,
                is_auto_response=config.auto_response,
                is_continuing=self.is_speaking,
                has_detector=self._detection is not None,
            )
        )
        self._decided(decision, config.overlap_policy, duration_ms)
        if decision.reason == "barge_in_unsupported" and (event.force_barge_in or event.overlap_action in BARGE_IN):
            error = SessionError(Code.BARGE_IN_UNSUPPORTED, "this model can't be interrupted")
            shared.outlet.emit(said.ErrorEvent(error=error.detail(event.event_id)))
        if decision.action == "barge_in":
            self._overlap_ms = 0.0
            responses.interrupt("barge_in", is_told=True)
        return decision.keeps_audio

    def _decided(self, decision: Decision, policy: str, duration_ms: float) -> None:
        shared = self._shared
        shared.outlet.emit(
            said.OverlapDecision(
                session_id=shared.id,
                epoch=shared.epoch,
                policy=policy,
                action=decision.action,
                reason=decision.reason,
                duration_ms=duration_ms,
                overlap_speech_ms=self._overlap_ms,
                is_audio_kept=decision.keeps_audio,
            )
        )


def _url(frame: bytes) -> str:
    kind = "png" if frame.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{b2a_base64(frame, newline=False).decode()}"


def effective(config: SessionConfig, capabilities: said.Capabilities) -> SessionConfig:
    """Return the configuration with what this deployment does in place of what it can't do."""
    detection = config.audio.input.turn_detection
    if detection is None:
        return config
    if isinstance(detection, SemanticVad) and not capabilities.supports_semantic_vad:
        detection = ServerVad(
            create_response=detection.create_response, interrupt_response=detection.interrupt_response
        )
    kept = detection if capabilities.supports_server_vad else None
    return replace(config, audio=replace(config.audio, input=replace(config.audio.input, turn_detection=kept)))
