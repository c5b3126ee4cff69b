"""The default model, converted once for all tests of a run, and tiny models beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from adapters import smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator

SaveTiny: TypeAlias = Callable[[Any, Path], str]


def _ignore_report(phase: str, fraction: float) -> None:
    """Take a load's report."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The cache folder of engines; SmolLM2 is in it."""
    folder = str(tmp_path_factory.mktemp("cache"))
    smollm2.convert_once(folder, _ignore_report)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def save_tiny(cache: str) -> SaveTiny:
    """Saves a model with random weights and SmolLM2's tokenizer into a folder."""
    import torch
    import transformers

    def save(config: Any, folder: Path) -> str:
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(smollm2.folder_for(cache)).save_pretrained(folder)
        return str(folder)

    return save
