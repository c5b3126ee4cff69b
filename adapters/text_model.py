"""What adapters of transformers' text models share: prompts to tokens, requests to answers, and every refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from adapters.answer import Answer, Limits
from adapters.answer_parts import AnswerParts
from adapters.chat import read_prompt, text_of
from adapters.chat_template import HONOURS, ChatTemplate, check_fields
from adapters.lora import check_name
from adapters.reasoning import OPEN, ThinkingFilter
from adapters.sampling import SamplingParams, refuse_unhonoured
from adapters.structure import TokenMask, compile_grammar
from adapters.token_choice import TokenChoice
from adapters.tool_calls import calls_of, grammar_of_answer
from adapters.transformers_model import ModelOptions, ends_of
from adapters.vocabulary import Vocabulary
from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Json
from omni_bus.wire.prompt import Prompt, Rendered

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from adapters.transformers_model import ModelLoader
    from omni_bus.engine import EngineRequest
    from omni_bus.wire.payloads import Payload

EMITS = {"text": "text", "reasoning": "text", "tool_calls": "json", "rendered": "json"}
"""Output ports of a stage that writes text."""

Candidates = list[list[tuple[int, float]] | None]


class TextOptions(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a stage's table that say which model, and how its answers are read."""

    reasoning_parser: Literal["none", "think"] = "none"
    """``think``: text between <think> and </think> is reasoning, not answer."""
    tool_call_parser: Literal["none", "hermes"] = "hermes"
    """``hermes``: JSON between <tool_call> and </tool_call>, as Hermes, Qwen and SmolLM2 write it."""
    trust_request_chat_template: bool = False
    """Whether requests may bring a chat template; it is a program that runs in a sandbox, without a time limit."""


