"""Pictures in live conversations, decoded before a session has them: what is none is refused by its field."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_bus.core.session import client_events as asked
from omni_bus.core.session.checks import PICTURES
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.items import InputImage, Message
from omni_bus.errors import OmniBusError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateways.media import MediaReader
    from gateways.realtime.reading import Events


async def check_pictures(events: Events, media: MediaReader) -> None:
    """Decode every picture that events bring, within the gateway's limits.

    Raises:
        SessionError: names the first that can't be, and why.
    """
    for event in events:
        for field, source, code in _pictures(event):
            try:
                await media.image(source, field=field)
            except OmniBusError as error:
                raise SessionError(code, error.message, param=field) from error


def _pictures(event: asked.AnyClientEvent) -> Iterator[tuple[str, str | bytes, Code]]:
    match event:
        case asked.AudioAppend(video_frames=frames):
            yield from ((f"video_frames[{i}]", frame, Code.INVALID_VIDEO_FRAMES) for i, frame in enumerate(frames))
        case asked.ItemCreate(item=item):
            yield from _pictures_of(item, "item")
        case asked.ResponseCreate(response=options):
            for index, item in enumerate(options.input or ()):
                yield from _pictures_of(item, f"response.input[{index}]")
        case _:
            pass


def _pictures_of(item: object, at: str) -> Iterator[tuple[str, str, Code]]:
    """Of the pictures of an item those that are here; the session refuses the others, so that nothing is fetched."""
    for index, part in enumerate(item.content if isinstance(item, Message) else ()):
        if isinstance(part, InputImage) and (part.image_url or "").lower().startswith(PICTURES):
            yield f"{at}.content[{index}].image_url", part.image_url or "", Code.INVALID_IMAGE
