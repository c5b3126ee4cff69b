"""Fifty streams while one process after the other is killed: what each request came to, and what is left at the end.

``scripts/kill_run [--seconds S] [--streams N] [--period S] [--limit S] [--seed N] [--out FOLDER]``. Every period a
process of the deployment, any but the supervisor, gets SIGKILL. Each request must end right, or with an error that has
a name, or with a connection that broke because its gateway was killed; nothing may be silent for longer than the limit.
Afterwards all processes must come back, serve every stream again, and leave nothing behind. With ``--faults``, messages
between the processes are lost, late, doubled or damaged all the time, and streams may fail by name afterwards too.

Writes kill_run.jsonl (each request and each kill), kill_run.log.jsonl (the deployment's log) and kill_run.png (extra
``bench``: matplotlib) to the folder. Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

import measured
from loads import chats
from loads.chats import Chat, Manner
from loads.deployment import Watched, read_shares

if TYPE_CHECKING:
    import aiohttp

LIMIT_S = 5.0
"""A request ends so soon after the fault that concerns it; a healthy one is never silent for nearly as long."""

BLAME_S = 5.0
"""A connection that breaks so soon after a gateway was killed broke for that."""

PATIENCE_S = 60.0
"""What is silent for longer is looked at so long, to tell late from never."""

NUM_TOKENS = 20
STEP_S = 0.1
DOWN = {"backing off", "degraded", "failed", "stopped"}
"""Phases of a process that isn't there to be killed."""


class Kill(msgspec.Struct, frozen=True):
    """One SIGKILL."""

    process: str
    pid: int
    at: float


class Run:
    """Streams and kills on one deployment.

    Args:
        deployment: the victim; up and ready.
        args: of the command line.
    """

    def __init__(self, deployment: Watched, args: argparse.Namespace) -> None:
        self.deployment = deployment
        self.begun_at = time.monotonic()
        self.num_streams: int = args.streams
        self.kills: list[Kill] = []
        self.chats: list[Chat] = []
        self._args = args
        self._dice = random.Random(args.seed)
        self._is_over = False

    async def play(self) -> None:
        """Load and kill for the time that was asked for, then let every request end."""
        async with chats.session(self.deployment.url) as http:
            streams = [asyncio.create_task(self._stream(http, number)) for number in range(self._args.streams)]
            ends_at = time.monotonic() + self._args.seconds
            await asyncio.sleep(self._args.period)
            while time.monotonic() < ends_at:
                self._kill()
                await asyncio.sleep(self._args.period)
            self._is_over = True
            await asyncio.gather(*streams)

    async def recover(self) -> list[Chat]:
        """Wait until all processes are back; return one request for each stream, which nothing disturbs."""
        await asyncio.to_thread(self.deployment.wait_until_ready, measured.START_S)
        found = [Chat(marker=f"after-{number}", num_tokens=NUM_TOKENS) for number in range(self._args.streams)]
        async with chats.session(self.deployment.url) as http, asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(chats.run(http, chat, Manner()) for chat in found))
        return found

    def _kill(self) -> None:
        there = [name for name, phase in self.deployment.phases.items() if phase not in DOWN and name != "supervisor"]
        if not there:
            return
        name = self._dice.choice(sorted(there))
        pid = self.deployment.pids[name]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # died of the last kill, and its supervisor has not said so yet
            return
        self.kills.append(Kill(name, pid, time.monotonic()))

    async def _stream(self, http: aiohttp.ClientSession, number: int) -> None:
        """One request after the other; refused ones rest as they are told to."""
        count = 0
        while not self._is_over:
            chat = Chat(marker=f"s{number}-{count}", num_tokens=NUM_TOKENS)
            count += 1
            self.chats.append(chat)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await chats.run(http, chat, Manner())
            except TimeoutError:
                chat.saw()
            if chat.outcome != "right":
                await asyncio.sleep(min(1.0, chat.retry_after_s or 0.1))


class Verdict:
    """What a run came to, and which promises it broke."""

    def __init__(self, run: Run, after: list[Chat], limit_s: float = LIMIT_S, *, may_fail_after: bool = False) -> None:
        self._run = run
        self._after = after
        gateway_kills = [kill.at for kill in run.kills if kill.process.startswith("gateway")]
        self.counts: Counter[str] = Counter()
        self.silences: list[float] = []
        self.broken: list[str] = []
        for chat in run.chats:
            self.counts[f"{chat.outcome or 'hung'} {chat.name}".strip()] += 1
            self.silences.append(chat.max_silence_s)
            is_explained = any(0 <= chat.last_at - at <= BLAME_S for at in gateway_kills)
            if chat.max_silence_s > limit_s:
                self._break("silent for too long", chat)
            elif chat.outcome is None:
                self._break("no end", chat)
            elif chat.outcome in {"wrong", "unnamed"} or (chat.outcome == "cut" and not is_explained):
                self._break("not an end with a name", chat)
        for chat in after:
            if chat.outcome != "right" and not (may_fail_after and chat.outcome in {"failed", "refused"}):
                self._break("not right although nothing was killed any more", chat)

    def _break(self, what: str, chat: Chat) -> None:
        at = round(chat.begun_at - self._run.begun_at, 2)
        self.broken.append(f"{what}: at {at} s {msgspec.json.encode(chat).decode()}")

    def add_remains(self, deployment: Watched) -> None:
        """Look at what is left after the stop."""
        self.broken += [f"left behind: {what}" for what in deployment.left]
        if deployment.exit_code != 0:
            self.broken.append(f"the deployment exited with {deployment.exit_code}")
        if deployment.num_tracebacks:
            self.broken.append(f"{deployment.num_tracebacks} tracebacks in the log")

    def print(self) -> None:
        """Print tables."""
        run, total = self._run, len(self._run.chats)
        seconds = max((chat.last_at for chat in run.chats), default=run.begun_at) - run.begun_at
        print(f"\n{total} requests in {seconds:.0f} s, {len(run.kills)} kills")
        rows = {name: [count, f"{count / total:.1%}"] for name, count in sorted(self.counts.items())}
        measured.table("how requests ended", ("requests", "share"), rows)  # type: ignore[arg-type]
        victims = Counter(kill.process for kill in run.kills)
        measured.table("what was killed", ("times",), {name: [count] for name, count in sorted(victims.items())})
        quantiles = {f"{share:.1%} of requests": [measured.quantile(self.silences, share)] for share in (0.5, 0.99, 1)}
        measured.table("longest silence of a request", ("s at most",), quantiles)
        after = Counter(chat.outcome for chat in self._after)
        print(f"\nafter the last kill: {after['right']} of {len(self._after)} streams right")
        print(f"promises broken: {len(self.broken)}")
        for line in self.broken[:20]:
            print(f"  {line}")


