"""The way of gradients: from the autograd node of a use to `.grad` of the sharded parameters.

take        all gradients of a use are there: they wait for their turn, then are reduced, or kept with sync off
returned    the caller of `torch.autograd.grad` wants some: reduced at once
add_outside_forward   a gradient that came to an unsharded parameter outside of its module's forward joins the next ones
finish      backward is over: what still waits is reduced, and all reductions are waited for
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Protocol

import torch

from .._errors import ShardConfigStateError
from .._group.group import Gradients, ParamGroup
from .._group.phases import SHARDED
from .._torch.core import HANDLES, Fate
from .actions import Actions
from .backward import BackwardPass
from .node import Use, added


class GradientFlow:
    """Decides when the gradients of which group are reduced; `Actions` does it."""

    def __init__(self, actions: Actions) -> None:
        self._do = actions
        self._outside_forward: dict[ParamGroup, Gradients] = {}
        self._reduced: set[ParamGroup] = set()  # in this pass
        self._looked: set[ParamGroup] = set()  # for hooks, in this pass

    def take_hooks(self, group: ParamGroup) -> None:
        """Before autograd can call the hooks of a group's parameters: they see what is reduced, until the pass ends."""
        self._looked.add(group)
        if group.may_have_hooks:
            group.take_hooks()

    def settle(self) -> None:
        """Wait for all reductions, set `.grad` and call the hooks, which are autograd's again then."""
        self._do.settle()
        self._give_hooks_back()

    def _give_hooks_back(self) -> None:
        for group in self._do.groups:
            if group.hooks_taken:
                group.give_hooks_back()

    def take(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        """All gradients of a use are there."""
        outside = self._outside_forward.pop(use.group, None)
        total = gradients if outside is None else added(outside, gradients)
        for each, its in now.in_turn(use, total):
            self._reduce_or_keep(each.group, its)

    def _reduce_or_keep(self, group: ParamGroup, gradients: Gradients) -> None:
        """As the settings say. A group without any gradient is left alone: its `.grad` stays None."""
        options = group.settings.current
        if any(map(getattr, gradients, repeat("is_sparse"), repeat(False))):
            raise _sparse(group, gradients)
        if options.reduce_unused:
            group.keep(gradients)  # other ranks may get those of other groups, or none: `finish` has one order for all
        elif all(map(is_, gradients, repeat(None))):
            return
        elif options.requires_gradient_sync:
            if group not in self._looked:  # its node did not run
                self.take_hooks(group)
            self._reduced.add(group)
            self._do.reduce(group, group.take_kept(gradients))
        else:
            group.keep(gradients)

    def returned(self, use: Use, fates: Sequence[Fate], wanted: Gradients, is_last: bool) -> list[torch.Tensor | None]:
        """Reduce at once; gives the pieces that the caller of `torch.autograd.grad` asked for, None for the others.

        A zero-bubble pipeline asks so in each micro-batch and adds what it gets to `.grad`: with sync
        off it gets nothing to add, and the gradients are kept for the reduction that it will ask for.
        """
        params = use.group.params
        out: list[torch.Tensor | None] = [None] * len(params)
        if not is_last and not use.group.options.requires_gradient_sync:
            use.group.keep(wanted)
            asked = [fate is Fate.RETURNED and g is not None for fate, g in zip(fates, wanted, strict=True)]
            return [param.nothing() if its else None for param, its in zip(params, asked, strict=True)]
        if any(gradient is not None for gradient in wanted):
            for index, piece in self._do.reduce_now(use.group, wanted).items():
                if fates[index] is Fate.RETURNED:
                    out[index] = params[index].hooked(piece)
                else:
                    params[index].accumulate(piece)
        return out

    def add_outside_forward(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """A gradient of a leaf that was read outside of its module's forward."""
        its: list[torch.Tensor | None] = [None] * len(group.params)
        parallel = group.params[index].parallel
        its[index] = gradient if parallel is None else parallel.local_gradient(gradient)
        before = self._outside_forward.get(group)
        self._outside_forward[group] = its if before is None else added(before, its)

    def finish(self, now: BackwardPass | None, groups: Sequence[ParamGroup], wait: bool) -> None:
        """Reduce what has waited in vain, and wait for all reductions."""
        for use, gradients in now.left_over() if now is not None else ():
            self._reduce_or_keep(use.group, gradients)
        for group, gradients in self._outside_forward.items():
            self._reduce_or_keep(group, gradients)
        for group in groups:
            options = group.settings.current
            unused = options.reduce_unused and options.requires_gradient_sync and group.trains
            unused = unused and (group in self._do.gathered or group.phase is not SHARDED)
            # Kept in earlier micro-batches and not used in this one, or not used at all where zeros are wanted.
            if group.awaits_reduction or (unused and group not in self._reduced):
                self.take_hooks(group)
                self._do.reduce(group, group.take_kept([None] * len(group.params)))
        self._do.gathered.clear()
        self._outside_forward.clear()
        self._reduced.clear()
        self._looked.clear()
        if wait:
            self.settle()
        else:
            self._do.hand_out()

    def discard(self) -> None:
        """A backward has failed: throw its gradients away."""
        self._outside_forward.clear()
        self._reduced.clear()
        self._looked.clear()
        self._do.discard()
        self._give_hooks_back()


class LeafOwner(Protocol):
    """Who is told of gradients outside forward."""

    def on_gradient_outside_forward(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """A gradient came to an unsharded parameter that was read outside of its module's forward."""


def watch_leaf(owner: Callable[[], LeafOwner | None], leaf: torch.Tensor, group: ParamGroup, index: int) -> None:
    """Hand on whatever gradient comes to `leaf`, which stands for parameter `index` of `group`."""
    this_group = weakref.ref(group)

    def hand_on(tensor: torch.Tensor) -> None:
        there, of, gradient = owner(), this_group(), tensor.grad
        if there is not None and of is not None and gradient is not None:
            tensor.grad = None
            there.on_gradient_outside_forward(of, index, gradient)

    leaf.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
    HANDLES.ours += 1


def _sparse(group: ParamGroup, gradients: Gradients) -> ShardConfigStateError:
    pairs = zip(group.params, gradients, strict=True)
    names = ", ".join(param.fqn for param, gradient in pairs if gradient is not None and gradient.is_sparse)
    return ShardConfigStateError(
        f"parameter {names}: got a sparse gradient, which cannot be reduced into shards; use sparse=False in forward, "
        "or pass the parameter in ignored_params"
    )
