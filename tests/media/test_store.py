"""A file is there whole or not at all, for its owner and nobody else, within what may be kept."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_bus.errors import BadInput, MediaTooLarge, StorageFull, StorageQuotaExceeded, Unavailable
from omni_bus.media import spool, store
from omni_bus.media.store import Entry, Quota, Store

QUOTA = Quota(max_owner_bytes=10_000_000, max_owner_files=100, max_total_bytes=20_000_000)


class Clock:
    """Unix time, turned by the test."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def kept(tmp_path: Path):
    found = Store(tmp_path / "files", QUOTA)
    yield found
    found.close()


def limited(folder: Path, **changes: int) -> Store:
    return Store(folder / "files", msgspec.structs.replace(QUOTA, **changes))


async def put(
    kept: Store, data: bytes = b"hello", owner: str = "me", kind: str = "file", piece: int = 1 << 20, **more: Any
) -> Entry:
    async with await kept.begin(kind, owner, max_bytes=more.pop("max_bytes", 100_000_000)) as upload:
        for at in range(0, len(data), piece):
            await upload.write(data[at : at + piece])
        return await upload.commit(more.pop("metadata", {"filename": "a.txt"}), **more)


async def bytes_of(kept: Store, entry: Entry) -> bytes:
    fd = await kept.open(entry)
    assert fd is not None
    try:
        return await kept.read(fd, 0, entry.num_bytes + 1)
    finally:
        os.close(fd)


def names(folder: Path) -> set[str]:
    """What is in the folder, without the lock."""
    return {path.name for path in (folder / "files").iterdir()} - {".lock"}


