"""A `DeviceMesh` as the runtime needs it: which axis shards, which axis replicates."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .._errors import ShardConfigAssertionError, ShardConfigStateError, ShardConfigTypeError, ShardConfigValueError
from .._policies import CPUOffloadPolicy, OffloadPolicy
from .._torch.distributed import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    concatenated_mesh,
    flattened_mesh,
    launched,
    store_of_one_process,
)


@dataclass(frozen=True, eq=False)
class FullMesh:
    """A mesh of all kinds of parallelism, on which parameters are DTensors already.

    Attributes:
        mesh: the mesh.
        shard, replicate: its axes that this library shards over and replicates over, by number.
    """

    mesh: DeviceMesh
    shard: tuple[int, ...]
    replicate: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """The sharding of a group: a 1D mesh shards; of a 2D mesh axis 0 replicates and axis 1 shards (HSDP).

    Attributes:
        mesh: the mesh of data parallelism, on which the sharded DTensors live if the parameters were plain tensors.
        device: where this rank computes.
        shard_size, shard_rank, shard_group: size of, this rank's place in, and process group of the shard axis (1, 0
            and None if there is none).
        replicate_size, replicate_group: the same of the replicate axis (1 and None on a 1D mesh).
        home: where the shards and their gradients are kept: `device`, or the CPU if they are offloaded.
        pins: whether memory on the CPU is pinned, for copies that do not block.
        full: the mesh of all kinds of parallelism, if `dp_mesh_dims` has named our axes of it.
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

    @property
    def offloads(self) -> bool:
        """Whether shards are kept on another device than that of the computation."""
        return self.home.type != self.device.type

    def placements(self, dim: int = 0) -> tuple[Placement, ...]:
        """Placements of DTensors that are sharded along `dim`."""
        return (Shard(dim),) if self.mesh.ndim == 1 else (Replicate(), Shard(dim))

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis as a mesh."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]

    @property
    def size(self) -> int:
        """Number of ranks that share the work: gradients are averaged over so many."""
        return self.shard_size * self.replicate_size

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshInfo:
        return self  # process groups have no copies

    def __str__(self) -> str:
        shard = f"shard over {self.shard_size}"
        return shard if self.replicate_group is None else f"replicate over {self.replicate_size}, {shard}"


