"""Which tensors are installed in a group's modules: sharded parameters, outputs of a node, leaves, or copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from .._group.group import ParamGroup
from .._group.hooks import WATCHED
from .._group.phases import UNSHARDED
from .._torch.core import HANDLES, to_keep
from .._torch.distributed import local_tensor
from .node import Outputs, Use

LeafHook = Callable[[torch.Tensor, ParamGroup, int], None]


class Installed:
    """Installs tensors in the modules of one engine's groups.

    In a backward with create_graph=True, modules see copies of the weights. Such a backward is itself recorded for
    another backward. Operators in it save weights without our saved-tensor hooks, so not as handles. If they were in a
    slot, they would be overwritten before the other backward reads them. Only while a checkpoint recomputes a sharded
    module, whose call sets our hooks, does the module see the gathered weights (`install_gathered`).

    Args:
        watch_leaf: called once for every unsharded leaf that users can read from a module outside its forward.
    """

    def __init__(self, watch_leaf: LeafHook) -> None:
        self._watch_leaf = watch_leaf
        # By group: the use that backward has reached, its node's outputs, and the copies.
        self._copied: dict[ParamGroup, tuple[Use, Outputs, list[torch.Tensor]]] = {}
        # Whether any hooks are registered in this process. In a backward, only code in hooks sees the installed
        # tensors, and may keep them. So without hooks, `end_use` need not look for kept ones.
        self._are_hooks = False

    def install_sharded(self, group: ParamGroup) -> None:
        """Install a group's sharded parameters."""
        if (entries := group.entries()) is not None:
            entries.install_sharded()

    def install_leaves(self, group: ParamGroup) -> None:
        """Install a group's unsharded parameters as leaves, without autograd history."""
        if (entries := group.entries()) is None:
            return
        entries.adopt_changes()
        entries.note_assigned()
        leaves = group.leaves()
        for index, leaf in enumerate(leaves):
            if WATCHED not in leaf.__dict__ and (leaf.requires_grad or _may_train(leaf)):
                self._watch_leaf(leaf, group, index)
        entries.install_leaves(leaves)

    def install_outputs(self, use: Use, outputs: Outputs) -> None:
        """Install the outputs of a use's node again, for a recomputation; leaves if there is no node.

        If the weights were gathered into other memory than before, the outputs are redirected to it.
        """
        group = use.group
        if use.places != group.places:
            _fill(group, outputs, group.weights())
            use.move(group.places)
        entries = group.entries()
        if outputs and entries is not None:
            entries.note_assigned()
            entries.install(outputs)
        elif entries is not None:
            self.install_leaves(group)

    def open_backward(self) -> None:
        """Begin a backward pass."""
        self._are_hooks = HANDLES.of_others() > 0

    def end_use(self, group: ParamGroup) -> None:
        """End the backward of a use."""
        if self._copied:
            self.install_gathered(group)  # outputs that user code keeps must not refer to copies afterwards
            self._copied.pop(group, None)
        for bucket in group.buckets if self._are_hooks else ():
            bucket.note_kept()

    def close_backward(self) -> None:
        """End a backward pass, successful or not."""
        self._copied.clear()

    # ---- copies

    def install_new_copies(self, use: Use, outputs: Outputs) -> None:
        """Install copies of a use's weights in its modules, until `end_use`."""
        group = use.group
        shown = group.weights() if outputs else group.leaves()
        with to_keep():
            copies = [*map(torch.Tensor.clone, shown)] if outputs else [*map(_copy_of_leaf, shown)]
        self._copied[group] = use, outputs, copies
        self.install_copies(group)

    def install_copies(self, group: ParamGroup) -> None:
        """Install the copies of this group's weights, if there are any."""
        if (copied := self._copied.get(group)) is None:
            return
        use, outputs, copies = copied
        if outputs:
            _fill(group, outputs, copies)
            use.move(())  # they refer to no slot now, so `install_outputs` will fill them again
        elif (entries := group.entries()) is not None:
            entries.install(copies)

    def install_gathered(self, group: ParamGroup) -> None:
        """Install gathered weights instead of copies: a recomputation saves handles again, or the use has ended."""
        if (copied := self._copied.get(group)) is None or group.phase is not UNSHARDED:
            return
        use, outputs, _ = copied
        if outputs:
            _fill(group, outputs, group.weights())
            use.move(group.places)
        else:
            self.install_leaves(group)


def _fill(group: ParamGroup, outputs: Outputs, weights: Sequence[torch.Tensor]) -> None:
    """Make the outputs of a node of this group refer to these weights. A frozen group has no outputs."""
    for out, weight in zip(outputs, weights, strict=False):
        (local_tensor(out) if group.layout.wraps and isinstance(out, DTensor) else out).data = weight


def _may_train(leaf: torch.Tensor) -> bool:
    """Whether users may thaw a frozen leaf. False for user-defined classes, which may refuse it."""
    return type(leaf) is torch.nn.Parameter and (leaf.is_floating_point() or leaf.is_complex())


def _copy_of_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf with its own memory; a leaf of a user-defined class is returned as it is."""
    if type(leaf) is not torch.nn.Parameter:
        return leaf
    copy = torch.nn.Parameter(leaf.detach().clone(), requires_grad=leaf.requires_grad)
    copy.__dict__.update(leaf.__dict__)
    return copy
