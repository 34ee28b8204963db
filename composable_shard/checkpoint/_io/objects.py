"""Objects in a store that fsspec can reach, such as S3, Google Cloud Storage or Azure: written once, read by ranges.

Object stores have neither directories nor renames. A directory is the common beginning of some names here. Requests are
repeated if they fail for a reason that may pass. No error contains a password, a key or a token.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from .requests import Requests, S3Requests, named, requests_of, said, tried, without_login

_log = logging.getLogger("composable_shard.checkpoint")

_PART = 16 << 20  # bytes of one request that uploads or downloads a part of an object
_GROWTH = 1000  # parts of an upload after which they get twice as large, because S3 accepts at most 10,000
_AT_ONCE = 8  # requests at a time

_T = TypeVar("_T")


class ObjectPath(os.PathLike[str]):
    """The name of an object, or the beginning of the names of several ones, as a URL.

    Args:
        url: the URL, such as ``s3://bucket/run``.
        store: file system of fsspec. Default: as configured for fsspec in this process.

    Attributes:
        url: the URL, which may contain a password; `str` returns it without.
        store: the file system.
    """

    def __init__(self, url: str, store: Any = None) -> None:
        self.url = re.sub(r"(?<![:/])/+$", "", url)
        self.store = _store_of(self.url) if store is None else store

    @property
    def requests(self) -> Requests:
        """Single requests to the store."""
        return requests_of(self.store)

    @property
    def key(self) -> str:
        """The name in the store."""
        key: str = self.store._strip_protocol(self.url)
        return key

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The name without its last part."""
        return ObjectPath(self.url.rpartition("/")[0], self.store)

    def __truediv__(self, name: str) -> ObjectPath:
        slash = "" if self.url.endswith("/") else "/"  # it ends with one for the root of a store
        return ObjectPath(name if "://" in name else f"{self.url}{slash}{name}", self.store)

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return without_login(self.url)

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and self.url == other.url

    def __lt__(self, other: ObjectPath) -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[Any, ...]:  # other ranks use their own configuration and credentials
        return ObjectPath, (self.url,)


def _store_of(url: str) -> Any:
    """The file system of a URL.

    Raises:
        ModuleNotFoundError: fsspec, or its package for this store, is not installed.
        ValueError: no package has such a store, or the URL has options or no bucket.
        OSError: the store cannot be reached.
    """
    protocol, _, name = url.partition("://")
    if "::" in protocol or "?" in url:
        raise ValueError(f"{without_login(url.partition('?')[0])}: chained URLs and URLs with options are unsupported")
    if not name and protocol != "memory":
        raise ValueError(f"{url} names no bucket")
    try:
        import fsspec.core
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{protocol}:// needs fsspec and its package for this store: pip install 'composable-shard[remote]' s3fs "
            "(gcsfs for gs://, adlfs for abfs://)"
        ) from None
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError:
        raise
    except Exception as error:
        text = said(url, None, error).partition(": ")[2]
        raise (ValueError if isinstance(error, ValueError) else OSError)(text) from None


def is_shared(path: ObjectPath) -> bool:
    """Whether other processes can reach the store."""
    return type(path.store).__module__ != "fsspec.implementations.memory"


def described(path: ObjectPath) -> dict[str, Any]:
    """The path, the options of its store and the environment, all with credentials, as JSON for the writer process."""
    return {"url": path.url, "store": path.store.to_dict(include_password=True), "environment": dict(os.environ)}


def from_described(about: dict[str, Any]) -> ObjectPath:
    """The inverse of `described`. Changes the environment of this process."""
    import fsspec

    changed = dict(os.environ) != about["environment"]
    if changed:  # for example, the user has set new credentials since this process was started
        os.environ.clear()
        os.environ.update(about["environment"])
    try:
        store = fsspec.AbstractFileSystem.from_dict(about["store"])
        if changed:
            store.clear_instance_cache()
            store = fsspec.AbstractFileSystem.from_dict(about["store"])
    except Exception as error:  # its text may contain the options
        raise OSError(errno.EIO, f"the writer process cannot use this store: {type(error).__name__}") from None
    return ObjectPath(about["url"], store)


