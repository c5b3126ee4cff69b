"""Simulated robots on a server that speaks OpenPI, omni-bus or another: what they wait, and what they miss.

Each robot has a socket and one observation under way at most, as the protocol has it. At a rate, its observations are
due at fixed times, evenly spread over the robots; those that are due while it still waits are missed.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np

from omni_bus.errors import Unreachable
from omni_bus.media.numpy_frames import encode
from omni_bus.wire.records import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NUM_VARIANTS = 4
"""Observations that a robot sends in turn, made before the clock runs."""

GIVE_UP_S = 60.0


class RobotPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done."""

    num_robots: int
    hz: float
    """Observations of each robot a second; infinity: the next one as soon as the last is answered."""
    seconds: float
    images: Mapping[str, tuple[int, int]] = {}
    """Keys and (height, width) of the pictures in an observation."""
    states: Mapping[str, int] = {}
    """Keys and lengths of the vectors in it."""
    prompt: str = ""
    deadline_s: float | None = None
    """An answer that takes longer is late; by default a period."""
    headers: Mapping[str, str] = {}

    @property
    def allowed_s(self) -> float:
        """What an answer may take without being late."""
        return self.deadline_s if self.deadline_s is not None else 1.0 / self.hz


class RobotOutcome(msgspec.Struct):
    """What the robots saw."""

    latencies_s: list[float] = []
    """From sending to the answer, all read."""
    num_late: int = 0
    num_skipped: int = 0
    """Observations that were due while the last one was not answered."""
    errors: dict[str, int] = {}
    batch_sizes: dict[int, int] = {}
    """Observations by the size of the batch that they were in, where the server says it."""
    policy_s: list[float] = []
    """Time within the policy, where the server says it."""
    seconds: float = 0.0

    def add(self, other: RobotOutcome) -> None:
        """Take another's in."""
        self.latencies_s += other.latencies_s
        self.policy_s += other.policy_s
        self.num_late += other.num_late
        self.num_skipped += other.num_skipped
        self.seconds += other.seconds
        for name, count in other.errors.items():
            self.errors[name] = self.errors.get(name, 0) + count
        for size, count in other.batch_sizes.items():
            self.batch_sizes[size] = self.batch_sizes.get(size, 0) + count

    @property
    def per_second(self) -> float:
        """Answers a second, of all robots."""
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    @property
    def mean_batch(self) -> float | None:
        """Observations in a call of the policy, on average over the calls; None where the server does not say."""
        calls = sum(count / size for size, count in self.batch_sizes.items())
        return sum(self.batch_sizes.values()) / calls if calls else None

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latencies; NaN without any."""
        return float(np.percentile(self.latencies_s, percent)) * 1e3 if self.latencies_s else math.nan


async def drive(url: str, plan: RobotPlan) -> RobotOutcome:
    """Let all robots run once.

    Raises:
        Unreachable: the server does not answer as one that speaks OpenPI.
    """
    total = RobotOutcome()
    async with aiohttp.ClientSession() as http:
        sockets = [await _dial(http, url, plan.headers) for _ in range(plan.num_robots)]
        try:
            frames = [frames_of(plan, seed) for seed in range(plan.num_robots)]
            for socket, mine in zip(sockets, frames, strict=True):  # connections and caches warm
                await socket.send_bytes(mine[0])
                await socket.receive(GIVE_UP_S)
            began_at = time.perf_counter()
            tasks = [
                asyncio.create_task(_run(socket, mine, plan, began_at, i / plan.num_robots))
                for i, (socket, mine) in enumerate(zip(sockets, frames, strict=True))
            ]
            for outcome in await asyncio.gather(*tasks):
                total.add(outcome)
            total.seconds = time.perf_counter() - began_at
        finally:
            for socket in sockets:
                await socket.close()
    return total


def frames_of(plan: RobotPlan, seed: int) -> list[bytes]:
    """Return a robot's observations as messages."""
    dice = np.random.default_rng(seed)
    return [
        encode(
            pack(
                {key: dice.integers(0, 256, (*size, 3), np.uint8) for key, size in plan.images.items()}
                | {key: dice.random(length, np.float32) for key, length in plan.states.items()}
                | ({"prompt": plan.prompt} if plan.prompt else {})
            )
        )
        for _ in range(NUM_VARIANTS)
    ]


