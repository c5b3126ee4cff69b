"""Files that callers keep here: uploads, voices, results. Each belongs to one caller and is invisible to all others.

A file is two in the store's folder, by its id: ``ID.blob``, the bytes, and ``ID.json``, what is known of it. The second
appears last and disappears first, so a file is there whole or not at all, whatever crashes in between. Nothing that a
caller names ever becomes part of a path. Several processes may share a folder: what counts is what the disk says.

::

    async with await store.begin("file", owner, max_bytes=1000) as upload:
        await upload.write(piece)
        entry = await upload.commit({"filename": "a.wav"})
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import msgspec

from omni_bus.errors import BadInput, StorageFull, StorageQuotaExceeded, Unavailable
from omni_bus.media.spool import BatchWriter, run_to_end, too_large, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

logger = logging.getLogger(__name__)

NUM_THREADS = 8
"""For the disk: whoever waits for one of them holds up no other work of the process."""

CHECK_BYTES = 8 * 1024 * 1024
"""Room on the disk is looked at whenever so much was written."""

_ID = re.compile(r"[a-z_]{1,24}-[0-9a-f]{32}")
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What may be kept."""

    max_owner_bytes: int
    """By one caller."""
    max_owner_files: int
    """By one caller."""
    max_total_bytes: int
    """By all callers, uploads that are under way too."""
    min_free_bytes: int = 0
    """So much of the disk stays free."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file; its bytes never change, and what is known of it only by `Store.amend`."""

    id: str
    kind: str
    owner: str
    num_bytes: int
    created_ns: int
    """Unix time; later files of one process have later ones."""
    expires_at: float | None = None
    """Unix time in seconds; from then on the file is not there."""
    metadata: dict[str, Any] = {}

    @property
    def created_at(self) -> int:
        """Unix time in seconds."""
        return self.created_ns // 10**9


class Usage(msgspec.Struct):
    """What one caller keeps."""

    num_bytes: int = 0
    num_files: int = 0


class _Index(msgspec.Struct, frozen=True):
    """What the folder held when it was last looked at."""

    entries: dict[str, Entry] = {}
    stamps: dict[str, tuple[int, int]] = {}
    """By which a record is known to be the same."""
    usage: dict[str, Usage] = {}
    num_bytes: int = 0
    part_bytes: int = 0
    """Of uploads under way in other processes."""


