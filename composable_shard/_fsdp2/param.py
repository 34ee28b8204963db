"""A sharded parameter, under the names of torch's `FSDPParam`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.distributed.tensor import Shard

from .._group.param import ShardedParam
from .._group.phases import UNSHARDED
from .._torch.distributed import ParamModuleInfo, spec_of
from ..errors import ShardConfigAttributeError, ShardConfigStateError
from .listening import POST_BACKWARD
from .views import View, strides

if TYPE_CHECKING:
    from .group import GroupFacade


class UnshardedGradient(NamedTuple):
    """A substitute for an unsharded parameter during `post_backward`, when the weights may be freed already."""

    grad: torch.Tensor | None


class ParamFacade(View):
    """A parameter, under the names of torch's `FSDPParam`."""

    _title = "FSDPParam"

    _known: weakref.ref[GroupFacade]  # the group's facade, which owns this one
    _param: ShardedParam
    _index: int

    _names: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "_param_fqn": lambda p: None if p._group._of._root is None else p._param.fqn,
        # sharded
        "_dtensor": attrgetter("_param.sharded"),
        "sharded_param": attrgetter("_param.sharded"),
        "_sharded_local_tensor": attrgetter("_param.local"),
        "_sharding_spec": lambda p: spec_of(p._param.sharded),
        "_spmd_mesh": attrgetter("_param.sharded.device_mesh"),
        "_spmd_placements": lambda p: tuple(p._param.sharded.placements),
        "shard_mesh": attrgetter("_group._info.shard_mesh"),
        "fsdp_placement": lambda p: Shard(p._param.dim),
        "sharded_size": lambda p: p._param.local.size(),
        "contiguous_sharded_stride": lambda p: strides(p.sharded_size),
        "sharded_state": attrgetter("_group._sharded_state"),
        # unsharded
        "_orig_size": lambda p: torch.Size(p._param.shape),
        "_contiguous_orig_stride": lambda p: strides(p._orig_size),
        "is_dtensor": lambda p: p._param.parallel is not None,
        "unsharded_accumulated_grad": lambda p: (
            None if p._group._group is None else p._group._group.gradients.accumulated(p._index)
        ),
        # dtypes, devices, meshes
        "orig_dtype": attrgetter("_param.dtype"),
        "sharded_grad_dtype": lambda p: p._param.grad_dtype.dtype if p._param.grad_dtype.is_set else p._param.dtype,
        "unsharded_grad_dtype": lambda p: p.reduce_dtype or p.sharded_grad_dtype,
        "offload_to_cpu": attrgetter("_group._info.offloads"),
        "pin_memory": attrgetter("_group._info.pins"),
        "mp_policy": attrgetter("_group.mp_policy"),
        "device": attrgetter("_group.device"),
        "mesh_info": attrgetter("_group.mesh_info"),
        "post_forward_mesh_info": attrgetter("_group.post_forward_mesh_info"),
    }

    def __repr__(self) -> str:
        return f"FSDPParam(fqn={self._param_fqn}, orig_size={self._orig_size})"

    @property
    def _group(self) -> GroupFacade:
        group = self._known()
        if group is None:
            raise ShardConfigStateError(f"parameter {self._param.fqn}: its module has been deleted")
        return group

    @property
    def _module_info(self) -> Any:
        holders = {id(m._parameters): m for each in self._group.modules for m in each.modules()}
        places = [(names, name) for names, name, index in self._group._own.entries.places if index == self._index]
        held = [(holders[id(names)], name) for names, name in places if id(names) in holders]
        (module, name), *shared = held
        return ParamModuleInfo(module, name, [m for m, _ in shared], [name for _, name in shared])

    @property
    def unsharded_param(self) -> torch.Tensor:
        group = self._group._group
        if group is None or group.phase is not UNSHARDED:
            raise ShardConfigAttributeError(f"parameter {self._param.fqn}: is not unsharded; call unshard() first")
        entries = self._group._own.entries
        return entries.installed(self._index) if entries.are_replaced else group.leaves()[self._index]

    @property
    def _unsharded_param(self) -> torch.Tensor | UnshardedGradient:
        event = self._group._event
        if event is None or event.moment != POST_BACKWARD:
            return self.unsharded_param
        return UnshardedGradient(event.gradients[self._index] if event.gradients else None)

    @property
    def padded_sharded_param_size(self) -> torch.Size:
        """The shape of the shard on the rank with the most rows."""
        shape, dim, info = list(self._orig_size), self._param.dim, self._group._info
        shape[dim] = -(-shape[dim] // info.shard_size)
        if info.shards_outer:
            shape[dim] = -(-shape[dim] // info.replicate_size)
        return torch.Size(shape)

    @property
    def _sharded_param_data(self) -> torch.Tensor:
        """The shard as a 1D view. If other ranks have more rows, a copy that has zeros at its end.

        Writes to the copy raise an error, because they would not reach the shard.
        """
        local, missing = self._param.local, self.padded_sharded_param_size.numel() - self._param.local.numel()
        flat = local.reshape(-1)
        if missing <= 0:
            return flat
        with torch.inference_mode():  # torch refuses writes to tensors that were made in it
            return torch.nn.functional.pad(flat, (0, missing))

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Do nothing: gradients without gradient sync are always accumulated."""

    def to_accumulated_grad_if_needed(self) -> None:
        """Do nothing, for the same reason."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        computed: torch.dtype = self._param.compute_dtype(self._group._options)
        return None if computed == self._param.dtype else computed

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        policy = self._group._options.mp_policy
        return None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
