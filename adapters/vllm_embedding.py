"""Embedding models on vLLM: one vector for a prompt, or the hidden state of each of its tokens.

Any causal language model serves as well (vLLM takes the last token's state then), which is what the default model does.
A prompt is read in one go and answered once, so there is nothing to suspend; vLLM's core runs in this process, as in
`adapters.vllm_text`.
"""

# vLLM is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.token_bytes import TokenBytes
from adapters.vllm_load import VllmSleep, close_engine, load_engine, modalities_of
from adapters.vllm_metrics import engine_metrics
from adapters.vllm_options import VllmOptions, problems_of
from adapters.vllm_request import HONOURED, VllmPrompt, read_inputs, rendered_of
from adapters.vllm_text import EXIT_BROKEN, find_template, lora_request, submit
from omni_bus.engine import EngineRequest, Finished, Output, StepEngine
from omni_bus.errors import BadInput, Overloaded, StartFailed
from omni_bus.wire.buffers import from_torch
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Hidden, Json, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.engine import Context, Event, Report
    from omni_bus.ids import RequestId
    from omni_bus.wire.metrics import Metric
    from omni_bus.wire.payloads import Payload

logger = logging.getLogger(__name__)

TASKS = {"embedding": "embed", "hidden_states": "token_embed"}
"""Output ports, and vLLM's pooling task for each."""

HONOURED_HERE = HONOURED - {"tools", "tool_choice", "parallel_tool_calls"}


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt becomes a vector."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Only so many of the leading ones, of models that were trained for that (Matryoshka)."""

    normalize: bool = True
    """Vectors have the length 1."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Cached prefixes are shared only between requests with the same salt."""

    lora: str | None = None
    """The name of the adapter to answer with; None is the base model."""


@dataclass(slots=True)
class _Running:
    """One request, with a vLLM request for each port that is wanted."""

    id: RequestId
    num_tokens: int
    awaited: dict[str, str] = field(default_factory=dict)
    """Ports that vLLM still works for, by the request's id there."""
    num_cached: int = 0
    events: list[Event] = field(default_factory=list)
    is_over: bool = False


