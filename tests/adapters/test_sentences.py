from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.sentences import MAX_SENTENCE_CHARS, MAX_WORD_CHARS, SentenceSplitter, speakable


def split(pieces: list[str]) -> list[str]:
    splitter = SentenceSplitter()
    sentences = [sentence for piece in pieces for sentence in splitter.feed(piece)]
    return sentences + list(splitter.end())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. How are you?", ["Hello there.", "How are you?"]),
        ("Dr. Smith paid $3.50. Then he left!", ["Dr. Smith paid $3.50.", "Then he left!"]),
        ("Pi is 3.14 or so. Mr. and Mrs. Jones agree.", ["Pi is 3.14 or so.", "Mr. and Mrs. Jones agree."]),
        (
            "J. K. Rowling wrote it, e.g. this. Fig. 3 shows it.",
            ["J. K. Rowling wrote it, e.g. this.", "Fig. 3 shows it."],
        ),
        ('He said: "Go away." Then: "Why?"', ['He said: "Go away."', 'Then: "Why?"']),
        ("Wait... what? It's fine.", ["Wait... what?", "It's fine."]),
        ("# Title\n\nText here\nand there", ["Title", "Text here", "and there"]),
        ("1. First item.\n2. Second item.", ["1. First item.", "2. Second item."]),
        ("- **One** thing\n* _two_ `three`\n> quoted", ["One thing", "two three", "quoted"]),
        ("See [the docs](https://example.com/a_b). Now.", ["See the docs.", "Now."]),
        ("Code:\n```python\nprint(1. + 2)\n```\nDone.", ["Code:", "Done."]),
        ("```\nnever closed. At all.", []),
        ("| a | b |\n|---|---|\n| 1 | 2 |", ["| a | b |", "| 1 | 2 |"]),
        ("😀 🎉\n—\n...\n", []),
        ("   \n\t\r\n", []),
        ("", []),
        ("2 * 3 = 6 and snake_case stay.", ["2 * 3 = 6 and snake_case stay."]),
        ("The answer:\n42.", ["The answer:", "42."]),
    ],
)
def test_text_becomes_spoken_sentences(text: str, expected: list[str]) -> None:
    assert split([text]) == expected
    assert split(list(text)) == expected


def test_sentence_comes_when_the_next_word_is_complete() -> None:
    splitter = SentenceSplitter()

    assert list(splitter.feed("Hello there.")) == []
    assert list(splitter.feed(" It")) == []
    assert list(splitter.feed(" is")) == ["Hello there."]
    assert list(splitter.feed(" late.\n")) == ["It is late."]


def test_endless_sentence_is_cut_between_words() -> None:
    words = [f"word{index}" for index in range(400)]

    sentences = split([f"{word} " for word in words])

    assert " ".join(sentences).split() == words
    assert max(map(len, sentences)) <= MAX_SENTENCE_CHARS
    assert len(sentences) < 20


def test_endless_sentence_is_cut_after_a_clause_if_one_ends_late() -> None:
    text = "so " * 50 + "it went, " + "and " * 60

    assert split([text])[0].endswith("it went,")


def test_endless_word_is_broken() -> None:
    sentences = split(["x" * 1000])

    assert "".join(sentences).replace(" ", "") == "x" * 1000
    assert max(len(word) for sentence in sentences for word in sentence.split()) <= MAX_WORD_CHARS


def test_overlong_number_is_read_in_groups() -> None:
    assert speakable("1" * 17) == "111 111 111 111 111 11"
    assert speakable("123456789012345") == "123456789012345"


PARTS = st.sampled_from(
    (
        *(
            "Dr. ",
            "Hello ",
            "there. ",
            "At 5 p.m. ",
            "Monday ",
            '"Why?" ',
            "(no.) ",
            "3.",
            "14 ",
            "U.S. ",
            "e.g. ",
            "\n",
        ),
        *(
            "```\n",
            "- ",
            "**b** ",
            "I'm ",
            "he said! ",
            "word " * 60,
            "x" * 50,
            "...",
            "? ",
            "'Oh.' ",
            "1. ",
            "😀",
            "é ",
        ),
        *("\t", ". ", "。你好", "No. ", "Inc. ", "etc. ", "A. ", "[x](y. Z) ", "vs. ", "OK.Next "),
    )
)


@given(st.lists(PARTS, max_size=12).map("".join), st.data())
@example("He said (at 5 p.m. Monday", None)
def test_cutting_the_text_differently_makes_no_difference(text: str, data: st.DataObject | None) -> None:
    whole = split([text])

    assert split(list(text)) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        assert split([text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


@given(st.text(max_size=400))
def test_any_text_is_split_without_losing_letters(text: str) -> None:
    if "```" in text or "~~~" in text or "](" in text:
        return
    letters = [char for char in text if char.isalnum()]

    assert [char for sentence in split([text]) for char in sentence if char.isalnum()] == letters
