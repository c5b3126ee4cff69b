"""A client and models around a session core, for tests: what they do by hand, and what must hold after every step.

`Talk` carries no effect out by itself. It keeps what the core said and asked for, and checks with each event that a
strict client could follow: numbers without gaps, responses that open and close in order, a conversation that the events
alone rebuild.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import effects as done
from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import encoded, server_event
from omni_bus.core.session.config import SessionConfig
from omni_bus.core.session.conversation import size_of, without_media
from omni_bus.core.session.core import SessionCore
from omni_bus.wire.payloads import Blob, Media

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_bus.core.session.effects import Effect
    from omni_bus.core.session.limits import Limits

SILENCE_MS = b"\0" * 32
"""A millisecond inside a session."""

PART_DONE = (said.AudioDone, said.TextDone)
RESPONSE_EVENTS = (
    said.OutputItemAdded,
    said.OutputItemDone,
    said.ContentPartAdded,
    said.ContentPartDone,
    said.TextDelta,
    said.TextDone,
    said.AudioDelta,
    said.AudioDone,
    said.TranscriptDelta,
    said.TranscriptDone,
    said.ArgumentsDelta,
    said.ArgumentsDone,
    said.Speak,
)


class Broken(AssertionError):
    """A session said or did what it must not."""


class _Watched:
    """One response, as its events tell it."""

    def __init__(self) -> None:
        self.open_items: dict[str, int] = {}
        self.open_parts: set[str] = set()
        self.texts: dict[str, str] = defaultdict(str)
        self.num_items = 0
        self.is_done = False


class Watcher:
    """A strict client: follows events, and raises `Broken` where it can't."""

    def __init__(self) -> None:
        self.responses: dict[str, _Watched] = {}
        self.order: list[str] = []
        """The conversation, as `added` and `deleted` tell it."""
        self.last_seq = 0
        self._event_ids: set[str] = set()

    def follow(self, event: said.AnyServerEvent) -> None:
        """Take the next event of the session, whoever it was said to."""
        _need(event.event_id not in self._event_ids, f"{event.event_id} was used twice")
        self._event_ids.add(event.event_id)
        if isinstance(event, said.UNKEPT):
            _need(event.server_event_seq is None, f"{event} has a number")
            return
        if event.server_event_seq is not None:
            _need(event.server_event_seq == self.last_seq + 1, f"{event} follows {self.last_seq}")
            self.last_seq = event.server_event_seq
        match event:
            case said.ItemAdded():
                self._on_added(event)
            case said.ItemDeleted(item_id=item_id):
                self.order.remove(item_id)
            case said.ResponseCreated(response=response):
                _need(response.id not in self.responses, f"{response.id} was created twice")
                _need(response.status == "in_progress", f"{response.id} begins as {response.status}")
                self.responses[response.id] = _Watched()
            case said.ResponseDone(response=response):
                self._on_done(response)
            case _ if isinstance(event, RESPONSE_EVENTS):
                self._on_response(event)
            case _:
                pass

    def _on_added(self, event: said.ItemAdded) -> None:
        assert event.item.id is not None
        _need(event.item.id not in self.order, f"{event.item.id} was added twice")
        previous = event.previous_item_id
        self.order.insert(0 if previous is None else self.order.index(previous) + 1, event.item.id)

    def _on_done(self, response: said.ResponseView) -> None:
        watched = self.responses[response.id]
        _need(not watched.is_done, f"{response.id} was done twice")
        _need(not watched.open_items and not watched.open_parts, f"{response.id} is done with open parts")
        _need(response.status != "in_progress", f"{response.id} is done in progress")
        _need(len(response.output) == watched.num_items, f"{response.id} has other items than it said")
        watched.is_done = True

    def _on_response(self, event: Any) -> None:
        watched = self.responses.get(event.response_id)
        if watched is None or watched.is_done:
            raise Broken(f"{type(event).__name__} of {event.response_id}, which is not being given")
        is_item = isinstance(event, said.OutputItemAdded | said.OutputItemDone)
        item_id: str = (event.item.id or "") if is_item else event.item_id
        match event:
            case said.OutputItemAdded(output_index=index):
                _need(index == watched.num_items, f"item {index} follows {watched.num_items} items")
                watched.num_items += 1
                watched.open_items[item_id] = index
            case said.OutputItemDone():
                _need(item_id not in watched.open_parts, f"{item_id} is done with an open part")
                _need(watched.open_items.pop(item_id, None) == event.output_index, f"{item_id} was not open")
            case said.ContentPartAdded():
                watched.open_parts.add(item_id)
            case said.ContentPartDone(part=part):
                watched.open_parts.remove(item_id)
                _need((part.text or part.transcript or "") == watched.texts[item_id], f"{item_id} ends otherwise")
            case said.Speak():
                pass
            case _:
                _need(item_id in watched.open_items, f"{type(event).__name__} of {item_id}, which is not open")
                self._on_piece(watched, event)

    @staticmethod
    def _on_piece(watched: _Watched, event: Any) -> None:
        match event:
            case said.TextDelta(delta=delta) | said.TranscriptDelta(delta=delta) | said.ArgumentsDelta(delta=delta):
                watched.texts[event.item_id] += delta
            case said.TextDone(text=text) | said.TranscriptDone(transcript=text) | said.ArgumentsDone(arguments=text):
                _need(text == watched.texts[event.item_id], f"{event.item_id}: {text!r} is not what was said")
            case said.AudioDelta():
                _need(bool(event.delta), "an empty piece of sound")
                _need(event.item_id in watched.open_parts, "sound outside a part")
            case _:
                pass


