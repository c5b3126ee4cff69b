"""Moshi of transformers as a session engine: it hears and speaks at the same time, and writes down what it says.

All open sessions advance together, a frame of 80 ms in each step: one pass of the codec and of the language model, with
a row for each session (`adapters.moshi_model`). Sessions come and go between any two frames. A session whose sound is
late hears silence; of sound that waits too long the oldest is dropped, so that the conversation stays in the present.
Instructions and a voice are primed before it (`adapters.moshi_prompt`), some of their frames in each step, beside the
conversations that go on.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.detokenize import Detokenizer
from adapters.model_memory import Files
from adapters.moshi_model import DEFAULTS, MAX_TOP_K, MimiStreams, MoshiStreams
from adapters.moshi_prompt import PAUSE, Frames, Prompts, voice_names, voice_problems
from adapters.random_state import MAX_SEED
from adapters.recorded import Recorded, recording
from adapters.speech_input import SpeechInput
from adapters.transformers_model import ModelLoader, ModelOptions, check_model
from omni_bus.engine import EngineRequest, Event, Finished, Output, SessionEngine, Starved
from omni_bus.errors import BadInput, Overloaded, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Blob, Payload, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    import torch

    from omni_bus.engine import Context, Memory, Report
    from omni_bus.ids import RequestId

    Samples = npt.NDArray[np.float32]

NAME = "transformers-moshi"

SILENT_TOKENS = frozenset({0, PAUSE})
"""Text tokens that say nothing: the end of a pause, and the pause (moshi 0.2.13, `server.py`)."""

PRIMED_PER_STEP = 4
"""Frames of prompts that one step reads, each for all sessions that have one: a second of prompt in a quarter of one,
while those who talk are held up for less than a frame."""

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=1, le=MAX_TOP_K)]


class MoshiOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=64)] = 4
    """Sessions at once. Each step computes as many rows, however many sessions are open."""
    frame_period_s: Annotated[float, Meta(ge=0, le=10)] = 0.08
    """Seconds from one frame to the next. 0: whenever a frame of sound has come, without silence for late sound; so the
    sound of files is answered faster than it was spoken."""
    max_waiting_s: Annotated[float, Meta(gt=0, le=600)] = 2.0
    """Sound of one session that may wait; of more, the oldest is dropped, or with a period of 0 worked off at once."""
    voices: str | None = None
    """A folder of WAV files (16 bits), an example of a voice in each; their names without the ending are the voices."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel by itself instead of replaying a CUDA graph of the whole step."""


class MoshiParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one session may set."""

    text_temperature: Temperature = DEFAULTS["text_temperature"]
    """0 always takes the likeliest token."""
    text_topk: TopK = int(DEFAULTS["text_topk"])
    """Candidates for a token."""
    audio_temperature: Temperature = DEFAULTS["audio_temperature"]
    """0 always takes the likeliest code."""
    audio_topk: TopK = int(DEFAULTS["audio_topk"])
    """Candidates for a code."""
    instructions: Annotated[str, Meta(max_length=10_000)] | None = None
    """Who the model is, in words: primed, between PersonaPlex's tags where they are not there."""
    voice: Annotated[str, Meta(max_length=255)] | None = None
    """One of the stage's; primed as well. None: the model's own."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """The same seed and sound give the same answer, alone or beside others; None draws a fresh seed."""


class _Session:
    """One conversation: its row, the sound that waits, and what it has said."""

    def __init__(self, request: EngineRequest, row: int, rate_hz: int, text: Detokenizer) -> None:
        import numpy as np
        import torch

        self.request = request
        self.row = row
        self.text = text
        seed = request.params.seed
        self.generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        self.first_token: int | None = None
        self.prompt: Frames | None = None
        """What is still to be primed, (frames, …)."""
        self.is_input_over = False
        self.num_frames = self.num_late = self.num_dropped = 0
        self._input = SpeechInput(rate_hz)
        self._waiting: Samples = np.zeros(0, np.float32)

    @property
    def num_waiting(self) -> int:
        """Samples that wait."""
        return len(self._waiting)

    def feed(self, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Take sound."""
        import numpy as np

        pieces = [self._input.feed(payload) for payload in payloads]
        if is_last and not self.is_input_over:
            self.is_input_over = True
            pieces.append(self._input.end())
        self._waiting = np.concatenate([self._waiting, *pieces])

    def drop(self, max_waiting: int) -> None:
        """Drop the oldest samples until no more than `max_waiting` wait."""
        excess = self.num_waiting - max_waiting
        if excess > 0:
            self._waiting = self._waiting[excess:]
            self.num_dropped += excess

    def take(self, frame: Samples) -> None:
        """Fill a frame with the next samples: with silence if they have not all come, behind them if no more will."""
        if self.num_waiting < len(frame) and not self.is_input_over:
            self.num_late += 1
            frame[:] = 0
            return
        piece, self._waiting = self._waiting[: len(frame)], self._waiting[len(frame) :]
        frame[: len(piece)] = piece
        frame[len(piece) :] = 0

    def finish(self, rate_hz: int) -> Finish:
        """Return what is known at the end."""
        detail = {
            "frames": self.num_frames,
            "late_frames": self.num_late,
            "dropped_s": round(self.num_dropped / rate_hz, 6),
        }
        return Finish(usage=Usage(prompt_tokens=0, completion_tokens=self.num_frames), detail=detail)


