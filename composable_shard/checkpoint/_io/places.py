"""Where files are: paths of a file system, or objects of a store. Everything else in this package uses these functions.

`files` and `objects` implement them. Both write a file sequentially and at most once, and read it by ranges.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from . import files, objects
from .objects import ObjectPath

Place: TypeAlias = Path | ObjectPath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z0-9+.-]+)*)://")
_NORMALIZED = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|adl|memory|hdfs|https?):/[^/]")


class Reading(Protocol):
    """An open file or object."""

    @property
    def size(self) -> int:
        """Its size in bytes."""

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prepare to read ranges, given in order and without overlaps. Downloads them from a store, into memory."""

    def forget(self) -> None:
        """Forget the bytes that `fetch` has downloaded."""

    def read_into(self, view: memoryview, at: int) -> int:
        """Read bytes at an offset, and return their number; 0 at the end."""


class Writing(Protocol):
    """A file or object that is written sequentially."""

    size: int

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def commit(self) -> None:
        """Return when all bytes are in the file system or the store."""

    def close(self) -> None:
        """Discard or close it without that. Has no effect after `commit`."""


def place(given: str | os.PathLike[str]) -> Place:
    """The place of a path or URL. URLs with ``file://`` are paths.

    Raises:
        ValueError: it is a URL that is not supported, or whose second slash is missing.
        ModuleNotFoundError: a package for this URL is not installed.
        OSError: the store cannot be reached.
    """
    if isinstance(given, ObjectPath):
        return given
    text = os.fspath(given)
    url = _URL.match(text)
    if url is None:
        if _NORMALIZED.match(text):
            raise ValueError(f"{text} is a URL that pathlib has changed; pass the URL as a str")
        return Path(given)
    protocol, name = url[1].lower(), text[url.end() :]
    if protocol in ("file", "local"):
        return Path(name.removeprefix("localhost") if name.startswith("localhost/") else name)
    return ObjectPath(f"{protocol}://{name}")


def created(path: Place) -> Writing:
    """Begin to write a file."""
    return objects.NewObject(path) if isinstance(path, ObjectPath) else files.NewFile(path)


def write_file(path: Place, data: bytes) -> None:
    """Write a file."""
    objects.write_file(path, data) if isinstance(path, ObjectPath) else files.write_file(path, data)


@contextmanager
def opened(path: Place) -> Iterator[Reading]:
    """Open a file for reading.

    Raises:
        OSError: it does not exist, is not a regular file, or is a link.
    """
    if isinstance(path, ObjectPath):
        file = objects.OpenObject(path)
        try:
            yield file
        finally:
            file.forget()
    else:
        with files.opened(path) as descriptor:
            yield files.OpenFile(descriptor, path)


def read_file(path: Place, most: int) -> bytes:
    """Read all bytes of a file.

    Raises:
        OSError: it has more than `most` bytes, or as in `opened`.
    """
    return objects.read_file(path, most) if isinstance(path, ObjectPath) else files.read_file(path, most)


def size_of(path: Place) -> int:
    """The size of a file in bytes.

    Raises:
        OSError: as in `opened`.
    """
    return objects.size_of(path) if isinstance(path, ObjectPath) else files.size_of(path)


def resolved(path: Place) -> Place:
    """The path without links and relative parts."""
    return path if isinstance(path, ObjectPath) else path.resolve()


def remove_tree(path: Place) -> None:
    """Delete a directory and all files in it."""
    objects.remove_tree(path) if isinstance(path, ObjectPath) else files.remove_tree(path)


def read_range(file: Reading, begin: int, count: int) -> bytes:
    """Read bytes of an open file; fewer at its end."""
    data = memoryview(bytearray(count))
    at = 0
    while at < count and (some := file.read_into(data[at:], begin + at)):
        at += some
    return bytes(data[:at])


class RangeFile(io.RawIOBase):
    """A file object for a range of an open file."""

    def __init__(self, file: Reading, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._length - self._at)]
        count = self._file.read_into(view, self._begin + self._at) if len(view) else 0
        self._at += count
        return count
