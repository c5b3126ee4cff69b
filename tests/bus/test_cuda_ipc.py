"""The books of device memory, without a device: its place is taken by host memory that both links see."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.cuda_ipc import CudaLimits, CudaViews, LeasedDeviceBlob
from omni_bus.bus.cuda_memory import BLOCK_BYTES, EVENT_HANDLE_BYTES, ForeignRange, Life, remove_remains, wait_written
from omni_bus.bus.link import Link
from omni_bus.errors import BadFrame
from omni_bus.ids import Peer, Sender
from omni_bus.wire.buffers import to_torch
from omni_bus.wire.device import DeviceBlob
from omni_bus.wire.frames import Chunk, MappedDevice, OfferDevice, Release
from omni_bus.wire.payloads import Tensor, Unreadable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from omni_bus.wire.codec import DeviceReference

LIMIT_S = 30
DATA_BYTES = 64 * BLOCK_BYTES


class FakeEvent:
    """Comes when the test says so."""

    has_come = True

    def query(self) -> bool:
        return self.has_come


class HostedBlob(DeviceBlob):
    """A tensor that says it is on a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.numel(), 0)
        self._tensor = tensor

    def tensor(self) -> torch.Tensor:
        return self._tensor


class Device:
    """What two processes would share: ranges by handle, events by handle."""

    def __init__(self) -> None:
        self.ranges: dict[bytes, torch.Tensor] = {}
        self.events: dict[bytes, FakeEvent] = {}
        self.read = self.event()
        self.num_written = 0

    def event(self) -> bytes:
        handle = len(self.events).to_bytes(EVENT_HANDLE_BYTES, "little")
        self.events[handle] = FakeEvent()
        return handle


class FakeRange:
    def __init__(self, device: Device, owner: Peer, index: int, data_bytes: int) -> None:
        self.device, self.owner, self.data_bytes = device, owner, data_bytes
        self.handle = bytes([index])
        device.ranges[self.handle] = torch.zeros(data_bytes, dtype=torch.uint8)
        self.written = device.event()

    def offer(self) -> OfferDevice:
        return OfferDevice(self.owner, 0, "GPU-fake", self.handle, 0, self.data_bytes, 0)

    def write(self, offset: int, blob: DeviceBlob) -> bytes:
        self.device.num_written += 1
        self.device.ranges[self.handle][offset : offset + len(blob)] = blob.tensor()
        return self.written

    def open_event(self, handle: bytes) -> FakeEvent:
        if handle not in self.device.events:
            raise ValueError("there is no such event")
        return self.device.events[handle]

    def close(self) -> None:
        self.device.ranges.pop(self.handle)


