"""Loading: what fits is found out on all ranks before anything is read, and all is read before anything changes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._errors import CheckpointError, CheckpointMismatchError, ShardConfigTypeError
from ._fitting import fit as fit_state
from ._format import commits
from ._format.manifest import Manifest
from ._format.reading import Reader, manifest_bytes
from ._ranks import Ranks, compare
from ._target import Target

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
    written, is found before anything changes. Then objects are loaded by their own methods, and get back the state that
    they had where one of these raises; then modules, optimizers, tensors and values are filled. So when it raises, all
    is as it was, unless a disk fails to give again, to fill a tensor, what it gave a moment before.

    Args:
        directory: that `save` was given, or one checkpoint in it.
        state: what to load into, by the names it was saved under; entries of the checkpoint that it does not name are
            left alone, so that ``{"model": model}`` loads weights alone. Modules and tensors are filled where they are;
            those on the meta device get memory (buffers that are not persistent are not saved, and stay there).
            Optimizers need not have stepped. Plain values are set in the dictionary.
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
        RankMismatchError: one of the ranks does something else, as trains on; on all ranks.
    """
    ranks = Ranks(process_group)
    ranks.meet("load a checkpoint")
    root, said = ranks.together_and_tell(
        lambda: _checked(directory, step),
        lambda root: {"directory": str(root), "step": step, "strict": strict, "cast": cast, "verify": verify},
    )
    compare("load", said)
    with _without_collections():
        checkpoint, manifest = find_manifest(ranks, root, step)
        target = Target(manifest, ranks.rank, ranks.size, cast)
        _, differ = ranks.together_and_tell(
            lambda: _fit(target, state, checkpoint.path), lambda _: (target.missing, target.unexpected)
        )
        missing, unexpected = differences(differ)
        if strict and (missing or unexpected):
            problems = [f"{name}: is not in the checkpoint" for name in missing]
            problems += [f"{name}: is in the checkpoint, and nothing here is called so" for name in unexpected]
            raise mismatch(checkpoint.path, problems)
        read = fill(ranks, target, checkpoint.path, manifest, verify)
    return Loaded(manifest.step, checkpoint.path, missing, unexpected, read)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collection meanwhile.

    Thousands of objects are made that stay for as long, so that collections would find nothing, and they look through
    all objects of the model each time: a fifth of the load of 4,096 tensors.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fill(ranks: Ranks, target: Target, path: Path, manifest: Manifest, verify: bool | None) -> int:
    """Read what fits, and put it in place; gives how many bytes were read.

    With `verify` None the files were looked at before.
    """
    with Reader(path, manifest) as handed, Reader(path, manifest) as rest, torch.no_grad():

        def check() -> None:
            handed.want(target.handed)
            if verify is not None:
                handed.check(verify)
            handed.copy()
            rest.want(target.wanted)
            if verify is not None:
                rest.check(verify)

        _, hand = ranks.together_and_tell(check, lambda _: target.hands)
        try:
            if any(hand):
                ranks.together(target.hand)
            ranks.together(_or_in_part(rest.copy))
        except BaseException:
            target.restore()
            raise
        ranks.together(_or_in_part(target.finish))
    return handed.bytes_read + rest.bytes_read


def _or_in_part(work: Callable[[], None]) -> Callable[[], None]:
    """The same work; an error of it says that what is loaded into was filled in part."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            text = str(error) if isinstance(error, (OSError, CheckpointError)) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{text}; all was as it should be a moment before, and modules, optimizers and tensors are filled in "
                "part: load again before they are used"
            ) from error

    return run


def _checked(directory: str | os.PathLike[str], step: int | None) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise ShardConfigTypeError(f"directory: {directory!r} is a {type(directory).__name__}; give a path")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise ShardConfigTypeError(f"step: {step!r} is a {type(step).__name__}; give an int")
    return Path(directory)


def find_manifest(ranks: Ranks, directory: Path, step: int | None) -> tuple[commits.Committed, Manifest]:
    """The checkpoint that rank 0 finds, and its manifest."""

    def first() -> tuple[commits.Committed, bytes]:
        checkpoint = commits.find(directory, step)
        return checkpoint, manifest_bytes(checkpoint.path)

    checkpoint, data = ranks.first_alone(first)
    manifest = ranks.together(lambda: commits.manifest_of(checkpoint, data))
    return checkpoint, manifest


def _fit(target: Target, state: Mapping[str, Any], path: Path) -> None:
    fit_state(target, state)
    if target.problems:
        raise mismatch(path, target.problems)


def differences(said: list[tuple[list[str], list[str]]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What any rank misses, and what no rank knows: ranks of a pipeline know some of the names each.

    Args:
        said: of each rank, the names that it misses and that it does not know.
    """
    missing = dict.fromkeys(name for each, _ in said for name in each)
    known = set.intersection(*(set(each) for _, each in said))
    return tuple(missing), tuple(name for name in said[0][1] if name in known)


def mismatch(path: Path, problems: list[str]) -> CheckpointMismatchError:
    more = f"\n  and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    listed = "".join(f"\n  {each}" for each in problems[:_MOST_NAMED])
    return CheckpointMismatchError(f"{path} does not fit what is loaded into:{listed}{more}")
