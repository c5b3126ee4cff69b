"""The jobs of a gateway: started here, kept on the disk, looked after to their end.

A job is a record in a store (`omni_bus.media.store`) and a file beside it. The file is an upload that this process has
under way as long as the job lives; so every process, and the next one after a crash, sees by the disk alone whether
somebody still works on a job. One whose process is gone is completed if its file is there, and failed if not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from gateways.http import log_failure
from gateways.problems import to_problem
from gateways.videos import jobs
from gateways.videos.jobs import Job
from gateways.videos.making import make_file
from omni_bus.errors import BadFrame, Overloaded, QuotaExceeded, RequestCancelled
from omni_bus.media.mp4 import Facts

if TYPE_CHECKING:
    from gateways.http import Terms
    from gateways.videos.form import Request
    from omni_bus.client import BusClient
    from omni_bus.media.store import Entry, Store, Upload
    from omni_bus.media.video_pool import VideoPool

logger = logging.getLogger(__name__)

RECORD, FILE = "video_gen", "video_file"
"""Kinds of entries of the store."""

TELL_S = 1.0
"""A job's progress is written to the disk so often at most; other processes of the gateway read it there."""

DELETE_S = 6.0
"""A job that runs may take so long to end when it is deleted."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the jobs of one process."""

    max_jobs: int
    """Queued and running ones."""
    max_caller_jobs: int
    """Of one caller."""
    max_at_once: int
    """Submitted to the bus at the same time; others wait here, in order."""
    max_held_bytes: int
    """Of what all queued and running ones bring with them, decoded."""
    max_file_bytes: int
    """Of one file."""
    keep_s: float
    """A file is kept so long after it was made, its job as long again."""


class JobBoard:
    """Jobs that live, and those that are over.

    Args:
        client: the bus.
        store: of records and files; closed by its owner.
        pool: encodes.
        limits: how many, and how much.
    """

    def __init__(self, client: BusClient, store: Store, pool: VideoPool, limits: Limits) -> None:
        self._client = client
        self._store = store
        self._pool = pool
        self._limits = limits
        self._live: dict[str, _Running] = {}
        self._turns = asyncio.Semaphore(limits.max_at_once)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def idle(self) -> None:
        """Return when no job lives."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """End what lives; it fails with a reason that says so."""
        tasks = [running.task for running in self._live.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, request: Request, caller: str, terms: Terms, request_id: str) -> Job:
        """Start a job.

        Raises:
            QuotaExceeded: the caller has as many jobs under way as it may.
            Overloaded: all callers together have.
            StorageQuotaExceeded, StorageFull: there is no room for its file.
        """
        self._check_room(request, caller)
        store = self._store
        async with AsyncExitStack() as stack:
            limit = self._limits.max_file_bytes
            upload = await stack.enter_async_context(await store.begin(FILE, caller, max_bytes=limit, what="video"))
            async with await store.begin(RECORD, caller, max_bytes=1024, what="job") as record:
                job = _new_job(record.id, request, upload.id)
                await record.write(b"1")
                entry = await record.commit({"job": msgspec.to_builtins(job)})
            running = _Running(self, entry, job, request, terms, request_id)
            self._live[job.id] = running
            self._is_idle.clear()
            stack.pop_all()  # the task has the upload from here on
            running.task = asyncio.create_task(self._run(running, upload))
        return job

    async def get(self, job_id: str, caller: str) -> tuple[Job, Entry] | None:
        """Return a caller's job; None for every other id, known or not."""
        entry = await self._store.get(_entry_id(job_id), RECORD, caller)
        return None if entry is None else (await self._seen(entry), entry)

    async def all(self, caller: str) -> list[Job]:
        """Return a caller's jobs, oldest first."""
        return [await self._seen(entry) for entry in await self._store.entries(RECORD, caller)]

    async def file(self, job: Job, caller: str) -> Entry | None:
        """Return the file of a job that is completed; None if its time is over."""
        return await self._store.get(job.content, FILE, caller)

    async def delete(self, job: Job, caller: str) -> bool:
        """End a job if it lives, and forget it with its file; False if it can't be ended in time."""
        running = self._live.get(job.id)
        if running is not None:
            running.is_deleted = True
            running.task.cancel()
            await asyncio.wait({running.task}, timeout=DELETE_S)
            if not running.task.done():
                return False
        await self._store.delete(_entry_id(job.id), RECORD, caller)
        await self._store.delete(job.content, FILE, caller)
        return True

    def _check_room(self, request: Request, caller: str) -> None:
        limits, live = self._limits, self._live.values()
        mine = sum(running.entry.owner == caller for running in live)
        if mine >= limits.max_caller_jobs:
            raise QuotaExceeded(f"{mine} videos are under way for you (allowed: {limits.max_caller_jobs})")
        held = request.num_bytes + sum(running.request.num_bytes for running in live)
        if len(live) >= limits.max_jobs or held > limits.max_held_bytes:
            raise Overloaded(f"{len(live)} videos are under way with {held} bytes of references; try again later")

    async def _seen(self, entry: Entry) -> Job:
        """Return a job as it is, whoever works or worked on it."""
        job = _job_of(entry)
        if job.is_over:
            return job
        if (running := self._live.get(job.id)) is not None:
            return running.job
        if await self._store.is_written(job.content):
            return job
        # Nobody works on it any more; what its process left behind since then is all that there will be.
        found = await self._store.get(entry.id, RECORD, entry.owner)
        if found is None or (job := _job_of(found)).is_over:
            return job
        made = await self._store.get(job.content, FILE, entry.owner)
        job = jobs.lost(job, time.time()) if made is None else self._completed(job, made)
        await self.write(found, job)
        return job

    def _completed(self, job: Job, made: Entry) -> Job:
        facts = msgspec.convert(made.metadata["facts"], Facts)
        durations = made.metadata["stage_durations"]
        return jobs.completed(job, facts, made.created_ns / 1e9, keep_s=self._limits.keep_s, stage_durations=durations)

    async def write(self, entry: Entry, job: Job, *, is_durable: bool = True) -> bool:
        """Write a job to the disk; False if it was deleted."""
        expires_at = time.time() + 2 * self._limits.keep_s if job.is_over else None
        metadata = {"job": msgspec.to_builtins(job)}
        amended = await self._store.amend(entry, metadata, expires_at=expires_at, is_durable=is_durable)
        return amended is not None

    async def _run(self, running: _Running, upload: Upload) -> None:
        try:
            async with upload:
                await self._work(running, upload)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (it is told by the job)
            log_failure(to_problem(error), error, running.request_id)
        finally:
            self._live.pop(running.job.id, None)
            if not self._live:
                self._is_idle.set()

    async def _work(self, running: _Running, upload: Upload) -> None:
        """Make the video; whatever happens, the job is over on the disk before its upload ends."""
        try:
            async with self._turns:
                made = await make_file(
                    self._client,
                    running.request,
                    running.terms,
                    self._pool,
                    upload.fd,
                    watcher=running,
                    measure=upload.measure,
                )
            metadata = {"facts": msgspec.to_builtins(made.facts), "stage_durations": made.stage_durations}
            entry = await upload.commit(metadata, expires_at=time.time() + self._limits.keep_s)
            running.job = self._completed(running.job, entry)
        except asyncio.CancelledError:
            running.job = jobs.lost(running.job, time.time())
            raise
        except Exception as error:
            problem = to_problem(error)
            running.job = jobs.failed(running.job, problem.status, problem.message, time.time())
            raise
        finally:
            if not running.is_deleted:
                await self.write(running.entry, running.job)


