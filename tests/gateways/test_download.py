"""Kept files come whole or in ranges, at their reader's speed."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from uploads import FILES, files_deployment, put, turn

from actors.testing import running
from gateways.download import byte_range
from gateways.problems import Problem


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-", (0, 10)),
        ("bytes=3-5", (3, 6)),
        ("Bytes=3-500", (3, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=9-9", (9, 10)),
        ("bytes=5-3", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=x-y", None),
        ("bytes=" + "9" * 5000 + "-", None),
        ("", None),
    ],
)
def test_range_is_read_or_left_alone(header: str, expected: tuple[int, int] | None) -> None:
    assert byte_range(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-20", "bytes=999999999999-", "bytes=-0"])
def test_range_beyond_the_end_is_refused(header: str) -> None:
    with pytest.raises(Problem) as caught:
        byte_range(header, 10)
    assert caught.value.status == 416
    assert caught.value.headers == {"Content-Range": "bytes */10"}


async def test_content_comes_whole_and_in_ranges() -> None:
    data = os.urandom(1_000_000)
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        path = f"{FILES}/{await put(session, data)}/content"

        async def get(method: str = "GET", **headers: str):
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.request(method, path, headers=sent) as response:
                return response.status, response.headers, await response.read()

        status, headers, body = await get()
        assert (status, body) == (200, data)
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Disposition"].startswith("attachment")
        etag = headers["ETag"]
        status, headers, body = await get(Range="bytes=10-999989", If_Range=etag)
        assert (status, body) == (206, data[10:999_990])
        assert headers["Content-Range"] == "bytes 10-999989/1000000"
        assert (await get(Range="bytes=-7"))[2] == data[-7:]
        assert (await get(Range="bytes=5-9", If_Range='"another"'))[::2] == (200, data)
        assert (await get(Range="bytes=0-1,5-6"))[::2] == (200, data)
        status, headers, body = await get(Range="bytes=1000000-")
        assert (status, headers["Content-Range"]) == (416, "bytes */1000000")
        status, headers, body = await get("HEAD")
        assert (status, headers["Content-Length"], body) == (200, "1000000", b"")


async def test_reader_that_takes_nothing_is_dropped_and_its_file_closed() -> None:
    async with (
        running(files_deployment("write_timeout_s = 0.3")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        path = f"{FILES}/{await put(session, bytes(20_000_000))}/content"
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            stuck.connect(("127.0.0.1", deployment.port))
            stuck.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

            def is_open() -> bool:
                links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
                return any(link.endswith(".blob") for link in links)

            while not is_open():
                await turn(session)
            while is_open():
                await turn(session)


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
