"""Causal language models of transformers as a continuously batched step engine.

Each step is one forward pass of the model (`adapters.packed_batch`): one token for each request that decodes, and up
to `prefill_chunk` tokens of prompts, so that a long prompt doesn't hold the others up. Requests join and leave
between steps; one that is not named in a step keeps its place. A prompt that begins as one that was read before goes
on from there (`adapters.slots`). Any model of transformers whose attention can be exchanged and whose layers cache keys
and values is served; another is refused when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from adapters import smollm2
from adapters.logprobs import logprobs_of, with_token_first
from adapters.lora import LoraSwitch, check_lora
from adapters.model_memory import Files
from adapters.packed_batch import ATTENTION, MAX_ROWS, KvPool, PackedForward, Piece, register_attention
from adapters.sampling import SamplingParams
from adapters.slots import Slots
from adapters.text_model import EMITS, TextModel, TextOptions, vocabulary_of
from adapters.transformers_model import DEFAULT_CONTEXT_LENGTH, ModelLoader, check_model
from omni_bus.engine import Context, EngineRequest, Event, Failure, Finished, Output, StepEngine
from omni_bus.errors import OmniBusError, Overloaded, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from adapters.answer import Answer
    from adapters.slots import Taken
    from omni_bus.engine import Memory, Report
    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Payload
    from omni_bus.wire.prompt import Prompt

CPU_PREFILL_CHUNK = 64
"""Tokens at which a CPU's matrix products are already limited by arithmetic: more would only lengthen the step."""

DEVICE_PREFILL_CHUNK = 1024
"""The same for accelerators."""

Count = Annotated[int, Meta(ge=1)]