class TextModel:
    """A model's tokenizer, template and limits, as one stage serves them."""

    def __init__(
        self,
        adapter: str,
        options: TextOptions,
        vocabulary: Vocabulary,
        *,
        template_owner: Any,
        context_length: int,
        device: Any,
        media: Collection[str] = (),
        lora: Collection[str] | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        """Prepare.

        Args:
            adapter: its name, for refusals.
            options: how answers are read.
            vocabulary: the model's.
            template_owner: whose chat template it is: the tokenizer or the processor.
            context_length: tokens of a prompt and its answer together.
            device: where logits are.
            media: input ports beside ``prompt``.
            lora: adapters that requests may name; None where the engine can't use any.
            shares_prefixes: whether what was computed of a prompt may serve another.
        """
        self.vocabulary = vocabulary
        self.context_length = context_length
        longest_token = max(map(len, vocabulary.tokenizer.get_vocab()))
        self._max_characters = context_length * longest_token
        self._adapter = adapter
        self._lora = lora
        self._unhonoured = tuple(
            name for name, is_so in (("lora", lora is not None), ("cache_salt", shares_prefixes)) if not is_so
        )
        self._options = options
        self._device = device
        self._honours = HONOURS | frozenset(media)
        self._template = ChatTemplate(
            template_owner, keeps_parts=bool(media), is_request_trusted=options.trust_request_chat_template
        )

    # --- prompts ---

    def read(self, payloads: Sequence[Payload]) -> Prompt:
        """Return the prompt that came, checked.

        Raises:
            BadInput: names the field.
        """
        if len(payloads) != 1:
            raise BadInput(f"prompt: {len(payloads)} payloads came (allowed: one)", field="prompt")
        prompt = read_prompt(payloads[0], self._adapter, self._honours)
        check_fields(prompt)
        characters = len(prompt.text or "") + sum(len(text_of(message)) for message in prompt.messages)
        if characters > self._max_characters or len(prompt.messages) > self.context_length:
            # Said without asking the tokenizer: ten million characters keep it, and every other request, for seconds.
            field = _form_of(prompt)
            raise BadInput(
                f"{field}: {characters} characters in {len(prompt.messages)} messages are beyond the context length of "
                f"{self.context_length} tokens (allowed: at most {self._max_characters} characters)",
                field=field,
            )
        return prompt

    def text(self, prompt: Prompt) -> str | None:
        """Return the prompt as text, None if it came as tokens.

        Raises:
            BadInput: the chat template refuses it.
        """
        if prompt.token_ids is not None:
            return None
        return prompt.text if prompt.text is not None else self._template.render(prompt)

    def token_ids(self, prompt: Prompt, text: str | None) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            BadInput: ids that the model doesn't know.
        """
        if text is None:
            ids = list(prompt.token_ids or ())
            self.check_ids("token_ids", ids)
            return ids
        return self.vocabulary.tokenizer(text, add_special_tokens=adds_special_tokens(prompt))["input_ids"]

    def check_ids(self, field: str, ids: Collection[int]) -> None:
        """Refuse ids beyond the vocabulary.

        Raises:
            BadInput: names the field and the first such id.
        """
        for token_id in ids:
            if token_id >= self.vocabulary.size:
                raise BadInput(
                    f"{field}: {token_id} is not a token of the model (allowed: 0 to {self.vocabulary.size - 1})",
                    field=field,
                )

    def rendered(self, ids: list[int], candidates: Candidates | None) -> Json:
        """Return what the prompt came to.

        Args:
            ids: its tokens.
            candidates: with `prompt_logprobs`: each token and others that might have stood there.
        """
        vocabulary = self.vocabulary
        logprobs = None
        if candidates is not None:
            logprobs = [
                None if row is None else [(id_, logprob, vocabulary.raw(id_)) for id_, logprob in row]
                for row in candidates
            ]
        rendered = Rendered(
            token_ids=ids,
            text=vocabulary.tokenizer.decode(ids, skip_special_tokens=False),
            token_strings=vocabulary.strings(ids),
            context_length=self.context_length,
            logprobs=logprobs,
        )
        return Json(msgspec.to_builtins(rendered))

    # --- requests ---

    def check(self, request: EngineRequest, prompt: Prompt, num_tokens: int) -> None:
        """Refuse parameters that can't be honoured, and a prompt that leaves no room for an answer.

        Raises:
            BadInput: names the field.
        """
        params: SamplingParams = request.params
        refuse_unhonoured(params, self._unhonoured, self._adapter)
        check_name(params.lora, self._lora or ())
        if params.prompt_logprobs is not None and "rendered" not in request.outputs:
            raise BadInput(
                "prompt_logprobs: nobody reads the port 'rendered' that they come on (allowed: None)",
                field="prompt_logprobs",
            )
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", [int(id_) for id_ in params.logit_bias])
        length, field = self.context_length, _form_of(prompt)
        if not num_tokens and request.outputs != {"rendered"}:
            raise BadInput(f"{field}: no token came (allowed: at least one)", field=field)
        if num_tokens >= length and (request.outputs != {"rendered"} or params.prompt_logprobs is not None):
            raise BadInput(
                f"{field}: {num_tokens} tokens leave no room for an answer "
                f"(allowed: at most {length - 1}, the context length is {length})",
                field=field,
            )
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise BadInput(
                f"min_tokens: {params.min_tokens} is above max_tokens (allowed: at most {params.max_tokens})",
                field="min_tokens",
            )

    def answer(self, request: EngineRequest, prompt: Prompt, text: str | None, ids: Sequence[int]) -> Answer:
        """Return the answer to a checked request, nothing of it chosen yet.

        Args:
            request: checked.
            prompt: what it asks.
            text: the same as the model reads it, None if it came as tokens.
            ids: its tokens.

        Raises:
            BadInput: its structure or tools can't be honoured.
        """
        params: SamplingParams = request.params
        max_tokens = self.context_length - len(ids)
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        own = frozenset(params.stop_token_ids)
        ends = own if params.ignore_eos else own | self.vocabulary.ends
        choice = TokenChoice(
            params,
            ids,
            ends,
            self._device,
            bad_words=_spellings(params.bad_words, self.vocabulary.tokenizer),
            mask=self._mask(params, prompt),
        )
        thinking = None
        if self._options.reasoning_parser == "think":
            thinking = ThinkingFilter(is_open=text is not None and text.rstrip().endswith(OPEN))
        return Answer(
            request.outputs,
            params,
            Limits(len(ids), max_tokens, ends),
            vocabulary=self.vocabulary,
            choice=choice,
            parts=AnswerParts(thinking, calls_of(prompt, request.outputs, self._options.tool_call_parser)),
        )

    def _mask(self, params: SamplingParams, prompt: Prompt) -> TokenMask | None:
        named = grammar_of_answer(prompt, params.structure)
        if named is None:
            return None
        field, grammar = named
        return compile_grammar(grammar, field, self.vocabulary)


def vocabulary_of(loader: ModelLoader, model: Any, tokenizer: Any) -> Vocabulary:
    """Return a model's vocabulary.

    Raises:
        StartFailed: its tokenizer has no fast form.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise loader.refused("its tokenizer has no fast form (tokenizer.json)")
    return Vocabulary(tokenizer, model.config.get_text_config().vocab_size, ends_of(model, tokenizer))


def adds_special_tokens(prompt: Prompt) -> bool:
    """Return whether the tokenizer adds its own: a chat template has written them already."""
    return not prompt.messages if prompt.add_special_tokens is None else prompt.add_special_tokens


def _form_of(prompt: Prompt) -> str:
    """Return the field that holds the prompt."""
    return "messages" if prompt.messages else "text" if prompt.text is not None else "token_ids"


def _spellings(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return each word's tokens, at the beginning of a text and after a blank."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            spellings[tuple(tokenizer(text, add_special_tokens=False)["input_ids"])] = None
    return [list(ids) for ids in spellings if ids]
