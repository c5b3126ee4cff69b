"""Qwen3-Omni (mixture of experts): what its parts send each other, and its talker.

The talker reads the user's turns, of text the thinker's embeddings and of pictures and sound the states of a middle
layer, each through a projection of its own; then a frame of marks around the reply's first token. Each of its tokens
is the first of a frame's codes; a small decoder says the others. Facts from transformers'
``Qwen3OmniMoeForConditionalGeneration.generate``, against which all of this is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from adapters.omni.family import Family, Seen, thinker_embeddings
from adapters.omni.qwen3_vocoder import Qwen3Vocoder
from adapters.omni.talking import Beginning, TalkerModel
from adapters.packed_batch import KvPool, cache_argument, with_filling
from adapters.packed_decoder import PackedDecoder
from omni_bus.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.omni.vocoder import Vocoder
    from adapters.token_choice import TokenChoice
    from adapters.transformers_model import ModelLoader

NUM_SUPPRESSED = 1024
"""Codes at the end of the talker's vocabulary that are marks; only the end of speech is ever said."""

NUM_HEAD = 3
"""Tokens of the assistant's turn before its text: its begin, the role, a new line."""

WINDOW = 100
"""Spectrogram frames that the ears hear at once, and the tokens that a whole window comes to."""
WINDOW_TOKENS = 13


class Qwen3(Family):
    """Qwen3-Omni."""

    classes: ClassVar[dict[str, str]] = {
        "thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
        "talker": "Qwen3OmniMoeTalkerForConditionalGeneration",
        "code2wav": "Qwen3OmniMoeCode2Wav",
    }
    pads_audio: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kept_layer = self.talker_config.accept_hidden_layer - 1

    def load_part(self, loader: ModelLoader, part: str) -> Any:
        """Load one part of a checkpoint; see `Family.load_part`."""
        _let_experts_be_read(self.classes["talker"], self.config.model_type)
        return super().load_part(loader, part)

    def num_audio_tokens(self, num_frames: int) -> int:
        """Return the tokens that so many spectrogram frames of one sound come to: three strides of two a window."""
        rest = num_frames % WINDOW
        for _ in range(3):
            rest = (rest - 1) // 2 + 1
        return rest + num_frames // WINDOW * WINDOW_TOKENS

    def see(self, model: Any, pixels: torch.Tensor, grids: torch.Tensor, *, is_video: bool) -> Seen:
        """Return what a thinker's eyes make of patches."""
        import torch

        look = model.model.get_video_features if is_video else model.model.get_image_features
        seen = look(pixels, grids, return_dict=True)
        deeper = [torch.cat(list(layer)) for layer in seen.deepstack_features]
        return Seen(torch.cat(list(seen.pooler_output)), deeper)

    def sent_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, states: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the embeddings of text, and the middle layer's states of pictures and sound."""
        import torch

        assert kept is not None
        del states
        return torch.where(self.is_media(ids)[:, None], kept, embeddings)

    def talker(self, loader: ModelLoader, num_slots: int, context_length: int | None) -> TalkerModel:
        """Load the talker.

        Raises:
            StartFailed: it can't be.
        """
        self.check_talker(self.talker_config.thinker_hidden_size)
        return Qwen3Talker(self, loader, num_slots, context_length)

    def vocoder(self, loader: ModelLoader) -> Vocoder:
        """Load the code2wav.

        Raises:
            StartFailed: it can't be.
        """
        return Qwen3Vocoder(self.load_part(loader, "code2wav"))


def _let_experts_be_read(class_name: str, model_type: str) -> None:
    """Have a class that is loaded by itself read experts, which checkpoints keep one by one, as all of it does."""
    from transformers import conversion_mapping

    if conversion_mapping.get_checkpoint_conversion_mapping(class_name) is None:
        whole = conversion_mapping.get_checkpoint_conversion_mapping(model_type)
        if whole is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(class_name, whole)


def user_tokens(ids: torch.Tensor, turn_begin: int, user: int) -> torch.Tensor:
    """Return which tokens of a prompt are of the user's turns, marks included: bool, (n,)."""
    import torch

    at = torch.arange(len(ids), device=ids.device)
    begins = torch.where(ids == turn_begin, at, -1).cummax(0).values.clamp_min(0)
    return ids[(begins + 1).clamp_max(len(ids) - 1)] == user


def assistant_begin(ids: torch.Tensor, turn_begin: int, assistant: int) -> int:
    """Return where the last turn of the assistant begins.

    Raises:
        BadInput: there is none, or it is cut short.
    """
    found = ((ids[:-1] == turn_begin) & (ids[1:] == assistant)).nonzero().flatten().tolist()
    if not found or len(ids) - found[-1] < NUM_HEAD:
        raise BadInput(
            "messages: no turn of the assistant to speak in (allowed: with one at the end)", field="messages"
        )
    return found[-1]


