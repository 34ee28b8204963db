"""Saves that go on in the background: at most one of a rank at a time, and no failure of one is ever lost."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from .._errors import CheckpointError
from ._io.process import WriterProcess


class RunningSave:
    """A save that goes on, for those who write it.

    Args:
        step: that it saves.
        total: bytes that this rank is to write.
        progress: called with the bytes written so far and with `total`, whenever more are written.
    """

    def __init__(self, step: int, total: int, progress: Callable[[int, int], None] | None = None) -> None:
        self.step = step
        self.written, self.total = 0, total
        self._tell = progress
        self._ended = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._raised = False  # whether anyone has been told of the error

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "goes on"
        return f"PendingSave(step={self.step}: {state}, {self.written} of {self.total} bytes written)"

    def advance(self, written: int) -> None:
        """Note how many bytes are written."""
        self.written = written
        if self._tell is not None:
            try:
                self._tell(written, self.total)
            except Exception as error:
                self._tell = None
                print(f"composable_shard: progress was told no more, as {self!r} raised {error!r}", file=sys.stderr)

    def succeed(self, path: Path) -> None:
        """Note that the checkpoint is committed."""
        self._path = path
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Note that it has failed."""
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None) -> Path:
        """See `PendingSave.result`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"the save of step {self.step} goes on: {self.written:,} of {self.total:,} bytes are written"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        assert self._path is not None
        return self._path

    @property
    def unseen(self) -> BaseException | None:
        """The error that nobody was told of; it is waited for, and asking counts as telling."""
        self._ended.wait()
        error, self._raised = None if self._raised else self._error, True
        return error


class PendingSave:
    """A save that goes on while training does; `async_save` gives it."""

    def __init__(self, running: RunningSave) -> None:
        self._running = running

    def __repr__(self) -> str:
        return repr(self._running)

    @property
    def step(self) -> int:
        """The step that it saves."""
        return self._running.step

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has written, and those that it is to write."""
        return self._running.written, self._running.total

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._running.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end.

        Args:
            timeout: how many seconds to wait at most; by default as long as it takes.

        Returns:
            the path of the checkpoint, which is committed.

        Raises:
            CheckpointError: it has failed; on all ranks, and the checkpoints that were there are unharmed.
            TimeoutError: it goes on.
        """
        return self._running.result(timeout)


class Background:
    """What this process keeps for the saves of one rank in the background.

    Attributes:
        writer: the process that writes, and the memory that it shares with this one.
        pending: the last save.
    """

    def __init__(self) -> None:
        self.writer = WriterProcess()
        self.pending: RunningSave | None = None

    def hold(self, pending: RunningSave) -> None:
        """Keep the save that goes on now."""
        self.pending = pending

    def settle(self) -> None:
        """Wait for the last save, and raise its error unless it has been raised already."""
        error = None if self.pending is None else self.pending.unseen
        if error is not None:
            assert self.pending is not None
            raise CheckpointError(
                f"the save of step {self.pending.step}, which went on in the background, has failed, and nothing else "
                f"was done: {error}"
            ) from error


_backgrounds: dict[int, Background] = {}  # by rank: simulated worlds have several in a process


def background() -> Background:
    """What this rank keeps."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not _backgrounds:
        multiprocessing.util.Finalize(None, _at_exit, (os.getpid(),), exitpriority=100)
    return _backgrounds.setdefault(rank, Background())


def wait() -> None:
    """Wait until no save goes on in the background; at the end of training, or before `load` or `prune`.

    Where it is not called, the interpreter waits when it ends. A process that is killed commits nothing.

    Raises:
        CheckpointError: the last save has failed, and no `result` or later save has raised that.
    """
    for each in list(_backgrounds.values()):  # several in simulated worlds, or where this process has had other ranks
        each.settle()


def _at_exit(process: int) -> None:
    if process != os.getpid():  # a fork
        return
    for each in _backgrounds.values():
        try:
            each.settle()
        except CheckpointError as error:
            print(f"composable_shard: {error}", file=sys.stderr, flush=True)
        each.writer.close()
