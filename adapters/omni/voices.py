"""The voices of an omni model by name, read off its files without loading anything."""

from __future__ import annotations

import json
import pickletools
import zipfile
from typing import TYPE_CHECKING, Any

from adapters.model_memory import local_folder

if TYPE_CHECKING:
    from pathlib import Path

SPEAKERS = "spk_dict.pt"
"""Qwen2.5-Omni's voices: a dictionary by name, as torch saves it."""

_MAX_BYTES = 1 << 20
"""Of what a file says besides its tensors."""

_MARK = object()


def voice_names(model: str) -> tuple[str, ...]:
    """Return the names in the model's order; none where its files aren't here or say none.

    Args:
        model: its folder, or its name on the hub.
    """
    folder = local_folder(model)
    if folder is None:
        return ()
    try:
        talker = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("talker_config") or {}
        return tuple(talker["speaker_id"].keys()) if "speaker_id" in talker else _saved_names(folder / SPEAKERS)
    except (OSError, ValueError, TypeError, AttributeError, IndexError, KeyError, zipfile.BadZipFile):
        return ()  # the load refuses such files, and says why


def _saved_names(file: Path) -> tuple[str, ...]:
    """Return the keys of a dictionary that torch has saved."""
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in [*archive.namelist(), "data.pkl"] if name.endswith("data.pkl"))
        with archive.open(name) as data:
            return keys_of(data.read(_MAX_BYTES))


def keys_of(data: bytes) -> tuple[str, ...]:
    """Return the keys of a dictionary from the program that describes it.

    The program is read, never run: it could do anything. Of the objects that it makes only strings and dictionaries
    are told apart.

    Raises:
        ValueError: it is none, or describes no dictionary.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "BINPUT" | "LONG_BINPUT":
                memo[int(argument or 0)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument or 0)])
            case "SETITEM" | "SETITEMS":
                items = _popped(stack, 2 if opcode.name == "SETITEM" else None)
                if isinstance(stack[-1], dict):
                    stack[-1].update(dict.fromkeys(items[::2]))
            case "STOP":
                break
            case _:
                taken = opcode.stack_before
                if pickletools.markobject in taken:
                    _popped(stack, None)
                    taken = taken[: taken.index(pickletools.markobject)]
                _popped(stack, len(taken))
                made = argument if isinstance(argument, str) else None
                stack += [made] * len(opcode.stack_after)
    if len(stack) != 1 or not isinstance(stack[0], dict):
        raise ValueError("no dictionary")
    return tuple(key for key in stack[0] if isinstance(key, str))


def _popped(stack: list[Any], number: int | None) -> list[Any]:
    """Take so many objects from a stack, or all above the last mark and the mark."""
    if number is None:
        begin = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[begin + 1 :]
    else:
        begin = len(stack) - number
        items = stack[begin:]
    del stack[begin:]
    return items
