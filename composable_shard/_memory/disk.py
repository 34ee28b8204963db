"""Unnamed files for optimizer state, and a ring buffer through which threads read and write them.

The files have no names, so no other process can open them. The system frees their space when the process ends, even if
it is killed, so no run can mistake the files of another run for its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import OffloadError

BLOCK = max(4096, mmap.ALLOCATIONGRANULARITY)  # alignment in bytes of addresses, offsets and lengths of direct I/O
_PIECE = 8 << 20  # bytes of one read or write; several run in parallel
THREADS = 4  # I/O threads: two saturate a disk, and reads must not wait for writes or vice versa
_FIRST, _LARGEST = 64 << 20, 64 << 30  # bytes of the first and of the largest file; each file doubles the previous size


def aligned(nbytes: int, to: int = BLOCK) -> int:
    """Round up to a multiple of `to`, a power of two."""
    return (nbytes + to - 1) & -to


@contextlib.contextmanager
def naming(directory: Path, doing: str) -> Iterator[None]:
    """Context that converts an `OSError` to an `OffloadError` with the directory and the failed operation."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = f"{_free_bytes(directory):,} bytes are free there"
            raise OffloadError(
                f"{directory}: the disk is full ({free}) and {doing} failed; free space or choose another directory in "
                "DiskOffloadPolicy, then resume from a checkpoint"
            ) from error
        raise OffloadError(f"{directory}: {doing} failed: {error}") from error


def _free_bytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize
    return 0


