"""Which boxes of a tensor this rank holds, and which of the ranks that hold the same box writes it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..._errors import ShardConfigValueError
from ..._torch.core import has_memory
from ..._torch.distributed import local_tensor
from .manifest import DTYPES, name_of


class Box(NamedTuple):
    """A part of a tensor: where it begins, what it spans, and this rank's memory for it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    local: torch.Tensor


def boxes_of(key: str, tensor: torch.Tensor) -> list[Box]:
    """The parts of a tensor that this rank holds; all of it, if it is no DTensor. Empty ones are left out.

    Raises:
        ShardConfigValueError: the tensor has no memory that could be written as it is.
    """
    if not isinstance(tensor, DTensor):
        whole = plain(key, tensor)
        return [Box((0,) * whole.dim(), tuple(whole.shape), whole)] if whole.numel() else []
    if any(placement.is_partial() for placement in tensor.placements):
        raise ShardConfigValueError(
            f"{key} has a Partial placement: its sum over ranks is pending; redistribute it first"
        )
    local = plain(key, local_tensor(tensor))
    if not local.numel():
        return []
    boxes = []
    chunks = _chunks_of(tensor)
    if len(chunks) == 1:
        return [Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes), local)]
    for chunk in chunks:
        part = tensor.__get_tensor_shard__(_index(key, chunk))  # type: ignore[no-untyped-call]
        boxes.append(Box(tuple(chunk.offsets), tuple(chunk.sizes), part.detach()))
    return boxes


# Chunks by mesh, and by placements, shape and this rank's coordinate: most tensors are like others.
_known: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
_MOST_KNOWN = 4096


def _chunks_of(tensor: DTensor) -> Any:
    """The chunks that a DTensor names to those who save it."""
    if type(local_tensor(tensor)) is not torch.Tensor:  # others may name chunks of their own
        return tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    mesh = tensor.device_mesh
    known = _known.setdefault(mesh, {})
    kind = tensor.placements, tensor.shape, tuple(mesh.get_coordinate() or ())
    chunks = known.get(kind)
    if chunks is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        chunks = known[kind] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return chunks


def _index(key: str, chunk: Any) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex(key, chunk.offsets)


def plain(key: str, local: torch.Tensor) -> torch.Tensor:
    """A tensor of this rank's as one of torch's own class, in the same memory.

    Raises:
        ShardConfigValueError: it has no memory that could be written as it is.
    """
    is_own = type(local) is torch.Tensor
    if not is_own and (is_traceable_wrapper_subclass(local) or not has_memory(local)):
        raise ShardConfigValueError(
            f"{key} is a {type(local).__name__}, which has no memory of its own; checkpoints hold plain tensors: put "
            "what it is made of into the state"
        )
    if name_of(local.dtype) not in DTYPES:
        raise ShardConfigValueError(
            f"{key} has dtype {name_of(local.dtype)}, which checkpoints do not know; convert it, or save its "
            "`view(torch.uint8)`"
        )
    if local.device.type == "meta":
        raise ShardConfigValueError(
            f"{key} is on the meta device and has no values; materialise the model first (module.to_empty)"
        )
    if local.layout != torch.strided or local.is_quantized:
        raise ShardConfigValueError(
            f"{key} is {'quantized' if local.is_quantized else 'sparse'}: checkpoints hold dense tensors; "
            "dequantize it, or leave it out of the state"
        )
    return local.detach() if is_own else local.detach().as_subclass(torch.Tensor)


def writes(tensor: torch.Tensor, turn: int, rank: int, holders: list[int]) -> bool:
    """Whether this rank is the one that writes its boxes of a tensor which others may hold as well.

    Args:
        tensor: the tensor.
        turn: its place among all, by which the writing is spread over those who hold the same.
        rank: of this process among those that save.
        holders: the ranks whose state has the tensor's key.
    """
    if not isinstance(tensor, DTensor):
        return holders[turn % len(holders)] == rank
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        coordinate[dim] == turn % mesh.size(dim)
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )
