"""Filling a state from the files of others, once they are described as a checkpoint of this library is."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._errors import ShardConfigValueError
from ._fitting import fit as fit_state
from ._format.manifest import Manifest, SavedTensor
from ._full.tensors import Holdings
from ._io import files
from ._load import differences, mismatch
from ._load import fill as fill_target
from ._ranks import Ranks
from ._state import unwrapped as unwrapped
from ._target import Target

ROOT = "@"  # the entry of a model that is no part of a state; errors do not show it
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Imported:
    """What was read of another library's files.

    Attributes:
        missing: names of the model that the files do not have; not empty under ``strict=False`` alone.
        unexpected: names in the files that the model does not have; likewise.
        bytes_read: by this rank, to check and to fill.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@dataclass(frozen=True)
class Options:
    """How a state is filled.

    Attributes:
        strict: names must be those of the files.
        cast: convert floating-point tensors where dtypes differ.
        check: looks at the files once it is known what is wanted of them, by key; gives how many bytes were read.
        concerns: which names of the model must be in the files; all, by default.
    """

    strict: bool
    cast: bool
    check: Callable[[Mapping[str, list[torch.Tensor]]], int | None]
    concerns: Callable[[str], bool] | None = None


def fill(ranks: Ranks, where: Path, manifest: Manifest, state: Mapping[str, Any], options: Options) -> Imported:
    """Fill a state; nothing changes before all of it is known to fit.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes do not fit; it lists them.
    """
    target = Target(manifest, ranks.rank, ranks.size, options.cast)

    def fit() -> None:
        fit_state(target, state)
        if target.problems:
            raise mismatch(where, list(map(_plainly, target.problems)))

    _, differ = ranks.together_and_tell(fit, lambda _: (target.missing, target.unexpected))
    missing, unexpected = (tuple(map(_plainly, names)) for names in differences(differ))
    if options.concerns is not None:
        missing = tuple(filter(options.concerns, missing))
    if options.strict and (missing or unexpected):
        problems = [f"{name}: is not in the files" for name in missing]
        problems += [f"{name}: is in the files, and nothing here is called so" for name in unexpected]
        raise mismatch(where, problems)
    checked = ranks.together(lambda: options.check(target.all_wanted())) or 0
    read = fill_target(ranks, target, where, manifest, verify=None)
    return Imported(missing, unexpected, checked + read)


def _plainly(text: str) -> str:
    return text.replace(f"{ROOT}.", "")


def begin(directory: Path) -> Path:
    """Make the directory that is written into, beside the one that it becomes.

    Raises:
        ShardConfigValueError: that exists already.
    """
    if os.path.lexists(directory):
        raise ShardConfigValueError(f"path: {directory} exists; give a new one, so that it is whole or absent")
    partial = directory.with_name(f".{directory.name}.tmp-{secrets.token_hex(6)}")
    files.make_directory(partial)
    return partial


def commit(partial: Path, directory: Path) -> None:
    """With all files on disk: give the directory its name."""
    files.sync_directory(partial)
    files.rename(partial, directory)


def aliases_of(held: Holdings, tensors: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Of tied weights, the names that take the values of another name, which the files have.

    Names that the files have both are one where their values are equal to the bit.
    """
    by_first: dict[str, list[str]] = {}
    for each in held.tensors.values():
        by_first.setdefault(each.first, []).append(each.name)
    aliases = {}
    for names in by_first.values():
        given = [name for name in names if name in tensors]
        if len(names) > 1 and given:
            equal = [name for name in given[1:] if _same(tensors[name], tensors[given[0]])]
            aliases.update({name: given[0] for name in names if name not in given or name in equal})
    return aliases


def _same(one: SavedTensor, two: SavedTensor) -> bool:
    """Whether two tensors in files, cut alike, are equal to the bit."""
    if (one.dtype, one.shape, len(one.pieces)) != (two.dtype, two.shape, len(two.pieces)):
        return False
    for first, second in zip(one.pieces, two.pieces, strict=True):
        if (first.offsets, first.shape) != (second.offsets, second.shape):
            return False
        with files.opened(Path(first.file)) as left, files.opened(Path(second.file)) as right:
            for at in range(0, first.end - first.begin, _AT_ONCE):
                count = min(_AT_ONCE, first.end - first.begin - at)
                if os.pread(left, count, first.begin + at) != os.pread(right, count, second.begin + at):
                    return False
    return True
