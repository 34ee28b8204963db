"""Read checkpoints of `torch.distributed.checkpoint` without executing any code in them.

`.metadata` is a pickle. Only the classes that DCP writes are accepted, and each is replaced by a record class that
stores the pickled arguments. Tensors are consecutive `torch.save` archives in the files `__0_0.distcp` and so on. This
module finds the byte range of each tensor, so that it can be read like a tensor of any other checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

import torch

from ..._plan.boxes import Box, whole_box
from ...errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointUnsafeError,
)
from .._io.files import buffer as new_buffer
from .._io.objects import ObjectPath, OpenObject
from .._io.places import Place, RangeFile, Reading, opened, place, read_file, read_range, resolved, size_of
from .boxes import parts_of
from .manifest import Piece, SavedTensor, as_count
from .reading import copies_for

METADATA = ".metadata"
_MOST_METADATA = 1 << 30  # bytes
_AT_ONCE = 1 << 23
_END = 1 << 13  # bytes at each end of an archive that hold everything except the tensor, usually
_FILE_NAME = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp", re.ASCII)
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip


@dataclass(frozen=True)
class Archive:
    """The archive of one piece of a tensor.

    Attributes:
        begin, end: byte range of the tensor's storage in the file.
        checksum: CRC-32 of these bytes.
    """

    begin: int
    end: int
    checksum: int


@dataclass
class Stored:
    """Content of a DCP checkpoint.

    Attributes:
        tensors: tensors by key. The files of their pieces are absolute paths.
        values: values that are not tensors, by key.
        paths: path of each key in the saved state.
        archives: archives, by file and begin of a piece.
        sizes: size of each file in bytes, by path.
    """

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    archives: dict[tuple[str, int], Archive] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def read_stored(directory: Place, names: Iterable[str] | None) -> Stored:
    """Find the byte ranges of the tensors in a DCP checkpoint, and read all other values.

    Args:
        directory: directory with `.metadata`.
        names: entries of the state to read. None for all.

    Raises:
        CheckpointIncompleteError: there is no `.metadata`.
        CheckpointUnsafeError: a pickle needs a class that no DCP checkpoint needs, or a file is a link or is outside of
            the directory.
        CheckpointCorruptError: files are missing, or do not match the metadata.
    """
    directory = resolved(directory)
    try:
        data = read_file(directory / METADATA, _MOST_METADATA)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointIncompleteError(
            f"{directory} has no {METADATA}: it is not a DCP checkpoint, or is incomplete"
        ) from None
    except OSError as error:
        raise CheckpointUnsafeError(f"{directory / METADATA}: {error.strerror}") from None
    wanted = None if names is None else set(names)
    try:
        return _understood(_unpickled(data, directory / METADATA), directory, wanted)
    except (CheckpointCorruptError, CheckpointUnsafeError, CheckpointMismatchError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointCorruptError(
            f"{directory / METADATA} cannot be parsed: {type(error).__name__}: {error}"
        ) from None


# --------------------------------------------------------------------------------------------------- pickles


class _Record:
    """Replaces an object of DCP: stores its arguments and its state."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def _unpickled(data: bytes, where: Place) -> Any:
    known: dict[tuple[str, str], Any] = {
        (module, name): type(name, (_Record,), {}) for module, names in _CLASSES.items() for name in names
    }
    known["torch", "Size"] = type("Size", (tuple,), {})
    known["torch.serialization", "_get_layout"] = type("Layout", (_Record,), {})
    known["torch", "device"] = type("Device", (_Record,), {})
    known["collections", "OrderedDict"] = type("OrderedDict", (collections.OrderedDict,), {})
    for module in ("pathlib", "pathlib._local"):
        known |= {(module, name): type(name, (_Record,), {}) for name in ("PosixPath", "WindowsPath")}

    memory_format = known["torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"]

    def member(kind: Any, name: Any) -> Any:
        """Replaces `getattr`, with which early Python 3.11, such as 3.11.2, pickles members of an enumeration."""
        if kind is not memory_format or not isinstance(name, str):
            raise CheckpointUnsafeError(
                f"{where} asks for builtins.getattr of another class than DCP's enumeration; no code was executed"
            )
        return memory_format(name)

    known["builtins", "getattr"] = member

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (stand_in := known.get((module, name))) is not None:
                return stand_in
            if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
                return dtype
            raise CheckpointUnsafeError(
                f"{where} asks for {module}.{name}, which no DCP checkpoint needs; no code was executed"
            )

        def persistent_load(self, pid: Any) -> Any:
            raise CheckpointUnsafeError(f"{where} refers to an object outside of the file: {str(pid)[:200]!r}")

    try:
        return Unpickler(io.BytesIO(data)).load()
    except CheckpointUnsafeError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointCorruptError(f"{where} is damaged: {type(error).__name__}: {error}") from None


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise TypeError(f"expected a {kind}, but found a {type(record).__name__}")
    return record.state


