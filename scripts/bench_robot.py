#!/usr/bin/env python3
"""Robots on our deployment against OpenPI's own style of server, and against the policy called in process.

Three parts, each in one run with what it is compared with:

- overhead: one robot with three pictures of 224 x 224 and a state asks again and again, over a socket, gateway and bus,
  or the same policy (seven Meta-World tasks, 0.3 ms) in this very process, in turn;
- batching: 16 robots ask without a pause, our batching stage or a server that calls the policy once for each message on
  the socket's loop, as OpenPI's does; the policy is a small pi0 of transformers (two pictures, four denoise steps);
- endurance: the stock openpi-client asks 10,000 times, connects anew after the deployment was restarted half-way, and
  every answer is compared with the policy's own.

Run: ``python scripts/bench_robot.py [--quick] [--rounds N]``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import uvloop

import measured
from adapters.robot.engine import policy_of
from adapters.robot.policy import Observation
from omni_bus.bench.robots import NUM_VARIANTS, RobotOutcome, RobotPlan, drive, frames_of, table_of
from omni_bus.media.numpy_frames import decode
from omni_bus.testing import make_context
from omni_bus.wire.records import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from adapters.robot.policy import Policy

ROOT = Path(__file__).parents[1]
START_S = 120.0

TOML = """
[stages.policy]
adapter = "robot-policy"
policy = {{ {policy} }}
threads = {threads}
{more}

[pipelines.robot]
edges = ["in.observation -> policy.observation", "policy.actions -> out.actions"]

[gateways.robot]
protocol = "openpi"
port = {port}
"""

ROUTE = "/v1/realtime/robot/openpi?timing=1"
CAMERAS = {f"observation/camera_{i}": (224, 224) for i in range(3)}
METAWORLD = RobotPlan(
    num_robots=1,
    hz=math.inf,
    seconds=1.0,
    images=CAMERAS,
    states={"observation/state": 39},
    prompt="open the drawer",
    deadline_s=math.inf,
)
PI0 = RobotPlan(
    num_robots=16,
    hz=math.inf,
    seconds=1.0,
    images={"observation/image": (56, 56), "observation/wrist_image": (56, 56)},
    states={"observation/state": 8},
    prompt="pick up the cup",
    deadline_s=math.inf,
)


def loaded(table: dict[str, Any]) -> Policy:
    """Return a policy that runs in this process."""
    kind, own = policy_of(table)
    policy = kind(own, make_context())
    policy.load(lambda _phase, _fraction: None)
    return policy


def observation_of(frame: bytes, session: str) -> Observation:
    """Return what a policy is given of a message."""
    values = unpack(decode(frame))
    return Observation(session, is_first=False, values=values, prompt=values.pop("prompt", None))


# --- OpenPI's style of server ------------------------------------------------------------------------------


async def serve_one_by_one(table: dict[str, Any], port: int) -> None:
    """Serve as the server that openpi-client was written for: one call of the policy for each message, on the loop."""
    from openpi_client import msgpack_numpy
    from websockets.asyncio.server import ServerConnection, serve

    policy = loaded(table)
    packb: Any = msgpack_numpy.packb  # it has no types

    async def answer(link: ServerConnection) -> None:
        await link.send(packb(dict(policy.metadata)))
        async for message in link:
            began_at = time.monotonic()
            values = msgpack_numpy.unpackb(message)
            observation = Observation("one", is_first=False, values=values, prompt=values.pop("prompt", None))
            answers: Any = policy.infer([observation])
            timing = {"infer_ms": (time.monotonic() - began_at) * 1e3}
            await link.send(packb({**answers[0], "server_timing": timing}))

    async with serve(answer, "127.0.0.1", port, compression=None, max_size=None) as server:
        await server.serve_forever()


@contextlib.contextmanager
def one_by_one(table: dict[str, Any]) -> Iterator[str]:
    """Run that server in a process of its own; yields its address."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", msgspec.json.encode(table).decode(), "--port", str(port)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environ)
    try:
        until_listening(port, process)
        yield f"ws://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until somebody accepts there."""
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not start")


# --- the three parts ---------------------------------------------------------------------------------------


def deployment(policy: str, port: int, more: str = "", threads: int = 1) -> measured.Deployment:
    """Return ours, not yet started."""
    toml = TOML.format(policy=policy, port=port, more=more, threads=threads)
    return measured.Deployment(toml, start_s=START_S)


