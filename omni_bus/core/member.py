"""An actor's side of membership: it says hello, reports, beats, and answers pings."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from omni_bus.core.effects import Common, Forget, Leave, Send, SetTimer
from omni_bus.core.pipeline import IN
from omni_bus.errors import from_info
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Broken,
    Goodbye,
    Heartbeat,
    Hello,
    Introduce,
    Lost,
    Outlook,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Rested,
    Role,
    Route,
    StageStats,
    Stalled,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from omni_bus.core.edge import InEdge
    from omni_bus.errors import OmniBusError
    from omni_bus.ids import EdgeId
    from omni_bus.wire.frames import ControlFrame, Range
    from omni_bus.wire.metrics import Metric

COORDINATOR = "coordinator"
FIRST_HEARTBEAT_S = 1.0
MISSED_ANSWERS = 3
"""So many heartbeats that a coordinator has not answered mean that it hangs: nothing that it does takes a tenth of a
second, while an engine may keep its stage from beating for longer."""
_BEAT = ("heartbeat", "")


def coordinator_peer(endpoint: str) -> Peer:
    """Return the coordinator as a peer that outlives its incarnations: its address stays, one lane serves them all."""
    return Peer(COORDINATOR, 0, endpoint)


class Running(NamedTuple):
    """A request that an actor holds, since when in its monotonic seconds, and the edges that lead to it."""

    route: Route
    since: float
    in_edges: Mapping[EdgeId, InEdge | None] = MappingProxyType({})

    @property
    def received(self) -> tuple[str, ...]:
        """Stages whose whole output has come."""
        is_whole: dict[str, bool] = {}
        for number, edge in self.in_edges.items():
            source = self.route.edges[number].source
            is_whole[source] = is_whole.get(source, True) and edge is not None and edge.is_closed
        return tuple(source for source, is_it in is_whole.items() if is_it and source != IN)


class Member:
    """The part that every actor but the coordinator shares."""

    def __init__(
        self,
        me: Peer,
        role: Role,
        coordinator: Peer,
        *,
        stage: str = "",
        replica: int = 0,
        live: Callable[[], tuple[Running, ...]] = tuple,
        stats: Callable[[], StageStats] = StageStats,
        linked: Callable[[], Iterable[Peer]] = tuple,
        metrics: Callable[[], tuple[Metric, ...]] = tuple,
    ) -> None:
        self.me = me
        self.coordinator = coordinator
        self.is_ready = False
        self.level = 0
        """At which the engine sleeps; 0 is awake."""
        self.next_level = 0
        """At which it is told to sleep; a hello says so, lest a new coordinator, which has not told it, binds to it."""
        self.is_drained = False
        """This replica gets nothing new, so that it can be restarted or removed."""
        self._role: Role = role
        self._stage = stage
        self._replica = replica
        self._live = live
        self._stats = stats
        self._linked = linked
        self._metrics = metrics
        self._context_length: int | None = None
        self._ranges: Mapping[str, Range] = {}
        self._broken: dict[Peer, Broken] = {}
        """The last break of each connection of ours that the coordinator was told of and has not answered yet."""
        self._num_breaks = 0
        self._told_links: frozenset[Peer] = frozenset()
        """Whom the last hello named as linked to."""
        self._heartbeat_s = FIRST_HEARTBEAT_S
        self._beat_at = 0.0
        self._num_unanswered = 0
        self._stalled_s = 0.0

    def start(self, now: float) -> list[Common]:
        """Say hello; from now on beat."""
        self._beat_at = now
        return [self._to_coordinator(self._introduction(now)), SetTimer(_BEAT, now + self._heartbeat_s)]

    def progress(self, phase: str, fraction: float) -> list[Common]:
        """Tell how far the start is."""
        return [self._to_coordinator(Progress(phase, fraction))]

    def ready(
        self, context_length: int | None = None, ranges: Mapping[str, Range] = MappingProxyType({})
    ) -> list[Common]:
        """Tell that this actor can serve, how many tokens at most, and which values of parameters."""
        self.is_ready = True
        self._context_length, self._ranges = context_length, ranges
        return [self._to_coordinator(Ready(context_length, dict(ranges)))]

    def rested(self, number: int, error: OmniBusError | None) -> list[Common]:
        """Tell that the engine sleeps or is awake as it was told to, or why not."""
        answer = Rested(number, None if error is None else error.to_info(), self.level)
        return [self._to_coordinator(Progress("ready", 1.0)), self._to_coordinator(answer)]

    def lost(self, peer: Peer, *, is_settled: bool = False) -> list[Common]:
        """Tell that another actor's process has ended, and whether all that it sent has arrived."""
        return [self._to_coordinator(Lost(peer, is_settled=is_settled))]

    def on_link_broken(self, peer: Peer, now: float) -> list[Common]:
        """A connection to a peer broke, which may have lost frames of ours.

        What the coordinator missed is made up for by a new introduction. Whoever has a `ClientCore` calls its
        `on_coordinator_changed` then, and carries those effects out after these.
        """
        if peer == self.coordinator:
            return self._introduce(now)
        self._num_breaks += 1
        broken = self._broken[peer] = Broken(self.me, peer, self._num_breaks)
        return [self._to_coordinator(broken)]

    def outlook(self, outlook: Outlook) -> list[Common]:
        """Tell what is known of a replica that does not serve."""
        return [self._to_coordinator(outlook)]

    def stalled(self, seconds: float, now: float) -> list[Common]:
        """Tell that this actor's engine is stuck; from now on it takes part in nothing any more."""
        self.is_ready = False
        self._stalled_s = seconds
        return [self._to_coordinator(self._introduction(now))]

    def goodbye(self, reason: str, *, is_settled: bool = False) -> list[Common]:
        """Tell that this actor leaves, and whether all that it sent has arrived."""
        self.is_ready = False
        return [self._to_coordinator(Goodbye(reason, is_settled))]

    def on_timer(self, now: float) -> list[Common]:
        """Beat."""
        self._beat_at = now
        self._num_unanswered += 1
        heartbeat = Heartbeat(self.me.endpoint, len(self._live()))
        return [self._to_coordinator(heartbeat), SetTimer(_BEAT, now + self._heartbeat_s)]

    @property
    def is_coordinator_silent(self) -> bool:
        """So many heartbeats in a row were not answered that nobody should wait for the coordinator.

        They are counted, not timed: whoever was held up itself has not sent them. Those of stages are never answered.
        """
        return self._num_unanswered > MISSED_ANSWERS

    def on_frame(self, frame: Welcome | Refused | Introduce | Ping | Lost | Broken, now: float) -> list[Common]:
        """Answer the coordinator.

        Whoever has a `ClientCore` calls, after an `Introduce`, its `on_coordinator_changed`, after a `Lost` its
        `on_peer_lost`, and after a `Broken` of somebody else its `on_link_broken`, and carries those effects out after
        these.
        """
        self._num_unanswered = 0
        match frame:
            case Welcome():
                return self._on_welcome(frame, now)
            case Refused(error=error):
                return [Leave(from_info(error))]
            case Introduce():
                return self._introduce(now)
            case Broken(target=target):
                if self._broken.get(target) == frame:
                    del self._broken[target]
                return []
            case Ping(nonce=nonce, wants_metrics=wants_metrics):
                metrics = self._metrics() if wants_metrics else ()
                return [self._to_coordinator(Pong(nonce, self._stats(), metrics))]
            case Lost(peer=peer):
                self._broken.pop(peer, None)
                return [Forget(peer)]

    def _on_welcome(self, welcome: Welcome, now: float) -> list[Common]:
        self.is_drained = welcome.is_drained
        effects: list[Common] = []
        if welcome.heartbeat_s != self._heartbeat_s:
            self._heartbeat_s = welcome.heartbeat_s
            # Counted from the last beat: the coordinator's patience runs from then too.
            effects.append(SetTimer(_BEAT, self._beat_at + welcome.heartbeat_s))
        # The hello may have been under way for long: who was linked to since may have been lost without a word to us.
        if welcome.is_new and not self._told_links.issuperset(self._links()):
            effects.append(self._to_coordinator(self._introduction(now)))
        return effects

    def _introduce(self, now: float) -> list[Common]:
        """Say hello, and repeat what a coordinator may not have heard."""
        return [self._to_coordinator(frame) for frame in (self._introduction(now), *self._broken.values())]

    def _introduction(self, now: float) -> Hello | Stalled:
        if self._stalled_s:
            return Stalled(self.me, self._stage, self._replica, self._stalled_s)
        live, links = self._live(), self._links()
        self._told_links = frozenset(links)
        return Hello(
            PROTOCOL_VERSION,
            self.me,
            self._role,
            self._stage,
            self._replica,
            self.is_ready,
            tuple(running.route for running in live),
            tuple(round(max(0.0, now - running.since), 3) for running in live),
            tuple(running.received for running in live),
            links,
            self._context_length,
            self.level or self.next_level,
            dict(self._ranges),
        )

    def _links(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in self._linked() if peer != self.coordinator)

    def _to_coordinator(self, frame: ControlFrame) -> Send:
        return Send(self.coordinator, frame)
