"""What a step runs and trains: the models, and parameters outside of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .._engine.engine import Engine
from .._group.faces import LEAF_OF
from .._group.param import SHARDED_IN, run_all
from .._module.build import living_engines
from .._torch.core import version_of, without_torch_function

Grad = tuple[torch.Tensor | None, int]  # `.grad` and its version


class Observation:
    """Compares what has run and what was trained with the time when this object was made.

    It holds the `.grad` of parameters outside of sharded models. A new gradient therefore never has the same id.
    """

    def __init__(self) -> None:
        self._runs = {id(engine): engine.runs for engine, _ in living_engines()}
        self._leaves = _other_leaves()
        self._grads = _grads_of(self._leaves)

    def engines(self) -> list[tuple[Engine, nn.Module]]:
        """The engines that have run since, in this thread, with their roots."""
        engines = [(engine, root) for engine, root in living_engines() if engine.is_of_this_thread]
        return [(engine, root) for engine, root in engines if engine.runs != self._runs.get(id(engine), (0, 0, 0))]

    def trained(self) -> list[torch.Tensor]:
        """The parameters outside of sharded models whose `.grad` has changed since."""
        pairs = zip(self._grads, _grads_of(self._leaves), strict=True)
        changed = [before[0] is not now[0] or before[1] != now[1] for before, now in pairs]
        return [leaf for leaf, has_changed in zip(self._leaves, changed, strict=True) if has_changed]

    def restore(self) -> None:
        """Set `.grad` of these parameters back."""
        now, before = ([grad for grad, _ in grads] for grads in (_grads_of(self._leaves), self._grads))
        set_each("grad", self._leaves, now, before)


def _other_leaves() -> list[torch.Tensor]:
    """All tensors of the process that can get a `.grad`, except sharded parameters and their unsharded ones.

    A step may train parameters of any module, and only the garbage collector lists them all.
    """
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with without_torch_function():
        leaves = [each for each in tensors if each.requires_grad and each.is_leaf]
    return [each for each in leaves if LEAF_OF not in each.__dict__ and SHARDED_IN not in each.__dict__]


def _grads_of(leaves: Iterable[torch.Tensor]) -> list[Grad]:
    with without_torch_function():
        grads = [leaf.grad for leaf in leaves]
    return [(grad, 0 if grad is None else version_of(grad)) for grad in grads]


def set_each(name: str, owners: Sequence[object], now: Sequence[object], wanted: Sequence[object]) -> None:
    """Set an attribute of those owners that do not have the wanted value."""
    changed = [(owner, value) for owner, before, value in zip(owners, now, wanted, strict=True) if before is not value]
    if changed:
        run_all(map(setattr, *zip(*[(owner, name, value) for owner, value in changed], strict=True)))
