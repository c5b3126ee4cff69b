"""A long mixed load on a synthetic deployment, and what each process holds at rest, again and again.

``scripts/soak [--minutes M] [--cycle S] [--workers N] [--max-growth MIB] [--seed N] [--out FOLDER]``. Each cycle,
workers send whole requests, streamed and not, with small and large sound; leave in mid stream; read slowly; have an
engine fail; send what is malformed. Then everything comes to rest, and memory, descriptors, threads and shared segments
of each process are noted. The first third of the cycles is warming up. After it, memory may grow by
`--max-growth` a minute at most, nothing else may grow at all, and nothing may be left at the end. Shared memory, which
the arenas bound, is told apart.

Writes soak.jsonl (each measurement), soak.log.jsonl (the deployment's log). Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop

import measured
from loads import chats
from loads.chats import CHAT, Chat, Manner
from loads.deployment import Watched, held, holdings, read_shares
from loads.leavers import leave_once

if TYPE_CHECKING:
    from omni_bus.client import BusClient

GRACE_S = 60.0
NUM_TOKENS = 20
LARGE_SOUND = 6000
"""Samples for each character: about 100 KB a word, which travels through shared memory."""

COUNTED = ("num_fds", "num_threads", "num_segments")
BAD_BODIES: tuple[Any, ...] = (
    b"",
    b"{",
    b"\xff\xfe",
    [],
    {},
    {"messages": []},
    {"messages": [{"role": "nobody", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "hi"}], "model": "another"},
    {"messages": [{"role": "user", "content": "hi"}], "sampling_params_list": [{"tokens": 0}]},
)


class Sample(msgspec.Struct, frozen=True):
    """What one process held at rest."""

    at_s: float
    process: str
    own_mib: float
    shared_mib: float
    num_fds: int
    num_threads: int
    num_segments: int


class Soak:
    """Workers and measurements on one deployment."""

    def __init__(self, deployment: Watched, bus: BusClient, args: argparse.Namespace) -> None:
        self._deployment = deployment
        self._bus = bus
        self._args = args
        self._dice = random.Random(args.seed)
        self._begun_at = time.monotonic()
        self._count = 0
        self.ends: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.broken: list[str] = []

    async def run(self) -> None:
        """Go through all cycles."""
        ends_at = self._begun_at + 60 * self._args.minutes
        async with chats.session(self._deployment.url) as http:
            while time.monotonic() < ends_at:
                cycle_ends_at = time.monotonic() + self._args.cycle
                async with asyncio.timeout(self._args.cycle + GRACE_S):
                    await asyncio.gather(*(self._work(http, cycle_ends_at) for _ in range(self._args.workers)))
                    await self._rest()
                self._measure()

    async def _work(self, http: aiohttp.ClientSession, ends_at: float) -> None:
        while time.monotonic() < ends_at:
            kind = self._dice.choices(
                ("whole", "large", "leave", "slow", "break", "fail", "bad"), (40, 10, 15, 10, 10, 5, 10)
            )[0]
            match kind:
                case "bad":
                    await self._send_bad(http)
                case "break":
                    await self._break()
                case _:
                    await self._chat(http, kind)

    async def _chat(self, http: aiohttp.ClientSession, kind: str) -> None:
        self._count += 1
        chat = Chat(marker=f"k{self._count}", num_tokens=NUM_TOKENS)
        manner, expected = Manner(is_streamed=self._dice.random() < 0.7), "right"
        match kind:
            case "large":
                chat.samples_per_character = LARGE_SOUND
            case "leave":
                manner, expected = Manner(leaves_after_bytes=self._dice.randrange(1, 5000)), "left"
            case "slow":
                manner = Manner(pause_s=0.02)
            case "fail":
                manner, expected = Manner(params=[{"fail_at_step": self._dice.randrange(1, NUM_TOKENS)}]), "failed"
            case _:
                pass
        await chats.run(http, chat, manner)
        self.ends[f"{kind}: {chat.outcome} {chat.name}".strip()] += 1
        if chat.outcome != expected:
            self.broken.append(f"{kind}: {expected} was due: {msgspec.json.encode(chat).decode()}")

    async def _send_bad(self, http: aiohttp.ClientSession) -> None:
        body = self._dice.choice(BAD_BODIES)
        given: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with http.post(CHAT, **given, headers={"Content-Type": "application/json"}) as response:
            error = chats.read_error(await response.read())
        self.ends[f"bad: {response.status} {'' if error is None else error['type']}".strip()] += 1
        if not 400 <= response.status < 500 or error is None:
            self.broken.append(f"bad: {body!r} was answered with {response.status}, {error}")

    async def _break(self) -> None:
        port = urlsplit(self._deployment.url).port
        assert port is not None
        pause_s = self._dice.random() * 0.1
        await leave_once(port, self._dice, wait=lambda: asyncio.sleep(pause_s), may_read=lambda: True)
        self.ends["break"] += 1

    async def _rest(self) -> None:
        """Wait until nothing is held of any request."""
        while await held(self._bus):
            pass  # each question is a round trip to every stage

    def _measure(self) -> None:
        at_s = time.monotonic() - self._begun_at
        for name, pid in self._deployment.pids.items():
            own = holdings(pid)
            counts = (own.num_fds, own.num_threads, own.num_segments)
            sizes = (own.own_bytes / 2**20, own.shared_bytes / 2**20)
            self.samples.append(Sample(round(at_s, 1), name, *sizes, *counts))
        total = sum(sample.own_mib for sample in self.samples[-len(self._deployment.pids) :])
        print(f"{at_s:7.0f} s  {sum(self.ends.values()):8} requests  {total:7.1f} MiB in all", flush=True)


def judge(samples: list[Sample], max_growth: float) -> list[str]:
    """Print what each process held; return what grew too much."""
    broken: list[str] = []
    rows: dict[str, list[float | str]] = {}
    for process in dict.fromkeys(sample.process for sample in samples):
        own = [sample for sample in samples if sample.process == process]
        warm = own[len(own) // 3 :]
        growth = 60 * slope([(sample.at_s, sample.own_mib) for sample in warm])
        rows[process] = [warm[0].own_mib, warm[-1].own_mib, growth, warm[-1].shared_mib]
        if growth > max_growth:
            broken.append(f"{process}: memory grows by {growth:.2f} MiB a minute (allowed: {max_growth:g})")
        half = len(warm) // 2
        for name in COUNTED:
            early, late = ([getattr(sample, name) for sample in part] for part in (warm[:half], warm[half:]))
            rows[process].append(f"{getattr(warm[0], name)} → {getattr(warm[-1], name)}")
            if early and min(late) > max(early):
                broken.append(f"{process}: {name} grew from at most {max(early)} to at least {min(late)}")
    columns = ("MiB warm", "MiB at end", "MiB/min", "MiB shared", "descriptors", "threads", "segments")
    measured.table("held at rest", columns, rows)
    return broken


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the line through points that leaves the least squares; 0 of fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


async def play(deployment: Watched, args: argparse.Namespace) -> Soak:
    """Soak a deployment that is up."""
    bus = await deployment.client()
    soak = Soak(deployment, bus, args)
    try:
        await soak.run()
    finally:
        await bus.close()
    return soak


def main() -> int:
    """Run; 1 if a promise was broken."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    options.add_argument("--cycle", type=float, default=20.0, help="seconds of load before each rest (default 20)")
    options.add_argument("--workers", type=int, default=16, help="requests at once (default 16)")
    options.add_argument("--seed", type=int, default=0, help="decides what they send (default 0)")
    options.add_argument("--max-growth", type=float, default=1.0, metavar="MIB", help="a minute (default 1)")
    options.add_argument("--faults", type=read_shares, help="of messages between processes, such as 'delay=0.2'")
    options.add_argument("--out", type=Path, help="where results go (default: a temporary folder)")
    args = options.parse_args()
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="soak-"))
    out.mkdir(parents=True, exist_ok=True)
    measured.header()
    toml = chats.toml(step_time_s=0.005, tokens=1000)
    with Watched(toml, log=out / "soak.log.jsonl", faults=args.faults) as deployment:
        soak = uvloop.run(play(deployment, args))
        stale = deployment.stale_files()
    measured.table("how requests ended", ("requests",), {end: [str(n)] for end, n in sorted(soak.ends.items())})
    broken = [*soak.broken, *judge(soak.samples, args.max_growth)]
    broken += [f"left behind: {what}" for what in (*stale, *deployment.left)]
    if deployment.num_tracebacks:
        broken.append(f"{deployment.num_tracebacks} tracebacks in the log")
    with (out / "soak.jsonl").open("wb") as rows:
        rows.writelines(msgspec.json.encode(sample) + b"\n" for sample in soak.samples)
    print(f"\npromises broken: {len(broken)}")
    for line in broken[:20]:
        print(f"  {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
