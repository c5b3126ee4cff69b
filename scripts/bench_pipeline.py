#!/usr/bin/env python3
"""What a chunk costs with few and with many requests streaming at once: three stages, in processes of their own.

Two loads on the same three-stage pipeline (source, a streaming relay, a step relay), each in turn at every concurrency:

- even: the source makes the same number of chunks a second in all, however many requests share it, each on a clock of
  its own; the latency of a chunk is from its making to its delivery, across three hops;
- flat out: a step source makes a chunk of every request in each step, as fast as credit lets it.

Measured over a window in which all requests stream; then some are cancelled one by one and the rest at once, which
gives the latency of a cancel under that load. Processor seconds are those of the stages and the coordinator; the
client's are told apart.
Last, short and long requests run to their end, and the coordinator tells how many frames it has seen of each.

Run: ``python scripts/bench_pipeline.py [--quick] [--seconds S] [--rounds N]``
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

import measured
import stamped
from omni_bus.client import Item
from omni_bus.errors import RequestCancelled
from omni_bus.wire.frames import Cancelled
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from omni_bus.client import BusClient, Request
    from omni_bus.ids import Sender

TOML = """
[stages.even]
adapter = "stamped:EvenSource"
[stages.steps]
adapter = "stamped:StepSource"
[stages.relay]
adapter = "stamped:Relay"
[stages.last]
adapter = "stamped:StepRelay"

[pipelines.even]
max_in_flight = 10000
edges = ["in.messages -> even.prompt", "even.text -> relay.text", "relay.text -> last.text", "last.text -> out.text"]

[pipelines.flat_out]
max_in_flight = 10000
edges = ["in.messages -> steps.prompt", "steps.text -> relay.text", "relay.text -> last.text", "last.text -> out.text"]
"""

FOREVER = 10_000_000
"""Chunks; a request of the windowed loads is cancelled long before."""

NUM_SINGLE_CANCELS = 20

CONTROL = ("Submit", "Admit", "Reject", "Cancel", "Cancelled", "Done", "Failed", "Inquire")
"""The coordinator's frames that concern one request."""


class Window(msgspec.Struct):
    """One measurement."""

    chunks_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    """Processor seconds per thousand chunks, coordinator and stages."""
    client_cpu_s: float
    cpu_by_actor: dict[str, float]
    resident_mb: dict[str, float]
    cancel_one_ms: float
    """Median from a cancel to its confirmation by every stage, one request after the other while the rest stream."""
    cancel_all_ms: float
    """The same for all that are left, at once; until the last one is confirmed."""


