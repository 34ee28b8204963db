"""What a step runs and trains: sharded models, and parameters outside of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .._engine.engine import Engine
from .._group.faces import LEAF_OF
from .._group.optimizers import known_optimizers
from .._group.param import SHARDED_IN, run_all
from .._module.build import living_engines
from .._torch.core import version_of, without_torch_function


class _Seen(NamedTuple):
    """What changes of a parameter that is trained: its `.grad`, and versions of both."""

    grad: torch.Tensor | None
    versions: tuple[int, int]


class Observation:
    """Compares what has run and what was trained with the time when this object was made.

    It holds the `.grad` of the parameters that it watches. A new gradient therefore never has the same id.

    Args:
        everything: whether to watch all parameters of the process for new gradients, which takes as long as a garbage
            collection. If not, only those of optimizers that have stepped, which may also set `.grad` to None again.
    """

    def __init__(self, everything: bool) -> None:
        self._runs = {id(engine): engine.runs for engine, _ in living_engines()}
        self._everything = everything
        self._leaves = _all_leaves() if everything else _stepped_leaves()
        self._before = self._seen()

    def engines(self) -> list[tuple[Engine, nn.Module]]:
        """The engines that have run since, in this thread, with their roots."""
        engines = [(engine, root) for engine, root in living_engines() if engine.is_of_this_thread]
        return [(engine, root) for engine, root in engines if engine.runs != self._runs.get(id(engine), (0, 0, 0))]

    def trained(self) -> list[torch.Tensor]:
        """The parameters outside of sharded models that were trained since."""
        triples = zip(self._leaves, self._before, self._seen(), strict=True)
        changed = [leaf for leaf, was, now in triples if was.grad is not now.grad or was.versions != now.versions]
        known = set(map(id, self._leaves))
        first = [leaf for leaf in _stepped_leaves() if id(leaf) not in known]  # of optimizers that stepped first since
        return [leaf for leaf in (*changed, *first) if SHARDED_IN not in leaf.__dict__]

    def restore(self) -> None:
        """Set each `.grad` back."""
        now, before = ([each.grad for each in seen] for seen in (self._seen(), self._before))
        set_each("grad", self._leaves, now, before)

    def _seen(self) -> list[_Seen]:
        with without_torch_function():
            grads = [leaf.grad for leaf in self._leaves]
        # Code may write to a parameter without training it, such as an average of another one.
        own = [0 if self._everything else version_of(leaf) for leaf in self._leaves]
        of_grads = [0 if grad is None else version_of(grad) for grad in grads]
        return list(map(_Seen, grads, zip(of_grads, own, strict=True)))


def _stepped_leaves() -> list[torch.Tensor]:
    """Parameters of optimizers that have stepped, outside of sharded models."""
    groups = [group for optimizer in known_optimizers() for group in optimizer.param_groups]
    return _leaves(param for group in groups for param in group["params"])


def _all_leaves() -> list[torch.Tensor]:
    """All tensors that can get a `.grad`. Sharded parameters are only those of models that other threads do not run.

    The garbage collector does not list objects from before `gc.freeze()`.
    """
    engines = [engine for engine, _ in living_engines() if engine.is_of_this_thread]
    sharded = [param.sharded for engine in engines for group in engine.groups for param in group.params]
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    others = {id(leaf): leaf for leaf in (*_stepped_leaves(), *_leaves(tensors))}
    return [*sharded, *others.values()]


def _leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that can get a `.grad`, without sharded parameters and their unsharded ones."""
    with without_torch_function():
        leaves = [each for each in tensors if each.requires_grad and each.is_leaf]
    return [each for each in leaves if LEAF_OF not in each.__dict__ and SHARDED_IN not in each.__dict__]


def set_each(name: str, owners: Sequence[object], now: Sequence[object], wanted: Sequence[object]) -> None:
    """Set an attribute of those owners that do not have the wanted value."""
    changed = [(owner, value) for owner, before, value in zip(owners, now, wanted, strict=True) if before is not value]
    if changed:
        run_all(map(setattr, *zip(*[(owner, name, value) for owner, value in changed], strict=True)))
