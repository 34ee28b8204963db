"""Parameters that are DTensors already, on the mesh of another parallelism (tensor or expert parallel).

Their local tensors are sharded over the data-parallel mesh. What users see as the sharded parameter is a DTensor on
both meshes; in forward they find the DTensor that they had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ._errors import ShardConfigValueError
from ._mesh import MeshInfo
from ._torch_distributed import concatenated_mesh, strided_shard


@dataclass(frozen=True, eq=False)
class Parallel:
    """How a parameter was placed before it was sharded.

    Attributes:
        mesh, placements: the other parallelism's.
        shape, stride: of the whole parameter.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        return self  # process groups have no copies

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The unsharded parameter as the DTensor that it was, of its local tensor; gradients flow through."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of the local tensor, of a gradient of the DTensor."""
        if not isinstance(gradient, DTensor):
            return gradient
        return gradient.redistribute(placements=self.placements).to_local()

    def placed(self, info: MeshInfo, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Mesh and placements of the sharded parameter, cut along `dim` over the data-parallel ranks."""
        factor = 1
        for size, placement in zip(self.mesh.shape, self.placements, strict=True):
            if isinstance(placement, Shard) and placement.dim % len(self.shape) == dim:
                factor *= size
        own = info.placements(dim)
        cut = own[-1] if factor == 1 else strided_shard(dim, factor)
        return concatenated_mesh([info.mesh, self.mesh]), (*own[:-1], cut, *self.placements)


def parallel_of(name: str, param: torch.Tensor, info: MeshInfo) -> Parallel | None:
    """How a parameter is placed already; None if it is a plain tensor.

    Raises:
        ShardConfigValueError: its mesh cannot be combined with the data-parallel one.
    """
    if not isinstance(param, DTensor):
        return None
    found = Parallel(param.device_mesh, tuple(param.placements), param.shape, param.stride())
    where = f"parameter {name}: is a DTensor on {param.device_mesh}"
    if param.device_mesh.device_type != info.mesh.device_type:
        raise ShardConfigValueError(f"{where}, of another device type than {info.mesh}; build both from one mesh")
    names = set(info.mesh.mesh_dim_names or ()), set(param.device_mesh.mesh_dim_names or ())
    if not all(names) or names[0] & names[1]:
        raise ShardConfigValueError(
            f"{where}, and shall be sharded on {info.mesh}: their axes need names, all different; build one mesh "
            "(init_device_mesh with mesh_dim_names) and give each parallelism its submesh, for example mesh['dp']"
        )
    try:
        found.placed(info, 0)
    except (RuntimeError, ValueError) as error:
        raise ShardConfigValueError(
            f"{where}, which cannot be combined with {info.mesh}: they must be submeshes of one mesh ({error})"
        ) from error
    return found
