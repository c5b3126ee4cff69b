"""Word errors of a recogniser: the words that it heard against those that were said."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ((1_000_000, "million"), (1_000, "thousand"), (100, "hundred"))

_SPELLED = {"mr": "mister", "mrs": "missus", "dr": "doctor", "st": "saint", "ok": "okay"}
_SIGNS = {"%": " percent ", "&": " and ", "+": " plus "}
_WORD = re.compile(r"\d+|[^\W\d_]+(?:'[^\W\d_]+)*")


class WordErrors(msgspec.Struct, frozen=True):
    """How two texts differ, by the fewest edits that turn what was said into what was heard."""

    words: int
    """That were said."""
    substituted: int = 0
    left_out: int = 0
    put_in: int = 0

    @property
    def errors(self) -> int:
        """All edits."""
        return self.substituted + self.left_out + self.put_in

    @property
    def rate(self) -> float:
        """Errors per word that was said; more than 1 if much was put in, and no number if nothing was said."""
        return self.errors / self.words if self.words else float("nan")


def words_of(text: str) -> list[str]:
    """Return a text's words so that two ways of writing the same come to the same.

    Lower case, no punctuation but apostrophes within words, whole numbers below a billion and a few signs and titles
    as they are read; English.
    """
    text = unicodedata.normalize("NFKC", text).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    for sign, word in _SIGNS.items():
        text = text.replace(sign, word)
    found: list[str] = []
    for match in _WORD.finditer(text):
        word = match.group()
        if word.isdecimal() and len(word) < 10:
            found += _read(int(word))
        else:
            found.append(_SPELLED.get(word, word))
    return found


def _read(number: int) -> list[str]:
    """Return a number below a billion, as it is read."""
    if number < 20:
        return [_SMALL[number]]
    for scale, name in _SCALES:
        if number >= scale:
            rest = number % scale
            return [*_read(number // scale), name, *(_read(rest) if rest else [])]
    return [_TENS[number // 10 - 2], *(_read(number % 10) if number % 10 else [])]


def count(said: str, heard: str) -> WordErrors:
    """Return the errors of one text."""
    return compare(words_of(said), words_of(heard))


def compare(said: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """Return the fewest edits between two sequences of words (Levenshtein, 1965)."""
    # For each number of heard words: (errors, substituted, left out, put in) of what was said so far.
    row = [(n, 0, 0, n) for n in range(len(heard) + 1)]
    for word in said:
        above, row = row, [(row[0][0] + 1, 0, row[0][2] + 1, 0)]
        for place, other in enumerate(heard):
            errors, substituted, left_out, put_in = above[place]
            differs = int(word != other)
            found = (errors + differs, substituted + differs, left_out, put_in)
            errors, substituted, left_out, put_in = above[place + 1]
            found = min(found, (errors + 1, substituted, left_out + 1, put_in))
            errors, substituted, left_out, put_in = row[place]
            row.append(min(found, (errors + 1, substituted, left_out, put_in + 1)))
    _, substituted, left_out, put_in = row[-1]
    return WordErrors(len(said), substituted, left_out, put_in)


def total(counts: Iterable[WordErrors]) -> WordErrors:
    """Return the errors of several texts: long ones count for more than short ones."""
    sums = [0, 0, 0, 0]
    for one in counts:
        for place, value in enumerate((one.words, one.substituted, one.left_out, one.put_in)):
            sums[place] += value
    return WordErrors(*sums)
