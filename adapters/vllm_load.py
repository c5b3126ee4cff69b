"""Starts vLLM inside the stage process, and tells how far it is."""

# vLLM is not installed where the types are checked.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters import smollm2
from adapters.vllm_options import arguments_of, problems_of
from omni_bus.errors import BadInput, StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from adapters.vllm_options import VllmOptions
    from omni_bus.engine import Context, Report


def load_engine(options: VllmOptions, context: Context, report: Report, *, adapter: str, **fixed: Any) -> Any:
    """Return a ``vllm.v1.engine.llm_engine.LLMEngine`` whose core runs in this process.

    Args:
        options: of the stage.
        context: of the stage.
        report: told of each phase.
        adapter: its name, for messages.
        fixed: engine arguments that the adapter sets.

    Raises:
        StartFailed: vLLM is missing, of another version, or refuses the model or an argument; says what it said.
    """
    if problems := problems_of(options, adapter):
        raise StartFailed("; ".join(problems))
    model = _find_model(options, context, report)
    _prepare_environment(context, is_local=Path(model).is_dir())
    report("importing vllm", 0.0)
    from vllm.platforms import current_platform

    arguments = arguments_of(options, model, is_cpu=current_platform.is_cpu()) | fixed
    if current_platform.is_cpu() and arguments["enforce_eager"]:
        _compile_nothing()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    report("starting the engine", 0.0)
    with _told(report):
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (
            OSError,
            ValueError,
            RuntimeError,
            TypeError,
            NotImplementedError,
            AssertionError,
            ImportError,
        ) as error:
            raise StartFailed(f"vLLM can't start '{options.model}': {error}{_hint(error)}", field="model") from error
    _remove_rendezvous(engine)
    return engine


def modalities_of(engine: Any) -> frozenset[str] | None:
    """Return what the model reads besides text, by vLLM's names (``image``); None where this vLLM doesn't tell."""
    if not engine.vllm_config.model_config.is_multimodal_model:
        return frozenset()
    processor = getattr(getattr(engine, "renderer", None), "mm_processor", None)
    return None if processor is None else frozenset(processor.info.get_supported_mm_limits())


def find_template(tokenizer: Any, model: str) -> str | None:
    """Return the chat template of a model whose processor has it, None where the tokenizer does or nobody."""
    if getattr(tokenizer, "chat_template", None) is not None:
        return None
    from transformers import AutoProcessor

    try:
        return getattr(AutoProcessor.from_pretrained(model), "chat_template", None)
    except (OSError, ValueError, ImportError):  # a base model, which takes text and token ids
        return None


class VllmSleep:
    """Puts vLLM to sleep and wakes it: by its own sleep mode where it has one, else by closing and loading it.

    vLLM's own is for accelerators, and has to be there from the start (`enable_sleep_mode`).
    """

    def __init__(self) -> None:
        self._level = 0
        """Of vLLM's own sleep mode; 0 for a closed engine and one that is awake."""

    def sleep(self, engine: Any, level: int, close: Callable[[], None]) -> None:
        """Give memory back; `close` is called where that is the only way.

        Raises:
            BadInput: vLLM has no sleep mode here, and to close it keeps no weights.
        """
        if _has_sleep_mode(engine):
            engine.sleep(level)
            self._level = level
            return
        if level == 1:
            from vllm.platforms import current_platform

            why = "vLLM has no sleep mode on a CPU" if current_platform.is_cpu() else "1 needs enable_sleep_mode"
            raise BadInput(f"level: 1 came (allowed: 2; {why})", field="level")
        close()
        gc.collect()

    def wake(self, engine: Any, load: Callable[[], None]) -> None:
        """Be as before; `load` is called where the engine was closed."""
        if not self._level:
            load()
            return
        engine.wake_up(["weights"])
        if self._level == 2:
            engine.collective_rpc("reload_weights")
        engine.wake_up(["kv_cache"])
        self._level = 0


def _has_sleep_mode(engine: Any) -> bool:
    from vllm.platforms import current_platform

    return bool(engine.vllm_config.model_config.enable_sleep_mode) and not current_platform.is_cpu()


def _hint(error: Exception) -> str:
    """Return what helps where vLLM's own words don't."""
    if "failed to be inspected" not in str(error) or importlib.util.find_spec("torchvision") is not None:
        return ""
    return (
        "; vLLM's own code for this model may need torchvision, which is not installed: engine = { model_impl = "
        '"transformers" } takes that of transformers'
    )


def close_engine(engine: Any) -> None:
    """Shut vLLM down; its worker processes, if it has any, end.

    It looks for garbage twice meanwhile, through everything that was ever imported. That takes longer than a stage has
    to close, in a process that ends next; who goes on gets the memory back by and by.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        engine.engine_core.shutdown()
    finally:
        gc.collect = collect


def _remove_rendezvous(engine: Any) -> None:
    """Remove the file in the temporary folder by which the engine's only process met itself.

    vLLM leaves it to torch, which leaves it where the process is killed.
    """
    worker = getattr(getattr(engine.model_executor, "driver_worker", None), "worker", None)
    method = getattr(worker, "distributed_init_method", None) or ""
    if method.startswith("file://"):
        Path(method.removeprefix("file://")).unlink(missing_ok=True)


def _find_model(options: VllmOptions, context: Context, report: Report) -> str:
    if options.model == smollm2.NAME:
        return str(smollm2.convert_once(context.cache_dir, report))
    path = Path(options.model).expanduser()
    return str(path) if path.exists() else options.model


def _prepare_environment(context: Context, *, is_local: bool) -> None:
    """Set what vLLM reads from the environment when it is imported; what the person set stays."""
    # The scheduler must be ours to drive: in a process of its own, its steps could not be chosen.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    threads = str(context.num_threads)
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CONFIGURE_LOGGING": "0",  # its lines go where this process's go
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the stage's cores are the supervisor's to choose
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if is_local:
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _compile_nothing() -> None:
    """Keep vLLM from compiling its sampler: the first request for log-probabilities held all others up for 25 s."""
    import torch._dynamo

    torch._dynamo.config.disable = True  # noqa: SLF001 (documented under this name)


class _PhaseOfLines(logging.Handler):
    """Takes each line of vLLM's log as a sign that the start goes on; it is a phase by the module that wrote it."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(record.module.replace("_", " "), 0.0)


@contextlib.contextmanager
def _told(report: Report) -> Iterator[None]:
    """Report what vLLM logs and how much of the weights is read, while it starts."""
    from vllm.model_executor.model_loader import weight_utils

    logger = logging.getLogger("vllm")
    handler = _PhaseOfLines(report)
    level, bar = logger.level, getattr(weight_utils, "tqdm", None)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if bar is not None:
        weight_utils.tqdm = lambda files, **_: _counted(files, report)
    try:
        yield
    finally:
        if bar is not None:
            weight_utils.tqdm = bar
        logger.removeHandler(handler)
        logger.setLevel(max(level, logging.WARNING))


def _counted(files: Iterable[Any], report: Report) -> Iterator[Any]:
    """Stand in for vLLM's progress bar over the files of weights."""
    listed = list(files)
    for number, file in enumerate(listed):
        report("reading weights", number / len(listed))
        yield file
    report("reading weights", 1.0)
