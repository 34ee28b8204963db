"""The parts of a `DeviceMesh` that the runtime needs: the axis that shards and the axis that replicates."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .._policies import OffloadPolicy, keeps_shards_on_host
from .._torch.distributed import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    concatenated_mesh,
    flattened_mesh,
    launched,
    new_mesh,
    store_of_one_process,
    strided_shard,
)
from ..errors import (
    ShardConfigAssertionError,
    ShardConfigStateError,
    ShardConfigTypeError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)


@dataclass(frozen=True, eq=False)
class FullMesh:
    """A mesh with the axes of all types of parallelism, on which the parameters are already DTensors.

    Attributes:
        mesh: the mesh.
        shard, replicate: indices of the axes over which this library shards and replicates.
    """

    mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """The sharding of a parameter group: a 1D mesh shards; axis 0 of a 2D mesh replicates and axis 1 shards (HSDP).

    With `outer_sharding` (HFSDP), axis 0 shards as well: each rank's piece along axis 1, the *node's piece*, is split
    over axis 0. The stored parameters, their gradients and the optimizer state are then sharded over all ranks.

    Attributes:
        mesh: the data-parallel mesh. It is also the mesh of the sharded DTensors if the parameters were plain tensors.
        device: the device on which this rank computes.
        shard_size, shard_rank, shard_group: size of the shard axis, this rank's index in it, and its process group
            (1, 0 and None if there is no such axis).
        replicate_size, replicate_group: size and process group of the replicate axis (1 and None if there is none).
        home: the device of the shards and their gradients: `device`, or the CPU if they are offloaded.
        pins: whether offloaded shards are in pinned memory, so that copies do not block.
        full: the mesh of all types of parallelism, if `dp_mesh_dims` names the data-parallel axes in it.
        shards_outer: whether the replicate axis shards as well. False if it has only one rank.
        outer_rank: this rank's index in the replicate axis; 0 if there is none.
    """

    mesh: DeviceMesh
    device: torch.device
    shard_size: int
    shard_rank: int
    shard_group: dist.ProcessGroup | None
    replicate_size: int
    replicate_group: dist.ProcessGroup | None
    home: torch.device
    pins: bool = False
    full: FullMesh | None = None
    shards_outer: bool = False
    outer_rank: int = 0

    @property
    def offloads(self) -> bool:
        """Whether shards are stored on a device other than the compute device."""
        return self.home.type != self.device.type

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the placements of DTensors that are sharded along `dim`."""
        if self.shards_outer:  # the inner axis divides first
            return (Shard(dim) if self.shard_size == 1 else strided_shard(dim, self.shard_size), Shard(dim))
        return (Shard(dim),) if self.mesh.ndim == 1 else (Replicate(), Shard(dim))

    @property
    def shards(self) -> int:
        """Number of ranks over which a stored parameter is sharded."""
        return self.size if self.shards_outer else self.shard_size

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis as a mesh."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]

    @property
    def size(self) -> int:
        """Number of ranks over which gradients are averaged: the product of both axes."""
        return self.shard_size * self.replicate_size

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshInfo:
        return self  # process groups cannot be copied

    def __str__(self) -> str:
        shard = f"shard over {self.shard_size}"
        if self.shards_outer:
            return f"{shard}, stored over {self.size}"
        return shard if self.replicate_group is None else f"replicate over {self.replicate_size}, {shard}"


