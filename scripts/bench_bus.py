#!/usr/bin/env python3
"""Compare our bus with bare pyzmq, in one run: round trip and one-way rate of small frames between two processes.

Ways of carrying the same encoded frame (a `Chunk` with a short `Text`):

- ours: `Outbox` to `Inbox` under uvloop, with encoding, decoding and all checks;
- blocking: DEALER to ROUTER, `send` and `recv_multipart` in a plain loop; nothing encoded or decoded;
- blocking+codec: the same, each frame encoded before and decoded after;
- asyncio: `zmq.asyncio` under asyncio, its own loop's `await recv_multipart`; nothing encoded or decoded.

The ways take turns, `--rounds` times, so that a disturbance hits all of them; medians and best values are printed,
then the median of each round's own ratio. Run: ``python scripts/bench_bus.py [--quick] [--seconds S] [--rounds N]``
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from typing import TYPE_CHECKING, Any

import uvloop
import zmq
import zmq.asyncio

import measured
from omni_bus.bus.inbox import Inbox
from omni_bus.bus.outbox import BacklogLimits, Outbox
from omni_bus.ids import Peer, Sender
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import Chunk, Goodbye
from omni_bus.wire.payloads import Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

FRAME = Chunk("r-0123456789abcdef01234567", 1, 7, Text(" token", 1))
WARM_UP = 50
"""Round trips before the clock starts: connecting isn't measured (bare pyzmq may retry its first after 100 ms)."""

NEAR, FAR = Sender("near.0", 1), Sender("far.0", 2)
WAYS = ("ours", "blocking", "blocking+codec", "asyncio")


def stuck(peer: Peer) -> None:
    """Nothing in this benchmark may be dropped."""
    raise RuntimeError(f"{peer} is stuck")


# --- ours -----------------------------------------------------------------------------------------------------


async def ours_far(pipe: Connection, near: str, far: str, *, is_echo: bool, count: int) -> None:
    """Answer each frame (echo), or say when `count` have come."""
    context = zmq.Context()
    outbox = Outbox(context, FAR, on_stuck=stuck)
    send, peer, over = outbox.send, Peer("near.0", 1, near), asyncio.Event()
    num = 0

    def echo(_: Sender, frame: Any) -> None:
        if type(frame) is Goodbye:
            over.set()
        else:
            send(peer, frame)

    def tally(_: Sender, frame: Any) -> None:
        nonlocal num
        num += 1
        if num in (1, count):
            pipe.send(time.monotonic())
        if type(frame) is Goodbye:
            over.set()

    inbox = Inbox(context, far, echo if is_echo else tally)
    pipe.send("ready")
    await over.wait()
    inbox.close()
    await outbox.close(0)
    context.term()


async def ours_round_trips(near: str, far: str, count: int) -> float:
    """Return seconds per round trip."""
    context = zmq.Context()
    outbox = Outbox(context, NEAR, on_stuck=stuck)
    peer, over, num, begun = Peer("far.0", 2, far), asyncio.Event(), 0, 0.0

    def answer(_: Sender, frame: Any) -> None:
        nonlocal num, begun
        num += 1
        if num == WARM_UP:
            begun = time.perf_counter()
        if num < count + WARM_UP:
            outbox.send(peer, frame)
        else:
            over.set()

    inbox = Inbox(context, near, answer)
    outbox.send(peer, FRAME)
    await over.wait()
    took = time.perf_counter() - begun
    outbox.send(peer, Goodbye())
    await outbox.close(5)
    inbox.close()
    context.term()
    return took / count


async def ours_send(far: str, count: int, wait: Callable[[], object]) -> None:
    """Send as fast as it goes, giving the loop a turn now and then, as an actor does after each engine step."""
    context = zmq.Context()
    outbox = Outbox(context, NEAR, on_stuck=stuck, backlog=BacklogLimits(max_frames=count))
    peer = Peer("far.0", 2, far)
    outbox.send(peer, FRAME)
    await asyncio.to_thread(wait)
    for sent in range(count - 2):
        outbox.send(peer, FRAME)
        if sent % 64 == 0:
            await asyncio.sleep(0)
    outbox.send(peer, Goodbye())
    await asyncio.to_thread(wait)
    await outbox.close(0)
    context.term()


