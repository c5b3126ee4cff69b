"""Broken frames: random ones of every kind, whole and mutated, to the codec and to the inboxes of a deployment."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from hypothesis import HealthCheck, given, settings

from loads.fuzz_http import mutated
from omni_bus.errors import BadFrame
from omni_bus.ids import Peer, Sender, new_incarnation
from omni_bus.wire.codec import MAX_PARTS, Codec
from omni_bus.wire.frames import PROTOCOL_VERSION, Chunk, Close, Hello, Open, Route, RouteEdge
from omni_bus.wire.payloads import Json

if TYPE_CHECKING:
    from random import Random

STRATEGIES = Path(__file__).parents[2] / "tests" / "wire" / "strategies.py"
NUM_FRAMES = 1500
"""Different ones, before they are mutated."""

HELLO_EVERY = 50
"""Messages after which the fuzzing actor joins again, since some frames make it leave."""

NOT_AN_INBOX = {"fuzz.sock", "control.sock"}
"""Sockets of a run folder that don't speak ZeroMQ, or are the intruder's."""

SEND_TIMEOUT_MS = 30_000
"""An inbox that takes nothing for so long hangs."""

ODD_IDS = (
    b"",
    b"\0x",
    b"coordinator",
    b"coordinator:zz",
    b"a:0123456789abcdef/bulk/bulk",
    b"\xff:0123456789abcdef",
    b"x" * 255,
)
"""Routing ids that no actor uses; an empty one has ZeroMQ choose."""

Parts = list[bytes]


def corpus() -> list[Parts]:
    """Return messages of every kind of frame, the same ones each time."""
    spec = importlib.util.spec_from_file_location("strategies", STRATEGIES)
    assert spec is not None
    assert spec.loader is not None
    strategies = importlib.util.module_from_spec(spec)
    sys.modules["strategies"] = strategies
    spec.loader.exec_module(strategies)
    codec = Codec()
    found: list[Parts] = []

    @settings(
        max_examples=NUM_FRAMES,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(strategies.frames)
    def collect(frame: Any) -> None:
        found.append([bytes(part) for part in codec.encode(frame)])

    collect()
    return found


def spoilt(messages: list[Parts], dice: Random) -> Parts:
    """Return a message that is one of these, mutated mostly, or noise."""
    parts = list(dice.choice(messages))
    roll = dice.random()
    if roll < 0.15:
        return parts
    if roll < 0.2:
        return [dice.randbytes(dice.randrange(64)) for _ in range(dice.randrange(1, 4))]
    number = 0 if dice.random() < 0.8 else dice.randrange(len(parts))
    parts[number] = mutated(parts[number], dice)
    match dice.randrange(12):
        case 0:
            parts.append(dice.randbytes(8))
        case 1 if len(parts) > 1:
            parts.pop()
        case 2:
            parts += [b""] * MAX_PARTS
        case 3:
            parts[0] = parts[0][: dice.randrange(len(parts[0]) + 1)]
        case _:
            pass
    return parts


def fuzz_codec(messages: list[Parts], count: int, dice: Random) -> tuple[Counter[str], list[str]]:
    """Decode so many messages; return how that ended, and what must not have happened."""
    codec = Codec()
    ends: Counter[str] = Counter()
    broken: list[str] = []
    for _ in range(count):
        parts = spoilt(messages, dice)
        try:
            codec.decode(parts)
            ends["decoded"] += 1
        except BadFrame:
            ends["refused"] += 1
        except Exception as error:  # noqa: BLE001 (that is what is looked for)
            broken.append(f"{type(error).__name__}: {error} of {parts!r:.300}")
    return ends, broken


class Intruder:
    """Sends messages to inboxes: as a client that joined, and from sockets that are no actor's.

    Args:
        folder: of the run directory; its inboxes are the targets, its coordinator is joined.
    """

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._codec = Codec()
        me = Sender("fuzz.0", new_incarnation())
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.bind(f"ipc://{folder}/fuzz.sock")
        self.me = Peer(me.actor, me.incarnation, f"ipc://{folder}/fuzz.sock")
        self._coordinator = f"ipc://{folder}/coordinator.sock"
        targets = sorted(f"ipc://{path}" for path in folder.glob("*.sock") if path.name not in NOT_AN_INBOX)
        self._sockets = {target: self._connect(target, me.encode()) for target in targets}
        self._odd = [self._connect(target, name) for target in targets for name in ODD_IDS]

    def _connect(self, target: str, routing_id: bytes) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        if routing_id:
            dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        dealer.connect(target)
        return dealer

    def send(self, messages: list[Parts], count: int, dice: Random) -> None:
        """Send so many messages, as fast as the inboxes take them.

        Raises:
            zmq.Again: one of them takes nothing.
        """
        for number in range(count):
            if number % HELLO_EVERY == 0:
                self.join()
            if dice.random() < 0.02:
                self._open_by_itself(dice, number)
                continue
            sockets = self._odd if dice.random() < 0.2 else list(self._sockets.values())
            parts = spoilt(messages, dice)
            dice.choice(sockets).send_multipart(parts)

    def join(self) -> None:
        """Say hello as a client, and read what came meanwhile, since who does not is given up."""
        hello = Hello(PROTOCOL_VERSION, self.me, "client")
        self._sockets[self._coordinator].send_multipart(self._codec.encode(hello))
        while self._inbox.poll(0):
            self._inbox.recv_multipart()

    def _open_by_itself(self, dice: Random, number: int) -> None:
        """Give a stage work that no coordinator knows of."""
        target = dice.choice([target for target in self._sockets if "llm" in target])
        edges = (
            RouteEdge("in", "messages", "llm", "prompt", "json", 8, 1 << 20),
            RouteEdge("llm", "text", "out", "text", "text", 8, 1 << 20),
        )
        # Nobody knows a stage's incarnation but those who are told; a wrong one must do no harm.
        stages = {"llm": Peer("llm.0", new_incarnation(), target)}
        route = Route(f"fuzz-{number}", "voice", self.me, stages, edges)
        for frame in (
            Open(route, 0, {"llm": {"tokens": 3}}),
            Chunk(route.request, 0, 0, Json({"marker": "fuzz"})),
            Close(route.request, 0, 1, kind="json"),
        ):
            self._sockets[target].send_multipart(self._codec.encode(frame))

    def close(self) -> None:
        """Send what is left, and leave."""
        for socket in (*self._sockets.values(), *self._odd, self._inbox):
            socket.close()
        self._context.term()
