"""How requests that last for as long as their callers like leave a replica that is drained."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

PieceT = TypeVar("PieceT")


class Departure:
    """Whether it is time, for all requests of an engine."""

    def __init__(self) -> None:
        self._is_due = asyncio.Event()

    @property
    def is_due(self) -> bool:
        """The replica is drained."""
        return self._is_due.is_set()

    def on_drained(self, *, is_drained: bool) -> None:
        """See `StreamingEngine.on_drained`."""
        if is_drained:
            self._is_due.set()
        else:
            self._is_due.clear()

    async def pieces(
        self, source: AsyncIterator[PieceT], may_leave: Callable[[], bool]
    ) -> AsyncGenerator[PieceT, None]:
        """Yield what a source gives, to its end or until it is time to leave.

        Args:
            source: of one request; whoever made it closes it.
            may_leave: whether the request can do without what comes next.
        """
        piece: asyncio.Future[Any] | None = None
        due: asyncio.Future[Any] | None = None
        try:
            while not (self.is_due and may_leave()):
                piece = piece or asyncio.ensure_future(anext(source, None))
                due = due if due is not None and not due.done() else asyncio.ensure_future(self._is_due.wait())
                waiting = {piece} if self.is_due else {piece, due}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if piece.done():
                    value = piece.result()
                    piece = None
                    if value is None:
                        return
                    yield value
        finally:
            open_: list[asyncio.Future[Any]] = [future for future in (piece, due) if future is not None]
            for future in open_:
                future.cancel()
            await asyncio.gather(*open_, return_exceptions=True)
