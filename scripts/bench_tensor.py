#!/usr/bin/env python3
"""Compare ways to bring a tensor from one process to another on one host, in one run.

End to end: from the call that sends to the moment when the receiver holds an array of the right shape and has looked
at its last element. One tensor at a time; the sender goes on when the receiver has let go of it. Ways:

- ours: `Link` to `Link`, through the shared-memory arena (one copy, into it);
- ours in place: the same, with the tensor written in the arena from the beginning (`Link.allocate`), so not copied;
- ours inline: the same with the arena switched off;
- stage in place: from an engine that makes it in memory of its `Context.allocate`, to a `BusClient`;
- client in place: from a `BusClient` that makes it in its own `allocate`, to an engine; both in a deployment of real
  processes, with flow control and all checks;
- stage, client: the same with a tensor that lay elsewhere, and is copied once;
- zeromq: DEALER to ROUTER of bare blocking pyzmq, `copy=False` at both ends, `numpy.frombuffer`;
- mp.Queue: `multiprocessing.Queue`, which pickles;
- ray: an actor's method called with the array (object store, read without a copy);
- xoscar: the same between two processes of an xoscar pool.

Each is set against one `numpy.copyto` of as many bytes, in the sender, in the same round: once in a tight loop
(copyto), once each time after a short call to the other process (copyto, paced), because a processor that had to wait
for an answer, as every sender here has, copies more slowly than one that did nothing else. Ways take turns; medians of
rounds, each round the median of `--count` tensors. A call with a short text instead of a tensor is measured as a round
trip. Ray and xoscar are measured where they are installed: ``pip install 'omni-bus[bench]'``.

Run: ``python scripts/bench_tensor.py [--quick] [--rounds N] [--count N] [--sizes BYTES,BYTES]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
import zmq

import measured
import stamped
from omni_bus.bus.arena import ArenaLimits
from omni_bus.bus.link import Link
from omni_bus.client import Item
from omni_bus.ids import Peer, Sender
from omni_bus.wire.buffers import tensor, view
from omni_bus.wire.frames import Chunk, Goodbye, Pong
from omni_bus.wire.payloads import Blob, Json, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20
LIMIT_S = 120
SPAWN = multiprocessing.get_context("spawn")


def now_ns() -> int:
    """Monotonic time, the same in all processes of a host."""
    return time.monotonic_ns()


class Way:
    """One way, open from construction to `close`."""

    def send(self, array: Any) -> int:
        """Send an array; return nanoseconds until the receiver had it."""
        raise NotImplementedError

    def call(self) -> int:
        """Send a short text there and get one back; return nanoseconds."""
        raise NotImplementedError

    def close(self) -> None:
        """End the other process."""


# --- ours -----------------------------------------------------------------------------------------------------


def ours_far(folder: str, pipe: Any) -> None:
    """Tell when each array was there."""

    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def deliver(_: Sender, frame: Any) -> None:
            if type(frame) is Goodbye:
                over.set()
                return
            if isinstance(frame.payload, Text):
                link.send(near, Pong(0))
                return
            array = view(frame.payload)
            assert array[-1] >= 0
            arrived = now_ns()
            # Two turns later, when nothing here holds the array any more.
            loop.call_soon(loop.call_soon, link.send, near, Pong(arrived))

        link = Link("far.0", f"ipc://{folder}/far", deliver, print)
        pipe.send((link.me.incarnation, link.me.endpoint))
        near = Peer("near.0", *pipe.recv())
        pipe.send("ready")
        await over.wait()
        await link.close(1)

    uvloop.run(main())


class Ours(Way):
    """`Link` to `Link`."""

    def __init__(self, *, has_arena: bool = True) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.loop = uvloop.new_event_loop()
        self.answer: asyncio.Future[int] = self.loop.create_future()
        self.pipe, far = multiprocessing.Pipe()
        self.process = SPAWN.Process(target=ours_far, args=(self.folder.name, far), daemon=True)
        self.process.start()
        self.limits = ArenaLimits() if has_arena else ArenaLimits(0)
        self.loop.run_until_complete(self.open())

    async def open(self) -> None:
        """Open this end."""
        self.link = Link("near.0", f"ipc://{self.folder.name}/near", self.deliver, print, self.limits)
        self.peer = Peer("far.0", *self.pipe.recv())
        self.pipe.send((self.link.me.incarnation, self.link.me.endpoint))
        self.pipe.recv()

    def deliver(self, _: Sender, frame: Any) -> None:
        """Take the answer."""
        self.answer.set_result(frame.nonce)

    async def exchange(self, payload: Any) -> tuple[int, int]:
        """Return when the frame was sent, and what the answer says."""
        self.answer = self.loop.create_future()
        begun = now_ns()
        self.link.send(self.peer, Chunk("r-0123456789abcdef01234567", 0, 0, payload))
        return begun, await self.answer

    def send(self, array: Any) -> int:
        """Send."""
        begun, arrived = self.loop.run_until_complete(self.exchange(tensor(array)))
        return arrived - begun

    def call(self) -> int:
        """Call."""
        begun, _ = self.loop.run_until_complete(self.exchange(Text("hello")))
        return now_ns() - begun

    def close(self) -> None:
        """Close."""
        self.link.send(self.peer, Goodbye())
        self.loop.run_until_complete(self.link.close(5))
        self.loop.close()
        self.process.join(LIMIT_S)
        self.folder.cleanup()


class OursInPlace(Ours):
    """`Link` to `Link`; what is sent was made in the arena."""

    def send(self, array: Any) -> int:
        """Send."""
        blob = self.link.allocate(array.nbytes)
        made = np.frombuffer(blob.view, array.dtype)
        np.copyto(made, array)  # stands for the work that makes it, which every other way has behind it too
        return super().send(made)


DEPLOYED = """
heartbeat_s = 600  # other ways block this process for seconds

