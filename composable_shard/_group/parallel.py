"""Parameters that are DTensors already: on the mesh of another parallelism (tensor or expert parallel), or on a mesh of
all kinds of parallelism, where they are replicated over our axes (`dp_mesh_dims`).

Their local tensors are sharded over the data-parallel mesh. What users see as the sharded parameter is a DTensor on
both meshes, or on the full one; in forward they find the DTensor that they had.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .._comm.mesh import FullMesh, MeshInfo
from .._errors import ShardConfigValueError
from .._torch.distributed import concatenated_mesh, strided_shard


@dataclass(frozen=True, eq=False)
class Parallel:
    """How a parameter was placed before it was sharded.

    Attributes:
        mesh, placements: those of the DTensor: the other parallelism's, or of the full mesh.
        shape, stride: of the whole DTensor.
        full: the full mesh and our axes of it, if the DTensor is on one.
        wrapper: on a full mesh, makes the DTensor from its local tensor, with a gradient that flows through.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    full: FullMesh | None = None
    wrapper: Callable[[torch.Tensor], DTensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        return self  # process groups cannot be copied

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The unsharded parameter as the DTensor that it was, from its local tensor; gradients flow through."""
        return self._from(local) if self.wrapper is None or not torch.is_grad_enabled() else self.wrapper(local)

    def _from(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's local tensor, out of a value of the whole parameter that all ranks have."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the local tensor, from a gradient of the DTensor.

        Over the data-parallel axes its placement stays (partial, as a rule): the reduction to come will sum it up.
        """
        if not isinstance(gradient, DTensor):
            return gradient
        wanted = list(self.placements)
        for axis in (*self.full.shard, *self.full.replicate) if self.full is not None else ():
            wanted[axis] = gradient.placements[axis]
        return gradient.redistribute(placements=wanted).to_local()

    def placed(self, info: MeshInfo, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of the sharded parameter, cut along `dim` over the data-parallel ranks."""
        if self.full is not None:
            return self._placed_in_full(self.full, info, dim)
        own = info.placements(dim)
        return concatenated_mesh([info.mesh, self.mesh]), (*own[:-1], self._cut(dim, 0), *self.placements)

    def _cut(self, dim: int, first: int) -> Placement:
        """The placement of an axis that cuts `dim` of pieces that the mesh axes from `first` on have already cut."""
        factor = 1
        for axis, placement in enumerate(self.placements):
            if axis >= first and isinstance(placement, Shard) and placement.dim % len(self.shape) == dim:
                factor *= self.mesh.size(axis)
        return Shard(dim) if factor == 1 else strided_shard(dim, factor)

    def _placed_in_full(self, full: FullMesh, info: MeshInfo, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """`placed` on a full mesh, which has our axes: several shard axes become one, behind the replicate axes."""
        placements = list(self.placements)
        for axis in full.shard:
            placements[axis] = self._cut(dim, axis + 1)
        if len(full.shard) < 2:
            return full.mesh, tuple(placements)
        names, first = full.mesh.mesh_dim_names, full.shard[0]
        assert names is not None
        meshes: list[DeviceMesh] = []
        combined: list[Placement] = []
        for axis, placement in enumerate(placements):
            if axis == first:
                meshes.append(info.mesh)
                combined += [Replicate()] * (info.mesh.ndim - 1) + [placement]
            elif axis not in full.shard and axis not in full.replicate:
                meshes.append(full.mesh[names[axis]])
                combined.append(placement)
        return meshes[0] if len(meshes) == 1 else concatenated_mesh(meshes), tuple(combined)


class _Wrap(torch.autograd.Function):
    """Local tensor of a parameter on a full mesh -> the parameter as a DTensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, parallel: Parallel) -> DTensor:
        ctx.parallel = parallel
        return parallel._from(local.view(local.shape))  # not `detach`, which partitioners save

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.parallel.local_gradient(gradient), None


@functools.lru_cache(maxsize=256)  # one wrapper for all parameters placed alike: equal layers share compiled code
def _wrapper(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    ours: tuple[tuple[int, ...], ...],
    groups: tuple[weakref.ref[dist.ProcessGroup], ...],  # a mesh of an earlier world is equal, and its groups are gone
) -> Callable[[torch.Tensor], DTensor]:
    parallel = Parallel(mesh, placements, shape, stride, FullMesh(mesh, *ours))

    def wrap(local: torch.Tensor) -> DTensor:
        wrapped: DTensor = _Wrap.apply(local, parallel)  # type: ignore[no-untyped-call]
        return wrapped

    # Dynamo must not trace into it: how a gradient is placed is known only when AOTAutograd makes the backward graph.
    allowed: Callable[[torch.Tensor], DTensor] = torch.compiler.allow_in_graph(wrap)  # type: ignore[no-untyped-call]
    return allowed


def _in_full(name: str, param: torch.Tensor, full: FullMesh) -> Parallel:
    """How a parameter is placed on the full mesh."""
    if not isinstance(param, DTensor) or param.device_mesh != full.mesh:
        given = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "a plain tensor"
        raise ShardConfigValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh. Expected param's "
            f"DTensor mesh to be the same mesh passed to fully_shard, {full.mesh}, but got {given} for parameter "
            f"'{name.rpartition('.')[2]}' ({name}); distribute it (distribute_tensor, distribute_module), or pass the "
            "data-parallel submesh without dp_mesh_dims"
        )
    for axis in (*full.shard, *full.replicate):
        if not isinstance(param.placements[axis], Replicate):
            names, role = full.mesh.mesh_dim_names, "shard" if axis in full.shard else "replicate"
            raise ShardConfigValueError(
                f"parameter {name}: Expected Replicate() on DP {role} dim '{names[axis] if names else axis}' (index "
                f"{axis}) but got {param.placements[axis]}; dp_mesh_dims names that axis, so it is ours to use"
            )
    placed = param.device_mesh, tuple(param.placements), param.shape, param.stride()
    groups = tuple(map(weakref.ref, param.device_mesh.get_all_groups()))
    return Parallel(*placed, full, _wrapper(*placed, (full.shard, full.replicate), groups))


