#!/usr/bin/env python3
"""Far more requests than a deployment can serve: how fast the rest is refused, who gets in, what it costs in memory.

A synthetic engine that keeps a core busy serves four chat completions at a time, and sixteen may wait. Requests come at
a steady rate on connections of their own (an open loop: a slow answer delays nobody else), each timed from the moment
when it was due until its answer is complete.

- *Refusals*: every fifth request is of a caller that has a rate of its own, so that quotas (429) show beside capacity
  (503). The same load goes straight to the bus, without HTTP, for comparison.
- *Shares*: three callers with weights 1, 2 and 4 send as much each. Whoever is pushed out of the queue is refused too,
  after having waited; those refusals count here and not above.

Every request is accounted for, or the run fails. Run: ``python scripts/bench_overload.py [--quick] [--requests N]
[--rate REQUESTS_PER_S] [--idle]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

import measured
from omni_bus.errors import OmniBusError
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from omni_bus.client import BusClient

TOML = """
[stages.llm]
adapter = "synthetic-text"
params = {{ tokens = 10, step_time_s = 0.004, busy = {busy} }}

[pipelines.chat]
max_in_flight = 4
max_queued = 16
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]

[gateways.openai]
port = 0

[callers.plain]
keys = ["plain"]

[callers.rated]
keys = ["rated"]
requests_per_minute = 60

[callers.one]
keys = ["one"]
weight = 1

[callers.two]
keys = ["two"]
weight = 2

