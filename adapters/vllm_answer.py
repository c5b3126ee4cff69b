"""Answers as vLLM gives them, turned into payloads: text, tokens, reasoning and tool calls."""

# vLLM is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import msgspec

from adapters.vllm_request import candidates_of
from omni_bus.errors import BadInput, StartFailed
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Candidate, Json, Text, Token
from omni_bus.wire.prompt import ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.sampling import SamplingParams
    from adapters.token_bytes import TokenBytes
    from omni_bus.wire.payloads import Payload
    from omni_bus.wire.prompt import Prompt


class Answer:
    """One request's answer as it comes.

    Args:
        params: what was asked for.
        outputs: ports that are wanted.
        table: the vocabulary.
        parser: tells reasoning and tool calls from text; None if all is text.
    """

    def __init__(
        self, params: SamplingParams, outputs: frozenset[str], table: TokenBytes, parser: AnswerParser | None
    ) -> None:
        self._outputs = outputs
        self._table = table
        self._parser = parser
        self._num_candidates = params.logprobs
        self._has_tokens = params.token_ids or params.logprobs is not None
        self._num_unsent = 0
        self._unsent: list[Token] = []
        self._num_tokens = 0
        self._has_called = False

    def read(self, output: Any) -> list[tuple[str, Payload]]:
        """Return what a ``vllm.RequestOutput`` (a delta) brings, by port."""
        [completion] = output.outputs
        ids: Sequence[int] = completion.token_ids
        self._num_tokens += len(ids)
        self._num_unsent += len(ids)
        if self._has_tokens:
            self._unsent += self._tokens(ids, completion.logprobs)
        if self._parser is None:
            return self._text(completion.text, is_last=output.finished)
        reasoning, text, calls = self._parser.feed(
            completion.text, list(ids), output.prompt_token_ids, is_last=output.finished
        )
        pieces: list[tuple[str, Payload]] = []
        if reasoning and "reasoning" in self._outputs:
            num_tokens, self._num_unsent = self._num_unsent, 0
            pieces.append(("reasoning", Text(reasoning, num_tokens)))
        pieces += self._text(text, is_last=output.finished)
        self._has_called = self._has_called or bool(calls)
        if "tool_calls" in self._outputs:
            pieces += [("tool_calls", Json(msgspec.to_builtins(call))) for call in calls]
        return pieces

    def _text(self, text: str, *, is_last: bool) -> list[tuple[str, Payload]]:
        if "text" not in self._outputs or not (text or (is_last and self._unsent)):
            return []
        piece = Text(text, self._num_unsent, tuple(self._unsent))
        self._num_unsent, self._unsent = 0, []
        return [("text", piece)]

    def _tokens(self, ids: Sequence[int], logprobs: Sequence[Any] | None) -> list[Token]:
        if logprobs is None:
            return [Token(id_, self._table.raw(id_)) for id_ in ids]
        return [self._token(id_, place) for id_, place in zip(ids, logprobs, strict=True)]

    def _token(self, id_: int, place: Any) -> Token:
        [own, *_] = candidates_of(id_, place, self._table)
        # vLLM adds the chosen token where it is not among the most probable ones.
        ranked = sorted(place.items(), key=lambda item: item[1].rank)[: self._num_candidates]
        candidates = tuple(Candidate(other, found.logprob, self._table.raw(other)) for other, found in ranked)
        return Token(id_, own[2], own[1], candidates)

    def finish(self, output: Any) -> Finish:
        """Return how a finished ``vllm.RequestOutput`` ended."""
        [completion] = output.outputs
        reason = completion.finish_reason or "stop"
        if reason == "stop" and self._has_called:
            reason = "tool_calls"
        usage = Usage(len(output.prompt_token_ids), self._num_tokens, output.num_cached_tokens or 0)
        detail = {} if completion.stop_reason is None else {"stop_reason": completion.stop_reason}
        return Finish(reason, usage, detail)


