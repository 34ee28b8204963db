"""The autograd node of a use.

A *use* is one forward of a group, with the backward that belongs to it. Its node takes the sharded parameters and
returns the unsharded ones. All operations of that forward start from these, so autograd runs the node when all
gradients of the use are complete. A use has *fired* when a backward has taken its gradients. That is usually when the
node has run. It is later if nested backward passes add to the gradients, and it also happens to uses that backward has
passed without running their node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from .._group.bucket import Saved
from .._group.group import ParamGroup
from .._group.param import lend_attributes, lent_attributes, run_all
from .._torch.core import (
    Fate,
    NotForCompiledAutograd,
    called_directly,
    gradient_fates,
    node_will_run,
    outputs_pass_for_leaves,
    plain_apply,
    plainly,
)
from ..errors import ShardConfigStateError

Outputs = tuple[torch.Tensor, ...]
_forward_of, _has_fired = attrgetter("forward"), attrgetter("fired")


def _no_node() -> None:
    """Replaces a weak reference to a node where there is none."""


class Use:
    """One forward of a group, with the backward that belongs to it.

    Attributes:
        group: the group.
        number: counts the uses of all groups of the engine, in the order of creation.
        last: number of the newest use when the forward of this one ended. So the uses with numbers up to `last` began
            within this one (see the example in `backward.py`).
        made_in: number of the backward pass in which the forward ran (a recomputation); -1 outside of any.
        forward: number of the root forward that contains the use; 0 for a recomputation.
        node: a weak reference to the autograd node; returns None if there is no node, as for a frozen group.
        places: the addresses of the weights to which the node's outputs refer; empty if they refer to copies.
        reads: how many handles autograd has saved for weights of the group's first bucket. Backward will read each of
            them once, so counting reads tells when it has come halfway. The first bucket stands for all: most groups
            have only one.
        saved_any: whether autograd has saved a handle for any weight of the group.
        fired: whether a backward has taken its gradients, as described above. Not if `torch.autograd.grad` has returned
            them.
        under_hooks: whether its forward ran under saved-tensor hooks of other code, such as a checkpoint that
            recomputes the forward.
        partial: the sum of the gradients so far, if nested backward passes (of checkpoints) will add more; else None.
    """

    __slots__ = (
        "__weakref__",
        "_saved_before",
        "fired",
        "forward",
        "group",
        "last",
        "made_in",
        "node",
        "number",
        "partial",
        "places",
        "reads",
        "saved_any",
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
        self.places = group.places
        self.reads = 0
        self.saved_any = False
        self._saved_before = [bucket.saved for bucket in group.buckets]
        self.fired = False
        self.under_hooks = under_hooks
        self.partial: list[torch.Tensor | None] | None = None

    def end_forward(self, last: int) -> None:
        """End the forward of the use; `last` is the number of the last use that has begun so far."""
        self.last = last
        saved = [bucket.saved for bucket in self.group.buckets]
        self.reads = saved[0] - self._saved_before[0]
        self.saved_any = saved != self._saved_before

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to the partial sum, because more will follow."""
        self.partial = list(gradients) if self.partial is None else added(self.partial, gradients)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the last gradients; returns the sum of all."""
        self.fired = True
        before, self.partial = self.partial, None
        return list(gradients) if before is None else added(before, gradients)

    def move(self, places: tuple[int, ...]) -> None:
        """Note that the node's outputs now refer to the weights at these places."""
        self.places = places

    def forget(self) -> None:
        """Discard the partial gradients after the backward of the use failed."""
        self.partial = None


