"""Requests to an object store, repeated if they fail for a reason that may pass.

`Requests` uses the functions that every store of fsspec has. `S3Requests` calls the client of s3fs instead: s3fs
repeats requests itself, up to 125 times, and then sends an empty body if the body was a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

_log = logging.getLogger("composable_shard.checkpoint")

PATIENCE = "COMPOSABLE_SHARD_STORE_PATIENCE"  # environment variable: seconds after which no request is repeated
_PATIENCE_S = 120.0  # its default
_ONE_TRY_S = 60.0  # one try gets as much time as all together, but at least this much
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between two tries of a request; up to half of each is random

_ENDED = "the main thread has ended, so the package of the store can start no threads; save before that"

_SECRET = re.compile(r"(?i)\b(sig|signature|\w*(?:token|secret|password|credential|key)\w*)=[^&\s'\"]+")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+@")
_SECRETS = re.compile(r"(?i)key|secret|token|password|credential|connection_string|sas")

_NUMBERS = {  # fsspec raises some errors without a number
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}

_T = TypeVar("_T")


class RefusedError(Exception):
    """A request that cannot succeed."""


_FINAL = (*_NUMBERS, RefusedError, NotImplementedError, ImportError, TypeError, ValueError, RuntimeError)


def tried(operation: str, url: str, store: Any, request: Callable[[], _T]) -> _T:
    """Send a request until it succeeds.

    Args:
        operation: what the request does, for messages.
        url: the URL of its object.
        store: the file system of fsspec.
        request: sends the request.

    Raises:
        OSError: it has failed for a reason that does not pass, or for too long. The error names the object.
        NotImplementedError: the store has no such request.
    """
    begun, patience = time.monotonic(), _patience(url)
    for tries in itertools.count(1):
        try:
            return request()
        except _FINAL as error:
            raise named(url, store, error) from None
        except Exception as error:
            if "Credentials" in type(error).__name__:  # of google.auth, for example
                raise named(url, store, error) from None
            if "after shutdown" in str(error) or "interpreter shutdown" in str(error):  # of executors and threads
                raise named(url, store, RefusedError(_ENDED)) from None
            lasted = time.monotonic() - begun
            if lasted >= patience:
                text = f"cannot {operation} for {lasted:.0f} s (tried {tries} times): {said(url, store, error)}"
                raise OSError(errno.EIO, text, without_login(url)) from None
            _log.warning("%s: cannot %s, trying again: %s", without_login(url), operation, said(url, store, error))
            time.sleep(_PAUSES[min(tries, len(_PAUSES)) - 1] * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _patience(url: str) -> float:
    """Seconds for which a request is repeated."""
    given = os.environ.get(PATIENCE, "").strip()
    try:
        seconds = float(given) if given else _PATIENCE_S
        if not 0 <= seconds < math.inf:
            raise ValueError
    except ValueError:
        text = f"the environment variable {PATIENCE}={given!r} is not a time in seconds"
        raise OSError(errno.EIO, text, without_login(url)) from None
    return seconds


def named(url: str, store: Any, error: Exception) -> Exception:
    """The same error with the name of the object, without secrets."""
    text = _clean(url, store, str(error)) if isinstance(error, RefusedError) else said(url, store, error)
    if isinstance(error, NotImplementedError):
        return NotImplementedError(f"{without_login(url)}: {text}")
    number = next((each for kind, each in _NUMBERS.items() if isinstance(error, kind)), None)
    if number is not None and number != errno.EACCES:  # the text of a refusal has the reason
        return OSError(number, os.strerror(number), without_login(url))
    return OSError(number or errno.EIO, text, without_login(url))


def without_login(text: str) -> str:
    """A text without the user and the password in URLs."""
    return _LOGIN.sub("", text)


def said(url: str, store: Any, error: BaseException) -> str:
    """The text of an error, without secrets."""
    return _clean(url, store, f"{type(error).__name__}: {error}")


def _clean(url: str, store: Any, text: str) -> str:
    login = _LOGIN.search(url)
    for secret in sorted(_secrets(store) | (set() if login is None else {login[0][:-1]}), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _SECRET.sub(r"\1=***", without_login(text))


def _secrets(store: Any) -> set[str]:
    """Values of options of a store and of the environment that may be secret."""
    options = {**getattr(store, "__dict__", {}), **getattr(store, "storage_options", {}), **os.environ}
    return {value for name, value in _flat(options) if len(value) > 5 and _SECRETS.search(name)}


def _flat(options: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """All strings in nested options, each with the names that lead to it."""
    for name, value in options.items():
        if isinstance(value, str):
            yield str(name), value
        elif isinstance(value, dict):
            yield from ((f"{name}.{below}", each) for below, each in _flat(value))


# ---- single requests


class Upload(NamedTuple):
    """An unfinished upload, whose parts occupy space: name of the object, and identifier."""

    key: str
    identifier: str


class Requests:
    """Single requests to a store, which are not repeated. Names of objects are `key`.

    Attributes:
        store: the file system of fsspec.
        has_parts: whether an object can be uploaded in parts, in any order.
    """

    has_parts = False

    def __init__(self, store: Any) -> None:
        self.store = store

    def entries(self, key: str) -> dict[str, bool]:
        """The names in a directory, and whether they are directories. Empty if there is none."""
        self.store.invalidate_cache()  # other processes write to the store
        try:
            answer = self.store.ls(key, detail=True)
        except FileNotFoundError:
            return {}
        below = _below(key)
        names = ((each["name"].rstrip("/"), each["type"] == "directory") for each in answer)
        return {name.removeprefix(below): is_one for name, is_one in names if name.startswith(below)}

    def sizes(self, key: str) -> dict[str, int]:
        """The sizes of all objects in a directory and below it, by name relative to it."""
        self.store.invalidate_cache()
        below = _below(key)
        answer = self.store.find(key, detail=True)
        return {name.removeprefix(below): each["size"] for name, each in answer.items() if name.startswith(below)}

    def size(self, key: str) -> int | None:
        """The size of an object; None if there is no such object."""
        self.store.invalidate_cache()
        try:
            about = self.store.info(key)
        except FileNotFoundError:
            return None
        return int(about["size"]) if about["type"] == "file" else None

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Some bytes of an object."""
        data: bytes = self.store.cat_file(key, start=begin, end=end)
        return data

    def put(self, key: str, data: bytes | bytearray, new: bool) -> None:
        """Write an object.

        Raises:
            FileExistsError: `new` is set, and it exists.
            NotImplementedError: `new` is set, and the store cannot check this.
        """
        self.store.pipe_file(key, bytes(data), mode="create" if new else "overwrite")  # Azure takes no bytearray

    def delete(self, key: str) -> None:
        """Delete an object."""
        self.store.rm_file(key)

    def uploads(self, key: str) -> list[Upload]:
        """The unfinished uploads to a directory, if the store can list them."""
        return []


