from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from adapters.detokenize import Detokenizer, StopFilter

EARTH = "🌍"
"""Four bytes."""

FEW_LETTERS = st.text(alphabet="ab🌍", max_size=12)
STOPS = st.lists(st.text(alphabet="ab🌍", min_size=1, max_size=4), max_size=4)
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)


def make_tokenizer() -> Tokenizer:
    """One token for each byte, one for a word, one that ends inside a character, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first, second = _as_bytes(EARTH)[:2]
    tokens = [*alphabet, "th", "the", first + second, "<end>"]
    merges = [("t", "h"), ("th", "e"), (first, second)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def _as_bytes(text: str) -> str:
    """Return the stand-ins that byte-level tokenizers have for each byte."""
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return piece


TOKENIZER = make_tokenizer()
SPECIAL: Any = TOKENIZER.token_to_id("<end>")


# --- detokenizing -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, SPECIAL), max_size=40))
@example(TOKENIZER.encode(EARTH).ids[:-1])
def test_pieces_concatenate_to_the_whole_text(ids: list[int]) -> None:
    """Of any ids, also of bytes that are no characters."""
    detokenizer = Detokenizer(TOKENIZER)

    pieces = [detokenizer.feed(token) for token in ids] + [detokenizer.flush()]

    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(TEXTS.filter(lambda text: "\ufffd" not in text))
@example("Grüße, 你好 🌍👩‍👩‍👧")
def test_no_piece_has_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)

    pieces = [detokenizer.feed(token) for token in TOKENIZER.encode(text).ids]

    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_character_comes_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)

    assert [detokenizer.feed(token) for token in TOKENIZER.encode("a" + EARTH).ids] == ["a", "", "", EARTH]


def test_special_token_has_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)

    assert detokenizer.feed(SPECIAL) == ""
    assert detokenizer.flush() == ""


def test_flush_shows_that_a_character_is_cut() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    detokenizer.feed(TOKENIZER.encode(EARTH).ids[0])

    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


# --- stop strings -------------------------------------------------------------------------------------------


def text_before_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What must come out, the slow way: look at every beginning of the text for a stop string at its end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(FEW_LETTERS, max_size=8), STOPS)
@example(["xa", "b"], ["ab", "xabc"])
def test_text_ends_before_the_first_complete_stop(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)

    out = "".join([stop_filter.feed(piece) for piece in pieces] + [stop_filter.flush()])

    assert (out, stop_filter.found) == text_before_stop("".join(pieces), stops)


@given(st.lists(FEW_LETTERS, max_size=8), STOPS)
def test_only_a_possible_beginning_is_kept_back(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    out = fed = ""
    for piece in pieces:
        out += stop_filter.feed(piece)
        fed += piece
        if stop_filter.found is not None:
            break
        kept = fed.removeprefix(out)
        assert kept == "" or any(stop.startswith(kept) and stop != kept for stop in stops)


def test_stop_over_many_pieces_is_found() -> None:
    stop_filter = StopFilter(["<stop>"])

    assert [stop_filter.feed(piece) for piece in ("one <", "st", "op", "> two")] == ["one ", "", "", ""]
    assert stop_filter.found == "<stop>"


def test_false_beginning_is_let_go() -> None:
    stop_filter = StopFilter(["<stop>"])

    assert [stop_filter.feed(piece) for piece in ("one <", "st", "ep>")] == ["one ", "", "<step>"]


def test_nothing_comes_after_a_stop() -> None:
    stop_filter = StopFilter(["."])
    stop_filter.feed("One. Two")

    assert stop_filter.feed(" three") == ""
    assert stop_filter.flush() == ""


@pytest.mark.parametrize("text", ["", "any text"])
def test_without_stops_everything_passes(text: str) -> None:
    stop_filter = StopFilter([])

    assert stop_filter.feed(text) == text
    assert stop_filter.flush() == ""