class Files:
    """Space in a directory, in one or more files. Space is reserved before it is written.

    Args:
        directory: the directory of the files. It is created if it does not exist.

    Raises:
        OffloadError: the directory cannot be created or is not writable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: list[File] = []
        with naming(directory, "creating a file"):
            directory.mkdir(parents=True, exist_ok=True)
            os.close(_open_unnamed(directory))  # fail here, not in the first step

    def settle(self) -> None:
        """Flush writes from the page cache to disk.

        Raises:
            OffloadError: a write failed.
        """
        for file in self._files:
            file.settle()

    def reserve(self, nbytes: int) -> tuple[File, int]:
        """Reserve `nbytes` bytes, a multiple of `BLOCK`. Returns the file and the offset in it.

        Raises:
            OffloadError: the disk is full.
        """
        with naming(self.directory, f"reserving {nbytes:,} bytes"):
            if not self._files or self._files[-1].room < nbytes:
                size = min(_FIRST << len(self._files), _LARGEST)
                self._files.append(File(self.directory, max(size, nbytes)))
            return self._files[-1], self._files[-1].reserve(nbytes)


class File:
    """An unnamed file. It occupies disk space only for its reserved bytes.

    Attributes:
        used: reserved bytes at the beginning of the file.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._directory, self._size, self.used = directory, nbytes, 0
        self._unsettled = False
        self._buffered = _open_unnamed(directory)
        weakref.finalize(self, os.close, self._buffered)
        self._direct = _open_direct(self._buffered)
        if self._direct is not None:
            weakref.finalize(self, os.close, self._direct)
        mapped: Any = torch.UntypedStorage.from_file(_path_of(self._buffered), True, nbytes)
        self._mapped: Any = torch.empty(0, dtype=torch.uint8).set_(mapped).numpy()
        self._begin: int = mapped.data_ptr()
        _mapped_files.add(self)

    def holds(self, address: int) -> bool:
        """Whether an address is in the memory mapping of this file."""
        return self._begin <= address < self._begin + self._size

    @property
    def room(self) -> int:
        """Bytes that can still be reserved."""
        return self._size - self.used

    def reserve(self, nbytes: int) -> int:
        """Reserve disk space for the next `nbytes` bytes, and return their offset."""
        offset = self.used
        os.posix_fallocate(self._buffered, offset, nbytes)
        self.used += nbytes
        return offset

    def part(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Some bytes of the mapping as a storage. The system loads pages from the file when they are read."""
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()

    def read(self, memory: memoryview, offset: int) -> None:
        """Read into memory from an offset. Memory and offset are aligned to `BLOCK`."""
        descriptor = self._buffered if self._direct is None else self._direct
        with naming(self._directory, f"reading {len(memory):,} bytes"):
            _all_of(memory, offset, lambda part, at: os.preadv(descriptor, [part], at))
        if self._direct is None:
            self._forget(offset, len(memory))

    def write(self, memory: memoryview, offset: int) -> None:
        """Write memory at an offset. Memory and offset are aligned to `BLOCK`."""
        descriptor = self._buffered if self._direct is None else self._direct
        with naming(self._directory, f"writing {len(memory):,} bytes"):
            _all_of(memory, offset, lambda part, at: os.pwrite(descriptor, part, at))
        if self._direct is None:
            self._unsettled = True
            self._forget(offset, len(memory))

    def put(self, memory: memoryview, offset: int) -> None:
        """Write memory of any length at any offset through the page cache. Errors may appear as late as `settle`."""
        self._unsettled = True
        with naming(self._directory, f"writing {len(memory):,} bytes"):
            _all_of(memory, offset, lambda part, at: os.pwrite(self._buffered, part, at))
        self._forget(offset, len(memory))

    def settle(self) -> None:
        """Flush writes from the page cache to disk, and drop them from the cache."""
        if self._unsettled:
            self._unsettled = False
            with naming(self._directory, "flushing"):
                os.fdatasync(self._buffered)
            self._forget(0, self.used)

    def _forget(self, offset: int, nbytes: int) -> None:
        """Drop pages from the page cache, or start writing dirty pages."""
        os.posix_fadvise(self._buffered, offset, nbytes, os.POSIX_FADV_DONTNEED)


_mapped_files: weakref.WeakSet[File] = weakref.WeakSet()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is mapped from a file of this module."""
    if not _mapped_files or not tensor.is_cpu or not tensor.numel():
        return False
    address = tensor.data_ptr()
    return any(file.holds(address) for file in list(_mapped_files))


def _all_of(memory: memoryview, offset: int, move: Callable[[memoryview, int], int]) -> None:
    """Repeat a read or write until all of `memory` has been transferred."""
    done = 0
    while done < len(memory):
        count = move(memory[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at {offset + done}")
        done += count


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix=".composable_shard-", dir=directory)  # a file system without O_TMPFILE
    os.unlink(name)
    return descriptor


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _open_direct(descriptor: int) -> int | None:
    """Open the file again for direct I/O. None if the file system does not support it."""
    direct = None
    try:
        direct = os.open(_path_of(descriptor), os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, BLOCK) as block:
            os.pwrite(direct, block, 0)  # some file systems accept the flag but fail on access
        os.ftruncate(descriptor, 0)
    except OSError as error:
        if direct is not None:
            os.close(direct)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    return direct


class Run(NamedTuple):
    """A range of a file that is moved as one unit. Offset and length are aligned to `BLOCK`."""

    file: File
    offset: int
    nbytes: int


class Ring:
    """A ring buffer. Leases are returned in the order in which they were made.

    Attributes:
        capacity: size in bytes.
        leased: leased bytes, without unused bytes at the end of the ring.
        most: peak of `leased`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.leased = self.most = 0
        self._memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self.storage = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()
        self._leases: deque[tuple[int, int]] = deque()

    def lease(self, nbytes: int) -> int | None:
        """Lease `nbytes` bytes, a multiple of `BLOCK`. Returns the offset, or None if there is no free space."""
        begin = self._next(nbytes)
        if begin is not None:
            self._leases.append((begin, begin + nbytes))
            self.leased += nbytes
            self.most = max(self.most, self.leased)
        return begin

    def _next(self, nbytes: int) -> int | None:
        if not self._leases:
            return 0 if nbytes <= self.capacity else None
        (oldest, _), (newest, end) = self._leases[0], self._leases[-1]
        if newest < oldest:  # wrapped around: the free space is between them
            return end if oldest - end >= nbytes else None
        if self.capacity - end >= nbytes:
            return end
        return 0 if oldest >= nbytes else None

    def give_back(self) -> None:
        """Return the oldest lease."""
        begin, end = self._leases.popleft()
        self.leased -= end - begin

    def clear(self) -> None:
        """Return all leases."""
        self._leases.clear()
        self.leased = 0

    def release(self) -> None:
        """Return the memory to the system until it is used again. Requires that nothing is leased."""
        assert not self._leases
        self._memory.madvise(mmap.MADV_DONTNEED)

    def read(self, begin: int, run: Run, threads: Executor) -> list[Future[None]]:
        """Start to read a range into leased memory."""
        return self._move(begin, run, run.file.read, threads)

    def write(self, begin: int, run: Run, threads: Executor) -> list[Future[None]]:
        """Start to write leased memory to a range."""
        return self._move(begin, run, run.file.write, threads)

    def _move(
        self, begin: int, run: Run, move: Callable[[memoryview, int], None], threads: Executor
    ) -> list[Future[None]]:
        parts = range(0, run.nbytes, _PIECE)
        ends = [min(at + _PIECE, run.nbytes) for at in parts]
        pieces = zip(parts, ends, strict=True)
        return [threads.submit(move, self._view[begin + at : begin + end], run.offset + at) for at, end in pieces]


def trim() -> None:
    """Make the allocator of the C library return freed memory to the system, including holes between live memory."""
    with contextlib.suppress(AttributeError, OSError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


def finish(futures: Sequence[Future[None]]) -> None:
    """Wait for these futures in turn. Raises the first exception, without waiting for the rest."""
    for future in futures:
        future.result()
