"""A writer's side in the process that trains: the memory that both share, jobs, and what comes of them."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Makes a package of this folder alone: what is above it imports torch.
_START = (
    "import importlib.util as u, sys; spec = u.spec_from_file_location('checkpoint_io', sys.argv.pop(1)); "
    "module = u.module_from_spec(spec); sys.modules['checkpoint_io'] = module; spec.loader.exec_module(module); "
    "from checkpoint_io.writer import main; main()"
)


def _anonymous() -> int:
    """A descriptor of a file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("composable_shard")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class WriterProcess:
    """A process that writes files from memory that it shares with this one; it is started by the first job.

    Attributes:
        capacity: bytes of the shared memory; it grows with what is staged, and stays.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._memory = -1
        self._mapping: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def buffer(self, size: int) -> mmap.mmap:
        """The shared memory, at least so many bytes; nothing may hold what it gave before.

        Raises:
            OSError: there is not so much memory.
        """
        if self._memory < 0:
            self._memory = _anonymous()
        if self._mapping is None or size > self.capacity:
            self._mapping, self.capacity = None, 0
            if hasattr(os, "posix_fallocate"):  # or a page that is written to later may be one too many
                os.posix_fallocate(self._memory, 0, size)
            else:
                os.ftruncate(self._memory, size)
            self._mapping, self.capacity = mmap.mmap(self._memory, size), size
        return self._mapping

    def start(self) -> None:
        """Have the process running; one that has died is replaced."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, other_end = socket.socketpair()
        if self._memory < 0:
            self._memory = _anonymous()
        package = Path(__file__).with_name("__init__.py")
        command = [sys.executable, "-P", "-c", _START, package, other_end.fileno(), self._memory, os.getpid()]
        with other_end:
            try:
                self._process = subprocess.Popen(
                    [str(each) for each in command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(other_end.fileno(), self._memory),
                    start_new_session=True,  # Ctrl-C is for the process that trains
                )
            except BaseException:
                ours.close()
                raise
        self._connection = ours

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return None if self._process is None else self._process.pid

    def write(self, path: Path, size: int, algorithm: str, tell: Callable[[int], None]) -> tuple[int, bytes]:
        """Write the first bytes of the shared memory as a file; they must not change meanwhile.

        Args:
            path: of the file, which must not exist.
            size: how many bytes.
            algorithm: of the digests.
            tell: is called with how many bytes are written, now and then.

        Returns:
            the file's size, and its blocks' digests.

        Raises:
            OSError: it could not be written; the message says why.
            ChildProcessError: the process has died.
        """
        assert self._connection is not None
        job = {"path": str(path), "size": size, "algorithm": algorithm}
        with contextlib.suppress(OSError):  # one that is dead is seen below
            self._connection.sendall(json.dumps(job).encode() + b"\n")
        begun = b""
        while data := self._receive():
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "error" in message:
                    raise OSError(message["error"])
                if "blocks" in message:
                    return message["size"], bytes.fromhex(message["blocks"])
                tell(message["written"])
        raise ChildProcessError(f"the process that was to write {path} has {self._end()}")

    def _receive(self) -> bytes:
        assert self._connection is not None
        try:
            return self._connection.recv(1 << 16)
        except OSError:
            return b""

    def _end(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"been killed by {signal.Signals(-code).name}"
        return f"been killed by signal {-code}"

    def close(self) -> None:
        """End the process; the memory stays."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.wait()
            self._process = None
