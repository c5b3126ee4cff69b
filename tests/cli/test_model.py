"""Deployments by a model's name: what ``check`` and ``up`` make of a folder, a hub name, and a third party's rule."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.model_rules import RULES
from omni_bus.cli import check, model
from omni_bus.cli.deployment import add_config_arguments, load_deployment, shipped_configs
from omni_bus.config.load import Loaded
from omni_bus.errors import ConfigError
from omni_bus.resolution import ModelRule

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FILES: dict[str, dict[str, Any]] = {
    "transformers-chat": {"config.json": LLAMA},
    "transformers-image-text": {
        "config.json": {"architectures": ["SmolVLMForConditionalGeneration"], "vision_config": {}}
    },
    "transformers-embedding": {
        "config.json": LLAMA,
        "modules.json": [{"type": "sentence_transformers.models.Normalize"}],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
    },
    "transformers-speech": {"config.json": {"model_type": "csm", "architectures": ["CsmForConditionalGeneration"]}},
    "transformers-vits": {"config.json": {"model_type": "vits", "architectures": ["VitsModel"]}},
    "transformers-whisper": {
        "config.json": {"architectures": ["WhisperForConditionalGeneration"]} | {"model_type": "whisper"}
    },
    "moshi": {"config.json": {"model_type": "moshi", "architectures": ["MoshiForConditionalGeneration"]}},
    "qwen2.5-omni": {
        "config.json": {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}
        | {"enable_audio_output": True}
    },
    "qwen3-omni": {
        "config.json": {"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    },
    "diffusers-image": {"model_index.json": {"_class_name": "PRXPixelPipeline"}},
    "diffusers-video": {"model_index.json": {"_class_name": "WanPipeline"}},
    "diffusers-audio": {"model_index.json": {"_class_name": "StableAudioPipeline"}},
}
"""What a checkpoint's folder holds, by the rule that serves it."""


def save(folder: Path, files: dict[str, Any]) -> str:
    for name, value in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    return str(folder)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    real = importlib.util.find_spec
    # As if all extras were installed: what is missing here is not what these tests are about.
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: real(name) or importlib.machinery.ModuleSpec(name, None)
    )


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return parser.parse_args(words)


def load(*words: str) -> Loaded:
    return load_deployment(arguments(*words))


@pytest.mark.parametrize("rule", sorted(FILES))
def test_folder_is_served_by_its_rule_under_its_name(rule: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "my model", FILES[rule])
    found = load(folder)

    known = next(each for each in RULES if each.name == rule)
    assert found.why[0].startswith(f"pipeline {rule} (")
    assert Path(found.path).samefile(shipped_configs()[known.config])
    assert found.config.name == "my_model"
    assert found.pipelines[known.pipeline].serve_as == "my_model"
    assert {found.config.stages[stage].options["model"] for stage in known.stages} == {folder}
    assert str(found.origin(f"stages.{known.stages[0]}.model")) == f"model {folder}"


def test_every_rule_but_second_choices_is_tried_here() -> None:
    assert {rule.name for rule in RULES} - {"vllm-chat"} == set(FILES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_file_ships_with_its_stages_and_pipeline(rule: ModelRule) -> None:
    found = tomllib.loads(shipped_configs()[rule.config].read_text())

    assert set(rule.stages) <= set(found["stages"])
    assert list(found["pipelines"]) == [rule.pipeline]


def test_embedding_pools_as_its_files_say(tmp_path: Path) -> None:
    found = load(save(tmp_path / "m", FILES["transformers-embedding"]))

    options = found.config.stages["embed"].options
    assert (options["pooling"], options["is_normalised"]) == ("last", True)


def test_embedding_with_another_pooling_is_refused(tmp_path: Path) -> None:
    files = FILES["transformers-embedding"] | {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}
    with pytest.raises(ConfigError, match="pools by pooling_mode_max_tokens"):
        load(save(tmp_path / "m", files))


def test_dias_codec_is_where_its_processor_says(tmp_path: Path) -> None:
    codec = save(tmp_path / "codec", {"config.json": {"model_type": "dac"}})
    named = {"audio_tokenizer": {"audio_tokenizer_name_or_path": codec}}
    files = {"config.json": {"model_type": "dia"}, "processor_config.json": named}

    assert load(save(tmp_path / "m", files)).config.stages["codec"].options["model"] == codec
    with pytest.raises(ConfigError, match="names no codec"):
        load(save(tmp_path / "m", files | {"processor_config.json": {}}))


def test_omni_model_without_a_talker_is_not_taken_for_one_that_speaks(tmp_path: Path) -> None:
    files = {"config.json": {"model_type": "qwen3_omni_moe", "enable_audio_output": False}}

    with pytest.raises(ConfigError, match="qwen3-omni matched, and its predicate said no"):
        load(save(tmp_path / "m", files))


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("FluxPipeline", {"prompt"}, {"image", "progress", "preview"}),
        ("FluxKontextPipeline", {"prompt", "images"}, {"image", "progress", "preview"}),
        ("ZImageInpaintPipeline", {"prompt", "images", "mask"}, {"image", "progress", "preview"}),
        ("WanPipeline", {"prompt"}, {"video", "progress"}),
        ("WanImageToVideoPipeline", {"prompt", "images"}, {"video", "progress"}),
        ("CogVideoXVideoToVideoPipeline", {"prompt", "video"}, {"video", "progress"}),
        ("LTX2Pipeline", {"prompt"}, {"video", "audio", "progress"}),
    ],
)
def test_diffusion_pipeline_has_the_ports_of_its_class(
    name: str, inputs: set[str], outputs: set[str], tmp_path: Path
) -> None:
    [pipeline] = load(save(tmp_path / "m", {"model_index.json": {"_class_name": name}})).pipelines.values()

    assert (set(pipeline.inputs), set(pipeline.outputs)) == (inputs, outputs)


