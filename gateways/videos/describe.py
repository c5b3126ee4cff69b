"""The routes of videos, for ``/openapi.json``."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateways.openai_chat import HEADERS
from gateways.openapi import Answer, Operation, Schema
from gateways.videos.jobs import Fault
from gateways.videos.routes import MAX_LISTED, PATH, SYNC_PATH

_JSON = "application/json"
_BYTES: Schema = {"contentMediaType": "video/mp4"}
_ID = {"video_id": "as given when the job was made"}
_JOB = f"{PATH}/{{video_id}}"


class VideoJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job."""

    id: str
    object: Literal["video"]
    model: str
    prompt: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    size: str
    seconds: str
    quality: str
    created_at: int
    completed_at: int | None
    expires_at: int | None
    error: Fault | None
    media_type: str
    file_name: str | None
    remixed_from_video_id: str | None
    fps: float | None
    num_frames: int | None
    duration_s: float | None
    inference_time_s: float | None
    metrics: dict[str, Any] | None
    stage_durations: dict[str, float]
    action: dict[str, Any] | None


class VideoList(msgspec.Struct, frozen=True):
    """A page of jobs."""

    object: Literal["list"]
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(msgspec.Struct, frozen=True):
    """A job is forgotten."""

    id: str
    object: Literal["video.deleted"]
    deleted: bool


_BODY: Schema = {"$ref": "#/components/schemas/VideoRequest"}

OPERATIONS = (
    Operation(
        method="post",
        path=PATH,
        name="create_video",
        summary="Begin to make a video, of a JSON body or a form with files (`input_reference`, `input_references`)",
        body=_BODY,
        answers={200: Answer(description="the job", content={_JSON: VideoJob})},
        errors=(404, 415, 422, 429, 507),
        headers=HEADERS,
    ),
    Operation(
        method="post",
        path=SYNC_PATH,
        name="create_video_sync",
        summary="Make a video and wait for it",
        body=_BODY,
        answers={200: Answer(description="the file", content={"video/mp4": _BYTES})},
        errors=(404, 415, 422, 429, 504, 507),
        headers=HEADERS,
    ),
    Operation(
        method="get",
        path=PATH,
        name="list_videos",
        summary="The caller's jobs",
        queries={
            "limit": {"type": "integer", "minimum": 0, "maximum": MAX_LISTED, "description": "jobs on a page"},
            "order": {"enum": ["asc", "desc"], "description": "by time of creation"},
            "after": {"type": "string", "description": "the last job of the page before"},
        },
        answers={200: Answer(description="a page", content={_JSON: VideoList})},
        errors=(507,),
    ),
    Operation(
        method="get",
        path=_JOB,
        name="retrieve_video",
        summary="A job, and how far it is",
        parameters=_ID,
        answers={200: Answer(description="the job", content={_JSON: VideoJob})},
        errors=(404, 507),
    ),
    Operation(
        method="delete",
        path=_JOB,
        name="delete_video",
        summary="End a job and forget it with its file",
        parameters=_ID,
        answers={200: Answer(description="it is gone", content={_JSON: VideoDeleted})},
        errors=(404, 409, 507),
    ),
    Operation(
        method="get",
        path=f"{_JOB}/content",
        name="retrieve_video_content",
        summary="A video's bytes, all or a range",
        parameters=_ID,
        queries={"variant": {"enum": ["video"], "description": "what of it"}},
        headers={"Range": {"type": "string", "description": "one range of bytes"}},
        answers={
            200: Answer(description="all", content={"video/mp4": _BYTES}),
            206: Answer(description="the range", content={"video/mp4": _BYTES}),
        },
        errors=(404, 416, 422, 507),
    ),
)
"""A test compares them with the router."""
