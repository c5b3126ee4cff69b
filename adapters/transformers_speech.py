"""Speech language models of transformers: text in, codec codes out, frame by frame; a codec stage makes sound of them.

Each step of a request is one step of the model's own `generate` (`SteppedCall`), so that codes are the model's own, a
cancel waits for one step, and a request without credit computes nothing. Steps of different requests take turns.
"""

from __future__ import annotations

import copy
import queue
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import start_threads
from adapters.model_memory import Files
from adapters.random_state import MAX_SEED, RandomState
from adapters.sound import mono, resampled
from adapters.speech_models import SPEECH_MODELS, SpeechModel
from adapters.stepped_call import SteppedCall
from adapters.transformers_model import DEFAULT_CONTEXT_LENGTH, ModelLoader, ModelOptions, check_model
from omni_bus.engine import EngineRequest, Event, Failure, Finished, Output, StepEngine
from omni_bus.errors import BadInput, OmniBusError, Overloaded, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Audio, Blob, Codes, Payload, Text, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_bus.engine import Context, Memory, Report
    from omni_bus.ids import RequestId

NAME = "transformers-speech"


class SpeechOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=64)] = 4
    """Requests in one step."""
    max_resident: Annotated[int, Meta(ge=1, le=64)] = 8
    """Requests that may hold memory at once, suspended ones included; each has a thread."""
    max_reference_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    """Seconds of a voice that is to be copied."""


class SpeechParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    voice: str | None = None
    """A speaker that the model knows; None takes its first."""
    reference_text: Annotated[str, Meta(max_length=10_000)] | None = None
    """What the reference says."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 always takes the likeliest code; None leaves it to the model."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """The same seed and request give the same codes, alone or beside others; None draws a fresh seed."""
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Frames of the sound at most; None leaves it to the model."""


class _Speech:
    """One request: its call, its frames, and the state of its random numbers."""

    def __init__(self, request: EngineRequest, random: RandomState) -> None:
        self.request = request
        self.random = random
        self.call: SteppedCall[list[list[int]]]
        self.num_prompt_tokens = 0
        self.max_steps = 0
        self.num_steps = 0
        self.num_frames = 0


