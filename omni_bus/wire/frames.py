"""Every frame of the protocol.

A bare word is the class name and the wire tag; an order is an imperative, an outcome a past form. Structs are
array-like MessagePack: a reader ignores unknown trailing fields, so new fields are added at the end with a
default.

Control frames go to and from the coordinator; data frames go straight between the actors of a request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec

from omni_bus.errors import ErrorInfo
from omni_bus.ids import EdgeId, Peer, RequestId
from omni_bus.wire.metrics import Metric
from omni_bus.wire.payloads import Payload

PROTOCOL_VERSION = 1

Role: TypeAlias = Literal["stage", "gateway", "client", "supervisor"]


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Parent of all frames: immutable, positional, tagged with the class name.

    Subclasses inherit all three; they repeat `frozen` because type checkers don't see that.
    """


# --- the vocabulary inside frames ---------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one stage's work on one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """How an edge's stream ended well: ``stop``, ``length`` (a token limit), ``tool_calls`` or an engine's own word.

    `detail` may have ``stop_reason``: the stop string, or the id of the token, that ended the text; and ``metrics``: by
    stage, what this one and those before it did. A stage that reads media may say ``prompt_tokens_details``, of its
    prompt's tokens those of each kind, by OpenAI's names; one that makes sound ``audio_tokens``, what it is made of.
    """

    reason: str = "stop"
    usage: Usage = Usage()
    detail: dict[str, Any] = {}


def token_counts(said: Any) -> dict[str, int]:
    """Return what is a number of tokens, by its name, among what a `Finish` says in its detail."""
    if not isinstance(said, dict):
        return {}
    found = cast("dict[str, Any]", said).items()  # of a frame: its keys are texts
    return {name: count for name, count in found if name.endswith("_tokens") and type(count) is int}


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Whole numbers from `first` on, each `step` above the one before, none above `last`."""

    first: int
    last: int
    step: Annotated[int, msgspec.Meta(ge=1)] = 1

    def nearest(self, value: int) -> int:
        """Return the number of them that is nearest to a value."""
        return max(self.first, min(self._most, self.first + round((value - self.first) / self.step) * self.step))

    def __contains__(self, value: int) -> bool:
        return self.first <= value <= self.last and (value - self.first) % self.step == 0

    def __str__(self) -> str:
        """What is allowed, in words."""
        if self.step == 1:
            return f"{self.first} to {self.last}"
        return f"{self.first}, {self.first + self.step}, … up to {self._most}"

    @property
    def _most(self) -> int:
        return self.first + (self.last - self.first) // self.step * self.step


class RouteEdge(msgspec.Struct, frozen=True, array_like=True):
    """One edge of a request: ``source.source_port -> target.target_port``.

    `source` is a stage or ``in``, `target` a stage or ``out``; the window is what the receiver grants from the
    beginning.
    """

    source: str
    source_port: str
    target: str
    target_port: str
    kind: str
    window_chunks: int
    window_bytes: int


class Route(msgspec.Struct, frozen=True, array_like=True):
    """Where a request goes: one bound replica for each needed stage, and the edges between them."""

    request: RequestId
    pipeline: str
    gateway: Peer
    stages: dict[str, Peer]
    edges: tuple[RouteEdge, ...]
    priority: int = 0
    timeout_s: float | None = None
    trace: str = ""
    key: str = ""
    """Who asked for it, so that a new coordinator knows whose it is."""
    is_retry: bool = False
    """It replaces a route whose replica was lost; there is no third one."""
    wants_metrics: bool = False
    """Each stage's account of the request comes with the ends of its outputs, as ``detail["metrics"]``."""

    def source(self, edge: EdgeId) -> Peer:
        """The actor that sends the chunks of `edge`."""
        return self.stages.get(self.edges[edge].source, self.gateway)

    def target(self, edge: EdgeId) -> Peer:
        """The actor that receives the chunks of `edge`."""
        return self.stages.get(self.edges[edge].target, self.gateway)

    def incoming(self, stage: str) -> list[EdgeId]:
        """Edges that end at `stage` (or at ``out``)."""
        return [i for i, edge in enumerate(self.edges) if edge.target == stage]

    def outgoing(self, stage: str) -> list[EdgeId]:
        """Edges that begin at `stage` (or at ``in``)."""
        return [i for i, edge in enumerate(self.edges) if edge.source == stage]


