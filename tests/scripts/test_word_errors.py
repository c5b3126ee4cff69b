"""Words are counted as a listener would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from word_errors import word_errors, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat, sat.", ["the", "cat", "sat"]),
        ("  it's 7 o’clock!", ["it's", "seven", "o'clock"]),
        ("'Quoted' words — 2024", ["quoted", "words", "2024"]),
        ("", []),
    ],
)
def test_words_are_what_is_heard(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b x c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d e", 2),
    ],
)
def test_errors_are_the_fewest_changes(said: str, heard: str, errors: int) -> None:
    assert word_errors(said.split(), heard.split()) == errors


words = st.lists(st.sampled_from("abc"), max_size=8)


@given(said=words, heard=words, other=words)
def test_errors_are_a_distance(said: list[str], heard: list[str], other: list[str]) -> None:
    assert word_errors(said, heard) == word_errors(heard, said)
    assert word_errors(said, heard) <= word_errors(said, other) + word_errors(other, heard)
    assert (word_errors(said, heard) == 0) == (said == heard)
