"""The process that writes files in the background, out of memory that it shares with the one that trains.

It loads neither torch nor the rest of this package. Its parent starts it as `process.py` says, and they talk in lines
of JSON over a socket: a job in, and out how far it is, and at last its digests or its error. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .digests import BLOCK, Digester
from .files import NewFile

_STEP = 8 << 20  # bytes at a time
_TOLD_S = 0.05  # between two messages of how far it is
_NICE = 10


def write_stream(
    file: NewFile, data: Iterable[memoryview], algorithm: str, tell: Callable[[int], None] | None = None
) -> tuple[int, bytes]:
    """Write a file as a whole, so that it is on disk.

    Args:
        file: that was just made.
        data: its bytes in their order.
        algorithm: of the digests.
        tell: is called with how many bytes are written so far.

    Returns:
        the file's size and its blocks' digests.
    """
    digester = Digester(algorithm)
    try:
        for each in data:
            for block in _blocks(each, file.size):  # which is in the processor's cache still when it is written
                digester.update(block)
                file.write(block)
            if tell is not None:
                tell(file.size)
        file.commit()
    finally:
        file.close()
    return file.size, digester.finish()


def _blocks(data: memoryview, begin: int) -> Iterator[memoryview]:
    """Data cut where the file's blocks end.

    Args:
        data: some bytes of the file.
        begin: where in the file they begin.
    """
    at = 0
    while at < len(data):
        end = at + BLOCK - (begin + at) % BLOCK
        yield data[at:end]
        at = end


def _slices(memory: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(memory), _STEP):
        yield memory[at : at + _STEP]


def _run(job: dict[str, Any], memory: int, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Do a job; gives the last message about it."""
    last = time.monotonic()

    def tell(written: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _TOLD_S:
            last = time.monotonic()
            send({"written": written})

    try:
        mapping = mmap.mmap(memory, job["size"], prot=mmap.PROT_READ)
        size, blocks = write_stream(NewFile(Path(job["path"])), _slices(memoryview(mapping)), job["algorithm"], tell)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"size": size, "blocks": blocks.hex()}


def _read_jobs(connection: socket.socket, parent: int, jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take jobs in, and end the process with its parent, whatever it is doing.

    The parent's children may hold its end of the socket, too, so that the end of the parent is also looked for.
    """
    begun = b""
    with contextlib.suppress(OSError):
        while os.getppid() == parent:
            if not select.select([connection], [], [], 1.0)[0]:
                continue
            data = connection.recv(1 << 16)
            if not data:
                break
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                jobs.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Write until the parent ends."""
    number, memory, parent = map(int, sys.argv[1:4])
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    connection = socket.socket(fileno=number)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(connection, parent, jobs), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    while True:
        send(_run(jobs.get(), memory, send))
