"""What the three stages ask of an omni model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from omni_bus.errors import StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from adapters.omni.talking import TalkerModel
    from adapters.omni.vocoder import Vocoder
    from adapters.transformers_model import ModelLoader


class Seen(NamedTuple):
    """What a model's eyes make of pictures."""

    embeddings: torch.Tensor
    """(tokens, width), of all pictures in order."""
    deeper: Sequence[torch.Tensor] = ()
    """More of the same shape, added to the states after the first layers."""


class Family(ABC):
    """One kind of omni model.

    Args:
        config: of the whole model.
    """

    classes: ClassVar[dict[str, str]]
    """Parts of the model by their name in a checkpoint, and their classes in transformers."""

    pads_audio: ClassVar[bool]
    """Whether sound is filled up with silence to the longest that the feature extractor takes."""

    is_recordable: ClassVar[bool] = False
    """Whether a GPU can replay a pass of its decoders: nothing in them depends on numbers that only the GPU knows."""

    kept_layer: int | None = None
    """The layer of the thinker whose states are sent on beside the last one's; 0 is the first."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.thinker_config: Any = config.thinker_config
        self.talker_config: Any = config.talker_config
        thinker = self.thinker_config
        self.placeholders: dict[str, int] = {
            "images": thinker.image_token_id,
            "video": thinker.video_token_id,
            "audio": thinker.audio_token_id,
        }
        """Input ports, and the token that stands for each piece of what came on them."""

    @abstractmethod
    def num_audio_tokens(self, num_frames: int) -> int:
        """Return the tokens that so many spectrogram frames of one sound come to."""

    @abstractmethod
    def see(self, model: Any, pixels: torch.Tensor, grids: torch.Tensor, *, is_video: bool) -> Seen:
        """Return what a thinker's eyes make of patches."""

    @abstractmethod
    def sent_rows(
        self, ids: torch.Tensor, embeddings: torch.Tensor, states: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what the talker needs of each token of the thinker.

        Args:
            ids: the tokens, (T,).
            embeddings: what the thinker's first layer was given, (T, width).
            states: its last layer's, normed, (T, width).
            kept: those of `kept_layer`, (T, width).

        Returns:
            (T, width).
        """

    @abstractmethod
    def talker(self, loader: ModelLoader, num_slots: int, context_length: int | None) -> TalkerModel:
        """Load the talker.

        Raises:
            StartFailed: it can't be.
        """

    @abstractmethod
    def vocoder(self, loader: ModelLoader) -> Vocoder:
        """Load what makes sound of codes.

        Raises:
            StartFailed: it can't be.
        """

    def is_media(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which tokens stand for pictures, sound or video."""
        import torch

        return torch.isin(ids, torch.tensor(sorted(self.placeholders.values()), device=ids.device))

    def load_part(self, loader: ModelLoader, part: str) -> Any:
        """Load one part of a checkpoint.

        Raises:
            StartFailed: it isn't there, lacks weights, or has others than its configuration says.
        """
        import transformers

        said, _ = transformers.PretrainedConfig.get_config_dict(loader.folder)
        if not isinstance(said.get(f"{part}_config"), dict):  # else it would be as large as the published one
            raise loader.refused(f"its config.json has no object {part}_config")
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # of the weights of the other parts, none is expected
        try:
            return loader.weights(
                getattr(transformers, self.classes[part]),
                is_complete=True,
                config=getattr(self.config, f"{part}_config"),
                key_mapping={rf"^{part}\.": ""},
            )
        except RuntimeError as error:
            raise loader.refused(f"its {part} is not what its configuration says: {_first_lines(error)}") from error
        finally:
            transformers.logging.set_verbosity(verbosity)

    def check_talker(self, width: int) -> None:
        """Refuse a talker that reads states of another width than the thinker's.

        Raises:
            StartFailed: it does.
        """
        own = self.thinker_config.text_config.hidden_size
        if width != own:
            raise StartFailed(
                f"model: its talker reads states of width {width}, its thinker writes {own} (allowed: the same)",
                field="model",
            )


def thinker_embeddings(loader: ModelLoader, ids: Sequence[int]) -> torch.Tensor:
    """Return the thinker's embeddings of a few tokens, (tokens, width), without loading the others.

    Raises:
        StartFailed: the checkpoint has none.
    """
    import json
    from pathlib import Path

    import torch
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    names = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")
    quiet: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    index = cached_file(loader.folder, "model.safetensors.index.json", **quiet)
    files: dict[str, str] = {}
    if index is not None:
        files = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    for name in names:
        file = cached_file(loader.folder, files.get(name, "model.safetensors"), **quiet)
        if file is None:
            continue
        with safe_open(file, "pt") as weights:
            if name in weights.keys():  # noqa: SIM118 (no mapping)
                rows = weights.get_slice(name)
                return torch.cat([rows[id_ : id_ + 1] for id_ in ids]).to(loader.device)
    raise loader.refused(f"its checkpoint has none of {' and '.join(names)} as safetensors")


def _first_lines(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:300]
