"""The autograd node of a use.

A *use* is one forward of a group. Its node takes the sharded parameters and gives the unsharded ones, from which all
operations of that forward begin. So when autograd runs the node, the gradients of the use are complete.
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
    called_directly,
    gradient_fates,
    node_will_run,
    outputs_pass_for_leaves,
    plain_apply,
    plainly,
)

Outputs = tuple[torch.Tensor, ...]


def _no_node() -> None:
    """Stands in for a weak reference to a node."""


class Use:
    """One forward of a group, with the backward that belongs to it.

    Attributes:
        group: the group.
        number: counts the uses of all groups of the engine, in the order of creation.
        last: number of the last use that began before the forward of this one was over.
        made_in: number of the backward pass in which the forward ran (a recomputation), -1 outside of any.
        forward: number of the root's forward that contains the use; 0 for a recomputation.
        node: a weak reference to the autograd node; gives None if there is none, as for a frozen group.
        slots: the slots of the weights that the node's outputs show.
        reads: how many handles of weights of the group's first bucket autograd has saved.
        entered: number of the last backward pass that has reached the use.
        fired: whether its gradients have been complete once.
        under_hooks: whether its forward ran under saved-tensor hooks, as of a checkpoint, which recomputes it.
        partial: the sum of the gradients so far, while more are to come from other nested passes; or None.
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
        """The forward of the use is over.

        Args:
            last: number of the last use that has begun until now.
            reads: how many handles of weights of the group's first bucket autograd has saved.
        """
        self.last, self.reads = last, reads

    def reach(self, number: int) -> None:
        """A backward pass, given by its number, has reached this use."""
        self.entered = number

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Some gradients have come, and more will: add them to the partial ones."""
        self.partial = self.add(gradients)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The last gradients have come; returns the sum of all."""
        self.fired = True
        return self.add(gradients)

    def move(self, slots: tuple[object, ...]) -> None:
        """The node's outputs show the weights in these slots now."""
        self.slots = slots

    def forget(self) -> None:
        """The backward of the use has failed: drop its partial gradients."""
        self.partial = None

    def add(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The sum of the partial gradients, which are taken away, and these."""
        before, self.partial = self.partial, None
        return list(gradients) if before is None else added(before, gradients)


def added(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Sums of gradients, pair by pair; None stands for no gradient."""
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]


class NodeOwner(Protocol):
    """Is told of the events of a node: the engine."""

    witness: Witness

    def on_gradients(self, use: Use, node: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The node of a use runs; returns the gradients that autograd hands to the sharded parameters."""

    def on_node_gone(self, use: Use) -> None:
        """The graph of a use was freed."""

    def on_handles_gone(self, use: Use) -> None:
        """The last saved weight of a use of a frozen group was freed."""


class _Lifeline:
    """Lives as long as a node; tells the owner of the end of both."""

    __slots__ = ("owner", "use")

    def __init__(self, owner: NodeOwner, use: Use) -> None:
        self.owner = owner
        self.use = use

    def __del__(self) -> None:
        self.owner.on_node_gone(self.use)


class Keeper:
    """Held by all handles of a use of a frozen group, which has no node; tells the owner when the last one is freed."""

    __slots__ = ("_owner", "_use")

    def __init__(self, owner: NodeOwner, use: Use) -> None:
        self._owner = owner
        self._use = use

    def __del__(self) -> None:
        self._owner.on_handles_gone(self._use)


class Witness:
    """Tells what becomes of the gradients of a node's leaves, by means of one leaf of its own.

    Every node also takes that leaf, which no user can name in `inputs=` or in `torch.autograd.grad`. So if a backward
    pass will add a gradient to the leaf, it is not restricted to some inputs and adds the gradients of all leaves. Only
    in other passes is each leaf of a node asked, which takes longer than autograd's own work for these leaves.
    """

    def __init__(self) -> None:
        with plainly(), torch.enable_grad():
            self.leaf = torch.zeros((), requires_grad=True)  # on the CPU: its node belongs to no stream
            self._node = get_gradient_edge(self.leaf).node
        self._adds_all = -1  # number of a pass that adds the gradients of all leaves

    def fates(self, node: Any, number: int) -> list[Fate] | None:
        """The fate of each leaf's gradient of a node in the pass `number`, which runs now; None if all are added."""
        if number != self._adds_all:
            if not node_will_run(self._node):
                return gradient_fates([leaf_node for leaf_node, _ in node.next_functions[1:]])
            self._adds_all = number
        return None


class _Unshard(torch.autograd.Function):
    """The node: takes sharded parameters, gives unsharded ones."""

    @staticmethod
    def forward(
        ctx: Any, lifeline: _Lifeline, weights: Sequence[torch.Tensor], witness: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.lifeline = lifeline
        ctx.set_materialize_grads(False)
        outputs = tuple(map(_data, weights))  # takes a third of the time of `detach`
        needed = ctx.needs_input_grad
        if not all(needed[3:]):
            frozen = [out for out, need in zip(outputs, needed[3:], strict=True) if not need]
            ctx.mark_non_differentiable(*frozen)
        lifeline.use.node = weakref.ref(ctx)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return _differentiated_once(ctx, *gradients) if torch.is_grad_enabled() else _backward(ctx, *gradients)


_apply = plain_apply(_Unshard)
called_directly(_Unshard)
outputs_pass_for_leaves(_Unshard)  # forward may assign a parameter to a module, a tracer of torch.fx to its graph
_attributes, _data = attrgetter("__dict__"), attrgetter("data")


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    line = ctx.lifeline
    return (None, None, None, *line.owner.on_gradients(line.use, ctx, gradients))


# With create_graph, differentiating a reduced gradient must be an error, and not treat that gradient as a constant.
_differentiated_once = once_differentiable(_backward)


def unshard(owner: NodeOwner, use: Use) -> tuple[torch.Tensor, ...]:
    """Create the node of `use` over the weights that its group has gathered.

    Returns:
        the unsharded parameters: tensors of this graph that look like Parameters, with the attributes that users set
        on the sharded ones. Attributes that forward sets on them stay there, as these may belong to this graph.
    """
    group = use.group
    weights = group.weights(for_use=True)
    outputs = _apply(_Lifeline(owner, use), weights, owner.witness.leaf, *group.shards)
    if group.layout.wraps:
        outputs = tuple([p.parallel.wrap(o) if p.parallel else o for o, p in zip(outputs, group.params, strict=True)])
    # `_is_param` is among them: isinstance(out, nn.Parameter) holds.
    if group.layout.extended:
        run_all(map(lend_attributes, outputs, group.shards))
    else:
        run_all(map(dict.update, map(_attributes, outputs), map(_attributes, group.shards)))
    group.begin_use(outputs)
    return outputs