# ---------------------------------------------------------------------------------------------------- content


def _understood(pickled: Any, directory: Place, wanted: set[str] | None) -> Stored:
    metadata = _state(pickled, "Metadata")
    places = _places_in(metadata)
    paths = {key: _path(key, metadata.get("planner_data")) for key in metadata["state_dict_metadata"]}
    if wanted is not None:
        paths = {key: path for key, path in paths.items() if _is_wanted(key, path, wanted)}
    stored = Stored(paths=paths)
    with _Files(directory, [place for (key, _), place in places.items() if key in paths]) as opened_files:
        for key in paths:
            record = metadata["state_dict_metadata"][key]
            if type(record).__name__ == "BytesStorageMetadata":
                stored.values[key] = _value(key, _place(opened_files, places[key, None], stored), opened_files)
            else:
                tensor = _state(record, "TensorStorageMetadata")
                stored.tensors[key] = _tensor(key, tensor, places, opened_files, stored)
    return stored


def _places_in(metadata: Mapping[str, Any]) -> dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]]:
    """The place of each value, and of each piece of a tensor, by key and offsets."""
    places = {}
    for index, info in metadata["storage_data"].items():
        at, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        offset = at.get("offset")
        places[at["fqn"], None if offset is None else tuple(offset)] = place
    return places


def _is_wanted(key: str, path: tuple[str | int, ...], wanted: set[str]) -> bool:
    return path[0] in wanted or any(key.startswith(f"{name}.") for name in wanted)


class _Files:
    """Files of a checkpoint. From a store, the ends of all archives are downloaded together, because they are small.

    Args:
        directory: the directory.
        places: all entries that will be read.
    """

    def __init__(self, directory: Place, places: Iterable[Mapping[str, Any]]) -> None:
        self.directory = directory
        self._downloaded: dict[Place, OpenObject] = {}
        self._ends: dict[str, list[tuple[int, int]]] = {}
        if isinstance(directory, ObjectPath):
            for place in places:
                name, begin, end = _checked(directory, place)
                if end - begin <= 2 * _END:
                    self._ends.setdefault(name, []).append((begin, end))
                else:
                    self._ends.setdefault(name, []).extend([(begin, begin + _END), (end - _END, end)])

    def __enter__(self) -> _Files:
        if isinstance(self.directory, ObjectPath):
            for name, ends in self._ends.items():
                self._downloaded[self.directory / name] = file = OpenObject(self.directory / name)
                file.fetch(ends)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._downloaded.values():
            file.forget()

    def at(self, path: Place) -> contextlib.AbstractContextManager[Reading]:
        """Open a file."""
        return contextlib.nullcontext(self._downloaded[path]) if path in self._downloaded else opened(path)

    def size_of(self, path: Place) -> int:
        """The size of a file in bytes."""
        return self._downloaded[path].size if path in self._downloaded else size_of(path)


