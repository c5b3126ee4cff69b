"""``/v1/videos``: jobs and their files, each visible to its caller alone; ``/v1/videos/sync``: one file at once."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web

from gateways.download import PIECE_BYTES, send_file, write
from gateways.http import KEY_NAME, REQUEST_ID, json_response, terms_of
from gateways.openai_voices import VoicesOptions
from gateways.problems import Problem
from gateways.sweeping import Sweeper
from gateways.videos.board import JobBoard, Limits
from gateways.videos.jobs import job_object
from gateways.videos.making import make_file
from omni_bus.errors import BadInput
from omni_bus.media.h264 import Encoder, Preset, Settings
from omni_bus.media.mp4 import MEDIA_TYPE
from omni_bus.media.spool import run_to_end, too_large
from omni_bus.media.store import Quota, Store, disk_error
from omni_bus.media.video_pool import VideoPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateways.videos.form import Reader
    from gateways.videos.jobs import Job
    from omni_bus.client import BusClient

PATH = "/v1/videos"
SYNC_PATH = f"{PATH}/sync"

MAX_LISTED = 100

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class VideosOptions(VoicesOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table of a gateway that makes videos."""

    videos_dir: str = ""
    """Folder of videos, private to the user; by default one of this gateway in the XDG state directory."""

    max_videos: _Count = 256
    """Jobs that are queued or run, in one process; more are refused."""

    max_caller_videos: _Count = 64
    """Of one caller (API key)."""

    videos_at_once: _Count = 16
    """Jobs that one process submits at the same time; others wait in it, in order."""

    max_waiting_bytes: _Count = 2 * 1024**3
    """What the references of all queued and running jobs may come to, decoded."""

    max_video_file_bytes: _Count = 2 * 1024**3
    """A larger video is given up."""

    video_keep_s: _Seconds = 86400.0
    """A video may be downloaded so long after it was made; its job is listed as long again."""

    video_sync_timeout_s: _Seconds = 600.0
    """A request to ``/v1/videos/sync`` may take so long."""

    video_encoder: Encoder = "auto"
    """``auto`` takes the first of the hardware's encoders that works, or libx264."""

    video_preset: Preset = "veryfast"
    """Time against size, where libx264 encodes."""

    video_quality: Annotated[int, msgspec.Meta(ge=0, le=51)] = 20
    """Constant rate factor: 0 loses nothing, 51 is the worst."""

    video_start_timeout_s: _Seconds = 10.0
    """A client of ``/v1/realtime/video`` may take so long to say what it wants."""

    video_stall_timeout_s: _Seconds = 60.0
    """Such a session ends when nothing is made, sent or pinged for so long."""


def settings_of(options: VideosOptions) -> Settings:
    """Return how files are encoded unless a request says otherwise."""
    return Settings(encoder=options.video_encoder, preset=options.video_preset, quality=options.video_quality)


