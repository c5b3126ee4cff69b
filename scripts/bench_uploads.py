#!/usr/bin/env python3
"""How long the gateway's event loop keeps others waiting while 20 clients upload 50 MB each, against an idle gateway.

A probe asks for ``/version``, which the gateway answers from its loop alone, at fixed times on connections of their
own; its latency counts from the time when it was due, so that a loop that stands still is seen by every probe that
falls into the stop. Round trip and the machine's other work are part of it: the loop's own delay is at most that. Load
comes from a process of its own. The second load is chat requests with as much base64 in their JSON as a body may have,
which the loop has to decode.

Run: ``python scripts/bench_uploads.py [--quick] [--rounds N] [--clients N] [--megabytes N]``
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

import measured

TOML = """
[stages.llm]
adapter = "synthetic-text"

[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]

[gateways.openai]
port = 0
files_dir = "{folder}"
min_free_bytes = 0
"""

PERIOD_S = 0.005
NUM_CONNECTIONS = 64
JSON_MEGABYTES = 31
AIM_MS = 100.0

LOAD = """
import socket, sys, threading, time

host, port, kind, clients, megabytes = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
data = bytes(range(256)) * 4096
if kind == "form":
    path, content = "/v1/files", "multipart/form-data; boundary=abc"
    first = b'--abc\\r\\nContent-Disposition: form-data; name="purpose"\\r\\n\\r\\nuser_data\\r\\n'
    first += b'--abc\\r\\nContent-Disposition: form-data; name="file"; filename="a"\\r\\n\\r\\n'
    last = b"\\r\\n--abc--\\r\\n"
else:
    path, content, data = "/v1/chat/completions", "application/json", b"QUJD" * (1 << 18)
    first = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {'
    first += b'"url": "data:image/png;base64,'
    last = b'"}}]}]}'
length = len(first) + megabytes * len(data) + len(last)
head = f"POST {path} HTTP/1.1\\r\\nHost:\\r\\nContent-Type: {content}\\r\\nContent-Length: {length}\\r\\n\\r\\n"
statuses = []

def send():
    with socket.create_connection((host, port)) as connection:
        connection.sendall(head.encode() + first)
        for _ in range(megabytes):
            connection.sendall(data)
        connection.sendall(last)
        statuses.append(connection.recv(12).decode())

threads = [threading.Thread(target=send) for _ in range(clients)]
began = time.perf_counter()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# The picture is read and then refused: this pipeline takes none.
assert statuses == ["HTTP/1.1 200" if kind == "form" else "HTTP/1.1 400"] * clients, statuses
print(time.perf_counter() - began)
"""


class Window(msgspec.Struct):
    """One measurement."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    num_probes: float
    mb_per_s: float
    gateway_mb: float
    """Resident memory of the gateway at the end."""


class Probe(asyncio.Protocol):
    """One connection that asks when it is told to."""

    def __init__(self, latencies_ms: list[float]) -> None:
        self._latencies_ms = latencies_ms
        self._due_at = 0.0
        self.is_free = True
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, due_at: float) -> None:
        """Send one request."""
        assert self.transport is not None
        self.is_free, self._due_at = False, due_at
        self.transport.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        """Note how long it took; answers are far smaller than one read."""
        assert data.startswith(b"HTTP/1.1 200"), data[:100]
        self._latencies_ms.append((time.perf_counter() - self._due_at) * 1e3)
        self.is_free = True


async def probe(host: str, port: int, until: asyncio.Event, latencies_ms: list[float]) -> None:
    """Ask every `PERIOD_S` until the event."""
    loop = asyncio.get_running_loop()
    probes = [
        (await loop.create_connection(lambda: Probe(latencies_ms), host, port))[1] for _ in range(NUM_CONNECTIONS)
    ]
    due_at = time.perf_counter()
    while not until.is_set():
        free = next((one for one in probes if one.is_free), None)
        if free is None:  # the loop stands still for longer than all of them: the next one to be free counts it
            await asyncio.sleep(PERIOD_S)
            continue
        free.ask(due_at)
        due_at += PERIOD_S
        await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
    while not all(one.is_free for one in probes):  # noqa: ASYNC110 (the answers are on their way)
        await asyncio.sleep(PERIOD_S)
    for one in probes:
        assert one.transport is not None
        one.transport.close()


