"""Objects in a store that fsspec can reach, such as S3, Google Cloud Storage or Azure: written once, read by ranges.

Object stores have neither directories nor renames. A directory is the common beginning of some names here. Requests are
repeated if they fail for a reason that may pass. No error contains a password, a key or a token.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import io
import itertools
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

_log = logging.getLogger("composable_shard.checkpoint")

_PART = 16 << 20  # bytes of one request that uploads or downloads a part of an object
_MOST_PARTS = 10_000  # S3 accepts no more in one upload
_AT_ONCE = 8  # requests at a time
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between two tries of a request; up to half of each is random
PATIENCE = "COMPOSABLE_SHARD_STORE_PATIENCE"  # environment variable: seconds after which no request is repeated
_PATIENCE_S = 120.0  # its default; one try may take half a minute, because libraries such as s3fs repeat requests too
_SECRET = re.compile(r"(?i)\b(sig|signature|\w*(?:token|secret|password|credential|key)\w*)=[^&\s'\"]+")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+@")
_SECRETS = re.compile(r"(?i)key|secret|token|password|credential|connection_string|sas")
_FINAL = (  # errors that do not pass
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
)
_NUMBERS = {  # fsspec raises some errors without a number
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}

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
        self.url = url.rstrip("/")
        self.store = _store_of(self.url) if store is None else store

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

    def with_name(self, name: str) -> ObjectPath:
        """The path with another last part."""
        return self.parent / name

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(name if "://" in name else f"{self.url}/{name}", self.store)

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return _LOGIN.sub("", self.url)

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
        ValueError: no package has such a store, or the URL has options.
    """
    protocol = url.partition("://")[0]
    if "::" in url or "?" in url:
        raise ValueError(f"{_LOGIN.sub('', url.partition('?')[0])}: chained URLs and URLs with options are unsupported")
    try:
        import fsspec.core
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{protocol}:// needs fsspec and its package for this store: pip install 'composable-shard[remote]' s3fs "
            "(gcsfs for gs://, adlfs for abfs://)"
        ) from None
    return fsspec.core.url_to_fs(url)[0]


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
        raise OSError(errno.EINVAL, f"the writer process cannot use this store: {type(error).__name__}") from None
    return ObjectPath(about["url"], store)


# ---- requests


