"""Fill a state from files of other libraries, after a manifest was built for these files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._fitting import fit as fit_state
from ._format.manifest import Manifest, SavedTensor
from ._full.tensors import Holdings
from ._io.places import Place, opened, place, read_range
from ._load import differences, mismatch
from ._load import fill as fill_target
from ._ranks import Ranks
from ._state import unwrapped as unwrapped
from ._target import Target

ROOT = "@"  # the entry name of a model that was passed without a state; error messages omit it
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Imported:
    """Result of an import from another library's files.

    Attributes:
        missing: names of the model that are not in the files. Empty unless ``strict=False``.
        unexpected: names in the files that the model does not have. Empty unless ``strict=False``.
        bytes_read: bytes that this rank read, to verify and to fill.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int


@dataclass(frozen=True)
class Options:
    """Options of filling a state.

    Attributes:
        strict: require the names to match those in the files.
        cast: convert floating-point tensors whose dtypes differ.
        check: verifies the files before anything is filled. Called with the tensors to fill, by key. Returns the number
            of bytes that it read.
        concerns: whether a name of the model must be in the files. Default: all names.
    """

    strict: bool
    cast: bool
    check: Callable[[Mapping[str, list[torch.Tensor]]], int | None]
    concerns: Callable[[str], bool] | None = None


def fill(ranks: Ranks, where: Place, manifest: Manifest, state: Mapping[str, Any], options: Options) -> Imported:
    """Fill a state. Nothing changes unless everything matches.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes do not match. The message lists them.
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
        problems += [f"{name}: is in the files, but not in the model" for name in unexpected]
        raise mismatch(where, problems)
    checked = ranks.together(lambda: options.check(target.all_wanted())) or 0
    read = fill_target(ranks, target, where, manifest, verify=None)
    return Imported(missing, unexpected, checked + read)


def _plainly(text: str) -> str:
    return text.replace(f"{ROOT}.", "")


def aliases_of(held: Holdings, tensors: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Map names of tied weights to the name in the files from which they get their values.

    If the files have several names of a tied weight, they count as tied if their values are bitwise identical.
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
    """Whether two saved tensors are split in the same way and are bitwise identical."""
    if (one.dtype, one.shape, len(one.pieces)) != (two.dtype, two.shape, len(two.pieces)):
        return False
    for first, second in zip(one.pieces, two.pieces, strict=True):
        if first.box != second.box:
            return False
        with opened(place(first.file)) as left, opened(place(second.file)) as right:
            for at in range(0, first.end - first.begin, _AT_ONCE):
                count = min(_AT_ONCE, first.end - first.begin - at)
                if read_range(left, first.begin + at, count) != read_range(right, second.begin + at, count):
                    return False
    return True
