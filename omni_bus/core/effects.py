"""What a core may ask of the loop around it. Each effect is named by what the outside must do.

Effects, payloads and frames that each chunk makes have ``gc=False``: none can be part of a cycle, and the garbage
collector's work would otherwise grow with the number of live requests.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from omni_bus.errors import OmniBusError
from omni_bus.ids import Peer, RequestId
from omni_bus.wire.frames import AnyFrame, Finish, Route
from omni_bus.wire.payloads import Payload

TimerKey: TypeAlias = tuple[str, str]
"""What the timer is for, and of whom: ``("deadline", request)``. Setting a key again replaces it."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a frame to a peer."""

    peer: Peer
    frame: AnyFrame


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Call `on_timer(key)` at the monotonic second `at`."""

    key: TimerKey
    at: float


class DropTimer(msgspec.Struct, frozen=True, gc=False):
    """Forget a timer; unknown keys are ignored."""

    key: TimerKey


class Forget(msgspec.Struct, frozen=True):
    """Close the lane to a peer that is gone; what was queued for it is worthless."""

    peer: Peer


class SetLevel(msgspec.Struct, frozen=True):
    """Have the engine sleep at a level, or wake with 0; then call `Resting.on_level`."""

    level: int


class Report(msgspec.Struct, frozen=True):
    """Write one line to the log."""

    event: str
    fields: dict[str, Any]


class Leave(msgspec.Struct, frozen=True):
    """End this actor's process: it can't take part."""

    error: OmniBusError


Common: TypeAlias = Send | SetTimer | DropTimer | Forget | Report | Leave
"""Effects that every core has."""


# --- a stage to its engine ----------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, gc=False):
    """Begin a request on a streaming engine; `Feed` brings its input."""

    request: RequestId


class Add(msgspec.Struct, frozen=True):
    """Hand a request to a step engine, with the input that there is."""

    request: RequestId
    inputs: dict[str, list[Payload]]


class Feed(msgspec.Struct, frozen=True, gc=False):
    """Bring more input for one port; with `is_last` the port has ended."""

    request: RequestId
    port: str
    payloads: tuple[Payload, ...]
    is_last: bool


class Suspend(msgspec.Struct, frozen=True, gc=False):
    """Do not advance this request's generator."""

    request: RequestId


class Resume(msgspec.Struct, frozen=True, gc=False):
    """Advance it again."""

    request: RequestId


class Step(msgspec.Struct, frozen=True, gc=False):
    """Run one engine step over these requests, then call `on_stepped`."""

    requests: tuple[RequestId, ...]


class Abort(msgspec.Struct, frozen=True, gc=False):
    """Free all that the engine holds of this request, then call `on_aborted`."""

    request: RequestId


class Stall(msgspec.Struct, frozen=True):
    """Give this actor up (`Member.stalled`): its engine has made no progress for so long."""

    seconds: float


StageEffect: TypeAlias = Common | Start | Add | Feed | Suspend | Resume | Step | Abort | Stall


# --- a client core to its application -----------------------------------------------------------------------


class Admitted(msgspec.Struct, frozen=True):
    """The request runs; input may be sent. Comes again, with another route, if a replica is lost before any output."""

    request: RequestId
    route: Route


class Writable(msgspec.Struct, frozen=True, gc=False):
    """An input port that was out of credit can take more."""

    request: RequestId
    port: str


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """A payload came out; the application calls `consume` when it is done with it."""

    request: RequestId
    port: str
    payload: Payload


class PortEnded(msgspec.Struct, frozen=True, gc=False):
    """An output port is complete."""

    request: RequestId
    port: str
    finish: Finish


class Ended(msgspec.Struct, frozen=True):
    """The request is over: well without an error. Nothing follows."""

    request: RequestId
    error: OmniBusError | None


class Answered(msgspec.Struct, frozen=True):
    """An admin call has its answer."""

    call: int
    result: Any
    error: OmniBusError | None


ClientEffect: TypeAlias = Common | Admitted | Writable | Deliver | PortEnded | Ended | Answered