def test_diffusion_model_that_ships_is_served_by_its_folder() -> None:
    found = load(str(Path(model.__file__).parents[2] / "configs" / "models" / "emoji-t2i"))

    assert found.config.stages["picture"].options["call"] == {"use_resolution_binning": False}


def test_settings_of_the_command_line_come_after_the_models(tmp_path: Path) -> None:
    found = load(save(tmp_path / "m", FILES["transformers-chat"]), "-o", "pipelines.chat.serve_as=mine")

    assert found.pipelines["chat"].serve_as == "mine"


def test_pipeline_that_is_asked_for_wins(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", FILES["transformers-chat"])

    assert load(folder, "--pipeline", "transformers-embedding").why == (
        "pipeline transformers-embedding (vectors of texts on transformers): it was asked for",
    )


def test_shipped_file_is_taken_whatever_lies_in_the_folder(tmp_path: Path) -> None:
    Path("moshi").write_text("")

    assert Path(load(save(tmp_path / "m", FILES["moshi"])).path).samefile(shipped_configs()["moshi"])


def test_default_model_is_known_by_name() -> None:
    assert load("smollm2-135m-instruct").config.stages["llm"].options["model"] == "smollm2-135m-instruct"


def test_hub_model_that_was_loaded_before_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--small"
    save(repository / "snapshots" / "abc", FILES["transformers-chat"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")

    found = load("someone/small")
    assert found.pipelines["chat"].serve_as == "someone/small"
    assert found.config.stages["llm"].options["model"] == "someone/small"
    with pytest.raises(ConfigError, match=r"there is no folder 'someone/large', and the hub can't be reached"):
        load("someone/large")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["./nothing"], "there is no folder './nothing'"),
        (["a/b/c"], "there is no folder 'a/b/c'"),
        (["empty"], "'empty' is not the folder of a model: it has no config.json and no model_index.json"),
        (["broken"], "config.json of 'broken' can't be read"),
        (["strange"], "no pipeline is known for 'strange' (model_type odd; architectures OddModel)"),
        (["strange", "--pipeline", "moshy"], "unknown pipeline 'moshy'; did you mean 'moshi'?"),
        (["strange", "--config", "moshi"], "--config moshi: it came with the model strange"),
        (["--pipeline", "moshi"], "--pipeline moshi: it came without a model"),
    ],
)
def test_bad_model_is_refused_in_words(words: list[str], problem: str) -> None:
    Path("empty").mkdir()
    save(Path("strange"), {"config.json": {"model_type": "odd", "architectures": ["OddModel"]}})
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        load(*words)

    assert problem in str(caught.value)


def test_check_prints_what_matched_and_what_came_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)

    assert check.run(parser.parse_args([save(tmp_path / "m", FILES["transformers-chat"])])) == 0
    out = capsys.readouterr().out.replace("\n#   ", " ")
    because = "its architecture LlamaForCausalLM is like *ForCausalLM"
    assert f"\n# pipeline transformers-chat (text chat on transformers): {because}\n" in out
    assert f"\n# second vllm-chat (text chat on vLLM): {because}\n" in out


# --- rules of third parties ---------------------------------------------------------------------------------

ODD = ModelRule(
    name="odd",
    config="",
    reason="a third party's",
    stages=(),
    pipeline="p",
    architectures=frozenset({"OddModel"}),
)


def install(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = importlib.metadata.EntryPoint("odd", value, model.GROUP)
    monkeypatch.setattr(model, "entry_points", lambda group: [point] if group == model.GROUP else [])


def test_installed_packages_rule_serves_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "odd.toml"
    stage = '[stages.s]\nadapter = "synthetic-text"\n'
    file.write_text(f'{stage}[pipelines.p]\nedges = ["in.messages -> s.prompt", "s.text -> out.text"]\n')
    monkeypatch.setattr(sys.modules[__name__], "ODD", msgspec.structs.replace(ODD, config=str(file)))
    install(monkeypatch, f"{__name__}:ODD")

    found = load(save(tmp_path / "m", {"config.json": {"architectures": ["OddModel"]}}))
    assert found.why == ("pipeline odd (a third party's): its architecture is OddModel",)
    assert found.path == str(file)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no.such.module:RULE", "can't be loaded from no.such.module:RULE: ModuleNotFoundError"),
        (f"{__name__}:save", "is no ModelRule"),
    ],
)
def test_installed_packages_broken_rule_is_named(monkeypatch: pytest.MonkeyPatch, value: str, problem: str) -> None:
    install(monkeypatch, value)
    with pytest.raises(ConfigError, match="model rule 'odd'") as caught:
        load("smollm2-135m-instruct")

    assert problem in str(caught.value)