class TransformersTextOptions(TextOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    model: str = smollm2.NAME
    """``smollm2-135m-instruct``, the folder of a model, or a name on the model hub."""
    max_num_seqs: Count = 8
    """Requests in one step."""
    max_resident: Count = 16
    """Requests that hold a slot at once, suspended ones included."""
    context_length: Annotated[int, Meta(ge=8)] | None = None
    """Tokens of prompt and output together; by default the model's own, at most 2048.
    A slot is reserved in full: 94 MB of float32 for SmolLM2 at 2048."""
    prefill_chunk: Count | None = None
    """Prompt tokens of one step; by default 64 on a CPU, 1024 elsewhere."""
    lora: dict[str, str] = msgspec.field(default_factory=dict)
    """LoRA adapters that requests may name, and the folder of each; a step computes once for each adapter in it."""


class Statistics(NamedTuple):
    """What the engine holds."""

    num_active: int
    num_free_slots: int
    num_tokens: int
    """Tokens whose keys and values are held."""
    pool_bytes: int
    """Memory that keys and values take when every slot is full."""


@dataclass(slots=True)
class _Running:
    """One request that holds a slot."""

    id: RequestId
    slot: int
    prompt: list[int]
    params: SamplingParams
    outputs: frozenset[str]
    answer: Answer
    num_computed: int = 0
    """Tokens whose keys and values are in the slot."""
    candidates: list[list[tuple[int, float]] | None] = field(default_factory=lambda: [None])
    """With `prompt_logprobs`: of the prompt's tokens as far as they are known, the first has none."""
    was_rendered: bool = False

    @property
    def generated(self) -> list[int]:
        """Tokens chosen so far."""
        return self.answer.token_ids

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.params.prompt_logprobs is not None

    @property
    def num_waiting(self) -> int:
        """Tokens that are known but not in the slot: the rest of the prompt, then always one."""
        return len(self.prompt) + len(self.generated) - self.num_computed

    def piece(self, max_tokens: int) -> Piece:
        """Return the next tokens to compute."""
        if self.generated:
            return Piece(self.slot, self.num_computed, self.generated[-1:])
        ids = self.prompt[self.num_computed : self.num_computed + max_tokens]
        return Piece(self.slot, self.num_computed, ids, is_whole=self.is_scored)

    def take_rows(self, piece: Piece, logits: torch.Tensor) -> torch.Tensor:
        """Note what a piece of the prompt says of its tokens, (rows, vocabulary) → the last row."""
        self.num_computed += len(piece.ids)
        if piece.is_whole:
            begin = piece.first_position + 1
            following = self.prompt[begin : begin + len(piece.ids)]
            measured = logprobs_of(logits[: len(following)], following, self.params.prompt_logprobs or 0)
            for token_id, (logprob, others) in zip(following, measured, strict=True):
                self.candidates.append(with_token_first(token_id, logprob, others))
        return logits[-1:]


class TransformersText(StepEngine):
    """A causal language model: chat messages in, text out."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json"}
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})
    emits: ClassVar[dict[str, str]] = EMITS
    Options = TransformersTextOptions
    Params = SamplingParams
    part: ClassVar[str] = ""
    """Of a model in several, for the account of its memory."""

    _forward: PackedForward
    _lora: LoraSwitch
    _model: TextModel
    _device: torch.device
    _context_length: int
    _prefill_chunk: int
    _pool: KvPool
    _slots: Slots

    def __init__(self, options: TransformersTextOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.max_resident
        self._running: dict[RequestId, _Running] = {}

    @classmethod
    def check(cls, options: TransformersTextOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        problems = check_model("transformers", options, ("torch", "transformers", "llguidance"))
        problems += check_lora("transformers", options.lora)
        if options.max_resident < options.max_num_seqs:
            problems.append(
                f"max_resident: {options.max_resident} came (allowed: at least max_num_seqs, {options.max_num_seqs})"
            )
        return problems

    @classmethod
    def memory(cls, options: TransformersTextOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator, part=cls.part)
        length = files.context_length(options.context_length, DEFAULT_CONTEXT_LENGTH)
        chunk = options.prefill_chunk or (CPU_PREFILL_CHUNK if files.on_cpu else DEVICE_PREFILL_CHUNK)
        return files.memory(
            cache=files.cache((options.max_resident + 1) * length),  # one slot is spare
            activations=files.activations(chunk + options.max_num_seqs, options.max_num_seqs),
        )

    def load(self, report: Report) -> None:
        """Convert the default model if it wasn't yet, load, and run a first batch.

        Raises:
            StartFailed: the model isn't there or can't be served as the options say.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._device = loader.device
        self._prefill_chunk = self.options.prefill_chunk or (
            CPU_PREFILL_CHUNK if loader.on_cpu else DEVICE_PREFILL_CHUNK
        )
        tokenizer = loader.part("loading tokenizer", AutoTokenizer)
        register_attention()
        model = loader.weights(AutoModelForCausalLM, attn_implementation=ATTENTION)
        self._check_layers(loader, model.config.get_text_config())
        self._lora = LoraSwitch(loader, model, self.options.lora)
        self.context_length = self._context_length = loader.context_length(model, self.options.context_length)
        self._model = TextModel(
            "transformers",
            self.options,
            vocabulary_of(loader, model, tokenizer),
            template_owner=tokenizer,
            context_length=self._context_length,
            device=self._device,
            lora=self.options.lora,
            shares_prefixes=True,
        )
        self._pool = KvPool(self.max_resident, self._context_length)
        self._slots = Slots(self.max_resident, self._prefill_chunk)
        self._forward = self._forward_on(model, self._pool)
        self._warm_up(model, report)

    def _forward_on(self, model: Any, pool: KvPool) -> PackedForward:
        """Return what runs the model on batches."""
        return PackedForward(model, pool)

    def _check_layers(self, loader: ModelLoader, config: Any) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "num_kv_shared_layers", 0):
            raise loader.refused(f"its layers don't each cache keys and values (they are: {', '.join(sorted(kinds))})")

    def _warm_up(self, model: Any, report: Report) -> None:
        """Run a token, then a batch with everything in it: a prompt's continuation and a decoding request."""
        import torch

        report("warming up", 0.0)
        half = min(self._prefill_chunk, self._context_length // 2)
        try:
            with torch.inference_mode():
                probe = KvPool(1, 1)
                self._forward_on(model, probe)([Piece(0, 0, [0])])
                self._check_memory(probe.place_bytes * self._pool.num_places)
                self._forward([Piece(0, 0, [0] * half)])
                report("warming up", 0.5)
                self._forward([Piece(0, half, [0] * half), Piece(self.max_resident - 1, 0, [0])])
        except StartFailed:
            raise
        except Exception as error:
            # Whatever a model's code raises when its attention is exchanged, the person should read which model it was.
            reason = f"a first batch failed with {type(error).__name__}: {error}"
            raise StartFailed(f"model: '{self.options.model}' can't be batched: {reason}", field="model") from error
        report("warming up", 1.0)

    def _check_memory(self, pool_bytes: int) -> None:
        """Refuse a pool that a CPU could reserve but never fill; an accelerator refuses it itself."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self._device.type == "cpu" and pool_bytes > memory:
            raise StartFailed(
                f"max_resident: {self.max_resident} requests of {self._context_length} tokens need {pool_bytes} bytes, "
                f"this machine has {memory}: lower max_resident or context_length",
                field="max_resident",
            )

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: its messages or parameters can't be honoured.
            Overloaded: all slots are taken.
        """
        if request.id in self._running:
            raise ValueError(f"request {request.id} was added twice")
        if not self._slots.num_free:
            raise Overloaded(f"all {self.max_resident} slots (max_resident) are taken")
        prompt = self._model.read(inputs.get("prompt", []))
        text = self._model.text(prompt)
        ids = self._token_ids(prompt, text, inputs)
        self._model.check(request, prompt, len(ids))
        answer = self._model.answer(request, prompt, text, ids)
        taken = self._take_slot(ids, request.params)
        answer.num_cached_tokens = taken.num_shared
        self._running[request.id] = _Running(
            id=request.id,
            slot=taken.slot,
            prompt=ids,
            params=request.params,
            outputs=request.outputs,
            answer=answer,
            num_computed=taken.num_shared,
        )

    def _take_slot(self, ids: list[int], params: SamplingParams) -> Taken:
        """Return a slot with as much of a prompt as is known."""
        taken = self._slots.take(ids, self._prefix_key(params))
        if taken.source != taken.slot:
            import torch

            with torch.inference_mode():
                self._pool.copy(taken.source, taken.slot, taken.num_shared)
        return taken

    def _prefix_key(self, params: SamplingParams) -> Hashable | None:
        """Return what keys and values of a prompt depend on besides its tokens; None where none can be shared."""
        if params.prompt_logprobs is not None:  # which are of all its tokens
            return None
        return params.lora, params.seed is None, params.cache_salt

    def _token_ids(self, prompt: Prompt, text: str | None, inputs: dict[str, list[Payload]]) -> list[int]:
        """Return the prompt's tokens; `inputs` have what comes beside it."""
        del inputs
        return self._model.token_ids(prompt, text)

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Compute one token for each request whose prompt is read, and go on with prompts, the first named first."""
        import torch

        named = [self._running[id_] for id_ in requests]
        events = [event for running in named for event in self._render(running)]
        planned = self._plan([running for running in named if running.id in self._running])
        if not planned:
            return events
        is_exact = any(running.params.seed is not None for running, _ in planned)
        passes = [
            (name, together)
            for name, named_so in _by_lora(planned).items()
            for together in (_exact_passes(named_so) if is_exact else [named_so])
        ]
        with torch.inference_mode():
            rows: list[tuple[_Running, torch.Tensor]] = []
            for name, together in passes:
                self._lora.use(name)
                logits = self._forward([piece for _, piece in together], is_exact=is_exact)
                parts = logits.split([piece.num_rows for _, piece in together])
                for (running, piece), part in zip(together, parts, strict=True):
                    last = running.take_rows(piece, part)
                    self._slots.hold(running.slot, running.num_computed)
                    # A prompt that isn't read to its end has no next token yet.
                    if running.num_waiting == 0:
                        events.extend(self._render(running))
                        rows.append((running, last))
            rows = [(running, row) for running, row in rows if running.id in self._running]
            if rows:
                events.extend(self._advance([running for running, _ in rows], torch.cat([row for _, row in rows])))
        return events

    def _render(self, running: _Running) -> list[Event]:
        """Tell what the prompt came to, once; that is all where nothing else is wanted."""
        if running.was_rendered or "rendered" not in running.outputs:
            return []
        if running.is_scored and len(running.candidates) < len(running.prompt):
            return []
        running.was_rendered = True
        candidates = running.candidates if running.is_scored else None
        events: list[Event] = [Output(running.id, "rendered", self._model.rendered(running.prompt, candidates))]
        if running.outputs == {"rendered"}:
            self.abort(running.id)
            events.append(Finished(running.id, Finish("stop", Usage(prompt_tokens=len(running.prompt)))))
        return events

    def _plan(self, requests: Sequence[_Running]) -> list[tuple[_Running, Piece]]:
        """Return each request's next piece; prompts only as far as the step's budget goes.

        A prompt is always cut at the same places, whoever else has one: attention over a part gives slightly other
        bits than over the whole. The first prompt always fits.
        """
        budget = self._prefill_chunk
        planned: list[tuple[_Running, Piece]] = []
        for running in requests:
            piece = running.piece(self._prefill_chunk)
            if not running.generated:
                if len(piece.ids) > budget:
                    continue
                budget -= len(piece.ids)
            planned.append((running, piece))
        return planned

    def _advance(self, requests: Sequence[_Running], logits: torch.Tensor) -> list[Event]:
        """Choose each request's next token, (requests, vocabulary) → events."""
        best, tokens = (result.tolist() for result in logits.max(dim=-1))
        events: list[Event] = []
        for index, running in enumerate(requests):
            try:
                outputs, finish = running.answer.advance(logits[index], best[index], tokens[index])
            except OmniBusError as error:
                self._slots.forget(running.slot)
                self.abort(running.id)
                events.append(Failure(running.id, error))
                continue
            except Exception as error:  # noqa: BLE001 (one request's parameters must not end the others of its batch)
                self.abort(running.id)
                failure = StageFailed(f"choosing a token failed with {type(error).__name__}: {error}")
                failure.__cause__ = error
                events.append(Failure(running.id, failure))
                continue
            events.extend(Output(running.id, port, payload) for port, payload in outputs)
            if finish is not None:
                self.abort(running.id)
                events.append(Finished(running.id, finish))
        return events

    def abort(self, request: RequestId) -> None:
        """Drop a request; its slot is free at once."""
        running = self._running.pop(request, None)
        if running is not None:
            self._slots.give_back(running.slot)

    def close(self) -> None:
        """Let go of the weights and the pool."""
        self._running.clear()
        for name in ("_forward", "_pool", "_model"):
            with contextlib.suppress(AttributeError):
                delattr(self, name)

    def statistics(self) -> Statistics:
        """Return how many requests and tokens are held."""
        return Statistics(
            num_active=len(self._running),
            num_free_slots=self._slots.num_free,
            num_tokens=sum(running.num_computed for running in self._running.values()),
            pool_bytes=self._pool.size_bytes,
        )


def _by_lora(planned: Sequence[tuple[_Running, Piece]]) -> dict[str | None, list[tuple[_Running, Piece]]]:
    """Split a step by the adapters that its requests name, None for the base model."""
    found: dict[str | None, list[tuple[_Running, Piece]]] = {}
    for item in planned:
        found.setdefault(item[0].params.lora, []).append(item)
    return found


def _exact_passes(planned: Sequence[tuple[_Running, Piece]]) -> list[list[tuple[_Running, Piece]]]:
    """Split a step into forward passes in which the tokens of seeded requests have the same bits in any company.

    How a matrix product adds up depends on its number of rows. A seeded prompt is read alone, in pieces that never
    vary; tokens that follow on an answer share passes within the numbers that make no difference.
    """
    decoding = [item for item in planned if item[0].generated]
    passes = [decoding[begin : begin + MAX_ROWS] for begin in range(0, len(decoding), MAX_ROWS)]
    prompts = [item for item in planned if not item[0].generated]
    passes += [[item] for item in prompts if item[0].params.seed is not None]
    unseeded = [item for item in prompts if item[0].params.seed is None]
    return [*passes, unseeded] if unseeded else passes
