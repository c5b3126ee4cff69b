"""The talker of an omni model: it says codes while the thinker still writes.

A request's input grows while it speaks: each code after the first takes one more row of the thinker's, and a request
whose rows are used up is starved until more come. Tokens of many requests run in one pass, as in
`adapters.transformers_text`; each request draws from random numbers of its own, and a code has the same bits in any
company.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from adapters.model_memory import Files
from adapters.omni.families import family_of
from adapters.omni.voices import voice_names
from adapters.packed_batch import MAX_ROWS, Piece, with_filling
from adapters.recorded import recording
from adapters.sampling import SamplingParams
from adapters.tensors import to_torch
from adapters.token_choice import TokenChoice
from adapters.transformers_model import DEFAULT_CONTEXT_LENGTH, ModelLoader, ModelOptions, check_model
from adapters.transformers_text import CPU_PREFILL_CHUNK, DEVICE_PREFILL_CHUNK
from omni_bus.engine import Context, EngineRequest, Event, Failure, Finished, Output, Starved, StepEngine
from omni_bus.errors import BadInput, Overloaded, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Blob, Codes, Hidden, Json, Payload, Tensor, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec
    import torch

    from adapters.omni.talking import Beginning, TalkerModel
    from omni_bus.engine import Memory, Report
    from omni_bus.ids import RequestId

NAME = "omni-talker"

Count = Annotated[int, Meta(ge=1)]


class TalkerOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_num_seqs: Count = 8
    """Requests in one step."""
    max_resident: Count = 16
    """Requests that hold a slot at once, suspended ones included."""
    context_length: Annotated[int, Meta(ge=8)] | None = None
    """Tokens of prompt and codes together; by default the model's own, at most 2048."""
    prefill_chunk: Count | None = None
    """Prompt tokens of one step; by default 64 on a CPU, 1024 elsewhere."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel by itself instead of replaying a CUDA graph."""


class TalkerParams(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How codes are chosen; the defaults are those of the published models."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.9
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.8
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 40
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.05
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Frames of codes; None goes on up to the context length."""
    voice: Annotated[str, Meta(max_length=64)] | None = None
    """One of the model's voices; None is its first."""


HONOURED = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "seed", "voice")
)


@dataclass(slots=True)
class _Speaking:
    """One request that holds a slot."""

    id: RequestId
    slot: int
    params: TalkerParams
    outputs: frozenset[str]
    voice: str
    choices: list[TokenChoice]
    """Of the first code of each frame, and of the others."""
    prompt: torch.Tensor | None = None
    """Ids and positions of the thinker's prompt, (4, n)."""
    rows: deque[torch.Tensor] = field(default_factory=deque["torch.Tensor"])
    """Of the thinker, not yet read: pieces (tokens, width) before the beginning, single ones (width,) after it."""
    num_rows: int = 0
    """Rows that came."""
    is_whole: bool = False
    """No more come."""
    has_ended: bool = False
    """The row that stands for the end of the text was read."""
    beginning: Beginning | None = None
    following: float = 0.0
    """The position of the first token after the beginning."""
    num_computed: int = 0
    frames: list[list[int]] = field(default_factory=list["list[int]"])
    was_told: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether everything before the first code was computed."""
        return bool(self.frames)

    @property
    def num_needed(self) -> int | None:
        """Rows that are needed before the first code; None while that isn't known."""
        return None if self.prompt is None else self.prompt.shape[1] + 1

    @property
    def can_begin(self) -> bool:
        """Whether they are there."""
        return self.num_needed is not None and self.num_rows >= self.num_needed

    @property
    def can_go_on(self) -> bool:
        """Whether the next token can be computed."""
        if not self.has_begun:
            return self.beginning is not None or self.can_begin
        return bool(self.rows) or self.is_whole


