"""One actor's connection to the bus: its context, its inbox, its outbox and shared memory under one name."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq

from omni_bus.bus.arena import DEFAULT_ARENA_LIMITS, Arena, ArenaLimits, ArenaStatistics
from omni_bus.bus.authenticator import Authenticator
from omni_bus.bus.borrowed import Borrowed, BorrowedStatistics
from omni_bus.bus.cuda_ipc import DEFAULT_CUDA_LIMITS, CudaArena, CudaLimits, CudaStatistics, CudaViews
from omni_bus.bus.inbox import Inbox, InboxStatistics
from omni_bus.bus.outbox import Outbox, OutboxStatistics
from omni_bus.bus.sockets import is_tcp
from omni_bus.ids import Peer, Sender, new_incarnation
from omni_bus.wire.codec import DeviceReference, Reference
from omni_bus.wire.frames import Confirm, Confirmed, Mapped, MappedDevice, Offer, OfferDevice, Release
from omni_bus.wire.payloads import ordinary_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.bus.curve import Curve
    from omni_bus.wire.frames import AnyFrame
    from omni_bus.wire.payloads import Blob

_log = logging.getLogger(__name__)

MAX_SOCKETS = 8192
"""Each peer that is reached over TCP takes three, one to send and two to watch it; the default is 1023."""


class LinkStatistics(NamedTuple):
    """Counts of a link's parts; `arena` is None where shared memory is switched off, `cuda` has one entry a device."""

    inbox: InboxStatistics
    outbox: OutboxStatistics
    borrowed: BorrowedStatistics
    arena: ArenaStatistics | None
    cuda: dict[int, CudaStatistics]
    refused: int = 0
    """Connections whose handshake failed."""


