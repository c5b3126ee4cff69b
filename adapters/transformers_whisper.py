"""Speech to text with Whisper on transformers and torch: for accelerators, and for models that nobody has converted.

A chunk of up to 30 seconds is read in one call, which can't be interrupted: a cancel waits for it. On a CPU `whisper`
is four times as fast with the same weights.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from adapters import whisper_tiny
from adapters.handover import on_thread
from adapters.packages import missing
from adapters.speech_chunks import Chunk, chunks_of
from adapters.speech_input import INSTALL_SOXR, RATE_HZ
from adapters.transformers_model import INSTALL_ENGINE
from adapters.whisper import NAME, model_folder
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from omni_bus.engine import Context, Report
    from omni_bus.wire.payloads import Payload


class TransformersWhisperOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    model: str = NAME
    """The folder of a Whisper model of transformers, or the one that comes in a package."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Numbers to compute with."""

    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """``cpu``, ``cuda`` or ``cuda:N``."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once; their chunks take turns on one thread."""


class TransformersWhisperParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    language: str | None = None
    """What is spoken, as ISO 639-1 has it; None finds out, chunk by chunk."""

    task: Literal["transcribe", "translate"] = "transcribe"
    """``translate`` writes English, whatever is spoken."""

    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """0 is the most probable text."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=440)] = 220
    """Limit of one chunk's text."""


class TransformersWhisper(StreamingEngine):
    """Sound in, of any rate, and a plan as `whisper` has it; out come text and segments, one for each chunk."""

    accepts: ClassVar[dict[str, str]] = {"audio": "audio", "segments": "json"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"segments"})
    emits: ClassVar[dict[str, str]] = {"text": "text", "segments": "json"}
    Options: ClassVar[type[msgspec.Struct]] = TransformersWhisperOptions
    Params: ClassVar[type[msgspec.Struct]] = TransformersWhisperParams

    def __init__(self, options: TransformersWhisperOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whisper")
        self._model: Any = None
        self._tokenizer: Any = None
        self._features: Any = None

    @classmethod
    def check(cls, options: TransformersWhisperOptions) -> list[str]:
        """Return what is missing: a package, or the weights."""
        needed = {INSTALL_ENGINE: ("torch", "transformers"), INSTALL_SOXR: ("soxr",)}
        problems = missing("transformers-whisper", needed)
        if options.model == NAME:
            try:
                model_folder(NAME)
            except BadInput as error:
                problems.append(error.message)
        elif not (Path(options.model).expanduser() / "config.json").is_file():
            problems.append(f"model: {options.model} has no config.json (allowed: '{NAME}', or a model's folder)")
        return problems

    def load(self, report: Report) -> None:
        """Load the weights, after converting the default ones if they were not yet, and read a second of silence.

        Raises:
            StartFailed: a package or the weights are not there, or can't be read.
        """
        report("importing torch", 0.0)
        try:
            import soxr  # noqa: F401
            import torch
            from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration
            from transformers.utils import logging
        except ImportError as error:
            raise StartFailed(f"transformers can't be imported ({INSTALL_ENGINE}): {error}") from error
        options = self.options
        folder = str(Path(options.model).expanduser())
        if options.model == NAME:
            folder = str(whisper_tiny.convert_once(self.context.cache_dir, report))
        report("weights", 0.0)
        torch.set_num_threads(self.context.num_threads)
        logging.disable_progress_bar()
        try:
            model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, options.dtype))
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._features = WhisperFeatureExtractor.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise StartFailed(f"model: '{options.model}' can't be loaded: {error}", field="model") from error
        self._model = model.to(options.device).eval()
        self._model.generation_config.max_length = None  # requests have a limit of their own
        report("weights", 1.0)
        report("warm-up", 0.0)
        self._thread.submit(self._warm_up_blocking).result()
        report("warm-up", 1.0)

    def close(self) -> None:
        """Give the model and the thread back."""
        self._thread.shutdown()
        self._model = None

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Write down one sound; one without speech gives no text and still finishes.

        Raises:
            BadInput: input that isn't sound, a language or a task that the model doesn't know, a plan out of order.
        """
        params: TransformersWhisperParams = request.params
        self._check(params)
        number, num_tokens, end_s = 0, 0, 0.0
        async with aclosing(chunks_of(inputs, has_plan="segments" in request.inputs)) as chunks:
            async for chunk in chunks:
                text, tokens = await on_thread(self._thread, self._read_blocking, chunk, params)
                end_s = chunk.end_s
                if not text.strip():
                    continue
                if "text" in request.outputs:
                    yield "text", Text(text if number else text.lstrip(), num_tokens=len(tokens))
                if "segments" in request.outputs:
                    times = {"start": round(chunk.start_s, 3), "end": round(chunk.end_s, 3)}
                    yield "segments", Json({"id": number, **times, "text": text, "tokens": tokens})
                number += 1
                num_tokens += len(tokens)
        language = params.language or (None if self._is_multilingual else "en")
        detail = {"seconds": end_s} | ({"language": language} if language else {})
        yield Finish(usage=Usage(completion_tokens=num_tokens), detail=detail)

    @property
    def _is_multilingual(self) -> bool:
        return bool(self._model.generation_config.is_multilingual)

    def _check(self, params: TransformersWhisperParams) -> None:
        if self._is_multilingual:
            languages = [token[2:-2] for token in self._model.generation_config.lang_to_id]
        else:
            languages = ["en"]
        why = "" if self._is_multilingual else "; the model knows English only"
        if params.language is not None and params.language not in languages:
            allowed = ", ".join(sorted(languages))
            raise BadInput(f"language: {params.language[:40]!r} came (allowed: {allowed}{why})", field="language")
        if params.task == "translate" and not self._is_multilingual:
            raise BadInput(f"task: 'translate' came (allowed: transcribe{why})", field="task")

    def _read_blocking(self, chunk: Chunk, params: TransformersWhisperParams) -> tuple[str, list[int]]:
        """Return a chunk's text, with the space before it, and its tokens."""
        import torch

        features = self._features(chunk.samples, sampling_rate=RATE_HZ, return_tensors="pt").input_features
        more: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            more = {"do_sample": True, "temperature": params.temperature}
        if self._is_multilingual:
            more |= {"language": params.language, "task": params.task}
        with torch.inference_mode():
            ids = self._model.generate(
                features.to(self._model.device, self._model.dtype),
                max_new_tokens=params.max_new_tokens,
                return_timestamps=False,
                **more,
            )
        tokens = [token for token in ids[0].tolist() if token < self._model.config.eos_token_id]  # all others are marks
        return self._tokenizer.decode(tokens), tokens

    def _warm_up_blocking(self) -> None:
        import numpy as np

        self._read_blocking(Chunk(0, np.zeros(RATE_HZ, np.float32)), TransformersWhisperParams(max_new_tokens=4))
