"""Tensors from GPU to GPU memory between actors of one host, without the host seeing their bytes.

`CudaArena` is the sender's side: it copies a tensor, on the device and in the background, into a range that readers
have mapped, and lends it to them. `CudaViews` is the reader's: tensors over the same memory, given back when the last
one is gone. Both only keep the books; torch and CUDA are in `cuda_memory`, which imports them when a process that uses
CUDA already has something to share.

A peer is asked once whether it can map the range (`OfferDevice`, `MappedDevice`). Until it says so, and for peers on
other hosts, without CUDA or without access to the device, and whenever the range is full, the tensor's bytes travel
like any other blob's: through the host, and copying them there waits for the device.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omni_bus.bus import cuda_memory
from omni_bus.bus.cuda_memory import BLOCK_BYTES, MAX_OPENED_EVENTS
from omni_bus.bus.leases import Block, LeaseCounts, Leases
from omni_bus.errors import BadFrame
from omni_bus.wire.codec import DeviceReference
from omni_bus.wire.device import DeviceBlob
from omni_bus.wire.frames import MappedDevice, OfferDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.frames import Release

_log = logging.getLogger(__name__)

MAX_DEVICES_PER_OWNER = 64
"""Ranges of one peer that are mapped here, one for each of its devices."""


class CudaLimits(NamedTuple):
    """Device memory that one actor may lend at a time, on each device that it sends from (0: none)."""

    max_bytes: int = 256 << 20


DEFAULT_CUDA_LIMITS = CudaLimits()


class Range(Protocol):
    """What `CudaArena` needs of `cuda_memory.OwnRange`."""

    def offer(self) -> OfferDevice:
        """Return what a reader needs to map it."""
        ...

    def write(self, offset: int, blob: DeviceBlob) -> bytes:
        """Copy a blob to `offset`; return the handle of the event after it."""
        ...

    def open_event(self, handle: bytes) -> Any:
        """Return a reader's event; raises `ValueError`."""
        ...

    def close(self) -> None:
        """Give the memory up."""
        ...


class CudaStatistics(NamedTuple):
    """Of one device: its leases, and the blocks let go whose readers' streams are not done yet."""

    leases: LeaseCounts
    draining: int


class _Sharing(enum.Enum):
    OFFERED = enum.auto()
    MAPPED = enum.auto()
    NEVER = enum.auto()


class _Pool:
    """One device: its range, the leases, who reads it, and what is let go but perhaps still read."""

    def __init__(self, range_: Range, data_bytes: int) -> None:
        self.range = range_
        self.leases = Leases(data_bytes, BLOCK_BYTES)
        self.sharing: dict[Sender, _Sharing] = {}
        self.pids: dict[Sender, int] = {}
        self.draining: deque[tuple[Block, Sender, list[Any]]] = deque()
        self.events: dict[Sender, dict[bytes, Any]] = {}
        self.last: tuple[weakref.ref[DeviceBlob], Block, DeviceReference] | None = None

    def let_go(self, blocks: list[Block], reader: Sender, events: list[Any]) -> None:
        """Free blocks once the reader's events have come."""
        self.draining.extend((block, reader, events) for block in blocks)
        self.sweep()

    def sweep(self) -> None:
        """Free what nobody reads any more."""
        for _ in range(len(self.draining)):
            block, reader, events = self.draining.popleft()
            if all(map(_has_come, events)):
                self.leases.free(block)
            else:
                self.draining.append((block, reader, events))

    def forget(self, reader: Sender) -> None:
        """Free what a dead reader held: the driver has ended its work with it, and its events may never come."""
        self.sharing.pop(reader, None)
        cuda_memory.remove_remains(self.pids.pop(reader, 0))
        self.events.pop(reader, None)
        self.draining = deque((block, who, [] if who == reader else events) for block, who, events in self.draining)
        self.let_go(self.leases.forget(reader), reader, [])


