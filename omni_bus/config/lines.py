"""Which line of a TOML document each key and list element is on.

The standard library's parser keeps no positions. This scanner runs only over documents that the parser has accepted, so
it needs to know where tokens end, not whether they are right.
Grammar: TOML 1.0.0, https://toml.io/en/v1.0.0 (and 1.1's line breaks inside inline tables).
"""

from __future__ import annotations

import bisect
import re
import tomllib

from omni_bus.config.layer import Path

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}#\n]*")
# The last quotes of a multi-line string may be preceded by one or two that belong to its content.
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'",
    re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """Return the line, counted from 1, of each table, key and list element of a valid document.

    A table that is only implied by a longer name has the line that names it first.
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._lines: dict[Path, int] = {}
        self._last_index: dict[Path, int] = {}

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self._peek():
            if self._text.startswith("[[", self._at):
                line = self._line()
                self._at += 2
                table = self._append_table(self._key(), line)
                self._at += 2
            elif self._text[self._at] == "[":
                line = self._line()
                self._at += 1
                table = self._resolve(self._key())
                self._at += 1
                self._note(table, line, is_header=True)
            else:
                self._pair(table)
        return self._lines

    def _peek(self) -> str:
        """Skip blanks and comments; return the next character, or nothing at the end."""
        self._skip(_BLANK)
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"line {self._line()}: not the TOML that the parser accepted")
        self._at = match.end()
        return match.group()

    def _line(self) -> int:
        return bisect.bisect_left(self._newlines, self._at) + 1

    def _note(self, path: Path, line: int, *, is_header: bool = False) -> None:
        for depth in range(1, len(path)):
            self._lines.setdefault(path[:depth], line)
        if is_header:
            self._lines[path] = line
        else:
            self._lines.setdefault(path, line)

    def _resolve(self, key: tuple[str, ...]) -> Path:
        """Put in the positions of the arrays of tables that a header's name passes through."""
        path: Path = ()
        for part in key:
            path = (*path, part)
            if path in self._last_index:
                path = (*path, self._last_index[path])
        return path

    def _append_table(self, key: tuple[str, ...], line: int) -> Path:
        array = (*self._resolve(key[:-1]), key[-1])
        index = self._last_index.get(array, -1) + 1
        self._last_index[array] = index
        self._note((*array, index), line)
        return (*array, index)

    def _key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            if self._text[self._at] in "\"'":
                parts.append(tomllib.loads("key = " + self._skip(_STRING))["key"])
            else:
                parts.append(self._skip(_BARE_KEY))
            self._skip(_SPACE)
            if self._text[self._at] != ".":
                return tuple(parts)
            self._at += 1

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._note(path, line)
        self._at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        first = self._text[self._at]
        if first in "\"'":
            self._skip(_STRING)
        elif first not in "[{":
            self._skip(_BARE_VALUE)
        else:
            self._at += 1
            index = 0
            while (character := self._peek()) not in ("]", "}"):
                if character == ",":
                    self._at += 1
                elif first == "{":
                    self._pair(path)
                else:
                    self._note((*path, index), self._line())
                    self._value((*path, index))
                    index += 1
            self._at += 1