class TransformersSpeech(StepEngine):
    """A text, and a voice to speak it with where the model can, in; codes out."""

    accepts: ClassVar[dict[str, str]] = {"text": "text", "reference": "audio"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"reference"})
    emits: ClassVar[dict[str, str]] = {"codes": "codes"}
    Options: ClassVar[type[msgspec.Struct]] = SpeechOptions
    Params: ClassVar[type[msgspec.Struct]] = SpeechParams

    _speech: SpeechModel

    def __init__(self, options: SpeechOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = max(options.max_resident, options.max_num_seqs)
        self._threads = ThreadPoolExecutor(self.max_resident, thread_name_prefix="speech")
        self._modules: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._live: dict[RequestId, _Speech] = {}

    @classmethod
    def check(cls, options: SpeechOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return check_model(NAME, options, ("torch", "transformers", "soxr"))

    @classmethod
    def memory(cls, options: SpeechOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator)
        held = max(options.max_resident, options.max_num_seqs)
        return files.memory(cache=files.cache(held * files.context_length(None, DEFAULT_CONTEXT_LENGTH)))

    def load(self, report: Report) -> None:
        """Load, and speak a frame.

        Raises:
            StartFailed: the model isn't there or is none that speaks in codes.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        import transformers

        config = loader.part("loading configuration", transformers.AutoConfig)
        if config.model_type not in SPEECH_MODELS:
            raise loader.refused(f"it is of type '{config.model_type}' (allowed: {', '.join(sorted(SPEECH_MODELS))})")
        kind = SPEECH_MODELS[config.model_type]
        processor = loader.part("loading processor", getattr(transformers, kind.processor_class))
        model = loader.weights(getattr(transformers, kind.auto_class), is_complete=True)
        self._speech = kind(model, processor)
        shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
        for _ in range(self.max_resident):
            # `generate` keeps settings of a request in its modules, so each request has modules of its own.
            self._modules.put(copy.deepcopy(model, dict(shared)))
        start_threads(self._threads, self.max_resident)
        report("warming up", 0.0)
        request = EngineRequest("warm-up", SpeechParams(max_new_tokens=2), frozenset({"codes"}))
        self.add(request, {"text": [Text("Hello.")]})
        while request.id in self._live:
            for event in self.step([request.id]):
                if isinstance(event, Failure):
                    raise loader.refused(f"it can't speak: {event.error.message}") from event.error
        report("warming up", 1.0)

    def close(self) -> None:
        """Let go of the weights and the threads."""
        for id_ in list(self._live):
            self.abort(id_)
        self._threads.shutdown()
        self._modules = queue.SimpleQueue()

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a text.

        Raises:
            BadInput: it can't be honoured.
            Overloaded: `max_resident` requests are held.
        """
        if request.id in self._live:
            raise ValueError(f"request {request.id} was added twice")
        if len(self._live) >= self.max_resident:
            raise Overloaded(f"{self.max_resident} requests (max_resident) are held")
        params: SpeechParams = request.params
        text = _text_of(inputs.get("text", []))
        reference = self._reference_of(inputs.get("reference", []), params)
        settings = self._speech.settings(params.temperature)
        speech = _Speech(request, RandomState(params.seed, self._speech.model.device))

        def speak(put: Callable[[list[list[int]]], None]) -> None:
            prompt = self._speech.prompt(text, params.voice, reference, params.reference_text or "")
            speech.num_prompt_tokens = self._speech.num_prompt_tokens(prompt)
            speech.max_steps = self._max_steps(params.max_new_tokens, speech.num_prompt_tokens)
            self._generate(prompt, settings | {"max_new_tokens": speech.max_steps}, put)

        speech.call = SteppedCall(self._threads, speak)
        self._live[request.id] = speech

    def _max_steps(self, wanted: int | None, num_prompt_tokens: int) -> int:
        """Return how many steps a request may take; by default what the model's own settings say."""
        left, late = self._speech.max_tokens - num_prompt_tokens, self._speech.num_late_steps
        if left <= late:
            raise BadInput("text: it leaves no room for speech in the model's context", field="text")
        if wanted is not None and wanted > left - late:
            raise BadInput(
                f"max_new_tokens: {wanted} came (allowed: at most {left - late} with this text)", field="max_new_tokens"
            )
        own = self._speech.model.generation_config
        by_length = own.max_length - num_prompt_tokens if (own.max_length or 0) > num_prompt_tokens else left
        return min(left, wanted + late if wanted is not None else own.max_new_tokens or by_length)

    def _reference_of(self, payloads: list[Payload], params: SpeechParams) -> Any:
        if not payloads:
            if params.reference_text is not None:
                raise BadInput("reference_text: it came without a reference (allowed: null)", field="reference_text")
            return None
        if not self._speech.takes_reference:
            raise BadInput("reference: the model can't be given a voice here (allowed: no sound)", field="reference")
        if len(payloads) > 1 or not isinstance(payloads[0], Audio):
            raise BadInput(f"reference: {len(payloads)} payloads came (allowed: one sound)", field="reference")
        sound, longest = payloads[0], self.options.max_reference_s
        if not 0 < sound.num_frames <= longest * sound.rate_hz:
            seconds = sound.num_frames / sound.rate_hz
            raise BadInput(
                f"reference: {seconds:g} s came (allowed: above 0, at most {longest:g} s)", field="reference"
            )
        if not (params.reference_text or "").strip():
            raise BadInput(
                "reference_text: it is missing (allowed: with a reference, what that says)", field="reference_text"
            )
        return resampled(mono(sound), sound.rate_hz, self._speech.rate_hz)

    def _generate(self, prompt: dict[str, Any], settings: dict[str, Any], put: Callable[..., None]) -> None:
        import torch

        module = self._modules.get()
        configs = [(part, part.generation_config) for part in module.modules() if hasattr(part, "generation_config")]
        try:
            for part, config in configs:
                part.generation_config = copy.deepcopy(config)
            arguments = {
                name: value.to(module.device, module.dtype if value.is_floating_point() else None)
                for name, value in prompt.items()
                if isinstance(value, torch.Tensor)
            }
            frames = self._speech.frames()
            with torch.inference_mode():
                self._speech.generate(module, arguments | settings, lambda tokens: put(frames.add(tokens)))
        finally:
            for part, config in configs:
                part.generation_config = config
            self._modules.put(module)

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Let each of these requests take one step."""
        events: list[Event] = []
        for id_ in requests:
            events += self._step(self._live[id_])
        return events

    def _step(self, speech: _Speech) -> list[Event]:
        id_ = speech.request.id
        try:
            with speech.random:
                frames = speech.call.advance()
        except OmniBusError as error:
            self.abort(id_)
            return [Failure(id_, error)]
        except Exception as error:  # noqa: BLE001 (whatever a model's code raises ends this request only)
            self.abort(id_)
            return [Failure(id_, StageFailed(f"the model failed with {type(error).__name__}: {str(error)[:300]}"))]
        if frames is None:
            self.abort(id_)
            usage = Usage(prompt_tokens=speech.num_prompt_tokens, completion_tokens=speech.num_steps)
            seconds = speech.num_frames / self._speech.frame_rate_hz
            is_cut = speech.num_steps >= speech.max_steps
            return [Finished(id_, Finish("length" if is_cut else "stop", usage, {"seconds": seconds}))]
        speech.num_steps += 1
        if not frames or "codes" not in speech.request.outputs:
            return []
        speech.num_frames += len(frames)
        return [Output(id_, "codes", self._codes(frames))]

    def _codes(self, frames: list[list[int]]) -> Codes:
        data = array("i", [code for frame in frames for code in frame])
        return Codes(
            len(frames), self._speech.num_codebooks, self._speech.frame_rate_hz, Blob(memoryview(data).cast("B"))
        )

    def abort(self, request: RequestId) -> None:
        """Drop a request; its thread is free when this returns."""
        if (speech := self._live.pop(request, None)) is not None:
            speech.call.close()


def _text_of(payloads: list[Payload]) -> str:
    pieces: list[str] = []
    for payload in payloads:
        if not isinstance(payload, Text):
            raise BadInput(f"text: {kind_of(payload)} came (allowed: text)", field="text")
        pieces.append(payload.text)
    text = "".join(pieces)
    if not text.strip():
        raise BadInput("text: it is blank (allowed: a text)", field="text")
    return text
