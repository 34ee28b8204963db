"""Noticing every optimizer's step, before it happens."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ._bucket import LEAF_OF
from ._errors import ShardConfigStateError
from ._param import SHARDED_IN
from ._torch import never_trace


class StepWatcher(Protocol):
    """Who must know of steps."""

    def before_optimizer_step(self, theirs: set[int]) -> None:
        """An optimizer is about to step; `theirs` are the ids of its parameters."""


# By id: their weak references can be listed in one go while another thread adds one.
_watchers: weakref.WeakValueDictionary[int, StepWatcher] = weakref.WeakValueDictionary()


def watch_steps(watcher: StepWatcher) -> None:
    """Tell `watcher`, while it lives, of the steps of all optimizers: it looks for its own parameters."""
    _watchers[id(watcher)] = watcher


@never_trace
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
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
    for group in optimizer.param_groups:
        _split_up(group)
    theirs = set(map(id, params))
    for ref in _watchers.valuerefs():
        if (watcher := ref()) is not None:
            watcher.before_optimizer_step(theirs)


def _split_up(group: dict[str, Any]) -> None:
    """Have sharded parameters stepped one by one if they are mixed with plain ones (`ignored_params`) or other meshes.

    torch's foreach and fused functions refuse such lists.
    """
    if group.get("foreach", False) is False and not group.get("fused"):
        return
    params = [param for param in group["params"] if param.requires_grad]
    meshes = {param.device_mesh if isinstance(param, DTensor) else None for param in params}
    if len(meshes) > 1 and any(SHARDED_IN in param.__dict__ for param in params):
        group.update(foreach=False, **({"fused": False} if group.get("fused") else {}))


register_optimizer_step_pre_hook(_before_step)
