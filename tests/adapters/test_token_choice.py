from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from adapters.sampling import SamplingParams
from adapters.token_choice import TokenChoice, _TopP

PROMPT = [1, 2, 3]
END = 0


def make_choice(prompt: Any = PROMPT, **params: Any) -> TokenChoice:
    return TokenChoice(SamplingParams(**params), prompt, frozenset({END}), "cpu")


def choose_many(choice: TokenChoice, logits: torch.Tensor, times: int) -> list[int]:
    return [choice.choose(logits) for _ in range(times)]


def test_greedy_takes_the_largest_logit() -> None:
    choice = make_choice(temperature=0)

    assert choice.is_argmax
    assert choice.choose(torch.tensor([0.0, 1.0, 5.0, 2.0])) == 2


def test_same_seed_chooses_the_same() -> None:
    logits = torch.zeros(100)

    first, second, other = (choose_many(make_choice(seed=seed), logits, 20) for seed in (1, 1, 2))

    assert first == second
    assert first != other


def test_no_seed_chooses_anew() -> None:
    """Of 100 equal tokens, 20 times the same by chance: 1 in 10^40."""
    logits = torch.zeros(100)

    assert choose_many(make_choice(), logits, 20) != choose_many(make_choice(), logits, 20)


def test_choices_follow_the_probabilities() -> None:
    """Three tokens of 60, 30 and 10 percent; a deviation of four standard deviations would fail."""
    shares = torch.tensor([0.6, 0.3, 0.1])
    chosen = torch.tensor(choose_many(make_choice(seed=7), shares.log(), 2000))

    counted = torch.bincount(chosen, minlength=3) / 2000

    assert torch.allclose(counted, shares, atol=0.044)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.55}, {0}),
        ({"top_p": 0.85}, {0, 1}),
        ({"min_p": 0.4}, {0, 1}),
        ({"temperature": 0.01}, {0}),
        ({"top_k": -1}, {0, 1, 2}),
    ],
)
def test_unlikely_tokens_are_cut_off(params: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()

    assert set(choose_many(make_choice(seed=1, **params), logits, 300)) == allowed


EXTREMES: dict[str, list[float]] = {
    "temperature": [5e-324, 1e-300, 1e-40, 1e-10, 1e-6, 1e-5, 2],
    "top_p": [5e-324, 1e-300, 1e-40, 1e-10, 1],
    "min_p": [0, 5e-324, 1],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "repetition_penalty": [0.01, 10.0],
    "frequency_penalty": [-2, 2],
    "presence_penalty": [-2, 2],
}
"""The ends of what each field allows, those that 32-bit floats don't have among them."""


@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("temperature", EXTREMES["temperature"])
@pytest.mark.parametrize(("field", "value"), [(field, value) for field in EXTREMES for value in EXTREMES[field]])
def test_every_allowed_value_chooses_a_token(spread: float, temperature: float, field: str, value: float) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(7)) * spread
    choice = make_choice(seed=1, **({"temperature": temperature} | {field: value}))

    assert all(0 <= token < 1000 for token in choose_many(choice, logits, 3))


@pytest.mark.parametrize("params", [{"temperature": 1e-300}, {"temperature": 2, "top_p": 1e-300}])
def test_vanishing_value_takes_the_largest_logit(params: dict[str, float]) -> None:
    assert make_choice(**params).choose(torch.tensor([0.1, 0.5, 0.3])) == 1


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 0.999])
def test_top_p_keeps_what_transformers_keeps(spread: float, top_p: float) -> None:
    """Both with few tokens, found without sorting, and with more than that."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(3)) * spread
    nothing = torch.zeros(1, 0, dtype=torch.long)

    expected = TopPLogitsWarper(top_p)(nothing, logits.clone())  # pyright: ignore[reportArgumentType]

    assert torch.equal(_TopP(top_p)(nothing, logits), expected)


def test_frequency_penalty_counts_each_generated_token() -> None:
    """Token 1 leads by 1; each choice takes 0.6 from it, so the second still wins and the third doesn't."""
    choice = make_choice(temperature=0, frequency_penalty=0.6)

    assert choose_many(choice, torch.tensor([0.0, 2.0, 1.0]), 4) == [1, 1, 2, 1]


def test_presence_penalty_counts_once() -> None:
    choice = make_choice(temperature=0, presence_penalty=1.5)

    assert choose_many(choice, torch.tensor([-9.0, 2.0, 1.0]), 4) == [1, 2, 1, 1]


def test_penalties_leave_the_prompt_alone() -> None:
    choice = make_choice(prompt=[1, 1, 1], temperature=0, frequency_penalty=2.0, presence_penalty=2.0)

    assert choice.choose(torch.tensor([0.0, 2.0, 1.0])) == 1


def test_repetition_penalty_looks_at_the_prompt() -> None:
    choice = make_choice(prompt=[1], temperature=0, repetition_penalty=3.0)

    assert choose_many(choice, torch.tensor([0.5, 2.0, 1.0]), 2) == [2, 1]


def test_ends_wait_for_min_tokens() -> None:
    choice = make_choice(temperature=0, min_tokens=2)

    assert choose_many(choice, torch.tensor([9.0, 2.0, 1.0]), 3) == [1, 1, END]


def test_logits_are_left_unchanged() -> None:
    logits = torch.tensor([0.5, 2.0, 1.0])

    make_choice(temperature=0.5, top_k=1, frequency_penalty=1.0, repetition_penalty=2.0, min_tokens=3).choose(logits)

    assert logits.tolist() == [0.5, 2.0, 1.0]
