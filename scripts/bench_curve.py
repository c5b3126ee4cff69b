#!/usr/bin/env python3
"""Compare TCP between two actors with keys (CURVE) and without, in one run.

Two processes with one `Link` each, on loopback TCP: the round trip of a `Chunk` with a short `Text`, its one-way rate,
and the one-way rate of 1 MiB `Media`. The two ways take turns, `--rounds` times; medians are printed, then the median
of each round's own ratio, and the time from nothing to the first answer, which has the handshakes in it.

Run: ``python scripts/bench_curve.py [--quick] [--seconds S] [--rounds N]``
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from measured import header, ratio, table
from omni_bus.bus.curve import Curve, make_deployment_keys
from omni_bus.bus.link import Link
from omni_bus.ids import Peer, Sender
from omni_bus.wire.frames import Chunk, Credit, Goodbye
from omni_bus.wire.payloads import Blob, Media, Text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LIMIT_S = 120
WORD = Chunk("r-0123456789abcdef01234567", 1, 7, Text(" token", 1))
PICTURE = bytearray(1 << 20)
WARM_UP = 50
WINDOWS = {"words": 4096, "pictures": 64}
"""Chunks that may be under way."""

WAYS = ("without keys", "with keys")
UNITS = {"first answer": "ms", "round trip": "us", "words": "frames/s", "pictures": "MiB/s"}


def stuck(peer: Peer) -> None:
    """Nothing in this benchmark may be dropped."""
    raise RuntimeError(f"{peer} is stuck")


def far_end(folder: str, pipe: Connection) -> None:
    """Answer words, tell the time when the last one of a flood came, and grant credit for pictures."""

    async def main() -> None:
        over = asyncio.Event()
        is_echo, num, count, window = True, 0, 0, 0

        def deliver(_: Sender, frame: Any) -> None:
            nonlocal is_echo, num, count, window
            if isinstance(frame, Goodbye):
                over.set()
            elif isinstance(frame, Credit):  # what comes next: so many to count, or words to answer
                is_echo, num, count, window = frame.chunks == 0, 0, frame.chunks, frame.bytes
                if not is_echo:
                    link.send(near, Credit("r", 0, window, 0))
            elif is_echo:
                link.send(near, frame)
            else:
                num += 1
                if num in (1, count):
                    pipe.send(time.monotonic())
                if num % (window // 16) == 0:
                    link.send(near, Credit("r", 0, num + window, 0))

        link = Link("far.0", "tcp://127.0.0.1:0", deliver, stuck, curve=Curve(folder) if folder else None)
        pipe.send((link.me.incarnation, link.me.endpoint))
        near = Peer("near.0", *pipe.recv())
        pipe.send("ready")
        await over.wait()
        await link.close(1)

    uvloop.run(main())


class Near:
    """The end that asks."""

    def __init__(self, folder: str, pipe: Connection) -> None:
        self._pipe = pipe
        self._answer: Any = lambda _: None
        curve = Curve(folder) if folder else None
        self._link = Link("near.0", "tcp://127.0.0.1:0", lambda _, frame: self._answer(frame), stuck, curve=curve)
        self._far = Peer("far.0", *pipe.recv())
        pipe.send((self._link.me.incarnation, self._link.me.endpoint))
        pipe.recv()

    async def round_trips(self, count: int) -> float:
        """Return seconds until the last of so many answers."""
        over: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        left = count
        begun_at = time.monotonic()

        def answer(frame: Any) -> None:
            nonlocal left
            left -= 1
            if left:
                self._link.send(self._far, frame)
            else:
                over.set_result(time.monotonic() - begun_at)

        self._answer = answer
        self._link.send(self._far, WORD)
        return await over

    async def rate(self, what: str, count: int) -> float:
        """Return chunks per second, under credit."""
        window, sent = WINDOWS[what], 0

        def answer(frame: Any) -> None:
            nonlocal sent
            while isinstance(frame, Credit) and sent < min(count, frame.chunks):
                chunk = WORD if what == "words" else Chunk("r", 0, sent, Media("x/y", Blob(PICTURE)))
                self._link.send(self._far, chunk)
                sent += 1

        self._answer = answer
        self._link.send(self._far, Credit("r", 0, count, window))
        first, last = await asyncio.to_thread(lambda: (receive(self._pipe), receive(self._pipe)))
        self._link.send(self._far, Credit("r", 0, 0, 0))
        return (count - 1) / (last - first)

    async def close(self) -> None:
        """Let the other end go too."""
        self._link.send(self._far, Goodbye())
        await self._link.close(5)


def receive(pipe: Connection) -> Any:
    """Wait for the other process, but not for ever."""
    if not pipe.poll(LIMIT_S):
        raise TimeoutError("the other process says nothing")
    return pipe.recv()


async def near_end(folder: str, pipe: Connection, seconds: float) -> dict[str, float]:
    """Measure everything once."""
    near = Near(folder, pipe)
    found = {"first answer": await near.round_trips(1) * 1e3}
    await near.round_trips(WARM_UP)
    trips = max(50, int(5000 * seconds))
    found["round trip"] = await near.round_trips(trips) / trips * 1e6
    found["words"] = await near.rate("words", max(200, int(80_000 * seconds)))
    found["pictures"] = await near.rate("pictures", max(20, int(400 * seconds)))
    await near.close()
    return found


def measure(folder: str, seconds: float) -> dict[str, float]:
    """Measure one way, in two new processes' links."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=far_end, args=(folder, theirs), daemon=True)
    process.start()
    try:
        return uvloop.run(near_end(folder, ours, seconds))
    finally:
        process.join(10)
        process.kill()


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=1.0, help="about how long one measurement takes (default 1)")
    options.add_argument("--rounds", type=int, default=9, help="how often each way is measured (default 9)")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    seconds, rounds = (0.02, 1) if args.quick else (args.seconds, args.rounds)
    header()
    print(f"{rounds} rounds, each way in turn, over tcp://127.0.0.1")
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        make_deployment_keys(Path(folder), may_replace=False)
        for _ in range(rounds):
            for way in WAYS:
                results[way].append(measure(folder if way == "with keys" else "", seconds))
    rows = {
        f"{name}, {unit}": [statistics.median(found[name] for found in results[way]) for way in WAYS]
        for name, unit in UNITS.items()
    }
    table("medians", WAYS, rows)
    print("\nratios")
    pairs = list(zip(results["with keys"], results["without keys"], strict=True))
    for name in UNITS:
        ratio(f"{name}, with keys / without", statistics.median(a[name] / b[name] for a, b in pairs))


if __name__ == "__main__":
    main()
