"""The modes of a run: load at a rate or a concurrency, beside slow readers, and a storm of clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from typing import TYPE_CHECKING

import msgspec

from omni_bus.bench.arrivals import offsets
from omni_bus.bench.costs import ClientCost, ServerCost, Watch
from omni_bus.bench.dataset import Prompt
from omni_bus.bench.dialects import Dialect, Wishes
from omni_bus.bench.measures import measure
from omni_bus.bench.occupancy import Occupancy
from omni_bus.bench.record import Record
from omni_bus.bench.round_trip import Heard, compared, recognise
from omni_bus.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_bus.bench.client import Server

MODES = ("load", "slow-reader", "cancel-storm")

NUM_CALM = 5
"""Requests one after the other before a storm, for how long an answer takes, and after it."""

TIMER_S = 0.0005
"""uvloop rounds timers to whole milliseconds; with this no request goes before its time."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done."""

    mode: str
    prompts: list[Prompt]
    """One for each request of a phase."""
    prompts_again: list[Prompt]
    """As many of the same lengths for a second phase; others where possible, lest a cache makes that the faster one."""
    aside: Prompt
    """What is asked where nothing is measured, and before and after a storm."""
    dialect: Dialect
    wishes: Wishes
    rate: float
    """Requests a second; infinity for no rate."""
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    num_slow_readers: int = 4
    slow_reader_rate: float = 10.0
    """Pieces a second that each of them reads."""
    slow_reader_output_len: int = 4096
    server_pids: tuple[int, ...] = ()
    num_heard: int = 0
    """Answers whose word errors are counted, at most."""
    hearing: Wishes | None = None
    """For the recogniser that answers with sound are sent to; None where answers are text."""


class Phase(msgspec.Struct, kw_only=True):
    """One phase and what it cost."""

    label: str
    records: list[Record]
    client: ClientCost
    server: ServerCost | None


class SlowReaders(msgspec.Struct, kw_only=True):
    """What the slow readers themselves saw."""

    records: list[Record]
    rate: float
    """That they were told to keep to."""


class Storm(msgspec.Struct, kw_only=True):
    """What a storm left."""

    calm: list[Record]
    """Requests one after the other before it."""
    after: list[Record]
    """And right after it."""
    at_once: Occupancy | None
    """When the last client had just left; None if the server says nothing of this."""
    at_last: Occupancy | None
    """When the requests after it had ended."""
    answered_s: float
    """What the first of these answers took; the next request was sent then."""
    spread_s: float
    """Clients left within this of their sending."""


class Outcome(msgspec.Struct, kw_only=True):
    """All that a run found; the last phase is the measured one."""

    model: str
    phases: list[Phase]
    slow: SlowReaders | None = None
    storm: Storm | None = None
    heard: Heard | None = None
    """The word errors of the measured phase."""


