"""Compute which boxes of a tensor this rank holds, and which of the ranks that hold the same box writes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..._comm.shardings import holders_of_own, own_regions
from ..._plan.boxes import Box, whole_box
from ..._plan.transfers import sender
from ..._torch.core import has_memory, inner_values
from ..._torch.distributed import local_part, local_tensor
from ...errors import ShardConfigValueError
from .manifest import DTYPES, name_of


class Part(NamedTuple):
    """A box of a tensor, and this rank's memory for it."""

    box: Box
    local: torch.Tensor


def parts_of(key: str, tensor: torch.Tensor) -> list[Part]:
    """The parts of a tensor that this rank holds; the whole tensor if it is not a DTensor. Empty parts are omitted.

    Raises:
        ShardConfigValueError: the tensor's memory cannot be written as it is, or its local shape does not match its
            placements.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ShardConfigValueError(
            f"{key} has a Partial placement: its sum over ranks is pending; call redistribute() first"
        )
    local = plain(key, local_part(tensor))
    if not local.numel():
        return []
    if isinstance(tensor, DTensor) and type(local_tensor(tensor)) not in (torch.Tensor, nn.Parameter):
        return _own_chunks(key, tensor, local)  # a subclass may define its own
    return _parts_by_placements(key, tensor, local)


def _parts_by_placements(key: str, tensor: torch.Tensor, local: torch.Tensor) -> list[Part]:
    try:
        regions = own_regions(tensor)
    except ShardConfigValueError as error:
        raise ShardConfigValueError(f"{key}: {error}") from None
    if len(regions) == 1:
        return [Part(regions[0].box, local)]
    whole = whole_box(local.shape)
    return [Part(box, local[Box(at, box.shape).slices(whole)]) for box, at in regions if box.numel]


def _own_chunks(key: str, tensor: DTensor, local: torch.Tensor) -> list[Part]:
    """The parts of a DTensor, by its `__create_chunk_list__`."""
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) == 1:
        return [Part(Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)), local)]
    return [
        Part(
            Box(tuple(chunk.offsets), tuple(chunk.sizes)),
            tensor.__get_tensor_shard__(_index(key, chunk)).detach(),  # type: ignore[no-untyped-call]
        )
        for chunk in chunks
    ]


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
        return sender(holders, turn) == rank
    if tensor.device_mesh.get_coordinate() is None:
        return False
    return sender(holders_of_own(tensor), turn) == dist.get_rank()
