"""Export the weights of a module in a committed checkpoint to safetensors files.

One process does this without a model and without a process group. It reads the bytes that it is about to write, checks
them against their checksums, and holds at most `_AT_ONCE` bytes of tensors in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError, ShardConfigValueError
from ._format.boxes import Box
from ._format.huggingface import lay_out_parts
from ._format.manifest import NAME, SAFETENSORS, Manifest, SavedTensor, name_of
from ._format.reading import Reader
from ._format.writing import bytes_of, write
from ._io import files
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
def understood(path: Path) -> Iterator[None]:
    """Report an exception that malformed manifest values cause as a CheckpointCorruptError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path / NAME} cannot be parsed: {type(error).__name__}: {error}") from None


def _box(offsets: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Box:
    return Box(offsets, shape, torch.empty(shape, dtype=dtype, device="meta"))  # memory is allocated in `_content`


# ------------------------------------------------------------------------------------------- reading and writing


@contextlib.contextmanager
def _removed_on_error(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_tree(partial)
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
    source: Path, manifest: Manifest, header: bytes, boxes: Iterable[tuple[str, Box]], dtype: torch.dtype | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of a file: its header, then boxes of a checkpoint in order, verified as they are read."""
    yield memoryview(header)
    for batch in _batches(boxes):
        reader = Reader(source, manifest)
        filled = [(key, box._replace(local=torch.empty(box.shape, dtype=box.local.dtype))) for key, box in batch]
        for key, box in filled:
            reader.want_box(key, box)
        reader.check(True)
        reader.copy()
        for _, box in filled:
            cast = dtype is not None and box.local.is_floating_point()
            yield bytes_of(box.local.to(dtype) if cast else box.local)


def _batches(boxes: Iterable[tuple[str, Box]]) -> Iterator[list[tuple[str, Box]]]:
    """Split large boxes and group all boxes into batches of at most `_AT_ONCE` bytes."""
    batch: list[tuple[str, Box]] = []
    size = 0
    for key, whole in boxes:
        for box in _slices(whole):
            more = math.prod(box.shape) * box.local.element_size()
            if batch and size + more > _AT_ONCE:
                yield batch
                batch, size = [], 0
            batch.append((key, box))
            size += more
    if batch:
        yield batch


def _slices(box: Box, dim: int = 0) -> Iterator[Box]:
    """Split a box into consecutive parts of at most `_AT_ONCE` bytes, in the order of its bytes."""
    size = math.prod(box.shape) * box.local.element_size()
    if size <= _AT_ONCE:
        yield box
        return
    extent = box.shape[dim]
    each = max(1, extent * _AT_ONCE // size)
    for begin in range(0, extent, each):
        count = min(each, extent - begin)
        offsets = (*box.offsets[:dim], box.offsets[dim] + begin, *box.offsets[dim + 1 :])
        part = _box(offsets, (*box.shape[:dim], count, *box.shape[dim + 1 :]), box.local.dtype)
        yield from _slices(part, dim + 1 if count == 1 else dim)


# --------------------------------------------------------------------------------------------------- weights only


@dataclass(frozen=True)
class Exported:
    """Result of an export: directory, file names, number of tensors, and their bytes."""

    path: Path
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
        out: directory to create. It must not exist, and appears only when all files are on disk.
        name: name of the module in the state. Default: "model", or the only module if there is only one.
        dtype: dtype of floating-point tensors. Default: unchanged.
        shard_bytes: maximum bytes of tensors in one file. A tensor is never split.
        step: step of the checkpoint. Default: the latest.
        progress: called with the bytes written so far and the total bytes.

    Raises:
        ShardConfigValueError: `out` exists, there is no such module, or safetensors has no name for a dtype.
        CheckpointError: the checkpoint cannot be read, as in `verify`. Nothing is written then.
    """
    out = Path(out)
    checkpoint, manifest = open_manifest(directory, step)
    if os.path.lexists(out):
        raise ShardConfigValueError(f"out: {out} exists; pass a directory that does not exist")
    with understood(checkpoint.path):
        weights = _weights(manifest, name, dtype)
    ties = {tie: each.name for each in weights for tie in each.ties}  # as `safetensors.torch.save_model` records them
    described = [(each.name, each.dtype, each.saved.shape) for each in weights]
    parts, index = lay_out_parts("model", described, shard_bytes, ties)
    by_name = {each.name: each for each in weights}
    total = sum(each.size for each in weights)
    count = _Count(total + sum(len(part.header) for part in parts), progress)
    partial = out.with_name(f".{out.name}.tmp-{secrets.token_hex(6)}")
    files.make_directory(partial)
    with _removed_on_error(partial):
        for part in parts:
            boxes = [(by_name[each].key, by_name[each].box) for each in part.names if by_name[each].size]
            content = _content(checkpoint.path, manifest, part.header, boxes, dtype)
            write(files.NewFile(partial / part.name), count.over(content), manifest.algorithm)
        if index is not None:
            files.write_file(partial / "model.safetensors.index.json", index)
        files.sync_directory(partial)
        files.rename(partial, out)
    return Exported(out, tuple(part.name for part in parts), len(weights), total)


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

    @property
    def box(self) -> Box:
        """A box that covers the whole tensor."""
        return _box((0,) * len(self.saved.shape), self.saved.shape, self.saved.dtype)


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
