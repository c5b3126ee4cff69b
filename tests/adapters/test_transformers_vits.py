from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

import tiny  # type: ignore[import-not-found] (put on the path above)

from adapters.sound import pcm16
from adapters.transformers_vits import TransformersVits, VitsOptions
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import make_engine, run_streaming
from omni_bus.wire.payloads import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.vits(tmp_path_factory.mktemp("vits"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[TransformersVits]:
    engine = make_engine(TransformersVits, {"model": folder})
    yield engine
    engine.close()


async def pcm(engine: TransformersVits, text: str, **params: Any) -> bytes:
    return (await run_streaming(engine, {"text": [Text(text)]}, params)).pcm


def alone(folder: str, text: str, **arguments: Any) -> bytes:
    """Return what the model itself makes of a sentence with seed 5."""
    model: Any = transformers.VitsModel.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    torch.manual_seed(5)
    with torch.no_grad():
        return bytes(pcm16(model(ids, **arguments).waveform[0].numpy(), 8000).data.view)


def test_voices_are_the_models_speakers(folder: str, tmp_path: Path) -> None:
    assert TransformersVits.voices(VitsOptions(model=folder)) == ("0", "1", "2")
    assert TransformersVits.voices(VitsOptions(model="some/name")) == ()
    (tmp_path / "config.json").write_text('{"num_speakers": 1}')
    assert TransformersVits.voices(VitsOptions(model=str(tmp_path))) == ()


async def test_sentence_is_the_models_own(engine: TransformersVits, folder: str) -> None:
    found = await pcm(engine, "Hello there", seed=5, voice="2", speed=1.5)

    assert found == alone(folder, "Hello there", speaker_id=2, speaking_rate=1.5)
    assert await pcm(engine, "Hello there", seed=5) == alone(folder, "Hello there", speaker_id=0)
    assert np.frombuffer(found, "<i2").std() > 300


async def test_slower_is_longer_and_voices_differ(engine: TransformersVits) -> None:
    first = await pcm(engine, "hello there", seed=1)

    assert len(await pcm(engine, "hello there", seed=1, speed=0.5)) > 1.5 * len(first)
    assert await pcm(engine, "hello there", seed=1, voice="1") != first


async def test_seed_gives_the_same_sound_beside_others(engine: TransformersVits) -> None:
    texts = ("One sentence. And another one.", "Something else. With more. And more.")
    own = [await pcm(engine, text, seed=i) for i, text in enumerate(texts)]
    beside = await asyncio.gather(*[pcm(engine, text, seed=i) for i, text in enumerate(texts)])

    assert beside == own
    assert await pcm(engine, texts[0]) != await pcm(engine, texts[0])


@pytest.mark.parametrize("text", ["", " ", "12345", "你好"])
async def test_nothing_to_speak_gives_no_sound(engine: TransformersVits, text: str) -> None:
    assert await pcm(engine, text) == b""


@pytest.mark.parametrize("voice", ["3", "-1", "heart", "", "01"])
async def test_unknown_voice_is_refused(engine: TransformersVits, voice: str) -> None:
    with pytest.raises(BadInput, match=r"^voice: no such speaker \(allowed: a number from 0 to 2\)"):
        await pcm(engine, "hello", voice=voice)


def test_other_models_are_refused_at_the_start(tmp_path: Path) -> None:
    transformers.DacConfig().save_pretrained(tmp_path)
    with pytest.raises(StartFailed, match=r"it is of type 'dac' \(allowed: vits\)"):
        make_engine(TransformersVits, {"model": str(tmp_path)})


def test_model_that_wants_phonemes_is_refused_at_the_start(tmp_path: Path) -> None:
    path = Path(tiny.vits(tmp_path)) / "tokenizer_config.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"phonemize": false', '"phonemize": true'), encoding="utf-8"
    )
    with pytest.raises(StartFailed, match="phonemizer"):
        make_engine(TransformersVits, {"model": str(tmp_path)})
