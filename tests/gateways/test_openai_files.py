"""Files over raw HTTP: names, ids, limits, lists, and what is left on the disk."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

sys.path.insert(0, str(Path(__file__).parent))

from uploads import (
    A_FILE,
    END,
    FILES,
    HEAD,
    PURPOSE,
    exchange,
    field,
    files_deployment,
    folder_of,
    names,
    post,
    put,
    turn,
)

from actors.testing import running
from gateways.openai_files import check_folder


async def test_names_are_told_back_and_used_for_nothing() -> None:
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:
        for name in ("../../../../tmp/evil", "/etc/passwd", "..", ".lock", "C:\\x", "größe 漢"):
            status, document = await post(
                session, PURPOSE + field("file", b"x", filename=name.replace("\\", "\\\\")) + END
            )
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


async def test_hundred_uploads_of_which_a_third_breaks_off() -> None:
    """What counts files at the end is the disk."""
    async with running(files_deployment()) as deployment, aiohttp.ClientSession(deployment.url) as session:

        async def break_off() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
            begun = PURPOSE + field("file", bytes(300_000), filename="a.txt")
            writer.write(f"{HEAD}Content-Length: 1000000\r\n\r\n".encode() + begun[:-2])
            while "part" not in names(deployment):
                await turn(session)
            writer.close()
            await writer.wait_closed()

        await asyncio.gather(*(break_off() if i % 3 == 0 else put(session) for i in range(99)))
        while "part" in names(deployment):
            await turn(session)

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
            await turn(session)
            go_on.set()
        while names(deployment):
            await turn(session)
        async with session.get(FILES) as response:
            assert (await response.json())["data"] == []


async def test_full_server_and_broken_folder_are_told_apart() -> None:
    async with (
        running(files_deployment("max_files_bytes = 10")) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
    ):
        await put(session)
        status, document = await post(session, PURPOSE + field("file", b"123456", filename="a") + END)
        assert status == 507
        assert document["error"]["type"] == "InsufficientStorageError"
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
    async with (
        running(files_deployment()) as deployment,
        aiohttp.ClientSession(deployment.url) as session,
        session.get(f"{FILES}?{query}") as response,
    ):
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
            await turn(session)
        async with session.get(f"{FILES}/{document['id']}") as response:
            assert response.status == 404
        async with session.get(FILES) as response:
            assert [file["id"] for file in (await response.json())["data"]] == [kept]


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
