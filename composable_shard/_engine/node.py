"""The autograd node of a use.

A *use* is one forward of a group. Its node takes the sharded parameters and gives the unsharded ones, so that autograd
runs it after every later operation of that forward: when it does, the gradients of the use are complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from .._group.group import ParamGroup
from .._group.param import lend_attributes, run_all
from .._torch.core import (
    Fate,
    apply_function,
    called_directly,
    gradient_fates,
    node_will_run,
    outputs_pass_for_leaves,
    plainly,
)

Outputs = tuple[torch.Tensor, ...]


def _no_node() -> None:
    """In the place of a weak reference to a node."""


class Use:
    """One forward of a group.

    Attributes:
        number: place in the order of creation, over all groups of the engine.
        last: number of the last use that began before the forward of this one was over.
        made_in: number of the backward pass in which the forward ran (a recomputation), -1 outside of any.
        forward: number of the root's forward that it was part of; 0 for a recomputation.
        node: the autograd node, weakly; None for a group without gradients.
        slots: where the weights were in forward.
        reads: how many weights autograd has saved, of the group's first bucket.
        entered: number of the last backward pass that has reached it.
        fired: whether its gradients have been complete once.
        under_hooks: whether saved-tensor hooks were around it, such as those of a checkpoint, which recomputes it.
        partial: gradients of nested backward passes that are not yet complete, or None.
    """

    __slots__ = (
        "__weakref__",
        "entered",
        "fired",
        "forward",
        "group",
        "last",
        "made_in",
        "node",
        "number",
        "partial",
        "reads",
        "slots",
        "under_hooks",
    )

    def __init__(
        self,
        group: ParamGroup,
        number: int,
        made_in: int,
        forward: int = 0,
        under_hooks: bool = False,
    ) -> None:
        self.group = group
        self.number = self.last = number
        self.made_in = made_in
        self.forward = forward
        self.node: Callable[[], Any] = _no_node
        self.slots = group.slots
        self.reads = 0
        self.entered = -1
        self.fired = False
        self.under_hooks = under_hooks
        self.partial: list[torch.Tensor | None] | None = None

    def end_forward(self, last: int, reads: int) -> None:
        """Its forward is over.

        Args:
            last: number of the last use that began before.
            reads: how many weights autograd has saved, of the group's first bucket.
        """
        self.last, self.reads = last, reads

    def reach(self, number: int) -> None:
        """A backward pass, given by its number, has reached this use."""
        self.entered = number

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients have come that are not all."""
        self.partial = self.add(gradients)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The last gradients have come; returns the sum of all."""
        self.fired = True
        return self.add(gradients)

    def move(self, slots: tuple[object, ...]) -> None:
        """Its outputs show the weights in other slots now."""
        self.slots = slots

    def forget(self) -> None:
        """Its backward has failed."""
        self.partial = None

    def add(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The sum of the partial gradients and these; nothing stays behind."""
        before, self.partial = self.partial, None
        return list(gradients) if before is None else added(before, gradients)


def added(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Sums of gradients, where None stands for none."""
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]


class NodeOwner(Protocol):
    """Who is told what happens to a node."""

    witness: Witness

    def on_gradients(self, use: Use, node: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of a use have come; returns those of the sharded parameters that autograd must hand on."""

    def on_node_gone(self, use: Use) -> None:
        """The graph of a use was freed."""

    def on_handles_gone(self, use: Use) -> None:
        """The last saved weight of a use of a frozen group was freed."""


class _Lifeline:
    """Lives as long as the node and tells its owner of its end."""

    __slots__ = ("owner", "use")

    def __init__(self, owner: NodeOwner, use: Use) -> None:
        self.owner = owner
        self.use = use

    def __del__(self) -> None:
        self.owner.on_node_gone(self.use)


class Keeper:
    """Held by the handles of one use of a frozen group, of whose end no node tells."""

    __slots__ = ("_owner", "_use")

    def __init__(self, owner: NodeOwner, use: Use) -> None:
        self._owner = owner
        self._use = use

    def __del__(self) -> None:
        self._owner.on_handles_gone(self._use)


class Witness:
    """Tells what becomes of the gradients of a node's leaves, by asking for a leaf that nobody else knows.

    Every node takes that leaf, too. A backward pass in which its gradient is added to `.grad` was not told for which
    leaves it runs, so that those of all are. Otherwise the leaves themselves are asked, which takes longer than what
    autograd does for them.
    """

    def __init__(self) -> None:
        with plainly(), torch.enable_grad():
            self.leaf = torch.zeros((), requires_grad=True)  # on the CPU: its node belongs to no stream
            self._node = get_gradient_edge(self.leaf).node
        self._adds_all = -1  # number of a pass that does

    def fates(self, node: Any, number: int) -> list[Fate] | None:
        """The fate of the gradient of each leaf of a node in the pass that runs now, by its number; None: all added."""
        if number != self._adds_all:
            if not node_will_run(self._node):
                return gradient_fates([leaf_node for leaf_node, _ in node.next_functions[1:]])
            self._adds_all = number
        return None


class _Unshard(torch.autograd.Function):
    """Sharded parameters -> unsharded ones."""

    @staticmethod
    def forward(
        ctx: Any, lifeline: _Lifeline, weights: Sequence[torch.Tensor], witness: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.lifeline = lifeline
        ctx.set_materialize_grads(False)
        outputs = tuple(map(_data, weights))  # at a third of what `detach` takes
        needed = ctx.needs_input_grad
        if not all(needed[3:]):
            frozen = [out for out, need in zip(outputs, needed[3:], strict=True) if not need]
            ctx.mark_non_differentiable(*frozen)
        lifeline.use.node = weakref.ref(ctx)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _differentiated_once(ctx, *gradients) if torch.is_grad_enabled() else _backward(ctx, *gradients)


called_directly(_Unshard)
outputs_pass_for_leaves(_Unshard)  # forward may assign a parameter to a module, a tracer of torch.fx to its graph
_attributes, _data = attrgetter("__dict__"), attrgetter("data")


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    line = ctx.lifeline
    return (None, None, None, *line.owner.on_gradients(line.use, ctx, gradients))


# With create_graph a reduced gradient must not pass for a constant: to differentiate it is an error.
_differentiated_once = once_differentiable(_backward)


def unshard(owner: NodeOwner, use: Use) -> tuple[torch.Tensor, ...]:
    """Create the node of `use` over the weights that its group has gathered.

    Returns:
        the unsharded parameters: tensors of this graph that look like Parameters, with the attributes that users set
        on the sharded ones. What forward writes on them is theirs alone: it may belong to this graph.
    """
    group = use.group
    weights = group.weights(for_use=True)
    outputs = apply_function(_Unshard, _Lifeline(owner, use), weights, owner.witness.leaf, *group.shards)
    if group.wraps:
        outputs = tuple([p.parallel.wrap(o) if p.parallel else o for o, p in zip(outputs, group.params, strict=True)])
    # `_is_param` is among them: isinstance(out, nn.Parameter) holds.
    if group.extended:
        run_all(map(lend_attributes, outputs, group.shards))
    else:
        run_all(map(dict.update, map(_attributes, outputs), map(_attributes, group.shards)))
    group.begin_use(outputs)
    return outputs