class StageStats(msgspec.Struct, frozen=True, array_like=True):
    """What a stage reports of itself: requests by state, steps since the start, requests ended by outcome."""

    active: int = 0
    waiting: int = 0
    suspended: int = 0
    steps: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    buffered_bytes: int = 0


class RequestStats(msgspec.Struct, frozen=True, array_like=True):
    """One stage's account of one request: seconds from opening to first output and to the end, chunks, bytes."""

    first_output_s: float = 0.0
    total_s: float = 0.0
    chunks_in: int = 0
    chunks_out: int = 0
    bytes_out: int = 0
    usage: Usage = Usage()


# --- control: membership ------------------------------------------------------------------------------------


class Hello(Frame, frozen=True):
    """I am here. Sent first, and again when asked by `Introduce`; `live` lets a new coordinator rebuild its table.

    `ran_s` says for each of them how long it has run, so that its time limit does not begin anew, and `received` whose
    whole output has come here: such a stage may have left since, and is not missed. `linked` are the actors to whom it
    holds a link; those that are gone it is told of.
    """

    version: int
    peer: Peer
    role: Role
    stage: str = ""
    replica: int = 0
    is_ready: bool = False
    live: tuple[Route, ...] = ()
    ran_s: tuple[float, ...] = ()
    received: tuple[tuple[str, ...], ...] = ()
    linked: tuple[Peer, ...] = ()
    context_length: int | None = None
    """As in `Ready`."""
    level: int = 0
    """At which its engine sleeps, or was told to; 0 is awake."""
    ranges: dict[str, Range] = {}
    """As in `Ready`."""


class Welcome(Frame, frozen=True):
    """You are known; send a `Heartbeat` each `heartbeat_s`.

    Whoever submits requests gets it in answer to each of those too, and so notices a coordinator that is silent. A
    stage's replica also gets it whenever `is_drained` changes: with that it gets no new requests, for it is drained or
    to sleep, and should end soon those that would last for as long as their clients like.

    With `is_new` you were not known, or not any more, until your `Hello` came, and so were told of nobody who was lost
    before that. Say it again if you have made links since you sent it.
    """

    version: int
    coordinator: Peer
    heartbeat_s: float
    is_drained: bool = False
    is_new: bool = False


class Refused(Frame, frozen=True):
    """You can't join: another protocol version, say."""

    error: ErrorInfo


class Introduce(Frame, frozen=True):
    """I do not know you (I am new): say `Hello` again."""


class Progress(Frame, frozen=True):
    """How far a start is: `phase` is a word, `fraction` in [0, 1] within it."""

    phase: str
    fraction: float = 0.0


class Ready(Frame, frozen=True):
    """I can serve, up to so many tokens of prompt and answer together (None: nothing that is counted so)."""

    context_length: int | None = None
    ranges: dict[str, Range] = {}
    """Values that my model takes of parameters, where it takes some only."""


class Heartbeat(Frame, frozen=True):
    """I am alive, this is where I listen, and so many requests (of those in a `Hello`'s `live`) I hold."""

    endpoint: str
    num_live: int = 0


class Stalled(Frame, frozen=True):
    """My loop runs, but my engine has made no progress for so many seconds: give me up.

    From a stage to the coordinator, also in answer to `Introduce`: it says `Hello` no more.
    """

    peer: Peer
    stage: str
    replica: int
    seconds: float


class Goodbye(Frame, frozen=True):
    """I am leaving of my own will; `is_settled`: all that I ever sent has arrived."""

    reason: str = ""
    is_settled: bool = False


class Lost(Frame, frozen=True):
    """This peer is gone: nothing more will come from it, nothing will reach it.

    From the coordinator to all; to the coordinator from a supervisor, which sees a process end at once, and knows
    whether it had seen to it that all that it sent has arrived.
    """

    peer: Peer
    reason: str = ""
    is_settled: bool = False


class Outlook(Frame, frozen=True):
    """What a supervisor knows of a replica that is not on the bus: its phase, why, and in how long to ask again.

    In phase `degraded` it stays away until a person does something; in phase `stopped` nobody misses it.
    """

    actor: str
    stage: str
    replica: int
    phase: str
    reason: str = ""
    retry_after_s: float = 0.0


