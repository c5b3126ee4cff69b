"""What omni stages can't take, at their start and in requests, and whom it harms."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from array import array
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from staged import messages_of  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.code2wav import OmniCode2Wav
from adapters.omni.talker import OmniTalker
from adapters.omni.thinker import OmniThinker
from omni_bus.errors import BadInput, ConfigError, StageFailed, StartFailed
from omni_bus.testing import Collected, StepDriver, make_engine, run_streaming
from omni_bus.wire.payloads import Audio, Blob, Codes, Hidden, Json, Payload, Tensor, Video

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

GREEDY = {"temperature": 0.0, "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_omni.qwen2_5(tmp_path_factory.mktemp("qwen2_5"))


@pytest.fixture
def copied(folder: str, tmp_path: Path) -> Path:
    """A model that a test may break."""
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def edit(folder: Path, change: Any) -> None:
    """Change a model's configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


# --- starting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_class", "part"), [(OmniThinker, "thinker"), (OmniTalker, "talker"), (OmniCode2Wav, "token2wav")]
)
def test_checkpoint_without_some_weights_is_refused(copied: Path, engine_class: Any, part: str) -> None:
    weights = load_file(copied / "model.safetensors")
    gone = next(name for name in sorted(weights) if name.startswith(part) and name.endswith("weight"))
    del weights[gone]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})

    with pytest.raises(StartFailed, match="lacks 1 weights"):
        make_engine(engine_class, {"model": str(copied)})


