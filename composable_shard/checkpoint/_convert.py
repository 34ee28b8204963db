"""Convert a committed checkpoint: to one file, to the files of another number of ranks, or to weights only.

One process does this without a model and without a process group. It reads the bytes that it is about to write, checks
them against their checksums, and holds at most `_AT_ONCE` bytes of tensors in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError, ShardConfigValueError
from ._format import commits
from ._format.boxes import Box
from ._format.huggingface import lay_out_parts
from ._format.manifest import NAME, SAFETENSORS, Manifest, Piece, SavedFile, SavedTensor, name_of
from ._format.reading import Reader
from ._format.writing import FileLayout, bytes_of, lay_out, write
from ._io import files
from ._pruning import open_manifest

Progress = Callable[[int, int], None]  # called with the bytes written so far and the total

_AT_ONCE = 1 << 25  # bytes of tensors in memory
_MOST_RANKS = 100_000


def reshard(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    ranks: int,
    step: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Rewrite a checkpoint into the files that `ranks` ranks would have saved.

    A checkpoint loads on any number of ranks without this. If it has as many files as there are ranks, each rank reads
    exactly one file sequentially. `PerRank` values stay those of the ranks that saved them. Tensors of modules and
    optimizers are split along the dimension along which they are already split, or along the first dimension if the
    checkpoint has one file only.

    Args:
        directory: directory that was passed to `save`, or one checkpoint in it.
        out: directory of checkpoints into which the new one is committed. Created if it does not exist.
        ranks: number of files.
        step: step of the checkpoint. Default: the latest.
        progress: called with the bytes written so far and the total bytes.

    Returns:
        The path of the new checkpoint.

    Raises:
        ShardConfigValueError: `out` has a checkpoint of this step or of a later one, or `ranks` is invalid.
        CheckpointError: the checkpoint cannot be read, as in `verify`. The new checkpoint is then deleted.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise ShardConfigValueError(f"ranks: {ranks!r} is not a number of ranks; pass 1 to {_MOST_RANKS:,}")
    checkpoint, manifest = open_manifest(directory, step)
    later = [each.step for each in commits.committed(Path(out)) if each.step >= manifest.step]
    if later:
        raise ShardConfigValueError(
            f"out: {out} already has a checkpoint of step {later[-1]}, so LATEST would move back to step "
            f"{manifest.step}; pass another directory"
        )
    with understood(checkpoint.path):
        layouts = _layouts(manifest, ranks)
    attempt = commits.begin(Path(out), manifest.step, overwrite=False)
    count = _Count(sum(each.size for each in layouts), progress)
    with _removed_on_error(attempt.partial):
        saved = {each.name: _copy(checkpoint.path, manifest, each, attempt.partial, count) for each in layouts}
        identity = attempt.partial.name.rpartition("-")[2]
        anew = replace(manifest, identity=identity, files=saved, tensors=_tensors(manifest, layouts))
        commits.commit(attempt, anew)
    return attempt.final


def _layouts(manifest: Manifest, ranks: int) -> list[FileLayout]:
    """The file layouts that `save` would choose: a part of each split tensor, and some of the tensors not split."""
    boxes: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for rank, key, box in _placed(manifest, ranks):
        if 0 not in box.shape:
            boxes[rank].append((key, box))
    return [lay_out(f"rank-{rank:05d}.safetensors", each) for rank, each in enumerate(boxes)]


def _placed(manifest: Manifest, ranks: int) -> Iterator[tuple[int, str, Box]]:
    """Rank, key and box of all parts of all tensors: first the shared tensors, then those of `PerRank` values."""
    own = {key: rank for values in manifest.per_rank.values() for rank, tree in enumerate(values) for key in keys(tree)}
    sharded = set(_owned(manifest)) if len(manifest.files) == 1 else set()
    for turn, key in enumerate(sorted(manifest.tensors.keys() - own.keys())):
        tensor = manifest.tensors[key]
        dim = _cut_dim(tensor, key in sharded)
        for rank, box in enumerate(_cut(tensor, dim, ranks)):
            yield turn % ranks if dim is None else rank, key, box
    for key, rank in own.items():
        for box in _cut(manifest.tensors[key], None, ranks):
            yield rank % ranks, key, box


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


def _owned(manifest: Manifest) -> Iterator[str]:
    """The keys of the tensors of modules and optimizers."""
    for path, value in manifest.values.items():
        kind = value.get("$") if isinstance(value, dict) else None
        if kind == "module":
            yield from (f"{path}.{name}" for name in value["tensors"])
        elif kind == "optimizer":
            yield from keys(value["state"])


def _cut_dim(tensor: SavedTensor, sharded: bool) -> int | None:
    """The dimension along which a tensor is split into pieces; None if it is not split."""
    for dim in range(len(tensor.shape)):
        if len({piece.offsets[dim] for piece in tensor.pieces}) > 1:
            return dim
    return 0 if sharded and tensor.shape else None


def _cut(tensor: SavedTensor, dim: int | None, ranks: int) -> Iterator[Box]:
    """The boxes of a tensor by rank, split as DTensor's `Shard` does; one box if the tensor is not split."""
    if dim is None:
        yield _box((0,) * len(tensor.shape), tensor.shape, tensor.dtype)
        return
    whole = tensor.shape[dim]
    size = -(-whole // ranks)
    for rank in range(ranks):
        begin = min(rank * size, whole)
        offsets = (*(0,) * dim, begin, *(0,) * (len(tensor.shape) - dim - 1))
        shape = (*tensor.shape[:dim], min(begin + size, whole) - begin, *tensor.shape[dim + 1 :])
        yield _box(offsets, shape, tensor.dtype)


def _box(offsets: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Box:
    return Box(offsets, shape, torch.empty(shape, dtype=dtype, device="meta"))  # memory is allocated in `_content`


def _tensors(manifest: Manifest, layouts: Iterable[FileLayout]) -> dict[str, SavedTensor]:
    pieces: dict[str, list[Piece]] = {}
    for layout in layouts:
        for key, piece in layout.pieces():
            pieces.setdefault(key, []).append(piece)
    return {key: replace(each, pieces=tuple(pieces.get(key, ()))) for key, each in manifest.tensors.items()}


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


def _copy(source: Path, manifest: Manifest, layout: FileLayout, into: Path, count: _Count) -> SavedFile:
    content = _content(source, manifest, layout.header, [(part.key, part.box) for part in layout.parts])
    return write(files.NewFile(into / layout.name), count.over(content), manifest.algorithm)


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
