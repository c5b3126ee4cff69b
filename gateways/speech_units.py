"""Where streamed text is cut into units that are spoken one by one. Pure: text in, units out."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Granularity: TypeAlias = Literal["none", "sentence", "clause"]

ASCII_SENTENCE, SCRIPT_SENTENCE = ".!?", "。！？…।॥؟"
ASCII_CLAUSE, SCRIPT_CLAUSE = ",;", "，；،؛"
"""An ASCII mark ends a unit only before white space (``3.14``, ``1,000``, ``a.b``); marks of scripts that write none
after them end it before anything."""

CLOSING = "\"'”’»›)]}」』】）〉》"
"""What belongs to the mark before it."""

ABBREVIATIONS = frozenset(
    (
        *("dr", "mr", "mrs", "ms", "prof", "rev", "sr", "jr", "st", "mt", "capt", "col", "gen", "gov", "lt", "rep"),
        *("sen", "sgt", "approx", "cf", "dept", "est", "etc", "fig", "no", "nos", "op", "pp", "vs", "al", "ph.d"),
        *("co", "corp", "inc", "ltd", "ave", "blvd", "rd", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep"),
        *("sept", "oct", "nov", "dec"),
    )
)
"""English ones that a full stop ends without ending a sentence, in lower case and without it."""

_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
"""``J``, ``U.S``, ``a.m``, ``e.g``."""

_LAST_WORD = re.compile(r"[\w.]+\Z")
_MAX_WORD_CHARS = 16
_SPOKEN = re.compile(r"\w")


class UnitSplitter:
    """Takes text in pieces and gives units; how the text was cut into pieces makes no difference.

    A mark, and those and the closing quotes and brackets that follow it, belong to the unit that they end; that is
    certain once the character after them is there. No character is looked at twice. What holds no letter and no digit
    is no unit by itself: it stays with what follows.

    Args:
        granularity: ``none`` gives all text as one unit at the flush.
    """

    def __init__(self, granularity: Granularity) -> None:
        self._ascii = "" if granularity == "none" else ASCII_SENTENCE
        self._script = "" if granularity == "none" else SCRIPT_SENTENCE
        if granularity == "clause":
            self._ascii += ASCII_CLAUSE
            self._script += SCRIPT_CLAUSE
        marks = self._ascii + self._script
        self._mark = re.compile(f"[{re.escape(marks)}]") if marks else None
        self._rest_of_run = re.compile(f"[{re.escape(marks + CLOSING)}]*")
        self._has_given = False
        self._begin()

    def _begin(self) -> None:
        self._parts: list[str] = []
        self._word = ""
        """The unit's last characters before its run of marks."""
        self._run = ""
        """The last characters of the marks and of what closes after them, so far at the end of the unit."""
        self._marks = ""
        """The first two marks of the run; a mark of a script in any place stands for all."""
        self._has_word = False
        self.num_chars = 0
        """Characters that are held."""

    def feed(self, text: str) -> list[str]:
        """Take a piece; return the units that it completes."""
        units: list[str] = []
        at = 0
        while at < len(text):
            if self._run:
                found = self._rest_of_run.match(text, at)
                assert found is not None
                self._go_on_with_run(found[0])
                at = found.end()
                if at < len(text):
                    units += self._end_run(text[at])
            else:
                found = self._mark.search(text, at) if self._mark is not None else None
                end = len(text) if found is None else found.start()
                self._take(text[at:end])
                if found is not None:
                    self._go_on_with_run(found[0])
                    end += 1
                at = end
        return units

    def flush(self) -> list[str]:
        """Return what is left, as the text ends here."""
        unit = "".join(self._parts).strip()
        is_unit = bool(unit) and (self._has_word or not self._has_given)
        self._begin()
        self._has_given = False
        return [unit] if is_unit else []

    def _hold(self, text: str) -> None:
        self._parts.append(text)
        self.num_chars += len(text)

    def _take(self, text: str) -> None:
        """Take text without marks."""
        self._hold(text)
        self._word = (self._word + text[-_MAX_WORD_CHARS:])[-_MAX_WORD_CHARS:]
        self._has_word = self._has_word or _SPOKEN.search(text) is not None

    def _go_on_with_run(self, more: str) -> None:
        self._hold(more)
        self._run = (self._run + more)[-_MAX_WORD_CHARS:]
        scripted = "".join(mark for mark in more if mark in self._script)
        self._marks = (scripted + self._marks + "".join(mark for mark in more if mark in self._ascii))[:2]

    def _end_run(self, after: str) -> list[str]:
        """Decide about a run by the character after it; return the unit if it ends one."""
        is_end = self._marks[0] in self._script or (after.isspace() and not self._is_abbreviation())
        if not is_end or not self._has_word:
            self._word = (self._word + self._run)[-_MAX_WORD_CHARS:]
            self._run = self._marks = ""
            return []
        unit = "".join(self._parts).strip()
        self._begin()
        self._has_given = True
        return [unit]

    def _is_abbreviation(self) -> bool:
        if self._marks != ".":
            return False
        found = _LAST_WORD.search(self._word)
        word = found[0].lower() if found is not None else ""
        return word in ABBREVIATIONS or _INITIALS.fullmatch(word) is not None


class Joiner:
    """Joins halves of a surrogate pair that came in two pieces: a client that counts in UTF-16 may cut through one."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        """Return a piece as far as its characters are whole; a half without its other one becomes U+FFFD."""
        text, self._half = self._half + text, ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def flush(self) -> str:
        """Return what stands for a half that stayed alone."""
        half, self._half = self._half, ""
        return "\ufffd" if half else ""
