#!/usr/bin/env python3
"""How long processes take from their start to serving, against a bare interpreter that imports the same libraries.

A synthetic deployment with a coordinator, one stage and a gateway is started and stopped, in turn with interpreters
that import what each of them needs and end; the difference is what is ours. The stage's time is without a model.

Run: ``python scripts/bench_start.py [--quick] [--rounds N]``
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import measured

TOML = """
[stages.even]
adapter = "stamped:EvenSource"

[pipelines.even]
edges = ["in.messages -> even.prompt", "even.text -> out.text"]

[gateways.openai]
port = 0
"""

BARE = {
    "coordinator": "import asyncio, logging, msgspec, uvloop, zmq",
    "even.0": "import asyncio, logging, msgspec, uvloop, zmq",
    "gateway.openai.0": "import asyncio, logging, msgspec, uvloop, zmq, aiohttp.web",
}
"""What each kind of process can't do without."""


def bare_s(imports: str) -> float:
    """Return the seconds of an interpreter that imports and ends."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", imports], check=True)
    return time.perf_counter() - begun


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7, help="how often each is started (default 7)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one round")
    args = options.parse_args()
    measured.header()
    ours: dict[str, list[float]] = {name: [] for name in (*BARE, "all, with the supervisor")}
    bare: dict[str, list[float]] = {name: [] for name in BARE}
    down: list[float] = []
    for _ in range(1 if args.quick else args.rounds):
        begun = time.perf_counter()
        with measured.Deployment(TOML) as deployment:
            ours["all, with the supervisor"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
        down.append(time.perf_counter() - begun)
        for name, imports in BARE.items():
            ours[name].append(deployment.ready_s[name])
            bare[name].append(bare_s(imports))
    rows: dict[str, list[float | str]] = {name: [measured.median(values), min(values)] for name, values in ours.items()}
    rows |= {f"bare imports of {name}": [measured.median(values), min(values)] for name, values in bare.items()}
    rows["to stop it all"] = [measured.median(down), min(down)]
    measured.table("seconds", ("median", "best"), rows)
    print("\nratios")
    for name, values in bare.items():
        of_rounds = measured.median(mine / theirs for mine, theirs in zip(ours[name], values, strict=True))
        measured.ratio(f"start of {name} / bare interpreter with its libraries", of_rounds)
    measured.write_json(args.json, {"ours_s": ours, "bare_s": bare, "stop_s": down})


if __name__ == "__main__":
    main()