async def test_file_is_read_as_it_was_written(kept: Store, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    entry = await put(kept, data, piece=100_001, metadata={"filename": "../../etc/passwd", "purpose": "vision"})

    assert entry.num_bytes == len(data)
    assert await bytes_of(kept, entry) == data
    assert await kept.get(entry.id, "file", "me") == entry
    assert names(tmp_path) == {f"{entry.id}.json", f"{entry.id}.blob"}


async def test_folder_and_files_are_private(kept: Store, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(mode=0o755)
    entry = await put(kept)

    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    for name in (f"{entry.id}.json", f"{entry.id}.blob"):
        assert (tmp_path / "files" / name).stat().st_mode & 0o777 == 0o600


async def test_files_outlive_their_process(tmp_path: Path) -> None:
    first = limited(tmp_path)
    entry = await put(first, b"stays")
    first.close()
    second = limited(tmp_path)
    await second.sweep()

    assert await second.entries("file", "me") == [entry]
    assert await bytes_of(second, entry) == b"stays"
    second.close()


async def test_ids_are_unguessable_and_tell_their_kind(kept: Store) -> None:
    entries = [await put(kept, kind=kind) for kind in ("file", "voice", "video", "file")]

    assert [entry.id.partition("-")[0] for entry in entries] == ["file", "voice", "video", "file"]
    assert len({entry.id for entry in entries}) == 4
    assert all(len(entry.id.partition("-")[2]) == 32 for entry in entries)


async def test_files_of_others_and_of_other_kinds_are_not_there(kept: Store) -> None:
    entry = await put(kept)

    for kind, owner in (("file", "you"), ("file", ""), ("voice", "me")):
        assert await kept.get(entry.id, kind, owner) is None
        assert await kept.entries(kind, owner) == []
        assert not await kept.delete(entry.id, kind, owner)
    assert await kept.get(entry.id, "file", "me") == entry


@pytest.mark.parametrize(
    "file_id",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        ".lock",
        "file-",
        "file-" + "g" * 32,
        "file-" + "A" * 32,
        "file-" + "0" * 31,
        "file-" + "0" * 33,
        "file-" + "0" * 32 + "\n",
        "file-" + "0" * 32 + "/../x",
        "file-" + "0" * 32 + ".json",
        "file-\0" + "0" * 31,
        "x" * 10_000,
    ],
)
async def test_what_is_no_id_touches_no_path(kept: Store, tmp_path: Path, file_id: str) -> None:
    assert await kept.get(file_id, "file", "me") is None
    assert not await kept.delete(file_id, "file", "me")
    assert not (tmp_path / "files").exists()


@given(st.text(max_size=60))
def test_any_text_is_no_id(text: str) -> None:
    kept = Store("/nonexistent/omni-bus", QUOTA)
    assert asyncio.run(kept.get(text, "file", "me")) is None
    kept.close()


async def test_record_of_another_id_is_not_believed(kept: Store, tmp_path: Path) -> None:
    """A copied record would make one file two, and its bytes another's."""
    entry = await put(kept)
    forged = f"file-{'0' * 32}"
    (tmp_path / "files" / f"{forged}.json").write_bytes((tmp_path / "files" / f"{entry.id}.json").read_bytes())

    assert await kept.get(forged, "file", "me") is None
    assert [found.id for found in await kept.entries("file", "me")] == [entry.id]


async def test_links_in_the_folder_are_not_followed(kept: Store, tmp_path: Path) -> None:
    entry = await put(kept)
    (tmp_path / "secret").write_bytes(b"secret")
    blob = tmp_path / "files" / f"{entry.id}.blob"
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")

    with pytest.raises(Unavailable):
        await kept.open(entry)


async def test_list_is_in_order_of_making(kept: Store) -> None:
    made = [await put(kept) for _ in range(20)]

    assert await kept.entries("file", "me") == made


async def test_deleted_file_is_gone_but_read_to_its_end(kept: Store, tmp_path: Path) -> None:
    entry = await put(kept, b"x" * 1000)
    fd = await kept.open(entry)
    assert fd is not None

    assert await kept.delete(entry.id, "file", "me")
    assert not await kept.delete(entry.id, "file", "me")
    assert await kept.get(entry.id, "file", "me") is None
    assert await kept.open(entry) is None
    assert await kept.read(fd, 0, 2000) == b"x" * 1000
    assert names(tmp_path) == set()
    os.close(fd)


# --- uploads that do not end well ---------------------------------------------------------------------------


async def test_upload_that_is_left_is_undone(kept: Store, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for error in (RuntimeError("x"), None):
        try:
            async with await kept.begin("file", "me", max_bytes=10_000_000) as upload:
                await upload.write(b"x" * 2_000_000)
                assert names(tmp_path) == {f"{upload.id}.part"}
                if error:
                    raise error
        except RuntimeError:
            pass
        assert names(tmp_path) == set()
        assert kept.usage("me").num_files == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "the folder's own descriptor"


async def test_upload_cancelled_at_any_moment_leaves_nothing(kept: Store, tmp_path: Path) -> None:
    """After so many turns of the loop: before the part, within a batch, within the commit, after it."""
    await put(kept)
    await kept.entries("file", "me")
    num_open = len(os.listdir("/proc/self/fd"))
    for num_turns in range(60):
        (entry,) = await kept.entries("file", "me")

        async def upload() -> None:
            async with await kept.begin("file", "me", max_bytes=10_000_000) as file:
                for _ in range(3):
                    await file.write(b"x" * spool.BATCH_BYTES)
                await file.commit({})
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(upload())
        for _ in range(num_turns):
            await asyncio.sleep(0)
            await asyncio.to_thread(int)
        task.cancel()
        await asyncio.wait({task})
        assert await kept.entries("file", "me") == [entry], num_turns
        assert names(tmp_path) == {f"{entry.id}.json", f"{entry.id}.blob"}, num_turns
    assert kept._uploads == {}
    assert len(os.listdir("/proc/self/fd")) == num_open


async def test_empty_file_is_refused(kept: Store, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="an empty file came"):
        await put(kept, b"")
    assert names(tmp_path) == set()


CHILD = """
import asyncio, sys
from omni_bus.media.store import Quota, Store

async def main():
    kept = Store(sys.argv[1], Quota(max_owner_bytes=10**7, max_owner_files=10, max_total_bytes=10**7))
    async with await kept.begin("file", "me", max_bytes=10**7) as upload:
        await upload.write(b"x" * 2_000_000)
        print(upload.id, flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


async def test_upload_of_a_killed_process_is_swept_and_that_of_a_live_one_is_not(kept: Store, tmp_path: Path) -> None:
    child = subprocess.Popen(  # noqa: ASYNC220 (it is not waited for)
        [sys.executable, "-c", CHILD, str(tmp_path / "files")], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert child.stdout is not None
    part = f"{(await asyncio.to_thread(child.stdout.readline)).strip()}.part"
    await kept.sweep()
    assert part in names(tmp_path)
    with pytest.raises(StorageFull):  # what others are writing counts for the total
        await put(limited(tmp_path, max_total_bytes=2_000_010), b"x" * 100)

    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    await kept.sweep()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("ending", ["blob", "json", "json.new", "part"])
async def test_half_of_a_file_is_swept(kept: Store, tmp_path: Path, ending: str) -> None:
    entry = await put(kept)
    (tmp_path / "files" / f"file-{'0' * 32}.{ending}").write_bytes(b"{}")
    (tmp_path / "files" / "somebody else's").write_bytes(b"x")
    await kept.sweep()

    assert names(tmp_path) == {f"{entry.id}.json", f"{entry.id}.blob", "somebody else's"}


async def test_damaged_record_harms_no_other(kept: Store, tmp_path: Path) -> None:
    good, bad = await put(kept), await put(kept)
    (tmp_path / "files" / f"{bad.id}.json").write_bytes(b"\xff not json")
    fresh = limited(tmp_path)
    await fresh.sweep()

    assert await fresh.entries("file", "me") == [good]
    assert await fresh.get(bad.id, "file", "me") is None
    assert f"{bad.id}.blob" in names(tmp_path), "a person may still want it"
    fresh.close()


# --- limits -------------------------------------------------------------------------------------------------


async def test_file_beyond_its_limit_is_refused_while_it_comes(kept: Store, tmp_path: Path) -> None:
    with pytest.raises(MediaTooLarge, match=r"file: more than 1000 bytes came \(allowed: at most 1000\)"):
        await put(kept, b"x" * 1001, max_bytes=1000, piece=100)
    assert names(tmp_path) == set()
    assert (await put(kept, b"x" * 1000, max_bytes=1000)).num_bytes == 1000


async def test_owner_has_so_many_bytes(tmp_path: Path) -> None:
    kept = limited(tmp_path, max_owner_bytes=1000)
    first = await put(kept, b"x" * 600)
    with pytest.raises(
        StorageQuotaExceeded, match=r"2 files of 1001 bytes .*allowed: 100 files of 1000 bytes; delete some"
    ):
        await put(kept, b"x" * 401)
    await put(kept, b"x" * 401, owner="you")
    await put(kept, b"x" * 400)
    await kept.delete(first.id, "file", "me")
    await put(kept, b"x" * 600)
    assert kept.usage("me").num_bytes == 1000
    kept.close()


async def test_owner_has_so_many_files_of_all_kinds(tmp_path: Path) -> None:
    kept = limited(tmp_path, max_owner_files=2)
    await put(kept, kind="voice")
    await put(kept)
    with pytest.raises(StorageQuotaExceeded, match="3 files of"):
        await kept.begin("file", "me", max_bytes=10)
    assert kept._uploads == {}
    kept.close()


async def test_uploads_under_way_count(tmp_path: Path) -> None:
    kept = limited(tmp_path, max_owner_bytes=1000, max_total_bytes=1500)
    async with await kept.begin("file", "me", max_bytes=1000) as upload:
        await upload.write(b"x" * 800)
        with pytest.raises(StorageQuotaExceeded):
            await put(kept, b"x" * 201)
        with pytest.raises(StorageFull, match="as many bytes of files as it may"):
            await put(kept, b"x" * 701, owner="you")
        await put(kept, b"x" * 700, owner="you")
    kept.close()


async def test_two_processes_together_keep_within_the_limits(tmp_path: Path) -> None:
    """Neither has looked since the other committed."""
    one, two = (limited(tmp_path, max_owner_bytes=1000) for _ in range(2))
    async with (
        await one.begin("file", "me", max_bytes=1000) as first,
        await two.begin("file", "me", max_bytes=1000) as second,
    ):
        await first.write(b"x" * 600)
        await second.write(b"x" * 600)
        await first.commit({})
        with pytest.raises(StorageQuotaExceeded):
            await second.commit({})
    assert [entry.num_bytes for entry in await two.entries("file", "me")] == [600]
    one.close()
    two.close()


async def test_concurrent_uploads_of_one_owner_never_pass_its_quota(tmp_path: Path) -> None:
    kept = limited(tmp_path, max_owner_bytes=100_000)
    results = await asyncio.gather(*(put(kept, b"x" * 30_000, piece=1000) for _ in range(10)), return_exceptions=True)

    assert sum(isinstance(result, Entry) for result in results) <= 3
    assert all(isinstance(result, Entry | StorageQuotaExceeded) for result in results)
    assert kept.usage("me").num_bytes <= 100_000
    kept.close()


async def test_full_disk_is_said_and_leaves_nothing(kept: Store, tmp_path: Path, monkeypatch) -> None:
    def full(fd: int, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    entry = await put(kept)
    with monkeypatch.context() as patched:
        patched.setattr(spool, "write_all", full)
        with pytest.raises(StorageFull, match="disk is full"):
            await put(kept, b"x" * 2_000_000)
        patched.undo()
    with monkeypatch.context() as patched:
        patched.setattr(store, "write_all", full)  # of the record
        with pytest.raises(StorageFull, match="disk is full"):
            await put(kept)
    await kept.sweep()
    assert names(tmp_path) == {f"{entry.id}.json", f"{entry.id}.blob"}


async def test_disk_keeps_so_much_free(tmp_path: Path, monkeypatch) -> None:
    kept = limited(tmp_path, min_free_bytes=1 << 62)
    with pytest.raises(StorageFull):
        await kept.begin("file", "me", max_bytes=10)
    kept.close()

    monkeypatch.setattr(store, "CHECK_BYTES", 1000)
    kept = limited(tmp_path, min_free_bytes=0)
    async with await kept.begin("file", "me", max_bytes=10_000) as upload:
        await upload.write(b"x" * 500)
        kept._quota = msgspec.structs.replace(kept._quota, min_free_bytes=1 << 62)
        await upload.write(b"x" * 400)
        with pytest.raises(StorageFull):
            await upload.write(b"x" * 200)
    kept.close()


async def test_folder_that_cannot_be_used_is_unavailable(tmp_path: Path, caplog) -> None:
    (tmp_path / "files").write_bytes(b"a file in its place")
    kept = limited(tmp_path)
    with pytest.raises(Unavailable) as caught:
        await put(kept)
    assert str(tmp_path) not in caught.value.message
    assert [record.getMessage() for record in caplog.records] == ["the folder of files can't be used"]
    kept.close()


async def test_folder_that_was_removed_is_made_anew(kept: Store, tmp_path: Path) -> None:
    entry = await put(kept)
    for path in (tmp_path / "files").iterdir():
        path.unlink()
    (tmp_path / "files").rmdir()

    assert await kept.get(entry.id, "file", "me") is None
    assert await kept.get((await put(kept)).id, "file", "me") is not None


# --- expiry -------------------------------------------------------------------------------------------------


async def test_file_expires_at_its_time_whether_or_not_anybody_swept(tmp_path: Path) -> None:
    clock = Clock()
    kept = Store(tmp_path / "files", QUOTA, now=clock)
    entry, forever = await put(kept, expires_at=clock.now + 10), await put(kept)
    clock.now += 9.9
    assert await kept.get(entry.id, "file", "me") == entry
    assert await kept.sweep() == entry.expires_at
    clock.now += 0.1
    assert await kept.get(entry.id, "file", "me") is None
    assert await kept.entries("file", "me") == [forever]
    assert not await kept.delete(entry.id, "file", "me")
    assert f"{entry.id}.blob" in names(tmp_path)
    assert await kept.sweep() is None
    assert names(tmp_path) == {f"{forever.id}.json", f"{forever.id}.blob"}
    assert kept.usage("me").num_files == 1
    kept.close()


# --- what is said of a file changes


async def test_amended_record_is_seen_by_everybody(tmp_path: Path) -> None:
    mine, other = limited(tmp_path), limited(tmp_path)
    entry = await put(mine, metadata={"step": 0})
    assert [seen.metadata for seen in await other.entries("file", "me")] == [{"step": 0}]
    for step in range(1, 6):  # the file system may give a new record the last one's inode
        amended = await mine.amend(entry, {"step": step}, is_durable=step == 5)
        assert amended is not None
        for store_ in (mine, other):
            assert [seen.metadata for seen in await store_.entries("file", "me")] == [{"step": step}]
            found = await store_.get(entry.id, "file", "me")
            assert found == amended
            assert await bytes_of(store_, amended) == b"hello"
    assert mine.usage("me").num_files == 1
    mine.close()
    other.close()


async def test_deleted_file_is_not_amended(kept: Store) -> None:
    entry = await put(kept)
    assert await kept.delete(entry.id, "file", "me")

    assert await kept.amend(entry, {"step": 1}) is None
    assert await kept.entries("file", "me") == []


async def test_amended_file_may_expire(tmp_path: Path) -> None:
    clock = Clock()
    found = Store(tmp_path / "files", QUOTA, now=clock)
    entry = await put(found)
    await found.amend(entry, {}, expires_at=clock.now + 10)
    assert await found.sweep() == clock.now + 10
    clock.now += 11
    await found.sweep()
    assert await found.get(entry.id, "file", "me") is None
    found.close()


async def test_upload_is_written_as_long_as_its_process_lives(tmp_path: Path) -> None:
    """By another process too, however it ends."""
    script = """
import asyncio, sys
from omni_bus.media.store import Quota, Store
async def main():
    store = Store(sys.argv[1], Quota(max_owner_bytes=9**9, max_owner_files=9, max_total_bytes=9**9))
    upload = await store.begin("file", "me", max_bytes=100)
    print(upload.id, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    found = limited(tmp_path)
    command = [sys.executable, "-c", script, tmp_path / "files"]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    file_id = (await child.stdout.readline()).decode().strip()
    assert await found.is_written(file_id)
    child.kill()
    await child.communicate()
    assert not await found.is_written(file_id)
    async with await found.begin("file", "me", max_bytes=100) as upload:
        assert await found.is_written(upload.id)
        await upload.write(b"x")
        entry = await upload.commit({})
    for over in (entry.id, "file-" + "0" * 32, "..", ""):
        assert not await found.is_written(over)
    found.close()


async def test_bytes_that_others_write_are_counted(tmp_path: Path) -> None:
    found = limited(tmp_path, max_owner_bytes=1000)
    async with await found.begin("file", "me", max_bytes=2000, what="video") as upload:
        os.write(upload.fd, bytes(600))
        await upload.measure()
        os.write(upload.fd, bytes(600))
        with pytest.raises(StorageQuotaExceeded, match="video"):
            await upload.measure()
    async with await found.begin("file", "me", max_bytes=500, what="video") as upload:
        os.write(upload.fd, bytes(501))
        with pytest.raises(MediaTooLarge, match="video"):
            await upload.measure()
    async with await found.begin("file", "me", max_bytes=500) as upload:
        os.write(upload.fd, b"hello")
        await upload.measure()
        entry = await upload.commit({})
    assert await bytes_of(found, entry) == b"hello"
    assert entry.num_bytes == 5
    found.close()
