"""Files over raw HTTP: forms of every shape, clients that misbehave, ranges, and what is left on the disk."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from actors.testing import Running, running
from gateways.download import byte_range
from gateways.openai_files import check_folder
from gateways.problems import Problem

FILES = "/v1/files"
TOML = """
[stages.llm]
adapter = "synthetic-text"
[pipelines.chat]
edges = ["in.messages -> llm.prompt", "llm.text -> out.text"]
[gateways.openai]
{gateway}
"""
HEAD = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=abc\r\n"


def files_deployment(gateway: str = "") -> str:
    return TOML.format(gateway=gateway)


def folder_of(deployment: Running) -> Path:
    return Path(deployment.deployment.state_dir) / "gateways" / "openai" / "files"


def names(deployment: Running) -> list[str]:
    """Endings of what is kept, and of what is under way."""
    if not folder_of(deployment).exists():
        return []
    return sorted(path.name.partition(".")[2] for path in folder_of(deployment).iterdir() if path.name != ".lock")


def field(name: str, value: str | bytes, *, filename: str | None = None, more: str = "") -> bytes:
    data = value.encode() if isinstance(value, str) else value
    label = "" if filename is None else f'; filename="{filename}"'
    return f'--abc\r\nContent-Disposition: form-data; name="{name}"{label}\r\n{more}\r\n'.encode() + data + b"\r\n"


PURPOSE = field("purpose", "user_data")
A_FILE = field("file", b"hello", filename="a.txt")
END = b"--abc--\r\n"


async def post(session: aiohttp.ClientSession, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    sent = {"Content-Type": "multipart/form-data; boundary=abc"} | {k.replace("_", "-"): v for k, v in headers.items()}
    async with session.post(FILES, data=body, headers=sent) as response:
        return response.status, await response.json()


async def put(session: aiohttp.ClientSession, data: bytes = b"hello") -> str:
    status, document = await post(session, io.BytesIO(PURPOSE + field("file", data, filename="a.txt") + END))
    assert status == 200, document
    return document["id"]


async def exchange(port: int, sent: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes and return the answer; the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        raw = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    head, _, rest = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


# --- forms --------------------------------------------------------------------------------------------------


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
        (PURPOSE + field("expires_after[anchor]", "now") + A_FILE + END, "expires_after[anchor]", "allowed: created_at"),
        (PURPOSE + field("expires_after[seconds]", "1e9") + A_FILE + END, "expires_after[seconds]", "from 3600"),
        (PURPOSE + field("file", b"x", filename="a\tb") + END, "file", "printable"),
        (PURPOSE + field("file", b"x", filename="a" * 256) + END, "file", "256 characters"),
        (PURPOSE + field("file", b"", filename="a") + END, "file", "an empty file"),
        (
            PURPOSE + field("file", b"eA==", filename="a", more="Content-Transfer-Encoding: base64\r\n") + END,
            "file",
            "Content-Transfer-Encoding",
        ),
        (b'--abc\r\nContent-Disposition: form-data\r\n\r\nx\r\n' + END, None, "without a name"),
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
        async with aiohttp.ClientSession(self.deployment.url) as session:
            status, _ = await post(session, body)
        return status, names(self.deployment).count("part")

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


async def test_names_are_told_back_and_used_for_nothing() -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for name in ("../../../../tmp/evil", "/etc/passwd", "..", ".lock", "C:\\x", "größe 漢"):
            status, document = await post(session, PURPOSE + field("file", b"x", filename=name.replace("\\", "\\\\")) + END)
            assert status == 200
            assert document["filename"] == name.removeprefix("/")
        assert set(names(deployment)) == {"blob", "json"}
        assert {path.name.partition("-")[0] for path in folder_of(deployment).iterdir()} == {"file", ".lock"}


@pytest.mark.parametrize(
    "file_id",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "file-" + "0" * 32, ".lock", "%00", "a" * 5000, "file-x.json", "%ff"],
)
async def test_what_is_no_id_is_no_file(file_id: str) -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession() as session:
        path = URL(f"{deployment.url}{FILES}/{file_id}", encoded=True)
        content = URL(f"{deployment.url}{FILES}/{file_id}/content", encoded=True)
        for method, url in (("GET", path), ("DELETE", path), ("GET", content)):
            async with session.request(method, url) as response:
                assert response.status in (404, 405)
                assert (await response.json())["error"]["code"] == response.status


# --- limits -------------------------------------------------------------------------------------------------


async def test_file_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    async with running(files_deployment("max_file_bytes = 100000")) as deployment:
        for expect in ("", "Expect: 100-continue\r\n"):
            status, document = await exchange(
                deployment.port, f"{HEAD}Content-Length: 50000000\r\n{expect}\r\n".encode()
            )
            assert status == 413
            assert "50000000 bytes came (allowed: at most 165536)" in document["error"]["message"]
        assert names(deployment) == []


async def test_expected_upload_is_asked_for() -> None:
    """Larger than other bodies may be."""
    async with (
        running(files_deployment("max_body_bytes = 1024")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        body = PURPOSE + field("file", b"x" * 100_000, filename="a") + END
        headers = {"Content-Type": "multipart/form-data; boundary=abc"}
        async with session.post(FILES, data=body, headers=headers, expect100=True) as response:
            assert response.status == 200


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


async def test_hundred_uploads_of_which_a_third_breaks_off() -> None:
    """What counts files at the end is the disk."""
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:

        async def break_off() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
            writer.write(f"{HEAD}Content-Length: 1000000\r\n\r\n".encode() + PURPOSE + A_FILE[:-2])
            while "part" not in names(deployment):
                await asyncio.sleep(0)
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(break_off() if i % 3 == 0 else put(session) for i in range(99)))
        while "part" in names(deployment):
            await session.get("/version")

        assert names(deployment) == ["blob"] * 66 + ["json"] * 66


async def test_client_that_leaves_within_the_commit_leaves_nothing(monkeypatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    fsync = os.fsync

    def held(fd: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        fsync(fd)

    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", held)
            _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
            body = PURPOSE + A_FILE + END
            writer.write(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await begun.wait()
            writer.close()
            await writer.wait_closed()
            await session.get("/version")
            go_on.set()
        while names(deployment):
            await session.get("/version")
        async with session.get(FILES) as response:
            assert (await response.json())["data"] == []


async def test_full_server_and_broken_folder_are_told_apart(tmp_path: Path) -> None:
    async with running(files_deployment("max_files_bytes = 10")) as deployment:
        async with aiohttp.ClientSession(deployment.url) as session:
            await put(session)
            status, document = await post(session, PURPOSE + field("file", b"123456", filename="a") + END)
            assert status == 507
            assert document["error"]["type"] == "InsufficientStorageError"
    (tmp_path / "x").write_bytes(b"")
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        folder_of(deployment).parent.mkdir(parents=True)
        folder_of(deployment).write_bytes(b"a file in its place")
        status, document = await post(session, PURPOSE + A_FILE + END)
        assert status == 503
        assert str(folder_of(deployment)) not in document["error"]["message"]
        async with session.get(FILES) as response:
            assert response.status == 503


def test_folder_that_cannot_work_is_a_mistake_in_the_options(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "closed").mkdir(mode=0o500)

    assert check_folder(str(tmp_path / "new" / "deeper")) == ""
    assert check_folder(str(tmp_path)) == ""
    assert "is not a folder" in check_folder(str(tmp_path / "file"))
    assert "is not a folder" in check_folder(str(tmp_path / "file" / "below"))
    if os.getuid():
        assert "can't be written to" in check_folder(str(tmp_path / "closed"))


# --- lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "param", "words"),
    [
        ("limit=0", "limit", "from 1 to 10000"),
        ("limit=10001", "limit", "from 1 to 10000"),
        ("limit=ten", "limit", "'ten' came"),
        ("limit=-1", "limit", "from 1 to 10000"),
        ("limit=%C2%B2", "limit", "from 1 to 10000"),
        ("limit=" + "9" * 5000, "limit", "from 1 to 10000"),
        ("order=up", "order", "allowed: asc, desc"),
        ("purpose=nope", "purpose", "allowed: assistants"),
        ("after=file-nope", "after", "no such file"),
    ],
)
async def test_list_refuses_what_it_does_not_know(query: str, param: str, words: str) -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.get(f"{FILES}?{query}") as response:
            document = await response.json()

            assert response.status == 400
            assert document["error"]["param"] == param
            assert words in document["error"]["message"]


async def test_empty_list_is_a_list() -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        async with session.get(FILES) as response:
            found = await response.json()

        assert found == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        assert not folder_of(deployment).exists() or names(deployment) == []


async def test_expired_file_is_swept_at_its_time(monkeypatch) -> None:
    monkeypatch.setattr("gateways.openai_files.MIN_LIFE_S", 0)
    expiring = field("expires_after[anchor]", "created_at") + field("expires_after[seconds]", "1")
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        kept = await put(session)
        status, document = await post(session, PURPOSE + A_FILE + expiring + END)
        assert status == 200
        while len(names(deployment)) > 2:
            await session.get("/version")
        async with session.get(f"{FILES}/{document['id']}") as response:
            assert response.status == 404
        async with session.get(FILES) as response:
            assert [file["id"] for file in (await response.json())["data"]] == [kept]


# --- ranges -------------------------------------------------------------------------------------------------


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
            stuck.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

            def is_open() -> bool:
                links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
                return any(link.endswith(".blob") for link in links)

            while not is_open():
                await session.get("/version")
            while is_open():
                await session.get("/version")


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


async def test_files_are_guarded_by_keys() -> None:
    async with (
        running(files_deployment('api_keys = ["k"]')) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        for method, path in (
            ("POST", FILES),
            ("GET", FILES),
            ("GET", f"{FILES}/x"),
            ("GET", f"{FILES}/x/content"),
            ("DELETE", f"{FILES}/x"),
        ):
            async with session.request(method, path) as response:
                assert response.status == 401
