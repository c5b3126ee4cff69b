# ruff: noqa: TID253
# A check of what lies on devices needs torch anyway.
"""Device tensors between real processes on two GPUs of one host: are they right, is nothing leaked, how fast is it.

Needs two NVIDIA GPUs and torch with CUDA; with one it says so and ends. Senders on either device; readers on either,
and one that sees only the second device, to which tensors of the first must go through the host. Otherwise as
`gpu_check_cuda_ipc`, which runs this at its end.

    PYTHONPATH=. python3 scripts/gpu_check_two_devices.py [--repeats 60]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch

from gpu_check_cuda_ipc import (
    DTYPES,
    LIMIT_S,
    MIB,
    VARIANTS,
    Asker,
    Other,
    Report,
    check_killed_reader,
    check_leaks,
    check_order,
    check_values,
    measure,
    pattern,
    run_and_exit,
    settle,
)
from omni_bus.wire.buffers import from_torch


def second_device_only() -> dict[str, str]:
    """Return an environment in which the second of our devices is the only one."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ours[1]}


async def check_reader_without_the_device(report: Report, asker: Asker, other: Other) -> None:
    """The reader can't map what it can't see: bytes come through the host, and are right."""
    for name in DTYPES:
        said = await asker.ask(other.peer, f"equal:{name}:3", from_torch(pattern(name, 3, 4 * MIB)))
        report.check(
            f"{name} arrives equal, through the host", bool(said.get("equal") and not said.get("leased")), said
        )


async def check_two_readers(report: Report, asker: Asker, near: Other, far: Other) -> None:
    """One tensor is copied once, whatever device its readers use, and goes back when both let go."""
    await settle(asker, near.peer)
    await settle(asker, far.peer)
    before = asker.cuda().leases
    payload = from_torch(pattern("float32", 3, 8 * MIB))
    leased = [(await asker.ask(other.peer, "hold", payload)).get("leased") for other in (near, far)]
    during = asker.cuda().leases
    sums = [(await asker.ask(other.peer, "held")).get("sums") for other in (near, far)]
    await asker.ask(near.peer, "drop")
    found = await settle(asker, far.peer)
    is_right = (
        leased == [True, True]
        and during.taken - before.taken == 1
        and during.lent - before.lent == 2
        and sums[0] == sums[1] is not None
        and found.leases.used_bytes == 0
    )
    report.check("readers on both devices share one copy and give it back", is_right, (leased, during, sums, found))


async def check_sender(report: Report, directory: str, device: int, num_repeats: int) -> None:
    """Everything with the sender on one device."""
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    near = Other(directory, f"near-{device}", device)
    far = Other(directory, f"far-{device}", 1 - device)
    asker = Asker(directory, f"asker-{device}", *VARIANTS["cuda"])
    for other in (near, far):
        began = time.monotonic()
        await asker.meet(other.peer)
        print(f"     first three sends: {time.monotonic() - began:.3f} s")
    print(f"== sender on cuda:{device}, reader on cuda:{1 - device}", flush=True)
    for check in (check_values, check_order, check_leaks):
        await check(report, asker, far.peer)
    await check_killed_reader(report, asker, directory, 1 - device)
    await check_two_readers(report, asker, near, far)
    if device == 0:
        alone = Other(directory, "alone", 0, second_device_only())
        await asker.meet(alone.peer)
        await check_reader_without_the_device(report, asker, alone)
        await asker.ask(alone.peer, "exit")
        alone.process.wait(timeout=LIMIT_S)
    for other, where in ((far, 1 - device), (near, device)):
        print(f"-- from cuda:{device} to cuda:{where}", flush=True)
        await measure(directory, other, num_repeats)
    for other in (near, far):
        await asker.ask(other.peer, "exit")
        code = other.process.wait(timeout=LIMIT_S)
        report.check("a reader ends well", code == 0, code)
    await asker.link.close(0.1)


async def main(num_repeats: int) -> int:
    """Check both directions."""
    report = Report()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"{', '.join(names)}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    if len(names) < 2:
        print("     between two devices: skipped, fewer are visible")
        return 0
    if not (torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)):
        print("     between two devices: skipped, these can't access each other; tensors go through the host")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        for device in (0, 1):
            await check_sender(report, directory, device, num_repeats)
    print(f"{report.failed} wrong between two devices", flush=True)
    return report.failed


if __name__ == "__main__":
    run_and_exit(main)