class Talk:
    """A session core with a clock that the test moves, and everything that it said."""

    def __init__(
        self,
        *,
        session: dict[str, Any] | None = None,
        capabilities: said.Capabilities | None = None,
        limits: Limits | None = None,
        is_resumable: bool = False,
        defaults: SessionConfig | None = None,
    ) -> None:
        self.now = 1000.0
        self.tokens: list[str] = []
        self.events: list[said.AnyServerEvent] = []
        """Said to whoever listened."""
        self.seen: dict[int, list[said.AnyServerEvent]] = defaultdict(list)
        """By attachment."""
        self._by_seq: dict[int, said.AnyServerEvent] = {}
        self._heard: set[tuple[int, str]] = set()
        self.effects: list[Effect] = []
        self.watcher = Watcher()
        self.generating: dict[str, done.Generate] = {}
        self.transcribing: dict[str, done.Transcribe] = {}
        self.vad: int | None = None
        self.vad_audio = bytearray()
        self.timer: float | None = None
        self.ended: str | None = None
        self.closed: dict[int, str] = {}
        self.attachment = 1
        opening = asked.SessionOpen(session_id="sess_1", session=session or {}, is_resumable=is_resumable)

        def new_core(tokens: list[str]) -> SessionCore:
            return SessionCore(
                opening,
                seed="5eed",
                defaults=defaults or SessionConfig(),
                capabilities=capabilities or said.Capabilities(supports_tools=True, hears_audio=True),
                limits=limits,
                new_token=lambda: _new_token(tokens),
            )

        self._new_core = new_core
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any], list[Effect]]] = []
        self.core = new_core(self.tokens)
        self._record(self.core)
        self.take(self.core.on_opened(1, self.now))

    # --- moving -----------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let time pass; timers come when they are due."""
        end = self.now + seconds
        while self.timer is not None and self.timer <= end and self.ended is None:
            self.now, self.timer = max(self.now, self.timer), None
            self.take(self.core.on_timer(self.now))
        self.now = end

    def say(self, event: asked.AnyClientEvent) -> list[said.AnyServerEvent]:
        """Be the client; return what is said in answer."""
        return self.take(self.core.on_client(self.attachment, event, self.now))

    def append(self, num_ms: int, **hints: Any) -> list[said.AnyServerEvent]:
        """Be the client's microphone, as fast as real time."""
        self.wait(num_ms / 1000)
        return self.say(asked.AudioAppend(audio=SILENCE_MS * num_ms, **hints))

    def take(self, effects: Sequence[Effect]) -> list[said.AnyServerEvent]:
        """Keep and check effects; return the events among them."""
        events: list[said.AnyServerEvent] = []
        for effect in effects:
            _need(self.ended is None, f"{effect} after the end")
            self.effects.append(effect)
            if isinstance(effect, done.Emit):
                events.append(effect.event)
                self._on_emit(effect)
            else:
                self._on_effect(effect)
        self.check()
        return events

    def check(self) -> None:
        """Raise `Broken` unless what the core holds is what its events tell."""
        shared = self.core._shared
        if self.watcher.last_seq == self.core._outlet.journal.head:
            _need([item.id for item in shared.conversation.items] == self.watcher.order, "the order is another one")
        journal = self.core._outlet.journal
        _need(journal.num_bytes <= shared.limits.journal_bytes, f"the journal holds {journal.num_bytes} bytes")
        _need(len(self.core._listening._buffer) <= shared.limits.max_buffer_bytes, "the buffer is too large")
        frames = self.core._listening._frames
        _need(len(frames) <= shared.limits.max_images, f"{len(frames)} pictures wait for a commit")
        _need(sum(map(len, frames)) <= shared.limits.max_image_bytes, "the pictures that wait are too large")
        num_images, num_bytes = shared.conversation.images
        if shared.is_duplex:
            _need(num_images <= shared.limits.max_images, f"the conversation has {num_images} pictures")
            _need(num_bytes <= shared.limits.max_image_bytes, "the pictures are too large")
        sizes = sum(size_of(item) for item in shared.conversation.items)
        _need(shared.conversation.num_bytes == sizes, f"the conversation counts {shared.conversation.num_bytes} bytes")
        if self.ended is not None:
            _need(not self.generating and not self.transcribing and self.vad is None, "work goes on after the end")

    def _on_emit(self, effect: done.Emit) -> None:
        _need(effect.attachment not in self.closed, f"{effect.event} to an attachment that ended")
        _need(encoded(effect.event) == effect.data, "the bytes are not the event's")
        _need(server_event(Media("application/vnd.msgpack", Blob(effect.data))) == effect.event, "it is read otherwise")
        heard = (effect.attachment, effect.event.event_id)
        _need(heard not in self._heard, f"{effect.event} was said twice to one attachment")
        self._heard.add(heard)
        self.seen[effect.attachment].append(effect.event)
        seq = effect.event.server_event_seq
        if seq is not None and seq <= self.watcher.last_seq:
            _need(self._by_seq[seq] == effect.event, f"{effect.event} was another one before")
            return
        if seq is not None:
            self._by_seq[seq] = effect.event
        item = getattr(effect.event, "item", None)
        is_whole = isinstance(effect.event, said.ItemRetrieved)
        _need(item is None or is_whole or item == without_media(item), f"{effect.event} brings media along")
        self.events.append(effect.event)
        self.watcher.follow(effect.event)

    def _on_effect(self, effect: Effect) -> None:
        match effect:
            case done.Generate(response_id=response_id):
                self.generating[response_id] = effect
            case done.CancelGeneration(response_id=response_id):
                _need(response_id in self.generating, f"{response_id} is cancelled and was not generated")
                del self.generating[response_id]
            case done.Transcribe(item_id=item_id):
                _need(item_id not in self.transcribing, f"{item_id} is written down twice at once")
                self.transcribing[item_id] = effect
            case done.StopTranscribing(item_id=item_id):
                del self.transcribing[item_id]
            case done.StartVad(stream=stream):
                _need(self.vad is None, "two detectors at once")
                self.vad = stream
                self.vad_audio.clear()
            case done.FeedVad(stream=stream, audio=audio):
                _need(stream == self.vad, "sound for a former detector")
                self.vad_audio += audio
            case done.StopVad(stream=stream):
                _need(stream == self.vad, "a former detector is stopped")
                self.vad = None
            case done.SetTimer(at=at):
                self.timer = at
            case done.EndAttachment(attachment=attachment, reason=reason):
                self.closed[attachment] = reason
            case done.Ended(reason=reason):
                self.ended = reason
            case _:
                pass

    def replay(self) -> None:
        """Do all again with another core: the same inputs must have the same effects."""
        core = self._new_core([])
        for name, args, kwargs, effects in self._calls:
            _need(getattr(core, name)(*args, **kwargs) == effects, f"{name} did something else the second time")

    def _record(self, core: SessionCore) -> None:
        def recorded(name: str, method: Callable[..., list[Effect]]) -> Callable[..., list[Effect]]:
            def call(*args: Any, **kwargs: Any) -> list[Effect]:
                effects = method(*args, **kwargs)
                self._calls.append((name, args, kwargs, effects))
                return effects

            return call

        for name in dir(core):
            if name.startswith("on_"):
                setattr(core, name, recorded(name, getattr(core, name)))

    # --- being the models -------------------------------------------------------------------------------------

    @property
    def generation(self) -> str:
        """The one response that is generated."""
        (response_id,) = self.generating
        return response_id

    def speech(self, start_ms: float, heard_ms: float | None = None) -> list[said.AnyServerEvent]:
        """Be a detector that hears speech begin."""
        assert self.vad is not None
        heard = self.vad_ms if heard_ms is None else heard_ms
        return self.take(self.core.on_vad(self.vad, "start", start_ms, heard, self.now))

    def silence(self, end_ms: float) -> list[said.AnyServerEvent]:
        """Be a detector that hears speech end."""
        assert self.vad is not None
        return self.take(self.core.on_vad(self.vad, "end", end_ms, self.vad_ms, self.now))

    def pause(self, end_ms: float) -> list[said.AnyServerEvent]:
        """Be a detector that hears speech pause."""
        assert self.vad is not None
        return self.take(self.core.on_vad(self.vad, "pause", end_ms, self.vad_ms, self.now))

    def resume(self, start_ms: float) -> list[said.AnyServerEvent]:
        """Be a detector that hears speech go on after a pause."""
        assert self.vad is not None
        return self.take(self.core.on_vad(self.vad, "resume", start_ms, self.vad_ms, self.now))

    def judge(self, score: float) -> list[said.AnyServerEvent]:
        """Be a judge of the latest pause."""
        asked_for = [effect for effect in self.effects if isinstance(effect, done.JudgeTurn)]
        return self.take(self.core.on_judged(asked_for[-1].pause, score, self.now))

    @property
    def vad_ms(self) -> float:
        """How much the detector has heard."""
        return len(self.vad_audio) / len(SILENCE_MS)

    def text(self, delta: str, response_id: str | None = None) -> list[said.AnyServerEvent]:
        """Be a model that writes."""
        return self.take(self.core.on_text(response_id or self.generation, delta, self.now))

    def sound(self, num_ms: int, response_id: str | None = None) -> list[said.AnyServerEvent]:
        """Be a voice."""
        audio = b"\1\0" * 24 * num_ms
        return self.take(self.core.on_audio(response_id or self.generation, audio, float(num_ms), self.now))

    def finish(
        self, finish: str = "stop", response_id: str | None = None, usage: said.ResponseUsage | None = None
    ) -> list[said.AnyServerEvent]:
        """Be a model that is done."""
        name = response_id or self.generation
        self.generating.pop(name, None)
        return self.take(self.core.on_generated(name, finish, usage, self.now))

    def fail(self, response_id: str | None = None) -> list[said.AnyServerEvent]:
        """Be a model that can't go on."""
        name = response_id or self.generation
        self.generating.pop(name, None)
        return self.take(self.core.on_failed(name, "stage_failed", "stage 'llm' failed", self.now))

    def transcribed(self, text: str, item_id: str | None = None) -> list[said.AnyServerEvent]:
        """Be a recogniser that is done."""
        name = item_id or next(iter(self.transcribing))
        self.transcribing.pop(name, None)
        heard = self.take(self.core.on_transcript(name, text, self.now))
        return heard + self.take(self.core.on_transcribed(name, self.now))

    # --- looking ----------------------------------------------------------------------------------------------

    @property
    def items(self) -> list[str]:
        """Names of the conversation's items, in order."""
        return [item.id or "" for item in self.core._shared.conversation.items]


def names(events: Sequence[said.AnyServerEvent]) -> list[str]:
    """Return the types of events."""
    return [str(type(event).__struct_config__.tag) for event in events]


def _new_token(tokens: list[str]) -> str:
    tokens.append(f"token{len(tokens)}")
    return tokens[-1]


def _need(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 (a condition)
    if not is_so:
        raise Broken(otherwise)
