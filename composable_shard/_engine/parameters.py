"""What the modules of a group find under the names of their parameters: sharded ones, or unsharded ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from .._group.group import ParamGroup
from .._torch.distributed import local_tensor
from .node import Entries, Outputs, Use

StrayHook = Callable[[torch.Tensor, ParamGroup, int], None]


class Shown:
    """The entries of all groups of one engine.

    Args:
        groups: with the entries of the modules that each belongs to.
        watch_leaf: called once with every leaf that users may find in a module outside of its forward.

    Attributes:
        late: by group, what its modules have in the place of the sharded parameters.
    """

    def __init__(self, groups: Sequence[tuple[ParamGroup, Entries]], watch_leaf: StrayHook) -> None:
        self._entries = {group: weakref.ref(entries) for group, entries in groups}
        self._watch_leaf = watch_leaf
        self.late: dict[ParamGroup, Sequence[torch.Tensor]] = {}

    def entries(self, group: ParamGroup) -> Entries | None:
        """Where the modules of a group look their parameters up; None if they are gone."""
        return self._entries[group]()

    def hide(self, group: ParamGroup) -> None:
        """Let the modules of a group have their sharded parameters, or what stands for late ones."""
        if (entries := self._entries[group]()) is not None:
            if self.late and group in self.late:
                entries.show(self.late[group])
            else:
                entries.hide()

    def hide_idle(self) -> None:
        """Let the modules of all groups have their sharded parameters, but for those whose forward runs."""
        for group in self._entries:
            if not group.running:
                self.hide(group)

    def show_pieces(self, group: ParamGroup) -> None:
        """Let the modules of a group have what a few ranks keep of the weights, but not in the place of late ones."""
        if (entries := self._entries[group]()) is not None and group not in self.late:
            entries.show(group.pieces())

    def show_leaves(self, group: ParamGroup) -> None:
        """Let the modules of a group have unsharded leaves, without history."""
        if (entries := self._entries[group]()) is None:
            return
        leaves = group.leaves()
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad and "_watched" not in leaf.__dict__:
                leaf.__dict__["_watched"] = True
                self._watch_leaf(leaf, group, index)
        entries.show(leaves)

    def show_again(self, use: Use, outputs: Outputs) -> None:
        """Let the modules of a group have what the forward of a use gave them, for a recomputation."""
        group = use.group
        if use.slots != group.slots:
            for out, weight in zip(outputs, group.weights(), strict=False):
                (local_tensor(out) if group.wraps and isinstance(out, DTensor) else out).data = weight
            use.slots = group.slots
        entries = use.entries()
        if outputs and entries is not None:
            entries.show(outputs)
        elif entries is not None:
            self.show_leaves(group)
