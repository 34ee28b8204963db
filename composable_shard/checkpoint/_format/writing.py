"""The file of one rank: a file of safetensors, laid out before anything is written and then written as a stream.

Its header tells torch's `HuggingFaceStorageReader` where each piece lies in its tensor, so that
`torch.distributed.checkpoint.load` reads these files, too. The library `safetensors` would need all tensors as one
block of bytes; here one piece at a time is in memory beside what the model holds.
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
from .._io.files import NewFile
from .._io.writer import write_stream
from .boxes import Box
from .manifest import SAFETENSORS, Piece, SavedFile

_ALIGNED = 64  # bytes at a multiple of which each tensor begins that has a multiple of as many
_SPLIT = 1 << 18  # bytes of a tensor that is worth several threads


@dataclass(frozen=True)
class Laid:
    """A box of a tensor, with its place in the file."""

    key: str
    box: Box
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """A file before it is written: its header, its tensors in their order, its bytes in all."""

    name: str
    header: bytes
    parts: tuple[Laid, ...]
    size: int

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Key and piece of each tensor in it."""
        for part in self.parts:
            yield part.key, Piece(part.box.offsets, part.box.shape, self.name, part.begin, part.end)


def lay_out(name: str, boxes: Sequence[tuple[str, Box]]) -> FileLayout:
    """Give boxes of tensors their places in a file.

    Args:
        name: of the file.
        boxes: key and box; several boxes may have one key.
    """
    entries: dict[str, dict[str, object]] = {}
    offsets: dict[str, dict[str, object]] = {}
    places = []
    at = 0
    for key, box in sorted(boxes, key=_turn):
        size = box.local.nbytes
        entry, number = key, 1
        while entry in entries or entry == "__metadata__":
            entry, number = f"{key}#{number}", number + 1
        entries[entry] = {**_described(box.local), "data_offsets": [at, at + size]}
        offsets[entry] = {"saved_offsets": box.offsets}
        places.append((key, box, at, at + size))
        at += size
    about = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":"))}
    header = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNED)
    first = 8 + len(header)
    parts = tuple(Laid(key, box, first + begin, first + end) for key, box, begin, end in places)
    return FileLayout(name, len(header).to_bytes(8, "little") + header, parts, first + at)


def _turn(keyed: tuple[str, Box]) -> tuple[bool, int]:
    """Where in a file a box comes: those that leave the next one aligned first, then the larger elements, whose size
    is a multiple of that of smaller ones."""
    local = keyed[1].local
    return local.nbytes % _ALIGNED != 0, -local.element_size()


def _described(local: torch.Tensor) -> dict[str, object]:
    if local.dtype in SAFETENSORS:
        return {"dtype": SAFETENSORS[local.dtype], "shape": list(local.shape)}
    return {"dtype": "U8", "shape": [*local.shape, local.element_size()]}  # a dtype that safetensors has no name for


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row by row: its own memory where it is a dense one of the CPU, else those of a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    plain = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(plain.numpy())  # type: ignore[arg-type]


def stream(layout: FileLayout) -> Iterator[memoryview]:
    """A file's bytes in their order, small tensors together; what is given holds until the next is asked for."""
    buffer, filled = memoryview(bytearray(min(BLOCK, layout.size))), 0
    tensors = (bytes_of(part.box.local) for part in layout.parts)
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
    file: NewFile, data: Iterable[memoryview], algorithm: str, tell: Callable[[int], None] | None = None
) -> SavedFile:
    """Write a file as a whole, so that it is on disk, and give its size and digests; `tell` hears how far it is."""
    return SavedFile(*write_stream(file, data, algorithm, tell))


@torch.no_grad()
def stage(layout: FileLayout, memory: mmap.mmap) -> None:
    """Copy a file's bytes into memory as they are at this moment; when it returns, the tensors may change."""
    memory[: len(layout.header)] = layout.header
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin, devices = whole.data_ptr(), set()
    split = _SPLIT if torch.get_num_threads() > 1 else layout.size
    for part in layout.parts:
        local, size = part.box.local, part.end - part.begin
        dense = local.is_cpu and local.is_contiguous() and not local.is_conj() and not local.is_neg()
        if dense and size <= split:  # half of the time of `copy_`, which uses all threads for large ones
            ctypes.memmove(begin + part.begin, local.data_ptr(), size)
        else:
            whole[part.begin : part.end].view(local.dtype).view(local.shape).copy_(local, non_blocking=True)
            devices.add(local.device)
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