class _Running:
    """A job that lives in this process."""

    task: asyncio.Task[None]

    def __init__(
        self, board: JobBoard, entry: Entry, job: Job, request: Request, terms: Terms, request_id: str
    ) -> None:
        self._board = board
        self.entry = entry
        self.job = job
        self.request = request
        self.terms = terms
        self.request_id = request_id
        self.is_deleted = False
        self._told_at = 0.0

    def on_admitted(self) -> None:
        self.job = jobs.admitted(self.job, time.time())

    async def on_report(self, report: Any) -> None:
        try:
            self.job = jobs.advanced(self.job, report)
        except ValueError as error:
            raise BadFrame(str(error)) from error
        await self._tell()

    async def on_frames(self, num_frames: int) -> None:
        is_told_steps = "progress" in self.request.wanted.outputs
        self.job = jobs.decoded(self.job, num_frames, is_told_steps=is_told_steps)
        await self._tell()

    async def _tell(self) -> None:
        """Tell the other processes how far it is, and hear from them whether it is wanted any more."""
        now = asyncio.get_running_loop().time()
        if now - self._told_at < TELL_S:
            return
        self._told_at = now
        if not await self._board.write(self.entry, self.job, is_durable=False):
            self.is_deleted = True
            raise RequestCancelled("the job was deleted")


def _new_job(entry_id: str, request: Request, content: str) -> Job:
    wanted = request.wanted
    fps = wanted.told.get("fps")
    return Job(
        id=entry_id.replace("-", "_"),
        model=wanted.model,
        prompt=wanted.prompt,
        seconds=wanted.seconds or (f"{wanted.num_frames / fps:g}" if fps and wanted.num_frames else "4"),
        size=wanted.size,
        quality=wanted.quality,
        created_at=int(time.time()),
        content=content,
        fps=fps,
        num_frames=wanted.num_frames,
    )


def _entry_id(job_id: str) -> str:
    kind, _, number = job_id.rpartition("_")
    return f"{kind}-{number}"


def _job_of(entry: Entry) -> Job:
    return msgspec.convert(entry.metadata["job"], Job)
