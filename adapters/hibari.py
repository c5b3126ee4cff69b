"""Neural text to speech with hibari (English, 24 kHz), sentence by sentence while the text is still being written.

Facts about hibari-tts 0.2.1, measured: the voice ``heart`` is inside the package (8 MB). A sentence of six seconds
takes 0.03 to 0.07 s on one thread. A synthesis can't be interrupted, so a cancel waits for it: 0.25 s for the longest
utterance that is given to it (`MAX_PHONEMES`, 19 seconds of speech), 0.6 s for the same at half speed. The first call
is slow (lexicons). It fetches voices that are not there from the network; that is never asked of it here.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from adapters.handover import on_thread
from adapters.packages import missing
from adapters.sentences import sentences_of
from adapters.turns import Listener, Turns
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StartFailed, unknown_name
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Payload

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from omni_bus.engine import Context, Report

    Samples = npt.NDArray[np.float32]

T = TypeVar("T")

RATE_HZ = 24_000
PIECE_FRAMES = RATE_HZ // 4
"""Audio leaves in pieces of a quarter of a second, so that credit and cancels are finer than a sentence."""

MAX_PHONEMES = 400
"""What hibari's authors feed it at once; the model itself takes more, but then the first sound waits."""

INSTALL_ENGINE = "pip install hibari-tts==0.2.1 scipy sentencex==1.0.32"

_NOT_PLAIN = re.compile(r"[^A-Za-z\s.,;:!?']+")


class HibariOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's keys of a stage."""

    voice: str = "heart"
    """The voice of requests that name none."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 32
    """Requests that are open at once; their sentences take turns on one thread (`Turns`)."""


class HibariParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may set."""

    voice: str | None = None
    """One of the voices on this machine; None takes the stage's."""

    speed: Annotated[float, Meta(ge=0.5, le=2)] = 1.0
    """2 is twice as fast."""

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """The same seed and text give the same samples, bit for bit; None draws a fresh seed."""


