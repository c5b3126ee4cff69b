"""How many requests of one pipeline run, how many wait, who is next, and who is refused.

A caller's own limits (`omni_bus.core.quota`) are refused as `QuotaExceeded`, the pipeline's as `Overloaded`, a deadline
that can't be met as `DeadlineExceeded`; each at once.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from omni_bus.core.fairness import Applicant, FairQueue
from omni_bus.core.quota import Quota, TokenBucket
from omni_bus.errors import BadInput, DeadlineExceeded, OmniBusError, Overloaded, QuotaExceeded
from omni_bus.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni_bus.core.pipeline import Pipeline
    from omni_bus.wire.frames import Submit

RETRY_AFTER_S = 1.0
"""What a refused caller is told to wait: about one short request."""

NUM_RECENT = 32
"""Requests whose time in flight is remembered: what is expected of the next ones."""

MAX_ACCOUNTS = 1024
"""Callers whose counts are kept; beyond it those that the deployment does not name are forgotten once idle."""


class AdmissionCounts(NamedTuple):
    """Of one pipeline."""

    in_flight: int
    max_in_flight: int
    queued: int
    max_queued: int
    queued_bytes: int = 0
    max_queued_bytes: int = 0


class Offer(NamedTuple):
    """What became of a request that was not refused."""

    may_run: bool
    pushed_out: RequestId | None = None
    """A request that waited until now and has given up its place; it is refused with `Admission.overloaded`."""


class _Account(msgspec.Struct):
    """One caller's use of the pipeline."""

    quota: Quota
    bucket: TokenBucket | None
    in_flight: int = 0
    queued: int = 0
    admitted: int = 0
    refused: Counter[str] = msgspec.field(default_factory=Counter[str])
    """By code of the error."""

    @property
    def is_held(self) -> bool:
        """Whether the caller's own limit keeps the next one from running."""
        return self.quota.max_in_flight is not None and self.in_flight >= self.quota.max_in_flight


class _Running(NamedTuple):
    caller: str
    since: float


