#!/usr/bin/env python3
"""How long a deployment takes to serve again after a process of it is killed, against starting that process.

A synthetic deployment with one replica of one stage. In each round a fresh one is started and

- its stage is killed while a request waits in it that has put nothing out: the time until that request's first output
  (it is resubmitted and its caller notices nothing), and until a new request is served;
- its coordinator is killed: the time until it admits again.

Run: ``python scripts/bench_recovery.py [--quick] [--rounds N]``
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import uvloop

import measured
from omni_bus.client import Item
from omni_bus.errors import OmniBusError
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from omni_bus.client import BusClient, Request

TOML = """
[stages.llm]
adapter = "synthetic-text"

[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
"""
PROMPT = Json({"messages": [{"role": "user", "content": "hi"}]})


async def first_output(request: Request) -> None:
    """Give the request its input and wait for the first output."""
    await request.send("messages", PROMPT)
    request.finish("messages")
    async with request:
        assert isinstance(await anext(request), Item)


async def served(client: BusClient) -> None:
    """Ask until a request is admitted, and wait for its first output; each refusal takes a round trip."""
    while True:
        try:
            await first_output(await client.submit("chat"))
        except OmniBusError:
            await asyncio.sleep(0.001)
        else:
            return


async def timed(pid: int, *waits: asyncio.Task[None]) -> list[float]:
    """Kill a process; return the seconds until each of these is done."""
    begun = time.perf_counter()
    os.kill(pid, signal.SIGKILL)

    async def seconds(wait: asyncio.Task[None]) -> float:
        await wait
        return time.perf_counter() - begun

    return list(await asyncio.gather(*(seconds(wait) for wait in waits)))


async def stage_killed(deployment: measured.Deployment) -> list[float]:
    """Return the seconds until a request that was bound is served, and until a new one is."""
    async with await deployment.client() as client:
        bound = await client.submit("chat")
        await bound.send("messages", PROMPT)

        async def goes_on() -> None:
            bound.finish("messages")
            assert isinstance(await anext(bound), Item)

        os.kill(deployment.pids["llm.0"], signal.SIGSTOP)  # so that it can't answer before it dies
        return await timed(
            deployment.pids["llm.0"], asyncio.create_task(goes_on()), asyncio.create_task(served(client))
        )


async def coordinator_killed(deployment: measured.Deployment) -> list[float]:
    """Return the seconds until a request is admitted and served."""
    async with await deployment.client() as client:
        await served(client)
        return await timed(deployment.pids["coordinator"], asyncio.create_task(served(client)))


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7, help="how often each is killed (default 7)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one round")
    args = options.parse_args()
    measured.header()
    found: dict[str, list[float]] = {
        "stage killed, its request goes on": [],
        "stage killed, a new request is served": [],
        "coordinator killed, a request is served": [],
    }
    starts: dict[str, list[float]] = {"start of the stage": [], "start of the coordinator": []}
    for _ in range(1 if args.quick else args.rounds):
        with measured.Deployment(TOML) as deployment:
            seconds = uvloop.run(stage_killed(deployment))
            starts["start of the stage"].append(deployment.ready_s["llm.0"])
        with measured.Deployment(TOML) as deployment:
            seconds += uvloop.run(coordinator_killed(deployment))
            starts["start of the coordinator"].append(deployment.ready_s["coordinator"])
        for values, value in zip(found.values(), seconds, strict=True):
            values.append(value)
    rows: dict[str, list[float | str]] = {
        name: [measured.median(values), min(values), max(values)] for name, values in {**found, **starts}.items()
    }
    measured.table("seconds", ("median", "best", "worst"), rows)
    print("\nratios")
    of_stage, of_new, of_coordinator = (measured.median(values) for values in found.values())
    stage_start, coordinator_start = (measured.median(values) for values in starts.values())
    measured.ratio("stage killed until its request goes on / start of the stage", of_stage / stage_start)
    measured.ratio("stage killed until a new request is served / start of the stage", of_new / stage_start)
    measured.ratio("coordinator killed until it serves / start of the coordinator", of_coordinator / coordinator_start)
    measured.write_json(args.json, {"seconds": found, "starts_s": starts})


if __name__ == "__main__":
    main()