def compute_device(device_type: str) -> torch.device:
    """Return this rank's device of the given type, with its index."""
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def mesh_info(
    mesh: DeviceMesh, offload: OffloadPolicy | None = None, dims: Any = None, outer: bool = False
) -> MeshInfo:
    """Make the `MeshInfo` of a mesh.

    Args:
        mesh: 1D or 2D; any number of axes with `dims`.
        offload: the policy that determines where shards are stored.
        dims: `DataParallelMeshDims`, the names of the data-parallel axes.
        outer: whether the replicate axis shards the stored parameters as well (`outer_sharding`).

    Raises:
        ShardConfigTypeError: `mesh` is not a DeviceMesh, or `dims` is not a DataParallelMeshDims.
        ShardConfigValueError: the mesh does not contain this rank, has more than two axes (without `dims`), lacks an
            axis that `dims` names, or is of a device type that this process does not have; or `dims` names no axis, or
            one axis twice; or `outer` is set and there is no replicate axis.
        ShardConfigUnsupportedError: `outer` is set and `dims` names several axes to replicate over.
        ShardConfigAssertionError: the axes of a 2D mesh have no names.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ShardConfigTypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}; use init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ShardConfigValueError(
            f"mesh: rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on ranks of the mesh"
        )
    if dims is not None:
        info = _info_of_full(_full_mesh(mesh, dims), offload)
        return _sharding_outer(info) if outer else info
    if mesh.ndim not in (1, 2):
        raise ShardConfigValueError(
            f"mesh: fully_shard expects a 1D or 2D DeviceMesh but got {mesh}, of {mesh.ndim} axes; "
            "pass the submesh of the data-parallel axes, for example mesh['dp']; or, if the parameters are DTensors on "
            "the full mesh, name the data-parallel axes with dp_mesh_dims"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardConfigAssertionError(
            "mesh: Please init the 2D mesh for HSDP with mesh_dim_names specified: init_device_mesh(..., "
            f"mesh_dim_names=('replicate', 'shard')); the axes of {mesh} have no names"
        )
    info = _info(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None, offload)
    return _sharding_outer(info) if outer else info


def _sharding_outer(info: MeshInfo) -> MeshInfo:
    """Return the description with a replicate axis that shards the stored parameters as well."""
    if info.replicate_group is None:
        raise ShardConfigValueError(
            f"outer_sharding: needs an outer axis to shard over, but {info.mesh} has none; pass a 2D mesh "
            "(nodes, ranks of a node), for example init_device_mesh(..., mesh_dim_names=('outer', 'inner'))"
        )
    if info.full is not None and len(info.full.replicate) > 1:
        raise ShardConfigUnsupportedError(
            "outer_sharding: dp_mesh_dims names several axes to replicate over; name one, which is then the outer axis"
        )
    return replace(info, shards_outer=info.replicate_size > 1)


def mesh_info_of_torch(given: Any, offload: OffloadPolicy | None, outer: bool = False) -> MeshInfo:
    """Make the `MeshInfo` from torch's own description of a mesh.

    Args:
        given: an FSDPMeshInfo or HSDPMeshInfo.
        offload: the policy that determines where shards are stored.
        outer: as for `mesh_info`, if the mesh has a replicate axis.

    Raises:
        ShardConfigTypeError: `given` is not such a description.
        ShardConfigValueError: its shard axis is not the last one, or its replicate axis not the one before.
    """
    if not isinstance(given, FSDPMeshInfo):
        raise ShardConfigTypeError(f"mesh_info: expected FSDPMeshInfo or HSDPMeshInfo, got {type(given).__name__}")
    dims = getattr(given, "dp_mesh_dims", None)
    if dims is not None:
        assert given.spmd_mesh is not None
        return mesh_info(given.spmd_mesh, offload, dims, outer and bool(dims.replicate))
    mesh = given.mesh
    if given.shard_mesh_dim != mesh.ndim - 1 or mesh.ndim != (1 if given.replicate_mesh_dim is None else 2):
        raise ShardConfigValueError(
            f"mesh_info: expected an FSDPMeshInfo of a 1D mesh or an HSDPMeshInfo of a 2D mesh (replicate, "
            f"shard), got {given}"
        )
    return mesh_info(mesh, offload, None, outer and mesh.ndim == 2)


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _full_mesh(mesh: DeviceMesh, dims: Any) -> FullMesh:
    """Find the axes that `dims` names in a mesh."""
    if not isinstance(dims, DataParallelMeshDims):
        raise ShardConfigTypeError(f"dp_mesh_dims: expected DataParallelMeshDims, got {type(dims).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        raise ShardConfigValueError(
            f"dp_mesh_dims: mesh must have mesh_dim_names when dp_mesh_dims is provided, but {mesh} has none"
        )
    shard, replicate = _as_tuple(dims.shard), _as_tuple(dims.replicate)
    wanted = [*shard, *replicate]
    unknown = [name for name in wanted if name not in names]
    if not wanted:
        raise ShardConfigValueError(
            f"dp_mesh_dims: {dims} names no axis. At least one of shard or replicate must be set in dp_mesh_dims"
        )
    if unknown:
        raise ShardConfigValueError(
            f"dp_mesh_dims: Mesh dim name '{unknown[0]}' not found in mesh.mesh_dim_names {names}"
        )
    if len(set(wanted)) < len(wanted):
        raise ShardConfigValueError(f"dp_mesh_dims: {dims} names an axis twice; an axis either shards or replicates")
    return FullMesh(mesh, tuple(sorted(map(names.index, shard))), tuple(sorted(map(names.index, replicate))))


def _info_of_full(full: FullMesh, offload: OffloadPolicy | None) -> MeshInfo:
    """Describe the data-parallel axes of a full mesh. Several shard axes count as one, as do several replicate axes."""
    names = full.mesh.mesh_dim_names or ()
    axes = [tuple(names[axis] for axis in axes) for axes in (full.replicate, full.shard) if axes]
    parts = [flattened_mesh(full.mesh, axis) for axis in axes]
    mesh = parts[0] if len(parts) == 1 else concatenated_mesh(parts)
    return _info(mesh, mesh.ndim - 1 if full.shard else None, 0 if full.replicate else None, offload, full)


def _info(
    mesh: DeviceMesh,
    shard_axis: int | None,
    replicate_axis: int | None,
    offload: OffloadPolicy | None,
    full: FullMesh | None = None,
) -> MeshInfo:
    try:
        device = compute_device(mesh.device_type)
    except (AssertionError, RuntimeError) as error:  # torch raises these if there is no such device
        raise ShardConfigValueError(
            f"mesh: {mesh} is of device type {mesh.device_type}, which this process does not have ({error}); "
            "build the mesh (init_device_mesh) for the device type on which the model computes"
        ) from error
    home, pins = device, False
    if keeps_shards_on_host(offload) and device.type not in ("cpu", "meta"):
        home, pins = torch.device("cpu"), bool(getattr(offload, "pin_memory", True))
    shard_size, shard_rank, shard_group = _axis(mesh, shard_axis)
    replicate_size, outer_rank, replicate_group = _axis(mesh, replicate_axis)
    return MeshInfo(
        mesh,
        device,
        shard_size,
        shard_rank,
        shard_group,
        replicate_size,
        replicate_group,
        home,
        pins,
        full,
        outer_rank=outer_rank,
    )


def _axis(mesh: DeviceMesh, axis: int | None) -> tuple[int, int, dist.ProcessGroup | None]:
    """Return the size of a mesh axis, this rank's index in it, and its process group."""
    return (1, 0, None) if axis is None else (mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis))