class Broken(Frame, frozen=True):
    """The connection from `source` to `target` broke while both live: frames that were under way on it may be lost.

    Or none can be made, and frames wait.
    From `source` to the coordinator, which ends what that concerns, tells `target`, and answers with the same once all
    who had to hear of it have: until then `source` repeats it to each coordinator. `number` counts the source's breaks.
    """

    source: Peer
    target: Peer
    number: int = 0


class Ping(Frame, frozen=True):
    """Answer with a `Pong` of the same nonce, and with what the engine measures if that is wanted."""

    nonce: int
    wants_metrics: bool = False


class Pong(Frame, frozen=True):
    """The answer to a `Ping`."""

    nonce: int
    stats: StageStats = StageStats()
    metrics: tuple[Metric, ...] = ()


class Rest(Frame, frozen=True):
    """Have your engine sleep: at level 1 it lets go of accelerator memory only, at 2 of its weights too; 0 wakes it.

    An order to sleep waits until no request is left. Repeated until answered.
    """

    number: int
    level: int


class Rested(Frame, frozen=True):
    """The answer to a `Rest` of that number: it is done, or not for this reason; the engine is at `level` now."""

    number: int
    error: ErrorInfo | None = None
    level: int = 0


# --- control: requests --------------------------------------------------------------------------------------


class Submit(Frame, frozen=True):
    """Please run this: wanted output ports of the pipeline, seconds it may take, who asks (`key`, never a secret).

    Higher priority goes first. `input_bytes` is what the client holds for the request while it waits. Whoever does not
    know whether it was heard repeats it as the next attempt; an answer to a former one does not count.

    What helps to choose replicas: `tokens` that prompt and answer may come to (0: not known); `prefix`, hashes of the
    prompt's beginning (`omni_bus.wire.prefix`); `session`, whose requests stay together.

    `former` is a request of the client's that its stages have let go of before its time: until the coordinator knows of
    that, this one gets its place, whoever else waits.
    """

    request: RequestId
    pipeline: str
    outputs: tuple[str, ...]
    priority: int = 0
    timeout_s: float | None = None
    key: str = ""
    trace: str = ""
    input_bytes: int = 0
    attempt: int = 0
    tokens: int = 0
    prefix: tuple[int, ...] = ()
    session: str = ""
    wants_metrics: bool = False
    """As in `Route`."""
    former: RequestId = ""


class Admit(Frame, frozen=True):
    """Your request may start; this is its route."""

    route: Route
    attempt: int = 0


class Reroute(Frame, frozen=True):
    """A replica of your request is lost (`error`): it goes on as `successor`, whose own `Admit` or `Reject` follows.

    Whoever has output of it already, or not all of its input any more, cancels the successor.
    """

    request: RequestId
    successor: RequestId
    error: ErrorInfo


class Reject(Frame, frozen=True):
    """Your request won't start."""

    request: RequestId
    error: ErrorInfo
    attempt: int = 0


class Cancel(Frame, frozen=True):
    """End this request now: from a gateway to the coordinator, from there to its stages; repeated until answered."""

    request: RequestId
    reason: str = ""


class Cancelled(Frame, frozen=True):
    """The cancel is carried out; `freed` engine slots were given back."""

    request: RequestId
    freed: int = 0


class Inquire(Frame, frozen=True):
    """Do you hold this request? Who does says nothing; else a stage repeats how it ended, a client cancels."""

    request: RequestId


class Unheard(Frame, frozen=True):
    """The answer of a stage to an `Inquire` of a request of which nothing has reached it."""

    request: RequestId


class Done(Frame, frozen=True):
    """A stage finished its part of the request."""

    request: RequestId
    stats: RequestStats = RequestStats()


class Failed(Frame, frozen=True):
    """A stage could not finish (to the coordinator), or the request is over with this error (to the gateway)."""

    request: RequestId
    error: ErrorInfo


# --- control: administration --------------------------------------------------------------------------------


class Admin(Frame, frozen=True):
    """An operation on the deployment; `call` pairs it with its answer."""

    call: int
    op: str
    args: dict[str, Any] = {}


class AdminReply(Frame, frozen=True):
    """The answer: a JSON-like `result`, or an error."""

    call: int
    result: Any = None
    error: ErrorInfo | None = None


