"""A stage's process: one replica with its engine, on a socket.

Run by the supervisor as ``python -m actors.stage DEPLOYMENT_JSON STAGE REPLICA``. It says hello before it loads, so
that the load can be followed. SIGTERM ends it; when it is to retire (`omni_bus.runtime.signals`) it has nothing left to
do, and leaves once all that it sent has been delivered.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from adapters import ADAPTERS
from omni_bus.client import BusClient
from omni_bus.config.schema import StageConfig
from omni_bus.core.effects import Abort, Add, Feed, Resume, SetLevel, StageEffect, Stall, Start, Step, Suspend
from omni_bus.core.member import Member, coordinator_peer
from omni_bus.core.resting import Resting
from omni_bus.core.stage import EngineShape, StageCore, stage_failed
from omni_bus.core.watchdog import WATCH
from omni_bus.engine import Context, Engine, EngineRequest, SessionEngine, StepEngine, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError, unknown_name
from omni_bus.registry import ADAPTER_GROUP, load_class
from omni_bus.runtime.driver import Driver
from omni_bus.runtime.engine_host import EngineThread, host_for
from omni_bus.runtime.process import EXIT_CUT, child_main, settle
from omni_bus.runtime.signals import Stop
from omni_bus.wire.frames import (
    STAGE_FRAMES,
    Broken,
    Chunk,
    Credit,
    Introduce,
    Lost,
    Ping,
    Refused,
    Rest,
    StageStats,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from omni_bus.core.effects import TimerKey
    from omni_bus.engine import Event
    from omni_bus.ids import Peer, RequestId, Sender
    from omni_bus.runtime.deployment import Deployment
    from omni_bus.wire.frames import AnyFrame
    from omni_bus.wire.metrics import Metric
    from omni_bus.wire.payloads import Payload

logger = logging.getLogger(__name__)

LINGER_S = 0.2
"""In a drain the coordinator has left before, so the goodbye may have nobody to go to."""

ERRANDS = ".errands"
"""Ends the name under which a stage asks other pipelines for work."""

DELIVER_S = 10.0
"""A peer that has not read its frames within this, once they are sent, is not reading."""

MEASURE_S = 0.5
"""An engine that is in a longer step is not waited for: the coordinator wants an answer within a second."""

CLOSE_S = 2.0
"""An engine gets so long to end its generators and to close; its supervisor waits a little longer."""


class StageActor:
    """One replica on the running loop: hello at construction, requests after `load`."""

    def __init__(self, deployment: Deployment, stage: str, replica: int) -> None:
        config = deployment.config.stages[stage]
        name = f"{stage}.{replica}"
        self._stage = stage
        self._has_left = False
        self.is_settled = True
        """Nothing is known to be missing of what was sent."""
        self._default_params = config.params
        self._loop = asyncio.get_running_loop()
        self._driver = Driver(
            name,
            deployment.listen(name),
            on_frame=self._on_frame,
            on_timer=self._on_timer,
            on_unsent=self._on_unsent,
            arena=deployment.arena,
            cuda=deployment.cuda,
            understands=STAGE_FRAMES,
            on_broken=self._on_broken,
            curve=deployment.curve(),
        )
        self._thread = EngineThread(name)
        threads, cache_dir = deployment.threads[stage], deployment.cache_dir
        context = Context(
            stage,
            replica,
            threads,
            cache_dir,
            self._driver.allocate,
            connect_bus=lambda: connect_bus(deployment, f"{name}{ERRANDS}"),
            pipelines=deployment.pipelines,
        )
        self.engine = build_engine(config, context)
        coordinator = coordinator_peer(deployment.coordinator_endpoint)
        self._core = StageCore(
            stage,
            coordinator,
            shape_of(self.engine),
            parse_params=self._parse_params,
            width=self.engine.max_num_seqs if isinstance(self.engine, StepEngine | StreamingEngine) else 1,
            max_resident=self.engine.max_resident if isinstance(self.engine, StepEngine) else 1,
            max_input_bytes=config.max_input_bytes,
            step_timeout_s=step_timeout_of(self.engine, config.step_timeout_s),
        )
        self._member = Member(
            self._driver.me,
            "stage",
            coordinator,
            stage=stage,
            replica=replica,
            live=lambda: self._core.running,
            stats=lambda: self.stats,
            linked=lambda: self._driver.linked,
            metrics=lambda: self._metrics,
        )
        self._metrics: tuple[Metric, ...] = ()
        """What the engine measured when it was last asked."""
        self._measuring: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._resting = Resting(self._member, lambda: self._core.is_empty)
        self._is_drained = False
        self._restless = ""
        """Why the engine could not sleep or wake when that was last tried."""
        self._may_rest = False
        """There is, or was a moment ago, an order to rest that is not carried out."""
        self._host = host_for(self.engine, self._thread, stage, self)
        logger.info("listening", extra={"fields": self._driver.address})
        self._perform(self._member.start(self._driver.now))

    async def load(self) -> None:
        """Load the engine, telling how far it is; then requests may come.

        Raises:
            OmniBusError: what the engine says to the person who starts the deployment.
        """
        await self._thread.run(lambda: self.engine.load(self._report))
        self._perform(self._member.ready(self.engine.context_length, self.engine.ranges))
        logger.info("phase", extra={"fields": {"phase": "ready", "fraction": 1.0}})

    @property
    def stats(self) -> StageStats:
        """Counts of this replica."""
        stats = self._core.stats
        if isinstance(self.engine, StreamingEngine):  # the core drives the steps of the others, and counts them
            return msgspec.structs.replace(stats, steps=self.engine.num_steps)
        return stats

    @property
    def leaving(self) -> asyncio.Future[OmniBusError]:
        """Done when the coordinator refused this actor."""
        return self._driver.leaving

    async def retire(self) -> None:
        """Say goodbye once nobody can miss this actor any more; it has no request left. Then `close`."""
        self.is_settled = await self._driver.delivered(DELIVER_S)
        self._has_left = True
        self._perform(self._member.goodbye("retired", is_settled=self.is_settled))

    async def close(self) -> None:
        """Say goodbye, end what runs, close the engine and the sockets; an engine that hangs is left behind."""
        if not self._has_left:
            self._perform(self._member.goodbye("stopped"))
        for task in self._answering:
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._host.close()
                await self._thread.run(self.engine.close)
        except TimeoutError:
            logger.warning("the engine hangs and is left behind", extra={"fields": {"after_s": CLOSE_S}})
        except Exception as error:  # the process ends anyway, and in order
            logger.error("the engine could not be closed", exc_info=error)  # noqa: TRY400 (its message may quote a prompt)
        self._thread.stop()
        await self._driver.close(LINGER_S)

    # --- the engine's host listens here -----------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """The engine said something."""
        self._perform(self._core.on_events(events, monotonic()))

    def on_stepped(self) -> None:
        """The next step may begin."""
        self._perform(self._core.on_stepped(monotonic()))

    def on_aborted(self, request: RequestId) -> None:
        """The engine let go."""
        self._perform(self._core.on_aborted(request, self._driver.now))

    def on_taken(self, request: RequestId, port: str, payload: Payload) -> None:
        """The engine took an input."""
        self._perform(self._core.on_taken(request, port, payload, self._driver.now))

    def request(self, request: RequestId) -> EngineRequest:
        """The request as the engine sees it."""
        return self._core.engine_request(request)

    # --- inside -----------------------------------------------------------------------------------------------

    def _on_frame(self, sender: Sender, frame: AnyFrame, now: float) -> None:
        match frame:
            case Chunk() | Credit():
                self._perform(self._core.on_frame(sender, frame, now))
            case Ping(wants_metrics=True) if self._member.is_ready:
                self._in_background(self._answer_measured(frame))
            case Rest():
                self._may_rest = True
                self._perform(self._resting.on_rest(frame))
            case Welcome():
                self._perform(self._member.on_frame(frame, now))
                self._heed_drain()
            case Refused() | Introduce() | Ping() | Lost() | Broken():
                self._perform(self._member.on_frame(frame, now))
            case _:
                self._perform(self._core.on_frame(sender, frame, now))  # pyright: ignore[reportArgumentType] (others are refused there)

    def _in_background(self, answer: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(answer)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _heed_drain(self) -> None:
        """Tell an engine whose requests may last for ever that nothing new comes, or comes again."""
        if self._member.is_drained != self._is_drained and isinstance(self.engine, StreamingEngine):
            self._is_drained = self._member.is_drained
            self.engine.on_drained(is_drained=self._is_drained)

    async def _set_level(self, level: int) -> None:
        """Have the engine sleep or wake."""
        call = (lambda: self.engine.sleep(level)) if level else (lambda: self.engine.wake(self._report))
        error, is_broken = None, False
        try:
            await self._thread.run(call)
        except OmniBusError as refusal:
            error = refusal
            self._log_restless(level, refusal)
        except Exception as failure:  # noqa: BLE001 (logged once for each reason; the process goes on)
            self._log_restless(level, failure)
            error, is_broken = stage_failed(failure, self._stage), True
        else:
            self._metrics, self._restless = (), ""
            logger.info("engine rests" if level else "engine is awake", extra={"fields": {"level": level}})
        self._perform(self._resting.on_level(error, is_broken=is_broken))

    def _log_restless(self, level: int, error: Exception) -> None:
        """Log why the engine could not sleep or wake, unless it has tried before and failed for the same reason."""
        said = f"{level} {type(error).__name__} {error}"
        if said == self._restless:
            return
        self._restless = said
        refusal = error.message if isinstance(error, OmniBusError) else None
        fields = {"level": level} | ({} if refusal is None else {"why": refusal})
        unforeseen = error if refusal is None else None
        logger.warning("the engine could not rest", exc_info=unforeseen, extra={"fields": fields})

    async def _answer_measured(self, ping: Ping) -> None:
        """Answer with what the engine measures, or measured last if it is in the middle of a long step."""
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure())
        await asyncio.wait({self._measuring}, timeout=MEASURE_S)
        self._perform(self._member.on_frame(ping, self._driver.now))

    async def _measure(self) -> None:
        try:
            self._metrics = tuple(await self._thread.run(self.engine.metrics))
        except Exception:  # an engine that can't tell goes on serving
            logger.exception("the engine could not be measured")

    def _on_unsent(self, request: RequestId, error: OmniBusError) -> None:
        self._perform(self._core.on_unsent(request, error, self._driver.now))

    def _on_broken(self, peer: Peer) -> None:
        self._perform(self._member.on_link_broken(peer, self._driver.now))

    def _on_timer(self, key: TimerKey, now: float) -> None:
        self._perform(self._core.on_timer(now) if key == WATCH else self._member.on_timer(now))

    def _perform(self, effects: Sequence[StageEffect | SetLevel]) -> None:
        self._driver.perform(effects, self._perform_engine)
        if self._may_rest and self._core.is_empty:  # the last request may have left
            self._driver.perform(self._resting.go_on(), self._perform_engine)
            self._may_rest = not self._resting.is_idle

    def _perform_engine(self, effect: Start | Add | Feed | Suspend | Resume | Step | Abort | Stall | SetLevel) -> None:
        if isinstance(effect, SetLevel):
            self._in_background(self._set_level(effect.level))
        elif isinstance(effect, Stall):
            self._perform(self._member.stalled(effect.seconds, self._driver.now))
        else:
            self._host.perform(effect)

    def _report(self, phase: str, fraction: float) -> None:
        """Called on the engine's thread while it loads; the line is written at once, in case the load crashes next."""
        logger.info("phase", extra={"fields": {"phase": phase, "fraction": fraction}})
        self._loop.call_soon_threadsafe(self._progress, phase, fraction)

    def _progress(self, phase: str, fraction: float) -> None:
        self._perform(self._member.progress(phase, fraction))

    def _parse_params(self, raw: dict[str, Any]) -> Any:
        kind = type(self.engine).Params
        try:
            return msgspec.convert({**self._default_params, **raw}, kind)
        except msgspec.ValidationError as error:
            unknown = [name for name in raw if name not in kind.__struct_fields__]
            if unknown and "unknown field" in str(error):
                raise unknown_name("parameter", unknown[0], kind.__struct_fields__, field=unknown[0]) from error
            message, _, path = str(error).partition(" - at `$.")
            raise BadInput(f"{path.rstrip('`') or 'parameters'}: {message}", field=path.rstrip("`")) from error


