from __future__ import annotations

import asyncio
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

from adapters.codec_models import CodecStream, field_of
from adapters.transformers_codec import TransformersCodec
from omni_bus.errors import StageFailed, StartFailed
from omni_bus.testing import make_engine, run_streaming, start_streaming
from omni_bus.wire.payloads import Blob, Codes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from omni_bus.wire.payloads import Payload

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NUM_CODEBOOKS = 4
BOUND = 1e-5
"""Between a stream's samples and the whole's: what other sums of the same numbers in float32 come to."""


class Codec:
    """A codec as a stage, and its `decode` in one piece."""

    def __init__(self, folder: str, whole: Any) -> None:
        self.engine = make_engine(TransformersCodec, {"model": folder})
        self.whole = whole
        self.frame_rate_hz = self.engine._codec.frame_rate_hz

    def payload(self, codes: torch.Tensor) -> Codes:
        frames = codes[0].T.numpy().astype("<i4")
        return Codes(len(frames), NUM_CODEBOOKS, self.frame_rate_hz, Blob(frames.tobytes()))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.whole.decode(audio_codes=codes).audio_values.flatten()


@pytest.fixture(scope="module", params=["mimi", "dac", "xcodec"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Codec]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mimi":
        csm: Any = transformers.CsmForConditionalGeneration.from_pretrained(tiny.csm(folder))
        whole = csm.codec_model
    elif request.param == "xcodec":
        whole = transformers.XcodecModel.from_pretrained(tiny.xcodec(folder))
    else:
        whole = transformers.DacModel.from_pretrained(tiny.dac(folder))
    codec = Codec(str(folder), whole)
    yield codec
    codec.engine.close()


def drawn(num_frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32, (1, NUM_CODEBOOKS, num_frames), generator=generator)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 17, 40, 150])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_pieces_together_are_the_whole(codec: Codec, num_frames: int, width: int) -> None:
    codes = drawn(num_frames)
    stream = CodecStream(codec.engine._codec, codec.engine._field)
    with torch.inference_mode():
        pieces = [stream.decode(piece, is_last=False) for piece in codes.split(width, dim=2)]
        pieces.append(stream.decode(None, is_last=True))
    whole = codec.decode(codes)

    found = torch.cat(pieces)
    assert found.shape == whole.shape
    assert float((found - whole).abs().max()) <= BOUND
    assert float(whole.std()) > 0.01


