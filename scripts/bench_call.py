#!/usr/bin/env python3
"""One actor calls another and awaits the answer: our bus against Ray and xoscar, between two processes of one host.

The caller sends a short text and awaits it back, one call after the other. Ours is two `Driver`s, as every actor has
one: typed frames, checked, a future per call. ``multiprocessing.Pipe``, blocking, shows the floor. Ray and xoscar are
their own actor calls (``ray.get(actor.echo.remote(x))`` and ``await ref.echo(x)``); a library that is not installed is
said to be missing and left out (extra ``bench``).

The ways take turns, `--rounds` times, each with its processes started once. Run: ``python scripts/bench_call.py
[--quick] [--seconds S] [--rounds N]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

import uvloop

import measured
from omni_bus.client import Item
from omni_bus.core.effects import Send
from omni_bus.ids import Peer
from omni_bus.runtime.driver import Driver
from omni_bus.wire.frames import Chunk, Goodbye
from omni_bus.wire.payloads import Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.connection import Connection

    from omni_bus.client import Request
    from omni_bus.ids import Sender
    from omni_bus.wire.frames import AnyFrame

TEXT = " token"
WARM_UP = 50


class Caller(Protocol):
    """One way to call an actor of another process."""

    async def call(self, text: str) -> str:
        """Return what the actor answers."""
        ...


# --- ours -----------------------------------------------------------------------------------------------------


async def echo_actor(pipe: Connection, listen: str) -> None:
    """Answer each chunk with itself, until a `Goodbye`."""
    over = asyncio.Event()

    def on_frame(sender: Sender, frame: AnyFrame, now: float) -> None:
        if isinstance(frame, Goodbye):
            over.set()
        else:
            driver.perform([Send(callers[sender.actor], frame)])

    driver = Driver("echo", listen, on_frame=on_frame, on_timer=lambda key, now: None)
    pipe.send(driver.me)
    caller: Peer = await asyncio.to_thread(pipe.recv)
    callers = {caller.actor: caller}
    pipe.send("ready")
    await over.wait()
    await driver.close()


def run_echo_actor(pipe: Connection, listen: str) -> None:
    """What the second process runs."""
    uvloop.run(echo_actor(pipe, listen))


class OurCaller:
    """Two drivers and a future per call."""

    def __init__(self, folder: str) -> None:
        self._driver = Driver(
            "caller", f"ipc://{folder}/caller", on_frame=self._on_frame, on_timer=lambda key, now: None
        )
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._num_calls = 0
        self._echo: Peer | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """Start the other process and introduce both."""
        with tempfile.TemporaryDirectory() as folder:
            caller = cls(folder)
            ours, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=run_echo_actor, args=(theirs, f"ipc://{folder}/echo"), daemon=True)
            process.start()
            try:
                caller._echo = await asyncio.to_thread(receive, ours)
                ours.send(caller._driver.me)
                await asyncio.to_thread(receive, ours)
                yield caller
                assert caller._echo is not None
                caller._driver.perform([Send(caller._echo, Goodbye())])
                await caller._driver.close()
            finally:
                await asyncio.to_thread(process.join, 10)
                process.kill()

    async def call(self, text: str) -> str:
        """Send, and await the answer of the same number."""
        assert self._echo is not None
        self._num_calls += 1
        request = f"r-{self._num_calls}"
        future = self._waiting[request] = asyncio.get_running_loop().create_future()
        self._driver.perform([Send(self._echo, Chunk(request, 0, 0, Text(text)))])
        return await future

    def _on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> None:
        assert isinstance(frame, Chunk)
        assert isinstance(frame.payload, Text)
        self._waiting.pop(frame.request).set_result(frame.payload.text)


def receive(pipe: Connection) -> Any:
    """Wait for the other process, but not for ever."""
    if not pipe.poll(60):
        raise TimeoutError("the other process says nothing")
    return pipe.recv()


# --- ours, as a client does it --------------------------------------------------------------------------------

RELAY = """
heartbeat_s = 600  # other ways block this process for seconds

[stages.relay]
adapter = "stamped:Relay"

