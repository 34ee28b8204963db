"""Bytes in files, and a ring of memory through which threads read and write them.

The files have no names: nothing else can open them, and the system takes their space back when the process ends,
however it ends. So a run that was killed leaves nothing behind that another one could take for its own.
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

from .._errors import OffloadError

BLOCK = max(4096, mmap.ALLOCATIONGRANULARITY)  # bytes to which addresses, offsets and lengths of direct access align
_PIECE = 8 << 20  # bytes of one read or write; several are on their way at once
THREADS = 4  # that read and write: two reach what a disk gives, and reads and writes are not to wait for each other
_FIRST, _LARGEST = 64 << 20, 64 << 30  # bytes of the first file, and at most: each is twice as large as the one before


def aligned(nbytes: int, to: int = BLOCK) -> int:
    """The next multiple of `to`, a power of two."""
    return (nbytes + to - 1) & -to


@contextlib.contextmanager
def naming(directory: Path, doing: str) -> Iterator[None]:
    """Errors of the system become an `OffloadError` that says what was done where."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = f"{_free_bytes(directory):,} bytes are free there"
            raise OffloadError(
                f"{directory}: the disk is full ({free}) and {doing} failed; make room or name another directory in "
                "DiskOffloadPolicy, and go on from a checkpoint"
            ) from error
        raise OffloadError(f"{directory}: {doing} failed: {error}") from error


def _free_bytes(directory: Path) -> int:
    with contextlib.suppress(OSError):
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize
    return 0


