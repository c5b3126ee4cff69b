from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from adapters import vllm_options
from adapters.vllm_options import VllmOptions, arguments_of, engine_arguments, lora_rank, problems_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ARG_UTILS = '''
class EngineArgs:
    """Arguments for vLLM engine."""
    model: str = ModelConfig.model
    tensor_parallel_size: int = ParallelConfig.tensor_parallel_size
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    kv_cache_dtype: CacheDType = "auto"
    compilation_config: CompilationConfig | dict = None

    def create(self): ...
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A vLLM of which nothing is there but what the check reads."""
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the check must not import vLLM')")
    (package / "engine" / "arg_utils.py").write_text(ARG_UTILS)
    (package / "_version.py").write_text("__version__ = version = '0.22.1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test's, and so found before any folder
    monkeypatch.setattr(vllm_options, "DISTRIBUTIONS", ("no-such-distribution",))
    engine_arguments.cache_clear()
    yield package
    engine_arguments.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def problems(model: str, **options: Any) -> list[str]:
    return problems_of(msgspec.convert({"model": model, **options}, VllmOptions), "vllm")


def test_options_that_can_work_have_no_problems(installed: Path, model: str) -> None:
    assert problems(model, engine={"tensor_parallel_size": 2, "enforce_eager": True, "kv_cache_dtype": "fp8"}) == []


def test_unknown_engine_argument_is_named_with_the_nearest_one(installed: Path, model: str) -> None:
    [problem] = problems(model, engine={"tensor_parallel": 2})

    assert problem == (
        "engine: vLLM 0.22.1 has no engine argument 'tensor_parallel'; did you mean 'tensor_parallel_size'?"
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("tensor_parallel_size", "2", "int"),
        ("tensor_parallel_size", True, "int"),
        ("tensor_parallel_size", 2.5, "int"),
        ("enforce_eager", 1, "bool"),
        ("gpu_memory_utilization", "much", "float or None"),
    ],
)
def test_engine_argument_of_another_type_is_refused(
    installed: Path, model: str, name: str, value: Any, allowed: str
) -> None:
    [problem] = problems(model, engine={name: value})

    assert problem == f"engine: {name} = {value!r} ({type(value).__name__}) came (allowed: {allowed})"


def test_whole_number_passes_for_a_fraction(installed: Path, model: str) -> None:
    assert problems(model, engine={"gpu_memory_utilization": 1}) == []


@pytest.mark.parametrize(("name", "key"), vllm_options.OWN_KEYS.items())
def test_engine_argument_that_the_stage_sets_names_its_key(installed: Path, model: str, name: str, key: str) -> None:
    assert problems(model, engine={name: 1}) == [f"engine: '{name}' is set by the stage's key {key}"]


@pytest.mark.parametrize("version", ["0.21.9", "0.33.0", "1.0.0", "0.9.2"])
def test_other_version_is_refused_and_the_range_said(installed: Path, model: str, version: str) -> None:
    (installed / "_version.py").write_text(f"__version__ = version = '{version}'\n")

    assert problems(model) == [f"adapter: vllm doesn't know vLLM {version} (allowed: 0.22 to 0.32)"]


def test_missing_vllm_is_said_with_how_to_install_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    engine_arguments.cache_clear()
    [problem] = problems(model, engine={"anything": 1})
    engine_arguments.cache_clear()

    assert problem.startswith("adapter: vllm needs vLLM (pip install")


def test_folder_without_config_is_refused(installed: Path, tmp_path: Path) -> None:
    assert problems(str(tmp_path)) == [f"model: '{tmp_path}' is not the folder of a model: it has no config.json"]


def test_lora_folder_without_adapter_is_refused(installed: Path, model: str, tmp_path: Path) -> None:
    assert problems(model, lora={"pirate": str(tmp_path)}) == [
        f"lora: 'pirate' is not the folder of an adapter: {tmp_path} has no adapter_config.json"
    ]


def test_resident_requests_are_at_least_those_of_a_step(installed: Path, model: str) -> None:
    assert problems(model, max_num_seqs=8, max_resident=4) == [
        "max_resident: 4 came (allowed: at least max_num_seqs, 8)"
    ]
    assert VllmOptions(max_num_seqs=8).num_resident == 16


def test_cpu_computes_in_float32_with_a_bounded_cache() -> None:
    arguments = arguments_of(VllmOptions(), "folder", is_cpu=True)

    assert arguments["dtype"] == "float32"
    assert arguments["enforce_eager"] is True
    assert arguments["kv_cache_memory_bytes"] == 2**30


def test_accelerator_keeps_what_vllm_chooses() -> None:
    arguments = arguments_of(VllmOptions(), "folder", is_cpu=False)

    assert not {"dtype", "enforce_eager", "kv_cache_memory_bytes", "max_model_len"} & set(arguments)


def test_own_keys_and_engine_arguments_come_through(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 12}))
    options = VllmOptions(
        max_num_seqs=4,
        context_length=512,
        kv_cache_gib=0.5,
        reasoning_parser="qwen3",
        lora={"pirate": str(tmp_path)},
        engine={"dtype": "bfloat16", "block_size": 16},
    )
    arguments = arguments_of(options, "folder", is_cpu=True)

    assert arguments["max_num_seqs"] == 4
    assert arguments["max_model_len"] == 512
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["reasoning_parser"] == "qwen3"
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 16)
    assert (arguments["dtype"], arguments["block_size"]) == ("bfloat16", 16)


def test_lora_rank_covers_the_largest(tmp_path: Path) -> None:
    folders: dict[str, str] = {}
    for rank in (4, 33):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        folders[str(rank)] = str(folder)

    assert lora_rank(folders) == 64
