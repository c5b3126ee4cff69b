"""One actor's connection to the bus: its context, its inbox and its outbox under one name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from omni_bus.bus.inbox import Inbox
from omni_bus.bus.outbox import Outbox
from omni_bus.ids import Peer, Sender, new_incarnation

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.wire.frames import AnyFrame


class Link:
    """Binds the inbox under a fresh incarnation; `me` is what others send to.

    Args:
        name: the actor's name.
        listen: ``ipc://PATH`` or ``tcp://ADDRESS:PORT``; port 0 takes a free one.
        deliver: called with each frame and who sent it.
        on_stuck: called with a peer that does not read any more.
    """

    def __init__(
        self,
        name: str,
        listen: str,
        deliver: Callable[[Sender, AnyFrame], None],
        on_stuck: Callable[[Peer], None],
    ) -> None:
        sender = Sender(name, new_incarnation())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._inbox = Inbox(self._context, listen, deliver)
        except BaseException:
            self._context.term()
            raise
        self._outbox = Outbox(self._context, sender, on_stuck=on_stuck)
        self.me = Peer(name, sender.incarnation, self._inbox.endpoint)
        self.send = self._outbox.send
        self.forget = self._outbox.forget

    async def close(self, linger_s: float) -> None:
        """Send what can still be sent within `linger_s`, then close."""
        self._inbox.close()
        await self._outbox.close(linger_s)
        self._context.term()
        scheme, _, path = self.me.endpoint.partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)  # noqa: ASYNC240 (a local socket's name: no disk is waited for)
