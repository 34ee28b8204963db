"""Find the latest checkpoint of a directory, delete old checkpoints, and verify a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CheckpointCorruptError, CheckpointError, ShardConfigValueError
from ._format.commits import Committed, find, manifest_of, run_at
from ._format.manifest import Manifest
from ._format.reading import file_problem
from ._io.digests import BLOCK
from ._io.places import Place
from ._places import directory_of

_BLOCKS_AT_ONCE = 64  # blocks between two calls of `progress`


def latest(directory: str | os.PathLike[str]) -> int | None:
    """Return the step of the checkpoint that `load` reads by default, or None if there is no checkpoint.

    This reads no tensors and is not a collective. If ranks act on the result, they must see the same directory.

    Raises:
        CheckpointUnsafeError, CheckpointCorruptError: the file LATEST was not written by this library, or is damaged.
        CheckpointError: the directory or the store cannot be read.
    """
    checkpoint = run_at(directory_of(directory)).newest()
    return None if checkpoint is None else checkpoint.step


def prune(directory: str | os.PathLike[str], *, keep: int) -> list[Place]:
    """Delete all checkpoints except the newest ones, and files that interrupted saves have left.

    The latest checkpoint is always kept. Call this on one rank, while no rank saves.

    Args:
        directory: directory or URL that was passed to `save`.
        keep: number of checkpoints to keep, at least 1: those with the highest steps.

    Returns:
        The deleted paths.

    Raises:
        ShardConfigValueError: `keep` is less than 1.
        CheckpointError: a file could not be deleted.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ShardConfigValueError(f"keep: {keep!r} is not a number of checkpoints; pass at least 1")
    root = directory_of(directory)
    try:
        return run_at(root).prune(keep)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{root}: old checkpoints cannot be deleted: {error}") from error


@dataclass(frozen=True)
class Verified:
    """Result of `verify` for an intact checkpoint: its step, its path, and the files and bytes that were read."""

    step: int
    path: Place
    files: int
    bytes: int


def verify(
    directory: str | os.PathLike[str], *, step: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Verified:
    """Read a whole checkpoint and compare it with its checksums.

    This is not a collective: call it on one rank, or in a process without a process group.

    Args:
        directory: directory or URL that was passed to `save`, or one checkpoint in it.
        step: step of the checkpoint. Default: the latest.
        progress: called with the bytes read so far and the total bytes.

    Raises:
        CheckpointIncompleteError: there is no checkpoint.
        CheckpointCorruptError: the checkpoint is damaged. The message names every damaged file.
        CheckpointUnsafeError: a file is a link, or a name points outside of the directory.
    """
    checkpoint, manifest = open_manifest(directory, step)
    total = sum(each.size for each in manifest.files.values())
    problems, read = [], 0
    for name, saved in manifest.files.items():
        blocks = -(-saved.size // BLOCK)
        problem = ""
        for first in range(0, max(blocks, 1), _BLOCKS_AT_ONCE):
            last = min(first + _BLOCKS_AT_ONCE, blocks)
            problem = problem or file_problem(checkpoint.path / name, manifest, [(first, last)])[0]
            read += min(last * BLOCK, saved.size) - first * BLOCK
            if progress is not None:
                progress(read, total)
        problems += [problem] if problem else []
    if problems:
        raise CheckpointCorruptError("; ".join(problems))
    return Verified(manifest.step, checkpoint.path, len(manifest.files), read)


def open_manifest(directory: str | os.PathLike[str], step: int | None = None) -> tuple[Committed, Manifest]:
    """Find a checkpoint and read its manifest in this process, without the other ranks."""
    checkpoint, data = find(directory_of(directory), step)
    return checkpoint, manifest_of(checkpoint, data)
