"""What adapters of diffusers' pipelines share: how one is loaded, what its call takes, and a call that can be stopped.

A pipeline makes its whole output in one call. It runs on a thread; after each denoising step it is asked whether it may
go on, so a cancel waits for one step at most (or for the text encoder before the first, the decoder after the last).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import queue
import secrets
import threading
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from adapters.handover import error_of, start_threads
from adapters.packages import missing
from adapters.transformers_model import ModelLoader, ModelOptions
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError, StageFailed, StartFailed, did_you_mean
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from omni_bus.engine import Context, Report

INSTALL_ENGINE = 'pip install "omni-bus[diffusers]"'

MAX_SEED = 2**63 - 1

WARM_UP_STEPS = 2
"""Denoising steps of the first call; solvers of second order want more than one."""

Argument: TypeAlias = str | int | float | bool

OURS = frozenset({
    "prompt", "generator", "output_type", "return_dict", "callback", "callback_steps", "callback_on_step_end",
    "callback_on_step_end_tensor_inputs", "num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt",
})  # fmt: skip
"""Arguments of calls that are the engine's own business."""


class DiffusersOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a stage's table."""

    call: dict[str, Argument] = msgspec.field(default_factory=dict)
    """Arguments of the pipeline's call that each request has unless it says otherwise, by their names in diffusers."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=16)] = 1
    """Requests that run at once, each on a thread; they share the weights."""


class DenoisingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set of any pipeline; what a pipeline's call doesn't take is refused by name."""

    negative_prompt: Annotated[str, Meta(min_length=1)] | None = None
    """What is not to be in the output."""
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """How closely the prompt is followed; None takes the pipeline's own."""
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Denoising steps; None takes the pipeline's own."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """The same seed and request give the same output, alone or beside others; None draws a fresh seed."""


class _Stopped(Exception):
    """The request is over; raised through the pipeline's own code."""