[callers.four]
keys = ["four"]
weight = 4
"""

WEIGHTS = {"one": 1, "two": 2, "four": 4}
BODY = {"messages": [{"role": "user", "content": "word"}]}
AIM_MS = 100.0
CODES = {"overloaded": 503, "quota_exceeded": 429}
WARM_UP = 300
NUM_CONNECTIONS = 256
"""Opened before memory is read: what a connection costs is no leak."""
GRACE_S = 60.0


class Tally(msgspec.Struct):
    """What became of the requests of one caller."""

    latencies_ms: defaultdict[int, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))
    """By status."""

    @property
    def counts(self) -> dict[int, int]:
        """Requests by status."""
        return {status: len(found) for status, found in sorted(self.latencies_ms.items())}


class Connection(asyncio.Protocol):
    """One request at a time, read as cheaply as Python can, so that the gateway is what is measured."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._answer: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by inheritance

    async def ask(self, request: bytes) -> int:
        """Return the status, once the whole answer is there."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._received = b""
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or self._answer is None:
            return
        start = head.index(b"Content-Length: ") + len(b"Content-Length: ")
        if len(body) >= int(head[start:].split(b"\r\n", 1)[0]) and not self._answer.done():
            self._answer.set_result(int(head.split(b" ", 2)[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway must not end it while it owes an answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the connection ended without an answer"))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


class Http:
    """Requests through the gateway; connections are used again."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._idle: list[Connection] = []
        body = json.dumps(BODY).encode()
        self._requests = {
            caller: (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\nAuthorization: Bearer {caller}"
                f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            + body
            for caller in ("plain", "rated", *WEIGHTS)
        }

    async def warm_up(self) -> None:
        """Open connections and have each used once."""
        self._idle = [await self._connect() for _ in range(NUM_CONNECTIONS)]
        for connection in self._idle:
            await connection.ask(self._requests["rated"])

    async def ask(self, caller: str) -> int:
        """Return the status of one request."""
        connection = self._idle.pop() if self._idle else await self._connect()
        status = await connection.ask(self._requests[caller])
        self._idle.append(connection)
        return status

    async def _connect(self) -> Connection:
        host, port = self._address.hostname or "", self._address.port or 0
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
        return connection

    def close(self) -> None:
        """Hang up everywhere."""
        for connection in self._idle:
            connection.close()


class Bus:
    """The same requests from an actor of the deployment."""

    def __init__(self, client: BusClient) -> None:
        self._client = client

    async def ask(self, caller: str) -> int:
        """Return the status that a gateway would answer."""
        try:
            async with await self._client.submit("chat", ["text"], key=caller) as request:
                await request.send("messages", Json(BODY))
                request.finish("messages")
                async for _ in request:
                    pass
        except OmniBusError as error:
            return CODES.get(error.code, 500)
        return 200


async def flood(ask: Callable[[str], Awaitable[int]], callers: list[str], rate: float) -> dict[str, Tally]:
    """Send a request for each entry, at a steady rate; return when all are answered."""
    tallies: dict[str, Tally] = {caller: Tally() for caller in dict.fromkeys(callers)}
    begun = time.perf_counter()

    async def one(caller: str, due: float) -> None:
        status = await ask(caller)
        tallies[caller].latencies_ms[status].append((time.perf_counter() - due) * 1e3)

    async with asyncio.timeout(GRACE_S + len(callers) / rate), asyncio.TaskGroup() as group:
        for number, caller in enumerate(callers):
            due = begun + number / rate
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(one(caller, due))
    return tallies


class Round(msgspec.Struct):
    """One flood."""

    tallies: dict[str, Tally]
    after_mb: dict[str, float]

    @property
    def counts(self) -> Counter[int]:
        """Requests by status."""
        return sum((Counter(tally.counts) for tally in self.tallies.values()), Counter())

    def latencies(self, *statuses: int) -> list[float]:
        """Milliseconds of all requests that ended so."""
        return [value for tally in self.tallies.values() for s in statuses for value in tally.latencies_ms[s]]


def memory_mb(deployment: measured.Deployment) -> dict[str, float]:
    """Return what coordinator and gateway hold."""
    resident = deployment.resident_bytes()
    return {name: resident[name] / 2**20 for name in ("coordinator", "gateway.openai.0")}


async def run(args: argparse.Namespace) -> dict[str, Round]:
    """Flood the gateway, the bus, and the gateway with three callers."""
    num_requests = 200 if args.quick else args.requests
    mixed = ["rated" if number % 5 == 4 else "plain" for number in range(num_requests)]
    weighted = [list(WEIGHTS)[number % 3] for number in range(num_requests)]
    rounds: dict[str, Round] = {}
    with measured.Deployment(TOML.format(busy="false" if args.idle else "true")) as deployment:
        client = await deployment.client()
        http, bus = Http(deployment.ready["gateways"]["openai"]), Bus(client)
        try:
            await http.warm_up()
            for ask in (http.ask, bus.ask):
                await flood(ask, mixed[:WARM_UP], args.rate)
            for name, ask, callers in (
                ("gateway", http.ask, mixed),
                ("bus", bus.ask, mixed),
                ("shares", http.ask, weighted),
            ):
                tallies = await flood(ask, callers, args.rate)
                rounds[name] = Round(tallies, memory_mb(deployment))
            await check(client, rounds, num_requests)
        finally:
            http.close()
            await client.close()
    return rounds


async def check(client: BusClient, rounds: dict[str, Round], num_requests: int) -> None:
    """Fail unless every request had one of three answers and the coordinator holds none any more."""
    for name, found in rounds.items():
        if found.counts.total() != num_requests or set(found.counts) - {200, 429, 503}:
            raise RuntimeError(f"{name}: {num_requests} requests were sent, {dict(found.counts)} answered")
    async with asyncio.timeout(GRACE_S):  # a stage's last word to the coordinator may follow its last to the client
        while (await client.admin("status"))["requests"]["live"]:
            pass  # each question is a round trip behind those words


def report(rounds: dict[str, Round]) -> None:
    """Print tables, then ratios."""
    columns = ("requests", "200", "503", "429", "refused p50 ms", "refused p99 ms", "worst ms", "served p50 ms")
    rows: dict[str, list[float | str]] = {}
    for name in ("gateway", "bus"):
        found = rounds[name]
        refused = found.latencies(429, 503)
        counts = [str(found.counts.total()), *(str(found.counts[status]) for status in (200, 503, 429))]
        times = [measured.quantile(refused, 0.5), measured.quantile(refused, 0.99), max(refused, default=0.0)]
        rows[name] = [*counts, *times, measured.quantile(found.latencies(200), 0.5)]
    measured.table("refusals (4 in flight, 16 queued)", columns, rows)
    measured.table(
        "three callers that send as much each",
        ("weight", "sent", "200", "503", "share", "by weight", "served p50 ms"),
        {
            caller: [
                str(WEIGHTS[caller]),
                str(sum(tally.counts.values())),
                str(tally.counts.get(200, 0)),
                str(tally.counts.get(503, 0)),
                tally.counts.get(200, 0) / max(1, rounds["shares"].counts[200]),
                WEIGHTS[caller] / sum(WEIGHTS.values()),
                measured.quantile(tally.latencies_ms[200], 0.5),
            ]
            for caller, tally in rounds["shares"].tallies.items()
        },
    )
    first, last = rounds["gateway"].after_mb, rounds["shares"].after_mb
    columns = [f"after {name}" for name in rounds]
    measured.table("resident MB", columns, {p: [found.after_mb[p] for found in rounds.values()] for p in first})
    print("\nratios")
    p50, p99 = (
        {name: measured.quantile(rounds[name].latencies(429, 503), share) for name in ("gateway", "bus")}
        for share in (0.5, 0.99)
    )
    measured.ratio(f"refusal p99 through the gateway / {AIM_MS:g} ms", p99["gateway"] / AIM_MS, "aim: below 1")
    measured.ratio("refusal p50, gateway / bus", p50["gateway"] / p50["bus"])
    for caller, tally in rounds["shares"].tallies.items():
        share = tally.counts.get(200, 0) / max(1, rounds["shares"].counts[200])
        wanted = WEIGHTS[caller] / sum(WEIGHTS.values())
        measured.ratio(f"share of weight {WEIGHTS[caller]} / its share by weight", share / wanted, "aim: 0.9 to 1.1")
    for name in first:
        what = f"resident memory of {name}, after all floods / after the first"
        measured.ratio(what, last[name] / first[name], "aim: at most 1.05")


def main() -> int:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=5000, help="of each flood (default 5000)")
    options.add_argument("--rate", type=float, default=500.0, help="requests a second (default 500)")
    options.add_argument("--idle", action="store_true", help="the engine waits instead of computing")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measured.header()
    print(f"open files: {soft}, raised to {hard}")
    rounds = uvloop.run(run(args))
    report(rounds)
    measured.write_json(args.json, {"rounds": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