# --- bare pyzmq -----------------------------------------------------------------------------------------------


def sockets(context: Any, own: str, other: str, name: bytes) -> tuple[Any, Any]:
    """Return a bound ROUTER and a connected DEALER, as our actors have."""
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(own)
    dealer.setsockopt(zmq.ROUTING_ID, name)
    dealer.connect(other)
    return router, dealer


def work(*, has_codec: bool) -> tuple[Callable[[], bytes], Callable[[bytes], object]]:
    """Return what is done to each frame before sending and after receiving."""
    codec = Codec()
    encoded = bytes(codec.encode(FRAME)[0])
    if has_codec:
        return lambda: codec.encode(FRAME)[0], lambda header: codec.decode([header])  # type: ignore[return-value]
    return lambda: encoded, lambda header: header


def blocking_far(pipe: Connection, near: str, far: str, *, is_echo: bool, count: int, has_codec: bool) -> None:
    """The far end of bare blocking pyzmq."""
    context = zmq.Context()
    router, dealer = sockets(context, far, near, b"far")
    make, take = work(has_codec=has_codec)
    pipe.send("ready")
    for num in range(count + WARM_UP if is_echo else count):
        take(router.recv_multipart()[1])
        if is_echo:
            dealer.send(make())
        elif num in (0, count - 1):
            pipe.send(time.monotonic())
    dealer.close(2000)
    router.close(0)
    context.term()


def blocking_near(
    near: str, far: str, wait: Callable[[], object], *, is_echo: bool, count: int, has_codec: bool
) -> float:
    """The near end; returns seconds per round trip, or 0."""
    context = zmq.Context()
    router, dealer = sockets(context, near, far, b"near")
    make, take = work(has_codec=has_codec)
    begun = 0.0
    for num in range(count + WARM_UP if is_echo else count):
        if num == WARM_UP:
            begun = time.perf_counter()
        dealer.send(make())
        if is_echo:
            take(router.recv_multipart()[1])
        elif num == 0:
            wait()
    took = time.perf_counter() - begun
    wait()
    dealer.close(0)
    router.close(0)
    context.term()
    return took / count if is_echo else 0.0


async def asyncio_far(pipe: Connection, near: str, far: str, *, is_echo: bool, count: int) -> None:
    """The far end of pyzmq's asyncio sockets."""
    context = zmq.asyncio.Context()
    router, dealer = sockets(context, far, near, b"far")
    make, _ = work(has_codec=False)
    pipe.send("ready")
    for num in range(count + WARM_UP if is_echo else count):
        await router.recv_multipart()
        if is_echo:
            await dealer.send(make())
        elif num in (0, count - 1):
            pipe.send(time.monotonic())
    dealer.close(2000)
    router.close(0)
    context.term()


async def asyncio_near(near: str, far: str, wait: Callable[[], object], *, is_echo: bool, count: int) -> float:
    """The near end; returns seconds per round trip, or 0."""
    context = zmq.asyncio.Context()
    router, dealer = sockets(context, near, far, b"near")
    make, _ = work(has_codec=False)
    begun = 0.0
    for num in range(count + WARM_UP if is_echo else count):
        if num == WARM_UP:
            begun = time.perf_counter()
        await dealer.send(make())
        if is_echo:
            await router.recv_multipart()
        elif num == 0:
            await asyncio.to_thread(wait)
    took = time.perf_counter() - begun
    await asyncio.to_thread(wait)
    dealer.close(0)
    router.close(0)
    context.term()
    return took / count if is_echo else 0.0


# --- one measurement ------------------------------------------------------------------------------------------


