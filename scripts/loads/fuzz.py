"""A hundred thousand malformed inputs to one deployment: over HTTP, as JSON, as frames.

``scripts/fuzz [--count N] [--only KIND …] [--seed N] [--openapi]``. Kinds share the count evenly: ``raw`` bytes that
break HTTP, ``json`` bodies that are wrong somewhere, ``websocket`` handshakes, frames and messages of speech,
``robots`` the same with observations, ``frames`` to every inbox of the deployment, ``codec`` the same without sockets.
``--openapi`` also runs Schemathesis on the deployment's own /openapi.json. No input may crash a process, give a client
a traceback or a 5xx, smuggle a request, or hang; afterwards a good request must be right. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

import measured
from loads import chats, fuzz_frames, fuzz_http, fuzz_robots, fuzz_websocket
from loads.chats import Chat, Manner
from loads.deployment import Watched, held

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("raw", "json", "websocket", "robots", "frames", "codec")
SPEAKS = """
[pipelines.speech]
edges = ["in.text -> voice.text", "voice.audio -> out.audio"]
max_queued = 1000
"""
SCHEMATHESIS = Path(__file__).parent / "schemathesis.toml"
GRACE_S = 60.0
"""For requests that intruders began: who takes part in them is lost after a few heartbeats."""


class Row(msgspec.Struct):
    """One kind of input."""

    tried: int
    ended: str
    server_errors: int
    broken: list[str]


class Fuzz:
    """All inputs to one deployment."""

    def __init__(self, deployment: Watched, seed: int) -> None:
        self._deployment = deployment
        self._seed = seed
        self._messages = fuzz_frames.corpus()
        self.rows: dict[str, Row] = {}

    async def run(self, kind: str, count: int) -> None:
        """Send so many inputs of a kind."""
        begun = time.monotonic()
        dice = random.Random(f"{self._seed} {kind}")
        match kind:
            case "raw":
                row = await self._http(fuzz_http.raw, count, dice)
            case "json":
                row = await self._http(fuzz_http.json_body, count, dice)
            case "websocket":
                texts, openings = fuzz_websocket.SPEECH_TEXTS, fuzz_websocket.SPEECH_OPENINGS
                tally = await fuzz_websocket.fuzz(
                    self._deployment.url, fuzz_websocket.SPEECH, count, dice, texts=texts, openings=openings
                )
                row = _row_of(tally)
            case "robots":
                tally = await fuzz_websocket.fuzz(
                    self._deployment.url, fuzz_robots.ROUTE, count, dice, binaries=fuzz_robots.corpus()
                )
                row = _row_of(tally)
            case "codec":
                ends, broken = fuzz_frames.fuzz_codec(self._messages, count, dice)
                row = Row(ends.total() + len(broken), _shown(ends), 0, broken)
            case _:
                await asyncio.to_thread(self._intrude, count, dice)
                row = Row(count, "", 0, [])
        self.rows[kind] = row
        took = time.monotonic() - begun
        print(f"{kind:<10}{row.tried:>8} tried in {took:.0f} s, {len(row.broken)} broken promises", flush=True)

    async def _http(self, make: fuzz_http.Make, count: int, dice: random.Random) -> Row:
        tally = await fuzz_http.fuzz(self._deployment.url, make, count, dice)
        errors = sum(n for status, n in tally.statuses.items() if status >= 500)
        ends = {**dict(sorted(tally.statuses.items())), "closed": tally.num_closed}
        return Row(tally.num_tried, _shown(ends), errors, tally.broken)

    def _intrude(self, count: int, dice: random.Random) -> None:
        intruder = fuzz_frames.Intruder(self._deployment.run_folder)
        intruder.send(self._messages, count, dice)
        intruder.close()

    async def aftermath(self) -> list[str]:
        """Wait until nothing is held of any input; return what is wrong then."""
        bus = await self._deployment.client()
        try:
            async with asyncio.timeout(GRACE_S):
                while await held(bus):
                    pass  # each question is a round trip to every stage
        except TimeoutError:
            return [f"still held: {await held(bus)}"]
        finally:
            await bus.close()
        chat = Chat(marker="after", num_tokens=5)
        async with chats.session(self._deployment.url) as http:
            await chats.run(http, chat, Manner())
        return [] if chat.outcome == "right" else [f"a good request afterwards: {msgspec.json.encode(chat).decode()}"]


def _row_of(tally: fuzz_websocket.Tally) -> Row:
    errors = sum(n for end, n in tally.ends.items() if end.startswith("HTTP 5"))
    return Row(tally.num_tried, _shown(tally.ends), errors, tally.broken)


def _shown(ends: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items(), key=lambda item: str(item[0])) if count)


def schemathesis(url: str, seed: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that has Schemathesis try all that a gateway's document promises, and its environment."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(SCHEMATHESIS), "run"]
    # For its hooks, and for sources that are not installed.
    path = os.pathsep.join([str(SCHEMATHESIS.parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    return [*command, f"{url}/openapi.json", "--seed", str(seed), "--no-color"], environ


def run_schemathesis(url: str, seed: int) -> list[str]:
    """Run it; return what it found."""
    command, environ = schemathesis(url, seed)
    done = subprocess.run(command, env=environ, check=False)
    return ["schemathesis found something: see above"] if done.returncode else []


def report(fuzz: Fuzz, broken: list[str]) -> None:
    """Print the table and what was broken."""
    rows = {kind: [str(row.tried), str(row.server_errors), str(len(row.broken))] for kind, row in fuzz.rows.items()}
    total = [sum(row.tried for row in fuzz.rows.values()), sum(row.server_errors for row in fuzz.rows.values())]
    rows["all"] = [*map(str, total), str(sum(len(row.broken) for row in fuzz.rows.values()))]
    measured.table("malformed inputs", ("tried", "5xx", "broken promises"), rows)
    print("\nhow they ended")
    for kind, row in fuzz.rows.items():
        print(f"  {kind:<10}{row.ended}")
    print(f"\npromises broken: {len(broken)}")
    for line in broken[:20]:
        print(f"  {line}")


async def play(deployment: Watched, args: argparse.Namespace) -> list[str]:
    """Send everything; return the broken promises."""
    pids = dict(deployment.pids)
    fuzz = Fuzz(deployment, args.seed)
    kinds = args.only or KINDS
    for kind in kinds:
        await fuzz.run(kind, args.count // len(kinds))
    broken = [line for row in fuzz.rows.values() for line in row.broken] + await fuzz.aftermath()
    if args.openapi:
        broken += await asyncio.to_thread(run_schemathesis, deployment.url, args.seed)
    broken += [f"{name} died" for name, pid in pids.items() if deployment.pids[name] != pid]
    if deployment.num_tracebacks:
        broken.append(f"{deployment.num_tracebacks} tracebacks in the log")
    report(fuzz, broken)
    return broken


def main() -> int:
    """Run; 1 if a promise was broken."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=100_000, help="inputs in all (default 100,000)")
    options.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help=f"some of: {', '.join(KINDS)}")
    options.add_argument("--openapi", action="store_true", help="run Schemathesis as well (extra: dev)")
    options.add_argument("--seed", type=int, default=0, help="decides what is sent (default 0)")
    options.add_argument("--out", type=Path, help="where the deployment's log goes (default: a temporary folder)")
    args = options.parse_args()
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    measured.header()
    toml = (
        chats.toml(step_time_s=0.0, tokens=3, max_queued=1000, gateway=fuzz_http.TIMEOUTS) + SPEAKS + fuzz_robots.TOML
    )
    with Watched(toml, log=out / "fuzz.log.jsonl") as deployment:
        broken = uvloop.run(play(deployment, args))
    broken = [*broken, *(f"left behind: {what}" for what in deployment.left)]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
