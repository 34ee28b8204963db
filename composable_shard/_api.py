"""`fully_shard`, and `last_record` of a sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, KeysView, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._comm.mesh import MeshInfo, default_mesh, mesh_info, small_mesh
from ._comm.own_groups import expect_own_group, next_number
from ._fsdp2.lazy_state import LazyState, registered
from ._group.extension import is_extended
from ._group.param import SHARDED_IN, ShardedParam, shard_parameter
from ._group.placement import Cut, PlacementFn, Placements
from ._memory.offload import note_policy
from ._module.additions import Top, WatchedEntries, check_use
from ._module.calls import assign_number
from ._module.entries import ModuleEntries, Place
from ._module.forward_hooks import post_forward, pre_forward
from ._module.module import class_of
from ._module.state import PLACE, STATE, Declaration, ShardState, state_of, states_below
from ._module.state_dict import StateDictOwner, watch_state_dict
from ._plan.record import Record
from ._policies import (
    CPUOffload,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Options,
    Settings,
    as_offload,
    as_precision,
    plain_value,
    without_overrides,
)
from ._torch.core import HANDLES
from ._torch.distributed import check_unmixed, is_replicated, local_tensor, mark_managed
from .errors import (
    ShardConfigAssertionError,
    ShardConfigTypeError,
    ShardConfigTypeValueError,
    ShardConfigUnsupportedError,
    ShardConfigValueError,
)

M = TypeVar("M", bound=nn.Module)
_classes: dict[type, type] = {}


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy | None = ...,
    offload_policy: OffloadPolicy | CPUOffload | Literal[False] | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    outer_sharding: Literal["optimizer"] | None = ...,
) -> M: ...


@overload
def fully_shard(
    module: Collection[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy | None = ...,
    offload_policy: OffloadPolicy | CPUOffload | Literal[False] | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    outer_sharding: Literal["optimizer"] | None = ...,
) -> Collection[nn.Module]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = MixedPrecisionPolicy(),  # noqa: B008 - frozen, and torch's signature
    offload_policy: OffloadPolicy | CPUOffload | Literal[False] | None = OffloadPolicy(),  # noqa: B008 - likewise
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    outer_sharding: Literal["optimizer"] | None = None,
) -> Any:
    """Shard the parameters of a module, in place.

    The parameters of `module` that no earlier call has sharded become one group of DTensors, sharded along dim 0. One
    all-gather unshards the group before the module's forward, and another one before its backward. One reduce-scatter
    averages its gradients. Call `fully_shard` on the inner modules first (for example, on each block) and on the whole
    model last. The sharded module whose forward runs first is the root.

    Attributes and gradient hooks of the parameters are carried over, and the handles of these hooks stay valid. The
    hooks then receive reduced, sharded gradients.

    A parameter of the group may later move to another module within `module`. A parameter that is added later raises an
    error at the next forward that trains it, unless one of these holds:

    - Another call of `fully_shard` has sharded it.
    - It has a post-accumulate hook, which must average its gradient.
    - `allow_unmanaged_parameters` was called.

    Args:
        module: a module with a forward, or modules that share one group: a list, a tuple or the values of a dict.
        mesh: 1D: shard over it. 2D with named axes: replicate over the first, shard over the second (HSDP). By
            default, all ranks of the default process group. If there is none, it is initialized (with a world size of
            1 if no launcher has set the environment variables).
        reshard_after_forward: True frees the unsharded parameters after forward and gathers them again in backward
            (ZeRO-3). False keeps them until backward has ended (ZeRO-2). None means False for the root and True
            elsewhere. An int, which must divide the size of the shard axis, keeps them sharded over that many
            consecutive ranks (for example those of one node), and backward gathers from these ranks only.
        shard_placement_fn: called with each parameter. Returns the `Shard` with the dim to shard along, or None for
            dim 0. The size of a dim other than 0 must be divisible by the number of ranks. `Ragged(rows)` shards dim 0
            at multiples of `rows` rows. A `ShardPlacementResult` also names a mesh. The parameters of each such mesh
            (for example those of experts) become a separate group.
        mp_policy: dtypes of the gathered parameters, of the reduction, and of inputs and outputs of forward. An input
            container (a dict, a list, a dataclass) is copied if a tensor in it is cast; otherwise forward receives the
            container itself. Items that forward writes into the copy are written back into the caller's container after
            forward; its other tensors are unchanged. Containers of outputs are copied in the same way, but nothing is
            written back. None casts nothing.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and optimizer state on the CPU, and copies shards to
            the accelerator before each gather. Without an accelerator it has no effect. `HostOffloadPolicy` keeps
            only the optimizer state there, and `DiskOffloadPolicy` keeps it on disk; see `offload_optimizer`. None and
            False offload nothing. FSDP1's `CPUOffload` is the same as `CPUOffloadPolicy()` if its `offload_params` is
            true, else it offloads nothing.
        ignored_params: parameters not to shard: a set or another iterable. None and buffers in it are skipped.
        dp_mesh_dims: a `DataParallelMeshDims`, which names the axes of `mesh` to shard over and to replicate over.
            All parameters must then be DTensors on the whole `mesh`, replicated over these axes. In forward they have
            this placement again. Several axes to shard over count as one axis, and so do several to replicate over.
        outer_sharding: for a 2D mesh (nodes, ranks of a node). None replicates over its first axis (HSDP).
            ``"optimizer"`` shards the stored parameters, their gradients and the optimizer state over both axes
            (HFSDP). Each rank also keeps a compute copy of 1/S of the parameters in `param_dtype`, for S ranks per
            node. Once per step, an all-gather over the first axis refreshes the copy. Forward and backward gather
            within the node, and a reduce-scatter over the first axis replaces the all-reduce.

    Returns:
        `module`, whose class is now a subclass of `FSDPModule` and of its original class.

    Raises:
        ShardConfigTypeError: an argument has a wrong type (also a TypeError).
        ShardConfigValueError: a module or a parameter cannot be sharded as requested (also a ValueError), for example
            with `outer_sharding` on a mesh without a first axis, or together with `Ragged`.
        MixedShardingError: torch's own `fully_shard` has sharded `module` or a module inside of it (also a ValueError).
    """
    modules = _outermost(module)
    reshard, precision, offload = (
        _checked_reshard(reshard_after_forward),
        as_precision(mp_policy),
        as_offload(offload_policy),
    )
    ignored = parameters_to_ignore(ignored_params)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise ShardConfigTypeError(f"shard_placement_fn: expected a function, got {type(shard_placement_fn).__name__}")
    info = _mesh_of(modules, mesh, offload, dp_mesh_dims, _checked_outer(outer_sharding))
    placements = Placements(info, offload, shard_placement_fn, precision)
    options = Options(reshard, mp_policy=without_overrides(precision))
    state = _shard(modules, placements, options, {id(p) for p in ignored})
    _move_buffers(modules, info)
    note_policy((param for part in state.family for param in part.declaration.params), offload)
    for index, each in enumerate(modules):
        _add_class_and_hooks(each, state, index)
    for part in state.family:
        for group in (part.declaration.info.shard_group, part.declaration.info.replicate_group):
            expect_own_group(group, part.declaration.info.device)
    LazyState(modules, state)  # registers itself for torch
    return module


fully_shard.state = registered  # type: ignore[attr-defined]  # torch's `fully_shard` has this attribute


def _shard(modules: list[nn.Module], placements: Placements, options: Options, ignored: set[int]) -> ShardState:
    """Shard the parameters of the modules, except those that earlier calls have sharded, and make the state."""
    managed = [taken for each in modules for taken in _modules_to_shard(each)]
    params = [param for prefix, owner in managed for param in _own_params(prefix, owner, ignored)]
    cuts = _choose_cuts(params, placements)
    shares = _shares_by_mesh(placements.info, cuts, options.reshard_after_forward)
    _install_sharded(params, shares, cuts)
    own, *others = shares.values()
    beside = tuple(
        ShardState(share.declaration(len(modules), options), ModuleEntries(share.places, share.params))
        for share in others
    )
    tops = [Top(each._parameters, each._modules) for each in modules]
    entries = WatchedEntries(own.places, own.params, tops, [each.entries for each in beside])
    state = ShardState(own.declaration(len(modules), options), entries, beside)
    entries.claim = StateDictOwner(state)
    for owner in {id(owner): owner for owner, _, _, _ in params}.values():
        watch_state_dict(owner, state)
    for _, taken in managed:
        mark_managed(taken)
    return state


def _outermost(module: Any) -> list[nn.Module]:
    """The modules that a call shards as one group: the given modules that no other given module contains."""
    modules = _as_list(module)
    for each in modules:
        _check_module(each)
    inner = {id(child) for each in modules for child in each.modules() if child is not each}
    outermost = {id(each): each for each in modules if id(each) not in inner}
    return list(outermost.values())


def _as_list(module: Any) -> list[Any]:
    several = isinstance(module, Collection) and not isinstance(module, (nn.Module, torch.Tensor, str))
    modules = list(module) if several else [module]
    if isinstance(module, Set) and len(modules) > 1 and not isinstance(module, KeysView):
        raise ShardConfigValueError(
            "module: a set does not have the same order on all ranks; pass the modules of the group as a list"
        )
    if not modules:
        raise ShardConfigValueError("module: the list is empty; pass the modules of the group")
    return modules


def _check_module(module: Any) -> None:
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise ShardConfigTypeError(f"module: expected an nn.Module or a list of them, got {kind}")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ShardConfigValueError(
            f"module: fully_shard does not support containers that do not implement forward, such as a {kind}; call it "
            "on each of its members"
        )
    if state_of(module) is not None:
        raise ShardConfigAssertionError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
            f"been applied to the following module: {kind}"
        )
    check_unmixed(module)


def _mesh_of(
    modules: list[nn.Module], mesh: DeviceMesh | None, offload: OffloadPolicy, dims: Any, outer: bool
) -> MeshInfo:
    try:
        return mesh_info(mesh if mesh is not None else default_mesh(), offload, dims, outer)
    except (ShardConfigTypeError, ShardConfigValueError) as error:
        names = (fqn for each in modules for at in _modules_to_shard(each) for _, _, fqn, _ in _own_params(*at, set()))
        where = f"parameter {first} of {type(modules[0]).__name__}" if (first := next(names, "")) else "module"
        raise type(error)(f"{where}: {error}") from error


def _checked_outer(value: Any) -> bool:
    if value not in (None, "optimizer"):
        raise ShardConfigValueError(
            f'outer_sharding={value!r}: expected "optimizer" (shard the optimizer state over the first axis of a 2D '
            "mesh as well) or None (replicate it)"
        )
    return value is not None


def _checked_reshard(value: Any) -> bool | int | None:
    reshard = plain_value(value)
    if reshard is not None and not isinstance(reshard, int):
        raise ShardConfigTypeValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{value!r}; or None, for False at the root and True elsewhere"
        )
    return reshard


def parameters_to_ignore(params: Any) -> list[nn.Parameter]:
    """List the parameters of `ignored_params`, which may be any iterable, including a generator.

    None (a bias that a module does not have) and tensors that are not parameters (buffers) are left out, because they
    are never sharded.

    Raises:
        ShardConfigTypeError: `params` is not an iterable, or contains other objects.
    """
    if params is None:
        return []
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise _no_parameters(params, params)
    listed = list(params)
    for each in listed:
        if not isinstance(each, torch.Tensor | None):
            raise _no_parameters(params, each)
    return [each for each in listed if isinstance(each, nn.Parameter)]


def _no_parameters(params: Any, wrong: Any) -> ShardConfigTypeError:
    return ShardConfigTypeError(
        f"ignored_params: expected a set of nn.Parameter, got {type(params).__name__} with {type(wrong).__name__}; "
        "pass the parameters themselves"
    )


def _mesh_between_uses(reshard: bool | int | None, info: MeshInfo) -> tuple[bool | int | None, MeshInfo | None]:
    """Normalize `reshard_after_forward`; for a number of ranks, return the mesh of that many ranks as well."""
    if reshard is None or isinstance(reshard, bool):
        return reshard, None
    if reshard < 1 or info.shard_size % reshard:
        raise ShardConfigValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {info.shard_size}, not {reshard}: "
            "that many ranks of the shard axis keep one copy of the parameters between forward and backward; pass the "
            "number of accelerators of a node, for example, or True or False"
        )
    if reshard == 1:
        warnings.warn("reshard_after_forward=1 keeps the unsharded parameters, as False does; pass False", stacklevel=5)
        return False, None
    return (True, None) if reshard == info.shard_size else (reshard, small_mesh(info, reshard))


ParamEntry = tuple[nn.Module, str, str, nn.Parameter]  # owner, name in it, name in the sharded module, parameter


def _modules_to_shard(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose own parameters this call shards, with the prefix of their names."""
    seen: set[int] = set()
    to_do = [("", root)]
    while to_do:
        name, module = to_do.pop()
        if id(module) in seen or state_of(module) is not None or is_replicated(module):
            continue
        seen.add(id(module))
        yield name, module
        to_do += [(f"{name}.{child}" if name else child, at) for child, at in reversed(list(module.named_children()))]


