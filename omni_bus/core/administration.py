"""Drain, restart and scale as the coordinator sees them: which replicas get nothing new, and who still has work.

The supervisor keeps the `Arrangement`, tells each change of it, and gives a new coordinator the whole of it; so a
drained replica stays drained when the coordinator or the replica itself is restarted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omni_bus.core.absence import ASLEEP, RESTARTING
from omni_bus.core.admission import RETRY_AFTER_S
from omni_bus.core.effects import Common, DropTimer, Send, SetTimer
from omni_bus.errors import BadInput, Unavailable
from omni_bus.wire.frames import AdminReply

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from omni_bus.core.membership import Actor
    from omni_bus.core.pipeline import Pipeline
    from omni_bus.ids import Peer
    from omni_bus.wire.frames import Route

CUT_S = 2.0
"""Stages that were told to let go of a request have done so within this, or the answer says that they have not."""


WAKING = "waking"
"""The phase of a replica that is to serve and has not said that its engine is awake."""


class Arrangement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the deployment's stages are meant to be at the moment."""

    wanted: dict[str, int] = {}
    """Replicas of each stage."""
    drained: frozenset[str] = frozenset()
    """Replicas, as ``llm.0``, that get nothing new; what they work on goes on."""
    returning: frozenset[str] = frozenset()
    """Replicas that are being restarted, or asleep and waited for: where a stage has no other one, its requests wait
    instead of being refused."""
    asleep: dict[str, int] = {}
    """Replicas that get nothing new because their engines sleep, and the level of each."""


class DrainArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of ``drain``: answer once these actors work on nothing, or after the time, or cut what is left."""

    actors: tuple[str, ...]
    timeout_s: float
    is_forced: bool = False


class _Drain(msgspec.Struct):
    """One wait for actors to have nothing left."""

    asker: Peer
    call: int
    args: DrainArgs
    has_cut: bool = False


class Administration:
    """The arrangement, and the waits for actors to have nothing left.

    Args:
        arrangement: as it is when the coordinator starts.
        awaited: replicas that served under a former coordinator and have not said hello to this one.
        clients: all who had requests of a former coordinator, or may have.
    """

    def __init__(self, arrangement: Arrangement, awaited: Iterable[str] = (), clients: Iterable[str] = ()) -> None:
        self._arrangement = arrangement
        self._awaited = set(awaited)
        self._clients = set(clients)
        self._served = frozenset(self._awaited)
        """Replicas to which a former coordinator bound requests of which this one may not have heard."""
        self._drains: dict[str, _Drain] = {}
        self._num_drains = 0

    # --- which replicas may be bound ----------------------------------------------------------------------

    def bindable(self, replicas: Iterable[Actor]) -> list[Actor]:
        """Return the ready replicas that may get new requests."""
        return [actor for actor in replicas if not actor.level and not self.kept(actor.peer.actor)]

    def is_waking(self, replicas: Iterable[Actor]) -> bool:
        """Whether a replica that may be bound once it is awake has yet to say so."""
        return any(actor.level and not self.kept(actor.peer.actor) for actor in replicas)

    def kept(self, replica: str) -> str:
        """Return in a word why a replica gets nothing new; empty for one that does."""
        if replica in self._arrangement.asleep:
            return ASLEEP
        return "drained" if self.is_drained(replica) else ""

    def level(self, replica: str) -> int:
        """Return at which level a replica is to sleep; 0 is awake."""
        return self._arrangement.asleep.get(replica, 0)

    def is_drained(self, replica: str) -> bool:
        """Whether a replica is kept from new requests."""
        return replica in self._arrangement.drained

    def is_returning(self, replica: str) -> bool:
        """Whether a replica is being restarted."""
        return replica in self._arrangement.returning

    def is_awaited(self, stage: str) -> bool:
        """Whether replicas of the stage have yet to say hello to this new coordinator.

        Before that it knows neither where they are nor how much they have to do.
        """
        return any(stage_of(name) == stage for name in self._awaited)

    def is_unsure(self, replica: str) -> bool:
        """Whether a former coordinator may have bound requests to a replica of which this one has not heard.

        The replica's own hello is not enough: what is bound to it and has not reached it is known to the client and to
        the stages before it only. All of them have said hello, or had the time to, before anybody can be sure.
        """
        return replica in self._served

    def is_coming_back(self, stage: str) -> bool:
        """Whether a replica of the stage is being restarted."""
        return any(stage_of(name) == stage for name in self._arrangement.returning)

    @property
    def is_waiting(self) -> bool:
        """Whether anybody is awaited at all."""
        return bool(self._awaited or self._clients)

    def heard_of(self, name: str) -> None:
        """A replica or a client said hello; after the last one, what nobody has told of is bound to nobody."""
        self._awaited.discard(name)
        self._clients.discard(name)
        if not self.is_waiting:
            self._served = frozenset[str]()

    def is_down(self, name: str) -> None:
        """A replica's process is gone, and with it what was bound to it."""
        self._served -= {name}
        self.heard_of(name)

    def give_up(self) -> list[str]:
        """Who has not said hello by now is gone, as far as what it had is concerned; return the clients among them."""
        gone = sorted(self._clients)
        self._awaited.clear()
        self._clients.clear()
        self._served = frozenset[str]()
        return gone

    def arrange(self, args: dict[str, Any]) -> tuple[set[str], set[str]]:
        """Take a new arrangement; return the replicas that are to sleep no longer, and those kept or not as before.

        Raises:
            BadInput: it is malformed.
        """
        former, self._arrangement = self._arrangement, _convert(args, Arrangement, "arrange")
        woken = former.asleep.keys() - self._arrangement.asleep.keys()
        return woken, _all_kept(former) ^ _all_kept(self._arrangement)

    # --- what is told of it -------------------------------------------------------------------------------

    def describe(self, actor: Actor, outstanding: int) -> dict[str, Any]:
        """Return what a row about a stage's replica says beside its own word."""
        if actor.role != "stage":
            return {}
        fields = self.marks(actor.peer.actor, actor.stage)
        kept = self.kept(actor.peer.actor)
        if kept and actor.is_ready and actor.phase == "ready":
            fields["phase"] = "draining" if outstanding else kept
        elif actor.level and not kept:
            fields |= {"is_ready": False, "phase": WAKING if actor.phase == "ready" else actor.phase}
        return fields

    def marks(self, replica: str, stage: str) -> dict[str, Any]:
        """Return what every row about a replica says, whether it is here or not."""
        wanted = self._arrangement.wanted
        return {
            "is_drained": self.is_drained(replica),
            **({"is_asleep": True} if self.level(replica) else {}),
            **({"wanted": wanted[stage]} if stage in wanted else {}),
        }

    def unheard(self, known: Container[str]) -> list[dict[str, Any]]:
        """Return a row for each wanted replica of which nothing was heard."""
        return [
            {
                "actor": f"{stage}.{replica}",
                "role": "stage",
                "stage": stage,
                "replica": replica,
                "phase": RESTARTING if self.is_returning(f"{stage}.{replica}") else "down",
                "fraction": 0.0,
                "is_ready": False,
                "is_live": False,
                "elapsed_s": None,
            }
            for stage, wanted in self._arrangement.wanted.items()
            for replica in range(wanted)
            if f"{stage}.{replica}" not in known
        ]

    # --- waiting for actors to have nothing left ----------------------------------------------------------

    def drain(self, asker: Peer, call: int, args: dict[str, Any], now: float) -> list[Common]:
        """Begin a wait; `settled` ends it.

        Raises:
            BadInput: the arguments are malformed.
        """
        wanted = _convert(args, DrainArgs, "drain")
        if not 0 <= wanted.timeout_s < float("inf"):
            raise BadInput(f"timeout_s: {wanted.timeout_s} came (allowed: seconds, at least 0)", field="timeout_s")
        self._num_drains += 1
        self._drains[str(self._num_drains)] = _Drain(asker, call, wanted)
        return [SetTimer(("drain", str(self._num_drains)), now + wanted.timeout_s)]

    def settled(self, outstanding: Callable[[str], int]) -> list[Common]:
        """Answer the waits that are over; cheap where there are none.

        Args:
            outstanding: requests that an actor takes part in, by its name.
        """
        effects: list[Common] = []
        for number, drain in list(self._drains.items()):
            if not any(outstanding(name) for name in drain.args.actors):
                effects += self._answer(number, {})
        return effects

    def on_timer(self, number: str, outstanding: Callable[[str], int], now: float) -> tuple[list[Common], list[str]]:
        """A wait's time is over: answer with what is left, or say whose requests must be cut for it to end."""
        drain = self._drains.get(number)
        if drain is None:
            return [], []
        left = {name: count for name in drain.args.actors if (count := outstanding(name))}
        if drain.args.is_forced and not drain.has_cut and left:
            drain.has_cut = True
            return [SetTimer(("drain", number), now + CUT_S)], list(left)
        return self._answer(number, left), []

    def forget(self, asker: Peer) -> list[Common]:
        """Whoever waited is gone."""
        numbers = [number for number, drain in self._drains.items() if drain.asker == asker]
        for number in numbers:
            del self._drains[number]
        return [DropTimer(("drain", number)) for number in numbers]

    def _answer(self, number: str, left: dict[str, int]) -> list[Common]:
        drain = self._drains.pop(number)
        result = {"outstanding": left, "has_cut": drain.has_cut}
        return [DropTimer(("drain", number)), Send(drain.asker, AdminReply(drain.call, result))]


def _all_kept(arrangement: Arrangement) -> set[str]:
    return {*arrangement.drained, *arrangement.asleep}


def returning(restarting: Iterable[str], asleep: Iterable[str], is_waited_for: Callable[[str], bool]) -> frozenset[str]:
    """Return an arrangement's `returning`.

    Args:
        restarting: replicas that orders to restart are at work on, asleep or not.
        asleep: replicas that sleep.
        is_waited_for: whether requests wait for a stage that sleeps.
    """
    return frozenset({*restarting, *(name for name in asleep if is_waited_for(stage_of(name)))})


def stage_of(replica: str) -> str:
    """Return the stage of a replica's name: ``llm`` of ``llm.0``."""
    return replica.rpartition(".")[0]


def error_for_cut(name: str, route: Route | None, pipeline: Pipeline) -> Unavailable:
    """Return the error of a request that ends because an actor is taken out of service before it is done.

    A retry is safe where none of the request's stages does work that must not be repeated.
    """
    stages = () if route is None else route.stages
    return Unavailable(
        f"'{name}' is taken out of service, and the time for what it works on is over",
        stage=stage_of(name) if stage_of(name) in stages else "",
        is_retry_safe=not pipeline.non_idempotent.intersection(stages),
        retry_after_s=RETRY_AFTER_S,
    )


def _convert(args: dict[str, Any], kind: Any, op: str) -> Any:
    try:
        return msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"operation '{op}': {error}", field="args") from error
