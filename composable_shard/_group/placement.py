"""Decides how each parameter of a call of `fully_shard` is sharded, and refuses parameters that cannot be sharded.

A parameter may already be a DTensor: on the mesh of another parallelism (tensor or expert parallel), or on a *full
mesh*, which has the axes of all types of parallelism. On a full mesh it must be replicated over *our axes*, the
data-parallel ones (`dp_mesh_dims`). Its local tensor is then sharded over the data-parallel mesh. The sharded parameter
that users see is a DTensor on both meshes, or on the full one. In forward, modules see the original DTensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from .._comm.mesh import FullMesh, MeshInfo, mesh_info_of_torch
from .._policies import MixedPrecisionPolicy, OffloadPolicy, overrides_of
from .._torch.distributed import ShardPlacementResult, concatenated_mesh, dtensor_at, local_part, strided_shard
from .._torch.ragged import Ragged
from ..errors import (
    ShardConfigAssertionError,
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)
from .packed import Carried, carried_by

PlacementFn = Callable[[nn.Parameter], Any]  # -> Shard | Ragged | ShardPlacementResult | None


@dataclass(frozen=True, eq=False)
class Parallel:
    """The placement of a parameter before it was sharded.

    Attributes:
        mesh, placements: those of the DTensor, on the mesh of the other parallelism or on the full mesh.
        shape, stride: those of the whole DTensor.
        full: the full mesh and our axes of it, if the DTensor is on one.
        wrapper: makes the DTensor from its local tensor in a graph, see `wrap`.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    full: FullMesh | None = None
    wrapper: Callable[[torch.Tensor, torch.Tensor | None], DTensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        return self  # process groups cannot be copied

    def wrap(self, local: torch.Tensor, port: torch.Tensor | None) -> DTensor:
        """Make the unsharded parameter, a DTensor, from its local tensor, for a graph with a backward.

        The backward of `DTensor.from_local` would sum a gradient that is partial over our axes of a full mesh, in the
        dtype of the gradient. But our reduction sums it, later and in its own dtype. So a function with another
        backward is used.

        Args:
            local: the local tensor.
            port: a tensor of the shape of `local` in the dtype of the reduction, through which the gradient can leave
                in that dtype: autograd would cast a gradient of `local` to the dtype of `local`. None if the dtypes are
                the same.
        """
        if not torch.is_grad_enabled() or self.wrapper is None or (self.full is None and port is None):
            return self.around(local)
        return self.wrapper(local, port)

    def around(self, local: torch.Tensor) -> DTensor:
        """Make the DTensor with this local tensor; where autograd records, call `wrap` instead."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's local tensor of `whole`, the value of the whole parameter, which all ranks pass in."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()

    def local_gradient(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of the local tensor, given a gradient of the DTensor.

        Over the data-parallel axes its placement stays (usually partial), because the later reduction sums it. Sums
        over other axes are computed here.

        Args:
            gradient: the gradient of the DTensor; a plain tensor is already the local gradient.
            dtype: the dtype of the later reduction. If a sum is needed and this dtype is wider than that of `gradient`,
                the sum and the result are in this dtype. Otherwise the result has the dtype of `gradient`.
        """
        if not isinstance(gradient, DTensor):
            return gradient
        wanted = list(self.placements)
        for axis in (*self.full.shard, *self.full.replicate) if self.full is not None else ():
            wanted[axis] = gradient.placements[axis]
        if gradient.dtype is not dtype and torch.promote_types(gradient.dtype, dtype) is dtype:
            pairs = zip(gradient.placements, wanted, strict=True)
            if any(now.is_partial() and now != then for now, then in pairs):
                local = local_part(gradient).to(dtype)
                gradient = dtensor_at(local, gradient.device_mesh, gradient.placements, gradient)
        return gradient.redistribute(placements=wanted).to_local()

    def placed(self, info: MeshInfo, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return mesh and placements of the sharded parameter, sharded along `dim` over the data-parallel ranks."""
        if self.full is not None:
            return self._placed_in_full(self.full, info, dim)
        own = info.placements(dim)
        outer = (self._cut(dim, 0, info.shard_size),) if info.shards_outer else own[:-1]
        return concatenated_mesh([info.mesh, self.mesh]), (*outer, self._cut(dim, 0), *self.placements)

    def _cut(self, dim: int, first: int, factor: int = 1) -> Placement:
        """Return the placement of our axis along `dim`: a strided one if other axes have sharded that dim before.

        As with FSDP2, a dim is divided by the axes of the other parallelism first, and then by ours.

        Args:
            dim: the dim.
            first: number of the first mesh axis to look at for the other parallelism: 0, or on a full mesh, the one
                after our axis. (Of the axes before ours, DTensor knows that they divide first.)
            factor: number of pieces into which a later axis of ours has divided the dim before.
        """
        for axis, placement in enumerate(self.placements):
            if axis >= first and isinstance(placement, Shard) and placement.dim % len(self.shape) == dim:
                factor *= self.mesh.size(axis)
        return Shard(dim) if factor == 1 else strided_shard(dim, factor)

    def _placed_in_full(self, full: FullMesh, info: MeshInfo, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Like `placed`, but on a full mesh. Several shard axes become one, which follows the replicate axes."""
        placements = list(self.placements)
        for axis in full.shard:
            placements[axis] = self._cut(dim, axis + 1)
        self._split_outer(placements, full, info, dim)
        if len(full.shard) < 2:
            return full.mesh, tuple(placements)
        names, first = full.mesh.mesh_dim_names, full.shard[0]
        own = [placements[axis] for axis in full.replicate[:1]] + [placements[first]]
        assert names is not None
        meshes: list[DeviceMesh] = []
        combined: list[Placement] = []
        for axis, placement in enumerate(placements):
            if axis == first:
                meshes.append(info.mesh)
                combined += [*own[:-1], placement]
            elif axis not in full.shard and axis not in full.replicate:
                meshes.append(full.mesh[names[axis]])
                combined.append(placement)
        return meshes[0] if len(meshes) == 1 else concatenated_mesh(meshes), tuple(combined)

    def _split_outer(self, placements: list[Placement], full: FullMesh, info: MeshInfo, dim: int) -> None:
        """Set the placement of the outer axis of a full mesh, if it shards as well (`outer_sharding`)."""
        if not info.shards_outer:
            return
        (outer,) = full.replicate  # checked by `mesh_info`
        inner_follows = max(full.shard, default=0) > outer  # DTensor knows that earlier axes divide first
        placements[outer] = self._cut(dim, outer + 1, info.shard_size if inner_follows else 1)


@functools.lru_cache(maxsize=256)  # one wrapper for all parameters placed alike, so equal layers share compiled code
def _wrapper(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    ours: tuple[tuple[int, ...], ...] | None,
    groups: tuple[weakref.ref[dist.ProcessGroup], ...],  # only in the key: an equal mesh of an earlier world has others
) -> Callable[[torch.Tensor, torch.Tensor | None], DTensor]:
    parallel = Parallel(mesh, placements, shape, stride, None if ours is None else FullMesh(mesh, *ours))

    @functools.cache
    def function_for(own: torch.dtype, reduced: torch.dtype) -> Callable[..., DTensor]:
        class Wrap(torch.autograd.Function):
            """Local tensor of a parameter -> the parameter as a DTensor; see `Parallel.wrap`."""

            @staticmethod
            def forward(ctx: Any, local: torch.Tensor, port: torch.Tensor | None) -> DTensor:
                # A view, and not `detach`: AOTAutograd's partitioner saves results of `detach` for backward.
                return parallel.around(local.view(local.shape))

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
                local = parallel.local_gradient(gradient, reduced)
                return (local, None) if local.dtype is own else (None, local)

        return Wrap.apply

    def wrap(local: torch.Tensor, port: torch.Tensor | None) -> DTensor:
        return function_for(local.dtype, (local if port is None else port).dtype)(local, port)

    # Dynamo must not trace it: the placement of the gradient is known only when AOTAutograd makes the backward graph.
    allowed: Callable[..., DTensor] = torch.compiler.allow_in_graph(wrap)  # type: ignore[no-untyped-call]
    return allowed


def _placed(param: DTensor, full: FullMesh | None = None) -> Parallel:
    placed = param.device_mesh, tuple(param.placements), param.shape, param.stride()
    groups = tuple(map(weakref.ref, param.device_mesh.get_all_groups()))
    return Parallel(*placed, full, _wrapper(*placed, None if full is None else (full.shard, full.replicate), groups))


def _in_full(name: str, param: torch.Tensor, full: FullMesh) -> Parallel:
    """Return the placement of a parameter on the full mesh."""
    if not isinstance(param, DTensor) or param.device_mesh != full.mesh:
        given = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else "a plain tensor"
        raise ShardConfigValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh. Expected param's "
            f"DTensor mesh to be the same mesh passed to fully_shard, {full.mesh}, but got {given} for parameter "
            f"'{name.rpartition('.')[2]}' ({name}); distribute it (distribute_tensor, distribute_module), or pass the "
            "data-parallel submesh without dp_mesh_dims. FSDP2 of torch 2.15 also takes plain parameters with "
            "annotations of spmd_types; this library does not"
        )
    for axis in (*full.shard, *full.replicate):
        if not isinstance(param.placements[axis], Replicate):
            names, role = full.mesh.mesh_dim_names, "shard" if axis in full.shard else "replicate"
            raise ShardConfigValueError(
                f"parameter {name}: Expected Replicate() on DP {role} dim '{names[axis] if names else axis}' (index "
                f"{axis}) but got {param.placements[axis]}; dp_mesh_dims names this axis as data-parallel, so "
                "distribute the parameter with Replicate() on it"
            )
    return _placed(param, full)


def _parallel_of(name: str, param: torch.Tensor, info: MeshInfo) -> Parallel | None:
    """Return the existing placement of a parameter; None if it is a plain tensor.

    Raises:
        ShardConfigValueError: its mesh cannot be combined with the data-parallel one; or `dp_mesh_dims` was given, and
            it is not a DTensor on that mesh that is replicated over the data-parallel axes.
    """
    if info.full is not None:
        return _in_full(name, param, info.full)
    if not isinstance(param, DTensor):
        return None
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
            f"{where}, and cannot be sharded on {info.mesh}: their axes need names, all different; build one mesh "
            "(init_device_mesh with mesh_dim_names) and give each parallelism its submesh, for example mesh['dp']"
        )
    parallel = _placed(param)
    try:
        parallel.placed(info, 0)
    except (RuntimeError, ValueError) as error:
        raise ShardConfigValueError(
            f"{where}, which cannot be combined with {info.mesh}: they must be submeshes of one mesh ({error})"
        ) from error
    return parallel


