"""Qwen2.5-Omni: what its parts send each other, and its talker.

The talker reads, for each token of the thinker, the sum of its embedding and its last state, of pictures and sound the
state alone. It adds the embedding of its own previous code to each row. Facts from transformers'
``Qwen2_5OmniForConditionalGeneration.generate``, against which all of this is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from adapters.omni.family import Family, Seen, thinker_embeddings
from adapters.omni.qwen2_5_vocoder import Qwen25Vocoder
from adapters.omni.talking import Beginning, TalkerModel
from adapters.packed_batch import KvPool
from adapters.packed_decoder import PackedDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.omni.vocoder import Vocoder
    from adapters.token_choice import TokenChoice
    from adapters.transformers_model import ModelLoader


class Qwen25(Family):
    """Qwen2.5-Omni."""

    classes: ClassVar[dict[str, str]] = {
        "thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
        "talker": "Qwen2_5OmniTalkerForConditionalGeneration",
        "token2wav": "Qwen2_5OmniToken2WavModel",
    }
    pads_audio: ClassVar[bool] = True
    is_recordable: ClassVar[bool] = True

    def num_audio_tokens(self, num_frames: int) -> int:
        """Return the tokens that so many spectrogram frames of one sound come to: two strides of two."""
        return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1

    def see(self, model: Any, pixels: torch.Tensor, grids: torch.Tensor, *, is_video: bool) -> Seen:
        """Return what a thinker's eyes make of patches."""
        import torch

        look = model.model.get_video_features if is_video else model.model.get_image_features
        return Seen(torch.cat(list(look(pixels, grids, return_dict=True).pooler_output)))

    def sent_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, states: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the last states, and for tokens of text their embeddings added."""
        del kept
        return states + embeddings.masked_fill(self.is_media(ids)[:, None], 0)

    def talker(self, loader: ModelLoader, num_slots: int, context_length: int | None) -> TalkerModel:
        """Load the talker.

        Raises:
            StartFailed: it can't be.
        """
        self.check_talker(self.talker_config.embedding_size)
        return Qwen25Talker(self, loader, num_slots, context_length)

    def vocoder(self, loader: ModelLoader) -> Vocoder:
        """Load the token2wav.

        Raises:
            StartFailed: it can't be.
        """
        return Qwen25Vocoder(self.load_part(loader, "token2wav").float(), load_speakers(loader))


def load_speakers(loader: ModelLoader) -> dict[str, dict[str, Any]]:
    """Return the voices: for each the token that its speech begins with, a vector and a spectrogram.

    Raises:
        StartFailed: the file isn't there or can't be read.
    """
    import torch
    from transformers.utils.hub import cached_file

    try:
        file: Any = cached_file(loader.folder, "spk_dict.pt")
        speakers: dict[str, dict[str, Any]] = torch.load(file, weights_only=True, map_location=loader.device)
    except (OSError, ValueError, RuntimeError) as error:
        raise loader.refused(f"its voices can't be read from spk_dict.pt: {str(error)[:200]}") from error
    if not speakers:
        raise loader.refused("its spk_dict.pt has no voice")
    return speakers


def talker_rows(prompt_rows: torch.Tensor, text_begin: torch.Tensor, codec_begin: torch.Tensor) -> torch.Tensor:
    """Return what the talker reads before its first code, not yet projected: (n + 2, width).

    Args:
        prompt_rows: of the prompt, and the first of the reply: (n + 1, width).
        text_begin: the thinker's embedding of the voice's first token: (width,).
        codec_begin: the talker's embeddings of its pad and its begin codes: (2, width).
    """
    import torch

    rows = torch.cat([prompt_rows[:-1], text_begin[None], prompt_rows[-1:]])
    return torch.cat([rows[:-2], rows[-2:] + codec_begin])


def talker_positions(prompt: torch.Tensor) -> torch.Tensor:
    """Return the positions of the prompt, (3, n), and of two tokens after it: (3, n + 2)."""
    import torch

    after = prompt.max() + torch.arange(1, 3, device=prompt.device)
    return torch.cat([prompt, after.expand(3, 2)], dim=1)


class Qwen25Talker(TalkerModel):
    """The talker: one code a frame, 50 frames a second."""

    def __init__(self, family: Qwen25, loader: ModelLoader, num_slots: int, context_length: int | None) -> None:
        import torch

        config: Any = family.talker_config
        speakers = load_speakers(loader)
        self.voices = tuple(speakers)
        self.model = family.load_part(loader, "talker")
        self.context_length = loader.context_length(self.model, context_length)
        self.decoder = PackedDecoder(self.model.model, KvPool(num_slots, self.context_length))
        self.num_codebooks, self.frame_rate_hz = 1, 50.0
        pad, begin = config.tts_codec_pad_token_id, config.tts_codec_start_token_id
        self.history = (config.tts_codec_mask_token_id, pad, begin)
        self.ends = frozenset({pad, config.tts_codec_end_token_id})
        self.suppressed = torch.zeros(config.vocab_size, dtype=torch.bool, device=loader.device)
        self.suppressed[begin] = True
        ids = [config.tts_text_end_token_id, config.tts_text_pad_token_id]
        ids += [int(speaker["bos_token"]) for speaker in speakers.values()]
        embedded = thinker_embeddings(loader, ids).to(self.model.dtype)
        self.end, self.pad = embedded[:2]
        self._text_begin = dict(zip(self.voices, embedded[2:], strict=True))
        with torch.inference_mode():
            self._codec_begin = self.model.model.embed_tokens(torch.tensor([pad, begin], device=loader.device))

    def begin(self, rows: torch.Tensor, prompt: torch.Tensor, voice: str) -> Beginning:
        """Return the prompt's rows, the voice's first token and the reply's first row, projected."""
        found = talker_rows(rows, self._text_begin[voice], self._codec_begin)
        return Beginning(self.model.thinker_to_talker_proj(found), talker_positions(prompt[1:]))

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of codes after states."""
        return self.model.codec_head(states).float()

    def frames(
        self, states: torch.Tensor, codes: Sequence[int], choices: Sequence[Sequence[TokenChoice]], *, is_exact: bool
    ) -> list[list[int]]:
        """Return the codes themselves."""
        del states, choices, is_exact
        return [[code] for code in codes]

    def embed(self, frames: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the sums of the codes' embeddings and the rows, projected."""
        return self.model.thinker_to_talker_proj(self.model.model.embed_tokens(frames[:, 0]) + rows)
