"""A server with the API of S3 (moto) on loopback. Tests, in any process, can let requests to it fail.

`S3()` starts a server in this process. Its `url` is all that other processes need: `use(url)` sets the environment of
s3fs, `fail(url, ...)` adds a rule about the next requests, and `seen(url)` lists the requests that were answered.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import urllib.request
from typing import Any

BUCKET = "bucket"
SECRET = "very-secret-key-of-a-user"
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"


class _Rules:
    """A WSGI application that answers some requests wrongly, and passes the others on.

    A rule has `method`, and parts of the path and the query that must match; `times`, the number of requests that it
    applies to; and `what`:
      error      answer 500 (or `status`, with `code` and `text`)
      slow       wait `seconds` first
      truncated  close the connection after half of the body
      cut        close the connection without an answer, before anything is done
      lost       close the connection without an answer, after everything is done
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._seen: list[list[Any]] = []
        self._active = self._most = 0

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path.startswith("/-/"):
            return self._control(path, environ, start)
        with self._lock:
            self._active += 1
            self._most = max(self._most, self._active)
        try:
            return self._answered(method, path, query, environ, start)
        finally:
            with self._lock:
                self._active -= 1

    def _answered(self, method: str, path: str, query: str, environ: dict[str, Any], start: Any) -> Any:
        rule = self._rule(method, f"{path}?{query}")
        what = None if rule is None else rule["what"]
        if what in ("error", "cut"):
            with self._lock:
                self._seen.append([method, path, query, environ.get("HTTP_RANGE", ""), -1])
        if what == "error":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = _ERROR.format(rule.get("code", "InternalError"), rule.get("text", "try again")).encode()
            start(f"{rule.get('status', 500)} Error", [("Content-Length", str(len(body)))])
            return [body]
        if what == "cut":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start("500 Error", [])
            return []
        if what == "slow":
            time.sleep(rule["seconds"])
        answered: list[Any] = []
        body = b"".join(self._inner(environ, lambda status, headers, info=None: answered.append((status, headers))))
        with self._lock:
            self._seen.append([method, path, query, environ.get("HTTP_RANGE", ""), len(body)])
        if what == "lost":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start(*answered[0])
        return self._half(body, environ) if what == "truncated" else [body]

    def _half(self, body: bytes, environ: dict[str, Any]) -> Any:
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def _rule(self, method: str, target: str) -> dict[str, Any] | None:
        with self._lock:
            for rule in self._rules:
                if rule["times"] and rule["method"] in (method, "") and all(part in target for part in rule["parts"]):
                    rule["times"] -= 1
                    return rule
        return None

    def _control(self, path: str, environ: dict[str, Any], start: Any) -> list[bytes]:
        data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            if path == "/-/fail":
                self._rules.append(json.loads(data))
            elif path == "/-/reset":
                self._rules, self._seen, self._most = [], [], 0
            answer = json.dumps(self._most if path == "/-/most" else self._seen).encode()
        start("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


class S3:
    """A server in threads of this process, with one bucket."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        inner = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, _Rules(inner), threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        use(self.url)
        store().mkdir(BUCKET)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


def settings(url: str) -> dict[str, str]:
    """The environment of a process that uses a server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # botocore repeats no requests
    }


def use(url: str) -> None:
    """Let this process use a server."""
    if os.environ.get("AWS_ENDPOINT_URL") != url:
        import fsspec

        os.environ.update(settings(url))
        fsspec.filesystem("s3").clear_instance_cache()


def store() -> Any:
    """The file system of s3fs, without any cached listing."""
    import fsspec

    made = fsspec.filesystem("s3")
    made.invalidate_cache()
    return made


def fail(url: str, what: str, *parts: str, method: str = "", times: int = 1, **about: Any) -> None:
    """Let the next `times` requests with this method and these parts in their target fail; see `_Rules`."""
    _send(url, "fail", {"what": what, "parts": parts, "method": method, "times": times, **about})


def seen(url: str) -> list[list[Any]]:
    """Method, path, query, range and bytes of the answers to all requests since `reset`; -1 bytes for errors."""
    answer: list[list[Any]] = _send(url, "seen", {})
    return answer


def most(url: str) -> int:
    """The largest number of requests at a time since `reset`."""
    number: int = _send(url, "most", {})
    return number


def reset(url: str) -> None:
    """Forget all rules and requests."""
    _send(url, "reset", {})


def _send(url: str, what: str, about: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/-/{what}", json.dumps(about).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def names(path: str) -> list[str]:
    """The names of all objects below a path, relative to it."""
    return sorted(name.removeprefix(f"{path}/") for name in store().find(path))