class CudaArena:
    """Lends copies of tensors, made on their device, to readers on this host.

    A range is made on each device when a tensor there is first sent. Nothing waits: a block that its readers have let
    go, but whose streams are not done, is used again only after a look says that they are; if there is no other, the
    tensor goes through the host. So a reader that dies with work in flight can't hold anything up.

    Not for use from several threads.

    Args:
        owner: this actor, as readers reach it.
        send: sends a frame to a peer.
        limits: rounded down to whole blocks.
        make_range: of an owner, a device and a size.

    Raises:
        RuntimeError: no running loop.
    """

    def __init__(
        self,
        owner: Peer,
        send: Callable[[Peer, OfferDevice], None],
        limits: CudaLimits = DEFAULT_CUDA_LIMITS,
        make_range: Callable[[Peer, int, int], Range] = cuda_memory.OwnRange,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._send = send
        self._data_bytes = limits.max_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._make_range = make_range
        self._pools: dict[int, _Pool | None] = {}

    def lend(self, blob: DeviceBlob, peer: Peer) -> DeviceReference | None:
        """Copy a blob to where `peer` can view it; None if it can't (yet), or if there is no room.

        The blob that was copied last is not copied again for other readers while one of them holds it.
        """
        if not peer.endpoint.startswith("ipc://") or not self._data_bytes:
            return None
        pool = self._pool(blob.device_index)
        if pool is None:
            return None
        reader = peer.sender
        sharing = pool.sharing.get(reader)
        if sharing is None:
            pool.sharing[reader] = _Sharing.OFFERED
            # Later, because the caller is in the middle of sending.
            self._loop.call_soon(self._offer, pool, peer)
        if sharing is not _Sharing.MAPPED:
            return None
        if pool.last is not None and pool.last[0]() is blob and pool.last[1].num_readers:
            _, block, reference = pool.last
        else:
            pool.sweep()
            taken = pool.leases.take(len(blob), reader)
            if taken is None:
                return None
            block = taken
            written = self._write(pool, block, blob)
            reference = DeviceReference(blob.device_index, block.offset, len(blob), block.generation, written)
            pool.last = (weakref.ref(blob), block, reference)
        pool.leases.lend(block, reader)
        return reference

    def mapped(self, reader: Sender, frame: MappedDevice) -> None:
        """Take a peer's answer to an offer."""
        pool = self._pools.get(frame.device)
        if pool is None or pool.sharing.get(reader) is not _Sharing.OFFERED:
            return
        pool.sharing[reader] = _Sharing.NEVER if frame.reason else _Sharing.MAPPED
        pool.pids[reader] = frame.pid
        if frame.reason:
            _log.info("%s can't map device %d (sent through the host): %s", reader.actor, frame.device, frame.reason)

    def release(self, reader: Sender, device: int, generations: tuple[int, ...], reads: tuple[bytes, ...] = ()) -> None:
        """Take back what a reader gives; the memory is written again after its events `reads` have come."""
        pool = self._pools.get(device)
        if pool is not None:
            pool.let_go(pool.leases.release(reader, generations), reader, self._events(pool, reader, reads))

    def forget(self, reader: Sender) -> None:
        """Take back all that a reader holds: it is gone, and reads no more."""
        for pool in self._pools.values():
            if pool is not None:
                pool.forget(reader)

    def statistics(self) -> dict[int, CudaStatistics]:
        """Return the counts of each device."""
        found: dict[int, CudaStatistics] = {}
        for device, pool in self._pools.items():
            if pool is not None:
                pool.sweep()
                found[device] = CudaStatistics(pool.leases.counts(), len(pool.draining))
        return found

    def close(self) -> None:
        """Give the memory up."""
        for pool in self._pools.values():
            if pool is not None:
                pool.range.close()
        self._pools.clear()
        self._data_bytes = 0

    def _pool(self, device: int) -> _Pool | None:
        """Return the device's pool, made at the first call; None if it can't be made."""
        if device not in self._pools:
            try:
                range_ = self._make_range(self._owner, device, self._data_bytes)
            except ValueError as error:
                _log.warning("tensors on device %d go through the host: %s", device, error)
                self._pools[device] = None
            else:
                self._pools[device] = _Pool(range_, self._data_bytes)
        return self._pools[device]

    def _offer(self, pool: _Pool, peer: Peer) -> None:
        if pool.sharing.get(peer.sender) is _Sharing.OFFERED:  # else forgotten in the same turn
            self._send(peer, pool.range.offer())

    def _write(self, pool: _Pool, block: Block, blob: DeviceBlob) -> bytes:
        try:
            return pool.range.write(block.offset, blob)
        except BaseException:
            pool.leases.free(block)
            raise

    def _events(self, pool: _Pool, reader: Sender, reads: tuple[bytes, ...]) -> list[Any]:
        """Open the events that a reader named; one that isn't there belongs to a reader that is gone, or that lies."""
        known = pool.events.setdefault(reader, {})
        events: list[Any] = []
        for handle in reads:
            event = known.get(handle)
            if event is None:
                try:
                    event = pool.range.open_event(handle)
                except ValueError as error:
                    _log.warning("%s gave memory back, but %s", reader.actor, error)
                    continue
                if len(known) >= MAX_OPENED_EVENTS:
                    known.clear()
                known[handle] = event
            events.append(event)
        return events


def _has_come(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:
        return True  # its process is gone


class View(Protocol):
    """What `CudaViews` needs of `cuda_memory.ForeignRange`."""

    owner: Peer
    is_owner_live: bool
    device_index: int
    pid: int

    def check(self, reference: DeviceReference) -> None:
        """Refuse a reference that leaves the range; raises `ValueError`."""
        ...

    def tensor(self, reference: DeviceReference, lease: Any) -> Any:
        """Return the bytes as a uint8 tensor that keeps `lease`; raises `ValueError`."""
        ...

    def used(self, generation: int, streams: set[Any]) -> None:
        """Note on which streams what is about to be given back was used."""
        ...

    def release(self, generations: tuple[int, ...]) -> Release:
        """Return the frame that gives these back."""
        ...


class _Lease:
    """Kept by a received blob and by every tensor made of it; when all are gone, in whatever thread, it goes back."""

    __slots__ = ("_generation", "_range", "_return", "streams")

    def __init__(self, range_: View, generation: int, give_back: Callable[[Any, int], None]) -> None:
        self._range = range_
        self._generation = generation
        self._return = give_back
        self.streams: set[Any] = set()

    def __del__(self) -> None:
        self._range.used(self._generation, self.streams)
        self._return(self._range, self._generation)


class LeasedDeviceBlob(DeviceBlob):
    """Device memory of a peer, on loan."""

    __slots__ = ("_lease", "_range", "_reference")

    def __init__(self, range_: View, reference: DeviceReference, lease: _Lease) -> None:
        super().__init__(reference.length, range_.device_index)
        self._range = range_
        self._reference = reference
        self._lease = lease

    def tensor(self) -> Any:
        """Return a tensor over the peer's memory, when the peer's device has written it.

        The memory stays mapped while any view of it lives, also if the peer dies; then nobody writes there any more.

        Raises:
            BadFrame: the peer named an event that does not exist, or died before the event came.
        """
        try:
            return self._range.tensor(self._reference, self._lease)
        except ValueError as error:
            raise BadFrame(f"a tensor from {self._range.owner.actor}: {error}", field="payload") from error


class CudaViews:
    """What this actor views of others' device memory.

    Args:
        give_back: told a range and a generation when nobody views that any more, in whatever thread that happens.
        open_range: maps what was offered; raises `ValueError`.
    """

    def __init__(
        self,
        give_back: Callable[[Any, int], None],
        open_range: Callable[[Sender, OfferDevice], View] = cuda_memory.ForeignRange,
    ) -> None:
        self._give_back = give_back
        self._open = open_range
        self._ranges: dict[tuple[Sender, int], View] = {}

    def offered(self, sender: Sender, offer: OfferDevice) -> MappedDevice:
        """Map what a peer offers, and return the answer."""
        try:
            key = (sender, offer.device)
            if key not in self._ranges and sum(owner == sender for owner, _ in self._ranges) >= MAX_DEVICES_PER_OWNER:
                raise ValueError(f"{MAX_DEVICES_PER_OWNER} ranges of {sender.actor} are mapped already")
            self._ranges[key] = self._open(sender, offer)
        except ValueError as error:
            return MappedDevice(offer.device, str(error))
        return MappedDevice(offer.device, pid=os.getpid())

    def view(self, sender: Sender, reference: DeviceReference) -> DeviceBlob:
        """Return what a sender lent; it, and every tensor made of it, is the lease.

        Raises:
            ValueError: the reference means nothing.
        """
        range_ = self._ranges.get((sender, reference.device))
        if range_ is None:
            raise ValueError(f"device {reference.device} of {sender.actor} is not mapped here")
        range_.check(reference)
        lease = _Lease(range_, reference.generation, self._give_back)
        return LeasedDeviceBlob(range_, reference, lease)

    def forget(self, sender: Sender) -> None:
        """Let go of a sender that is gone. Tensors over its memory stay mapped until the last one is gone."""
        for key in [key for key in self._ranges if key[0] == sender]:
            range_ = self._ranges.pop(key)
            range_.is_owner_live = False
            cuda_memory.remove_remains(range_.pid)
