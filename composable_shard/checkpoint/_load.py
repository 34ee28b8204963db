"""Load a checkpoint: all ranks check that the state matches before any tensor is read, and verify before any change."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, CheckpointMismatchError, ShardConfigTypeError
from ._fitting import fit as fit_state
from ._format.commits import Committed, find, manifest_of
from ._format.manifest import Manifest
from ._format.reading import Reader
from ._io.places import Place
from ._places import directory_of
from ._ranks import Ranks, compare
from ._target import Target

_MOST_NAMED = 20  # problems listed in one error


@dataclass(frozen=True)
class Loaded:
    """Result of a load.

    Attributes:
        step: step that was passed to `save`.
        path: path of the checkpoint.
        missing: names of the modules that are not in the checkpoint. Empty unless ``strict=False``.
        unexpected: names in the checkpoint that the modules do not have. Empty unless ``strict=False``.
        bytes_read: bytes that this rank read, to verify and to fill.
    """

    step: int
    path: Place
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
    """Load a checkpoint into a state.

    This is a collective: all ranks must call it with the same arguments.

    The number of ranks, the meshes and the placements may differ from those of the save. Each rank reads only the bytes
    of its own shards, and at most the surrounding blocks of 1 MiB to verify them. The load has three steps:

    1. Check everything. Mismatches and damaged files are found before anything changes.
    2. Call `load_state_dict` of the user's objects. If one of these raises, the objects get their previous state again.
    3. Fill modules, optimizers, tensors and values.

    If `load` raises an error, the state is therefore unchanged, except if step 3 fails, for example because a disk
    cannot read bytes that it has read in step 1. The message then contains "only partly filled".

    Args:
        directory: directory or URL that was passed to `save`, or one checkpoint in it.
        state: state to load into, by the names that were saved. Other entries of the checkpoint are ignored, so
            ``{"model": model}`` loads only weights. Modules and tensors are filled in place. For tensors on the meta
            device, memory is allocated, except for non-persistent buffers, which are not saved. Optimizers need not
            have stepped. Plain values are replaced in the dictionary.
        step: step of the checkpoint. Default: the latest.
        strict: require the names of modules to match those in the checkpoint.
        cast: convert floating-point tensors whose dtypes differ.
        verify: before loading, compare the needed blocks with their checksums.
        process_group: process group of the ranks that load. Default: all ranks.

    Returns:
        The step, the path, the missing and unexpected names, and the bytes read.

    Raises:
        ShardConfigTypeError, ShardConfigValueError: an argument is invalid, or a package for the URL is missing.
        CheckpointIncompleteError: there is no such checkpoint.
        CheckpointMismatchError: names, shapes, dtypes or the number of ranks do not match. The message lists them.
        CheckpointCorruptError: files are missing or damaged. The message names them.
        CheckpointUnsafeError: a file is a link, or a name points outside of the directory.
        CheckpointError: a file or the store cannot be read.
        RankMismatchError: a rank does something else, for example continues to train. Raised on all ranks.
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
            problems += [f"{name}: is in the checkpoint, but not in the state" for name in unexpected]
            raise mismatch(checkpoint.path, problems)
        read = fill(ranks, target, checkpoint.path, manifest, verify)
    return Loaded(manifest.step, checkpoint.path, missing, unexpected, read)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection inside the context.

    A load makes thousands of objects that live until its end, so a collection would free nothing. Each collection
    visits all objects of the model: a fifth of the time to load 4,096 tensors.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fill(ranks: Ranks, target: Target, path: Place, manifest: Manifest, verify: bool | None) -> int:
    """Read the tensors of a target, fill the state, and return the number of bytes read.

    If `verify` is None, the caller has already checked the files.
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
    """Wrap `work` so that its errors report that the state may be partly filled."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            text = str(error) if isinstance(error, (OSError, CheckpointError)) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{text}; the checkpoint was intact when it was checked, but modules, optimizers and tensors are now "
                "only partly filled: load again before you use them"
            ) from error

    return run


def _checked(directory: str | os.PathLike[str], step: int | None) -> Place:
    path = directory_of(directory)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise ShardConfigTypeError(f"step: {step!r} is a {type(step).__name__}; pass an int")
    return path


def find_manifest(ranks: Ranks, directory: Place, step: int | None) -> tuple[Committed, Manifest]:
    """The checkpoint that rank 0 finds, and its manifest."""

    checkpoint, data = ranks.first_alone(lambda: find(directory, step))
    manifest = ranks.together(lambda: manifest_of(checkpoint, data))
    return checkpoint, manifest


def _fit(target: Target, state: Mapping[str, Any], path: Place) -> None:
    fit_state(target, state)
    if target.problems:
        raise mismatch(path, target.problems)


def differences(said: list[tuple[list[str], list[str]]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that any rank misses, and the names that are unexpected on all ranks.

    A name is unexpected only if no rank has it, because each rank of a pipeline has only some of the names.

    Args:
        said: for each rank, its missing and its unexpected names.
    """
    missing = dict.fromkeys(name for each, _ in said for name in each)
    known = set.intersection(*(set(each) for _, each in said))
    return tuple(missing), tuple(name for name in said[0][1] if name in known)


def mismatch(path: Place, problems: list[str]) -> CheckpointMismatchError:
    more = f"\n  and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    listed = "".join(f"\n  {each}" for each in problems[:_MOST_NAMED])
    return CheckpointMismatchError(f"{path} does not match the state to load into:{listed}{more}")
