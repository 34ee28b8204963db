"""The manifest of a checkpoint: a JSON file that lists its content. Everything in it is checked before use."""

from __future__ import annotations

import base64
import collections
import functools
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..._plan.boxes import Box, fill_once, whole_box
from ...errors import CheckpointCorruptError, CheckpointError, CheckpointUnsafeError
from .._io.digests import ALGORITHMS, BLOCK, best, file_checksum

FORMAT = "composable_shard checkpoint"
VERSION = 1
NAME = "manifest.json"
MOST_BYTES = 1 << 30  # maximum size of a manifest
_MOST = 1 << 62  # upper bound of a count
FILE_NAME = re.compile(r"rank-[0-9]{5,9}(-[0-9a-f]{1,64})?\.safetensors", re.ASCII)

# Names of dtypes in safetensors. Tensors of other dtypes are stored as bytes.
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


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, for example "float32"."""
    return str(dtype).removeprefix("torch.")


class Piece(NamedTuple):
    """A box of a tensor, and the byte range of a file that stores it in row-major order."""

    box: Box
    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor: its dtype, its global shape, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def is_filled(self) -> bool:
        """Whether its pieces cover each element exactly once. All pieces must be inside of it."""
        return fill_once(self.shape, [piece.box for piece in self.pieces])


@dataclass(frozen=True)
class SavedFile:
    """A saved file: its size in bytes, and the concatenated digests of its blocks."""

    size: int
    blocks: bytes


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the bytes of its tensors.

    Attributes:
        step: training step of the save.
        identity: unique identifier of the save.
        ranks: number of ranks that saved it.
        algorithm: algorithm of the checksums: "xxh3" or "crc32".
        files: files by name.
        tensors: tensors by key.
        aliases: maps further keys of a tensor (of tied weights) to its key in `tensors`.
        values: values that are not tensors, by name in the state; JSON trees, see `values.py`.
        per_rank: values that differ between ranks, by name in the state; a list with one JSON tree for each rank.
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
        """Encode as the bytes of a file. The last line is the checksum of the first line."""
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
                    "pieces": [[p.file, p.begin, p.end, *p.box] for p in each.pieces],
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
        """Total bytes of all tensors, without the headers of files."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.tensors.values())