[stages.source]
adapter = "stamped:TensorSource"
[stages.sink]
adapter = "stamped:TensorSink"

[pipelines.source]
edges = ["in.ask -> source.ask", "source.tensor -> out.tensor"]
[pipelines.sink]
edges = ["in.tensor -> sink.tensor", "sink.came -> out.came"]
"""


class Deployed(Way):
    """A request that stays open between a client and a stage of a running deployment.

    Args:
        pipeline: where the tensor is made: at the ``source``, which is a stage, or here, for the ``sink``.
        is_in_place: whether it is made in shared memory.
    """

    def __init__(self, pipeline: str, *, is_in_place: bool) -> None:
        self.pipeline = pipeline
        self.is_in_place = is_in_place
        self.own: dict[int, Any] = {}
        self.loop = uvloop.new_event_loop()
        self.stack = contextlib.ExitStack()
        self.deployment = self.stack.enter_context(measured.Deployment(DEPLOYED))
        self.loop.run_until_complete(self.open())

    async def open(self) -> None:
        """Open the request."""
        self.client = await self.deployment.client()
        self.request = await self.client.submit(self.pipeline)

    def send(self, array: Any) -> int:
        """Send."""
        return self.loop.run_until_complete(
            self.from_stage(array) if self.pipeline == "source" else self.to_stage(array)
        )

    async def from_stage(self, array: Any) -> int:
        """Ask a stage for a tensor of that size; return how long it was on its way."""
        await self.request.send("ask", Json({"num_bytes": array.nbytes, "is_in_place": self.is_in_place}))
        item = await anext(self.request)
        assert isinstance(item, Item)
        assert isinstance(item.payload, Tensor)
        came = view(item.payload)
        assert came[-1] >= 0
        return now_ns() - int.from_bytes(item.payload.data.view[: stamped.STAMP_BYTES], "little")

    async def to_stage(self, array: Any) -> int:
        """Send a tensor to a stage."""
        if self.is_in_place:
            blob = self.client.allocate(array.nbytes)
        else:
            own = self.own.setdefault(array.nbytes, np.empty_like(array))
            blob = Blob(own.data)
        np.copyto(np.frombuffer(blob.view, np.uint8), array)  # stands for the work that makes it
        begun = now_ns()
        await self.request.send("tensor", Tensor("uint8", array.shape, blob))
        del blob
        item = await anext(self.request)
        assert isinstance(item, Item)
        assert isinstance(item.payload, Json)
        return item.payload.value - begun

    def call(self) -> int:
        """Send one byte."""
        begun = now_ns()
        self.send(np.zeros(stamped.STAMP_BYTES, np.uint8))
        return now_ns() - begun

    def close(self) -> None:
        """Close."""
        self.request.cancel()
        self.loop.run_until_complete(self.client.close())
        self.loop.close()
        self.stack.close()


# --- bare ZeroMQ and the standard library ---------------------------------------------------------------------


def zeromq_far(folder: str) -> None:
    """Tell when each array was there."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"ipc://{folder}/far")
    dealer.connect(f"ipc://{folder}/near")
    dealer.send(b"ready")
    while True:
        _, part = router.recv_multipart(copy=False)
        if len(part) == 0:
            break
        if len(part) > 8:
            array = np.frombuffer(part.buffer, np.uint8)
            assert array[-1] >= 0
        dealer.send(now_ns().to_bytes(8, "little"))
    context.destroy(1000)


