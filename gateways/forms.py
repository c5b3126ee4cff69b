"""Multipart forms (RFC 7578), read as they come: no part is ever whole in memory unless it is a short field.

The body is bounded in bytes, in time without a byte, and in its rate over all: whoever sends drop by drop is answered
with 408, however long the drops last.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from aiohttp import BodyPartReader, MultipartReader, http_exceptions, web
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam

from gateways.http import check_length, too_large
from gateways.media import MediaOptions
from gateways.problems import Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

ResultT = TypeVar("ResultT")

# aiohttp only warns, on standard error and with what came, of heads that it can't read.
warnings.filterwarnings("error", category=BadContentDispositionHeader)
warnings.filterwarnings("error", category=BadContentDispositionParam)

PIECE_BYTES = 64 * 1024
"""Read of a part at a time."""

MAX_PARTS = 64
FRAMING_BYTES = 64 * 1024
"""What a form may have besides its file: boundaries, heads of parts, short fields."""

MAX_LINES = 1024
"""Boundaries and lines of heads. Each is read alone, so that a body of nothing but short lines would hold the loop."""

MAX_FIELD_BYTES = 16 * 1024
MAX_NAME_CHARACTERS = 255

_NOT_A_FORM = (
    ValueError,
    RuntimeError,
    AssertionError,
    http_exceptions.BadHttpMessage,
    web.RequestPayloadError,
    BadContentDispositionHeader,
    BadContentDispositionParam,
)
"""What aiohttp's reader raises for bytes that are no form."""

_PLAIN_ENCODINGS = ("", "binary", "8bit", "7bit")


