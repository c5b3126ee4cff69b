"""GPU memory that two processes of one host share, through torch: the owner's side and a reader's.

An owner sets one range of a device's memory aside and exports it once (`UntypedStorage._share_cuda_`, which is
``cudaIpcGetMemHandle``); each reader opens it once (`_new_shared_cuda`). Exporting every tensor where it lies would
save a copy on the device, but it lays open all that the allocator keeps in the same allocation, takes a reference
counter in ``/dev/shm`` for each, makes torch wait for the device whenever a reader lets one go, and nothing could tell
a reader that a handle and a length don't belong together. Here a stamp at each end of the range tells.

Order between the processes is kept by events that both can see. The owner records one after each copy into the range,
and the reader does not touch the bytes before it has come; the reader records one after its last use, and the owner
does not write there again before that has come. Neither lets a stream wait for the other's event: if its process is
killed with work in flight it never comes, and the stream would wait for ever (seen on an H200, driver 580).
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_bus.wire.frames import OfferDevice, Release

if TYPE_CHECKING:
    from omni_bus.ids import Peer, Sender
    from omni_bus.wire.codec import DeviceReference
    from omni_bus.wire.device import DeviceBlob

STAMP_BYTES = 512
"""What the stamps take at each end, so that data begins where the widest device access likes it."""

BLOCK_BYTES = 4096
"""The smallest block, and so the alignment of all data."""

EVENT_HANDLE_BYTES = 64
"""``CUDA_IPC_HANDLE_SIZE`` of the CUDA runtime."""

MAX_RANGE_BYTES = 1 << 40

NUM_EVENTS = 64
"""Events that take turns. One that is recorded again makes those who wait for it wait for more than they need."""

MAX_OPENED_EVENTS = 4 * NUM_EVENTS
"""Of one peer; a peer that uses more (a stream after the other, say) makes us open some again."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
"""Between two looks at an event that has not come: at first about what a copy takes, then what no kernel notices."""

_STAMP = struct.Struct("<8sQQ")
_HEAD_MAGIC, _TAIL_MAGIC = b"omnigpu1", b"1upginmo"

_NO_COUNTER = b"/omni-bus-keeps-its-own-count"
"""Torch lowers a counter in shared memory of this name when a reader unmaps; there is none, which it allows."""

_SHM = Path("/dev/shm")  # noqa: S108 (only looked at by exact names)