class Cut(NamedTuple):
    """How a parameter is sharded.

    Attributes:
        info: the mesh.
        dim: the sharded dim, of the parameter or of its local tensor.
        parallel: how it was placed before, if it was a DTensor.
        rows: boundaries between shards are multiples of this number of rows.
        keeps_dtype: whether it is gathered in the dtype in which it is stored.
        carried: its state besides its data, if it is packed.
    """

    info: MeshInfo
    dim: int
    parallel: Parallel | None
    keeps_dtype: bool = False
    rows: int = 1
    carried: Carried | None = None

    def placements(self, name: str) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return mesh and placements of the sharded parameter."""
        if self.parallel is not None:
            return self.parallel.placed(self.info, self.dim)
        placements = self.info.placements(self.dim)
        return self.info.mesh, placements if self.rows == 1 else (*placements[:-1], Ragged(self.rows).of(name))


class Placements:
    """Decides how the parameters of one call of `fully_shard` are sharded.

    Args:
        info: the mesh of the call.
        offload: determines where shards are stored, on every mesh.
        choose: the user's `shard_placement_fn`; None to shard all along dim 0 on the mesh of the call.
        policy: the mixed-precision policy, which may exclude parameters from its dtype.

    Attributes:
        info: the mesh of the call.
    """

    def __init__(
        self, info: MeshInfo, offload: OffloadPolicy, choose: PlacementFn | None, policy: MixedPrecisionPolicy
    ) -> None:
        self.info = info
        self._offload = offload
        self._choose = choose
        self._policy = policy
        self._others: dict[tuple[object, ...], MeshInfo] = {}

    def cut(self, name: str, param: nn.Parameter) -> Cut:
        """Decide how `param` is sharded.

        Raises:
            ShardConfigTypeError: it has no shape yet, or the user's function returned an object that is no placement.
            ShardConfigValueError: it cannot be sharded in this way.
        """
        wanted = None if self._choose is None else self._choose(param)
        info = self.info
        if isinstance(wanted, ShardPlacementResult):
            info, wanted = self._info_of(name, wanted.mesh_info), wanted.placement
        _check_can_shard(name, param, info)
        if info.shards_outer:
            _check_can_split_again(name, param, wanted)
        parallel = _parallel_of(name, param, info)
        if isinstance(wanted, Ragged):
            _check_ragged(name, param, parallel, wanted)
            dim, rows = 0, wanted.rows
        else:
            dim, rows = _dim_of(name, param, wanted, info), 1
        carried = carried_by(param)
        keeps_dtype = carried is not None or _keeps_dtype(name, param, self._policy)
        return Cut(info, dim, parallel, keeps_dtype, rows, carried)

    def _info_of(self, name: str, given: Any) -> MeshInfo:
        try:
            info = mesh_info_of_torch(given, self._offload, self.info.shards_outer)
        except (ShardConfigTypeError, ShardConfigValueError) as error:
            raise type(error)(f"parameter {name}: {error}") from error
        key = _identity(info)
        return self.info if key == _identity(self.info) else self._others.setdefault(key, info)


def _identity(info: MeshInfo) -> tuple[object, ...]:
    """Return a key that is equal for meshes on which parameters are sharded in the same way."""
    full = info.full
    return (info.mesh,) if full is None else (full.mesh, full.shard, full.replicate)


def _keeps_dtype(name: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    """Whether the policy has this parameter gathered in the dtype in which it is stored.

    Raises:
        ShardConfigValueError: the policy asks for a dtype that is neither the stored one nor its `param_dtype`.
    """
    overrides = overrides_of(policy)
    wanted = None if overrides is None else overrides(param)
    if wanted not in (None, policy.param_dtype, param.dtype):
        raise ShardConfigValueError(
            f"param_dtype_override_fn: returned {wanted} for parameter {name}; expected None, param_dtype "
            f"({policy.param_dtype}) or the dtype in which the parameter is stored ({param.dtype})"
        )
    return wanted is not None and wanted != policy.param_dtype


def _check_can_shard(name: str, param: nn.Parameter, info: MeshInfo) -> None:
    """Refuse a parameter that cannot be sharded on `info`'s mesh.

    Raises:
        ShardConfigValueError: it is a scalar, not contiguous, or on a device other than this rank's.
        ShardConfigTypeError: it is a lazy parameter, which has no shape yet.
    """
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ShardConfigTypeError(f"parameter {name}: has no shape yet; run the lazy module once before sharding it")
    if param.ndim == 0:
        raise ShardConfigValueError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1, or "
            "pass it in ignored_params"
        )
    if not local_part(param).is_contiguous():
        raise ShardConfigUnsupportedError(
            f"parameter {name}: FSDP does not support non-contiguous parameters yet: param.shape={param.shape} "
            f"param.stride()={param.stride()}; assign its .contiguous() copy before sharding"
        )
    if param.device.type not in ("meta", "cpu") and param.device != info.device:
        raise ShardConfigValueError(
            f"parameter {name}: is on {param.device}, but this rank computes on {info.device}; "
            "set the device first (torch.accelerator.set_device_index) and move the module to it"
        )


def _check_can_split_again(name: str, param: nn.Parameter, wanted: Any) -> None:
    """Refuse a parameter that cannot be sharded over the outer axis as well.

    Raises:
        ShardConfigUnsupportedError: it is placed by `Ragged`, or of a class that defines its own all-gather.
    """
    if isinstance(wanted, Ragged):
        raise ShardConfigUnsupportedError(
            f"outer_sharding: parameter {name} is placed by {wanted}, which one axis shards; return Shard(0) or None, "
            "or leave out outer_sharding"
        )
    if hasattr(param, "fsdp_pre_all_gather"):
        raise ShardConfigUnsupportedError(
            f"outer_sharding: parameter {name} is a {type(param.data).__name__} with fsdp_pre_all_gather, which "
            "gathers over one axis; leave out outer_sharding, or use set_comm_policy for gathers in fewer bits"
        )


def _check_ragged(name: str, param: nn.Parameter, parallel: Parallel | None, wanted: Ragged) -> None:
    """Refuse a parameter that cannot be sharded at multiples of `wanted.rows` rows.

    Raises:
        ShardConfigUnsupportedError: it is already a DTensor, or of a class that defines its own all-gather.
    """
    if parallel is not None:
        raise ShardConfigUnsupportedError(
            f"shard_placement_fn: returned {wanted} for parameter {name}, which is already a DTensor on "
            f"{parallel.mesh}; return Shard(dim) or None for parameters of tensor and expert parallelism"
        )
    if hasattr(param, "fsdp_pre_all_gather"):
        raise ShardConfigUnsupportedError(
            f"shard_placement_fn: returned {wanted} for parameter {name}, a {type(param.data).__name__} with "
            "fsdp_pre_all_gather; return Shard(0) or None"
        )


def _dim_of(name: str, param: nn.Parameter, placement: Any, info: MeshInfo) -> int:
    """Return the dim along which the user wants a parameter sharded.

    Raises:
        ShardConfigTypeError: the placement is not a `Shard`.
        ShardConfigValueError: the parameter has no such dim; or the dim is not 0 and its size is not a multiple of the
            number of ranks.
    """
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ShardConfigTypeValueError(
            f"Invalid shard_placement_fn result: {placement!r} for parameter {name}; expected None, Shard(dim), "
            "Ragged(rows) or ShardPlacementResult"
        )
    shape = tuple(local_part(param).shape)
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.ndim:
        raise ShardConfigAssertionError(
            f"shard_placement_fn: returned {placement} for parameter {name}. Shard dim {dim} is invalid for "
            f"{param.ndim}D tensor: {param.shape}; return a dim that the parameter has"
        )
    if dim > 0 and shape[dim] % info.shards:
        raise ShardConfigUnsupportedError(
            f"parameter {name}: FSDP does not support uneven sharding on dim {dim}: {torch.Size(shape)} (world size: "
            f"{info.shards}); choose dim 0, or a dim that divides evenly"
        )
    return dim