def _own_params(name: str, module: nn.Module, ignored: set[int]) -> Iterator[ParamEntry]:
    for own, param in module._parameters.items():
        if param is not None and id(param) not in ignored:
            yield module, own, f"{name}.{own}" if name else own, param


def _check_unmanaged(name: str, param: nn.Parameter) -> None:
    other = param.__dict__.get(SHARDED_IN)
    if other is None:
        return
    if isinstance(param, DTensor):
        raise ShardConfigValueError(
            f"parameter {name}: is already sharded with an enclosing module (as {other}); "
            "call fully_shard on inner modules before outer ones"
        )
    raise ShardConfigValueError(
        f"Parameter '{name}' is shared with a parameter already managed by another FSDP group. For shared/tied "
        f"parameters, use fully_shard([module_a, module_b]) to place them in the same FSDP group, or shard only a "
        f"module that contains both. The other parameter is {other}"
    )


@dataclass
class _MeshShare:
    """The parameters that one call of `fully_shard` shards on one mesh; see `Declaration`."""

    info: MeshInfo
    label: str
    reshard: bool | int | None
    small: MeshInfo | None
    params: list[ShardedParam] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def declaration(self, modules: int, options: Options) -> Declaration:
        settings = Settings(replace(options, reshard_after_forward=self.reshard))
        number = str(next_number(self.info.shard_group or self.info.replicate_group))
        return Declaration(modules, tuple(self.params), self.info, settings, self.small, self.label, number)