# ---- requests


def _tried(operation: str, path: ObjectPath, request: Callable[[], _T]) -> _T:
    return tried(operation, path.url, path.store, request)


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that wait for requests; a forked process gets its own ones."""
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checkpoint-store")


def _begun(call: Callable[[], _T]) -> Future[_T]:
    """Begin a call in another thread, if the interpreter still starts threads; otherwise call it."""
    try:
        return _pool(os.getpid()).submit(call)
    except RuntimeError:  # the main thread has ended
        done: Future[_T] = Future()
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)
        return done


def _together(calls: Iterable[Callable[[], _T]]) -> list[_T]:
    """Send several requests at a time. If one fails, those that wait are not sent."""
    waiting = [_begun(call) for call in calls]
    try:
        return [each.result() for each in waiting]
    finally:
        for each in waiting:
            each.cancel()


# ---- names


def entries(path: ObjectPath) -> dict[str, bool]:
    """All names in a directory, and whether they are directories; empty if it does not exist."""
    return _tried("list names", path, lambda: path.requests.entries(path.key))


def sizes(path: ObjectPath) -> dict[str, int]:
    """The sizes of all objects in a directory and below it, by name relative to it."""
    return _tried("list names", path, lambda: path.requests.sizes(path.key))


def sizes_of(paths: Iterable[ObjectPath]) -> list[int | None]:
    """The sizes of objects; None for those that do not exist."""
    return _together(functools.partial(_size, path) for path in paths)


def _size(path: ObjectPath) -> int | None:
    return _tried("get its size", path, lambda: path.requests.size(path.key))


def size_of(path: ObjectPath) -> int:
    """The size of an object in bytes.

    Raises:
        FileNotFoundError: there is no such object.
    """
    size = _size(path)
    if size is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return size


# ---- deletion


def remove(path: ObjectPath, names: Iterable[str]) -> None:
    """Delete objects in a directory. Names that do not exist are ignored."""

    def removed(name: str) -> None:
        key = f"{path.key.rstrip('/')}/{name}"  # the name is empty for an object that stands for the directory
        with contextlib.suppress(FileNotFoundError):
            _tried("delete it", path / name, lambda: path.requests.delete(key))

    _together(functools.partial(removed, name) for name in names)


def remove_tree(path: ObjectPath) -> None:
    """Delete all objects in a directory, and the parts of unfinished uploads to it."""
    remove(path, sizes(path))
    abort_uploads(path)


def abort_uploads(path: ObjectPath, directories: re.Pattern[str] | None = None) -> list[str]:
    """Delete the parts of unfinished uploads to a directory, and return the names of the objects, relative to it.

    Only S3 can list them. Warns if it refuses this. Checkpoints are correct nevertheless.

    Args:
        path: the directory.
        directories: only uploads to directories in `path` with these names. Default: all.
    """
    names = []
    try:
        for upload in _tried("list uploads", path, lambda: path.requests.uploads(path.key)):
            name = upload.key.removeprefix(path.key.rstrip("/") + "/")
            if directories is None or directories.fullmatch(name.partition("/")[0]):
                _abort(path, upload.key, upload.identifier)
                names.append(name)
    except (OSError, NotImplementedError) as error:
        _log.warning(
            "%s: cannot delete the parts of interrupted uploads; they occupy space until a rule of the bucket "
            "(AbortIncompleteMultipartUpload) deletes them: %s",
            path,
            error,
        )
    return names


def _abort(path: ObjectPath, key: str, identifier: str) -> None:
    requests = path.requests
    assert isinstance(requests, S3Requests)
    _tried("abort an upload", path, lambda: requests.abort(key, identifier))


# ---- reading


class _Fetched(NamedTuple):
    """A downloaded range of an object, or one that is on the way."""

    begin: int
    end: int
    data: Future[bytes]


class OpenObject:
    """An object from which ranges are read."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self._size = _begun(functools.partial(size_of, path))
        self._fetched: list[_Fetched] = []  # in the order of the object, without overlaps

    @property
    def size(self) -> int:
        """Its size in bytes.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return self._size.result()

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to download ranges, several requests at a time. They stay in memory until this is closed."""
        wanted = _without(sorted(ranges), [(part.begin, part.end) for part in self._fetched])
        for begin, end in _pieces(wanted):
            self._fetched.append(_Fetched(begin, end, _begun(functools.partial(_get, self.path, begin, end))))
        self._fetched.sort(key=_begin_of)

    def read_into(self, view: memoryview, at: int) -> int:
        """Read bytes at an offset, and return their number; 0 at the end of the object."""
        index = bisect.bisect_right(self._fetched, at, key=_begin_of) - 1
        if index >= 0 and at < self._fetched[index].end:
            begin, _, fetched = self._fetched[index]
            data = memoryview(fetched.result())[at - begin : at - begin + len(view)]
        else:
            data = memoryview(_get(self.path, at, min(at + len(view), self.size)) if at < self.size else b"")
        view[: len(data)] = data
        return len(data)

    def forget(self) -> None:
        """Forget all downloaded bytes."""
        for part in self._fetched:
            part.data.cancel()
        self._fetched = []


