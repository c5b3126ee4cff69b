"""Forms of every shape and of none, and senders that stall, drip or never end; through the route that takes files."""

from __future__ import annotations

import asyncio
import gzip
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from uploads import A_FILE, END, FILES, HEAD, PURPOSE, exchange, field, files_deployment, names, post, put

from actors.testing import Running, running


@pytest.mark.parametrize(
    "body",
    [
        PURPOSE + A_FILE + END,
        A_FILE + PURPOSE + END,
        A_FILE + PURPOSE + b"--abc--",
        b"preamble\r\n" + A_FILE + PURPOSE + END + b"epilogue",
        A_FILE + field("expires_after[anchor]", "created_at") + field("expires_after[seconds]", "3600") + PURPOSE + END,
        field("file", b"hello", filename="a.txt", more="Content-Type: text/html\r\nX-Other: 1\r\n") + PURPOSE + END,
        field("purpose", "user_data", more="Content-Type: text/plain; charset=utf-8\r\n") + A_FILE + END,
    ],
)
async def test_form_of_any_order_is_taken(body: bytes) -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        status, document = await post(session, body)

        assert status == 200, document
        assert document["bytes"] == 5
        assert document["filename"] == "a.txt"
        async with session.get(f"{FILES}/{document['id']}/content") as response:
            assert await response.read() == b"hello"


@settings(max_examples=25)
@given(data=st.binary(min_size=1, max_size=3000), cut=st.integers(1, 3000), boundary=st.sampled_from(["abc", "-" * 60]))
def test_bytes_that_look_like_boundaries_survive_every_split(data: bytes, cut: int, boundary: str) -> None:
    data = data.replace(b"\0", f"\r\n--{boundary[:-1]}".encode()).replace(b"\1", b"\r\n--").replace(b"\2", b"\r\n")

    async def send() -> bytes:
        body = PURPOSE.replace(b"--abc", f"--{boundary}".encode())
        body += field("file", data, filename="a").replace(b"--abc", f"--{boundary}".encode(), 1)
        body += f"--{boundary}--\r\n".encode()

        async def pieces():
            for at in range(0, len(body), cut):
                yield body[at : at + cut]

        async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
            headers = {"Content-Type": f'multipart/form-data; boundary="{boundary}"'}
            async with session.post(FILES, data=pieces(), headers=headers) as response:
                made = await response.json()
            async with session.get(f"{FILES}/{made['id']}/content") as response:
                return await response.read()

    if f"\r\n--{boundary}".encode() not in b"\r\n" + data + b"\r\n":
        assert asyncio.run(send()) == data


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (PURPOSE + END, "file", "missing"),
        (A_FILE + END, "purpose", "missing (allowed: assistants"),
        (A_FILE + PURPOSE + PURPOSE + END, "purpose", "it came twice"),
        (A_FILE + A_FILE + PURPOSE + END, "file", "it came twice"),
        (field("file", "text") + PURPOSE + END, "file", "a text came (allowed: a file"),
        (field("purpose", "user_data", filename="p") + A_FILE + END, "purpose", "a file came (allowed: text)"),
        (field("purpose", "x" * 20_000) + A_FILE + END, "purpose", "more than 16384 bytes"),
        (field("purpose", b"\xff\xfe") + A_FILE + END, "purpose", "no UTF-8"),
        (field("purpose", "nope") + A_FILE + END, "purpose", "'nope' came"),
        (PURPOSE + field("colour", "red") + A_FILE + END, "colour", "unknown field (allowed: file, purpose"),
        (PURPOSE + field("expires_after[anchor]", "created_at") + A_FILE + END, "expires_after[seconds]", "missing"),
        (
            PURPOSE + field("expires_after[anchor]", "now") + A_FILE + END,
            "expires_after[anchor]",
            "allowed: created_at",
        ),
        (PURPOSE + field("expires_after[seconds]", "1e9") + A_FILE + END, "expires_after[seconds]", "from 3600"),
        (PURPOSE + field("file", b"x", filename="a\tb") + END, "file", "printable"),
        (PURPOSE + field("file", b"x", filename="a" * 256) + END, "file", "256 characters"),
        (PURPOSE + field("file", b"", filename="a") + END, "file", "an empty file"),
        (
            PURPOSE + field("file", b"eA==", filename="a", more="Content-Transfer-Encoding: base64\r\n") + END,
            "file",
            "Content-Transfer-Encoding",
        ),
        (b"--abc\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END, None, "without a name"),
        (b"--abc\r\n\r\nx\r\n" + END, None, "without a name"),
        (field("a", b"--x--\r\n", more="Content-Type: multipart/mixed; boundary=x\r\n") + END, None, "without a name"),
        (END, None, "without parts"),
        (b"", None, "no proper multipart form"),
        (b"nothing of the kind", None, "no proper multipart form"),
        (PURPOSE + A_FILE, None, "no proper multipart form"),
        (PURPOSE + A_FILE[:-4], None, "no proper multipart form"),
        (PURPOSE + A_FILE + b"--ab", None, "no proper multipart form"),
        (PURPOSE + b"--abc\r\nContent-Disposition: form-data; name=", None, "no proper multipart form"),
        (PURPOSE + b"--abc\r\n" + b"X: y\r\n" * 200 + b"\r\nx\r\n" + END, None, "no proper multipart form"),
        (PURPOSE + b"--abc\r\nX: " + b"y" * 10_000 + b"\r\n\r\nx\r\n" + END, None, "no proper multipart form"),
        (b"x" * 300_000, None, "no proper multipart form"),
    ],
)
async def test_form_that_is_not_right_is_refused_by_name(body: bytes, param: str | None, words: str) -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        status, document = await post(session, body)

        assert status == 400
        assert words in document["error"]["message"]
        assert document["error"]["param"] == param
        assert names(deployment) == []
        await put(session)


