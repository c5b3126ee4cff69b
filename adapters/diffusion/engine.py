"""Any of diffusers' pipelines as a step engine: requests at different denoising steps share the model's calls."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec

from adapters.diffusion.arguments import Call
from adapters.diffusion.batching import Waiting, choose
from adapters.diffusion.drawing import Drawing, Plan, Work
from adapters.diffusion.families import Family, family_in
from adapters.diffusion.interposed import Prompts, forget_history
from adapters.diffusion.joining import ModelCall
from adapters.diffusion.loading import load_pipeline
from adapters.diffusion.options import DiffusionOptions, problems_of
from adapters.diffusion.params import ACCEPTS, EMITS, MEDIA, OPTIONAL_INPUTS, DiffusionParams, Lora
from adapters.handover import start_threads
from adapters.model_memory import Files
from adapters.transformers_model import ModelLoader
from omni_bus.engine import Context, EngineRequest, Event, Failure, Finished, Memory, Output, Report, StepEngine
from omni_bus.errors import BadInput, OmniBusError, StageFailed, StartFailed, did_you_mean
from omni_bus.ids import RequestId
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Payload


class Diffusers(StepEngine):
    """A prompt in, pictures, video or sound out; see `params` for its ports.

    One step is one unit: a prompt is encoded, or a model called once for all requests whose calls can be joined, or a
    picture decoded. So a cancel waits for one model call at most.
    """

    name: ClassVar[str] = "diffusers"
    accepts: ClassVar[dict[str, str]] = ACCEPTS
    optional_inputs: ClassVar[frozenset[str]] = OPTIONAL_INPUTS
    emits: ClassVar[dict[str, str]] = EMITS
    Options: ClassVar[type[msgspec.Struct]] = DiffusionOptions
    Params: ClassVar[type[msgspec.Struct]] = DiffusionParams
    sleep_levels: ClassVar[frozenset[int]] = frozenset({1, 2})
    drawing: ClassVar[type[Drawing]] = Drawing
    """What one request is here."""
    without: ClassVar[frozenset[str]] = frozenset()
    """Parts of pipelines that are in other stages."""

    def __init__(self, options: DiffusionOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.max_resident
        self._pool: ThreadPoolExecutor | None = None
        self._pipeline: Any = None
        self._prompts = Prompts(options.max_cached_prompts)
        self._live: dict[RequestId, Drawing] = {}
        self._lora: Lora | None = None

    @classmethod
    def check(cls, options: DiffusionOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return problems_of(cls.name, options)

    @classmethod
    def memory(cls, options: DiffusionOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes: weights; what a step takes depends on the request."""
        return Files(options, has_accelerator=has_accelerator).memory()

    def load(self, report: Report) -> None:
        """Load, and run a few steps.

        Raises:
            StartFailed: the pipeline isn't there or can't be served as the options say.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        if (family := family_in(self.options.model)) is not None:
            self._check_edges(family)
        self._loader = ModelLoader(self.options, self.context, report)
        self._pipeline = load_pipeline(self._loader, self.options, self.without)
        family = Family(type(self._pipeline).__name__)
        self._check_edges(family)
        self._call = Call(self._pipeline, family, self.options)
        if "prompt" not in self._call.takes:
            raise self._loader.refused(f"{family.class_name} takes no prompt")
        if family.media == {"audio"} and not (self._call.rate_hz and self._call.length):
            raise self._loader.refused(f"{family.class_name} doesn't say how long its sound is, or at which rate")
        self._work = Work(self._pipeline, self._call.takes, self._prompts, self.context.allocate, self._call.rate_hz)
        self._work.publishes_frames = family.publishes_frames
        settable = self.Params.__struct_fields__
        self.ranges = {name: allowed for name, allowed in self._call.ranges().items() if name in settable}
        if self._pool is None:
            num_threads = self.num_slots(self.options)  # one for each request that may be under way
            self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=self.name)
            start_threads(self._pool, num_threads)
        if self.options.warm_up and not self.without:  # a part has no input of its own to warm up with
            self._warm_up(report)

    def _check_edges(self, family: Family) -> None:
        """Refuse a pipeline of the deployment that wants what the model doesn't make.

        Raises:
            StartFailed: names the edge.
        """
        for pipeline in self.context.pipelines.values():
            for edge in pipeline.edges:
                port = edge.source_port
                if edge.source == self.context.stage and port in MEDIA and port not in family.media:
                    makes = ", ".join(sorted(family.media))
                    raise StartFailed(
                        f"pipelines.{pipeline.name}.edges: '{edge.source}.{port}' carries nothing:"
                        f" {family.class_name} makes {makes}",
                        field="model",
                    )

    def _warm_up(self, report: Report) -> None:
        report("warming up", 0.0)
        request = EngineRequest("warm-up", DiffusionParams(seed=0), frozenset(EMITS))
        example = self._call.example()
        try:
            self._begin(request, example)
            while self._live:
                for event in self.step([request.id]):
                    if isinstance(event, Failure):
                        raise event.error
                report("warming up", min(1.0, self._live[request.id].num_steps_done / 3 if self._live else 1.0))
        except OmniBusError as error:
            raise self._loader.refused(f"its first steps failed: {error.message}") from error
        finally:
            self.abort(request.id)
        self._prompts.clear()

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request.

        Raises:
            BadInput: it can't be honoured.
        """
        params: DiffusionParams = request.params
        self._check_lora(params.lora)
        if params.num_previews and not self._can_preview():
            raise BadInput(
                f"num_previews: {params.num_previews} came, and the model's pipeline can't show any (allowed: 0)",
                field="num_previews",
            )
        self._begin(request, self._call.arguments(params, inputs), inputs)

    def _check_lora(self, lora: Lora | None) -> None:
        loras = self.options.loras
        if lora is not None and lora.name not in loras:
            known = ", ".join(sorted(loras)) or "none, the stage has no loras"
            raise BadInput(
                f"lora: unknown adapter '{lora.name}'{did_you_mean(lora.name, loras)} (known: {known})", field="lora"
            )

    def _can_preview(self) -> bool:
        """Whether its pipeline decodes latents that it is given, and they are not where it begins from a picture."""
        takes = self._call.takes
        makes_pictures = Family(type(self._pipeline).__name__).media != {"audio"}
        return makes_pictures and {"latents", "num_inference_steps"} <= takes and "strength" not in takes

    def _begin(
        self, request: EngineRequest, arguments: dict[str, Any], inputs: Mapping[str, Sequence[Payload]] = {}
    ) -> None:
        assert self._pool is not None
        call = self._call
        plan = Plan(arguments, call.num_steps(arguments), call.time_base(request.params.fps), inputs)
        self._live[request.id] = self.drawing(request, self._work, plan, self._pool)

    def step(self, requests: Sequence[RequestId]) -> list[Event]:
        """Run one unit of one of these requests, or one model call of several."""
        import torch

        live = {request: self._live[request] for request in requests if request in self._live}
        waiting = [
            Waiting(request, drawing.key, drawing.request.priority, drawing.num_passed_over)
            for request, drawing in live.items()
        ]
        chosen = choose(waiting, max_batch=self.options.max_num_seqs, max_passed_over=self.options.max_passed_over)
        for request, drawing in live.items():
            drawing.num_passed_over = 0 if request in chosen else drawing.num_passed_over + 1
        if not chosen:
            return []
        self._activate(live[chosen[0]].lora)
        calls = [unit for request in chosen if isinstance(unit := live[request].unit, ModelCall)]
        if calls:
            with torch.no_grad():
                ModelCall.run_together(calls)
        return [event for request in chosen for event in self._advance(request, live[request])]

    def _advance(self, request: RequestId, drawing: Drawing) -> list[Event]:
        error: OmniBusError | None = None
        goes_on = False
        try:
            goes_on = drawing.advance()
        except OmniBusError as found:
            error = found
        except Exception as found:  # noqa: BLE001 (a pipeline's code may raise anything; it ends this request only)
            error = StageFailed(f"the pipeline failed with {type(found).__name__}: {str(found)[:300]}")
        events: list[Event] = [Output(request, port, payload) for port, payload in drawing.take_events()]
        if error is not None:
            events.append(Failure(request, error))
        elif not goes_on:
            events.append(Finished(request, Finish("stop")))
        if not goes_on:
            self.abort(request)
        return events

    def abort(self, request: RequestId) -> None:
        """Drop a request."""
        drawing = self._live.pop(request, None)
        if drawing is None:
            return
        drawing.close()
        if self.options.step_cache is not None:
            for part in self._work.denoisers:
                forget_history(part, request)
        if not self._live:
            self._pipeline.maybe_free_model_hooks()

    def _activate(self, lora: Lora | None) -> None:
        """Let the models be those of an adapter, or the plain ones; requests of one batch have the same."""
        if lora == self._lora:
            return
        if lora is None:
            self._pipeline.disable_lora()
        else:
            if self._lora is None:
                self._pipeline.enable_lora()
            self._pipeline.set_adapters([lora.name], [lora.scale])
        self._lora = lora

    def sleep(self, level: int) -> None:
        """Give memory back: 1 keeps the weights in the host's, 2 keeps nothing.

        Raises:
            BadInput: no such level, or 1 while weights move by themselves.
        """
        if level == 1 and self.options.offload != "none":
            raise BadInput("level: 1 came, and the weights are in the host's memory anyway (allowed: 2)", field="level")
        if level != 1:
            super().sleep(level)
            return
        self._prompts.clear()
        self._pipeline.to("cpu")
        _empty_cache()

    def wake(self, report: Report) -> None:
        """Bring the weights back, or load again."""
        if self._pipeline is None:
            self.load(report)
        else:
            report("moving weights", 0.0)
            self._pipeline.to(self._loader.device)

    def close(self) -> None:
        """Let go of the weights and the threads."""
        self.unload()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None

    def unload(self) -> None:
        """Let go of the weights."""
        for request in list(self._live):
            self.abort(request)
        self._pipeline = self._lora = None
        self._prompts.clear()
        for name in ("_work", "_call"):
            vars(self).pop(name, None)
        _empty_cache()


def _empty_cache() -> None:
    import torch

    gc.collect()  # pipelines and their parts refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
