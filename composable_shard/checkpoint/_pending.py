"""Handles for background saves: at most one per rank at a time. Every failure is raised or printed."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  must be imported before `_register_atexit` is called
import contextlib
import multiprocessing.util
import os
import sys
import threading

import torch.distributed as dist

from ..errors import CheckpointError
from ._io.places import Place
from ._io.process import WriterProcess


class PendingSave:
    """Handle of a background save, returned by `async_save`."""

    def __init__(self, step: int, total: int) -> None:
        self._step = step
        self._written, self._total = 0, total  # bytes of this rank
        self._ended = threading.Event()
        self._path: Place | None = None
        self._error: BaseException | None = None
        self._raised = False  # whether the error was raised in the user's code

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "running"
        return f"PendingSave(step={self._step}: {state}, {self._written} of {self._total} bytes written)"

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._step

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written, and the total bytes that it will write."""
        return self._written, self._total

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Place:
        """Wait until the save has ended.

        Args:
            timeout: maximum time to wait, in seconds. Default: no limit.

        Returns:
            The path of the committed checkpoint.

        Raises:
            CheckpointError: the save failed. Raised on all ranks. Earlier checkpoints are unchanged.
            TimeoutError: the save is still running after `timeout` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"the save of step {self._step} is still running: {self._written:,} of {self._total:,} bytes are "
                "written"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        assert self._path is not None
        return self._path

    # ---- for the code that saves

    def _advance(self, written: int) -> None:
        """Record the number of bytes written so far."""
        self._written = written

    def _succeed(self, path: Place) -> None:
        """Record that the checkpoint is committed."""
        self._path = path
        self._ended.set()

    def _fail(self, error: BaseException) -> None:
        """Record that the save has failed."""
        self._error = error
        self._ended.set()

    def _unseen(self) -> BaseException | None:
        """The error, unless it was already raised. Waits for the end of the save and marks the error as raised."""
        self._ended.wait()
        error, self._raised = None if self._raised else self._error, True
        return error


class Background:
    """State of this process for the background saves of one rank.

    Attributes:
        writer: the writer process, and the memory that it shares with this process.
        pending: the last save.
    """

    def __init__(self) -> None:
        self.writer = WriterProcess()
        self.pending: PendingSave | None = None

    def remember(self, pending: PendingSave) -> None:
        """Note a save that was started."""
        self.pending = pending

    def settle(self) -> None:
        """Wait for the last save, and raise its error unless it was already raised."""
        error = None if self.pending is None else self.pending._unseen()
        if error is not None:
            assert self.pending is not None
            raise CheckpointError(
                f"the background save of step {self.pending.step} failed, so nothing else was done: {error}"
            ) from error


# By process, because a forked child has none at first, and by rank: a simulated world has several in one process.
_backgrounds: dict[tuple[int, int], Background] = {}


def background() -> Background:
    """The background state of this rank."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    process = os.getpid()
    if not _own():
        # The interpreter stops the threads of executors first. Uploads need some, so wait for the saves before. It
        # calls these functions in reverse order, and `concurrent.futures.thread` has registered its own at its import.
        with contextlib.suppress(RuntimeError):  # the main thread has ended: this is a last save at the exit
            threading._register_atexit(_settle_at_exit, process)  # type: ignore[attr-defined]
        multiprocessing.util.Finalize(None, _at_exit, (process,), exitpriority=100)
    return _backgrounds.setdefault((process, rank), Background())


def _own() -> list[Background]:
    """The states of this process."""
    return [each for (process, _), each in _backgrounds.items() if process == os.getpid()]


def wait() -> None:
    """Wait for the background save to end. Call it at the end of training, or before `load` or `prune`.

    Without this call, the interpreter waits when it exits. A process that is killed commits nothing.

    Raises:
        CheckpointError: the last save failed, and no `result` or later save has raised its error.
    """
    for each in _own():  # several in a simulated world, or if this process has had other ranks
        each.settle()


def _settle_at_exit(process: int) -> None:
    if process != os.getpid():  # a forked child, whose parent waits for the saves
        return
    for each in _own():
        try:
            each.settle()
        except CheckpointError as error:
            print(f"composable_shard: {error}", file=sys.stderr, flush=True)


def _at_exit(process: int) -> None:
    _settle_at_exit(process)
    if process == os.getpid():
        for each in _own():
            each.writer.close()