class FormOptions(MediaOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a ``[gateways.NAME]`` table of a gateway that takes forms."""

    min_upload_bytes_per_s: Annotated[int, msgspec.Meta(ge=1)] = 16 * 1024
    """An upload that is slower over all, after its first `body_total_timeout_s`, is answered with 408."""


class _Body:
    """A request's body as `MultipartReader` reads it, with its limits.

    Raises:
        Problem: 413, 408.
    """

    def __init__(self, request: web.Request, options: FormOptions, max_bytes: int) -> None:
        self._content = request.content
        self._options = options
        self._max_bytes = max_bytes
        self._returned: list[bytes] = []
        self._num_lines = 0
        self._now = asyncio.get_running_loop().time
        self._began_at = self._now()
        self.num_bytes = 0

    def at_eof(self) -> bool:
        """Whether nothing more comes."""
        return not self._returned and self._content.at_eof()

    def unread_data(self, data: bytes) -> None:
        """Take back what was read too far."""
        if data:
            self._returned.append(data)

    async def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end."""
        if self._returned:
            data = self._returned.pop()
            if len(data) > size:
                self._returned.append(data[size:])
            return data[:size]
        if self._content.at_eof():  # asked a few times more, aiohttp would warn of it
            return b""
        return self._counted(await self._timely(self._content.read(size)))

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Return one line with its end."""
        self._num_lines += 1
        if self._num_lines > MAX_LINES:
            raise _improper()
        line = b""
        while self._returned and not line.endswith(b"\n"):
            head, found, rest = self._returned.pop().partition(b"\n")
            line += head + found
            if rest:
                self._returned.append(rest)
        if max_line_length is not None and len(line) > max_line_length:
            raise _improper()
        if line.endswith(b"\n"):
            return line
        # A line that goes on in what is still to come; heads of parts are short, and all else is read by `read`.
        return line + self._counted(await self._timely(self._content.readline(max_line_length=max_line_length)))

    def _counted(self, data: bytes) -> bytes:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise too_large(f"more than {self._max_bytes}", self._max_bytes)
        return data

    async def _timely(self, step: Awaitable[bytes]) -> bytes:
        options = self._options
        slowest_s = options.body_total_timeout_s + self.num_bytes / options.min_upload_bytes_per_s
        ends_at = min(self._began_at + slowest_s, self._now() + options.body_timeout_s)
        try:
            async with asyncio.timeout_at(ends_at):
                return await step
        except TimeoutError:
            message = (
                f"body: {self.num_bytes} bytes came, then nothing in time (allowed: {options.body_timeout_s:g} s "
                f"between two bytes, {options.min_upload_bytes_per_s} bytes a second over all)"
            )
            raise Problem(408, message, must_close=True) from None


class Part:
    """One part of a form."""

    def __init__(self, name: str, filename: str | None, reader: BodyPartReader, content_type: str = "") -> None:
        self.name = name
        self.filename = filename
        """None for a field, a text for a file; no path, and never to be used as one."""
        self.content_type = content_type
        """The media type that the part says it is, in lower case and without parameters; it need not be true."""
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the part's bytes as they come."""
        while piece := await _sound(self._reader.read_chunk(PIECE_BYTES)):
            yield piece
            await asyncio.sleep(0)  # one piece of each upload in a turn of the loop, however much of it is there

    async def text(self, max_bytes: int = MAX_FIELD_BYTES) -> str:
        """Return a short field.

        Raises:
            Problem: it is longer, or not UTF-8, or a file.
        """
        if self.filename is not None:
            raise Problem(400, f"{self.name}: a file came (allowed: text)", param=self.name, must_close=True)
        found = bytearray()
        async for piece in self.pieces():
            found += piece
            if len(found) > max_bytes:
                message = f"{self.name}: more than {max_bytes} bytes came (allowed: {max_bytes})"
                raise Problem(400, message, param=self.name, must_close=True)
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise Problem(400, f"{self.name}: bytes that are no UTF-8 came", param=self.name, must_close=True) from None


async def read_form(request: web.Request, options: FormOptions, *, max_bytes: int) -> AsyncIterator[Part]:
    """Yield a form's parts in their order; each is to be read before the next one is asked for.

    Args:
        request: its body is not read yet.
        options: limits of time.
        max_bytes: limit of the whole body.

    Raises:
        Problem: 415 for another content type, 413, 408, and 400 for a body that is no form.
    """
    if request.content_type != "multipart/form-data":
        came = request.headers.get("Content-Type", "")[:100] or "none"
        message = f"Content-Type: {came} came (allowed: multipart/form-data)"
        raise Problem(415, message, must_close=request.can_read_body)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Problem(415, f"Content-Encoding: {encoding[:40]} came (allowed: identity)", must_close=True)
    check_length(request, max_bytes)
    body = _Body(request, options, max_bytes)
    try:
        reader = MultipartReader(request.headers, body)  # type: ignore[arg-type] (what it uses of a StreamReader)
    except (ValueError, UnicodeEncodeError):
        message = "Content-Type: multipart/form-data without a proper boundary came (allowed: with one)"
        raise Problem(400, message, must_close=True) from None
    num_parts = 0
    while (part := await _sound(reader.next())) is not None:
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise Problem(400, f"body: more than {MAX_PARTS} parts came (allowed: {MAX_PARTS})", must_close=True)
        try:
            named = _part(part)
        except _NOT_A_FORM:
            raise _improper() from None
        yield named
    if not num_parts:
        raise Problem(400, "body: a form without parts came", must_close=True)


def _part(part: BodyPartReader | MultipartReader) -> Part:
    if not isinstance(part, BodyPartReader) or not part.name:
        raise Problem(400, "body: a part without a name came (allowed: fields and files with names)", must_close=True)
    name = _text(part.name)[:MAX_NAME_CHARACTERS]
    if part.headers.get("Content-Transfer-Encoding", "").lower() not in _PLAIN_ENCODINGS:
        # RFC 7578, 4.7: not to be used; taken as plain bytes it would be something else than was meant.
        message = f"{name}: a Content-Transfer-Encoding came (allowed: none, or binary)"
        raise Problem(400, message, param=name, must_close=True)
    filename = part.filename
    if filename is not None:
        filename = _text(filename)
        if len(filename) > MAX_NAME_CHARACTERS or not filename.isprintable():
            message = (
                f"{name}: a file name of {len(filename)} characters came (allowed: {MAX_NAME_CHARACTERS}, printable)"
            )
            raise Problem(400, message, param=name, must_close=True)
    content_type = part.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return Part(name, filename, part, _text(content_type)[:MAX_NAME_CHARACTERS])


def _text(raw: str) -> str:
    """Return a name of a head, whose bytes need not be UTF-8, as text."""
    return raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def _sound(step: Awaitable[ResultT]) -> ResultT:
    """Do a step of the reader; turn what it says of a body that is no form into a refusal."""
    try:
        return await step
    except _NOT_A_FORM:
        raise _improper() from None


def _improper() -> Problem:
    return Problem(400, "body: it is no proper multipart form, or cut off", must_close=True)