class Store:
    """A folder of files with owners.

    Args:
        folder: made, private to the user, when it is first needed; nothing else should live in it.
        quota: what may be kept.
        now: Unix time in seconds.
    """

    def __init__(self, folder: str | os.PathLike[str], quota: Quota, *, now: Callable[[], float] = time.time) -> None:
        self._path = os.path.abspath(folder)
        self._quota = quota
        self._now = now
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="store")
        self._folder = -1
        self._looking = threading.Lock()
        self._index = _Index()
        self._uploads: dict[str, Upload] = {}
        self._last_ns = 0

    # --- files ------------------------------------------------------------------------------------------------

    async def begin(self, kind: str, owner: str, *, max_bytes: int, what: str = "file") -> Upload:
        """Begin an upload; leaving its ``async with`` block without `Upload.commit` undoes it.

        Args:
            kind: what sort of file; the first part of its id.
            owner: whose it will be.
            max_bytes: of this file.
            what: the caller's field, for refusals.

        Raises:
            StorageQuotaExceeded: the owner keeps as much as it may.
            StorageFull: all together do, or the disk has no room.
            Unavailable: the folder can't be used.
        """
        file_id = f"{kind}-{secrets.token_hex(16)}"
        assert _ID.fullmatch(file_id), "a kind is letters and underscores"
        upload = Upload(self, file_id, kind, owner, max_bytes, what)
        try:
            await self._run(self._begin_blocking, upload)
            self._check_quota(upload)
        except BaseException:
            await self.abort(upload)
            raise
        return upload

    async def append(self, upload: Upload, piece: bytes | memoryview) -> None:
        """Add a piece to an upload.

        Raises:
            MediaTooLarge: it would be more than its `max_bytes`.
            StorageQuotaExceeded: the owner would keep more than it may.
            StorageFull: all together would, or the disk has no room.
        """
        if upload.num_bytes + len(piece) > upload.max_bytes:
            raise too_large(upload.what, f"more than {upload.max_bytes}", upload.max_bytes)
        upload.num_bytes += len(piece)
        self._check_quota(upload)
        if upload.num_bytes - upload.checked_bytes >= CHECK_BYTES:
            upload.checked_bytes = upload.num_bytes
            await self._run(self._check_room)
        try:
            await upload.writer.write(piece)
        except OSError as error:
            raise disk_error(error) from error

    async def commit(self, upload: Upload, metadata: dict[str, Any], expires_at: float | None) -> Entry:
        """Make an upload a file, on the disk for good when this returns.

        Args:
            upload: with at least one byte.
            metadata: what else is to be known of it; values that JSON has.
            expires_at: Unix time from which on it is not there.

        Raises:
            BadInput: it is empty.
            StorageQuotaExceeded, StorageFull: as in `append`.
        """
        if not upload.num_bytes:
            raise BadInput(f"{upload.what}: an empty file came (allowed: at least one byte)", field=upload.what)
        self._last_ns = max(self._last_ns + 1, int(self._now() * 1e9))
        entry = Entry(
            id=upload.id,
            kind=upload.kind,
            owner=upload.owner,
            num_bytes=upload.num_bytes,
            created_ns=self._last_ns,
            expires_at=expires_at,
            metadata=metadata,
        )
        try:
            await upload.writer.flush()
        except OSError as error:
            raise disk_error(error) from error
        await self._run(self._commit_blocking, upload, entry)
        return entry

    async def measure(self, upload: Upload) -> None:
        """Count the bytes of an upload whose `fd` somebody else writes to.

        Raises:
            MediaTooLarge, StorageQuotaExceeded, StorageFull: as in `append`.
        """
        upload.num_bytes = await self._run(lambda: os.fstat(upload.fd).st_size)
        if upload.num_bytes > upload.max_bytes:
            raise too_large(upload.what, f"more than {upload.max_bytes}", upload.max_bytes)
        self._check_quota(upload)
        await self._run(self._check_room)

    async def abort(self, upload: Upload) -> None:
        """Undo an upload that is no file yet."""
        if self._uploads.pop(upload.id, None) is not None:
            try:
                await self._run(self._unlink, f"{upload.id}.part")
            finally:
                os.close(upload.fd)

    async def get(self, file_id: str, kind: str, owner: str) -> Entry | None:
        """Return a file of that kind and owner; None for every other id, known or not."""
        if not _ID.fullmatch(file_id):
            return None
        entry = await self._run(self._read_blocking, file_id)
        return entry if entry is not None and self._is_seen(entry, kind, owner) else None

    async def entries(self, kind: str, owner: str) -> list[Entry]:
        """Return an owner's files of a kind, oldest first."""
        await self._run(self._look_blocking)
        found = [entry for entry in self._index.entries.values() if self._is_seen(entry, kind, owner)]
        return sorted(found, key=lambda entry: (entry.created_ns, entry.id))

    async def delete(self, file_id: str, kind: str, owner: str) -> bool:
        """Delete a file of that kind and owner; False if there is none. Who reads it now reads it to its end."""
        entry = await self.get(file_id, kind, owner)
        if entry is None:
            return False
        await self._run(self._remove_blocking, entry.id)
        return True

    async def amend(
        self, entry: Entry, metadata: dict[str, Any], *, expires_at: float | None = None, is_durable: bool = True
    ) -> Entry | None:
        """Say something else of a file; None if it is gone.

        Args:
            entry: the file.
            metadata: instead of what was said of it.
            expires_at: Unix time from which on it is not there.
            is_durable: it is on the disk for good when this returns; else it may be lost with the machine's power.
        """
        amended = msgspec.structs.replace(entry, metadata=metadata, expires_at=expires_at)
        amend = functools.partial(self._amend_blocking, amended, is_durable=is_durable)
        return amended if await self._run(amend) else None

    async def is_written(self, file_id: str) -> bool:
        """Whether some process that lives has an upload of this id under way; it is no file yet."""
        return bool(_ID.fullmatch(file_id)) and await self._run(self._is_written_blocking, file_id)

    async def open(self, entry: Entry) -> int | None:
        """Return a descriptor of a file's bytes, the caller's to close; None if it is gone."""
        return await self._run(self._open_blocking, entry.id)

    async def read(self, fd: int, at: int, num_bytes: int) -> bytes:
        """Return bytes of an opened file, fewer at its end."""
        return await self._run(os.pread, fd, num_bytes, at)

    # --- time -------------------------------------------------------------------------------------------------

    async def sweep(self) -> float | None:
        """Delete what has expired and what crashed processes left; return when the next file expires."""
        await self._run(self._sweep_blocking)
        return min((e.expires_at for e in self._index.entries.values() if e.expires_at is not None), default=None)

    def close(self) -> None:
        """Let the threads and the folder go; with no upload left."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def usage(self, owner: str) -> Usage:
        """Return what an owner kept when the folder was last looked at."""
        return self._index.usage.get(owner, Usage())

    def _is_seen(self, entry: Entry, kind: str, owner: str) -> bool:
        is_alive = entry.expires_at is None or entry.expires_at > self._now()
        return is_alive and entry.kind == kind and entry.owner == owner

    def _check_quota(self, upload: Upload) -> None:
        """Refuse an upload that is, with what it has so far, too much.

        Raises:
            StorageQuotaExceeded: for its owner.
            StorageFull: for all.
        """
        quota, kept = self._quota, self.usage(upload.owner)
        mine = [other for other in self._uploads.values() if other.owner == upload.owner]
        num_bytes = kept.num_bytes + sum(other.num_bytes for other in mine)
        num_files = kept.num_files + len(mine)
        if num_bytes > quota.max_owner_bytes or num_files > quota.max_owner_files:
            raise StorageQuotaExceeded(
                f"{upload.what}: with this one {num_files} files of {num_bytes} bytes would be kept for you "
                f"(allowed: {quota.max_owner_files} files of {quota.max_owner_bytes} bytes; delete some)",
                field=upload.what,
            )
        under_way = sum(other.num_bytes for other in self._uploads.values()) + self._index.part_bytes
        if self._index.num_bytes + under_way > quota.max_total_bytes:
            raise StorageFull("the server keeps as many bytes of files as it may")

    # --- on a thread ------------------------------------------------------------------------------------------

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await run_to_end(self._threads, function, *args)
        except OSError as error:
            raise disk_error(error) from error

    def _begin_blocking(self, upload: Upload) -> None:
        with self._locked(fcntl.LOCK_SH):  # a sweep holds it alone, and takes a part that nobody holds for a left-over
            self._check_room()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            upload.fd = os.open(f"{upload.id}.part", flags, 0o600, dir_fd=self._folder)
            upload.writer = BatchWriter(upload.fd, self._threads)
            self._uploads[upload.id] = upload
            fcntl.flock(upload.fd, fcntl.LOCK_EX)
            self._look()

    def _commit_blocking(self, upload: Upload, entry: Entry) -> None:
        os.fsync(upload.fd)
        with self._locked(fcntl.LOCK_EX):
            self._check_room()
            self._look()
            self._check_quota(upload)
            os.rename(f"{entry.id}.part", f"{entry.id}.blob", src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._write_entry(entry)
            os.fsync(self._folder)
            upload.is_committed = True  # here, since a caller that is cancelled meanwhile doesn't hear of it
            self._uploads.pop(upload.id, None)
            os.close(upload.fd)
            self._look()

    def _amend_blocking(self, entry: Entry, *, is_durable: bool) -> bool:
        with self._locked(fcntl.LOCK_EX):  # nobody removes it between the look and the write
            if self._read_blocking(entry.id) is None:
                return False
            self._write_entry(entry, is_durable=is_durable)
            if is_durable:
                os.fsync(self._folder)
            return True

    def _is_written_blocking(self, file_id: str) -> bool:
        self._ready()
        return file_id in self._uploads or self._is_held(f"{file_id}.part") is True

    def _write_entry(self, entry: Entry, *, is_durable: bool = True) -> None:
        draft = f"{entry.id}.json.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        try:
            write_all(fd, msgspec.json.encode(entry))
            if is_durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, f"{entry.id}.json", src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def _remove_blocking(self, file_id: str) -> None:
        with self._locked(fcntl.LOCK_EX):
            if self._unlink(f"{file_id}.json"):
                os.fsync(self._folder)
            self._unlink(f"{file_id}.blob")
        self._look()

    def _open_blocking(self, file_id: str) -> int | None:
        try:
            return os.open(f"{file_id}.blob", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._ready())
        except FileNotFoundError:
            return None

    def _read_blocking(self, file_id: str) -> Entry | None:
        """Read what is known of a file; None if it is not there or its record is damaged."""
        try:
            fd = os.open(f"{file_id}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._ready())
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            data = file.read()
        try:
            entry = msgspec.json.decode(data, type=Entry)
        except msgspec.MsgspecError:
            logger.warning("a file's record is damaged", extra={"fields": {"id": file_id}})
            return None
        return entry if entry.id == file_id else None

    def _look_blocking(self) -> None:
        self._ready()
        self._look()

    def _look(self) -> None:
        """Bring the index up to what the folder holds; only records that are new or were amended are read."""
        with self._looking:
            self._index = self._looked()

    def _looked(self) -> _Index:
        known, entries, stamps, part_bytes = self._index, dict[str, Entry](), dict[str, tuple[int, int]](), 0
        with os.scandir(self._folder) as names:
            for name in names:
                file_id, _, ending = name.name.partition(".")
                if ending == "json" and _ID.fullmatch(file_id):
                    with contextlib.suppress(FileNotFoundError):
                        status = name.stat(follow_symlinks=False)
                        stamps[file_id] = (status.st_ino, status.st_mtime_ns)  # an amended record is another file
                    is_known = file_id in known.stamps and known.stamps[file_id] == stamps.get(file_id)
                    entry = known.entries.get(file_id) if is_known else self._read_blocking(file_id)
                    if entry is not None:
                        entries[file_id] = entry
                elif ending == "part" and file_id not in self._uploads:
                    with contextlib.suppress(FileNotFoundError):
                        part_bytes += name.stat(follow_symlinks=False).st_size
        usage: dict[str, Usage] = {}
        for entry in entries.values():
            kept = usage.setdefault(entry.owner, Usage())
            kept.num_bytes += entry.num_bytes
            kept.num_files += 1
        num_bytes = sum(kept.num_bytes for kept in usage.values())
        return _Index(entries, stamps, usage, num_bytes, part_bytes)

    def _sweep_blocking(self) -> None:
        if not os.path.isdir(self._path):
            return
        with self._locked(fcntl.LOCK_EX):
            names = set(os.listdir(self._folder))
            for name in names:
                file_id, _, ending = name.partition(".")
                if not _ID.fullmatch(file_id):
                    continue
                is_whole = f"{file_id}.json" in names and f"{file_id}.blob" in names
                is_left = ending in ("json", "blob") and not is_whole
                if is_left or ending == "json.new" or (ending == "part" and self._is_abandoned(name)):
                    self._unlink(name)
            self._look()
            now = self._now()
            for entry in list(self._index.entries.values()):
                if entry.expires_at is not None and entry.expires_at <= now:
                    self._unlink(f"{entry.id}.json")
                    self._unlink(f"{entry.id}.blob")
            os.fsync(self._folder)
            self._look()

    def _is_abandoned(self, part: str) -> bool:
        """Whether the process that wrote a part is gone: as long as it lives it holds a lock on it."""
        return self._is_held(part) is False

    def _is_held(self, part: str) -> bool | None:
        """Whether a process that lives writes a part; None if there is no such part."""
        try:
            fd = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _check_room(self) -> None:
        """Refuse to write to a disk with little room.

        Raises:
            StorageFull: less than `min_free_bytes` are free.
        """
        status = os.fstatvfs(self._folder)
        if status.f_bavail * status.f_frsize < self._quota.min_free_bytes:
            raise _disk_full()

    def _unlink(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold the folder's lock, which other processes that use it take too."""
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._ready())
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)

    def _ready(self) -> int:
        """Return the folder's descriptor, after making it where it is not there, yet or any more."""
        if self._folder < 0 or not os.fstat(self._folder).st_nlink:
            self._folder = _own_folder(self._path)
        return self._folder


