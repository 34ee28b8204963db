"""The mesh on which each parameter of a call is sharded, and the dim: as users ask, with errors for what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .._comm.mesh import MeshInfo, mesh_info_of_torch
from .._errors import (
    ShardConfigAssertionError,
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)
from .._policies import MixedPrecisionPolicy, OffloadPolicy, overrides_of
from .._torch.distributed import ShardPlacementResult, local_tensor
from .parallel import Parallel, parallel_of

PlacementFn = Callable[[nn.Parameter], Any]  # -> Shard | ShardPlacementResult | None


class Cut(NamedTuple):
    """How a parameter is sharded.

    Attributes:
        info: the mesh.
        dim: of the parameter, or of its local tensor.
        parallel: how it was placed before, if it was a DTensor.
        keeps_dtype: whether it is gathered in the dtype in which it is stored.
    """

    info: MeshInfo
    dim: int
    parallel: Parallel | None
    keeps_dtype: bool = False


class Placements:
    """Decides how the parameters of one call of `fully_shard` are sharded.

    Args:
        info: the mesh of the call.
        offload: where shards are kept, on every mesh.
        choose: the user's `shard_placement_fn`; None to cut all along dim 0 on the mesh of the call.
        policy: the mixed-precision policy, which may except parameters from its dtype.

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
        """How `param` is to be sharded.

        Raises:
            ShardConfigTypeError: it has no shape yet, or the user's function gave something else than a placement.
            ShardConfigValueError: it cannot be sharded so.
        """
        wanted = None if self._choose is None else self._choose(param)
        info = self.info
        if isinstance(wanted, ShardPlacementResult):
            info, wanted = self._info_of(name, wanted.mesh_info), wanted.placement
        _check_can_shard(name, param, info)
        dim, parallel = _dim_of(name, param, wanted, info), parallel_of(name, param, info)
        return Cut(info, dim, parallel, _keeps_dtype(name, param, self._policy))

    def _info_of(self, name: str, given: Any) -> MeshInfo:
        try:
            info = mesh_info_of_torch(given, self._offload)
        except (ShardConfigTypeError, ShardConfigValueError) as error:
            raise type(error)(f"parameter {name}: {error}") from error
        key = _identity(info)
        return self.info if key == _identity(self.info) else self._others.setdefault(key, info)


def _identity(info: MeshInfo) -> tuple[object, ...]:
    """A key that is equal for meshes on which parameters are sharded in the same way."""
    full = info.full
    return (info.mesh,) if full is None else (full.mesh, full.shard, full.replicate)


def _keeps_dtype(name: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    """Whether the policy has this parameter gathered in the dtype in which it is stored.

    Raises:
        ShardConfigValueError: it asks for a dtype that is neither that one nor the policy's.
    """
    overrides = overrides_of(policy)
    wanted = None if overrides is None else overrides(param)
    if wanted not in (None, policy.param_dtype, param.dtype):
        raise ShardConfigValueError(
            f"param_dtype_override_fn: gave {wanted} for parameter {name}; expected None, param_dtype "
            f"({policy.param_dtype}) or the dtype in which it is stored ({param.dtype})"
        )
    return wanted is not None and wanted != policy.param_dtype


def _check_can_shard(name: str, param: nn.Parameter, info: MeshInfo) -> None:
    """Refuse a parameter that cannot be sharded on `info`'s mesh.

    Raises:
        ShardConfigValueError: it is a scalar, not contiguous, on a device that is not this rank's, or wants gradients
            of another dtype than its own.
        ShardConfigTypeError: it is a lazy parameter, which has no shape yet.
    """
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ShardConfigTypeError(f"parameter {name}: has no shape yet; run the lazy module once before sharding it")
    if getattr(param, "grad_dtype", None) not in (None, param.dtype):
        raise ShardConfigValueError(
            f"parameter {name}: has grad_dtype {param.grad_dtype}, which is not supported; leave it out, gradients are "
            "then kept in the dtype of the parameter"
        )
    if param.ndim == 0:
        raise ShardConfigValueError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1, or "
            "pass it in ignored_params"
        )
    whole = local_tensor(param) if isinstance(param, DTensor) else param
    if not whole.is_contiguous():
        raise ShardConfigUnsupportedError(
            f"parameter {name}: FSDP does not support non-contiguous parameters yet: param.shape={param.shape} "
            f"param.stride()={param.stride()}; assign its .contiguous() copy before sharding"
        )
    if param.device.type not in ("meta", "cpu") and param.device != info.device:
        raise ShardConfigValueError(
            f"parameter {name}: lies on {param.device}, but this rank computes on {info.device}; "
            "set the device first (torch.accelerator.set_device_index) and move the module to it"
        )


def _dim_of(name: str, param: nn.Parameter, placement: Any, info: MeshInfo) -> int:
    """The dim that a user wants a parameter cut along.

    Raises:
        ShardConfigTypeError: the placement is no `Shard`.
        ShardConfigValueError: the parameter has no such dim; or it is not 0, and does not divide by the ranks.
    """
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ShardConfigTypeValueError(
            f"Invalid shard_placement_fn result: {placement!r} for parameter {name}; expected None, Shard(dim) or "
            "ShardPlacementResult"
        )
    shape = tuple((local_tensor(param) if isinstance(param, DTensor) else param).shape)
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.ndim:
        raise ShardConfigAssertionError(
            f"shard_placement_fn: gave {placement} for parameter {name}. Shard dim {dim} is invalid for {param.ndim}D "
            f"tensor: {param.shape}; give a dim that it has"
        )
    if dim > 0 and shape[dim] % info.shard_size:
        raise ShardConfigUnsupportedError(
            f"parameter {name}: FSDP does not support uneven sharding on dim {dim}: {torch.Size(shape)} (world size: "
            f"{info.shard_size}); choose dim 0, or one that divides"
        )
    return dim
