#!/usr/bin/env python3
"""Resident memory of every process after many requests against after few: nothing of an ended request may stay.

Short requests run to their end through three stages, 16 at a time; every tenth comes as a chat completion over HTTP,
the others straight over the bus. Memory is read when all requests so far have ended. What is bounded on purpose fills
up early: 4,096 tombstones in each core.

Run: ``python scripts/bench_memory.py [--quick] [--requests N] [--first N] [--max-seconds S]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvloop

import measured
import stamped
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from omni_bus.client import BusClient

TOML = """
[stages.steps]
adapter = "stamped:StepSource"
[stages.relay]
adapter = "stamped:Relay"
[stages.last]
adapter = "stamped:StepRelay"

[pipelines.three]
edges = ["in.messages -> steps.prompt", "steps.text -> relay.text", "relay.text -> last.text", "last.text -> out.text"]

[gateways.openai]
port = 0
"""

NUM_LANES = 16
HTTP_EVERY = 10
NUM_CHUNKS = 3


class Lane:
    """One request after the other."""

    def __init__(self, bus: BusClient, url: str) -> None:
        self._bus = bus
        self._address = urlsplit(url)
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._prompt = stamped.prompt(NUM_CHUNKS, 0)
        body = json.dumps(self._prompt).encode()
        self._http = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def run(self, number: int) -> None:
        """Run one request to its end."""
        if number % HTTP_EVERY == 0:
            await self._over_http()
            return
        request = await self._bus.submit("three")
        await request.send("messages", Json(self._prompt))
        request.finish("messages")
        async for _ in request:
            pass

    async def _over_http(self) -> None:
        if self._connection is None:
            self._connection = await asyncio.open_connection(self._address.hostname, self._address.port)
        reader, writer = self._connection
        writer.write(self._http)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(head)
        await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection[1].close()


class Stretch:
    """Requests from where the last stretch ended up to a number, or until time is up."""

    def __init__(self, bus: BusClient, url: str, ends_at: float) -> None:
        self._bus = bus
        self._lanes = [Lane(bus, url) for _ in range(NUM_LANES)]
        self._ends_at = ends_at
        self.num_done = 0

    async def run(self, up_to: int) -> None:
        """Return when all have ended, in the coordinator too."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(self._follow(lane, up_to))
        while (await self._bus.admin("status"))["requests"]["live"]:
            pass  # the last stages say so within a round trip

    async def _follow(self, lane: Lane, up_to: int) -> None:
        while self.num_done < up_to and time.monotonic() < self._ends_at:
            self.num_done += 1
            await lane.run(self.num_done)

    def close(self) -> None:
        """Close the connections."""
        for lane in self._lanes:
            lane.close()


async def run(num_first: int, num_requests: int, max_seconds: float) -> list[tuple[int, dict[str, int]]]:
    """Return the memory of each process after each stretch."""
    found: list[tuple[int, dict[str, int]]] = []
    with measured.Deployment(TOML) as deployment:
        bus = await deployment.client()
        stretch = Stretch(bus, deployment.ready["gateways"]["openai"], time.monotonic() + max_seconds)
        begun = time.monotonic()
        for up_to in dict.fromkeys((num_first, 5 * num_first, num_requests // 2, num_requests)):
            await stretch.run(up_to)
            found.append((stretch.num_done, deployment.resident_bytes()))
        print(f"{stretch.num_done / (time.monotonic() - begun):,.0f} requests a second")
        stretch.close()
        await bus.close()
    return found


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=100_000, help="requests in all (default 100,000)")
    options.add_argument("--first", type=int, default=1000, help="requests before memory is first read (default 1,000)")
    options.add_argument("--max-seconds", type=float, default=600.0, help="no request begins after this (default 600)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="few requests: shows that it runs, measures nothing")
    args = options.parse_args()
    first, requests = (20, 200) if args.quick else (args.first, args.requests)
    measured.header()
    found = uvloop.run(run(first, requests, args.max_seconds))
    rows: dict[str, list[float | str]] = {
        f"{num} requests": [size / 2**20 for size in sizes.values()] for num, sizes in found
    }
    measured.table("resident memory (MiB)", list(found[0][1]), rows)
    (num_first, before), (num_last, after) = found[0], found[-1]
    print("\nratios")
    for name, size in after.items():
        what = f"memory of {name}, after {num_last} requests / {num_first}"
        measured.ratio(what, size / before[name])
    what = f"resident memory of all, after {num_last} requests / {num_first}"
    measured.ratio(what, sum(after.values()) / sum(before.values()), "aim: at most 1.05", key="memory")
    measured.write_json(args.json, {"resident_bytes": {str(num): sizes for num, sizes in found}})


if __name__ == "__main__":
    main()
