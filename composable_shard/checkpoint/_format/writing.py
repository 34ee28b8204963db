"""Write the file of one rank: a safetensors file that is laid out first and then written as a stream.

The header has the offsets of each piece in its tensor for torch's `HuggingFaceStorageReader`, so
`torch.distributed.checkpoint.load` can read these files, too. The `safetensors` library would need all tensors in one
block of bytes. This module needs memory for one piece at a time, in addition to the model.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .._io.digests import BLOCK
from .._io.places import Writing
from .._io.writer import write_stream
from .boxes import Part
from .manifest import SAFETENSORS, Piece, SavedFile

_ALIGNED = 64  # bytes; a tensor whose size is a multiple of this begins at a multiple of it
_SPLIT = 1 << 18  # bytes; larger tensors are copied by several threads


@dataclass(frozen=True)
class Laid:
    """A part of a tensor, and its byte range in the file."""

    key: str
    part: Part
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file: its name, its header, its tensors in order, and its size in bytes."""

    name: str
    header: bytes
    parts: tuple[Laid, ...]
    size: int

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield key and piece of each part in the file."""
        for laid in self.parts:
            yield laid.key, Piece(laid.part.box, self.name, laid.begin, laid.end)


def lay_out(name: str, parts: Sequence[tuple[str, Part]]) -> FileLayout:
    """Lay out parts of tensors in a file.

    Args:
        name: name of the file.
        parts: keys and parts. Several parts may have the same key.
    """
    entries: dict[str, dict[str, object]] = {}
    offsets: dict[str, dict[str, object]] = {}
    places = []
    at = 0
    for key, part in sorted(parts, key=_turn):
        size = part.local.nbytes
        entry, number = key, 1
        while entry in entries or entry == "__metadata__":
            entry, number = f"{key}#{number}", number + 1
        entries[entry] = {**_described(part.local), "data_offsets": [at, at + size]}
        offsets[entry] = {"saved_offsets": part.box.offsets}
        places.append((key, part, at, at + size))
        at += size
    about = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":"))}
    header = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNED)
    first = 8 + len(header)
    laid = tuple(Laid(key, part, first + begin, first + end) for key, part, begin, end in places)
    return FileLayout(name, len(header).to_bytes(8, "little") + header, laid, first + at)


def _turn(keyed: tuple[str, Part]) -> tuple[bool, int]:
    """Sort key of a part in its file. It keeps tensors aligned.

    Parts that leave the next one aligned come first. Within both groups, larger elements come first, because their
    size is a multiple of the size of smaller elements.
    """
    local = keyed[1].local
    return local.nbytes % _ALIGNED != 0, -local.element_size()


def _described(local: torch.Tensor) -> dict[str, object]:
    if local.dtype in SAFETENSORS:
        return {"dtype": SAFETENSORS[local.dtype], "shape": list(local.shape)}
    return {"dtype": "U8", "shape": [*local.shape, local.element_size()]}  # safetensors does not support the dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: a view of its memory if it is contiguous on the CPU, else a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    plain = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(plain.numpy())  # type: ignore[arg-type]


def stream(layout: FileLayout) -> Iterator[memoryview]:
    """Yield the bytes of a file in order, with small tensors combined. Each view is valid until the next one."""
    buffer, filled = memoryview(bytearray(min(BLOCK, layout.size))), 0
    tensors = (bytes_of(laid.part.local) for laid in layout.parts)
    for data in itertools.chain([memoryview(layout.header)], tensors):
        if len(data) >= BLOCK:
            yield buffer[:filled]
            yield data
            filled = 0
            continue
        while len(data):
            some = data[: len(buffer) - filled]
            buffer[filled : filled + len(some)] = some
            filled, data = filled + len(some), data[len(some) :]
            if filled == len(buffer):
                yield buffer
                filled = 0
    yield buffer[:filled]


def write(
    file: Writing, data: Iterable[memoryview], algorithm: str, tell: Callable[[int], None] | None = None
) -> SavedFile:
    """Write a file to disk or to a store, and return its size and digests. `tell` is called with the bytes written."""
    return SavedFile(*write_stream(file, data, algorithm, tell))


@torch.no_grad()
def stage(layout: FileLayout, memory: mmap.mmap) -> None:
    """Copy the bytes of a file into memory. The tensors may change after this returns."""
    memory[: len(layout.header)] = layout.header
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin, devices = whole.data_ptr(), set()
    split = _SPLIT if torch.get_num_threads() > 1 else layout.size
    for laid in layout.parts:
        local, size = laid.part.local, laid.end - laid.begin
        dense = local.is_cpu and local.is_contiguous() and not local.is_conj() and not local.is_neg()
        if dense and size <= split:  # takes half the time of `copy_`, which uses all threads for large tensors
            ctypes.memmove(begin + laid.begin, local.data_ptr(), size)
        else:
            whole[laid.begin : laid.end].view(local.dtype).view(local.shape).copy_(local, non_blocking=True)
            devices.add(local.device)
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
