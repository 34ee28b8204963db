"""Every write, flush, rename and read of a checkpoint, in one place.

Nothing follows a symbolic link, and nothing is written over a file that exists. `observe`, where it is set, is told of
each operation before it is done, by its name and path; a test ends the process there, or raises what a full disk does.
"""

import ctypes
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FLUSH = 8 << 20  # bytes after which the disk is to begin
_SYNC_FILE_RANGE_WRITE = 2  # of <fcntl.h>

observe: Callable[[str, Path], None] | None = None


@contextmanager
def _doing(operation: str, path: Path) -> Iterator[None]:
    """Tell of an operation; where it fails, the error names the file."""
    try:
        if observe is not None:
            observe(operation, path)
        yield
    except OSError as error:
        if error.filename is None:
            raise _of(path, error) from None
        raise


def _of(path: Path, error: OSError) -> OSError:
    """The same error, naming the file; one without a number, which the system has not raised, as it is."""
    return error if error.errno is None else OSError(error.errno, error.strerror, str(path))


def make_directory(path: Path) -> None:
    """Make a new directory, and those above it where there are none; those have their names on disk then."""
    above = path.parent
    if not above.is_dir():
        make_directory(above)
        sync_directory(above.parent)
    with _doing("mkdir", path):
        path.mkdir(exist_ok=True)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's system call; None on another system."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    try:
        return kind(("sync_file_range", ctypes.CDLL(None)))
    except (AttributeError, OSError, TypeError):
        return None


_sync_file_range = _find_sync_file_range()


def _begin_to_flush(descriptor: int, begin: int, count: int) -> None:
    """Let the disk begin with bytes of a file while others are written; a hint.

    What goes wrong with these bytes is an error of `fsync`, as ever.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, begin, count, _SYNC_FILE_RANGE_WRITE)


class NewFile:
    """A file that is written once, from its begin to its end. Nothing is certain to be on disk before `commit`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._flushed = 0
        with _doing("create", path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        with _doing("write", self.path):
            while len(data):
                written = os.write(self._descriptor, data)
                self.size += written
                data = data[written:]
        if self.size - self._flushed >= _FLUSH:
            _begin_to_flush(self._descriptor, self._flushed, self.size - self._flushed)
            self._flushed = self.size

    def commit(self) -> None:
        """Have all that was written on disk, and close the file."""
        try:
            with _doing("fsync", self.path):
                os.fsync(self._descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as it is; again is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_file(path: Path, data: bytes) -> None:
    """Write a new file as a whole; it is on disk afterwards."""
    file = NewFile(path)
    try:
        file.write(memoryview(data))
        file.commit()
    finally:
        file.close()


def sync_directory(path: Path) -> None:
    """Have the names in a directory on disk."""
    with _doing("fsync", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot do it for directories
                raise
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a directory a name that nothing has (an OSError where something has), and have that on disk."""
    with _doing("rename", new):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        old.rename(new)
    sync_directory(new.parent)


def replace(old: Path, new: Path) -> None:
    """Give a file the name that another one has, at once, and have that on disk."""
    with _doing("rename", new):
        old.replace(new)
    sync_directory(new.parent)


def remove(path: Path) -> None:
    """Remove a file, or a link."""
    with _doing("remove", path):
        path.unlink()


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it; a link is removed itself."""
    if path.is_symlink() or not path.is_dir():
        remove(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not entry.is_dir(follow_symlinks=False):
            remove(Path(entry.path))
    with _doing("remove", path):
        shutil.rmtree(path)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read an ordinary file by; an OSError where it is none, or a link."""
    with _doing("open", path):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not an ordinary file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview, at: int, path: Path) -> int:
    """Read bytes of an open file from a place in it; gives how many, none at its end."""
    try:  # without `_doing`, which takes longer than to read a small tensor
        if observe is not None:
            observe("read", path)
        return read_at(descriptor, view, at)
    except OSError as error:
        raise _of(path, error) from None


def _copied(descriptor: int, view: memoryview, at: int) -> int:
    """`read_at` on a system that reads only into memory of its own, as macOS before version 11."""
    data = os.pread(descriptor, len(view), at)
    view[: len(data)] = data
    return len(data)


def _direct(descriptor: int, view: memoryview, at: int) -> int:
    return os.preadv(descriptor, [view], at)


read_at: Callable[[int, memoryview, int], int] = _direct if hasattr(os, "preadv") else _copied
"""Read bytes of an open file from a place in it into a view of bytes; gives how many, none at its end."""


def buffer(size: int) -> memoryview:
    """Memory to read files into, which begins at a page.

    Some processors copy at a quarter of their speed to where the address, within its page, is up to 31 bytes past that
    of the source, which is where a large `bytearray` lies and a block of a file does not.
    """
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def size_of(path: Path) -> int:
    """Bytes of an ordinary file; an OSError where it is none, or a link."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not an ordinary file"
        raise OSError(errno.EINVAL, kind, str(path))
    return status.st_size


def read_file(path: Path, most: int) -> bytes:
    """All of an ordinary file; an OSError where it has more bytes than `most`."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than the {most:,} that such a file may have", str(path))
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(size)
