"""A request for a video on the bus, and what comes of it: frames and sound to a file, reports to whoever asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gateways.fan_out import Call, opened
from gateways.openai_refusals import renamed
from gateways.videos import body
from omni_bus.client import End, Item
from omni_bus.errors import BadFrame, BadInput
from omni_bus.media.mp4 import Facts, Mp4File
from omni_bus.media.sound import slices
from omni_bus.media.video_pool import VideoPool, frame_slices
from omni_bus.wire.payloads import Audio, Json, Video

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateways.http import Terms
    from gateways.videos.form import Request
    from omni_bus.client import BusClient


class Watcher(Protocol):
    """Whoever is told how far it is; what it raises ends the request."""

    def on_admitted(self) -> None:
        """The scheduler took it."""

    async def on_report(self, report: Any) -> None:
        """A stage did a step."""

    async def on_frames(self, num_frames: int) -> None:
        """So many frames are in the file."""


class Made(msgspec.Struct, frozen=True):
    """What came of a request."""

    facts: Facts
    stage_durations: dict[str, float]
    """Seconds by stage."""


def call_of(request: Request) -> Call:
    """Return a request as the bus has it."""
    wanted = request.wanted
    return Call(
        pipeline=wanted.pipeline.name,
        outputs=wanted.outputs,
        params=wanted.params,
        inputs=request.inputs,
        wants_metrics=True,
    )


async def make_file(
    client: BusClient,
    request: Request,
    terms: Terms,
    pool: VideoPool,
    fd: int,
    *,
    watcher: Watcher,
    measure: Callable[[], Awaitable[None]],
) -> Made:
    """Have a video made and write it to a file; leaving early cancels it on the bus.

    Args:
        client: the bus.
        request: what to make.
        terms: of whoever asks.
        pool: encodes.
        fd: an empty file.
        watcher: is told how far it is.
        measure: looks at the file's size after each piece; what it raises ends the request.

    Raises:
        BadInput: what a stage refuses, by the field that the caller sent.
        BadFrame: what a stage put out is no video.
        OmniBusError: what the request ended with.
    """
    wanted = request.wanted
    file = await pool.run(
        lambda: Mp4File(fd, pool.converter, wanted.settings, expects_sound=body.SOUND in wanted.outputs)
    )
    durations: dict[str, float] = {}
    try:
        async with opened(client, call_of(request), terms) as made:
            watcher.on_admitted()
            async for event in made:
                if isinstance(event, End):
                    durations |= durations_of(event)
                else:
                    await _take(event, file, pool, watcher)
                    await measure()
        facts = await _encoded(pool, file.finish_blocking)
        await measure()
    except BadInput as error:
        raise renamed(error, wanted.pipeline, wanted.names) from error
    finally:
        await pool.run(file.close)
    return Made(facts, durations)


def durations_of(end: End) -> dict[str, float]:
    """Return how long the stages behind an output worked."""
    accounts: dict[str, Any] = end.finish.detail.get("metrics") or {}
    return {stage: round(float(account["total_s"]), 6) for stage, account in accounts.items()}


async def _take(event: Item, file: Mp4File, pool: VideoPool, watcher: Watcher) -> None:
    match event.payload:
        case Video() as video:
            for piece in frame_slices(video):
                await _encoded(pool, file.feed_blocking, piece)
                await watcher.on_frames(file.num_frames)
        case Audio() as sound:
            for piece in slices(sound, sound.rate_hz):
                await _encoded(pool, file.feed_blocking, piece)
        case Json(value=report):
            await watcher.on_report(report)
        case _:
            raise BadFrame(f"{event.port}: another payload came (allowed: frames, sound, reports)")


async def _encoded(pool: VideoPool, function: Callable[..., Any], *args: Any) -> Any:
    """Run a step of the encoder; its refusals are the stages' faults, not the caller's."""
    try:
        return await pool.run(function, *args)
    except (ValueError, OverflowError) as error:
        raise BadFrame(f"video: {error}") from error