class Lent:
    def __init__(self, array: np.ndarray[Any, Any], lease: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owners = (array, lease)


class FakeForeignRange(ForeignRange):
    """Maps as `ForeignRange` would, checks as it does."""

    def __init__(self, device: Device, sender: Sender, offer: OfferDevice) -> None:
        if offer.handle not in device.ranges:
            raise ValueError("the sender's device memory can't be read")
        self.device, self._whole = device, device.ranges[offer.handle]
        self.owner, self.is_owner_live, self.device_index = offer.peer, True, 0
        self._data_bytes, self._device_there, self.pid = offer.data_bytes, offer.device, offer.pid
        self._streams = {}

    def tensor(self, reference: DeviceReference, lease: Any) -> torch.Tensor:
        if reference.written not in self.device.events:
            raise ValueError("the peer's event can't be opened")
        lease.streams.add(self.device.read)
        end = reference.offset + reference.length
        return torch.as_tensor(np.asarray(Lent(self._whole[reference.offset : end].numpy(), lease)))

    def _record(self, stream: bytes) -> bytes:
        return stream


class Pair:
    """Two links of which each gets what the other sends; `ann` sends tensors."""

    def __init__(self, directory: Path, device: Device, *, scheme: str = "ipc", max_bytes: int = DATA_BYTES) -> None:
        self.device = device
        self.came: dict[str, asyncio.Queue[Any]] = {"ann": asyncio.Queue(), "bob": asyncio.Queue()}
        self.ann, self.bob = (self._link(directory, name, scheme, max_bytes) for name in self.came)
        self.seq = 0

    def _link(self, directory: Path, name: str, scheme: str, max_bytes: int) -> Link:
        listen = f"ipc://{directory}/{name}" if scheme == "ipc" else "tcp://127.0.0.1:0"
        deliver: Callable[[Sender, Any], None] = lambda sender, frame: self.came[name].put_nowait(frame)  # noqa: E731
        link = Link(name, listen, deliver, lambda peer: None, ArenaLimits(0), CudaLimits(max_bytes))
        link._cuda._make_range = lambda owner, index, size: FakeRange(self.device, owner, index, size)
        link._views._open = lambda sender, offer: FakeForeignRange(self.device, sender, offer)
        return link

    async def pass_on(self, blob: DeviceBlob) -> Any:
        """Send a blob as a tensor and return the payload that comes."""
        self.seq += 1
        self.ann.send(self.bob.me, Chunk("r", 0, self.seq, Tensor("uint8", (len(blob),), blob)))
        return await self.next_payload()

    async def next_payload(self) -> Any:
        async with asyncio.timeout(LIMIT_S):
            return (await self.came["bob"].get()).payload

    async def agreed(self) -> None:
        """Send until bob has mapped ann's range and ann knows."""
        async with asyncio.timeout(LIMIT_S):
            while not isinstance((await self.pass_on(blob(1))).data, LeasedDeviceBlob):
                pass
        await self.until(lambda: self.statistics().leases.used_bytes == 0)

    def statistics(self) -> Any:
        return self.ann.statistics().cuda[0]

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Let frames come until it is, one at a time: more than a slow machine takes would make its sender give up."""
        gc.collect()
        async with asyncio.timeout(LIMIT_S):
            delivered = -1
            while not is_true():
                if self.ann.statistics().inbox.delivered != delivered:
                    delivered = self.ann.statistics().inbox.delivered
                    self.bob.send(self.ann.me, MappedDevice(9))
                await asyncio.sleep(0)

    async def close(self) -> None:
        await self.bob.close(0)
        await self.ann.close(0)


def blob(value: int, num_bytes: int = BLOCK_BYTES) -> HostedBlob:
    return HostedBlob(torch.full((num_bytes,), value, dtype=torch.uint8))


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path, Device())
    yield pair
    await pair.close()


async def test_tensor_goes_through_the_host_until_the_peer_has_mapped_the_range(pair: Pair) -> None:
    first = await pair.pass_on(blob(5))
    await pair.agreed()
    later = await pair.pass_on(blob(6))

    assert not isinstance(first.data, DeviceBlob)
    assert to_torch(first).tolist() == [5] * BLOCK_BYTES
    assert isinstance(later.data, LeasedDeviceBlob)
    assert to_torch(later).tolist() == [6] * BLOCK_BYTES


async def test_reader_views_the_senders_memory(pair: Pair) -> None:
    await pair.agreed()

    received = to_torch(await pair.pass_on(blob(5)))

    whole = pair.device.ranges[b"\0"]
    assert whole.data_ptr() <= received.data_ptr() < whole.data_ptr() + DATA_BYTES


async def test_lease_lasts_as_long_as_any_view(pair: Pair) -> None:
    await pair.agreed()
    view = to_torch(await pair.pass_on(blob(5)))[7:].view(-1)[1:]
    for value in range(40):
        await pair.pass_on(blob(value))

    assert pair.statistics().leases.blocks >= 1
    assert view.tolist() == [5] * (BLOCK_BYTES - 8)
    del view
    await pair.until(lambda: pair.statistics().leases.used_bytes == 0)
    assert pair.statistics().leases.stale == 0


async def test_host_view_of_a_leased_tensor_has_its_bytes(pair: Pair) -> None:
    await pair.agreed()

    received = await pair.pass_on(blob(5))

    assert bytes(received.data.view) == bytes([5]) * BLOCK_BYTES
    assert received.data.view.readonly


async def test_memory_is_not_written_before_its_readers_stream_is_done(pair: Pair) -> None:
    await pair.agreed()
    pair.device.events[pair.device.read].has_come = False
    received = to_torch(await pair.pass_on(blob(5)))
    address = received.data_ptr()
    del received
    await pair.until(lambda: pair.statistics().draining == 1)

    others = [to_torch(await pair.pass_on(blob(6))).data_ptr() for _ in range(4)]
    assert address not in others
    pair.device.events[pair.device.read].has_come = True
    await pair.until(lambda: pair.statistics().leases.used_bytes == 0)


async def test_full_range_falls_back_to_the_host_until_there_is_room(pair: Pair) -> None:
    await pair.agreed()
    held = [await pair.pass_on(blob(i, DATA_BYTES // 4)) for i in range(3)]

    assert [isinstance(payload.data, DeviceBlob) for payload in held] == [True, True, False]
    assert [to_torch(payload)[-1].item() for payload in held] == [0, 1, 2]
    assert pair.statistics().leases.full == 1
    held.clear()
    await pair.until(lambda: pair.statistics().leases.used_bytes == 0)
    assert isinstance((await pair.pass_on(blob(1))).data, DeviceBlob)


async def test_tensor_larger_than_the_range_goes_through_the_host(pair: Pair) -> None:
    await pair.agreed()

    received = await pair.pass_on(blob(5, 2 * DATA_BYTES))

    assert not isinstance(received.data, DeviceBlob)
    assert len(received.data) == 2 * DATA_BYTES


async def test_same_blob_is_written_once_for_two_references(pair: Pair) -> None:
    await pair.agreed()
    shared, before = blob(5), pair.device.num_written

    first, second = await pair.pass_on(shared), await pair.pass_on(shared)

    assert pair.device.num_written == before + 1
    del first, second
    await pair.until(lambda: pair.statistics().leases.used_bytes == 0)


async def test_lost_reader_gives_everything_back_at_once(pair: Pair) -> None:
    await pair.agreed()
    pair.device.events[pair.device.read].has_come = False
    held = [await pair.pass_on(blob(i)) for i in range(3)]
    tensor = to_torch(await pair.pass_on(blob(9)))
    del tensor
    await pair.until(lambda: pair.statistics().draining == 1)

    pair.ann.forget(pair.bob.me)

    found = pair.statistics()
    assert (found.draining, found.leases.used_bytes, found.leases.taken_back) == (0, 0, 3)
    held.clear()
    await pair.until(lambda: pair.statistics().leases.stale == 3)  # what it gives back now is not its own any more


async def test_view_outlives_its_forgotten_sender(pair: Pair) -> None:
    await pair.agreed()
    received = to_torch(await pair.pass_on(blob(5)))

    pair.bob.forget(pair.ann.me)

    assert received.tolist() == [5] * BLOCK_BYTES
    released = pair.statistics().leases.released
    del received
    gc.collect()
    pair.bob.send(pair.ann.me, Release((), 0))
    await pair.until(lambda: True)
    assert pair.statistics().leases.released == released  # nobody to give it back to


async def test_peer_over_tcp_gets_bytes_and_no_offer(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Device(), scheme="tcp")

    received = [await pair.pass_on(blob(5)) for _ in range(5)]

    assert not any(isinstance(payload.data, DeviceBlob) for payload in received)
    assert pair.ann.statistics().cuda == {}
    await pair.close()


async def test_switched_off_sends_bytes(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Device(), max_bytes=0)

    received = [await pair.pass_on(blob(5)) for _ in range(5)]

    assert not any(isinstance(payload.data, DeviceBlob) for payload in received)
    await pair.close()


async def test_peer_that_declines_gets_bytes(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omni_bus")
    del pair.bob._views._open  # and with it the fake
    pair.bob._views._open = ForeignRange

    async with asyncio.timeout(LIMIT_S):
        while "can't map device 0" not in caplog.text:
            received = await pair.pass_on(blob(5))
    assert "this process does not use CUDA" in caplog.text
    received = await pair.pass_on(blob(6))
    assert bytes(received.data.view) == bytes([6]) * BLOCK_BYTES
    assert not isinstance(received.data, DeviceBlob)


async def test_device_without_room_for_a_range_sends_bytes(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def no_room(owner: Peer, index: int, size: int) -> Any:
        raise ValueError("device 0 has no room")

    pair.ann._cuda._make_range = no_room

    received = [await pair.pass_on(blob(5)) for _ in range(3)]

    assert not any(isinstance(payload.data, DeviceBlob) for payload in received)
    assert caplog.text.count("has no room") == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offset": DATA_BYTES}, "not in the sender's range"),
        ({"offset": -BLOCK_BYTES}, "not in the sender's range"),
        ({"offset": 1}, "not in the sender's range"),
        ({"offset": 1 << 62}, "not in the sender's range"),
        ({"length": 0}, "not in the sender's range"),
        ({"length": -1}, "not in the sender's range"),
        ({"length": DATA_BYTES + 1}, "not in the sender's range"),
        ({"length": 8}, "8 bytes came where the header says 4096"),
        ({"device": 3}, "device 3 of ann is not mapped here"),
        ({"written": b"short"}, "handle of 5 bytes"),
    ],
    ids=str,
)
async def test_reference_that_lies_fails_only_its_chunk(pair: Pair, changed: dict[str, Any], said: str) -> None:
    await pair.agreed()
    honest = pair.ann._cuda.lend

    def lend(blob: DeviceBlob, peer: Peer) -> DeviceReference | None:
        reference = honest(blob, peer)
        assert reference is not None
        return msgspec.structs.replace(reference, **changed)

    pair.ann._cuda.lend = lend
    wrong = await pair.pass_on(blob(5))
    pair.ann._cuda.lend = honest
    right = await pair.pass_on(blob(6))

    assert isinstance(wrong, Unreadable)
    assert said in wrong.reason
    assert to_torch(right)[0].item() == 6


async def test_event_that_does_not_exist_is_a_bad_frame(pair: Pair) -> None:
    await pair.agreed()
    received = await pair.pass_on(blob(5))
    pair.device.events.clear()

    with pytest.raises(BadFrame, match="a tensor from ann: the peer's event can't be opened"):
        to_torch(received)


async def test_release_of_what_is_not_held_is_counted_and_ignored(pair: Pair) -> None:
    await pair.agreed()
    held = await pair.pass_on(blob(5))

    pair.bob.send(pair.ann.me, Release((0, 77, 1 << 60), 0, (bytes(3), bytes([9]) * EVENT_HANDLE_BYTES)))
    pair.bob.send(pair.ann.me, Release((1,), 5))

    await pair.until(lambda: pair.statistics().leases.stale == 3)
    assert pair.statistics().leases.blocks == 1
    assert to_torch(held)[0].item() == 5


async def test_stranger_can_not_give_back_anothers_lease(pair: Pair, tmp_path: Path) -> None:
    await pair.agreed()
    held = await pair.pass_on(blob(5))
    stranger = Link("eve", f"ipc://{tmp_path}/eve", lambda sender, frame: None, lambda peer: None)

    stranger.send(pair.ann.me, Release(tuple(range(20)), 0))

    await pair.until(lambda: pair.statistics().leases.stale == 20)
    assert pair.statistics().leases.blocks == 1
    assert to_torch(held)[0].item() == 5
    await stranger.close(0)


def test_offer_of_anothers_memory_is_refused() -> None:
    views = CudaViews(lambda range_, generation: None)
    offer = OfferDevice(Peer("ann", 1, "ipc:///nowhere"), 0, "GPU-0", b"", 0, BLOCK_BYTES, 0)

    assert "came from eve" in views.offered(Sender("eve", 2), offer).reason


def test_ranges_of_one_peer_are_bounded() -> None:
    device = Device()
    device.ranges[b"x"] = torch.zeros(1)
    views = CudaViews(lambda range_, generation: None, lambda sender, offer: FakeForeignRange(device, sender, offer))
    offer = OfferDevice(Peer("ann", 1, "ipc:///nowhere"), 0, "GPU-0", b"x", 0, BLOCK_BYTES, 0)

    reasons = [views.offered(offer.peer.sender, msgspec.structs.replace(offer, device=i)).reason for i in range(65)]

    assert reasons[:64] == [""] * 64
    assert "64 ranges of ann are mapped already" in reasons[64]


def test_process_without_torch_declines_without_loading_it() -> None:
    code = """
import sys
from omni_bus.bus.cuda_ipc import CudaViews
from omni_bus.ids import Peer
from omni_bus.wire.frames import OfferDevice
offer = OfferDevice(Peer("ann", 1, "ipc:///nowhere"), 0, "GPU-0", bytes(64), 0, 4096, 0)
print(CudaViews(print).offered(offer.peer.sender, offer).reason)
print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)

    assert done.stdout == "this process does not use CUDA\n[]\n"


