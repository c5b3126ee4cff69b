"""Which file a ``--config`` means."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from omni_bus.cli.deployment import SHIPPED_CONFIGS, config_file, load_deployment, shipped_configs
from omni_bus.errors import ConfigError

TEXT = """[stages.llm]
adapter = "synthetic-text"
[pipelines.text]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(config: str | None):
    return load_deployment(argparse.Namespace(config=config, model=None, pipeline=None, overrides=[], insecure=False))


@pytest.mark.parametrize("name", sorted(file.stem for file in SHIPPED_CONFIGS.glob("*.toml")))
def test_shipped_one_is_found_by_name_from_anywhere(name: str) -> None:
    assert Path(config_file(name)).samefile(SHIPPED_CONFIGS / f"{name}.toml")


def test_no_name_means_the_voice_chat() -> None:
    assert Path(load(None).path).samefile(SHIPPED_CONFIGS / "voice_chat.toml")


def test_file_of_that_path_wins_over_a_shipped_one() -> None:
    Path("synthetic_text").write_text(TEXT)

    loaded = load("synthetic_text")

    assert (loaded.path, loaded.config.gateways) == ("synthetic_text", {})


def test_folder_of_that_name_is_not_meant() -> None:
    Path("synthetic_text").mkdir()

    assert load("synthetic_text").config.pipelines["text"].serve_as == "synthetic-text"


@pytest.mark.parametrize("config", ["voice_cat", "configs/voice_chat.toml"])
def test_missing_one_lists_those_that_ship(config: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config)

    assert caught.value.problems == (f"{config}: no such file (shipped ones, by name: {', '.join(shipped_configs())})",)


def test_missing_base_is_not_about_shipped_ones() -> None:
    Path("mine.toml").write_text('base = "nothing.toml"')

    with pytest.raises(ConfigError, match=r"^mine.toml:1: base: nothing.toml: no such file") as caught:
        load("mine.toml")

    assert "shipped" not in caught.value.message
