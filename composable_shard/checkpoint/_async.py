"""Background saves: the call copies the state, a separate process writes the file, and a thread commits it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from .._memory.disk import is_mapped
from ..errors import CheckpointError
from ._format.commits import run_at
from ._format.manifest import SavedFile
from ._format.writing import FileLayout, stage
from ._io.objects import ObjectPath, is_shared
from ._io.places import Place
from ._io.process import WriterProcess
from ._io.writer import write_memory
from ._pending import PendingSave, background
from ._ranks import Ranks
from ._save import Prepared, Request, finish, prepare, prune, remove, see, write_own
from ._store import RankLostError, StoreRanks, can_talk


def async_save(
    directory: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    keep: int | None = None,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Save a state in the background while training continues.

    This is a collective: all ranks must call it with the same arguments.

    The checkpoint holds the state at the time of the call. The call copies this rank's part into memory that it shares
    with a writer process. This memory is as large as this rank's file and is reused by later saves. There is only one
    such buffer: if another save is in progress, the call waits for it first. As with `save`, the checkpoint is
    committed when all ranks have written their files.

    If optimizer state is on disk (`DiskOffloadPolicy`), nothing is copied, to save memory. The call itself then writes
    this rank's file and holds only a part of the state in memory at a time. Only the commit runs in the background.

    A failure is raised on all ranks: by `PendingSave.result`, or else by the next `save`, `async_save` or `wait`, which
    then does nothing else. When the interpreter exits, it waits for a pending save and prints its error if no call has
    raised it.

    Args:
        directory: directory of the run's checkpoints. This and all other arguments are those of `save`.
        state: what to save, by name.
        step: training step.
        keep: after the save, delete all checkpoints except the `keep` newest ones.
        overwrite: replace a checkpoint of the same step.
        process_group: process group of the ranks that save. Default: all ranks.

    Returns:
        A handle for the save: its result, whether it is done, and its progress.

    Raises:
        CheckpointError: the previous save failed. Also raises the errors that `save` raises before it writes.
    """
    ranks = Ranks(process_group)
    ranks.meet("save a checkpoint")
    writer = background().writer

    def asked() -> Request:
        return Request.of(directory, step, overwrite, keep)

    if not can_talk(ranks):
        return _at_once(ranks, asked, state)

    def copy(layout: FileLayout) -> None:
        if _has_state_on_disk(layout):
            return
        writer.start()
        stage(layout, writer.buffer(layout.size))

    prepared = prepare(ranks, asked, state, copy)
    pending = PendingSave(step, prepared.layout.size)
    beside: StoreRanks | None = None
    thread: threading.Thread | None = None
    try:
        beside = StoreRanks(process_group, prepared.attempt.identity)
        beside.start()
        write = _written_now(pending, prepared) if _has_state_on_disk(prepared.layout) else None
        write = write or (lambda: _write(pending, prepared, writer))
        thread = threading.Thread(target=_run, args=(pending, beside, prepared, write), name="checkpoint-save")
        thread.start()
    except BaseException as error:  # the other ranks get this error, or notice that this rank sends no heartbeat
        if beside is not None:
            beside.give_up(error)
        if ranks.rank == 0 and thread is None:  # otherwise the thread may commit, or deletes the files itself
            remove(prepared)
        pending._fail(error)
        raise
    background().remember(pending)
    return pending


def _has_state_on_disk(layout: FileLayout) -> bool:
    return any(is_mapped(laid.part.local) for laid in layout.parts)


def _written_now(pending: PendingSave, prepared: Prepared) -> Callable[[], SavedFile]:
    """Write this rank's file now. Return a function that gives the file or raises the error when all ranks call it."""
    outcome: Future[SavedFile] = Future()
    try:
        see(prepared)
        outcome.set_result(write_own(prepared, pending._advance))
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result


def _run(pending: PendingSave, ranks: StoreRanks, prepared: Prepared, write: Callable[[], SavedFile]) -> None:
    """Write the file, commit together with the other ranks, and record the outcome."""
    with contextlib.suppress(Exception), ranks.alive():
        try:
            path = _finish(ranks, prepared, write)
        except BaseException as error:
            pending._fail(error)
            raise
        pending._succeed(path)


def _finish(ranks: StoreRanks, prepared: Prepared, write: Callable[[], SavedFile]) -> Place:
    try:
        path = finish(ranks, prepared, write)
    except RankLostError:
        if ranks.rank == 0 or not run_at(prepared.request.directory).is_committed(prepared.attempt):
            raise
        return prepared.attempt.final  # rank 0 was lost after the commit
    prune(ranks, prepared.request)
    return path


def _write(pending: PendingSave, prepared: Prepared, writer: WriterProcess) -> SavedFile:
    layout, algorithm = prepared.layout, prepared.request.algorithm
    path = prepared.attempt.partial / layout.name
    try:
        if isinstance(path, ObjectPath) and not is_shared(path):
            memory = memoryview(writer.buffer(layout.size))[: layout.size]
            size, blocks = write_memory(path, memory, algorithm, pending._advance)
        else:
            size, blocks = writer.write(path, layout.size, algorithm, pending._advance)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    pending._advance(size)
    return SavedFile(size, blocks)


def _at_once(ranks: Ranks, asked: Callable[[], Request], state: Mapping[str, Any]) -> PendingSave:
    """Save before the call returns. Used in a simulated world, where ranks are threads that take turns."""
    prepared = prepare(ranks, asked, state)
    pending = PendingSave(prepared.request.step, prepared.layout.size)
    path = finish(ranks, prepared, lambda: write_own(prepared))
    prune(ranks, prepared.request)
    pending._advance(prepared.layout.size)
    pending._succeed(path)
    return pending
