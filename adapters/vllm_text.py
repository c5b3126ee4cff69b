"""Language models on vLLM, as a step engine over its core in this process.

``vllm serve`` has an HTTP process, an engine process and, on a CPU, a worker process; tokens cross from one to the next
encoded. Here vLLM's scheduler and model run on the stage's engine thread: nothing is encoded on the way, a cancel frees
a request's memory at once, and the stage says before each step which requests it is for, so a slow reader suspends
exactly its own one (`adapters.vllm_suspension`).
"""

# vLLM is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import concurrent.futures
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from adapters.sampling import SamplingParams, Structure
from adapters.vllm_answer import Answer, AnswerParsers
from adapters.vllm_engine import Held, VllmEngine
from adapters.vllm_request import HONOURED, VllmPrompt, rendered_of, sampling_arguments, structure_arguments
from adapters.vllm_suspension import Suspension
from omni_bus.engine import EngineRequest, Failure, Finished, Output
from omni_bus.errors import BadInput, OmniBusError, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.vllm_options import VllmOptions
    from omni_bus.engine import Context, Event, Report
    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Payload


class Statistics(NamedTuple):
    """What vLLM holds."""

    num_active: int
    num_running: int
    """Requests with keys and values, suspended ones included."""
    num_waiting: int
    num_preempted: int
    """How often a suspended request gave its keys and values up."""
    kv_cache_usage: float
    """Share of the memory for keys and values that is in use."""


@dataclass(slots=True, kw_only=True)
class _Running(Held):
    """One request."""

    engine_id: str
    """vLLM's own id of it; empty if it needs no token."""
    prompt: VllmPrompt
    answer: Answer
    wants_rendered: bool
    wants_answer: bool


