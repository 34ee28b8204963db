"""Export the weights of a module in a committed checkpoint to safetensors files.

One process does this without a model and without a process group. It reads the bytes that it is about to write, checks
them against their checksums, and holds at most `_AT_ONCE` bytes of tensors in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._plan.boxes import batches, whole_box
from ..errors import CheckpointCorruptError, ShardConfigValueError
from ._format.boxes import Part
from ._format.huggingface import lay_out_parts
from ._format.manifest import NAME, SAFETENSORS, Manifest, SavedTensor, name_of
from ._format.reading import Reader
from ._format.writing import bytes_of, write
from ._io.places import Place, created, remove_tree, write_file
from ._places import begin, commit, directory_of
from ._pruning import open_manifest

Progress = Callable[[int, int], None]  # called with the bytes written so far and the total

_AT_ONCE = 1 << 25  # bytes of tensors in memory


def keys(tree: Any) -> Iterator[str]:
    """The keys of the tensors in a tree of JSON."""
    if isinstance(tree, list):
        for each in tree:
            yield from keys(each)
    elif isinstance(tree, dict) and tree.get("$") in ("tensor", "generator"):
        yield tree["key"]
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from keys(each)


@contextlib.contextmanager
def understood(path: Place) -> Iterator[None]:
    """Report an exception that malformed manifest values cause as a CheckpointCorruptError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path / NAME} cannot be parsed: {type(error).__name__}: {error}") from None


# ------------------------------------------------------------------------------------------- reading and writing


@contextlib.contextmanager
def _removed_on_error(partial: Place) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(partial)
        raise


class _Count:
    """Counts written bytes and reports them to `progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._written = 0
        self._total = total
        self._progress = progress

    def over(self, data: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the same data and count its bytes."""
        for each in data:
            yield each
            self._written += len(each)
            if self._progress is not None:
                self._progress(self._written, self._total)


def _content(
    source: Place, manifest: Manifest, header: bytes, wanted: Iterable[str], dtype: torch.dtype | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of a file: its header, then tensors of a checkpoint in order, verified as they are read."""
    yield memoryview(header)
    saved = {key: manifest.tensors[key] for key in wanted}
    blocks = (
        (key, block)
        for key, each in saved.items()
        for block in whole_box(each.shape).blocks(_AT_ONCE // each.dtype.itemsize)
    )
    for batch in batches(blocks, lambda block: block[1].numel * saved[block[0]].dtype.itemsize, _AT_ONCE):
        filled = [(key, Part(box, torch.empty(box.shape, dtype=saved[key].dtype))) for key, box in batch]
        with Reader(source, manifest) as reader:
            for key, part in filled:
                reader.want_part(key, part)
            reader.check(True)
            reader.copy()
        for _, part in filled:
            cast = dtype is not None and part.local.is_floating_point()
            yield bytes_of(part.local.to(dtype) if cast else part.local)


# --------------------------------------------------------------------------------------------------- weights only


@dataclass(frozen=True)
class Exported:
    """Result of an export: directory, file names, number of tensors, and their bytes."""

    path: Place
    files: tuple[str, ...]
    tensors: int
    bytes: int


def export_safetensors(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    step: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Export a module of a checkpoint in Hugging Face's layout: safetensors files, with an index if there are several.

    Args:
        directory: directory that was passed to `save`, or one checkpoint in it.
        out: directory to create, or a URL. It must not exist, and appears only when all files are on disk.
        name: name of the module in the state. Default: "model", or the only module if there is only one.
        dtype: dtype of floating-point tensors. Default: unchanged.
        shard_bytes: maximum bytes of tensors in one file. A tensor is never split.
        step: step of the checkpoint. Default: the latest.
        progress: called with the bytes written so far and the total bytes.

    Raises:
        ShardConfigValueError: `out` exists, there is no such module, or safetensors has no name for a dtype.
        CheckpointError: the checkpoint cannot be read, as in `verify`. Nothing is written then.
    """
    target = directory_of(out, "out")
    checkpoint, manifest = open_manifest(directory, step)
    with understood(checkpoint.path):
        weights = _weights(manifest, name, dtype)
    ties = {tie: each.name for each in weights for tie in each.ties}  # as `safetensors.torch.save_model` records them
    described = [(each.name, each.dtype, each.saved.shape) for each in weights]
    parts, index = lay_out_parts("model", described, shard_bytes, ties)
    by_name = {each.name: each for each in weights}
    total = sum(each.size for each in weights)
    count = _Count(total + sum(len(part.header) for part in parts), progress)
    partial = begin(target, "out")
    with _removed_on_error(partial):
        for part in parts:
            wanted = [by_name[each].key for each in part.names if by_name[each].size]
            content = _content(checkpoint.path, manifest, part.header, wanted, dtype)
            write(created(partial / part.name), count.over(content), manifest.algorithm)
        if index is not None:
            write_file(partial / "model.safetensors.index.json", index)
        commit(partial, target)
    return Exported(target, tuple(part.name for part in parts), len(weights), total)


class _Weight(NamedTuple):
    """A tensor to export: its name in the module, its key in the checkpoint, its other (tied) names, and its dtype."""

    name: str
    key: str
    saved: SavedTensor
    ties: tuple[str, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of the exported tensor."""
        return math.prod(self.saved.shape) * self.dtype.itemsize


def _weights(manifest: Manifest, name: str | None, dtype: torch.dtype | None) -> list[_Weight]:
    name = _module_name(manifest, name)
    names: dict[str, list[str]] = {}  # by key; tied weights have several
    for each in manifest.values[name]["tensors"]:
        key = f"{name}.{each}"
        names.setdefault(manifest.aliases.get(key, key), []).append(each)
    weights = []
    for key, (first, *ties) in names.items():
        saved = manifest.tensors[key]
        becomes = dtype if dtype is not None and saved.dtype.is_floating_point else saved.dtype
        if becomes not in SAFETENSORS:
            raise ShardConfigValueError(
                f"{key} has dtype {name_of(becomes)}, which safetensors does not support; pass another dtype"
            )
        weights.append(_Weight(first, key, saved, tuple(ties), becomes))
    return weights


def _module_name(manifest: Manifest, name: str | None) -> str:
    modules = [
        each for each, value in manifest.values.items() if isinstance(value, dict) and value.get("$") == "module"
    ]
    if name is None:
        name = "model" if "model" in modules or len(modules) != 1 else modules[0]
    if name not in modules:
        raise ShardConfigValueError(
            f"name: the checkpoint has no module called {name!r}; its modules: {', '.join(modules) or 'none'}"
        )
    return name
