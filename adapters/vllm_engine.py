"""What stages on vLLM have in common: how its core is loaded, driven, measured, put to sleep and closed."""

# vLLM is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from adapters.token_bytes import TokenBytes
from adapters.vllm_load import VllmSleep, close_engine, find_template, load_engine, modalities_of
from adapters.vllm_metrics import engine_metrics
from adapters.vllm_options import VllmOptions, problems_of
from adapters.vllm_request import read_inputs
from omni_bus.engine import StepEngine
from omni_bus.errors import BadInput, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from adapters.vllm_request import VllmPrompt
    from omni_bus.engine import Context, EngineRequest, Event, Report
    from omni_bus.ids import RequestId
    from omni_bus.wire.metrics import Metric
    from omni_bus.wire.payloads import Payload
    from omni_bus.wire.prompt import Prompt

logger = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""A process whose engine broke ends with this (sysexits.h: EX_SOFTWARE), and its supervisor starts another."""


@dataclass(slots=True, kw_only=True)
class Held:
    """One request that vLLM holds, or whose last events wait for a step."""

    id: RequestId
    events: list[Event] = field(default_factory=list)
    """What came in a step that it was not named for; vLLM may be one step ahead."""
    is_over: bool = False


HeldT = TypeVar("HeldT", bound=Held)


class VllmEngine(StepEngine, Generic[HeldT]):
    """A model on vLLM: messages, text or token ids in, with media where the model reads them."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json", "images": "image", "audio": "audio", "video": "video"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "audio", "video"})
    sleep_levels: ClassVar[frozenset[int]] = frozenset({1, 2})
    Options = VllmOptions

    adapter: ClassVar[str]
    """Its name, for messages."""
    runner: ClassVar[str]
    """vLLM's word for what the model does."""
    honoured: ClassVar[Collection[str]]
    """Fields of a `Prompt` that the adapter honours."""

    _engine: Any = None
    _tokenizer: Any
    _template: str | None
    """The model's chat template where the tokenizer has none of its own."""
    _modalities: frozenset[str] | None
    _table: TokenBytes
    _context_length: int

    def __init__(self, options: VllmOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self.max_resident = options.num_resident
        self._running: dict[RequestId, HeldT] = {}
        self._sleep = VllmSleep()

    @classmethod
    def num_slots(cls, options: VllmOptions) -> int:
        """Return the requests that one replica with these options can hold at once."""
        return options.num_resident

    @classmethod
    def check(cls, options: VllmOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without importing vLLM."""
        return problems_of(options, cls.adapter)

    def load(self, report: Report) -> None:
        """Start vLLM.

        Raises:
            StartFailed: vLLM is missing or of an unknown version, or refuses the model or an argument.
        """
        self._engine = load_engine(self.options, self.context, report, adapter=self.adapter, runner=self.runner)
        config = self._engine.vllm_config.model_config
        self._tokenizer = self._engine.get_tokenizer()
        self._template = find_template(self._tokenizer, config.model)
        self._modalities = modalities_of(self._engine)
        self._table = TokenBytes(self._tokenizer)
        self.context_length = self._context_length = config.max_model_len

    def _read(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> tuple[Prompt, VllmPrompt]:
        """Return what a new request asks, and how vLLM takes it.

        Raises:
            BadInput: it can't be honoured.
            Overloaded: vLLM holds all that it may.
        """
        if request.id in self._running:
            raise ValueError(f"request {request.id} was added twice")
        if len(self._running) >= self.max_resident:
            raise Overloaded(f"all {self.max_resident} places (max_resident) are taken")
        return read_inputs(
            inputs,
            self.adapter,
            self.honoured,
            self._tokenizer,
            template=self._template,
            may_bring_template=self.options.trust_request_chat_template,
            modalities=self._modalities,
        )

    def _submit(
        self,
        engine_id: str,
        request: EngineRequest,
        prompt: VllmPrompt,
        make_params: Callable[[], Any],
        *,
        suspect: str = "prompt",
    ) -> str:
        """Give vLLM a request with the parameters that `make_params` returns; return its own id of it.

        `suspect` is the field of which a refusal is that names none itself.

        Raises:
            BadInput: vLLM refuses it. Raised apart from vLLM's own exception, whose frames would keep the prompt.
        """
        more = {
            "lora_request": _lora_request(self.options.lora, request.params.lora),
            "priority": -request.priority,  # vLLM's lower values go first
        }
        engine_prompt = prompt.engine_prompt(request.params.cache_salt)
        try:
            return self._engine.add_request(engine_id, engine_prompt, make_params(), **more)
        except _refusals() as error:
            field_ = getattr(error, "parameter", None) or suspect
            refusal = BadInput(f"{field_}: vLLM refuses the request: {error}", field=field_)
        raise refusal

    def _run_step(self) -> Sequence[Any]:
        """Run a step of vLLM and return its outputs; the process ends if that breaks it.

        Scheduler and model may disagree from then on, as vLLM itself sees it: its own core process ends too.
        """
        try:
            return self._engine.step()
        except Exception:
            logger.exception("vLLM's engine broke; this process ends")
            _end_process()

    def _take_events(self, named: Sequence[HeldT]) -> list[Event]:
        """Return what there is to say of these requests, and forget those that are over."""
        events: list[Event] = []
        for held in named:
            events += held.events
            held.events = []
            if held.is_over:
                self._running.pop(held.id, None)
        return events

    def metrics(self) -> Sequence[Metric]:
        """Return vLLM's own measures; nothing with `disable_log_stats`."""
        return engine_metrics(self._engine)

    def sleep(self, level: int) -> None:
        """Give memory back, by vLLM's own sleep mode where that is enabled, else (level 2) by closing it.

        Raises:
            BadInput: level 1 without that mode.
        """
        self._sleep.sleep(self._engine, level, self.close)

    def wake(self, report: Report) -> None:
        """Be ready again."""
        self._sleep.wake(self._engine, lambda: self.load(report))

    def close(self) -> None:
        """Let go of the model and its memory."""
        engine, self._engine = self._engine, None
        self._running.clear()
        if engine is not None:
            close_engine(engine)


def _end_process() -> NoReturn:
    logging.shutdown()
    os._exit(EXIT_BROKEN)


def _lora_request(folders: dict[str, str], name: str | None) -> Any:
    """Return vLLM's ``LoRARequest`` for one of the stage's adapters, None for the base model.

    Raises:
        BadInput: the stage has no such adapter.
    """
    if name is None:
        return None
    if name not in folders:
        raise BadInput(f"lora: '{name}' is unknown (allowed: {', '.join(folders) or 'none'})", field="lora")
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, list(folders).index(name) + 1, os.path.expanduser(folders[name]))


def _refusals() -> tuple[type[Exception], ...]:
    """Return what vLLM raises for a request that it refuses."""
    refusals: list[type[Exception]] = [ValueError, TypeError, NotImplementedError]
    with contextlib.suppress(ImportError, AttributeError):
        refusals.append(importlib.import_module("vllm.exceptions").VLLMValidationError)
    return tuple(refusals)
