"""A hook before the step of every optimizer: it checks what is stepped, and tells the engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._errors import ShardConfigStateError
from .._torch.core import never_trace
from .faces import LEAF_OF
from .param import SHARDED_IN


class StepWatcher(Protocol):
    """Whoever must know of optimizers' steps."""

    def before_optimizer_step(self, stepped: set[int]) -> None:
        """An optimizer is about to step the parameters with these ids."""

    def check_reduced(self, stepped: set[int]) -> None:
        """An optimizer is about to read the gradients of these parameters: none may still wait for its reduction."""


# By id, and no WeakSet: the weak references can be listed in one go while another thread adds a watcher.
_watchers: weakref.WeakValueDictionary[int, StepWatcher] = weakref.WeakValueDictionary()


def watch_steps(watcher: StepWatcher) -> None:
    """Tell `watcher`, while it lives, of the steps of all optimizers; it finds its own parameters among theirs."""
    _watchers[id(watcher)] = watcher


def _check_stepped(params: Sequence[torch.Tensor]) -> None:
    """Raise ShardConfigStateError for parameters that are not, or no longer, those of the model."""
    copies = [param.__dict__[LEAF_OF] for param in params if LEAF_OF in param.__dict__]
    if copies:
        raise ShardConfigStateError(
            f"the optimizer holds unsharded copies of {', '.join(copies)}, which get no gradients; "
            "build it before the first forward, or after reshard()"
        )
    old = [
        param.__dict__[SHARDED_IN]
        for param in params
        if SHARDED_IN in param.__dict__ and not isinstance(param, DTensor)
    ]
    if old:
        raise ShardConfigStateError(
            f"the optimizer holds {', '.join(old)} as they were before fully_shard, and would train nothing; "
            "build it after sharding, from model.parameters()"
        )


@never_trace
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    _check_stepped(params)
    for group in optimizer.param_groups:
        _split_up(group)
    stepped = set(map(id, params))
    args, kwargs, has_closure = _with_closure(args, kwargs, partial(_check_reduced, stepped))
    if not has_closure:
        _check_reduced(stepped)
    for watcher in _living():
        watcher.before_optimizer_step(stepped)
    return (args, kwargs) if has_closure else None


def _with_closure(args: Any, kwargs: Any, check: Callable[[], None]) -> tuple[Any, Any, bool]:
    """The arguments of a step, and whether there is a closure, which then runs `check` after it has made gradients."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], partial(_checked, args[1], check), *args[2:]), kwargs, True
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": partial(_checked, closure, check)}, True
    return args, kwargs, False


def _checked(closure: Callable[[], Any], check: Callable[[], None]) -> Any:
    loss = closure()
    check()
    return loss


def _check_reduced(stepped: set[int]) -> None:
    for watcher in _living():
        watcher.check_reduced(stepped)


def _living() -> list[StepWatcher]:
    return [watcher for ref in _watchers.valuerefs() if (watcher := ref()) is not None]


def _split_up(group: dict[str, Any]) -> None:
    """Turn foreach and fused off for an optimizer's param group that mixes meshes, or DTensors and plain tensors.

    torch's foreach and fused functions refuse such lists. (Plain tensors are parameters in `ignored_params`.)
    """
    if group.get("foreach", False) is False and not group.get("fused"):
        return
    params = [param for param in group["params"] if param.requires_grad]
    meshes = {param.device_mesh if isinstance(param, DTensor) else None for param in params}
    if len(meshes) > 1 and any(SHARDED_IN in param.__dict__ for param in params):
        group.update(foreach=False, **({"fused": False} if group.get("fused") else {}))


register_optimizer_step_pre_hook(_before_step)