def write_rows(run: Run, path: Path) -> None:
    """Write each kill and each request, with times from the beginning of the run."""
    with path.open("wb") as out:
        for kill in run.kills:
            row = msgspec.to_builtins(kill) | {"kind": "kill", "at": round(kill.at - run.begun_at, 3)}
            out.write(msgspec.json.encode(row) + b"\n")
        for chat in run.chats:
            row = msgspec.to_builtins(chat) | {"kind": "request"}
            for name in ("begun_at", "last_at", "ended_at"):
                row[name] = round(row[name] - run.begun_at, 3)
            out.write(msgspec.json.encode(row) + b"\n")


def draw(run: Run, path: Path) -> None:
    """Draw how many requests ended how in each second, and what was killed when."""
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports] (extra: bench)
    except ImportError:
        print("no picture: matplotlib is not installed (extra: bench)")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports] (extra: bench)

    ended = [chat for chat in run.chats if chat.outcome is not None]
    num_seconds = 1 + int(max((chat.ended_at - run.begun_at for chat in ended), default=0))
    by_end: dict[str, list[int]] = {"right": [0] * num_seconds}
    for chat in sorted(ended, key=lambda chat: (chat.outcome != "right", chat.name)):
        label = "right" if chat.outcome == "right" else f"{chat.outcome}: {chat.name}"
        by_end.setdefault(label, [0] * num_seconds)[int(chat.ended_at - run.begun_at)] += 1
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(12, 6), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    above.stackplot(range(num_seconds), *by_end.values(), labels=list(by_end), step="post")
    above.set(ylabel="requests that ended, per second", title=f"{len(run.kills)} kills under {run.num_streams} streams")
    above.legend(fontsize=8, loc="upper right")
    names = sorted({kill.process for kill in run.kills}, reverse=True)
    below.scatter([k.at - run.begun_at for k in run.kills], [names.index(k.process) for k in run.kills], s=6, c="k")
    below.set(xlabel="seconds", yticks=range(len(names)), yticklabels=names)
    below.set_title("killed", fontsize=9)
    below.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main() -> int:
    """Run; 1 if a promise was broken."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0, help="how long to kill (default 60)")
    options.add_argument("--streams", type=int, default=50, help="requests at once (default 50)")
    options.add_argument("--period", type=float, default=1.0, help="seconds between two kills (default 1)")
    options.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of silence allowed (default 5)")
    options.add_argument("--seed", type=int, default=0, help="decides who is killed (default 0)")
    options.add_argument("--replicas", type=int, default=2, help="of each stage (default 2)")
    options.add_argument("--gateways", type=int, default=2, help="processes of the gateway (default 2)")
    options.add_argument("--faults", type=read_shares, help="of messages between processes: 'delay=0.2 drop=0.001'")
    options.add_argument("--out", type=Path, help="where results go (default: a temporary folder)")
    args = options.parse_args()
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="kill_run-"))
    out.mkdir(parents=True, exist_ok=True)
    measured.header()
    slots = max(64, 2 * args.streams)
    toml = chats.toml(
        replicas=args.replicas,
        gateways=args.gateways,
        slots=slots,
        step_time_s=STEP_S,
        # What is lost where nobody can notice it ends with the request's time.
        pipeline="" if args.faults is None else f"timeout_s = {2 * NUM_TOKENS * STEP_S}",
    )
    with Watched(toml, log=out / "kill_run.log.jsonl", faults=args.faults) as deployment:
        run = Run(deployment, args)
        uvloop.run(run.play())
        after = uvloop.run(run.recover())
        stale = deployment.stale_files()
    verdict = Verdict(run, after, args.limit, may_fail_after=args.faults is not None)
    verdict.broken += [f"left behind while it ran: {name}" for name in stale]
    verdict.add_remains(deployment)
    verdict.print()
    write_rows(run, out / "kill_run.jsonl")
    draw(run, out / "kill_run.png")
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    sys.exit(main())