class Files:
    """Space in a directory, in as many files as it takes. Space is reserved before anything is written there.

    Args:
        directory: where the files are; it is made if it is not there.

    Raises:
        OffloadError: the directory cannot be made or written in.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: list[File] = []
        with naming(directory, "making a file"):
            directory.mkdir(parents=True, exist_ok=True)
            os.close(_open_unnamed(directory))  # better now than in the first step

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(file.used for file in self._files)

    def settle(self) -> None:
        """Have on disk what went through the page cache.

        Raises:
            OffloadError: it is not.
        """
        for file in self._files:
            file.settle()

    def reserve(self, nbytes: int) -> tuple[File, int]:
        """A file with so many bytes, a multiple of `BLOCK`, and where in it they begin.

        Raises:
            OffloadError: the disk has no room for them.
        """
        with naming(self.directory, f"reserving {nbytes:,} bytes"):
            if not self._files or self._files[-1].room < nbytes:
                size = min(_FIRST << len(self._files), _LARGEST)
                self._files.append(File(self.directory, max(size, nbytes)))
            return self._files[-1], self._files[-1].reserve(nbytes)


class File:
    """A file without a name, which takes the space of what is reserved in it.

    Attributes:
        used: bytes that are reserved, from its begin.
        direct: whether reads and writes go past the system's page cache.
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
        """Whether what lies at an address is mapped from this file."""
        return self._begin <= address < self._begin + self._size

    @property
    def direct(self) -> bool:
        return self._direct is not None

    @property
    def room(self) -> int:
        """Bytes that can still be reserved."""
        return self._size - self.used

    def reserve(self, nbytes: int) -> int:
        """Where the next bytes begin, which the disk has room for."""
        offset = self.used
        os.posix_fallocate(self._buffered, offset, nbytes)
        self.used += nbytes
        return offset

    def part(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Some bytes as memory: pages come from the file when they are read, and go back there."""
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill memory from an offset on. Both are aligned to `BLOCK`."""
        descriptor = self._buffered if self._direct is None else self._direct
        with naming(self._directory, f"reading {len(memory):,} bytes"):
            _all_of(memory, offset, lambda part, at: os.preadv(descriptor, [part], at))
        if self._direct is None:
            self._forget(offset, len(memory))

    def write(self, memory: memoryview, offset: int) -> None:
        """Write memory at an offset. Both are aligned to `BLOCK`."""
        descriptor = self._buffered if self._direct is None else self._direct
        with naming(self._directory, f"writing {len(memory):,} bytes"):
            _all_of(memory, offset, lambda part, at: os.pwrite(descriptor, part, at))
        if self._direct is None:
            self._unsettled = True
            self._forget(offset, len(memory))

    def put(self, memory: memoryview, offset: int) -> None:
        """Write memory of any length at any offset, through the page cache; errors may come as late as in `settle`."""
        self._unsettled = True
        with naming(self._directory, f"writing {len(memory):,} bytes"):
            _all_of(memory, offset, lambda part, at: os.pwrite(self._buffered, part, at))
        self._forget(offset, len(memory))

    def settle(self) -> None:
        """Have on disk what went through the page cache, and out of the cache."""
        if self._unsettled:
            self._unsettled = False
            with naming(self._directory, "flushing"):
                os.fdatasync(self._buffered)
            self._forget(0, self.used)

    def _forget(self, offset: int, nbytes: int) -> None:
        """Let the page cache drop pages, or begin to write those that are yet to be written."""
        os.posix_fadvise(self._buffered, offset, nbytes, os.POSIX_FADV_DONTNEED)


_mapped_files: weakref.WeakSet[File] = weakref.WeakSet()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in a file of this module, and come into memory when they are read."""
    if not _mapped_files or not tensor.is_cpu or not tensor.numel():
        return False
    address = tensor.data_ptr()
    return any(file.holds(address) for file in list(_mapped_files))


def _all_of(memory: memoryview, offset: int, move: Callable[[memoryview, int], int]) -> None:
    """Read or write until all of it has been."""
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
    descriptor, name = tempfile.mkstemp(prefix=".composable_shard-", dir=directory)  # a file system without such files
    os.unlink(name)
    return descriptor


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _open_direct(descriptor: int) -> int | None:
    """The file once more, to read and write past the page cache; None where the file system cannot."""
    direct = None
    try:
        direct = os.open(_path_of(descriptor), os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        with mmap.mmap(-1, BLOCK) as block:
            os.pwrite(direct, block, 0)  # some take the flag, and refuse the access
        os.ftruncate(descriptor, 0)
    except OSError as error:
        if direct is not None:
            os.close(direct)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    return direct


class Run(NamedTuple):
    """Bytes of a file that are moved as a whole; all three are aligned to `BLOCK`."""

    file: File
    offset: int
    nbytes: int


class Ring:
    """Memory that is leased in turns, and given back in the order in which it was leased.

    Attributes:
        capacity: its bytes, all that it ever takes.
        leased: bytes that are leased now, without those that are left out where the ring closes.
        most: the most that were leased at once.
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
        """Where so many bytes begin, a multiple of `BLOCK`; None while others hold them."""
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
        if newest < oldest:  # closed: free is what is between them
            return end if oldest - end >= nbytes else None
        if self.capacity - end >= nbytes:
            return end
        return 0 if oldest >= nbytes else None

    def give_back(self) -> None:
        """Give the oldest lease back."""
        begin, end = self._leases.popleft()
        self.leased -= end - begin

    def clear(self) -> None:
        """Give all leases back."""
        self._leases.clear()
        self.leased = 0

    def release(self) -> None:
        """Give the memory to the system until it is used again. Nothing is leased."""
        assert not self._leases
        self._memory.madvise(mmap.MADV_DONTNEED)

    def read(self, begin: int, run: Run, threads: Executor) -> list[Future[None]]:
        """Fill leased memory."""
        return self._move(begin, run, run.file.read, threads)

    def write(self, begin: int, run: Run, threads: Executor) -> list[Future[None]]:
        """Write leased memory."""
        return self._move(begin, run, run.file.write, threads)

    def _move(
        self, begin: int, run: Run, move: Callable[[memoryview, int], None], threads: Executor
    ) -> list[Future[None]]:
        parts = range(0, run.nbytes, _PIECE)
        ends = [min(at + _PIECE, run.nbytes) for at in parts]
        pieces = zip(parts, ends, strict=True)
        return [threads.submit(move, self._view[begin + at : begin + end], run.offset + at) for at, end in pieces]


def trim() -> None:
    """Let the allocator of the C library give back what it keeps of freed memory: holes between what lives on, too."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all, and raise what any of them has raised."""
    for future in futures:
        future.result()
