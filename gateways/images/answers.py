"""What the routes of pictures answer, as Structs, and how it is rendered."""

from __future__ import annotations

import io
import secrets
import zipfile
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gateways.images.making import data_url
from gateways.openai_answers import Exact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateways.images.making import Picture


class PictureData(Exact, frozen=True):
    """One picture."""

    b64_json: str | None = None
    url: str | None = None
    """A data URL: nothing is kept here."""
    revised_prompt: str | None = None


class PictureTokens(Exact, frozen=True):
    """Of one side."""

    text_tokens: int
    image_tokens: int


class PictureUsage(Exact, frozen=True):
    """The words of the prompt and the pictures that came and were made; no model here counts tokens."""

    input_tokens: int
    input_tokens_details: PictureTokens
    output_tokens: int
    output_tokens_details: PictureTokens
    total_tokens: int


class ImagesResponse(Exact, frozen=True, kw_only=True):
    """The pictures of a request."""

    created: int
    data: list[PictureData]
    output_format: str
    size: str
    """Of the first picture as it is, whatever was asked for."""
    background: str = "opaque"
    usage: PictureUsage
    cot_output: None = None
    metrics: dict[str, Any]
    """What the stages did; with ``return_stage_metrics``."""


class PictureEvent(Exact, frozen=True, kw_only=True):
    """One event of a stream: a picture on its way, or done."""

    type: Literal[
        "image_generation.partial_image",
        "image_generation.completed",
        "image_edit.partial_image",
        "image_edit.completed",
    ]
    b64_json: str
    background: str = "opaque"
    created_at: int
    output_format: str
    quality: str = "auto"
    size: str
    index: int
    """Which of the ``n`` pictures."""
    partial_image_index: int | msgspec.UnsetType = msgspec.UNSET
    usage: PictureUsage | msgspec.UnsetType = msgspec.UNSET


def render_blocking(
    document: dict[str, Any], pictures: Sequence[Picture], files: Sequence[bytes], *, by_url: bool
) -> bytes:
    """Return an answer's JSON; `files` are the pictures in base64."""
    data: list[dict[str, Any]] = []
    for picture, file in zip(pictures, files, strict=True):
        # Base64 needs no escapes; copied as it is, a large one costs nothing.
        raw = msgspec.json.encode(data_url(picture, file)) if by_url else b'"%b"' % file
        found: dict[str, Any] = {"b64_json": None, "url": None, "revised_prompt": None}
        data.append(found | {"url" if by_url else "b64_json": msgspec.Raw(raw)})
    return msgspec.json.encode(document | {"data": data})


def file_blocking(pictures: Sequence[Picture]) -> tuple[str, str, bytes]:
    """Return a name, media type and content: of the picture, or of an archive of several."""
    mark = secrets.token_hex(4)
    if len(pictures) == 1:
        (picture,) = pictures
        return f"image_{mark}.{picture.format}", picture.media_type, picture.file
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as archive:  # pictures are packed already
        for i, picture in enumerate(pictures):
            archive.writestr(f"image_{i}.{picture.format}", picture.file)
    return f"images_{mark}.zip", "application/zip", found.getvalue()
