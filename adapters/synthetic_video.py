"""A synthetic engine that makes videos: load, faults and protocols can be tested with it where no model is."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from adapters.synthetic_marks import MIN_SIDE, PictureMark, marker_of, ramp, write_picture
from adapters.synthetic_shapes import Progress, SyntheticStream
from adapters.synthetic_work import Amount, StreamingOptions, WorkParams, plan_of
from omni_bus.errors import BadInput
from omni_bus.wire.frames import Finish
from omni_bus.wire.payloads import Audio, Blob, Json, Payload, Text, Video, kind_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from omni_bus.engine import Allocate, EngineRequest, Inputs

RATE_HZ = 24_000
"""Of the sound."""

MAX_PROMPT_CHARACTERS = 4096
"""What a prompt is cut to while it streams in."""

Side = Annotated[int, msgspec.Meta(ge=MIN_SIDE, le=4096)]

_Rate = Annotated[int, msgspec.Meta(ge=1, le=1000)]
_Chunk = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Steps = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class VideoOptions(StreamingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `SyntheticVideo`."""

    num_frames: Amount = 24
    """Frames of each video."""
    frames_per_chunk: _Chunk = 4
    """Frames that one step makes and one chunk carries."""
    num_inference_steps: _Steps = 0
    """Steps before the first frame, each with a report on ``progress``."""
    fps: _Rate = 24
    """Frames to show in a second."""
    width: Side = 256
    """Pixels."""
    height: Side = 256
    """Pixels; a frame is width * height * 3 bytes."""


class VideoParams(WorkParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may set on `SyntheticVideo`."""

    num_frames: Amount | None = None
    frames_per_chunk: _Chunk | None = None
    num_inference_steps: _Steps | None = None
    fps: _Rate | None = None
    width: Side | None = None
    height: Side | None = None


class SyntheticVideo(SyntheticStream):
    """Makes frames that say their prompt and index, a chunk at a time, then a ramp as their sound.

    ``interactions`` takes ``{"event_id", "event": {"prompt"}, "transition_chunks"}``: the next chunk's frames say the
    new prompt, and the event is active for so many chunks more. Before a chunk that an event concerns, the port of the
    same name tells ``{"chunk": index, "started": [id], "active": [id], "completed": [id]}``; of an event without a
    prompt, ``{"refused": id, "message": why}``.
    """

    accepts: ClassVar[dict[str, str]] = {"prompt": "text", "images": "image", "interactions": "json"}
    optional_inputs: ClassVar[frozenset[str]] = frozenset({"images", "interactions"})
    emits: ClassVar[dict[str, str]] = {"video": "video", "audio": "audio", "progress": "json", "interactions": "json"}
    Options = VideoOptions
    Params = VideoParams

    async def run(self, request: EngineRequest, inputs: Inputs) -> AsyncGenerator[tuple[str, Payload] | Finish, None]:
        """Read the prompt to its end, then make frames."""
        plan: VideoOptions = plan_of(self.options, request.params)
        wanted = request.outputs
        with Progress(self._workload, plan) as progress:
            marker = await _read_marker(inputs)
            num_images = len([image async for image in inputs.port("images")])
            for step in range(plan.num_inference_steps):
                await progress.step()
                if "progress" in wanted:
                    yield "progress", Json(_report("denoise", step + 1, plan))
            if "progress" in wanted:
                yield "progress", Json(_report("decode", plan.num_inference_steps, plan))
            events = _Interactions(marker)
            reading = asyncio.create_task(events.read(inputs))
            try:
                for chunk, first in enumerate(range(0, plan.num_frames, plan.frames_per_chunk)):
                    await progress.step()
                    for told in events.next_chunk(chunk):
                        if "interactions" in wanted:
                            yield "interactions", Json(told)
                    if "video" in wanted:
                        end = min(first + plan.frames_per_chunk, plan.num_frames)
                        yield "video", _video(plan, events.marker, range(first, end), self.context.allocate)
            finally:
                reading.cancel()
                await asyncio.wait({reading})
            origin = zlib.crc32(marker.encode()) % RATE_HZ  # where the ramp begins tells requests apart
            num_samples = RATE_HZ * plan.num_frames // plan.fps if "audio" in wanted else 0
            for start in range(0, num_samples, RATE_HZ):
                yield "audio", Audio(RATE_HZ, 1, "s16", Blob(ramp(origin + start, min(RATE_HZ, num_samples - start))))
        yield Finish(detail={"frames": plan.num_frames, "images": num_images})


class _Interactions:
    """Events of one video: what its frames say, and which events concern the next chunk."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self._queue: list[dict[str, Any]] = []
        self._active: dict[str, int] = {}
        """Chunks that each event goes on for."""

    async def read(self, inputs: Inputs) -> None:
        """Queue what comes, until it is cancelled."""
        async for piece in inputs.port("interactions"):
            if isinstance(piece, Json) and isinstance(piece.value, dict):
                self._queue.append(piece.value)

    def next_chunk(self, chunk: int) -> list[dict[str, Any]]:
        """Return what is to be told before a chunk."""
        queue, self._queue = self._queue, []
        told: list[dict[str, Any]] = []
        started: list[str] = []
        for event in queue:
            event_id, prompt = str(event.get("event_id")), event.get("event", {}).get("prompt")
            if not isinstance(prompt, str):
                told.append({"refused": event_id, "message": "event: no prompt came (allowed: one)"})
                continue
            self.marker = marker_of(prompt)
            self._active[event_id] = int(event.get("transition_chunks", 0))
            started.append(event_id)
        completed = [event_id for event_id, left in self._active.items() if left <= 0]
        active = list(self._active)
        self._active = {event_id: left - 1 for event_id, left in self._active.items() if left > 0}
        if active:
            told.append({"chunk": chunk, "started": started, "active": active, "completed": completed})
        return told


async def _read_marker(inputs: Inputs) -> str:
    """Read the prompt to its end; only its beginning is kept, of which the marker is made."""
    text: str | None = None
    async for piece in inputs.port("prompt"):
        if not isinstance(piece, Text):
            raise BadInput(f"prompt: {kind_of(piece)} came (allowed: text)", field="prompt")
        text = ((text or "") + piece.text)[:MAX_PROMPT_CHARACTERS]
    if text is None:
        raise BadInput("prompt: nothing came (allowed: text)", field="prompt")
    return marker_of(text)


def _report(phase: str, step: int, plan: VideoOptions) -> dict[str, Any]:
    return {"step": step, "num_steps": plan.num_inference_steps, "phase": phase}


def _video(plan: VideoOptions, marker: str, frames: range, allocate: Allocate) -> Video:
    size = 3 * plan.width * plan.height
    data = allocate(len(frames) * size)
    for i, frame in enumerate(frames):
        mark = PictureMark(marker, frame, plan.num_frames)
        write_picture(mark, plan.height, plan.width, data.view[i * size : (i + 1) * size])
    return Video(frames.start, len(frames), plan.height, plan.width, 1, plan.fps, data)