class OmniTalker(StepEngine):
    """Rows of the thinker in, codes out."""

    accepts: ClassVar[dict[str, str]] = {"prompt_tokens": "tensor", "hidden": "hidden"}
    emits: ClassVar[dict[str, str]] = {"codes": "codes", "voice": "json"}
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})
    Options: ClassVar[type[msgspec.Struct]] = TalkerOptions
    Params: ClassVar[type[msgspec.Struct]] = TalkerParams
    is_input_streamed: ClassVar[bool] = True

    _talker: TalkerModel

    def __init__(self, options: TalkerOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.max_resident
        self._speaking: dict[RequestId, _Speaking] = {}
        self._free_slots = list(range(options.max_resident - 1, -1, -1))

    @classmethod
    def check(cls, options: TalkerOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        problems = check_model(NAME, options, ("torch", "transformers", "safetensors"))
        if options.max_resident < options.max_num_seqs:
            problems.append(
                f"max_resident: {options.max_resident} came (allowed: at least max_num_seqs, {options.max_num_seqs})"
            )
        return problems

    @classmethod
    def voices(cls, options: TalkerOptions) -> tuple[str, ...]:
        """Return the model's voices."""
        return voice_names(options.model)

    @classmethod
    def memory(cls, options: TalkerOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator, part="talker")
        length = files.context_length(options.context_length, DEFAULT_CONTEXT_LENGTH)
        chunk = options.prefill_chunk or (CPU_PREFILL_CHUNK if files.on_cpu else DEVICE_PREFILL_CHUNK)
        return files.memory(
            cache=files.cache((options.max_resident + 1) * length),  # one slot is spare
            activations=files.activations(chunk + options.max_num_seqs, options.max_num_seqs),
        )

    def load(self, report: Report) -> None:
        """Load the talker alone, and run a token.

        Raises:
            StartFailed: the model isn't there, or its talker doesn't fit its thinker.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        import torch

        self._prefill_chunk = self.options.prefill_chunk or (
            CPU_PREFILL_CHUNK if loader.on_cpu else DEVICE_PREFILL_CHUNK
        )
        self._device = loader.device
        family = family_of(loader)
        self._talker = family.talker(loader, self.max_resident, self.options.context_length)
        self._suppressed = self._talker.suppressed.cpu()
        self.context_length = self._talker.context_length
        report("warming up", 0.0)
        with torch.inference_mode():
            frames = torch.zeros(1, self._talker.num_codebooks, dtype=torch.long, device=loader.device)
            self._decode([Piece(0, 0, [0])], frames, self._talker.pad[None], torch.zeros(3, 1))
        if family.is_recordable and not (self.options.enforce_eager or loader.on_cpu):
            with recording():
                self._talker.decoder.record(self.max_num_seqs)
        report("warming up", 1.0)

    # --- requests ---

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request; all of its input comes by `feed`.

        Raises:
            BadInput: its parameters can't be honoured.
            Overloaded: all slots are taken.
        """
        del inputs
        if request.id in self._speaking:
            raise ValueError(f"request {request.id} was added twice")
        if not self._free_slots:
            raise Overloaded(f"all {self.max_resident} slots (max_resident) are taken")
        params: TalkerParams = request.params
        self._check(params)
        voice = self._talker.checked_voice(params.voice)
        speaking = _Speaking(
            id=request.id,
            slot=self._free_slots[-1],
            params=params,
            outputs=request.outputs,
            voice=voice,
            choices=self._choices(params),
        )
        self._free_slots.pop()
        self._speaking[request.id] = speaking

    def _check(self, params: TalkerParams) -> None:
        defaults = TalkerParams()
        for name in TalkerParams.__struct_fields__:
            value = getattr(params, name)
            if name not in HONOURED and value != getattr(defaults, name):
                raise BadInput(f"{name}: {value!r} can't be honoured by {NAME} (allowed: its default)", field=name)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise BadInput(
                f"min_tokens: {params.min_tokens} is above max_tokens (allowed: at most {params.max_tokens})",
                field="min_tokens",
            )

    def _choices(self, params: TalkerParams) -> list[TokenChoice]:
        """Return how first codes are chosen, and the others of a frame; both from the same seed, but not alike.

        They are chosen on the CPU: logits of few codes come there for all requests at once, and nothing waits for a
        GPU after that.
        """
        seed = secrets.randbelow(2**32 - 1) if params.seed is None else params.seed
        talker = self._talker
        first = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            min_tokens=params.min_tokens,
            seed=seed,
        )
        others = SamplingParams(temperature=1.0 if params.temperature else 0.0, top_k=50, top_p=0.8, seed=seed ^ 1)
        return [
            TokenChoice(first, talker.history, talker.ends, "cpu"),
            TokenChoice(others, (), frozenset(), "cpu"),
        ]

    def feed(self, request: RequestId, port: str, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Bring what the thinker says.

        Raises:
            StageFailed: it is not what a thinker of this model says, or there is more than the talker can hold.
        """
        speaking = self._speaking.get(request)
        if speaking is None:
            return
        for payload in payloads:
            if port == "prompt_tokens":
                self._take_prompt(speaking, payload)
            else:
                self._take_rows(speaking, payload)
        if port == "hidden" and is_last:
            speaking.is_whole = True

    def _take_prompt(self, speaking: _Speaking, payload: Payload) -> None:
        if not isinstance(payload, Tensor):
            raise BadInput(f"prompt_tokens: {kind_of(payload)} came (allowed: tensor)", field="prompt_tokens")
        is_one = len(payload.shape) == 2 and payload.shape[0] == 4 and speaking.prompt is None
        if payload.dtype != "float32" or not is_one:
            raise StageFailed(f"a prompt of {payload.shape}, {payload.dtype}, came (allowed: one of (4, n), float32)")
        speaking.prompt = to_torch(payload, self._device)

    def _take_rows(self, speaking: _Speaking, payload: Payload) -> None:
        if not isinstance(payload, Hidden):
            raise BadInput(f"hidden: {kind_of(payload)} came (allowed: hidden)", field="hidden")
        width = len(self._talker.pad)
        if len(payload.shape) != 2 or payload.shape[1] != width or payload.first_position != speaking.num_rows:
            raise StageFailed(
                f"states of shape {payload.shape} from position {payload.first_position} came "
                f"(allowed: (tokens, {width}) from {speaking.num_rows})"
            )
        rows = to_torch(payload, self._device).to(self._talker.pad.dtype)
        speaking.num_rows += len(rows)
        if speaking.beginning is None:
            speaking.rows.append(rows)
        else:
            speaking.rows.extend(rows)

    # --- steps ---

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Say one code for each request that has begun and has a row for it; read more of what others begin on."""
        import torch

        events: list[Event] = []
        going: list[_Speaking] = []
        beginning: list[_Speaking] = []
        budget = self._prefill_chunk
        for speaking in (self._speaking[id_] for id_ in requests):
            events += self._tell_voice(speaking)
            if not speaking.can_go_on:
                events.append(self._idle(speaking))
            elif speaking.has_begun:
                going.append(speaking)
            elif budget > 0:
                beginning.append(speaking)
                budget -= self._prefill_chunk
        with torch.inference_mode():
            for at in range(0, len(going), MAX_ROWS):
                events += self._go_on(going[at : at + MAX_ROWS])
            for speaking in beginning:
                events += self._begin(speaking)
        return events

    def _tell_voice(self, speaking: _Speaking) -> list[Event]:
        if speaking.was_told or "voice" not in speaking.outputs:
            return []
        speaking.was_told = True
        return [Output(speaking.id, "voice", Json(speaking.voice))]

    def _idle(self, speaking: _Speaking) -> Event:
        """Return that a request waits for rows, or that it never gets what it needs to say a word."""
        if speaking.is_whole:
            return self._finished(speaking, "stop")
        return Starved(speaking.id)

    def _begin(self, speaking: _Speaking) -> list[Event]:
        """Read on in what stands before the first code; at its end say that."""
        if speaking.beginning is None:
            try:
                self._prepare(speaking)
            except (BadInput, StageFailed) as error:
                self.abort(speaking.id)
                return [Failure(speaking.id, error)]
        found = speaking.beginning
        assert found is not None
        begin = speaking.num_computed
        end = min(begin + self._prefill_chunk, len(found.embeddings))
        piece = Piece(speaking.slot, begin, [0] * (end - begin))
        states = self._talker.decoder(
            [piece], found.embeddings[begin:end], found.positions[:, begin:end], is_exact=True
        )
        speaking.num_computed = end
        if end < len(found.embeddings):
            return []
        return self._say([speaking], states[-1:])

    def _prepare(self, speaking: _Speaking) -> None:
        prompt, needed = speaking.prompt, speaking.num_needed
        assert prompt is not None
        assert needed is not None
        import torch

        rows = torch.cat(list(speaking.rows))
        found = self._talker.begin(rows[:needed], prompt, speaking.voice)
        room = self._talker.context_length - len(found.embeddings)
        if room < 1:
            raise StageFailed(
                f"a prompt of {len(found.embeddings)} tokens came, the talker's context_length is "
                f"{self._talker.context_length} (allowed: a shorter prompt, or a longer context_length)"
            )
        speaking.beginning = found
        speaking.following = float(found.positions[0, -1]) + 1
        speaking.rows = deque([*(() if found.rows is None else found.rows), *rows[needed:]])

    def _go_on(self, requests: Sequence[_Speaking]) -> list[Event]:
        """Say the next code of requests that have a row for it."""
        import torch

        rows = torch.stack([self._next_row(speaking) for speaking in requests])
        frames = torch.tensor([speaking.frames[-1] for speaking in requests], device=self._device)
        pieces = [Piece(speaking.slot, speaking.num_computed, [0]) for speaking in requests]
        places = [self._position(speaking) for speaking in requests]
        positions = torch.tensor(places, device=self._device).expand(3, -1)
        states = self._decode(pieces, frames, rows, positions)
        for speaking in requests:
            speaking.num_computed += 1
        return self._say(requests, states)

    def _decode(
        self, pieces: Sequence[Piece], frames: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        embeddings = self._talker.embed(with_filling(frames, is_exact=True), with_filling(rows, is_exact=True))
        positions = positions.to(self._device)
        return self._talker.decoder(pieces, embeddings[: len(pieces)], positions, is_exact=True)

    def _next_row(self, speaking: _Speaking) -> torch.Tensor:
        if speaking.rows:
            return speaking.rows.popleft()
        if not speaking.has_ended:
            speaking.has_ended = True
            return self._talker.end
        return self._talker.pad

    def _position(self, speaking: _Speaking) -> float:
        found = speaking.beginning
        assert found is not None
        return speaking.following + speaking.num_computed - len(found.embeddings)

    def _say(self, requests: Sequence[_Speaking], states: torch.Tensor) -> list[Event]:
        """Choose the next frame of each request, after states (requests, width)."""
        logits = self._talker.head(with_filling(states, is_exact=True))[: len(states)].cpu()
        are_finite = logits.isfinite().all(dim=1).tolist()
        logits = logits.masked_fill(self._suppressed, float("-inf"))
        events: list[Event] = []
        saying: list[tuple[int, _Speaking, int]] = []
        for index, speaking in enumerate(requests):
            if not are_finite[index]:
                self.abort(speaking.id)
                events.append(Failure(speaking.id, StageFailed("the talker computed logits that aren't finite")))
                continue
            code = speaking.choices[0].choose(logits[index])
            if code in self._talker.ends:
                events.append(self._finished(speaking, "stop"))
            else:
                saying.append((index, speaking, code))
        if saying:
            frames = self._talker.frames(
                states[[index for index, _, _ in saying]],
                [code for _, _, code in saying],
                [speaking.choices[1:] for _, speaking, _ in saying],
                is_exact=True,
            )
            for (_, speaking, _), frame in zip(saying, frames, strict=True):
                events += self._put(speaking, frame)
        return events

    def _put(self, speaking: _Speaking, frame: list[int]) -> list[Event]:
        from array import array

        speaking.frames.append(frame)
        events: list[Event] = []
        if "codes" in speaking.outputs:
            data = Blob(memoryview(array("i", frame)).cast("B"))
            codes = Codes(1, len(frame), self._talker.frame_rate_hz, data)
            events.append(Output(speaking.id, "codes", codes))
        most = self._talker.context_length - speaking.num_computed
        if len(speaking.frames) == speaking.params.max_tokens or most < 1:
            events.append(self._finished(speaking, "length"))
        return events

    def _finished(self, speaking: _Speaking, reason: str) -> Event:
        self.abort(speaking.id)
        return Finished(speaking.id, Finish(reason, Usage(speaking.num_rows, len(speaking.frames))))

    def abort(self, request: RequestId) -> None:
        """Drop a request; its slot is free at once."""
        speaking = self._speaking.pop(request, None)
        if speaking is not None:
            self._free_slots.append(speaking.slot)

    def close(self) -> None:
        """Let go of the weights and the pool."""
        self._speaking.clear()
        if hasattr(self, "_talker"):
            del self._talker
