"""Whether an engine still makes progress: a stage's loop may answer pings while its engine is stuck for ever.

An engine owes an answer while it runs a step, while it drops a request, and, where each request runs by itself, while
a request has credit to put out and input on every port that may still bring some. One that owes it for too long is
given up as a whole: nobody can free what it holds.

One timer serves all of that. It is set when the engine gets something to do and then again for the oldest debt, so a
step costs no timer of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Report, SetTimer, Stall

if TYPE_CHECKING:
    from omni_bus.core.effects import StageEffect, TimerKey

WATCH: TimerKey = ("watch", "")


class Watchdog:
    """Keeps the timer and tells of a stall once.

    Args:
        stage: whose engine it is, for the log.
        limit_s: an engine that owes an answer for so long is stuck; 0 switches this off.
    """

    def __init__(self, stage: str, limit_s: float) -> None:
        self._stage = stage
        self._limit_s = limit_s
        self._is_watching = False
        self._has_told = False

    def watch(self, now: float) -> list[StageEffect]:
        """The engine has something to do from now on."""
        if self._is_watching or self._has_told or not self._limit_s:
            return []
        self._is_watching = True
        return [SetTimer(WATCH, now + self._limit_s)]

    def on_timer(self, owing_since: float | None, now: float, *, is_idle: bool) -> list[StageEffect]:
        """Look after the engine.

        Args:
            owing_since: the moment of its oldest debt; None if it owes nothing.
            now: monotonic seconds.
            is_idle: it holds nothing that it could come to owe something for.
        """
        self._is_watching = False
        if self._has_told:
            return []
        if owing_since is None:
            return [] if is_idle else self.watch(now)
        if now < owing_since + self._limit_s:
            self._is_watching = True
            return [SetTimer(WATCH, owing_since + self._limit_s)]
        self._has_told = True
        seconds = now - owing_since
        return [Report("engine stalled", {"stage": self._stage, "for_s": round(seconds, 3)}), Stall(seconds)]