[pipelines.relay]
edges = ["in.text -> relay.text", "relay.text -> out.text"]
"""


class RequestCaller:
    """A `BusClient` with one request open to a stage of a running deployment: a piece of input, and what came of it."""

    def __init__(self, request: Request) -> None:
        self._request = request

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """Start a deployment and open a request."""
        with measured.Deployment(RELAY) as deployment:
            async with await deployment.client() as client, await client.submit("relay") as request:
                yield cls(request)

    async def call(self, text: str) -> str:
        """Send a piece and await the item; the engine, flow control and both cores take part."""
        await self._request.send("text", Text(text))
        item = await anext(self._request)
        assert isinstance(item, Item)
        assert isinstance(item.payload, Text)
        return item.payload.text


# --- a bare pipe ----------------------------------------------------------------------------------------------


def run_pipe_echo(pipe: Connection) -> None:
    """What the second process runs."""
    while (text := pipe.recv()) is not None:
        pipe.send(text)


class PipeCaller:
    """``multiprocessing.Pipe``: a blocking, unchecked, pickling exchange of two processes; the floor for Python."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """Start the other process."""
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=run_pipe_echo, args=(theirs,), daemon=True)
        process.start()
        try:
            yield cls(ours)
            ours.send(None)
        finally:
            await asyncio.to_thread(process.join, 10)
            process.kill()

    async def call(self, text: str) -> str:
        """Send and wait; nothing else can run meanwhile."""
        self._pipe.send(text)
        return self._pipe.recv()


# --- Ray and xoscar -------------------------------------------------------------------------------------------


class RayCaller:
    """A Ray actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._get = ray.get
        self._echo = actor.echo

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """Start Ray on this host."""
        import ray  # pyright: ignore[reportMissingImports]

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:

            class Echo:
                def echo(self, text: str) -> str:
                    return text

            yield cls(ray, ray.remote(Echo).remote())
        finally:
            ray.shutdown()

    async def call(self, text: str) -> str:
        """As Ray's own quick start does it; its awaitable form takes longer."""
        return self._get(self._echo.remote(text))


class XoscarCaller:
    """A xoscar actor in a sub-pool, which is a process of its own."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Self]:
        """Start a pool with one sub-process."""
        import xoscar  # pyright: ignore[reportMissingImports]

        from xoscar_actors import Echo, share_path

        share_path()
        pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=1)
        async with pool:
            strategy = xoscar.allocate_strategy.ProcessIndex(1)
            ref = await xoscar.create_actor(Echo, address=pool.external_address, uid="echo", allocate_strategy=strategy)
            yield cls(ref)

    async def call(self, text: str) -> str:
        """Call and await."""
        return await self._ref.echo(text)


WAYS = {"ours": OurCaller, "ours, a stage": RequestCaller, "pipe": PipeCaller, "ray": RayCaller, "xoscar": XoscarCaller}


async def measure(caller: Caller, seconds: float) -> list[float]:
    """Return the microseconds of each call for a while."""
    for _ in range(WARM_UP):
        assert await caller.call(TEXT) == TEXT
    took: list[float] = []
    ends_at = time.perf_counter() + seconds
    begun = time.perf_counter()
    while begun < ends_at:
        await caller.call(TEXT)
        now = time.perf_counter()
        took.append((now - begun) * 1e6)
        begun = now
    return took


async def run(args: argparse.Namespace) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Return the calls of each way by round, and why a way is missing."""
    seconds, rounds = (0.1, 1) if args.quick else (args.seconds, args.rounds)
    missing: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        callers: dict[str, Any] = {}
        for way, kind in WAYS.items():
            try:
                callers[way] = await stack.enter_async_context(kind.open())
            except ImportError as error:
                missing[way] = f"not installed ({error.name})"
        results: dict[str, list[list[float]]] = {way: [] for way in callers}
        for _ in range(rounds):
            for way, caller in callers.items():
                results[way].append(await measure(caller, seconds))
    return results, missing


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=1.0, help="about how long one measurement takes (default 1)")
    options.add_argument("--rounds", type=int, default=7, help="how often each way is measured (default 7)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    measured.header()
    results, missing = uvloop.run(run(args))
    p50 = {way: [measured.quantile(calls, 0.5) for calls in rounds] for way, rounds in results.items()}
    p99 = {way: [measured.quantile(calls, 0.99) for calls in rounds] for way, rounds in results.items()}
    rows: dict[str, list[float | str]] = {
        way: [measured.median(p50[way]), measured.median(p99[way]), str(sum(map(len, rounds)))]
        for way, rounds in results.items()
    }
    measured.table("call and answer (microseconds, medians over rounds)", ("p50", "p99", "calls"), rows)
    print("\nratios")
    for way in [way for way in p50 if way != "ours"]:
        of_rounds = measured.median(theirs / ours for theirs, ours in zip(p50[way], p50["ours"], strict=True))
        aim = {"ray": "aim: at least 5", "xoscar": "aim: at least 2"}.get(way, "")
        measured.ratio(f"call latency, {way} / ours", of_rounds, aim, key=f"call_{way}")
    for way, reason in missing.items():
        print(f"  {way}: {reason}")
    measured.write_json(args.json, {"p50_us": p50, "p99_us": p99, "missing": missing})


if __name__ == "__main__":
    main()
