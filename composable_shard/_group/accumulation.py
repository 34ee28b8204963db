"""Accumulated gradients, which wait for a later backward to reduce them.

There are two kinds: unsharded gradients wait for a backward with gradient sync on, and reduced pieces wait for their
all-reduce over the replicas. `zero_grad` must clear both, whether it sets `.grad` to None or to zero. Nobody tells us
of it, so `ShardedParam.mark_accumulated` marks `.grad`, and a mark that is gone shows that `zero_grad` was called.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from .._torch.core import has_memory, is_of_cuda_graph
from .param import ShardedParam

# By index of the parameter: a reduced piece, and its reduced mark, which is not 0 if any rank had a gradient.
Partial = dict[int, tuple[torch.Tensor, torch.Tensor]]


class AccumulatedGradients:
    """The accumulated gradients of one group, by the index of the parameter.

    Attributes:
        whole: the unsharded gradients, also those that `zero_grad` has voided since. Other classes only read it.
        pieces: the reduced pieces that wait for an all-reduce over replicas; likewise.
        wanted: indices of the parameters that required gradients when some were accumulated, the same on all ranks.
            The next reduction includes these parameters even if they are frozen by then.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self.whole: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()  # of `whole`: sums made here, which nobody else holds
        self.pieces: Partial = {}
        self.wanted: set[int] = set()

    def tensors(self) -> list[torch.Tensor]:
        """The accumulated gradients and pieces, those that `zero_grad` has voided among them."""
        return [*self.whole.values(), *(piece for piece, _ in self.pieces.values())]

    def note_wanted(self) -> None:
        """Gradients are about to be accumulated: note which parameters require them."""
        self.wanted.update(index for index, param in enumerate(self._params) if param.sharded.requires_grad)

    def add(self, index: int, gradient: torch.Tensor, dtype: torch.dtype, lent: bool = False) -> None:
        """Add an unsharded gradient to the accumulated one of its parameter, in the dtype of reduction.

        Args:
            index: of the parameter.
            gradient: the gradient.
            dtype: of the reduction.
            lent: whether its memory may be written to after this call, as that of a graph's own tensors is.
        """
        kept = self._surviving(index)
        if kept is None:
            lent = lent or is_of_cuda_graph(gradient)
            self.whole[index] = gradient.to(dtype, copy=lent)
            (self._owned.add if lent else self._owned.discard)(index)
        elif index in self._owned:
            self.whole[index] = kept.add_(gradient)
        else:  # not in place: the first one is autograd's, and others may hold it
            self.whole[index] = _sum(kept, gradient)
            self._owned.add(index)
        self._params[index].mark_accumulated()

    def take(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The sums of these unsharded gradients and the accumulated ones, which are dropped here."""
        total = list(gradients)
        for index in list(self.whole):
            kept = self._surviving(index)
            new = total[index]
            if kept is not None:
                total[index] = kept if new is None else _sum(kept, new)
        self.whole.clear()
        self._owned.clear()
        return total

    def add_partial(self, index: int, piece: torch.Tensor, used: torch.Tensor) -> None:
        """Accumulate this rank's piece of a gradient that was reduced over the shard axis only.

        Args:
            index: of the parameter.
            piece: this rank's.
            used: its reduced mark: not 0 if any rank of the shard axis had a gradient.
        """
        self.wanted.add(index)
        before = self.pieces.get(index)
        self.pieces[index] = (piece, used) if before is None else (before[0] + piece, before[1] + used)
        self._params[index].mark_accumulated()

    def take_partial(self) -> Partial | None:
        """The accumulated pieces that `zero_grad` has not voided, which are dropped here; None if there are none.

        A reduction takes them as it begins. It has chosen its members by `wanted`, which is cleared here.
        """
        self.wanted.clear()
        if not self.pieces:
            return None
        taken = {i: (self._unless_voided(i, piece), used) for i, (piece, used) in self.pieces.items()}
        self.pieces = {}
        return {i: (piece, used) for i, (piece, used) in taken.items() if piece is not None}

    def held(self, stepped: Container[int]) -> list[str]:
        """Names of the parameters among these, by id, with accumulated gradients that `zero_grad` has not voided."""
        names = []
        for index in dict.fromkeys((*self.whole, *self.pieces)):
            param = self._params[index]
            if id(param.sharded) in stepped and not param.accumulated_is_gone():
                survives = self._survives(index)
                if survives is not None and survives.item():  # where this rank cannot tell, other ranks raise the error
                    names.append(param.fqn)
        return names

    def forget(self) -> None:
        """Drop all accumulated gradients."""
        self.wanted.clear()
        self.whole.clear()
        self._owned.clear()
        self.pieces.clear()

    def _surviving(self, index: int) -> torch.Tensor | None:
        kept = self.whole.get(index)
        return None if kept is None else self._unless_voided(index, kept)

    def _unless_voided(self, index: int, kept: torch.Tensor) -> torch.Tensor | None:
        if self._params[index].accumulated_is_gone():
            return None
        survives = self._survives(index)
        if survives is None:
            return kept
        if survives.device.type == "cpu" and has_memory(survives):
            return kept if survives.item() else None
        return torch.where(survives.reshape(()), kept, torch.zeros_like(kept))  # without a host synchronisation

    def _survives(self, index: int) -> torch.Tensor | None:
        """Whether a gradient was not set to zero since it was accumulated; None if this rank cannot tell.

        Where this rank's piece is empty, so is its `.grad`, which shows nothing. Then the `.grad` of another parameter
        of the group tells, which `zero_grad` sets to zero along with it.
        """
        candidates = (index, *(i for i in (*self.whole, *self.pieces) if i != index))
        answers = (
            self._params[i].accumulated_survives() for i in candidates if not self._params[i].accumulated_is_gone()
        )
        return next((t for t in answers if t is not None), None)


def _sum(kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The sum in the dtype of `kept`; `new` is not converted before, so that the sum is rounded only once."""
    return kept + new if new.dtype == kept.dtype else kept.clone().add_(new)