async def _dial(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> aiohttp.ClientWebSocketResponse:
    try:
        socket = await http.ws_connect(url, compress=0, max_msg_size=0, headers=dict(headers))
        first = await socket.receive(GIVE_UP_S)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unreachable(f"url: {url} does not answer: {error}", field="url") from error
    if first.type is not aiohttp.WSMsgType.BINARY:
        raise Unreachable(f"url: {url} begins with no metadata: {str(first.data)[:200]}", field="url")
    return socket


async def _run(
    socket: aiohttp.ClientWebSocketResponse, frames: Sequence[bytes], plan: RobotPlan, began_at: float, phase: float
) -> RobotOutcome:
    """Be one robot until the time is over.

    Args:
        socket: its own.
        frames: its observations.
        plan: what all do.
        began_at: when the clock began.
        phase: of its period, in [0, 1).
    """
    outcome = RobotOutcome()
    period_s = 0.0 if math.isinf(plan.hz) else 1.0 / plan.hz
    tick = 0
    while True:
        due_at = began_at + (tick + phase) * period_s
        now = time.perf_counter()
        if max(due_at, now) > began_at + plan.seconds:
            return outcome
        if due_at > now:
            await asyncio.sleep(due_at - now)
        sent_at = time.perf_counter()
        await socket.send_bytes(frames[tick % len(frames)])
        message = await socket.receive(GIVE_UP_S)
        now = time.perf_counter()
        if not _note(outcome, message, now - sent_at):
            return outcome
        outcome.num_late += now - sent_at > plan.allowed_s
        tick += 1
        if period_s:
            next_tick = max(tick, math.ceil((now - began_at) / period_s - phase))
            outcome.num_skipped += next_tick - tick
            tick = next_tick


def _note(outcome: RobotOutcome, message: aiohttp.WSMessage, latency_s: float) -> bool:
    """Count an answer; returns whether the socket goes on."""
    if message.type is not aiohttp.WSMsgType.BINARY:
        _count(outcome.errors, f"closed or text: {str(message.data)[:80]}")
        return message.type is aiohttp.WSMsgType.TEXT
    answer: Any = msgspec.msgpack.decode(message.data)
    if not isinstance(answer, dict) or "actions" not in answer:
        told = answer.get("detail", answer.get("message", "")) if isinstance(answer, dict) else answer
        _count(outcome.errors, str(told)[:80])
        return True
    outcome.latencies_s.append(latency_s)
    timing = answer.get("server_timing", {})
    if "batch_size" in timing:
        _count(outcome.batch_sizes, timing["batch_size"])
        outcome.policy_s.append(timing["policy_ms"] / 1e3)
    return True


def _count(counts: dict[Any, int], key: Any) -> None:
    counts[key] = counts.get(key, 0) + 1


ROWS: tuple[tuple[str, str, str], ...] = (
    ("per_second", "Actions a second", "{:.1f}"),
    ("p50_ms", "Latency p50 (ms)", "{:.2f}"),
    ("p99_ms", "Latency p99 (ms)", "{:.2f}"),
    ("late", "Late answers", "{:.0f}"),
    ("skipped", "Missed observations", "{:.0f}"),
    ("errors", "Errors", "{:.0f}"),
    ("mean_batch", "Batch, mean", "{:.2f}"),
    ("policy_p50_ms", "Policy p50 (ms)", "{:.2f}"),
)
"""Key in the JSON, title in the table, and form."""


def summary_of(outcome: RobotOutcome) -> dict[str, float | None]:
    """Return the figures by key; None for what the server does not say."""
    return {
        "per_second": outcome.per_second,
        "p50_ms": outcome.percentile_ms(50),
        "p99_ms": outcome.percentile_ms(99),
        "late": outcome.num_late,
        "skipped": outcome.num_skipped,
        "errors": sum(outcome.errors.values()),
        "mean_batch": outcome.mean_batch,
        "policy_p50_ms": float(np.percentile(outcome.policy_s, 50)) * 1e3 if outcome.policy_s else None,
    }


def table_of(named: Mapping[str, RobotOutcome]) -> str:
    """Return the figures of one or two servers as text; of two, with the first's share of the second."""
    columns = {name: summary_of(outcome) for name, outcome in named.items()}
    is_pair = len(columns) == 2
    lines = [f"{'':22}" + "".join(f"{name[:20]:>22}" for name in columns) + (f"{'ratio':>10}" if is_pair else "")]
    for key, title, form in ROWS:
        found = [column[key] for column in columns.values()]
        line = f"{title:22}" + "".join(f"{'-' if value is None else form.format(value):>22}" for value in found)
        if is_pair and found[0] is not None and found[1]:
            line += f"{found[0] / found[1]:>10.2f}"
        lines.append(line)
    for name, outcome in named.items():
        if outcome.batch_sizes:
            sizes = ", ".join(f"{size}: {count}" for size, count in sorted(outcome.batch_sizes.items()))
            lines.append(f"Observations by batch size, {name}: {sizes}")
        lines += [f"Error of {name}, {count} times: {text}" for text, count in outcome.errors.items()]
    return "\n".join(lines)
