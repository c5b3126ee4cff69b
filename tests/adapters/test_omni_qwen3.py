"""Qwen3-Omni in stages against transformers' own `generate`, on the same tiny checkpoint with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

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

from adapters.omni.qwen3 import Qwen3, assistant_begin, kept_positions, user_tokens
from adapters.omni.qwen3_vocoder import Qwen3Vocoder
from adapters.omni.talker import OmniTalker
from adapters.omni.thinker import OmniThinker
from omni_bus.errors import BadInput
from omni_bus.testing import make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(240),
    # The talker's own `generate` says so of how the whole model calls it.
    pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning"),
]


def audio_tokens(frames: torch.Tensor) -> torch.Tensor:
    rest = frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // 100 * 13


class Reference:
    """transformers' own `generate`, one question at a time.

    In a batch with padding transformers 5.24 leaves the first codes of each row out of the repetition penalty, as many
    as its prompt has tokens of padding.
    """

    def __init__(self, folder: str) -> None:
        self.model: Any = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        # transformers 5.24 reads it there, where its own configuration has none, once a prompt has sound.
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config
        self._inputs = Inputs(folder, 16, audio_tokens, {"padding": True, "truncation": False})
        self.questions = self._inputs.questions
        self._codes = torch.zeros(0)
        self.begins: list[dict[str, torch.Tensor]] = []
        """What the talker's decoder was given first, by question."""
        self.chunked_decode = self.model.code2wav.chunked_decode
        self.model.code2wav.chunked_decode = self._take_codes
        handle = self.model.talker.model.register_forward_pre_hook(self._take_begin, with_kwargs=True)
        self.answers = [self._generate(question) for question in self.questions]
        handle.remove()

    def _take_codes(self, codes: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self._codes = codes
        return torch.zeros(len(codes), 1, codes.shape[-1] * 1920)

    def _take_begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["inputs_embeds"].shape[1] > 1:
            self.begins.append({"embeddings": kwargs["inputs_embeds"][0], "positions": kwargs["position_ids"][-3:, 0]})

    def _generate(self, question: tuple[Any, ...]) -> tuple[list[int], list[list[int]]]:
        inputs = self._inputs.for_generate("pixel_values", (question,))
        ids, _ = self.model.generate(
            **inputs,
            speaker="Ethan",
            thinker_max_new_tokens=NUM_TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=tiny_omni.SPECIALS.index("<|im_end|>"),
            talker_do_sample=False,
            talker_min_new_tokens=MIN_CODES,
            # The last token is never made a frame.
            talker_max_new_tokens=NUM_CODES + 1,
        )
        ids = getattr(ids, "sequences", ids)
        return to_end(ids[0, inputs["input_ids"].shape[1] :].tolist()), self._codes[0].T.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_omni.qwen3(tmp_path_factory.mktemp("qwen3"))


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


def test_questions_have_different_answers(reference: Reference) -> None:
    assert len({tuple(ids) for ids, _ in reference.answers}) >= 7
    assert len({str(codes) for _, codes in reference.answers}) == 8


# --- sound --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocoder(reference: Reference) -> Qwen3Vocoder:
    return Qwen3Vocoder(reference.model.code2wav)


def some_codes(num_frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_frames)
    return torch.randint(0, tiny_omni.CODES_3, (num_frames, tiny_omni.GROUPS_3), generator=generator)


def in_pieces(vocoder: Qwen3Vocoder, codes: torch.Tensor, size: int) -> torch.Tensor:
    with torch.inference_mode():
        stream = vocoder.begin("", 0)
        pieces = [stream.decode(codes[i : i + size], is_last=False) for i in range(0, len(codes), size)]
        return torch.cat([*pieces, stream.decode(None, is_last=True)])


@pytest.mark.parametrize("num_frames", [1, 12, 50])
def test_sound_in_pieces_is_the_whole_sound(vocoder: Qwen3Vocoder, reference: Reference, num_frames: int) -> None:
    codes = some_codes(num_frames)

    sound = in_pieces(vocoder, codes, 5)

    with torch.inference_mode():
        whole = reference.chunked_decode(codes.T[None])[0, 0]
    assert sound.shape == whole.shape
    assert sound.std() > 0.01
    assert (sound - whole).abs().max() < 1e-4


def test_sound_is_the_same_whatever_pieces_codes_come_in(vocoder: Qwen3Vocoder) -> None:
    assert torch.equal(in_pieces(vocoder, some_codes(30), 1), in_pieces(vocoder, some_codes(30), 30))


def test_sound_comes_with_the_frames_that_were_missing(vocoder: Qwen3Vocoder) -> None:
    stream = vocoder.begin("", 0)
    with torch.inference_mode():
        for _ in range(2):
            assert len(stream.decode(some_codes(stream.num_missing - 1), is_last=False)) == 0
            assert stream.num_missing == 1
            assert len(stream.decode(some_codes(1), is_last=False)) > 0


# --- conversions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 3, 4, 5])
def test_talker_begins_as_generate_begins(staged: Staged, reference: Reference, index: int) -> None:
    [answer] = staged.ask(reference.questions[index])
    talker: Any = staged.talker.engine
    prompt = answer.prompt_tokens
    with torch.inference_mode():
        found = talker._talker.begin(answer.thinker_rows[: prompt.shape[1] + 1], prompt, "ethan")

    assert (found.embeddings - reference.begins[index]["embeddings"]).abs().max() < 1e-4
    assert torch.equal(found.positions, reference.begins[index]["positions"].float())


def test_sound_comes_to_as_many_tokens_as_the_processor_says(reference: Reference) -> None:
    family = Qwen3(reference.model.config)

    assert [family.num_audio_tokens(n) for n in range(1, 1000)] == audio_tokens(torch.arange(1, 1000)).tolist()


def test_turns_are_found_by_their_marks() -> None:
    ids = torch.tensor(
        [1, 7, 50, 2, 1, 8, 51, 2, 1, 9, 52, 2, 1, 8, 53, 54, 2, 1, 9, 5]
    )  # 7 system, 8 user, 9 assistant

    assert user_tokens(ids, 1, 8).nonzero().flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 16]
    assert assistant_begin(ids, 1, 9) == 17
    with pytest.raises(BadInput, match="messages"):
        assistant_begin(ids[:19], 1, 9)


def test_tokens_that_are_left_out_leave_no_gap_in_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 2, 4, 5, 6, 7], [0, 1, 2, 2, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]).float()
    kept = torch.tensor([False, True, True, True, True, False, True, True])

    assert kept_positions(positions, kept).tolist() == [[0, 1, 1, 3, 4, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