def is_cuda_live() -> bool:
    """Whether this process uses CUDA already. Asking neither imports torch nor starts CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


class OwnRange:
    """The owner's side: device memory that it writes and others may read.

    Args:
        owner: who it belongs to; readers compare it with who sends the references.
        device_index: in this process.
        data_bytes: a positive multiple of `BLOCK_BYTES`.

    Raises:
        ValueError: the device has no room, or this torch keeps its memory in a form that can't be shared
            (``expandable_segments``).
    """

    def __init__(self, owner: Peer, device_index: int, data_bytes: int) -> None:
        import torch

        self._torch: Any = torch
        self._whole: Any = None
        self._device = torch.device("cuda", device_index)
        self._data_bytes = data_bytes
        self._owner = owner
        # Not behind the engine's work, and not in its way.
        self._stream = torch.cuda.Stream(self._device)
        try:
            with torch.cuda.stream(self._stream):
                self._whole = torch.empty(data_bytes + 2 * STAMP_BYTES, dtype=torch.uint8, device=self._device)
                _write_stamps(torch, self._whole, owner.incarnation, data_bytes)
                self._events = [torch.cuda.Event(interprocess=True) for _ in range(NUM_EVENTS)]
                for event in self._events:
                    event.record(self._stream)
            self._handles: list[bytes] = [event.ipc_handle() for event in self._events]
            self._stream.synchronize()
            shared = self._whole.untyped_storage()._share_cuda_()  # torch's own way to share; it has no public one
        except RuntimeError as error:  # torch's errors of CUDA, and of memory that is used up
            raise ValueError(
                f"device {device_index} has no {data_bytes} bytes to share: {_first_line(error)}"
            ) from error
        _, self._handle, _, self._offset, counter, counter_offset, _, _ = shared
        # Torch counts one reader in advance, which would tell it: our own leases do.
        torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=self._device)  # noqa: SLF001 (see above)
        self._next_event = 0

    def offer(self) -> OfferDevice:
        """Return what a reader needs to open it."""
        torch = self._torch
        return OfferDevice(
            peer=self._owner,
            device=self._device.index,
            uuid=str(torch.cuda.get_device_properties(self._device).uuid),
            handle=self._handle,
            offset=self._offset,
            data_bytes=self._data_bytes,
            pid=os.getpid(),
        )

    def write(self, offset: int, blob: DeviceBlob) -> bytes:
        """Copy a blob to `offset`, on the device and in the background; return the handle of the event after it."""
        torch = self._torch
        turn = self._next_event = (self._next_event + 1) % NUM_EVENTS
        begin = STAMP_BYTES + offset
        with torch.cuda.stream(self._stream):
            self._whole[begin : begin + len(blob)].copy_(blob.tensor(), non_blocking=True)
            self._events[turn].record(self._stream)
        return self._handles[turn]

    def open_event(self, handle: bytes) -> Any:
        """Return a reader's event; its `query` tells whether what was recorded last has come.

        Raises:
            ValueError: there is no such event (its process may be gone).
        """
        return _open_event(self._torch, self._device, handle)

    def close(self) -> None:
        """Give the memory up. What readers that still view it see is not defined."""
        self._stream.synchronize()
        self._whole = None
        self._events.clear()
        self._torch.cuda.ipc_collect()  # removes the counter's file


class ForeignRange:
    """A reader's side: device memory of another process. Unmapped with the last view of it.

    Args:
        sender: who must own it.
        offer: what it said.

    Raises:
        ValueError: this process doesn't use CUDA or can't reach the device, there is no such memory, or it is not
            `sender`'s.
    """

    def __init__(self, sender: Sender, offer: OfferDevice) -> None:
        if offer.peer.sender != sender:
            raise ValueError(f"an offer of {offer.peer.actor}'s memory came from {sender.actor}")
        if not is_cuda_live():
            raise ValueError("this process does not use CUDA")
        if not 0 < offer.data_bytes <= MAX_RANGE_BYTES or not 0 <= offer.offset <= MAX_RANGE_BYTES:
            raise ValueError(f"{offer.data_bytes} bytes at {offer.offset} of an allocation are no memory to share")
        import torch

        self._torch: Any = torch
        self._data_bytes = offer.data_bytes
        self.pid = offer.pid
        self._device_there = offer.device
        self.owner = offer.peer
        self.is_owner_live = True
        """Whether the owner wants to hear what is not viewed any more; the reader clears it."""
        self._device = torch.device("cuda", _reachable_device(torch, offer.uuid))
        self.device_index: int = self._device.index
        self._owners_life = Life(offer.pid)
        _check_handle(offer.handle)
        self._whole = self._map(offer)
        self._written: dict[bytes, Any] = {}
        self._read: dict[int, _Ring] = {}
        self._streams: dict[int, set[Any]] = {}

    def _map(self, offer: OfferDevice) -> Any:
        torch = self._torch
        num_bytes = offer.data_bytes + 2 * STAMP_BYTES
        # A stream of its own, so that looking at the stamps does not wait for the engine's work.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            try:
                storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001 (torch's own way to share)
                    self._device.index, offer.handle, num_bytes, offer.offset, _NO_COUNTER, 0, b"", False
                )
                whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                stamps = bytes(whole[: _STAMP.size].tolist()), bytes(whole[-_STAMP.size :].tolist())
            except RuntimeError as error:  # torch's errors of CUDA; a copy from an address that isn't mapped is one
                raise ValueError(f"the sender's device memory can't be read: {_first_line(error)}") from error
        if stamps != _stamps(offer.peer.incarnation, offer.data_bytes):
            raise ValueError(f"no range of {offer.data_bytes} bytes of {offer.peer.actor} lies there")
        return whole

    def check(self, reference: DeviceReference) -> None:
        """Refuse a reference that leaves the range.

        Raises:
            ValueError: says what is allowed.
        """
        offset, length = reference.offset, reference.length
        if offset < 0 or offset % BLOCK_BYTES or length < 1 or offset + length > self._data_bytes:
            raise ValueError(f"{length} bytes at {offset} are not in the sender's range of {self._data_bytes}")
        if len(reference.written) != EVENT_HANDLE_BYTES:
            raise ValueError(f"an event's handle of {len(reference.written)} bytes (allowed: {EVENT_HANDLE_BYTES})")

    def tensor(self, reference: DeviceReference, lease: Any) -> Any:
        """Return the bytes as a uint8 tensor which keeps `lease` alive; returns when they are written.

        Raises:
            ValueError: the writer's event does not exist, or the writer ended before it came.
        """
        torch = self._torch
        event = self._written.get(reference.written)
        if event is None:
            event = _open_event(torch, self._device, reference.written)
            if len(self._written) >= MAX_OPENED_EVENTS:
                self._written.clear()
            self._written[reference.written] = event
        wait_written(event, self._owners_life)
        lease.streams.add(torch.cuda.current_stream(self._device))
        lent = _Lent(self._whole.data_ptr() + STAMP_BYTES + reference.offset, reference.length, lease)
        return torch.as_tensor(lent, device=self._device)

    def used(self, generation: int, streams: set[Any]) -> None:
        """Note on which streams what is about to be given back was used."""
        if streams:
            self._streams.setdefault(generation, set()).update(streams)

    def release(self, generations: tuple[int, ...]) -> Release:
        """Return the frame that gives these back, with events recorded behind their last use."""
        streams: set[Any] = set()
        for generation in generations:
            streams |= self._streams.pop(generation, set())
        reads = tuple(self._record(stream) for stream in streams)
        return Release(generations, self._device_there, reads)

    def _record(self, stream: Any) -> bytes:
        ring = self._read.get(stream.cuda_stream)
        if ring is None:
            ring = self._read[stream.cuda_stream] = _Ring(self._torch, self._device)
        return ring.record(stream)


class Life:
    """Tells when a process ends.

    Raises:
        ValueError: there is none of that number here.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError as error:
            raise ValueError(f"there is no process {pid} here: {os.strerror(error.errno or 0)}") from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def ends_within(self, timeout_s: float) -> bool:
        """Return whether it ends in that time, at once if it does."""
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])