def accelerator() -> torch.device | None:
    """Return this machine's accelerator, without an index; None if it has none that supports collectives.

    The availability check is needed because a build of torch for an accelerator names its type also on machines that
    have none. On a Mac torch names ``mps``, but has no collectives for its tensors.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type == "mps" else device


def default_device_type() -> str:
    """Return the device type of this machine's accelerator, or ``cpu``."""
    device = accelerator()
    return device.type if device is not None else "cpu"


def ensure_process_group() -> None:
    """Initialize the default process group if needed: from the launcher's environment, or with a world size of one.

    Raises:
        ShardConfigStateError: this build of torch has no `torch.distributed`.
    """
    if not dist.is_available():
        raise ShardConfigStateError("this build of torch lacks torch.distributed; install one that has it")
    if dist.is_initialized():
        return
    if launched():
        dist.init_process_group()
    else:
        backend = dist.get_default_backend_for_device(default_device_type())
        dist.init_process_group(backend, store=store_of_one_process(), rank=0, world_size=1)


def default_mesh() -> DeviceMesh:
    """Make a 1D mesh over the default process group (initialized if needed), on the accelerator if there is one.

    As in torch's FSDP2, the axis has no name. So the mesh equals the unnamed mesh that a user makes over all ranks.
    Also, PEFT treats parameters on an axis with a name other than ``fsdp`` as tensor-parallel.
    """
    ensure_process_group()
    return new_mesh(default_device_type(), (dist.get_world_size(),))


def replicated_mesh(replicas: int) -> DeviceMesh:
    """Make a 2D mesh over the default process group, `replicas` x (world size / `replicas`).

    Raises:
        ShardConfigValueError: `replicas` does not divide the world size.
    """
    ensure_process_group()
    world = dist.get_world_size()
    if not isinstance(replicas, int) or replicas < 1 or world % replicas:
        raise ShardConfigValueError(f"replicas: {replicas!r} does not divide the world size {world}")
    shape = (replicas, world // replicas)
    return new_mesh(default_device_type(), shape, ("replicate", "shard"))


_FEW: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


def small_mesh(info: MeshInfo, size: int) -> MeshInfo:
    """Make a 2D mesh in which every `size` adjacent ranks of the shard axis share one copy of the parameters.

    This is a collective over the world.
    """
    world = dist.group.WORLD
    assert world is not None
    made = _FEW.setdefault(world, {})  # keyed by world: after a new initialization, meshes of the old one compare equal
    key = size, info.mesh.device_type, str(info.mesh.mesh.tolist())
    if key not in made:
        made[key] = _few_ranks(info.mesh, size)
    return replace(mesh_info(made[key]), home=info.device, pins=False)


def _few_ranks(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Make the 2D mesh of `small_mesh`, with process groups for its columns and rows.

    Ranks may have different meshes, for example with tensor parallelism. So each rank gathers the meshes of all
    others, and all ranks of the world make all process groups in the same order. If each rank made only its own, torch
    would match them by the number of process groups that each rank has made before, and the ranks would hang if these
    numbers differ.
    """
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, (size, mesh.mesh.flatten().tolist()))
    own: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for few, ranks in dict.fromkeys((few, tuple(ranks)) for few, ranks in everybodys):
        rows = torch.tensor(ranks).view(-1, few)
        for members in (*rows.T.tolist(), *rows.tolist()):
            own[tuple(members)] = dist.new_group(members, group_desc="composable_shard_few")
    rows = mesh.mesh.reshape(-1, size)
    row, column = (rows == dist.get_rank()).nonzero()[0].tolist()
    groups = [own[tuple(rows[:, column].tolist())], own[tuple(rows[row].tolist())]]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=rows, mesh_dim_names=("copies", "few"))
