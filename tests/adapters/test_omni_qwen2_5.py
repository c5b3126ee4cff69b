"""Qwen2.5-Omni in stages against transformers' own `generate`, on the same tiny checkpoint with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Pillow

sys.path.insert(0, str(Path(__file__).parent))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from staged import Staged  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.media import clip_patches
from adapters.omni.qwen2_5 import Qwen25, talker_positions, talker_rows
from adapters.omni.qwen2_5_vocoder import Qwen25Vocoder
from adapters.omni.talker import OmniTalker
from adapters.omni.thinker import OmniThinker
from omni_bus.testing import make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

NUM_TOKENS, MIN_CODES, NUM_CODES = 10, 12, 30

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 255, (56, 84, 3), np.uint8)
OTHER_PICTURE = RNG.integers(0, 255, (90, 60, 3), np.uint8)
CLIP = RNG.integers(0, 255, (4, 56, 56, 3), np.uint8)
SOUND = (RNG.standard_normal(12_000) * 0.1).astype(np.float32)
LONG_SOUND = (RNG.standard_normal(40_000) * 0.1).astype(np.float32)

QUESTIONS: tuple[tuple[Any, ...], ...] = (
    ("Hello",),
    ("Tell me a story about a dragon. " * 4,),
    (PICTURE, "What is that?"),
    (SOUND, "What do you hear?"),
    (CLIP, "What happens?"),
    ("Both: ", OTHER_PICTURE, SOUND, "And?"),
    (PICTURE, OTHER_PICTURE, "Which?"),
    ("你好! ", LONG_SOUND),
)
"""Texts, pictures (height, width, 3), clips (frames, height, width, 3) and sounds at 16 kHz."""


class Reference:
    """transformers' own `generate`, all questions in one batch.

    Of a batch without padding transformers 5.24 drops the attention mask, and with it what the talker's `forward` does
    where there is one: the begin of codes is not added to the prompt, and positions have one axis. With a prompt that
    is padded each row is what the model's authors wrote.
    """

    def __init__(self, folder: str) -> None:
        self.model: Any = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._images: Any = transformers.AutoImageProcessor.from_pretrained(folder)
        self._sound: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
        self._codes: list[list[int]] = []
        self.begins: dict[str, torch.Tensor] = {}
        """What the talker's decoder was given first: embeddings, positions and mask."""
        self.model.token2wav.forward = self._take_codes
        handle = self.model.talker.model.register_forward_pre_hook(self._take_begin, with_kwargs=True)
        self.answers = self._generate()
        handle.remove()

    def _take_codes(self, code: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self._codes.append(code[0].tolist())
        return torch.zeros(2)

    def _take_begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not self.begins:
            self.begins = {name: kwargs[name] for name in ("inputs_embeds", "position_ids", "attention_mask")}

    def _inputs(self) -> dict[str, Any]:
        """Return what `generate` takes, made as the model's own processor makes it."""
        parts = [part for question in QUESTIONS for part in question if not isinstance(part, str)]
        pictures = [Pillow.fromarray(part) for part in parts if part.ndim == 3]
        sounds = [part for part in parts if part.ndim == 1]
        [clip] = [part for part in parts if part.ndim == 4]
        seen = self._images(pictures, return_tensors="pt")
        heard = self._sound(
            sounds, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        frames = heard["attention_mask"].sum(-1)
        counts = {
            1: iter((((frames - 1) // 2 + 1 - 2) // 2 + 1).tolist()),
            3: iter((seen["image_grid_thw"].prod(-1) // 4).tolist()),
            4: iter([2 * 4 * 4 // 4]),
        }
        texts = ["".join(self._written(part, counts) for part in question) for question in QUESTIONS]
        whole = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
        return {
            **self._tokenizer(whole, return_tensors="pt", padding=True),
            # By these names: else they would be given to the talker too, which takes none.
            "thinker_pixel_values": seen["pixel_values"],
            "thinker_pixel_values_videos": torch.from_numpy(self._patches(clip)),
            "image_grid_thw": seen["image_grid_thw"],
            "video_grid_thw": torch.tensor([[2, 4, 4]]),
            "video_second_per_grid": torch.tensor([2 * 0.5]),
            "input_features": heard["input_features"],
            "feature_attention_mask": heard["attention_mask"],
        }

    def _written(self, part: Any, counts: dict[int, Iterator[int]]) -> str:
        if isinstance(part, str):
            return part
        begin, pad, end = {
            1: ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
            3: ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
            4: ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
        }[part.ndim]
        return begin + pad * next(counts[part.ndim]) + end

    def _patches(self, clip: np.ndarray) -> np.ndarray:
        """Return a clip's patches: the layout of Qwen2-VL's processor, written out for one that needs no resizing."""
        frames = (clip / 255 - np.array(self._images.image_mean)) / np.array(self._images.image_std)
        split = frames.transpose(0, 3, 1, 2).reshape(2, 2, 3, 2, 2, 14, 2, 2, 14)
        return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(32, -1).astype(np.float32)

    def _generate(self) -> list[tuple[list[int], list[int]]]:
        inputs = self._inputs()
        ids, _ = self.model.generate(
            **inputs,
            speaker="Ethan",
            thinker_max_new_tokens=NUM_TOKENS,
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_min_new_tokens=MIN_CODES,
            talker_max_new_tokens=NUM_CODES,
            talker_eos_token_id=[tiny_omni.PAD, tiny_omni.END],
        )
        texts = ids[:, inputs["input_ids"].shape[1] :].tolist()
        return [(_to_end(text), codes) for text, codes in zip(texts, self._codes, strict=True)]


def _to_end(ids: list[int]) -> list[int]:
    """Return a row of a batch without what comes after its end."""
    end = tiny_omni.SPECIALS.index("<|im_end|>")
    return ids[: ids.index(end) + 1] if end in ids else ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_omni.qwen2_5(tmp_path_factory.mktemp("qwen2_5"))


@pytest.fixture(scope="module")
def reference(folder: str) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def staged(folder: str) -> Iterator[Staged]:
    thinker = make_engine(OmniThinker, {"model": folder, "prefill_chunk": 16, "context_length": 512})
    talker = make_engine(OmniTalker, {"model": folder, "prefill_chunk": 24, "context_length": 512})
    yield Staged(thinker, talker, voice="Ethan", num_tokens=NUM_TOKENS, min_codes=MIN_CODES, num_codes=NUM_CODES)
    thinker.close()
    talker.close()


@pytest.mark.parametrize("index", range(len(QUESTIONS)))
def test_alone_it_says_what_generate_says(staged: Staged, reference: Reference, index: int) -> None:
    [answer] = staged.ask(QUESTIONS[index])

    assert (answer.token_ids, answer.codes) == reference.answers[index]
    assert answer.was_early


def test_eight_at_once_say_what_each_says_alone(staged: Staged, reference: Reference) -> None:
    answers = staged.ask(*QUESTIONS)

    assert [(answer.token_ids, answer.codes) for answer in answers] == reference.answers


def test_questions_have_different_answers(reference: Reference) -> None:
    assert len({tuple(ids) for ids, _ in reference.answers}) >= 7
    assert len({tuple(codes) for _, codes in reference.answers}) == 8


# --- sound --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocoder(reference: Reference) -> Qwen25Vocoder:
    return Qwen25Vocoder(reference.model.token2wav, reference.model.speaker_map)


def whole(reference: Reference, codes: torch.Tensor, seed: int) -> torch.Tensor:
    """Return what the model itself makes of codes."""
    speaker = reference.model.speaker_map["Ethan"]
    torch.manual_seed(seed)
    arguments = {"conditioning": speaker["cond"], "reference_mel": speaker["ref_mel"]}
    return type(reference.model.token2wav).forward(reference.model.token2wav, codes.T, **arguments)


def in_pieces(vocoder: Qwen25Vocoder, codes: torch.Tensor, seed: int, size: int) -> torch.Tensor:
    with torch.inference_mode():
        stream = vocoder.begin("Ethan", seed)
        pieces = [stream.decode(codes[i : i + size], is_last=False) for i in range(0, len(codes), size)]
        return torch.cat([*pieces, stream.decode(None, is_last=True)])


@pytest.mark.parametrize("num_codes", [1, 24, 75])
def test_sound_in_pieces_is_the_whole_sound(vocoder: Qwen25Vocoder, reference: Reference, num_codes: int) -> None:
    codes = torch.randint(0, tiny_omni.CODES, (num_codes, 1), generator=torch.Generator().manual_seed(num_codes))

    sound = in_pieces(vocoder, codes, 7, 5)

    assert len(sound) == num_codes * 480
    assert sound.std() > 0.01
    assert (sound - whole(reference, codes, 7)).abs().max() < 1e-4


def test_sound_is_the_same_whatever_pieces_codes_come_in(vocoder: Qwen25Vocoder) -> None:
    codes = torch.randint(0, tiny_omni.CODES, (50, 1), generator=torch.Generator().manual_seed(1))

    assert torch.equal(in_pieces(vocoder, codes, 7, 1), in_pieces(vocoder, codes, 7, 50))


# --- conversions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 3, 4, 5])
def test_talker_begins_as_generate_begins(staged: Staged, reference: Reference, index: int) -> None:
    [answer] = staged.ask(QUESTIONS[index])
    rows, prompt = answer.thinker_rows, answer.prompt_tokens
    talker = reference.model.talker
    speaker = reference.model.speaker_map["Ethan"]
    with torch.inference_mode():
        begin = reference.model.thinker.get_input_embeddings()(torch.tensor(speaker["bos_token"]))
        codec = talker.model.embed_tokens(torch.tensor([tiny_omni.PAD, tiny_omni.BEGIN]))
        found = talker.thinker_to_talker_proj(talker_rows(rows[: prompt.shape[1] + 1], begin, codec))

    length = len(found)
    assert (found - reference.begins["inputs_embeds"][index, -length:]).abs().max() < 1e-4
    assert torch.equal(talker_positions(prompt[1:].long()), reference.begins["position_ids"][-3:, index, -length:])


def test_sound_comes_to_as_many_tokens_as_the_encoder_says(reference: Reference) -> None:
    family = Qwen25(reference.model.config)
    lengths = torch.arange(3, 1000)
    _, tokens = reference.model.thinker.model.audio_tower._get_feat_extract_output_lengths(lengths)

    assert [family.num_audio_tokens(length) for length in lengths.tolist()] == tokens.tolist()


def test_clip_of_one_picture_has_its_patches() -> None:
    picture = torch.randn(6, 3, 1, 5).expand(6, 3, 2, 5).reshape(6, 30)

    assert torch.equal(clip_patches(torch.stack([picture] * 4), 2), picture.repeat(2, 1))
