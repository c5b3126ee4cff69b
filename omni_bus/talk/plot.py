"""One turn as a picture: who spoke when, and what the listener waited for."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING

from omni_bus.talk.dialogue import PARTS, Turn, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLOURS = {"user": "#3b6fb6", "wait": "#d1682b", "answer": "#4b9a5b"}


def chosen(turns: Sequence[Turn]) -> Turn | None:
    """Return the last turn that was answered."""
    return next((turn for turn in reversed(turns) if turn.played_at is not None and turn.stopped_at is not None), None)


def lanes_of(turn: Turn) -> list[tuple[str, str, float, float]]:
    """Return what is drawn: label, whose, begin and end in seconds from the end of speech."""
    end_at = turn.speech_end_at
    assert end_at is not None
    assert turn.played_at is not None
    lanes = [("the user speaks", "user", turn.speech_at - end_at, 0.0)]
    for label, (since, until) in zip(PARTS.values(), spans(turn), strict=True):
        if since is not None and until is not None:
            lanes.append((label, "wait", since / 1000, until / 1000))
    return [*lanes, ("the answer is heard", "answer", turn.played_at - end_at, turn.played_until - end_at)]


def draw(turn: Turn, path: str) -> None:
    """Draw it into a file, whose ending decides the format."""
    from matplotlib import pyplot as plt

    lanes = lanes_of(turn)
    figure, axis = plt.subplots(figsize=(10, 0.5 * len(lanes) + 1.4), constrained_layout=True)
    for place, (_, whose, begin, end) in enumerate(lanes):
        axis.barh(place, end - begin, left=begin, height=0.6, color=_COLOURS[whose])
        words = f"{(end - begin) * 1000:.0f} ms" if whose == "wait" else f"{end - begin:.2f} s"
        axis.annotate(words, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.axvline(0, color="#777777", linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(lanes)), [label for label, *_ in lanes])
    axis.invert_yaxis()
    axis.use_sticky_edges = False
    axis.margins(x=0.08)
    axis.set_xlabel("seconds from the end of speech")
    words = shorten(turn.heard, 80, placeholder="…")
    axis.set_title(f"“{words}”" if words else "One turn", fontsize=11, parse_math=False)  # a price is no formula
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