def read_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check the bytes of a manifest file.

    Args:
        data: bytes of the file.
        where: path of the file, for error messages.

    Raises:
        CheckpointCorruptError: the file is not a manifest, has another version, was changed, or is inconsistent.
        CheckpointUnsafeError: the manifest names files that cannot be part of this checkpoint.
    """
    if data.startswith((b"\x80", b"PK")):
        raise CheckpointUnsafeError(f"{where} is a pickle, or an archive of pickles, and was not read")
    try:
        body, checksum = _parts(data)
        content = json.loads(body, object_pairs_hook=as_dict, parse_constant=_no_number)
        if content["format"] != FORMAT:
            raise CheckpointCorruptError(f"{where} is not the manifest of a composable_shard checkpoint")
        if content["version"] != VERSION:
            raise CheckpointCorruptError(
                f"{where} has format version {content['version']!r}, but this library reads version {VERSION}; use the "
                "version of the library that wrote it, or a newer one"
            )
        algorithm, block = content["checksums"]["algorithm"], content["checksums"]["block"]
        if algorithm not in ALGORITHMS or block != BLOCK:
            raise ValueError(f"checksums: {algorithm!r} of {block!r} bytes")
        require(algorithm, where)
        if file_checksum(algorithm, body) != checksum:
            raise CheckpointCorruptError(f"{where}: its checksum does not match its content; it was changed or damaged")
        manifest = _manifest(content, where)
        check(manifest)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointCorruptError(f"{where} cannot be parsed: {_spoken(error)}") from None
    return manifest


def require(algorithm: str, where: str) -> None:
    """Check that the checksum algorithm of a file is installed.

    Raises:
        CheckpointError: its package is not installed.
    """
    if algorithm == "xxh3" and best() != "xxh3":
        raise CheckpointError(
            f"{where} has checksums that need the package xxhash, which is not installed: pip install xxhash"
        )


def _parts(data: bytes) -> tuple[bytes, str]:
    """The content of a manifest file, and the checksum of this content."""
    begin, middle = b'{"manifest":', data.rfind(b',\n"checksum":"')
    end = re.fullmatch(rb',\n"checksum":"([0-9a-f]{1,64})"}\n', data[max(middle, 0) : max(middle, 0) + 99])
    if not data.startswith(begin) or end is None:
        raise ValueError("it is truncated, or is not a manifest")
    return data[len(begin) : middle], end[1].decode()


def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Raises ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"it has the key {next(name for name, count in counts.items() if count > 1)!r} twice")
    return content


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _spoken(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"{error} is missing" if isinstance(error, KeyError) else f"{error}"


def _manifest(content: dict[str, Any], where: str) -> Manifest:
    for name in ("files", "tensors", "aliases", "values", "per_rank"):
        if not isinstance(content[name], dict):
            raise TypeError(f"{name} is a {type(content[name]).__name__}")
    if not isinstance(content["identity"], str):
        raise TypeError("identity")
    algorithm = content["checksums"]["algorithm"]
    files = {name: _file(name, each, algorithm, where) for name, each in content["files"].items()}
    tensors = {key: _tensor(key, each, where) for key, each in content["tensors"].items()}
    step, ranks = as_count(content["step"]), as_count(content["ranks"])
    aliases, values, per_rank = content["aliases"], content["values"], content["per_rank"]
    return Manifest(step, content["identity"], ranks, algorithm, files, tensors, aliases, values, per_rank)


def _file(name: str, given: Any, algorithm: str, where: str) -> SavedFile:
    _safe(name, where)
    try:
        file = SavedFile(as_count(given["size"]), base64.b64decode(given["blocks"], validate=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    if given["checksum"] != file_checksum(algorithm, file.blocks):
        raise ValueError(f"{name}: its checksum does not match its blocks")
    return file


def _safe(name: Any, where: str, key: str = "") -> None:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not a file name")
    if FILE_NAME.fullmatch(name) is None:
        raise CheckpointUnsafeError(
            f"{where} names the file {name!r}{key}, but files of checkpoints are rank-00000.safetensors and so on"
        )


def _tensor(key: str, given: Any, where: str) -> SavedTensor:
    try:
        if given["dtype"] not in DTYPES:
            raise ValueError(f"this library does not support dtype {given['dtype']!r}")
        pieces = []
        for file, begin, end, at, shape in given["pieces"]:
            _safe(file, where, f" for {key}")
            pieces.append(Piece(Box(_counts(at), _counts(shape)), file, as_count(begin), as_count(end)))
        return SavedTensor(DTYPES[given["dtype"]], _counts(given["shape"]), tuple(pieces))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key}: {_spoken(error)}") from None


def as_count(given: Any) -> int:
    """The same number. Raises ValueError if it is not an int from 0 to 2**62."""
    if type(given) is not int or not 0 <= given < _MOST:
        raise ValueError(f"{given!r} is not a count")
    return given


def _counts(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise TypeError(f"{given!r} is not a list of counts")
    if len(given) > 64:
        raise ValueError(f"{len(given)} dimensions")
    for each in given:
        if type(each) is not int or not 0 <= each < _MOST:
            raise ValueError(f"{each!r} is not a count")
    return tuple(given)


def check(manifest: Manifest) -> None:
    """Check that sizes, pieces and names are consistent.

    Raises:
        ValueError: they are not. The message gives the reason.
    """
    if manifest.ranks < 1:
        raise ValueError("the number of ranks is 0")
    width = ALGORITHMS[manifest.algorithm][0]
    for name, file in manifest.files.items():
        if len(file.blocks) != width * math.ceil(file.size / BLOCK):
            raise ValueError(f"{name} of {file.size} bytes has {len(file.blocks)} bytes of digests")
    _check_tensors(manifest)
    for alias, key in manifest.aliases.items():
        if key not in manifest.tensors or alias in manifest.tensors:
            raise ValueError(f"alias {alias} of {key}: {key} is not the key of a tensor, or {alias} is one itself")
    for name, values in manifest.per_rank.items():
        if not isinstance(values, list) or len(values) != manifest.ranks:
            raise ValueError(f"{name} has values of {len(values)} ranks, but {manifest.ranks} ranks saved")


def _check_tensors(manifest: Manifest) -> None:
    """Check that pieces cover every tensor exactly once, and that no two pieces share bytes."""
    used: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    for key, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            _check_piece(key, tensor, piece)
            if piece.file not in used or piece.end > manifest.files[piece.file].size:
                raise ValueError(f"{key}: {piece.file} has no bytes {piece.begin} to {piece.end}")
            if piece.begin < piece.end:
                used[piece.file].append((piece.begin, piece.end, key))
        if not tensor.is_filled():
            raise ValueError(f"{key}: its pieces do not cover it, or overlap")
    for name, ranges in used.items():
        for (_, end, key), (begin, _, other) in itertools.pairwise(sorted(ranges)):
            if begin < end:
                raise ValueError(f"{key} and {other} share bytes of {name}")


def _check_piece(key: str, tensor: SavedTensor, piece: Piece) -> None:
    """Check that a piece is inside of its tensor, and has the right number of bytes."""
    offsets, shape = piece.box
    if len(offsets) != len(tensor.shape) or len(shape) != len(tensor.shape):
        raise ValueError(f"{key} has {len(tensor.shape)} dimensions, but a piece of it has {len(shape)}")
    if not whole_box(tensor.shape).contains(piece.box):
        raise ValueError(f"{key} of shape {tensor.shape} has a piece outside of it")
    if piece.end - piece.begin != piece.box.numel * tensor.dtype.itemsize:
        raise ValueError(f"{key}: a piece of shape {shape} cannot have {piece.end - piece.begin} bytes")
