"""A bus on which things go wrong, for tests: per link, messages are lost, late, doubled, damaged or cut off.

Faults strike between the receiver's socket and its codec, so the sender takes a message for delivered and the codec
sees the damage. ``faults.installed()`` makes every `FaultyLink` that is built within it suffer them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from fnmatch import fnmatchcase
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.bus.link import Link
from omni_bus.errors import BadFrame
from omni_bus.ids import Peer, parse_sender
from omni_bus.wire.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Part = bytes | memoryview
    Take = Callable[[bytes, list[Part]], None]

MAX_TRIES = 30
"""Random damage of one message until it is of the kind that was asked for."""


class Fault(StrEnum):
    """What may happen to a message."""

    DROP = "drop"
    """It is lost."""
    DELAY = "delay"
    """It comes later, and what follows on its link behind it."""
    DUPLICATE = "duplicate"
    """It comes twice."""
    CORRUPT = "corrupt"
    """Its bytes are damaged so that the codec refuses it, or its payload."""
    ALTER = "alter"
    """Its bytes are changed so that it is another well-formed frame, as no transport does but a faulty actor may.

    Names and addresses of actors stay: ZeroMQ closes one of two sockets that come to an actor under one name, so who
    is told of a wrong actor at a right address loses the way to the right one.
    """
    CUT = "cut"
    """The link is partitioned: it is lost."""
    HOLD = "hold"
    """The link is partitioned: it comes when that heals."""


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a link's messages suffer each fault, from 0 to 1; at most one fault each, delay apart."""

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    alter: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02
    """Mean of the exponential distribution of delays."""


class Faults:
    """Which links fail how. Links are named by the actors at their ends; names may be patterns (``llm.*``).

    Args:
        seed: of each link's own dice, so that traffic on one link does not change the fate of another's.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._shares: dict[tuple[str, str], Shares] = {}
        self._partitions: dict[tuple[str, str], Fault] = {}
        self._pipes: list[_Pipe] = []
        self._came = asyncio.Event()
        self.counts: Counter[Fault] = Counter()
        """Messages that suffered each fault."""
        self.num_messages: Counter[tuple[str, str]] = Counter()
        """Messages that came, by link."""

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        """Let links that are built within this context suffer these faults; tasks begun within it inherit that."""
        token = _INSTALLED.set(self)
        try:
            yield self
        finally:
            _INSTALLED.reset(token)

    def set(self, source: str, target: str, shares: Shares) -> None:
        """Have a share of the messages from `source` to `target` suffer; replaces what was set for the same names."""
        self._shares[source, target] = shares

    def partition(self, source: str, target: str, *, holds: bool = False) -> None:
        """Let nothing through from `source` to `target` until `heal`; what `holds` keeps is delivered then."""
        self._partitions[source, target] = Fault.HOLD if holds else Fault.CUT

    def heal(self) -> None:
        """End every fault; what was late or held comes now, in order."""
        self._shares.clear()
        self._partitions.clear()
        for pipe in self._pipes:
            pipe.release()

    async def until_struck(self, num_messages: int = 1) -> None:
        """Wait until so many messages in all suffered something."""
        await self._until(lambda: self.counts.total() >= num_messages)

    async def until_came(self, source: str, target: str, num_messages: int) -> None:
        """Wait until so many messages came on a link, whatever became of them."""
        await self._until(lambda: self.num_messages[source, target] >= num_messages)

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._came.clear()
            await self._came.wait()

    # --- asked by the pipes -----------------------------------------------------------------------------------

    def join(self, pipe: _Pipe) -> None:
        """Take a receiver in."""
        self._pipes.append(pipe)

    def dice(self, source: str, target: str) -> Random:
        """Return a link's dice."""
        return Random(f"{self._seed} {source} {target}")

    def shares(self, source: str, target: str) -> Shares | None:
        """Return what was last set for a link."""
        return _find(self._shares, source, target)

    def partition_of(self, source: str, target: str) -> Fault | None:
        """Return how a link is partitioned, if it is."""
        return _find(self._partitions, source, target)

    def note(self, source: str, target: str) -> None:
        """Note that a message came."""
        self.num_messages[source, target] += 1
        self._came.set()

    def count(self, fault: Fault) -> None:
        """Note that a message suffered."""
        self.counts[fault] += 1
        self._came.set()


def _find(rules: dict[tuple[str, str], Any], source: str, target: str) -> Any:
    for (sources, targets), rule in reversed(rules.items()):
        if fnmatchcase(source, sources) and fnmatchcase(target, targets):
            return rule
    return None


_INSTALLED: ContextVar[Faults | None] = ContextVar("faults", default=None)


