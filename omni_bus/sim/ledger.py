"""What really happened to each chunk and each request, seen from outside the cores."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from omni_bus.core.recovery import origin
from omni_bus.wire.payloads import Text

if TYPE_CHECKING:
    from random import Random

    from omni_bus.ids import RequestId
    from omni_bus.wire.payloads import Payload


class Violation(AssertionError):
    """An invariant does not hold."""


class Ledger:
    """Chunks emitted and received, by request and port; ends of requests."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.emitted: Counter[tuple[RequestId, str]] = Counter()
        self.received: Counter[tuple[RequestId, str, str]] = Counter()
        self.finished: set[tuple[RequestId, str]] = set()
        self.ends: Counter[RequestId] = Counter()

    def emit(self, request: RequestId, source: str) -> Text:
        """Make the next payload of ``source`` (a stage and port); its text says which it is."""
        index = self.emitted[request, source]
        self.emitted[request, source] = index + 1
        return Text(
            f"{request}|{source}|{index}|" + "x" * (0 if self._rng.random() < 0.6 else self._rng.randrange(300))
        )

    def finish(self, request: RequestId, source: str) -> None:
        """`source` emits no more."""
        self.finished.add((request, source))

    def receive(self, request: RequestId, source: str, receiver: str, payload: Payload) -> None:
        """Check that `payload` is the next one that `receiver` should get from `source`.

        Raises:
            Violation: it is not: something was lost, doubled, reordered or mixed up.
        """
        index = self.received[request, source, receiver]
        self.received[request, source, receiver] = index + 1
        text = payload.text if isinstance(payload, Text) else ""
        if not text.startswith(f"{_sender(request, source)}|{source}|{index}|"):
            raise Violation(f"{receiver} got {text[:40]!r} where chunk {index} of {source} of {request} was due")

    def receive_end(self, request: RequestId, source: str, receiver: str) -> None:
        """Check that `receiver` got all that `source` emitted.

        Raises:
            Violation: the end came early.
        """
        sender = _sender(request, source)
        if source.startswith("in.") and self.ends[sender]:
            return  # a client that has all its outputs cuts its inputs short; nobody uses what a stage makes of them
        if (sender, source) not in self.finished:
            raise Violation(f"{receiver} saw the end of {source} of {request}, which had not ended")
        if self.received[request, source, receiver] != self.emitted[sender, source]:
            got, sent = self.received[request, source, receiver], self.emitted[sender, source]
            raise Violation(f"{receiver} saw the end of {source} of {request} after {got} of {sent} chunks")

    def end(self, request: RequestId) -> None:
        """Note an end, as the application sees it.

        Raises:
            Violation: it is the second one.
        """
        self.ends[request] += 1
        if self.ends[request] > 1:
            raise Violation(f"{request} ended twice")


def _sender(request: RequestId, source: str) -> RequestId:
    """Return the id under which `source` works: a client's input is that of the request which it made, always."""
    return origin(request) if source.startswith("in.") else request
