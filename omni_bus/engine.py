"""What an adapter implements: the three engine shapes, and the values that cross between a stage and its engine.

An adapter is one class. It names its ports and their payload kinds, a Struct of options (its keys in the TOML) and a
Struct of parameters (what one request may set). Heavy imports happen in `load`, which runs inside the stage process
only. Which shape:

- `StreamingEngine`: an async generator from inputs to outputs; for stages that handle each request on its own.
- `StepEngine`: add, step, abort; the stage's scheduler decides which requests run in each step.
- `SessionEngine`: state per session, stepped at a fixed period; for duplex models and robot policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from omni_bus.errors import BadInput, Unavailable
from omni_bus.ids import RequestId
from omni_bus.wire.frames import Finish, Range
from omni_bus.wire.payloads import Blob, Payload, ordinary_memory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from omni_bus.errors import OmniBusError
    from omni_bus.wire.metrics import Metric

Report: TypeAlias = Callable[[str, float], None]
"""Says how far a load is: a phase in a word, and a fraction in [0, 1] within it."""

Allocate: TypeAlias = Callable[[int], Blob]

ConnectBus: TypeAlias = Callable[[], Awaitable[Any]]
"""Joins the deployment once more, as a client; returns an `omni_bus.client.BusClient`."""


async def no_bus() -> Any:
    """Stand in where there is no deployment.

    Raises:
        Unavailable: always.
    """
    raise Unavailable("this engine runs without a deployment")


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For adapters without options or parameters."""


class Context(msgspec.Struct, frozen=True):
    """What a stage process tells its engine: its name, its share of the cores, where caches may be kept."""

    stage: str
    replica: int
    num_threads: int
    cache_dir: str
    allocate: Allocate = ordinary_memory
    """Returns writable memory for a payload of so many bytes, from any thread.

    Large payloads that are made in it reach stages and clients of the same host without a copy. Write `Blob.view`, or
    an array over all of it, then emit the payload with that `Blob`; to several ports if need be. From then on nobody
    may write there: readers see the same memory. What the memory holds at first is undefined. It is taken back when no
    view of it is left, sent or not, so an engine has nothing to give back when a request is cancelled.
    """
    connect_bus: ConnectBus = no_bus
    """For a stage that asks other pipelines of the deployment for work; call it on the stage's loop, and close the
    client in `StreamingEngine.aclose`."""
    pipelines: Mapping[str, Any] = {}
    """All of the deployment, by name, each an `omni_bus.core.pipeline.Pipeline`."""


class EngineRequest(msgspec.Struct, frozen=True):
    """One request as the engine sees it: parameters of the adapter's own type, and the output ports that are wanted."""

    id: RequestId
    params: Any
    outputs: frozenset[str]
    priority: int = 0
    deadline: float | None = None
    inputs: frozenset[str] = frozenset()
    """Input ports that the pipeline feeds; the others, which are optional ones, have ended before they begin."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """A payload for one of the stage's output ports."""

    request: RequestId
    port: str
    payload: Payload


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The request is complete; the engine holds nothing of it any more."""

    request: RequestId
    finish: Finish = Finish()


class Starved(msgspec.Struct, frozen=True, gc=False):
    """The request has nothing to do before more input comes (step engines that stream their input)."""

    request: RequestId


class Failure(msgspec.Struct, frozen=True):
    """The request can't be completed; the engine holds nothing of it any more. Others go on."""

    request: RequestId
    error: OmniBusError


Event: TypeAlias = Output | Finished | Starved | Failure


class Memory(msgspec.Struct, frozen=True):
    """What one replica takes, in bytes."""

    device: str
    """``cpu``, ``cuda:N``, ``cuda``, or ``auto``: the first accelerator, the host where there is none."""
    weights: int
    cache: int = 0
    """Keys and values of all requests that it may hold, when all are as long as they may be."""
    activations: int = 0
    """What one step takes in between; an estimate."""