class ZeroMQ(Way):
    """DEALER to ROUTER."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.context = zmq.Context()
        self.router, self.dealer = self.context.socket(zmq.ROUTER), self.context.socket(zmq.DEALER)
        self.router.bind(f"ipc://{self.folder.name}/near")
        self.process = SPAWN.Process(target=zeromq_far, args=(self.folder.name,), daemon=True)
        self.process.start()
        self.router.recv_multipart()
        self.dealer.connect(f"ipc://{self.folder.name}/far")

    def send(self, array: Any) -> int:
        """Send."""
        begun = now_ns()
        self.dealer.send(array, copy=False)
        return int.from_bytes(self.router.recv_multipart()[1], "little") - begun

    def call(self) -> int:
        """Call."""
        begun = now_ns()
        self.dealer.send(b"hello")
        self.router.recv_multipart()
        return now_ns() - begun

    def close(self) -> None:
        """Close."""
        self.dealer.send(b"")
        self.process.join(LIMIT_S)
        self.context.destroy(0)
        self.folder.cleanup()


def queue_far(there: Any, back: Any) -> None:
    """Tell when each array was there."""
    while (item := there.get()) is not None:
        if not isinstance(item, str):
            assert item[-1] >= 0
        back.put(now_ns())


class MpQueue(Way):
    """`multiprocessing.Queue`."""

    def __init__(self) -> None:
        self.there, self.back = SPAWN.Queue(), SPAWN.Queue()
        self.process = SPAWN.Process(target=queue_far, args=(self.there, self.back), daemon=True)
        self.process.start()

    def send(self, array: Any) -> int:
        """Send."""
        begun = now_ns()
        self.there.put(array)
        return self.back.get(timeout=LIMIT_S) - begun

    def call(self) -> int:
        """Call."""
        begun = now_ns()
        self.there.put("hello")
        self.back.get(timeout=LIMIT_S)
        return now_ns() - begun

    def close(self) -> None:
        """Close."""
        self.there.put(None)
        self.process.join(LIMIT_S)


# --- others ---------------------------------------------------------------------------------------------------


os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a benchmark leaves no key behind


class Ray(Way):
    """An actor of Ray's."""

    def __init__(self) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self.ray = ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)

        @ray.remote
        class Far:
            def take(self, item: Any) -> int:
                if not isinstance(item, str):
                    assert item[-1] >= 0
                return time.monotonic_ns()

        self.far: Any = Far.remote()  # pyright: ignore[reportAttributeAccessIssue]
        ray.get(self.far.take.remote("hello"))

    def send(self, array: Any) -> int:
        """Send."""
        begun = now_ns()
        return self.ray.get(self.far.take.remote(array)) - begun

    def call(self) -> int:
        """Call."""
        begun = now_ns()
        self.ray.get(self.far.take.remote("hello"))
        return now_ns() - begun

    def close(self) -> None:
        """Close."""
        self.ray.shutdown()


class Xoscar(Way):
    """An actor of xoscar's in a pool's second process, called from one in the first."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.open())

    async def open(self) -> None:
        """Make the pool and the actor."""
        import xoscar  # pyright: ignore[reportMissingImports]

        import xoscar_actors

        xoscar_actors.share_path()
        self.pool: Any = await xoscar.create_actor_pool("127.0.0.1:0", n_process=1)
        address = list(self.pool._config.get_process_indexes())  # noqa: SLF001 (it has no public way to name a process)
        far_address = self.pool._config.get_pool_config(address[-1])["external_address"][0]  # noqa: SLF001
        self.far: Any = await xoscar.create_actor(xoscar_actors.Far, address=far_address)
        await self.far.take("hello")

    def send(self, array: Any) -> int:
        """Send."""
        return self.loop.run_until_complete(self.exchange(array))[0]

    def call(self) -> int:
        """Call."""
        return self.loop.run_until_complete(self.exchange("hello"))[1]

    async def exchange(self, item: Any) -> tuple[int, int]:
        """Return nanoseconds until it was there, and until the answer was."""
        begun = now_ns()
        arrived = await self.far.take(item)
        return arrived - begun, now_ns() - begun

    def close(self) -> None:
        """Close."""
        self.loop.run_until_complete(self.pool.stop())


WAYS: dict[str, Callable[[], Way]] = {
    "ours": Ours,
    "ours in place": OursInPlace,
    "ours inline": lambda: Ours(has_arena=False),
    "stage in place": lambda: Deployed("source", is_in_place=True),
    "client in place": lambda: Deployed("sink", is_in_place=True),
    "stage": lambda: Deployed("source", is_in_place=False),
    "client": lambda: Deployed("sink", is_in_place=False),
    "zeromq": ZeroMQ,
    "mp.Queue": MpQueue,
    "ray": Ray,
    "xoscar": Xoscar,
}

FOREIGN = frozenset({"ray", "xoscar"})
"""Measured where they are installed."""

MAX_BYTES = {"mp.Queue": 8 * MIB, "xoscar": 8 * MIB, "ours inline": 8 * MIB, "zeromq": 8 * MIB}
"""Ways that copy so much that larger tensors say nothing new and take most of the time."""


# --- the run --------------------------------------------------------------------------------------------------


def copy_ns(source: Any, target: Any) -> int:
    """Time one copy."""
    begun = now_ns()
    np.copyto(target, source)
    return now_ns() - begun


def paced_copy_ns(way: Way, source: Any, target: Any) -> int:
    """Time one copy after a wait for an answer."""
    way.call()
    return copy_ns(source, target)


def median_us(measure: Callable[[], int], count: int) -> float:
    """Return the median in microseconds, after two that don't count (pages are touched, buffers grow)."""
    for _ in range(2):
        measure()
    return statistics.median(measure() for _ in range(count)) / 1000


