# ruff: noqa: D102, SLF001, TID253
# A check of what siblings must not use; each `do_` method is an order of the checks; it needs torch anyway.
"""Device tensors between real processes on one GPU: are they right, is nothing copied or leaked, and how fast is it.

Needs one NVIDIA GPU and torch with CUDA; with two, `gpu_check_two_devices` follows. Starts receivers and senders as
processes of their own, each with a real `Link`, prints one line a check and the medians of alternated timings, and ends
with 1 if anything is wrong. Besides torch: numpy, pyzmq, msgspec, uvloop; nothing is installed.

    PYTHONPATH=. python3 scripts/gpu_check_cuda_ipc.py [--repeats 60]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
import uvloop
import zmq

from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.cuda_ipc import CudaLimits, LeasedDeviceBlob
from omni_bus.bus.inbox import Inbox
from omni_bus.bus.link import Link
from omni_bus.bus.outbox import Outbox
from omni_bus.errors import BadFrame
from omni_bus.ids import Peer, Sender, new_incarnation
from omni_bus.wire.buffers import from_torch, to_torch
from omni_bus.wire.device import LocalDeviceBlob
from omni_bus.wire.frames import Chunk, MappedDevice
from omni_bus.wire.payloads import Json, Tensor, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

MIB = 1 << 20
LIMIT_S = 30
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64")
GPU_HZ = 1.9e9
"""About: `torch.cuda._sleep` counts cycles."""

NUM_BEFORE = 2
"""Tensors that a sender which will be killed sends first, so that its range is mapped."""

SHM = "/dev/shm"  # noqa: S108 (looked at only)

CHILDREN: list[subprocess.Popen[Any]] = []

VARIANTS = {
    "cuda": (ArenaLimits(), CudaLimits(512 * MIB)),
    "host+arena": (ArenaLimits(512 * MIB), CudaLimits(0)),
    "host+inline": (ArenaLimits(0), CudaLimits(0)),
}


def pattern(name: str, seed: int, num_bytes: int) -> torch.Tensor:
    """Return a tensor on the current GPU that both sides can make."""
    dtype = getattr(torch, name)
    indices = torch.arange(num_bytes // dtype.itemsize, device="cuda")
    if dtype == torch.int64:
        return indices * seed
    return ((indices * seed) % 31 - 15).float().to(dtype)


def sleep_on_gpu(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * GPU_HZ))


def own_figures(link: Link) -> dict[str, Any]:
    """Return what must not grow."""
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shm": sorted(os.listdir(SHM)),
        "cuda": msgspec.to_builtins(link.statistics().cuda),
        "views": link.statistics().borrowed.views,
    }


class Receiver:
    """The other process: does with each tensor what the request's name says, and answers every chunk with JSON."""

    def __init__(self, directory: str, name: str) -> None:
        self.link = Link(name, f"ipc://{directory}/{name}", self.deliver, lambda peer: None)
        self.over = asyncio.Event()
        self.answer_to: dict[Sender, Peer] = {}
        self.held: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None

    def deliver(self, sender: Sender, frame: Any) -> None:
        if not isinstance(frame, Chunk):
            return
        if isinstance(frame.payload, Json) and frame.request == "hello":
            self.answer_to[sender] = msgspec.convert(frame.payload.value, Peer)
        began = time.monotonic()
        try:
            said: dict[str, Any] = getattr(self, "do_" + frame.request.partition(":")[0])(frame)
        except (BadFrame, RuntimeError) as error:
            said = {"error": type(error).__name__, "said": str(error)}
        said["took_s"] = round(time.monotonic() - began, 4)
        if sender in self.answer_to:
            self.link.send(self.answer_to[sender], Chunk(frame.request, 0, frame.seq, Json(said)))

    def do_hello(self, frame: Chunk) -> dict[str, Any]:
        # The kernels that the checks use, since loading one waits for the device.
        sleep_on_gpu(0.001)
        return {"mean": torch.ones(2, device="cuda").double().mean().item()}

    def do_equal(self, frame: Chunk) -> dict[str, Any]:
        payload = frame.payload
        if isinstance(payload, Unreadable):
            return {"error": "Unreadable", "said": payload.reason}
        assert isinstance(payload, Tensor)
        _, name, seed = frame.request.split(":")
        before = torch.cuda.memory_allocated()
        tensor = to_torch(payload)
        added = torch.cuda.memory_allocated() - before
        expected = pattern(name, int(seed), len(payload.data)).view(payload.shape)
        is_equal = torch.equal(tensor.to("cuda").view(torch.uint8), expected.view(torch.uint8))
        return {
            "equal": bool(is_equal),
            "dtype": str(tensor.dtype),
            "device": str(tensor.device),
            "leased": isinstance(payload.data, LeasedDeviceBlob),
            "on_host": getattr(payload.data, "_host", None) is not None,
            "added": added,
        }

    def do_hold(self, frame: Chunk) -> dict[str, Any]:
        assert isinstance(frame.payload, Tensor)
        self.held.append(to_torch(frame.payload)[1:])  # a view of a view
        return {"leased": isinstance(frame.payload.data, LeasedDeviceBlob)}

    def do_drop(self, frame: Chunk) -> dict[str, Any]:
        self.held.clear()
        return {}

    def do_held(self, frame: Chunk) -> dict[str, Any]:
        return {"sums": [tensor.double().sum().item() for tensor in self.held]}

    def do_late(self, frame: Chunk) -> dict[str, Any]:
        """Use at once what the sender's GPU has not written yet."""
        assert isinstance(frame.payload, Tensor)
        return {"mean": to_torch(frame.payload).double().mean().item()}

    def do_slow(self, frame: Chunk) -> dict[str, Any]:
        """Let go of a tensor while our GPU has yet to read it."""
        assert isinstance(frame.payload, Tensor)
        tensor = to_torch(frame.payload)
        with torch.cuda.device(tensor.device):
            sleep_on_gpu(1.0)
        self.total = tensor.to("cuda").double().mean()
        return {}

    def do_total(self, frame: Chunk) -> dict[str, Any]:
        assert self.total is not None
        return {"pending": not torch.cuda.current_stream().query(), "mean": self.total.item()}

    def do_time(self, frame: Chunk) -> dict[str, Any]:
        assert isinstance(frame.payload, Tensor)
        tensor = to_torch(frame.payload, device="cuda")
        return {"last": tensor.view(-1)[-1:].tolist()}

    def do_figures(self, frame: Chunk) -> dict[str, Any]:
        return own_figures(self.link)

    def do_exit(self, frame: Chunk) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.05, self.over.set)  # after the answer
        return {}