def far_end(way: str, pipe: Connection, near: str, far: str, *, is_echo: bool, count: int) -> None:
    """What the second process runs."""
    if way == "ours":
        uvloop.run(ours_far(pipe, near, far, is_echo=is_echo, count=count))
    elif way == "asyncio":
        asyncio.run(asyncio_far(pipe, near, far, is_echo=is_echo, count=count))
    else:
        blocking_far(pipe, near, far, is_echo=is_echo, count=count, has_codec=way.endswith("codec"))


def near_end(way: str, near: str, far: str, wait: Callable[[], object], *, is_echo: bool, count: int) -> float:
    """What this process runs."""
    if way == "ours":
        if is_echo:
            return uvloop.run(ours_round_trips(near, far, count))
        uvloop.run(ours_send(far, count, wait))
        return 0.0
    if way == "asyncio":
        return asyncio.run(asyncio_near(near, far, wait, is_echo=is_echo, count=count))
    return blocking_near(near, far, wait, is_echo=is_echo, count=count, has_codec=way.endswith("codec"))


def receive(pipe: Connection) -> Any:
    """Wait for the other process, but not for ever."""
    if not pipe.poll(60):
        raise TimeoutError("the other process says nothing")
    return pipe.recv()


def measure(way: str, folder: str, *, is_echo: bool, count: int) -> float:
    """Return microseconds per round trip, or frames per second from the first frame received to the last."""
    near, far = f"ipc://{folder}/near", f"ipc://{folder}/far"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=far_end, args=(way, theirs, near, far), kwargs={"is_echo": is_echo, "count": count}, daemon=True
    )
    process.start()
    try:
        receive(ours)
        moments: list[float] = []

        def wait() -> None:
            """Wait for the first frame to have come, then for the last.

            The first, so that nobody connects, encodes or queues before the clock starts; the last, because ZeroMQ
            loses frames of a closed sender whose receiver is at its high-water mark.
            """
            if not is_echo:
                moments.append(receive(ours))

        per_trip_s = near_end(way, near, far, wait, is_echo=is_echo, count=count)
        return per_trip_s * 1e6 if is_echo else (count - 1) / (moments[1] - moments[0])
    finally:
        process.join(10)
        process.kill()


def table(title: str, results: dict[str, list[float]], best: Callable[[list[float]], float]) -> None:
    """Print median and best of each way."""
    rows: dict[str, list[float | str]] = {
        way: [measured.median(values), best(values)] for way, values in results.items()
    }
    measured.table(title, ("median", "best"), rows)


def ratio(what: str, results: dict[str, list[float]], way: str, aim: str = "", key: str = "") -> None:
    """Print ours over `way`: the median of each round's own ratio."""
    by_round = measured.median(a / b for a, b in zip(results["ours"], results[way], strict=True))
    measured.ratio(f"{what}, ours / {way}", by_round, aim, key=key)


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=1.0, help="about how long one measurement takes (default 1)")
    options.add_argument("--rounds", type=int, default=9, help="how often each way is measured (default 9)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    seconds, rounds = (0.02, 1) if args.quick else (args.seconds, args.rounds)
    trips, frames = max(50, int(5000 * seconds)), max(200, int(80_000 * seconds))
    measured.header()
    print(f"{rounds} rounds, each way in turn: {trips} round trips, {frames} frames one way, over ipc://")
    latency: dict[str, list[float]] = {way: [] for way in WAYS}
    rate: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                latency[way].append(measure(way, folder, is_echo=True, count=trips))
                rate[way].append(measure(way, folder, is_echo=False, count=frames))
    table("round trip (microseconds, less is better)", latency, min)
    table("one way (frames per second, more is better)", rate, max)
    print("\nratios")
    ratio("round trip", latency, "asyncio", "aim: at most 0.8", key="bus_round_trip")
    ratio("round trip", latency, "blocking")
    ratio("round trip", latency, "blocking+codec")
    ratio("rate one way", rate, "blocking")
    ratio("rate one way", rate, "blocking+codec", "aim: at least 0.85", key="bus_rate")
    ratio("rate one way", rate, "asyncio")
    measured.write_json(args.json, {"round_trip_us": latency, "frames_per_s": rate})


if __name__ == "__main__":
    main()
