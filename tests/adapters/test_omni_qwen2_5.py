"""Qwen2.5-Omni in stages against transformers' own `generate`, on the same tiny checkpoint with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from omni_reference import (  # type: ignore[import-not-found] (put on the path above)
    MIN_CODES,
    NUM_CODES,
    NUM_TOKENS,
    Inputs,
    to_end,
)
from staged import Staged  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.media import clip_patches
from adapters.omni.qwen2_5 import Qwen25, talker_positions, talker_rows
from adapters.omni.qwen2_5_flow import fitting, powers_of_two
from adapters.omni.qwen2_5_vocoder import Qwen25Vocoder
from adapters.omni.talker import OmniTalker
from adapters.omni.thinker import OmniThinker
from adapters.omni.vocoder import NewCodes
from omni_bus.testing import make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


class Reference:
    """transformers' own `generate`, all questions in one batch.

    Of a batch without padding transformers 5.24 drops the attention mask, and with it what the talker's `forward` does
    where there is one: the begin of codes is not added to the prompt, and positions have one axis. With a prompt that
    is padded each row is what the model's authors wrote.
    """

    def __init__(self, folder: str) -> None:
        self.model: Any = transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._inputs = Inputs(folder, 14, lambda n: ((n - 1) // 2 + 1 - 2) // 2 + 1, {"padding": "max_length"})
        self.questions = self._inputs.questions
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

    def _generate(self) -> list[tuple[list[int], list[int]]]:
        # By this name: else pixels would be given to the talker too, which takes none.
        inputs = self._inputs.for_generate("thinker_pixel_values", self.questions)
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
        return [(to_end(text), codes) for text, codes in zip(texts, self._codes, strict=True)]


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


@pytest.mark.parametrize("index", range(8))
def test_alone_it_says_what_generate_says(staged: Staged, reference: Reference, index: int) -> None:
    [answer] = staged.ask(reference.questions[index])

    assert (answer.token_ids, answer.codes) == reference.answers[index]
    assert answer.was_early


def test_eight_at_once_say_what_each_says_alone(staged: Staged, reference: Reference) -> None:
    answers = staged.ask(*reference.questions)

    assert [(answer.token_ids, answer.codes) for answer in answers] == reference.answers


def test_passes_of_fixed_rows_say_what_generate_says(staged: Staged, reference: Reference) -> None:
    """As on a GPU: fewer rows than requests, so that each step has several passes."""
    engines: tuple[Any, Any] = staged.thinker.engine, staged.talker.engine
    decoders = engines[0]._thinking.decoder, engines[1]._talker.decoder
    for decoder in decoders:
        decoder.record(3)
    try:
        answers = staged.ask(*reference.questions)
    finally:
        for decoder in decoders:
            decoder._num_rows = 0

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


def draw_codes(num_codes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, tiny_omni.CODES, (num_codes, 1), generator=torch.Generator().manual_seed(seed))


def in_pieces(vocoder: Qwen25Vocoder, codes: torch.Tensor, seed: int, size: int) -> torch.Tensor:
    with torch.inference_mode():
        stream = vocoder.begin("Ethan", seed)
        pieces = [stream.decode(codes[i : i + size], is_last=False) for i in range(0, len(codes), size)]
        return torch.cat([*pieces, stream.decode(None, is_last=True)])


@pytest.mark.parametrize("num_codes", [1, 24, 75])
def test_sound_in_pieces_is_the_whole_sound(vocoder: Qwen25Vocoder, reference: Reference, num_codes: int) -> None:
    codes = draw_codes(num_codes, num_codes)

    sound = in_pieces(vocoder, codes, 7, 5)

    assert len(sound) == num_codes * 480
    assert sound.std() > 0.01
    assert (sound - whole(reference, codes, 7)).abs().max() < 1e-4


def test_sound_is_the_same_whatever_pieces_codes_come_in(vocoder: Qwen25Vocoder) -> None:
    codes = draw_codes(50, 1)

    assert torch.equal(in_pieces(vocoder, codes, 7, 1), in_pieces(vocoder, codes, 7, 50))


def test_sound_comes_with_the_codes_that_were_missing(vocoder: Qwen25Vocoder) -> None:
    stream = vocoder.begin("Ethan", 1)
    with torch.inference_mode():
        for _ in range(2):
            assert len(stream.decode(draw_codes(stream.num_missing - 1, 1), is_last=False)) == 0
            assert stream.num_missing == 1
            assert len(stream.decode(draw_codes(1, 1), is_last=False)) > 0


def test_streams_decoded_together_sound_as_each_alone(vocoder: Qwen25Vocoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several voices and lengths; the second begins when the first has sounded, the fourth never says a code."""
    codes = [draw_codes(num_codes, num_codes) for num_codes in (50, 37, 14)]
    voices = ("Ethan", "Chelsie", "Ethan")
    with torch.inference_mode():
        alone = [
            vocoder.begin(voice, seed).decode(each, is_last=True)
            for seed, (voice, each) in enumerate(zip(voices, codes, strict=True))
        ]
        monkeypatch.setattr(vocoder, "max_together", 8)
        streams = [vocoder.begin(voice, seed) for seed, voice in enumerate((*voices, "Ethan"))]
        [first] = vocoder.decode([NewCodes(streams[0], codes[0][:40], is_last=False)])
        found = vocoder.decode(
            [
                NewCodes(streams[0], codes[0][40:], is_last=True),
                NewCodes(streams[1], codes[1], is_last=True),
                NewCodes(streams[2], codes[2], is_last=True),
                NewCodes(streams[3], None, is_last=True),
            ]
        )

    assert len(first) > 0
    assert len(found[3]) == 0
    for sound, expected in zip([torch.cat([first, found[0]]), *found[1:3]], alone, strict=True):
        assert (sound - expected).abs().max() < 1e-4


