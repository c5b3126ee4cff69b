"""What sits on a gateway: submits the planned requests, sends input, reads output at its own pace, may give up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.effects import Admitted, Answered, Deliver, Ended, PortEnded, Writable
from omni_bus.core.pipeline import IN, OUT
from omni_bus.core.recovery import needed_stages
from omni_bus.errors import StageLost, Unavailable
from omni_bus.sim.ledger import Violation
from omni_bus.sim.scenario import sources
from omni_bus.wire.frames import Submit

if TYPE_CHECKING:
    from omni_bus.core.effects import ClientEffect
    from omni_bus.errors import OmniBusError
    from omni_bus.ids import RequestId
    from omni_bus.sim.processes import GatewayProcess
    from omni_bus.sim.scenario import RequestPlan
    from omni_bus.wire.frames import Route
    from omni_bus.wire.payloads import Payload

READ_S = {"fast": 0.0005, "slow": 0.4}
"""Mean time that a reader needs for a payload; a stuck one never takes any."""


class _Run:
    """One request under way."""

    def __init__(self, plan: RequestPlan, *, may_be_refused: bool) -> None:
        self.plan = plan
        self.may_be_refused = may_be_refused
        """A stage may not have been ready yet when it was submitted."""
        self.num_events = 0
        self.num_outputs = 0
        self.left: dict[str, int] = {}
        self.waits: set[str] = set()
        self.ended_ports: set[str] = set()
        self.wire_ids: list[RequestId] = []
        """Under which it was admitted: its own, and that of its successor."""


class Application:
    """Runs requests over one `ClientCore` and checks all that comes back."""

    def __init__(self, process: GatewayProcess, plans: list[RequestPlan]) -> None:
        self._process = process
        self._world = process.world
        self._plans = plans
        self._runs: dict[RequestId, _Run] = {}
        self._begun: set[str] = set()
        self._is_asking = False

    @property
    def not_begun(self) -> list[RequestPlan]:
        """Plans that a successor still has to run."""
        return [plan for plan in self._plans if plan.id not in self._begun]

    def start(self) -> None:
        """Schedule the submits."""
        for plan in self._plans:
            self._world.after(
                max(0.0, plan.submit_at - self._world.now) + self._world.rng.random() * 0.01, self._submit, plan
            )
        if self._world.scenario.asks_health:
            self._world.after(self._world.rng.random(), self._ask)

    def held(self) -> str:
        """Tell what is held; empty for nothing."""
        if self._runs or self._is_asking:
            return f"application of {self._process.name} waits for {list(self._runs)}, an answer: {self._is_asking}"
        return ""

    def on_effect(self, effect: ClientEffect) -> None:
        """Take what the core says."""
        match effect:
            case Answered():
                if not self._is_asking:
                    raise Violation("a second answer to one question")
                self._is_asking = False
            case Ended(request=request, error=error):
                self._world.trace("   ended at", self._process, effect)
                run = self._runs.pop(request, None)
                if run is None:
                    raise Violation(f"{request} ended, which was not under way")
                is_refused = isinstance(error, Unavailable) and not self._may_be_refused(run, error)
                is_lost = isinstance(error, StageLost) or is_refused
                if is_lost and self._world.loses_nothing:
                    raise Violation(f"{request} is lost for no reason: {error}")
                self._world.ledger.end(request)
                self._check_loss(request, run, error)
            case Admitted(request=request, route=route):
                self._on_admitted(request, route)
            case Writable(request=request, port=port):
                self._on_writable(request, port)
            case Deliver(request=request, port=port, payload=payload):
                self._on_payload(request, port, payload)
            case PortEnded(request=request, port=port):
                self._on_port_ended(request, port)
            case _:
                raise Violation(f"unknown effect {effect}")

    def _may_be_refused(self, run: _Run, error: Unavailable) -> bool:
        """Whether a stage was not ready yet, or sleeps with requests refused, or a way was slow."""
        if self._process.member.is_coordinator_silent and self._world.may_seem_silent(self._process.name):
            return True
        supervisor, plan = self._world.supervisor, self._world.scenario.stages.get(error.stage)
        has_slept = supervisor is not None and plan is not None and error.stage in supervisor.slept
        return run.may_be_refused or (has_slept and plan is not None and plan.while_asleep == "refuse")

    def _ask(self) -> None:
        if self._process.is_alive and not self._is_asking:
            self._is_asking = True
            self._process.carry(self._process.core.admin(1, "health", {}))

    def _submit(self, plan: RequestPlan) -> None:
        if not self._process.is_alive:
            return
        request = f"{plan.id}:{plan.pipeline}"
        self._begun.add(plan.id)
        run = self._runs[request] = _Run(plan, may_be_refused=not self._world.is_up)
        params = {"llm": {"is_bad": plan.has_bad_params}}
        submit = Submit(
            request,
            plan.pipeline,
            plan.outputs,
            plan.priority,
            plan.timeout_s,
            key=plan.key,
            input_bytes=plan.input_bytes,
            tokens=plan.tokens,
            prefix=plan.prefix,
            session=plan.session,
        )
        if plan.timeout_s is not None:
            self._world.deadlines[request] = self._world.now + plan.timeout_s
        self._process.carry(self._process.core.submit(submit, params, self._world.now))
        self._count(request, run)

    def _count(self, request: RequestId, run: _Run) -> None:
        """Cancel when the plan says so."""
        if run.num_events == run.plan.cancel_after_events and request in self._runs:
            self._world.after(self._world.rng.random() * 0.001, self._cancel, request)
        run.num_events += 1

    def _check_loss(self, request: RequestId, run: _Run, error: OmniBusError | None) -> None:
        """Where nothing but stages fail, no user hears of a loss that could have been mended.

        None can be while the request also needs a stage that is gone for good: it would only wait to be refused.

        Raises:
            Violation: one did.
        """
        is_mendable = isinstance(error, StageLost) and error.is_retry_safe and not run.num_outputs
        is_mendable = is_mendable and not self._needs_what_is_gone(run.plan)
        kinds = {fault.kind for fault in self._world.scenario.faults}
        if is_mendable and kinds <= {"kill_stage", "hang"} and not self._world.was_rerouted(request):
            raise Violation(f"{request} ended with {error} though it had put nothing out")

    def _needs_what_is_gone(self, plan: RequestPlan) -> bool:
        supervisor = self._world.supervisor
        stages = needed_stages(self._world.scenario.pipelines[plan.pipeline].needed(plan.outputs))
        return supervisor is not None and any(supervisor.has_given_up(stage) for stage in stages)

    def _cancel(self, request: RequestId) -> None:
        if self._process.is_alive and self._runs.pop(request, None) is not None:
            self._world.trace(f"   cancel of {request} at", self._process)
            self._world.ledger.end(request)
            self._process.carry(self._process.core.cancel(request, "changed my mind"))

    # --- input --------------------------------------------------------------------------------------------

    def _on_admitted(self, request: RequestId, route: Route) -> None:
        run = self._run(request)
        run.wire_ids.append(route.request)
        if len(run.wire_ids) > 1:
            self._world.num_rerouted += 1
            if len(run.wire_ids) > 2 or run.num_outputs:
                raise Violation(f"{request} begins anew as {run.wire_ids} after {run.num_outputs} outputs")
            return
        for port in dict.fromkeys(route.edges[edge].source_port for edge in route.outgoing(IN)):
            run.left[port] = run.plan.num_inputs
            self._world.after(self._world.rng.expovariate(1 / run.plan.input_s), self._write, request, port)
        self._count(request, run)

    def _write(self, request: RequestId, port: str) -> None:
        run = self._runs.get(request)
        if run is None or not self._process.is_alive:
            return
        core, ledger = self._process.core, self._world.ledger
        while run.left[port] > 0 and (run.plan.is_burst or not core.is_blocked(request, port)):
            run.left[port] -= 1
            self._process.carry(core.send(request, port, ledger.emit(request, f"{IN}.{port}")))
            if not run.plan.is_burst:
                break
        if run.left[port] == 0:
            ledger.finish(request, f"{IN}.{port}")
            self._process.carry(core.finish(request, port))
        elif core.is_blocked(request, port):
            run.waits.add(port)
        else:
            self._world.after(self._world.rng.expovariate(1 / run.plan.input_s), self._write, request, port)
        self._process.check(request)

    def _on_writable(self, request: RequestId, port: str) -> None:
        run = self._run(request)
        if port in run.waits:
            run.waits.discard(port)
            self._world.after(0.0, self._write, request, port)

    # --- output -------------------------------------------------------------------------------------------

    def _on_payload(self, request: RequestId, port: str, payload: Payload) -> None:
        run = self._run(request)
        if port in run.ended_ports:
            raise Violation(f"{request} delivers on {port}, which ended")
        run.num_outputs += 1
        self._world.ledger.receive(run.wire_ids[-1], self._source(run, port), f"{OUT}.{port}", payload)
        if run.plan.reader != "stuck":
            delay_s = self._world.rng.expovariate(1 / READ_S[run.plan.reader])
            self._world.after(delay_s, self._consume, request, port, payload)
        self._count(request, run)

    def _consume(self, request: RequestId, port: str, payload: Payload) -> None:
        if self._process.is_alive:
            self._process.carry(self._process.core.consume(request, port, payload))
            self._process.check(request)

    def _on_port_ended(self, request: RequestId, port: str) -> None:
        run = self._run(request)
        if port in run.ended_ports:
            raise Violation(f"{request} ends {port} twice")
        run.ended_ports.add(port)
        run.num_outputs += 1
        self._world.ledger.receive_end(run.wire_ids[-1], self._source(run, port), f"{OUT}.{port}")
        self._count(request, run)

    def _source(self, run: _Run, port: str) -> str:
        return sources(self._world.scenario.pipelines[run.plan.pipeline])[OUT, port]

    def _run(self, request: RequestId) -> _Run:
        """The request that an effect is about.

        Raises:
            Violation: the application was told, or has said, that it is over.
        """
        run = self._runs.get(request)
        if run is None:
            raise Violation(f"something is delivered of {request}, which is over")
        return run
