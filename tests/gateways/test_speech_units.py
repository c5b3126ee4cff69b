"""Where streamed text is cut, whatever pieces it comes in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateways.speech_units import Granularity, Joiner, UnitSplitter

TEXTS: list[tuple[Granularity, str, list[str]]] = [
    ("none", "  Hi there. How are you? ", ["Hi there. How are you?"]),
    ("none", "   ", []),
    ("sentence", "Hi there. How are you? Fine!", ["Hi there.", "How are you?", "Fine!"]),
    ("sentence", "Pi is 3.14, or 1,000 times less. See a.b now.", ["Pi is 3.14, or 1,000 times less.", "See a.b now."]),
    ("sentence", "Dr. J. Smith of the U.S. came at 5 p.m. sharp. Yes.", [
        "Dr. J. Smith of the U.S. came at 5 p.m. sharp.", "Yes."]),
    ("sentence", 'He said "Wait..." Then (why?!) he left.', ['He said "Wait..."', "Then (why?!)", "he left."]),
    ("sentence", "e.g. this, etc. and so on.", ["e.g. this, etc. and so on."]),
    ("sentence", "... Well. ...", ["... Well."]),
    ("sentence", "...", ["..."]),
    ("sentence", "你好。「再见！」好…行", ["你好。", "「再见！」", "好…", "行"]),
    ("sentence", "नमस्ते। आप कैसे हैं॥ठीक", ["नमस्ते।", "आप कैसे हैं॥", "ठीक"]),
    ("sentence", "هل أنت بخير؟نعم", ["هل أنت بخير؟", "نعم"]),
    ("sentence", "One, two; three.", ["One, two; three."]),
    ("clause", "One, two; three. 1,000 men", ["One,", "two;", "three.", "1,000 men"]),
    ("clause", "你好，再见；، بخير،نعم", ["你好，", "再见；،", "بخير،", "نعم"]),
    ("clause", "i.e., this, Mr. Fox", ["i.e.,", "this,", "Mr. Fox"]),
    ("sentence", "It has 5. Then more.", ["It has 5.", "Then more."]),
    ("sentence", "No end", ["No end"]),
    ("sentence", "Yes!\n\nNo.", ["Yes!", "No."]),
]  # fmt: skip


def units(granularity: Granularity, pieces: list[str]) -> list[str]:
    splitter = UnitSplitter(granularity)
    return [unit for piece in pieces for unit in splitter.feed(piece)] + splitter.flush()


@pytest.mark.parametrize(("granularity", "text", "expected"), TEXTS)
def test_text_is_cut_where_it_is_said(granularity: Granularity, text: str, expected: list[str]) -> None:
    assert units(granularity, [text]) == expected
    assert units(granularity, list(text)) == expected


@given(
    st.sampled_from(["none", "sentence", "clause"]),
    st.lists(st.text("ab1 .,!?;\"')(。！，…؟\nDJr", max_size=8) | st.text(max_size=5), max_size=12),
)
def test_cut_into_pieces_makes_no_difference(granularity: Granularity, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = units(granularity, pieces)

    assert found == units(granularity, list(text)) == units(granularity, [text])
    assert all(unit == unit.strip() != "" for unit in found)
    spoken = [char for char in text if char.isalnum()]
    assert [char for unit in found for char in unit if char.isalnum()] == spoken


def test_unit_comes_once_the_character_after_its_marks_is_there() -> None:
    splitter = UnitSplitter("sentence")

    assert splitter.feed("Wait.") == []
    assert splitter.feed('.."') == []
    assert splitter.feed(" ") == ['Wait..."']
    assert splitter.feed("好。") == []
    assert splitter.feed("吗") == ["好。"]
    assert splitter.num_chars == 1


def test_splitter_serves_one_text_after_the_other() -> None:
    splitter = UnitSplitter("sentence")

    assert [*splitter.feed("One. Two"), *splitter.flush()] == ["One.", "Two"]
    assert splitter.flush() == []
    assert splitter.feed("J. Three. ") == ["J. Three."]


@given(st.text(max_size=20), st.lists(st.integers(0, 40), max_size=5))
def test_halves_of_surrogate_pairs_are_joined(text: str, cuts: list[int]) -> None:
    raw = text.encode("utf-16-le")
    ends = [0, *sorted(2 * cut for cut in cuts if 2 * cut < len(raw)), len(raw)]
    pieces = [raw[a:b].decode("utf-16-le", "surrogatepass") for a, b in itertools.pairwise(ends)]
    joiner = Joiner()

    assert "".join([*map(joiner.feed, pieces), joiner.flush()]) == text


def test_half_that_stays_alone_is_a_replacement_character() -> None:
    joiner = Joiner()

    assert joiner.feed("a\ud83d") == "a"
    assert joiner.feed("b\ude00") == "\ufffdb\ufffd"
    assert joiner.feed("\ud83d") + joiner.flush() == "\ufffd"