def test_waiting_for_a_killed_writer_ends() -> None:
    event = FakeEvent()
    event.has_come = False
    with subprocess.Popen(["sleep", "1000"]) as process:
        life = Life(process.pid)
        killer = threading.Timer(0.05, process.kill)
        killer.start()

        with pytest.raises(ValueError, match="its process ended before its device had written it"):
            wait_written(event, life)
    killer.join()


def test_waiting_for_a_live_writer_ends_with_its_event() -> None:
    event = FakeEvent()
    event.has_come = False
    come = threading.Timer(0.05, setattr, (event, "has_come", True))
    come.start()

    wait_written(event, Life(os.getpid()))

    assert event.has_come
    come.join()


def test_written_bytes_of_a_dead_writer_are_read() -> None:
    with subprocess.Popen(["true"]) as process:
        life = Life(process.pid)
        process.wait()
    assert life.ends_within(0)

    wait_written(FakeEvent(), life)


@pytest.mark.parametrize("pid", [-1, 0, 1 << 30])
def test_process_that_is_not_here_has_no_life(pid: int) -> None:
    with pytest.raises(ValueError, match=f"no process {pid} here"):
        Life(pid)


def test_remains_of_dead_processes_only_are_removed() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    names = [f"{kind}" for pid in (process.pid, os.getpid()) for kind in (f"torch_{pid}_1_0", f"cuda.shm.0.{pid:x}.1")]
    paths = [Path("/dev/shm") / name for name in names]
    for path in paths:
        path.touch()
    try:
        for pid in (process.pid, os.getpid(), 0, -1):
            remove_remains(pid)

        assert [path.exists() for path in paths] == [False, False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
