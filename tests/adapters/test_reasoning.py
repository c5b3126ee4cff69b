from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.reasoning import ThinkingFilter


def read(*pieces: str, is_open: bool = False) -> tuple[str, str]:
    """Return the reasoning and the text."""
    thinking = ThinkingFilter(is_open=is_open)
    found = [piece for text in pieces for piece in thinking.feed(text)] + thinking.flush()
    return tuple("".join(text for port, text in found if port == wanted) for wanted in ("reasoning", "text"))  # pyright: ignore[reportReturnType] (two of them)


CASES = {
    "no reasoning": ("Hello <b>", False, ("", "Hello <b>")),
    "reasoning, then an answer": ("<think>\nwell, 1 < 2\n</think>\n\nYes.\n", False, ("well, 1 < 2", "Yes.\n")),
    "the prompt began it": ("hmm </thin </think> Yes", True, ("hmm </thin", "Yes")),
    "empty reasoning": ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
    "blanks before": ("\n <think>a</think>b", False, ("a", "b")),
    "cut in reasoning": ("<think>so ", False, ("so", "")),
    "cut in the closing tag": ("<think>so</thi", False, ("so</thi", "")),
    "cut in the opening tag": ("<thi", False, ("", "<thi")),
    "a later tag is text": ("a <think>b</think>", False, ("", "a <think>b</think>")),
    "only blanks": (" \n", False, ("", " \n")),
}


@pytest.mark.parametrize(("written", "is_open", "parts"), CASES.values(), ids=CASES)
def test_reasoning_is_told_apart_however_it_is_cut(written: str, is_open: bool, parts: tuple[str, str]) -> None:  # noqa: FBT001 (a parameter of the table)
    assert read(written, is_open=is_open) == parts
    assert read(*written, is_open=is_open) == parts
    for cut in range(len(written)):
        assert read(written[:cut], written[cut:], is_open=is_open) == parts


@given(st.text(alphabet="<>/think \na", max_size=40), st.integers(0, 40), st.booleans())
def test_any_text_is_read_the_same_however_it_is_cut(written: str, cut: int, is_open: bool) -> None:  # noqa: FBT001 (drawn)
    assert read(written[:cut], written[cut:], is_open=is_open) == read(written, is_open=is_open)


def test_reasoning_streams_and_says_when_it_ends() -> None:
    thinking = ThinkingFilter(is_open=True)

    assert [piece.text for piece in thinking.feed("one two")] == ["one two"]
    assert thinking.is_thinking
    thinking.feed("</think>")
    assert not thinking.is_thinking