class TransformersMoshi(SessionEngine):
    """Sound in; sound of the same length, and the words that are spoken in it, out.

    A session with instructions or a voice begins with a piece of sound that has no samples: from then on it hears. What
    came before that it does not hear, unless the period is 0.
    """

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio", "text": "text"}
    Options: ClassVar[type[msgspec.Struct]] = MoshiOptions
    Params: ClassVar[type[msgspec.Struct]] = MoshiParams
    is_idempotent: ClassVar[bool] = False

    _moshi: MoshiStreams
    _mimi: MimiStreams

    def __init__(self, options: MoshiOptions, context: Context) -> None:
        super().__init__(options, context)
        self.frame_period_s = options.frame_period_s
        self.max_num_seqs = self.max_resident = options.max_num_seqs
        self._sessions: dict[RequestId, _Session] = {}
        self._free_rows = list(reversed(range(options.max_num_seqs)))
        self._rate_hz = self._frame = 0
        self._silent = SILENT_TOKENS

    @classmethod
    def num_slots(cls, options: MoshiOptions) -> int:
        """Return the sessions that one replica with these options can hold at once."""
        return options.max_num_seqs

    @classmethod
    def check(cls, options: MoshiOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return [*check_model(NAME, options, ("torch", "transformers", "soxr")), *voice_problems(options.voices)]

    @classmethod
    def voices(cls, options: MoshiOptions) -> tuple[str, ...]:
        """Return the names of the folder's files."""
        return voice_names(options.voices)

    @classmethod
    def memory(cls, options: MoshiOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator)
        return files.memory(cache=files.cache(options.max_num_seqs * files.config.get("sliding_window", 0)))

    def load(self, report: Report) -> None:
        """Load, and speak a frame.

        Raises:
            StartFailed: the model isn't there or is no Moshi, or a voice can't be used.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        import torch

        self._tokenizer, self._model = tokenizer, model = self._parts(report)
        codec, rows, num_codebooks = model.audio_encoder, self.options.max_num_seqs, int(model.config.num_codebooks)
        self._silent = SILENT_TOKENS | set(tokenizer.all_special_ids)
        self._rate_hz, self._frame = int(codec.config.sampling_rate), int(codec.config.frame_size)
        try:
            self._mimi = MimiStreams(codec, num_codebooks, rows)
        except ValueError as error:
            raise StartFailed(f"model: '{self.options.model}' can't be served: {error}", field="model") from error
        self._moshi = MoshiStreams(model, rows)
        self._no_noise = self._moshi.noise(torch.Generator()).zero_()
        report("encoding voices", 0.0)
        self._prompts = Prompts(codec, num_codebooks, tokenizer, self.options.voices, self._moshi.longest_prompt)
        report("warming up", 0.0)
        self._advances = Recorded(self._hear_and_say)
        request = EngineRequest("warm-up", MoshiParams(seed=0), frozenset({"audio", "text"}))
        self.add(request, {})
        self.feed(request.id, "audio", [], is_last=True)
        self._advance([self._sessions[request.id]])
        self.abort(request.id)
        if not self.options.enforce_eager:
            report("warming up", 0.5)
            self._record()
        report("warming up", 1.0)

    def _parts(self, report: Report) -> tuple[Any, Any]:
        """Load the tokenizer and the model."""
        loader = ModelLoader(self.options, self.context, report)
        import transformers

        config = loader.part("loading configuration", transformers.AutoConfig)
        if config.model_type != "moshi":
            raise loader.refused(f"it is of type '{config.model_type}' (allowed: moshi)")
        tokenizer = loader.part("loading tokenizer", transformers.AutoTokenizer)
        model = loader.weights(transformers.MoshiForConditionalGeneration, is_complete=True, attn_implementation="sdpa")
        codec = model.audio_encoder
        if not hasattr(getattr(codec, "encoder", None), "encoder_seanet"):
            raise loader.refused(f"its codec is of type '{codec.config.model_type}' (allowed: mimi, transformers 5.24)")
        return tokenizer, model

    def _record(self) -> None:
        """Have a GPU remember the steps, with no session in any row.

        Raises:
            StartFailed: something in them can't be recorded.
        """
        import torch

        model, rows = self._model, self.max_num_seqs
        sound = torch.zeros((rows, 1, self._frame), device=model.device, dtype=model.dtype)
        nobody = torch.zeros(rows, dtype=torch.bool, device=model.device)
        with recording(), torch.inference_mode():
            self._moshi.record()
            self._advances.record(sound, nobody, self._moshi.silent_noise())

    def close(self) -> None:
        """Let go of the weights and of all sessions' state."""
        for id_ in list(self._sessions):
            self.abort(id_)
        for name in ("_model", "_mimi", "_moshi", "_prompts", "_advances", "_tokenizer", "_no_noise"):
            vars(self).pop(name, None)

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Open a session.

        Raises:
            Overloaded: `max_num_seqs` sessions are open.
            BadInput: sound that can't be read, a voice that isn't there, instructions that are too long.
        """
        if request.id in self._sessions:
            raise ValueError(f"session {request.id} was added twice")
        if not self._free_rows:
            raise Overloaded(f"{self.max_num_seqs} sessions (max_num_seqs) are open")
        import torch

        text = Detokenizer(self._tokenizer.backend_tokenizer)
        session = _Session(request, self._free_rows[-1], self._rate_hz, text)
        session.feed(inputs.get("audio", []), is_last=False)
        session.prompt = self._prompts.of(request.params.instructions, request.params.voice)
        with torch.inference_mode():
            self._mimi.reset(session.row)
            self._moshi.begin(session.row, {name: float(getattr(request.params, name)) for name in DEFAULTS})
            if session.prompt is None:
                session.first_token = self._moshi.start(session.row, self._moshi.noise(session.generator))
        self._free_rows.pop()
        self._sessions[request.id] = session

    def feed(self, request: RequestId, port: str, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Bring sound. Unknown ids are ignored.

        Raises:
            BadInput: sound that can't be read; the session is dropped.
        """
        session = self._sessions.get(request)
        if session is None:
            return
        try:
            session.feed(payloads, is_last=is_last)
        except BadInput:
            self.abort(request)
            raise
        if self.frame_period_s and not session.is_input_over:
            session.drop(max(self._frame, round(self.options.max_waiting_s * self._rate_hz)))

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Advance these sessions by a frame; those with a prompt by some frames of it."""
        due: list[_Session] = []
        sessions = [self._sessions[id_] for id_ in requests if id_ in self._sessions]
        unprimed = [session for session in sessions if session.prompt is not None]
        events = self._prime(unprimed)
        for session in sessions:
            if session in unprimed:
                continue
            if session.is_input_over and not session.num_waiting:
                events += self._finish(session)
            elif not self.frame_period_s and not self._has_frame(session):
                events.append(Starved(session.request.id))
            else:
                due.append(session)
        longest = self.options.max_waiting_s * self._rate_hz
        while due:
            events += self._advance(due)
            due = [] if self.frame_period_s else [one for one in due if one.num_waiting > longest]
        return events

    def _prime(self, sessions: list[_Session]) -> list[Event]:
        """Read the next frames of these sessions' prompts."""
        import torch

        moshi, device, rows = self._moshi, self._model.device, self.max_num_seqs
        heard = self._prompts.tone.expand(rows, -1).to(device)
        events: list[Event] = []
        for _ in range(PRIMED_PER_STEP):
            text, said, active = (
                torch.zeros(rows, dtype=torch.long),
                torch.zeros_like(heard, device="cpu"),
                [False] * rows,
            )
            for session in sessions:
                if session.prompt is not None:
                    text[session.row], said[session.row] = session.prompt.text[0], session.prompt.said[0]
                    active[session.row] = True
            if not any(active):
                break
            with torch.inference_mode():
                moshi.prime(text.to(device), said.to(device), heard, torch.tensor(active, device=device))
            for session in sessions:
                if session.prompt is None:
                    continue
                left = Frames(session.prompt.text[1:], session.prompt.said[1:])
                session.prompt = left if len(left.text) else None
                if session.prompt is None:
                    events += self._primed(session)
        return events

    def _primed(self, session: _Session) -> list[Event]:
        """A prompt is read: the conversation begins."""
        import torch

        with torch.inference_mode():
            session.first_token = self._moshi.start(session.row, self._moshi.noise(session.generator))
        if self.frame_period_s:
            session.drop(0)
        if "audio" not in session.request.outputs:
            return []
        return [Output(session.request.id, "audio", Audio(self._rate_hz, 1, "f32", Blob(b"")))]

    def _has_frame(self, session: _Session) -> bool:
        return session.is_input_over or session.num_waiting >= self._frame

    def _advance(self, sessions: Sequence[_Session]) -> list[Event]:
        """Hear and say one frame in each of these sessions."""
        import numpy as np
        import torch

        rows, model = self.max_num_seqs, self._model
        sound = np.zeros((rows, 1, self._frame), np.float32)
        active = np.zeros(rows, bool)
        with torch.inference_mode():
            noise = [self._no_noise] * rows
            for session in sessions:
                session.take(sound[session.row, 0])
                active[session.row] = True
                noise[session.row] = self._moshi.noise(session.generator)
            tokens, said = self._advances(
                torch.from_numpy(sound).to(model.device, model.dtype),
                torch.from_numpy(active).to(model.device),
                torch.stack(noise).to(model.device),
            )
            spoken, samples = tokens.tolist(), said.cpu().numpy()
        return [event for one in sessions for event in self._said(one, spoken[one.row], samples[one.row])]

    def _hear_and_say(
        self, sound: torch.Tensor, active: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next text tokens, (rows,), and a frame of sound, (rows, samples) float32."""
        tokens, codes = self._moshi.step(self._mimi.encode(sound, active), active, noise)
        return tokens, self._mimi.decode(codes, active).float()

    def _said(self, session: _Session, token: int, sound: Samples) -> list[Event]:
        import numpy as np

        id_, wanted = session.request.id, session.request.outputs
        session.num_frames += 1
        tokens = [token] if session.first_token is None else [session.first_token, token]
        session.first_token = None
        text = "".join(session.text.feed(token) for token in tokens if token not in self._silent)
        events: list[Event] = []
        if "audio" in wanted:
            data = np.clip(sound, -1.0, 1.0).astype("<f4").tobytes()
            events.append(Output(id_, "audio", Audio(self._rate_hz, 1, "f32", Blob(data))))
        if text and "text" in wanted:
            events.append(Output(id_, "text", Text(text)))
        return events

    def _finish(self, session: _Session) -> list[Event]:
        id_ = session.request.id
        rest = session.text.flush()
        self.abort(id_)
        events: list[Event] = [Output(id_, "text", Text(rest))] if rest and "text" in session.request.outputs else []
        return [*events, Finished(id_, session.finish(self._rate_hz))]

    def abort(self, request: RequestId) -> None:
        """Close a session; its row is free when this returns."""
        if (session := self._sessions.pop(request, None)) is not None:
            self._free_rows.append(session.row)