class Link:
    """Binds the inbox under a fresh incarnation; `me` is what others send to.

    Large blobs go to peers on this host through shared memory (`Arena`, `Borrowed`), those in GPU memory through that
    (`CudaArena`, `CudaViews`); the frames by which both ends agree on it never reach `deliver`.

    Args:
        name: the actor's name.
        listen: ``ipc://PATH`` or ``tcp://ADDRESS:PORT``; port 0 takes a free one.
        deliver: called with each frame and who sent it.
        on_stuck: called with a peer that does not read any more.
        arena: how much may be lent, and from which length on; others' arenas are read in any case.
        cuda: how much device memory may be lent; others' is read in any case.
        curve: the keys for TCP sockets; without them, these are neither encrypted nor guarded.
        on_broken: called with a peer to whom a TCP connection broke (`Outbox`).
        on_unreachable: called, again and again, with a peer to whom no TCP connection can be made.
        on_refused: called with a peer that takes no connection of ours, and why.
    """

    def __init__(
        self,
        name: str,
        listen: str,
        deliver: Callable[[Sender, AnyFrame], None],
        on_stuck: Callable[[Peer], None],
        arena: ArenaLimits = DEFAULT_ARENA_LIMITS,
        cuda: CudaLimits = DEFAULT_CUDA_LIMITS,
        *,
        curve: Curve | None = None,
        on_broken: Callable[[Peer], None] | None = None,
        on_unreachable: Callable[[Peer], None] | None = None,
        on_refused: Callable[[Peer, str], None] | None = None,
    ) -> None:
        sender = Sender(name, new_incarnation())
        self._borrowed = Borrowed(lambda peer, frame: self.send(peer, frame))  # noqa: PLW0108 (`send` is not there yet)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._views = CudaViews(self._borrowed.give_back)
        handlers = {
            Offer: self._on_offer,
            Mapped: self._on_mapped,
            OfferDevice: self._on_offer_device,
            MappedDevice: self._on_mapped_device,
            Release: self._on_release,
            Confirm: self._on_confirm,
            Confirmed: self._on_confirmed,
        }
        self._authenticator = Authenticator(self._context, curve) if curve is not None and is_tcp(listen) else None
        self._unconfirmed: dict[int, Peer] = {}
        self._num_confirms = 0
        self._is_confirmed = asyncio.Event()
        try:
            self._inbox = Inbox(
                self._context,
                listen,
                deliver,
                handlers=handlers,
                fetch=self._fetch,
                authenticator=self._authenticator,
            )
        except BaseException:
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.term()
            raise
        self.me = Peer(name, sender.incarnation, self._inbox.endpoint)
        self._arena = Arena(self.me, arena) if arena.max_bytes else None
        self._lend_from_bytes = arena.threshold_bytes
        self._cuda = CudaArena(self.me, lambda peer, frame: self.send(peer, frame), cuda)  # noqa: PLW0108 (see above)
        self._outbox = Outbox(
            self._context,
            sender,
            on_stuck=on_stuck,
            arena=self._arena,
            lend_from_bytes=arena.threshold_bytes,
            cuda=self._cuda,
            curve=curve,
            on_broken=on_broken,
            on_unreachable=on_unreachable,
            on_refused=on_refused,
        )
        self.send = self._outbox.send

    def allocate(self, num_bytes: int) -> Blob:
        """Return writable memory for a payload; from any thread.

        From the arena's threshold on, and while the arena has room, it is shared: sent to peers on this host, it
        travels without a copy (`Arena.allocate`). Otherwise it is ordinary memory, which can be sent as well.

        Raises:
            ValueError: `num_bytes` is negative.
        """
        if self._arena is not None and num_bytes >= self._lend_from_bytes:
            try:
                blob = self._arena.allocate(num_bytes)
            except OSError as error:
                _log.warning("no shared memory to write %d bytes in (sent in messages): %s", num_bytes, error)
            else:
                if blob is not None:
                    return blob
        return ordinary_memory(num_bytes)

    @property
    def peers(self) -> list[Peer]:
        """Those whom `forget` has something to close or take back of."""
        return self._outbox.peers

    def forget(self, peer: Peer) -> None:
        """Close the way to a peer that is gone, and take back what it was lent; views of its memory stay valid."""
        self._outbox.forget(peer)
        self._confirm([nonce for nonce, asked in self._unconfirmed.items() if asked == peer])
        self._borrowed.forget(peer.sender)
        self._views.forget(peer.sender)

    def recheck_keys(self) -> None:
        """Close the ways from and to clients whose key is not allowed any more; call it when the keys have changed."""
        if self._authenticator is None:
            return
        self._authenticator.recheck()
        for peer in self._outbox.peers:
            if is_tcp(peer.endpoint) and self._authenticator.curve.server_key(peer.actor) is None:
                self._outbox.forget(peer)

    def statistics(self) -> LinkStatistics:
        """Return the counts of all parts."""
        arena = None if self._arena is None else self._arena.statistics()
        return LinkStatistics(
            self._inbox.statistics(),
            self._outbox.statistics(),
            self._borrowed.statistics(),
            arena,
            self._cuda.statistics(),
            0 if self._authenticator is None else self._authenticator.num_refused,
        )

    async def delivered(self, timeout_s: float) -> bool:
        """Wait until all that was sent so far has been delivered to the actors that it was sent to.

        Closing can't tell that: it ends when the last byte has left, and who is gone by then may be missed by somebody
        who has yet to read it.

        Returns:
            Whether everybody said so in time. Peers that were forgotten meanwhile are not waited for.
        """
        for peer, is_bulk in self._outbox.ways():
            self._num_confirms += 1
            self._unconfirmed[self._num_confirms] = peer
            self.send(peer, Confirm(self._num_confirms, self.me, is_bulk))
        try:
            async with asyncio.timeout(timeout_s):
                while self._unconfirmed:
                    self._is_confirmed.clear()
                    await self._is_confirmed.wait()
        except TimeoutError:
            self._unconfirmed.clear()
            return False
        return True

    async def close(self, linger_s: float) -> None:
        """Send what can still be sent within `linger_s`, then close."""
        self._inbox.close()
        if self._authenticator is not None:
            self._authenticator.close()
        await self._outbox.close(linger_s)
        self._borrowed.close()
        if self._arena is not None:
            self._arena.close()
        self._cuda.close()
        self._context.term()
        scheme, _, path = self.me.endpoint.partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)  # noqa: ASYNC240 (a local socket's name: no disk is waited for)

    def _on_offer(self, sender: Sender, frame: Offer) -> None:
        if frame.peer.sender != sender:
            return  # an answer would go to somebody who did not ask
        try:
            self._borrowed.open(sender, frame.pid, frame.fd)
        except ValueError as error:
            self.send(frame.peer, Mapped(str(error)))
        else:
            self.send(frame.peer, Mapped())

    def _on_mapped(self, sender: Sender, frame: Mapped) -> None:
        self._outbox.mapped(sender, frame.reason)

    def _on_offer_device(self, sender: Sender, frame: OfferDevice) -> None:
        if frame.peer.sender == sender:
            self.send(frame.peer, self._views.offered(sender, frame))

    def _on_mapped_device(self, sender: Sender, frame: MappedDevice) -> None:
        self._cuda.mapped(sender, frame)

    def _on_release(self, sender: Sender, frame: Release) -> None:
        if frame.device is not None:
            self._cuda.release(sender, frame.device, frame.generations, frame.reads)
        elif self._arena is not None:
            self._arena.release(sender, frame.generations)

    def _on_confirm(self, sender: Sender, frame: Confirm) -> None:
        if frame.peer.sender == sender:
            self.send(frame.peer, Confirmed(frame.nonce))

    def _on_confirmed(self, sender: Sender, frame: Confirmed) -> None:
        asked = self._unconfirmed.get(frame.nonce)
        # The coordinator is known by its name: its address outlives its incarnations.
        if asked is not None and asked.actor == sender.actor and asked.incarnation in (0, sender.incarnation):
            self._confirm([frame.nonce])

    def _confirm(self, nonces: list[int]) -> None:
        for nonce in nonces:
            del self._unconfirmed[nonce]
        if nonces and not self._unconfirmed:
            self._is_confirmed.set()

    def _fetch(self, sender: Sender, reference: Reference | DeviceReference) -> memoryview | Blob:
        if isinstance(reference, DeviceReference):
            return self._views.view(sender, reference)
        return self._borrowed.view(sender, reference)
