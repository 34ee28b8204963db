"""Read tensors: find the byte ranges that a rank needs, verify them, and copy them into the tensors."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from ..._plan.boxes import Box
from ..._plan.text import first_names
from ...errors import CheckpointCorruptError, CheckpointIncompleteError, CheckpointUnsafeError
from .._io.digests import BLOCK, digest
from .._io.files import buffer as new_buffer
from .._io.objects import ObjectPath, OpenObject
from .._io.places import Place, Reading, opened, read_file
from .boxes import Part, parts_of
from .manifest import MOST_BYTES, NAME, Manifest, Piece, SavedTensor

_MOST_OPEN = 128  # files that stay open between check and copy
_AT_ONCE = 1 << 23  # bytes per read through a buffer, if bytes cannot be read directly into the tensor


@dataclass(frozen=True)
class Copy:
    """A part of a saved piece, and the part of a tensor that it fills.

    Attributes:
        piece: the saved piece.
        dtype: dtype of the saved piece.
        box: the part, as a box of the tensor.
        destination: memory to fill, of the same shape as the part.
    """

    piece: Piece
    dtype: torch.dtype
    box: Box
    destination: torch.Tensor

    def bytes(self) -> tuple[int, int]:
        """The byte range in the file, from the part's first to its last byte, including bytes between its rows."""
        first, end = self.box.span(self.piece.box)
        return self.piece.begin + first * self.dtype.itemsize, self.piece.begin + end * self.dtype.itemsize

    def rows(self, dim: int, begin: int, size: int) -> Copy:
        """The copy of a part of the part along one dim."""
        box, destination = self.box.part(dim, begin, size), self.destination.narrow(dim, begin, size)
        return Copy(self.piece, self.dtype, box, destination)


def copies_for(saved: SavedTensor, part: Part) -> Iterator[Copy]:
    """Yield the copies that fill a part of a tensor."""
    for piece in saved.pieces:
        if (box := part.box.common(piece.box)) is not None:
            destination = part.local if box == part.box else part.local[box.slices(part.box)]
            yield from _apart(Copy(piece, saved.dtype, box, destination))


def _apart(copy: Copy) -> Iterator[Copy]:
    """Split a copy into rows if there are many other bytes between its rows."""
    begin, end = copy.bytes()
    dim = next((dim for dim, size in enumerate(copy.box.shape) if size > 1), None)
    if dim is None or end - begin - copy.box.numel * copy.dtype.itemsize < BLOCK:
        yield copy
        return
    for at in range(copy.box.shape[dim]):
        yield from _apart(copy.rows(dim, at, 1))


