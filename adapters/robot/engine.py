"""The stage of a robot policy: many connections, each a long request, to one batching policy.

It streams rather than steps, because a batch begins when its window says so, and a missed deadline is told while the
policy still computes. What is decided is decided in `batching`, `chunks` and `safety`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from adapters.handover import on_thread
from adapters.packages import missing
from adapters.robot.batching import Batcher
from adapters.robot.dispatch import Call, Dispatcher
from adapters.robot.messages import Message, error_value, message_of
from adapters.robot.options import RobotOptions, RobotParams, faults_of
from adapters.robot.policy import POLICIES, Observation, Policy
from adapters.robot.robot import Robot
from adapters.robot.safety import check_actions
from adapters.robot.transforms import Transforms
from omni_bus.engine import EngineRequest, Inputs, StreamingEngine
from omni_bus.errors import BadInput, OmniBusError, StageFailed, unknown_name
from omni_bus.wire.metrics import Metric, Sample
from omni_bus.wire.payloads import Record
from omni_bus.wire.records import pack, unpack

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from adapters.robot.dispatch import Answer
    from omni_bus.engine import Context, Report
    from omni_bus.wire.frames import Finish
    from omni_bus.wire.payloads import Payload

logger = logging.getLogger(__name__)

INSTALL = "pip install 'pillow>=11'"


class RobotPolicy(StreamingEngine):
    """Serves a policy. Each connection is a request; what its messages are is in `adapters.robot.messages`."""

    accepts: ClassVar[dict[str, str]] = {"observation": "record"}
    emits: ClassVar[dict[str, str]] = {"actions": "record"}
    Options: ClassVar[type[msgspec.Struct]] = RobotOptions
    Params: ClassVar[type[msgspec.Struct]] = RobotParams
    is_idempotent: ClassVar[bool] = False
    sleep_levels: ClassVar[frozenset[int]] = frozenset({2})

    def __init__(self, options: RobotOptions, context: Context) -> None:
        super().__init__(options, context)
        self.max_num_seqs = options.max_num_seqs
        self._thread: ThreadPoolExecutor
        """On which alone the policy runs."""
        self._pool: ThreadPoolExecutor
        self._policy: Policy | None = None
        self._transforms: Transforms
        self._dispatcher: Dispatcher | None = None
        self._is_drained = False
        self._idle: set[asyncio.Timeout] = set()
        """Of connections that wait for their next message: what ends the wait."""

    @classmethod
    def check(cls, options: RobotOptions) -> list[str]:
        """Return what is wrong with the options, and with the policy's."""
        faults = faults_of(options)
        if any(image.size is not None for image in options.images.values()):
            faults += missing("robot-policy", {INSTALL: ("PIL",)})
        try:
            kind, own = policy_of(options.policy)
        except BadInput as error:
            return [*faults, error.message]
        return faults + [f"policy.{fault}" for fault in kind.check(own)]

    def load(self, report: Report) -> None:
        """Load the policy on the thread that it will run on.

        Raises:
            OmniBusError: it can't be loaded, or the statistics can't be read.
        """
        self._transforms = Transforms(self.options)
        kind, own = policy_of(self.options.policy)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._pool = ThreadPoolExecutor(max(1, self.context.num_threads), thread_name_prefix="transforms")
        self._policy = kind(own, self.context)
        self._thread.submit(self._policy.load, report).result()

    def close(self) -> None:
        """Give the policy and the threads back."""
        policy, self._policy = self._policy, None
        if policy is None:
            return
        self._thread.submit(policy.close).result()
        self._thread.shutdown()
        self._pool.shutdown()
        self._dispatcher = None

    async def aclose(self) -> None:
        """Wait for the batch that runs."""
        if self._dispatcher is not None:
            await self._dispatcher.close()
            self._dispatcher = None

    @property
    def num_steps(self) -> int:
        """Batches since the load."""
        return 0 if self._dispatcher is None else self._dispatcher.counts.batches

    def metrics(self) -> Sequence[Metric]:
        """Return what was done since the load."""
        if self._dispatcher is None:
            return ()
        counts = self._dispatcher.counts
        return tuple(
            Metric(name, "counter", text, (Sample(f"{name}_total", value),))
            for name, text, value in (
                ("omni_bus_policy_batches", "Calls of the policy.", counts.batches),
                ("omni_bus_policy_observations", "Observations in them.", counts.observations),
                ("omni_bus_policy_missed_deadlines", "Observations without an answer in time.", counts.missed),
                ("omni_bus_policy_seconds", "Time within the policy.", counts.policy_s),
            )
        )

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Answer a connection's messages, one by one, until it or the replica is to end.

        Raises:
            BadInput: a message that is none: the gateway's fault, not the robot's.
        """
        dispatcher = self._started()
        robot = Robot(request.id, self.options, deadline_s=_nearer(request.params.deadline_s, self.options.deadline_s))
        try:
            observations = inputs.port("observation")
            while (payload := await self._next(observations)) is not None:
                if not isinstance(payload, Record):
                    raise BadInput("observation: allowed is a record", field="observation")
                received_at = time.monotonic()
                message = message_of(unpack(payload))
                payload = None  # the client's bytes are copied by now: their memory goes back
                if message.kind == "open":
                    welcome = {"metadata": self._metadata(), "deadline_s": robot.deadline_s}
                    yield "actions", pack(welcome, self.context.allocate)
                elif message.kind == "reset":
                    dispatcher.forget(robot.forget_all())
                else:
                    dispatcher.forget(robot.forget(message.forget))
                    yield "actions", pack(await self._answer(robot, message, received_at), self.context.allocate)
                    await dispatcher.until_responsive()
        finally:
            dispatcher.leave(request.id, robot.forget_all())

    def on_drained(self, *, is_drained: bool) -> None:
        """Let connections go between two messages: what was not taken, their gateway sends to another replica."""
        self._is_drained = is_drained
        if is_drained:
            idle, self._idle = self._idle, set()
            for wait in idle:
                wait.reschedule(0.0)

    async def _next(self, observations: AsyncIterator[Payload]) -> Payload | None:
        """Return a connection's next message; None after the last one, or the last that a drained replica takes."""
        wait = asyncio.timeout(0.0 if self._is_drained else None)
        try:
            async with wait:
                self._idle.add(wait)
                return await anext(observations, None)
        except TimeoutError:
            return None
        finally:
            self._idle.discard(wait)

    def _started(self) -> Dispatcher:
        assert self._policy is not None
        if self._dispatcher is None:
            batcher: Batcher[Call] = Batcher(self.options.max_batch_size, self.options.max_batch_wait_s)
            self._dispatcher = Dispatcher(
                self._policy,
                self._thread,
                batcher,
                self.context.stage,
                timeout_s=self.options.policy_timeout_s,
                max_age_s=self.options.max_age_s,
            )
        return self._dispatcher

    def _metadata(self) -> dict[str, Any]:
        assert self._policy is not None
        return {**self._policy.metadata, **self.options.policy_server_config}

    async def _answer(self, robot: Robot, message: Message, received_at: float) -> dict[str, Any]:
        """Return what a robot reads: its actions, or what is wrong; nothing of it ends the connection."""
        try:
            return await self._infer(robot, message, received_at)
        except OmniBusError as error:
            return error_value(error)
        except Exception as error:
            # One robot's odd values must not end its connection, nor be quoted to it with a traceback.
            logger.exception("an observation could not be served", extra={"fields": {"stage": self.context.stage}})
            return error_value(StageFailed(f"the observation could not be served: {type(error).__name__}"))

    async def _infer(self, robot: Robot, message: Message, received_at: float) -> dict[str, Any]:
        policy, dispatcher = self._policy, self._dispatcher
        assert policy is not None
        assert dispatcher is not None
        session = robot.session(message.session, is_first=message.is_first, now=received_at)
        values = message.values
        session.admit(values, time.time())
        prompt = self._transforms.prompt(values)
        step = session.step_of(values, received_at)
        if self._is_light(values):
            values = self._transforms.observation(values)
        else:
            values = await on_thread(self._pool, self._transforms.observation, values)
        observation = Observation(
            session=f"{robot.id}/{message.session}",
            is_first=message.is_first or not session.was_served,
            values=values,
            prompt=prompt,
            seed=message.seed,
            num_inference_steps=message.num_inference_steps,
            previous=self._transforms.previous(session.previous(step)) if policy.takes_previous else None,
        )
        came_at = received_at - message.waited_s
        deadline = None if robot.deadline_s is None else came_at + robot.deadline_s
        answer = await dispatcher.infer(robot.id, observation, came_at=came_at, deadline=deadline)
        actions = self._transforms.actions(answer.actions)
        check_actions(actions, (), ())  # before they are averaged with others, which would hide it
        actions["actions"] = session.smooth(step, actions["actions"], continues=policy.takes_previous)
        check_actions(actions, self.options.action_low, self.options.action_high)
        session.served(step, actions["actions"], time.monotonic() - received_at)
        return {"actions": actions, "timing": _timing(answer) | {"is_first": observation.is_first}}

    def _is_light(self, values: dict[str, Any]) -> bool:
        """Whether the transforms cost less than to have them done on a thread: no picture is resized or converted."""
        return all(
            getattr(values.get(key), "shape", None) in (None, (*(wanted.size or ()), 3))
            and wanted.layout == "hwc"
            and wanted.dtype == "uint8"
            for key, wanted in self.options.images.items()
        )