def overhead(seconds: float, rounds: int) -> dict[str, float]:
    """Compare a socket with a call."""
    port = free_port()
    policy = loaded({"name": "metaworld"})
    plan = msgspec.structs.replace(METAWORLD, seconds=seconds)
    frames = frames_of(plan, 0)
    through, direct, inside = RobotOutcome(), [], []
    with deployment('name = "metaworld"', port):
        for _ in range(rounds):
            observations = [observation_of(frame, "one") for frame in frames]
            for i in range(max(50, round(seconds * 200))):
                began_at = time.perf_counter()
                policy.infer([observations[i % NUM_VARIANTS]])
                direct.append((time.perf_counter() - began_at) * 1e3)
            outcome = uvloop.run(drive(f"ws://127.0.0.1:{port}{ROUTE}", plan))
            through.add(outcome)
            inside += [each * 1e3 for each in outcome.policy_s]
    over = [all_s * 1e3 - in_s * 1e3 for all_s, in_s in zip(through.latencies_s, through.policy_s, strict=True)]
    rows = {
        "policy called in process": (measured.quantile(direct, 0.5), measured.quantile(direct, 0.99)),
        "policy, as the stage measures it": (measured.quantile(inside, 0.5), measured.quantile(inside, 0.99)),
        "through socket, gateway and bus": (through.percentile_ms(50), through.percentile_ms(99)),
        "all of that but the policy": (measured.quantile(over, 0.5), measured.quantile(over, 0.99)),
    }
    measured.table(
        f"One robot, three pictures of 224 x 224 and a state: {len(over)} observations", ("p50 (ms)", "p99 (ms)"), rows
    )
    p50, p99 = rows["all of that but the policy"]
    measured.ratio("overhead p50 (ms)", p50, "aim: <= 2", key="robot_overhead_p50")
    measured.ratio("overhead p99 (ms)", p99, "aim: <= 5", key="robot_overhead_p99")
    called = rows["policy called in process"][0]
    measured.ratio("latency through the bus / in process, p50", through.percentile_ms(50) / called)
    return {"overhead_p50_ms": p50, "overhead_p99_ms": p99}


def batching(seconds: float, rounds: int) -> dict[str, Any]:
    """Compare a batching stage with one call for each message."""
    sys.path.insert(0, str(ROOT / "tests" / "adapters"))
    import tiny  # type: ignore[import-not-found] (put on the path above)

    port = free_port()
    plan = msgspec.structs.replace(PI0, seconds=seconds)
    ours, theirs = RobotOutcome(), RobotOutcome()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.pi0(Path(folder))
        policy = f'name = "pi0", model = "{model}", device = "cpu"'
        table = {"name": "pi0", "model": model, "device": "cpu"}
        with deployment(policy, port), one_by_one(table) as other:
            for _ in range(rounds):
                ours.add(uvloop.run(drive(f"ws://127.0.0.1:{port}{ROUTE}", plan)))
                theirs.add(uvloop.run(drive(other, plan)))
    print(f"\n16 robots without a pause, {rounds} rounds of {seconds:g} s of each\n")
    print(table_of({"omni-bus": ours, "one by one": theirs}))
    gain = ours.per_second / theirs.per_second
    measured.ratio("throughput, omni-bus / one call per message", gain, "aim: >= 3", key="robot_batching")
    measured.ratio(
        "p99, omni-bus / one call per message", ours.percentile_ms(99) / theirs.percentile_ms(99), "aim: < 1"
    )
    return {"throughput_ratio": gain}


def endurance(count: int) -> dict[str, int]:
    """Ask with the stock client, over a restart."""
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    port = free_port()
    policy = loaded({"name": "metaworld"})
    frames = frames_of(METAWORLD, 1)
    observations = [unpack(decode(frame)) for frame in frames]
    expected = [policy.infer([observation_of(frame, "one")])[0]["actions"] for frame in frames]  # type: ignore[index]
    wrong = lost = answered = 0
    for part in range(2):
        with deployment('name = "metaworld"', port):
            client = WebsocketClientPolicy("127.0.0.1", port)
            for i in range(count // 2):
                answer = client.infer(observations[i % NUM_VARIANTS])
                found = answer.get("actions")
                lost += not isinstance(found, np.ndarray)
                wrong += isinstance(found, np.ndarray) and not np.allclose(found, expected[i % NUM_VARIANTS], atol=1e-5)
                answered += 1
        if part == 0:
            with contextlib.suppress(Exception):  # whatever the client says of a server that is gone
                client.infer(observations[0])
                raise AssertionError("a stopped server answered")
    print(f"\nstock openpi-client, restart half-way: {answered} answers, {wrong} wrong, {lost} lost")
    measured.ratio("answers that were wrong or lost / all", (wrong + lost) / count, "aim: 0", key="robot_endurance")
    return {"answers": answered, "wrong": wrong, "lost": lost}


def main() -> None:
    """Measure all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short, for trying it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve_one_by_one(msgspec.json.decode(args.serve), args.port))
        return
    measured.header()
    seconds, rounds, count = (2.0, 1, 400) if args.quick else (10.0, args.rounds, 10_000)
    results = {
        "overhead": overhead(seconds, rounds),
        "batching": batching(seconds, rounds),
        "endurance": endurance(count),
    }
    measured.write_json(args.json, results)


if __name__ == "__main__":
    main()