def parallel_of(name: str, param: torch.Tensor, info: MeshInfo) -> Parallel | None:
    """How a parameter is placed already; None if it is a plain tensor.

    Raises:
        ShardConfigValueError: its mesh cannot be combined with the data-parallel one; or `dp_mesh_dims` was given, and
            it is no DTensor on that mesh, replicated over the data-parallel axes.
    """
    if info.full is not None:
        return _in_full(name, param, info.full)
    if not isinstance(param, DTensor):
        return None
    parallel = Parallel(param.device_mesh, tuple(param.placements), param.shape, param.stride())
    where = f"parameter {name}: is a DTensor on {param.device_mesh}"
    if param.device_mesh.device_type != info.mesh.device_type:
        raise ShardConfigValueError(
            f"{where}, of another device type than {info.mesh}. Requires DTensor to have mesh of the same type as the "
            f"FSDP mesh but got {param.device_mesh.device_type} for DTensor and {info.mesh.device_type} for FSDP; "
            "build both from one mesh"
        )
    names = set(info.mesh.mesh_dim_names or ()), set(param.device_mesh.mesh_dim_names or ())
    if not all(names) or names[0] & names[1]:
        raise ShardConfigValueError(
            f"{where}, and shall be sharded on {info.mesh}: their axes need names, all different; build one mesh "
            "(init_device_mesh with mesh_dim_names) and give each parallelism its submesh, for example mesh['dp']"
        )
    try:
        parallel.placed(info, 0)
    except (RuntimeError, ValueError) as error:
        raise ShardConfigValueError(
            f"{where}, which cannot be combined with {info.mesh}: they must be submeshes of one mesh ({error})"
        ) from error
    return parallel
