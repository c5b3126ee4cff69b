"""vLLM's outputs turned into payloads, without vLLM; its parsers are tried in `test_vllm_text`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from adapters.sampling import SamplingParams
from adapters.vllm_answer import Answer
from omni_bus.wire.frames import Finish, Usage
from omni_bus.wire.payloads import Candidate, Json, Text, Token
from omni_bus.wire.prompt import ToolCallDelta

ALL = frozenset({"text", "reasoning", "tool_calls"})


class Table:
    """A vocabulary in which token 65 is A."""

    def raw(self, token: int) -> bytes:
        return bytes([token])


class Parser:
    """Gives out what it was given for each delta."""

    def __init__(self, *deltas: tuple[str, str, list[ToolCallDelta]]) -> None:
        self._deltas = iter(deltas)

    def feed(self, text: str, ids: list[int], prompt_ids: list[int], *, is_last: bool) -> Any:
        return next(self._deltas)


def answer_of(outputs: frozenset[str] = ALL, parser: Any = None, **params: Any) -> Answer:
    table: Any = Table()
    return Answer(SamplingParams(**params), outputs, table, parser)


def output(
    text: str, ids: tuple[int, ...], *, logprobs: Any = None, reason: str | None = None, stop: Any = None
) -> Any:
    completion = SimpleNamespace(text=text, token_ids=ids, logprobs=logprobs, finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(
        outputs=[completion], finished=reason is not None, prompt_token_ids=[1, 2, 3], num_cached_tokens=2
    )


def place(*ranked: tuple[int, float, int]) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=logprob, rank=rank) for token, logprob, rank in ranked}


def test_delta_becomes_text_with_its_number_of_tokens() -> None:
    assert answer_of().read(output("AB", (65, 66))) == [("text", Text("AB", 2))]


def test_tokens_without_text_are_counted_with_the_next_piece() -> None:
    """vLLM keeps text back that may be the beginning of a character or of a stop string."""
    answer = answer_of(token_ids=True)

    assert answer.read(output("", (65,))) == []
    assert answer.read(output("AB", (66,))) == [("text", Text("AB", 2, (Token(65, b"A"), Token(66, b"B"))))]


def test_tokens_that_never_became_text_come_at_the_end() -> None:
    answer = answer_of(token_ids=True)

    assert answer.read(output("", (65,), reason="stop")) == [("text", Text("", 1, (Token(65, b"A"),)))]


def test_logprobs_have_as_many_candidates_as_were_asked_for() -> None:
    """vLLM adds the chosen token where it is not among the most probable ones."""
    answer = answer_of(logprobs=2)
    [(_, text)] = answer.read(output("C", (67,), logprobs=[place((67, -3.0, 9), (65, -0.5, 1), (66, -1.0, 2))]))

    assert isinstance(text, Text)
    assert text.tokens == (Token(67, b"C", -3.0, (Candidate(65, -0.5, b"A"), Candidate(66, -1.0, b"B"))),)


def test_logprobs_may_be_of_the_chosen_token_alone() -> None:
    [(_, text)] = answer_of(logprobs=0).read(output("C", (67,), logprobs=[place((67, -3.0, 9))]))

    assert isinstance(text, Text)
    assert text.tokens == (Token(67, b"C", -3.0),)


@pytest.mark.parametrize("stop", [None, "END", 7])
def test_finish_tells_usage_and_what_stopped(stop: Any) -> None:
    answer = answer_of()
    answer.read(output("A", (65,)))
    last = output("B", (66,), reason="stop", stop=stop)
    answer.read(last)

    detail = {} if stop is None else {"stop_reason": stop}
    assert answer.finish(last) == Finish("stop", Usage(3, 2, 2), detail)


def test_parsed_pieces_go_to_their_ports() -> None:
    call = ToolCallDelta(index=0, id="c1", name="f", arguments="{}")
    answer = answer_of(parser=Parser(("hm", "", []), ("", "well", []), ("", "", [call])))
    pieces = [
        piece
        for delta in (output("a", (65,)), output("b", (66,)), output("c", (67,), reason="stop"))
        for piece in answer.read(delta)
    ]

    assert pieces == [
        ("reasoning", Text("hm", 1)),
        ("text", Text("well", 1)),
        ("tool_calls", Json(msgspec.to_builtins(call))),
    ]
    assert answer.finish(output("", (), reason="stop")).reason == "tool_calls"


def test_cut_answer_stays_cut_although_it_called() -> None:
    answer = answer_of(parser=Parser(("", "", [ToolCallDelta(index=0, name="f")])))
    last = output("a", (65,), reason="length")
    answer.read(last)

    assert answer.finish(last).reason == "length"


def test_reasoning_that_nobody_wants_is_no_text() -> None:
    answer = answer_of(frozenset({"text"}), Parser(("hm", "well", [ToolCallDelta(index=0, name="f")])))

    assert [port for port, _ in answer.read(output("ab", (65, 66)))] == ["text"]