def open_ways(names: list[str]) -> dict[str, Way]:
    """Open what is there; say what is not."""
    ways: dict[str, Way] = {}
    for name in names:
        if name in FOREIGN and importlib.util.find_spec(name) is None:
            print(f"{name}: not installed, not measured")
            continue
        ways[name] = WAYS[name]()
    return ways


def table(size: int, results: dict[str, list[float]]) -> None:
    """Print medians, and ratios to one copy and to ours: medians of each round's own ratio."""
    ours, copies, paced = results["ours"], results.get("copyto"), results.get("copyto, paced")
    title = f"{size / MIB:g} MiB" if size >= MIB else f"{size / KIB:g} KiB"
    head = "" if copies is None else f"{'/ copyto':>10}{'/ paced':>10}"
    print(f"\n{title if size else 'a call with a short text, there and back'}")
    print(f"  {'way':<17}{'median us':>12}{'best us':>12}{head}{'/ ours':>10}")
    for way, values in results.items():
        by_copy = "" if copies is None else f"{ratio(values, copies):>10.2f}{ratio(values, paced or copies):>10.2f}"
        row = f"  {way:<17}{statistics.median(values):>12,.1f}{min(values):>12,.1f}{by_copy}"
        print(f"{row}{ratio(values, ours):>10.2f}", flush=True)


def ratio(values: list[float], others: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=9, help="how often each way is measured (default 9)")
    options.add_argument("--count", type=int, default=20, help="tensors of one measurement (default 20)")
    options.add_argument("--sizes", default=f"{64 * KIB},{MIB},{8 * MIB},{64 * MIB}", help="bytes, by commas")
    options.add_argument("--ways", default=",".join(WAYS), help="which ways, by commas")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    rounds, count = (1, 2) if args.quick else (args.rounds, args.count)
    sizes = [64 * KIB, MIB] if args.quick else [int(size) for size in args.sizes.split(",")]
    measured.header()
    print(f"{rounds} rounds, each way in turn, {count} tensors each")
    ways = open_ways([name for name in args.ways.split(",") if not args.quick or name not in FOREIGN])
    calls: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            calls[name].append(median_us(way.call, count * 10))
    table(0, calls)
    found: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        source = np.arange(size, dtype=np.uint64).astype(np.uint8) if size < 16 * MIB else np.ones(size, np.uint8)
        target = np.zeros(size, np.uint8)
        shown = {name: way for name, way in ways.items() if size <= MAX_BYTES.get(name, size)}
        results = found[size] = {"copyto": [], "copyto, paced": [], **{name: [] for name in shown}}
        for _ in range(rounds):
            results["copyto"].append(median_us(lambda: copy_ns(source, target), count))  # noqa: B023 (called here)
            paced = median_us(lambda: paced_copy_ns(ways["ours"], source, target), count)  # noqa: B023 (called here)
            results["copyto, paced"].append(paced)
            for name, way in shown.items():
                results[name].append(median_us(lambda: way.send(source), count))  # noqa: B023 (called here)
        table(size, results)
    for way in ways.values():
        way.close()
    report(found.get(8 * MIB) or found[max(found)])
    measured.write_json(args.json, {"call_us": calls, "us": {str(size): results for size, results in found.items()}})


def report(results: dict[str, list[float]]) -> None:
    """Print the ratios of one size, 8 MiB if it was measured."""
    print("\nratios")
    for way in ("stage in place", "client in place", "ours in place"):
        if way in results:
            key = "tensor_" + way.replace(" ", "_")
            measured.ratio(f"{way} / one copy", ratio(results[way], results["copyto"]), "aim: at most 1.5", key=key)
    for way in ("stage", "client", "ours"):
        if way in results:
            what, copied = f"{way}, copied once / one copy", ratio(results[way], results["copyto"])
            measured.ratio(what, copied, key=f"tensor_{way}")
    for way in ("ray", "mp.Queue", "zeromq", "xoscar"):
        if way in results:
            aim = "aim: at least 5" if way in {"ray", "mp.Queue"} else ""
            measured.ratio(f"{way} / ours, copied once", ratio(results[way], results["ours"]), aim, key=f"tensor_{way}")


if __name__ == "__main__":
    main()
