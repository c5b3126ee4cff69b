"""Speech language models and codecs as two stages, against `generate` of the same checkpoints in one piece."""

from __future__ import annotations

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
from adapters.speech_models import Delayed, Staircase, UntilEnd
from adapters.transformers_codec import TransformersCodec
from adapters.transformers_speech import TransformersSpeech
from omni_bus.errors import BadInput, StartFailed
from omni_bus.testing import StepDriver, make_engine, run_streaming
from omni_bus.wire.payloads import Audio, Blob, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_bus.testing import Collected
    from omni_bus.wire.payloads import Payload

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

TEXTS = ("Hello there.", "[S1] A longer sentence, with more in it.", "Drei.")


def says(words: str, reference: Audio | None = None) -> dict[str, list[Payload]]:
    return {"text": [Text(words)], "reference": [] if reference is None else [reference]}


def voice(rate_hz: int, seconds: float = 0.4, channels: int = 1) -> Audio:
    time = np.arange(int(seconds * rate_hz)) / rate_hz
    samples = 0.5 * np.sin(2 * np.pi * 220 * time) * np.sin(2 * np.pi * 3 * time)
    data = np.repeat(samples.astype("<f4")[:, None], channels, axis=1).tobytes()
    return Audio(rate_hz, channels, "f32", Blob(data))


