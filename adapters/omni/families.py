"""The omni models that are known, by the type in their configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.omni.qwen2_5 import Qwen25
from adapters.omni.qwen3 import Qwen3

if TYPE_CHECKING:
    from adapters.omni.family import Family
    from adapters.transformers_model import ModelLoader

FAMILIES: dict[str, type[Family]] = {"qwen2_5_omni": Qwen25, "qwen3_omni_moe": Qwen3}
"""By ``model_type`` of a checkpoint's ``config.json``."""


def family_of(loader: ModelLoader) -> Family:
    """Return what tells a checkpoint's model from others.

    Raises:
        StartFailed: it can't be read, or is none of `FAMILIES`.
    """
    import transformers

    config: Any = loader.part("loading configuration", transformers.AutoConfig)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise loader.refused(f"it is of type '{config.model_type}' (allowed: {', '.join(sorted(FAMILIES))})")
    return family(config)
