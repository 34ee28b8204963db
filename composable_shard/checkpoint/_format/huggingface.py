"""Hugging Face's layout of models: safetensors files, and an index if there are several.

Headers and indices may come from untrusted sources, so everything in them is checked before use.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._plan.boxes import batches, whole_box
from ...errors import CheckpointCorruptError, CheckpointIncompleteError, CheckpointUnsafeError
from .._io import objects
from .._io.objects import ObjectPath
from .._io.places import Place, opened, read_file, read_range, resolved, size_of
from .manifest import NAME as MANIFEST
from .manifest import SAFETENSORS, Piece, SavedTensor, as_count, as_dict

INDEX = ".safetensors.index.json"
UNFINISHED = ".unfinished"  # an object in a directory of a store that is being written
STEMS = ("model", "adapter_model")  # stems of the default file names
_MOST_HEADER = 100_000_000  # bytes; the safetensors library has the same limit
_MOST_INDEX = 1 << 28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors", re.ASCII)
_PART_NAME = re.compile(r".*-[0-9]+-of-[0-9]+\.safetensors", re.ASCII)
_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


@dataclass(frozen=True)
class Stored:
    """Content of a model's files.

    Attributes:
        tensors: tensors by name. The files of their pieces are absolute paths without links.
        sizes: size of each file in bytes, by path.
    """

    tensors: dict[str, SavedTensor]
    sizes: dict[str, int]


def read_stored(path: Place) -> Stored:
    """Find a model's files and read their headers.

    Args:
        path: directory, or one file.

    Raises:
        CheckpointIncompleteError: there is no such file, or no model in the directory.
        CheckpointCorruptError: a file is missing, or a header or the index is inconsistent.
        CheckpointUnsafeError: the index names a file outside of the directory, or a file is a link that is not a link
            of Hugging Face's cache.
    """
    names = _names_in(path)
    if names is not None:
        directory = resolved(path)
        parts, named = _parts(directory, names)
    else:
        directory, parts, named = resolved(path.parent), [path.name], None
    tensors, sizes = _read_headers(directory, parts, named)
    absent = [key for key in named or () if key not in tensors]
    if absent:
        listed = ", ".join(absent[:5])
        raise CheckpointCorruptError(f"{directory}: its index lists {listed}, but no file contains this tensor")
    return Stored(tensors, sizes)


def _names_in(path: Place) -> list[str] | None:
    """The names in a directory; None if the path is a file.

    Raises:
        CheckpointIncompleteError: it does not exist, or is being written.
    """
    missing = f"{path} does not exist; pass a directory with safetensors files, or one file"
    if not isinstance(path, ObjectPath):
        if path.is_dir():
            return sorted(os.listdir(path))
        if not path.exists():
            raise CheckpointIncompleteError(missing)
        return None
    names = sorted(objects.entries(path))
    if UNFINISHED in names:
        raise CheckpointIncompleteError(
            f"{path} is incomplete: an export is running or was interrupted; delete it, or export to another URL"
        )
    if not names and objects.sizes_of([path]) == [None]:
        raise CheckpointIncompleteError(missing)
    return names or None


def _read_headers(
    directory: Place, parts: Sequence[str], named: dict[str, str] | None
) -> tuple[dict[str, SavedTensor], dict[str, int]]:
    """The tensors of all files, and the size of each file in bytes, by path."""
    tensors: dict[str, SavedTensor] = {}
    sizes: dict[str, int] = {}
    for name in parts:
        own, size, real = _read_header(directory, name)
        sizes[os.fspath(real)] = size
        for key, tensor in own.items():
            if key in tensors or (named is not None and named.get(key) != name):
                where = (
                    f"{tensors[key].pieces[0].file.rpartition('/')[2]} has it, too"
                    if key in tensors
                    else "the index does not"
                )
                raise CheckpointCorruptError(
                    f"{directory / name}: contains {key}, but {where}; the directory mixes files of two exports"
                )
            tensors[key] = tensor
    return tensors, sizes


def _parts(directory: Place, names: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
    """The files of the model in a directory, and the file of each tensor if there is an index."""
    for stem in STEMS:
        if f"{stem}{INDEX}" in names:
            return _read_index(directory / f"{stem}{INDEX}")
        if f"{stem}.safetensors" in names:
            return [f"{stem}.safetensors"], None
    return _only_model(directory, names)


def _only_model(directory: Place, names: Sequence[str]) -> tuple[list[str], dict[str, str] | None]:
    """The files of the only model in a directory without default file names."""
    if MANIFEST in names:
        raise CheckpointIncompleteError(f"{directory} is a checkpoint of this library; load it with checkpoint.load")
    indices = [name for name in names if name.endswith(INDEX)]
    whole = [name for name in names if name.endswith(".safetensors") and not _PART_NAME.fullmatch(name)]
    if len(indices) == 1:
        return _read_index(directory / indices[0])
    if not indices and len(whole) == 1:
        return whole, None
    hint = f"; it has {', '.join([*indices, *whole][:5])}: pass one of these" if indices or whole else ""
    if any(map(_PART_NAME.fullmatch, names)):
        hint += "; it has parts of a model, but no index"
    raise CheckpointIncompleteError(f"{directory} has neither model.safetensors nor model{INDEX}{hint}")


def _read_index(path: Place) -> tuple[list[str], dict[str, str]]:
    data = _bytes_of(_real_file(path.parent, path.name), _MOST_INDEX)
    try:
        named = json.loads(data)["weight_map"]
        if not isinstance(named, dict) or not named or not all(isinstance(each, str) for each in named.values()):
            raise ValueError("weight_map must map each tensor to a file name")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is not a safetensors index: {type(error).__name__}: {error}") from None
    for name in named.values():
        if _FILE_NAME.fullmatch(name) is None:
            raise CheckpointUnsafeError(f"{path} names the file {name[:200]!r}, which is not in its directory")
    return list(dict.fromkeys(named.values())), named


def _real_file(directory: Place, name: str) -> Place:
    """The path of a file without links. Only a link from snapshots/ID to blobs of Hugging Face's cache is followed."""
    path = directory / name
    if isinstance(path, ObjectPath) or isinstance(directory, ObjectPath) or not path.is_symlink():
        return path
    real, cache = path.resolve(), directory.parent.parent
    if directory.parent.name != "snapshots" or real.parent != cache / "blobs":
        raise CheckpointUnsafeError(
            f"{path} is a link to {real}; only links from snapshots/ to blobs/ of Hugging Face's cache are followed. "
            "Pass the directory of the link's target"
        )
    return real


