"""Compute the box of a tensor that each rank holds, and the process group over which the tensor is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from .._comm.agreement import is_shared
from .._comm.mesh import compute_device
from .._comm.own_groups import own_group
from .._comm.shardings import sharding_of
from .._faults.ledger import Ledger
from .._faults.watch import ledger_of
from .._plan.boxes import Box, chunks_of, whole_box
from .._plan.transfers import sender
from .._torch.distributed import flattened_mesh, is_native
from ..errors import ShardConfigUnsupportedError

Placed = Sequence[Any]  # a placement for each axis of a mesh


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor is sharded over ranks.

    Attributes:
        device: compute device of this rank.
        group: this library's process group over which the tensor is sharded. None if each rank holds the full tensor.
        rank: this rank's index in the group.
        boxes: box that each rank of the group holds.
        mesh, placements: mesh and placements of a DTensor with this layout. The mesh is None for a plain tensor.
        ledgers: ledger of the group. Empty if the group has no other process.
    """

    device: torch.device
    group: dist.ProcessGroup | None
    rank: int
    boxes: tuple[Box, ...]
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]
    ledgers: tuple[Ledger, ...] = ()

    @property
    def own(self) -> Box:
        """The box that this rank holds."""
        return self.boxes[self.rank]

    def by_first_dim(self, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor of another shape, whose first dim is sharded over the mesh's first sharding axis."""
        if self.mesh is None:
            return Layout(self.device, None, 0, (whole_box(shape),), None, ())
        cuts = [axis for axis, placed in enumerate(self.placements) if not isinstance(placed, Replicate)]
        placements = tuple(Shard(0) if axis in cuts[:1] else Replicate() for axis in range(self.mesh.ndim))
        boxes = _boxes(shape, self.mesh, placements, self.group)
        return replace(self, boxes=boxes, placements=placements)

    def in_chunks(self, shape: tuple[int, ...]) -> Layout:
        """The layout of a tensor of another shape: its first dim is split evenly over all ranks of the group."""
        boxes = chunks_of(whole_box(shape), len(self.boxes))
        return replace(self, boxes=boxes, mesh=None, placements=())


def most_bytes(param: torch.Tensor) -> int:
    """Bytes of the largest shard of a parameter on any rank."""
    if not isinstance(param, DTensor):
        return param.nbytes
    sharding = sharding_of(param.device_mesh, param.placements, param.ndim)
    first = sharding.regions_at(param.shape, [0] * param.device_mesh.ndim)
    return sum(region.box.numel for region in first) * param.dtype.itemsize


def layout_of(name: str, param: torch.Tensor) -> Layout:
    """The layout of a parameter. A collective over the world if several axes of its mesh shard it.

    Raises:
        ShardConfigUnsupportedError: a placement is neither a sharding nor a replication, several axes of a mesh
            without names shard the parameter, or a rank holds several separate parts of it.
    """
    if not isinstance(param, DTensor):
        return Layout(param.device, None, 0, (whole_box(param.shape),), None, ())
    mesh, placements = param.device_mesh, tuple(param.placements)
    device = compute_device(mesh.device_type)
    for placed in placements:
        if not (isinstance(placed, Replicate) or hasattr(placed, "dim")):
            raise ShardConfigUnsupportedError(
                f"parameter {name}: is placed as {placements} on {mesh}; full tensors can only be assembled from "
                "sharded or replicated parameters"
            )
    group = _group_of(name, mesh, placements, device)
    rank = 0 if group is None else group.rank()
    try:
        boxes = _boxes(tuple(param.shape), mesh, placements, group)
    except ShardConfigUnsupportedError as error:
        raise ShardConfigUnsupportedError(f"parameter {name}: {error}") from None
    return Layout(device, group, rank, boxes, mesh, placements, _ledgers(group, device))


def _ledgers(group: dist.ProcessGroup | None, device: torch.device) -> tuple[Ledger, ...]:
    """The ledger of a process group of this library; empty for one rank, a simulated world, or a Python-only group."""
    if group is None or not is_native(group) or not is_shared(group, device):
        return ()
    return (ledger_of(group, device),)


def _group_of(name: str, mesh: DeviceMesh, placements: Placed, device: torch.device) -> dist.ProcessGroup | None:
    """The process group over which a tensor is sharded: the ranks along all axes that shard it."""
    cuts = [axis for axis, placed in enumerate(placements) if not isinstance(placed, Replicate)]
    cuts = [axis for axis in cuts if mesh.size(axis) > 1]
    if not cuts:
        return None
    if len(cuts) == 1:
        return own_group(mesh.get_group(cuts[0]), device)
    if mesh.mesh_dim_names is None:
        raise ShardConfigUnsupportedError(
            f"parameter {name}: is sharded over {len(cuts)} axes of {mesh}, which have no names; name them "
            "(init_device_mesh with mesh_dim_names)"
        )
    names = tuple(mesh.mesh_dim_names[axis] for axis in cuts)
    return own_group(flattened_mesh(mesh, names).get_group(), device)


def _boxes(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Placed, group: dist.ProcessGroup | None
) -> tuple[Box, ...]:
    """The box that each rank of the group holds.

    Raises:
        ShardConfigUnsupportedError: a rank holds several separate parts.
    """
    if group is None:
        return (whole_box(shape),)
    sharding = sharding_of(mesh, placements, len(shape))
    places = [sharding.ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
    regions = [sharding.regions_at(shape, sharding.coordinate_of(place)) for place in places]
    if any(len(each) > 1 for each in regions):
        raise ShardConfigUnsupportedError(
            f"is placed as {placements} on {mesh}, so that each rank holds {len(regions[0])} separate parts of it; "
            "shard fused projections so that each rank holds one"
        )
    return tuple(box for [(box, _)] in regions)


@dataclass(frozen=True, eq=False)
class Route:
    """The transfers of a matrix between its owner and the ranks that hold parts of it.

    Attributes:
        layout: layout of the tensor that contains the matrix.
        region: box of the matrix in this tensor.
        shape: shape of the matrix: that of the region without its leading dims of size 1.
        owner: rank of the owner in the layout's group.
        parts: part of the matrix on each rank, as a box in the tensor. None for ranks without a part.
    """

    layout: Layout
    region: Box
    shape: tuple[int, ...]
    owner: int
    parts: tuple[Box | None, ...]

    @classmethod
    def of(cls, layout: Layout, region: Box, shape: tuple[int, ...], owner: int) -> Route:
        """The route of a region of a tensor."""
        return cls(layout, region, shape, owner, tuple(region.common(box) for box in layout.boxes))

    def to(self, owner: int) -> Route:
        """The same route with another owner."""
        return Route(self.layout, self.region, self.shape, owner, self.parts)

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        return self.layout.rank == self.owner

    @property
    def own(self) -> Box | None:
        """The part on this rank; None if it has none."""
        return self.parts[self.layout.rank]

    @property
    def stays_at(self) -> int | None:
        """The rank that holds the full matrix, if it is the only rank with a part of it; None otherwise."""
        ranks = [rank for rank, part in enumerate(self.parts) if part is not None]
        return ranks[0] if len(ranks) == 1 and self.parts[ranks[0]] == self.region else None

    def holders(self) -> list[tuple[int, Box]]:
        """The ranks that hold a part, and their parts."""
        return [(rank, part) for rank, part in enumerate(self.parts) if part is not None]

    @cached_property
    def senders(self) -> list[tuple[int, Box]]:
        """One holder for each distinct part."""
        by_part: dict[Box, list[int]] = {}
        for rank, part in self.holders():
            by_part.setdefault(part, []).append(rank)
        return [(sender(ranks, self.owner), part) for part, ranks in by_part.items()]

    @property
    def sends(self) -> bool:
        """Whether this rank is among the senders."""
        return (self.layout.rank, self.own) in self.senders

    def in_shard(self, local: torch.Tensor) -> torch.Tensor | None:
        """This rank's part as a view of its shard of the tensor; None if it has none."""
        return None if self.own is None else local[self.own.slices(self.layout.own)]

    def part_of(self, whole: torch.Tensor | None, part: Box) -> torch.Tensor:
        """A part as a view of the full matrix."""
        assert whole is not None
        return whole.view(self.region.shape)[part.slices(self.region)]