class Whole:
    """A checkpoint in one piece, as transformers' own documentation runs it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.processor: Any = transformers.AutoProcessor.from_pretrained(folder)
        self.rate_hz: int = self.processor.feature_extractor.sampling_rate

    def speak(self, text: str, seed: int, temperature: float, reference: Audio | None, reference_text: str) -> Any:
        """Return samples, (samples,)."""
        raise NotImplementedError


class WholeCsm(Whole):
    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.model: Any = transformers.CsmForConditionalGeneration.from_pretrained(folder)

    def speak(self, text: str, seed: int, temperature: float, reference: Audio | None, reference_text: str) -> Any:
        turns: list[dict[str, Any]] = [{"role": "0", "content": [{"type": "text", "text": text}]}]
        if reference is not None:
            heard = {"type": "audio", "path": np.frombuffer(reference.data.view, "<f4")}
            turns.insert(0, {"role": "0", "content": [{"type": "text", "text": reference_text}, heard]})
        prompt = self.processor.apply_chat_template(turns, tokenize=True, return_dict=True)
        settings: dict[str, Any] = {"do_sample": False, "depth_decoder_do_sample": False}
        if temperature:
            settings = {"do_sample": True, "temperature": temperature}
            settings |= {f"depth_decoder_{name}": value for name, value in settings.items()}
        torch.manual_seed(seed)
        return self.model.generate(**prompt, **settings, output_audio=True)[0]


class WholeDia(Whole):
    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.model: Any = transformers.DiaForConditionalGeneration.from_pretrained(folder)

    def speak(self, text: str, seed: int, temperature: float, reference: Audio | None, reference_text: str) -> Any:
        of_model = {"bos_token_id": 34, "eos_token_id": 32, "pad_token_id": 33, "delay_pattern": [0, 2, 3, 4]}
        audio = of_model | {"sampling_rate": self.rate_hz}
        sound = None if reference is None else np.frombuffer(reference.data.view, "<f4")
        text = text if reference is None else f"{reference_text} {text}"
        prompt = self.processor(text=[text], audio=sound, text_kwargs={"padding": False}, audio_kwargs=audio)
        settings = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        torch.manual_seed(seed)
        codes = self.model.generate(**prompt, **settings)
        length = self.processor.get_audio_prompt_len(prompt["decoder_attention_mask"], audio_kwargs=audio)
        return self.processor.decode(codes, audio_prompt_len=length, audio_kwargs=audio)


class WholeHiggs(Whole):
    """With an X-Codec, since transformers loads Higgs' own codec only where torchaudio is."""

    def __init__(self, folder: str, codec_folder: str) -> None:
        self.folder = folder
        self.rate_hz = 8000
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(folder)
        from transformers.models.higgs_audio_v2.processing_higgs_audio_v2 import HiggsAudioV2Processor

        # Its constructor wants Higgs' own codec; what makes sound of codes is transformers' all the same.
        self.processor: Any = object.__new__(HiggsAudioV2Processor)
        self.processor.audio_stream_bos_id, self.processor.audio_stream_eos_id = 32, 33
        self.processor.audio_tokenizer = transformers.AutoModel.from_pretrained(codec_folder)

    def speak(self, text: str, seed: int, temperature: float, reference: Audio | None, reference_text: str) -> Any:
        asked = [
            {"role": "system", "content": [{"type": "text", "text": "Generate audio following instruction."}]},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
        prompt = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        settings = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        torch.manual_seed(seed)
        return self.processor.decode(self.model.generate(**prompt, **settings))


class Pair:
    """The two stages, and the same checkpoint in one piece."""

    def __init__(self, whole: Whole, codec_folder: str) -> None:
        self.whole = whole
        self.speech = make_engine(TransformersSpeech, {"model": whole.folder})
        self.hears = self.speech._speech.takes_reference
        self.codec = make_engine(TransformersCodec, {"model": codec_folder})

    def codes(self, inputs: dict[str, list[Payload]], params: dict[str, Any]) -> Collected:
        driver = StepDriver(self.speech)
        [said] = driver.run(driver.add(inputs, params))
        if said.error is not None:
            raise said.error
        return said

    async def speak(self, inputs: dict[str, list[Payload]], params: dict[str, Any]) -> bytes:
        return (await run_streaming(self.codec, {"codes": self.codes(inputs, params).port("codes")})).pcm

    def close(self) -> None:
        self.speech.close()
        self.codec.close()


def make_csm(folder: Path) -> Pair:
    return Pair(WholeCsm(tiny.csm(folder)), str(folder))


def make_dia(folder: Path) -> Pair:
    return Pair(WholeDia(tiny.dia(folder)), str(folder / "codec"))


def make_higgs(folder: Path) -> Pair:
    codec = tiny.xcodec(folder / "codec")
    return Pair(WholeHiggs(tiny.higgs(folder), codec), codec)


@pytest.fixture(scope="module", params=[make_csm, make_dia, make_higgs], ids=["csm", "dia", "higgs"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    make: Callable[[Path], Pair] = request.param
    pair = make(tmp_path_factory.mktemp("model"))
    yield pair
    pair.close()


def assert_same_sound(pcm: bytes, samples: torch.Tensor) -> None:
    """Equal but for the last bits of floating point: one step of 16 bits."""
    whole = np.frombuffer(pcm16(samples.numpy(), 1).data.view, "<i2").astype(int)
    found = np.frombuffer(pcm, "<i2").astype(int)
    assert found.shape == whole.shape
    assert np.abs(found - whole).max() <= 1
    assert found.std() > 1000


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.3])
@pytest.mark.parametrize("text", TEXTS)
async def test_stages_say_what_the_whole_model_says(pair: Pair, text: str, temperature: float) -> None:
    found = await pair.speak(says(text), {"seed": 5, "temperature": temperature})

    assert_same_sound(found, pair.whole.speak(text, 5, temperature, None, ""))


async def test_reference_is_spoken_with_as_by_the_whole_model(pair: Pair) -> None:
    params = {"seed": 5, "temperature": 1.0, "reference_text": "What it says."}
    reference = voice(pair.whole.rate_hz)
    if not pair.hears:
        with pytest.raises(BadInput, match=r"^reference: the model can't be given a voice here"):
            await pair.speak(says(TEXTS[0], reference), params)
        return
    found = await pair.speak(says(TEXTS[0], reference), params)

    assert_same_sound(found, pair.whole.speak(TEXTS[0], 5, 1.0, reference, "What it says."))
    assert found != await pair.speak(says(TEXTS[0]), {"seed": 5, "temperature": 1.0})


async def test_reference_of_another_rate_and_two_channels_is_heard(pair: Pair) -> None:
    if not pair.hears:
        pytest.skip("it can't be given a voice")
    params = {"seed": 5, "temperature": 1.0, "reference_text": "What it says."}

    assert await pair.speak(says(TEXTS[0], voice(44_100, channels=2)), params)


def test_eight_at_once_say_what_each_says_alone(pair: Pair) -> None:
    asked = [(TEXTS[i % 3], {"seed": i, "temperature": 1.0}) for i in range(8)]
    alone = [pair.codes(says(text), params).port("codes") for text, params in asked]
    driver = StepDriver(pair.speech)
    together = driver.run(*[driver.add(says(text), params) for text, params in asked])

    assert [said.port("codes") for said in together] == alone
    assert len({b"".join(bytes(frame.data.view) for frame in frames) for frames in alone}) == 8


def test_a_seed_repeats_and_none_does_not(pair: Pair) -> None:
    def spoken(**params: Any) -> list[Any]:
        return pair.codes(says(TEXTS[1]), {"temperature": 1.0} | params).outputs

    assert spoken(seed=1) == spoken(seed=1) != spoken(seed=2)
    assert spoken() != spoken()


def test_settings_of_a_request_are_gone_with_it(pair: Pair) -> None:
    """`generate` keeps those of CSM's second language model in its modules."""
    model_own = pair.codes(says(TEXTS[0]), {"seed": 1}).outputs
    for _ in range(pair.speech.max_resident):
        pair.codes(says(TEXTS[0]), {"seed": 1, "temperature": 2.0})

    assert pair.codes(says(TEXTS[0]), {"seed": 1}).outputs == model_own


def test_frames_come_as_they_are_made_and_an_abort_ends_it(pair: Pair) -> None:
    driver = StepDriver(pair.speech)
    request = driver.add(says(TEXTS[1]), {"seed": 5, "temperature": 1.0})
    while not driver.results[request].outputs:
        assert not driver.step() or driver.results[request].outputs
    assert len(driver.results[request].outputs) == 1
    driver.abort(request)

    assert pair.codes(says(TEXTS[1]), {"seed": 5, "temperature": 1.0}).outputs[0] == driver.results[request].outputs[0]


def test_max_new_tokens_ends_the_sound(pair: Pair) -> None:
    said = pair.codes(says(TEXTS[1]), {"seed": 5, "temperature": 1.0, "max_new_tokens": 4})

    assert said.finish.reason == "length"
    assert len(said.outputs) == 4


def test_room_is_handed_back_whatever_happens(pair: Pair) -> None:
    """More requests than there are threads, each ending in another way."""
    driver = StepDriver(pair.speech)
    for i in range(3 * pair.speech.max_resident):
        request = driver.add(says(TEXTS[0]), {"max_new_tokens": 10_000 if i % 3 == 0 else 4})
        if i % 3 == 1:
            driver.step(request)
            driver.abort(request)
        else:
            driver.run(request)
            assert (driver.results[request].error is None) == (i % 3 == 2)
    assert driver.live == []


@pytest.mark.parametrize(
    ("inputs", "params", "field"),
    [
        (says(""), {}, "text"),
        (says(" \n"), {}, "text"),
        (says("x" * 300), {}, "text"),
        (says("a"), {"max_new_tokens": 10_000}, "max_new_tokens"),
        (says("a"), {"reference_text": "b"}, "reference_text"),
        (says("a", voice(8000)), {}, "reference_text"),
        (says("a", voice(8000)), {"reference_text": " "}, "reference_text"),
        (says("a", voice(8000, 0)), {"reference_text": "b"}, "reference"),
        (says("a", voice(8000, 31)), {"reference_text": "b"}, "reference"),
        ({"text": [Text("a")], "reference": [voice(8000)] * 2}, {"reference_text": "b"}, "reference"),
        (says("a"), {"voice": "../heart"}, "voice"),
    ],
)
def test_bad_input_is_refused_by_name(
    pair: Pair, inputs: dict[str, list[Payload]], params: dict[str, Any], field: str
) -> None:
    if inputs["reference"] and not pair.hears:
        field = "reference"
    with pytest.raises(BadInput) as caught:
        pair.codes(inputs, params)

    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


def test_other_models_are_refused_at_the_start(pair: Pair, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for kind in (TransformersSpeech, TransformersCodec):
        with pytest.raises(StartFailed, match=r"^model: .* it is of type 'llama' \(allowed: "):
            make_engine(kind, {"model": str(tmp_path)})


def test_checkpoint_that_lacks_weights_is_refused_at_the_start(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = Path(tiny.csm(tmp_path)) / "model.safetensors"
    found = load_file(weights)
    del found[next(name for name in found if name.startswith("codec_model.decoder."))], found["lm_head.weight"]
    save_file(found, weights, {"format": "pt"})
    for kind in (TransformersSpeech, TransformersCodec):
        with pytest.raises(StartFailed, match=r"its checkpoint lacks \d weights?, "):
            make_engine(kind, {"model": str(tmp_path)})


# --- frames -------------------------------------------------------------------------------------------------


def test_frame_of_end_tokens_ends_the_sound() -> None:
    frames = UntilEnd(0)

    assert [frames.add(tokens) for tokens in ([1, 2], [0, 3], [0, 0], [4, 5])] == [[[1, 2]], [[0, 3]], [], []]


@pytest.mark.parametrize("num_frames", range(4))
def test_staircase_ends_where_every_codebook_has_ended(num_frames: int) -> None:
    """Codebook k of frame t is made at step t + k + 1, after a step of begin tokens; any of them may end the sound."""
    begin, end = 90, 91
    steps = [[begin] * 3] + [
        [begin if t < k else end if t - k >= num_frames and t >= k + num_frames else 10 * (t - k) + k for k in range(3)]
        for t in range(num_frames + 5)
    ]
    frames = Staircase(3, begin, end)

    found = [frame for step in steps for frame in frames.add(step)]
    assert found == [[10 * t, 10 * t + 1, 10 * t + 2] for t in range(num_frames)]


def test_staircase_takes_a_token_that_is_no_code_for_the_last_code() -> None:
    frames = Staircase(2, 90, 91)

    found = [frames.add(step) for step in ([90, 90], [1, 90], [91, 2], [4, 90], [91, 91])]
    assert found == [[], [], [[1, 2]], [[89, 89]], []]


@pytest.mark.parametrize("num_frames", range(7))
def test_delayed_codebooks_meet_in_their_frame(num_frames: int) -> None:
    """Frame t of codebook k is made at step t + delay; each code here says where it belongs."""
    delays, end, pad = [0, 1, 3], 99, 98
    frames = Delayed(delays, end)
    steps = [
        [
            end if t - delay == num_frames else pad if not 0 <= t - delay < num_frames else 10 * (t - delay) + k
            for k, delay in enumerate(delays)
        ]
        for t in range(num_frames + 6)
    ]
    found = [frame for step in steps for frame in frames.add(step)]

    assert found == [[10 * t, 10 * t + 1, 10 * t + 2] for t in range(num_frames)]
