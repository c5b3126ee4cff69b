"""Pictures, sound and video that a request brings or names, to payloads for the bus, within the gateway's limits.

One `MediaReader` serves every route that takes media: ``image_url``, ``input_audio``, reference pictures, uploads.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec

from gateways.http import HttpOptions
from omni_bus.errors import BadInput
from omni_bus.media.addresses import AllowedAddresses
from omni_bus.media.decode import AudioRequest, ImageRequest, Request, VideoRequest
from omni_bus.media.fetch import Fetcher, FetchOptions
from omni_bus.media.inline import decode_base64_blocking, decode_data_url_blocking, is_data_url
from omni_bus.media.local import is_file_url, read_file_url_blocking
from omni_bus.media.spool import Spool, too_large
from omni_bus.media.store import disk_error
from omni_bus.runtime.media_pool import MediaPool
from omni_bus.wire.payloads import Audio, Image, SampleFormat, Video

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["image", "audio", "video"]

_Bytes = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]

SMALL_BYTES = 64 * 1024
"""Base64 up to this size is decoded on the loop: that takes less than the hop to a thread."""


class MediaOptions(HttpOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table of a gateway that takes media."""

    media_fetch: bool = False
    """Fetch media from http and https addresses that requests name; public ones only."""

    media_hosts: tuple[str, ...] = ()
    """Fetch from these hosts only, as ``images.example.com`` or ``*.example.org``."""

    media_networks: tuple[str, ...] = ()
    """Networks to fetch from although they are not public, as ``10.1.0.0/16``."""

    media_root: str = ""
    """Folder whose files requests may name as ``file://…``; by default none."""

    media_redirects: Annotated[int, msgspec.Meta(ge=0, le=20)] = 3
    """Redirects that one fetch follows."""

    media_first_byte_timeout_s: _Seconds = 5.0
    """A server that media is fetched from may take so long to begin its answer."""

    image_fetch_timeout_s: _Seconds = 5.0
    """A picture may take so long to fetch."""

    audio_fetch_timeout_s: _Seconds = 10.0
    """A sound may take so long to fetch."""

    video_fetch_timeout_s: _Seconds = 30.0
    """A video may take so long to fetch."""

    max_image_bytes: _Bytes = 20 * 1024 * 1024
    """A larger picture file is refused."""

    max_audio_bytes: _Bytes = 25 * 1024 * 1024
    """A larger sound file is refused."""

    max_video_bytes: _Bytes = 128 * 1024 * 1024
    """A larger video file is refused."""

    max_image_pixels: _Bytes = 89_478_485
    """A picture of more is refused by its header; so many are 256 MiB, a stage's default `max_input_bytes`."""

    max_audio_seconds: _Seconds = 600.0
    """A longer sound is refused."""

    max_video_seconds: _Seconds = 600.0
    """A longer video is refused."""

    max_video_pixels: _Bytes = 33_177_600
    """A video with larger frames is refused; 7680 × 4320."""

    max_video_frames: _Bytes = 36_000
    """A video of more frames is refused, whether or not all are wanted; 600 s of 60 a second."""

    max_decoded_bytes: _Bytes = 256 * 1024 * 1024
    """Sound or video of more samples, once decoded, is refused."""

    decode_processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Files that are decoded at the same time, each in a process of its own."""

    decode_timeout_s: _Seconds = 30.0
    """A file that takes longer to decode is refused."""

    decode_memory_bytes: Annotated[int, msgspec.Meta(ge=64 * 1024 * 1024)] = 2 * 1024**3
    """A file that takes more memory to decode is refused."""

    def __post_init__(self) -> None:
        try:
            AllowedAddresses(self.media_networks)
        except ValueError as error:
            raise ValueError(f"media_networks: {error} (allowed: networks in CIDR notation, as 10.1.0.0/16)") from None


class MediaReader:
    """Reads media from wherever a request says it is. Made on a loop; `close` at the end.

    Args:
        options: what may be read, and the limits.
        fetcher: for tests that play a name server.
    """

    def __init__(self, options: MediaOptions, fetcher: Fetcher | None = None) -> None:
        self._options = options
        self._fetcher = fetcher
        self._pool = MediaPool(options.decode_processes, options.decode_timeout_s, options.decode_memory_bytes)

    async def close(self) -> None:
        """Break off what is under way."""
        self._pool.close()
        if self._fetcher is not None:
            await self._fetcher.close()

    async def image(self, source: str | bytes | Spool, *, field: str, channels: Literal[0, 1, 3, 4] = 3) -> Image:
        """Return a picture.

        Args:
            source: a URL (``data:``, ``http``, ``https``, ``file:``), base64, or the file itself.
            field: the caller's field, for refusals.
            channels: 1 grey, 3 RGB on white, 4 RGBA; 0 keeps transparency where there is some.

        Raises:
            BadInput: damaged, of another kind, or not to be read.
            MediaTooLarge: beyond a limit.
            Unreachable: an address that doesn't give it.
        """
        request = ImageRequest(field, self._options.max_image_pixels, channels)
        return cast(Image, await self._decode(source, "image", request))

    async def audio(
        self,
        source: str | bytes | Spool,
        *,
        field: str,
        rate_hz: int = 0,
        channels: int = 0,
        sample_format: SampleFormat = "s16",
    ) -> Audio:
        """Return a sound, or a video's, resampled and mixed down where that is asked for; see `image`."""
        options = self._options
        request = AudioRequest(
            field, options.max_audio_seconds, options.max_decoded_bytes, rate_hz, channels, sample_format
        )
        return cast(Audio, await self._decode(source, "audio", request))

    async def video(
        self,
        source: str | bytes | Spool,
        *,
        field: str,
        fps: float | None = None,
        max_frames: int | None = None,
        max_frame_pixels: int | None = None,
    ) -> Video:
        """Return a video's frames, so many a second, at most so many, at most so large; see `image`."""
        options = self._options
        request = VideoRequest(
            field,
            options.max_video_seconds,
            options.max_video_pixels,
            options.max_video_frames,
            options.max_decoded_bytes,
            fps,
            max_frames,
            max_frame_pixels,
        )
        return cast(Video, await self._decode(source, "video", request))

    async def _decode(self, source: str | bytes | Spool, kind: Kind, request: Request) -> Image | Audio | Video:
        max_bytes: int = getattr(self._options, f"max_{kind}_bytes")
        field = request.field
        if not isinstance(source, str):
            num_bytes = source.num_bytes if isinstance(source, Spool) else len(source)
            if num_bytes > max_bytes:
                raise too_large(field, f"{num_bytes}", max_bytes)
            return await self._pool.decode(source, request)
        if _is_web_url(source):
            with Spool(max_bytes, what=field) as spool:
                await self._fetch(source, spool, kind, field)
                return await self._pool.decode(spool, request)
        return await self._pool.decode(await self._inline(source, field, max_bytes), request)

    async def _fetch(self, url: str, spool: Spool, kind: Kind, field: str) -> None:
        if self._fetcher is None:
            self._fetcher = Fetcher(fetch_options(self._options))
        timeout_s: float = getattr(self._options, f"{kind}_fetch_timeout_s")
        try:
            await self._fetcher.fetch(url, spool, field=field, timeout_s=timeout_s)
        except OSError as error:
            raise disk_error(error) from error

    async def _inline(self, text: str, field: str, max_bytes: int) -> bytes:
        read: Callable[..., bytes] = decode_base64_blocking
        more: dict[str, Any] = {}
        if is_data_url(text):
            read = decode_data_url_blocking
        elif is_file_url(text):
            read, more = read_file_url_blocking, {"root": self._options.media_root}
        elif "://" in text[:64]:
            raise BadInput(f"{field}: another scheme came (allowed: data:, http://, https://, file:///)", field=field)
        if len(text) <= SMALL_BYTES and not more:
            return read(text, field=field, max_bytes=max_bytes)
        return await asyncio.to_thread(read, text, field=field, max_bytes=max_bytes, **more)


def fetch_options(options: MediaOptions) -> FetchOptions:
    """Return the fetcher's part of a gateway's options."""
    return FetchOptions(
        enabled=options.media_fetch,
        allowed_hosts=options.media_hosts,
        allowed_networks=options.media_networks,
        max_redirects=options.media_redirects,
        first_byte_timeout_s=options.media_first_byte_timeout_s,
    )


def _is_web_url(text: str) -> bool:
    return text[:64].lstrip().lower().startswith(("http://", "https://"))