def _own_folder(path: str) -> int:
    """Open a folder that only this user may enter; made if needed."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.getuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "the folder belongs to another user")
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.fchmod(fd, 0o700)
    return fd


def _disk_full() -> StorageFull:
    logger.warning("an upload was refused: the disk of the folder of files is full")
    return StorageFull("the server's disk is full")


def disk_error(error: OSError) -> StorageFull | Unavailable:
    """Return what callers are told of a disk that does not do what it should."""
    if error.errno in _FULL:
        return _disk_full()
    logger.error("the folder of files can't be used", extra={"fields": {"reason": error.strerror}})
    return Unavailable("the server can't store files now", retry_after_s=60.0)


class Upload:
    """A file that is being written; made by `Store.begin`."""

    def __init__(self, store: Store, file_id: str, kind: str, owner: str, max_bytes: int, what: str) -> None:
        self._store = store
        self.id = file_id
        self.kind = kind
        self.owner = owner
        self.max_bytes = max_bytes
        self.what = what
        self.fd: int
        self.writer: BatchWriter
        self.num_bytes = 0
        self.checked_bytes = 0
        """Up to here the disk was looked at for room."""
        self.is_committed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_committed:
            await self._store.abort(self)
        elif error is not None:  # whoever sent it never hears of its id
            await self._store.delete(self.id, self.kind, self.owner)

    async def write(self, piece: bytes | memoryview) -> None:
        """Take a piece; see `Store.append`."""
        await self._store.append(self, piece)

    async def measure(self) -> None:
        """Count what was written to `fd`; see `Store.measure`."""
        await self._store.measure(self)

    async def commit(self, metadata: dict[str, Any], *, expires_at: float | None = None) -> Entry:
        """Make it a file; see `Store.commit`."""
        return await self._store.commit(self, metadata, expires_at)