def _bytes_of(path: Place, most: int) -> bytes:
    try:
        return read_file(path, most)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointUnsafeError(f"{path}: {error.strerror}") from None


def _read_header(directory: Place, name: str) -> tuple[dict[str, SavedTensor], int, Place]:
    """The tensors of a file, its size in bytes, and its path without links."""
    path = _real_file(directory, name)
    try:
        size = size_of(path)
        with opened(path) as file:
            length = int.from_bytes(read_range(file, 0, 8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise CheckpointCorruptError(f"{path} of {size:,} bytes cannot have a header of {length:,} bytes")
            data = read_range(file, 8, length)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointUnsafeError(f"{path}: {error.strerror}") from None
    try:
        entries = json.loads(data, object_pairs_hook=as_dict)
        entries.pop("__metadata__", None)
        tensors = {key: _tensor(key, entry, os.fspath(path), 8 + length) for key, entry in entries.items()}
        _check(8 + length, size, tensors.items())
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path}: its header cannot be parsed: {type(error).__name__}: {error}") from None
    return tensors, size, path


def _tensor(key: str, entry: dict[str, Any], file: str, first: int) -> SavedTensor:
    shape = tuple(as_count(each) for each in entry["shape"])
    begin, end = (as_count(each) for each in entry["data_offsets"])
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{key} has dtype {entry['dtype']!r}; supported dtypes: {', '.join(_DTYPES)}")
    dtype: torch.dtype = _DTYPES[entry["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key} of dtype {entry['dtype']} and shape {shape} cannot have {end - begin} bytes")
    return SavedTensor(dtype, shape, (Piece(whole_box(shape), file, first + begin, first + end),))


def _check(first: int, size: int, tensors: Iterable[tuple[str, SavedTensor]]) -> None:
    """Check that the tensors fill the file from its header to its end, without gaps or shared bytes."""
    at = first
    for begin, end, key in sorted((t.pieces[0].begin, t.pieces[0].end, key) for key, t in tensors):
        if begin != at:
            raise ValueError(f"{key} begins at byte {begin:,}, but the tensor before it ends at byte {at:,}")
        at = end
    if at != size:
        raise ValueError(f"its tensors end at byte {at:,} of {size:,}")


# ---------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Part:
    """A file to write: its name, its header, the names of its tensors in order, and its size in bytes."""

    name: str
    header: bytes
    names: tuple[str, ...]
    size: int


Described = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's name, dtype and shape


def lay_out_parts(
    stem: str, described: Sequence[Described], most: int, metadata: dict[str, str]
) -> tuple[list[Part], bytes | None]:
    """Distribute a model's tensors over files of at most `most` bytes. A larger tensor gets a file of its own.

    Args:
        stem: stem of the file names.
        described: tensors, in the order of the model.
        most: maximum bytes of tensors in one file.
        metadata: metadata for the headers.

    Returns:
        The files, and the index if there are several files.
    """
    of_files = [*batches(described, _nbytes, most)] or [[]]
    single = len(of_files) == 1
    parts = []
    for number, batch in enumerate(of_files, 1):
        name = f"{stem}.safetensors" if single else f"{stem}-{number:05d}-of-{len(of_files):05d}.safetensors"
        parts.append(_lay_out(name, batch, metadata))
    if single:
        return parts, None
    index = {
        "metadata": {"total_size": sum(map(_nbytes, described))},
        "weight_map": {key: part.name for part in parts for key in part.names},
    }
    return parts, json.dumps(index, indent=2).encode() + b"\n"


def _nbytes(described: Described) -> int:
    _, dtype, shape = described
    return math.prod(shape) * dtype.itemsize


def _lay_out(name: str, batch: Sequence[Described], metadata: dict[str, str]) -> Part:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    ordered = sorted(batch, key=lambda each: -each[1].itemsize)  # so that all tensors are aligned
    for each in ordered:
        key, dtype, shape = each
        entries[key] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [at, at := at + _nbytes(each)]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return Part(
        name, len(header).to_bytes(8, "little") + header, tuple(key for key, _, _ in ordered), 8 + len(header) + at
    )
