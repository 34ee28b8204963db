"""The flow of gradients from the autograd node of a use to `.grad` of the sharded parameters.

take                  when the gradients of a use are complete: reduce them in turn or, with sync off, accumulate them
returned              when the caller of `torch.autograd.grad` asks for some of them: reduce them immediately
add_outside_forward   add a gradient from outside forward to the next gradients of its group
finish                when backward is over: reduce the remaining gradients, and wait for all reductions
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_

import torch

from .._comm.copies import Gradients
from .._group.group import ParamGroup
from .._group.hooks import WATCHED
from .._group.param import SHARDED_IN
from .._group.phases import SHARDED
from .._torch.core import HANDLES, Fate
from .._torch.distributed import dtensor_like
from ..errors import ShardConfigStateError
from .actions import Actions
from .backward import BackwardPass
from .node import Use, added

TakeGradient = Callable[[ParamGroup, int, torch.Tensor], None]


class GradientFlow:
    """Decides when the gradients of each group are reduced; `Actions` reduces them."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._outside_forward: dict[ParamGroup, Gradients] = {}
        self._looked: set[ParamGroup] = set()  # groups that were searched for hooks, in this pass

    def take_hooks(self, group: ParamGroup) -> None:
        """Take a group's parameter hooks from autograd until the pass ends, because they must see reduced gradients."""
        self._looked.add(group)
        if group.gradients.may_have_hooks:
            group.gradients.take_hooks()

    def settle(self, keeps_hooks: bool = False) -> None:
        """Wait for all reductions, set `.grad`, call the hooks, and return the hooks to autograd.

        Args:
            keeps_hooks: if True, the hooks are not returned yet: the backward of a compiled graph is running, at whose
                end `TracedGroup` returns them.
        """
        self._actions.reductions.finish_all()
        for group in () if keeps_hooks else self._actions.groups:
            if group.gradients.hooks_taken:
                group.gradients.give_hooks_back()

    def take(self, now: BackwardPass, use: Use, gradients: Gradients) -> None:
        """Reduce or accumulate the complete gradients of a use when it is their turn."""
        outside = self._outside_forward.pop(use.group, None)
        total = gradients if outside is None else added(outside, gradients)
        for each, complete in now.in_turn(use, total):
            self._reduce_or_accumulate(each.group, complete)

    def _reduce_or_accumulate(self, group: ParamGroup, gradients: Gradients) -> None:
        """Reduce or accumulate gradients according to the settings.

        Without any gradient, `.grad` stays None. With `reduce_unused` and gradient sync, it becomes a reduced
        gradient in any case.
        """
        options = group.settings.current
        if any(map(getattr, gradients, repeat("is_sparse"), repeat(False))):
            raise _sparse(group, gradients)
        # With `reduce_unused`, ranks may use different groups, or the same ones in different orders. Reductions must
        # have the same order on all ranks, so gradients are only collected here. `finish` reduces them in one order.
        if options.reduce_unused:
            group.gradients.check_unused()
            group.gradients.accumulate(gradients)
        elif all(map(is_, gradients, repeat(None))):
            return
        elif options.requires_gradient_sync:
            if group not in self._looked:  # its node did not run: the gradient is from outside forward
                self.take_hooks(group)
            self._actions.reduce(group, group.gradients.take(gradients))
        else:
            group.gradients.accumulate(gradients)

    def returned(self, use: Use, fates: Sequence[Fate], wanted: Gradients, is_last: bool) -> list[torch.Tensor | None]:
        """Reduce immediately. Returns the shards that the caller of `torch.autograd.grad` asked for, else None.

        A zero-bubble pipeline does this in each microbatch and adds the results to `.grad` itself. If gradient sync is
        off and the backward is not the last one (`is_last`), the gradients are accumulated for a later reduction. The
        caller then gets -0.0, which changes no sum: 0.0 would turn a sum of -0.0 into 0.0.
        """
        params, options = use.group.params, use.group.options
        out: list[torch.Tensor | None] = [None] * len(params)
        if not is_last and not options.requires_gradient_sync:
            use.group.gradients.accumulate(wanted)
            for index, (fate, gradient) in enumerate(zip(fates, wanted, strict=True)):
                if fate is Fate.RETURNED and gradient is not None:
                    out[index] = params[index].nothing(options)
            return out
        if any(gradient is not None for gradient in wanted):
            for index, piece in self._actions.reduce_now(use.group, wanted).items():
                if fates[index] is Fate.RETURNED:
                    param = params[index]
                    out[index] = param.hooks.on_tensor(dtensor_like(param.sharded, piece), param.fqn)
                else:
                    use.group.gradients.add({index: piece})
        return out

    def add_outside_forward(self, group: ParamGroup, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient from outside forward, of the parameter `index` of a group."""
        gradients: list[torch.Tensor | None] = [None] * len(group.params)
        gradients[index] = group.params[index].local_gradient(gradient, group.settings.current)
        before = self._outside_forward.get(group)
        self._outside_forward[group] = gradients if before is None else added(before, gradients)

    def finish(self, now: BackwardPass | None, groups: Sequence[ParamGroup], wait: bool) -> None:
        """At the end of backward: reduce the remaining gradients, in the same order on all ranks.

        Args:
            now: the pass that ends, if there is one.
            groups: all groups.
            wait: whether to wait for all reductions and set `.grad`. If not, a later call of `settle` does.
        """
        self._take_left_over(now)
        for group in groups:
            self._reduce_waiting(group)
            group.gradients.own_accumulated()
        self._actions.gathered.clear()
        self._looked.clear()
        if wait:
            self.settle()
        else:
            self._actions.reductions.set_gradients()

    def _take_left_over(self, now: BackwardPass | None) -> None:
        for use, gradients in now.left_over() if now is not None else ():
            self._reduce_or_accumulate(use.group, gradients)
        for group, gradients in self._outside_forward.items():
            self._reduce_or_accumulate(group, gradients)
        self._outside_forward.clear()

    def finish_group(self, group: ParamGroup) -> None:
        """Between backwards: reduce what a group has accumulated, and wait for all reductions."""
        self._reduce_waiting(group)
        self._actions.gathered.discard(group)
        self.settle()

    def _reduce_waiting(self, group: ParamGroup) -> None:
        options = group.settings.current
        if group.gradients.must_reduce or (options.reduce_unused and self._wants_zeros(group)):
            self.take_hooks(group)
            self._actions.reduce(group, group.gradients.take([None] * len(group.params)))

    def _wants_zeros(self, group: ParamGroup) -> bool:
        """Whether to reduce a group with `reduce_unused` that has no gradient, because other ranks may have some.

        This is the case if gradient sync is on and the group trains. In addition, it must have been gathered since the
        last backward, or still be unsharded from before. Both are the same on all ranks, unlike which rank used it.
        """
        if not group.settings.current.requires_gradient_sync:
            return False
        return group.trains and (group in self._actions.gathered or group.phase is not SHARDED)

    def discard(self) -> None:
        """Discard the gradients of a failed backward."""
        self._outside_forward.clear()
        self._looked.clear()
        self._actions.discard_reductions()
        self.settle()  # only to return the hooks to autograd, because no reduction is in flight any more


def watch_replaced(refuse: Callable[[], Callable[[str], None] | None], whole: torch.Tensor) -> None:
    """When `whole`, a parameter from before sharding, gets a gradient, pass its name to a method.

    Args:
        refuse: returns the method; None if its object was freed.
        whole: the parameter.
    """
    if whole.requires_grad:
        # The sharded parameter may share this tensor's dictionary of hooks. So the hook checks whose gradient it gets.
        hook = functools.partial(_refuse_replaced, refuse, weakref.ref(whole))
        whole.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        HANDLES.give()


def _refuse_replaced(
    method: Callable[[], Callable[[str], None] | None], whole: weakref.ref[torch.Tensor], leaf: torch.Tensor
) -> None:
    refuse = method()
    if refuse is not None and leaf is whole():
        refuse(leaf.__dict__[SHARDED_IN])


def watch_leaf(take: Callable[[], TakeGradient | None], leaf: torch.Tensor, group: ParamGroup, index: int) -> None:
    """Pass gradients of `leaf`, the unsharded parameter `index` of `group`, to a method, instead of to `leaf.grad`.

    Args:
        take: returns the method; None if its object was freed.
        leaf, group, index: the leaf, and the parameter that it stands for.
    """
    if (before := leaf.__dict__.get(WATCHED)) is not None:  # of an earlier engine, whose hook would take the gradient
        (leaf._post_accumulate_grad_hooks or {}).pop(before, None)
    # A partial object is small. A closure for each parameter would need three more objects, for its cells.
    hand_on = functools.partial(_hand_on, take, weakref.ref(group), index)
    trains = leaf.requires_grad
    leaf.requires_grad_(True)  # users may thaw it later, and torch only allows hooks on tensors that require gradients
    handle = leaf.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
    leaf.requires_grad_(trains)
    HANDLES.give()
    leaf.__dict__[WATCHED] = handle.id


def _hand_on(
    method: Callable[[], TakeGradient | None], group: weakref.ref[ParamGroup], index: int, leaf: torch.Tensor
) -> None:
    take, of, gradient = method(), group(), leaf.grad
    if take is not None and of is not None and gradient is not None:
        leaf.grad = None
        take(of, index, gradient)


def _sparse(group: ParamGroup, gradients: Gradients) -> ShardConfigStateError:
    pairs = zip(group.params, gradients, strict=True)
    names = ", ".join(param.fqn for param, gradient in pairs if gradient is not None and gradient.is_sparse)
    return ShardConfigStateError(
        f"parameter {names}: got a sparse gradient, which cannot be reduced into shards; use sparse=False in forward, "
        "or pass the parameter in ignored_params"
    )