class AnswerParsers:
    """Makes a parser for each request that needs one, from vLLM's own by name.

    Raises:
        StartFailed: the installed vLLM has no parser of that name; names those that it has.
    """

    def __init__(self, tokenizer: Any, model: str, *, tool_call: str | None, reasoning: str | None) -> None:
        from vllm.parser.parser_manager import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        _check_name("tool_call_parser", tool_call, {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        _check_name(
            "reasoning_parser",
            reasoning,
            {*ReasoningParserManager.reasoning_parsers, *ReasoningParserManager.lazy_parsers},
        )
        self._tokenizer = tokenizer
        self._model = model
        self._can_auto = tool_call is not None
        self._reasons = reasoning is not None
        self._parser_class: Any = ParserManager.get_parser(
            tool_parser_name=tool_call, reasoning_parser_name=reasoning, enable_auto_tools=True, model_name=model
        )

    def parser_for(self, prompt: Prompt) -> AnswerParser | None:
        """Return a parser for an answer to this prompt, None if the answer is text alone.

        Raises:
            BadInput: a tool choice that the model or the tools can't answer.
        """
        choice = prompt.tool_choice if prompt.tools else "none"
        if prompt.tool_choice != "none" and not prompt.tools:
            raise BadInput(
                f"tool_choice: '{prompt.tool_choice}' came without tools (allowed: none)", field="tool_choice"
            )
        if choice == "none" and not self._reasons:
            return None
        if choice == "auto" and not self._can_auto:
            raise BadInput(
                "tool_choice: 'auto' needs the stage's tool_call_parser (allowed: none, required, function:NAME)",
                field="tool_choice",
            )
        name = choice.removeprefix("function:")
        names = [tool.function.name for tool in prompt.tools]
        if choice not in {"none", "auto", "required"} and (name == choice or name not in names):
            raise BadInput(
                f"tool_choice: '{choice}' came (allowed: none, auto, required, or function: and one of "
                f"{', '.join(names)})",
                field="tool_choice",
            )
        return AnswerParser(self._class_for(choice), self._tokenizer, self._request(prompt, choice))

    def _class_for(self, choice: str) -> Any:
        if choice in {"none", "auto"}:
            return self._parser_class
        # Calls that are forced are JSON by the grammar. In a model's own format, vLLM 0.32 would hold it to the
        # call's frame but let the arguments be any JSON, whatever the tool's schema says.
        from vllm.parser.abstract_parser import DelegatingParser
        from vllm.tool_parsers import ToolParser

        reasoning = getattr(self._parser_class, "reasoning_parser_cls", None)
        return _forced_parser_class(DelegatingParser, ToolParser, reasoning)

    def _request(self, prompt: Prompt, choice: str) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        wanted: Any = choice
        if choice.startswith("function:"):
            wanted = {"type": "function", "function": {"name": choice.removeprefix("function:")}}
        tools = [{"type": "function", "function": msgspec.to_builtins(tool.function)} for tool in prompt.tools]
        return ChatCompletionRequest.model_validate(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": ""}],
                "tools": tools or None,
                "tool_choice": wanted if tools else None,
                "parallel_tool_calls": prompt.parallel_tool_calls,
                "chat_template_kwargs": prompt.chat_template_kwargs or None,
            }
        )


def _check_name(field: str, name: str | None, known: set[str]) -> None:
    if name is not None and name not in known:
        from omni_bus.errors import did_you_mean

        raise StartFailed(
            f"{field}: vLLM has no '{name}'{did_you_mean(name, known)} (allowed: {', '.join(sorted(known))})",
            field=field,
        )


def _forced_parser_class(delegating: Any, tool_parser: Any, reasoning: Any) -> Any:
    """Return a parser class for forced calls, built from vLLM's base classes."""

    class Forced(delegating):
        reasoning_parser_cls = reasoning
        tool_parser_cls = tool_parser

        def __init__(self, tokenizer: Any, tools: Any = None, **kwargs: Any) -> None:
            super().__init__(tokenizer)
            # vLLM 0.22 leaves this to its subclass, 0.32 does it itself; doing it again is harmless.
            self._reasoning_parser = None if reasoning is None else reasoning(tokenizer)
            self._tool_parser = tool_parser(tokenizer, tools)

    return Forced


class AnswerParser:
    """A parser of vLLM's for one answer, fed with deltas."""

    def __init__(self, parser_class: Any, tokenizer: Any, request: Any) -> None:
        self._parser = parser_class(tokenizer, request.tools, chat_template_kwargs=request.chat_template_kwargs or {})
        self._request = self._parser.adjust_request(request)
        self._says_end = "finished" in inspect.signature(self._parser.parse_delta).parameters

    @property
    def structure(self) -> Any:
        """The ``StructuredOutputsParams`` of vLLM that the answer must follow; None if it is free."""
        return self._request.structured_outputs

    @property
    def skips_special_tokens(self) -> bool:
        """False where the parser must see the special tokens."""
        return self._request.skip_special_tokens

    def feed(
        self, text: str, ids: list[int], prompt_ids: list[int], *, is_last: bool
    ) -> tuple[str, str, list[ToolCallDelta]]:
        """Return reasoning, text and pieces of calls that became certain."""
        end = {"finished": is_last} if self._says_end else {}
        delta = self._parser.parse_delta(text, ids, self._request, prompt_ids, **end)
        if delta is None:
            return "", "", []
        calls = [
            ToolCallDelta(
                index=call.index,
                id=call.id,
                name=None if call.function is None else call.function.name,
                arguments=(call.function and call.function.arguments) or "",
            )
            for call in delta.tool_calls or ()
            if call.index == 0 or self._request.parallel_tool_calls is not False
        ]
        return delta.reasoning or "", delta.content or "", [call for call in calls if call.name or call.arguments]
