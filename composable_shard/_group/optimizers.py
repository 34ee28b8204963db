"""A hook before the step of every optimizer: it checks what is stepped, and tells the engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._errors import ShardConfigStateError
from .._torch.core import HANDLES, never_trace
from .faces import LEAF_OF
from .param import SHARDED_IN


class StepWatcher(Protocol):
    """Whoever must know of optimizers' steps."""

    def before_optimizer_step(self, stepped: set[int]) -> None:
        """An optimizer is about to step the parameters with these ids."""

    def check_reduced(self, stepped: set[int]) -> None:
        """An optimizer is about to read the gradients of these parameters: none may still wait for its reduction."""


# By id, and no WeakSet: the weak references can be listed at once while another thread adds a watcher.
_watchers: weakref.WeakValueDictionary[int, StepWatcher] = weakref.WeakValueDictionary()


def watch_steps(watcher: StepWatcher) -> None:
    """Tell `watcher`, while it lives, of every optimizer's steps; not all are of its parameters."""
    _watchers[id(watcher)] = watcher


@never_trace
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    params: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    _check_are_of_the_model(params)
    for group in optimizer.param_groups:
        _avoid_mixed_lists(group)
    stepped = set(map(id, params))
    watchers = _living_watchers()
    changed = None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):  # it makes the gradients, so it checks them
        checked = partial(_run_closure, closure, stepped)
        changed = ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})
    else:
        for watcher in watchers:
            watcher.check_reduced(stepped)
    for watcher in watchers:
        watcher.before_optimizer_step(stepped)
    return changed


def _check_are_of_the_model(params: Sequence[torch.Tensor]) -> None:
    """Raise ShardConfigStateError for parameters that are not, or no longer, those of the model."""
    copies, old = [], []
    for param in params:
        if LEAF_OF in param.__dict__:
            copies.append(param.__dict__[LEAF_OF])
        elif SHARDED_IN in param.__dict__ and not isinstance(param, DTensor):
            old.append(param.__dict__[SHARDED_IN])
    if copies:
        raise ShardConfigStateError(
            f"the optimizer holds unsharded copies of {', '.join(copies)}, which get no gradients; "
            "build it before the first forward, or after reshard()"
        )
    if old:
        raise ShardConfigStateError(
            f"the optimizer holds {', '.join(old)} as they were before fully_shard, and would train nothing; "
            "build it after sharding, from model.parameters()"
        )


def _avoid_mixed_lists(group: dict[str, Any]) -> None:
    """Turn foreach and fused off for an optimizer's param group that mixes meshes, or DTensors and plain tensors.

    torch's foreach and fused functions refuse such lists. (Plain tensors are parameters in `ignored_params`.)
    """
    fused = group.get("fused")
    if group.get("foreach", False) is False and not fused:
        return
    meshes: set[object] = set()
    has_ours = False
    for param in group["params"]:
        if param.requires_grad:
            meshes.add(param.device_mesh if isinstance(param, DTensor) else None)
            has_ours = has_ours or SHARDED_IN in param.__dict__
    if len(meshes) > 1 and has_ours:
        group.update(foreach=False, **({"fused": False} if fused else {}))


def _run_closure(closure: Callable[[], Any], stepped: set[int]) -> Any:
    loss = closure()
    for watcher in _living_watchers():
        watcher.check_reduced(stepped)
    return loss


def _living_watchers() -> list[StepWatcher]:
    return list(filter(None, map(call, _watchers.valuerefs())))


register_optimizer_step_pre_hook(_before_step)
HANDLES.ours += 1
