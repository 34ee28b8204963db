"""Read from a DTensor's mesh and placements which part of it each rank holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from .._plan.boxes import Box, Region, Sharding, Split, local_shape, whole_box
from .._torch.distributed import local_tensor, own_offsets, ranks_of
from ..errors import ShardConfigUnsupportedError, ShardConfigValueError

# By mesh, placements and number of dims. Cached, because many tensors have equal ones. Equal meshes may share an entry.
_known: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[Any, int], Sharding]] = weakref.WeakKeyDictionary()


def sharding_of(mesh: DeviceMesh, placements: Sequence[Any], ndim: int) -> Sharding:
    """How placements shard a tensor of `ndim` dims. No placement may be `Partial`.

    Raises:
        ShardConfigUnsupportedError: the ranks of the mesh do not ascend along each dim.
    """
    known = _known.setdefault(mesh, {})
    kind = tuple(placements), ndim
    if kind not in known:
        splits = tuple(None if isinstance(placed, Replicate) else _split(placed, ndim) for placed in placements)
        ranks = ranks_of(mesh)
        _check_order(np.array(ranks).reshape(tuple(mesh.shape)))
        known[kind] = Sharding(tuple(mesh.shape), tuple(ranks), splits)
    return known[kind]


def _check_order(ranks: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Check that the position of a rank in a mesh is its position in the process group of each dim.

    Torch sorts the ranks of process groups. Shards follow the groups, but torch's offsets follow the mesh.

    Raises:
        ShardConfigUnsupportedError: the positions may differ.
    """
    if any((np.diff(ranks, axis=dim) < 0).any() for dim in range(ranks.ndim)):
        raise ShardConfigUnsupportedError(
            f"mesh: its ranks {ranks.tolist()} do not ascend along each dim, so it is uncertain which rank holds "
            "which part of a tensor; make it with ascending ranks, as init_device_mesh does"
        )


def _split(placed: Any, ndim: int) -> Split:
    return Split(placed.dim % max(ndim, 1), getattr(placed, "rows", 1), getattr(placed, "split_factor", 1))


def holders_of_own(tensor: DTensor) -> list[int]:
    """The ranks of a DTensor's mesh that hold the same part as this rank, itself included."""
    mesh = tensor.device_mesh
    sharding = sharding_of(mesh, tensor.placements, tensor.ndim)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return sharding.alike(coordinate)


def own_regions(tensor: torch.Tensor) -> tuple[Region, ...]:
    """The parts of a tensor that this rank holds; the whole tensor if it is not a DTensor.

    Empty if this rank is not in the tensor's mesh.

    Raises:
        ShardConfigValueError: the local tensor has another shape than its placements mean.
    """
    if not isinstance(tensor, DTensor):
        return (Region(whole_box(tensor.shape), (0,) * tensor.ndim),)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    local = tuple(local_tensor(tensor).shape)
    regions = sharding_of(tensor.device_mesh, tensor.placements, tensor.ndim).regions_at(tensor.shape, coordinate)
    if local_shape(regions) == local:
        return regions
    # With equal placements, `distribute_tensor` splits a tensor that no axis divides in another order than
    # `fully_shard` does after tensor parallelism.
    other = Box(*own_offsets(tensor))
    if other.shape == local:
        return (Region(other, (0,) * tensor.ndim),)
    raise ShardConfigValueError(
        f"a local tensor has the shape {local}, but {tensor.placements} of {tuple(tensor.shape)} on "
        f"{tensor.device_mesh} mean {local_shape(regions)} on this rank; make it with distribute_tensor or fully_shard"
    )