class HibariVoice(StreamingEngine):
    """Text in, as pieces that concatenate; PCM out: 24 kHz, mono, s16.

    A sentence is spoken as soon as it is certain that it ended (`SentenceSplitter`). Nothing is synthesised before all
    audio of the sentence before it was taken, and no text is taken meanwhile, so a slow listener slows the writer down.
    Of several sentences that are due, that one is next whose listener runs out of sound first (`Listener`).
    """

    accepts: ClassVar[dict[str, str]] = {"text": "text"}
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options: ClassVar[type[msgspec.Struct]] = HibariOptions
    Params: ClassVar[type[msgspec.Struct]] = HibariParams

    def __init__(self, options: HibariOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._voices: dict[str, Any] = {}
        """Loaded voices by name; touched on the engine's thread only, after `load`."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hibari")
        self._turns = Turns()

    @classmethod
    def check(cls, options: HibariOptions) -> list[str]:
        """Return what is missing: a package, or the voice."""
        if problems := missing("hibari", {INSTALL_ENGINE: ("hibari", "sentencex")}):
            return problems
        known = _registry().VOICES
        return [] if options.voice in known else [f"voice: {unknown_name('voice', options.voice, known).message}"]

    @classmethod
    def voices(cls, options: HibariOptions) -> tuple[str, ...]:
        """Return the voices on this machine."""
        return _voices_here()

    def load(self, report: Report) -> None:
        """Load the stage's voice and speak once.

        Raises:
            StartFailed: a package or the voice is not there; says how to get it.
        """
        report("import", 0.0)
        try:
            import hibari  # noqa: F401
            import sentencex  # noqa: F401
        except ImportError as error:
            raise StartFailed(f"hibari can't be imported ({INSTALL_ENGINE}): {error}") from error
        report("weights", 0.0)
        try:
            voice = self._thread.submit(self._voice_blocking, self.options.voice).result()
        except BadInput as error:
            raise StartFailed(error.message) from error
        report("weights", 1.0)
        report("warm-up", 0.0)
        # A number and an unknown word, so that every table is loaded.
        for phonemes in self._thread.submit(_phonemes_blocking, voice, "Warm up 3 zyzzyx.").result():
            self._thread.submit(_samples_blocking, voice, phonemes, 1.0, _generator(0)).result()
        report("warm-up", 1.0)

    def unload(self) -> None:
        """Give the voices back."""
        self._voices.clear()

    def close(self) -> None:
        """Give the voices and the thread back."""
        self._thread.shutdown()
        self.unload()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Speak one text; text without anything to speak gives no audio and still finishes.

        Raises:
            BadInput: an unknown voice (lists those that are there), or input that isn't text.
        """
        params: HibariParams = request.params
        listener = Listener()
        voice = await self._in_turn(listener, self._voice_blocking, params.voice or self.options.voice)
        generator = _generator(params.seed)
        num_frames = 0
        async for sentence in sentences_of(inputs):
            for phonemes in await self._in_turn(listener, _phonemes_blocking, voice, sentence):
                samples = await self._in_turn(listener, _samples_blocking, voice, phonemes, params.speed, generator)
                num_frames += len(samples)
                listener.gets(len(samples) / RATE_HZ)
                for piece in _pieces(samples):
                    yield "audio", piece
        yield Finish(detail={"seconds": num_frames / RATE_HZ})

    async def _in_turn(self, listener: Listener, function: Callable[..., T], *args: Any) -> T:
        """Run a call on the engine's thread when it is the listener's turn."""
        async with self._turns.turn(listener.runs_dry_at()):
            return await on_thread(self._thread, function, *args)

    def _voice_blocking(self, name: str) -> Any:
        """Return a voice, loading it at its first use.

        Raises:
            UnknownName: no such voice on this machine.
        """
        if name not in self._voices:
            from hibari import Hibari

            available = _voices_here()
            if name not in available:
                raise unknown_name("voice", name, available, field="voice")
            voice = Hibari(voice=name)
            # hibari's own session lets idle threads spin, which starves the other stages of this machine.
            voice.sess = _session(voice.model_path, self.context.num_threads)
            self._voices[name] = voice
        return self._voices[name]


def _registry() -> Any:
    """Return hibari's module of voices by itself: the package around it imports its whole engine."""
    package = importlib.util.find_spec("hibari")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "voices.py"
    spec = importlib.util.spec_from_file_location("hibari_voices", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _voices_here() -> tuple[str, ...]:
    registry = _registry()
    return tuple(voice for voice in registry.VOICES if _is_available(registry.voice_path, voice))


def _is_available(voice_path: Callable[..., str], name: str) -> bool:
    try:
        voice_path(name, download_missing=False)
    except FileNotFoundError:
        return False
    return True


def _session(path: str, num_threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _generator(seed: int | None) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng(seed)


def _phonemes_blocking(voice: Any, sentence: str) -> list[str]:
    """Return a sentence as utterances of at most `MAX_PHONEMES` phonemes; none where nothing can be spoken."""
    # Compatibility forms (full-width digits, ligatures, superscripts) as the letters and digits that they stand for.
    text = unicodedata.normalize("NFKC", sentence)
    try:
        phonemes: list[str] = voice.phonemize(text)
    except (ValueError, LookupError):
        # hibari's number reader stumbles over odd digits; better the words without them than no speech.
        phonemes = voice.phonemize(_NOT_PLAIN.sub(" ", text))
    return [piece for long in phonemes for piece in _cut_phonemes(long)]


def _cut_phonemes(phonemes: str) -> Iterator[str]:
    while len(phonemes) > MAX_PHONEMES:
        end = phonemes.rfind(" ", 1, MAX_PHONEMES) + 1 or MAX_PHONEMES
        yield phonemes[:end].strip()
        phonemes = phonemes[end:].strip()
    yield phonemes


def _samples_blocking(voice: Any, phonemes: str, speed: float, generator: np.random.Generator) -> Samples:
    return voice.from_ids(voice.ids(phonemes), speed, generator)


def _pieces(samples: Samples) -> Iterator[Audio]:
    import numpy as np

    pcm = (np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
    view = memoryview(pcm)
    for start in range(0, len(view), 2 * PIECE_FRAMES):
        yield Audio(RATE_HZ, 1, "s16", Blob(view[start : start + 2 * PIECE_FRAMES]))