class Run:
    """One run against one server.

    Args:
        server: to ask.
        plan: what to ask.
        on_done: called after each measured request.
        recogniser: a server that transcribes, where the plan wants answers with sound to be heard.
    """

    def __init__(
        self,
        server: Server,
        plan: Plan,
        on_done: Callable[[], None] = lambda: None,
        recogniser: Server | None = None,
    ) -> None:
        self._server = server
        self._recogniser = recogniser
        self._plan = plan
        self._wishes = plan.wishes
        self._on_done = on_done
        self._counts_tokens = False
        self._dice = random.Random(plan.seed)

    async def run(self) -> Outcome:
        """Do it.

        Raises:
            Unavailable: the first request failed, so that the rest would only repeat that.
        """
        await self._probe()
        if num_warmups := self._plan.num_warmups:
            await self._send_all([self._plan.aside] * num_warmups, [0.0] * num_warmups, on_done=lambda: None)
        match self._plan.mode:
            case "slow-reader":
                outcome, prompts = await self._slow_reader(), self._plan.prompts_again
            case "cancel-storm":
                outcome, prompts = await self._cancel_storm(), self._plan.prompts
            case _:
                phase = await self._phase("load", self._plan.prompts)
                outcome, prompts = await self._outcome([phase]), self._plan.prompts
        if self._plan.num_heard:
            outcome.heard = await self._heard(outcome.phases[-1].records, prompts)
        return outcome

    async def _outcome(
        self, phases: list[Phase], *, slow: SlowReaders | None = None, storm: Storm | None = None
    ) -> Outcome:
        for phase in phases if self._plan.dialect.has_tokens else ():
            await self._count_tokens(phase.records)
        return Outcome(
            model=self._wishes.model,
            phases=phases,
            slow=slow,
            storm=storm,
        )

    async def _probe(self) -> None:
        """Send one request that is not measured: does the server answer, tell of its stages, count tokens?"""
        self._wishes = msgspec.structs.replace(self._wishes, wants_stage_metrics=True)
        found = await self._ask_aside()
        if found.failure.startswith(("400", "422")):  # it may be the extension that it refuses
            self._wishes = msgspec.structs.replace(self._wishes, wants_stage_metrics=False)
            found = await self._ask_aside()
        if found.failure:
            raise Unavailable(f"the first request failed, so none was measured: {found.failure}: {found.message}")
        self._counts_tokens = self._plan.dialect.has_tokens and found.tokens_from != "usage"

    async def _ask_aside(self) -> Record:
        [found] = await self._send_all([self._plan.aside], [0.0], on_done=lambda: None)
        return found

    async def _heard(self, records: Sequence[Record], prompts: Sequence[Prompt]) -> Heard:
        """Compare what was said with what was heard, once nothing is measured any more."""
        if self._recogniser is None or self._plan.hearing is None:
            kept = [record for record in records[: self._plan.num_heard] if record.is_complete]
            return compared((prompts[record.index].as_text(), "".join(record.answer)) for record in kept)
        return await recognise(records, prompts, self._recogniser, self._plan.hearing)

    # --- modes ------------------------------------------------------------------------------------------------

    async def _phase(self, label: str, prompts: Sequence[Prompt], leaves: Sequence[float] | None = None) -> Phase:
        """Send a request for each prompt as the plan says, and watch what that costs."""
        plan = self._plan
        # The same schedule in each phase, so that phases differ in nothing else.
        found = offsets(len(prompts), plan.rate, plan.burstiness, random.Random(plan.seed))
        watch = Watch(plan.server_pids)
        async with watch.phase():
            records = await self._send_all(prompts, found, leaves=leaves, on_done=self._on_done)
        assert watch.client is not None
        return Phase(label=label, records=records, client=watch.client, server=watch.server)

    async def _slow_reader(self) -> Outcome:
        """The same load twice: alone, and while slow readers hold long answers."""
        plan = self._plan
        alone = await self._phase("alone", plan.prompts)
        slow: list[Record] = []
        have_begun = [asyncio.Event() for _ in range(plan.num_slow_readers)]
        readers = [asyncio.create_task(self._read_slowly(slow, begun)) for begun in have_begun]
        try:
            for begun in have_begun:
                await begun.wait()
            beside = await self._phase("beside slow readers", plan.prompts_again)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return await self._outcome([alone, beside], slow=SlowReaders(records=slow, rate=plan.slow_reader_rate))

    async def _read_slowly(self, records: list[Record], begun: asyncio.Event) -> None:
        """Read long answers slowly, one after the other, until this is cancelled or one fails."""
        plan = self._plan
        clock = _clock()
        try:
            while True:
                prompt = plan.dialect.lengthened(plan.aside, plan.slow_reader_output_len)
                body = plan.dialect.body(prompt, msgspec.structs.replace(self._wishes, ignore_eos=True))
                record = Record(index=len(records), intended_at=clock())
                records.append(record)
                await self._server.ask(record, body, clock, pace=_Pace(plan.slow_reader_rate, begun))
                if record.failure:
                    return
        finally:
            begun.set()  # nobody waits for one that failed

    async def _cancel_storm(self) -> Outcome:
        """Calm requests, clients that leave at random moments of their answers, and calm requests again."""
        calm = [await self._ask_aside() for _ in range(NUM_CALM)]
        lengths_s = [record.ended_at - record.sent_at for record in calm if record.is_complete]
        if not lengths_s:
            raise Unavailable(f"every request before the storm failed: {calm[0].failure}: {calm[0].message}")
        spread_s = statistics.median(lengths_s)
        leaves = [self._dice.uniform(0, spread_s) for _ in self._plan.prompts]
        phase = await self._phase("storm", self._plan.prompts, leaves)
        asked_at = time.perf_counter()
        at_once = await self._server.occupancy()
        answered_s = time.perf_counter() - asked_at
        after = [await self._ask_aside() for _ in range(NUM_CALM)]
        at_last = await self._server.occupancy()
        storm = Storm(
            calm=calm, after=after, at_once=at_once, at_last=at_last, answered_s=answered_s, spread_s=spread_s
        )
        return await self._outcome([phase], storm=storm)

    # --- requests ---------------------------------------------------------------------------------------------

    async def _send_all(
        self,
        prompts: Sequence[Prompt],
        sent_at: Sequence[float],
        *,
        on_done: Callable[[], None],
        leaves: Sequence[float] | None = None,
    ) -> list[Record]:
        """Send requests at their times, no more at once than allowed; return when all have ended."""
        limit = self._plan.max_concurrency
        gate = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
        is_scheduled = any(sent_at)
        clock = _clock()

        async def send(record: Record, prompt: Prompt, leaves_after_s: float | None) -> None:
            body = self._plan.dialect.body(prompt, self._wishes)
            keeps_answer = self._counts_tokens or record.index < self._plan.num_heard
            async with gate:
                if not is_scheduled:  # without a rate a request is due when it may go
                    record.intended_at = clock()
                await self._server.ask(record, body, clock, keeps_answer=keeps_answer, leaves_after_s=leaves_after_s)
            on_done()

        records = [
            Record(index=index, intended_at=at, heard_s=prompt.sound_s)
            for index, (at, prompt) in enumerate(zip(sent_at, prompts, strict=True))
        ]
        async with asyncio.TaskGroup() as group:
            for record, prompt in zip(records, prompts, strict=True):
                if (wait_s := record.intended_at - clock()) > 0:
                    await asyncio.sleep(wait_s + TIMER_S)
                group.create_task(send(record, prompt, None if leaves is None else leaves[record.index]))
        return records

    async def _count_tokens(self, records: Sequence[Record]) -> None:
        """Count where the server's usage didn't: with its tokeniser, else by pieces."""
        for record in records:
            if not record.is_complete or record.output_tokens is not None:
                continue
            count = (
                await self._server.count_tokens(self._wishes.model, "".join(record.answer)) if record.answer else None
            )
            record.output_tokens, record.tokens_from = (
                (len(record.texts), "chunks") if count is None else (count, "tokenize")
            )
            record.answer = []


class _Pace:
    """Lets so many pieces a second through.

    Args:
        rate: pieces a second.
        begun: set with the first piece.
    """

    def __init__(self, rate: float, begun: asyncio.Event) -> None:
        self._rate = rate
        self._begun = begun
        self._begun_at: float | None = None
        self._num_read = 0

    async def __call__(self, num_pieces: int) -> None:
        if not num_pieces:
            return
        now = time.perf_counter()
        if self._begun_at is None:
            self._begun_at = now
            self._begun.set()
        self._num_read += num_pieces
        await asyncio.sleep(max(0.0, self._begun_at + self._num_read / self._rate - now))


def _clock() -> Callable[[], float]:
    """Return a clock that begins now."""
    origin = time.perf_counter()
    return lambda: time.perf_counter() - origin


def first_ttft_s(records: Sequence[Record]) -> float | None:
    """Return the time to first token, or to the first sound, of the first request, if it was answered."""
    if not records or not records[0].is_complete:
        return None
    found = measure(records[0])
    return found.audio_ttfp_s if found.ttft_s is None else found.ttft_s