def wait_written(event: Any, life: Life) -> None:
    """Block until an event of another process has come.

    CUDA offers no wait that ends with that process, so this one is for the process, with looks at the event in between;
    mostly it has come already. Call it on an engine's thread.

    Raises:
        ValueError: the process ended before.
    """
    pause_s = SHORTEST_PAUSE_S
    while not event.query():
        if life.ends_within(pause_s) and not event.query():
            raise ValueError("its process ended before its device had written it")
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Ring:
    """Events of one stream that take turns."""

    def __init__(self, torch: Any, device: Any) -> None:
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(interprocess=True) for _ in range(NUM_EVENTS)]
        self._handles: list[bytes] = []
        self._next = 0

    def record(self, stream: Any) -> bytes:
        turn = self._next
        self._next = (turn + 1) % NUM_EVENTS
        event = self._events[turn]
        event.record(stream)
        if turn == len(self._handles):  # the first round
            self._handles.append(event.ipc_handle())
        return self._handles[turn]


class _Lent:
    """Device bytes offered through the CUDA array interface; torch keeps it, and so the lease, as long as any view."""

    __slots__ = ("__cuda_array_interface__", "_lease")

    def __init__(self, address: int, num_bytes: int, lease: Any) -> None:
        self._lease = lease
        # "Writeable", since torch refuses the rest. Stream order is kept by events already, so no stream is named.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def remove_remains(pid: int) -> None:
    """Remove what torch and the CUDA driver left in ``/dev/shm`` of a process that shared device memory and was killed.

    Those are torch's file of reference counters (``torch_PID_…``) and the driver's own of events that others can see
    (``cuda.shm.UID.PID.…``, the last two hexadecimal). Of a process that lives nothing is touched.
    """
    if pid < 1 or Path(f"/proc/{pid}").exists():
        return
    for pattern in (f"torch_{pid}_*", f"cuda.shm.*.{pid:x}.*"):
        for path in _SHM.glob(pattern):
            with contextlib.suppress(OSError):  # removed by another, or another user's
                path.unlink()


def _stamps(incarnation: int, data_bytes: int) -> tuple[bytes, bytes]:
    return _STAMP.pack(_HEAD_MAGIC, incarnation, data_bytes), _STAMP.pack(_TAIL_MAGIC, incarnation, data_bytes)


def _write_stamps(torch: Any, whole: Any, incarnation: int, data_bytes: int) -> None:
    head, tail = (torch.tensor(list(stamp), dtype=torch.uint8) for stamp in _stamps(incarnation, data_bytes))
    whole[: _STAMP.size].copy_(head)
    whole[-_STAMP.size :].copy_(tail)


def _open_event(torch: Any, device: Any, handle: bytes) -> Any:
    if len(handle) != EVENT_HANDLE_BYTES:
        raise ValueError(f"an event's handle of {len(handle)} bytes (allowed: {EVENT_HANDLE_BYTES})")
    try:
        return torch.cuda.Event.from_ipc_handle(device, handle)
    except RuntimeError as error:
        raise ValueError(f"the peer's event can't be opened: {_first_line(error)}") from error


def _check_handle(handle: bytes) -> None:
    """Refuse all but the handle of a plain allocation: 64 bytes, since torch 2.5 after a version and the letter c.

    Its other form makes torch take descriptors out of the process that the handle names.
    """
    if len(handle) not in (64, 66) or (len(handle) == 66 and handle[1:2] != b"c"):
        raise ValueError(f"a handle of {len(handle)} bytes is not that of a plain device allocation")


def _reachable_device(torch: Any, uuid: str) -> int:
    """Return which of this process's devices has the UUID.

    Raises:
        ValueError: none, or it is not used here and none that is can reach it.
    """
    count = torch.cuda.device_count()
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    if uuid not in uuids:
        raise ValueError(f"the sender's device {uuid[:40]} is not visible here (visible: {', '.join(uuids)})")
    index = uuids.index(uuid)
    used = [i for i in range(count) if torch.cuda.memory_reserved(i)]
    if used and index not in used and not any(torch.cuda.can_device_access_peer(i, index) for i in used):
        raise ValueError(f"the devices used here ({used}) can't access the sender's device {index}")
    return index


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