def _tried(operation: str, path: ObjectPath, request: Callable[[], _T]) -> _T:
    """Send a request until it succeeds.

    Raises:
        OSError: it has failed for a reason that does not pass, or for too long. The error names the object.
    """
    begun, patience = time.monotonic(), _patience()
    for tries in itertools.count(1):
        try:
            return request()
        except _FINAL as error:
            raise _of(path, error) from None
        except Exception as error:
            if "Credentials" in type(error).__name__:  # NoCredentialsError and others of botocore
                raise OSError(errno.EACCES, _said(path, error), str(path)) from None
            lasted = time.monotonic() - begun
            if lasted >= patience:
                text = f"cannot {operation} for {lasted:.0f} s (tried {tries} times): {_said(path, error)}"
                raise OSError(errno.EIO, text, str(path)) from None
            _log.warning("%s: cannot %s, trying again: %s", path, operation, _said(path, error))
            time.sleep(_PAUSES[min(tries, len(_PAUSES)) - 1] * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _patience() -> float:
    """Seconds for which a request is repeated.

    Raises:
        OSError: the environment variable `PATIENCE` is not a number of seconds.
    """
    given = os.environ.get(PATIENCE, "").strip()
    try:
        seconds = float(given) if given else _PATIENCE_S
        if not 0 <= seconds < math.inf:
            raise ValueError
    except ValueError:
        raise OSError(errno.EINVAL, f"the environment variable {PATIENCE}={given!r} is not a time in seconds") from None
    return seconds


def _said(path: ObjectPath, error: Exception) -> str:
    """The text of an error, without secrets."""
    text = f"{type(error).__name__}: {error}"
    for secret in _secrets(path.store):
        text = text.replace(secret, "***")
    return _SECRET.sub(r"\1=***", _LOGIN.sub("", text))


def _secrets(store: Any) -> set[str]:
    options = {**vars(store), **getattr(store, "storage_options", {}), **os.environ}
    names = (name for name, value in options.items() if isinstance(value, str) and len(value) > 5)
    return {options[name] for name in names if _SECRETS.search(name)}


def _of(path: ObjectPath, error: Exception) -> Exception:
    """The same error with the name of the object."""
    if isinstance(error, OSError):
        number = next((n for kind, n in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        return OSError(number, os.strerror(number), str(path))
    if isinstance(error, NotImplementedError):
        return NotImplementedError(f"{path}: {_said(path, error)}")
    return OSError(errno.EINVAL, _said(path, error), str(path))


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads that wait for requests; a forked process gets its own ones."""
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checkpoint-store")


def _together(calls: Iterable[Callable[[], _T]]) -> list[_T]:
    """Send several requests at a time."""
    waiting = [_pool(os.getpid()).submit(call) for call in calls]
    return [each.result() for each in waiting]


# ---- names


class Entry(NamedTuple):
    """A name in a directory, and whether it is one itself."""

    name: str
    is_directory: bool


def entries(path: ObjectPath) -> list[Entry]:
    """All names in a directory; empty if it does not exist."""

    def listed() -> list[dict[str, Any]]:
        path.store.invalidate_cache()  # other processes write to the store
        try:
            return list(path.store.ls(path.key, detail=True))
        except FileNotFoundError:
            return []

    below = path.key.rstrip("/") + "/"
    answer = ((each["name"].rstrip("/"), each["type"]) for each in _tried("list names", path, listed))
    return [Entry(name.removeprefix(below), kind == "directory") for name, kind in answer if name.startswith(below)]


def sizes(path: ObjectPath) -> dict[str, int]:
    """The sizes of all objects in a directory and below it, by name relative to it."""

    def listed() -> dict[str, dict[str, Any]]:
        path.store.invalidate_cache()
        return dict(path.store.find(path.key, detail=True))

    below = path.key.rstrip("/") + "/"
    answer = _tried("list names", path, listed)
    return {name.removeprefix(below): each["size"] for name, each in answer.items() if name.startswith(below)}


def _size(path: ObjectPath) -> int | None:
    """The size of an object; None if there is no such object."""

    def info() -> int | None:
        path.store.invalidate_cache()
        try:
            about = path.store.info(path.key)
        except FileNotFoundError:
            return None
        return int(about["size"]) if about["type"] == "file" else None

    return _tried("get its size", path, info)


def exist(paths: Sequence[ObjectPath]) -> list[bool]:
    """Whether there are objects of these names."""
    return [size is not None for size in _together(functools.partial(_size, path) for path in paths)]


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


def remove(paths: Iterable[ObjectPath]) -> None:
    """Delete objects. Names that do not exist are ignored."""

    def removed(path: ObjectPath) -> None:
        with contextlib.suppress(FileNotFoundError):
            _tried("delete it", path, lambda: path.store.rm_file(path.key))

    _together(functools.partial(removed, path) for path in paths)


def remove_objects(path: ObjectPath) -> None:
    """Delete all objects in a directory."""
    remove(path / name for name in sizes(path))


def remove_tree(path: ObjectPath) -> None:
    """Delete all objects in a directory, and the parts of unfinished uploads to it."""
    remove_objects(path)
    abort_uploads(path)


class Upload(NamedTuple):
    """An unfinished upload of S3, whose parts occupy space."""

    bucket: str
    key: str
    identifier: str


def unfinished(path: ObjectPath) -> list[Upload]:
    """The unfinished uploads to a directory. Only s3fs can list them."""
    if not hasattr(path.store, "call_s3"):
        return []
    bucket, prefix, _ = path.store.split_path(path.key)
    uploads: list[Upload] = []
    after: dict[str, str] = {}
    while True:
        page = path.store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **after)
        uploads += [Upload(bucket, each["Key"], each["UploadId"]) for each in page.get("Uploads", ())]
        if not page.get("IsTruncated"):
            return uploads
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def abort_uploads(path: ObjectPath, directories: re.Pattern[str] | None = None) -> list[str]:
    """Delete the parts of unfinished uploads to a directory, and return the names of the objects, relative to it.

    Warns if the store refuses this. Checkpoints are correct nevertheless.

    Args:
        path: the directory.
        directories: only uploads to directories in `path` with these names. Default: all.
    """
    names = []
    try:
        for upload in unfinished(path):
            name = f"{upload.bucket}/{upload.key}".removeprefix(path.key.rstrip("/") + "/")
            if directories is None or directories.fullmatch(name.partition("/")[0]):
                _abort(path.store, upload)
                names.append(name)
    except Exception as error:
        _log.warning(
            "%s: cannot delete the parts of interrupted uploads; they occupy space until a rule of the bucket "
            "(AbortIncompleteMultipartUpload) deletes them: %s",
            path,
            _said(path, error),
        )
    return names


def _abort(store: Any, upload: Upload) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.call_s3("abort_multipart_upload", Bucket=upload.bucket, Key=upload.key, UploadId=upload.identifier)


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
        self._size = _pool(os.getpid()).submit(size_of, path)
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
            self._fetched.append(_Fetched(begin, end, _pool(os.getpid()).submit(_get, self.path, begin, end)))
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

    def close(self) -> None:
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
        data: bytes = path.store.cat_file(path.key, start=begin, end=end)
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


def write_file(path: ObjectPath, data: bytes) -> None:
    """Write an object."""
    _tried("write it", path, lambda: _put(path, data))


def _put(path: ObjectPath, data: bytes | bytearray, **conditions: str) -> None:
    store = path.store
    if hasattr(store, "call_s3"):  # `pipe_file` passes bytes, which block the loop of aiohttp while they are sent
        bucket, key, _ = store.split_path(path.key)
        if conditions:
            conditions = {"IfNoneMatch": "*"}
        store.call_s3("put_object", Bucket=bucket, Key=key, Body=io.BytesIO(data), **conditions)
    else:
        store.pipe_file(path.key, data, **conditions)


def create_file(path: ObjectPath, data: bytes) -> None:
    """Write an object, unless it exists.

    Stores without conditional writes replace an object that another process writes at the same time.

    Raises:
        FileExistsError: it exists, with other content.
    """
    try:
        try:
            _tried("write it", path, lambda: _put(path, data, mode="create"))
        except NotImplementedError:
            if _size(path) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            write_file(path, data)
    except FileExistsError:
        if read_file(path, 1 << 62) != data:  # otherwise a request has succeeded although its answer was lost
            raise


class NewObject:
    """An object that is written once, sequentially. It exists only after `commit`.

    Args:
        path: its path.
        size: its size in bytes, if it is known.
    """

    def __init__(self, path: ObjectPath, size: int = 0) -> None:
        self.path = path
        self.size = 0
        self._part = max(_PART, -(-size // _MOST_PARTS))
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
            self._upload = (_Parts if hasattr(self.path.store, "call_s3") else _Stream)(self.path)
        data, self._begun = self._begun, bytearray()
        self._upload.send(data)

    def commit(self) -> None:
        """Wait until all bytes are in the store."""
        try:
            if self._upload is None:
                write_file(self.path, bytes(self._begun))
                return
            if self._begun:
                self._send()
            self._upload.finish()
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
        self._bucket, self._key, _ = path.store.split_path(path.key)
        self._free = threading.Semaphore(_AT_ONCE)
        self._sent: list[Future[str]] = []
        self._failed = threading.Event()
        begun = self._call("begin an upload", "create_multipart_upload")
        self._identifier: str = begun["UploadId"]

    def _call(self, operation: str, method: str, data: bytearray | None = None, **options: Any) -> Any:
        def call() -> Any:
            body = {} if data is None else {"Body": io.BytesIO(data)}
            return self._path.store.call_s3(method, Bucket=self._bucket, Key=self._key, **options, **body)

        return _tried(operation, self._path, call)

    def send(self, data: bytearray) -> None:
        """Send the next part; waits while too many are on the way."""
        self._free.acquire()
        if self._failed.is_set():
            self._free.release()
            self._tags()
        self._sent.append(_pool(os.getpid()).submit(self._put, len(self._sent) + 1, data))

    def _put(self, number: int, data: bytearray) -> str:
        try:
            answer = self._call(
                f"upload part {number}", "upload_part", data, PartNumber=number, UploadId=self._identifier
            )
        except BaseException:
            self._failed.set()
            raise
        finally:
            self._free.release()
        tag: str = answer["ETag"]
        return tag

    def _tags(self) -> list[str]:
        return [each.result() for each in self._sent]

    def finish(self) -> None:
        """Wait for all parts, and make the object."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags(), 1)]
        try:
            self._call(
                "finish an upload",
                "complete_multipart_upload",
                UploadId=self._identifier,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError:  # no such upload: a request has succeeded although its answer was lost
            size_of(self._path)

    def abort(self) -> None:
        """Discard all parts, after those on the way have arrived."""
        for each in self._sent:
            each.cancel()
            with contextlib.suppress(Exception):
                each.exception()
        with contextlib.suppress(OSError):
            upload = Upload(self._bucket, self._key, self._identifier)
            _tried("abort an upload", self._path, lambda: _abort(self._path.store, upload))


class _Stream:
    """An upload by a file object of fsspec, in another thread."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._file = path.store.open(path.key, "wb", block_size=_PART)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-upload")
        self._sent: Future[Any] | None = None

    def send(self, data: bytearray) -> None:
        """Send the next bytes; waits for the previous ones."""
        self._wait()
        self._sent = self._pool.submit(self._file.write, data)

    def _wait(self) -> None:
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self._checked(sent.result)

    def _checked(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            raise _of(self._path, error) from None
        except Exception as error:
            raise OSError(errno.EIO, _said(self._path, error), str(self._path)) from None

    def finish(self) -> None:
        """Wait for all bytes, and make the object."""
        self._wait()
        self._checked(self._file.close)
        self._pool.shutdown()

    def abort(self) -> None:
        """Discard all bytes."""
        with contextlib.suppress(Exception):
            self._wait()
        self._pool.shutdown()
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True  # otherwise its destructor would make the object