def _begin_of(part: _Fetched) -> int:
    return part.begin


def _without(ranges: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What sorted ranges cover, each byte once and without the other ranges, which are sorted and do not overlap."""
    at = 0
    for begin, end in ranges:
        at = max(at, begin)
        for other, stop in others[max(bisect.bisect_right(others, (at, at)) - 1, 0) :]:
            if other >= end:
                break
            if other > at:
                yield at, other
            at = max(at, stop)
        if at < end:
            yield at, end
            at = end


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Split ranges for single requests."""
    for begin, end in ranges:
        for at in range(begin, end, _PART):
            yield at, min(at + _PART, end)


def _get(path: ObjectPath, begin: int, end: int) -> bytes:
    def got() -> bytes:
        data = path.requests.get(path.key, begin, end)
        if len(data) != end - begin:
            raise OSError(errno.EIO, f"{len(data):,} of {end - begin:,} bytes have arrived")
        return data

    return _tried(f"read bytes {begin:,} to {end:,}", path, got)


def read_file(path: ObjectPath, most: int) -> bytes:
    """Read an object.

    Raises:
        OSError: it has more than `most` bytes.
    """
    size = size_of(path)
    if size > most:
        raise OSError(errno.EFBIG, f"{size:,} bytes, but such a file may have at most {most:,}", str(path))
    return b"".join(_together(functools.partial(_get, path, begin, end) for begin, end in _pieces([(0, size)])))


# ---- writing


def write_file(path: ObjectPath, data: bytes | bytearray) -> None:
    """Write an object, or replace it."""
    _tried("write it", path, lambda: path.requests.put(path.key, data, new=False))


def create_file(path: ObjectPath, data: bytes) -> None:
    """Write an object, unless it exists.

    Does nothing if it exists with the same content, because the answer to an earlier request may have been lost. Stores
    without conditional writes replace an object that another process writes at the same time.

    Raises:
        FileExistsError: it exists, with other content.
    """
    try:
        try:
            _tried("write it", path, lambda: path.requests.put(path.key, data, new=True))
        except NotImplementedError:
            if _size(path) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            write_file(path, data)
    except FileExistsError:
        if not _contains(path, data):
            raise


def _contains(path: ObjectPath, data: bytes) -> bool:
    try:
        return size_of(path) == len(data) and read_file(path, len(data)) == data
    except FileNotFoundError:  # another process has deleted it
        return False


class NewObject:
    """An object that is written once, sequentially. It exists only after `commit`, if the store is S3."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self.size = 0
        self._part = _PART
        self._begun = bytearray()
        self._upload: _Parts | _Stream | None = None

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        self.size += len(data)
        while len(data):
            some = data[: self._part - len(self._begun)]
            self._begun += some
            data = data[len(some) :]
            if len(self._begun) == self._part:
                self._send()

    def _send(self) -> None:
        if self._upload is None:
            self._upload = (_Parts if self.path.requests.has_parts else _Stream)(self.path)
        data, self._begun = self._begun, bytearray()
        sent = self._upload.send(data)
        self._part = _PART << (sent // _GROWTH)

    def commit(self) -> None:
        """Wait until all bytes are in the store."""
        try:
            if self._upload is None:
                write_file(self.path, self._begun)
                return
            if self._begun:
                self._send()
            self._upload.finish(self.size)
            self._upload = None
        finally:
            self.close()

    def close(self) -> None:
        """Abort the upload if it is not finished. Further calls have no effect."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.abort()


class _Parts:
    """An upload to S3 whose parts are sent at the same time."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        requests = path.requests
        assert isinstance(requests, S3Requests)
        self._requests = requests
        self._free = threading.Semaphore(_AT_ONCE)
        self._sent: list[Future[dict[str, Any]]] = []
        self._failed = threading.Event()
        self._identifier = _tried("begin an upload", path, lambda: requests.begin(path.key))

    def send(self, data: bytearray) -> int:
        """Send the next part, and return its number. Waits while too many are on the way."""
        self._free.acquire()
        if self._failed.is_set():
            self._free.release()
            self._answers()
        self._sent.append(_begun(functools.partial(self._put, len(self._sent) + 1, data)))
        return len(self._sent)

    def _put(self, number: int, data: bytearray) -> dict[str, Any]:
        def upload() -> dict[str, Any]:
            return self._requests.upload(self._path.key, self._identifier, number, data)

        try:
            return _tried(f"upload part {number}", self._path, upload)
        except BaseException:
            self._failed.set()
            raise
        finally:
            self._free.release()

    def _answers(self) -> list[dict[str, Any]]:
        return [each.result() for each in self._sent]

    def finish(self, size: int) -> None:
        """Wait for all parts, and make the object, which then has `size` bytes."""
        parts = self._answers()
        path = self._path
        try:
            _tried("finish an upload", path, lambda: self._requests.finish(path.key, self._identifier, parts))
        except FileNotFoundError:  # no such upload: a request has succeeded although its answer was lost
            if size_of(path) != size:
                raise

    def abort(self) -> None:
        """Discard all parts, after those on the way have arrived."""
        for each in self._sent:
            each.cancel()
            with contextlib.suppress(Exception):
                each.exception()
        with contextlib.suppress(OSError):
            _abort(self._path, self._path.key, self._identifier)


class _Stream:
    """An upload by a file object of fsspec, in another thread. The package of the store repeats its requests."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._file = self._checked(lambda: path.store.open(path.key, "wb", block_size=_PART))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._sent: Future[Any] | None = None
        self._number = 0

    def send(self, data: bytearray) -> int:
        """Send the next bytes, and return how often that was done. Waits for the previous ones."""
        self._wait()
        self._sent = self._pool.submit(self._file.write, data)
        self._number += 1
        return self._number

    def _wait(self) -> None:
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self._checked(sent.result)

    def _checked(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            raise named(self._path.url, self._path.store, error) from None

    def finish(self, size: int) -> None:
        """Wait for all bytes, and make the object, which then has `size` bytes."""
        self._wait()
        self._checked(self._file.close)
        self._pool.shutdown()

    def abort(self) -> None:
        """Discard all bytes, and the object if it exists nevertheless."""
        with contextlib.suppress(Exception):
            self._wait()
        self._pool.shutdown()
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # otherwise its destructor would make the object
        with contextlib.suppress(Exception):
            self._path.requests.delete(self._path.key)
