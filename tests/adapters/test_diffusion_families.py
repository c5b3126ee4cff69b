"""Every family that is said to run does: alone it is the pipeline's own picture, beside others nearly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny_diffusion  # type: ignore[import-not-found] (put on the path above)
from drawn import begin_with, inputs_of, pixels_in, run  # type: ignore[import-not-found] (put on the path above)

from adapters.diffusion import media
from adapters.diffusion.engine import Diffusers
from adapters.diffusion.joining import JOINS
from adapters.model_rules import CLIPS, PICTURES
from omni_bus.testing import make_engine

if TYPE_CHECKING:
    from omni_bus.testing import Collected

diffusers: Any = tiny_diffusion.D

pytestmark = [
    pytest.mark.model,
    # Of diffusers, transformers and torch, at work on models of this size.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("name", tiny_diffusion.PIPELINES)
def test_family_draws_what_its_pipeline_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tiny_diffusion.PIPELINES[name]
    torch.manual_seed(0)
    tiny_diffusion.lively(sample.make()).save_pretrained(tmp_path)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    output = pipeline(
        prompt="a red cube",
        generator=torch.Generator().manual_seed(7),
        output_type="pil",
        **sample.call | begin_with(sample.inputs),
    )
    expected = np.stack([np.asarray(p) for p in (output.images if hasattr(output, "images") else output.frames[0])])

    engine = make_engine(Diffusers, {"model": str(tmp_path), "call": sample.call, "warm_up": False})
    red = ("a red cube", {"seed": 7})
    floats = _recorded(monkeypatch)
    try:
        [alone] = run(engine, red, inputs=inputs_of(sample.inputs))
        of_alone = np.concatenate([part.ravel() for part in floats])
        floats.clear()
        if not sample.inputs:  # variants have the same models; here the other begins later and ends later
            run(engine, red, ("a whale", {"seed": 8, "num_inference_steps": 5}))
            of_beside = np.concatenate([part.ravel() for part in floats])[: of_alone.size]
            assert np.abs(of_beside - of_alone).max() <= 1e-5 * np.abs(of_alone).max()
    finally:
        engine.close()

    assert np.array_equal(pixels_in(alone), expected)
    assert expected.std() > 5
    assert _phases(alone)[0] == "encode"
    assert _phases(alone).count("denoise") == getattr(pipeline, "num_timesteps", 3)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """Return a list that gets all pixels as they were before they became bytes."""
    floats: list[np.ndarray[Any, Any]] = []
    quantised = media.quantised

    def recorded(values: torch.Tensor) -> torch.Tensor:
        floats.append(values.float().numpy().copy())
        return quantised(values)

    monkeypatch.setattr(media, "quantised", recorded)
    return floats


def _phases(result: Collected) -> list[str]:
    return [payload.value["phase"] for payload in result.port("progress")]


def test_models_that_are_joined_are_diffusers() -> None:
    assert [name for name in JOINS if not hasattr(diffusers, name)] == []


def test_pipelines_that_are_served_by_name_are_those_that_run() -> None:
    joint = {"LTX2Pipeline"}  # video and sound together: in test_diffusion.py

    assert set(tiny_diffusion.PIPELINES) | joint == PICTURES | CLIPS
