"""Which replica a request is bound to: the one where it costs the least.

A request's work at a replica is its tokens, less those of a prefix that the replica has seen. A replica's load is the
work of what is bound to it and has not ended there, which the coordinator keeps count of, since it sees each beginning
and each end; to that comes the request's own work. So a replica that has a long prompt cached is chosen until it is
busier than another by what the cache saves (the same balance as in NVIDIA Dynamo's KV router, with text blocks in the
place of KV blocks; the engine alone knows what it really keeps).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_bus.core.membership import Actor
    from omni_bus.ids import Peer, RequestId, Sender
    from omni_bus.wire.frames import Submit

Routing: TypeAlias = Literal["prefix", "least_tokens", "round_robin"]

BLOCK_TOKENS = 64
"""What a block of a prefix (`Submit.prefix`) stands for: 256 bytes, at four a token."""

UNTOLD_TOKENS = 256
"""What a request counts whose client did not say what it takes."""

MAX_REMEMBERED_BLOCKS = 16_384
"""Of each replica of each stage: the prefixes of the last million tokens."""

MAX_SESSIONS = 65_536
"""Sessions whose replicas are remembered; the longest unused are forgotten first."""


def tokens_of(submit: Submit) -> int:
    """Return what a request counts."""
    return submit.tokens or UNTOLD_TOKENS


class Bindings:
    """Outstanding requests and work by replica, and what the replicas have seen."""

    def __init__(self) -> None:
        self._outstanding: Counter[Sender] = Counter()
        self._work: dict[tuple[RequestId, str], int] = {}
        """Of each outstanding request at each of its stages, in tokens, as it was when it was bound."""
        self._tokens: Counter[Sender] = Counter()
        """All of that, by replica."""
        self._seen: dict[Sender, OrderedDict[int, None]] = {}
        self._sessions: OrderedDict[tuple[str, str, str], Sender] = OrderedDict()
        self._last: dict[str, int] = {}
        """By stage: the replica that had the last turn."""

    def outstanding(self, replica: Sender) -> int:
        """Requests that are bound to this replica and have not ended there."""
        return self._outstanding[replica]

    @property
    def total(self) -> int:
        """Bound and not ended, over all replicas."""
        return self._outstanding.total()

    def bind(self, stage: str, replicas: Sequence[Actor], submit: Submit, routing: Routing, *, is_entry: bool) -> Peer:
        """Choose among a stage's replicas (at least one) and count the request.

        A session stays with its replica while that may be bound. Ties go to fewer requests, then to the lower number.

        Args:
            stage: its name.
            replicas: those that may be bound.
            submit: what the client said of the request.
            routing: ``prefix`` as told above, ``least_tokens`` without looking at prefixes, or ``round_robin``.
            is_entry: the stage reads the request's own input, so that its prefix means something there.
        """
        prefix = submit.prefix if is_entry and routing == "prefix" else ()
        chosen = self._of_session(stage, replicas, submit)
        if chosen is None and routing == "round_robin":
            last = self._last.get(stage, -1)
            chosen = min(replicas, key=lambda actor: (actor.replica <= last, actor.replica))
            self._last[stage] = chosen.replica
        elif chosen is None:
            chosen = min(replicas, key=lambda actor: self._cost(actor, submit, prefix))
        self._count(stage, chosen.sender, submit.request, self._work_at(chosen.sender, submit, prefix))
        self._remember(chosen.sender, prefix)
        if submit.session:
            self._sessions[submit.key, submit.session, stage] = chosen.sender
            self._sessions.move_to_end((submit.key, submit.session, stage))
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen.peer

    def rebind(self, stage: str, replica: Sender, submit: Submit) -> None:
        """Count a request whose replica is given: a former coordinator chose it, and knew what is cached there."""
        self._count(stage, replica, submit.request, tokens_of(submit))

    def release(self, stage: str, replica: Sender, request: RequestId) -> None:
        """The request ended at this replica of a stage."""
        self._outstanding[replica] -= 1
        self._tokens[replica] -= self._work.pop((request, stage))
        if self._outstanding[replica] <= 0:
            del self._outstanding[replica], self._tokens[replica]

    def forget(self, replica: Sender) -> None:
        """The replica is gone, and its cache with it."""
        self._seen.pop(replica, None)

    def num_cached(self, replica: Sender, prefix: Sequence[int]) -> int:
        """Return how many blocks of a prefix this replica has seen from its beginning on."""
        seen = self._seen.get(replica)
        if seen is None:
            return 0
        return next((i for i, block in enumerate(prefix) if block not in seen), len(prefix))

    def _of_session(self, stage: str, replicas: Sequence[Actor], submit: Submit) -> Actor | None:
        if not submit.session:
            return None
        known = self._sessions.get((submit.key, submit.session, stage))
        return next((actor for actor in replicas if actor.sender == known), None)

    def _cost(self, actor: Actor, submit: Submit, prefix: Sequence[int]) -> tuple[int, int, int]:
        replica = actor.sender
        work = self._tokens[replica] + self._work_at(replica, submit, prefix)
        return work, self._outstanding[replica], actor.replica

    def _work_at(self, replica: Sender, submit: Submit, prefix: Sequence[int]) -> int:
        return max(0, tokens_of(submit) - self.num_cached(replica, prefix) * BLOCK_TOKENS)

    def _count(self, stage: str, replica: Sender, request: RequestId, work: int) -> None:
        self._outstanding[replica] += 1
        self._work[request, stage] = work
        self._tokens[replica] += work

    def _remember(self, replica: Sender, prefix: Sequence[int]) -> None:
        if not prefix:
            return
        seen = self._seen.setdefault(replica, OrderedDict())
        for block in reversed(prefix):  # the beginning, which most prompts share, is forgotten last
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > MAX_REMEMBERED_BLOCKS:
            seen.popitem(last=False)
