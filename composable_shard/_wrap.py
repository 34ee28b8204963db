"""Shard a whole model by class, by size, or by its repeated blocks, with a named strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._api import fully_shard, parameters_to_ignore
from ._comm.mesh import ensure_process_group, replicated_mesh
from ._module.module import FSDPModule
from ._policies import AS_IT_IS, CommPolicy
from .errors import ShardConfigTypeError, ShardConfigValueError

Strategy = Literal["none", "ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"]
_KEEPS_AFTER_FORWARD = ("ddp", "zero1", "zero2")
_KEEPS_AFTER_BACKWARD = ("ddp", "zero1")


def shard_by_class(
    model: nn.Module,
    classes: Iterable[type[nn.Module]],
    *,
    strategy: Strategy = "zero3",
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    root: bool = True,
    comm_policy: CommPolicy = AS_IT_IS,
    **options: Any,
) -> list[nn.Module]:
    """Shard every module of the given classes, and the model itself.

    Args:
        model: the model, changed in place.
        classes: classes of modules, for example ``{Block}``. Each module of these classes becomes one group.
        strategy: ``none`` shards nothing. ``ddp`` replicates parameters and averages gradients by all-reduce.
            ``zero1`` keeps unsharded parameters from their first use to the optimizer step, ``zero2`` until the end of
            backward, ``zero3`` frees them after each use. ``hsdp`` is ``zero3`` within each of `replicas` groups of
            ranks. ``hfsdp`` is ``hsdp`` with stored parameters, gradients and optimizer state sharded over all ranks
            (`outer_sharding`).
        replicas: for ``hsdp`` and ``hfsdp``: number of replicas, a divisor of the world size; with 1 it is ``zero3``.
        mesh: the mesh to use instead of the one that the strategy makes.
        root: whether to shard the model itself, too, so that parameters outside of these modules are sharded.
        comm_policy: formats in which parameters and gradients are communicated; see `set_comm_policy`.
        options: further arguments of `fully_shard`.

    Returns:
        the sharded modules, children before parents; empty with ``none``.

    Raises:
        ShardConfigTypeError: `classes` are not module classes.
        ShardConfigValueError: no module is of these classes, the strategy is unknown, or `replicas` does not divide the
            world size.
    """
    kinds = _module_classes(classes)
    modules = [module for module in _children_first(model) if isinstance(module, kinds) and module is not model]
    if not modules and not isinstance(model, kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ShardConfigValueError(f"classes: {type(model).__name__} contains no module of {names}")
    return _shard(model, modules, strategy, replicas, mesh, root, comm_policy, options)


def shard_by_size(
    model: nn.Module,
    *,
    min_bytes: int,
    strategy: Strategy = "zero3",
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    root: bool = True,
    comm_policy: CommPolicy = AS_IT_IS,
    **options: Any,
) -> list[nn.Module]:
    """Shard each innermost module whose parameters, without those of sharded modules in it, reach `min_bytes` bytes.

    The other arguments, the result and the errors are those of `shard_by_class`.

    Raises:
        ShardConfigValueError: `min_bytes` is not a positive int.
    """
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 1:
        raise ShardConfigValueError(f"min_bytes: expected a positive number of bytes, got {min_bytes!r}")
    taken: set[int] = set()
    modules = []
    for module in _children_first(model):
        own = [p for p in module.parameters() if id(p) not in taken]
        if module is not model and _has_forward(module) and sum(p.nbytes for p in own) >= min_bytes:
            taken.update(map(id, own))
            modules.append(module)
    return _shard(model, modules, strategy, replicas, mesh, root, comm_policy, options)


def shard_auto(
    model: nn.Module,
    *,
    strategy: Strategy = "zero3",
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
    root: bool = True,
    comm_policy: CommPolicy = AS_IT_IS,
    **options: Any,
) -> list[nn.Module]:
    """Shard the repeated blocks: the outermost siblings with equal class, structure and parameter shapes.

    The other arguments, the result and the errors are those of `shard_by_class`. A model without repetition becomes
    one group.
    """
    return _shard(model, repeated_blocks(model), strategy, replicas, mesh, root, comm_policy, options)


def _module_classes(classes: Any) -> tuple[type[nn.Module], ...]:
    kinds = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        raise ShardConfigTypeError(f"classes: expected a set of nn.Module classes, got {classes!r}")
    return kinds


def _children_first(model: nn.Module) -> list[nn.Module]:
    children = {id(module): module for child in model.children() for module in _children_first(child)}
    return list({**children, id(model): model}.values())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _structure(module: nn.Module) -> tuple[Any, ...]:
    params = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters(recurse=False))
    return type(module), params, tuple((name, _structure(child)) for name, child in module.named_children())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost siblings with equal class, structure and parameter shapes, in the order of the modules."""
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    kinds = Counter(map(_structure, children))
    blocks: list[nn.Module] = []
    for child in children:
        if kinds[_structure(child)] > 1 and _has_forward(child):
            blocks.append(child)
        else:
            blocks += repeated_blocks(child)
    return blocks


def _strategy_mesh(strategy: Strategy, replicas: int) -> DeviceMesh | None:
    if strategy == "ddp":
        ensure_process_group()
        return replicated_mesh(dist.get_world_size())
    return replicated_mesh(replicas) if strategy in ("hsdp", "hfsdp") else None


def _shard(
    model: nn.Module,
    modules: list[nn.Module],
    strategy: Strategy,
    replicas: int,
    mesh: DeviceMesh | None,
    root: bool,
    comm_policy: CommPolicy,
    options: dict[str, Any],
) -> list[nn.Module]:
    if strategy not in get_args(Strategy):
        raise ShardConfigValueError(f"strategy: expected one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    if strategy == "none":
        return []
    if mesh is None:
        mesh = _strategy_mesh(strategy, replicas)
    options = _options_for_all(strategy, options)
    sharded = [*modules, model] if root else modules
    for module in sharded:
        fully_shard(module, mesh=mesh, **options)
        if strategy in _KEEPS_AFTER_BACKWARD and isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False, recurse=False)
    if comm_policy != AS_IT_IS:
        _set_comm_policy(sharded, comm_policy)
    return sharded


def _options_for_all(strategy: Strategy, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of every call of `fully_shard`: those of the strategy, overridden by the user's."""
    if strategy in _KEEPS_AFTER_FORWARD:
        options = {"reshard_after_forward": False, **options}
    if strategy == "hfsdp":
        options = {"outer_sharding": "optimizer", **options}
    if "ignored_params" in options:  # the first call would exhaust a generator
        options = {**options, "ignored_params": parameters_to_ignore(options["ignored_params"])}
    return options


def _set_comm_policy(sharded: list[nn.Module], policy: CommPolicy) -> None:
    for module in sharded:
        assert isinstance(module, FSDPModule)
        module.set_comm_policy(policy, recurse=False)
