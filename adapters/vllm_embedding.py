"""Embedding models on vLLM: one vector for a prompt, or the hidden state of each of its tokens.

Any causal language model serves as well (vLLM takes the last token's state then), which is what the default model does.
A prompt is read in one go and answered once, so there is nothing to suspend; vLLM's core runs in this process, as in
`adapters.vllm_text`.
"""

# vLLM is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.vllm_engine import Held, VllmEngine
from adapters.vllm_request import HONOURED, rendered_of
from omni_bus.engine import EngineRequest, Finished, Output
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.buffers import from_torch
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Hidden, Json, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.vllm_options import VllmOptions
    from omni_bus.engine import Event, Report
    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Payload

TASKS = {"embedding": "embed", "hidden_states": "token_embed"}
"""Output ports, and vLLM's pooling task for each."""


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


@dataclass(slots=True, kw_only=True)
class _Running(Held):
    """One request, with a vLLM request for each port that is wanted."""

    num_tokens: int
    awaited: dict[str, str] = field(default_factory=dict)
    """Ports that vLLM still works for, by the request's id there."""
    num_cached: int = 0


class VllmEmbedding(VllmEngine[_Running]):
    """A prompt in, a vector out."""

    emits: ClassVar[dict[str, str]] = {"embedding": "tensor", "hidden_states": "hidden", "rendered": "json"}
    Params = EmbeddingParams
    adapter = "vllm-embedding"
    runner = "pooling"
    honoured = HONOURED - {"tools", "tool_choice", "parallel_tool_calls"}

    @classmethod
    def check(cls, options: VllmOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without importing vLLM."""
        problems = super().check(options)
        for key in ("tool_call_parser", "reasoning_parser"):
            if getattr(options, key) is not None:
                problems.append(f"{key}: an embedding has no text to parse (allowed: none)")
        return problems

    def load(self, report: Report) -> None:
        """Start vLLM.

        Raises:
            StartFailed: vLLM is missing or of an unknown version, or the model can't embed.
        """
        super().load(report)
        if missing := set(TASKS.values()) - set(self._engine.get_supported_tasks()):
            raise StartFailed(f"model: '{self.options.model}' can't {' or '.join(sorted(missing))}", field="model")

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: its prompt or parameters can't be honoured.
            Overloaded: vLLM holds all that it may.
        """
        _, prompt = self._read(request, inputs)
        num_tokens = len(prompt.token_ids)
        if not 0 < num_tokens <= self._context_length:
            raise BadInput(
                f"prompt: {num_tokens} tokens came (allowed: 1 to the context length, {self._context_length})",
                field="prompt",
            )
        running = _Running(id=request.id, num_tokens=num_tokens)
        if "rendered" in request.outputs:
            rendered = rendered_of(prompt, self._context_length, self._table)
            running.events.append(Output(request.id, "rendered", Json(msgspec.to_builtins(rendered))))
        for port in sorted(request.outputs & set(TASKS)):
            running.awaited[f"{request.id}/{port}"] = port
        try:
            for engine_id, port in running.awaited.items():
                self._submit(engine_id, request, prompt, lambda task=TASKS[port]: _pooling(task, request.params))
        except BadInput:
            self._engine.abort_request(list(running.awaited))
            raise
        self._running[request.id] = running
        self._finish_if_done(running)

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Run one step of vLLM, which may read prompts of others too; their vectors wait for their own step."""
        named = [self._running[id_] for id_ in requests]
        if not any(running.events for running in named):
            self._step_engine()
        return self._take_events(named)

    def _step_engine(self) -> None:
        for output in self._run_step():
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


def _pooling(task: Any, params: EmbeddingParams) -> Any:
    from vllm import PoolingParams

    return PoolingParams(task=task, dimensions=params.dimensions, use_activation=params.normalize)


def _payload_of(port: str, data: Any) -> Tensor | Hidden:
    vectors = from_torch(data.float().contiguous())
    return vectors if port == "embedding" else Hidden(0, vectors.dtype, vectors.shape, vectors.data)
