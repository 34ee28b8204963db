"""What a directory of checkpoints holds, whether it is whole, and what may go."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .._errors import CheckpointCorruptError, CheckpointError, ShardConfigValueError
from ._format import commits
from ._format.manifest import Manifest
from ._format.reading import file_problem, manifest_bytes
from ._io import files
from ._io.digests import BLOCK
from ._ranks import Ranks

_STEM = len("step-00000000")
_BLOCKS_AT_ONCE = 64  # until progress is told of


def latest(directory: str | os.PathLike[str]) -> int | None:
    """The step of the checkpoint that `load` takes by default, or None where there is none.

    It reads file names alone, and needs no other rank; ranks that act upon it must see one file system.

    Raises:
        CheckpointUnsafeError, CheckpointCorruptError: the file LATEST is not as this library writes it.
    """
    checkpoint = commits.newest(Path(directory))
    return None if checkpoint is None else checkpoint.step


def prune(directory: str | os.PathLike[str], *, keep: int) -> list[Path]:
    """Remove all but the newest checkpoints, and what saves that were cut off have left.

    The latest is always kept. Call it on one rank, while no rank saves.

    Args:
        directory: that `save` was given.
        keep: how many steps stay, at least 1.

    Returns:
        what was removed.

    Raises:
        ShardConfigValueError: `keep` is less than 1.
        CheckpointError: something could not be removed.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ShardConfigValueError(f"keep: {keep!r} is not a number of checkpoints; give at least 1")
    root = Path(directory)
    try:
        return _removed(root, keep)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{root}: what is not needed any more cannot be removed: {error}") from error


def _removed(root: Path, keep: int) -> list[Path]:
    removed = []
    for path in (*commits.removable(root, keep), *commits.leftovers(root)):
        gone = path
        if not path.name.startswith("."):  # at once no checkpoint any more, whatever happens while its files go
            gone = path.with_name(f".{path.name[:_STEM]}.tmp-{secrets.token_hex(6)}")
            files.rename(path, gone)
        files.remove_tree(gone)
        removed.append(path)
    return removed


def prune_on_first(ranks: Ranks, directory: Path, keep: int) -> None:
    """`prune` by rank 0, while the others wait."""
    ranks.first_alone(lambda: prune(directory, keep=keep) and None)


@dataclass(frozen=True)
class Verified:
    """A checkpoint that is whole: its step, where it is, how many files and bytes were read."""

    step: int
    path: Path
    files: int
    bytes: int


def verify(
    directory: str | os.PathLike[str], *, step: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Verified:
    """Read all of a checkpoint and compare it with its checksums; on one rank, or without any.

    Args:
        directory: that `save` was given, or one checkpoint in it.
        step: which checkpoint; by default the latest.
        progress: is called with how many bytes are read, and how many there are.

    Raises:
        CheckpointIncompleteError: there is none.
        CheckpointCorruptError: it is damaged; it names every file that is.
        CheckpointUnsafeError: links, or names that lead outside of the directory.
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


def open_manifest(directory: str | os.PathLike[str], step: int | None = None) -> tuple[commits.Committed, Manifest]:
    """A checkpoint and its manifest, read by this process alone."""
    checkpoint = commits.find(Path(directory), step)
    return checkpoint, commits.manifest_of(checkpoint, manifest_bytes(checkpoint.path))
