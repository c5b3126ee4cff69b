"""From streamed text to speakable sentences, each as soon as it is certain that it ended.

Where a sentence ends is decided by ``sentencex`` (abbreviations, initials, decimals). What it can't know is here: text
comes in pieces, lines end sentences too, no utterance may be endless, and a language model writes Markdown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from omni_bus.errors import BadInput
from omni_bus.wire.payloads import Text, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from omni_bus.engine import Inputs

MAX_SENTENCE_CHARS = 240
"""A longer one is cut. English has about one phoneme a character, and hibari's authors cut at 400 phonemes."""

MAX_WORD_CHARS = 40
MAX_DIGITS = 15
"""Longer numbers are read in groups of three digits; hibari has names for numbers of up to 36 digits."""

_WINDOW_CHARS = MAX_SENTENCE_CHARS + MAX_WORD_CHARS + 2
"""What a decision looks at: the longest sentence, and the word after it."""

_FEED_CHARS = 4096
"""Longer pieces are taken in slices, so that the cost stays linear."""

_CLAUSE_END = re.compile(r"[,;:—–)]\s+")
_WORD_END = re.compile(r"\s+")
_NEXT_WORD = re.compile(r"\W*\w\S*\s")
_LIST_NUMBER = re.compile(r"\d{1,3}[.)]")

# Quotes and brackets count as space when looking for ends: sentencex keeps what is between two of them together, so
# the decision would hang on a closing mark that may be far ahead. An apostrophe inside a word stays.
_MARKS = re.compile(r"""["“”„«»()\[\]{}]|(?<!\w)['‘’]|['‘’](?!\w)""")

_FENCE = re.compile(r"```|~~~")
_LINE_START = re.compile(r"\A(?:#{1,6}\s+|>\s*|[-*+•]\s+)+")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_EMPHASIS = re.compile(r"(?<!\w)[*_~`]+(?=\S)|(?<=\S)[*_~`]+(?!\w)")
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
_THREE_DIGITS = re.compile(r"\d{3}(?=\d)")
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARS}}}(?=\S)")


class SentenceSplitter:
    """Takes text in pieces and gives sentences; how the text was cut into pieces makes no difference.

    A sentence has ended when the word after it is complete (that word decides about "p.m." and its like), at the end of
    its line, or when it reaches `MAX_SENTENCE_CHARS`. Sentences come as they are to be spoken: without Markdown and
    fenced code; what holds no letter or digit is left out, and a list's number ("1.") joins what follows.
    """

    def __init__(self) -> None:
        from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue] (compiled)

        self._segment: Callable[[str, str], list[str]] = segment
        self._line = ""  # of the unfinished line, what no sentence was made of yet
        self._is_line_start = True
        self._is_in_code = False
        self._number = ""

    def feed(self, text: str) -> Iterator[str]:
        """Take a piece of text and yield the sentences that are certain now."""
        *lines, rest = text.split("\n")
        for line in lines:
            yield from self._add(line)
            yield from self._end_line()
        yield from self._add(rest)

    def end(self) -> Iterator[str]:
        """Yield what is left when the text has ended."""
        yield from self._end_line()
        if self._number:
            yield self._number
            self._number = ""

    def _add(self, text: str) -> Iterator[str]:
        for start in range(0, len(text), _FEED_CHARS):
            self._line = (self._line + text[start : start + _FEED_CHARS]).lstrip()
            if self._is_code_line():
                self._line = self._line[:_FEED_CHARS]  # of code only the fence matters
            else:
                yield from self._take(is_line_complete=False)

    def _end_line(self) -> Iterator[str]:
        if self._is_code_line():
            if _FENCE.match(self._line):
                self._is_in_code = not self._is_in_code
        else:
            yield from self._take(is_line_complete=True)
        self._line = ""
        self._is_line_start = True

    def _is_code_line(self) -> bool:
        return self._is_in_code or (self._is_line_start and _FENCE.match(self._line) is not None)

    def _take(self, *, is_line_complete: bool) -> Iterator[str]:
        while end := self._find_end(is_line_complete=is_line_complete):
            sentence = speakable(self._line[:end], is_line_start=self._is_line_start)
            self._line = self._line[end:].lstrip()
            self._is_line_start = False
            if _LIST_NUMBER.fullmatch(sentence):
                self._number = sentence
            elif sentence:
                yield f"{self._number} {sentence}".lstrip()
                self._number = ""

    def _find_end(self, *, is_line_complete: bool) -> int:
        """Return how long the line's first sentence is; 0 while that is not certain."""
        if not self._line:
            return 0
        window = self._line[:_WINDOW_CHARS]
        end = self._find_first_boundary(_MARKS.sub(" ", window))
        if end > MAX_SENTENCE_CHARS:
            is_certain = is_line_complete or len(self._line) >= _WINDOW_CHARS
            return _find_cut(window) if is_certain else 0
        after = window[end:]
        is_certain = is_line_complete or len(after) > MAX_WORD_CHARS or _NEXT_WORD.match(after) is not None
        return end if is_certain else 0

    def _find_first_boundary(self, text: str) -> int:
        """Return where the first sentence ends: at white space ("e.g.This" is none), or where the text does."""
        end = 0
        for sentence in self._segment("en", text):
            end += len(sentence)
            if sentence[-1].isspace():
                break
        return end


async def sentences_of(inputs: Inputs) -> AsyncIterator[str]:
    """Yield what is to be spoken of the input port ``text``; takes no piece before the sentences so far are taken.

    Raises:
        BadInput: something else than text came.
    """
    splitter = SentenceSplitter()
    async for payload in inputs.port("text"):
        if not isinstance(payload, Text):
            raise BadInput(f"text: {kind_of(payload)} came (allowed: text)", field="text")
        for sentence in splitter.feed(payload.text):
            yield sentence
    for sentence in splitter.end():
        yield sentence


def written_out(text: str) -> str:
    """Return English with dates, times, units, ranges and abbreviations as words, as hibari reads them.

    For voices that don't do it by themselves; plain numbers are left to them.
    """
    from hibari.g2p.normalize import normalize

    try:
        return normalize(text)
    except (ValueError, LookupError):  # it stumbles over odd digits
        return text


def _find_cut(text: str) -> int:
    """Return where to cut an overlong sentence: after the last clause of its second half, else after the last word."""
    for rule, least in ((_CLAUSE_END, MAX_SENTENCE_CHARS // 2), (_WORD_END, 1)):
        ends = [match.end() for match in rule.finditer(text, 0, MAX_SENTENCE_CHARS)]
        if ends and ends[-1] >= least:
            return ends[-1]
    return MAX_SENTENCE_CHARS


def speakable(text: str, *, is_line_start: bool = True) -> str:
    """Return text without Markdown and without what a voice can't read; empty where no letter or digit is left."""
    if is_line_start:
        text = _LINE_START.sub("", text)
    text = _LINK.sub(r"\1", text)
    text = _EMPHASIS.sub("", text)
    text = _LONG_NUMBER.sub(lambda match: _THREE_DIGITS.sub(r"\g<0> ", match[0]), text)
    text = _LONG_WORD.sub(r"\g<0> ", text)
    return " ".join(text.split()) if any(char.isalnum() for char in text) else ""