class VllmEmbedding(StepEngine):
    """A prompt in, a vector out."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "images": "image", "audio": "audio", "video": "video"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "audio", "video"})
    sleep_levels: ClassVar[frozenset[int]] = frozenset({1, 2})
    emits: ClassVar[dict[str, str]] = {"embedding": "tensor", "hidden_states": "hidden", "rendered": "json"}
    Options = VllmOptions
    Params = EmbeddingParams

    _engine: Any = None
    _tokenizer: Any
    _template: str | None
    _modalities: frozenset[str] | None
    _table: TokenBytes
    _context_length: int

    def __init__(self, options: VllmOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.num_resident
        self._running: dict[RequestId, _Running] = {}
        self._sleep = VllmSleep()

    @classmethod
    def num_slots(cls, options: VllmOptions) -> int:
        """Return the requests that one replica with these options can hold at once."""
        return options.num_resident

    @classmethod
    def check(cls, options: VllmOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without importing vLLM."""
        problems = problems_of(options, "vllm-embedding")
        for key in ("tool_call_parser", "reasoning_parser"):
            if getattr(options, key) is not None:
                problems.append(f"{key}: an embedding has no text to parse (allowed: none)")
        return problems

    def load(self, report: Report) -> None:
        """Start vLLM.

        Raises:
            StartFailed: vLLM is missing or of an unknown version, or the model can't embed.
        """
        self._engine = load_engine(self.options, self.context, report, adapter="vllm-embedding", runner="pooling")
        if missing := set(TASKS.values()) - set(self._engine.get_supported_tasks()):
            raise StartFailed(f"model: '{self.options.model}' can't {' or '.join(sorted(missing))}", field="model")
        config = self._engine.vllm_config.model_config
        self._tokenizer = self._engine.get_tokenizer()
        self._template = find_template(self._tokenizer, config.model)
        self._modalities = modalities_of(self._engine)
        self._table = TokenBytes(self._tokenizer)
        self.context_length = self._context_length = config.max_model_len

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: its prompt or parameters can't be honoured.
            Overloaded: vLLM holds all that it may.
        """
        if request.id in self._running:
            raise ValueError(f"request {request.id} was added twice")
        if len(self._running) >= self.max_resident:
            raise Overloaded(f"all {self.max_resident} places (max_resident) are taken")
        _, prompt = read_inputs(
            inputs,
            "vllm-embedding",
            HONOURED_HERE,
            self._tokenizer,
            template=self._template,
            may_bring_template=self.options.trust_request_chat_template,
            modalities=self._modalities,
        )
        num_tokens = len(prompt.token_ids)
        if not 0 < num_tokens <= self._context_length:
            raise BadInput(
                f"prompt: {num_tokens} tokens came (allowed: 1 to the context length, {self._context_length})",
                field="prompt",
            )
        running = _Running(request.id, num_tokens)
        if "rendered" in request.outputs:
            rendered = rendered_of(prompt, self._context_length, self._table)
            running.events.append(Output(request.id, "rendered", Json(msgspec.to_builtins(rendered))))
        for port in sorted(request.outputs & set(TASKS)):
            running.awaited[f"{request.id}/{port}"] = port
        try:
            for engine_id, port in running.awaited.items():
                self._submit(engine_id, TASKS[port], request, prompt)
        except BadInput:
            self._engine.abort_request(list(running.awaited))
            raise
        self._running[request.id] = running
        self._finish_if_done(running)

    def _submit(self, engine_id: str, task: Any, request: EngineRequest, prompt: VllmPrompt) -> None:
        from vllm import PoolingParams

        params: EmbeddingParams = request.params
        submit(
            self._engine,
            engine_id,
            prompt.engine_prompt(params.cache_salt),
            lambda: PoolingParams(task=task, dimensions=params.dimensions, use_activation=params.normalize),
            lora_request=lora_request(self.options.lora, params.lora),
            priority=-request.priority,
        )

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Run one step of vLLM, which may read prompts of others too; their vectors wait for their own step."""
        named = [self._running[id_] for id_ in requests]
        if not any(running.events for running in named):
            self._step_engine()
        events: list[Event] = []
        for running in named:
            events += running.events
            running.events = []
            if running.is_over:
                self._running.pop(running.id, None)
        return events

    def _step_engine(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:
            logger.exception("vLLM's engine broke; this process ends")
            logging.shutdown()
            os._exit(EXIT_BROKEN)
        for output in outputs:
            running = self._running.get(output.request_id.rpartition("/")[0])
            port = None if running is None else running.awaited.pop(output.request_id, None)
            if running is not None and port is not None:
                running.num_cached = max(running.num_cached, output.num_cached_tokens or 0)
                running.num_tokens = len(output.prompt_token_ids)
                running.events.append(Output(running.id, port, _payload_of(port, output.outputs.data)))
                self._finish_if_done(running)

    def _finish_if_done(self, running: _Running) -> None:
        if not running.awaited:
            usage = Usage(prompt_tokens=running.num_tokens, cached_tokens=running.num_cached)
            running.events.append(Finished(running.id, Finish("stop", usage)))
            running.is_over = True

    def abort(self, request: RequestId) -> None:
        """Drop a request; what it holds is free when this returns."""
        running = self._running.pop(request, None)
        if running is not None and running.awaited:
            self._engine.abort_request(list(running.awaited))

    def metrics(self) -> Sequence[Metric]:
        """Return vLLM's own measures; nothing with `disable_log_stats`."""
        return engine_metrics(self._engine)

    def sleep(self, level: int) -> None:
        """Give memory back, by vLLM's own sleep mode where that is enabled, else (level 2) by closing it.

        Raises:
            BadInput: level 1 without that mode.
        """
        self._sleep.sleep(self._engine, level, self.close)

    def wake(self, report: Report) -> None:
        """Be ready again."""
        self._sleep.wake(self._engine, lambda: self.load(report))

    def close(self) -> None:
        """Let go of the model and its memory."""
        engine, self._engine = self._engine, None
        self._running.clear()
        if engine is not None:
            close_engine(engine)


def _payload_of(port: str, data: Any) -> Tensor | Hidden:
    vectors = from_torch(data.float().contiguous())
    return vectors if port == "embedding" else Hidden(0, vectors.dtype, vectors.shape, vectors.data)