async def measure(deployment: measured.Deployment, load: tuple[str, int, int] | None, seconds: float) -> Window:
    """Probe while a load runs, or for a while without one.

    Args:
        deployment: what is probed.
        load: kind, clients and megabytes of each; None for nothing.
        seconds: how long to probe without a load.
    """
    address = urlsplit(deployment.ready["gateways"]["openai"])
    host, port = address.hostname or "", address.port or 0
    latencies_ms: list[float] = []
    is_over = asyncio.Event()
    probing = asyncio.create_task(probe(host, port, is_over, latencies_ms))
    mb_per_s = 0.0
    if load is None:
        await asyncio.sleep(seconds)
    else:
        kind, clients, megabytes = load
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LOAD, host, str(port), kind, str(clients), str(megabytes)), stdout=subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        mb_per_s = clients * megabytes / float(out)
    is_over.set()
    await probing
    resident = deployment.resident_bytes()["gateway.openai.0"] / 2**20
    quantiles = [measured.quantile(latencies_ms, share) for share in (0.5, 0.99, 1.0)]
    return Window(*quantiles, num_probes=len(latencies_ms), mb_per_s=mb_per_s, gateway_mb=resident)


async def run(args: argparse.Namespace, folder: str) -> dict[str, list[Window]]:
    """Measure idle and loaded, in turn."""
    clients, megabytes, json_megabytes = (3, 2, 2) if args.quick else (args.clients, args.megabytes, JSON_MEGABYTES)
    rounds, seconds = (1, 0.3) if args.quick else (args.rounds, 5.0)
    loads = {
        "idle": None,
        f"{clients} uploads of {megabytes} MB": ("form", clients, megabytes),
        f"{clients} JSON bodies of {json_megabytes} MB": ("json", clients, json_megabytes),
    }
    windows: dict[str, list[Window]] = {name: [] for name in loads}
    with measured.Deployment(TOML.format(folder=folder)) as deployment:
        for _ in range(rounds):
            for name, load in loads.items():
                windows[name].append(await measure(deployment, load, seconds))
                for path in Path(folder).glob("file-*"):  # noqa: ASYNC240 (nothing else runs)
                    path.unlink()
    return windows


def report(windows: dict[str, list[Window]]) -> None:
    """Print a table, then ratios."""
    columns = ("p50 ms", "p99 ms", "max ms", "probes", "MB/s", "gateway MB")
    rows = {
        name: [measured.median(getattr(window, field) for window in found) for field in Window.__struct_fields__]
        for name, found in windows.items()
    }
    measured.table("latency of a probe that the gateway's loop answers (medians of the rounds)", columns, rows)
    print("\nratios")
    idle, *loaded = rows
    for name in loaded:
        measured.ratio(f"p99 with {name} / {AIM_MS:g} ms", rows[name][1] / AIM_MS, "aim: below 1")
        measured.ratio(f"p99 with {name} / idle", rows[name][1] / rows[idle][1])


def main() -> None:
    """Run the benchmark."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    options.add_argument("--clients", type=int, default=20, help="uploads at the same time (default 20)")
    options.add_argument("--megabytes", type=int, default=50, help="of each upload (default 50)")
    options.add_argument("--json", help="also write every number to this file")
    options.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures nothing")
    args = options.parse_args()
    measured.header()
    folder = tempfile.mkdtemp(prefix="ob-files")
    try:
        windows = uvloop.run(run(args, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(windows)
    measured.write_json(args.json, {"windows": windows})


if __name__ == "__main__":
    main()