class Admission:
    """The limits and the queue of one pipeline; times are monotonic seconds.

    Whoever calls `leave` calls `next` until it returns None, so that nobody waits while there is room.

    Args:
        pipeline: whose limits hold.
        quotas: by caller; others have the defaults.
    """

    def __init__(self, pipeline: Pipeline, quotas: Mapping[str, Quota] | None = None) -> None:
        self._pipeline = pipeline
        self._quotas = quotas or {}
        self._accounts: dict[str, _Account] = {}
        self._in_flight: dict[RequestId, _Running] = {}
        self._queued: dict[RequestId, Applicant] = {}
        self._queue = FairQueue(pipeline.max_queued, pipeline.max_queued_bytes)
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def counts(self) -> AdmissionCounts:
        """Where the limits stand."""
        pipeline = self._pipeline
        return AdmissionCounts(
            len(self._in_flight),
            pipeline.max_in_flight,
            len(self._queued),
            pipeline.max_queued,
            self._queue.num_bytes,
            pipeline.max_queued_bytes,
        )

    def callers(self) -> list[dict[str, Any]]:
        """Return a row for each caller that came lately, the busiest first."""
        rows = sorted(self._accounts.items(), key=lambda item: (-item[1].in_flight, -item[1].queued, item[0]))
        return [
            {
                "caller": caller,
                "pipeline": self._pipeline.name,
                "in_flight": account.in_flight,
                "queued": account.queued,
                "admitted": account.admitted,
                "refused": account.refused.total(),
                "refused_by": dict(account.refused),
            }
            for caller, account in rows
        ]

    # --- coming ---------------------------------------------------------------------------------------------

    def offer(self, submit: Submit, timeout_s: float | None, now: float, *, is_back: bool = False) -> Offer:
        """Take a request, to run or to wait.

        Args:
            submit: what is asked for, and by whom.
            timeout_s: how long it may take; None for as long as it needs.
            now: the time.
            is_back: it had a place before and lost it through no fault of its own. It goes ahead of others of its
                priority, and nothing refuses it.

        Raises:
            BadInput: the caller may not ask for this priority.
            QuotaExceeded: the caller's own limit or rate.
            Overloaded: the queue is full.
            DeadlineExceeded: the time limit would pass while it waits.
        """
        account = self._account(submit.key, now)
        newcomer = Applicant(submit.request, submit.key, submit.priority, account.quota.weight, submit.input_bytes)
        may_run = self._has_room and not account.is_held and not self._queue.has_next(self._is_held)
        pushed_out = None if is_back else self._check(newcomer, account, timeout_s, now, may_run=may_run)
        if may_run:
            self._run(newcomer.request, newcomer.caller, now)
            return Offer(may_run=True)
        if pushed_out is not None:
            self._accounts[self._queued[pushed_out].caller].refused[Overloaded.code] += 1
            self._unqueue(pushed_out)
        self._queue.push(newcomer, is_back=is_back)
        self._queued[newcomer.request] = newcomer
        account.queued += 1
        return Offer(may_run=False, pushed_out=pushed_out)

    def adopt(self, request: RequestId, caller: str, now: float) -> None:
        """Count a request that runs already, whatever the limit."""
        self._account(caller, now)
        self._run(request, caller, now)

    def overloaded(self) -> Overloaded:
        """Return the refusal of a request for which there is no place."""
        in_flight, max_in_flight, queued, max_queued, queued_bytes, max_queued_bytes = self.counts
        return Overloaded(
            f"pipeline '{self._pipeline.name}' is busy: {in_flight} requests run (max_in_flight {max_in_flight}) and "
            f"{queued} wait (max_queued {max_queued}) with {queued_bytes} bytes of input (max_queued_bytes "
            f"{max_queued_bytes})",
            is_retry_safe=True,
            retry_after_s=RETRY_AFTER_S,
        )

    def _check(
        self, newcomer: Applicant, account: _Account, timeout_s: float | None, now: float, *, may_run: bool
    ) -> RequestId | None:
        """Refuse a request, or count it against its caller's rate; return who must make room for it."""
        try:
            self._check_priority(newcomer, account)
            self._check_rate(newcomer, account, now)
            pushed_out = None if may_run else self._check_wait(newcomer, account, timeout_s)
        except OmniBusError as error:
            account.refused[error.code] += 1
            raise
        if account.bucket is not None:
            account.bucket.take(now)
        return pushed_out

    def _check_priority(self, newcomer: Applicant, account: _Account) -> None:
        limit = account.quota.max_priority
        if limit is not None and newcomer.priority > limit:
            raise BadInput(
                f"priority: it is above what caller '{newcomer.caller}' may ask for (allowed: at most {limit}, which "
                f"HTTP writes as {-limit})",
                field="priority",
            )

    def _check_rate(self, newcomer: Applicant, account: _Account, now: float) -> None:
        wait_s = 0.0 if account.bucket is None else account.bucket.wait_s(now)
        if wait_s > 0:
            raise QuotaExceeded(
                f"caller '{newcomer.caller}' sends more than its rate for pipeline '{self._pipeline.name}' "
                f"(requests_per_minute {account.quota.requests_per_minute:g}); the next may come in {wait_s:.3g} s",
                is_retry_safe=True,
                retry_after_s=wait_s,
            )

    def _check_wait(self, newcomer: Applicant, account: _Account, timeout_s: float | None) -> RequestId | None:
        """Check whether a request may wait; return who must make room for it."""
        quota = account.quota
        if quota.max_queued is not None and account.queued >= quota.max_queued:
            raise self._over_quota(newcomer.caller, account)
        self._check_deadline(newcomer, account, timeout_s)
        if self._queue.fits(newcomer):
            return None
        outsider = self._queue.outsider(newcomer)
        if outsider is None:
            is_own_fault = account.is_held and self._has_room
            raise self._over_quota(newcomer.caller, account) if is_own_fault else self.overloaded()
        return outsider

    def _over_quota(self, caller: str, account: _Account) -> QuotaExceeded:
        limits = account.quota
        run = "" if limits.max_in_flight is None else f" (max_in_flight {limits.max_in_flight})"
        wait = "" if limits.max_queued is None else f" (max_queued {limits.max_queued})"
        return QuotaExceeded(
            f"pipeline '{self._pipeline.name}' can't run one more of caller '{caller}' now, and it is at its limit: "
            f"{account.in_flight} of its requests run{run} and {account.queued} wait{wait}",
            is_retry_safe=True,
            retry_after_s=RETRY_AFTER_S,
        )

    def _check_deadline(self, newcomer: Applicant, account: _Account, timeout_s: float | None) -> None:
        """Refuse a request that would still wait when its time is over, even if all goes as well as it can.

        At best everything that runs ends now, and every request before this one in its own caller's line (fairness may
        put it before all others) is as short as the shortest of the last `NUM_RECENT`. Each round of as many as may run
        at once then takes that long. Its own time to run counts as nothing, for it may be shorter than any before it.
        """
        if timeout_s is None or not self._recent:
            return
        at_once = min(self._pipeline.max_in_flight, account.quota.max_in_flight or self._pipeline.max_in_flight)
        rounds = self._queue.num_before(newcomer.caller, newcomer.priority) // at_once
        at_least_s = rounds * min(self._recent)
        if at_least_s >= timeout_s:
            raise DeadlineExceeded(
                f"the time limit of {timeout_s:g} s would pass while the request waits: pipeline "
                f"'{self._pipeline.name}' needs at least {at_least_s:.3g} s before its turn",
                is_retry_safe=True,
            )

    # --- going ----------------------------------------------------------------------------------------------

    def leave(self, request: RequestId, now: float) -> None:
        """Forget a request that ended or gave up waiting."""
        running = self._in_flight.pop(request, None)
        if running is None:
            self._unqueue(request)
            return
        self._recent.append(max(0.0, now - running.since))
        self._accounts[running.caller].in_flight -= 1
        self._queue.release(running.caller)

    def next(self, now: float) -> RequestId | None:
        """Take the next waiting request that may run now."""
        request = self._queue.pop(self._is_held) if self._has_room else None
        if request is not None:
            caller = self._queued.pop(request).caller
            self._accounts[caller].queued -= 1
            self._run(request, caller, now)
        return request

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        return len(self._in_flight) < self._pipeline.max_in_flight

    def _is_held(self, caller: str) -> bool:
        return self._accounts[caller].is_held

    def _run(self, request: RequestId, caller: str, now: float) -> None:
        account = self._accounts[caller]
        account.in_flight += 1
        account.admitted += 1
        self._in_flight[request] = _Running(caller, now)

    def _unqueue(self, request: RequestId) -> None:
        place = self._queued.pop(request, None)
        if place is not None:
            self._accounts[place.caller].queued -= 1
            self._queue.discard(request)

    def _account(self, caller: str, now: float) -> _Account:
        account = self._accounts.get(caller)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._forget_idle()
            quota = self._quotas.get(caller, Quota())
            account = self._accounts[caller] = _Account(quota, quota.bucket(now))
        return account

    def _forget_idle(self) -> None:
        idle = [
            caller
            for caller, account in self._accounts.items()
            if not account.in_flight and not account.queued and caller not in self._quotas
        ]
        for caller in idle[: len(idle) // 2 + 1]:
            del self._accounts[caller]