def policy_of(table: dict[str, Any]) -> tuple[type[Policy], Any]:
    """Return a policy's class and its options.

    Raises:
        BadInput: no such policy, or its options are wrong.
    """
    own = dict(table)
    name = own.pop("name", None)
    if not isinstance(name, str):
        raise BadInput("policy.name: it is missing (allowed: a short name or 'module:Class')", field="policy")
    target = name if ":" in name else POLICIES.get(name)
    if target is None:
        raise unknown_name("policy", name, POLICIES, field="policy")
    module, _, attribute = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # somebody's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"policy.name: '{name}' can't be loaded: {reason}", field="policy") from error
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise BadInput(f"policy.name: '{name}' is no subclass of adapters.robot.policy.Policy", field="policy")
    try:
        return kind, msgspec.convert(own, kind.Options)
    except msgspec.ValidationError as error:
        raise BadInput(f"policy: {error}", field="policy") from error


def _nearer(first: float | None, second: float | None) -> float | None:
    return min((limit for limit in (first, second) if limit is not None), default=None)


def _timing(answer: Answer) -> dict[str, Any]:
    return {
        "queue_ms": answer.queue_s * 1e3,
        "policy_ms": answer.policy_s * 1e3,
        "batch_size": answer.batch_size,
        "num_steps": answer.num_steps,
    }
