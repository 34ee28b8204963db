"""What a checkpoint holds, as plain data that can be printed or written as JSON."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._convert import keys, understood
from ._format import commits
from ._format.manifest import Manifest, SavedTensor, name_of
from ._pruning import open_manifest


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, or several that differ in the numbers of their names alone: `name` has a * in place of those.

    Attributes:
        name: key in the checkpoint.
        dtype, shape: as in "float32" and (3, 4).
        pieces: into how many parts one is cut.
        count: how many tensors it stands for.
        bytes: of all of them.
        ties: other keys that it is known under; not of several.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: int
    count: int
    bytes: int
    ties: tuple[str, ...] = ()


@dataclass(frozen=True)
class EntryInfo:
    """An entry of the state.

    Attributes:
        name: in the state.
        kind: "module", "optimizer", "stateful", "value" or "per rank".
        tensors: keys of its tensors.
        bytes: of its tensors.
        value: what it holds beside tensors, as in the manifest: of optimizers the groups without parameters, of modules
            the extra state.
    """

    name: str
    kind: str
    tensors: tuple[str, ...]
    bytes: int
    value: Any


@dataclass(frozen=True)
class Info:
    """A checkpoint.

    Attributes:
        path: of it.
        step: that was given to `save`.
        identity: of the save; equal in no two of them.
        ranks: how many have saved it.
        checksums: the algorithm.
        files: bytes by name.
        tensors: by key.
        entries: of the state.
        committed: the steps that the directory holds; empty where one checkpoint was given.
        latest: the step that is loaded by default, None likewise.
        partial: names of saves that have not ended, which do not count.
    """

    path: str
    step: int
    identity: str
    ranks: int
    checksums: str
    files: dict[str, int]
    tensors: tuple[TensorInfo, ...]
    entries: tuple[EntryInfo, ...]
    committed: tuple[int, ...]
    latest: int | None
    partial: tuple[str, ...]


def describe(directory: str | os.PathLike[str], step: int | None = None) -> Info:
    """Say what a checkpoint holds; its manifest alone is read.

    Args:
        directory: that `save` was given, or one checkpoint in it.
        step: which checkpoint; by default the latest.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    directory = Path(directory)
    checkpoint, manifest = open_manifest(directory, step)
    steps = tuple(each.step for each in commits.committed(directory))
    newest = commits.newest(directory) if steps else None
    ties: dict[str, list[str]] = {}
    for alias, key in manifest.aliases.items():
        ties.setdefault(key, []).append(alias)
    with understood(checkpoint.path):
        entries = [_entry(manifest, name, value) for name, value in manifest.values.items()]
        entries += [_entry(manifest, name, each, "per rank") for name, each in manifest.per_rank.items()]
    return Info(
        path=str(checkpoint.path),
        step=manifest.step,
        identity=manifest.identity,
        ranks=manifest.ranks,
        checksums=manifest.algorithm,
        files={name: each.size for name, each in sorted(manifest.files.items())},
        tensors=tuple(
            _tensor(key, manifest.tensors[key], tuple(ties.get(key, ()))) for key in sorted(manifest.tensors)
        ),
        entries=tuple(entries),
        committed=steps,
        latest=None if newest is None else newest.step,
        partial=tuple(each.name for each in commits.partials(directory)),
    )


def grouped(tensors: tuple[TensorInfo, ...]) -> list[TensorInfo]:
    """Tensors whose names differ in numbers alone, as those of a model's layers do, as one."""
    groups: dict[tuple[Any, ...], list[TensorInfo]] = {}
    for each in tensors:
        pattern = ".".join("*" if part.isdecimal() else part for part in each.name.split("."))
        groups.setdefault((pattern, each.dtype, each.shape, each.pieces), []).append(each)
    return [
        members[0] if len(members) == 1
        else TensorInfo(name, dtype, shape, pieces, len(members), sum(each.bytes for each in members))
        for (name, dtype, shape, pieces), members in groups.items()
    ]  # fmt: skip


def _tensor(key: str, saved: SavedTensor, ties: tuple[str, ...]) -> TensorInfo:
    return TensorInfo(key, name_of(saved.dtype), saved.shape, len(saved.pieces), 1, _bytes(saved), ties)


def _bytes(saved: SavedTensor) -> int:
    return math.prod(saved.shape) * saved.dtype.itemsize


def _entry(manifest: Manifest, name: str, value: Any, kind: str = "") -> EntryInfo:
    kind = kind or _kind(value)
    held = [f"{name}.{each}" for each in value["tensors"]] if kind == "module" else []
    held = list(dict.fromkeys(manifest.aliases.get(key, key) for key in (*held, *keys(value))))
    return EntryInfo(name, kind, tuple(held), sum(_bytes(manifest.tensors[key]) for key in held), _rest(kind, value))


def _kind(value: Any) -> str:
    tag = value.get("$") if isinstance(value, dict) else None
    return tag if tag in ("module", "optimizer", "stateful") else "value"


def _rest(kind: str, value: Any) -> Any:
    """What an entry holds beside the tensors of a module, and the names of an optimizer's parameters."""
    if kind == "optimizer":
        return [{option: each for option, each in group.items() if option != "params"} for group in value["groups"]]
    return value[{"module": "extra", "stateful": "value"}[kind]] if kind in ("module", "stateful") else value