class VideosRoutes:
    """The routes' handlers, the store and the jobs.

    Args:
        client: the bus.
        reader: reads requests.
        pool: encodes.
        options: limits, and where videos are kept.
        state_dir: the gateway's own folder for what outlives it.
    """

    def __init__(
        self, client: BusClient, reader: Reader, pool: VideoPool, options: VideosOptions, state_dir: str
    ) -> None:
        self._client = client
        self._reader = reader
        self._pool = pool
        self._options = options
        self._store = Store(
            Path(options.videos_dir).expanduser() if options.videos_dir else Path(state_dir) / "videos",
            Quota(
                max_owner_bytes=options.max_caller_bytes,
                max_owner_files=options.max_caller_files,
                max_total_bytes=options.max_files_bytes,
                min_free_bytes=options.min_free_bytes,
            ),
        )
        self.board = JobBoard(
            client,
            self._store,
            pool,
            Limits(
                max_jobs=options.max_videos,
                max_caller_jobs=options.max_caller_videos,
                max_at_once=options.videos_at_once,
                max_held_bytes=options.max_waiting_bytes,
                max_file_bytes=options.max_video_file_bytes,
                keep_s=options.video_keep_s,
            ),
        )

    @property
    def max_body_bytes(self) -> int:
        """Limit of a form."""
        return self._reader.max_body_bytes

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """Sweep as long as the application runs, then end the jobs that live (for ``app.cleanup_ctx``)."""
        async with Sweeper(self._store):
            yield
            await self.board.close()
        self._store.close()

    async def create(self, request: web.Request) -> web.Response:
        """``POST /v1/videos``."""
        caller = request[KEY_NAME]
        terms = terms_of(request)
        wanted = await self._reader.read(request, caller)
        terms["input_bytes"] = wanted.num_bytes
        job = await self.board.create(wanted, caller, terms, request[REQUEST_ID])
        return json_response(job_object(job))

    async def list(self, request: web.Request) -> web.Response:
        """``GET /v1/videos``, page by page."""
        query = request.query
        limit, order, after = _limit(query.get("limit")), query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise BadInput(f"order: {order[:40]!r} came (allowed: asc, desc)", field="order")
        found = await self.board.all(request[KEY_NAME])
        if order == "desc":
            found.reverse()
        if after:
            places = [place for place, job in enumerate(found) if job.id == after]
            found = found[places[0] + 1 :] if places else []
        page = [job_object(job) for job in found[:limit]]
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(found) > len(page),
            }
        )

    async def retrieve(self, request: web.Request) -> web.Response:
        """``GET /v1/videos/ID``."""
        return json_response(job_object(await self._find(request)))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/videos/ID/content``: all, or a range."""
        variant = request.query.get("variant", "video")
        if variant != "video":
            raise BadInput(f"variant: {variant[:40]!r} came (allowed: video)", field="variant")
        job = await self._find(request)
        if job.fault is not None:
            raise Problem(422, f"the video failed: {job.fault.message}", param="video_id")
        if job.status != "completed":
            raise Problem(404, f"the video is not made yet: {job.status}, {job.progress} %", param="video_id")
        entry = await self.board.file(job, request[KEY_NAME])
        if entry is None:
            raise Problem(404, "the video has expired", param="video_id")
        return await send_file(
            request,
            self._store,
            entry,
            filename=f"{job.id}.mp4",
            write_timeout_s=self._options.write_timeout_s,
            content_type=MEDIA_TYPE,
        )

    async def delete(self, request: web.Request) -> web.Response:
        """``DELETE /v1/videos/ID``: a job that runs is cancelled on the bus first."""
        job = await self._find(request)
        if not await self.board.delete(job, request[KEY_NAME]):
            raise Problem(409, "the video can't be ended at this moment; try again", param="video_id")
        return json_response({"id": job.id, "object": "video.deleted", "deleted": True})

    async def sync(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/videos/sync``: the file as the answer; a client that leaves ends it."""
        request[REQUEST_ID] = f"video_sync-{secrets.token_hex(12)}"
        began_at = time.monotonic()
        terms = terms_of(request)
        wanted = await self._reader.read(request, request[KEY_NAME])
        limit_s = self._options.video_sync_timeout_s
        terms["input_bytes"] = wanted.num_bytes
        terms["timeout_s"] = min(terms["timeout_s"] or limit_s, limit_s)
        try:
            with tempfile.TemporaryFile() as file:
                made = await make_file(
                    self._client,
                    wanted,
                    terms,
                    self._pool,
                    file.fileno(),
                    watcher=_Nobody(),
                    measure=lambda: self._measure(file.fileno()),
                )
                response = web.StreamResponse(
                    headers={
                        "Content-Type": MEDIA_TYPE,
                        "X-Request-Id": request[REQUEST_ID],
                        "X-Model": wanted.wanted.model,
                        "X-Inference-Time-S": f"{time.monotonic() - began_at:.3f}",
                        "X-Stage-Durations": msgspec.json.encode(made.stage_durations).decode(),
                    }
                )
                await self._send(request, response, file.fileno())
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise disk_error(error) from error
        return response

    async def _measure(self, fd: int) -> None:
        most = self._options.max_video_file_bytes
        if os.fstat(fd).st_size > most:
            raise too_large("video", f"more than {most}", most)

    async def _send(self, request: web.Request, response: web.StreamResponse, fd: int) -> None:
        size, at = os.fstat(fd).st_size, 0
        response.content_length = size
        await response.prepare(request)
        while at < size:
            piece = await run_to_end(None, os.pread, fd, PIECE_BYTES, at)
            at += len(piece)
            await write(request, response, piece, self._options.write_timeout_s)
        await response.write_eof()

    async def _find(self, request: web.Request) -> Job:
        video_id = request.match_info["video_id"]
        found = await self.board.get(video_id, request[KEY_NAME])
        if found is None:
            # Said alike of ids that never were, of those that are gone, and of another caller's.
            raise Problem(404, f"no such video: {video_id[:80]!r}", param="video_id")
        return found[0]


class _Nobody:
    """Is told how far a video is, and does nothing with it."""

    def on_admitted(self) -> None: ...

    async def on_report(self, report: Any) -> None: ...

    async def on_frames(self, num_frames: int) -> None: ...


def _limit(text: str | None) -> int:
    if text is None:
        return MAX_LISTED
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= 6 else -1
    if not 0 <= value <= MAX_LISTED:
        raise BadInput(f"limit: {text[:40]!r} came (allowed: an integer from 0 to {MAX_LISTED})", field="limit")
    return value
