"""Compute which boxes of a tensor this rank holds, and which of the ranks that hold the same box writes it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..._torch.core import has_memory, inner_values
from ..._torch.distributed import local_tensor
from ...errors import ShardConfigValueError
from .manifest import DTYPES, name_of


class Box(NamedTuple):
    """A rectangular part of a tensor: its offsets, its shape, and this rank's memory for it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    local: torch.Tensor


def boxes_of(key: str, tensor: torch.Tensor) -> list[Box]:
    """The parts of a tensor that this rank holds; the whole tensor if it is not a DTensor. Empty parts are omitted.

    Raises:
        ShardConfigValueError: the tensor's memory cannot be written as it is.
    """
    if not isinstance(tensor, DTensor):
        whole = plain(key, tensor)
        return [Box((0,) * whole.dim(), tuple(whole.shape), whole)] if whole.numel() else []
    if any(placement.is_partial() for placement in tensor.placements):
        raise ShardConfigValueError(
            f"{key} has a Partial placement: its sum over ranks is pending; call redistribute() first"
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


# Chunks by mesh, and by placements, shape and this rank's coordinate. Cached, because many tensors have equal ones.
_known: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
_MOST_KNOWN = 4096


def _chunks_of(tensor: DTensor) -> Any:
    """The chunks of a DTensor on this rank, from its `__create_chunk_list__`."""
    if type(local_tensor(tensor)) is not torch.Tensor:  # a subclass may define its own chunks, so do not cache them
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


def _with_memory(local: torch.Tensor) -> torch.Tensor:
    """The tensor inside of a subclass that holds its values; other tensors as they are."""
    values = inner_values(local)
    return local if values is None else values[1]


def plain(key: str, local: torch.Tensor) -> torch.Tensor:
    """A local tensor, or the tensor inside of it that holds its values, as a plain `torch.Tensor` on the same memory.

    Raises:
        ShardConfigValueError: the tensor's memory cannot be written as it is.
    """
    local = _with_memory(local)
    is_own = type(local) is torch.Tensor
    if not is_own and (is_traceable_wrapper_subclass(local) or not has_memory(local)):
        raise ShardConfigValueError(
            f"{key} is a {type(local).__name__}, which has no memory of its own; checkpoints store plain tensors: put "
            "its inner tensors into the state"
        )
    if name_of(local.dtype) not in DTYPES:
        raise ShardConfigValueError(
            f"{key} has dtype {name_of(local.dtype)}, which checkpoints do not support; convert it, or save its "
            "`view(torch.uint8)`"
        )
    if local.device.type == "meta":
        raise ShardConfigValueError(
            f"{key} is on the meta device and has no values; materialize the model first (module.to_empty)"
        )
    if local.layout != torch.strided or local.is_quantized:
        raise ShardConfigValueError(
            f"{key} is {'quantized' if local.is_quantized else 'sparse'}: checkpoints store dense tensors; "
            "dequantize it, or remove it from the state"
        )
    return local.detach() if is_own else local.detach().as_subclass(torch.Tensor)


def writes(tensor: torch.Tensor, turn: int, rank: int, holders: list[int]) -> bool:
    """Whether this rank writes its boxes of a tensor. Other ranks may hold the same boxes.

    Args:
        tensor: the tensor.
        turn: index of the tensor among all tensors. It distributes the writes over the ranks with equal boxes.
        rank: rank of this process among the ranks that save.
        holders: ranks whose state has the tensor's key.
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
