"""Token ids to text as they come: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer


class Detokenizer:
    """The text of a growing list of token ids.

    A character of several bytes may be spread over several tokens: `feed` keeps it back until it is whole. What
    `feed` and `flush` return concatenates to the tokenizer's own text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Begin a text.

        Args:
            tokenizer: what the ids are of.
            skip_special_tokens: leave them out.
        """
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skips_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._num_characters = 0

    def feed(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty for a special token or a part of a character."""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_characters += len(text)
        return text

    def flush(self) -> str:
        """Return what is still kept back: U+FFFD where the ids end inside a character."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skips_special_tokens)[self._num_characters :]
        self._num_characters += len(text)
        return text


class StopFilter:
    """Passes text on up to the first stop string.

    Text is kept back only while it may be the beginning of a stop string. Which string is found, and what is passed
    on, does not depend on how the text was cut into pieces: the one that is complete first wins, of two that end
    together the longer.
    """

    def __init__(self, stops: Iterable[str], *, is_passed_on: bool = False) -> None:
        """Begin a text.

        Args:
            stops: what ends it.
            is_passed_on: the stop string itself is part of the text too.
        """
        self._stops = tuple(stops)
        self._is_passed_on = is_passed_on
        self._kept = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Return what is safe to pass on; after a stop string nothing is."""
        if self.found is not None:
            return ""
        text = self._kept + text
        begin = self._search(text)
        if self.found is None:
            begin = len(text) - longest_beginning(text, self._stops)
            self._kept = text[begin:]
        else:
            self._kept = ""
            begin += len(self.found) if self._is_passed_on else 0
        return text[:begin]

    def flush(self) -> str:
        """Return what is kept back: no more text comes, so it is no stop string."""
        text, self._kept = self._kept, ""
        return text

    def _search(self, text: str) -> int:
        """Set `found` to the stop string that is complete first and return where it begins; len(text) without one."""
        best_end, best_begin = len(text) + 1, len(text)
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0 and (begin + len(stop), begin) < (best_end, best_begin):
                best_end, best_begin = begin + len(stop), begin
                self.found = stop
        return best_begin


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
