"""How much of each answer was made, sent, played, and counts as heard.

Played is what the client says; of a client that says nothing it is what the clock allows, since sound is played at its
own pace from when it is sent.
"""

from __future__ import annotations

from omni_bus.core.session.server_events import Playback


class Cursor:
    """Of one response, in milliseconds of its sound; nothing ever goes back."""

    def __init__(self, response_id: str, item_id: str, commit_number: int) -> None:
        self.response_id = response_id
        self.item_id = item_id
        self.commit_number = commit_number
        """Of the user's commits, the one that it answers; what is said after a later one is too late to count."""
        self.text = ""
        """All that the answer says."""
        self.sent_ms = 0.0
        self.acked_ms: float | None = None
        self.committed_ms = 0.0
        self.cap_ms: float | None = None
        """The client says that nothing beyond was heard, whatever it says later."""
        self.stopped_ms: float | None = None
        """How far the client was, as far as the clock tells, when the answer was cut off."""
        self.is_committed = False
        """It ended while the session took what ended for heard; only what the client says of this one counts more."""
        self._ends_at = 0.0
        """When a client plays the last of what was sent, at the earliest."""
        self._marks: list[tuple[float, int]] = []

    @property
    def view(self) -> Playback:
        """As events show it."""
        return Playback(
            generated_ms=self.sent_ms,
            sent_ms=self.sent_ms,
            played_ms=self.acked_ms or 0.0,
            committed_ms=self.committed_ms,
        )

    @property
    def is_cut(self) -> bool:
        """Whether its end was not heard."""
        return self.cap_ms is not None or self.stopped_ms is not None

    def on_sent(self, duration_ms: float, text_chars: int | None, now: float) -> None:
        """More sound goes out; it says the first `text_chars` characters, where that is known."""
        self.sent_ms += duration_ms
        self._ends_at = max(self._ends_at, now) + duration_ms / 1000
        if text_chars is not None:
            self._marks.append((self.sent_ms, text_chars))

    def on_ack(self, played_ms: float, committed_ms: float, *, is_final: bool) -> None:
        """The client says how far it is; with `is_final` it plays no more."""
        self.acked_ms = max(self.acked_ms or 0.0, played_ms)
        self.committed_ms = max(self.committed_ms, committed_ms)
        if is_final:
            self.cut(committed_ms)
            self.committed_ms = min(self.committed_ms, self.sent_ms)

    def cut(self, position_ms: float) -> None:
        """The client says that nothing beyond was heard; an earlier cut stays."""
        position_ms = min(position_ms, self.sent_ms)
        self.cap_ms = position_ms if self.cap_ms is None else min(self.cap_ms, position_ms)

    def stop(self, now: float) -> None:
        """The answer is cut off; the client may still say more exactly where."""
        if self.stopped_ms is None:
            self.stopped_ms = self.played_ms(now)
            self._ends_at = now

    def played_ms(self, now: float) -> float:
        """Return how much was played by now."""
        if self.acked_ms is not None:
            return min(self.acked_ms, self.sent_ms)
        return max(0.0, self.sent_ms - self.left_ms(now))

    def left_ms(self, now: float) -> float:
        """Return how long the client goes on playing, by the clock alone."""
        return max(0.0, self._ends_at - now) * 1000

    def lead_ms(self, now: float) -> float:
        """Return how far what was sent is ahead of what was played; nothing is once it was cut off."""
        return 0.0 if self.is_cut else self.sent_ms - self.played_ms(now)

    def heard(self, *, needs_ack: bool) -> str:
        """Return the part of the text that counts as heard; all of it where no sound was made."""
        if not self.sent_ms:
            return self.text
        limit = self._limit_ms(needs_ack=needs_ack)
        if limit is None or limit >= self.sent_ms:
            return self.text
        return _whole_words(self.text, self._chars_at(limit, len(self.text)))

    def is_settled(self, *, needs_ack: bool) -> bool:
        """Whether the client has said all that it will of what was heard, or need not."""
        is_due = needs_ack and not self.is_committed
        return self.is_cut or not is_due or self.committed_ms >= self.sent_ms

    def _limit_ms(self, *, needs_ack: bool) -> float | None:
        """Return what was heard at most; None for everything."""
        limits = [] if self.cap_ms is None else [self.cap_ms]
        if (needs_ack and not self.is_committed) or self.acked_ms is not None:
            limits.append(self.committed_ms)
        elif self.cap_ms is None and self.stopped_ms is not None:
            limits.append(self.stopped_ms)
        return min(limits, default=None)

    def _chars_at(self, position_ms: float, num_chars: int) -> int:
        """Interpolate between the marks, or over all where there are none."""
        start_ms, start_chars = 0.0, 0
        for end_ms, end_chars in [*self._marks, (self.sent_ms, num_chars)]:
            if position_ms <= end_ms:
                share = (position_ms - start_ms) / max(1e-9, end_ms - start_ms)
                return min(num_chars, start_chars + int(share * (end_chars - start_chars)))
            start_ms, start_chars = end_ms, end_chars
        return num_chars


def _whole_words(text: str, num_chars: int) -> str:
    """Return the beginning of a text, without the word that is cut in two."""
    if num_chars >= len(text) or text[num_chars].isspace() or not text[:num_chars].strip():
        return text[:num_chars].rstrip() if num_chars < len(text) else text
    head = text[:num_chars]
    words = head.rsplit(maxsplit=1)
    # Text without blanks (Chinese, say) is cut where it is.
    return words[0] if len(words) > 1 else head