class DiffusersEngine(StreamingEngine):
    """Text in, what a pipeline makes out; a subclass says which pipelines, and what their output is as payloads."""

    name: ClassVar[str]
    """The adapter's."""
    accepts: ClassVar[dict[str, str]] = {"prompt": "text"}

    def __init__(self, options: DiffusersOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._threads = ThreadPoolExecutor(options.max_num_seqs, thread_name_prefix=self.name)
        self._pipelines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._takes: frozenset[str] = frozenset()
        self._own_guidance: float | None = None
        self._num_steps = 0
        self._counting = threading.Lock()

    @classmethod
    def check(cls, options: DiffusersOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        problems = missing(cls.name, {INSTALL_ENGINE: ("torch", "diffusers", "transformers")})
        path = Path(options.model).expanduser()
        is_path = path.is_absolute() or options.model.startswith(("./", "../", "~"))
        if is_path and not (path / "model_index.json").is_file():
            problems.append(
                f"model: '{options.model}' is not the folder of a diffusers pipeline: it has no model_index.json"
            )
        return problems

    @property
    def num_steps(self) -> int:
        """Denoising steps since the load."""
        return self._num_steps

    @abstractmethod
    def examine(self, pipeline: Any, takes: frozenset[str]) -> None:
        """Look at a loaded pipeline, whose call takes these arguments.

        Raises:
            ValueError: it is none that this adapter serves; says why.
        """

    @abstractmethod
    def arguments(self, params: Any) -> dict[str, Any]:
        """Return a request's arguments besides those that all pipelines have.

        Raises:
            BadInput: they can't be honoured.
        """

    @abstractmethod
    def payloads(self, output: Any) -> list[tuple[str, Payload]]:
        """Return a call's output as payloads of ports.

        Raises:
            StageFailed: it can't be shown.
        """

    def load(self, report: Report) -> None:
        """Load, and run a few steps.

        Raises:
            StartFailed: the pipeline isn't there or can't be served as the options say.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        pipeline = self._loaded(loader)
        parameters = inspect.signature(type(pipeline).__call__).parameters
        self._takes = frozenset(parameters) - {"self"}
        if "guidance_scale" in parameters and isinstance(own := parameters["guidance_scale"].default, int | float):
            self._own_guidance = own
        self._check_call()
        if not self._takes & {"callback", "callback_on_step_end"}:
            raise loader.refused(f"{type(pipeline).__name__} can't be stopped between steps")
        try:
            self.examine(pipeline, self._takes)
        except ValueError as error:
            raise loader.refused(str(error)) from error
        report("warming up", 0.0)
        try:
            _warm_up(pipeline, dict(self.options.call), self._takes, report)
        except Exception as error:
            # Whatever a pipeline's code raises in its first steps, it can't be served here.
            raise loader.refused(f"its first steps failed with {type(error).__name__}: {error}") from error
        for _ in range(self.max_num_seqs):
            self._pipelines.put(_with_own_scheduler(pipeline))
        start_threads(self._threads, self.max_num_seqs)
        report("warming up", 1.0)

    def _loaded(self, loader: ModelLoader) -> Any:
        import torch
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline
        from diffusers.utils import logging

        logging.disable_progress_bar()
        dtype = self.options.dtype
        found: dict[str, Any] = {} if dtype == "auto" else {"dtype": getattr(torch, dtype)}
        if dtype == "auto" and loader.on_cpu:
            found = {"dtype": torch.float32}
        try:
            pipeline: Any = loader.part("loading weights", DiffusionPipeline, **found)
        except (AttributeError, TypeError) as error:  # a class that this diffusers doesn't know, or other parts
            raise loader.refused(f"{type(error).__name__}: {error}") from error
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(loader.device)

    def _check_call(self) -> None:
        known = self._takes - OURS
        for name in self.options.call:
            if name not in known:
                raise StartFailed(
                    f"call: unknown argument '{name}'{did_you_mean(name, known)} (known: {', '.join(sorted(known))})",
                    field="call",
                )

    def close(self) -> None:
        """Let go of the weights and the threads."""
        self._threads.shutdown()
        self._pipelines = queue.SimpleQueue()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Make one output.

        The generator's end, however it comes, waits for the thread to let go of the request: at most one step.

        Raises:
            BadInput: what came can't be honoured.
            StageFailed: the pipeline failed.
        """
        prompt = await _text_of(inputs)
        arguments = self._arguments(prompt, request.params)
        is_over = threading.Event()

        def go_on() -> None:
            if is_over.is_set():
                raise _Stopped
            with self._counting:
                self._num_steps += 1

        call = asyncio.get_running_loop().run_in_executor(
            self._threads, self._run_blocking, arguments, request.params.seed, go_on
        )
        try:
            await asyncio.wait([call])
        finally:
            is_over.set()
            # Shielded: a second cancel must not make the slot look free while the thread still holds it.
            error = await asyncio.shield(error_of(call))
        if error is not None:
            raise error
        for port, payload in call.result():
            if port in request.outputs:
                yield port, payload
        yield Finish("stop")

    def _arguments(self, prompt: str, params: DenoisingParams) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.options.call) | {"prompt": prompt}
        for name in ("negative_prompt", "guidance_scale", "num_inference_steps"):
            if (value := getattr(params, name)) is not None:
                self.require(name, {name})
                found[name] = value
        guidance = found.get("guidance_scale", self._own_guidance)
        if params.negative_prompt is not None and guidance is not None and guidance <= 1:
            raise BadInput(
                f"negative_prompt: it changes nothing at a guidance_scale of {guidance:g} (allowed: null, or above 1)",
                field="negative_prompt",
            )
        return found | self.arguments(params)

    def require(self, field: str, arguments: set[str]) -> None:
        """Refuse a parameter unless the pipeline's call takes one of these arguments.

        Raises:
            BadInput: names the parameter.
        """
        if not self._takes & arguments:
            raise BadInput(f"{field}: the model has no such setting (allowed: null)", field=field)

    def _run_blocking(
        self, arguments: dict[str, Any], seed: int | None, go_on: Callable[[], None]
    ) -> list[tuple[str, Payload]]:
        import torch

        pipeline = self._pipelines.get()
        try:
            for field in ("prompt", "negative_prompt"):
                _check_length(pipeline, field, arguments.get(field))
            # On the CPU, so that a seed means the same wherever the model computes.
            generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
            return self.payloads(_call(pipeline, arguments | {"generator": generator}, self._takes, go_on))
        except _Stopped:
            return []
        except OmniBusError:
            raise
        except Exception as error:
            raise StageFailed(f"the pipeline failed with {type(error).__name__}: {str(error)[:300]}") from error
        finally:
            self._pipelines.put(pipeline)


def _call(pipeline: Any, arguments: Mapping[str, Any], takes: frozenset[str], go_on: Callable[[], None]) -> Any:
    """Call a pipeline, and `go_on` after each step, which may raise."""

    def on_step_end(of: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        go_on()
        return tensors

    def on_step(step: int, timestep: Any, latents: Any) -> None:
        go_on()

    callback = {"callback_on_step_end": on_step_end} if "callback_on_step_end" in takes else {"callback": on_step}
    return pipeline(**arguments, **callback)


def _warm_up(pipeline: Any, arguments: dict[str, Any], takes: frozenset[str], report: Report) -> None:
    done = 0

    def go_on() -> None:
        nonlocal done
        done += 1
        report("warming up", min(1.0, done / (WARM_UP_STEPS + 1)))

    if "num_inference_steps" in takes:
        arguments["num_inference_steps"] = WARM_UP_STEPS
    _call(pipeline, arguments | {"prompt": "rain"}, takes, go_on)
    if not done:
        raise ValueError("it called nobody after its steps")


def _with_own_scheduler(pipeline: Any) -> Any:
    """Return a pipeline with the same weights and a scheduler of its own, which is where a call keeps its state."""
    own = copy.copy(pipeline)
    own.scheduler = copy.deepcopy(pipeline.scheduler)
    return own


def _check_length(pipeline: Any, field: str, text: str | None) -> None:
    """Refuse a text that the pipeline's tokenizers would cut silently."""
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        tokenizer: Any = getattr(pipeline, name, None)
        longest = getattr(tokenizer, "model_max_length", 0)
        if text is None or not 0 < longest < 1_000_000:  # huge: the tokenizer knows no limit
            continue
        # A token of these vocabularies has no more characters, so longer texts need not be looked at.
        num_tokens = longest + 1 if len(text) > 100 * longest else len(tokenizer(text, verbose=False)["input_ids"])
        if num_tokens > longest:
            raise BadInput(f"{field}: it comes to more than {longest} tokens (allowed: at most {longest})", field=field)


async def _text_of(inputs: Inputs) -> str:
    pieces: list[str] = []
    async for payload in inputs.port("prompt"):
        if not isinstance(payload, Text):
            raise BadInput(f"prompt: {kind_of(payload)} came (allowed: text)", field="prompt")
        pieces.append(payload.text)
    prompt = "".join(pieces)
    if not prompt.strip():
        raise BadInput("prompt: it is blank (allowed: a text)", field="prompt")
    return prompt