@settings(max_examples=100)
@given(st.data())
def test_damaged_form_is_taken_or_refused(data: st.DataObject) -> None:
    """Never a failure of ours, and nothing is left of it."""
    damaged = bytearray(PURPOSE + A_FILE + field("expires_after[anchor]", "created_at") + END)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["change", "drop", "repeat"])):
            case "change":
                damaged[at] = data.draw(st.integers(0, 255))
            case "drop":
                del damaged[at : at + data.draw(st.integers(1, 30))]
            case _:
                damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 60))]
        if not damaged:
            break
    status, num_left = _shared.send(bytes(damaged))

    assert status in (200, 400)
    assert num_left == 0


class _Shared:
    """One deployment for all examples."""

    def __init__(self) -> None:
        self.runner: asyncio.Runner | None = None
        self.stack: Any = None
        self.deployment: Running | None = None

    def send(self, body: bytes) -> tuple[int, int]:
        assert self.runner is not None
        return self.runner.run(self._send(body))

    async def _send(self, body: bytes) -> tuple[int, int]:
        if self.deployment is None:
            self.stack = running(files_deployment("max_caller_files = 100000"))
            self.deployment = await self.stack.__aenter__()
        deployment = self.deployment
        assert deployment is not None
        async with aiohttp.ClientSession(deployment.url) as session:
            status, _ = await post(session, body)
        return status, names(deployment).count("part")

    async def stop(self) -> None:
        if self.stack is not None:
            await self.stack.__aexit__(None, None, None)


_shared = _Shared()


@pytest.fixture(autouse=True)
def _one_deployment(request: pytest.FixtureRequest):
    if "damaged_form" not in request.node.name:
        yield
        return
    _shared.__init__()
    _shared.runner = asyncio.Runner()
    yield
    _shared.runner.run(_shared.stop())
    _shared.runner.close()


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"Content_Type": "application/json"}, 415, "application/json came (allowed: multipart/form-data)"),
        ({"Content_Type": "multipart/mixed; boundary=abc"}, 415, "multipart/mixed"),
        ({"Content_Type": "multipart/form-data"}, 400, "boundary"),
        ({"Content_Type": "multipart/form-data; boundary=" + "a" * 80}, 400, "boundary"),
        ({"Content_Encoding": "gzip"}, 415, "Content-Encoding: gzip came (allowed: identity)"),
    ],
)
async def test_body_of_another_kind_is_refused(headers: dict[str, str], status: int, words: str) -> None:
    body = gzip.compress(A_FILE) if "Content_Encoding" in headers else A_FILE + PURPOSE + END
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        found, document = await post(session, body, **headers)

        assert found == status
        assert words in document["error"]["message"]


@pytest.mark.parametrize(
    "endless",
    [
        (PURPOSE + b'--abc\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n', b"x" * 10_000),
        (b"", b"preamble without end\r\n" * 500),
        (b"--abc\r\n", b"X: y\r\n" * 1000),
        (b"", field("a", "")),
        (PURPOSE + b'--abc\r\nContent-Disposition: form-data; name="b"\r\n\r\n', b"x" * 10_000),
    ],
    ids=["file", "preamble", "head", "parts", "field"],
)
async def test_body_without_end_is_cut_off(endless: tuple[bytes, bytes]) -> None:
    first, again = endless

    async def pieces():
        yield first
        while True:
            yield again

    async with running(files_deployment("max_file_bytes = 1000000")) as deployment:
        async with aiohttp.ClientSession(deployment.url) as session:
            try:
                status, _ = await post(session, pieces())
            except aiohttp.ClientConnectionError:  # the refusal was sent while we were still sending
                status = 400
            assert status in (400, 413)
        async with aiohttp.ClientSession(deployment.url) as session:
            assert names(deployment) == []
            await put(session)


@pytest.mark.parametrize(
    ("gateway", "sent"),
    [
        ("body_timeout_s = 0.2", PURPOSE + A_FILE[:-10]),
        ("body_timeout_s = 0.2", b""),
        ("body_timeout_s = 0.2", b"--ab"),
    ],
)
async def test_sender_that_stalls_is_answered_and_leaves_nothing(gateway: str, sent: bytes) -> None:
    async with running(files_deployment(gateway)) as deployment:
        status, document = await exchange(deployment.port, f"{HEAD}Content-Length: 100000\r\n\r\n".encode() + sent)

        assert status == 408
        assert "bytes a second over all" in document["error"]["message"]
        assert names(deployment) == []


async def test_sender_that_only_drips_is_answered() -> None:
    """Each byte comes in time; all of them would take for ever."""
    gateway = "body_timeout_s = 20\nbody_total_timeout_s = 0.5\nmin_upload_bytes_per_s = 1000000"
    async with running(files_deployment(gateway)) as deployment:
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        writer.write(f"{HEAD}Content-Length: 100000\r\n\r\n".encode() + PURPOSE + A_FILE[:-7])
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"x")
            await asyncio.wait({answer}, timeout=0.05)
        writer.close()

        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert names(deployment) == []


async def test_fast_upload_may_take_longer_than_any_other_body() -> None:
    gateway = "body_total_timeout_s = 0.3\nmin_upload_bytes_per_s = 1"
    go_on = asyncio.Event()

    async def pieces():
        yield PURPOSE + A_FILE[:-7]
        await go_on.wait()
        yield A_FILE[-7:] + END

    async with running(files_deployment(gateway)) as deployment, aiohttp.ClientSession(deployment.url) as session:
        asyncio.get_running_loop().call_later(0.6, go_on.set)
        status, document = await post(session, pieces())

        assert status == 200, document
