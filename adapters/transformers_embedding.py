"""Embeddings from models of transformers: one vector for each text, many texts in one forward pass."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from adapters import smollm2
from adapters.chat import read_prompt
from adapters.model_memory import Files
from adapters.transformers_model import ModelLoader, ModelOptions, check_model
from omni_bus.engine import Context, EngineRequest, Event, Failure, Finished, Output, StepEngine
from omni_bus.errors import BadInput, Overloaded, StageFailed, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Blob, Payload, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from omni_bus.engine import Memory, Report
    from omni_bus.ids import RequestId

NAME = "transformers-embedding"

HONOURS = frozenset({"text", "token_ids", "add_special_tokens", "add_generation_prompt", "parallel_tool_calls"})
"""Fields of a `Prompt` that are honoured; the last two mean nothing without messages."""

Count = Annotated[int, Meta(ge=1)]


class EmbeddingOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the stage's table."""

    model: str = smollm2.NAME
    """``smollm2-135m-instruct``, the folder of a model, or a name on the model hub."""
    pooling: Literal["mean", "last", "first"] = "mean"
    """Which of a text's last hidden states make its vector: their mean, the last token's, or the first one's."""
    is_normalised: bool = True
    """Whether vectors have length one."""
    max_num_seqs: Count = 32
    """Texts in one forward pass."""
    max_batch_tokens: Count = 2048
    """Tokens in one forward pass, padding included, unless a single text has more: how long a cancel may wait."""
    context_length: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of one text; by default what the model can, at most 2048."""


@dataclass(slots=True)
class _Waiting:
    """One text that was tokenised."""

    id: RequestId
    ids: list[int]
    is_wanted: bool


class TransformersEmbedding(StepEngine):
    """A text or token ids in, a vector out."""

    accepts: ClassVar[dict[str, str]] = {"prompt": "json"}
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})
    emits: ClassVar[dict[str, str]] = {"embedding": "tensor"}
    Options = EmbeddingOptions

    _tokenizer: Any
    _model: Any
    _device: torch.device
    _context_length: int
    _max_characters: int

    def __init__(self, options: EmbeddingOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = self.max_resident = options.max_num_seqs
        self._waiting: dict[RequestId, _Waiting] = {}

    @classmethod
    def num_slots(cls, options: Any) -> int:
        """Return the requests that one replica with these options can hold at once."""
        return options.max_num_seqs

    @classmethod
    def check(cls, options: EmbeddingOptions) -> list[str]:
        """Return what is wrong with the options and can be seen without loading."""
        return check_model(NAME, options, ("torch", "transformers"))

    @classmethod
    def memory(cls, options: EmbeddingOptions, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica takes."""
        files = Files(options, has_accelerator=has_accelerator)
        return files.memory(activations=files.activations(options.max_batch_tokens, 0))

    def load(self, report: Report) -> None:
        """Load, and make a first vector.

        Raises:
            StartFailed: the model isn't there or gives no hidden states.
        """
        if problems := self.check(self.options):
            raise StartFailed("; ".join(problems))
        loader = ModelLoader(self.options, self.context, report)
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = loader.part("loading tokenizer", AutoTokenizer)
        self._model = loader.weights(AutoModel)
        self._device = loader.device
        self.context_length = self._context_length = loader.context_length(self._model, self.options.context_length)
        self._max_characters = self._context_length * max(map(len, self._tokenizer.get_vocab()))
        report("warming up", 0.0)
        try:
            self._vectors([[0], [0, 0]])
        except Exception as error:
            # Whatever a model's code raises when it is called with tokens alone, it can't be served here.
            raise loader.refused(f"a first batch failed with {type(error).__name__}: {error}") from error
        report("warming up", 1.0)

    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a text.

        Raises:
            BadInput: it can't be honoured.
            Overloaded: `max_num_seqs` texts are waiting.
        """
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} was added twice")
        if len(self._waiting) >= self.max_resident:
            raise Overloaded(f"{self.max_resident} texts (max_num_seqs) are waiting")
        prompts = inputs.get("prompt", [])
        if len(prompts) != 1:
            raise BadInput(f"prompt: {len(prompts)} payloads came (allowed: one)", field="prompt")
        self._waiting[request.id] = _Waiting(request.id, self._tokens(prompts[0]), "embedding" in request.outputs)

    def _tokens(self, payload: Payload) -> list[int]:
        prompt = read_prompt(payload, NAME, HONOURS)
        if prompt.token_ids is not None:
            field, ids = "token_ids", list(prompt.token_ids)
            size = self._model.config.get_text_config().vocab_size
            if (largest := max(ids)) >= size:
                raise BadInput(
                    f"token_ids: {largest} is not a token of the model (allowed: 0 to {size - 1})", field="token_ids"
                )
        else:
            field, text = "text", prompt.text or ""
            if len(text) > self._max_characters:
                raise BadInput(
                    f"text: {len(text)} characters came (allowed: at most {self._max_characters})", field="text"
                )
            ids = self._tokenizer(text, add_special_tokens=prompt.add_special_tokens is not False)["input_ids"]
        if not 0 < len(ids) <= self._context_length:
            raise BadInput(f"{field}: {len(ids)} tokens came (allowed: 1 to {self._context_length})", field=field)
        return ids

    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Make the vectors of as many of these texts as fit into one forward pass, the first named first."""
        batch: list[_Waiting] = []
        longest = 0
        for waiting in (self._waiting[id_] for id_ in requests):
            longest = max(longest, len(waiting.ids))
            if batch and longest * (len(batch) + 1) > self.options.max_batch_tokens:
                break
            batch.append(waiting)
        events: list[Event] = []
        for waiting, vector in zip(batch, self._vectors([waiting.ids for waiting in batch]), strict=True):
            self.abort(waiting.id)
            if not bool(vector.isfinite().all()):
                events.append(Failure(waiting.id, StageFailed("the model computed a vector that isn't finite")))
                continue
            if waiting.is_wanted:
                tensor = Tensor("float32", tuple(vector.shape), Blob(vector.numpy().tobytes()))
                events.append(Output(waiting.id, "embedding", tensor))
            events.append(Finished(waiting.id, Finish("stop", Usage(prompt_tokens=len(waiting.ids)))))
        return events

    def _vectors(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return a vector for each list of tokens, float32 on the CPU."""
        import torch
        from torch.nn.functional import normalize

        lengths = torch.tensor([len(ids) for ids in texts])
        longest = int(lengths.max())
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts])
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        with torch.inference_mode():
            states = self._model(
                input_ids=ids.to(self._device), attention_mask=mask.long().to(self._device)
            ).last_hidden_state.float()
            mask, lengths = mask.to(states.device), lengths.to(states.device)
            match self.options.pooling:
                case "mean":
                    vectors = (states * mask[:, :, None]).sum(dim=1) / lengths[:, None]
                case "last":
                    vectors = states[torch.arange(len(texts), device=states.device), lengths - 1]
                case _:
                    vectors = states[:, 0]
            if self.options.is_normalised:
                vectors = normalize(vectors, dim=-1)
            return list(vectors.cpu())

    def abort(self, request: RequestId) -> None:
        """Drop a text."""
        self._waiting.pop(request, None)

    def close(self) -> None:
        """Let go of the weights."""
        self._waiting.clear()
        for name in ("_model", "_tokenizer"):
            with contextlib.suppress(AttributeError):
                delattr(self, name)