class FaultyLink(Link):
    """A `Link` whose incoming messages suffer the faults that were installed when it was built, if any."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(name, *args, **kwargs)
        faults = _INSTALLED.get()
        self._pipe = None if faults is None else _Pipe(faults, name, self._inbox.handle)
        if self._pipe is not None:
            self._inbox.handle = self._pipe.take

    async def close(self, linger_s: float) -> None:
        """As a link does; what is late or held is lost."""
        if self._pipe is not None:
            self._pipe.close()
        await super().close(linger_s)


class _Pipe:
    """All that comes to one receiver, by sender in order."""

    def __init__(self, faults: Faults, target: str, handle: Take) -> None:
        self._loop = asyncio.get_running_loop()
        self._faults = faults
        self._target = target
        self._handle = handle
        self._codec = Codec()
        self._dice: dict[str, Random] = {}
        self._late: dict[bytes, deque[tuple[float, list[Part]]]] = {}
        """Messages that wait, by routing id, and until when; in order, so the first is due first."""
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        faults.join(self)

    def take(self, routing_id: bytes, parts: list[Part]) -> None:
        """Take a message: deliver it, or what becomes of it."""
        sender = parse_sender(routing_id)
        if sender is None:
            self._handle(routing_id, parts)
            return
        source = sender.actor
        self._faults.note(source, self._target)
        partition = self._faults.partition_of(source, self._target)
        if partition is not None:
            self._faults.count(partition)
            if partition is Fault.HOLD:
                self._queue(routing_id, float("inf"), parts)
            return
        shares = self._faults.shares(source, self._target)
        if shares is None:
            self._pass(routing_id, 0.0, parts)
            return
        if source not in self._dice:
            self._dice[source] = self._faults.dice(source, self._target)
        dice = self._dice[source]
        messages = self._strike(shares, dice, parts)
        delay_s = 0.0
        if messages and dice.random() < shares.delay:
            self._faults.count(Fault.DELAY)
            delay_s = dice.expovariate(1 / shares.delay_s)
        for message in messages:
            self._pass(routing_id, delay_s, message)

    def release(self) -> None:
        """Deliver all that waits."""
        for routing_id in list(self._late):
            self._drop_timer(routing_id)
            for _, parts in self._late.pop(routing_id):
                self._handle(routing_id, parts)

    def close(self) -> None:
        """Lose all that waits; nothing is delivered any more."""
        for routing_id in list(self._timers):
            self._drop_timer(routing_id)
        self._late.clear()

    def _strike(self, shares: Shares, dice: Random, parts: list[Part]) -> list[list[Part]]:
        """Return the messages that one message becomes: none, itself, another, or two."""
        roll = dice.random()
        for fault in (Fault.DROP, Fault.DUPLICATE, Fault.CORRUPT, Fault.ALTER):
            roll -= getattr(shares, fault.value)
            if roll >= 0:
                continue
            match fault:
                case Fault.DROP:
                    found: list[list[Part]] = []
                case Fault.DUPLICATE:
                    found = [parts, parts]
                case _:
                    damaged = damage(parts, dice, self._codec, is_noticed=fault is Fault.CORRUPT)
                    if damaged is None:
                        return [parts]
                    found = [damaged]
            self._faults.count(fault)
            return found
        return [parts]

    def _pass(self, routing_id: bytes, delay_s: float, parts: list[Part]) -> None:
        if delay_s or routing_id in self._late:
            self._queue(routing_id, self._loop.time() + delay_s, parts)
        else:
            self._handle(routing_id, parts)

    def _queue(self, routing_id: bytes, at: float, parts: list[Part]) -> None:
        late = self._late.setdefault(routing_id, deque())
        late.append((max(at, late[-1][0]) if late else at, parts))
        if len(late) == 1:
            self._watch(routing_id)

    def _watch(self, routing_id: bytes) -> None:
        at = self._late[routing_id][0][0]
        if at < float("inf"):
            self._timers[routing_id] = self._loop.call_at(at, self._due, routing_id)

    def _due(self, routing_id: bytes) -> None:
        del self._timers[routing_id]
        late = self._late[routing_id]
        while late and late[0][0] <= self._loop.time():
            self._handle(routing_id, late.popleft()[1])
        if late:
            self._watch(routing_id)
        else:
            del self._late[routing_id]

    def _drop_timer(self, routing_id: bytes) -> None:
        timer = self._timers.pop(routing_id, None)
        if timer is not None:
            timer.cancel()


def damage(parts: list[Part], dice: Random, codec: Codec, *, is_noticed: bool) -> list[Part] | None:
    """Return a message with some bytes changed, cut off or added, or a part lost or added.

    Args:
        parts: the message; left as it is.
        dice: decides.
        codec: judges; one that fetches nothing.
        is_noticed: whether the codec is to refuse the outcome. If not, it is a well-formed frame, and another one.

    Returns:
        None where nothing of that kind was found.
    """
    before = _read(codec, parts)
    for _ in range(MAX_TRIES):
        found = _damaged(parts, dice)
        after = _read(codec, found)
        if is_noticed and before is not None and after is None:
            return found
        is_another = after is not None and after != before and list(_peers(after)) == list(_peers(before))
        if not is_noticed and is_another:
            return found
    # What refers to shared memory is refused by this codec as it is; half a header by every one.
    return [bytes(parts[0])[: len(parts[0]) // 2], *parts[1:]] if is_noticed else None


def _read(codec: Codec, parts: list[Part]) -> Any:
    try:
        return codec.decode(parts)
    except BadFrame:
        return None


def _peers(value: Any) -> Iterator[Peer]:
    """Find all actors that a frame names."""
    match value:
        case Peer():
            yield value
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from _peers(getattr(value, name))
        case dict():
            for each in value.values():
                yield from _peers(each)
        case tuple() | list():
            for each in value:
                yield from _peers(each)
        case _:
            pass


def _damaged(parts: list[Part], dice: Random) -> list[Part]:
    changed = [bytearray(part) for part in parts]
    # The header mostly: what a payload's own bytes say is no business of the codec.
    number = 0 if dice.random() < 0.8 else dice.randrange(len(changed))
    part = changed[number]
    match dice.randrange(6):
        case 0 | 1 | 2 if part:
            for _ in range(dice.choice((1, 1, 2, 8))):
                part[dice.randrange(len(part))] ^= 1 << dice.randrange(8)
        case 3 if part:
            del part[dice.randrange(len(part)) :]
        case 4:
            part += dice.randbytes(dice.randrange(1, 9))
        case _ if len(changed) > 1:
            del changed[dice.randrange(1, len(changed))]
        case _:
            changed.append(bytearray(dice.randbytes(8)))
    return [bytes(part) for part in changed]