def test_checkpoint_without_a_file_is_refused(copied: Path) -> None:
    names = dict.fromkeys(load_file(copied / "model.safetensors"), "model-00001-of-00002.safetensors")
    (copied / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": names}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"lacks 1 files of its weights, model-00001-of-00002.safetensors among them"):
        make_engine(OmniThinker, {"model": str(copied)})


def test_other_architecture_is_refused(copied: Path) -> None:
    (copied / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")

    with pytest.raises(StartFailed, match=r"of type 'qwen2' \(allowed: qwen2_5_omni, qwen3_omni_moe\)"):
        make_engine(OmniTalker, {"model": str(copied)})


@pytest.mark.parametrize(("engine_class", "part"), [(OmniThinker, "thinker"), (OmniCode2Wav, "token2wav")])
@pytest.mark.parametrize("value", [None, "none"])
def test_part_without_a_configuration_is_refused_and_not_made_in_full_size(
    copied: Path, monkeypatch: pytest.MonkeyPatch, engine_class: Any, part: str, value: Any
) -> None:
    edit(copied, lambda config: config.update({f"{part}_config": value}))
    made: list[Any] = []
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", lambda *args, **kwargs: made.append(args))

    with pytest.raises(StartFailed, match=f"{part}_config"):
        make_engine(engine_class, {"model": str(copied)})
    assert not made


def test_talker_of_another_width_is_refused(copied: Path) -> None:
    edit(copied, lambda config: config["talker_config"].update(embedding_size=32))

    with pytest.raises(StartFailed, match="width 32, its thinker writes 64"):
        make_engine(OmniTalker, {"model": str(copied)})


def test_weights_of_another_size_are_refused(copied: Path) -> None:
    edit(copied, lambda config: config["talker_config"].update(intermediate_size=32))

    with pytest.raises(StartFailed, match="its talker is not what its configuration says"):
        make_engine(OmniTalker, {"model": str(copied)})


def test_model_without_voices_is_refused(copied: Path) -> None:
    (copied / "spk_dict.pt").unlink()

    with pytest.raises(StartFailed, match=r"spk_dict\.pt"):
        make_engine(OmniTalker, {"model": str(copied)})


# --- the thinker --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(folder: str) -> Iterator[OmniThinker]:
    engine = make_engine(OmniThinker, {"model": folder, "context_length": 512})
    yield engine
    engine.close()


def test_memory_is_told_part_by_part(folder: str, loaded: OmniThinker) -> None:
    classes: tuple[Any, ...] = (OmniThinker, OmniTalker, OmniCode2Wav)
    found = [
        each.memory(msgspec.convert({"model": folder, "dtype": "float32"}, each.Options), has_accelerator=True)
        for each in classes
    ]
    small: Any = msgspec.convert({"model": folder, "context_length": 512, "device": "cpu"}, OmniThinker.Options)
    memory = OmniThinker.memory(small, has_accelerator=False)

    weights = load_file(Path(folder) / "model.safetensors").values()
    assert sum(memory.weights for memory in found) == sum(4 * weight.numel() for weight in weights)
    assert [memory.cache > 0 for memory in found] == [True, True, False]
    assert memory is not None
    assert memory.cache == loaded.statistics().pool_bytes


@pytest.fixture
def thinker(loaded: OmniThinker) -> StepDriver:
    return StepDriver(loaded)


def tone(seconds: float, *, channels: int = 1, level: float = 0.1) -> Audio:
    samples = level * np.sin(np.arange(round(16_000 * seconds) * channels, dtype=np.float32))
    return Audio(16_000, channels, "f32", Blob(samples.astype(np.float32).tobytes()))


def heard(*sounds: Audio) -> dict[str, Any]:
    parts = [{"type": "audio"} for _ in sounds]
    return {"prompt": [Json({"messages": [{"role": "user", "content": parts}]})], "audio": list(sounds)}


CLIP = {"prompt": [Json({"messages": [{"role": "user", "content": [{"type": "video"}]}]})]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "long sound": (heard(tone(10.5)), "audio: a sound of 10.5 s came .allowed: 0.1 to 10 s"),
    "short sound": (heard(tone(0.01)), "audio: a sound of 0.01 s came"),
    "no sound": (heard(Audio(16_000, 1, "s16", Blob(b""))), "audio: a sound of 0 s came"),
    "no numbers": (heard(tone(1, level=float("nan"))), "audio: samples came that are no numbers"),
    "clip without frames": (CLIP | {"video": [Video(0, 0, 32, 32, 1, 2, Blob(b""))]}, "video: a clip without frames"),
    "missing sound": (heard() | {"prompt": heard(tone(1))["prompt"]}, "audio: 0 payloads came for 1 audio parts"),
    "flat picture": (
        messages_of((np.zeros((1, 300, 3), np.uint8),)),
        "images: a picture came that the model can't see",
    ),
    "placeholder": (messages_of(("<|image_pad|>",)), "messages: <.image_pad.> stands 1 times"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_bad_media_are_refused_and_leave_neighbours_alone(thinker: StepDriver, what: str) -> None:
    alone = thinker.run(thinker.add(messages_of(("Hello",)), GREEDY))[0].outputs
    neighbour = thinker.add(messages_of(("Hello",)), GREEDY)
    thinker.step()
    inputs, message = REFUSED[what]

    with pytest.raises(BadInput, match=message):
        thinker.add(inputs, GREEDY)

    assert thinker.run(neighbour)[0].outputs == alone
    assert thinker.engine.statistics().num_active == 0  # type: ignore[attr-defined] (of the text engine)


@pytest.mark.parametrize("sound", [tone(1, level=0.0), tone(1, channels=8), tone(0.1), tone(10)])
def test_odd_sound_is_heard(thinker: StepDriver, sound: Audio) -> None:
    [answer] = thinker.run(thinker.add(heard(sound), GREEDY))

    assert answer.error is None
    assert answer.finish.usage.completion_tokens == 4


def test_encoder_that_computes_no_numbers_fails_its_request_only(
    thinker: StepDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = thinker.engine
    neighbour = thinker.add(messages_of(("Hello",)), GREEDY)
    weight = engine._thinker.model.audio_tower.proj.bias
    with monkeypatch.context() as patch:
        patch.setattr(weight, "data", torch.full_like(weight, float("nan")))
        with pytest.raises(StageFailed, match="finite"):
            thinker.add(heard(tone(1)), GREEDY)

    assert thinker.run(neighbour)[0].error is None


# --- the talker ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(folder: str) -> Iterator[OmniTalker]:
    engine = make_engine(OmniTalker, {"model": folder, "context_length": 64})
    yield engine
    engine.close()


def thought(num_prompt: int, num_reply: int, *, width: int = 64, value: float = 0.5) -> dict[str, Any]:
    """Return rows of a prompt and a reply."""
    prompt = np.tile(np.arange(num_prompt, dtype=np.float32), (4, 1))
    rows = np.full((num_prompt + num_reply, width), value, np.float32) * np.linspace(-1, 1, width, dtype=np.float32)
    return {
        "prompt_tokens": [Tensor("float32", prompt.shape, Blob(prompt.tobytes()))],
        "hidden": [Hidden(0, "float32", rows.shape, Blob(rows.tobytes()))],
    }


SPEECH = {"temperature": 0.0, "min_tokens": 5, "max_tokens": 6}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (thought(3, 2, width=32), "states of shape"),
        (thought(70, 2), "context_length is 64"),
        (thought(3, 2, value=float("nan")), "aren't finite"),
    ],
)
def test_bad_rows_fail_their_request_and_leave_neighbours_alone(
    talker: OmniTalker, inputs: dict[str, Any], message: str
) -> None:
    driver = StepDriver(talker)
    [alone] = driver.run(driver.add(thought(3, 2), SPEECH))
    neighbour, bad = driver.add(thought(3, 2), SPEECH), driver.add(inputs, SPEECH)

    found, failed = driver.run(neighbour, bad)

    assert found.outputs == alone.outputs
    assert message in str(failed.error)
    assert len(alone.port("codes")) == 6


def test_voice_that_does_not_exist_is_refused(talker: OmniTalker) -> None:
    with pytest.raises(BadInput, match=r"voice: .*allowed: Chelsie, Ethan"):
        StepDriver(talker).add({}, {"voice": "Bob"})


def test_reply_of_one_token_has_no_speech(talker: OmniTalker) -> None:
    driver = StepDriver(talker)

    [found] = driver.run(driver.add(thought(3, 0), SPEECH))

    assert found.error is None
    assert found.port("codes") == []


def test_speech_waits_for_rows_and_goes_on(talker: OmniTalker) -> None:
    driver = StepDriver(talker)
    whole = thought(3, 4)
    [alone] = driver.run(driver.add(whole, SPEECH | {"max_tokens": 12}))
    request = driver.add({}, SPEECH | {"max_tokens": 12}, is_complete=False)
    driver.feed(request, "prompt_tokens", whole["prompt_tokens"], is_last=True)
    rows = np.frombuffer(whole["hidden"][0].data.view, np.float32).reshape(7, 64)

    for i in range(7):
        driver.feed(request, "hidden", [Hidden(i, "float32", (1, 64), Blob(rows[i].tobytes()))])
        while driver.live and request not in driver._starved:
            driver.step()
        assert len(driver.results[request].port("codes")) == max(0, i - 2)
    driver.feed(request, "hidden", [], is_last=True)

    assert driver.run(request)[0].port("codes") == alone.port("codes")


def test_seeded_speech_is_the_same_in_any_company(talker: OmniTalker) -> None:
    driver = StepDriver(talker)
    params = {"seed": 3, "max_tokens": 8, "min_tokens": 8}
    [alone] = driver.run(driver.add(thought(3, 2), params))
    requests = [driver.add(thought(3, 2), params), *(driver.add(thought(4 + i, 3), SPEECH) for i in range(6))]

    assert driver.run(*requests)[0].outputs == alone.outputs


# --- the vocoder --------------------------------------------------------------------------------------------


class Waiting(deque[Any]):
    """What waits for the thread, and whether it is as much as wanted."""

    def __init__(self, num_wanted: int) -> None:
        super().__init__()
        self.is_full = asyncio.Event()
        self._num_wanted = num_wanted

    def append(self, value: Any) -> None:
        super().append(value)
        if len(self) == self._num_wanted:
            self.is_full.set()


class Vocoding:
    """A vocoder stage, and how many streams it decoded in each turn."""

    def __init__(self, folder: str) -> None:
        self.engine = make_engine(OmniCode2Wav, {"model": folder})
        self.turns: list[int] = []
        self.engine._vocoder.max_together = 4  # as on a GPU
        self._decode = self.engine._vocoder.decode
        self.engine._vocoder.decode = self._counted  # type: ignore[method-assign]

    def _counted(self, news: Any) -> list[torch.Tensor]:
        self.turns.append(len(news))
        return self._decode(news)

    async def start(self, *streams: list[Payload]) -> tuple[list[asyncio.Task[Collected]], threading.Event]:
        """Start streams while the thread is busy, until the first codes of all wait; the event lets it go on."""
        is_free = threading.Event()
        self.engine._thread.submit(is_free.wait)
        waiting = self.engine._waiting = Waiting(len(streams))
        tasks = [asyncio.create_task(self.run(codes)) for codes in streams]
        await waiting.is_full.wait()
        return tasks, is_free

    async def run(self, codes: list[Payload]) -> Collected:
        return await run_streaming(self.engine, {"voice": [Json("Ethan")], "codes": codes}, {"seed": 1})


@pytest.fixture(scope="module")
def vocoding(folder: str) -> Iterator[Vocoding]:
    made = Vocoding(folder)
    yield made
    made.engine.close()


def spoken(*codes: int) -> Codes:
    return Codes(len(codes), 1, 50.0, Blob(memoryview(array("i", codes)).cast("B")))


async def test_what_came_while_the_vocoder_was_busy_is_decoded_in_one_turn(vocoding: Vocoding) -> None:
    streams: list[list[Payload]] = [[spoken(*range(i, i + 14))] for i in range(3)]
    alone = [await vocoding.run(codes) for codes in streams]
    vocoding.turns.clear()

    tasks, is_free = await vocoding.start(*streams)
    is_free.set()
    found = await asyncio.gather(*tasks)

    assert vocoding.turns[0] == 3
    for one, other in zip(found, alone, strict=True):
        difference = np.frombuffer(one.pcm, "<i2").astype(int) - np.frombuffer(other.pcm, "<i2")
        assert np.abs(difference).max() <= 1
    assert len({each.pcm for each in found}) == 3


async def test_vocoder_is_asked_only_when_codes_make_sound(vocoding: Vocoding) -> None:
    whole = await vocoding.run([spoken(*range(40))])
    vocoding.turns.clear()

    found = await vocoding.run([spoken(code) for code in range(40)])

    assert vocoding.turns == [1, 1]
    assert found.pcm == whole.pcm


async def test_where_nothing_is_gained_streams_take_turns(vocoding: Vocoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocoding.engine._vocoder, "max_together", 1)
    vocoding.turns.clear()

    tasks, is_free = await vocoding.start([spoken(1, 2)], [spoken(3)])
    is_free.set()
    await asyncio.gather(*tasks)

    assert set(vocoding.turns) == {1}


async def test_vocoder_that_computes_no_numbers_fails_its_stream_only(
    vocoding: Vocoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = vocoding._decode

    def broken(news: Any) -> list[torch.Tensor]:
        monkeypatch.setattr(vocoding, "_decode", decode)
        first, *others = decode(news)
        return [first * float("nan"), *others]

    monkeypatch.setattr(vocoding, "_decode", broken)
    [bad, good], is_free = await vocoding.start([spoken(*range(50))], [spoken(*range(50))])
    is_free.set()

    with pytest.raises(StageFailed, match="aren't finite"):
        await bad
    assert len((await good).pcm) == 50 * 480 * 2


async def test_cancelled_stream_is_not_decoded(vocoding: Vocoding) -> None:
    [task], is_free = await vocoding.start([spoken(1, 2, 3)])
    vocoding.turns.clear()

    task.cancel()
    await asyncio.wait([task])
    is_free.set()
    await vocoding.run([])

    assert not vocoding.engine._waiting
    assert vocoding.turns == []