class Engine(ABC):
    """What all shapes share."""

    accepts: ClassVar[dict[str, str]]
    """Input ports and the payload kind of each."""

    optional_inputs: ClassVar[frozenset[str]] = frozenset()
    """Input ports that a pipeline may leave without an edge; the others must be fed."""

    emits: ClassVar[dict[str, str]]
    """Output ports and the payload kind of each."""

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """The adapter's own keys of a ``[stages.NAME]`` table."""

    Params: ClassVar[type[msgspec.Struct]] = NoOptions
    """What one request may set; validated before `add`, `run` or `open` sees it."""

    is_idempotent: ClassVar[bool] = True
    """Whether a request that has emitted nothing may be run again elsewhere."""

    sleep_levels: ClassVar[frozenset[int]] = frozenset()
    """Levels of `sleep` that the adapter knows. With 2 and no `sleep` of its own, `load` must be possible after
    `unload`, and so must `close`."""

    context_length: int | None = None
    """Tokens of prompt and answer together, set by `load`; None where there is no such limit."""

    ranges: Mapping[str, Range] = MappingProxyType({})
    """Whole numbers that the loaded model takes of parameters, where these are fewer than `Params` says, set by `load`.

    Gateways refuse others at once. The engine refuses them too: a request may come before a gateway knows.
    """

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @classmethod
    @abstractmethod
    def num_slots(cls, options: Any) -> int:
        """Return the requests that one replica with these options can hold at once."""

    @classmethod
    def check(cls, options: Any) -> list[str]:
        """Return every reason why these options can't work, found without loading anything (a missing file, say).

        One that begins with a key and a colon, as in ``model: there is no file x``, is shown where that key is set.
        """
        del options
        return []

    @classmethod
    def voices(cls, options: Any) -> tuple[str, ...]:
        """Return the values that the parameter `voice` may have with these options, found without loading anything.

        Asked only with options that `check` finds no fault with.
        """
        del options
        return ()

    @classmethod
    def memory(cls, options: Any, *, has_accelerator: bool) -> Memory | None:
        """Return what a replica with these options takes, found without loading anything; None if nobody knows.

        Asked only with options that `check` finds no fault with.
        """
        del options, has_accelerator
        return None

    @abstractmethod
    def load(self, report: Report) -> None:
        """Load weights and warm up; blocks, runs on the engine's thread.

        Raises:
            OmniBusError: with a message for the person who starts the deployment.
        """

    def metrics(self) -> Sequence[Metric]:
        """Return what the engine measures of itself, by default nothing.

        Called on the engine's thread between two of its calls, when somebody asks. Names that a library gives its own
        measures are kept; labels for the stage and its replica are added later.
        """
        return ()

    def sleep(self, level: int) -> None:
        """Give memory back until `wake`; called with no request left. Unloads the engine by default.

        Args:
            level: 1 gives accelerator memory back and keeps the weights elsewhere; 2 keeps nothing.

        Raises:
            OmniBusError: the engine can't sleep so; it is as before. After anything else that is raised it is woken.
        """
        if level not in self.sleep_levels:
            levels = ", ".join(map(str, sorted(self.sleep_levels)))
            allowed = levels or f"none, stage '{self.context.stage}' can't sleep"
            raise BadInput(f"level: {level} came (allowed: {allowed})", field="level")
        self.unload()

    def unload(self) -> None:
        """Give back what `load` took, and be ready to be loaded again; closes the engine by default."""
        self.close()

    def wake(self, report: Report) -> None:
        """Be ready again after `sleep`; loads the engine again by default.

        Raises:
            OmniBusError: it can't; it sleeps on, and this may be tried again.
        """
        self.load(report)

    def close(self) -> None:
        """Give everything back, with no request left; called at the end, and by the default `unload`."""


class Inputs(ABC):
    """The inputs of one request on a `StreamingEngine`; taking a payload gives its credit back to the sender."""

    @abstractmethod
    def port(self, name: str) -> AsyncIterator[Payload]:
        """Iterate over one input port's payloads as they come, to its end."""


