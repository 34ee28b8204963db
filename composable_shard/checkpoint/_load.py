"""Loading: what fits is found out on all ranks before anything is read, and all is read before anything changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._errors import CheckpointMismatchError
from ._format import commits
from ._format.manifest import NAME, Manifest, read_manifest
from ._format.reading import Reader, manifest_bytes
from ._ranks import Ranks
from ._state import Target

_MOST_NAMED = 20  # of problems in one error


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: that was given to `save`.
        path: of the checkpoint.
        missing: names of the modules that the checkpoint does not have; not empty under ``strict=False`` alone.
        unexpected: names of the checkpoint that the modules do not have; likewise.
        bytes_read: by this rank, to check and to fill.
    """

    step: int
    path: Path
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


def load(
    directory: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint into a state; all ranks call it alike.

    The number of ranks, meshes and placements may be others than those that saved: every rank reads the bytes that it
    needs for its shards, and no more than the blocks of 1 MiB around them. What does not fit, or is not as it was
    written, is found before anything changes: when it raises, modules and optimizers are as they were.

    Args:
        directory: that `save` was given, or one checkpoint in it.
        state: what to load into, by the names it was saved under; entries of the checkpoint that it does not name are
            left alone, so that ``{"model": model}`` loads weights alone. Modules and tensors are filled where they are,
            those on the meta device are materialised; optimizers need not have stepped; plain values are set in the
            dictionary.
        step: which checkpoint; by default the latest.
        strict: names of modules must be those of the checkpoint.
        cast: convert floating-point tensors where dtypes differ.
        verify: compare what is read with its checksums, before.
        process_group: of the ranks that load; by default all.

    Returns:
        step, path, and what was not found.

    Raises:
        CheckpointIncompleteError: there is no such checkpoint.
        CheckpointMismatchError: names, shapes, dtypes or the number of ranks do not fit; it lists them.
        CheckpointCorruptError: files are missing, or not as they were written; it names them.
        CheckpointUnsafeError: links, or names that lead outside of the directory.
    """
    ranks = Ranks(process_group)
    checkpoint, manifest = find_manifest(ranks, Path(directory), step)
    target = Target(manifest, ranks.rank, ranks.size, cast)
    ranks.together(lambda: _fit(target, state, checkpoint.path))
    missing, unexpected = differences(ranks, target)
    if strict and (missing or unexpected):
        problems = [f"{name}: is not in the checkpoint" for name in missing]
        problems += [f"{name}: is in the checkpoint, and nothing here is called so" for name in unexpected]
        raise mismatch(checkpoint.path, problems)
    reader = Reader(checkpoint.path, manifest)

    def check() -> None:
        reader.want(target.wanted)
        reader.check(verify)

    ranks.together(check)
    with torch.no_grad():
        ranks.together(reader.copy)
        ranks.together(target.finish)
    return Loaded(manifest.step, checkpoint.path, missing, unexpected, reader.bytes_checked + reader.bytes_copied)


def find_manifest(ranks: Ranks, directory: Path, step: int | None) -> tuple[commits.Committed, Manifest]:
    """The checkpoint that rank 0 finds, and its manifest."""

    def first() -> tuple[commits.Committed, bytes]:
        checkpoint = commits.find(directory, step)
        return checkpoint, manifest_bytes(checkpoint.path)

    checkpoint, data = ranks.first_alone(first)
    return checkpoint, ranks.together(lambda: read_manifest(data, str(checkpoint.path / NAME)))


def _fit(target: Target, state: Mapping[str, Any], path: Path) -> None:
    try:
        target.add(state)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointMismatchError(f"{path}: cannot be understood: {type(error).__name__}: {error}") from error
    if target.problems:
        raise mismatch(path, target.problems)


def differences(ranks: Ranks, target: Target) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What any rank misses, and what no rank knows: ranks of a pipeline know some of the names each."""
    said = ranks.gather((target.missing, target.unexpected))
    missing = dict.fromkeys(name for each, _ in said for name in each)
    known = set.intersection(*(set(each) for _, each in said))
    return tuple(missing), tuple(name for name in said[0][1] if name in known)


def mismatch(path: Path, problems: list[str]) -> CheckpointMismatchError:
    more = f"\n  and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    listed = "".join(f"\n  {each}" for each in problems[:_MOST_NAMED])
    return CheckpointMismatchError(f"{path} does not fit what is loaded into:{listed}{more}")
