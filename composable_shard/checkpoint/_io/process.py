"""The training process's interface to the writer process: shared memory, jobs, and their results."""

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

from .objects import ObjectPath, described
from .places import Place

# Imports this folder as a package of its own, because its parent packages import torch.
_START = (
    "import importlib.util as u, sys; spec = u.spec_from_file_location('checkpoint_io', sys.argv.pop(1)); "
    "module = u.module_from_spec(spec); sys.modules['checkpoint_io'] = module; spec.loader.exec_module(module); "
    "from checkpoint_io.writer import main; main()"
)


def _anonymous() -> int:
    """A descriptor of an anonymous file, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("composable_shard")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class WriterProcess:
    """A process that writes files from memory shared with this process. `start` starts it.

    Attributes:
        capacity: bytes of the shared memory. It grows to the largest requested size and never shrinks.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._memory = -1
        self._mapping: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def buffer(self, size: int) -> mmap.mmap:
        """The shared memory, with at least `size` bytes. No view of an earlier buffer may exist.

        Raises:
            OSError: there is not enough memory.
        """
        if self._memory < 0:
            self._memory = _anonymous()
        if self._mapping is None or size > self.capacity:
            self._mapping, self.capacity = None, 0
            if hasattr(os, "posix_fallocate"):  # otherwise a later write to a page may run out of memory
                os.posix_fallocate(self._memory, 0, size)
            else:
                os.ftruncate(self._memory, size)
            self._mapping, self.capacity = mmap.mmap(self._memory, size), size
        return self._mapping

    def start(self) -> None:
        """Start the process if it is not running. A dead process is replaced."""
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
                    start_new_session=True,  # so that Ctrl-C interrupts only the training process
                )
            except BaseException:
                ours.close()
                raise
        self._connection = ours

    @property
    def pid(self) -> int | None:
        """Process id; None if the process was not started."""
        return None if self._process is None else self._process.pid

    def write(self, path: Place, size: int, algorithm: str, tell: Callable[[int], None]) -> tuple[int, bytes]:
        """Write the first `size` bytes of the shared memory to a file. They must not change during the call.

        Args:
            path: path of the file. It must not exist. Its store must be one that other processes can reach.
            size: number of bytes.
            algorithm: algorithm of the digests.
            tell: called from time to time with the number of bytes written so far.

        Returns:
            The file's size, and the digests of its blocks.

        Raises:
            OSError: the file could not be written. The message gives the reason.
            ChildProcessError: the process has died.
        """
        assert self._connection is not None
        job: dict[str, Any] = {"size": size, "algorithm": algorithm}
        job |= {"object": described(path)} if isinstance(path, ObjectPath) else {"path": str(path)}
        with contextlib.suppress(OSError):  # a dead process is detected below
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
        raise ChildProcessError(f"the writer process of {path} has {self._end()}")

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
        """End the process. The shared memory is kept."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.wait()
            self._process = None