class Tally:
    """What came while it counts; latencies in nanoseconds, a sample of at most one in `every`."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.latencies_ns: list[int] = []
        self.every = 1

    def take(self, text: str) -> None:
        """Note a chunk."""
        self.num_chunks += 1
        if self.num_chunks % self.every == 0:
            self.latencies_ns.append(time.monotonic_ns() - int(text))


class Streams:
    """So many requests that stream at once."""

    def __init__(self, client: BusClient, pipeline: str, concurrency: int, period_s: float) -> None:
        self._client = client
        self._pipeline = pipeline
        self._prompt = Json(stamped.prompt(FOREVER, period_s))
        self._concurrency = concurrency
        self.tally = Tally()
        self.requests: list[Request] = []
        self._readers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when every request has had a chunk."""
        begun = [asyncio.get_running_loop().create_future() for _ in range(self._concurrency)]
        self._readers = [asyncio.create_task(self._read(first)) for first in begun]
        for first in begun:
            await first

    async def _read(self, first: asyncio.Future[None]) -> None:
        try:
            request = await self._client.submit(self._pipeline)
            self.requests.append(request)
            await request.send("messages", self._prompt)
            request.finish("messages")
            async for event in request:
                if isinstance(event, Item):
                    if not first.done():
                        first.set_result(None)
                    self.tally.take(event.payload.text)  # type: ignore[union-attr] (the pipeline's output is text)
        except RequestCancelled:
            pass  # the window is over
        except Exception as error:
            if first.done():
                raise
            first.set_exception(error)

    async def close(self) -> tuple[list[float], float]:
        """Cancel some requests one by one, then all others; return the seconds of each, and of all others."""
        some = self.requests[:: max(1, len(self.requests) // NUM_SINGLE_CANCELS)][:NUM_SINGLE_CANCELS]
        one_by_one = [max(await self._cancel([request])) for request in some]
        rest = [request for request in self.requests if request not in some]
        of_rest = max(await self._cancel(rest)) if rest else 0.0
        await asyncio.gather(*self._readers)
        return one_by_one, of_rest

    async def _cancel(self, requests: list[Request]) -> list[float]:
        """Cancel at once; return the seconds until the coordinator confirmed each."""
        confirmed: list[float] = []
        waiting = {request.id for request in requests}
        is_over = asyncio.Event()
        core = self._client.core
        on_frame = core.on_frame

        def watch(sender: Sender, frame: Any, now: float) -> Any:
            if isinstance(frame, Cancelled) and frame.request in waiting:
                waiting.discard(frame.request)
                confirmed.append(time.perf_counter() - begun)
                if not waiting:
                    is_over.set()
            return on_frame(sender, frame, now)

        core.on_frame = watch
        begun = time.perf_counter()
        for request in requests:
            request.cancel("the window is over")
        await is_over.wait()
        core.on_frame = on_frame
        return confirmed


async def measure(
    deployment: measured.Deployment, client: BusClient, pipeline: str, concurrency: int, *, rate: float, seconds: float
) -> Window:
    """Let `concurrency` requests stream for a while."""
    streams = Streams(client, pipeline, concurrency, concurrency / rate if pipeline == "even" else 0.0)
    await streams.start()
    await asyncio.sleep(min(1.0, seconds / 4))
    tally = streams.tally = Tally()
    tally.every = 1 if pipeline == "even" else 7
    before, client_before, begun = deployment.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - begun
    client_cpu, after = time.process_time() - client_before, deployment.cpu_s()
    num_chunks, latencies = tally.num_chunks, [ns / 1e6 for ns in tally.latencies_ns]
    resident = {name: size / 2**20 for name, size in deployment.resident_bytes().items()}
    one_by_one, rest = await streams.close()
    per_thousand = 1000 / max(1, num_chunks)
    actors = {n: (after[n] - before[n]) * per_thousand for n in after if n != "supervisor"}
    return Window(
        chunks_per_s=num_chunks / took,
        p50_ms=measured.quantile(latencies, 0.5),
        p99_ms=measured.quantile(latencies, 0.99),
        cpu_s=sum(actors.values()),
        client_cpu_s=client_cpu * per_thousand,
        cpu_by_actor=actors,
        resident_mb=resident,
        cancel_one_ms=measured.median(one_by_one) * 1e3,
        cancel_all_ms=rest * 1e3,
    )


async def control_frames(client: BusClient, num_requests: int, num_chunks: int) -> float:
    """Run requests one after the other, to their end; return the coordinator's frames for each, in and out."""

    async def count() -> int:
        frames: dict[str, dict[str, int]] = (await client.admin("status"))["frames"]
        return sum(counts.get(name, 0) for counts in frames.values() for name in CONTROL)

    async def settled() -> int:
        while (await client.admin("status"))["requests"]["live"]:
            pass
        return await count()

    before = await settled()
    for _ in range(num_requests):
        request = await client.submit("even")
        await request.send("messages", Json(stamped.prompt(num_chunks, 0)))
        request.finish("messages")
        async for _event in request:
            pass
    return (await settled() - before) / num_requests


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything in one deployment."""
    concurrencies = (1, 10, 20) if args.quick else (1, 10, 100, 1000)
    seconds, rounds = (0.3, 1) if args.quick else (args.seconds, args.rounds)
    windows: dict[str, dict[int, list[Window]]] = {
        name: {n: [] for n in concurrencies} for name in ("even", "flat_out")
    }
    with measured.Deployment(TOML) as deployment:
        client = await deployment.client()
        try:
            for _ in range(rounds):
                for name, by_concurrency in windows.items():
                    for concurrency, found in by_concurrency.items():
                        window = await measure(deployment, client, name, concurrency, rate=args.rate, seconds=seconds)
                        found.append(window)
            num = 5 if args.quick else 50
            frames = {chunks: await control_frames(client, num, chunks) for chunks in (1, 20 if args.quick else 500)}
        finally:
            await client.close()
    return {"windows": windows, "frames": frames}


def report(windows: dict[str, dict[int, list[Window]]], frames: dict[int, float]) -> None:
    """Print tables, then ratios."""

    def mid(found: list[Window], field: str) -> float:
        return measured.median(getattr(window, field) for window in found)

    columns = ("chunks/s", "p50 ms", "p99 ms", "CPU s/1000", "client CPU", "cancel one ms", "cancel rest ms")
    fields = ("chunks_per_s", "p50_ms", "p99_ms", "cpu_s", "client_cpu_s", "cancel_one_ms", "cancel_all_ms")
    for name, by_concurrency in windows.items():
        measured.table(
            f"{name.replace('_', ' ')} (medians)",
            columns,
            {f"{n} requests": [mid(found, field) for field in fields] for n, found in by_concurrency.items()},
        )
        actors = list(next(iter(by_concurrency.values()))[0].cpu_by_actor)
        rows: dict[str, list[float | str]] = {}
        for n, found in by_concurrency.items():
            costs = [measured.median(w.cpu_by_actor[a] for w in found) for a in actors]
            sizes = [measured.median(w.resident_mb[a] for w in found) for a in actors]
            rows[f"{n} requests"] = [f"{cost:.4f} s {size:.1f} MB" for cost, size in zip(costs, sizes, strict=True)]
        measured.table(f"{name.replace('_', ' ')}: CPU s/1000 chunks and memory of each process", actors, rows)
    print("\nratios")
    for name, by_concurrency in windows.items():
        low, high = 10, max(by_concurrency)
        by_round = [a.cpu_s / b.cpu_s for a, b in zip(by_concurrency[high], by_concurrency[low], strict=True)]
        what = f"CPU per chunk, {high} requests / {low}, {name.replace('_', ' ')}"
        measured.ratio(what, measured.median(by_round), "aim: at most 1.2", key=f"cpu_{name}")
    short, long = frames
    measured.ratio(
        f"coordinator frames per request of {short} chunk, in and out", frames[short], "aim: at most 6", key="frames"
    )
    what = f"coordinator frames per request of {long} chunks / of {short}"
    measured.ratio(what, frames[long] / frames[short], "aim: 1.0", key="frames_long")


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=5.0, help="length of one window (default 5)")
    options.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    options.add_argument("--rate", type=float, default=1000.0, help="chunks a second of the even load (default 1000)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    measured.header()
    results = uvloop.run(run(args))
    report(**results)
    measured.write_json(args.json, results)


if __name__ == "__main__":
    main()
