"""Late, doubled, crossed and lost events: whatever comes in which order, a strict client can follow.

`Talk` checks after every step: numbers without gaps, responses that open and close in order and once, a conversation
that the events rebuild, bounded buffers, and no work without its end.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from omni_bus.core.session import client_events as asked
from omni_bus.core.session import server_events as said
from omni_bus.core.session.items import FunctionCallOutput, InputAudio, InputImage, InputText, Message
from omni_bus.core.session.limits import Limits
from omni_bus.sim.sessions import Broken, Talk

LIMITS = Limits(
    max_items=12,
    max_buffer_bytes=100_000,
    max_conversation_bytes=60_000,
    max_pending_turns=2,
    max_out_of_band=2,
    max_transcriptions=2,
    max_images=3,
    max_image_bytes=2000,
    journal_bytes=20_000,
    journal_ttl_s=10,
    grace_s=5,
    idle_ttl_s=30,
)
DETECTIONS = st.sampled_from(
    [
        None,
        {"type": "server_vad"},
        {"type": "server_vad", "interrupt_response": False},
        {"type": "server_vad", "create_response": False, "idle_timeout_ms": 1000},
        {"type": "semantic_vad"},
    ]
)
MILLISECONDS = st.integers(0, 3000)


class Session(RuleBasedStateMachine):
    """A client, a detector, a recogniser, a model and sockets that come and go."""

    @initialize(
        is_resumable=st.booleans(),
        hears=st.booleans(),
        is_duplex=st.booleans(),
        policy=st.sampled_from(["listen_only", "barge_in_on_speech", "auto"]),
        transcribes=st.booleans(),
        ack_only=st.booleans(),
        sees=st.booleans(),
    )
    def begin(self, is_resumable, hears, is_duplex, policy, transcribes, ack_only, sees):
        session = {
            "playback_commit_policy": "ack_only" if ack_only else "commit_all_on_done",
            "tools": [{"type": "function", "name": "f"}],
        }
        if is_duplex:
            session["duplex"] = {"overlap_policy": policy}
        if transcribes:
            session["audio"] = {"input": {"transcription": {}}}
        self.talk = Talk(
            session=session,
            capabilities=said.Capabilities(
                supports_tools=True, hears_audio=hears, supports_semantic_vad=True, supports_image_input=sees
            ),
            limits=LIMITS,
            is_resumable=is_resumable,
        )
        self.next_attachment = 2
        self.known_responses = ["resp_none"]
        self.known_transcripts = ["item_none"]

    @property
    def is_open(self):
        return hasattr(self, "talk") and self.talk.ended is None

    def take(self, effects):
        self.talk.take(effects)
        self.known_responses += [name for name in self.talk.generating if name not in self.known_responses]
        self.known_transcripts += [name for name in self.talk.transcribing if name not in self.known_transcripts]

    def say(self, event):
        self.take(self.talk.core.on_client(self.talk.attachment, event, self.talk.now))

    @property
    def some_items(self):
        return [*self.talk.items, "gone"]

    # --- time -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_open)
    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds):
        self.talk.wait(seconds)

    # --- the client -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_open)
    @rule(
        num_ms=st.integers(0, 1500),
        is_loud=st.booleans(),
        action=st.sampled_from([None, "interrupt", "listen", "drop", "nonsense"]),
        frames=st.sampled_from([(), (b"\xff\xd8",), (b"\xff\xd8" * 300,), (b"\x89PNG" * 900, b"\xff\xd8")]),
    )
    def append(self, num_ms, is_loud, action, frames):
        audio = (b"\0\x20" if is_loud else b"\0\0") * 16 * num_ms
        self.say(asked.AudioAppend(audio=audio, overlap_action=action, video_frames=frames))

    @precondition(lambda self: self.is_open)
    @rule(create=st.booleans(), is_speech=st.sampled_from([None, True, False]))
    def commit(self, create, is_speech):
        self.say(asked.AudioCommit(create_response=create, is_speech=is_speech))

    @precondition(lambda self: self.is_open)
    @rule(
        event=st.sampled_from(
            [
                asked.AudioClear(),
                asked.InputCancel(),
                asked.BargeIn(),
                asked.Heartbeat(),
                asked.ResponseCancel(),
                asked.OutputAudioClear(),
                asked.ResponseCreate(),
                asked.ResponseCreate(response=asked.ResponseOptions(conversation="none", output_modalities=("text",))),
                asked.ResponseCreate(
                    response=asked.ResponseOptions(
                        input=(Message(role="user", content=(InputAudio(audio=bytes(3200)), InputText("x"))),)
                    )
                ),
                asked.TurnSignal(event="user_started"),
                asked.Refuse(code="INVALID_JSON", message="no JSON"),
                asked.Refuse(code="INVALID_AUDIO", message="no base64", is_append=True),
            ]
        )
    )
    def command(self, event):
        self.say(event)

    @precondition(lambda self: self.is_open)
    @rule(detection=DETECTIONS)
    def detect(self, detection):
        self.say(asked.SessionUpdate(session={"audio": {"input": {"turn_detection": detection}}}))

    @precondition(lambda self: self.is_open)
    @rule(data=st.data(), kind=st.sampled_from(["sound", "text", "picture"]))
    def create_item(self, data, kind):
        kinds = {"sound": InputAudio(audio=bytes(6400)), "picture": InputImage("data:image/png;base64,AAAA")}
        part = kinds.get(kind, InputText("Hello"))
        after = data.draw(st.sampled_from([None, "root", *self.some_items]))
        self.say(asked.ItemCreate(item=Message(role="user", content=(part, part)), previous_item_id=after))

    @precondition(lambda self: self.is_open)
    @rule(data=st.data())
    def answer_call(self, data):
        index = data.draw(st.integers(0, 2))
        self.say(asked.ItemCreate(item=FunctionCallOutput(call_id=f"call_{index}", output="42")))

    @precondition(lambda self: self.is_open)
    @rule(data=st.data(), what=st.sampled_from(["delete", "retrieve", "truncate"]), position=MILLISECONDS)
    def change_item(self, data, what, position):
        item_id = data.draw(st.sampled_from(self.some_items))
        events = {
            "delete": asked.ItemDelete(item_id=item_id),
            "retrieve": asked.ItemRetrieve(item_id=item_id),
            "truncate": asked.ItemTruncate(item_id=item_id, audio_end_ms=position),
        }
        self.say(events[what])

    @precondition(lambda self: self.is_open)
    @rule(data=st.data(), played_ms=MILLISECONDS, is_named=st.booleans(), truncate=st.booleans())
    def acknowledge(self, data, played_ms, is_named, truncate):
        name = data.draw(st.sampled_from(self.known_responses)) if is_named else None
        self.say(asked.PlaybackAck(played_ms=played_ms, response_id=name, truncate=truncate))

    # --- models, also such as don't know that nobody waits for them any more ----------------------------------

    @precondition(lambda self: self.is_open)
    @rule(
        kind=st.sampled_from(["start", "pause", "resume", "end"]),
        at=MILLISECONDS,
        late=st.integers(0, 600),
        is_former=st.booleans(),
    )
    def hear(self, kind, at, late, is_former):
        stream = (self.talk.vad or 1) - is_former
        self.take(self.talk.core.on_vad(stream, kind, at, at + late, self.talk.now))

    @precondition(lambda self: self.is_open)
    @rule(pause=st.integers(1, 3), score=st.floats(0, 1))
    def judge(self, pause, score):
        self.take(self.talk.core.on_judged(pause, score, self.talk.now))

    @precondition(lambda self: self.is_open and self.talk.vad is not None)
    @rule()
    def lose_detector(self):
        stream, self.talk.vad = self.talk.vad or 0, None
        self.take(self.talk.core.on_vad_failed(stream, "stage 'vad' was lost", self.talk.now))

    @precondition(lambda self: self.is_open and self.talk.vad is not None)
    @rule(heard=MILLISECONDS)
    def dismiss_detector(self, heard):
        stream, self.talk.vad = self.talk.vad or 0, None
        self.take(self.talk.core.on_vad_left(stream, heard, self.talk.now))

    @precondition(lambda self: self.is_open)
    @rule(data=st.data(), what=st.sampled_from(["delta", "done", "failed"]), text=st.sampled_from(["", "Hello"]))
    def transcribe(self, data, what, text):
        item_id = data.draw(st.sampled_from(self.known_transcripts))
        core, now = self.talk.core, self.talk.now
        if what == "delta":
            self.take(core.on_transcript(item_id, text, now))
            return
        self.talk.transcribing.pop(item_id, None)
        self.take(
            core.on_transcribed(item_id, now) if what == "done" else core.on_transcript_failed(item_id, "lost", now)
        )

    @precondition(lambda self: self.is_open)
    @rule(
        data=st.data(),
        what=st.sampled_from(["text", "audio", "call", "calls", "done", "failed"]),
        num_ms=st.integers(0, 1000),
    )
    def generate(self, data, what, num_ms):
        name = data.draw(st.sampled_from(self.known_responses))
        core, now = self.talk.core, self.talk.now
        if what in {"done", "failed"}:
            self.talk.generating.pop(name, None)
        effects = {
            "text": lambda: core.on_text(name, "word ", now),
            "audio": lambda: core.on_audio(name, b"\1\0" * 24 * num_ms, float(num_ms), now),
            "call": lambda: core.on_tool_call(name, num_ms % 3, f"call_{num_ms % 3}", "f", "{}", now),
            "calls": lambda: core.on_tool_calls_done(name, now),
            "done": lambda: core.on_generated(name, "stop", None, now),
            "failed": lambda: core.on_failed(name, "stage_lost", "lost", now),
        }
        self.take(effects[what]())

    # --- sockets ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_open)
    @rule(is_mine=st.booleans())
    def detach(self, is_mine):
        self.take(self.talk.core.on_detached(self.talk.attachment if is_mine else 999, self.talk.now))

    @precondition(lambda self: self.is_open and self.talk.tokens)
    @rule(is_old=st.booleans(), missed=st.integers(-1, 5))
    def resume(self, is_old, missed):
        token = self.talk.tokens[0 if is_old else -1]
        is_lie = missed < 0
        seq = self.talk.core._outlet.journal.head + 1 if is_lie else max(0, self.talk.watcher.last_seq - missed)
        attachment, self.next_attachment = self.next_attachment, self.next_attachment + 1
        event = asked.SessionResume(session_id="sess_1", resume_token=token, last_received_server_event_seq=seq)
        self.take(self.talk.core.on_resumed(attachment, event, self.talk.now))
        if self.talk.core.attachment == attachment:
            self.talk.attachment = attachment

    @precondition(lambda self: self.is_open)
    @rule(which=st.integers(0, 9))
    def drain(self, which):
        was_answering = bool(self.talk.generating)
        self.take(self.talk.core.on_drained(self.talk.now, is_drained=which == 9))
        assert self.is_open or not was_answering, "an answer was cut off"

    @precondition(lambda self: self.is_open)
    @rule(seq=st.integers(-1, 50))
    def acknowledge_events(self, seq):
        self.say(asked.EventAck(server_event_seq=seq))

    @precondition(lambda self: self.is_open)
    @rule(is_close=st.integers(0, 9))
    def close(self, is_close):
        if is_close == 9:
            self.say(asked.SessionClose())

    @precondition(lambda self: not self.is_open)
    @rule(seconds=st.integers(0, 5))
    def come_too_late(self, seconds):
        self.talk.now += seconds
        self.say(asked.Heartbeat())
        self.take(self.talk.core.on_timer(self.talk.now))
        self.take(self.talk.core.on_text(self.known_responses[-1], "late", self.talk.now))

    def teardown(self):
        """Whatever happened, the end closes every response, and the same happens the next time."""
        if not hasattr(self, "talk"):
            return
        self.talk.replay()
        if not self.is_open:
            return
        listens = self.talk.core.attachment is not None and not self.talk.core._outlet.journal.has_overflowed
        self.take(self.talk.core.on_shutdown(self.talk.now))
        open_ones = [name for name, response in self.talk.watcher.responses.items() if not response.is_done]
        if listens and open_ones:
            raise Broken(f"{open_ones} never ended")


TestSession = Session.TestCase
TestSession.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