def _path(key: str, planner: Any) -> tuple[str | int, ...]:
    path = (planner or {}).get(key, (key,))
    if not isinstance(key, str) or not path or not all(type(each) in (str, int) for each in path):
        raise TypeError(f"{key!r} is not a name")
    return tuple(path)


def _checked(directory: Place, info: Mapping[str, Any]) -> tuple[str, int, int]:
    """File name, begin and end of an entry."""
    name, begin, length = info["relative_path"], as_count(info["offset"]), as_count(info["length"])
    if not isinstance(name, str) or _FILE_NAME.fullmatch(name) is None:
        raise CheckpointUnsafeError(
            f"{directory / METADATA} names the file {str(name)[:200]!r}, but DCP names its files __0_0.distcp and so on"
        )
    if info.get("transform_descriptors"):
        raise CheckpointMismatchError(
            f"{directory / name} is compressed by an extension of DCP, which this library does not support"
        )
    return name, begin, begin + length


def _place(files: _Files, info: Mapping[str, Any], stored: Stored) -> tuple[Place, int, int]:
    """Path, begin and length in bytes of an entry."""
    name, begin, end = _checked(files.directory, info)
    length = end - begin
    path = files.directory / name
    named = os.fspath(path)
    if named not in stored.sizes:
        try:
            stored.sizes[named] = files.size_of(path)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointUnsafeError(f"{path} is {error.strerror}") from None
    if begin + length > stored.sizes[named]:
        raise CheckpointCorruptError(
            f"{path} has {stored.sizes[named]:,} bytes, but at least {begin + length:,} were written"
        )
    return path, begin, length


def _value(key: str, place: tuple[Place, int, int], files: _Files) -> Any:
    path, begin, length = place
    with files.at(path) as file:
        data = read_range(file, begin, length)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointUnsafeError(
            f"{path}: the value {key} is more than plain data and was not loaded: {str(error).splitlines()[0]}"
        ) from None
    except Exception as error:  # a damaged archive can raise any exception
        raise CheckpointCorruptError(f"{path}: the value {key} is damaged: {type(error).__name__}: {error}") from None


