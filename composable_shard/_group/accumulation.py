"""Gradients that wait: unsharded ones for a backward with gradient sync, pieces for an all-reduce over the replicas.

Both must vanish with `zero_grad`, in all its forms: `ShardedParam.mark_kept` makes `.grad` tell.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from .._torch.core import has_memory
from .param import ShardedParam

Partial = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by index: a piece, and how many ranks had a gradient


class KeptGradients:
    """What one group keeps, by the index of the parameter.

    Attributes:
        whole, pieces: the unsharded ones, and the pieces; others only look whether there are any.
        wanted: parameters that wanted gradients when some were kept, on all ranks alike. The next reduction is for
            them, too, should they be frozen by then.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self.whole: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()  # those of `whole` that nobody else holds
        self.pieces: Partial = {}
        self.wanted: set[int] = set()

    def note_wanted(self) -> None:
        """Gradients are about to be kept."""
        self.wanted.update(index for index, param in enumerate(self._params) if param.sharded.requires_grad)

    def add(self, index: int, gradient: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep an unsharded gradient, in the dtype of reduction, on top of those of the same parameter."""
        kept = self._surviving(index)
        if kept is None:
            self.whole[index] = gradient.to(dtype)
            self._owned.discard(index)
        elif index in self._owned:
            self.whole[index] = kept.add_(gradient)
        else:  # the first one may be shared with others who hold it
            self.whole[index] = _sum(kept, gradient)
            self._owned.add(index)
        self._params[index].mark_kept()

    def take(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """These unsharded gradients plus those that were kept, which are kept no longer."""
        total = list(gradients)
        if not self.whole:
            return total
        for index in list(self.whole):
            kept = self._surviving(index)
            new = total[index]
            if kept is not None:
                total[index] = kept if new is None else _sum(kept, new)
        self.whole.clear()
        self._owned.clear()
        return total

    def add_partial(self, index: int, piece: torch.Tensor, used: torch.Tensor) -> None:
        """Keep a piece of a gradient that was reduced over the shard axis only."""
        self.wanted.add(index)
        before = self.pieces.get(index)
        self.pieces[index] = (piece, used) if before is None else (before[0] + piece, before[1] + used)
        self._params[index].mark_kept()

    def take_partial(self) -> Partial | None:
        """The pieces that `zero_grad` has not voided, which are kept no longer; None if there are none.

        A reduction begins whose members are known.
        """
        self.wanted.clear()
        if not self.pieces:
            return None
        taken = {i: (self._unless_voided(i, piece), used) for i, (piece, used) in self.pieces.items()}
        self.pieces = {}
        return {i: (piece, used) for i, (piece, used) in taken.items() if piece is not None}

    def held(self, theirs: Container[int]) -> list[str]:
        """Names of the parameters among these, by id, of which something is kept that `zero_grad` has not voided."""
        found = []
        for index in dict.fromkeys((*self.whole, *self.pieces)):
            param = self._params[index]
            if id(param.sharded) in theirs and not param.kept_is_gone():
                told = self._told(index)
                if told is not None and told.item():  # a rank that cannot tell leaves it to the others
                    found.append(param.fqn)
        return found

    def forget(self) -> None:
        """Keep nothing any more."""
        self.wanted.clear()
        self.whole.clear()
        self._owned.clear()
        self.pieces.clear()

    def _surviving(self, index: int) -> torch.Tensor | None:
        kept = self.whole.get(index)
        return None if kept is None else self._unless_voided(index, kept)

    def _unless_voided(self, index: int, kept: torch.Tensor) -> torch.Tensor | None:
        if self._params[index].kept_is_gone():
            return None
        survives = self._told(index)
        if survives is None:
            return kept
        if survives.device.type == "cpu" and has_memory(survives):
            return kept if survives.item() else None
        return torch.where(survives.reshape(()), kept, torch.zeros_like(kept))  # without a host synchronisation

    def _told(self, index: int) -> torch.Tensor | None:
        """Whether a gradient was not set to zero since it was kept; None if this rank cannot tell.

        A rank whose piece is empty cannot see its own `.grad` cleared; a sibling's was cleared with it.
        """
        candidates = (index, *(i for i in (*self.whole, *self.pieces) if i != index))
        told = (self._params[i].kept_survives() for i in candidates if not self._params[i].kept_is_gone())
        return next((t for t in told if t is not None), None)


def _sum(kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Both, in the dtype of the first, rounded once: the second one is added as it is."""
    return kept + new if new.dtype == kept.dtype else kept.clone().add_(new)
