"""Whether the speaker is done or only pauses, with smart-turn v3.2 (BSD-2), whose model the package pipecat-ai carries.

Facts, measured: it looks at the last 8 seconds, up to the moment of asking, and takes 0.05 s on one core. Judge it by
real speech: where a synthesiser is cut off, its voice often falls as at the end of a sentence.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import on_thread
from adapters.packages import missing
from adapters.speech_input import INSTALL_SOXR, RATE_HZ, speech_of
from adapters.whisper import INSTALL_ENGINE as INSTALL_FEATURES
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from adapters.speech_input import Samples
    from omni_bus.engine import Context, Report
    from omni_bus.wire.payloads import Payload

NAME = "smart-turn-v3.2"
PACKAGE = "pipecat-ai"
INSTALL_WEIGHTS = f"pip install --no-deps {PACKAGE}==1.14.0"

WINDOW_S = 8
_WINDOW = WINDOW_S * RATE_HZ
_MEL_FRAMES = 100 * WINDOW_S


class SmartTurnOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    model: str = NAME
    """An ONNX file of smart-turn v3, or the one that comes in a package."""

    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """From this probability on the turn is over."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once; they take turns on one thread."""


class SmartTurnParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    threshold: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """None takes the stage's."""


class SmartTurn(StreamingEngine):
    """The sound of a turn so far, of any rate; out comes ``{"probability", "is_complete"}`` once it has ended."""

    accepts: ClassVar[dict[str, str]] = {"audio": "audio"}
    emits: ClassVar[dict[str, str]] = {"turn": "json"}
    Options: ClassVar[type[msgspec.Struct]] = SmartTurnOptions
    Params: ClassVar[type[msgspec.Struct]] = SmartTurnParams

    def __init__(self, options: SmartTurnOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smart-turn")
        self._session: Any = None
        self._features: Any = None

    @classmethod
    def check(cls, options: SmartTurnOptions) -> list[str]:
        """Return what is missing: a package, or the model."""
        problems = missing("smart-turn", {INSTALL_FEATURES: ("faster_whisper",), INSTALL_SOXR: ("soxr",)})
        try:
            model_file(options.model)
        except BadInput as error:
            problems.append(error.message)
        return problems

    def load(self, report: Report) -> None:
        """Load the model and judge a moment of silence.

        Raises:
            StartFailed: a package or the model is not there, or can't be read.
        """
        report("import", 0.0)
        try:
            import numpy as np
            import onnxruntime
            import soxr  # noqa: F401
            from faster_whisper.feature_extractor import FeatureExtractor  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            message = f"smart-turn can't be imported ({INSTALL_FEATURES}, {INSTALL_SOXR}): {error}"
            raise StartFailed(message) from error
        report("weights", 0.0)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.context.num_threads
        options.inter_op_num_threads = 1
        # Idle threads that spin starve the other stages of this machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            file = str(model_file(self.options.model))
            self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        except (RuntimeError, ValueError, BadInput) as error:
            raise StartFailed(f"model: '{self.options.model}' can't be loaded: {error}", field="model") from error
        self._features = FeatureExtractor(chunk_length=WINDOW_S)
        report("weights", 1.0)
        report("warm-up", 0.0)
        self._thread.submit(self._judge_blocking, [np.zeros(RATE_HZ, np.float32)]).result()
        report("warm-up", 1.0)

    def close(self) -> None:
        """Give the model and the thread back."""
        self._thread.shutdown()
        self._session = None

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Judge one sound.

        Raises:
            BadInput: no sound, or input that isn't any.
        """
        pieces: list[Samples] = []
        num_samples = 0
        async with aclosing(speech_of(inputs)) as speech:
            async for samples in speech:
                pieces.append(samples)
                num_samples += len(samples)
                while num_samples - len(pieces[0]) >= _WINDOW:  # it is out of the window
                    num_samples -= len(pieces.pop(0))
        if not num_samples:
            raise BadInput("audio: no sound came (allowed: some)", field="audio")
        probability = await on_thread(self._thread, self._judge_blocking, pieces)
        threshold = request.params.threshold or self.options.threshold
        if "turn" in request.outputs:
            yield "turn", Json({"probability": probability, "is_complete": probability >= threshold})

    def _judge_blocking(self, pieces: list[Samples]) -> float:
        """Return how probable it is that the turn is over."""
        import numpy as np

        samples = np.concatenate(pieces)[-_WINDOW:]
        samples = np.pad(samples, (_WINDOW - len(samples), 0))
        # As the model was trained: zero mean, unit variance, Whisper's log-mel spectrogram.
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
        features = self._features(samples.astype(np.float32))[None, :, :_MEL_FRAMES]
        [found] = self._session.run(None, {"input_features": features.astype(np.float32)})
        return float(found[0, 0])


def model_file(model: str) -> Path:
    """Return the file of a model; imports nothing.

    Raises:
        BadInput: it or its package is not there; says how to get it.
    """
    if model != NAME:
        file = Path(model).expanduser()
        if not file.is_file():
            raise BadInput(f"model: there is no file {model} (allowed: '{NAME}', or an ONNX file)")
        return file
    spec = importlib.util.find_spec("pipecat")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in Path(place).glob(f"audio/turn/smart_turn/data/{NAME}*.onnx"):
            return file
    raise BadInput(f"model: '{NAME}' is in the Python package {PACKAGE}, which is not installed ({INSTALL_WEIGHTS})")
