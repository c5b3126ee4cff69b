#!/usr/bin/env python3
"""Server-sent events through the gateway against the same stream straight from the bus, with 1, 100, 1,000 clients.

One synthetic stage makes the same number of chunks a second in all, however many clients share it. A chunk's latency is
from its making in the stage to its arrival: as an event of a chat completion on a TCP connection of its own, or as an
item of a `BusClient`. At the end of each window some clients hang up, one after the other, while the rest stream: how
long until no stage holds anything of such a one is the cancel latency under that load. Then all others do at once.
Processor seconds are those of the gateway, the stage and the coordinator.

Run: ``python scripts/bench_gateway.py [--quick] [--seconds S] [--rounds N] [--rate CHUNKS_PER_S]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

import measured
import stamped
from omni_bus.client import Item
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from omni_bus.client import BusClient

TOML = """
[stages.even]
adapter = "stamped:EvenSource"

[pipelines.even]
max_in_flight = 10000
edges = ["in.messages -> even.prompt", "even.text -> out.text"]

[gateways.openai]
port = 0
"""

FOREVER = 10_000_000
NUM_SINGLE_CANCELS = 10
GRACE_S = 60.0
_CONTENT = b'"content":"'


class Tally:
    """Chunks and latencies of the window; shared by all clients."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.latencies_ms: list[float] = []

    def take(self, made_ns: int) -> None:
        """Note a chunk."""
        self.num_chunks += 1
        self.latencies_ms.append((time.monotonic_ns() - made_ns) / 1e6)


class Window(msgspec.Struct):
    """One measurement."""

    chunks_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    """Processor seconds per thousand chunks of gateway, stage and coordinator."""
    gateway_cpu_s: float
    gateway_mb: float
    cancel_one_ms: float
    """Median, from one client's hanging up to the coordinator's word that its request is over."""
    cancel_all_ms: float
    """The same of all that are left, at once."""


class EventReader(asyncio.Protocol):
    """One streamed chat completion, read as cheaply as Python can, so that the gateway is what is measured."""

    def __init__(self, load: Load, body: bytes, host: str) -> None:
        self._load = load
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        self._body = body
        self._rest = b""
        self.has_begun = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by inheritance
        self.transport.write(self._head + self._body)

    def data_received(self, data: bytes) -> None:
        """Take the events that are complete."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            start = event.find(_CONTENT)
            if start < 0:
                continue
            text = event[start + len(_CONTENT) : event.index(b'"', start + len(_CONTENT))]
            if text:
                self._load.tally.take(int(text))
                if not self.has_begun.done():
                    self.has_begun.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway must not end it before we do."""
        if not self.has_begun.done():
            self.has_begun.set_exception(exc or ConnectionError(f"no stream came: {self._rest[:300]!r}"))