def test_nothing_in_a_step_of_the_solver_waits_for_the_device(vocoder: Qwen25Vocoder) -> None:
    """Tensors without contents: whatever asks for a number of theirs fails, as it would while a GPU records."""
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        step, ends = torch.zeros(1, dtype=torch.long), torch.full((2,), 48)
        [state] = vocoder.flow._advance(step, torch.zeros(2, 48, 80), torch.zeros(4, 48, 32), ends)

    assert state.shape == (2, 48, 80)


@pytest.mark.parametrize(
    ("windows", "frames", "shape"),
    [(1, 48, (1, 72)), (2, 72, (2, 72)), (3, 73, (4, 168)), (5, 10, (8, 72)), (9, 72, (9, 72)), (1, 300, (1, 300))],
)
def test_smallest_recorded_pass_that_holds_all_is_taken(windows: int, frames: int, shape: tuple[int, int]) -> None:
    recorded = [(num, length) for length in (168, 72) for num in powers_of_two(8)]

    assert fitting(recorded, windows, frames) == shape


def test_numbers_of_windows_are_powers_of_two_up_to_the_most() -> None:
    assert [powers_of_two(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


# --- conversions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 3, 4, 5])
def test_talker_begins_as_generate_begins(staged: Staged, reference: Reference, index: int) -> None:
    [answer] = staged.ask(reference.questions[index])
    rows, prompt = answer.thinker_rows, answer.prompt_tokens
    talker = reference.model.talker
    speaker = reference.model.speaker_map["Ethan"]
    with torch.inference_mode():
        begin = reference.model.thinker.get_input_embeddings()(torch.tensor(speaker["bos_token"]))
        codec = talker.model.embed_tokens(torch.tensor([tiny_omni.PAD, tiny_omni.BEGIN]))
        found = talker.thinker_to_talker_proj(talker_rows(rows[: prompt.shape[1] + 1], begin, codec))

    length = len(found)
    assert (found - reference.begins["inputs_embeds"][index, -length:]).abs().max() < 1e-4
    assert torch.equal(talker_positions(prompt[1:]), reference.begins["position_ids"][-3:, index, -length:].float())


def test_sound_comes_to_as_many_tokens_as_the_encoder_says(reference: Reference) -> None:
    family = Qwen25(reference.model.config)
    lengths = torch.arange(3, 1000)
    _, tokens = reference.model.thinker.model.audio_tower._get_feat_extract_output_lengths(lengths)

    assert [family.num_audio_tokens(length) for length in lengths.tolist()] == tokens.tolist()


def test_clip_of_one_picture_has_its_patches() -> None:
    picture = torch.randn(6, 3, 1, 5).expand(6, 3, 2, 5).reshape(6, 30)

    assert torch.equal(clip_patches(torch.stack([picture] * 4), 2), picture.repeat(2, 1))
