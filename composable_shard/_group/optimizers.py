"""A hook before the step of every optimizer: it checks the stepped parameters and notifies the engines.

If `torch.compile` traces a step, it traces the hook, too, and records an operator that notifies the engines when the
graph runs. So the hook causes no graph break.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from operator import call
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._memory.offload import in_memory
from .._plan.text import first_names
from .._torch.core import HANDLES, has_side_effect, tree_tensors
from ..errors import ShardConfigStateError
from .faces import LEAF_OF
from .param import SHARDED_IN


class StepWatcher(Protocol):
    """An object that is notified of optimizer steps."""

    def before_optimizer_step(self, stepped: set[int], optimizer: Optimizer | None) -> None:
        """Handle a step, before it, of the parameters with these ids; a compiled step does not pass its optimizer."""

    def check_reduced(self, stepped: set[int]) -> None:
        """Check, before an optimizer reads the gradients of these parameters, that none waits for its reduction."""


@runtime_checkable
class DecidesSteps(Protocol):
    """An optimizer that steps in backward, and decides on the host whether it does."""

    def decision(self) -> Hashable:
        """Return a value that is equal if it decides alike. Backwards with different values do different work."""


_NAMED = 5  # maximum number of parameters that an error names
REDUCED, STEPPED, REDUCED_AND_STEPPED = 1, 2, 3  # notifications: one for each method of a watcher, and both

# By id instead of in a WeakSet: the weak references can be listed in one call while another thread adds a watcher.
_watchers: weakref.WeakValueDictionary[int, StepWatcher] = weakref.WeakValueDictionary()
_optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()


def watch_steps(watcher: StepWatcher) -> None:
    """Notify `watcher`, while it lives, of the steps of all optimizers, even of those without its parameters."""
    _watchers[id(watcher)] = watcher


def note_optimizer(optimizer: Optimizer) -> None:
    """Include an optimizer, while it lives, in `state_of_optimizers`; those that have stepped are already included."""
    _optimizers[id(optimizer)] = optimizer


def known_optimizers() -> list[Optimizer]:
    """Return all living optimizers that have stepped, or were noted."""
    return list(filter(None, map(call, _optimizers.valuerefs())))


def state_of_optimizers(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that known optimizers store for these parameters, except those on disk."""
    optimizers = known_optimizers()
    # A wrapper shares its state with the optimizer that it wraps, so count each state once.
    apart = {id(optimizer.state): optimizer for optimizer in optimizers}.values()
    params = list(params)
    held = [optimizer.state.get(param, {}) for optimizer in apart for param in in_memory(optimizer, params)]
    return tree_tensors(held)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    params: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    if not torch.compiler.is_compiling():
        note_optimizer(optimizer)
    _check_are_of_the_model(params)
    for group in optimizer.param_groups:
        _avoid_mixed_lists(group)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _tell(optimizer, params, REDUCED_AND_STEPPED)
        return None
    checked = partial(_run_closure, optimizer, closure, params)  # the closure computes the gradients, then checks them
    _tell(optimizer, params, STEPPED)
    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": checked})


def _tell(optimizer: Optimizer, params: Sequence[torch.Tensor], what: int) -> None:
    """Notify the watchers of a step of these parameters; while Dynamo traces, record an operator that does so."""
    if not torch.compiler.is_compiling():
        _tell_watchers(set(map(id, params)), what, optimizer)
        return
    ours = [param for param in params if isinstance(param, DTensor) and hasattr(param, SHARDED_IN)]
    if ours:
        torch.ops.composable_shard.before_step([p._local_tensor for p in ours], [id(p) for p in ours], what)


def _tell_watchers(stepped: set[int], what: int, optimizer: Optimizer | None = None) -> None:
    watchers = list(filter(None, map(call, _watchers.valuerefs())))
    if what & REDUCED:
        for watcher in watchers:
            watcher.check_reduced(stepped)
    if what & STEPPED:
        for watcher in watchers:
            watcher.before_optimizer_step(stepped, optimizer)


def _check_are_of_the_model(params: Sequence[torch.Tensor]) -> None:
    """Raise ShardConfigStateError for parameters that are not parameters of the model, or no longer are."""
    copies, old = [], []
    for param in params:
        if hasattr(param, LEAF_OF):
            copies.append(getattr(param, LEAF_OF))
        elif hasattr(param, SHARDED_IN) and not isinstance(param, DTensor):
            old.append(getattr(param, SHARDED_IN))
    if copies:
        raise ShardConfigStateError(
            f"the optimizer holds unsharded copies of {first_names(copies, _NAMED)}, which get no gradients; "
            "build the optimizer before the first forward, or after reshard()"
        )
    if old:
        raise ShardConfigStateError(
            f"the optimizer holds {first_names(old, _NAMED)} from before fully_shard, so it would not train the "
            "model; build the optimizer after sharding, from model.parameters()"
        )


def _avoid_mixed_lists(group: dict[str, Any]) -> None:
    """Turn foreach and fused off for an optimizer's param group that mixes DTensors and plain tensors.

    torch's foreach and fused functions refuse such lists. The plain tensors are parameters in `ignored_params`.
    """
    fused = group.get("fused")
    if group.get("foreach", False) is False and not fused:
        return
    has_plain = has_ours = False
    for param in group["params"]:
        if param.requires_grad:
            has_plain = has_plain or not isinstance(param, DTensor)
            has_ours = has_ours or hasattr(param, SHARDED_IN)
    if has_plain and has_ours:
        group.update(foreach=False, **({"fused": False} if fused else {}))


def _run_closure(optimizer: Optimizer, closure: Callable[[], Any], params: Sequence[torch.Tensor]) -> Any:
    loss = closure()
    _tell(optimizer, params, REDUCED)
    return loss


_library = torch.library.Library("composable_shard", "FRAGMENT")  # type: ignore[no-untyped-call]
# It takes the shards, so that no compiler moves it after their update. The ids identify the parameters.
_library.define("before_step(Tensor[] shards, int[] ids, int what) -> ()", tags=(torch.Tag.cudagraph_unsafe,))  # type: ignore[no-untyped-call]
_library.impl("before_step", lambda shards, ids, what: _tell_watchers(set(ids), what), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("composable_shard::before_step", lambda shards, ids, what: None, lib=_library)
has_side_effect(torch.ops.composable_shard.before_step.default)
register_optimizer_step_pre_hook(_before_step)
HANDLES.give()
