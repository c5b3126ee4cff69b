"""The memory of one arena, from both sides: a sealed memfd with a head that says whose it is and what lies where.

The head holds a magic number, the owner as a `Peer`, and a table with one row per `BLOCK_BYTES` of data: generation and
length of what begins there. A memfd has no name in any file system, so nothing of it can be left behind: it is gone
with the last process that has it open or mapped (memfd_create(2)).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from omni_bus.ids import Peer
from omni_bus.wire.frames import Release

if TYPE_CHECKING:
    from omni_bus.ids import Sender
    from omni_bus.wire.codec import Reference

BLOCK_BYTES = 16 * 1024
"""Data is allocated in multiples of this; four pages, so that views are aligned for any element type."""

MAX_SEGMENT_BYTES = 1 << 40

_MAGIC = b"omnibus\x01"
_HEAD = struct.Struct("<8sQQI")
"""Magic, offset of the data, its size, length of the owner's description that follows."""
_ROW = struct.Struct("<QQ")
"""Generation and length; zeros where nothing begins."""
_TABLE_OFFSET = 4096
"""The head and the owner fit before it: an address has at most some hundred bytes."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What is mapped can't be cut off under a reader, which the kernel would kill for touching it (SIGBUS)."""


class _Layout(NamedTuple):
    data_offset: int
    num_bytes: int


def _layout(data_bytes: int) -> _Layout:
    table_bytes = data_bytes // BLOCK_BYTES * _ROW.size
    data_offset = -(-(_TABLE_OFFSET + table_bytes) // BLOCK_BYTES) * BLOCK_BYTES
    return _Layout(data_offset, data_offset + data_bytes)


class OwnSegment:
    """The owner's side: memory that it writes and others may read. Pages count as used once they are written.

    Args:
        owner: who it belongs to; readers compare it with who sends the references.
        data_bytes: a positive multiple of `BLOCK_BYTES`.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, owner: Peer, data_bytes: int) -> None:
        self._data_offset, num_bytes = _layout(data_bytes)
        description = msgspec.msgpack.encode(owner)
        self.fd = os.memfd_create(f"omni-bus {owner.actor}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._view = memoryview(self._memory)
        self.address = address_of(self._view) + self._data_offset
        """Where data begins in this process."""
        _HEAD.pack_into(self._memory, 0, _MAGIC, self._data_offset, data_bytes, len(description))
        self._memory[_HEAD.size : _HEAD.size + len(description)] = description

    def write(self, offset: int, data: memoryview, generation: int) -> None:
        """Copy `data` to `offset` and enter it in the table.

        The copy holds the interpreter (0.16 ms for 8 MiB): letting go could cost the loop 5 ms, a busy thread's slice.
        """
        begin = self._data_offset + offset
        self._view[begin : begin + data.nbytes] = data
        _ROW.pack_into(self._memory, _row(offset), generation, data.nbytes)

    def enter(self, offset: int, length: int, generation: int) -> int:
        """Enter what will be written at `offset` in the table; return the address."""
        _ROW.pack_into(self._memory, _row(offset), generation, length)
        return self.address + offset

    def erase(self, offset: int) -> None:
        """Take `offset` out of the table: references to it mean nothing from now on."""
        _ROW.pack_into(self._memory, _row(offset), 0, 0)

    def close(self) -> None:
        """Give the memory up; readers that have it mapped keep it, and so does a producer that still holds some.

        Unmapped with the last reference to this object.
        """
        os.close(self.fd)


def _row(offset: int) -> int:
    return _TABLE_OFFSET + offset // BLOCK_BYTES * _ROW.size


class ForeignSegment:
    """A reader's side: another process's segment, mapped for reading only. Unmapped with its last reference.

    Whoever writes through a view anyway is stopped by the kernel (SIGSEGV): the memory is the owner's.

    Args:
        sender: who must own it.
        pid: a process of the same user, in the same pid namespace.
        fd: its descriptor.

    Raises:
        ValueError: there is no such segment, it can't be opened, it is not `sender`'s, or it could be cut off.
    """

    def __init__(self, sender: Sender, pid: int, fd: int) -> None:
        self._address = 0
        if pid < 1 or fd < 0:
            raise ValueError(f"process {pid}, descriptor {fd}: no such arena")
        path = f"/proc/{pid}/fd/{fd}"
        try:
            # Whatever it really is, opening it must neither wait nor change it.
            own_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise ValueError(f"{path} can't be opened: {os.strerror(error.errno or 0)}") from error
        try:
            self._map(own_fd, path)
        finally:
            os.close(own_fd)
        self.owner = self._read_owner(path)
        if self.owner.sender != sender:
            raise ValueError(f"{path} is {self.owner.actor}'s arena or a former one, not the sender's")
        self.is_owner_live = True
        """Whether the owner wants to hear what is not viewed any more; the reader clears it."""

    def __del__(self) -> None:
        if self._address:
            _munmap(self._address, self._num_bytes)

    def _map(self, fd: int, path: str) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError(f"{path} is no arena") from error
        self._num_bytes = os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or not _TABLE_OFFSET < self._num_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"{path} is no sealed arena")
        address = _mmap(None, self._num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise ValueError(f"{path} can't be mapped: {os.strerror(ctypes.get_errno())}")
        self._address = address
        self._head = memoryview((ctypes.c_ubyte * self._num_bytes).from_address(address)).cast("B").toreadonly()

    def _read_owner(self, path: str) -> Peer:
        magic, self._data_offset, self._data_bytes, length = _HEAD.unpack_from(self._head, 0)
        if magic != _MAGIC or _layout(self._data_bytes) != (self._data_offset, self._num_bytes):
            raise ValueError(f"{path} is no arena of this version")
        try:
            return msgspec.msgpack.decode(bytes(self._head[_HEAD.size : _HEAD.size + length]), type=Peer)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} names no owner") from error

    def release(self, generations: tuple[int, ...]) -> Release:
        """Return the frame that gives these back to the owner."""
        return Release(generations)

    def address_of(self, reference: Reference) -> int:
        """Return where the bytes of a reference lie.

        Raises:
            ValueError: nothing of that generation and length begins there.
        """
        offset, length, generation = reference.offset, reference.length, reference.generation
        if offset < 0 or offset % BLOCK_BYTES or length < 1 or offset + length > self._data_bytes or generation < 1:
            raise ValueError(f"{length} bytes at {offset} are not in the sender's arena of {self._data_bytes}")
        if _ROW.unpack_from(self._head, _row(offset)) != (generation, length):
            raise ValueError(f"the sender's arena holds no {length} bytes of generation {generation} at {offset}")
        return self._address + self._data_offset + offset


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of Python's C interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Return where a contiguous view begins. `ctypes` alone tells that of writable ones only."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address or 0


_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
