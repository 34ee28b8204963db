"""A committed checkpoint written anew: as one file, as the files of so many ranks, or its weights alone.

One process does it, without a model and without a process group: it reads what it is about to write, checks it against
its checksums, and holds no more than `_AT_ONCE` bytes of it.
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

from .._errors import CheckpointCorruptError, ShardConfigValueError
from ._format import commits
from ._format.boxes import Box
from ._format.huggingface import lay_out_parts
from ._format.manifest import NAME, SAFETENSORS, Manifest, Piece, SavedFile, SavedTensor, name_of
from ._format.reading import Reader
from ._format.writing import FileLayout, bytes_of, lay_out, write
from ._io import files
from ._pruning import open_manifest

Progress = Callable[[int, int], None]  # is given how many bytes are written, and how many there will be

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
    """Write a checkpoint anew, in the files that so many ranks would have saved it in.

    A checkpoint loads on any number of ranks as it is; in as many files as there are ranks, each rank reads one of them
    from its begin to its end. Values of `PerRank` stay those of the ranks that saved. Tensors of modules and optimizers
    are cut along the dimension that they are cut along already, or along the first one if all of them are in one file.

    Args:
        directory: that `save` was given, or one checkpoint in it.
        out: a directory of checkpoints, which the new one is committed into; made where it does not exist.
        ranks: how many files.
        step: which checkpoint; by default the latest.
        progress: is called with how many bytes are written, and how many there will be.

    Returns:
        the path of the new checkpoint.

    Raises:
        ShardConfigValueError: `out` has a checkpoint of this step or of a later one; `ranks` is no such number.
        CheckpointError: the checkpoint cannot be read, as in `verify`; nothing remains of the new one.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise ShardConfigValueError(f"ranks: {ranks!r} is not a number of ranks; give 1 to {_MOST_RANKS:,}")
    checkpoint, manifest = open_manifest(directory, step)
    later = [each.step for each in commits.committed(Path(out)) if each.step >= manifest.step]
    if later:
        raise ShardConfigValueError(
            f"out: {out} has a checkpoint of step {later[-1]} already, and LATEST would go back to step "
            f"{manifest.step}; give another directory"
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
    """The files as `save` would lay them out: a part of each tensor that is cut, and some of those that are not."""
    boxes: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for rank, key, box in _placed(manifest, ranks):
        if 0 not in box.shape:
            boxes[rank].append((key, box))
    return [lay_out(f"rank-{rank:05d}.safetensors", each) for rank, each in enumerate(boxes)]


def _placed(manifest: Manifest, ranks: int) -> Iterator[tuple[int, str, Box]]:
    """Rank, key and box of all parts of all tensors: those that the ranks share, then those of `PerRank` values."""
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
    """What the values of a manifest make a program stumble over is an error of the checkpoint."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path / NAME} cannot be understood: {type(error).__name__}: {error}") from None


def _owned(manifest: Manifest) -> Iterator[str]:
    """The keys of the tensors of modules and optimizers."""
    for path, value in manifest.values.items():
        kind = value.get("$") if isinstance(value, dict) else None
        if kind == "module":
            yield from (f"{path}.{name}" for name in value["tensors"])
        elif kind == "optimizer":
            yield from keys(value["state"])


def _cut_dim(tensor: SavedTensor, sharded: bool) -> int | None:
    """The dimension along which a tensor's pieces are cut; None where it stays whole."""
    for dim in range(len(tensor.shape)):
        if len({piece.offsets[dim] for piece in tensor.pieces}) > 1:
            return dim
    return 0 if sharded and tensor.shape else None


def _cut(tensor: SavedTensor, dim: int | None, ranks: int) -> Iterator[Box]:
    """The boxes of a tensor by rank, as a DTensor's `Shard` cuts them; one box where it is not cut."""
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
    return Box(offsets, shape, torch.empty(shape, dtype=dtype, device="meta"))  # filled when its turn comes


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
    """How many bytes are written."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._written = 0
        self._total = total
        self._progress = progress

    def over(self, data: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same, counted."""
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
    """The bytes of a file: its header, and boxes of a checkpoint in their order, checked as they are read."""
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
    """Boxes, cut where they are large, by as many as are in memory at a time."""
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
    """Boxes that follow each other in a file and make up one, none of them of many bytes."""
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


# -------------------------------------------------------------------------------------------------- weights alone


@dataclass(frozen=True)
class Exported:
    """What was exported: where to, the files, how many tensors and bytes of them."""

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
    """Write a module of a checkpoint in the layout of Hugging Face: safetensors, in several files with an index.

    Args:
        directory: that `save` was given, or one checkpoint in it.
        out: a directory, which must not exist; it appears when all of it is on disk.
        name: of the module in the state; by default "model", or the only module that there is.
        dtype: of floating-point tensors; by default they keep theirs.
        shard_bytes: of tensors in a file, at most; a tensor is never split.
        step: which checkpoint; by default the latest.
        progress: is called with how many bytes are written, and how many there will be.

    Raises:
        ShardConfigValueError: `out` exists, there is no such module, or a dtype that safetensors has no name for.
        CheckpointError: the checkpoint cannot be read, as in `verify`; nothing is written then.
    """
    out = Path(out)
    checkpoint, manifest = open_manifest(directory, step)
    if os.path.lexists(out):
        raise ShardConfigValueError(f"out: {out} exists; give a directory that does not")
    with understood(checkpoint.path):
        weights = _weights(manifest, name, dtype)
    ties = {tie: each.name for each in weights for tie in each.ties}  # as `safetensors.torch.save_model` names them
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
    """A tensor to export: its name in the module, its key in the checkpoint, what else it is called, and its dtype."""

    name: str
    key: str
    saved: SavedTensor
    ties: tuple[str, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes that it will have."""
        return math.prod(self.saved.shape) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """All of it."""
        return _box((0,) * len(self.saved.shape), self.saved.shape, self.saved.dtype)


def _weights(manifest: Manifest, name: str | None, dtype: torch.dtype | None) -> list[_Weight]:
    name = _module_name(manifest, name)
    names: dict[str, list[str]] = {}  # by key; of tied weights several
    for each in manifest.values[name]["tensors"]:
        key = f"{name}.{each}"
        names.setdefault(manifest.aliases.get(key, key), []).append(each)
    weights = []
    for key, (first, *ties) in names.items():
        saved = manifest.tensors[key]
        becomes = dtype if dtype is not None and saved.dtype.is_floating_point else saved.dtype
        if becomes not in SAFETENSORS:
            raise ShardConfigValueError(
                f"{key} has dtype {name_of(becomes)}, which safetensors has no name for; give another dtype"
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
            f"name: no module of the checkpoint is called {name!r}; it has {', '.join(modules) or 'none'}"
        )
    return name