class Reader:
    """Reads the tensors that one rank needs from a checkpoint.

    As a context manager, it keeps the checked files open until the copy. So it copies the bytes that it has checked,
    even if the checkpoint is deleted in between. From a store, it downloads these bytes once, and holds them in memory.

    Attributes:
        bytes_checked: bytes read to verify them.
        bytes_copied: bytes read to fill tensors.
    """

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.bytes_checked = 0
        self.bytes_copied = 0
        self._path = path
        self._manifest = manifest
        self._copies: dict[str, list[Copy]] = {}
        self._open: dict[str, Reading] = {}
        self._files: contextlib.ExitStack | None = None

    def __enter__(self) -> Reader:
        self._files = contextlib.ExitStack()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._files is not None
        self._open.clear()
        self._files.close()

    @property
    def bytes_read(self) -> int:
        """Total bytes read."""
        return self.bytes_checked + self.bytes_copied

    def want(self, wanted: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Request tensors by key."""
        for key, tensors in wanted.items():
            for tensor in tensors:
                for part in parts_of(key, tensor):
                    self.want_part(key, part)
        for copies in self._copies.values():
            copies.sort(key=lambda copy: copy.piece.begin)

    def want_part(self, key: str, part: Part) -> None:
        """Request a part of a tensor."""
        for copy in copies_for(self._manifest.tensors[key], part):
            self._copies.setdefault(copy.piece.file, []).append(copy)

    def check(self, digests: bool) -> None:
        """Check that the needed files exist and are intact.

        Args:
            digests: read the needed blocks and compare them with their checksums. Otherwise check only file sizes.

        Raises:
            CheckpointCorruptError: files are missing or damaged. The message names every such file.
            CheckpointUnsafeError: a file is a link.
        """
        blocks = {
            name: _blocks(copy.bytes() for copy in some) if digests else [] for name, some in self._copies.items()
        }
        if isinstance(self._path, ObjectPath):
            self._begin_to_download(self._path, blocks)
        problems = []
        for name in self._copies:
            problem, read = self._problem(name, blocks[name])
            self.bytes_checked += read
            problems += [problem] if problem else []
        if problems:
            raise CheckpointCorruptError("; ".join(problems))

    def _begin_to_download(self, path: ObjectPath, blocks: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Begin to download blocks of all files."""
        if self._files is not None:
            for name, ranges in blocks.items():
                self._open[name] = file = OpenObject(path / name)
                self._files.callback(file.forget)
                file.fetch(_bytes_of(ranges, self._manifest.files[name].size))

    def _problem(self, name: str, ranges: Sequence[tuple[int, int]]) -> tuple[str, int]:
        path = self._path / name
        if name in self._open:
            try:
                return _damage(self._open[name], path, self._manifest, ranges)
            except OSError as error:
                return _not_opened(path, error), 0
        if self._files is None or len(self._open) >= _MOST_OPEN:
            return file_problem(path, self._manifest, ranges)
        try:
            file = self._files.enter_context(opened(path))
        except OSError as error:
            return _not_opened(path, error), 0
        self._open[name] = file
        return _damage(file, path, self._manifest, ranges)

    def copy(self) -> None:
        """Fill the requested tensors."""
        buffer = memoryview(b"")
        for name, copies in self._copies.items():
            with contextlib.ExitStack() as stack:
                file = self._open.get(name)
                if file is None:
                    file = stack.enter_context(opened(self._path / name))
                file.fetch(copy.bytes() for copy in copies)
                for copy in copies:
                    buffer = self._copy(file, copy, buffer, self._path / name)
                file.forget()

    def _copy(self, file: Reading, copy: Copy, buffer: memoryview, path: Place) -> memoryview:
        begin, end = copy.bytes()
        self.bytes_copied += end - begin
        destination = copy.destination
        if _is_rows(copy) and destination.is_contiguous() and destination.is_cpu and destination.dtype == copy.dtype:
            view = memoryview(destination.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            _read_into(file, view, begin, path)
            return buffer
        for part, first in _in_slices(copy):
            begin, end = part.bytes()
            if len(buffer) < end - begin:
                buffer = new_buffer(max(end - begin, _AT_ONCE))
            _read_into(file, buffer[: end - begin], begin, path)
            rows = torch.frombuffer(buffer, dtype=torch.uint8, count=end - begin)
            part.destination.copy_(_strided(rows, part, first))
        return buffer


def _is_rows(copy: Copy) -> bool:
    """Whether the part's bytes are contiguous in the file."""
    begin, end = copy.bytes()
    return end - begin == copy.box.numel * copy.dtype.itemsize


def _in_slices(copy: Copy) -> Iterator[tuple[Copy, int]]:
    """Split a part along its first dimension into slices of about `_AT_ONCE` bytes, with their offsets in the file."""
    begin, end = copy.bytes()
    rows = copy.box.shape[0] if copy.box.shape else 1
    each = max(1, rows * _AT_ONCE // max(end - begin, 1))
    if each >= rows:
        yield copy, begin
        return
    for at in range(0, rows, each):
        part = copy.rows(0, at, min(each, rows - at))
        yield part, part.bytes()[0]


def _strided(data: torch.Tensor, copy: Copy, first: int) -> torch.Tensor:
    """View the elements of a part in the bytes of its byte range."""
    itemsize = copy.dtype.itemsize
    strides, stride = [], 1
    for extent in reversed(copy.piece.box.shape):
        strides.append(stride)
        stride *= extent
    if first % itemsize or data.data_ptr() % itemsize:
        data = data.clone()
    return data.view(copy.dtype).as_strided(copy.box.shape, strides[::-1])


def _read_into(file: Reading, view: memoryview, at: int, path: Place) -> None:
    while len(view):
        count = file.read_into(view, at)
        if count == 0:
            raise CheckpointCorruptError(f"{path} ended at byte {at:,} during a read")
        view, at = view[count:], at + count


def _blocks(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of blocks that contain the given byte ranges, in the order of the file, merged if they overlap."""
    blocks: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        first, last = begin // BLOCK, -(-end // BLOCK)
        if blocks and first <= blocks[-1][1]:
            blocks[-1] = (blocks[-1][0], max(blocks[-1][1], last))
        else:
            blocks.append((first, last))
    return blocks


def _bytes_of(blocks: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The byte ranges of ranges of blocks in a file of `size` bytes."""
    return ((first * BLOCK, min(last * BLOCK, size)) for first, last in blocks)


def manifest_bytes(path: Place) -> bytes:
    """Read the bytes of a checkpoint's manifest."""
    try:
        data = read_file(path / NAME, MOST_BYTES)
    except FileNotFoundError:
        data = None
    except OSError as error:
        kind = CheckpointUnsafeError if error.errno in _UNSAFE or error.errno == errno.EFBIG else CheckpointCorruptError
        raise kind(f"{path / NAME} cannot be read: {error.strerror or error}") from None
    if data is None or (isinstance(path, ObjectPath) and not data):  # in a store, an empty manifest is none
        raise CheckpointIncompleteError(f"{path} has no {NAME}: it is not a checkpoint, or is not committed")
    return data


def file_problem(path: Place, manifest: Manifest, ranges: Sequence[tuple[int, int]] | None = None) -> tuple[str, int]:
    """Check a file. Returns a description of the problem or "", and the number of bytes read.

    Args:
        path: path of the file.
        manifest: manifest of its checkpoint.
        ranges: ranges of blocks to compare with their digests. None for all blocks.

    Raises:
        CheckpointUnsafeError: the file is a link, or not a regular file.
    """
    try:
        with opened(path) as file:
            return _damage(file, path, manifest, ranges)
    except OSError as error:
        return _not_opened(path, error), 0


_UNSAFE = {errno.ELOOP: "a symbolic link", errno.EINVAL: "not a regular file", errno.ENXIO: "not a regular file"}


def _not_opened(path: Place, error: OSError) -> str:
    """Describe why a file cannot be opened."""
    if error.errno in _UNSAFE:
        raise CheckpointUnsafeError(f"{path} is {_UNSAFE[error.errno]}, which no checkpoint contains") from None
    if error.errno == errno.ENOENT:
        return f"{path} is missing"
    return f"{path} cannot be read: {error.strerror or error}"


def _damage(
    file: Reading, path: Place, manifest: Manifest, ranges: Sequence[tuple[int, int]] | None
) -> tuple[str, int]:
    """Check an open file. Returns a description of the problem or "", and the number of bytes read."""
    saved = manifest.files[path.name]
    size = file.size
    if size != saved.size:
        return f"{path} has {size:,} bytes, but {saved.size:,} were written", 0
    width = len(digest(manifest.algorithm, b""))
    buffer = new_buffer(min(BLOCK, size))
    read = 0
    chosen = [(0, -(-size // BLOCK))] if ranges is None else ranges
    file.fetch(_bytes_of(chosen, size))
    for block in (block for first, last in chosen for block in range(first, last)):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, size)
        data = buffer[: end - begin]
        try:
            _read_into(file, data, begin, path)
        except OSError as error:
            return f"{path} cannot be read from byte {begin:,}: {error.strerror or error}", read
        read += end - begin
        if digest(manifest.algorithm, data) != saved.blocks[block * width : (block + 1) * width]:
            where = f"bytes {begin:,} to {end:,}"
            return f"{path} is damaged in {where}: {_keys(manifest, path.name, block)}", read
    return "", read


def _keys(manifest: Manifest, name: str, block: int) -> str:
    """Names of the tensors in a block of a file."""
    begin, end = block * BLOCK, (block + 1) * BLOCK
    keys = [
        key
        for key, tensor in manifest.tensors.items()
        if any(p.file == name and p.begin < end and begin < p.end for p in tensor.pieces)
    ]
    return first_names(keys, 3) if keys else "its header"