def _choose_cuts(params: list[ParamEntry], placements: Placements) -> dict[int, Cut]:
    """Decide how to shard each parameter. The result is keyed by the parameters' ids."""
    cuts: dict[int, Cut] = {}
    for owner, name, fqn, param in params:
        check_use(owner, name, fqn)
        _check_unmanaged(fqn, param)
        if id(param) not in cuts:
            cuts[id(param)] = placements.cut(fqn, param)
    return cuts


def _shares_by_mesh(own: MeshInfo, cuts: dict[int, Cut], reshard: bool | int | None) -> dict[MeshInfo, _MeshShare]:
    """Make a share for each mesh that a call uses. The first share is that of `own`, the mesh of the call."""
    shares: dict[MeshInfo, _MeshShare] = {}
    for info in dict.fromkeys([own, *(cut.info for cut in cuts.values())]):
        label = "/".join(info.mesh.mesh_dim_names or ()) or "another mesh" if shares else ""
        if label in [share.label for share in shares.values()]:
            label += f" ({len(shares)})"
        shares[info] = _MeshShare(info, label, *_mesh_between_uses(reshard, info))
    return shares


def _install_sharded(params: list[ParamEntry], shares: dict[MeshInfo, _MeshShare], cuts: dict[int, Cut]) -> None:
    """Shard all parameters, then install them in the modules. If sharding fails, the modules are unchanged."""
    made: dict[int, int] = {}
    for owner, name, fqn, param in params:
        share = shares[cuts[id(param)].info]
        if id(param) not in made:
            made[id(param)] = len(share.params)
            share.params.append(_shard_one(fqn, param, cuts[id(param)]))
        share.places.append((owner._parameters, name, made[id(param)]))
    for share in shares.values():
        for names, name, index in share.places:
            whole, held = names[name], share.params[index]
            if whole is not None:
                held.replace(whole)
            names[name] = held.sharded


