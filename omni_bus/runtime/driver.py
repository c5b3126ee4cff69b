"""The loop around a core: feeds it frames and due timers, and carries out the effects that every core has."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from omni_bus.bus.arena import DEFAULT_ARENA_LIMITS, ArenaLimits
from omni_bus.bus.cuda_ipc import DEFAULT_CUDA_LIMITS, CudaLimits
from omni_bus.bus.link import Link
from omni_bus.core.effects import DropTimer, Forget, Leave, Report, Send, SetTimer
from omni_bus.core.member import COORDINATOR
from omni_bus.errors import BadFrame, InputTooLarge, Unavailable
from omni_bus.runtime.watch import FileWatch
from omni_bus.wire.frames import DATA_FRAMES, Open

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.bus.curve import Curve
    from omni_bus.core.effects import TimerKey
    from omni_bus.errors import OmniBusError
    from omni_bus.ids import Peer, RequestId, Sender
    from omni_bus.wire.frames import AnyFrame

    OnFrame = Callable[[Sender, AnyFrame, float], None]
    OnTimer = Callable[[TimerKey, float], None]
    OnUnsent = Callable[[RequestId, OmniBusError], None]

logger = logging.getLogger(__name__)

_COMMON = frozenset({SetTimer, DropTimer, Forget, Report, Leave})

MAX_REFUSALS_LOGGED = 1000
"""Senders and kinds of frames that are named in the log once each; a stranger can invent any number of names."""


class Driver:
    """Sockets and timers of one actor, on the running loop.

    Args:
        name: the actor's name.
        listen: address of its inbox.
        on_frame: called with sender, frame and the monotonic time.
        on_timer: called with a timer's key and the monotonic time when it is due.
        on_unsent: called, in a later turn of the loop, with a request whose data frame could not be sent, and why.
        arena: what this actor may lend through shared memory.
        cuda: what it may lend of its devices' memory.
        understands: the frames that this actor takes, control frames among them only from the coordinator; others are
            counted, logged once per sender and dropped. None takes all from everybody, as the coordinator does.
        on_broken: called with a peer to whom a TCP connection broke, so that frames for it may be lost, though it
            lives; and, again and again, with one other than the coordinator to whom none can be made.
        curve: the keys for TCP sockets.
    """

    def __init__(
        self,
        name: str,
        listen: str,
        *,
        on_frame: OnFrame,
        on_timer: OnTimer,
        on_unsent: OnUnsent | None = None,
        arena: ArenaLimits = DEFAULT_ARENA_LIMITS,
        cuda: CudaLimits = DEFAULT_CUDA_LIMITS,
        understands: frozenset[type] | None = None,
        on_broken: Callable[[Peer], None] | None = None,
        curve: Curve | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_timer = on_timer
        self._on_unsent = on_unsent
        self._on_broken = on_broken
        self._understands = understands
        self._refused: set[tuple[str, type]] = set()
        self.num_refused = 0
        self._timers: dict[TimerKey, asyncio.TimerHandle] = {}
        self._leaving: asyncio.Future[OmniBusError] = self._loop.create_future()
        self._link = Link(
            name,
            listen,
            self._deliver,
            self._stuck,
            arena,
            cuda,
            curve=curve,
            on_broken=on_broken,
            on_unreachable=self._unreachable,
            on_refused=self._refused_by,
        )
        self.allocate = self._link.allocate
        self._key_watch = None
        if curve is not None and not curve.is_client and listen.startswith("tcp://"):
            self._key_watch = FileWatch((), self._link.recheck_keys, folders=(curve.allowed_folder,))

    @property
    def me(self) -> Peer:
        """This actor, as others reach it."""
        return self._link.me

    @property
    def address(self) -> dict[str, str]:
        """This actor as a supervisor reads it from the log."""
        return {"endpoint": self.me.endpoint, "incarnation": f"{self.me.incarnation:016x}"}

    @property
    def linked(self) -> list[Peer]:
        """The actors to whom this one holds a link."""
        return self._link.peers

    @property
    def now(self) -> float:
        """Monotonic seconds, the time of all cores of this process."""
        return time.monotonic()  # the loop's clock, but not as of the beginning of its turn

    @property
    def leaving(self) -> asyncio.Future[OmniBusError]:
        """Done when the coordinator refused this actor."""
        return self._leaving

    def perform(self, effects: Iterable[Any], other: Callable[[Any], None] | None = None) -> None:
        """Carry out effects in order; those that not every core has go to `other`."""
        for effect in effects:
            kind = type(effect)
            if kind is Send:  # by far the most frequent one; a class pattern takes three times as long
                try:
                    self._link.send(effect.peer, effect.frame)
                except (BadFrame, InputTooLarge) as error:
                    self._not_sent(effect.peer, effect.frame, error)
                continue
            if other is not None and kind not in _COMMON:
                other(effect)
                continue
            match effect:
                case SetTimer(key=key, at=at):
                    self._drop_timer(key)
                    self._timers[key] = self._loop.call_at(at, self._due, key)
                case DropTimer(key=key):
                    self._drop_timer(key)
                case Forget(peer=peer):
                    self._link.forget(peer)
                case Report(event=event, fields=fields):
                    logger.info(event, extra={"fields": fields})
                case Leave(error=error):
                    if not self._leaving.done():
                        self._leaving.set_result(error)
                case _:
                    raise AssertionError(f"nobody carries out {effect}")

    async def delivered(self, timeout_s: float) -> bool:
        """Wait until all that was sent has been delivered; False if not everybody said so in time."""
        return await self._link.delivered(timeout_s)

    async def close(self, linger_s: float = 1.0) -> None:
        """Drop the timers, send what is queued, close the sockets."""
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
        if self._key_watch is not None:
            self._key_watch.close()
        await self._link.close(linger_s)

    def _not_sent(self, peer: Peer, frame: AnyFrame, error: BadFrame | InputTooLarge) -> None:
        """A frame that has no form on the wire costs its own request, not the effects after it."""
        fields = {"peer": peer.actor, "frame": type(frame).__name__, "code": error.code, "field": error.field}
        logger.error("a frame could not be sent", extra={"fields": fields})
        request = frame.route.request if isinstance(frame, Open) else getattr(frame, "request", None)
        if request is not None and self._on_unsent is not None:
            # Later, because the core's effects are being carried out in order.
            self._loop.call_soon(self._on_unsent, request, error)

    def _deliver(self, sender: Sender, frame: AnyFrame) -> None:
        kind = type(frame)
        if self._understands is not None and (
            kind not in self._understands or (kind not in DATA_FRAMES and sender.actor != COORDINATOR)
        ):
            self._refuse(sender, kind)
            return
        try:
            self._on_frame(sender, frame, time.monotonic())
        except Exception:  # one frame must not end the actor; its request ends by deadline or by its client
            logger.exception("a %s from %s could not be handled", type(frame).__name__, sender.actor)

    def _refuse(self, sender: Sender, kind: type) -> None:
        """Drop a frame that is not for this kind of actor, or that only the coordinator may send."""
        self.num_refused += 1
        if (sender.actor, kind) in self._refused or len(self._refused) >= MAX_REFUSALS_LOGGED:
            return
        self._refused.add((sender.actor, kind))
        fields = {"sender": sender.actor, "frame": kind.__name__}
        logger.warning("unexpected frame (further ones are only counted)", extra={"fields": fields})

    def _due(self, key: TimerKey) -> None:
        self._timers.pop(key, None)
        try:
            self._on_timer(key, self.now)
        except Exception:  # one timer must not end the actor; whose it was ends by a later one or by its client
            logger.exception("a timer could not be handled", extra={"fields": {"timer": key}})

    def _drop_timer(self, key: TimerKey) -> None:
        handle = self._timers.pop(key, None)
        if handle is not None:
            handle.cancel()

    def _unreachable(self, peer: Peer) -> None:
        """Whose frames wait for a connection is served as badly as by a broken one.

        Nobody waits for a coordinator, whose silence is noticed; and its own word is repeated until it is answered.
        """
        if self._on_broken is not None and self._understands is not None and peer.actor != COORDINATOR:
            self._on_broken(peer)

    def _refused_by(self, peer: Peer, reason: str) -> None:
        """End an actor that the coordinator will never hear."""
        message = f"{peer.actor} at {peer.endpoint} takes no connection of ours: {reason}"
        if peer.actor != COORDINATOR:
            logger.warning(message)
        elif not self._leaving.done():
            self._leaving.set_result(Unavailable(message))

    def _stuck(self, peer: Peer) -> None:
        logger.error("peer does not read: its frames are dropped", extra={"fields": {"peer": peer.actor}})
        if self._understands is not None and peer.actor == COORDINATOR and not self._leaving.done():
            # What it missed can't be made up for, and its lane stays shut: only a newcomer is heard again.
            self._leaving.set_result(Unavailable("the coordinator does not read what it is sent"))
