"""Two thousand clients that leave at random moments: how soon nothing of them is held, and the request after them.

``scripts/storm [--clients N] [--slots N] [--spread S] [--margin S] [--seed N]``. Some requests run, the others wait
their turn. All connections break within the spread, the last tenth in one moment. The engines' slots must all be free
within one step and the margin of the last break, and requests after that must be right and take no longer than on a
fresh deployment. Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvloop

import measured
from loads import chats
from loads.chats import Chat, Manner
from loads.deployment import Watched, held
from loads.leavers import leave_once

if TYPE_CHECKING:
    import aiohttp

    from omni_bus.client import BusClient

STEP_S = 0.1
MARGIN_S = 0.1
NUM_TOKENS = 10
FOREVER = 1_000_000
NUM_AFTER = 20
GRACE_S = 60.0
SLOWER = 1.5
"""A request after the storm may take so much longer than one before it; their work is a second of sleep."""


class Storm:
    """The clients and the clock.

    Args:
        deployment: up and ready.
        bus: joined to it.
        args: of the command line.
    """

    def __init__(self, deployment: Watched, bus: BusClient, args: argparse.Namespace) -> None:
        self._deployment = deployment
        self._bus = bus
        self._args = args
        self._dice = random.Random(args.seed)
        self._last_at = 0.0
        self.max_held = 0
        """Requests that the stages held at once, by what was seen."""

    async def blow(self) -> float:
        """Have everybody come and leave; return the seconds from the last break until nothing is held."""
        ends_at = time.monotonic() + self._args.spread
        async with chats.session(self._deployment.url) as http:
            clients: list[asyncio.Task[None]] = []
            for number in range(self._args.clients):
                early_s = 0.0 if number % 10 == 0 else self._dice.random() * self._args.spread * 0.9
                clients.append(asyncio.create_task(self._leave(http, number, ends_at - early_s)))
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*clients)
        watching.cancel()
        async with asyncio.timeout(GRACE_S):
            while await self._num_held():
                pass  # each question is a round trip to every stage
        return time.monotonic() - self._last_at

    async def _leave(self, http: aiohttp.ClientSession, number: int, at: float) -> None:
        """Be one client: read nothing, read all that comes, or dawdle; then be gone."""
        left_s = at - time.monotonic()
        if self._dice.random() < 0.5:
            port = urlsplit(self._deployment.url).port
            assert port is not None
            await leave_once(port, self._dice, wait=lambda: asyncio.sleep(left_s), may_read=lambda: False)
        else:
            pause_s = 0.0 if self._dice.random() < 0.6 else 0.5
            chat = Chat(marker=f"storm-{number}", num_tokens=FOREVER)
            await chats.run(http, chat, Manner(leaves_after_s=left_s, pause_s=pause_s))
        self._last_at = time.monotonic()

    async def ask(self, prefix: str) -> list[Chat]:
        """Return requests that nobody disturbs, one after the other."""
        found = [Chat(marker=f"{prefix}-{number}", num_tokens=NUM_TOKENS) for number in range(NUM_AFTER)]
        async with chats.session(self._deployment.url) as http, asyncio.timeout(GRACE_S):
            await asyncio.gather(*(chats.run(http, chat, Manner()) for chat in found))
        return found

    async def until_idle(self) -> None:
        """Wait until the coordinator holds nothing either."""
        async with asyncio.timeout(GRACE_S):
            while await held(self._bus):
                pass

    async def _watch(self) -> None:
        while True:
            self.max_held = max(self.max_held, await self._num_held())
            await asyncio.sleep(0.5)

    async def _num_held(self) -> int:
        rows = await self._bus.admin("health")
        stats = [row["stats"] for row in rows if row["role"] == "stage"]
        return sum(stat["active"] + stat["waiting"] for stat in stats)


async def run(args: argparse.Namespace) -> list[str]:
    """Run the storm; return the promises that it broke."""
    toml = chats.toml(slots=args.slots, max_queued=args.clients, tokens=FOREVER, step_time_s=STEP_S)
    with Watched(toml) as deployment:
        bus = await deployment.client()
        try:
            storm = Storm(deployment, bus, args)
            before = await storm.ask("before")
            free_s = await storm.blow()
            after = await storm.ask("after")
            await storm.until_idle()
        finally:
            await bus.close()
    before_s, after_s = (max(chat.ended_at - chat.begun_at for chat in found) for found in (before, after))
    num_right = sum(chat.outcome == "right" for chat in after)
    print(f"\n{args.clients} clients left within {args.spread:g} s; stages held up to {storm.max_held} requests")
    limit_s = STEP_S + args.margin
    print(f"  slots free after the last one left      {free_s * 1e3:8.0f} ms   aim: at most {limit_s * 1e3:.0f} ms")
    print(f"  requests after it that are right        {num_right:8} of {NUM_AFTER}")
    print(f"  the slowest of {NUM_AFTER}, before and after       {before_s:8.2f} s, {after_s:.2f} s")
    broken = [f"left behind: {what}" for what in deployment.left]
    if free_s > limit_s:
        broken.append(f"slots were taken for {free_s * 1e3:.0f} ms")
    if num_right < NUM_AFTER or after_s > SLOWER * before_s + args.margin:
        broken.append("requests after the storm suffered from it")
    if storm.max_held < min(args.slots, args.clients) / 2:
        broken.append("hardly any client had a request that ran")
    if deployment.num_tracebacks:
        broken.append(f"{deployment.num_tracebacks} tracebacks in the log")
    return broken


def main() -> int:
    """Run; 1 if a promise was broken."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, default=2000, help="how many leave (default 2000)")
    options.add_argument("--slots", type=int, default=200, help="requests that run at once (default 200)")
    options.add_argument("--spread", type=float, default=20.0, help="seconds in which they leave (default 20)")
    options.add_argument("--margin", type=float, default=MARGIN_S, help="seconds beyond one step (default 0.1)")
    options.add_argument("--seed", type=int, default=0, help="decides who leaves when (default 0)")
    args = options.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the deployment's processes inherit it
    measured.header()
    broken = uvloop.run(run(args))
    print(f"promises broken: {len(broken)}")
    for line in broken:
        print(f"  {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