def _tensor(key: str, record: Mapping[str, Any], places: Any, files: _Files, stored: Stored) -> SavedTensor:
    dtype = _state(record["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key} has dtype {dtype!r}")
    shape = tuple(map(as_count, record["size"]))
    pieces = []
    for chunk in record["chunks"]:
        part = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = box = Box(tuple(map(as_count, part["offsets"])), tuple(map(as_count, part["sizes"])))
        if not len(offsets) == len(sizes) == len(shape) or not whole_box(shape).contains(box):
            raise ValueError(f"{key} of shape {shape} has a piece of shape {sizes} at {offsets}")
        if 0 in sizes:
            continue
        place = _place(files, places[key, offsets], stored)
        archive, first = _archive(key, place, dtype, sizes, files)
        begin = archive.begin + first
        stored.archives[os.fspath(place[0]), begin] = archive
        pieces.append(Piece(box, os.fspath(place[0]), begin, begin + box.numel * dtype.itemsize))
    saved = SavedTensor(dtype, shape, tuple(pieces))
    if not saved.is_filled():
        raise ValueError(f"{key}: its pieces do not cover it, or overlap")
    return saved


def _archive(
    key: str, place: tuple[Place, int, int], dtype: torch.dtype, shape: tuple[int, ...], files: _Files
) -> tuple[Archive, int]:
    """Find the byte range of a tensor's storage, and the offset of the tensor in the storage in bytes."""
    path, begin, length = place
    with files.at(path) as file:
        view = RangeFile(file, begin, length)
        try:
            tensor = torch.load(cast(IO[bytes], view), map_location="meta", weights_only=True)
            data, at = _data_in(view)
        except pickle.UnpicklingError as error:
            raise CheckpointUnsafeError(
                f"{path}: {key} is not a plain tensor and was not loaded: {str(error).splitlines()[0]}"
            ) from None
        except Exception as error:  # a damaged archive can raise any exception
            raise CheckpointCorruptError(f"{path}: {key} is damaged: {type(error).__name__}: {error}") from None
    _check_tensor(key, path, tensor, dtype, shape)
    first, size = int(tensor.storage_offset()) * dtype.itemsize, tensor.numel() * dtype.itemsize
    if data.compress_type != zipfile.ZIP_STORED or first + size > data.file_size or at + data.file_size > length:
        raise CheckpointCorruptError(f"{path}: {key} is damaged: its bytes are beyond the end of its archive")
    return Archive(begin + at, begin + at + data.file_size, data.CRC), first


def _data_in(view: RangeFile) -> tuple[zipfile.ZipInfo, int]:
    """The archive entry with a tensor's bytes, and the offset of these bytes in the archive."""
    with zipfile.ZipFile(cast(IO[bytes], view)) as archive:
        order = [each for each in archive.namelist() if each.endswith("/byteorder")]
        if order and archive.read(order[0]) != b"little":
            raise ValueError("its byte order is not little-endian")
        [data] = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
    view.seek(data.header_offset)
    header = view.read(30) or b""
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return data, data.header_offset + 30 + name + extra


def _check_tensor(key: str, path: Place, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Check that a tensor matches the metadata, and that its bytes are in row-major order."""
    if type(tensor) is not torch.Tensor or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise CheckpointCorruptError(
            f"{path}: expected tensor {key} of dtype {dtype} and shape {shape}, found another tensor"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise CheckpointMismatchError(f"{path}: {key} is a conjugated or negated view; save `resolve_conj()` of it")
    if not tensor.is_contiguous():
        raise CheckpointMismatchError(f"{path}: {key} is not contiguous; save `contiguous()` of it")


def check(stored: Stored, wanted: Mapping[str, Sequence[tuple[SavedTensor, torch.Tensor]]]) -> int:
    """Read the needed pieces, and compare them with the checksums in their archives.

    Args:
        stored: content of the checkpoint.
        wanted: saved tensors and the tensors to fill with them, by key.

    Returns:
        The number of bytes read.

    Raises:
        CheckpointCorruptError: pieces are damaged. The message names them.
    """
    needed = _needed(wanted)
    problems, read = [], 0
    buffer = new_buffer(_AT_ONCE)
    for name, pieces in itertools.groupby(sorted(needed.items()), key=lambda item: item[0][0]):
        archives = [(key, stored.archives[where]) for where, key in pieces]
        with opened(place(name)) as file:
            file.fetch((archive.begin, archive.end) for _, archive in archives)
            for key, archive in archives:
                count, whole = _is_whole(file, archive, buffer)
                read += count
                if not whole:
                    damaged = f"{key}, bytes {archive.begin:,} to {archive.end:,}"
                    problems.append(f"{place(name)} is damaged: {damaged}")
    if problems:
        raise CheckpointCorruptError("; ".join(problems[:20]))
    return read


def _needed(wanted: Mapping[str, Sequence[tuple[SavedTensor, torch.Tensor]]]) -> dict[tuple[str, int], str]:
    """The keys of the needed pieces, by file and begin."""
    return {
        (copy.piece.file, copy.piece.begin): key
        for key, pairs in wanted.items()
        for saved, tensor in pairs
        for part in parts_of(key, tensor)
        for copy in copies_for(saved, part)
    }


def _is_whole(file: Reading, archive: Archive, buffer: memoryview) -> tuple[int, bool]:
    """Read an archive. Returns the number of bytes read, and whether their checksum is right."""
    checksum, at = 0, archive.begin
    while at < archive.end and (count := file.read_into(buffer[: archive.end - at], at)):
        checksum, at = zlib.crc32(buffer[:count], checksum), at + count
    return at - archive.begin, (checksum, at) == (archive.checksum, archive.end)
