"""Lines of keys: written by hand for each form, and against random documents."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_bus.config.lines import key_lines


def test_tables_dotted_keys_and_inline_tables_have_their_lines() -> None:
    text = """# comment = "no"
title = "x # = [y]"
[a.b]
c = 1
d.e = 2
"f g".'h' = { i = 1, j = [1,
  2] }
"""

    lines = key_lines(text)

    assert lines == {
        ("title",): 2,
        ("a",): 3,
        ("a", "b"): 3,
        ("a", "b", "c"): 4,
        ("a", "b", "d"): 5,
        ("a", "b", "d", "e"): 5,
        ("a", "b", "f g"): 6,
        ("a", "b", "f g", "h"): 6,
        ("a", "b", "f g", "h", "i"): 6,
        ("a", "b", "f g", "h", "j"): 6,
        ("a", "b", "f g", "h", "j", 0): 6,
        ("a", "b", "f g", "h", "j", 1): 7,
    }


def test_multi_line_strings_do_not_shift_lines() -> None:
    text = 'a = """\n[b]\nc = 1 \\""" d\n"""""\ne = \'\'\'\n]#\n\'\'\'\nf = 1\n'

    assert tomllib.loads(text)["a"] == '[b]\nc = 1 """ d\n""'
    assert key_lines(text) == {("a",): 1, ("e",): 5, ("f",): 8}


def test_arrays_of_tables_count_their_positions() -> None:
    text = "[[s]]\nn = 1\n[[s]]\nn = 2\n[s.t]\nm = 1\n[[s.u]]\no = 1979-05-27 07:32:00\n"

    lines = key_lines(text)

    assert lines[("s", 0, "n")] == 2
    assert lines[("s", 1)] == 3
    assert lines[("s", 1, "t", "m")] == 6
    assert lines[("s", 1, "u", 0, "o")] == 8


_KEYS = st.sampled_from(["a", "b-c", "D", '"x.y"', "'q '", '"\\u0041[=#"'])
_BLANKS = st.sampled_from(["", " ", "\n", "# note ] } = \n", "\n\n \t"])
_SCALARS = st.sampled_from(
    ["1", "-2.5e3", "true", '"] , }"', "'#'", '"""m\n" ""\n"""', "'''\n[x]\ny = 1'''", "1979-05-27T07:32:00Z", "inf"]
)


@st.composite
def _documents(draw: st.DrawFn) -> tuple[str, dict[tuple[str | int, ...], int]]:
    """A document that is written piece by piece, with the lines noted while writing."""
    text = ""
    lines: dict[tuple[str | int, ...], int] = {}

    def here() -> int:
        return text.count("\n") + 1

    def write_list(path: tuple[str | int, ...], depth: int) -> None:
        nonlocal text
        text += "["
        for index in range(draw(st.integers(0, 3))):
            text += draw(_BLANKS)
            lines[(*path, index)] = here()
            write_value((*path, index), depth + 1)
            text += draw(_BLANKS) + ","
        text += draw(_BLANKS) + "]"

    def write_table(path: tuple[str | int, ...], depth: int) -> None:
        nonlocal text
        text += "{"
        for number, key in enumerate(draw(st.lists(_KEYS, max_size=2, unique=True))):
            text += " , " if number else " "
            inner = (*path, *tomllib.loads(f"{key} = 1"))
            lines[inner] = here()
            text += f"{key} ="
            write_value(inner, depth + 1)
        text += " }"

    def write_value(path: tuple[str | int, ...], depth: int) -> None:
        nonlocal text
        form = draw(st.integers(0, 4)) if depth < 3 else 0
        if form == 3:
            write_list(path, depth)
        elif form == 4:
            write_table(path, depth)
        else:
            text += draw(_SCALARS)

    for number in range(draw(st.integers(0, 4))):
        text += draw(_BLANKS)
        lines[(f"t{number}",)] = here()
        text += f"[ t{number} ]  # head\n"
        for key in draw(st.lists(_KEYS, max_size=3, unique=True)):
            text += draw(_BLANKS)
            path = (f"t{number}", *tomllib.loads(f"{key} = 1"))
            lines[path] = here()
            text += f"{key} = "
            write_value(path, 0)
            text += "\n"
    return text, lines


@settings(max_examples=300, deadline=None)
@given(_documents())
def test_random_documents_have_the_lines_they_were_written_on(
    document: tuple[str, dict[tuple[str | int, ...], int]],
) -> None:
    text, lines = document
    parsed: Any = tomllib.loads(text)

    assert key_lines(text) == lines
    assert {path[0] for path in lines} == set(parsed)
