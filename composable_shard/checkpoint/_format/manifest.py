"""The manifest: what a checkpoint holds and where, as JSON; everything in it is checked before it is used."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..._errors import CheckpointCorruptError, CheckpointUnsafeError
from .._io.digests import ALGORITHMS, BLOCK, file_checksum

FORMAT = "composable_shard checkpoint"
VERSION = 1
NAME = "manifest.json"
MOST_BYTES = 1 << 30  # of a manifest
FILE_NAME = re.compile(r"rank-[0-9]{5,9}\.safetensors", re.ASCII)

# How safetensors names the dtypes; those that it does not have are kept as bytes.
SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_OTHERS = ("complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = {str(each).removeprefix("torch."): each for each in SAFETENSORS}
DTYPES |= {name: getattr(torch, name) for name in _OTHERS if hasattr(torch, name)}


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, as in "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the bytes of a file that hold it, row by row."""

    offsets: tuple[int, ...]  # where the box begins in the tensor
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor: global shape, dtype, and the pieces that fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SavedFile:
    """A file: bytes, and the digests of its blocks."""

    size: int
    blocks: bytes


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its tensors' bytes.

    Attributes:
        step: that it was saved at.
        identity: of the save; equal in no two of them.
        ranks: how many have saved it.
        algorithm: of the checksums: "xxh3", "crc32" or "sha256".
        files: by name.
        tensors: by key.
        aliases: keys under which another key's tensor is known, too, as of tied weights.
        values: what is no tensor, by the name in the state; trees of JSON, see `_values`.
        per_rank: the same of what differs by rank: a list with an element for each.
    """

    step: int
    identity: str
    ranks: int
    algorithm: str
    files: dict[str, SavedFile] = field(default_factory=dict)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, list[Any]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """As a file's bytes; the last line is the checksum of what is above it."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "identity": self.identity,
            "ranks": self.ranks,
            "checksums": {"algorithm": self.algorithm, "block": BLOCK},
            "files": {
                name: {
                    "size": each.size,
                    "checksum": file_checksum(self.algorithm, each.blocks),
                    "blocks": base64.b64encode(each.blocks).decode(),
                }
                for name, each in self.files.items()
            },
            "tensors": {
                key: {
                    "dtype": name_of(each.dtype),
                    "shape": each.shape,
                    "pieces": [[p.file, p.begin, p.end, p.offsets, p.shape] for p in each.pieces],
                }
                for key, each in self.tensors.items()
            },
            "aliases": self.aliases,
            "values": self.values,
            "per_rank": self.per_rank,
        }
        body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        return b'{"manifest":' + body + b',\n"checksum":"' + file_checksum(self.algorithm, body).encode() + b'"}\n'

    @property
    def bytes(self) -> int:
        """Of all tensors, without what files have around them."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.tensors.values())


def read_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in a file's bytes.

    Args:
        data: the bytes.
        where: the file's path, for errors.

    Raises:
        CheckpointCorruptError: it is no manifest, of another version, not as it was written, or contradicts itself.
        CheckpointUnsafeError: it names files that are not of this checkpoint.
    """
    try:
        whole = json.loads(data)
        content = whole["manifest"]
        if content["format"] != FORMAT:
            raise CheckpointCorruptError(f"{where} is not the manifest of a checkpoint of composable_shard")
        if content["version"] != VERSION:
            raise CheckpointCorruptError(
                f"{where} has version {content['version']!r} of the format and this library reads version {VERSION}; "
                "use the library that wrote it, or a newer one"
            )
        algorithm, block = content["checksums"]["algorithm"], content["checksums"]["block"]
        if algorithm not in ALGORITHMS or block != BLOCK:
            raise ValueError(f"checksums: {algorithm!r} of {block!r} bytes")
        body = data[len(b'{"manifest":') : data.rindex(b',\n"checksum":')]
        if file_checksum(algorithm, body) != whole["checksum"]:
            raise CheckpointCorruptError(f"{where}: its checksum is not that of its content; it was changed or damaged")
        manifest = _manifest(content, where)
        _check(manifest)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, CheckpointUnsafeError):
            raise
        raise CheckpointCorruptError(f"{where} cannot be understood: {type(error).__name__}: {error}") from None
    return manifest


