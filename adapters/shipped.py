"""Small models of our own that come with omni-bus, by name."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs" / "models"


def folder_of(model: str) -> Path:
    """Return the folder that a stage's ``model`` stands for, whether it is there or not.

    A folder of that name where the stage runs goes before a model that comes with omni-bus.
    """
    path = Path(model).expanduser()
    ours = FOLDER / model
    return ours if not path.exists() and ours.parent == FOLDER and ours.is_dir() else path
