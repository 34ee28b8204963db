"""The writer process: writes files in the background from memory that it shares with the training process.

It imports neither torch nor the rest of this package. `process.py` starts it. Both exchange lines of JSON over a
socket: the parent sends a job, and the writer sends its progress and finally the digests or an error. The writer ends
when its parent ends.
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
from typing import Any

from . import objects
from .digests import BLOCK, Digester
from .places import Place, Writing, created, place

_STEP = 8 << 20  # bytes written at a time
_TOLD_S = 0.05  # seconds between two progress messages
_NICE = 10  # added to the niceness, so that the writer takes less CPU time from training


def write_stream(
    file: Writing, data: Iterable[memoryview], algorithm: str, tell: Callable[[int], None] | None = None
) -> tuple[int, bytes]:
    """Write a file, and return when it is on disk or in its store.

    Args:
        file: new, empty file.
        data: bytes of the file, in order.
        algorithm: algorithm of the digests.
        tell: called with the number of bytes written so far.

    Returns:
        The file's size, and the digests of its blocks.
    """
    digester = Digester(algorithm)
    try:
        for each in data:
            for block in _blocks(each, file.size):  # a block is still in the CPU cache when it is written
                digester.update(block)
                file.write(block)
            if tell is not None:
                tell(file.size)
        file.commit()
    finally:
        file.close()
    return file.size, digester.finish()


def _blocks(data: memoryview, begin: int) -> Iterator[memoryview]:
    """Split data at the ends of the file's blocks.

    Args:
        data: bytes of the file.
        begin: offset of `data` in the file.
    """
    at = 0
    while at < len(data):
        end = at + BLOCK - (begin + at) % BLOCK
        yield data[at:end]
        at = end


def write_memory(
    path: Place, memory: memoryview, algorithm: str, tell: Callable[[int], None] | None = None
) -> tuple[int, bytes]:
    """Write a file with these bytes; see `write_stream`."""
    slices = (memory[at : at + _STEP] for at in range(0, len(memory), _STEP))
    return write_stream(created(path), slices, algorithm, tell)


def _run(job: dict[str, Any], memory: int, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a job, and return its last message."""
    last = time.monotonic()

    def tell(written: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _TOLD_S:
            last = time.monotonic()
            send({"written": written})

    try:
        mapping = mmap.mmap(memory, job["size"], prot=mmap.PROT_READ)
        path = place(job["path"]) if "path" in job else objects.from_described(job["object"])
        size, blocks = write_memory(path, memoryview(mapping), job["algorithm"], tell)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"size": size, "blocks": blocks.hex()}


def _read_jobs(connection: socket.socket, parent: int, jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Receive jobs, and end this process when its parent ends, even during a job.

    Other children of the parent may keep the parent's end of the socket open, so the parent's process id is polled.
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
    """Run jobs until the parent ends."""
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