class VllmText(VllmEngine[_Running]):
    """A language model: what `VllmEngine` takes in, text out."""

    emits: ClassVar[dict[str, str]] = {"text": "text", "reasoning": "text", "tool_calls": "json", "rendered": "json"}
    Params = SamplingParams
    adapter = "vllm"
    runner = "generate"
    honoured = HONOURED

    _parsers: AnswerParsers
    _suspension: Suspension

    def __init__(self, options: VllmOptions, context: Context) -> None:
        super().__init__(options, context)
        self._named: list[_Running] = []
        """The requests of the last step."""

    def load(self, report: Report) -> None:
        """Start vLLM and answer one request.

        Raises:
            StartFailed: vLLM is missing or of an unknown version, or refuses the model or an argument.
        """
        super().load(report)
        self._parsers = AnswerParsers(
            self._tokenizer,
            self._engine.vllm_config.model_config.model,
            tool_call=self.options.tool_call_parser,
            reasoning=self.options.reasoning_parser,
        )
        core = self._engine.engine_core.engine_core
        self._suspension = Suspension(core.scheduler, keeps_kv=self.options.suspended_kv == "keep")
        report("warming up", 0.0)
        self._warm_up()
        report("warming up", 1.0)

    def _warm_up(self) -> None:
        """Answer once, and once within a structure, whose compiler would else start at the first such request."""
        plain = SamplingParams(max_tokens=2, temperature=0.0)
        with contextlib.suppress(OmniBusError):  # not every vocabulary has a compiler; its requests are refused then
            self._answer_once(msgspec.structs.replace(plain, structure=Structure(regex="[ab]")))
        try:
            self._answer_once(plain)
        except OmniBusError as error:
            raise StartFailed(f"the model can't answer: {error.message}", field="model") from error

    def _answer_once(self, params: SamplingParams) -> None:
        request = EngineRequest("warm-up", params, frozenset({"text"}))
        self.add(request, {"prompt": [Json({"token_ids": [0]})]})
        while self._running:
            for event in self.step([request.id]):
                if isinstance(event, Failure):
                    raise event.error

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: its prompt or parameters can't be honoured.
            Overloaded: vLLM holds all that it may.
        """
        params: SamplingParams = request.params
        asked, prompt = self._read(request, inputs)
        wants_answer = bool(request.outputs - {"rendered"})
        parser = self._parsers.parser_for(asked) if wants_answer else None
        running = _Running(
            id=request.id,
            engine_id="",
            prompt=prompt,
            answer=Answer(params, request.outputs, self._table, parser),
            wants_rendered="rendered" in request.outputs,
            wants_answer=wants_answer,
        )
        self._check_lengths(
            params, len(prompt.token_ids), has_answer=wants_answer or params.prompt_logprobs is not None
        )
        if not wants_answer and params.prompt_logprobs is None:
            self._render_alone(running)
        else:
            running.engine_id = self._ask(request, running, parser)
            if running.wants_rendered and params.prompt_logprobs is None:
                running.events.append(self._rendered(running, None))
                running.wants_rendered = False
        self._running[request.id] = running

    def _check_lengths(self, params: SamplingParams, num_tokens: int, *, has_answer: bool) -> None:
        if has_answer and not 0 < num_tokens < self._context_length:
            raise BadInput(
                f"messages: {num_tokens} tokens came (allowed: 1 to {self._context_length - 1}, the context length is "
                f"{self._context_length})",
                field="messages",
            )
        for token in (*params.stop_token_ids, *map(int, params.logit_bias)):
            if token >= len(self._tokenizer):
                name = "stop_token_ids" if token in params.stop_token_ids else "logit_bias"
                raise BadInput(
                    f"{name}: {token} is not a token of the model (allowed: 0 to {len(self._tokenizer) - 1})",
                    field=name,
                )

    def _render_alone(self, running: _Running) -> None:
        usage = Usage(prompt_tokens=len(running.prompt.token_ids))
        running.events = [self._rendered(running, None), Finished(running.id, Finish("stop", usage))]
        running.is_over = True

    def _rendered(self, running: _Running, logprobs: Sequence[Any] | None) -> Output:
        rendered = rendered_of(running.prompt, self._context_length, self._table, logprobs)
        return Output(running.id, "rendered", Json(msgspec.to_builtins(rendered)))

    def _ask(self, request: EngineRequest, running: _Running, parser: Any) -> str:
        """Give vLLM the request; return its own id of it."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params: SamplingParams = request.params
        arguments = sampling_arguments(params)
        structure = None if parser is None else parser.structure
        if structure is None and params.structure is not None:
            structure = StructuredOutputsParams(**structure_arguments(params.structure))
        if parser is not None and not parser.skips_special_tokens:
            arguments["skip_special_tokens"] = False
        if not running.wants_answer:
            arguments["max_tokens"] = 1  # whose one token nobody sees: the prompt's log-probabilities come with it
        return self._submit(
            request.id,
            request,
            running.prompt,
            lambda: VllmSamplingParams(
                **arguments, structured_outputs=structure, output_kind=RequestOutputKind.DELTA, skip_clone=True
            ),
            suspect=_suspect(params),
        )

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Run one step of vLLM for these requests; prompts beyond its budget of tokens go on in later ones."""
        named = self._named = [self._running[id_] for id_ in requests]
        if not any(running.events for running in named):
            # Else what is there already goes out first: a rendered prompt, or what vLLM was ahead with.
            self._step_engine([running.engine_id for running in named if running.engine_id])
        return self._take_events(named)

    def run_ahead(self) -> None:
        """Run vLLM's next step for those of the last one that need more tokens."""
        ids = [running.engine_id for running in self._named if running.id in self._running and not running.is_over]
        if any(ids):
            self._step_engine([engine_id for engine_id in ids if engine_id])

    def _step_engine(self, engine_ids: list[str]) -> None:
        self._suspension.name(frozenset(engine_ids))
        outputs = self._run_step()
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                running.events += self._take(running, output)
        if not outputs and not self._suspension.num_scheduled:
            self._wait_for_grammar(engine_ids)

    def _wait_for_grammar(self, engine_ids: list[str]) -> None:
        """Wait for a grammar that vLLM compiles on a thread, rather than ask over and over whether it is there."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        held = (scheduler.requests.get(id_) for id_ in engine_ids)
        structures = (getattr(request, "structured_output_request", None) for request in held)
        grammars = [getattr(structure, "_grammar", None) for structure in structures]
        pending = [grammar for grammar in grammars if isinstance(grammar, concurrent.futures.Future)]
        if pending:
            concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)

    def _take(self, running: _Running, output: Any) -> list[Event]:
        [completion] = output.outputs
        if completion.finish_reason in {"error", "abort"}:
            running.is_over = True
            return [Failure(running.id, StageFailed(f"vLLM ended the request: {completion.finish_reason}"))]
        events: list[Event] = []
        if running.wants_rendered:
            running.prompt.token_ids = list(output.prompt_token_ids)
            events.append(self._rendered(running, output.prompt_logprobs))
            running.wants_rendered = False
        if running.wants_answer:
            try:
                events += [Output(running.id, port, payload) for port, payload in running.answer.read(output)]
            except Exception as error:  # noqa: BLE001 (a parser of vLLM's may trip over an answer; that costs this request)
                self._engine.abort_request([running.id])
                running.is_over = True
                failure = StageFailed(f"the answer can't be parsed: {type(error).__name__}")
                failure.__cause__ = error
                return [*events, Failure(running.id, failure)]
        if output.finished:
            running.is_over = True
            finish = running.answer.finish(output)
            if not running.wants_answer:
                finish = Finish("stop", Usage(prompt_tokens=len(output.prompt_token_ids)))
            events.append(Finished(running.id, finish))
        return events

    def abort(self, request: RequestId) -> None:
        """Drop a request; its keys and values are free when this returns."""
        running = self._running.pop(request, None)
        self._named = [named for named in self._named if named is not running]
        if running is not None and running.engine_id:
            self._suspension.forget(running.engine_id)
            self._engine.abort_request([request])

    def close(self) -> None:
        """Let go of the model and its memory."""
        self._named.clear()
        vars(self).pop("_suspension", None)  # which keeps the scheduler
        super().close()

    def statistics(self) -> Statistics:
        """Return what vLLM holds."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        running, waiting = scheduler.get_request_counts()
        return Statistics(
            num_active=len(self._running),
            num_running=running,
            num_waiting=waiting,
            num_preempted=self._suspension.num_preempted,
            kv_cache_usage=scheduler.kv_cache_manager.usage,
        )


def _suspect(params: SamplingParams) -> str:
    """Return what vLLM's refusals are about that don't say it: prompts were checked here, structures were not."""
    if params.structure is None:
        return "prompt"
    return f"structure.{next(iter(structure_arguments(params.structure)))}"
