"""An actor's side of membership: it says hello, reports, beats, and answers pings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Common, Forget, Leave, Send, SetTimer
from omni_bus.errors import from_info
from omni_bus.ids import Peer
from omni_bus.wire.frames import (
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Introduce,
    Lost,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Role,
    Route,
    StageStats,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.wire.frames import ControlFrame

COORDINATOR = "coordinator"
FIRST_HEARTBEAT_S = 1.0
_BEAT = ("heartbeat", "")


def coordinator_peer(endpoint: str) -> Peer:
    """Return the coordinator as a peer that outlives its incarnations: its address stays, one lane serves them all."""
    return Peer(COORDINATOR, 0, endpoint)


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
        live: Callable[[], tuple[Route, ...]] = tuple,
        stats: Callable[[], StageStats] = StageStats,
    ) -> None:
        self.me = me
        self.coordinator = coordinator
        self.is_ready = False
        self._role: Role = role
        self._stage = stage
        self._replica = replica
        self._live = live
        self._stats = stats
        self._heartbeat_s = FIRST_HEARTBEAT_S
        self._beat_at = 0.0

    def start(self, now: float) -> list[Common]:
        """Say hello; from now on beat."""
        self._beat_at = now
        return [self._to_coordinator(self._hello()), SetTimer(_BEAT, now + self._heartbeat_s)]

    def progress(self, phase: str, fraction: float) -> list[Common]:
        """Tell how far the start is."""
        return [self._to_coordinator(Progress(phase, fraction))]

    def ready(self) -> list[Common]:
        """Tell that this actor can serve."""
        self.is_ready = True
        return [self._to_coordinator(Ready())]

    def lost(self, peer: Peer, *, is_settled: bool = False) -> list[Common]:
        """Tell that another actor's process has ended, and whether all that it sent has arrived."""
        return [self._to_coordinator(Lost(peer, is_settled))]

    def goodbye(self, reason: str, *, is_settled: bool = False) -> list[Common]:
        """Tell that this actor leaves, and whether all that it sent has arrived."""
        self.is_ready = False
        return [self._to_coordinator(Goodbye(reason, is_settled))]

    def on_timer(self, now: float) -> list[Common]:
        """Beat."""
        self._beat_at = now
        heartbeat = Heartbeat(self.me.endpoint, len(self._live()))
        return [self._to_coordinator(heartbeat), SetTimer(_BEAT, now + self._heartbeat_s)]

    def on_frame(self, frame: Welcome | Refused | Introduce | Ping | Lost) -> list[Common]:
        """Answer the coordinator.

        Whoever has a `ClientCore` calls, after an `Introduce`, its `on_coordinator_changed`, and after a `Lost` its
        `on_peer_lost`, and carries those effects out after these.
        """
        match frame:
            case Welcome(heartbeat_s=heartbeat_s):
                if heartbeat_s == self._heartbeat_s:
                    return []
                self._heartbeat_s = heartbeat_s
                # Counted from the last beat: the coordinator's patience runs from then too.
                return [SetTimer(_BEAT, self._beat_at + heartbeat_s)]
            case Refused(error=error):
                return [Leave(from_info(error))]
            case Introduce():
                return [self._to_coordinator(self._hello())]
            case Ping(nonce=nonce):
                return [self._to_coordinator(Pong(nonce, self._stats()))]
            case Lost(peer=peer):
                return [Forget(peer)]

    def _hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self.me, self._role, self._stage, self._replica, self.is_ready, self._live())

    def _to_coordinator(self, frame: ControlFrame) -> Send:
        return Send(self.coordinator, frame)