# --- data ---------------------------------------------------------------------------------------------------


class Open(Frame, frozen=True):
    """The first frame on an edge. `params` are the parameters of every stage downstream, by stage name."""

    route: Route
    edge: EdgeId
    params: dict[str, dict[str, Any]] = {}


class Chunk(Frame, frozen=True, gc=False):
    """The `seq`-th payload of an edge, from 0."""

    request: RequestId
    edge: EdgeId
    seq: int
    payload: Payload


class Credit(Frame, frozen=True, gc=False):
    """The sender of `edge` may send up to this many chunks and charged bytes in all, counted from the beginning."""

    request: RequestId
    edge: EdgeId
    chunks: int
    bytes: int


class Close(Frame, frozen=True, gc=False):
    """The edge ended after `num_chunks` chunks."""

    request: RequestId
    edge: EdgeId
    num_chunks: int
    finish: Finish = Finish()
    kind: str = ""
    """The edge's payload kind, by which transport keeps the frames of an edge together."""


# --- transport: from one end of a link to the other, unseen by cores ----------------------------------------


class Offer(Frame, frozen=True):
    """I have a shared-memory arena, descriptor `fd` of process `pid`: can you read it? `peer` is where to answer."""

    peer: Peer
    pid: int
    fd: int


class Mapped(Frame, frozen=True):
    """The answer to an `Offer`: I can, or I can't for this reason."""

    reason: str = ""


class OfferDevice(Frame, frozen=True):
    """I have a range of device memory, `data_bytes` long between two stamps: can you map it? `peer` is where to answer.

    `device` is my number for the device, `uuid` everybody's; `handle` and `offset` say where the range begins as CUDA
    and torch do; `pid` is my process, whose remains are removed if it is killed.
    """

    peer: Peer
    device: int
    uuid: str
    handle: bytes
    offset: int
    data_bytes: int
    pid: int


class MappedDevice(Frame, frozen=True):
    """The answer to an `OfferDevice`: I can, in process `pid`, or I can't for this reason."""

    device: int
    reason: str = ""
    pid: int = 0


class Release(Frame, frozen=True):
    """Nobody here views these slots of your arena any more; a generation is named once for each reference to it.

    With a `device` they are blocks of its range, free once the events with the handles `reads` have come.
    """

    generations: tuple[int, ...]
    device: int | None = None
    reads: tuple[bytes, ...] = ()


class Confirm(Frame, frozen=True):
    """Say when you have read this: by then all that I sent before on this way has been delivered.

    `peer` is where to answer; `is_bulk` has it take the way of bulky payloads.
    """

    nonce: int
    peer: Peer
    is_bulk: bool = False


class Confirmed(Frame, frozen=True):
    """The answer to a `Confirm`."""

    nonce: int


ControlFrame: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Introduce
    | Progress
    | Ready
    | Heartbeat
    | Stalled
    | Goodbye
    | Lost
    | Broken
    | Outlook
    | Ping
    | Pong
    | Rest
    | Rested
    | Submit
    | Admit
    | Reroute
    | Reject
    | Cancel
    | Cancelled
    | Inquire
    | Unheard
    | Done
    | Failed
    | Admin
    | AdminReply
)
DataFrame: TypeAlias = Open | Chunk | Credit | Close
TransportFrame: TypeAlias = Offer | Mapped | OfferDevice | MappedDevice | Release | Confirm | Confirmed
AnyFrame: TypeAlias = ControlFrame | DataFrame | TransportFrame

DATA_FRAMES: frozenset[type] = frozenset({Open, Chunk, Credit, Close})
"""What any actor may send to any other; the request's route decides whether it counts."""

STAGE_FRAMES: frozenset[type] = DATA_FRAMES.union(
    (Welcome, Refused, Introduce, Lost, Broken, Ping, Rest, Cancel, Inquire)
)
"""What a stage understands; control frames come from the coordinator only."""

CLIENT_FRAMES: frozenset[type] = (DATA_FRAMES | {Welcome, Refused, Introduce, Lost, Broken, Ping}) | {
    Admit,
    Reroute,
    Reject,
    Failed,
    Cancelled,
    Inquire,
    AdminReply,
}
"""What a gateway or another client understands; control frames come from the coordinator only."""
