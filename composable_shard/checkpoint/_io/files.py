"""All operations of checkpoints on files: create, write, flush, rename, read, delete.

No operation follows a symbolic link, and no operation overwrites an existing file. If `observe` is set, it is called
before each operation with the operation's name and path. Tests use it to end the process or to raise disk errors.
"""

import ctypes
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FLUSH = 8 << 20  # bytes after which the kernel starts to write them to disk
_SYNC_FILE_RANGE_WRITE = 2  # of <fcntl.h>

observe: Callable[[str, Path], None] | None = None


@contextmanager
def _doing(operation: str, path: Path) -> Iterator[None]:
    """Call `observe` before an operation. If the operation fails, the error names the file."""
    try:
        if observe is not None:
            observe(operation, path)
        yield
    except OSError as error:
        if error.filename is None:
            raise _of(path, error) from None
        raise


def _of(path: Path, error: OSError) -> OSError:
    """The same error with the file's name. An error without errno, which the system did not raise, is unchanged."""
    return error if error.errno is None else OSError(error.errno, error.strerror, str(path))


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents. The names of the new parents are flushed to disk."""
    above = path.parent
    if not above.is_dir():
        make_directory(above)
        sync_directory(above.parent)
    with _doing("mkdir", path):
        path.mkdir(exist_ok=True)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call of Linux; None on other systems."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    try:
        return kind(("sync_file_range", ctypes.CDLL(None)))
    except (AttributeError, OSError, TypeError):
        return None


_sync_file_range = _find_sync_file_range()


def _begin_to_flush(descriptor: int, begin: int, count: int) -> None:
    """Start to write bytes of a file to disk while the file is still being written. This is only a hint.

    Errors are not reported here. `fsync` reports them.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, begin, count, _SYNC_FILE_RANGE_WRITE)


class NewFile:
    """A file that is written once, sequentially. Its bytes are guaranteed to be on disk only after `commit`."""

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
        """Flush all written bytes to disk, and close the file."""
        try:
            with _doing("fsync", self.path):
                os.fsync(self._descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file without a flush. Further calls have no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    file = NewFile(path)
    try:
        file.write(memoryview(data))
        file.commit()
    finally:
        file.close()


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    with _doing("fsync", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot flush directories
                raise
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a directory and flush the rename to disk.

    Raises:
        OSError: the new name exists.
    """
    with _doing("rename", new):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        old.rename(new)
    sync_directory(new.parent)


def replace(old: Path, new: Path) -> None:
    """Atomically replace a file by another one, and flush the rename to disk."""
    with _doing("rename", new):
        old.replace(new)
    sync_directory(new.parent)


def remove(path: Path) -> None:
    """Delete a file or a link."""
    with _doing("remove", path):
        path.unlink()


def remove_tree(path: Path) -> None:
    """Delete a directory and its content. A link is deleted, not followed."""
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
    """Open a regular file for reading, and give its descriptor.

    Raises:
        OSError: the path is not a regular file, or is a link.
    """
    with _doing("open", path):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


class OpenFile:
    """An open file from which ranges are read.

    Args:
        descriptor: its descriptor, which the caller closes.
        path: its path.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._descriptor).st_size

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: the page cache reads ahead."""

    def forget(self) -> None:
        """Do nothing: nothing was downloaded."""

    def read_into(self, view: memoryview, at: int) -> int:
        """Read bytes at an offset, and return their number; 0 at the end of the file."""
        try:  # without `_doing`, which would take longer than the read of a small tensor
            if observe is not None:
                observe("read", self._path)
            return _read_at(self._descriptor, view, at)
        except OSError as error:
            raise _of(self._path, error) from None


def _copied(descriptor: int, view: memoryview, at: int) -> int:
    """`_read_at` on systems without `preadv`, for example macOS before version 11."""
    data = os.pread(descriptor, len(view), at)
    view[: len(data)] = data
    return len(data)


def _direct(descriptor: int, view: memoryview, at: int) -> int:
    return os.preadv(descriptor, [view], at)


_read_at: Callable[[int, memoryview, int], int] = _direct if hasattr(os, "preadv") else _copied


def buffer(size: int) -> memoryview:
    """A buffer to read files into. It starts at a page boundary.

    Some processors copy at a quarter of their speed if the destination's offset in its page is up to 31 bytes larger
    than the source's. Blocks of a file start at a page boundary, but a large `bytearray` starts shortly after one.
    """
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def size_of(path: Path) -> int:
    """The size of a regular file in bytes.

    Raises:
        OSError: the path is not a regular file, or is a link.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise OSError(errno.EINVAL, kind, str(path))
    return status.st_size


def read_file(path: Path, most: int) -> bytes:
    """Read all bytes of a regular file.

    Raises:
        OSError: the file has more than `most` bytes, is not a regular file, or is a link.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, but such a file may have at most {most:,}", str(path))
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(size)
