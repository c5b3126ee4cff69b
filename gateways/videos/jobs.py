"""What becomes of a video job: queued, in progress, then completed or failed, once and for good. Pure."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

import msgspec

Status: TypeAlias = Literal["queued", "in_progress", "completed", "failed"]

DENOISED = 85
"""Per cent that are done when the last denoising step is; the rest is decoding."""

ALMOST = 99
"""A job that is not over is at most so far."""

PHASES = ("encode", "denoise", "decode")

LOST = "the server stopped before the video was made; create it again"


class Facts(Protocol):
    """What a file came to, as `omni_bus.media.mp4.Facts` has it."""

    @property
    def width(self) -> int:
        """Pixels."""
        ...

    @property
    def height(self) -> int:
        """Pixels."""
        ...

    @property
    def fps(self) -> float:
        """Frames a second."""
        ...

    @property
    def num_frames(self) -> int:
        """Frames."""
        ...

    @property
    def has_sound(self) -> bool:
        """There is a sound track."""
        ...


class Fault(msgspec.Struct, frozen=True):
    """Why a job failed."""

    code: int
    """The status that the same request, asked at once, would have been answered with."""
    message: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job; times are Unix time in seconds."""

    id: str
    model: str
    prompt: str
    seconds: str
    """As given; how long it is to be if the request says so."""
    size: str
    quality: str
    created_at: int
    content: str = ""
    """The id of its file, which is being written as long as the job lives."""
    status: Status = "queued"
    progress: int = 0
    started_at: float | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    """From then on its file is gone."""
    fault: Fault | None = None
    fps: float | None = None
    num_frames: int | None = None
    """How many there are or, before the end, how many are wanted if that is known."""
    width: int | None = None
    height: int | None = None
    has_sound: bool = False
    inference_time_s: float | None = None
    stage_durations: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in ("completed", "failed")

    @property
    def duration_s(self) -> float | None:
        """Seconds of its frames."""
        return None if not self.fps or self.num_frames is None else self.num_frames / self.fps


def admitted(job: Job, now: float) -> Job:
    """Return the job once the scheduler has taken it."""
    if job.status != "queued":
        return job
    return msgspec.structs.replace(job, status="in_progress", started_at=now)


def advanced(job: Job, report: Any) -> Job:
    """Return the job after a stage's report ``{"step", "num_steps", "phase"}``; progress never goes back.

    Raises:
        ValueError: it is none.
    """
    match report:
        case {"step": int(step), "num_steps": int(num_steps), "phase": str(phase)} if phase in PHASES:
            pass
        case _:
            raise ValueError(f"progress: {str(report)[:80]} came (allowed: step, num_steps, phase)")
    if not 0 <= step <= num_steps:
        raise ValueError(f"progress: step {step} of {num_steps} came (allowed: 0 to num_steps)")
    share = {"encode": 0.0, "decode": 1.0}.get(phase, step / max(1, num_steps))
    return _at_least(job, round(DENOISED * share))


def decoded(job: Job, num_frames: int, *, is_told_steps: bool) -> Job:
    """Return the job once so many frames are there.

    Args:
        job: that is in progress.
        num_frames: so far.
        is_told_steps: its stages report their steps, so that frames are the last part of the work only.
    """
    if not job.num_frames:
        return job
    start = DENOISED if is_told_steps else 0
    return _at_least(job, start + (100 - start) * num_frames // job.num_frames)


def completed(job: Job, facts: Facts, now: float, *, keep_s: float, stage_durations: dict[str, float]) -> Job:
    """Return the job once its file is there.

    Args:
        job: that is in progress.
        facts: of the file.
        now: Unix time.
        keep_s: how long the file is kept.
        stage_durations: seconds that each stage worked on it.
    """
    if job.is_over:
        return job
    started_at = job.created_at if job.started_at is None else job.started_at
    return msgspec.structs.replace(
        job,
        status="completed",
        progress=100,
        completed_at=int(now),
        expires_at=int(now + keep_s),
        fps=facts.fps,
        num_frames=facts.num_frames,
        width=facts.width,
        height=facts.height,
        has_sound=facts.has_sound,
        inference_time_s=round(max(0.0, now - started_at), 3),
        stage_durations=stage_durations,
    )


def failed(job: Job, code: int, message: str, now: float) -> Job:
    """Return the job once it can't go on."""
    if job.is_over:
        return job
    return msgspec.structs.replace(job, status="failed", fault=Fault(code, message), completed_at=int(now))


def lost(job: Job, now: float) -> Job:
    """Return a job whose process is gone and left no file."""
    return failed(job, 503, LOST, now)


def _at_least(job: Job, progress: int) -> Job:
    if job.status != "in_progress":
        return job
    return msgspec.structs.replace(job, progress=max(job.progress, min(ALMOST, progress)))


def job_object(job: Job) -> dict[str, Any]:
    """Return a job as clients know it."""
    fault = job.fault
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "prompt": job.prompt,
        "status": job.status,
        "progress": job.progress,
        "size": job.size,
        "seconds": job.seconds,
        "quality": job.quality,
        "created_at": job.created_at,
        "completed_at": job.completed_at,
        "expires_at": job.expires_at,
        "error": None if fault is None else {"code": fault.code, "message": fault.message},
        "media_type": "video/mp4",
        "file_name": f"{job.id}.mp4" if job.status == "completed" else None,
        "remixed_from_video_id": None,
        "fps": job.fps,
        "num_frames": job.num_frames,
        "duration_s": job.duration_s,
        "inference_time_s": job.inference_time_s,
        "metrics": None,
        "stage_durations": job.stage_durations,
        "action": None,
    }
