"""Describe the content of a checkpoint as plain data that can be printed or written as JSON."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from ._convert import keys, understood
from ._format.commits import run_at
from ._format.manifest import Manifest, SavedTensor, name_of
from ._places import directory_of
from ._pruning import open_manifest


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, or several whose names differ only in numbers. `name` then has a * instead of each number.

    Attributes:
        name: key in the checkpoint.
        dtype, shape: for example "float32" and (3, 4).
        pieces: number of pieces of each tensor.
        count: number of tensors that this entry stands for.
        bytes: total bytes of these tensors.
        ties: other keys of the same tensor. Empty if `count` is more than 1.
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
        name: name in the state.
        kind: "module", "optimizer", "stateful", "value" or "per rank".
        tensors: keys of its tensors.
        bytes: total bytes of its tensors.
        value: everything except tensors, as in the manifest. For an optimizer, its groups without parameters. For a
            module, its extra state.
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
        path: path of the checkpoint.
        step: step that was passed to `save`.
        identity: unique identifier of the save.
        ranks: number of ranks that saved it.
        checksums: checksum algorithm.
        files: bytes of each file, by name.
        tensors: all tensors, sorted by key.
        entries: entries of the state.
        committed: committed steps in the directory. Empty if the path of one checkpoint was passed.
        latest: step that is loaded by default. None if the path of one checkpoint was passed.
        partial: names of unfinished saves, which are not checkpoints.
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
    """Describe the content of a checkpoint. Reads only its manifest.

    Args:
        directory: directory that was passed to `save`, or one checkpoint in it.
        step: step of the checkpoint. Default: the latest.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    checkpoint, manifest = open_manifest(directory, step)
    run = run_at(directory_of(directory))
    steps = tuple(each.step for each in run.committed())
    newest = run.newest() if steps else None
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
        partial=tuple(each.name for each in run.partials()),
    )


def grouped(tensors: tuple[TensorInfo, ...]) -> list[TensorInfo]:
    """Merge tensors whose names differ only in numbers, such as those of a model's layers, into one entry each."""
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
    """The value of an entry without a module's tensors and without the names of an optimizer's parameters."""
    if kind == "optimizer":
        return [{option: each for option, each in group.items() if option != "params"} for group in value["groups"]]
    return value[{"module": "extra", "stateful": "value"}[kind]] if kind in ("module", "stateful") else value