def _shard_one(fqn: str, param: nn.Parameter, cut: Cut) -> ShardedParam:
    whole = param if cut.parallel is None else local_tensor(param)
    try:
        made = shard_parameter(fqn, param, cut)
    except Exception as error:
        if not hasattr(whole, "__tensor_flatten__"):
            raise
        raise ShardConfigUnsupportedError(
            f"parameter {fqn}: a {type(whole).__name__} of shape {tuple(whole.shape)} cannot be split into "
            f"{cut.info.shard_size} pieces ({error}); choose a shape or block size that divides evenly, leave the "
            "parameter unsharded (ignored_params), or use a tensor class that can be split or that defines "
            "fsdp_pre_all_gather"
        ) from error
    sharded = ShardedParam(fqn, made, cut, tuple(whole.shape))
    is_extended(sharded)  # raises an error if the parameter could not be gathered
    sharded.hooks.carry(param, made)
    sharded.adopt_grad_dtype(param)
    return sharded


def _move_buffers(modules: list[nn.Module], info: MeshInfo) -> None:
    for module in modules:
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.device.type not in ("meta", info.device.type):
                    child._buffers[name] = buffer.to(info.device)


def _add_class_and_hooks(module: nn.Module, state: ShardState, index: int) -> None:
    cls = type(module)
    if cls not in _classes:
        _classes.setdefault(cls, class_of(cls))  # one class for all threads
    module.__class__ = _classes[cls]
    module.__dict__[STATE] = state
    module.__dict__[PLACE] = index
    assign_number(module)
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward)
    HANDLES.give(2)


def last_record(model: nn.Module) -> Record | None:
    """The record of the last finished iteration of a sharded model; None if it has not run, or is not sharded."""
    for state in states_below(model):
        if state.bound is not None:
            return state.bound.engine.last_record
    return None