async def connect_bus(deployment: Deployment, name: str) -> BusClient:
    """Join the deployment as a client of a stage's own."""
    return await BusClient.connect(
        name,
        deployment.listen(name),
        deployment.coordinator_endpoint,
        arena=deployment.arena,
        curve=deployment.curve(),
    )


def build_engine(config: StageConfig, context: Context) -> Engine:
    """Return the engine that a stage's configuration names, not yet loaded.

    Raises:
        BadInput: no such adapter, or it can't be imported.
        msgspec.ValidationError: its `Options` doesn't allow these.
    """
    kind: type[Engine] = load_class("adapter", config.adapter, ADAPTERS, ADAPTER_GROUP)
    return kind(msgspec.convert(config.options, kind.Options), context)


def shape_of(engine: Engine) -> EngineShape:
    """Return how an engine is driven."""
    if isinstance(engine, StreamingEngine):
        return EngineShape.STREAMING
    assert isinstance(engine, StepEngine)
    return EngineShape.STEP_FED if engine.is_input_streamed else EngineShape.STEP


def step_timeout_of(engine: Engine, step_timeout_s: float) -> float:
    """Return when an engine counts as stuck; one with a fixed frame period is to wait for that between steps."""
    if step_timeout_s and isinstance(engine, SessionEngine):
        return step_timeout_s + engine.frame_period_s
    return step_timeout_s


async def run(deployment: Deployment, arguments: Sequence[str]) -> int:
    """Load and serve until SIGTERM, or until the coordinator refuses this actor."""
    stop = Stop()
    actor = StageActor(deployment, arguments[0], int(arguments[1]))
    stopping = asyncio.create_task(stop.requested.wait())
    loading = asyncio.create_task(actor.load())
    await asyncio.wait({stopping, loading, actor.leaving}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        settle()
        await asyncio.wait({stopping, actor.leaving}, return_when=asyncio.FIRST_COMPLETED)
    if actor.leaving.done():
        raise actor.leaving.result()
    if loading.done():
        if stop.is_retiring:
            await stop.unless_ordered(actor.retire())
        await actor.close()
    return 0 if actor.is_settled else EXIT_CUT


if __name__ == "__main__":
    child_main("stage", run)