def compute_device(device_type: str) -> torch.device:
    """This rank's device of the given type, with its index."""
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def mesh_info(mesh: DeviceMesh, offload: OffloadPolicy | None = None, dims: Any = None) -> MeshInfo:
    """Read a mesh, and where its shards shall be kept.

    Args:
        mesh: 1D or 2D; of any number of axes with `dims`.
        offload: the policy.
        dims: `DataParallelMeshDims`, the names of the axes that are ours.

    Raises:
        ShardConfigTypeError: `mesh` is no DeviceMesh, or `dims` of another type.
        ShardConfigValueError: it has more than two axes, two without names, or does not contain this rank; or it lacks
            an axis that `dims` names, or `dims` names one twice.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ShardConfigTypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}; use init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ShardConfigValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}; shard on the ranks it names")
    if dims is not None:
        return _info_of_dims(mesh, dims, offload)
    if mesh.ndim not in (1, 2):
        raise ShardConfigValueError(
            f"mesh: fully_shard expects a 1D or 2D DeviceMesh but got {mesh}, of {mesh.ndim} axes; "
            "pass the submesh of the data-parallel axes, for example mesh['dp']; or, if the parameters are DTensors on "
            "all of it, name these axes by dp_mesh_dims"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardConfigAssertionError(
            "mesh: Please init the 2D mesh for HSDP with mesh_dim_names specified: init_device_mesh(..., "
            f"mesh_dim_names=('replicate', 'shard')); the axes of {mesh} have no names"
        )
    return _read(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None, offload)


def mesh_info_of_torch(theirs: Any, offload: OffloadPolicy | None) -> MeshInfo:
    """Read torch's own description of a mesh.

    Raises:
        ShardConfigTypeError: it is none.
        ShardConfigValueError: other axes than the last one shard, or than the one before it replicate.
    """
    if not isinstance(theirs, FSDPMeshInfo):
        raise ShardConfigTypeError(f"mesh_info: expected FSDPMeshInfo or HSDPMeshInfo, got {type(theirs).__name__}")
    dims = getattr(theirs, "dp_mesh_dims", None)
    if dims is not None:
        assert theirs.spmd_mesh is not None
        return mesh_info(theirs.spmd_mesh, offload, dims)
    mesh = theirs.mesh
    replicates = theirs.replicate_mesh_dim
    if theirs.shard_mesh_dim != mesh.ndim - 1 or mesh.ndim != (1 if replicates is None else 2):
        raise ShardConfigValueError(
            f"mesh_info: FSDPMeshInfo of a 1D mesh, or HSDPMeshInfo of a 2D mesh (replicate, shard), got {theirs}"
        )
    return mesh_info(mesh, offload)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _info_of_dims(mesh: DeviceMesh, dims: Any, offload: OffloadPolicy | None) -> MeshInfo:
    if not isinstance(dims, DataParallelMeshDims):
        raise ShardConfigTypeError(f"dp_mesh_dims: expected DataParallelMeshDims, got {type(dims).__name__}")
    if mesh.mesh_dim_names is None:
        raise ShardConfigValueError(
            f"dp_mesh_dims: mesh must have mesh_dim_names when dp_mesh_dims is provided, and those of {mesh} have none"
        )
    wanted = [*_names(dims.shard), *_names(dims.replicate)]
    unknown = [name for name in wanted if name not in mesh.mesh_dim_names]
    if not wanted:
        raise ShardConfigValueError(
            f"dp_mesh_dims: {dims} names no axis. At least one of shard or replicate must be set in dp_mesh_dims"
        )
    if unknown:
        raise ShardConfigValueError(
            f"dp_mesh_dims: Mesh dim name '{unknown[0]}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
        )
    if len(set(wanted)) < len(wanted):
        raise ShardConfigValueError(f"dp_mesh_dims: {dims} names an axis twice; an axis shards or replicates")
    shard, replicate = (
        tuple(sorted(mesh.mesh_dim_names.index(name) for name in _names(given)))
        for given in (dims.shard, dims.replicate)
    )
    parts = [
        flattened_mesh(mesh, tuple(mesh.mesh_dim_names[axis] for axis in axes)) for axes in (replicate, shard) if axes
    ]
    own = parts[0] if len(parts) == 1 else concatenated_mesh(parts)
    full = FullMesh(mesh, shard, replicate)
    return _read(own, own.ndim - 1 if shard else None, 0 if replicate else None, offload, full)


def _read(
    mesh: DeviceMesh,
    shard_axis: int | None,
    replicate_axis: int | None,
    offload: OffloadPolicy | None,
    full: FullMesh | None = None,
) -> MeshInfo:
    try:
        device = compute_device(mesh.device_type)
    except (AssertionError, RuntimeError) as error:  # so torch says that it has none
        raise ShardConfigValueError(
            f"mesh: {mesh} is of device type {mesh.device_type}, which this process does not have ({error}); "
            "build it (init_device_mesh) for the devices on which the model computes"
        ) from error
    to_cpu = isinstance(offload, CPUOffloadPolicy) and device.type not in ("cpu", "meta")
    return MeshInfo(
        mesh=mesh,
        device=device,
        home=torch.device("cpu") if to_cpu else device,
        pins=to_cpu and isinstance(offload, CPUOffloadPolicy) and offload.pin_memory,
        shard_size=1 if shard_axis is None else mesh.size(shard_axis),
        shard_rank=0 if shard_axis is None else mesh.get_local_rank(shard_axis),
        shard_group=None if shard_axis is None else mesh.get_group(shard_axis),
        replicate_size=1 if replicate_axis is None else mesh.size(replicate_axis),
        replicate_group=None if replicate_axis is None else mesh.get_group(replicate_axis),
        full=full,
    )


def default_device_type() -> str:
    """The device type of the accelerator that this machine has, else ``cpu``.

    A build of torch for an accelerator names it also where none is.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def ensure_process_group() -> None:
    """Initialise the default process group if it is not: from the launcher's environment, or as a world of one.

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
    """A 1D mesh over the default process group (initialised if needed), on the accelerator if there is one.

    Its axis has no name, as that of torch's FSDP2: so it equals a mesh that a user makes of the world in one line. PEFT
    takes weights on an axis with another name than ``fsdp`` for tensor-parallel ones.
    """
    ensure_process_group()
    return init_device_mesh(default_device_type(), (dist.get_world_size(),))


def replicated_mesh(replicas: int) -> DeviceMesh:
    """A 2D mesh over the default process group, `replicas` x (world / `replicas`).

    Raises:
        ShardConfigValueError: `replicas` does not divide the world size.
    """
    ensure_process_group()
    world = dist.get_world_size()
    if not isinstance(replicas, int) or replicas < 1 or world % replicas:
        raise ShardConfigValueError(f"replicas: {replicas!r} does not divide the world size {world}")
    shape = (replicas, world // replicas)
    return init_device_mesh(default_device_type(), shape, mesh_dim_names=("replicate", "shard"))


_FEW: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


def small_mesh(info: MeshInfo, size: int) -> MeshInfo:
    """The mesh of `size` neighbouring ranks of the shard axis, with copies on the others; all ranks must call it."""
    world = dist.group.WORLD
    assert world is not None
    made = _FEW.setdefault(world, {})  # of this world: meshes of another one would look equal
    key = size, info.mesh.device_type, str(info.mesh.mesh.tolist())
    if key not in made:
        made[key] = _few_ranks(info.mesh, size)
    return replace(mesh_info(made[key]), home=info.device, pins=False)


def _few_ranks(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Process groups of the rows and columns of all ranks' meshes, which may differ (beside tensor parallelism, say).

    Groups are made by all ranks of the world in one order: those made among a few alone find each other by how many
    groups each rank has made before, and wait for ever where that differs.
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