def _manifest(content: dict[str, Any], where: str) -> Manifest:
    files = {}
    for name, each in content["files"].items():
        if FILE_NAME.fullmatch(name) is None:
            raise CheckpointUnsafeError(
                f"{where} names a file {name!r}; a checkpoint has rank-00000.safetensors and so on"
            )
        try:
            files[name] = SavedFile(_count(each["size"]), base64.b64decode(each["blocks"], validate=True))
        except binascii.Error as error:
            raise ValueError(f"blocks of {name}: {error}") from None
    tensors = {
        key: SavedTensor(
            DTYPES[each["dtype"]],
            _counts(each["shape"]),
            tuple(Piece(_counts(at), _counts(shape), file, _count(begin), _count(end))
                  for file, begin, end, at, shape in each["pieces"]),
        )
        for key, each in content["tensors"].items()
    }  # fmt: skip
    step, identity, ranks = content["step"], content["identity"], content["ranks"]
    aliases, values, per_rank = content["aliases"], content["values"], content["per_rank"]
    if not isinstance(identity, str) or not isinstance(values, dict) or not isinstance(per_rank, dict):
        raise TypeError("identity, values or per_rank")
    algorithm = content["checksums"]["algorithm"]
    return Manifest(
        _count(step), identity, _count(ranks), algorithm, files, tensors, dict(aliases), values, dict(per_rank)
    )


def _count(given: Any) -> int:
    if type(given) is not int or not 0 <= given < 1 << 62:
        raise ValueError(f"{given!r} is not a count")
    return given


def _counts(given: Any) -> tuple[int, ...]:
    if len(given) > 64:
        raise ValueError(f"{len(given)} dimensions")
    return tuple(_count(each) for each in given)


def _check(manifest: Manifest) -> None:
    """See that sizes, pieces and names fit together; a ValueError says what does not."""
    width = ALGORITHMS[manifest.algorithm][0]
    for name, file in manifest.files.items():
        if len(file.blocks) != width * math.ceil(file.size / BLOCK):
            raise ValueError(f"{name} of {file.size} bytes has {len(file.blocks)} bytes of digests")
    used: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    for key, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            if len(piece.offsets) != len(tensor.shape) or len(piece.shape) != len(tensor.shape):
                raise ValueError(f"{key} has {len(tensor.shape)} dimensions and a piece of it {len(piece.shape)}")
            if any(at + size > whole for at, size, whole in zip(piece.offsets, piece.shape, tensor.shape, strict=True)):
                raise ValueError(f"{key} of shape {tensor.shape} has a piece beyond it")
            count = math.prod(piece.shape)
            if piece.end - piece.begin != count * tensor.dtype.itemsize:
                raise ValueError(f"{key}: a piece of shape {piece.shape} in {piece.end - piece.begin} bytes")
            if piece.file not in used or piece.end > manifest.files[piece.file].size:
                raise ValueError(f"{key}: a piece in bytes {piece.begin} to {piece.end} of {piece.file}")
            used[piece.file].append((piece.begin, piece.end, key))
        if not fills(tensor):
            raise ValueError(f"{key}: its pieces do not fill it, or lie on top of each other")
    for name, ranges in used.items():
        for (_, end, key), (begin, _, other) in _neighbours(sorted(each for each in ranges if each[0] < each[1])):
            if begin < end:
                raise ValueError(f"{key} and {other} share bytes of {name}")
    for alias, key in manifest.aliases.items():
        if key not in manifest.tensors or alias in manifest.tensors:
            raise ValueError(f"{alias} is said to be {key}")
    for name, values in manifest.per_rank.items():
        if len(values) != manifest.ranks:
            raise ValueError(f"{name} has values of {len(values)} ranks, and {manifest.ranks} have saved")


def fills(tensor: SavedTensor) -> bool:
    """Whether the pieces of a tensor, none of which lies beyond it, have each of its elements once."""
    filled = sum(math.prod(piece.shape) for piece in tensor.pieces)
    return filled == math.prod(tensor.shape) and not (len(tensor.pieces) > 1 and _overlap(tensor))


def _neighbours(ranges: list[tuple[int, int, str]]) -> Iterator[tuple[tuple[int, int, str], tuple[int, int, str]]]:
    return itertools.pairwise(ranges)


def _overlap(tensor: SavedTensor) -> bool:
    """Whether two pieces share an element. They fill as much as the tensor has, so a gap is an overlap elsewhere.

    Pieces are compared in the order of their first dimension with those that begin before they end.
    """
    pieces = sorted((each for each in tensor.pieces if 0 not in each.shape), key=lambda each: each.offsets)
    for index, piece in enumerate(pieces):
        for other in pieces[index + 1 :]:
            if other.offsets[0] >= piece.offsets[0] + piece.shape[0]:
                break
            if all(
                at < begin + size and begin < at + extent
                for at, extent, begin, size in zip(other.offsets, other.shape, piece.offsets, piece.shape, strict=True)
            ):
                return True
    return False
