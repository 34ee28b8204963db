"""The installed parameters: which tensors stand in the modules of a group, sharded or unsharded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from .._group.group import ParamGroup
from .._torch.distributed import local_tensor
from .node import Outputs, Use

LeafHook = Callable[[torch.Tensor, ParamGroup, int], None]


class Shown:
    """Installs the parameters of the groups of one engine in their modules.

    Args:
        watch_leaf: called once with every leaf that users may find in a module outside of its forward.
    """

    def __init__(self, watch_leaf: LeafHook) -> None:
        self._watch_leaf = watch_leaf

    def hide(self, group: ParamGroup) -> None:
        """Install a group's sharded parameters."""
        if (entries := group.entries()) is not None:
            entries.hide()

    def hide_idle(self, groups: Sequence[ParamGroup]) -> None:
        """`hide` all groups whose forward does not run."""
        for group in groups:
            if not group.running:
                self.hide(group)

    def show_pieces(self, group: ParamGroup) -> None:
        """Install the pieces that a few ranks keep of a group's weights."""
        if (entries := group.entries()) is not None:
            entries.show(group.pieces())

    def show_leaves(self, group: ParamGroup) -> None:
        """Install a group's unsharded parameters as leaves, without autograd history."""
        if (entries := group.entries()) is None:
            return
        leaves = group.leaves()
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad and "_watched" not in leaf.__dict__:
                leaf.__dict__["_watched"] = True
                self._watch_leaf(leaf, group, index)
        entries.show(leaves)

    def show_again(self, use: Use, outputs: Outputs) -> None:
        """Install the outputs of a use's node again, for a recomputation; leaves where there is no node.

        If the weights were gathered into other slots than before, the outputs are made to show these.
        """
        group = use.group
        if use.slots != group.slots:
            for out, weight in zip(outputs, group.weights(), strict=False):
                (local_tensor(out) if group.layout.wraps and isinstance(out, DTensor) else out).data = weight
            use.move(group.slots)
        entries = group.entries()
        if outputs and entries is not None:
            entries.show(outputs)
        elif entries is not None:
            self.show_leaves(group)
