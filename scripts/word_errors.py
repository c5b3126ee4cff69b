"""The word error rate: how many words were heard wrong, of those that were said."""

from __future__ import annotations

import re
import unicodedata

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def words_of(text: str) -> list[str]:
    """Return a text's words as they sound: lower case, no punctuation, small numbers in words."""
    text = unicodedata.normalize("NFKC", text).lower().replace("\u2019", "'")
    words = (word.strip("'") for word in re.findall(r"[^\W_]+(?:'[^\W_]+)?", text))
    return [_ONES[int(word)] if word.isdecimal() and int(word) < len(_ONES) else word for word in words]


def word_errors(said: list[str], heard: list[str]) -> int:
    """Return the fewest words to put in, leave out or replace that make one of the other (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        above, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (word != other)))
    return row[-1]
