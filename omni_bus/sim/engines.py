"""Scripted engines of every shape: they check what they are given, emit numbered chunks, fail, hang and dawdle."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from omni_bus.core.effects import Abort, Add, Feed, Resume, SetLevel, Start, Step, Suspend
from omni_bus.core.stage import EngineShape
from omni_bus.engine import Event, Failure, Finished, Output, Starved
from omni_bus.errors import BadInput, StageFailed
from omni_bus.sim.ledger import Violation

if TYPE_CHECKING:
    from omni_bus.ids import RequestId
    from omni_bus.sim.processes import StageProcess
    from omni_bus.wire.payloads import Payload

EngineEffect = Start | Add | Feed | Suspend | Resume | Step | Abort

MAX_OUTPUTS_PER_STEP = 2
"""Per request; what may wait for credit in a stage after the step in which credit ran out."""


class _Script:
    """What one request does in an engine."""

    def __init__(self, engine: ScriptedEngine, request: RequestId) -> None:
        stage = engine.process
        wanted = stage.core.engine_request(request)
        self.request = request
        self.ports = sorted(wanted.outputs)
        self.waiting: dict[str, deque[Payload]] = {}
        self.open_ports = set(stage.in_ports(request))
        self.budget = engine.rng.choice((0, 1, 2, 3))
        self.fails_after = engine.rng.randrange(4) if engine.rng.random() < engine.failure_rate else None
        self.stops_early = engine.rng.random() < 0.08
        self.is_suspended = False
        self.is_idle = True

    @property
    def has_input(self) -> bool:
        return any(self.waiting.values())


class ScriptedEngine:
    """Runs the orders of one `StageCore` in order, like an engine thread, and reports back through it.

    Orders that come during a step wait for its end. A streaming engine has no steps: each request goes on by itself.
    """

    def __init__(self, process: StageProcess) -> None:
        self.process = process
        self.world = process.world
        self.rng = process.world.rng
        self.failure_rate = process.world.scenario.failure_rate
        self.is_hung = False
        self._scripts: dict[RequestId, _Script] = {}
        self._orders: deque[EngineEffect] = deque()
        self._is_stepping = False
        self._refused: set[RequestId] = set()
        self.level = 0
        """At which it sleeps; 0 is awake."""
        self._is_resting = False
        self._aborting: set[RequestId] = set()
        """Requests of a streaming engine whose generators have yet to end."""

    @property
    def num_held(self) -> int:
        """Requests that hold something here."""
        return len(self._scripts)

    def set_level(self, order: SetLevel) -> None:
        """Begin to sleep or to wake, which takes a while and may fail.

        Raises:
            Violation: it holds something, or is told what it does already.
        """
        held = {*self._scripts, *self._aborting}
        if held or self._is_resting or bool(order.level) == bool(self.level):
            raise Violation(f"{self.process.name} at level {self.level} gets {order}, holds {held}")
        self._is_resting = True
        self.world.after(self.rng.expovariate(0.2 / self.world.scenario.step_s), self._end_resting, order.level)

    def _end_resting(self, level: int) -> None:
        if not self.process.is_alive or self.is_hung:
            return
        self._is_resting = False
        fails = self.rng.random() < self.failure_rate
        if not fails:
            self.level = level
        error = BadInput("scripted failure to rest", field="level") if fails else None
        self.process.carry(self.process.resting.on_level(error))

    def _check_awake(self, effect: EngineEffect) -> None:
        is_work = isinstance(effect, Add | Start | Feed) or (isinstance(effect, Step) and effect.requests)
        if is_work and (self.level or self._is_resting):
            raise Violation(f"{self.process.name} at level {self.level} gets {effect}")

    def order(self, effect: EngineEffect) -> None:
        """Take an order of the core.

        Raises:
            Violation: it is work, and the engine sleeps or is on its way.
        """
        self._check_awake(effect)
        if self.process.plan.shape is EngineShape.STREAMING:
            self._order_streaming(effect)
            return
        self._orders.append(effect)
        if len(self._orders) == 1 and not self._is_stepping:
            self.world.after(0.0, self._run_orders)

    # --- step engines -------------------------------------------------------------------------------------

    def _run_orders(self) -> None:
        while self._orders and not self._is_stepping and self.process.is_alive and not self.is_hung:
            effect = self._orders.popleft()
            if isinstance(effect, Step):
                self._is_stepping = True
                duration = self.rng.expovariate(1 / self.world.scenario.step_s)
                self.world.after(duration, self._end_step, effect.requests)
            elif isinstance(effect, Abort):
                self._scripts.pop(effect.request, None)
                self.process.carry(self.process.core.on_aborted(effect.request, self.world.now))
                self.process.check(effect.request)
            elif isinstance(effect, Add):
                self._add(effect)
            elif isinstance(effect, Feed):
                self._feed(effect)

    def _add(self, effect: Add) -> None:
        request = effect.request
        script = self._scripts[request] = _Script(self, request)
        if len(self._scripts) > self.process.core_max_resident:
            raise Violation(f"{self.process.name} holds {len(self._scripts)} requests, more than it may")
        if self.process.plan.shape is EngineShape.STEP:
            for port in script.open_ports:
                for payload in effect.inputs.get(port, ()):
                    self.process.receive(request, port, payload)
                self.process.receive_end(request, port)
            script.open_ports.clear()
        if self.rng.random() * 4 < self.failure_rate:
            self._refused.add(request)
            self.process.carry(self.process.core.on_events([self._fail(script)], self.world.now))
            self.process.check(request)

    def _feed(self, effect: Feed) -> None:
        script = self._scripts.get(effect.request)
        if script is None:
            return
        for payload in effect.payloads:
            self.process.receive(effect.request, effect.port, payload)
        script.waiting.setdefault(effect.port, deque()).extend(effect.payloads)
        if effect.is_last:
            self.process.receive_end(effect.request, effect.port)
            script.open_ports.discard(effect.port)

    def _end_step(self, requests: tuple[RequestId, ...]) -> None:
        if not self.process.is_alive or self.is_hung:
            return
        # A step that was ordered together with an `Add` names its request even if that was refused.
        requests = tuple(request for request in requests if request not in self._refused)
        if len(requests) > self.process.plan.width or not self._scripts.keys() >= set(requests):
            raise Violation(f"{self.process.name} was told to step {requests}, it holds {tuple(self._scripts)}")
        events: list[Event] = []
        for request in requests:
            events += self._advance(self._scripts[request])
        self._is_stepping = False
        process = self.process
        process.carry(process.core.on_events(events, self.world.now))
        process.carry(process.core.on_stepped(self.world.now))
        for request in requests:
            process.check(request)
        if self._orders:
            self.world.after(0.0, self._run_orders)

    def _advance(self, script: _Script) -> list[Event]:
        """One unit of work of one request."""
        if self._fails(script):
            return [self._fail(script)]
        if script.open_ports and not script.has_input and not script.stops_early:
            return [Starved(script.request)]
        for queue in script.waiting.values():
            if queue:
                queue.popleft()
                script.budget += self.rng.choice((0, 1, 1))
        events: list[Event] = []
        for _ in range(self.rng.randrange(MAX_OUTPUTS_PER_STEP + 1)):
            if script.budget > 0 and script.ports:
                script.budget -= 1
                events.append(self._emit(script))
        is_over = not script.open_ports and not script.has_input and script.budget <= 0
        if is_over or (script.stops_early and script.budget <= 0):
            events.append(self._finish(script))
        return events

    def _fails(self, script: _Script) -> bool:
        if script.fails_after is None:
            return False
        script.fails_after -= 1
        return script.fails_after < 0

    def _fail(self, script: _Script) -> Event:
        del self._scripts[script.request]
        return Failure(script.request, StageFailed("scripted failure"))

    def _emit(self, script: _Script) -> Event:
        port = self.rng.choice(script.ports)
        return Output(script.request, port, self.world.ledger.emit(script.request, f"{self.process.stage}.{port}"))

    def _finish(self, script: _Script) -> Event:
        del self._scripts[script.request]
        for port in script.ports:
            self.world.ledger.finish(script.request, f"{self.process.stage}.{port}")
        return Finished(script.request)

    # --- streaming engines --------------------------------------------------------------------------------

    def _order_streaming(self, effect: EngineEffect) -> None:
        request = effect.request if not isinstance(effect, Step | Add) else ""
        if isinstance(effect, Start):
            script = self._scripts[request] = _Script(self, request)
            if len(self._scripts) > self.process.core_max_resident:
                raise Violation(f"{self.process.name} runs {len(self._scripts)} requests, more than it may")
            self._wake(script)
            return
        script = self._scripts.get(request)
        if isinstance(effect, Abort):
            self._scripts.pop(request, None)
            self._aborting.add(request)
            self.world.after(self.rng.expovariate(1 / self.world.scenario.step_s), self._end_abort, request)
        elif script is None:
            return
        elif isinstance(effect, Feed):
            script.waiting.setdefault(effect.port, deque()).extend(effect.payloads)
            if effect.is_last:
                script.open_ports.discard(effect.port)
            self._wake(script)
        elif isinstance(effect, Suspend):
            script.is_suspended = True
        elif isinstance(effect, Resume):
            script.is_suspended = False
            self._wake(script)

    def _end_abort(self, request: RequestId) -> None:
        if self.process.is_alive and not self.is_hung:
            self._aborting.discard(request)
            self.process.carry(self.process.core.on_aborted(request, self.world.now))
            self.process.check(request)

    def _wake(self, script: _Script) -> None:
        if script.is_idle:
            script.is_idle = False
            self.world.after(self.rng.expovariate(1 / self.world.scenario.step_s), self._go_on, script)

    def _go_on(self, script: _Script) -> None:
        """Advance a generator to its next yield, or take an input, or let it wait."""
        process, request = self.process, script.request
        if not process.is_alive or self.is_hung or self._scripts.get(request) is not script:
            return
        script.is_idle = True
        if script.is_suspended:
            return
        events: list[Event] = []
        if self._fails(script):
            events.append(self._fail(script))
        elif script.budget > 0 and script.ports and self.rng.random() < 0.7:
            script.budget -= 1
            events.append(self._emit(script))
        elif script.stops_early and script.budget <= 0:
            events.append(self._finish(script))
        elif script.has_input:
            self._take(script)
        elif not script.open_ports and (script.budget <= 0 or not script.ports):
            for port in process.in_ports(request):
                process.receive_end(request, port)
            events.append(self._finish(script))
        elif script.budget <= 0:
            return
        if events:
            process.carry(process.core.on_events(events, self.world.now))
        process.check(request)
        if request in self._scripts:
            self._wake(script)

    def _take(self, script: _Script) -> None:
        port = self.rng.choice([port for port, queue in script.waiting.items() if queue])
        payload = script.waiting[port].popleft()
        self.process.receive(script.request, port, payload)
        script.budget += self.rng.choice((0, 1, 1, 2))
        self.process.carry(self.process.core.on_taken(script.request, port, payload, self.world.now))
