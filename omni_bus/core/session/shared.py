"""What the parts of a session share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.session.conversation import Conversation
from omni_bus.core.session.ids import Ids

if TYPE_CHECKING:
    from omni_bus.core.session.config import SessionConfig
    from omni_bus.core.session.limits import Limits
    from omni_bus.core.session.outlet import Outlet
    from omni_bus.core.session.server_events import Capabilities, TurnState


class Shared:
    """One session's state that more than one part reads."""

    def __init__(
        self,
        session_id: str,
        seed: str,
        config: SessionConfig,
        capabilities: Capabilities,
        limits: Limits,
        outlet: Outlet,
    ) -> None:
        self.id = session_id
        self.config = config
        self.capabilities = capabilities
        self.limits = limits
        self.outlet = outlet
        self.ids = Ids(seed)
        self.conversation = Conversation(limits.max_items, limits.max_conversation_bytes)
        self.conversation_id = f"conv_{seed}"
        self.epoch = 0
        """Advances with everything that cuts an answer off."""
        self.turn_id = 0
        """Commits so far."""
        self.needs_ack = config.playback_commit_policy == "ack_only"
        """Only what a client says it played counts as heard."""
        self.is_user_speaking = False
        """A detector hears the user."""
        self.has_sounded = False
        """Sound was made, and its voice can't change any more."""
        self.signalled: TurnState | None = None
        """What a client that knows turns itself said last."""

    @property
    def now(self) -> float:
        """The time of the call that is served."""
        return self.outlet.now

    @property
    def is_duplex(self) -> bool:
        """Whether the client speaks a duplex dialect."""
        return self.config.duplex is not None
