"""Text to speech with VITS models of transformers (MMS has one for each of 1,100 languages), sentence by sentence.

A sentence is one call of the model, which can't be interrupted: a cancel waits for its end.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import on_thread, start_threads
from adapters.model_memory import Files
from adapters.packages import missing
from adapters.random_state import MAX_SEED, RandomState
from adapters.sentences import sentences_of
from adapters.sound import pcm16
from adapters.transformers_model import ModelLoader, ModelOptions, check_model
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError, StageFailed, StartFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Payload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from omni_bus.engine import Context, Memory, Report

NAME = "transformers-vits"


class VitsOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 8
    """Requests that are open at once; their sentences take turns on one thread."""


class VitsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    voice: str | None = None
    """A speaker's number, for models with several; None takes the first."""
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    """2 is twice as fast as the model's own rate."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """The same seed and text give the same samples, alone or beside others; None draws a fresh seed."""


class TransformersVits(StreamingEngine):
    """Text in, as pieces that concatenate; PCM out: s16, mono, at the model's rate."""

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options: ClassVar[type[msgspec.Struct]] = VitsOptions
    Params: ClassVar[type[msgspec.Struct]] = VitsParams

    _model: Any
    _tokenizer: Any

    def __init__(self, options: VitsOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vits")

    @classmethod
    def check(cls, options: VitsOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        problems = check_model(NAME, options, ("torch", "transformers"))
        return [*problems, *missing(NAME, {"pip install sentencex==1.0.32": ("sentencex",)})]

    @classmethod
    def voices(cls, options: VitsOptions) -> tuple[str, ...]:
        """Return the numbers of a local model's speakers; none for a model that has one only."""
        config = Path(options.model).expanduser() / "config.json"
        try:
            num_speakers = json.loads(config.read_text()).get("num_speakers", 1)
        except (OSError, ValueError):  # a model's name, or something that the load will refuse
            return ()
        return tuple(map(str, range(num_speakers))) if num_speakers > 1 else ()

    @classmethod
    def memory(cls, options: VitsOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        return Files(options, has_accelerator=has_accelerator).memory()

    def load(self, report: Report) -> None:
        """Load, and speak a word.

        Raises:
            StartFailed: the model isn't there, is no VITS, or wants its text in another form.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        import transformers

        config = loader.part("loading configuration", transformers.AutoConfig)
        if config.model_type != "vits":
            raise loader.refused(f"it is of type '{config.model_type}' (allowed: vits)")
        self._tokenizer = loader.part("loading tokenizer", transformers.AutoTokenizer)
        self._model = loader.weights(transformers.VitsModel, is_complete=True)
        start_threads(self._thread, 1)
        report("warming up", 0.0)
        try:
            random = RandomState(0, self._model.device)
            self._thread.submit(self._speak_blocking, "a", VitsParams(), random).result()
        except (OmniBusError, ImportError) as error:
            # Some want phonemes or Roman letters, which other packages make.
            raise loader.refused(f"it can't speak: {error}") from error
        report("warming up", 1.0)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Speak one text; text without anything to speak gives no audio and still finishes.

        Raises:
            BadInput: an unknown voice, or input that isn't text.
            StageFailed: the model failed.
        """
        params: VitsParams = request.params
        self._speaker(params.voice)
        random = RandomState(params.seed, self._model.device)
        num_frames = 0
        async for sentence in sentences_of(inputs):
            sound = await on_thread(self._thread, self._speak_blocking, sentence, params, random)
            num_frames += sound.num_frames
            for piece in _pieces(sound):
                yield "audio", piece
        yield Finish(detail={"seconds": num_frames / self._model.config.sampling_rate})

    def _speaker(self, voice: str | None) -> int | None:
        """Return a speaker's number, None for models that have one only."""
        most = int(self._model.config.num_speakers)
        if most <= 1:
            if voice is not None:
                raise BadInput("voice: the model has one only (allowed: null)", field="voice")
            return None
        known = [str(number) for number in range(most)]
        if voice is not None and voice not in known:
            raise BadInput(f"voice: no such speaker (allowed: a number from 0 to {most - 1})", field="voice")
        return int(voice or 0)

    def _speak_blocking(self, sentence: str, params: VitsParams, random: RandomState) -> Audio:
        import torch

        rate_hz = int(self._model.config.sampling_rate)
        ids = torch.tensor([self._tokenizer(sentence)["input_ids"]], dtype=torch.long)
        if ids.shape[1] < 2:  # a blank alone: no letter that the model knows
            return Audio(rate_hz, 1, "s16", Blob(b""))
        own_rate = float(self._model.config.speaking_rate)
        try:
            with torch.inference_mode(), random:
                found = self._model(
                    ids.to(self._model.device),
                    speaker_id=self._speaker(params.voice),
                    speaking_rate=own_rate * params.speed,
                )
        except (RuntimeError, ValueError) as error:
            raise StageFailed(f"the model failed with {type(error).__name__}: {str(error)[:300]}") from error
        waveform = found.waveform[0].float().cpu()
        if not bool(waveform.isfinite().all()):
            raise StageFailed("the model computed samples that aren't finite")
        return pcm16(waveform.numpy(), rate_hz)


def _pieces(sound: Audio) -> Iterator[Audio]:
    """Cut a sentence into quarters of a second, so that credit and cancels are finer."""
    view, size = sound.data.view, 2 * (sound.rate_hz // 4)
    for at in range(0, len(view), size):
        yield Audio(sound.rate_hz, 1, "s16", Blob(view[at : at + size]))
