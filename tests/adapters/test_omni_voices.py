"""The voices of omni models, read off files that are not run."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from adapters.omni.voices import keys_of, voice_names

if TYPE_CHECKING:
    from pathlib import Path


def speaker(seed: int) -> dict[str, Any]:
    """What a published voice has."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "bos_token": 151872 + seed,
        "cond": torch.randn(1, 16, generator=generator),
        "ref_mel": torch.randn(1, 40, 80, generator=generator),
    }


@pytest.mark.parametrize("names", [("Chelsie", "Ethan"), ("One",), ("cond", "bos_token", "Ünï ﬂ")])
def test_saved_voices_are_listed_in_their_order(tmp_path: Path, names: tuple[str, ...]) -> None:
    torch.save({name: speaker(i) for i, name in enumerate(names)}, tmp_path / "spk_dict.pt")
    (tmp_path / "config.json").write_text('{"talker_config": {"hidden_size": 8}}')

    assert voice_names(str(tmp_path)) == names


def test_voices_of_the_configuration_are_listed(tmp_path: Path) -> None:
    talker = {"speaker_id": {"ethan": 2302, "chelsie": 2301}}
    (tmp_path / "config.json").write_text(json.dumps({"talker_config": talker}))

    assert voice_names(str(tmp_path)) == ("ethan", "chelsie")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        *(
            ("config.json", b'{"talker_config": {"speaker_id": %s}}' % value)
            for value in (b"3", b"null", b'"ethan"', b"[1, 2]", b'["ethan"]')
        ),
        ("spk_dict.pt", b"no archive"),
        ("spk_dict.pt", b""),
        ("other", b""),
    ],
)
def test_files_that_say_nothing_have_no_voices(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)

    assert voice_names(str(tmp_path)) == ()
    assert voice_names(str(tmp_path / "nothing")) == ()


class Evil:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (["touch", str(self._file)],)


def test_program_in_the_file_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps({"Ethan": Evil(mark), "Chelsie": OrderedDict(a=1)}, protocol=2)

    assert keys_of(data) == ("Ethan", "Chelsie")
    assert not mark.exists()


@pytest.mark.parametrize("value", [[1, 2], "text", 3, None])
def test_what_is_no_dictionary_has_no_keys(value: Any) -> None:
    with pytest.raises(ValueError, match="no dictionary"):
        keys_of(pickle.dumps(value, protocol=2))
