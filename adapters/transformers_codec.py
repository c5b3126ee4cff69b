"""Codec codes to sound with the codecs of transformers, while the codes still come.

`CodecStream` decodes each piece with as much around it as its sound depends on, so that the pieces together are what
the codec makes of all codes at once, but for the last bits of floating point.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from adapters.codec_models import CODEC_MODELS, CodecModel, CodecStream, Field, field_of
from adapters.handover import on_thread, start_threads
from adapters.model_memory import Files
from adapters.sound import pcm16
from adapters.transformers_model import ModelLoader, ModelOptions, check_model
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, StageFailed, StartFailed
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Codes, Payload, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import torch

    from omni_bus.engine import Context, Memory, Report

NAME = "transformers-codec"

NESTED = {"csm": "codec_model"}
"""Types of models that have a codec inside, and what its weights are called there."""


class CodecOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    piece_s: Annotated[float, Meta(gt=0, le=10)] = 0.24
    """Seconds of codes that are decoded at once; the first piece has half as many."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=256)] = 16
    """Streams that are open at once; their pieces take turns on one thread."""


class TransformersCodec(StreamingEngine):
    """Codes in, PCM out: s16, mono, at the codec's rate."""

    accepts: ClassVar[dict[str, str]] = {"codes": "codes"}
    emits: ClassVar[dict[str, str]] = {"audio": "audio"}
    Options: ClassVar[type[msgspec.Struct]] = CodecOptions

    _codec: CodecModel
    _field: Field

    def __init__(self, options: CodecOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="codec")

    @classmethod
    def check(cls, options: CodecOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return check_model(NAME, options, ("torch", "transformers"))

    @classmethod
    def memory(cls, options: CodecOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator)
        nested = NESTED.get(files.config.get("model_type", ""), "")
        return files.memory(prefix=f"{nested}." if nested else "")

    def load(self, report: Report) -> None:
        """Load, and find how far sound depends on the codes around it.

        Raises:
            StartFailed: the codec isn't there, or is none that can be decoded in pieces.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        import transformers

        config = loader.part("loading configuration", transformers.AutoConfig)
        arguments: dict[str, Any] = {}
        if (prefix := NESTED.get(config.model_type)) is not None:
            config = config.codec_config
            arguments = {"config": config, "key_mapping": {rf"^{prefix}\.": ""}}
        if config.model_type not in CODEC_MODELS:
            allowed = ", ".join(sorted({*CODEC_MODELS, *NESTED}))
            raise loader.refused(f"it is of type '{config.model_type}' (allowed: {allowed})")
        verbosity = transformers.logging.get_verbosity()
        if arguments:  # of the weights around the codec, none is expected
            transformers.logging.set_verbosity_error()
        model = loader.weights(transformers.AutoModel, is_complete=True, **arguments)
        transformers.logging.set_verbosity(verbosity)
        start_threads(self._thread, 1)
        report("warming up", 0.0)
        try:
            self._codec = CODEC_MODELS[config.model_type](model)
            self._field = field_of(self._codec)
        except ValueError as error:
            raise loader.refused(f"it can't be decoded in pieces: {error}") from error
        report("warming up", 1.0)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown()

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Decode one stream; no codes give no sound.

        Raises:
            BadInput: what came are no codes.
            StageFailed: they are another codec's, or the codec failed.
        """
        stream = CodecStream(self._codec, self._field)
        wanted = max(1, round(self.options.piece_s * self._codec.frame_rate_hz / 2))
        waiting: list[Codes] = []
        num_samples = 0
        async for payload in inputs.port("codes"):
            waiting.append(self._checked(payload))
            if sum(codes.num_frames for codes in waiting) < wanted:
                continue
            wanted = max(1, round(self.options.piece_s * self._codec.frame_rate_hz))
            piece = await on_thread(self._thread, self._decode_blocking, stream, waiting, False)
            waiting = []
            if piece.num_frames:
                num_samples += piece.num_frames
                yield "audio", piece
        piece = await on_thread(self._thread, self._decode_blocking, stream, waiting, True)
        num_samples += piece.num_frames
        if piece.num_frames:
            yield "audio", piece
        yield Finish(detail={"seconds": num_samples / self._codec.rate_hz})

    def _checked(self, payload: Payload) -> Codes:
        if not isinstance(payload, Codes):
            raise BadInput(f"codes: {kind_of(payload)} came (allowed: codes)", field="codes")
        most, rate_hz = self._codec.num_codebooks, self._codec.frame_rate_hz
        # Only a stage sends codes: that these are another codec's is no fault of the caller.
        if not 1 <= payload.num_codebooks <= most:
            raise StageFailed(f"codes of {payload.num_codebooks} codebooks came; the codec has {most}")
        if not math.isclose(payload.frame_rate_hz, rate_hz, rel_tol=0.01):
            raise StageFailed(f"codes of {payload.frame_rate_hz:g} frames a second came; the codec has {rate_hz:g}")
        return payload

    def _decode_blocking(self, stream: CodecStream, waiting: list[Codes], is_last: bool) -> Audio:  # noqa: FBT001
        import torch

        codes = self._joined(waiting) if any(each.num_frames for each in waiting) else None
        try:
            with torch.inference_mode():
                sound = stream.decode(codes, is_last=is_last).float().cpu()
        except (RuntimeError, ValueError) as error:
            raise StageFailed(f"the codec failed with {type(error).__name__}: {str(error)[:300]}") from error
        if not bool(sound.isfinite().all()):
            raise StageFailed("the codec computed samples that aren't finite")
        return pcm16(sound.numpy(), self._codec.rate_hz)

    def _joined(self, waiting: list[Codes]) -> torch.Tensor:
        import numpy as np
        import torch

        frames = [np.frombuffer(each.data.view, "<i4").reshape(-1, each.num_codebooks) for each in waiting]
        if len({each.shape[1] for each in frames}) > 1:
            raise StageFailed("the number of codebooks changed within a stream")
        codes = torch.from_numpy(np.concatenate(frames).astype(np.int64)).T[None]
        if int(codes.min()) < 0 or int(codes.max()) >= self._codec.codebook_size:
            raise StageFailed(f"a code came that is not in the codec's codebooks of {self._codec.codebook_size}")
        return codes.to(self._codec.model.device)
