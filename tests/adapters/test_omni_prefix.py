"""A thinker's prompts that begin alike: what is sent of them is the same with and without a hit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import tiny_omni  # type: ignore[import-not-found] (put on the path above)
from staged import Answer, messages_of  # type: ignore[import-not-found] (put on the path above)

from adapters.omni.thinker import OmniThinker
from omni_bus.testing import StepDriver, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_bus.testing import Collected

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

CHUNK = 16
LONG = "Tell me a long story about a dragon and a knight. "
OUTPUTS = ["text", "hidden", "prompt_tokens"]
GREEDY = {"temperature": 0.0, "max_tokens": 6, "token_ids": True, "seed": 1}
"""With a seed, which makes bits the same in any company."""


@pytest.fixture(scope="module", params=[tiny_omni.qwen2_5, tiny_omni.qwen3], ids=["qwen2_5", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return request.param(tmp_path_factory.mktemp("omni"))


@pytest.fixture
def thinker(folder: str) -> Iterator[StepDriver]:
    """One that has read nothing yet."""
    engine = make_engine(OmniThinker, {"model": folder, "prefill_chunk": CHUNK, "context_length": 256})
    yield StepDriver(engine)
    engine.close()


def ask(driver: StepDriver, *question: Any, **params: Any) -> Collected:
    [found] = driver.run(driver.add(messages_of(question), GREEDY | params, outputs=OUTPUTS))
    assert found.error is None
    return found


def sent(found: Collected) -> tuple[Any, ...]:
    """All that the talker and the client get."""
    answer = Answer(found, found)
    ids = [token.id for piece in found.port("text") for token in piece.tokens]
    return ids, answer.thinker_rows, answer.prompt_tokens, [piece.first_position for piece in found.port("hidden")]


def same(one: Collected, other: Collected) -> bool:
    (ids, rows, prompt, _), (other_ids, other_rows, other_prompt, begins) = sent(one), sent(other)
    return begins[0] == 0 and ids == other_ids and torch.equal(rows, other_rows) and torch.equal(prompt, other_prompt)


def cached(found: Collected) -> int:
    return found.finish.usage.cached_tokens


def test_rows_of_the_prompt_are_the_same_with_a_hit(thinker: StepDriver) -> None:
    first = ask(thinker, LONG)
    again = ask(thinker, LONG)
    other = ask(thinker, LONG + "Now!")
    beside = [thinker.add(messages_of((LONG,)), GREEDY, outputs=OUTPUTS) for _ in range(3)]

    whole = len(sent(first)[2][0]) // CHUNK * CHUNK
    assert cached(first) == 0
    assert cached(again) == whole
    assert 0 < cached(other) <= whole
    assert same(first, again)
    assert all(same(first, found) for found in thinker.run(*beside))
    thinker.engine.load(lambda phase, fraction: None)
    alone = ask(thinker, LONG + "Now!")
    assert cached(alone) == 0
    assert same(alone, other)


def test_reply_of_one_token_sends_all_of_its_prompt(thinker: StepDriver) -> None:
    first, again = (ask(thinker, "Tell me a story", max_tokens=1) for _ in range(2))

    assert (cached(first), cached(again) > 0) == (0, True)
    assert same(first, again)


def test_what_prompts_depend_on_besides_their_tokens_is_not_shared(thinker: StepDriver) -> None:
    ask(thinker, LONG)

    assert cached(ask(thinker, LONG, cache_salt="mine")) == 0
    assert cached(ask(thinker, LONG, cache_salt="mine")) > 0
    assert cached(ask(thinker, LONG, seed=None)) == 0
    assert cached(ask(thinker, LONG, seed=None)) > 0


def test_pictures_are_not_taken_for_each_other(thinker: StepDriver) -> None:
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 255, (112, 112, 3), np.uint8) for _ in range(2))

    first, second = ask(thinker, one, LONG), ask(thinker, other, LONG)
    assert (cached(first), cached(second)) == (0, 0)
    assert not same(first, second)
