"""The vocoder stage of an omni model: codes to sound while they still come.

One thread decodes. It is given the codes of a stream once they make sound: what comes before that waits for nobody.
What came on several streams while it was busy is decoded in its next turn, together where the vocoder gains by that.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from adapters.handover import on_thread, start_threads
from adapters.model_memory import Files
from adapters.omni.families import family_of
from adapters.omni.vocoder import NewCodes
from adapters.recorded import recording
from adapters.sound import pcm16
from adapters.transformers_model import ModelLoader, ModelOptions, check_model
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StageFailed, StartFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Codes, Json, Payload, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import torch

    from adapters.omni.vocoder import SoundStream, Vocoder
    from omni_bus.engine import Context, Memory, Report

NAME = "omni-code2wav"


class Code2WavOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 16
    """Streams that are open at once."""
    enforce_eager: bool = False
    """On a GPU, launch each kernel by itself instead of replaying CUDA graphs."""


class Code2WavParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set."""

    seed: Annotated[int, Meta(ge=0, le=2**32 - 2)] | None = None
    """Of the noise that sound is made from, in models that have any; None draws a fresh one."""


@dataclass(slots=True, eq=False)
class _Decoding:
    """What came on a stream, and what became of it."""

    new: NewCodes
    sound: Audio | None = None
    error: StageFailed | None = None

    @property
    def is_done(self) -> bool:
        """Whether it was decoded."""
        return self.sound is not None or self.error is not None


class OmniCode2Wav(StreamingEngine):
    """Codes in, PCM out: s16, mono. Models whose vocoder has voices are told which on ``voice``."""

    accepts: ClassVar[dict[str, str]] = {"codes": "codes", "voice": "json"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"voice"})
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options: ClassVar[type[msgspec.Struct]] = Code2WavOptions
    Params: ClassVar[type[msgspec.Struct]] = Code2WavParams

    _vocoder: Vocoder

    def __init__(self, options: Code2WavOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="code2wav")
        self._waiting: deque[_Decoding] = deque()
        """At most one of each stream: the loop puts them in, the thread takes them out."""

    @classmethod
    def check(cls, options: Code2WavOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return check_model(NAME, options, ("torch", "transformers"))

    @classmethod
    def memory(cls, options: Code2WavOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes: weights; what a piece of sound takes depends on the model."""
        found = Files(options, has_accelerator=has_accelerator).memory(prefix="code2wav.")
        exact = msgspec.structs.replace(options, dtype="float32")  # as Qwen2.5's computes, whatever it is saved as
        return found or Files(exact, has_accelerator=has_accelerator).memory(prefix="token2wav.")

    def load(self, report: Report) -> None:
        """Load the vocoder alone.

        Raises:
            StartFailed: the model isn't there, or its sound can't be made in pieces.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        family = family_of(loader)
        start_threads(self._thread, 1)
        report("warming up", 0.0)
        try:
            self._vocoder = family.vocoder(loader)
        except ValueError as error:
            raise loader.refused(f"its sound can't be made in pieces: {error}") from error
        if not (self.options.enforce_eager or loader.on_cpu):
            report("warming up", 0.5)
            with recording():
                self._vocoder.record(self.max_num_seqs)
        report("warming up", 1.0)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Decode one stream; no codes give no sound.

        Raises:
            BadInput: what came are no codes.
            StageFailed: they are another model's, or the vocoder failed.
        """
        seed = secrets.randbelow(2**32 - 1) if request.params.seed is None else request.params.seed
        stream: SoundStream | None = None
        num_samples = num_frames = 0
        waiting: list[torch.Tensor] = []
        async for payload in inputs.port("codes"):
            waiting.append(self._codes(payload))
            num_frames += len(waiting[-1])
            if stream is None:
                stream = self._vocoder.begin(await self._voice(inputs), seed)
            if sum(map(len, waiting)) < stream.num_missing:
                continue
            piece = await self._decoded(stream, waiting, is_last=False)
            waiting = []
            if piece.num_frames:
                num_samples += piece.num_frames
                yield "audio", piece
        if stream is not None:
            piece = await self._decoded(stream, waiting, is_last=True)
            if piece.num_frames:
                num_samples += piece.num_frames
                yield "audio", piece
        yield Finish(detail={"seconds": num_samples / self._vocoder.rate_hz, "audio_tokens": num_frames})

    async def _voice(self, inputs: Inputs) -> str:
        if not self._vocoder.has_voices:
            return ""
        async for piece in inputs.port("voice"):
            if not isinstance(piece, Json) or not isinstance(piece.value, str):
                raise BadInput(f"voice: {kind_of(piece)} came (allowed: json, a name)", field="voice")
            return piece.value
        raise StageFailed("codes came without the name of their voice")

    def _codes(self, payload: Payload) -> torch.Tensor:
        """Return checked codes, (frames, codebooks)."""
        import numpy as np
        import torch

        if not isinstance(payload, Codes):
            raise BadInput(f"codes: {kind_of(payload)} came (allowed: codes)", field="codes")
        vocoder = self._vocoder
        # Only a stage sends codes: that these are another model's is no fault of the caller.
        if payload.num_codebooks != vocoder.num_codebooks:
            raise StageFailed(
                f"codes of {payload.num_codebooks} codebooks came; the vocoder has {vocoder.num_codebooks}"
            )
        values = np.frombuffer(payload.data.view, "<i4").reshape(-1, payload.num_codebooks).astype(np.int64)
        codes = torch.from_numpy(values)
        if len(codes) and (int(codes.min()) < 0 or int(codes.max()) >= vocoder.codebook_size):
            raise StageFailed(f"a code came that is not among the vocoder's {vocoder.codebook_size}")
        return codes

    async def _decoded(self, stream: SoundStream, codes: Sequence[torch.Tensor], *, is_last: bool) -> Audio:
        """Return the sound that what came on a stream makes certain.

        Raises:
            StageFailed: the vocoder failed.
        """
        import torch

        joined = torch.cat(list(codes)).to(self._vocoder.model.device) if codes else None
        decoding = _Decoding(NewCodes(stream, joined, is_last))
        self._waiting.append(decoding)
        try:
            await on_thread(self._thread, self._decode_blocking, decoding)
        finally:
            with contextlib.suppress(ValueError):  # a cancelled one, before its turn
                self._waiting.remove(decoding)
        if decoding.error is not None:
            raise decoding.error
        assert decoding.sound is not None
        return decoding.sound

    def _decode_blocking(self, decoding: _Decoding) -> None:
        """Decode this, and with it what has waited less long, unless an earlier turn has done so."""
        import torch

        if decoding.is_done:
            return
        together: list[_Decoding] = []
        with contextlib.suppress(IndexError):  # the loop may take out what was cancelled meanwhile
            while len(together) < self._vocoder.max_together:
                together.append(self._waiting.popleft())
        try:
            with torch.inference_mode():
                sounds = [sound.float().cpu() for sound in self._vocoder.decode([each.new for each in together])]
        except (RuntimeError, ValueError) as error:
            for each in together:
                each.error = StageFailed(f"the vocoder failed with {type(error).__name__}: {str(error)[:300]}")
                each.error.__cause__ = error
            return
        for each, sound in zip(together, sounds, strict=True):
            if bool(sound.isfinite().all()):
                each.sound = pcm16(sound.numpy(), self._vocoder.rate_hz)
            else:
                each.error = StageFailed("the vocoder computed samples that aren't finite")