class Load:
    """So many clients, of one kind."""

    def __init__(self, bus: BusClient, url: str, way: str, num_clients: int, rate: float) -> None:
        self.tally = Tally()
        self._bus = bus
        self._address = urlsplit(url)
        self._host, self._port = self._address.hostname or "", self._address.port or 0
        self._way = way
        self._num_clients = num_clients
        self._messages = stamped.prompt(FOREVER, num_clients / rate)
        self._readers: list[EventReader] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when every client has had a chunk."""
        loop = asyncio.get_running_loop()
        if self._way == "bus":
            begun = [loop.create_future() for _ in range(self._num_clients)]
            self._tasks = [asyncio.create_task(self._read_bus(first)) for first in begun]
            await asyncio.gather(*begun)
            return
        host, body = self._address.netloc, json.dumps({**self._messages, "stream": True}).encode()
        for _ in range(self._num_clients):
            _, reader = await loop.create_connection(lambda: EventReader(self, body, host), self._host, self._port)
            self._readers.append(reader)
        await asyncio.gather(*(reader.has_begun for reader in self._readers))

    async def _read_bus(self, first: asyncio.Future[None]) -> None:
        async with await self._bus.submit("even") as request:
            await request.send("messages", Json(self._messages))
            request.finish("messages")
            async for event in request:
                if isinstance(event, Item):
                    self.tally.take(int(event.payload.text))  # type: ignore[union-attr] (the pipeline's output is text)
                    if not first.done():
                        first.set_result(None)

    async def hang_up(self, num_clients: int) -> float:
        """Close so many connections; return the milliseconds until the coordinator knows their requests ended."""
        begun = time.perf_counter()
        readers, self._readers = self._readers[:num_clients], self._readers[num_clients:]
        tasks, self._tasks = self._tasks[:num_clients], self._tasks[num_clients:]
        for reader in readers:
            assert reader.transport is not None
            reader.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        num_left = len(self._readers) + len(self._tasks)
        async with asyncio.timeout(GRACE_S):
            while (await self._bus.admin("status"))["requests"]["live"] > num_left:
                pass  # each question is a round trip to the coordinator behind the cancels
        return (time.perf_counter() - begun) * 1e3


async def measure(
    deployment: measured.Deployment, bus: BusClient, way: str, num_clients: int, *, rate: float, seconds: float
) -> Window:
    """Let the clients read for a while."""
    load = Load(bus, deployment.ready["gateways"]["openai"], way, num_clients, rate)
    async with asyncio.timeout(GRACE_S):
        await load.start()
    await asyncio.sleep(min(1.0, seconds / 4))
    tally = load.tally = Tally()
    before, begun = deployment.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    took, after = time.perf_counter() - begun, deployment.cpu_s()
    num_chunks = tally.num_chunks
    resident = deployment.resident_bytes()["gateway.openai.0"] / 2**20
    one_by_one = [await load.hang_up(1) for _ in range(min(num_clients - 1, NUM_SINGLE_CANCELS) or 1)]
    cancel_all_ms = await load.hang_up(num_clients)
    costs = {name: (after[name] - before[name]) * 1000 / max(1, num_chunks) for name in after if name != "supervisor"}
    return Window(
        chunks_per_s=num_chunks / took,
        p50_ms=measured.quantile(tally.latencies_ms, 0.5),
        p99_ms=measured.quantile(tally.latencies_ms, 0.99),
        cpu_s=sum(costs.values()),
        gateway_cpu_s=costs["gateway.openai.0"],
        gateway_mb=resident,
        cancel_one_ms=measured.median(one_by_one),
        cancel_all_ms=cancel_all_ms,
    )


async def run(args: argparse.Namespace) -> dict[str, dict[int, list[Window]]]:
    """Measure both ways at every number of clients, in turn."""
    counts = (1, 5, 10) if args.quick else (1, 100, 1000)
    seconds, rounds = (0.3, 1) if args.quick else (args.seconds, args.rounds)
    windows: dict[str, dict[int, list[Window]]] = {way: {n: [] for n in counts} for way in ("gateway", "bus")}
    with measured.Deployment(TOML) as deployment:
        bus = await deployment.client()
        try:
            for _ in range(rounds):
                for num_clients in counts:
                    for way, found in windows.items():
                        window = await measure(deployment, bus, way, num_clients, rate=args.rate, seconds=seconds)
                        found[num_clients].append(window)
        finally:
            await bus.close()
    return windows


def report(windows: dict[str, dict[int, list[Window]]]) -> None:
    """Print tables, then ratios."""
    columns = (
        "chunks/s",
        "p50 ms",
        "p99 ms",
        "CPU s/1000",
        "gateway CPU",
        "gateway MB",
        "cancel one ms",
        "cancel rest ms",
    )
    for way, by_count in windows.items():
        rows = {
            f"{n} clients": [measured.median(getattr(w, f) for w in found) for f in Window.__struct_fields__]
            for n, found in by_count.items()
        }
        measured.table(f"through the {way} (medians)", columns, rows)
    print("\nratios")

    def by_round(name: str, above: list[Window], below: list[Window]) -> float:
        return measured.median(getattr(a, name) / getattr(b, name) for a, b in zip(above, below, strict=True))

    low, *_, high = windows["gateway"]
    for n, found in windows["gateway"].items():
        measured.ratio(f"p50 latency, gateway / bus, {n} clients", by_round("p50_ms", found, windows["bus"][n]))
    measured.ratio(
        f"gateway CPU per chunk, {high} clients / {low}",
        by_round("gateway_cpu_s", windows["gateway"][high], windows["gateway"][low]),
        "aim: at most 1.2",
    )
    measured.ratio(
        f"cancel latency of one of {high} clients / of {low}",
        by_round("cancel_one_ms", windows["gateway"][high], windows["gateway"][low]),
    )


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=3.0, help="length of one window (default 3)")
    options.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    options.add_argument("--rate", type=float, default=1000.0, help="chunks a second in all (default 1000)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a thousand connections at each end
    measured.header()
    print(f"open files: {soft}, raised to {hard}")
    windows = uvloop.run(run(args))
    report(windows)
    measured.write_json(args.json, {"windows": windows})


if __name__ == "__main__":
    main()
