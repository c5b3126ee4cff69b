"""Files that a command is told to write."""

from __future__ import annotations

import os
from pathlib import Path

from omni_bus.errors import BadInput


def check_writable(path: str, option: str) -> None:
    """Refuse a file that could not be written, before the work is done.

    Raises:
        BadInput: names the option, the file and what is wrong with it.
    """
    directory = Path(path).parent
    if not directory.is_dir():
        raise BadInput(f"{option} {path}: there is no directory '{directory}'", field=option)
    if Path(path).is_dir():
        raise BadInput(f"{option} {path}: that is a directory, not a file", field=option)
    if not os.access(path if Path(path).exists() else directory, os.W_OK):
        raise BadInput(f"{option} {path}: no permission to write there", field=option)
