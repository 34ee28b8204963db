"""Saving in the background: the call copies what is saved, a process of its own writes it, a thread commits it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._errors import CheckpointError
from .._memory.disk import is_mapped
from ._format.manifest import NAME, SavedFile
from ._format.writing import FileLayout, stage
from ._io.process import WriterProcess
from ._pending import PendingSave, RunningSave, background
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
    checksum: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PendingSave:
    """Save a state while training goes on; all ranks call it alike.

    What is saved is the state of the moment of the call: the call copies this rank's part into memory that it shares
    with a process of its own, which writes it. That memory is as large as this rank's file, is kept for the next save,
    and there is only one: a save that is called while another one goes on waits for it first. The checkpoint is
    committed when all ranks have written, as `save` does it.

    Where an optimizer's state is on disk (`DiskOffloadPolicy`), which is there to save memory, nothing is copied: the
    call itself writes this rank's file, some of the state in memory at a time, and only the commit goes on after it.

    A failure is raised on all ranks: by `PendingSave.result`, or else by the next `save`, `async_save` or `wait`, which
    then does nothing else. What nobody has asked for is waited for, and its failure printed, when the interpreter ends.

    Args:
        directory: of the checkpoints of a run, as of `save`; so are all arguments but the last.
        state: what to save, by name.
        step: of the training.
        keep: after the save, remove all but so many newest checkpoints.
        overwrite: replace a checkpoint of the same step.
        checksum: "xxh3", "crc32" or "sha256".
        process_group: of the ranks that save; by default all.
        progress: is called with the bytes that this rank has written, and those that it is to write, now and then, in
            a thread of its own; in the thread of the call where state is on disk.

    Returns:
        the save: its result, whether it has ended, how far it is.

    Raises:
        CheckpointError: the save before this one has failed; besides, what `save` raises before it writes.
    """
    ranks = Ranks(process_group)
    ranks.meet("save a checkpoint")
    writer = background().writer

    def asked() -> Request:
        return Request.of(directory, step, overwrite, checksum, keep)

    if not can_talk(ranks):
        return _at_once(ranks, asked, state, progress)

    def copy(layout: FileLayout) -> None:
        if _has_state_on_disk(layout):
            return
        writer.start()
        stage(layout, writer.buffer(layout.size))

    prepared = prepare(ranks, asked, state, copy)
    pending = RunningSave(step, prepared.layout.size, progress)
    beside: StoreRanks | None = None
    thread: threading.Thread | None = None
    try:
        beside = StoreRanks(process_group, prepared.attempt.partial.name)
        beside.start()
        write = _written_now(pending, prepared) if _has_state_on_disk(prepared.layout) else None
        write = write or (lambda: _write(pending, prepared, writer))
        thread = threading.Thread(target=_run, args=(pending, beside, prepared, write), name="checkpoint-save")
        thread.start()
    except BaseException as error:  # the other ranks find this one silent, or are told
        if beside is not None:
            beside.give_up(error)
        if ranks.rank == 0 and thread is None:  # else the thread may be about to commit, or removes it itself
            remove(prepared.attempt)
        pending.fail(error)
        raise
    background().hold(pending)
    return PendingSave(pending)


def _has_state_on_disk(layout: FileLayout) -> bool:
    return any(is_mapped(part.box.local) for part in layout.parts)


def _written_now(pending: RunningSave, prepared: Prepared) -> Callable[[], SavedFile]:
    """Write this rank's file; gives what gives the file, or raises what went wrong, when all ranks ask for it."""
    outcome: Future[SavedFile] = Future()
    try:
        see(prepared.attempt)
        outcome.set_result(write_own(prepared, pending.advance))
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result


def _run(pending: RunningSave, ranks: StoreRanks, prepared: Prepared, write: Callable[[], SavedFile]) -> None:
    """Have the file written, commit with the other ranks, and note how that went."""
    with contextlib.suppress(Exception), ranks.alive():
        try:
            path = _finish(ranks, prepared, write)
        except BaseException as error:
            pending.fail(error)
            raise
        pending.succeed(path)


def _finish(ranks: StoreRanks, prepared: Prepared, write: Callable[[], SavedFile]) -> Path:
    try:
        path = finish(ranks, prepared, write)
    except RankLostError:
        path = prepared.attempt.final
        if ranks.rank == 0 or not (path / NAME).is_file():
            raise
        return path  # rank 0 was lost after it had committed
    prune(ranks, prepared.request)
    return path


def _write(pending: RunningSave, prepared: Prepared, writer: WriterProcess) -> SavedFile:
    layout, request = prepared.layout, prepared.request
    try:
        size, blocks = writer.write(
            prepared.attempt.partial / layout.name, layout.size, request.algorithm, pending.advance
        )
    except OSError as error:
        raise CheckpointError(str(error)) from error
    pending.advance(size)
    return SavedFile(size, blocks)


def _at_once(
    ranks: Ranks,
    asked: Callable[[], Request],
    state: Mapping[str, Any],
    progress: Callable[[int, int], None] | None,
) -> PendingSave:
    """Save before the call returns: in a simulated world, whose ranks are threads that take turns."""
    prepared = prepare(ranks, asked, state)
    pending = RunningSave(prepared.request.step, prepared.layout.size, progress)
    path = finish(ranks, prepared, lambda: write_own(prepared))
    prune(ranks, prepared.request)
    pending.advance(prepared.layout.size)
    pending.succeed(path)
    return PendingSave(pending)