def test_field_is_as_wide_as_it_must_be(codec: Codec) -> None:
    """With one latent less on a side that has any, pieces differ: the bound above is no accident."""
    field, codes = codec.engine._field, drawn(100)
    for side in ("left", "right"):
        if not (size := getattr(field, side)):
            continue
        stream = CodecStream(codec.engine._codec, field._replace(**{side: size // 2}))
        with torch.inference_mode():
            pieces = [stream.decode(piece, is_last=False) for piece in codes.split(1, dim=2)]
            found = torch.cat([*pieces, stream.decode(None, is_last=True)])
        assert float((found - codec.decode(codes)).abs().max()) > 10 * BOUND


async def test_sound_begins_before_the_codes_end(codec: Codec) -> None:
    taken: list[int] = []

    async def coming() -> AsyncIterator[Payload]:
        for i, piece in enumerate(drawn(120).split(1, dim=2)):
            taken.append(i)
            yield codec.payload(piece)

    async with start_streaming(codec.engine, {"codes": coming()}) as stream:
        assert await stream.pull() is not None
        assert len(taken) < 120


async def test_streams_beside_each_other_do_not_mix(codec: Codec) -> None:
    def inputs(seed: int) -> dict[str, list[Any]]:
        return {"codes": [codec.payload(piece) for piece in drawn(60, seed).split(2, dim=2)]}

    alone = [(await run_streaming(codec.engine, inputs(seed))).pcm for seed in range(4)]
    together = await asyncio.gather(*[run_streaming(codec.engine, inputs(seed)) for seed in range(4)])

    assert [said.pcm for said in together] == alone
    assert len(set(alone)) == 4


async def test_no_codes_give_no_sound(codec: Codec) -> None:
    assert (await run_streaming(codec.engine, {"codes": []})).outputs == []


@pytest.mark.parametrize(
    ("num_codebooks", "factor", "words"),
    [(0, 1, "of 0 codebooks came; the codec has 4"), (5, 1, "of 5 codebooks"), (4, 1.1, "frames a second came")],
)
async def test_codes_of_another_codec_fail_the_stage(
    codec: Codec, num_codebooks: int, factor: float, words: str
) -> None:
    codes = Codes(1, num_codebooks, factor * codec.frame_rate_hz, Blob(bytes(4 * num_codebooks)))
    with pytest.raises(StageFailed, match=words):
        await run_streaming(codec.engine, {"codes": [codes]})


@pytest.mark.parametrize("code", [-1, 32, 2**31 - 1])
async def test_codes_that_are_in_no_codebook_fail_the_stage(codec: Codec, code: int) -> None:
    data = array("i", [1, 2, code, 4])
    with pytest.raises(StageFailed, match="not in the codec's codebooks of 32"):
        await run_streaming(
            codec.engine, {"codes": [Codes(1, 4, codec.frame_rate_hz, Blob(memoryview(data).cast("B")))]}
        )


def test_field_of_a_codec_that_remembers_is_refused(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec.engine._codec, "sound", lambda latents: _running_sum(codec, latents))
    with pytest.raises(ValueError, match="depends on all that came before"):
        field_of(codec.engine._codec)


def _running_sum(codec: Codec, latents: torch.Tensor) -> torch.Tensor:
    own = codec.engine._codec
    samples = own.samples_per_frame // own.latents_per_frame
    return latents.sum(dim=1, keepdim=True).cumsum(dim=2).repeat_interleave(samples, dim=2)


def test_folder_without_weights_is_refused_at_the_start(tmp_path: Path) -> None:
    transformers.DacConfig().save_pretrained(tmp_path)
    with pytest.raises(StartFailed, match=r"^model: .*can't be loaded"):
        make_engine(TransformersCodec, {"model": str(tmp_path)})


def test_samples_are_as_loud_as_the_codecs(codec: Codec) -> None:
    codes = drawn(30)
    said = asyncio.run(run_streaming(codec.engine, {"codes": [codec.payload(codes)]}))
    whole = codec.decode(codes).clamp(-1, 1).numpy()

    assert np.abs(np.frombuffer(said.pcm, "<i2") / 32767 - whole).max() < 1e-4


def test_higgs_own_codec_is_read_where_torchaudio_is(tmp_path: Path) -> None:
    """transformers imports torchaudio beside that codec's class; only encoding calls it, so an empty module will do."""
    program = f"""
import importlib.machinery, sys, types
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
import tiny, torch, transformers
from adapters.codec_models import CodecStream
from adapters.transformers_codec import TransformersCodec
from omni_bus.testing import make_engine

folder = tiny.xcodec({str(tmp_path)!r}, "higgs_audio_v2_tokenizer")
engine = make_engine(TransformersCodec, {{"model": folder}})
codes = torch.randint(0, 32, (1, 4, 40))
stream = CodecStream(engine._codec, engine._field)
with torch.inference_mode():
    pieces = [stream.decode(piece, is_last=False) for piece in codes.split(3, dim=2)]
    found = torch.cat([*pieces, stream.decode(None, is_last=True)])
    whole = transformers.AutoModel.from_pretrained(folder).decode(codes).audio_values.flatten()
engine.close()
assert type(engine._codec.model).__name__ == "HiggsAudioV2TokenizerModel"
assert found.shape == whole.shape and float(whole.std()) > 0.1
assert float((found - whole).abs().max()) <= {BOUND}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
