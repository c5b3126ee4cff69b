"""Kept files on their way out: whole or a range of them (RFC 9110, section 14), as fast as the client reads."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.parse
from typing import TYPE_CHECKING

from aiohttp import web

from gateways.problems import Problem

if TYPE_CHECKING:
    from omni_bus.media.store import Entry, Store

PIECE_BYTES = 256 * 1024

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.IGNORECASE)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Return the first byte of a range and the one after its last; None for a header to ignore.

    Raises:
        Problem: 416, the file has no such bytes.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.groups() == ("", ""):
        return None  # several ranges, or other units: the whole is a good answer too
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < start:
            return None
    if start >= size or start >= end:
        message = f"Range: {header[:60]} came (allowed: bytes 0 to {size - 1})"
        raise Problem(416, message, headers={"Content-Range": f"bytes */{size}"})
    return start, end


async def send_file(
    request: web.Request,
    store: Store,
    entry: Entry,
    *,
    filename: str,
    write_timeout_s: float,
    content_type: str = "application/octet-stream",
) -> web.StreamResponse:
    """Answer with a file's bytes, or with the range that was asked for.

    They are called an attachment, of no known type unless we made them: whatever a caller uploaded is never a page of
    this server.

    Args:
        request: a GET or HEAD.
        store: where the file is.
        entry: the file.
        filename: what to call it.
        write_timeout_s: a client that takes nothing for so long is treated as gone.
        content_type: of what this server made itself.

    Raises:
        Problem: 416; 404 if the file went in this moment.
        ConnectionError: the client is gone.
    """
    etag = f'"{entry.id}"'  # a file never changes
    wanted = None
    if "Range" in request.headers and request.headers.get("If-Range", etag) == etag:
        wanted = byte_range(request.headers["Range"], entry.num_bytes)
    start, end = wanted or (0, entry.num_bytes)
    response = web.StreamResponse(
        status=206 if wanted else 200,
        headers={
            "Content-Type": content_type,
            "Content-Disposition": f"attachment; filename*=UTF-8''{urllib.parse.quote(filename, safe='')}",
            "X-Content-Type-Options": "nosniff",
            "Accept-Ranges": "bytes",
            "ETag": etag,
        },
    )
    if wanted:
        response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{entry.num_bytes}"
    response.content_length = end - start
    fd = await store.open(entry)
    if fd is None:
        raise Problem(404, "the file is gone")
    try:
        await response.prepare(request)
        while start < end and request.method != "HEAD":
            piece = await store.read(fd, start, min(PIECE_BYTES, end - start))
            if not piece:
                raise ConnectionAbortedError("the file is shorter than it was")
            start += len(piece)
            await write(request, response, piece, write_timeout_s)
    finally:
        os.close(fd)
    await response.write_eof()
    return response


async def write(request: web.Request, response: web.StreamResponse, piece: bytes, timeout_s: float) -> None:
    """Write a piece and wait until the client has taken enough of what came before.

    Raises:
        ConnectionError: it took nothing in time, or is gone.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(piece)
            await request.writer.drain()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client took nothing for {timeout_s:g} s") from None
