"""A client and a stage joined, without a coordinator: every frame goes through the real codec, nothing is delayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_bus.core.client import ClientCore
from omni_bus.core.effects import Send
from omni_bus.core.member import coordinator_peer
from omni_bus.core.stage import EngineShape, StageCore
from omni_bus.ids import Peer
from omni_bus.wire.codec import Codec
from omni_bus.wire.frames import Admit, Route, RouteEdge, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_bus.core.effects import ClientEffect, StageEffect
    from omni_bus.ids import RequestId, Sender
    from omni_bus.wire.frames import AnyFrame
    from omni_bus.wire.payloads import Payload


class ActorPair:
    """``in.prompt -> stage.prompt``, ``stage.text -> out.text``: one client core, one stage core.

    Effects other than `Send` pile up in `client_effects` and `stage_effects`; frames for the coordinator, whom the
    test plays, in `control`. Frames between the two are delivered when `settle` is called, in order, so a test may
    look between.
    """

    def __init__(
        self,
        shape: EngineShape = EngineShape.STEP,
        *,
        window_chunks: int = 4,
        window_bytes: int = 4096,
        kind: str = "text",
        width: int = 2,
        max_resident: int = 4,
        max_input_bytes: int = 1 << 20,
        parse_params: Callable[[dict[str, Any]], Any] = dict,
        step_timeout_s: float = 0.0,
    ) -> None:
        coordinator = coordinator_peer("pair://coordinator")
        self.coordinator = coordinator
        self.client = ClientCore(coordinator)
        self.stage = StageCore(
            "stage",
            coordinator,
            shape,
            parse_params=parse_params,
            width=width,
            max_resident=max_resident,
            max_input_bytes=max_input_bytes,
            step_timeout_s=step_timeout_s,
        )
        self.client_peer = Peer("client", 1, "pair://client")
        self.stage_peer = Peer("stage.0", 2, "pair://stage.0")
        self.client_effects: list[ClientEffect] = []
        self.stage_effects: list[StageEffect] = []
        self.control: list[AnyFrame] = []
        self.now = 0.0
        self._edges = (
            RouteEdge("in", "prompt", "stage", "prompt", kind, window_chunks, window_bytes),
            RouteEdge("stage", "text", "out", "text", kind, window_chunks, window_bytes),
        )
        self._codec = Codec()
        self._under_way: list[tuple[Peer, AnyFrame]] = []

    def route(self, request: RequestId) -> Route:
        """The route that `open` admits a request with."""
        return Route(request, "pair", self.client_peer, {"stage": self.stage_peer}, self._edges)

    def open(self, request: RequestId = "r", params: dict[str, Any] | None = None) -> RequestId:
        """Submit and admit a request."""
        submit = Submit(request, "pair", ("text",))
        self.from_client(self.client.submit(submit, {"stage": params or {}}, 0.0))
        self.to_client(Admit(self.route(request)))
        return request

    def send(self, request: RequestId, *payloads: Payload, is_last: bool = False) -> None:
        """Send input, and its end; settle."""
        for payload in payloads:
            self.from_client(self.client.send(request, "prompt", payload))
        if is_last:
            self.from_client(self.client.finish(request, "prompt"))
        self.settle()

    def to_client(self, frame: AnyFrame) -> None:
        """Give the client a frame of the coordinator."""
        frame = self._over_the_wire(frame)
        self.from_client(self.client.on_frame(self.coordinator.sender, frame, self.now))  # pyright: ignore[reportArgumentType]

    def to_stage(self, frame: AnyFrame) -> None:
        """Give the stage a frame of the coordinator."""
        frame = self._over_the_wire(frame)
        effects = self.stage.on_frame(self.coordinator.sender, frame, self.now)  # pyright: ignore[reportArgumentType]
        self.from_stage(effects)

    def from_client(self, effects: Iterable[ClientEffect]) -> None:
        """Take the client core's effects."""
        for effect in effects:
            if isinstance(effect, Send):
                self._post(effect)
            else:
                self.client_effects.append(effect)

    def from_stage(self, effects: Iterable[StageEffect]) -> None:
        """Take the stage core's effects."""
        for effect in effects:
            if isinstance(effect, Send):
                self._post(effect)
            else:
                self.stage_effects.append(effect)

    def settle(self) -> None:
        """Deliver what is under way, until nothing is."""
        while self._under_way:
            target, frame = self._under_way.pop(0)
            if target == self.stage_peer:
                sender: Sender = self.client_peer.sender
                effects = self.stage.on_frame(sender, frame, self.now)  # pyright: ignore[reportArgumentType]
                self.from_stage(effects)
            else:
                sender = self.stage_peer.sender
                self.from_client(self.client.on_frame(sender, frame, self.now))  # pyright: ignore[reportArgumentType]

    def _post(self, effect: Send) -> None:
        frame = self._over_the_wire(effect.frame)
        if effect.peer == self.coordinator:
            self.control.append(frame)
        else:
            self._under_way.append((effect.peer, frame))

    def _over_the_wire(self, frame: AnyFrame) -> AnyFrame:
        return self._codec.decode(self._codec.encode(frame))