class S3Requests(Requests):
    """Single requests by the client of s3fs, which is botocore's."""

    has_parts = True

    def _call(self, method: str, key: str, data: bytes | bytearray | None = None, **options: Any) -> Any:
        """Call a method of the client; with `data`, as the body of a request. The body of an answer is read."""
        from fsspec.asyn import sync

        async def call() -> Any:
            await self.store.set_session()
            bucket, name, _ = self.store.split_path(key)
            method_of_client = getattr(await self.store.get_s3(bucket), method)
            named_object = {} if method.startswith("list_") else {"Key": name}
            wanted = self.store._get_s3_method_kwargs(
                method_of_client, self.store.req_kw, Bucket=bucket, **named_object, **options
            )
            if missing := options.keys() - wanted.keys():  # they were dropped, because botocore does not know them
                raise NotImplementedError(f"botocore has no {', '.join(missing)}; install a newer version")
            body = {} if data is None else {"Body": io.BytesIO(data)}  # aiohttp sends bytes without a pause
            answer = await method_of_client(**wanted, **body)
            if "Body" in answer:
                async with answer["Body"] as stream:
                    return await stream.read()
            return answer

        try:
            return sync(self.store.loop, call, timeout=max(_patience(key), _ONE_TRY_S))
        except Exception as error:
            translated = _of_s3(error)
            raise translated from None if translated is error else error

    def _listed(self, key: str, **options: Any) -> Iterator[dict[str, Any]]:
        prefix = _prefix(self.store, key)
        after: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", key, Prefix=prefix, **options, **after)
            yield page
            if not page.get("IsTruncated"):
                return
            after = {"ContinuationToken": page["NextContinuationToken"]}

    def entries(self, key: str) -> dict[str, bool]:
        skipped = len(_prefix(self.store, key))
        names: dict[str, bool] = {}
        for page in self._listed(key, Delimiter="/"):
            names |= {each["Key"][skipped:]: False for each in page.get("Contents", ())}
            names |= {each["Prefix"][skipped:].rstrip("/"): True for each in page.get("CommonPrefixes", ())}
        names.pop("", None)  # an empty object that stands for the directory itself
        return names

    def sizes(self, key: str) -> dict[str, int]:
        skipped = len(_prefix(self.store, key))
        return {each["Key"][skipped:]: each["Size"] for page in self._listed(key) for each in page.get("Contents", ())}

    def size(self, key: str) -> int | None:
        if not self.store.split_path(key)[1]:
            return None  # a bucket
        try:
            return int(self._call("head_object", key)["ContentLength"])
        except FileNotFoundError:
            return None

    def get(self, key: str, begin: int, end: int) -> bytes:
        data: bytes = self._call("get_object", key, Range=f"bytes={begin}-{end - 1}")
        return data

    def put(self, key: str, data: bytes | bytearray, new: bool) -> None:
        self._call("put_object", key, data, **({"IfNoneMatch": "*"} if new else {}))

    def delete(self, key: str) -> None:
        self._call("delete_object", key)

    # ---- uploads in parts

    def begin(self, key: str) -> str:
        """Begin an upload, and return its identifier."""
        identifier: str = self._call("create_multipart_upload", key)["UploadId"]
        return identifier

    def upload(self, key: str, identifier: str, number: int, data: bytearray) -> dict[str, Any]:
        """Upload a part, and return how `finish` names it."""
        answer = self._call("upload_part", key, data, UploadId=identifier, PartNumber=number)
        checksums = {
            name: value for name, value in answer.items() if name == "ETag" or re.match("Checksum[A-Z0-9]+$", name)
        }
        return {"PartNumber": number, **checksums}

    def finish(self, key: str, identifier: str, parts: Sequence[dict[str, Any]]) -> None:
        """Make the object of its parts.

        Raises:
            FileNotFoundError: there is no such upload.
        """
        self._call("complete_multipart_upload", key, UploadId=identifier, MultipartUpload={"Parts": list(parts)})

    def abort(self, key: str, identifier: str) -> None:
        """Delete the parts of an upload."""
        with contextlib.suppress(FileNotFoundError):
            self._call("abort_multipart_upload", key, UploadId=identifier)

    def uploads(self, key: str) -> list[Upload]:
        bucket, _, _ = self.store.split_path(key)
        listed: list[Upload] = []
        after: dict[str, Any] = {}
        while True:
            page = self._call("list_multipart_uploads", key, Prefix=_prefix(self.store, key), **after)
            listed += [Upload(f"{bucket}/{each['Key']}", each["UploadId"]) for each in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return listed
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def requests_of(store: Any) -> Requests:
    """The requests to a store."""
    return S3Requests(store) if hasattr(store, "call_s3") else Requests(store)


def _below(key: str) -> str:
    return key.rstrip("/") + "/"


def _prefix(store: Any, key: str) -> str:
    """The beginning of the names of all objects in a directory, in its bucket."""
    name: str = store.split_path(key.rstrip("/"))[1]
    return f"{name}/" if name else ""


_PASSING = {
    "RequestTimeout",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
    "ConditionalRequestConflict",
}
_OF_STATUS = {404: FileNotFoundError, 401: PermissionError, 403: PermissionError, 412: FileExistsError}


def _of_s3(error: Exception) -> Exception:
    """The error that `tried` understands, for an error of botocore."""
    from botocore import exceptions as known

    passing = (
        known.ConnectionError,
        known.CredentialRetrievalError,
        known.HTTPClientError,
        known.IncompleteReadError,
        known.MetadataRetrievalError,
        known.ResponseStreamingError,
    )
    if isinstance(error, known.BotoCoreError) and (
        not isinstance(error, passing) or isinstance(error, (known.NoCredentialsError, known.SSLError))
    ):
        return RefusedError(f"{type(error).__name__}: {error}")  # for example, without credentials
    if isinstance(error, asyncio.TimeoutError):
        return TimeoutError("the store does not answer")
    return error if getattr(error, "response", None) is None else _of_answer(error)


def _of_answer(error: Any) -> Exception:
    """The same for an error that the server has answered."""
    code = error.response["Error"].get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket":
        return RefusedError(f"{code}: {error.response['Error'].get('BucketName', '')}")
    if status == 501:
        return NotImplementedError(str(error))
    if status in _OF_STATUS:
        return _OF_STATUS[status](str(error))
    if 300 <= status < 500 and status not in (408, 409, 429) and code not in _PASSING:
        return RefusedError(str(error))
    passing: Exception = error
    return passing