async def receive(directory: str, name: str, device: str) -> None:
    torch.cuda.set_device(int(device))
    torch.zeros(1, device="cuda")
    receiver = Receiver(directory, name)
    print(msgspec.json.encode(receiver.link.me).decode(), flush=True)
    await receiver.over.wait()
    receiver.held.clear()
    await receiver.link.close(1.0)


def start(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environ)
    CHILDREN.append(process)
    return process


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()


class Other:
    """A receiver's process, as the sender sees it; on one of the devices that it sees."""

    def __init__(self, directory: str, name: str, device: int = 0, environ: dict[str, str] | None = None) -> None:
        self.process = start("--receive", directory, name, str(device), environ=environ)
        assert self.process.stdout is not None
        self.peer = msgspec.json.decode(self.process.stdout.readline(), type=Peer)


class Asker:
    """Sends chunks and waits for their answers."""

    def __init__(self, directory: str, name: str, arena: ArenaLimits, cuda: CudaLimits) -> None:
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.link = Link(name, f"ipc://{directory}/{name}", self.deliver, lambda peer: None, arena, cuda)
        self.seq = 0

    def deliver(self, sender: Sender, frame: Any) -> None:
        if isinstance(frame, Chunk) and isinstance(frame.payload, Json):
            self.answers.pop(frame.seq).set_result(frame.payload.value)

    def tell(self, peer: Peer, request: str, payload: Any) -> asyncio.Future[dict[str, Any]]:
        self.seq += 1
        answer = self.answers[self.seq] = asyncio.get_running_loop().create_future()
        self.link.send(peer, Chunk(request, 0, self.seq, payload))
        return answer

    async def ask(self, peer: Peer, request: str, payload: Any = None) -> dict[str, Any]:
        async with asyncio.timeout(LIMIT_S):
            return await self.tell(peer, request, Json(None) if payload is None else payload)

    async def meet(self, peer: Peer, num_bytes: int = 4096) -> None:
        """Make ourselves known, and send until the peer has mapped what we offer; the first go through the host."""
        await self.ask(peer, "hello", Json(msgspec.to_builtins(self.link.me)))
        for _ in range(3):
            await self.ask(peer, "time", from_torch(torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")))

    def cuda(self) -> Any:
        return self.link.statistics().cuda[torch.cuda.current_device()]


def remains(pid: int) -> list[str]:
    """Return what torch and the driver keep of a process."""
    return [name for name in os.listdir(SHM) if name.startswith((f"torch_{pid}_", f"cuda.shm.{os.getuid()}.{pid:x}."))]


class Report:
    """Prints and counts."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, name: str, is_right: bool, seen: Any = "") -> None:  # noqa: FBT001 (the claim itself)
        self.failed += not is_right
        print(f"{'ok  ' if is_right else 'FAIL'} {name}{f': {seen}' if seen != '' else ''}", flush=True)


async def check_values(report: Report, asker: Asker, peer: Peer) -> None:
    for name in DTYPES:
        source = pattern(name, 3, 4 * MIB)
        payload = from_torch(source)
        said = await asker.ask(peer, f"equal:{name}:3", payload)
        is_right = said.get("equal") and said.get("leased") and not said.get("on_host") and not said.get("added")
        report.check(f"{name} arrives equal, on the device, uncopied by the reader", bool(is_right), said)
        report.check(f"{name} was not copied to host by the sender", getattr(payload.data, "_host", None) is None)
    strided = pattern("float32", 5, 4 * MIB).view(1024, 1024).T
    said = await asker.ask(peer, "equal:float32:5", from_torch(strided.contiguous().T))
    report.check("a strided tensor arrives in row order", bool(said.get("equal")), said.get("dtype"))


async def check_no_host_copies(report: Report, asker: Asker, peer: Peer) -> None:
    payload = from_torch(pattern("float32", 3, 64 * MIB))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            await asker.ask(peer, "hold", payload)
            await asker.ask(peer, "drop")
        torch.cuda.synchronize()
    copies = [event.key for event in profile.key_averages() if "memcpy" in event.key.lower()]
    report.check(
        "the sender's profile of 5 sends of 64 MiB names no copy to host",
        any("DtoD" in k for k in copies) and not any("DtoH" in k for k in copies),
        copies,
    )


async def check_order(report: Report, asker: Asker, peer: Peer) -> None:
    source = torch.zeros(16 * MIB, device="cuda")
    torch.cuda.synchronize()
    sleep_on_gpu(2.0)
    source.fill_(7)
    payload = from_torch(source)
    sent_at = time.monotonic()
    answer = asker.tell(peer, "late", payload)
    took_s = time.monotonic() - sent_at
    assert isinstance(payload.data, LocalDeviceBlob)
    was_running = not payload.data.ready.query()
    said = await answer
    report.check(
        "a tensor sent while its kernel runs is read after it",
        was_running and said.get("mean") == 7 and said["took_s"] > 0.5,
        f"send returned in {took_s * 1e3:.2f} ms, kernel still running: {was_running}, read after {said}",
    )
    await asker.ask(peer, "slow", from_torch(torch.full((4 * MIB,), 3.0, device="cuda")))
    await asyncio.sleep(0.1)
    draining = asker.cuda().draining
    for _ in range(40):  # more than the range holds, so that the block would be used again if it could
        await asker.ask(peer, "drop", from_torch(torch.full((4 * MIB,), 9.0, device="cuda")))
    said = await asker.ask(peer, "total")
    report.check(
        "memory let go by a reader whose kernel has yet to read it is not written",
        draining == 1 and said.get("mean") == 3,
        f"draining {draining}, {said}",
    )


async def settle(asker: Asker, peer: Peer) -> Any:
    """Return the statistics once the peer's releases, which follow its answers, have come."""
    for _ in range(50):
        await asker.ask(peer, "drop")
        if not asker.cuda().leases.used_bytes:
            break
        await asyncio.sleep(0.02)
    return asker.cuda()


async def check_leaks(report: Report, asker: Asker, peer: Peer) -> None:
    found = await settle(asker, peer)
    report.check(
        "after all views are gone nothing is in use", found.leases.used_bytes == 0 and found.draining == 0, found
    )
    source = pattern("bfloat16", 3, MIB)
    for _ in range(50):
        await asker.ask(peer, "hold", from_torch(source))
        await asker.ask(peer, "drop")
    there, here = await asker.ask(peer, "figures"), own_figures(asker.link)
    before = asker.cuda().leases
    began = time.monotonic()
    for _ in range(1000):
        await asker.ask(peer, "hold", from_torch(source))
        await asker.ask(peer, "drop")
    took_s = time.monotonic() - began
    found = await settle(asker, peer)
    report.check(
        "1,000 sends are lent 1,000 times and given back",
        found.leases.lent - before.lent == 1000 and found.leases.used_bytes == 0 and found.leases.stale == 0,
        f"{found} ({took_s:.2f} s with two answers each)",
    )
    there_after, here_after = await asker.ask(peer, "figures"), own_figures(asker.link)
    for name in ("allocated", "descriptors", "shm"):
        report.check(
            f"1,000 sends leave {name} of both as it was",
            there[name] == there_after[name] and here[name] == here_after[name],
            f"{here[name]}, {there[name]}",
        )


async def check_full(report: Report, asker: Asker, peer: Peer) -> None:
    leased = []
    for _ in range(6):
        said = await asker.ask(peer, "hold", from_torch(torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")))
        leased.append(said.get("leased"))
    sums = await asker.ask(peer, "held")
    is_right = leased == [True] * 4 + [False] * 2 and sums.get("sums") == [64.0 * MIB - 1] * 6
    report.check(
        "a reader that holds half of the range gets the rest through the host", is_right, (leased, sums.get("sums"))
    )
    await settle(asker, peer)


async def check_hostile(report: Report, asker: Asker, peer: Peer, directory: str) -> None:
    """Offers and references that lie, from a link of which we hold the parts."""
    replies: asyncio.Queue[Any] = asyncio.Queue()
    context = zmq.Context()
    me = Peer("mallory", new_incarnation(), f"ipc://{directory}/mallory")
    inbox = Inbox(context, me.endpoint, lambda sender, frame: replies.put_nowait(frame))
    outbox = Outbox(context, me.sender, on_stuck=lambda peer: None)
    pool = asker.link._cuda._pools[0]
    assert pool is not None
    true = pool.range.offer()
    flipped = bytes([*true.handle[:10], true.handle[10] ^ 0xFF, *true.handle[11:]])

    async def offer(**changed: Any) -> str:
        outbox.send(peer, msgspec.structs.replace(true, **{"peer": me, **changed}))
        async with asyncio.timeout(LIMIT_S):
            reply = await replies.get()
        assert isinstance(reply, MappedDevice), reply
        return reply.reason

    print(f"     handle: {len(true.handle)} bytes, begins {true.handle[:2]!r}, at {true.offset} of its allocation")
    cases: dict[str, dict[str, Any]] = {
        "another actor's memory": {},
        "a handle with a flipped byte": {"handle": flipped},
        "a handle of zeros": {"handle": true.handle[:2] + bytes(64)},
        "a handle of another form": {"handle": true.handle[:1] + b"e" + true.handle[2:]},
        "a short handle": {"handle": b"x"},
        "a range longer than the memory": {"data_bytes": true.data_bytes + 64 * MIB},
        "a range much longer than the memory": {"data_bytes": 1 << 40},
        "a range shorter than the memory": {"data_bytes": true.data_bytes - 4096},
        "an offset outside of the allocation": {"offset": 1 << 39},
        "a negative offset": {"offset": -4096},
        "an unknown device": {"uuid": "GPU-0"},
    }
    for name, changed in cases.items():
        reason = await offer(**changed)
        report.check(f"offer of {name} is refused", bool(reason), reason)
        said = await asker.ask(peer, "equal:float32:3", from_torch(pattern("float32", 3, MIB)))
        if not (said.get("equal") and said.get("leased")):
            report.check(f"the reader goes on after {name}", False, said)
    # What is signed with the victim's own name comes from the wrong sender and isn't even answered.
    outbox.send(peer, true)
    await check_references(report, asker, peer)
    await outbox.close(0.1)
    inbox.close()
    context.destroy(linger=0)


async def check_references(report: Report, asker: Asker, peer: Peer) -> None:
    payload = from_torch(pattern("float32", 3, MIB))
    arena = asker.link._cuda
    honest = arena.lend
    size = len(payload.data)

    def forged(**changed: Any) -> Any:
        def lend(blob: Any, to: Peer) -> Any:
            reference = honest(blob, to)
            return None if reference is None else msgspec.structs.replace(reference, **changed)

        return lend

    cases: dict[str, tuple[dict[str, Any], str]] = {
        "beyond the end": ({"offset": 512 * MIB}, "Unreadable"),
        "before the beginning": ({"offset": -4096}, "Unreadable"),
        "between two blocks": ({"offset": 100}, "Unreadable"),
        "shorter than the shape": ({"length": size - 4}, "Unreadable"),
        "longer than the shape": ({"length": size + 4}, "Unreadable"),
        "to a device never offered": ({"device": 7}, "Unreadable"),
        "with a short event": ({"written": b"x"}, "Unreadable"),
        "with a made-up event": ({"written": bytes(range(64))}, "BadFrame"),
        "with an event of zeros": ({"written": bytes(64)}, "BadFrame"),
    }
    for name, (changed, error) in cases.items():
        arena.lend = forged(**changed)  # type: ignore[method-assign]
        said = await asker.ask(peer, "equal:float32:3", from_torch(pattern("float32", 3, MIB)))
        arena.lend = honest  # type: ignore[method-assign]
        report.check(f"reference {name} is refused", said.get("error") == error, said.get("said", said))
    said = await asker.ask(peer, "equal:float32:3", payload)
    report.check("the reader goes on after them", bool(said.get("equal") and said.get("leased")))
    # Leases whose reference the reader could not even read stay lent until it is forgotten; say how many.
    print(f"     {asker.cuda()}")


async def check_killed_reader(report: Report, asker: Asker, directory: str, device: int = 0) -> None:
    other = Other(directory, "victim", device)
    await asker.meet(other.peer)
    for _ in range(3):
        await asker.ask(other.peer, "hold", from_torch(torch.ones(8 * MIB, dtype=torch.uint8, device="cuda")))
    await asker.ask(other.peer, "slow", from_torch(torch.full((4 * MIB,), 3.0, device="cuda")))
    await asyncio.sleep(0.1)
    held, draining = asker.cuda().leases.used_bytes, asker.cuda().draining
    kill(other.process)
    asker.link.forget(other.peer)
    found = asker.cuda()
    is_right = held == 40 * MIB and draining == 1 and found.leases.used_bytes == 0 and found.draining == 0
    report.check("a killed reader's leases come back at once", is_right, f"{held}, {draining} draining, then {found}")
    report.check("nothing of it is left in /dev/shm", not remains(other.process.pid), os.listdir(SHM))
    torch.ones(8, device="cuda").sum().item()


class Heir:
    """Our turn to receive, from senders that are killed while we view their memory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.came: asyncio.Queue[Any] = asyncio.Queue()
        self.link = Link("heir", f"ipc://{directory}/heir", self._deliver, lambda peer: None)

    def _deliver(self, sender: Sender, frame: Any) -> None:
        self.came.put_nowait((sender, frame))

    async def leased_from(self, how: str) -> tuple[subprocess.Popen[Any], Sender, Tensor]:
        """Start a sender, and return its last payload, which lies in its device memory."""
        me = msgspec.json.encode(self.link.me).decode()
        process = start("--send", self.directory, "late-" + how, me, how)
        async with asyncio.timeout(LIMIT_S):
            while True:
                sender, frame = await self.came.get()
                if frame.seq == NUM_BEFORE:
                    assert isinstance(frame.payload.data, LeasedDeviceBlob)
                    return process, sender, frame.payload

    def bury(self, report: Report, process: subprocess.Popen[Any], sender: Sender, before: list[str]) -> None:
        """Forget a killed sender."""
        self.link.forget(Peer(sender.actor, sender.incarnation, f"ipc://{self.directory}/{sender.actor}"))
        left = remains(process.pid)
        report.check("nothing of the killed sender is left in /dev/shm", bool(before) and not left, (before, left))


async def check_killed_sender(report: Report, directory: str) -> None:
    heir = Heir(directory)
    process, sender, payload = await heir.leased_from("idle")
    tensor = to_torch(payload)
    before = tensor.double().mean().item()
    files = remains(process.pid)
    kill(process)
    again = tensor.double().mean().item()
    report.check("a view outlives its killed sender", again == before == 5, f"mean {before}, after the kill {again}")
    heir.bury(report, process, sender, files)
    del tensor, payload
    report.check("the device goes on after it", torch.ones(8, device="cuda").sum().item() == 8)

    process, sender, payload = await heir.leased_from("busy")
    files = remains(process.pid)
    waiting = asyncio.create_task(asyncio.to_thread(to_torch, payload))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    was_waiting = not done
    kill(process)
    began = time.monotonic()
    await asyncio.wait({waiting}, timeout=10)
    error = waiting.exception() if waiting.done() else None
    report.check(
        "a reader that waits for the kernel of a sender which is killed gets an error",
        was_waiting and isinstance(error, BadFrame),
        f"{error!r} after {(time.monotonic() - began) * 1e3:.1f} ms",
    )
    heir.bury(report, process, sender, files)
    report.check("the device goes on after it", torch.ones(8, device="cuda").sum().item() == 8)
    await heir.link.close(0.1)


async def send_and_wait(directory: str, name: str, to: str, how: str) -> None:
    """Be the sender that is killed."""
    peer = msgspec.json.decode(to, type=Peer)
    link = Link(name, f"ipc://{directory}/{name}", lambda sender, frame: None, lambda peer: None)
    source = torch.full((MIB,), 5.0, device="cuda")
    for seq in range(NUM_BEFORE):
        link.send(peer, Chunk("r", 0, seq, from_torch(source)))
        await asyncio.sleep(0.5)  # for the answer to the offer
    if how == "busy":
        source = torch.zeros(MIB, device="cuda")
        sleep_on_gpu(30.0)
        source.fill_(5.0)
    link.send(peer, Chunk("r", 0, NUM_BEFORE, from_torch(source)))
    await asyncio.sleep(LIMIT_S)


async def measure(directory: str, other: Other, num_repeats: int) -> None:
    askers = {name: Asker(directory, f"time-{i}", *limits) for i, (name, limits) in enumerate(VARIANTS.items())}
    for size in (MIB // 16, MIB, 8 * MIB, 64 * MIB):
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        source = torch.ones(size, dtype=torch.uint8, device="cuda")
        for asker in askers.values():
            await asker.meet(other.peer, size)
        for _ in range(num_repeats if size < 64 * MIB else num_repeats // 2):
            for name, asker in askers.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                await asker.ask(other.peer, "time", from_torch(source))
                times[name].append(time.perf_counter() - began)
        medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
        shown = ", ".join(f"{name} {median:.0f} us" for name, median in medians.items())
        ratios = ", ".join(
            f"{name} / cuda = {medians[name] / medians['cuda']:.2f}" for name in VARIANTS if name != "cuda"
        )
        print(
            f"time {size / MIB:g} MiB from device here to device there and an answer: {shown}; {ratios}",
            flush=True,
        )
    for asker in askers.values():
        await asker.link.close(0.1)


async def main(num_repeats: int) -> int:
    report = Report()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    torch.zeros(1, device="cuda")
    with tempfile.TemporaryDirectory() as directory:
        other = Other(directory, "reader")
        asker = Asker(directory, "asker", *VARIANTS["cuda"])
        began = time.monotonic()
        await asker.meet(other.peer)
        print(f"     first three sends, with making and mapping the range: {time.monotonic() - began:.3f} s")
        for check in (check_values, check_no_host_copies, check_order, check_full, check_leaks):
            await check(report, asker, other.peer)
        await check_killed_reader(report, asker, directory)
        await measure(directory, other, num_repeats)
        await check_hostile(report, asker, other.peer, directory)
        await asker.ask(other.peer, "exit")
        code = other.process.wait(timeout=LIMIT_S)
        report.check("the reader ends well", code == 0, code)
        await asker.link.close(0.1)
        report.check(
            "a closed link leaves no counters",
            not [n for n in os.listdir(SHM) if n.startswith("torch_")],
            os.listdir(SHM),
        )
        await check_killed_sender(report, directory)
    if torch.cuda.device_count() > 1:
        check_two_devices(report, num_repeats)
    else:
        print("     between two devices: skipped, one is visible")
    print(f"{report.failed} wrong", flush=True)
    return report.failed


def check_two_devices(report: Report, num_repeats: int) -> None:
    """Run the checks between two devices, in a process that knows nothing of the ones before."""
    script = os.path.join(os.path.dirname(__file__), "gpu_check_two_devices.py")
    done = subprocess.run([sys.executable, script, "--repeats", str(num_repeats)], check=False)
    report.check("everything is right between two devices", done.returncode == 0, f"exit code {done.returncode}")


def run_and_exit(checks: Callable[[int], Coroutine[Any, Any, int]]) -> NoReturn:
    """Run checks with the repeats that the command line says; end with 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=60)
    failed = 1
    try:
        failed = uvloop.run(checks(parser.parse_args().repeats))
    except BaseException:  # noqa: BLE001 (told, and then the children end)
        traceback.print_exc()
    for child in CHILDREN:
        child.kill()
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # a stream that waits for a dead process would keep a plain exit from ending


if __name__ == "__main__":
    if sys.argv[1:2] == ["--receive"]:
        uvloop.run(receive(*sys.argv[2:]))
    elif sys.argv[1:2] == ["--send"]:
        torch.zeros(1, device="cuda")
        uvloop.run(send_and_wait(*sys.argv[2:]))
    else:
        run_and_exit(main)