def kept_positions(positions: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    """Return the positions that some tokens have when the others are left out.

    Args:
        positions: of all tokens, (3, n); each run of kept ones begins with a token of text.
        is_kept: bool, (n,).

    Returns:
        (3, kept).
    """
    import torch

    parts: list[torch.Tensor] = []
    following = 0.0
    edges = torch.diff(is_kept.int(), prepend=is_kept.new_zeros(1).int(), append=is_kept.new_zeros(1).int())
    begins, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    for begin, end in zip(begins, ends, strict=True):
        run = positions[:, begin:end]
        parts.append(run - run[0, 0] + following)
        following = float(parts[-1].max()) + 1
    return torch.cat(parts, dim=1) if parts else positions[:, :0]


class Qwen3Talker(TalkerModel):
    """The talker: 16 codes a frame, 12.5 frames a second."""

    def __init__(self, family: Qwen3, loader: ModelLoader, num_slots: int, context_length: int | None) -> None:
        import torch

        self._family = family
        whole: Any = family.config
        config: Any = family.talker_config
        self._speakers: dict[str, int] = dict(config.speaker_id)
        self.voices = tuple(self._speakers)
        self.model = family.load_part(loader, "talker")
        self._predictor: Any = self.model.code_predictor
        self._cache_argument = cache_argument(self._predictor)
        self.context_length = loader.context_length(self.model, context_length)
        self.decoder = PackedDecoder(self.model.model, KvPool(num_slots, self.context_length))
        self.num_codebooks = int(config.num_code_groups)
        self.frame_rate_hz = 12.5
        self.history = ()
        self.ends = frozenset({config.codec_eos_token_id})
        size = config.text_config.vocab_size
        self.suppressed = torch.zeros(size, dtype=torch.bool, device=loader.device)
        self.suppressed[size - NUM_SUPPRESSED :] = True
        self.suppressed[config.codec_eos_token_id] = False
        ids = [whole.tts_eos_token_id, whole.tts_pad_token_id, whole.tts_bos_token_id]
        self.end, self.pad, self._begin = thinker_embeddings(loader, ids).to(self.model.dtype)

    def begin(self, rows: torch.Tensor, prompt: torch.Tensor, voice: str) -> Beginning:
        """Return the user's turns, the assistant's head, marks, and the reply's first row."""
        import torch

        whole: Any = self._family.config
        ids, positions = prompt[0].long(), prompt[1:]
        at = assistant_begin(ids, whole.im_start_token_id, whole.assistant_token_id)
        is_user = user_tokens(ids, whole.im_start_token_id, whole.user_token_id)
        is_user = is_user & (torch.arange(len(ids), device=ids.device) < at)
        own = kept_positions(positions, is_user)
        text = torch.cat(
            [rows[at : at + NUM_HEAD], self.pad.expand(4, -1), self._begin[None], rows[at + NUM_HEAD][None]]
        )
        marked = self.model.text_projection(text)
        marks = self.model.model.codec_embedding(torch.tensor(self._marks(voice), device=ids.device))
        marked = torch.cat([marked[:NUM_HEAD], marked[NUM_HEAD:] + marks])
        first = float(own.max()) + 1 if own.shape[1] else 0.0
        after = first + torch.arange(len(marked), device=ids.device, dtype=positions.dtype)
        return Beginning(
            torch.cat([self._of_user(rows[:-1][is_user], ids[is_user]), marked]),
            torch.cat([own, after.expand(3, -1)], dim=1),
            rows[at + NUM_HEAD + 1 :],
        )

    def _of_user(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        import torch

        is_media = self._family.is_media(ids)[:, None]
        return torch.where(is_media, self.model.hidden_projection(rows), self.model.text_projection(rows))

    def _marks(self, voice: str) -> list[int]:
        config: Any = self._family.talker_config
        return [
            config.codec_nothink_id,
            config.codec_think_bos_id,
            config.codec_think_eos_id,
            self._speakers[voice],
            config.codec_pad_id,
            config.codec_bos_id,
        ]

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of first codes after states."""
        return self.model.codec_head(states).float()

    def frames(
        self, states: torch.Tensor, codes: Sequence[int], choices: Sequence[Sequence[TokenChoice]], *, is_exact: bool
    ) -> list[list[int]]:
        """Return whole frames: the small decoder says the other codes one after another."""
        import torch
        from transformers import DynamicCache

        frames = [[code] for code in codes]
        device = states.device
        first = self.model.model.codec_embedding(torch.tensor(codes, device=device))
        given: dict[str, Any] = {"inputs_embeds": with_filling(torch.stack([states, first], dim=1), is_exact=is_exact)}
        cache = DynamicCache(config=self._predictor.config)
        for step in range(self.num_codebooks - 1):
            found = self._predictor(**given, generation_steps=step, use_cache=True, **{self._cache_argument: cache})
            logits = found.logits[:, -1].float().cpu()
            for frame, row, [choice] in zip(frames, logits, choices, strict=False):
                frame.append(choice.choose(row))
            last = torch.tensor([[frame[-1]] for frame in frames], device=device)
            given = {"input_ids": with_filling(last, is_exact=is_exact)}
        return frames

    def embed(self, frames: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the sums of the codes' embeddings and the rows, projected."""
        summed = self.model.model.codec_embedding(frames[:, 0])
        for group, table in enumerate(self._predictor.get_input_embeddings(), start=1):
            summed = summed + table(frames[:, group])
        return summed + self.model.text_projection(rows)