def added(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The sums of gradients, pair by pair; None stands for no gradient."""
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]


class Uses:
    """The uses of an engine that a backward may still go through, on this rank or on other ranks.

    Attributes:
        in_forward: by group, the use whose forward is running.
        lost: the uses whose graph was freed on this rank, but may be alive on other ranks.
    """

    def __init__(self) -> None:
        self.in_forward: dict[ParamGroup, Use] = {}
        self._count = 0  # number of all uses so far
        self._live: dict[int, Use] = {}  # the uses whose graph is alive, by number, in the order of creation
        self.lost: list[Use] = []

    def __iter__(self) -> Iterator[Use]:
        # A copy: an autograd thread may free a graph meanwhile, which changes `_live`.
        return iter([*self._live.values(), *self.lost])

    def begin(self, group: ParamGroup, made_in: int, forward: int, under_hooks: bool) -> Use:
        """Create the use of a group's forward that has begun; arguments as for `Use`."""
        self._count += 1
        use = self._live[self._count] = self.in_forward[group] = Use(group, self._count, made_in, forward, under_hooks)
        return use

    def newest(self, group: ParamGroup) -> Use | None:
        """The newest use of a group whose graph is alive."""
        return next((use for use in reversed([*self._live.values()]) if use.group is group), None)

    def end_forward(self, group: ParamGroup) -> bool:
        """End a forward of a group; returns whether it belonged to a use."""
        use = self.in_forward.pop(group, None)
        if use is not None:
            use.end_forward(self._count)
        return use is not None

    def graph_gone(self, use: Use) -> None:
        """Note that the graph of a use was freed."""
        self._live.pop(use.number, None)
        # The graph has had no backward here. Another rank may still have it and run its backward. With `reduce_unused`,
        # this rank must take part in that.
        if use.group.settings.current.reduce_unused and use.group.trains and use.forward and not use.fired:
            self.lost.append(use)

    def forget_lost(self, waiting: bool) -> None:
        """At the start of a root forward: forget lost uses that no later backward goes through.

        All ranks run the backward of a root forward, or none does. So if this rank has no graph of it left, no rank
        will run its backward, and the lost uses of that forward are forgotten.

        Args:
            waiting: whether an earlier forward waits for its backward. If not, all lost uses are forgotten.
        """
        alive = set(map(_forward_of, self._live.values())) if waiting else ()
        self.lost = [use for use in self.lost if use.forward in alive]

    def forget(self, forwards: Container[int] | None = None) -> None:
        """Forget the lost uses of these forwards (None: of all), because their backward is over."""
        self.lost = [use for use in self.lost if forwards is not None and use.forward not in forwards]

    def all_fired(self) -> bool:
        """Whether all uses whose graph is alive have fired."""
        return all(map(_has_fired, self._live.values()))


class NodeOwner(Protocol):
    """The object that is notified of a node's events: the engine."""

    witness: Witness
    uses: Uses

    def on_gradients(self, use: Use, node: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Handle the gradients when the node of a use runs; returns the gradients for the sharded parameters."""

    def on_handles_gone(self, use: Use, saved: Saved) -> None:
        """Handle that the last saved weight of a use of a frozen group was freed; `saved` are all that were saved."""


class _Lifeline:
    """Lives as long as a node, and notifies the owner when the graph is freed."""

    __slots__ = ("owner", "use")

    def __init__(self, owner: NodeOwner, use: Use) -> None:
        self.owner = owner
        self.use = use

    def __del__(self) -> None:
        self.owner.uses.graph_gone(self.use)


class Keeper:
    """Held by all handles of a use of a frozen group, which has no node; notifies the owner when the last is freed.

    Attributes:
        saved: the weights that have handles.
    """

    __slots__ = ("_owner", "_use", "saved")

    def __init__(self, owner: NodeOwner, use: Use) -> None:
        self._owner = owner
        self._use = use
        self.saved: Saved = set()

    def __del__(self) -> None:
        self._owner.on_handles_gone(self._use, self.saved)


class Witness:
    """Tells what a backward pass does with the gradients of a node's leaves, the sharded parameters.

    It may add them to `.grad` (`loss.backward()`), return some (`torch.autograd.grad`), or drop those that are not in
    ``inputs=``. Autograd can be asked for each leaf, but that takes longer than its own work for the leaf. So every
    node has one more leaf, the witness, which users cannot pass as an input. If the pass will run the node of the
    witness, it is not restricted to inputs, and adds the gradients of all leaves. Otherwise each leaf is asked.
    """

    def __init__(self) -> None:
        with plainly(), torch.enable_grad():
            # On the CPU. For a leaf on an accelerator, autograd would synchronize streams before it adds the gradient.
            self.leaf = torch.zeros((), requires_grad=True)
            self._node = get_gradient_edge(self.leaf).node
        self._adds_all = -1  # number of the last pass known to add the gradients of all leaves

    def fates(self, node: Any, number: int) -> list[Fate] | None:
        """What happens to the gradient of each leaf of a node in the running pass `number`; None if all are added."""
        if number != self._adds_all:
            if not node_will_run(self._node):
                return gradient_fates([leaf_node for leaf_node, _ in node.next_functions[1:]])
            self._adds_all = number
        return None


class _Unshard(NotForCompiledAutograd):
    """The node: takes sharded parameters and returns unsharded ones."""

    @staticmethod
    def forward(
        ctx: Any, lifeline: _Lifeline, weights: Sequence[torch.Tensor], witness: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.lifeline = lifeline
        ctx.set_materialize_grads(False)
        outputs = tuple(map(_data, weights))  # tensors with version counters of their own, for `Writes`
        group = lifeline.use.group
        # The node itself makes the DTensors, so that their gradients reach `backward` as they are. If
        # `DTensor.from_local` were called on plain outputs, its backward would first sum a partial gradient, in the
        # dtype of that gradient. Our reduction sums it later, in its own dtype.
        if group.layout.wraps:
            outputs = group.wrapped(outputs)
        needed = ctx.needs_input_grad  # of the three first arguments, then of the shards
        if not all(needed[3:]):
            frozen = [out for out, need in zip(outputs, needed[3:], strict=True) if not need]
            ctx.mark_non_differentiable(*frozen)
        lifeline.use.node = weakref.ref(ctx)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # True with create_graph
            return _differentiated_once(ctx, *gradients)
        line = ctx.lifeline
        use = line.use
        if use.group.layout.wraps:
            gradients = use.group.local_gradients(gradients)
        return (None, None, None, *line.owner.on_gradients(use, ctx, gradients))

    @staticmethod
    def refusal(node: Any) -> ShardConfigStateError:
        return ShardConfigStateError(
            f"group {node.lifeline.use.group.name}: compiled autograd cannot trace the backward of an eager forward, "
            "because its hooks gather weights and reduce gradients; compile the model (`torch.compile(model)`), so "
            "that its backward is called and not traced, or run this backward without compiled autograd"
        )


_apply = plain_apply(_Unshard)
called_directly(_Unshard)
# A forward may assign an unsharded parameter to a module, and a torch.fx tracer may assign one to its graph. Both are
# allowed for leaves only, so the outputs pass for leaves.
outputs_pass_for_leaves(_Unshard)
_attributes, _data = attrgetter("__dict__"), attrgetter("data")


# Differentiating a reduced gradient again must raise an error instead of treating the gradient as a constant. Grad mode
# is off while `once_differentiable` runs our backward.
_differentiated_once = once_differentiable(_Unshard.backward)


def unshard(owner: NodeOwner, use: Use) -> tuple[torch.Tensor, ...]:
    """Create the node of `use` over the weights that its group has gathered.

    The caller installs the outputs, then calls `ParamGroup.begin_forward`.

    Returns:
        the unsharded parameters: tensors of this graph that look like Parameters, with the attributes that users set
        on the sharded parameters. Attributes that forward sets on them stay there, because they may belong to this
        graph.
    """
    group = use.group
    weights = group.weights_for_use()
    outputs = _apply(_Lifeline(owner, use), weights, owner.witness.leaf, *group.shards)
    # The attributes of the shards include `_is_param`, so isinstance(out, nn.Parameter) holds.
    if group.layout.extended:
        run_all(map(lend_attributes, outputs, group.shards))
    elif outputs[0].__dict__:  # fake tensors have attributes of their class there
        run_all(map(dict.update, map(_attributes, outputs), lent_attributes(group.shards)))
    else:
        # New tensors have no attributes yet. Replacing the whole dictionary takes less host time than `update`.
        run_all(map(setattr, outputs, repeat("__dict__"), lent_attributes(group.shards)))
    if group.layout.packed:
        group.lend_carried(outputs)
    return outputs