class StreamingEngine(Engine):
    """Each request is an async generator on the stage's loop.

    The generator is not advanced while the request has no credit, and is closed (`GeneratorExit`, `CancelledError`)
    when it is cancelled. Work that blocks belongs on a thread.
    """

    max_num_seqs: int = 8
    """Requests that run at once; others wait in the stage."""

    @classmethod
    def num_slots(cls, options: Any) -> int:
        """Return the requests that one replica with these options can hold at once."""
        return getattr(options, "max_num_seqs", cls.max_num_seqs)

    @property
    def num_steps(self) -> int:
        """Units of work done since the load, for ``status`` and ``/health``; 0 if the engine does not count any."""
        return 0

    @abstractmethod
    def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Yield (port, payload) pairs; a `Finish`, if any, comes last.

        Raises:
            OmniBusError: ends this request; any other exception does too, as `StageFailed`.
        """

    def on_drained(self, *, is_drained: bool) -> None:
        """The replica gets no new requests from now on, or gets them again; called on the stage's loop.

        Whoever serves requests that last for as long as their clients like ends them as soon as their protocol lets
        it, and tells the clients why. Others need do nothing, as by default.
        """
        del is_drained

    async def aclose(self) -> None:
        """Give back what belongs to the stage's loop (connections); called on it before `close`, with none left."""


class StepEngine(Engine):
    """Continuously batched: `step` advances a set of requests by one unit of work (a token, a denoising step).

    All methods run on one thread, never at once.
    """

    max_num_seqs: int = 8
    """Requests in one step."""

    max_resident: int = 32
    """Requests that may hold engine memory at once, suspended ones included."""

    @classmethod
    def num_slots(cls, options: Any) -> int:
        """Return the requests that one replica with these options can hold at once."""
        width = getattr(options, "max_num_seqs", cls.max_num_seqs)
        return max(width, getattr(options, "max_resident", cls.max_resident))

    is_input_streamed: ClassVar[bool] = False
    """False: a request is added when its input is complete. True: it is added at once and `feed` brings the rest."""

    @abstractmethod
    def add(self, request: EngineRequest, inputs: dict[str, list[Payload]]) -> None:
        """Take a request; it runs when a `step` names it.

        Raises:
            OmniBusError: the request is refused; nothing of it is held.
        """

    def feed(self, request: RequestId, port: str, payloads: Sequence[Payload], *, is_last: bool) -> None:
        """Bring more input (only with `is_input_streamed`).

        Raises:
            OmniBusError: the input is refused; the request is aborted and fails, others go on.
        """
        raise NotImplementedError(f"{type(self).__name__} does not stream its input: {request}, {port}")

    @abstractmethod
    def step(self, requests: Sequence[RequestId]) -> Sequence[Event]:
        """Advance these requests by one unit; others keep their state.

        An exception fails all of `requests` as `StageFailed`, and they are aborted.
        """

    @abstractmethod
    def abort(self, request: RequestId) -> None:
        """Drop a request and free all that it holds; unknown ids are ignored."""

    def run_ahead(self) -> None:
        """Do what the next `step` would do for the requests of the last one, while the stage deals with its events.

        Called on the engine's thread after a step when nothing else waits there. What comes of it is kept for the
        `step` that names its request, so nobody is more than one step ahead of its credit. By default nothing is done.
        """


class SessionEngine(StepEngine):
    """A step engine whose steps happen at a fixed period while sessions are open, whatever input has come."""

    is_input_streamed: ClassVar[bool] = True

    frame_period_s: float = 0.08
    """Seconds from one step to the next; 0 steps as soon as there is input."""

    def truncate(self, session: RequestId, port: str, position: int) -> None:
        """Forget what `port` said after `position` (its unit is the port's: samples, tokens): it was never heard."""
        raise NotImplementedError(f"{type(self).__name__} can't truncate: {session}, {port}, {position}")
