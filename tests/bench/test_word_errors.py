from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.bench.word_errors import WordErrors, compare, count, total, words_of

WORDS = st.lists(st.sampled_from("abc"), max_size=8)


@pytest.mark.parametrize(
    ("said", "heard", "words"),
    [
        ("It's four o'clock, isn't it?", "it's 4 o\N{RIGHT SINGLE QUOTATION MARK}clock isn't it", 5),
        ("Mr. Brown paid two hundred and five", "Mister Brown paid two hundred & 5", 7),
        ("one million two hundred thirty four thousand five hundred sixty seven", "1,234,567", 11),
        ("ten thousand", "10000", 2),
        ("nineteen ninety percent", "19 90%", 3),
        ("\N{LATIN SMALL LIGATURE FI}ne café", "Fine CAFÉ!", 2),
        ("", " ... ", 0),
    ],
)
def test_ways_of_writing_the_same_are_the_same(said: str, heard: str, words: int) -> None:
    assert words_of(said) == words_of(heard)
    assert count(said, heard) == WordErrors(words)


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("the cat sat", "the bat sat", WordErrors(3, substituted=1)),
        ("the cat sat", "the sat", WordErrors(3, left_out=1)),
        ("the cat sat", "the big cat sat down", WordErrors(3, put_in=2)),
        ("the cat sat", "", WordErrors(3, left_out=3)),
        ("", "you", WordErrors(0, put_in=1)),
        ("a b c d", "x b d e", WordErrors(4, substituted=1, left_out=1, put_in=1)),
    ],
)
def test_errors_are_told_by_their_kind(said: str, heard: str, errors: WordErrors) -> None:
    assert count(said, heard) == errors


def test_rate_is_of_all_words_together() -> None:
    both = total([count("a", "b"), count("a b c", "a b c d")])

    assert (both, both.rate) == (WordErrors(4, substituted=1, put_in=1), 0.5)
    assert math.isnan(total([]).rate)


@given(WORDS, WORDS, WORDS)
def test_errors_are_a_distance(one: list[str], two: list[str], three: list[str]) -> None:
    assert (compare(one, two).errors == 0) == (one == two)
    assert compare(one, two).errors == compare(two, one).errors
    assert compare(one, three).errors <= compare(one, two).errors + compare(two, three).errors
    found = compare(one, two)
    assert len(one) - found.left_out + found.put_in == len(two)
