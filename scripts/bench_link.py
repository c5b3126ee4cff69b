#!/usr/bin/env python3
"""Show what a stream of 8 MiB video frames does to the 20 ms audio chunks beside it on one link, in one run.

Two processes with one `Link` each. Audio: five streams of 20 ms chunks (24 kHz, 16 bit: 960 bytes), one chunk every
4 ms by the clock; latency is from the moment when a chunk was due to its delivery, so a sender that is busy counts
(and so does the loop's timer, which counts in milliseconds).
Video: 8 MiB frames as fast as a window of two frames allows, each consumed at once. Links: through the arena, the same
with all bytes in messages over ipc, and in messages over tcp (as between hosts, here on loopback).

Printed: p50, p99 and worst audio latency, alone and beside video, medians over rounds, and the best round's p99; the
video's rate; the p99 beside video, whose bound is the length of one chunk; and what video added to it, the median over
rounds of each round's difference.

Run: ``python scripts/bench_link.py [--quick] [--rounds N] [--seconds S]``
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from typing import Any

import uvloop

import measured
from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.link import Link
from omni_bus.ids import Peer, Sender
from omni_bus.wire.frames import Chunk, Credit, Goodbye, Ping
from omni_bus.wire.payloads import Audio, Blob, Video

LIMIT_S = 120
HEIGHT, WIDTH = 1024, 2730
PICTURE = bytearray(b"x" * HEIGHT * WIDTH * 3)
"""8,386,560 bytes."""
SOUND = Blob(bytes(960))
NUM_STREAMS = 5
INTERVAL_S = 0.02 / NUM_STREAMS
WINDOW = 2
BOUND = "aim: at most 20"
"""Milliseconds: one audio chunk. A player that holds one chunk never runs dry."""
LINKS = {"ipc, arena": ("ipc", ArenaLimits()), "ipc, inline": ("ipc", ArenaLimits(0)), "tcp": ("tcp", ArenaLimits())}


def stuck(peer: Peer) -> None:
    """Nothing in this benchmark may be dropped."""
    raise RuntimeError(f"{peer} is stuck")


def far_end(listen: str, pipe: Any) -> None:
    """Receive; grant credit for each video frame; in the end send when each audio chunk came."""

    async def main() -> None:
        came: list[float] = []
        num_frames = 0
        over = asyncio.Event()

        def deliver(_: Sender, frame: Any) -> None:
            nonlocal num_frames
            if isinstance(frame, Goodbye):
                over.set()
            elif isinstance(frame.payload, Audio):
                came.append(time.monotonic())
            else:
                num_frames += 1
                link.send(near, Credit("video", 0, num_frames + WINDOW, 1 << 40))

        link = Link("far.0", listen, deliver, stuck)
        pipe.send((link.me.incarnation, link.me.endpoint))
        near = Peer("near.0", *pipe.recv())
        pipe.send("ready")
        await over.wait()
        pipe.send((came, num_frames))
        await link.close(1)

    uvloop.run(main())


async def near_end(listen: str, arena: ArenaLimits, pipe: Any, *, seconds: float, has_video: bool) -> list[float]:
    """Send; return when each audio chunk was due."""
    loop = asyncio.get_running_loop()
    num_sent = 0

    def deliver(_: Sender, frame: Any) -> None:
        nonlocal num_sent
        if isinstance(frame, Ping):
            return
        while num_sent < frame.chunks and not over.done():
            picture = Video(num_sent, 1, HEIGHT, WIDTH, 1, 25, Blob(PICTURE))  # one blob would be written once
            link.send(far, Chunk("video", 0, num_sent, picture))
            num_sent += 1

    due: list[float] = []
    over: asyncio.Future[None] = loop.create_future()

    def tick() -> None:
        # A late loop sends what became due meanwhile, as a stage whose engine hands over several chunks.
        while due[-1] <= time.monotonic():
            seq, stream = divmod(len(due) - 1, NUM_STREAMS)
            link.send(far, Chunk(f"audio {stream}", 0, seq, Audio(24_000, 1, "s16", SOUND)))
            due.append(due[-1] + INTERVAL_S)
        if len(due) * INTERVAL_S > seconds:
            over.set_result(None)
        else:
            loop.call_at(due[-1], tick)

    link = Link("near.0", listen, deliver, stuck, arena)
    far = Peer("far.0", *pipe.recv())
    pipe.send((link.me.incarnation, link.me.endpoint))
    pipe.recv()
    if has_video:
        deliver(far.sender, Credit("video", 0, WINDOW, 1 << 40))
        await asyncio.sleep(0.2)  # warm
    due.append(time.monotonic())
    tick()
    await over
    link.send(far, Goodbye())
    due.pop()  # not sent
    await link.close(5)
    return due


def measure(name: str, *, seconds: float, has_video: bool) -> tuple[list[float], float]:
    """Return audio latencies in milliseconds, and video frames per second."""
    scheme, arena = LINKS[name]
    pipe, far = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        listen = [f"ipc://{folder}/{end}" if scheme == "ipc" else "tcp://127.0.0.1:0" for end in ("near", "far")]
        process = multiprocessing.get_context("spawn").Process(target=far_end, args=(listen[1], far), daemon=True)
        process.start()
        try:
            due = uvloop.run(near_end(listen[0], arena, pipe, seconds=seconds, has_video=has_video))
            if not pipe.poll(LIMIT_S):
                raise TimeoutError("the other process says nothing")
            came, num_frames = pipe.recv()
        finally:
            process.join(10)
            process.kill()
    return [(end - begin) * 1000 for begin, end in zip(due, came, strict=True)], num_frames / seconds


def percentile(values: list[float], percent: float) -> float:
    """Return the value below which so many of them are."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5, help="how often each link is measured (default 5)")
    options.add_argument("--seconds", type=float, default=5.0, help="length of one measurement (default 5)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    rounds, seconds = (1, 0.2) if args.quick else (args.rounds, args.seconds)
    measured.header()
    print(f"{rounds} rounds, each link in turn, alone and beside video, {seconds:g} s each")
    cases = [(name, has_video) for name in LINKS for has_video in (False, True)]
    results: dict[tuple[str, bool], list[tuple[list[float], float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for name, has_video in cases:
            results[name, has_video].append(measure(name, seconds=seconds, has_video=has_video))
    print(f"\n{'audio latency, ms':<28}{'p50':>9}{'p99':>9}{'worst':>9}{'best p99':>10}{'video frames/s':>17}")
    for (name, has_video), runs in results.items():
        medians = [measured.median(percentile(latencies, p) for latencies, _ in runs) for p in (50, 99, 100)]
        row = f"{name + (', beside video' if has_video else ', alone'):<28}" + "".join(f"{ms:>9.2f}" for ms in medians)
        row += f"{min(percentile(latencies, 99) for latencies, _ in runs):>10.2f}"
        print(row + (f"{measured.median(rate for _, rate in runs):>17.0f}" if has_video else ""))
    print("\nratios")
    for name in LINKS:
        pairs = zip(results[name, True], results[name, False], strict=True)
        added = [percentile(beside[0], 99) - percentile(alone[0], 99) for beside, alone in pairs]
        beside_video = measured.median(percentile(latencies, 99) for latencies, _ in results[name, True])
        measured.ratio(f"p99 of audio beside video, ms, {name}", beside_video, BOUND, key=f"audio_{name}")
        measured.ratio(f"added by video to the audio's p99, ms, {name}", measured.median(added))
    measured.write_json(
        args.json,
        {
            "p99_ms": {
                name: [
                    {"alone": percentile(alone[0], 99), "beside_video": percentile(beside[0], 99)}
                    for alone, beside in zip(results[name, False], results[name, True], strict=True)
                ]
                for name in LINKS
            }
        },
    )


if __name__ == "__main__":
    main()
